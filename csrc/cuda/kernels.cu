// The kernels on a GPU. A thread works on groups of 8 elements, 16 bytes of bf16, and issues the loads of several groups
// before it uses the first. A block's maximum goes through warp shuffles. Nothing is atomic, nothing waits for the host.
//
// The wire formats travel as kernel parameters. This file includes nothing of torch: nvcc alone compiles it.

#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#define ZEROPP_CUDA
#include "../kernel_arguments.h"

namespace zeropp::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kGroup = 8;
constexpr int kStride = kThreads * kGroup;      // elements from one group of a thread to its next
constexpr int kLargestWarpBlock = 32 * kGroup;  // elements that one warp has in its registers
constexpr int kSegments = 24;                   // of a launch
constexpr int kLaunchBytes = 4096;              // of parameters, which all supported cards take

// One segment of the format that a kernel goes through, and where its elements are in other wires.
struct Item {
  Segment own, source, error;
  int64_t first_tile;  // what blockIdx.x counts, for the first of this segment
};

template <class Arguments>
struct Launch {
  Arguments arguments;
  int num_items = 0;
  Item items[kSegments];
};

template <class Arguments>
__device__ const Item& item_of_block(const Launch<Arguments>& launch) {
  int i = 0;
  while (i + 1 < launch.num_items && blockIdx.x >= launch.items[i + 1].first_tile) i++;
  return launch.items[i];
}

struct Row {
  int64_t row0, row1;
};

__device__ Row row_of_block(int64_t rows1) { return {blockIdx.y / rows1, blockIdx.y % rows1}; }

__device__ uint8_t* at(const Wires& wires, const Row& row) {
  return wires.data + row.row0 * wires.stride0 + row.row1 * wires.stride1;
}

// ---- Groups of 8 elements in registers. `valid` of them exist; the others are zero, and are not written.

template <class T>
__device__ void load_as(const void* data, int valid, float (&values)[kGroup]) {
  constexpr int kPerLoad = 16 / sizeof(T);
  const T* from = static_cast<const T*>(data);
  if (valid == kGroup && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
    union {
      uint4 raw[kGroup / kPerLoad];
      T elements[kGroup];
    } loaded;
#pragma unroll
    for (int j = 0; j < kGroup / kPerLoad; j++) loaded.raw[j] = reinterpret_cast<const uint4*>(from)[j];
#pragma unroll
    for (int i = 0; i < kGroup; i++) values[i] = to_float(loaded.elements[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; i++) values[i] = i < valid ? to_float(from[i]) : 0.f;
  }
}

template <class T>
__device__ void store_as(const float (&values)[kGroup], int valid, void* data) {
  constexpr int kPerStore = 16 / sizeof(T);
  T* to = static_cast<T*>(data);
  union {
    uint4 raw[kGroup / kPerStore];
    T elements[kGroup];
  } stored;
#pragma unroll
  for (int i = 0; i < kGroup; i++) from_float(values[i], stored.elements[i]);
  if (valid == kGroup && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
#pragma unroll
    for (int j = 0; j < kGroup / kPerStore; j++) reinterpret_cast<uint4*>(to)[j] = stored.raw[j];
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; i++) {
      if (i < valid) to[i] = stored.elements[i];
    }
  }
}

__device__ void load(const void* from, Type type, int valid, float (&values)[kGroup]) {
  if (type == Type::kFloat) load_as<float>(from, valid, values);
  else if (type == Type::kBFloat16) load_as<BFloat16>(from, valid, values);
  else load_as<Half>(from, valid, values);
}

__device__ void store(const float (&values)[kGroup], Type type, int valid, void* to) {
  if (type == Type::kFloat) store_as<float>(values, valid, to);
  else if (type == Type::kBFloat16) store_as<BFloat16>(values, valid, to);
  else store_as<Half>(values, valid, to);
}

__device__ uint8_t* at(const Rows& rows, const Row& row, int64_t element) {
  const int64_t offset = row.row0 * rows.stride0 + row.row1 * rows.stride1 + element;
  return static_cast<uint8_t*>(rows.data) + offset * size_of(rows.type);
}

// ---- Codes of a group, a byte each in the two words; `bits` bytes on the wire. kBits = 0: bits and code known at run time
// only; kBits = 2 is the code "mean", 4 and 8 are "absmax".

template <int kBits>
__device__ bool is_mean(const Format& format) {
  return kBits ? kBits == 2 : format.is_mean;
}

