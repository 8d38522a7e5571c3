// The kernels on a GPU. A thread works on groups of 8 elements, 16 bytes of bf16, and issues the loads of several groups, or
// of what several peers sent of one, before it uses the first. A block's maximum goes through warp shuffles. Nothing is
// atomic, nothing waits for the host.
//
// The wire formats are passed as kernel parameters. This file includes nothing of torch: nvcc alone compiles it.

#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>
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
constexpr int64_t kLargestGrid = 0x7fffffff;    // blocks

// One segment of the format that a kernel goes through, and where its elements are in other wires.
struct Item {
  Segment own, source, error;
  int64_t first_tile;  // of the launch's tiles of a row, the first of this segment
};

template <class Arguments>
struct Launch {
  Arguments arguments;
  uint32_t tiles = 0;  // of a row; all rows are in grid.x, since grid.y ends at 65,535
  int num_items = 0;
  Item items[kSegments];
};

template <class Arguments>
__device__ int64_t tile_of_block(const Launch<Arguments>& launch) {
  return blockIdx.x % launch.tiles;
}

template <class Arguments>
__device__ const Item& item_of_block(const Launch<Arguments>& launch) {
  int i = 0;
  while (i + 1 < launch.num_items && tile_of_block(launch) >= launch.items[i + 1].first_tile) i++;
  return launch.items[i];
}

struct Row {
  int64_t row0, row1;
};

template <class Arguments>
__device__ Row row_of_block(const Launch<Arguments>& launch) {
  const uint32_t row = blockIdx.x / launch.tiles, rows1 = uint32_t(launch.arguments.rows1);
  return {row / rows1, row % rows1};
}

__device__ uint8_t* at(const Wires& wires, const Row& row) {
  return wires.data + row.row0 * wires.stride0 + row.row1 * wires.stride1;
}

__device__ uint8_t* at(const Rows& rows, const Row& row, int64_t element) {
  const int64_t offset = row.row0 * rows.stride0 + row.row1 * rows.stride1 + element;
  return static_cast<uint8_t*>(rows.data) + offset * size_of(rows.type);
}

// ---- Groups of 8 elements in dense memory. They begin anywhere, since parameters of one dimension shift those behind them,
// and all of a warp equally far from a multiple of 16 bytes. A thread reads the aligned vectors that hold its group, and
// moves the words; what it writes are aligned vectors, too, for which it takes over elements of the next thread. `valid`
// elements exist; others are zero, and are not written.

// Aligned vectors, the group in them, and the bytes before it.
template <int kWords>
struct Vectors {
  uint32_t words[kWords];
  uint32_t before;
};

template <class T>
constexpr int kGroupWords = kGroup * sizeof(T) / 4;
template <class T>
using VectorsOf = Vectors<kGroupWords<T> + 4>;

// The vectors with the bytes [from, from + nbytes); no others are touched.
template <int kWords>
__device__ void fetch(const uint8_t* from, int nbytes, Vectors<kWords>& vectors) {
  vectors.before = uint32_t(reinterpret_cast<uintptr_t>(from) % 16);
  const int stop = nbytes > 0 ? int(vectors.before) + nbytes : 0;
#pragma unroll
  for (int v = 0; v < kWords / 4; v++) {
    uint4 vector = make_uint4(0, 0, 0, 0);
    if (16 * v < stop) vector = reinterpret_cast<const uint4*>(from - vectors.before)[v];
    vectors.words[4 * v] = vector.x, vectors.words[4 * v + 1] = vector.y;
    vectors.words[4 * v + 2] = vector.z, vectors.words[4 * v + 3] = vector.w;
  }
}

template <int width, int kWords>
__device__ void drop_words(uint32_t (&words)[kWords], bool drops) {
#pragma unroll
  for (int i = 0; i + width < kWords; i++) words[i] = drops ? words[i + width] : words[i];
}

// Drops the first bytes, an even number below 16.
template <int kWords>
__device__ void drop(uint32_t (&words)[kWords], uint32_t bytes) {
  drop_words<2>(words, bytes & 8);
  drop_words<1>(words, bytes & 4);
#pragma unroll
  for (int i = 0; i + 1 < kWords; i++) words[i] = bytes & 2 ? words[i] >> 16 | words[i + 1] << 16 : words[i];
}

template <class T, int kWords>
__device__ T element_of(const uint32_t (&words)[kWords], int i) {
  if constexpr (sizeof(T) == 4) return float_of(words[i]);
  else return T{uint16_t(words[i / 2] >> (16 * (i % 2)))};
}

template <class T, int kWords>
__device__ void read_as(Vectors<kWords> vectors, int valid, float (&values)[kGroup]) {
  if (vectors.before != 0) drop(vectors.words, vectors.before);
#pragma unroll
  for (int i = 0; i < kGroup; i++) values[i] = i < valid ? to_float(element_of<T>(vectors.words, i)) : 0.f;
}

template <int kWords>
__device__ void read(const Vectors<kWords>& vectors, Type type, int valid, float (&values)[kGroup]) {
  if constexpr (kWords == kGroupWords<float> + 4) {
    if (type == Type::kFloat) return read_as<float>(vectors, valid, values);
  }
  if (type == Type::kBFloat16) read_as<BFloat16>(vectors, valid, values);
  else read_as<Half>(vectors, valid, values);
}

// All threads of a warp come here together.
template <class T>
__device__ void store_as(const float (&values)[kGroup], int valid, void* data) {
  constexpr int kWords = kGroupWords<T>;
  uint32_t words[2 * kWords];
#pragma unroll
  for (int i = 0; i < kGroup; i++) {
    T element;
    from_float(values[i], element);
    if constexpr (sizeof(T) == 4) words[i] = bits_of(element);
    else words[i / 2] = i % 2 ? words[i / 2] | uint32_t(element.bits) << 16 : element.bits;
  }
  T* to = static_cast<T*>(data);
  const uint32_t before = uint32_t(reinterpret_cast<uintptr_t>(to) % 16);
  const int left = before == 0 ? 0 : int(16 - before) / int(sizeof(T));  // to the thread before, or to nobody
  int stored = valid - left;
  if (before != 0) {
    const uint32_t lane = threadIdx.x % 32;
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < 16 / int(sizeof(T)); i++) {
        if (i < left && i < valid) to[i] = element_of<T>(words, i);
      }
    }
    const int next_valid = __shfl_down_sync(0xffffffffu, valid, 1);
    if (lane < 31) stored += next_valid < left ? next_valid : left;
