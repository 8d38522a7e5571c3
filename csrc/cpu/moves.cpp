// Moved codes on a CPU: encode_moves and apply_moves of megatron_zpp/zeropp/wire/moves.py, which says what the bytes are.

#include "../moves.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <span>
#include <type_traits>

namespace zeropp::cpu {
namespace {

// ---- Lists of Rice codes

// Writes whole words, so 8 bytes more than it is asked for.
class BitWriter {
 public:
  explicit BitWriter(uint8_t* to) : to_(to) {}
  void put(uint64_t value, int width) {  // width <= 32
    pending_ |= value << filled_;
    filled_ += width;
    memcpy(to_, &pending_, 8);
    to_ += filled_ >> 3;
    pending_ >>= filled_ & 56;
    filled_ &= 7;
  }
  void zeros_and_one(int zeros) {
    for (; zeros >= 31; zeros -= 31) put(0, 31);
    put(uint64_t(1) << zeros, zeros + 1);
  }
  uint8_t* end() const { return to_ + (filled_ > 0); }  // the byte after the last bit's

 private:
  uint8_t* to_;
  uint64_t pending_ = 0;
  int filled_ = 0;
};

// Reads no byte from `end` on: what is damaged gives wrong numbers, not a crash.
class BitReader {
 public:
  BitReader(const uint8_t* at, const uint8_t* end) : at_(at), end_(end) {}
  uint32_t take(int width) {
    if (filled_ < width) fill();
    const uint32_t value = uint32_t(pending_ & ((uint64_t(1) << width) - 1));
    skip(width);
    return value;
  }
  int64_t zeros_before_one() {
    int64_t zeros = 0;
    for (;;) {
      const int more = std::countr_zero(pending_);
      if (more < filled_) {
        skip(more + 1);
        return zeros + more;
      }
      zeros += filled_;
      skip(filled_);
      if (at_ == end_) return zeros;
      fill();
    }
  }
  const uint8_t* end() const { return at_ - filled_ / 8; }  // the next byte that no bit was taken of

