// The kernels on a CPU: plain loops over tiles that stay in the L1 cache, which the compiler turns into vector code.
// GCC makes three versions of them (AVX-512, AVX2, baseline), of which the best that the processor has is taken.

#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "../kernel_arguments.h"

namespace zeropp::cpu {
namespace {

constexpr int64_t kTile = 1024;          // elements, unless one block is more
constexpr int64_t kTilesPerThread = 32;  // at least: less work is not worth a thread

// Some whole blocks of a segment, or some values that travel as they are, of one row.
struct Tile {
  int64_t row0, row1;
  int64_t first;   // element of the segment
  int64_t count;   // elements
  int64_t padded;  // elements with the padding of the last block
};

int64_t tile_size(const Segment& segment) {
  return segment.block_size ? std::max<int64_t>(kTile / segment.block_size, 1) * segment.block_size : kTile;
}

int64_t num_tiles(const Segment& segment) {
  return (segment.stop - segment.start + tile_size(segment) - 1) / tile_size(segment);
}

int64_t tiles_per_row(const Format& format) {
  int64_t tiles = 0;
  for (int s = 0; s < format.num_segments; s++) tiles += num_tiles(format.segments[s]);
  return tiles;
}

struct Scratch {
  explicit Scratch(const Format& format) {
    int64_t size = kTile;
    for (int s = 0; s < format.num_segments; s++) size = std::max(size, tile_size(format.segments[s]));
    values.resize(size), sent.resize(size), error.resize(size), codes.resize(size);
    scales.resize(kTile / 8);  // of the smallest blocks
  }
  std::vector<float> values, sent, error, scales;
  std::vector<uint8_t> codes;
};

// Calls work(segment, tile) for the tiles [begin, end) of all rows.
template <class Work>
ZEROPP_INLINE void for_each_tile(const Format& format, int64_t rows1, int64_t begin, int64_t end, const Work& work) {
  const int64_t per_row = tiles_per_row(format);
  for (int64_t row = begin / per_row; row * per_row < end; row++) {
    int64_t index = row * per_row;  // of the segment's first tile
    for (int s = 0; s < format.num_segments; s++) {
      const Segment& segment = format.segments[s];
      const int64_t size = tile_size(segment), numel = segment.stop - segment.start, tiles = num_tiles(segment);
      for (int64_t t = std::max<int64_t>(begin - index, 0); t < std::min(end - index, tiles); t++) {
        const int64_t count = std::min(size, numel - t * size);
        const int64_t padded = segment.block_size ? round_up(count, segment.block_size) : count;
        work(segment, Tile{row / rows1, row % rows1, t * size, count, padded});
      }
      index += tiles;
    }
  }
}

// ---- Dense tensors.

// Fetches what the next tile will read, too, while this one is worked on.
template <class T>
ZEROPP_INLINE void load_as(const T* from, int64_t count, float* values) {
  for (int64_t i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(from + count + i);
  for (int64_t i = 0; i < count; i++) values[i] = to_float(from[i]);
}

template <class T>
ZEROPP_INLINE void add_as(const T* from, int64_t count, float sign, float* values) {
  for (int64_t i = 0; i < count; i++) values[i] += sign * to_float(from[i]);
}

template <class T>
ZEROPP_INLINE void store_as(const float* values, int64_t count, T* to) {
  for (int64_t i = 0; i < count; i++) from_float(values[i], to[i]);
}

ZEROPP_INLINE void load(const void* from, Type type, int64_t count, float* values) {
  if (type == Type::kFloat) load_as(static_cast<const float*>(from), count, values);
  if (type == Type::kBFloat16) load_as(static_cast<const BFloat16*>(from), count, values);
  if (type == Type::kHalf) load_as(static_cast<const Half*>(from), count, values);
}

ZEROPP_INLINE void add(const void* from, Type type, int64_t count, float sign, float* values) {
  if (type == Type::kFloat) add_as(static_cast<const float*>(from), count, sign, values);
  if (type == Type::kBFloat16) add_as(static_cast<const BFloat16*>(from), count, sign, values);
  if (type == Type::kHalf) add_as(static_cast<const Half*>(from), count, sign, values);
}

ZEROPP_INLINE void store(const float* values, Type type, int64_t count, void* to) {
  if (type == Type::kFloat) store_as(values, count, static_cast<float*>(to));
  if (type == Type::kBFloat16) store_as(values, count, static_cast<BFloat16*>(to));
  if (type == Type::kHalf) store_as(values, count, static_cast<Half*>(to));
}

uint8_t* at(const Rows& rows, const Tile& tile, int64_t element) {
  const int64_t offset = tile.row0 * rows.stride0 + tile.row1 * rows.stride1 + element;
  return static_cast<uint8_t*>(rows.data) + offset * size_of(rows.type);
}

// ---- Packed codes.

// What is moved at once: the codes of one byte of the stream, or eight. The compiler makes vector code of the loops.
template <int bits>
struct Word {
  using type __attribute__((may_alias)) = uint64_t;
};
template <>
struct Word<2> {
  using type __attribute__((may_alias)) = uint32_t;
};
template <>
struct Word<4> {
  using type __attribute__((may_alias)) = uint16_t;
};

template <int bits>
ZEROPP_INLINE void pack_as(const uint8_t* codes, int64_t count, uint8_t* __restrict stream) {
  using Codes = typename Word<bits>::type;
  constexpr int64_t kCodes = sizeof(Codes), kBytes = kCodes * bits / 8;
  const Codes* __restrict from = reinterpret_cast<const Codes*>(codes);
  for (int64_t i = 0; i < count / kCodes; i++) {
    const Codes packed = pack<bits, Codes>(from[i]);
    if constexpr (kBytes == 1) stream[i] = uint8_t(packed);
    else memcpy(stream + kBytes * i, &packed, kBytes);
  }
}

template <int bits>
ZEROPP_INLINE void unpack_as(const uint8_t* __restrict stream, int64_t count, uint8_t* codes) {
  using Codes = typename Word<bits>::type;
  constexpr int64_t kCodes = sizeof(Codes), kBytes = kCodes * bits / 8;
  Codes* __restrict to = reinterpret_cast<Codes*>(codes);
  for (int64_t i = 0; i < (count + kCodes - 1) / kCodes; i++) {
    Codes packed = 0;
    if constexpr (kBytes == 1) packed = stream[i];
    else memcpy(&packed, stream + kBytes * i, kBytes);
    to[i] = unpack<bits, Codes>(packed);
  }
}

ZEROPP_INLINE void pack_codes(int bits, const uint8_t* codes, int64_t count, uint8_t* stream) {
  if (bits == 1) pack_as<1>(codes, count, stream);
  if (bits == 2) pack_as<2>(codes, count, stream);
  if (bits == 3) pack_as<3>(codes, count, stream);
  if (bits == 4) pack_as<4>(codes, count, stream);
  if (bits == 6) pack_as<6>(codes, count, stream);
}

ZEROPP_INLINE void unpack_codes(int bits, const uint8_t* stream, int64_t count, uint8_t* codes) {
  if (bits == 1) unpack_as<1>(stream, count, codes);
  if (bits == 2) unpack_as<2>(stream, count, codes);
  if (bits == 3) unpack_as<3>(stream, count, codes);
  if (bits == 4) unpack_as<4>(stream, count, codes);
  if (bits == 6) unpack_as<6>(stream, count, codes);
}

// What the compiler knows of a format is kBits; 0: nothing. 2 is the code "mean", 4 and 8 are "absmax".
template <int kBits>
ZEROPP_INLINE bool is_mean(const Format& format) {
  return kBits ? kBits == 2 : format.is_mean;
}

float load_scale(const uint8_t* scales, int64_t block, int bytes) {
  if (bytes == 4) return reinterpret_cast<const float*>(scales)[block];
  return to_float(reinterpret_cast<const BFloat16*>(scales)[block]);
}

void store_scale(float scale, uint8_t* scales, int64_t block, int bytes) {
  if (bytes == 4) reinterpret_cast<float*>(scales)[block] = scale;
  else from_float(scale, reinterpret_cast<BFloat16*>(scales)[block]);  // exactly
}

template <bool adds>
ZEROPP_INLINE void dequantize(const uint8_t* codes, const uint8_t* scales, const Format& format, int64_t block,
                              int64_t count, float* values) {
  for (int64_t first = 0; first < count; first += block) {
    const Levels levels = levels_of(load_scale(scales, first / block, format.scale_bytes), format.is_mean);
    const int64_t stop = std::min(first + block, count);
    for (int64_t i = first; i < stop; i++) {
      const float value = value_of(code_value(codes[i]), levels);
      values[i] = adds ? values[i] + value : value;
    }
  }
}

template <bool adds>
ZEROPP_INLINE void read_blocks(const Format& format, const Segment& segment, const uint8_t* wire, const Tile& tile,
                               uint8_t* scratch, float* values) {
  const uint8_t* codes = wire + segment.codes + tile.first * format.bits / 8;
  if (format.bits != 8) {
    unpack_codes(format.bits, codes, tile.count, scratch);
    codes = scratch;
  }
  const uint8_t* scales = wire + segment.scales + tile.first / segment.block_size * format.scale_bytes;
  dequantize<adds>(codes, scales, format, segment.block_size, tile.count, values);
}

// What one wire buffer says of a tile, set or added. The tile is of another format, with the same blocks if any.
template <bool adds>
ZEROPP_INLINE void read_wire(const Wires& wires, int peer, const Segment& own, const Tile& tile, uint8_t* scratch,
                             float* values) {
  const Format& format = wires.format;
  const uint8_t* wire = wires.data + peer * wires.peer_stride + tile.row0 * wires.stride0 + tile.row1 * wires.stride1;
  const Segment& segment = segment_at(format, own.start);
  if (segment.block_size == 0) {
    const int64_t skipped = own.start + tile.first - segment.start;
    const uint8_t* from = wire + segment.codes + skipped * size_of(format.type);
    if (adds) add(from, format.type, tile.count, 1, values);
    else load(from, format.type, tile.count, values);
    return;
  }
  read_blocks<adds>(format, segment, wire, tile, scratch, values);
}

ZEROPP_INLINE void read_sum(const Wires& wires, const Segment& own, const Tile& tile, uint8_t* scratch, float* values) {
  read_wire<false>(wires, 0, own, tile, scratch, values);
  for (int peer = 1; peer < wires.num_peers; peer++) read_wire<true>(wires, peer, own, tile, scratch, values);
}

// ---- Quantization.

struct Noise {
  bool wanted;
  uint32_t seed;
  uint32_t index;  // of the tile's first element

  ZEROPP_INLINE float at(int64_t i) const { return counter_uniform(index + uint32_t(i), seed); }
};

ZEROPP_INLINE uint32_t largest_magnitude(const float* __restrict values, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; i++) largest = std::max(largest, magnitude_of(values[i]));
  return largest;
}

ZEROPP_INLINE uint32_t num_nonzeros(const float* __restrict values, int64_t count) {
  uint32_t nonzeros = 0;
  for (int64_t i = 0; i < count; i++) nonzeros += values[i] != 0;
  return nonzeros;
}

ZEROPP_INLINE uint64_t total_in_units(const float* __restrict values, int64_t count, float units) {
  uint64_t total = 0;
  for (int64_t first = 0; first < count; first += 256) {
    uint32_t part = 0;
    for (int64_t i = first; i < std::min<int64_t>(first + 256, count); i++) part += in_units(values[i], units);
    total += part;
  }
  return total;
}

// The scale of a block, taken strip by strip; `size` of its elements are no padding.
template <int kBits>
ZEROPP_INLINE float scale_of_block(
    const float* values, int64_t block, int64_t strip, int64_t size, const Format& format) {
  const int bits = kBits ? kBits : format.bits;
  const bool is_short = format.scale_bytes == 2;
  uint32_t largest = 0;
  for (int64_t s = 0; s < block; s += strip) largest = std::max(largest, largest_magnitude(values + s, strip));
  if (!is_mean<kBits>(format)) return scale_of(largest, qmax_of(bits), is_short);
  const float units = per_unit(exponent_of(largest));
  uint32_t nonzeros = 0;
  uint64_t total = 0;
  for (int64_t s = 0; s < block; s += strip) {
    nonzeros += num_nonzeros(values + s, strip);
    total += total_in_units(values + s, strip, units);
  }
  return mean_scale(total, largest, size, nonzeros, bits, is_short);
}

// Puts the codes [first, stop) of a tile, a byte each, and what arrives of them where that is wanted. code_of(i) is a code
// plus kIntegers.
template <class CodeOf>
ZEROPP_INLINE void put_codes(int64_t first, int64_t stop, Levels levels, uint8_t* __restrict codes,
                             float* __restrict sent, const CodeOf& code_of) {
  if (sent == nullptr) {
    for (int64_t i = first; i < stop; i++) codes[i] = uint8_t(bits_of(code_of(i)));
  } else {
    for (int64_t i = first; i < stop; i++) {
      const float code = code_of(i);
      codes[i] = uint8_t(bits_of(code));
      sent[i] = value_of(code - kIntegers, levels);
    }
  }
}

// The codes [first, stop) of a tile, all of one block. The tile's elements from `count` on are padding.
template <int kBits, bool kHasFma>
ZEROPP_INLINE void quantize_strip(const float* __restrict values, int64_t first, int64_t stop, int64_t count,
                                  float sent_scale, const Format& format, const Noise& noise, uint8_t* codes,
                                  float* sent) {
  const int qmax = qmax_of(kBits ? kBits : format.bits);
  const Levels levels = levels_of(sent_scale, is_mean<kBits>(format));
  const float scale = levels.scale, reciprocal = 1 / scale;
  const auto put = [&](const auto& code_of) __attribute__((always_inline)) {
    put_codes(first, stop, levels, codes, sent, code_of);
  };
  if (is_mean<kBits>(format)) {
    if (!(scale > 0)) {
      put([&](int64_t) __attribute__((always_inline)) { return kIntegers; });
    } else if (noise.wanted) {
      put([&](int64_t i) __attribute__((always_inline)) {
        return mean_code(values[i], reciprocal, levels, qmax, i < count ? noise.at(i) : 0.5f) + kIntegers;
      });
    } else {
      put([&](int64_t i) __attribute__((always_inline)) {
        return mean_code(values[i], reciprocal, levels, qmax, 0.5f) + kIntegers;
      });
    }
  } else if (noise.wanted) {
    put([&](int64_t i) __attribute__((always_inline)) {
      return round_quotient(values[i], scale, qmax, noise.at(i)) + kIntegers;
    });
  } else if (has_reciprocal(scale)) {  // then nothing has to be clamped
    put([&](int64_t i) __attribute__((always_inline)) {
      return (kHasFma ? quotient_of(values[i], scale, reciprocal) : values[i] / scale) + kIntegers;
    });
  } else {
    put([&](int64_t i) __attribute__((always_inline)) {
      return round_quotient(values[i], scale, qmax) + kIntegers;
    });
  }
}

// Scales and codes, a byte each, of a tile, strip by strip: a block, or a part of one, of a size that the compiler may
// know. One loop over the tile after the other, so that no block waits for the reductions and divisions of another.
template <int kBits, bool kHasFma>
ZEROPP_INLINE void quantize(const float* values, int64_t count, int64_t padded, int64_t block, int64_t strip,
                            const Format& format, const Noise& noise, float* scales, uint8_t* codes, float* sent) {
  for (int64_t first = 0; first < padded; first += block) {
    const int64_t size = std::min(block, count - first);
    scales[first / block] = scale_of_block<kBits>(values + first, block, strip, size, format);
  }
  for (int64_t first = 0; first < padded; first += block) {
    for (int64_t s = first; s < first + block; s += strip) {
      quantize_strip<kBits, kHasFma>(values, s, s + strip, count, scales[first / block], format, noise, codes, sent);
    }
  }
}

template <int kBits, bool kHasFma>
ZEROPP_INLINE void write_blocks(const Format& format, const Segment& segment, uint8_t* wire, const Tile& tile,
                                const Noise& noise, Scratch& scratch, float* values, float* sent) {
  const int64_t block = segment.block_size, count = tile.count, padded = tile.padded;
  std::fill(values + count, values + padded, 0.f);
  const int bits = kBits ? kBits : format.bits;
  uint8_t* stream = wire + segment.codes + tile.first * bits / 8;
  uint8_t* codes = bits == 8 ? stream : scratch.codes.data();
  float* scales = scratch.scales.data();
  if (block % 128 == 0) {
    quantize<kBits, kHasFma>(values, count, padded, block, 128, format, noise, scales, codes, sent);
  } else {
    quantize<kBits, kHasFma>(values, count, padded, block, block, format, noise, scales, codes, sent);
  }
  uint8_t* sent_scales = wire + segment.scales + tile.first / block * format.scale_bytes;
  for (int64_t b = 0; b < padded / block; b++) store_scale(scales[b], sent_scales, b, format.scale_bytes);
  if (bits != 8) pack_codes(bits, codes, padded, stream);
}

// The gaps that alignment leaves behind the last code and the last scale.
void zero_gaps(const Segment& segment, const Format& format, uint8_t* wire) {
  const auto zero_from = [wire](int64_t stop) { memset(wire + stop, 0, round_up(stop, 16) - stop); };
  const int64_t numel = segment.stop - segment.start;
  if (segment.block_size == 0) return zero_from(segment.codes + numel * size_of(format.type));
  const int64_t blocks = (numel + segment.block_size - 1) / segment.block_size;
  zero_from(segment.codes + blocks * segment.block_size * format.bits / 8);
  zero_from(segment.scales + format.scale_bytes * blocks);
}

// Writes a tile to a wire; ``sent``, if not null, receives what will arrive. Sets the padding of ``values`` to zero.
template <int kBits, bool kHasFma>
ZEROPP_INLINE void write_wire(const Wires& wires, const Segment& own, const Tile& tile, const Noise& noise,
                              Scratch& scratch, float* values, float* sent) {
  const Format& format = wires.format;
  uint8_t* wire = wires.data + tile.row0 * wires.stride0 + tile.row1 * wires.stride1;
  const Segment& segment = segment_at(format, own.start);
  if (segment.block_size == 0) {
    const int64_t skipped = own.start + tile.first - segment.start;
    uint8_t* to = wire + segment.codes + skipped * size_of(format.type);
    store(values, format.type, tile.count, to);
    if (sent) load(to, format.type, tile.count, sent);
  } else {
    write_blocks<kBits, kHasFma>(format, segment, wire, tile, noise, scratch, values, sent);
  }
  if (own.start + tile.first + tile.count == segment.stop) zero_gaps(segment, format, wire);
}

// ---- The kernels, for some of the tiles.

template <int kBits, bool kHasFma>
ZEROPP_INLINE void encode_tiles(const EncodeArguments& a, int64_t begin, int64_t end) {
  Scratch scratch(a.wire.format);
  float *values = scratch.values.data(), *sent = scratch.sent.data(), *error = scratch.error.data();
  uint8_t* codes = scratch.codes.data();
  const Averaging averaging = a.averaging;
  for_each_tile(a.wire.format, a.rows1, begin, end, [&](const Segment& segment, const Tile& tile) __attribute__((always_inline)) {
    const int64_t element = segment.start + tile.first, row = tile.row0 * a.rows1 + tile.row1;
    if (a.values.data) load(at(a.values, tile, element), a.values.type, tile.count, values);
    else read_sum(a.peers, segment, tile, codes, values);
    if (a.addend.data) add(at(a.addend, tile, element), a.addend.type, tile.count, a.addend_sign, values);

    const Noise noise{a.stochastic, a.noise_seed, uint32_t(row * a.numel + element)};
    if (!a.compensates) return write_wire<kBits, kHasFma>(a.wire, segment, tile, noise, scratch, values, nullptr);

    if (a.error.data) read_wire<false>(a.error, 0, segment, tile, codes, error);
    else std::fill(error, error + tile.count, 0.f);
    for (int64_t i = 0; i < tile.count; i++) values[i] += error[i];
    write_wire<kBits, kHasFma>(a.wire, segment, tile, noise, scratch, values, sent);
    if (!a.new_error.data) return;
    for (int64_t i = 0; i < tile.count; i++) error[i] = moved_error(error[i], values[i], sent[i], averaging);
    write_wire<8, kHasFma>(a.new_error, segment, tile, Noise{}, scratch, error, nullptr);
  });
}

template <bool kHasFma>
ZEROPP_INLINE void encode_some(const EncodeArguments& a, int64_t begin, int64_t end) {
  const Format& format = a.wire.format;
  if (format.is_mean && format.bits == 2) encode_tiles<2, kHasFma>(a, begin, end);
  else if (!format.is_mean && format.bits == 4) encode_tiles<4, kHasFma>(a, begin, end);
  else if (!format.is_mean && format.bits == 8) encode_tiles<8, kHasFma>(a, begin, end);
  else encode_tiles<0, kHasFma>(a, begin, end);
}

template <bool>
ZEROPP_INLINE void decode_some(const DecodeArguments& a, int64_t begin, int64_t end) {
  Scratch scratch(a.peers.format);
  for_each_tile(a.peers.format, a.rows1, begin, end, [&](const Segment& segment, const Tile& tile) __attribute__((always_inline)) {
    uint8_t* out = at(a.out, tile, segment.start + tile.first);
    const bool straight = a.out.type == Type::kFloat && !a.accumulates;
    float* values = straight ? reinterpret_cast<float*>(out) : scratch.values.data();
    read_sum(a.peers, segment, tile, scratch.codes.data(), values);
    if (a.accumulates) add(out, a.out.type, tile.count, 1, values);
    if (!straight) store(values, a.out.type, tile.count, out);
  });
}

template <int width>
ZEROPP_INLINE void rotate_pairs(float* values, int64_t count) {
  for (int64_t pair = 0; pair < count; pair += 2 * width) {
    ZEROPP_UNROLL
    for (int i = 0; i < width; i++) {
      const float first = values[pair + i], second = values[pair + i + width];
      values[pair + i] = first + second;
      values[pair + i + width] = first - second;
    }
  }
}

template <bool>
ZEROPP_INLINE void rotate_some(const RotateArguments& a, int64_t begin, int64_t end) {
  for_each_tile(a.format, a.rows1, begin, end, [&](const Segment& segment, const Tile& tile) __attribute__((always_inline)) {
    const int64_t element = segment.start + tile.first;
    float* out = reinterpret_cast<float*>(at(a.out, tile, element));
    load(at(a.values, tile, element), a.values.type, tile.count, out);
    if (segment.block_size == 0) return;
    const int64_t whole = tile.count / 32 * 32;
    rotate_pairs<1>(out, whole);
    rotate_pairs<2>(out, whole);
    rotate_pairs<4>(out, whole);
    rotate_pairs<8>(out, whole);
    rotate_pairs<16>(out, whole);
    for (int64_t i = 0; i < whole; i++) out[i] *= kHadamardScale;
  });
}

// ---- Versions of the kernels for processors with AVX-512, AVX2 and neither.

template <class Arguments>
using Work = void (*)(const Arguments&, int64_t, int64_t);

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define ZEROPP_VERSION(target_name, name, Arguments, work) \
  __attribute__((target(target_name))) void name(const Arguments& a, int64_t begin, int64_t end) { work(a, begin, end); }
#define ZEROPP_VERSIONS(work, Arguments)                                        \
  ZEROPP_VERSION("arch=x86-64-v4", work##_v4, Arguments, work<true>)            \
  ZEROPP_VERSION("arch=x86-64-v3", work##_v3, Arguments, work<true>)            \
  ZEROPP_VERSION("default", work##_v1, Arguments, work<false>)                  \
  Work<Arguments> best_of_##work() {                                            \
    if (__builtin_cpu_supports("x86-64-v4")) return work##_v4;                  \
    return __builtin_cpu_supports("x86-64-v3") ? work##_v3 : work##_v1;         \
  }
#else
#ifdef __FP_FAST_FMAF
constexpr bool kTargetHasFma = true;
#else
constexpr bool kTargetHasFma = false;
#endif
#define ZEROPP_VERSIONS(work, Arguments)                                                                       \
  void work##_v1(const Arguments& a, int64_t begin, int64_t end) { work<kTargetHasFma>(a, begin, end); }       \
  Work<Arguments> best_of_##work() { return work##_v1; }
#endif

ZEROPP_VERSIONS(encode_some, EncodeArguments)
ZEROPP_VERSIONS(decode_some, DecodeArguments)
ZEROPP_VERSIONS(rotate_some, RotateArguments)

template <class Arguments>
void run_parallel(const Arguments& a, const Format& format, Work<Arguments> work) {
  const int64_t tiles = a.rows0 * a.rows1 * tiles_per_row(format);
  at::parallel_for(0, tiles, kTilesPerThread, [&](int64_t begin, int64_t end) { work(a, begin, end); });
}

}  // namespace

void encode(const EncodeArguments& a) { run_parallel(a, a.wire.format, best_of_encode_some()); }
void decode(const DecodeArguments& a) { run_parallel(a, a.peers.format, best_of_decode_some()); }
void rotate(const RotateArguments& a) { run_parallel(a, a.format, best_of_rotate_some()); }

}  // namespace zeropp::cpu
