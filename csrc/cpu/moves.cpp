// Moved codes on a CPU: requantize, encode_moves and apply_moves of megatron_zpp/zeropp/wire/moves.py, which says what
// the bytes are.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "../moves.h"

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define ZEROPP_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define ZEROPP_CLONES
#endif

namespace zeropp::cpu {
namespace {

constexpr int64_t kChunk = 16384, kHeaderBytes = 12;
constexpr float kKeptFrom = 0.6f;
constexpr double kFresh = 0.9;

// A run of codes in a wire buffer: those of a quantized segment, or unquantized values of 16 bits.
struct Run {
  int64_t first;     // index of its first code
  int64_t count;     // a multiple of 8 where bits < 16
  int64_t codes;     // where they begin, in bytes
  int64_t scales;    // where their scales begin
  int64_t block_size;
  int64_t block;     // index of its first block
};

float read_scale(const uint8_t* at, int scale_bytes) {
  uint32_t bits = 0;
  memcpy(reinterpret_cast<uint8_t*>(&bits) + 4 - scale_bytes, at, scale_bytes);
  return float_of(bits);
}

struct Layout {
  explicit Layout(const Format& format) : bits(format.bits), scale_bytes(format.scale_bytes) {
    for (int i = 0; i < format.num_segments; i++) {
      const Segment& s = format.segments[i];
      if (!s.block_size) continue;
      const int64_t blocks = (s.stop - s.start + s.block_size - 1) / s.block_size;
      runs.push_back({num_codes, blocks * s.block_size, s.codes, s.scales, s.block_size, num_blocks});
      num_codes += blocks * s.block_size;
      num_blocks += blocks;
    }
    num_quantized = runs.size();
    for (int i = 0; i < format.num_segments; i++) {
      const Segment& s = format.segments[i];
      if (s.block_size) continue;
      if (format.type == Type::kFloat) {
        raw.push_back({s.codes, 4 * (s.stop - s.start)});
      } else {
        runs.push_back({num_codes, s.stop - s.start, s.codes, 0, 0, 0});
        num_codes += s.stop - s.start;
      }
    }
  }

  int64_t num_chunks() const { return (num_codes + kChunk - 1) / kChunk; }

  float scale_at(const uint8_t* wire, const Run& run, int64_t block) const {
    return read_scale(wire + run.scales + block * scale_bytes, scale_bytes);
  }

  // Calls run_part(run, begin, end) for the codes [begin, end) of each run that are in a chunk.
  template <class RunPart>
  void each_run(int64_t chunk, RunPart run_part) const {
    const int64_t first = chunk * kChunk, last = std::min(num_codes, first + kChunk);
    for (const Run& run : runs) {
      const int64_t begin = std::max(first, run.first), end = std::min(last, run.first + run.count);
      if (begin < end) run_part(run, begin - run.first, end - run.first);
    }
  }