 private:
  // Bits from `filled_` on are of the byte at `at_`, or zeros.
  void fill() {
    if (end_ - at_ >= 8) {
      uint64_t word;
      memcpy(&word, at_, 8);
      pending_ |= word << filled_;
      at_ += (63 - filled_) >> 3;
      filled_ |= 56;
    } else {
      for (; filled_ < 56 && at_ < end_; filled_ += 8) pending_ |= uint64_t(*at_++) << filled_;
    }
  }
  void skip(int width) {  // < 64
    pending_ >>= width;
    filled_ = filled_ > width ? filled_ - width : 0;
  }
  const uint8_t *at_, *end_;
  uint64_t pending_ = 0;
  int filled_ = 0;
};

using List = std::span<int32_t>;

int64_t sum_of(List values) {
  int64_t sum = 0;
  for (int32_t value : values) sum += value;
  return sum;
}

// Returns the byte after them.
uint8_t* write_rice(uint8_t* to, List values, int k) {
  BitWriter unary(to);
  for (int32_t value : values) unary.zeros_and_one(value >> k);
  BitWriter low(unary.end());
  if (k > 0) for (int32_t value : values) low.put(value & ((1 << k) - 1), k);
  return low.end();
}

// Fills `values`, whose size says how many there are; returns the byte after them. No value is negative, whatever the
// bytes are: positions made of them would lie before the buffer.
const uint8_t* read_rice(const uint8_t* at, const uint8_t* end, int k, List values) {
  constexpr int64_t kLargest = int64_t(1) << 30;
  BitReader unary(at, end);
  for (int32_t& value : values) value = int32_t(std::min(unary.zeros_before_one(), kLargest >> k) << k);
  BitReader low(unary.end(), end);
  if (k > 0) for (int32_t& value : values) value |= low.take(k);
  return low.end();
}

// ---- One chunk

template <class Work>
void with_bits(int bits, const Work& work) {
  if (bits == 4) work(std::integral_constant<int, 4>());
  else if (bits == 6) work(std::integral_constant<int, 6>());
  else if (bits == 8) work(std::integral_constant<int, 8>());
  else work(std::integral_constant<int, 16>());
}

// Calls work(index of a code less `first`, by how much it moved) for the codes in [first, last) that moved. Masks have
// 64 codes, because the processor mispredicts where each ends.
template <class Work>
void each_move(const CodeTable& table, const uint8_t* old, const uint8_t* now, int64_t first, int64_t last,
               const Work& work) {
  table.each_run(first, last, [&](const Run& run, int64_t begin, int64_t end) {
    const uint8_t *before = old + run.codes, *after = now + run.codes;
    const int base = int(run.first - first);
    if (run.block_size == 0) {
      for (int64_t i = begin; i < end; i += 64) {
        uint64_t moved = 0;
        const uint8_t *x = before + 2 * i, *y = after + 2 * i;
        for (int j = 0; j < 64 && i + j < end; j++) moved |= uint64_t(memcmp(x + 2 * j, y + 2 * j, 2) != 0) << j;
        for (; moved != 0; moved &= moved - 1) {
          const int j = std::countr_zero(moved);
          work(base + int(i) + j, ordered(y + 2 * j) - ordered(x + 2 * j));
        }
      }
      return;
    }
    with_bits(table.bits, [&](auto bits) {
      int64_t block = begin / run.block_size, end_of_block = begin;
      float scale = 0, new_scale = 0;
      for (int64_t i = begin; i < end; i += 64) {
        uint64_t from[8], to[8], moved = 0;  // codes, a byte each; a bit for each code that moved
        for (int g = 0; g < 8 && i + 8 * g < end; g++) {
          if (i + 8 * g >= end_of_block) {
            scale = table.scale_at(old, run, block), new_scale = table.scale_at(now, run, block);
            end_of_block = ++block * run.block_size;
          }
          const uint8_t *x = before + (i / 8 + g) * bits, *y = after + (i / 8 + g) * bits;
          if (bits < 8 && scale == new_scale && memcmp(x, y, bits) == 0) continue;  // unpacking takes longer
          from[g] = load_codes(x, bits), to[g] = load_codes(y, bits);
          if (scale != new_scale) from[g] = predicted_codes(from[g], scale, new_scale, table.qmax());
          constexpr uint64_t kHigh = 0x8080808080808080;  // the high bit of each byte
          const uint64_t different = from[g] ^ to[g];
          const uint64_t highs = (((different & ~kHigh) + ~kHigh) | different) & kHigh;
          moved |= ((highs >> 7) * 0x0102040810204080 >> 56) << 8 * g;
        }
        for (; moved != 0; moved &= moved - 1) {
          const int j = std::countr_zero(moved);
          work(base + int(i) + j, code_in(to[j / 8], j % 8) - code_in(from[j / 8], j % 8));
        }
      }
    });
  });
}

struct Chunk {
  uint8_t header[kHeaderBytes];
  std::vector<uint8_t> body;
};

// Memory for the lists of one chunk after the other; damaged headers ask for 65,535 numbers at most.
struct Lists {
  std::vector<int32_t> memory = std::vector<int32_t>(4 << 16);
  List list(int which, int64_t size) { return {memory.data() + (which << 16), size_t(size)}; }
};

Chunk encode_chunk(const CodeTable& table, const uint8_t* old, const uint8_t* now, int64_t index, Lists& lists) {
  List gaps = lists.list(0, kChunk), moves = lists.list(1, kChunk);
  List further_gaps = lists.list(2, kChunk), more = lists.list(3, kChunk);
  int32_t count = 0, last = -1, num_further = 0, last_further = -1;
  each_move(table, old, now, index * kChunk, (index + 1) * kChunk, [&](int position, int move) {
    gaps[count] = position - last - 1;
    moves[count] = move;
    // Written in any case, because a branch would often be mispredicted.
    further_gaps[num_further] = count - last_further - 1;
    more[num_further] = std::abs(move) - 2;
    const bool is_further = std::abs(move) > 1;
    last_further = is_further ? count : last_further;
    num_further += is_further;
    last = position;
    count++;
  });
  gaps = gaps.first(count), moves = moves.first(count);
  further_gaps = further_gaps.first(num_further), more = more.first(num_further);
  Chunk chunk;
  int k[3];
  int64_t bits = count;
  for (int i = 0; i < 3; i++) {
    const List list = i == 0 ? gaps : i == 1 ? further_gaps : more;
    const int64_t sum = sum_of(list), size = int64_t(list.size());
    k[i] = rice_parameter(sum, size);
    bits += (sum >> k[i]) + size * (1 + k[i]);
  }
  chunk.body.resize(bits / 8 + 7 + 8);  // each of the sections begins at a byte
  uint8_t* to = write_rice(chunk.body.data(), gaps, k[0]);
  BitWriter signs(to);
  for (int32_t move : moves) signs.put(move < 0, 1);
  to = write_rice(signs.end(), further_gaps, k[1]);
  to = write_rice(to, more, k[2]);
  chunk.body.resize(to - chunk.body.data());
  const uint16_t counts[] = {uint16_t(gaps.size()), uint16_t(more.size())};
  const uint8_t parameters[] = {uint8_t(k[0]), uint8_t(k[1]), uint8_t(k[2]), 0};
  const uint32_t nbytes = uint32_t(chunk.body.size());
  memcpy(chunk.header, counts, 4);
  memcpy(chunk.header + 4, parameters, 4);
  memcpy(chunk.header + 8, &nbytes, 4);
  return chunk;
}

// Add a move to code i of `bits` bits in a stream of them, or to value i of 16 bits.
template <int bits>
void add_move(uint8_t* codes, int64_t i, int move) {
  if constexpr (bits == 16) {
    store_ordered(ordered(codes + 2 * i) + move, codes + 2 * i);
  } else {
    uint8_t* at = codes + i * bits / 8;
    const int shift = int(i * bits % 8);
    const bool has_second = shift + bits > 8;
    constexpr uint32_t kMask = (1u << bits) - 1;
    const uint32_t stream = at[0] | (has_second ? at[1] << 8 : 0);
    const uint32_t moved = ((stream >> shift) + uint32_t(move)) & kMask;
    const uint32_t result = (stream & ~(kMask << shift)) | moved << shift;
    at[0] = uint8_t(result);
    if (has_second) at[1] = uint8_t(result >> 8);
  }
}

// Add a chunk's moves to the codes in a wire buffer.
void move_chunk(const CodeTable& table, uint8_t* wire, int64_t index, const uint8_t* header, const uint8_t* at,
                const uint8_t* end, Lists& lists) {
  uint16_t counts[2];
  memcpy(counts, header, 4);
  const List gaps = lists.list(0, counts[0]), moves = lists.list(1, counts[0]);
  const List further_gaps = lists.list(2, counts[1]), more = lists.list(3, counts[1]);
  at = read_rice(at, end, header[4] & 15, gaps);
  BitReader signs(at, end);
  for (int32_t& move : moves) move = 1 - 2 * int(signs.take(1));
  at = read_rice(signs.end(), end, header[5] & 15, further_gaps);
  read_rice(at, end, header[6] & 15, more);
  int64_t further = -1;
  for (size_t i = 0; i < more.size(); i++) {
    further += further_gaps[i] + 1;
    if (further < int64_t(moves.size())) moves[further] *= more[i] + 2;
  }
  size_t next = 0;
  int64_t code = index * kChunk + (gaps.empty() ? 0 : gaps[0]);
  table.each_run(index * kChunk, (index + 1) * kChunk, [&](const Run& run, int64_t, int64_t end_of_run) {
    with_bits(run.block_size == 0 ? 16 : table.bits, [&](auto bits) {
      for (; next < gaps.size() && code - run.first < end_of_run; code += ++next < gaps.size() ? gaps[next] + 1 : 0) {
        add_move<bits()>(wire + run.codes, code - run.first, moves[next]);
      }
    });
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
    Lists lists;
    for (int64_t c = begin; c < end; c++) chunks[c] = encode_chunk(table, old, now, c, lists);
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
    Lists lists;
    for (int64_t c = begin; c < last; c++) {
      move_chunk(table, wire, c, headers + c * kHeaderBytes, bodies[c], bodies[c + 1], lists);
    }
  });
  return true;
}

}  // namespace zeropp::cpu