#pragma unroll
    for (int i = 0; i < kWords; i++) words[kWords + i] = __shfl_down_sync(0xffffffffu, words[i], 1);
    drop(words, 16 - before);
  }
  to += left;
  if (stored == kGroup) {
#pragma unroll
    for (int v = 0; v < kWords / 4; v++) {
      const uint32_t* of = words + 4 * v;
      reinterpret_cast<uint4*>(to)[v] = make_uint4(of[0], of[1], of[2], of[3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; i++) {
      if (i < stored) to[i] = element_of<T>(words, i);
    }
  }
}

__device__ void store(const float (&values)[kGroup], Type type, int valid, void* to) {
  if (type == Type::kFloat) store_as<float>(values, valid, to);
  else if (type == Type::kBFloat16) store_as<BFloat16>(values, valid, to);
  else store_as<Half>(values, valid, to);
}

// ---- Scales of elements: 8 exponents a thread, which begin at any byte. A thread reads the aligned words that hold them.

struct Bytes {
  uint2 first, second;  // aligned
  uint32_t before;      // bytes before the group
};

__device__ uint8_t* at(const Exponents& exponents, const Row& row, int64_t element) {
  return exponents.data + row.row0 * exponents.stride0 + row.row1 * exponents.stride1 + element;
}

__device__ void fetch(const uint8_t* from, int nbytes, Bytes& bytes) {
  bytes.before = uint32_t(reinterpret_cast<uintptr_t>(from) % 8);
  bytes.first = bytes.second = make_uint2(0, 0);
  const uint2* words = reinterpret_cast<const uint2*>(from - bytes.before);
  if (nbytes > 0) bytes.first = words[0];
  if (int(bytes.before) + nbytes > 8) bytes.second = words[1];
}

__device__ uint64_t word_of(uint2 word) { return word.x | uint64_t(word.y) << 32; }

__device__ uint64_t read(const Bytes& bytes) {
  const uint32_t bits = 8 * bytes.before;
  return bits == 0 ? word_of(bytes.first) : word_of(bytes.first) >> bits | word_of(bytes.second) << (64 - bits);
}

__device__ uint32_t byte_of(uint64_t bytes, int i) { return uint32_t(bytes >> (8 * i)) & 0xff; }

// All threads of a warp come here together. What is written are aligned words: a thread takes over from the next one.
__device__ void store(uint64_t bytes, int valid, uint8_t* to) {
  const uint32_t before = uint32_t(reinterpret_cast<uintptr_t>(to) % 8), lane = threadIdx.x % 32;
  const int left = before == 0 ? 0 : int(8 - before);  // to the thread before, or to nobody
  int stored = valid - left;
  if (before != 0) {
    for (int i = 0; lane == 0 && i < left && i < valid; i++) to[i] = uint8_t(byte_of(bytes, i));
    const int next_valid = __shfl_down_sync(0xffffffffu, valid, 1);
    if (lane < 31) stored += next_valid < left ? next_valid : left;
    const uint32_t low = __shfl_down_sync(0xffffffffu, uint32_t(bytes), 1);
    const uint32_t high = __shfl_down_sync(0xffffffffu, uint32_t(bytes >> 32), 1);
    bytes = bytes >> (8 * left) | (low | uint64_t(high) << 32) << (64 - 8 * left);
  }
  to += left;
  if (stored == kGroup) *reinterpret_cast<uint2*>(to) = make_uint2(uint32_t(bytes), uint32_t(bytes >> 32));
  else for (int i = 0; i < stored; i++) to[i] = uint8_t(byte_of(bytes, i));
}

// The 16 words lie in 16 banks of shared memory: no two threads of a warp wait for each other.
struct Sixteenths {
  uint32_t words[16];

  __device__ void fill() {
    if (threadIdx.x < 16) words[threadIdx.x] = kSixteenths[threadIdx.x];
    __syncthreads();
  }
  __device__ float scale(uint64_t exponents, int i) const { return scale_of_exponent(byte_of(exponents, i), words); }
};

// What a receiver makes of a value that is sent as it is.
__device__ float rounded_to(Type type, float value) {
  BFloat16 bfloat16;
  Half half;
  from_float(value, bfloat16);
  from_float(value, half);
  return type == Type::kFloat ? value : type == Type::kBFloat16 ? to_float(bfloat16) : to_float(half);
}

// ---- Codes of a group, `bits` bytes on the wire. kBits = 0: bits and code known at run time only; kBits = 1 is the
// code "largest", 2 "mean", 4 and 8 are "absmax".

template <int kBits>
__device__ bool is_mean(const Format& format) {
  return kBits ? kBits == 2 : format.is_mean;
}

template <int kBits>
__device__ int code_bits(const Format& format) {
  return kBits ? kBits : format.bits;
}

__device__ float load_scale(const uint8_t* scale, int bytes) {
  if (bytes == 4) return *reinterpret_cast<const float*>(scale);
  return to_float(*reinterpret_cast<const BFloat16*>(scale));
}

__device__ void store_scale(float scale, uint8_t* scales, uint32_t block, int bytes) {
  if (bytes == 4) reinterpret_cast<float*>(scales)[block] = scale;
  else from_float(scale, reinterpret_cast<BFloat16*>(scales)[block]);  // exactly
}

// Codes are a byte each in two words.
template <int bits>
__device__ void store_codes_as(uint32_t low, uint32_t high, uint8_t* to) {
  if constexpr (bits == 8) {
    *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
  } else {
    const uint64_t stream = pack<bits>(low) | uint64_t(pack<bits>(high)) << (4 * bits);
    if constexpr (bits == 4) *reinterpret_cast<uint32_t*>(to) = uint32_t(stream);
    if constexpr (bits == 2) *reinterpret_cast<uint16_t*>(to) = uint16_t(stream);
    if constexpr (bits == 3 || bits == 6) {
#pragma unroll
      for (int i = 0; i < bits; i++) to[i] = uint8_t(stream >> (8 * i));
    }
  }
}

template <int bits>
__device__ uint64_t load_stream_as(const uint8_t* from) {
  if constexpr (bits == 8) {
    const uint2 raw = *reinterpret_cast<const uint2*>(from);
    return raw.x | uint64_t(raw.y) << 32;
  }
  if constexpr (bits == 4) return *reinterpret_cast<const uint32_t*>(from);
  if constexpr (bits == 2) return *reinterpret_cast<const uint16_t*>(from);
  uint64_t stream = 0;
#pragma unroll
  for (int i = 0; i < bits; i++) stream |= uint64_t(from[i]) << (8 * i);
  return stream;
}

template <int bits>
__device__ void read_stream_as(uint64_t stream, float (&codes)[kGroup]) {
  constexpr uint32_t half = uint32_t((uint64_t(1) << (4 * bits)) - 1);
  const uint32_t low = unpack<bits>(uint32_t(stream) & half), high = unpack<bits>(uint32_t(stream >> (4 * bits)) & half);
#pragma unroll
  for (int i = 0; i < kGroup; i++) codes[i] = code_value((i < 4 ? low : high) >> (8 * (i % 4)) & 0xff);
}

// work(the number of bits, as a constant). Codes of 1 bit are bytes once they are fetched.
template <int kBits, class Work>
__device__ void with_bits(int bits, const Work& work) {
  if constexpr (kBits != 0) {
    work(std::integral_constant<int, kBits>());
  } else {
    switch (bits) {
      case 2: return work(std::integral_constant<int, 2>());
      case 3: return work(std::integral_constant<int, 3>());
      case 4: return work(std::integral_constant<int, 4>());
      case 6: return work(std::integral_constant<int, 6>());
      default: return work(std::integral_constant<int, 8>());
    }
  }
}

// ---- Wires.

// Where a group is in a wire, in bytes: its codes or values, and its block's scale. `before`: groups of its block, which has
// `block_size` elements, that come first.
struct Place {
  int64_t codes, scale;
  uint32_t before, block_size;
};

template <int kBits>
__device__ Place place_of(const Format& format, const Segment& segment, int64_t element) {
  const int64_t offset = element - segment.start;
  if (segment.block_size == 0) return {segment.codes + offset * size_of(format.type), 0, 0, 0};
  const uint32_t size = uint32_t(segment.block_size), group = uint32_t(offset / kGroup), block = group / (size / kGroup);
  return {segment.codes + int64_t(group) * code_bits<kBits>(format), segment.scales + int64_t(block) * format.scale_bytes,
          group - block * (size / kGroup), size};
}

// A group as it arrived; of 1 bit, its codes.
struct Encoded {
  uint64_t stream;
  float scale;
};

// 32 bits of a stream, from any bit on.
__device__ uint32_t bits_at(const uint8_t* stream, uint32_t bit) {
  const uintptr_t byte = reinterpret_cast<uintptr_t>(stream + bit / 8);
  const uint32_t* words = reinterpret_cast<const uint32_t*>(byte / 4 * 4);
  const uint32_t shift = 8 * uint32_t(byte % 4) + bit % 8;
  return shift == 0 ? words[0] : words[0] >> shift | words[1] << (32 - shift);
}

// The codes of a group of 1 bit, a byte each. Each thread reads its block's stream (quantization.py, pack_largest) from its
// beginning to the group, and up to 7 bytes more than the stream, which a wire always has: scales follow.
__device__ uint64_t find_largest(const uint8_t* stream, uint32_t block_size, int first) {
  uint64_t codes = 0;
  int place = -1;
  for (uint32_t symbol = 0, at = 0; at < block_size;) {
    uint32_t bits = bits_at(stream, at);
    at += bits ? __ffs(bits) - 1 : 32;
    if (!bits || at >= block_size) continue;
    bits = bits_at(stream, at);
    place += 4 * int(at - symbol) + int(bits >> 1 & 3) + 1;
    if (place >= first + kGroup) break;
    if (place >= first) codes |= uint64_t(bits & 8 ? 0xff : 1) << (8 * (place - first));
    symbol = at += 4;
  }
  return codes;
}

template <int kBits>
__device__ void fetch_codes(const uint8_t* wire, const Format& format, const Place& place, Encoded& group) {
  if (code_bits<kBits>(format) == 1) {
    group.stream = find_largest(wire + place.codes - place.before, place.block_size, int(place.before) * kGroup);
  } else {
    with_bits<kBits>(format.bits, [&](auto bits) {
      group.stream = load_stream_as<decltype(bits)::value>(wire + place.codes);
    });
  }
  group.scale = load_scale(wire + place.scale, format.scale_bytes);
}

template <int kBits>
__device__ void read_codes(const Encoded& group, const Format& format, int valid, float (&values)[kGroup]) {
  const Levels levels = levels_of(group.scale, is_mean<kBits>(format));
  with_bits<kBits>(format.bits, [&](auto bits) { read_stream_as<decltype(bits)::value>(group.stream, values); });
#pragma unroll
  for (int i = 0; i < kGroup; i++) values[i] = i < valid ? value_of(values[i], levels) : 0.f;
}

__device__ void add(float (&values)[kGroup], const float (&addend)[kGroup]) {
#pragma unroll
  for (int i = 0; i < kGroup; i++) values[i] += addend[i];
}

// Peers whose loads a thread issues before it uses the first.
constexpr int kPlainPeers = 4;
template <int kBits>
constexpr int kPeers = kBits == 0 ? 4 : kBits == 8 ? 8 : 16;

// The sum of what all peers sent of a group, in their order.
template <int kBits>
__device__ void read_sum(const Wires& wires, const Segment& segment, const Row& row, int64_t element, int valid,
                         float (&values)[kGroup]) {
#pragma unroll
  for (int i = 0; i < kGroup; i++) values[i] = -0.f;  // which changes nothing that is added to it
  if (valid == 0) return;
  const Format& format = wires.format;
  const Place place = place_of<kBits>(format, segment, element);
  const auto add_peers = [&](auto at_once, auto group, const auto& fetch_from, const auto& read_it) {
    constexpr int kAtOnce = decltype(at_once)::value;
    const uint8_t* wire = at(wires, row);
#pragma unroll 1
    for (int left = wires.num_peers; left > 0; left -= kAtOnce) {
      decltype(group) groups[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; j++) {
        if (j < left) fetch_from(wire + j * wires.peer_stride, groups[j]);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; j++) {
        if (j < left) {
          float addend[kGroup];
          read_it(groups[j], addend);
          add(values, addend);
        }
      }
      wire += kAtOnce * wires.peer_stride;
    }
  };
  if (segment.block_size == 0) {
    add_peers(
        std::integral_constant<int, kPlainPeers>(), VectorsOf<float>(),
        [&](const uint8_t* wire, auto& group) { fetch(wire + place.codes, valid * int(size_of(format.type)), group); },
        [&](const auto& group, auto& addend) { read(group, format.type, valid, addend); });
  } else {
    add_peers(
        std::integral_constant<int, kPeers<kBits>>(), Encoded(),
        [&](const uint8_t* wire, auto& group) { fetch_codes<kBits>(wire, format, place, group); },
        [&](const auto& group, auto& addend) { read_codes<kBits>(group, format, valid, addend); });
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

// The maximum of magnitudes that keeps a NaN: one instruction from sm_80 on. Elsewhere bits are compared, which order
// magnitudes and put NaNs above them.
__device__ float max_nan(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
#else
  return float_of(bits_of(a) > bits_of(b) ? bits_of(a) : bits_of(b));
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

// Codes of a group of a block with this scale, each plus kIntegers.
__device__ void quantize_by_absmax(
    const float (&values)[kGroup], float scale, int qmax, const Noise& noise, float (&codes)[kGroup]) {
  if (has_reciprocal(scale) && !noise.wanted) {
    const float reciprocal = 1 / scale;
#pragma unroll
    for (int i = 0; i < kGroup; i++) codes[i] = quotient_of(values[i], scale, reciprocal) + kIntegers;
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; i++) {
      codes[i] = noise.wanted
                     ? round_quotient(values[i], scale, qmax, counter_uniform(noise.index + i, noise.seed))
                     : round_quotient(values[i], scale, qmax);
      codes[i] += kIntegers;
    }
  }
}

__device__ void quantize_by_mean(const float (&values)[kGroup], int valid, float scale, int qmax, const Noise& noise,
                                 float (&codes)[kGroup]) {
  const Levels levels = levels_of(scale, true);
  const float reciprocal = 1 / levels.scale;
#pragma unroll
  for (int i = 0; i < kGroup; i++) {
    const float uniform = noise.wanted && i < valid ? counter_uniform(noise.index + i, noise.seed) : 0.5f;
    codes[i] = (levels.scale > 0 ? mean_code(values[i], reciprocal, levels, qmax, uniform) : 0.f) + kIntegers;
  }
}

// Codes as bytes in two words, and what arrives of them.
template <int kBits>
__device__ void quantize(const float (&values)[kGroup], int valid, float scale, const Format& format, const Noise& noise,
                         uint32_t& low, uint32_t& high, float (&sent)[kGroup]) {
  const int qmax = qmax_of(code_bits<kBits>(format));
  float codes[kGroup];
  if (is_mean<kBits>(format)) quantize_by_mean(values, valid, scale, qmax, noise, codes);
  else quantize_by_absmax(values, scale, qmax, noise, codes);
  const auto bytes = [](float a, float b, float c, float d) {
    const uint32_t first = __byte_perm(bits_of(a), bits_of(b), 0x0040);
    return __byte_perm(first, __byte_perm(bits_of(c), bits_of(d), 0x0040), 0x5410);
  };
  low = bytes(codes[0], codes[1], codes[2], codes[3]);
  high = bytes(codes[4], codes[5], codes[6], codes[7]);
  const Levels levels = levels_of(scale, is_mean<kBits>(format));
#pragma unroll
  for (int i = 0; i < kGroup; i++) sent[i] = value_of(codes[i] - kIntegers, levels);
}

// ---- Code "largest", of 1 bit: the largest fifth of a block's values, of equal ones the first.

constexpr int kLargestOneBitBlock = 4096;  // elements: config.py

__device__ uint32_t count_from(const float (&values)[kGroup], uint32_t least) {
  uint32_t count = 0;
#pragma unroll
  for (int i = 0; i < kGroup; i++) count += magnitude_of(values[i]) >= least;
  return count;
}

// The least magnitude that is taken, found bit by bit. count(least): the block's values at or above it.
template <class Count>
__device__ uint32_t least_taken(int64_t block_size, const Count& count) {
  uint32_t least = 0;
#pragma unroll 1
  for (uint32_t bit = 1u << 30; bit > 0; bit >>= 1) least |= count(least | bit) >= block_size / 5 ? bit : 0;
  return least > 0 ? least : 1;
}

// Codes of a group, a byte each. room: how many that equal the least may still be taken.
__device__ uint64_t take_largest(const float (&values)[kGroup], uint32_t least, int64_t room) {
  uint64_t codes = 0;
#pragma unroll
  for (int i = 0; i < kGroup; i++) {
    const uint32_t magnitude = magnitude_of(values[i]);
    const bool is_taken = magnitude > least || (magnitude == least && room > 0);
    if (is_taken) codes |= uint64_t(bits_of(values[i]) >> 31 ? 0xff : 1) << (8 * i);
    room -= magnitude == least;
  }
  return codes;
}

__device__ uint32_t total_of_taken(const float (&values)[kGroup], uint64_t codes, float units) {
  uint32_t total = 0;
#pragma unroll
  for (int i = 0; i < kGroup; i++) total += byte_of(codes, i) ? in_units(values[i], units) : 0;
  return total;
}

__device__ void values_of(uint64_t codes, float scale, float (&sent)[kGroup]) {
#pragma unroll
  for (int i = 0; i < kGroup; i++) sent[i] = value_of(code_value(uint8_t(byte_of(codes, i))), levels_of(scale, false));
}

// Packs a block as quantization.py's pack_largest does.
__device__ void pack_largest(const uint8_t* codes, int block_size, uint8_t* stream) {
  const uint8_t* stop = stream + block_size / 8;
  uint32_t bits = 0;  // not yet written, `filled` of them
  for (int i = 0, last = -1, filled = 0; i < block_size; i++) {
    if (codes[i] == 0) continue;
    const uint32_t gap = uint32_t(i - last - 1);
    for (filled += int(gap >> 2); filled >= 8; filled -= 8, bits >>= 8) *stream++ = uint8_t(bits);
    bits |= (1 | (gap & 3) << 1 | uint32_t(codes[i] >> 7) << 3) << filled;
    filled += 4, last = i;
  }
  for (; stream < stop; bits >>= 8) *stream++ = uint8_t(bits);
}

// ---- Encoding: what a thread does with a group, in the order in which it does it.

enum class Source { kFloat, k16Bit, kWires8, kWires };  // kWires8: in 8 bits, as within nodes by default

ZEROPP_INLINE constexpr bool is_wires(Source source) { return source == Source::kWires8 || source == Source::kWires; }

// Groups whose loads a thread issues before it uses the first. One has several loads already where there are peers or
// errors, and more would not fit the registers.
template <Source kSource, bool kCompensates>
constexpr int kEncodesInFlight = is_wires(kSource) || kCompensates ? 1 : 2;
constexpr int kDecodesInFlight = 2;

// What a group is encoded from, as it is in memory; of peers' wires, nothing yet. kScaled, 0 or 1: with scales of elements.
template <Source kSource>
struct Fetched {
  Vectors<kSource == Source::kFloat ? kGroupWords<float> + 4 : kGroupWords<Half> + 4> values;
  VectorsOf<float> addend, plain_error;
  Encoded error;  // in 8 bits, where it is not kept as it is
  Bytes exponents;
};

template <Source kSource, bool kCompensates, int kScaled>
__device__ void fetch_group(
    const EncodeArguments& a, const Item& item, const Row& row, int64_t element, int valid, Fetched<kSource>& group) {
  if constexpr (!is_wires(kSource)) {
    fetch(at(a.values, row, element), valid * (kSource == Source::kFloat ? 4 : 2), group.values);
  }
  if constexpr (kScaled) fetch(at(a.exponents, row, element), valid, group.exponents);
  if (a.addend.data != nullptr) fetch(at(a.addend, row, element), valid * int(size_of(a.addend.type)), group.addend);
  if constexpr (kCompensates) {
    if (a.error.data != nullptr && valid > 0) {
      const Place place = place_of<8>(a.error.format, item.error, element);
      const uint8_t* wire = at(a.error, row);
      if (item.error.block_size != 0) fetch_codes<8>(wire, a.error.format, place, group.error);
      else fetch(wire + place.codes, valid * int(size_of(a.error.format.type)), group.plain_error);
    }
  }
}

// The values to encode, errors included, and the errors. Returns a bit for each element that has no gradient.
template <Source kSource, bool kCompensates>
__device__ uint32_t read_group(const EncodeArguments& a, const Item& item, const Row& row, int64_t element, int valid,
                           const Fetched<kSource>& group, float (&values)[kGroup], float (&error)[kGroup]) {
  if constexpr (kSource == Source::kWires8) read_sum<8>(a.peers, item.source, row, element, valid, values);
  else if constexpr (kSource == Source::kWires) read_sum<0>(a.peers, item.source, row, element, valid, values);
  else if constexpr (kSource == Source::kFloat) read_as<float>(group.values, valid, values);
  else read(group.values, a.values.type, valid, values);
  if (a.addend.data != nullptr) {
    float addend[kGroup];
    read(group.addend, a.addend.type, valid, addend);
#pragma unroll
    for (int i = 0; i < kGroup; i++) values[i] += addend[i];
  }
  uint32_t zeros = 0;
  if constexpr (kCompensates) {
#pragma unroll
    for (int i = 0; i < kGroup; i++) zeros |= uint32_t(values[i] == 0) << i;
#pragma unroll
    for (int i = 0; i < kGroup; i++) error[i] = 0;
    if (a.error.data != nullptr && valid > 0) {
      if (item.error.block_size != 0) read_codes<8>(group.error, a.error.format, valid, error);
      else read(group.plain_error, a.error.format.type, valid, error);
    }
    add(values, error);
  }
  return zeros;
}

// Values in units of their elements' scales, and back. An element without a gradient is sent as 0: its error waits.
__device__ void divide(const float (&values)[kGroup], uint32_t zeros, uint64_t exponents, const Sixteenths& sixteenths,
                       float (&divided)[kGroup]) {
#pragma unroll
  for (int i = 0; i < kGroup; i++) divided[i] = zeros >> i & 1 ? 0.f : values[i] / sixteenths.scale(exponents, i);
}

__device__ void multiply(float (&values)[kGroup], uint64_t exponents, const Sixteenths& sixteenths) {
#pragma unroll
  for (int i = 0; i < kGroup; i++) values[i] *= sixteenths.scale(exponents, i);
}

// Replaces the error by the new one; ``values`` are compensated, ``sent`` what arrives of them.
__device__ void move_error(const EncodeArguments& a, const float (&values)[kGroup], const float (&sent)[kGroup],
                           int valid, float (&error)[kGroup]) {
#pragma unroll
  for (int i = 0; i < kGroup; i++) {
    error[i] = i < valid ? moved_error(error[i], values[i], sent[i], a.averaging) : 0.f;
  }
}

// Writes values that are sent as they are.
__device__ void store_plain(const float (&values)[kGroup], const Wires& wires, const Segment& segment, const Row& row,
                            int64_t element, int valid) {
  const Type type = wires.format.type;
  store(values, type, valid, at(wires, row) + segment.codes + (element - segment.start) * size_of(type));
}

template <bool kCompensates>
__device__ void write_plain(const EncodeArguments& a, const Item& item, const Row& row, int64_t element, int valid,
                            const float (&values)[kGroup], float (&error)[kGroup]) {
  store_plain(values, a.wire, item.own, row, element, valid);
  if constexpr (kCompensates) {
    if (a.new_error.data == nullptr) return;
    float sent[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; i++) sent[i] = rounded_to(a.wire.format.type, values[i]);
    move_error(a, values, sent, valid, error);
    store_plain(error, a.new_error, item.error, row, element, valid);
  }
}

// Codes of a group, and the scale if the group is its block's first. Returns in ``sent`` what arrives.
template <int kBits>
__device__ void write_codes(uint8_t* wire, const Format& format, const Segment& segment, int64_t offset, int valid,
                            float scale, const Noise& noise, const float (&values)[kGroup], float (&sent)[kGroup]) {
  uint32_t low, high;
  quantize<kBits>(values, valid, scale, format, noise, low, high, sent);
  const uint32_t group = uint32_t(offset / kGroup), groups_per_block = uint32_t(segment.block_size) / kGroup;
  uint8_t* to = wire + segment.codes + int64_t(group) * code_bits<kBits>(format);
  with_bits<kBits>(format.bits, [&](auto bits) { store_codes_as<decltype(bits)::value>(low, high, to); });
  if (group % groups_per_block == 0) {
    store_scale(scale, wire + segment.scales, group / groups_per_block, format.scale_bytes);
  }
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

// Whether the element, counted from the segment's first, is in one of its blocks.
__device__ bool is_in_block(const Segment& segment, int64_t offset) {
  return offset < (segment.stop - segment.start + segment.block_size - 1) / segment.block_size * segment.block_size;
}

// The scale that the block at `offset` has already, or 0.
__device__ float kept_scale(const EncodeArguments& a, const Segment& own, const Row& row, int64_t offset) {
  if (a.kept.data == nullptr || own.block_size == 0 || !is_in_block(own, offset)) return 0;
  const int bytes = a.kept.format.scale_bytes;
  return load_scale(at(a.kept, row) + own.scales + offset / own.block_size * bytes, bytes);
}

template <int kBits, bool kMayKeep>
__device__ float absmax_scale(const EncodeArguments& a, uint32_t largest, float kept) {
  const int qmax = qmax_of(code_bits<kBits>(a.wire.format));
  const bool keeps_scales = kMayKeep && a.keeps_scales;
  if (keeps_scales && keeps(kept, largest, qmax)) return kept;
  return scale_of(largest, keeps_scales ? fresh_level(qmax) : float(qmax), a.wire.format.scale_bytes == 2);
}

// Blocks of 8 to 256 elements, a power of two: each is in the registers of some threads of one warp, a team.
// With scales of elements one thread block a multiprocessor is asked for, or sm_100's compiler keeps to 64 registers.
template <int kBits, Source kSource, bool kCompensates, int kScaled = 0>
__global__ void __launch_bounds__(kThreads, kScaled) encode_tiles(const __grid_constant__ Launch<EncodeArguments> launch) {
  const EncodeArguments& a = launch.arguments;
  const Item& item = item_of_block(launch);
  const Segment& own = item.own;
  const Row row = row_of_block(launch);
  constexpr int kInFlight = kEncodesInFlight<kSource, kCompensates>;
  const int64_t first = (tile_of_block(launch) - item.first_tile) * kInFlight * kStride + threadIdx.x * kGroup;

  Fetched<kSource> fetched[kInFlight];
#pragma unroll
  for (int j = 0; j < kInFlight; j++) {
    const int64_t offset = first + j * kStride;
    fetch_group<kSource, kCompensates, kScaled>(a, item, row, own.start + offset, num_valid(own, offset), fetched[j]);
  }
  __shared__ Sixteenths sixteenths;
  if constexpr (kScaled) sixteenths.fill();
  float kept[kInFlight];
#pragma unroll
  for (int j = 0; j < kInFlight; j++) kept[j] = kCompensates || kScaled ? 0 : kept_scale(a, own, row, first + j * kStride);
  float values[kInFlight][kGroup], error[kInFlight][kGroup];
  uint32_t zeros[kInFlight];
#pragma unroll
  for (int j = 0; j < kInFlight; j++) {
    const int64_t offset = first + j * kStride;
    zeros[j] = read_group<kSource, kCompensates>(
        a, item, row, own.start + offset, num_valid(own, offset), fetched[j], values[j], error[j]);
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
  const auto sum_before = [team](uint32_t own) {  // of the team's earlier threads
    uint32_t sum = own;
    for (int by = 1; by < team; by *= 2) {
      const uint32_t other = __shfl_up_sync(0xffffffffu, sum, by);
      if (int(threadIdx.x) % team >= by) sum += other;
    }
    return sum - own;
  };
  __shared__ uint64_t largest_codes[kBits == 1 ? kThreads : 1];
#pragma unroll
  for (int j = 0; j < kInFlight; j++) {
    const int64_t offset = first + j * kStride, element = own.start + offset;
    const int valid = num_valid(own, offset);
    if (own.block_size == 0) {
      write_plain<kCompensates>(a, item, row, element, valid, values[j], error[j]);
      continue;
    }
    const uint64_t exponents = kScaled ? read(fetched[j].exponents) : 0;
    float divided[kGroup];
    if constexpr (kScaled) divide(values[j], zeros[j], exponents, sixteenths, divided);
    const float(&coded)[kGroup] = kScaled ? divided : values[j];
    const int bits = code_bits<kBits>(a.wire.format);
    const bool is_short = a.wire.format.scale_bytes == 2;
    const uint32_t largest = largest_of_team(coded);
    float scale;
    uint64_t codes = 0;
    if constexpr (kBits == 1) {
      const auto count = [&](uint32_t least) { return sum_of_team(count_from(coded, least)); };
      const uint32_t least = least_taken(own.block_size, count), above = count(least + 1);
      const uint32_t equal_before = sum_before(count_from(coded, least) - count_from(coded, least + 1));
      codes = take_largest(coded, least, own.block_size / 5 - above - equal_before);
      const uint32_t total = sum_of_team(total_of_taken(coded, codes, per_unit(exponent_of(largest))));
      const uint32_t taken = sum_of_team(uint32_t(__popcll(codes & 0x0101010101010101u)));
      scale = mean_scale(total, largest, taken, taken, 1, is_short);
      if (!(scale > 0)) codes = 0;
    } else if (is_mean<kBits>(a.wire.format)) {
      const uint32_t nonzeros = sum_of_team(num_nonzeros(coded));
      const uint32_t total = sum_of_team(total_in_units(coded, per_unit(exponent_of(largest))));
      scale = mean_scale(total, largest, size_of_block(own, offset), nonzeros, bits, is_short);
    } else {
      scale = absmax_scale<kBits, !kCompensates && !kScaled>(a, largest, kept[j]);
    }
    const bool exists = is_in_block(own, offset);
    float sent[kGroup];
    if constexpr (kBits == 1) {
      uint8_t* wire = at(a.wire, row);
      values_of(codes, scale, sent);
      largest_codes[threadIdx.x] = codes;
      __syncthreads();
      // One warp packs what all of them took, a thread a block.
      const int64_t tile = offset - threadIdx.x * kGroup, of_thread = tile + threadIdx.x * own.block_size;
      if (threadIdx.x < kStride / own.block_size && is_in_block(own, of_thread)) {
        const auto* bytes = reinterpret_cast<const uint8_t*>(largest_codes) + threadIdx.x * own.block_size;
        pack_largest(bytes, int(own.block_size), wire + own.codes + of_thread / 8);
      }
      __syncthreads();
      if (exists && offset % own.block_size == 0) {
        store_scale(scale, wire + own.scales, uint32_t(offset / own.block_size), a.wire.format.scale_bytes);
      }
    } else if (exists) {
      const Noise noise = kBits ? Noise{} : noise_at(a, row, element);  // noise goes with the general kernel only
      write_codes<kBits>(at(a.wire, row), a.wire.format, own, offset, valid, scale, noise, coded, sent);
    }
    if constexpr (kCompensates) {
      if (a.new_error.data == nullptr) continue;
      if constexpr (kScaled) multiply(sent, exponents, sixteenths);
      move_error(a, values[j], sent, valid, error[j]);
      if (item.error.block_size == 0) {
        store_plain(error[j], a.new_error, item.error, row, element, valid);
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
template <bool kOneBit, Source kSource, bool kCompensates, int kScaled>
__global__ void __launch_bounds__(kThreads, 1) encode_blocks(const __grid_constant__ Launch<EncodeArguments> launch) {
  const EncodeArguments& a = launch.arguments;
  const Item& item = item_of_block(launch);
  const Segment& own = item.own;
  const Row row = row_of_block(launch);
  const int64_t block = tile_of_block(launch) - item.first_tile;
  const int64_t start = block * own.block_size, stop = start + own.block_size;

  float values[kGroup], error[kGroup], sent[kGroup], divided[kGroup];
  const float(&coded)[kGroup] = kScaled ? divided : values;
  uint64_t exponents = 0;
  __shared__ Sixteenths sixteenths;
  if constexpr (kScaled) sixteenths.fill();
  // work(offset, valid, whether it exists) for a group of each thread at a time, once its values are read.
  const auto for_each_group = [&](const auto& work) {
    for (int64_t tile = start; tile < stop; tile += kStride) {
      const int64_t offset = tile + threadIdx.x * kGroup, element = own.start + offset;
      const bool exists = offset < stop;
      const int valid = exists ? num_valid(own, offset) : 0;
      Fetched<kSource> fetched;
      fetch_group<kSource, kCompensates, kScaled>(a, item, row, element, valid, fetched);
      const uint32_t zeros = read_group<kSource, kCompensates>(a, item, row, element, valid, fetched, values, error);
      if constexpr (kScaled) {
        exponents = read(fetched.exponents);
        divide(values, zeros, exponents, sixteenths, divided);
      }
      work(offset, valid, exists);
    }
  };
  __shared__ uint64_t largest_codes[kOneBit ? kLargestOneBitBlock / kGroup : 1];
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
  // Codes of a group, a byte each in two words, and what arrives of them.
  const auto quantize_group = [&](int64_t offset, int valid, float scale, uint32_t& low, uint32_t& high) {
    if constexpr (kOneBit) values_of(offset < stop ? largest_codes[(offset - start) / kGroup] : 0, scale, sent);
    else quantize<0>(coded, valid, scale, a.wire.format, noise_at(a, row, own.start + offset), low, high, sent);
  };

  float largest = 0;
  uint64_t nonzeros = 0;
  for_each_group([&](int64_t, int, bool) {
    largest = max_nan(largest, largest_magnitude(coded));
    nonzeros += num_nonzeros(coded);
  });
  const uint32_t largest_of_block = largest_of_threads(largest);
  const bool is_short = a.wire.format.scale_bytes == 2;
  float scale = absmax_scale<0, !kCompensates && !kScaled>(a, largest_of_block, kept_scale(a, own, row, start));
  if constexpr (kOneBit) {
    const auto count = [&](uint32_t least) {
      uint64_t sum = 0;
      for_each_group([&](int64_t, int, bool) { sum += count_from(coded, least); });
      return sum_of_threads(sum);
    };
    const uint32_t least = least_taken(own.block_size, count);
    int64_t room = own.block_size / 5 - int64_t(count(least + 1));
    uint64_t total = 0, taken = 0;
    for_each_group([&](int64_t offset, int, bool exists) {
      const uint32_t equal = count_from(coded, least) - count_from(coded, least + 1);
      const uint64_t equal_of_all = sum_of_threads(equal);  // and each thread's are in sum_of_thread
      int64_t left = room;
      for (unsigned thread = 0; thread < threadIdx.x; thread++) left -= int64_t(sum_of_thread[thread]);
      room -= int64_t(equal_of_all);
      const uint64_t codes = take_largest(coded, least, left);
      if (exists) largest_codes[(offset - start) / kGroup] = codes;
      total += total_of_taken(coded, codes, per_unit(exponent_of(largest_of_block)));
      taken += __popcll(codes & 0x0101010101010101u);
    });
    total = sum_of_threads(total), taken = sum_of_threads(taken);
    scale = mean_scale(total, largest_of_block, int64_t(taken), int64_t(taken), 1, is_short);
    for (int64_t i = threadIdx.x; !(scale > 0) && i < own.block_size / kGroup; i += kThreads) largest_codes[i] = 0;
    __syncthreads();
    if (threadIdx.x == 0) {
      uint8_t* wire = at(a.wire, row);
      pack_largest(reinterpret_cast<const uint8_t*>(largest_codes), int(own.block_size), wire + own.codes + start / 8);
      store_scale(scale, wire + own.scales, uint32_t(block), a.wire.format.scale_bytes);
    }
  } else if (a.wire.format.is_mean) {
    uint64_t total = 0;
    for_each_group([&](int64_t, int, bool) {
      total += total_in_units(coded, per_unit(exponent_of(largest_of_block)));
    });
    total = sum_of_threads(total);
    nonzeros = sum_of_threads(nonzeros);
    scale = mean_scale(total, largest_of_block, size_of_block(own, start), nonzeros, a.wire.format.bits, is_short);
  }

  largest = 0;
  for_each_group([&](int64_t offset, int valid, bool exists) {
    const int64_t element = own.start + offset;
    uint32_t low, high;
    if (kOneBit) {
      quantize_group(offset, valid, scale, low, high);
    } else if (exists) {
      const Noise noise = noise_at(a, row, element);
      write_codes<0>(at(a.wire, row), a.wire.format, own, offset, valid, scale, noise, coded, sent);
    }
    if constexpr (kCompensates) {
      if constexpr (kScaled) multiply(sent, exponents, sixteenths);
      move_error(a, values, sent, valid, error);
      largest = max_nan(largest, largest_magnitude(error));
      if (a.new_error.data != nullptr && item.error.block_size == 0) {
        store_plain(error, a.new_error, item.error, row, element, valid);
      }
    }
  });
  if constexpr (kCompensates) {
    if (a.new_error.data != nullptr && item.error.block_size != 0) {
      const float error_scale = scale_of(largest_of_threads(largest), qmax_of(8), false);
      for_each_group([&](int64_t offset, int valid, bool exists) {
        uint32_t low, high;
        quantize_group(offset, valid, scale, low, high);
        if constexpr (kScaled) multiply(sent, exponents, sixteenths);
        move_error(a, values, sent, valid, error);
        if (exists) {
          write_codes<8>(
              at(a.new_error, row), a.new_error.format, item.error, offset, valid, error_scale, Noise{}, error, sent);
        }
      });
    }
  }
  if (block == 0 && threadIdx.x == 0) write_gaps(a, item, row);
}

// ---- Decoding: of one peer several groups at a time, of several peers one group.

template <class Out>
__device__ void write_out(const DecodeArguments& a, const VectorsOf<Out>& before, int valid, float (&values)[kGroup],
                          uint8_t* out) {
  if (a.accumulates) {
    float addend[kGroup];
    read_as<Out>(before, valid, addend);
    add(values, addend);
  }
  store_as<Out>(values, valid, out);
}

template <int kBits, class Out>
__global__ void __launch_bounds__(kThreads) decode_tiles(const __grid_constant__ Launch<DecodeArguments> launch) {
  const DecodeArguments& a = launch.arguments;
  const Item& item = item_of_block(launch);
  const Format& format = a.peers.format;
  const Row row = row_of_block(launch);
  const uint8_t* wire = at(a.peers, row);
  const int64_t first = (tile_of_block(launch) - item.first_tile) * kDecodesInFlight * kStride + threadIdx.x * kGroup;
  const bool is_plain = item.own.block_size == 0;
  Encoded encoded[kDecodesInFlight];
  VectorsOf<float> plain[kDecodesInFlight];
  VectorsOf<Out> before[kDecodesInFlight];
#pragma unroll
  for (int j = 0; j < kDecodesInFlight; j++) {
    const int64_t offset = first + j * kStride, element = item.own.start + offset;
    const int valid = num_valid(item.own, offset);
    if (valid == 0) continue;
    const Place place = place_of<kBits>(format, item.own, element);
    if (is_plain) fetch(wire + place.codes, valid * int(size_of(format.type)), plain[j]);
    else fetch_codes<kBits>(wire, format, place, encoded[j]);
    if (a.accumulates) fetch(at(a.out, row, element), valid * int(sizeof(Out)), before[j]);
  }
#pragma unroll
  for (int j = 0; j < kDecodesInFlight; j++) {
    const int64_t offset = first + j * kStride;
    const int valid = num_valid(item.own, offset);
    float values[kGroup];
    if (is_plain) read(plain[j], format.type, valid, values);
    else read_codes<kBits>(encoded[j], format, valid, values);
    write_out<Out>(a, before[j], valid, values, at(a.out, row, item.own.start + offset));
  }
}

template <int kBits, class Out>
__global__ void __launch_bounds__(kThreads) decode_sums(const __grid_constant__ Launch<DecodeArguments> launch) {
  const DecodeArguments& a = launch.arguments;
  const Item& item = item_of_block(launch);
  const Row row = row_of_block(launch);
  const int64_t offset = (tile_of_block(launch) - item.first_tile) * kStride + threadIdx.x * kGroup;
  const int64_t element = item.own.start + offset;
  const int valid = num_valid(item.own, offset);
  uint8_t* out = at(a.out, row, element);
  VectorsOf<Out> before;
  if (a.accumulates) fetch(out, valid * int(sizeof(Out)), before);
  float values[kGroup];
  read_sum<kBits>(a.peers, item.own, row, element, valid, values);
  write_out<Out>(a, before, valid, values, out);
}

// Of peers whose elements have scales. The sum begins at 0, as in plain torch, which ends up the same as 0 added last.
constexpr int kScaledPeers = 8;

template <int kBits>
__global__ void __launch_bounds__(kThreads) decode_scaled(const __grid_constant__ Launch<DecodeArguments> launch) {
  const DecodeArguments& a = launch.arguments;
  const Item& item = item_of_block(launch);
  const Format& format = a.peers.format;
  const Row row = row_of_block(launch);
  const int64_t offset = (tile_of_block(launch) - item.first_tile) * kStride + threadIdx.x * kGroup;
  const int64_t element = item.own.start + offset;
  const int valid = num_valid(item.own, offset);
  uint8_t* out = at(a.out, row, element);
  VectorsOf<float> before;
  if (a.accumulates) fetch(out, valid * int(sizeof(float)), before);
  __shared__ Sixteenths sixteenths;
  sixteenths.fill();
  float values[kGroup];
  if (item.own.block_size == 0) {
    read_sum<kBits>(a.peers, item.own, row, element, valid, values);
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; i++) values[i] = 0;
    const Place place = place_of<kBits>(format, item.own, element);
    const uint8_t *wire = at(a.peers, row), *exponents = at(a.exponents, row, element);
#pragma unroll 1
    for (int left = valid > 0 ? a.peers.num_peers : 0; left > 0; left -= kScaledPeers) {
      Encoded groups[kScaledPeers];
      Bytes bytes[kScaledPeers];
#pragma unroll
      for (int j = 0; j < kScaledPeers; j++) {
        if (j >= left) continue;
        fetch_codes<kBits>(wire + j * a.peers.peer_stride, format, place, groups[j]);
        fetch(exponents + j * a.exponents.peer_stride, valid, bytes[j]);
      }
#pragma unroll
      for (int j = 0; j < kScaledPeers; j++) {
        if (j >= left) continue;
        float addend[kGroup];
        read_codes<kBits>(groups[j], format, valid, addend);
        multiply(addend, read(bytes[j]), sixteenths);
        add(values, addend);
      }
      wire += kScaledPeers * a.peers.peer_stride, exponents += kScaledPeers * a.exponents.peer_stride;
    }
  }
#pragma unroll
  for (int i = 0; i < kGroup; i++) values[i] += 0.f;
  write_out<float>(a, before, valid, values, out);
}

// ---- Exponents, moved by the codes that were sent.

struct FetchedMove {
  Encoded group;
  Bytes exponents;
};

template <int kBits>
__device__ void fetch_move(const MoveExponentsArguments& a, const Segment& own, const Row& row, int64_t offset,
                           bool exists, FetchedMove& fetched) {
  const int valid = num_valid(own, offset);
  const int64_t element = own.start + offset;
  fetched.exponents = {};
  if (a.exponents.data != nullptr) fetch(at(a.exponents, row, element), valid, fetched.exponents);
  if (own.block_size == 0 || !exists) return;
  const Format& format = a.wire.format;
  fetch_codes<kBits>(at(a.wire, row), format, place_of<kBits>(format, own, element), fetched.group);
}

constexpr int kNoBlock = 1 << 20;  // more than any exponent

// Exponents before the block's least one is taken off. Returns the least of this group.
template <int kBits>
__device__ int moved_group(const MoveExponentsArguments& a, const FetchedMove& fetched, int valid, bool exists,
                           int (&moved)[kGroup]) {
  float codes[kGroup] = {};
  const float scale = exists ? fetched.group.scale : 0;
  const bool has_half_steps = is_mean<kBits>(a.wire.format) && scale > 0;
  if (exists) {
    with_bits<kBits>(a.wire.format.bits,
                     [&](auto bits) { read_stream_as<decltype(bits)::value>(fetched.group.stream, codes); });
  }
  const uint64_t exponents = read(fetched.exponents);
  const int first = moves_exponents(scale) ? a.moves.first : 0, changes = moves_exponents(scale) ? a.moves.num_changes : 0;
#pragma unroll
  for (int i = 0; i < kGroup; i++) moved[i] = (i < valid ? int(byte_of(exponents, i)) : kQuietest) - first;
#pragma unroll 1
  for (int t = 0; t < changes; t++) {
#pragma unroll
    for (int i = 0; i < kGroup; i++) {
      moved[i] -= doubled_level(int(codes[i]), has_half_steps) >= a.moves.from[t] ? a.moves.by[t] : 0;
    }
  }
  int least = exists ? moved[0] : kNoBlock;
#pragma unroll
  for (int i = 0; exists && i < kGroup; i++) least = moved[i] < least ? moved[i] : least;
  return least;
}

// All threads of a warp come here together.
__device__ void store_moved(const MoveExponentsArguments& a, const Row& row, int64_t element, int valid, int least,
                            const int (&moved)[kGroup]) {
  uint64_t bytes = 0;
#pragma unroll
  for (int i = 0; i < kGroup; i++) {
    const int quieter = moved[i] - least;
    bytes |= uint64_t(quieter < kQuietest ? quieter : kQuietest) << (8 * i);
  }
  store(bytes, valid, at(a.out, row, element));
}

constexpr int kMovesInFlight = 2;

// Blocks that a team of threads of a warp holds, and what is not quantized.
template <int kBits>
__global__ void __launch_bounds__(kThreads) move_exponents_of_tiles(
    const __grid_constant__ Launch<MoveExponentsArguments> launch) {
  const MoveExponentsArguments& a = launch.arguments;
  const Segment& own = item_of_block(launch).own;
  const Row row = row_of_block(launch);
  const int64_t first = (tile_of_block(launch) - item_of_block(launch).first_tile) * kMovesInFlight * kStride +
                        threadIdx.x * kGroup;
  const bool is_plain = own.block_size == 0;
  FetchedMove fetched[kMovesInFlight];
#pragma unroll
  for (int j = 0; j < kMovesInFlight; j++) {
    const int64_t offset = first + j * kStride;
    fetch_move<kBits>(a, own, row, offset, !is_plain && is_in_block(own, offset), fetched[j]);
  }
#pragma unroll
  for (int j = 0; j < kMovesInFlight; j++) {
    const int64_t offset = first + j * kStride;
    const int valid = num_valid(own, offset);
    int moved[kGroup];
    int least = moved_group<kBits>(a, fetched[j], valid, !is_plain && is_in_block(own, offset), moved);
    for (int other = int(own.block_size) / kGroup / 2; other > 0; other /= 2) {
      const int others = __shfl_xor_sync(0xffffffffu, least, other);
      least = others < least ? others : least;
    }
    store_moved(a, row, own.start + offset, valid, is_plain ? 0 : least, moved);
  }
}

// Blocks of any other size: a thread block for each, which reads it twice.
template <int kBits>
__global__ void __launch_bounds__(kThreads) move_exponents_of_blocks(
    const __grid_constant__ Launch<MoveExponentsArguments> launch) {
  const MoveExponentsArguments& a = launch.arguments;
  const Segment& own = item_of_block(launch).own;
  const Row row = row_of_block(launch);
  const int64_t start = (tile_of_block(launch) - item_of_block(launch).first_tile) * own.block_size;
  const int64_t stop = start + own.block_size;
  int moved[kGroup];
  // work(offset, valid, the least) of a group of each thread at a time.
  const auto for_each_group = [&](const auto& work) {
    for (int64_t tile = start; tile < stop; tile += kStride) {
      const int64_t offset = tile + threadIdx.x * kGroup;
      const bool exists = offset < stop;
      const int valid = exists ? num_valid(own, offset) : 0;
      FetchedMove fetched;
      fetch_move<kBits>(a, own, row, exists ? offset : start, exists, fetched);
      work(offset, valid, moved_group<kBits>(a, fetched, valid, exists, moved));
    }
  };
  int least = kNoBlock;
  for_each_group([&](int64_t, int, int of_group) { least = of_group < least ? of_group : least; });
  __shared__ int least_of_thread[kThreads];
  least_of_thread[threadIdx.x] = least;
  __syncthreads();
#pragma unroll 1
  for (int thread = 0; thread < kThreads; thread++) {
    least = least_of_thread[thread] < least ? least_of_thread[thread] : least;
  }
  for_each_group([&](int64_t offset, int valid, int) { store_moved(a, row, own.start + offset, valid, least, moved); });
}

// ---- Unquantized segments whose values only change their place.

__device__ const uint8_t* source_of(const EncodeArguments& a, const Row& row, const Segment&, int64_t element) {
  return at(a.values, row, element);
}

__device__ uint8_t* target_of(const EncodeArguments& a, const Row& row, const Segment& own, int64_t element) {
  return at(a.wire, row) + place_of<0>(a.wire.format, own, element).codes;
}

__device__ const uint8_t* source_of(const DecodeArguments& a, const Row& row, const Segment& own, int64_t element) {
  return at(a.peers, row) + place_of<0>(a.peers.format, own, element).codes;
}

__device__ uint8_t* target_of(const DecodeArguments& a, const Row& row, const Segment&, int64_t element) {
  return at(a.out, row, element);
}

// Copies bit by bit: a conversion and back would change NaNs, and so what is packed into such elements.
template <class Arguments>
__global__ void __launch_bounds__(kThreads) move_tiles(const __grid_constant__ Launch<Arguments> launch) {
  const Arguments& a = launch.arguments;
  const Item& item = item_of_block(launch);
  const Row row = row_of_block(launch);
  const int64_t offset = (tile_of_block(launch) - item.first_tile) * kStride + threadIdx.x * kGroup;
  const int64_t element = item.own.start + offset;
  const uint8_t* from = source_of(a, row, item.own, element);
  uint8_t* to = target_of(a, row, item.own, element);
  const int nbytes = num_valid(item.own, offset) * int(size_of(a.plain_type()));
  const bool is_aligned = (reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) % 16 == 0;
  int i = 0;
  for (; is_aligned && i + 16 <= nbytes; i += 16) {
    *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
  }
  for (; i < nbytes; i += 2) *reinterpret_cast<uint16_t*>(to + i) = *reinterpret_cast<const uint16_t*>(from + i);
  if constexpr (std::is_same_v<Arguments, EncodeArguments>) {
    if (offset == 0) write_gaps(a, item, row);
  }
}

// ---- Rotation: a group of 32 elements is in the 32 threads of a warp, one each.

__global__ void __launch_bounds__(kThreads) rotate_tiles(const __grid_constant__ Launch<RotateArguments> launch) {
  const RotateArguments& a = launch.arguments;
  const Item& item = item_of_block(launch);
  const Row row = row_of_block(launch);
  const int64_t numel = item.own.stop - item.own.start, tile = (tile_of_block(launch) - item.first_tile) * kStride;
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
      const int64_t blocks = tiles * a.rows0 * a.rows1;
      if (blocks > kLargestGrid) return cudaErrorInvalidConfiguration;
      launch.tiles = uint32_t(tiles);
      void* parameters[] = {&launch};
      const dim3 grid{unsigned(blocks)};
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

template <class Arguments>
bool is_moved(const Arguments& a, const Segment& segment) {
  return segment.block_size == 0 && a.moves_bits();
}

template <class Arguments>
int move(const Arguments& a, const Format& format, cudaStream_t stream) {
  const auto wanted = [&a](const Segment& segment) { return is_moved(a, segment); };
  return launch(move_tiles<Arguments>, a, format, nullptr, nullptr, stream, wanted, num_tiles<1>);
}

// The kBits of a kernel made for this format; 0 = the general one.
int compiled_bits(const Format& format) {
  const bool exists = format.is_mean ? format.bits == 2 : format.bits == 4 || format.bits == 8;
  return exists ? format.bits : 0;
}

template <Source kSource, bool kCompensates, int kScaled = 0>
int encode_from(const EncodeArguments& a, cudaStream_t stream) {
  const Format* source = is_wires(kSource) ? &a.peers.format : nullptr;
  const Format* error = kCompensates ? &a.error.format : nullptr;
  constexpr int kInFlight = kEncodesInFlight<kSource, kCompensates>;
  auto* tiles = encode_tiles<0, kSource, kCompensates, kScaled>;
  const int bits = a.stochastic ? 0 : compiled_bits(a.wire.format);
  if constexpr (!kScaled) {
    if (bits == 8) tiles = encode_tiles<8, kSource, kCompensates>;
    if (bits == 4) tiles = encode_tiles<4, kSource, kCompensates>;
  }
  if (bits == 2) tiles = encode_tiles<2, kSource, kCompensates, kScaled>;
  if (a.wire.format.bits == 1) tiles = encode_tiles<1, kSource, kCompensates, kScaled>;
  const auto wanted = [&a](const Segment& segment) { return fits_a_warp(segment) && !is_moved(a, segment); };
  int status = launch(tiles, a, a.wire.format, source, error, stream, wanted, num_tiles<kInFlight>);
  if (status != cudaSuccess) return status;
  status = move(a, a.wire.format, stream);
  if (status != cudaSuccess) return status;
  auto* blocks = a.wire.format.bits == 1 ? encode_blocks<true, kSource, kCompensates, kScaled>
                                         : encode_blocks<false, kSource, kCompensates, kScaled>;
  const auto others = [](const Segment& segment) { return !fits_a_warp(segment); };
  return launch(blocks, a, a.wire.format, source, error, stream, others, num_blocks);
}

template <Source kSource>
int encode_with(const EncodeArguments& a, cudaStream_t stream) {
  if (a.exponents.data != nullptr) {
    return a.compensates ? encode_from<kSource, true, 1>(a, stream) : encode_from<kSource, false, 1>(a, stream);
  }
  return a.compensates ? encode_from<kSource, true>(a, stream) : encode_from<kSource, false>(a, stream);
}

template <int kBits, class Out>
int decode_bits_to(const DecodeArguments& a, cudaStream_t stream) {
  const auto wanted = [&a](const Segment& segment) { return !is_moved(a, segment); };
  const bool is_sum = a.peers.num_peers > 1;
  auto* kernel = is_sum ? decode_sums<kBits, Out> : decode_tiles<kBits, Out>;
  const auto tiles = is_sum ? num_tiles<1> : num_tiles<kDecodesInFlight>;
  const int status = launch(kernel, a, a.peers.format, nullptr, nullptr, stream, wanted, tiles);
  return status == cudaSuccess ? move(a, a.peers.format, stream) : status;
}

template <class Out>
int decode_to(const DecodeArguments& a, cudaStream_t stream) {
  switch (compiled_bits(a.peers.format)) {
    case 8: return decode_bits_to<8, Out>(a, stream);
    case 4: return decode_bits_to<4, Out>(a, stream);
    case 2: return decode_bits_to<2, Out>(a, stream);
    default: return decode_bits_to<0, Out>(a, stream);
  }
}

}  // namespace

int encode(const EncodeArguments& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (a.rows0 * a.rows1 == 0) return cudaSuccess;
  if (a.values.data == nullptr) {
    return compiled_bits(a.peers.format) == 8 ? encode_with<Source::kWires8>(a, on) : encode_with<Source::kWires>(a, on);
  }
  if (a.values.type == Type::kFloat) return encode_with<Source::kFloat>(a, on);
  return encode_with<Source::k16Bit>(a, on);
}

int decode(const DecodeArguments& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (a.rows0 * a.rows1 == 0) return cudaSuccess;
  if (a.exponents.data != nullptr) {
    const auto all = [](const Segment&) { return true; };
    auto* kernel = compiled_bits(a.peers.format) == 2 ? decode_scaled<2> : decode_scaled<0>;
    return launch(kernel, a, a.peers.format, nullptr, nullptr, on, all, num_tiles<1>);
  }
  if (a.out.type == Type::kFloat) return decode_to<float>(a, on);
  if (a.out.type == Type::kBFloat16) return decode_to<BFloat16>(a, on);
  return decode_to<Half>(a, on);
}

int rotate(const RotateArguments& a, void* stream) {
  if (a.rows0 * a.rows1 == 0) return cudaSuccess;
  const auto all = [](const Segment&) { return true; };
  return launch(rotate_tiles, a, a.format, nullptr, nullptr, static_cast<cudaStream_t>(stream), all, num_tiles<1>);
}

int move_exponents(const MoveExponentsArguments& a, void* stream) {
  if (a.rows0 * a.rows1 == 0) return cudaSuccess;
  const auto on = static_cast<cudaStream_t>(stream);
  const Format& format = a.wire.format;
  const bool is_common = compiled_bits(format) == 2;
  auto* tiles = is_common ? move_exponents_of_tiles<2> : move_exponents_of_tiles<0>;
  const int status = launch(tiles, a, format, nullptr, nullptr, on, fits_a_warp, num_tiles<kMovesInFlight>);
  if (status != cudaSuccess) return status;
  const auto others = [](const Segment& segment) { return !fits_a_warp(segment); };
  return launch(move_exponents_of_blocks<0>, a, format, nullptr, nullptr, on, others, num_blocks);
}

}  // namespace zeropp::cuda