  int bits, scale_bytes;
  int64_t num_codes = 0, num_blocks = 0;
  size_t num_quantized = 0;
  std::vector<Run> runs;
  std::vector<std::pair<int64_t, int64_t>> raw;  // where unquantized values of 32 bits are, and their bytes
};

// Eight codes of `bits` bits each.
inline void read_codes(const uint8_t* at, int bits, int8_t* codes) {
  uint64_t stream = 0;
  memcpy(&stream, at, bits);
  switch (bits) {
    case 2: stream = unpack<2>(stream); break;
    case 3: stream = unpack<3>(stream); break;
    case 4: stream = unpack<4>(stream); break;
    case 6: stream = unpack<6>(stream); break;
    default: break;
  }
  memcpy(codes, &stream, 8);
}

inline void write_codes(uint8_t* at, int bits, const int8_t* codes) {
  uint64_t stream;
  memcpy(&stream, codes, 8);
  switch (bits) {
    case 2: stream = pack<2>(stream); break;
    case 3: stream = pack<3>(stream); break;
    case 4: stream = pack<4>(stream); break;
    case 6: stream = pack<6>(stream); break;
    default: break;
  }
  memcpy(at, &stream, bits);
}

// What a code of the scale `before` is predicted to be with the scale `after`.
inline int predicted(int code, float before, float after, int qmax) {
  if (before == after) return code;
  const float rounded = rintf(float(code) * (before / after));
  return is_finite(rounded) ? int(fminf(fmaxf(rounded, -float(qmax)), float(qmax))) : 0;
}

// The bits of a 16-bit number, in the order of the values.
inline int ordered(const uint8_t* at) {
  int16_t bits;
  memcpy(&bits, at, 2);
  return bits < 0 ? -1 - (bits & 0x7fff) : bits;
}

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

int rice_parameter(const std::vector<int32_t>& values) {
  int64_t sum = 0;
  for (int32_t value : values) sum += value;
  const int64_t count = values.size();
  const uint64_t middle = (2 * sum + count) * 77 / (160 * std::max<int64_t>(1, count));
  return std::max(0, int(std::bit_width(middle)) - 1);
}

void write_rice(std::vector<uint8_t>& out, const std::vector<int32_t>& values, int k) {
  BitWriter unary(out);
  for (int32_t value : values) unary.zeros_and_one(value >> k);
  unary.end();
  BitWriter low(out);
  for (int32_t value : values) low.put(value & ((1 << k) - 1), k);
  low.end();
}

// Fills `values`, whose size says how many there are; returns the byte after them.
const uint8_t* read_rice(const uint8_t* at, const uint8_t* end, int k, std::vector<int32_t>& values) {
  BitReader unary(at, end);
  for (int32_t& value : values) value = int32_t(unary.zeros_before_one()) << k;
  BitReader low(unary.end(), end);
  for (int32_t& value : values) value |= low.take(k);
  return low.end();
}

// ---- One chunk

void find_moves(const Layout& layout, const uint8_t* old, const uint8_t* now, int64_t chunk,
                std::vector<int32_t>& positions, std::vector<int32_t>& moves) {
  const int bits = layout.bits, qmax = qmax_of(bits ? bits : 8);
  int32_t base = 0;
  layout.each_run(chunk, [&](const Run& run, int64_t begin, int64_t end) {
    const uint8_t *before = old + run.codes, *after = now + run.codes;
    if (!run.block_size) {
      for (int64_t i = begin; i < end; i++) {
        const int moved = ordered(after + 2 * i) - ordered(before + 2 * i);
        if (moved) positions.push_back(base + int32_t(i - begin)), moves.push_back(moved);
      }
    } else {
      float scale = 0, new_scale = 0;
      int64_t block = -1;
      for (int64_t i = begin; i < end; i += 8) {
        if (i / run.block_size != block) {
          block = i / run.block_size;
          scale = layout.scale_at(old, run, block), new_scale = layout.scale_at(now, run, block);
        }
        uint64_t first = 0, second = 0;
        memcpy(&first, before + i / 8 * bits, bits);
        memcpy(&second, after + i / 8 * bits, bits);
        if (first == second && scale == new_scale) continue;
        int8_t from[8], to[8];
        read_codes(before + i / 8 * bits, bits, from);
        read_codes(after + i / 8 * bits, bits, to);
        for (int j = 0; j < 8; j++) {
          const int before_move = scale == new_scale ? from[j] : predicted(from[j], scale, new_scale, qmax);
          const int moved = to[j] - before_move;
          if (moved) positions.push_back(base + int32_t(i - begin) + j), moves.push_back(moved);
        }
      }
    }
    base += int32_t(end - begin);
  });
}

struct Chunk {
  uint8_t header[kHeaderBytes];
  std::vector<uint8_t> body;
};

Chunk encode_chunk(const Layout& layout, const uint8_t* old, const uint8_t* now, int64_t index) {
  std::vector<int32_t> positions, moves, gaps, further_gaps, more;
  for (auto* list : {&positions, &moves, &gaps}) list->reserve(kChunk);
  find_moves(layout, old, now, index, positions, moves);
  int32_t last = -1, last_further = -1;
  for (int32_t i = 0; i < int32_t(positions.size()); i++) {
    gaps.push_back(positions[i] - last - 1);
    last = positions[i];
    if (const int32_t size = std::abs(moves[i]); size > 1) {
      further_gaps.push_back(i - last_further - 1);
      more.push_back(size - 2);
      last_further = i;
    }
  }
  Chunk chunk;
  const int k[] = {rice_parameter(gaps), rice_parameter(further_gaps), rice_parameter(more)};
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
void move_chunk(const Layout& layout, uint8_t* wire, int64_t index, const uint8_t* header, const uint8_t* at,
                const uint8_t* end) {
  uint16_t counts[2];
  memcpy(counts, header, 4);
  const int64_t length = std::min(kChunk, layout.num_codes - index * kChunk);
  std::vector<int32_t> gaps(counts[0]), moves(counts[0], 1), further_gaps(counts[1]), more(counts[1]);
  at = read_rice(at, end, header[4] & 31, gaps);
  BitReader signs(at, end);
  std::vector<uint8_t> is_negative(counts[0]);
  for (uint8_t& negative : is_negative) negative = signs.take(1);
  at = read_rice(signs.end(), end, header[5] & 31, further_gaps);
  read_rice(at, end, header[6] & 31, more);
  int64_t further = -1;
  for (size_t i = 0; i < more.size(); i++) {
    further += further_gaps[i] + 1;
    if (further < int64_t(moves.size())) moves[further] = more[i] + 2;
  }
  int64_t base = 0, position = -1;
  size_t next = 0;
  if (next < gaps.size()) position = gaps[next];
  layout.each_run(index, [&](const Run& run, int64_t begin, int64_t end_of_run) {
    const int64_t stop = base + end_of_run - begin;
    while (next < gaps.size() && position < std::min(stop, length)) {
      const int move = is_negative[next] ? -moves[next] : moves[next];
      const int64_t i = begin + position - base;
      if (!run.block_size) {
        const int value = ordered(wire + run.codes + 2 * i) + move;
        const int16_t bits = int16_t(value < 0 ? -1 - value - 0x8000 : value);
        memcpy(wire + run.codes + 2 * i, &bits, 2);
      } else {
        uint8_t* group = wire + run.codes + i / 8 * layout.bits;
        int8_t codes[8];
        read_codes(group, layout.bits, codes);
        codes[i % 8] = int8_t(codes[i % 8] + move);
        write_codes(group, layout.bits, codes);
      }
      if (++next < gaps.size()) position += gaps[next] + 1;
    }
    base = stop;
  });
}

// The scale is above 0. Written so that compilers make vectors of it.
ZEROPP_CLONES void quantize_block(const float* values, int64_t count, float scale, float qmax, int8_t* codes) {
  for (int64_t i = 0; i < count; i++) {
    float quotient = values[i] / scale;
    quotient = quotient > qmax ? qmax : quotient;
    quotient = quotient < -qmax ? -qmax : quotient;
    codes[i] = int8_t(bits_of(quotient + kIntegers));
  }
}

ZEROPP_CLONES uint32_t largest_of(const float* values, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; i++) largest = std::max(largest, magnitude_of(values[i]));
  return largest;
}

template <class Value>
ZEROPP_INLINE void read_values(const Value* values, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i++) out[i] = to_float(values[i]);
}

void read_values(const void* row, Type type, int64_t at, int64_t count, float* out) {
  switch (type) {
    case Type::kFloat: return read_values(static_cast<const float*>(row) + at, count, out);
    case Type::kBFloat16: return read_values(static_cast<const BFloat16*>(row) + at, count, out);
    case Type::kHalf: return read_values(static_cast<const Half*>(row) + at, count, out);
  }
}

void requantize_segment(const Format& format, const Segment& s, const void* values, Type type, const uint8_t* old,
                        uint8_t* wire) {
  const int64_t size = s.block_size, blocks = (s.stop - s.start + size - 1) / size;
  const int qmax = qmax_of(format.bits);
  const float per_largest = float(kFresh * qmax);
  at::parallel_for(0, blocks, 64, [&](int64_t begin, int64_t end) {
    std::vector<float> block(size);
    std::vector<int8_t> codes(size);
    for (int64_t b = begin; b < end; b++) {
      const int64_t first = s.start + b * size, count = std::min(size, s.stop - first);
      read_values(values, type, first, count, block.data());
      std::fill(block.begin() + count, block.end(), 0.f);
      const uint32_t largest = largest_of(block.data(), size);
      float scale = scale_of(largest, per_largest, format.scale_bytes == 2);
      if (old != nullptr) {
        const float kept = read_scale(old + s.scales + b * format.scale_bytes, format.scale_bytes), reach = kept * float(qmax), magnitude = float_of(largest);
        if (magnitude <= reach && magnitude >= kKeptFrom * reach) scale = kept;
      }
      if (scale > 0) quantize_block(block.data(), size, scale, float(qmax), codes.data());
      else std::fill(codes.begin(), codes.end(), 0);  // zeros, or NaN
      for (int64_t i = 0; i < size; i += 8) {
        write_codes(wire + s.codes + (b * size + i) / 8 * format.bits, format.bits, codes.data() + i);
      }
      memcpy(wire + s.scales + b * format.scale_bytes, reinterpret_cast<const uint8_t*>(&scale) + 4 - format.scale_bytes,
             format.scale_bytes);
    }
  });
}

}  // namespace