__device__ float load_scale(const uint8_t* scales, uint32_t block, int bytes) {
  if (bytes == 4) return reinterpret_cast<const float*>(scales)[block];
  return to_float(reinterpret_cast<const BFloat16*>(scales)[block]);
}

__device__ void store_scale(float scale, uint8_t* scales, uint32_t block, int bytes) {
  if (bytes == 4) reinterpret_cast<float*>(scales)[block] = scale;
  else from_float(scale, reinterpret_cast<BFloat16*>(scales)[block]);  // exactly
}

template <int bits>
__device__ void store_codes_as(uint32_t low, uint32_t high, uint8_t* to) {
  if constexpr (bits == 8) {
    *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
  } else {
    const uint64_t stream = pack<bits>(low) | uint64_t(pack<bits>(high)) << (4 * bits);
    if constexpr (bits == 4) *reinterpret_cast<uint32_t*>(to) = uint32_t(stream);
    if constexpr (bits == 2) *reinterpret_cast<uint16_t*>(to) = uint16_t(stream);
    if constexpr (bits == 1) *to = uint8_t(stream);
    if constexpr (bits == 3 || bits == 6) {
#pragma unroll
      for (int i = 0; i < bits; i++) to[i] = uint8_t(stream >> (8 * i));
    }
  }
}

template <int bits>
__device__ void load_codes_as(const uint8_t* from, float (&codes)[kGroup]) {
  uint32_t low, high;
  if constexpr (bits == 8) {
    const uint2 raw = *reinterpret_cast<const uint2*>(from);
    low = raw.x, high = raw.y;
  } else {
    uint64_t stream = 0;
    if constexpr (bits == 4) stream = *reinterpret_cast<const uint32_t*>(from);
    if constexpr (bits == 2) stream = *reinterpret_cast<const uint16_t*>(from);
    if constexpr (bits == 1) stream = *from;
    if constexpr (bits == 3 || bits == 6) {
#pragma unroll
      for (int i = 0; i < bits; i++) stream |= uint64_t(from[i]) << (8 * i);
    }
    constexpr uint32_t half = uint32_t((uint64_t(1) << (4 * bits)) - 1);
    low = unpack<bits>(uint32_t(stream) & half), high = unpack<bits>(uint32_t(stream >> (4 * bits)) & half);
  }
#pragma unroll
  for (int i = 0; i < kGroup; i++) codes[i] = code_value((i < 4 ? low : high) >> (8 * (i % 4)) & 0xff);
}

template <int kBits>
__device__ void store_codes(uint32_t low, uint32_t high, int bits, uint8_t* to) {
  if constexpr (kBits != 0) {
    store_codes_as<kBits>(low, high, to);
  } else {
    switch (bits) {
      case 1: return store_codes_as<1>(low, high, to);
      case 2: return store_codes_as<2>(low, high, to);
      case 3: return store_codes_as<3>(low, high, to);
      case 4: return store_codes_as<4>(low, high, to);
      case 6: return store_codes_as<6>(low, high, to);
      default: return store_codes_as<8>(low, high, to);
    }
  }
}

template <int kBits>
__device__ void load_codes(const uint8_t* from, int bits, float (&codes)[kGroup]) {
  if constexpr (kBits != 0) {
    load_codes_as<kBits>(from, codes);
  } else {
    switch (bits) {
      case 1: return load_codes_as<1>(from, codes);
      case 2: return load_codes_as<2>(from, codes);
      case 3: return load_codes_as<3>(from, codes);
      case 4: return load_codes_as<4>(from, codes);
      case 6: return load_codes_as<6>(from, codes);
      default: return load_codes_as<8>(from, codes);
    }
  }
}

// ---- Wires.

// What one wire says of the group at `element` of the shard.
template <int kBits>
__device__ void read_wire(const uint8_t* wire, const Format& format, const Segment& segment, int64_t element, int valid,
                          float (&values)[kGroup]) {
  const int64_t offset = element - segment.start;
  if (segment.block_size == 0) {
    return load(wire + segment.codes + offset * size_of(format.type), format.type, valid, values);
  }
  const uint32_t group = uint32_t(offset / kGroup), groups_per_block = uint32_t(segment.block_size) / kGroup;
  const float scale = load_scale(wire + segment.scales, group / groups_per_block, format.scale_bytes);
  const Levels levels = levels_of(scale, is_mean<kBits>(format));
  const int bits = kBits ? kBits : format.bits;
  load_codes<kBits>(wire + segment.codes + int64_t(group) * bits, bits, values);
#pragma unroll
  for (int i = 0; i < kGroup; i++) values[i] = i < valid ? value_of(values[i], levels) : 0.f;
}

