// The kernels on a CPU: plain loops over tiles that stay in the L1 cache, which the compiler turns into vector code.
// GCC makes three versions of them (AVX-512, AVX2, baseline) and the loader takes the best that the processor has.

#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "../kernel_arguments.h"

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define ZEROPP_VERSIONS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define ZEROPP_VERSIONS
#endif

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

// Eight codes take `bits` bytes. Where those are a machine word, the compiler makes vector code of the loops.
using Eight __attribute__((may_alias)) = uint64_t;
using Four __attribute__((may_alias)) = uint32_t;
using Two __attribute__((may_alias)) = uint16_t;

template <int bits>
ZEROPP_INLINE void pack_as(const uint8_t* codes, int64_t count, uint8_t* stream) {
  const Eight* __restrict from = reinterpret_cast<const Eight*>(codes);
  Four* __restrict fours = reinterpret_cast<Four*>(stream);
  Two* __restrict twos = reinterpret_cast<Two*>(stream);
  for (int64_t group = 0; group < count / 8; group++) {
    const uint64_t packed = pack<bits>(uint64_t(from[group]));
    if (bits == 4) fours[group] = uint32_t(packed);
    else if (bits == 2) twos[group] = uint16_t(packed);
    else memcpy(stream + bits * group, &packed, bits);
  }
}

template <int bits>
ZEROPP_INLINE void unpack_as(const uint8_t* stream, int64_t count, uint8_t* codes) {
  Eight* __restrict to = reinterpret_cast<Eight*>(codes);
  const Four* __restrict fours = reinterpret_cast<const Four*>(stream);
  const Two* __restrict twos = reinterpret_cast<const Two*>(stream);
  for (int64_t group = 0; group < (count + 7) / 8; group++) {
    uint64_t packed = 0;
    if (bits == 4) packed = fours[group];
    else if (bits == 2) packed = twos[group];
    else memcpy(&packed, stream + bits * group, bits);
    to[group] = unpack<bits>(packed);
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
};

ZEROPP_INLINE uint32_t largest_magnitude(const float* __restrict values, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; i++) largest = std::max(largest, magnitude_of(values[i]));
  return largest;
}

// Codes, a byte each, of one block; returns the largest distance of a product from its code.
ZEROPP_INLINE float quantize_by_product(
    const float* __restrict values, int64_t count, float reciprocal, uint8_t* __restrict codes) {
  uint32_t largest = 0;  // as an integer, of which the compiler may reorder the maximum
  for (int64_t i = 0; i < count; i++) {
    const RoundedProduct rounded = round_product(values[i], reciprocal);
    codes[i] = uint8_t(rounded.code);
    largest = std::max(largest, bits_of(rounded.distance));
  }
  return float_of(largest);
}

ZEROPP_INLINE void quantize_by_quotient(
    const float* __restrict values, int64_t count, float scale, int qmax, uint8_t* __restrict codes) {
  if (has_reciprocal(scale)) {  // then nothing has to be clamped
    // In double precision the product rounds to the quotient: it is off by less than 2^-27 units in fp32's last place,
    // and a quotient of two fp32 numbers is never closer than 2^-25 to the middle of two others.
    const double reciprocal = 1 / double(scale);
    for (int64_t i = 0; i < count; i++) codes[i] = uint8_t(int(rintf(float(double(values[i]) * reciprocal))));
  } else {
    for (int64_t i = 0; i < count; i++) codes[i] = uint8_t(round_quotient(values[i], scale, qmax));
  }
}