void requantize(const Format& format, const void* values, Type type, const uint8_t* old, uint8_t* wire) {
  for (int i = 0; i < format.num_segments; i++) {
    const Segment& s = format.segments[i];
    if (s.block_size) {
      requantize_segment(format, s, values, type, old, wire);
    } else if (type == format.type) {
      const int64_t bytes = size_of(type);
      memcpy(wire + s.codes, static_cast<const uint8_t*>(values) + s.start * bytes, (s.stop - s.start) * bytes);
    } else {
      for (int64_t at = s.start; at < s.stop; at++) {
        float value;
        read_values(values, type, at, 1, &value);
        uint8_t* to = wire + s.codes + (at - s.start) * size_of(format.type);
        BFloat16 as_bf16;
        Half as_half;
        from_float(value, as_bf16), from_float(value, as_half);
        if (format.type == Type::kFloat) memcpy(to, &value, 4);
        if (format.type == Type::kBFloat16) memcpy(to, &as_bf16, 2);
        if (format.type == Type::kHalf) memcpy(to, &as_half, 2);
      }
    }
  }
}

at::Tensor encode_moves(const Format& format, const at::Tensor& old, const at::Tensor& now) {
  const Layout layout(format);
  const uint8_t *before = old.const_data_ptr<uint8_t>(), *after = now.const_data_ptr<uint8_t>();
  std::vector<uint8_t> head((layout.num_blocks + 7) / 8);
  for (size_t i = 0; i < layout.num_quantized; i++) {
    const Run& run = layout.runs[i];
    for (int64_t b = 0; b < run.count / run.block_size; b++) {
      const int64_t at = run.scales + b * layout.scale_bytes;
      if (memcmp(before + at, after + at, layout.scale_bytes) == 0) continue;
      head[(run.block + b) / 8] |= uint8_t(1 << (run.block + b) % 8);
      head.insert(head.end(), after + at, after + at + layout.scale_bytes);
    }
  }
  for (const auto& [at, nbytes] : layout.raw) head.insert(head.end(), after + at, after + at + nbytes);

  std::vector<Chunk> chunks(layout.num_chunks());
  at::parallel_for(0, chunks.size(), 4, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c++) chunks[c] = encode_chunk(layout, before, after, c);
  });
  int64_t total = head.size() + kHeaderBytes * chunks.size();
  for (const Chunk& chunk : chunks) total += chunk.body.size();
  at::Tensor moves = at::empty({total}, old.options());
  uint8_t* out = moves.data_ptr<uint8_t>();
  out = std::copy(head.begin(), head.end(), out);
  for (const Chunk& chunk : chunks) out = std::copy(chunk.header, chunk.header + kHeaderBytes, out);
  for (const Chunk& chunk : chunks) out = std::copy(chunk.body.begin(), chunk.body.end(), out);
  return moves;
}