template <int kBits>
__device__ void read_sum(const Wires& wires, const Segment& segment, const Row& row, int64_t element, int valid,
                         float (&values)[kGroup]) {
  const uint8_t* wire = at(wires, row);
  read_wire<kBits>(wire, wires.format, segment, element, valid, values);
#pragma unroll 2
  for (int peer = 1; peer < wires.num_peers; peer++) {
    float addend[kGroup];
    read_wire<kBits>(wire + peer * wires.peer_stride, wires.format, segment, element, valid, addend);
#pragma unroll
    for (int i = 0; i < kGroup; i++) values[i] += addend[i];
  }
}

// The bytes up to the next multiple of 16 are gaps of the alignment.
__device__ void zero_gap(uint8_t* wire, int64_t offset) {
  for (; offset % 16 != 0; offset++) wire[offset] = 0;
}

__device__ void zero_gaps(uint8_t* wire, const Format& format, const Segment& segment) {
  const int64_t numel = segment.stop - segment.start;
  if (segment.block_size == 0) {
    zero_gap(wire, segment.codes + numel * size_of(format.type));
  } else {
    const int64_t blocks = (numel + segment.block_size - 1) / segment.block_size;
    zero_gap(wire, segment.codes + blocks * segment.block_size / kGroup * format.bits);
    zero_gap(wire, segment.scales + format.scale_bytes * blocks);
  }
}

// ---- Quantization.

// The maximum of magnitudes that keeps a NaN: one instruction.
__device__ float max_nan(float a, float b) {
#ifdef __CUDA_ARCH__
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
#else
  return float_of(std::max(bits_of(a), bits_of(b)));
#endif
}

__device__ float largest_magnitude(const float (&values)[kGroup]) {
  float largest = 0;
#pragma unroll
  for (int i = 0; i < kGroup; i++) largest = max_nan(largest, fabsf(values[i]));
  return largest;
}

struct Noise {
  bool wanted;
  uint32_t seed, index;  // of the group's first element
};

__device__ uint32_t num_nonzeros(const float (&values)[kGroup]) {
  uint32_t nonzeros = 0;
#pragma unroll
  for (int i = 0; i < kGroup; i++) nonzeros += values[i] != 0;
  return nonzeros;
}

__device__ uint32_t total_in_units(const float (&values)[kGroup], float units) {
  uint32_t total = 0;
#pragma unroll
  for (int i = 0; i < kGroup; i++) total += in_units(values[i], units);
  return total;
}

// Codes of a group of a block with this scale.
__device__ void quantize_by_absmax(
    const float (&values)[kGroup], float scale, int qmax, const Noise& noise, uint32_t (&codes)[kGroup]) {
  float distance = 1;
  if (has_reciprocal(scale) && !noise.wanted) {
    const float reciprocal = 1 / scale;
    distance = 0;
#pragma unroll
    for (int i = 0; i < kGroup; i++) {
      const RoundedProduct rounded = round_product(values[i], reciprocal);
      codes[i] = rounded.code;
      distance = fmaxf(distance, rounded.distance);
    }
  }
  if (is_near_tie(distance, qmax)) {
#pragma unroll
    for (int i = 0; i < kGroup; i++) {
      codes[i] = noise.wanted
                     ? round_quotient(values[i], scale, qmax, counter_uniform(noise.index + i, noise.seed))
                     : round_quotient(values[i], scale, qmax);
    }
  }
}

__device__ void quantize_by_mean(const float (&values)[kGroup], int valid, float scale, int qmax, const Noise& noise,
                                 uint32_t (&codes)[kGroup]) {
  const Levels levels = levels_of(scale, true);
  const float reciprocal = 1 / levels.scale;
#pragma unroll
  for (int i = 0; i < kGroup; i++) {
    const float uniform = noise.wanted && i < valid ? counter_uniform(noise.index + i, noise.seed) : 0.5f;
    codes[i] = levels.scale > 0 ? mean_code(values[i], reciprocal, levels, qmax, uniform) : 0;
  }
}