// Scales and codes, a byte each, of a tile, strip by strip: a block, or a part of one, of a size that the compiler may
// know. One loop over the tile after the other, so that no block waits for the reductions and divisions of another.
ZEROPP_INLINE void quantize(const float* values, int64_t count, int64_t block, int64_t strip, const Format& format,
                            const Noise& noise, float* scales, uint8_t* codes) {
  const int qmax = qmax_of(format.bits);
  for (int64_t first = 0; first < count; first += block) {
    uint32_t largest = 0;
    for (int64_t s = first; s < first + block; s += strip) largest = std::max(largest, largest_magnitude(values + s, strip));
    scales[first / block] = scale_of(largest, qmax, format.scale_bytes == 2);
  }
  if (noise.wanted) {
    for (int64_t i = 0; i < count; i++) {
      const float uniform = counter_uniform(noise.index + uint32_t(i), noise.seed);
      codes[i] = uint8_t(round_quotient(values[i], scales[i / block], qmax, uniform));
    }
    return;
  }
  for (int64_t first = 0; first < count; first += block) {
    const float scale = scales[first / block], reciprocal = 1 / scale;
    for (int64_t s = first; s < first + block; s += strip) {
      const float distance = quantize_by_product(values + s, strip, reciprocal, codes + s);
      if (!has_reciprocal(scale) || is_near_tie(distance, qmax)) {
        quantize_by_quotient(values + s, strip, scale, qmax, codes + s);
      }
    }
  }
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

// The same for the code "mean", of a tile whose elements from `count` on are padding.
ZEROPP_INLINE void quantize_by_mean(const float* values, int64_t count, int64_t padded, int64_t block, int64_t strip,
                                    const Format& format, const Noise& noise, float* scales, uint8_t* codes) {
  const int qmax = qmax_of(format.bits);
  for (int64_t first = 0; first < padded; first += block) {
    uint32_t largest = 0, nonzeros = 0;
    for (int64_t s = first; s < first + block; s += strip) {
      largest = std::max(largest, largest_magnitude(values + s, strip));
      nonzeros += num_nonzeros(values + s, strip);
    }
    const float units = per_unit(exponent_of(largest));
    uint64_t total = 0;
    for (int64_t s = first; s < first + block; s += strip) total += total_in_units(values + s, strip, units);
    const int64_t size = std::min(block, count - first);
    scales[first / block] = mean_scale(total, largest, size, nonzeros, format.bits, format.scale_bytes == 2);
  }
  for (int64_t first = 0; first < padded; first += block) {
    const Levels levels = levels_of(scales[first / block], true);
    const float reciprocal = 1 / levels.scale;
    if (!(levels.scale > 0)) {
      std::fill(codes + first, codes + first + block, uint8_t(0));
    } else if (noise.wanted) {
      for (int64_t i = first; i < first + block; i++) {
        const float uniform = i < count ? counter_uniform(noise.index + uint32_t(i), noise.seed) : 0.5f;
        codes[i] = uint8_t(mean_code(values[i], reciprocal, levels, qmax, uniform));
      }
    } else {
      for (int64_t s = first; s < first + block; s += strip) {
        for (int64_t i = s; i < s + strip; i++) {
          codes[i] = uint8_t(mean_code(values[i], reciprocal, levels, qmax, 0.5f));
        }
      }
    }
  }
}

ZEROPP_INLINE void write_blocks(const Format& format, const Segment& segment, uint8_t* wire, const Tile& tile,
                                const Noise& noise, Scratch& scratch, float* values, float* sent) {
  const int64_t block = segment.block_size, count = tile.count, padded = tile.padded;
  std::fill(values + count, values + padded, 0.f);
  uint8_t* stream = wire + segment.codes + tile.first * format.bits / 8;
  uint8_t* codes = format.bits == 8 ? stream : scratch.codes.data();
  float* scales = scratch.scales.data();
  if (format.is_mean) {
    if (block % 128 == 0) quantize_by_mean(values, count, padded, block, 128, format, noise, scales, codes);
    else quantize_by_mean(values, count, padded, block, block, format, noise, scales, codes);
  } else {
    if (block % 128 == 0) quantize(values, padded, block, 128, format, noise, scales, codes);
    else quantize(values, padded, block, block, format, noise, scales, codes);
  }
  uint8_t* sent_scales = wire + segment.scales + tile.first / block * format.scale_bytes;
  for (int64_t b = 0; b < padded / block; b++) store_scale(scales[b], sent_scales, b, format.scale_bytes);
  if (sent) dequantize<false>(codes, sent_scales, format, block, padded, sent);
  if (format.bits != 8) pack_codes(format.bits, codes, padded, stream);
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
    write_blocks(format, segment, wire, tile, noise, scratch, values, sent);
  }
  if (own.start + tile.first + tile.count == segment.stop) zero_gaps(segment, format, wire);
}

// ---- The kernels, for some of the tiles.

ZEROPP_VERSIONS void encode_tiles(const EncodeArguments& a, int64_t begin, int64_t end) {
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
    if (!a.compensates) return write_wire(a.wire, segment, tile, noise, scratch, values, nullptr);

    if (a.error.data) read_wire<false>(a.error, 0, segment, tile, codes, error);
    else std::fill(error, error + tile.count, 0.f);
    for (int64_t i = 0; i < tile.count; i++) values[i] += error[i];
    write_wire(a.wire, segment, tile, noise, scratch, values, sent);
    if (!a.new_error.data) return;
    for (int64_t i = 0; i < tile.count; i++) error[i] = moved_error(error[i], values[i], sent[i], averaging);
    write_wire(a.new_error, segment, tile, Noise{}, scratch, error, nullptr);
  });
}

ZEROPP_VERSIONS void decode_tiles(const DecodeArguments& a, int64_t begin, int64_t end) {
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

ZEROPP_VERSIONS void rotate_tiles(const RotateArguments& a, int64_t begin, int64_t end) {
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

template <class Arguments>
void run_parallel(const Arguments& a, const Format& format, void (*work)(const Arguments&, int64_t, int64_t)) {
  const int64_t tiles = a.rows0 * a.rows1 * tiles_per_row(format);
  at::parallel_for(0, tiles, kTilesPerThread, [&](int64_t begin, int64_t end) { work(a, begin, end); });
}

}  // namespace

void encode(const EncodeArguments& a) { run_parallel(a, a.wire.format, encode_tiles); }
void decode(const DecodeArguments& a) { run_parallel(a, a.peers.format, decode_tiles); }
void rotate(const RotateArguments& a) { run_parallel(a, a.format, rotate_tiles); }

}  // namespace zeropp::cpu
