// Moved codes on a CPU: encode_moves and apply_moves of megatron_zpp/zeropp/wire/moves.py, which says what the bytes are.

#include "../moves.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <bit>
#include <cstdlib>

namespace zeropp::cpu {
namespace {

// ---- Lists of Rice codes

class BitWriter {
 public:
  explicit BitWriter(std::vector<uint8_t>& out) : out_(out) {}
  void put(uint64_t value, int width) {  // width <= 32
    pending_ |= value << filled_;
    filled_ += width;
    if (filled_ >= 32) {
      const uint32_t word = uint32_t(pending_);
      out_.insert(out_.end(), reinterpret_cast<const uint8_t*>(&word), reinterpret_cast<const uint8_t*>(&word + 1));
      pending_ >>= 32;
      filled_ -= 32;
    }
  }
  void zeros_and_one(int64_t zeros) {
    for (; zeros >= 31; zeros -= 31) put(0, 31);
    put(uint64_t(1) << zeros, int(zeros) + 1);
  }
  void end() {
    for (; filled_ > 0; filled_ -= 8, pending_ >>= 8) out_.push_back(uint8_t(pending_));
    pending_ = filled_ = 0;
  }

 private:
  std::vector<uint8_t>& out_;
  uint64_t pending_ = 0;
  int filled_ = 0;
};

// Reads no byte from `end` on: what is damaged gives wrong numbers, not a crash.
class BitReader {
 public:
  BitReader(const uint8_t* at, const uint8_t* end) : at_(at), end_(end) {}
  uint32_t take(int width) {
    fill();
    const uint32_t value = uint32_t(pending_ & ((uint64_t(1) << width) - 1));
    pending_ >>= width;
    filled_ -= width;
    return value;
  }
  int64_t zeros_before_one() {
    int64_t zeros = 0;
    for (fill(); pending_ == 0 && at_ < end_; fill()) {
      zeros += filled_;
      filled_ = 0;
    }
    if (pending_ == 0) return zeros;
    const int more = std::countr_zero(pending_);
    pending_ = more == 63 ? 0 : pending_ >> (more + 1);
    filled_ -= more + 1;
    return zeros + more;
  }
  const uint8_t* end() const { return at_ - filled_ / 8; }  // the next byte that no bit was taken of

 private:
  void fill() {
    while (filled_ <= 56 && at_ < end_) {
      pending_ |= uint64_t(*at_++) << filled_;
      filled_ += 8;
    }
    if (filled_ < 0) filled_ = 0;
  }
  const uint8_t *at_, *end_;
  uint64_t pending_ = 0;
  int filled_ = 0;
};

int rice_parameter_of(const std::vector<int32_t>& values) {
  int64_t sum = 0;
  for (int32_t value : values) sum += value;
  return rice_parameter(sum, int64_t(values.size()));
}

void write_rice(std::vector<uint8_t>& out, const std::vector<int32_t>& values, int k) {
  BitWriter unary(out);
  for (int32_t value : values) unary.zeros_and_one(value >> k);
  unary.end();
  BitWriter low(out);
  for (int32_t value : values) low.put(value & ((1 << k) - 1), k);
  low.end();
}

// Fills `values`, whose size says how many there are; returns the byte after them. No value is negative, whatever the
// bytes are: positions made of them would lie before the buffer.
const uint8_t* read_rice(const uint8_t* at, const uint8_t* end, int k, std::vector<int32_t>& values) {
  constexpr int64_t kLargest = int64_t(1) << 30;
  BitReader unary(at, end);
  for (int32_t& value : values) value = int32_t(std::min(unary.zeros_before_one(), kLargest >> k) << k);
  BitReader low(unary.end(), end);
  for (int32_t& value : values) value |= low.take(k);
  return low.end();
}

// ---- One chunk

struct Chunk {
  uint8_t header[kHeaderBytes];
  std::vector<uint8_t> body;
};

Chunk encode_chunk(const CodeTable& table, const uint8_t* old, const uint8_t* now, int64_t index) {
  std::vector<int32_t> moves, gaps, further_gaps, more;
  moves.reserve(kChunk), gaps.reserve(kChunk);
  int32_t last = -1, last_further = -1;
  each_move(table, old, now, index * kChunk, (index + 1) * kChunk, [&](int position, int move) {
    gaps.push_back(position - last - 1);
    last = position;
    if (const int32_t size = std::abs(move); size > 1) {
      further_gaps.push_back(int32_t(moves.size()) - last_further - 1);
      more.push_back(size - 2);
      last_further = int32_t(moves.size());
    }
    moves.push_back(move);
  });
  Chunk chunk;
  const int k[] = {rice_parameter_of(gaps), rice_parameter_of(further_gaps), rice_parameter_of(more)};
  write_rice(chunk.body, gaps, k[0]);
  BitWriter signs(chunk.body);
  for (int32_t move : moves) signs.put(move < 0, 1);
  signs.end();
  write_rice(chunk.body, further_gaps, k[1]);
  write_rice(chunk.body, more, k[2]);
  const uint16_t counts[] = {uint16_t(gaps.size()), uint16_t(more.size())};
  const uint8_t parameters[] = {uint8_t(k[0]), uint8_t(k[1]), uint8_t(k[2]), 0};
  const uint32_t nbytes = uint32_t(chunk.body.size());
  memcpy(chunk.header, counts, 4);
  memcpy(chunk.header + 4, parameters, 4);
  memcpy(chunk.header + 8, &nbytes, 4);
  return chunk;
}

// Add a chunk's moves to the codes in a wire buffer.
void move_chunk(const CodeTable& table, uint8_t* wire, int64_t index, const uint8_t* header, const uint8_t* at,
                const uint8_t* end) {
  uint16_t counts[2];
  memcpy(counts, header, 4);
  std::vector<int32_t> gaps(counts[0]), moves(counts[0], 1), further_gaps(counts[1]), more(counts[1]);
  at = read_rice(at, end, header[4] & 15, gaps);
  BitReader signs(at, end);
  std::vector<uint8_t> is_negative(counts[0]);
  for (uint8_t& negative : is_negative) negative = signs.take(1);
  at = read_rice(signs.end(), end, header[5] & 15, further_gaps);
  read_rice(at, end, header[6] & 15, more);
  int64_t further = -1;
  for (size_t i = 0; i < more.size(); i++) {
    further += further_gaps[i] + 1;
    if (further < int64_t(moves.size())) moves[further] = more[i] + 2;
  }
  size_t next = 0;
  int64_t code = index * kChunk + (gaps.empty() ? 0 : gaps[0]);
  table.each_run(index * kChunk, (index + 1) * kChunk, [&](const Run& run, int64_t, int64_t end_of_run) {
    for (; next < gaps.size() && code - run.first < end_of_run; code += ++next < gaps.size() ? gaps[next] + 1 : 0) {
      const int move = is_negative[next] ? -moves[next] : moves[next];
      const int64_t i = code - run.first;
      if (run.block_size == 0) {
        uint8_t* value = wire + run.codes + 2 * i;
        store_ordered(ordered(value) + move, value);
      } else {
        uint8_t* group = wire + run.codes + i / 8 * table.bits;
        const uint64_t codes = load_codes(group, table.bits);
        const int shift = int(8 * (i % 8));
        const uint64_t moved = uint64_t(uint8_t(code_in(codes, int(i % 8)) + move)) << shift;
        store_codes((codes & ~(uint64_t(0xff) << shift)) | moved, table.bits, group);
      }
    }
  });
}

}  // namespace

void encode_moves(const CodeTable& table, const uint8_t* old, const uint8_t* now, std::vector<uint8_t>& moves) {
  moves.assign(table.flag_bytes(), 0);
  for (int r = 0; r < table.num_quantized; r++) {
    const Run& run = table.runs[r];
    for (int64_t b = 0; b < run.count / run.block_size; b++) {
      const int64_t at = run.scales + b * table.scale_bytes;
      if (memcmp(old + at, now + at, table.scale_bytes) == 0) continue;
      moves[(run.block + b) / 8] |= uint8_t(1 << (run.block + b) % 8);
      moves.insert(moves.end(), now + at, now + at + table.scale_bytes);
    }
  }
  for (int r = 0; r < table.num_raw; r++) {
    moves.insert(moves.end(), now + table.raw[r].wire, now + table.raw[r].wire + table.raw[r].nbytes);
  }
  std::vector<Chunk> chunks(table.num_chunks());
  at::parallel_for(0, chunks.size(), 4, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c++) chunks[c] = encode_chunk(table, old, now, c);
  });
  for (const Chunk& chunk : chunks) moves.insert(moves.end(), chunk.header, chunk.header + kHeaderBytes);
  for (const Chunk& chunk : chunks) moves.insert(moves.end(), chunk.body.begin(), chunk.body.end());
}