// The same as bytes in two words.
template <int kBits>
__device__ void quantize(const float (&values)[kGroup], int valid, float scale, const Format& format,
                         const Noise& noise, uint32_t& low, uint32_t& high) {
  const int qmax = qmax_of(kBits ? kBits : format.bits);
  uint32_t codes[kGroup];
  if (is_mean<kBits>(format)) quantize_by_mean(values, valid, scale, qmax, noise, codes);
  else quantize_by_absmax(values, scale, qmax, noise, codes);
  const auto bytes = [](uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
  };
  low = bytes(codes[0], codes[1], codes[2], codes[3]);
  high = bytes(codes[4], codes[5], codes[6], codes[7]);
}

// ---- Encoding: what a thread does with a group, in the order in which it does it.

enum class Source { kFloat, k16Bit, kWires };

// Groups whose loads a thread issues before it uses the first. One has several loads already where there are peers or
// errors, and more would not fit the registers.
template <Source kSource, bool kCompensates>
constexpr int kEncodesInFlight = kSource == Source::kWires || kCompensates ? 1 : 2;
constexpr int kDecodesInFlight = 2;

template <Source kSource>
__device__ void read_source(const EncodeArguments& a, const Item& item, const Row& row, int64_t element, int valid,
                            float (&values)[kGroup]) {
  if constexpr (kSource == Source::kWires) {
    read_sum<0>(a.peers, item.source, row, element, valid, values);
  } else {
    const uint8_t* from = at(a.values, row, element);
    if constexpr (kSource == Source::kFloat) load_as<float>(from, valid, values);
    else if (a.values.type == Type::kBFloat16) load_as<BFloat16>(from, valid, values);
    else load_as<Half>(from, valid, values);
  }
  if (a.addend.data != nullptr) {
    float addend[kGroup];
    load(at(a.addend, row, element), a.addend.type, valid, addend);
#pragma unroll
    for (int i = 0; i < kGroup; i++) values[i] += a.addend_sign * addend[i];
  }
}

__device__ void read_error(const EncodeArguments& a, const Item& item, const Row& row, int64_t element, int valid,
                           float (&error)[kGroup]) {
  if (a.error.data != nullptr) {
    // In 8 bits, or not quantized at all.
    return read_wire<8>(at(a.error, row), a.error.format, item.error, element, valid, error);
  }
#pragma unroll
  for (int i = 0; i < kGroup; i++) error[i] = 0;
}

// Replaces the error by the new one; ``values`` are compensated, ``sent`` what arrives of them.
__device__ void move_error(const EncodeArguments& a, const float (&values)[kGroup], const float (&sent)[kGroup],
                           float (&error)[kGroup]) {
#pragma unroll
  for (int i = 0; i < kGroup; i++) error[i] = moved_error(error[i], values[i], sent[i], a.averaging);
}

__device__ void add(float (&values)[kGroup], const float (&addend)[kGroup]) {
#pragma unroll
  for (int i = 0; i < kGroup; i++) values[i] += addend[i];
}

__device__ void dequantize(uint32_t low, uint32_t high, Levels levels, float (&values)[kGroup]) {
#pragma unroll
  for (int i = 0; i < kGroup; i++) {
    values[i] = value_of(code_value((i < 4 ? low : high) >> (8 * (i % 4)) & 0xff), levels);
  }
}

// Writes values that travel as they are; returns where.
__device__ uint8_t* store_plain(const float (&values)[kGroup], const Wires& wires, const Segment& segment,
                                const Row& row, int64_t element, int valid) {
  const Type type = wires.format.type;
  uint8_t* to = at(wires, row) + segment.codes + (element - segment.start) * size_of(type);
  store(values, type, valid, to);
  return to;
}

template <bool kCompensates>
__device__ void write_plain(const EncodeArguments& a, const Item& item, const Row& row, int64_t element, int valid,
                            const float (&values)[kGroup], float (&error)[kGroup]) {
  const uint8_t* to = store_plain(values, a.wire, item.own, row, element, valid);
  if constexpr (kCompensates) {
    if (a.new_error.data == nullptr) return;
    float sent[kGroup];
    load(to, a.wire.format.type, valid, sent);
    move_error(a, values, sent, error);
    store_plain(error, a.new_error, item.error, row, element, valid);
  }
}

