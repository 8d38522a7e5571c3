// Helpers of the GPU kernels. A thread works on groups of 8 elements, 16 bytes of bf16, and issues the loads of several
// groups, or of what several peers sent of one, before it uses the first. A block's maximum goes through warp shuffles.
// Nothing is atomic, nothing waits for the host.
//
// A vector that is aligned and has a byte of a buffer is read whole: buffers must be in allocations of whole vectors of 16
// bytes, as torch's are on a GPU. Nothing beyond that is touched.
//
// The wire formats are passed as kernel parameters. This folder includes nothing of torch: nvcc alone compiles it, each
// encode_*.cu beside the others.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#define ZEROPP_CUDA
#include "../kernel_arguments.h"
#include "scan.h"

namespace zeropp::cuda {

enum class Source { kFloat, k16Bit, kWires8, kWires };  // kWires8: in 8 bits, as within nodes by default

ZEROPP_INLINE constexpr bool is_wires(Source source) { return source == Source::kWires8 || source == Source::kWires; }

// Encode what comes from one kind of source, each in a file of its own; scaled: with scales of elements.
int encode_floats(const EncodeArguments&, cudaStream_t);
int encode_16_bits(const EncodeArguments&, cudaStream_t);
int encode_wires_of_8_bits(const EncodeArguments&, cudaStream_t);
int encode_scaled_wires_of_8_bits(const EncodeArguments&, cudaStream_t);
int encode_wires(const EncodeArguments&, cudaStream_t);
int encode_scaled_wires(const EncodeArguments&, cudaStream_t);

namespace {

constexpr int kGroup = 8;
constexpr int kStride = kThreads * kGroup;      // elements from one group of a thread to its next
constexpr int kLargestWarpBlock = 32 * kGroup;  // elements that one warp has in its registers
constexpr int kSegments = 24;                   // per launch
constexpr int kLaunchBytes = 4096;              // parameters that all supported cards take
constexpr int64_t kLargestGrid = 0x7fffffff;    // blocks

// One segment of the format that a kernel goes through, and where its elements are in other wires.
struct Item {
  Segment own, source, error;
  int64_t first_tile;  // this segment's first among the launch's tiles of a row
};

template <class Arguments>
struct Launch {
  Arguments arguments;
  uint32_t tiles = 0;  // per row; all rows are in grid.x, since grid.y ends at 65,535
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
    const int next_valid = __shfl_down_sync(kAllLanes, valid, 1);
    if (lane < 31) stored += next_valid < left ? next_valid : left;
#pragma unroll
    for (int i = 0; i < kWords; i++) words[kWords + i] = __shfl_down_sync(kAllLanes, words[i], 1);
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
    const int next_valid = __shfl_down_sync(kAllLanes, valid, 1);
    if (lane < 31) stored += next_valid < left ? next_valid : left;
    const uint32_t low = __shfl_down_sync(kAllLanes, uint32_t(bytes), 1);
    const uint32_t high = __shfl_down_sync(kAllLanes, uint32_t(bytes >> 32), 1);
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

__device__ void multiply(float (&values)[kGroup], uint64_t exponents, const Sixteenths& sixteenths) {
#pragma unroll
  for (int i = 0; i < kGroup; i++) values[i] *= sixteenths.scale(exponents, i);
}

// The receiver's value for one that is sent unquantized.
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
  static_assert(bits == 2 || bits == 3 || bits == 4 || bits == 6 || bits == 8, "codes of another width");
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

// The codes of 1 bit of this thread's group, a byte each. All threads of a warp come here together. `stream`: the block's
// (quantization.py, pack_largest), of a byte for each of its `groups`, of which this thread's is number `before`.
//
// A thread has a byte of a stream, which it can read once it knows how many of its first bits, 0 to 3, belong to a code that
// began before. It finds how many reach into the next byte in all four cases; put together, these say what is so for each
// thread. In four bits one code begins at most. Teams have a block each. Of one that is no team's, a warp reads 32 bytes at a
// time, up to its own groups.
__device__ uint64_t find_largest(const uint8_t* stream, uint32_t groups, uint32_t before, bool exists) {
  const auto reach_of = [](uint32_t four_bits, uint32_t reach) {
    const uint32_t ones = four_bits >> reach << reach;
    return ones ? uint32_t(__ffs(ones)) - 1 : 0;
  };
  const auto then = [](uint32_t first, uint32_t second) {  // a byte for each case
    const uint32_t pairs = (first | first >> 4) & 0x00ff00ffu;
    return __byte_perm(second, 0, (pairs | pairs >> 8) & 0xffff);
  };
  const auto in_case = [](uint32_t cases, uint32_t reach) { return cases >> 8 * reach & 3; };
  __shared__ uint32_t found[kThreads];  // per thread's group: a bit that it is not 0, and in the next byte its sign
  const bool is_team = groups <= 32 && (groups & (groups - 1)) == 0;
  const int team = is_team ? int(groups) : 32, lane = threadIdx.x % 32, index = lane % team;
  found[threadIdx.x] = 0;
  __syncwarp();
  uint32_t left = __ballot_sync(kAllLanes, exists);
  while (left != 0) {
    // The first block of the warp that is not done; or each team's.
    const int leader = is_team ? lane - index : __ffs(left) - 1;
    const uint64_t address = reinterpret_cast<uint64_t>(stream);
    const uint64_t high = __shfl_sync(kAllLanes, uint32_t(address >> 32), leader);
    const uint8_t* from = reinterpret_cast<const uint8_t*>(high << 32 | __shfl_sync(kAllLanes, uint32_t(address), leader));
    const uint32_t first = __shfl_sync(kAllLanes, before, leader);  // the groups before, at the leader's thread
    const bool is_own = exists && from == stream, has_stream = is_team ? exists : true;
    uint32_t reach = 0;
    int place = -1;  // the last element that was read
    for (uint32_t byte = index; __ballot_sync(kAllLanes, is_own && place < int(8 * before + 7) && byte - index < groups);
         byte += 32) {
      uint32_t bits = 0;
      if (has_stream && byte < groups) bits = from[byte];
      if (has_stream && byte + 1 < groups) bits |= uint32_t(from[byte + 1]) << 8;
      uint32_t cases = 0;
#pragma unroll
      for (uint32_t r = 0; r < 4; r++) cases |= reach_of(bits >> 4 & 15, reach_of(bits & 15, r)) << 8 * r;
      for (int by = 1; by < team; by *= 2) {
        const uint32_t earlier = __shfl_up_sync(kAllLanes, cases, by);
        if (index >= by) cases = then(earlier, cases);
      }
      const uint32_t earlier = __shfl_up_sync(kAllLanes, cases, 1);
      uint32_t own_reach = index > 0 ? in_case(earlier, reach) : reach;

      // How far the byte leads, and on the way where its codes are, of which it has two at most.
      int advance = 0, ends[2];
      uint32_t tails[2];
      bool begins[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint32_t ones = (bits >> 4 * half & 15) >> own_reach << own_reach;
        begins[half] = ones != 0;
        const uint32_t one = ones ? uint32_t(__ffs(ones)) - 1 : 4;
        tails[half] = bits >> (4 * half + one + 1) & 7;
        advance += 4 * int(one - own_reach) + (ones ? int(tails[half] & 3) + 1 : 0);
        ends[half] = advance;
        own_reach = one & 3;
      }
      const int begin = place + before_in_team<Sum>(advance, team);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int element = begin + ends[half], thread = leader + element / 8 - int(first);
        if (begins[half] && element / 8 >= int(first) && element / 8 < int(groups) && thread < 32) {
          atomicOr(&found[threadIdx.x - lane + thread], (1u | tails[half] >> 2 << 8) << element % 8);
        }
      }
      reach = in_case(__shfl_sync(kAllLanes, cases, lane - index + team - 1), reach);
      place = __shfl_sync(kAllLanes, begin + advance, lane - index + team - 1);
    }
    left &= is_team ? 0 : ~__ballot_sync(kAllLanes, is_own);
  }
  __syncwarp();
  const uint32_t taken = found[threadIdx.x], negative = taken >> 8;
  return (a_byte_each(taken) | a_byte_each(negative) * 0xff) |
         uint64_t(a_byte_each(taken >> 4) | a_byte_each(negative >> 4) * 0xff) << 32;
}

// A group of 2 bits and more.
template <int kBits>
__device__ void fetch_group_of_codes(const uint8_t* wire, const Format& format, const Place& place, Encoded& group) {
  with_bits<kBits>(format.bits, [&](auto bits) {
    group.stream = load_stream_as<decltype(bits)::value>(wire + place.codes);
  });
  group.scale = load_scale(wire + place.scale, format.scale_bytes);
}

// A group of any bits. All threads of a warp come here together. exists: whether it is in a block.
template <int kBits>
__device__ void fetch_codes(const uint8_t* wire, const Format& format, const Place& place, bool exists, Encoded& group) {
  if (kBits == 0 && format.bits == 1) {
    const uint32_t groups = place.block_size / kGroup;
    group.stream = find_largest(wire + place.codes - place.before, groups, place.before, exists);
    if (exists) group.scale = load_scale(wire + place.scale, format.scale_bytes);
  } else if (exists) {
    fetch_group_of_codes<kBits>(wire, format, place, group);
  }
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

// Whether the element, counted from the segment's first, is in one of its blocks.
__device__ bool is_in_block(const Segment& segment, int64_t offset) {
  return offset < (segment.stop - segment.start + segment.block_size - 1) / segment.block_size * segment.block_size;
}

// The sum of what all peers sent of a group, in their order. All threads of a warp come here together.
template <int kBits>
__device__ void read_sum(const Wires& wires, const Segment& segment, const Row& row, int64_t element, int valid,
                         float (&values)[kGroup]) {
#pragma unroll
  for (int i = 0; i < kGroup; i++) values[i] = -0.f;  // which changes nothing that is added to it
  const Format& format = wires.format;
  const bool is_1_bit = kBits == 0 && segment.block_size != 0 && format.bits == 1;
  if (valid == 0 && !is_1_bit) return;
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
  const auto read_it = [&](const Encoded& group, auto& addend) { read_codes<kBits>(group, format, valid, addend); };
  if (is_1_bit) {
    const bool exists = is_in_block(segment, element - segment.start);
    const auto fetch_it = [&](const uint8_t* wire, auto& group) { fetch_codes<kBits>(wire, format, place, exists, group); };
    add_peers(std::integral_constant<int, 1>(), Encoded(), fetch_it, read_it);
  } else if (segment.block_size == 0) {
    add_peers(
        std::integral_constant<int, kPlainPeers>(), VectorsOf<float>(),
        [&](const uint8_t* wire, auto& group) { fetch(wire + place.codes, valid * int(size_of(format.type)), group); },
        [&](const auto& group, auto& addend) { read(group, format.type, valid, addend); });
  } else {
    add_peers(
        std::integral_constant<int, kPeers<kBits>>(), Encoded(),
        [&](const uint8_t* wire, auto& group) { fetch_group_of_codes<kBits>(wire, format, place, group); }, read_it);
  }
}

__device__ int num_valid(const Segment& segment, int64_t offset) {
  const int64_t left = segment.stop - segment.start - offset;
  return left <= 0 ? 0 : left < kGroup ? int(left) : kGroup;
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

// The kBits of a kernel made for this format; 0 = the general one.
int compiled_bits(const Format& format) {
  const bool exists = format.is_mean ? format.bits == 2 : format.bits == 4 || format.bits == 8;
  return exists ? format.bits : 0;
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

__device__ void write_gaps(const EncodeArguments& a, const Item& item, const Row& row) {
  zero_gaps(at(a.wire, row), a.wire.format, item.own);
  if (a.new_error.data != nullptr && item.error.stop == item.own.stop) {
    zero_gaps(at(a.new_error, row), a.new_error.format, item.error);
  }
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

template <class Arguments>
bool is_moved(const Arguments& a, const Segment& segment) {
  return segment.block_size == 0 && a.moves_bits();
}

template <class Arguments>
int move(const Arguments& a, const Format& format, cudaStream_t stream) {
  const auto wanted = [&a](const Segment& segment) { return is_moved(a, segment); };
  return launch(move_tiles<Arguments>, a, format, nullptr, nullptr, stream, wanted, num_tiles<1>);
}

}  // namespace
}  // namespace zeropp::cuda