bool apply_moves(const CodeTable& table, const uint8_t* moves, int64_t num_bytes, uint8_t* wire) {
  const uint8_t *at = moves, *end = moves + num_bytes;
  const auto has = [&](int64_t nbytes) { return end - at >= nbytes; };
  const uint8_t* flags = at;
  if (!has(table.flag_bytes())) return false;
  at += table.flag_bytes();
  for (int r = 0; r < table.num_quantized; r++) {
    const Run& run = table.runs[r];
    for (int64_t b = 0; b < run.count / run.block_size; b++) {
      if (!(flags[(run.block + b) / 8] >> (run.block + b) % 8 & 1)) continue;
      if (!has(table.scale_bytes)) return false;
      const float before = table.scale_at(wire, run, b);
      memcpy(wire + run.scales + b * table.scale_bytes, at, table.scale_bytes);
      at += table.scale_bytes;
      const float after = table.scale_at(wire, run, b);
      uint8_t* codes = wire + run.codes + b * run.block_size / 8 * table.bits;
      for (uint8_t* group = codes; group < codes + run.block_size / 8 * table.bits; group += table.bits) {
        store_codes(predicted_codes(load_codes(group, table.bits), before, after, table.qmax()), table.bits, group);
      }
    }
  }
  if (!has(table.raw_bytes + kHeaderBytes * table.num_chunks())) return false;
  for (int r = 0; r < table.num_raw; r++) memcpy(wire + table.raw[r].wire, at + table.raw[r].moves, table.raw[r].nbytes);
  const int64_t num_chunks = table.num_chunks();
  const uint8_t* headers = at + table.raw_bytes;
  at = headers + kHeaderBytes * num_chunks;
  std::vector<const uint8_t*> bodies(num_chunks + 1);
  for (int64_t c = 0; c < num_chunks; c++) {
    uint32_t nbytes;
    memcpy(&nbytes, headers + c * kHeaderBytes + 8, 4);
    if (!has(nbytes)) return false;
    bodies[c] = at;
    at += nbytes;
  }
  bodies[num_chunks] = at;
  at::parallel_for(0, num_chunks, 4, [&](int64_t begin, int64_t last) {
    for (int64_t c = begin; c < last; c++) {
      move_chunk(table, wire, c, headers + c * kHeaderBytes, bodies[c], bodies[c + 1]);
    }
  });
  return true;
}

}  // namespace zeropp::cpu