// Codes of a group, and the scale if the group is its block's first. Returns in ``sent`` what arrives.
template <int kBits>
__device__ void write_codes(uint8_t* wire, const Format& format, const Segment& segment, int64_t offset, int valid,
                            float scale, const Noise& noise, const float (&values)[kGroup], float (&sent)[kGroup]) {
  const int bits = kBits ? kBits : format.bits;
  uint32_t low, high;
  quantize<kBits>(values, valid, scale, format, noise, low, high);
  store_codes<kBits>(low, high, bits, wire + segment.codes + offset / kGroup * bits);
  const uint32_t group = uint32_t(offset / kGroup), groups_per_block = uint32_t(segment.block_size) / kGroup;
  if (group % groups_per_block == 0) {
    store_scale(scale, wire + segment.scales, group / groups_per_block, format.scale_bytes);
  }
  dequantize(low, high, levels_of(scale, is_mean<kBits>(format)), sent);
}

// Elements of the block at `offset` that are no padding.
__device__ int64_t size_of_block(const Segment& segment, int64_t offset) {
  const int64_t left = segment.stop - segment.start - offset / segment.block_size * segment.block_size;
  return left < segment.block_size ? left : segment.block_size;
}

__device__ int num_valid(const Segment& segment, int64_t offset) {
  const int64_t left = segment.stop - segment.start - offset;
  return left <= 0 ? 0 : left < kGroup ? int(left) : kGroup;
}

__device__ void write_gaps(const EncodeArguments& a, const Item& item, const Row& row) {
  zero_gaps(at(a.wire, row), a.wire.format, item.own);
  if (a.new_error.data != nullptr && item.error.stop == item.own.stop) {
    zero_gaps(at(a.new_error, row), a.new_error.format, item.error);
  }
}

__device__ Noise noise_at(const EncodeArguments& a, const Row& row, int64_t element) {
  return {a.stochastic, a.noise_seed, uint32_t((row.row0 * a.rows1 + row.row1) * a.numel + element)};
}