void apply_moves(const Format& format, const uint8_t* moves, int64_t num_bytes, uint8_t* wire) {
  const Layout layout(format);
  const uint8_t *at = moves, *end = moves + num_bytes;
  const auto take = [&](int64_t nbytes) {
    TORCH_CHECK_VALUE(end - at >= nbytes, "a buffer of moves ends too early");
    return std::exchange(at, at + nbytes);
  };
  const uint8_t* has_new_scale = take((layout.num_blocks + 7) / 8);
  const int qmax = qmax_of(layout.bits ? layout.bits : 8);
  for (size_t i = 0; i < layout.num_quantized; i++) {
    const Run& run = layout.runs[i];
    for (int64_t b = 0; b < run.count / run.block_size; b++) {
      if (!(has_new_scale[(run.block + b) / 8] >> (run.block + b) % 8 & 1)) continue;
      const float before = layout.scale_at(wire, run, b);
      memcpy(wire + run.scales + b * layout.scale_bytes, take(layout.scale_bytes), layout.scale_bytes);
      const float after = layout.scale_at(wire, run, b);
      for (int64_t group = b * run.block_size; group < (b + 1) * run.block_size; group += 8) {
        int8_t codes[8];
        read_codes(wire + run.codes + group / 8 * layout.bits, layout.bits, codes);
        for (int8_t& code : codes) code = int8_t(predicted(code, before, after, qmax));
        write_codes(wire + run.codes + group / 8 * layout.bits, layout.bits, codes);
      }
    }
  }
  for (const auto& [to, nbytes] : layout.raw) memcpy(wire + to, take(nbytes), nbytes);
  const int64_t num_chunks = layout.num_chunks();
  const uint8_t* headers = take(kHeaderBytes * num_chunks);
  std::vector<const uint8_t*> bodies(num_chunks + 1);
  for (int64_t c = 0; c < num_chunks; c++) {
    uint32_t nbytes;
    memcpy(&nbytes, headers + c * kHeaderBytes + 8, 4);
    bodies[c] = take(nbytes);
  }
  bodies[num_chunks] = at;
  at::parallel_for(0, num_chunks, 4, [&](int64_t begin, int64_t last) {
    for (int64_t c = begin; c < last; c++) {
      move_chunk(layout, wire, c, headers + c * kHeaderBytes, bodies[c], bodies[c + 1]);
    }
  });
}

}  // namespace zeropp::cpu