// Blocks of 8 to 256 elements, a power of two: each is in the registers of some threads of one warp, a team.
template <int kBits, Source kSource, bool kCompensates>
__global__ void __launch_bounds__(kThreads) encode_tiles(const __grid_constant__ Launch<EncodeArguments> launch) {
  const EncodeArguments& a = launch.arguments;
  const Item& item = item_of_block(launch);
  const Segment& own = item.own;
  const Row row = row_of_block(a.rows1);
  constexpr int kInFlight = kEncodesInFlight<kSource, kCompensates>;
  const int64_t first = (blockIdx.x - item.first_tile) * kInFlight * kStride + threadIdx.x * kGroup;

  float values[kInFlight][kGroup], error[kInFlight][kGroup];
#pragma unroll
  for (int j = 0; j < kInFlight; j++) {
    const int64_t offset = first + j * kStride;
    read_source<kSource>(a, item, row, own.start + offset, num_valid(own, offset), values[j]);
    if constexpr (kCompensates) {
      read_error(a, item, row, own.start + offset, num_valid(own, offset), error[j]);
    }
  }
  const int team = int(own.block_size) / kGroup;
  const auto largest_of_team = [team](const float (&group)[kGroup]) {
    float largest = largest_magnitude(group);
    for (int other = team / 2; other > 0; other /= 2) {
      largest = max_nan(largest, __shfl_xor_sync(0xffffffffu, largest, other));
    }
    return bits_of(largest);
  };
  const auto sum_of_team = [team](uint32_t sum) {
    for (int other = team / 2; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
    return sum;
  };
#pragma unroll
  for (int j = 0; j < kInFlight; j++) {
    const int64_t offset = first + j * kStride, element = own.start + offset;
    const int valid = num_valid(own, offset);
    if constexpr (kCompensates) add(values[j], error[j]);
    if (own.block_size == 0) {
      if (valid > 0) write_plain<kCompensates>(a, item, row, element, valid, values[j], error[j]);
      continue;
    }
    const int bits = kBits ? kBits : a.wire.format.bits;
    const bool is_short = a.wire.format.scale_bytes == 2;
    const uint32_t largest = largest_of_team(values[j]);
    float scale;
    if (is_mean<kBits>(a.wire.format)) {
      const uint32_t nonzeros = sum_of_team(num_nonzeros(values[j]));
      const uint32_t total = sum_of_team(total_in_units(values[j], per_unit(exponent_of(largest))));
      scale = mean_scale(total, largest, size_of_block(own, offset), nonzeros, bits, is_short);
    } else {
      scale = scale_of(largest, qmax_of(bits), is_short);
    }
    const bool exists = offset < (own.stop - own.start + own.block_size - 1) / own.block_size * own.block_size;
    float sent[kGroup];
    if (exists) {
      const Noise noise = kBits ? Noise{} : noise_at(a, row, element);  // noise goes with the general kernel only
      write_codes<kBits>(at(a.wire, row), a.wire.format, own, offset, valid, scale, noise, values[j], sent);
    }
    if constexpr (kCompensates) {
      if (a.new_error.data == nullptr) continue;
      move_error(a, values[j], sent, error[j]);
#pragma unroll
      for (int i = 0; i < kGroup; i++) error[j][i] = i < valid ? error[j][i] : 0.f;
      if (item.error.block_size == 0) {
        if (valid > 0) store_plain(error[j], a.new_error, item.error, row, element, valid);
        continue;
      }
      const float error_scale = scale_of(largest_of_team(error[j]), qmax_of(8), false);
      if (exists) {
        write_codes<8>(
            at(a.new_error, row), a.new_error.format, item.error, offset, valid, error_scale, Noise{}, error[j], sent);
      }
    }
  }
  if (first == 0) write_gaps(a, item, row);
}

// Blocks of any other size: a thread block for each, which reads it once more for every pass, from the caches if small.
template <Source kSource, bool kCompensates>
__global__ void __launch_bounds__(kThreads, 1) encode_blocks(const __grid_constant__ Launch<EncodeArguments> launch) {
  const EncodeArguments& a = launch.arguments;
  const Item& item = item_of_block(launch);
  const Segment& own = item.own;
  const Row row = row_of_block(a.rows1);
  const int64_t block = blockIdx.x - item.first_tile;
  const int64_t start = block * own.block_size, stop = start + own.block_size;

  float values[kGroup], error[kGroup], sent[kGroup];
  const auto read = [&](int64_t offset) {
    const int valid = num_valid(own, offset);
    read_source<kSource>(a, item, row, own.start + offset, valid, values);
    if constexpr (kCompensates) {
      read_error(a, item, row, own.start + offset, valid, error);
      add(values, error);
    }
  };
  __shared__ float largest_of_warp[kThreads / 32];
  const auto largest_of_threads = [&](float largest) {
    for (int other = 16; other > 0; other /= 2) {
      largest = max_nan(largest, __shfl_xor_sync(0xffffffffu, largest, other));
    }
    __syncthreads();  // the array may still be read
    if (threadIdx.x % 32 == 0) largest_of_warp[threadIdx.x / 32] = largest;
    __syncthreads();
    for (int warp = 0; warp < kThreads / 32; warp++) largest = max_nan(largest, largest_of_warp[warp]);
    return bits_of(largest);
  };
  __shared__ uint64_t sum_of_thread[kThreads];
  const auto sum_of_threads = [&](uint64_t sum) {
    __syncthreads();
    sum_of_thread[threadIdx.x] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll 1
    for (int thread = 0; thread < kThreads; thread++) sum += sum_of_thread[thread];
    return sum;
  };

  float largest = 0;
  uint64_t nonzeros = 0;
  for (int64_t offset = start + threadIdx.x * kGroup; offset < stop; offset += kStride) {
    read(offset);
    largest = max_nan(largest, largest_magnitude(values));
    nonzeros += num_nonzeros(values);
  }
  const uint32_t largest_of_block = largest_of_threads(largest);
  const bool is_short = a.wire.format.scale_bytes == 2;
  float scale = scale_of(largest_of_block, qmax_of(a.wire.format.bits), is_short);
  if (a.wire.format.is_mean) {
    uint64_t total = 0;
    for (int64_t offset = start + threadIdx.x * kGroup; offset < stop; offset += kStride) {
      read(offset);
      total += total_in_units(values, per_unit(exponent_of(largest_of_block)));
    }
    total = sum_of_threads(total);
    nonzeros = sum_of_threads(nonzeros);
    scale = mean_scale(total, largest_of_block, size_of_block(own, start), nonzeros, a.wire.format.bits, is_short);
  }

  largest = 0;
  for (int64_t offset = start + threadIdx.x * kGroup; offset < stop; offset += kStride) {
    const int64_t element = own.start + offset;
    const int valid = num_valid(own, offset);
    read(offset);
    write_codes<0>(
        at(a.wire, row), a.wire.format, own, offset, valid, scale, noise_at(a, row, element), values, sent);
    if constexpr (kCompensates) {
      move_error(a, values, sent, error);
      for (int i = 0; i < kGroup; i++) error[i] = i < valid ? error[i] : 0.f;
      largest = max_nan(largest, largest_magnitude(error));
      if (a.new_error.data != nullptr && item.error.block_size == 0 && valid > 0) {
        store_plain(error, a.new_error, item.error, row, element, valid);
      }
    }
  }
  if constexpr (kCompensates) {
    if (a.new_error.data != nullptr && item.error.block_size != 0) {
      const float error_scale = scale_of(largest_of_threads(largest), qmax_of(8), false);
      for (int64_t offset = start + threadIdx.x * kGroup; offset < stop; offset += kStride) {
        const int64_t element = own.start + offset;
        const int valid = num_valid(own, offset);
        read(offset);
        uint32_t low, high;
        quantize<0>(values, valid, scale, a.wire.format, noise_at(a, row, element), low, high);
        dequantize(low, high, levels_of(scale, a.wire.format.is_mean), sent);
        move_error(a, values, sent, error);
        for (int i = 0; i < kGroup; i++) error[i] = i < valid ? error[i] : 0.f;
        write_codes<8>(
            at(a.new_error, row), a.new_error.format, item.error, offset, valid, error_scale, Noise{}, error, sent);
      }
    }
  }
  if (block == 0 && threadIdx.x == 0) write_gaps(a, item, row);
}

// ---- Decoding.

template <int kBits, class Out>
__global__ void __launch_bounds__(kThreads) decode_tiles(const __grid_constant__ Launch<DecodeArguments> launch) {
  const DecodeArguments& a = launch.arguments;
  const Item& item = item_of_block(launch);
  const Row row = row_of_block(a.rows1);
  const int64_t first = (blockIdx.x - item.first_tile) * kDecodesInFlight * kStride + threadIdx.x * kGroup;
#pragma unroll
  for (int j = 0; j < kDecodesInFlight; j++) {
    const int64_t offset = first + j * kStride, element = item.own.start + offset;
    const int valid = num_valid(item.own, offset);
    if (valid == 0) continue;
    float values[kGroup];
    read_sum<kBits>(a.peers, item.own, row, element, valid, values);
    uint8_t* out = at(a.out, row, element);
    if (a.accumulates) {
      float addend[kGroup];
      load_as<Out>(out, valid, addend);
      add(values, addend);
    }
    store_as<Out>(values, valid, out);
  }
}

// ---- Rotation: a group of 32 elements is in the 32 threads of a warp, one each.

__global__ void __launch_bounds__(kThreads) rotate_tiles(const __grid_constant__ Launch<RotateArguments> launch) {
  const RotateArguments& a = launch.arguments;
  const Item& item = item_of_block(launch);
  const Row row = row_of_block(a.rows1);
  const int64_t numel = item.own.stop - item.own.start, tile = (blockIdx.x - item.first_tile) * kStride;
#pragma unroll
  for (int64_t offset = tile + threadIdx.x; offset < tile + kStride; offset += kThreads) {
    const bool exists = offset < numel;
    const int64_t element = item.own.start + offset;
    float value = 0;
    if (exists) {
      const uint8_t* from = at(a.values, row, element);
      if (a.values.type == Type::kFloat) value = *reinterpret_cast<const float*>(from);
      else if (a.values.type == Type::kBFloat16) value = to_float(*reinterpret_cast<const BFloat16*>(from));
      else value = to_float(*reinterpret_cast<const Half*>(from));
    }
    float rotated = value;
#pragma unroll
    for (int width = 1; width < 32; width *= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, rotated, width);
      rotated = threadIdx.x & width ? other - rotated : rotated + other;
    }
    const bool whole = item.own.block_size != 0 && offset / 32 * 32 + 32 <= numel;
    if (exists) *reinterpret_cast<float*>(at(a.out, row, element)) = whole ? rotated * kHadamardScale : value;
  }
}

// ---- Launches.

bool fits_a_warp(const Segment& segment) {
  const int64_t size = segment.block_size;
  return size <= kLargestWarpBlock && (size & (size - 1)) == 0;  // 0, unquantized, too
}

// Runs a kernel over the segments of a format that it is for, as many at a time as fit its parameters.
template <class Arguments, class Wanted, class Tiles>
int launch(void (*kernel)(Launch<Arguments>), const Arguments& a, const Format& format, const Format* source,
           const Format* error, cudaStream_t stream, Wanted wanted, Tiles tiles_of) {
  static_assert(sizeof(Launch<Arguments>) <= kLaunchBytes);
  Launch<Arguments> launch{a};
  int64_t tiles = 0;
  for (int s = 0; s < format.num_segments; s++) {
    const Segment& own = format.segments[s];
    if (wanted(own)) {
      launch.items[launch.num_items++] = {
          own, source ? segment_at(*source, own.start) : own, error ? segment_at(*error, own.start) : own, tiles};
      tiles += tiles_of(own);
    }
    if (tiles > 0 && (launch.num_items == kSegments || s + 1 == format.num_segments)) {
      const dim3 grid(unsigned(tiles), unsigned(a.rows0 * a.rows1));
      void* parameters[] = {&launch};
      const cudaError_t status = cudaLaunchKernel(kernel, grid, dim3(kThreads), parameters, 0, stream);
      if (status != cudaSuccess) return status;
      launch.num_items = 0, tiles = 0;
    }
  }
  return cudaSuccess;
}

template <int kInFlight>
int64_t num_tiles(const Segment& segment) {
  return (segment.stop - segment.start + kInFlight * kStride - 1) / (kInFlight * kStride);
}

int64_t num_blocks(const Segment& segment) {
  return (segment.stop - segment.start + segment.block_size - 1) / segment.block_size;
}

// The kBits of a kernel made for this format; 0 = the general one.
int compiled_bits(const Format& format) {
  const bool exists = format.is_mean ? format.bits == 2 : format.bits == 4 || format.bits == 8;
  return exists ? format.bits : 0;
}

template <Source kSource, bool kCompensates>
int encode_from(const EncodeArguments& a, cudaStream_t stream) {
  const Format* source = kSource == Source::kWires ? &a.peers.format : nullptr;
  const Format* error = kCompensates ? &a.error.format : nullptr;
  constexpr int kInFlight = kEncodesInFlight<kSource, kCompensates>;
  auto* tiles = encode_tiles<0, kSource, kCompensates>;
  const int bits = a.stochastic ? 0 : compiled_bits(a.wire.format);
  if (bits == 8) tiles = encode_tiles<8, kSource, kCompensates>;
  if (bits == 4) tiles = encode_tiles<4, kSource, kCompensates>;
  if (bits == 2) tiles = encode_tiles<2, kSource, kCompensates>;
  const int status = launch(tiles, a, a.wire.format, source, error, stream, fits_a_warp, num_tiles<kInFlight>);
  if (status != cudaSuccess) return status;
  auto* blocks = encode_blocks<kSource, kCompensates>;
  const auto others = [](const Segment& segment) { return !fits_a_warp(segment); };
  return launch(blocks, a, a.wire.format, source, error, stream, others, num_blocks);
}

template <Source kSource>
int encode_with(const EncodeArguments& a, cudaStream_t stream) {
  return a.compensates ? encode_from<kSource, true>(a, stream) : encode_from<kSource, false>(a, stream);
}

template <class Out>
int decode_to(const DecodeArguments& a, cudaStream_t stream) {
  auto* tiles = decode_tiles<0, Out>;
  const int bits = compiled_bits(a.peers.format);
  if (bits == 8) tiles = decode_tiles<8, Out>;
  if (bits == 4) tiles = decode_tiles<4, Out>;
  if (bits == 2) tiles = decode_tiles<2, Out>;
  const auto all = [](const Segment&) { return true; };
  return launch(tiles, a, a.peers.format, nullptr, nullptr, stream, all, num_tiles<kDecodesInFlight>);
}

}  // namespace

int encode(const EncodeArguments& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (a.rows0 * a.rows1 == 0) return cudaSuccess;
  if (a.values.data == nullptr) return encode_with<Source::kWires>(a, on);
  if (a.values.type == Type::kFloat) return encode_with<Source::kFloat>(a, on);
  return encode_with<Source::k16Bit>(a, on);
}

int decode(const DecodeArguments& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (a.rows0 * a.rows1 == 0) return cudaSuccess;
  if (a.out.type == Type::kFloat) return decode_to<float>(a, on);
  if (a.out.type == Type::kBFloat16) return decode_to<BFloat16>(a, on);
  return decode_to<Half>(a, on);
}

int rotate(const RotateArguments& a, void* stream) {
  if (a.rows0 * a.rows1 == 0) return cudaSuccess;
  const auto all = [](const Segment&) { return true; };
  return launch(rotate_tiles, a, a.format, nullptr, nullptr, static_cast<cudaStream_t>(stream), all, num_tiles<1>);
}

}  // namespace zeropp::cuda
