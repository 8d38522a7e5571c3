// Encoding, for the encode_*.cu: each compiles it for one kind of source.
#pragma once

#include "kernels.h"

namespace zeropp::cuda {
namespace {

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
  uint32_t seed, index;  // the index of the group's first element
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

// A magnitude at or above which there are as many of a block's values as are taken; or, where equal ones would be more, the
// least that is taken. Steps down from the largest, which grow, lead below it, and then the interval is halved. count(least):
// the block's values at or above it. any(wanted): whether a thread that comes here together with this one wants more.
template <class Count, class Any>
__device__ uint32_t least_taken(int64_t block_size, uint32_t largest, const Count& count, const Any& any) {
  uint32_t least = 0, above = largest + 1, step = 1 << 22;  // half of a power of two
#pragma unroll 1
  while (any(above - least > 1)) {
    const uint32_t tried = least > 0 ? least + (above - least) / 2 : above > step ? above - step : 1;
    const int64_t counted = count(tried);
    if (above - least <= 1) continue;
    if (counted < block_size / 5) above = tried, step *= 2;
    else least = tried;
    if (counted == block_size / 5) above = least + 1;
  }
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

__device__ uint32_t taken_of(uint64_t codes) {
  return side_by_side(uint32_t(codes)) | side_by_side(uint32_t(codes >> 32)) << 4;
}

// The last element that is taken, of a block whose element `first` is this group's first; -1 = none.
__device__ int last_taken(uint64_t codes, int first) {
  const uint32_t taken = taken_of(codes);
  return taken ? first + 31 - __clz(taken) : -1;
}

// Packs a group's codes as quantization.py's pack_largest does, from a bit of the block's stream on. Returns how many bits they
// take. previous: the last element before the group that is taken. writes: or only counts.
__device__ int pack_group(uint64_t codes, int first, int previous, int bit, BitWriter& stream, bool writes) {
  const int begin = bit;
  for (uint32_t left = taken_of(codes); left != 0; left &= left - 1) {
    const int i = __ffs(left) - 1, gap = first + i - previous - 1;
    bit += gap >> 2;
    if (writes) stream.set(bit, 4, 1 | (gap & 3) << 1 | uint32_t(codes >> (8 * i + 7) & 1) << 3);
    bit += 4, previous = first + i;
  }
  return bit - begin;
}

// ---- Encoding: what a thread does with a group, in the order in which it does it.

// Groups whose loads a thread issues before it uses the first. One has several loads already where there are peers or
// errors, and more would not fit the registers.
template <Source kSource, bool kCompensates>
constexpr int kEncodesInFlight = is_wires(kSource) || kCompensates ? 1 : 2;

// A group's input as it lies in memory; peers' wires are not read yet. kScaled, 0 or 1: with scales of elements.
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
      if (item.error.block_size != 0) fetch_group_of_codes<8>(wire, a.error.format, place, group.error);
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

// Values in units of their elements' scales. An element without a gradient is sent as 0: its error waits.
__device__ void divide(const float (&values)[kGroup], uint32_t zeros, uint64_t exponents, const Sixteenths& sixteenths,
                       float (&divided)[kGroup]) {
#pragma unroll
  for (int i = 0; i < kGroup; i++) divided[i] = zeros >> i & 1 ? 0.f : values[i] / sixteenths.scale(exponents, i);
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

__device__ Noise noise_at(const EncodeArguments& a, const Row& row, int64_t element) {
  return {a.stochastic, a.noise_seed, uint32_t((row.row0 * a.rows1 + row.row1) * a.numel + element)};
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
      largest = max_nan(largest, __shfl_xor_sync(kAllLanes, largest, other));
    }
    return bits_of(largest);
  };
  const auto sum_of_team = [team](uint32_t sum) {
    for (int other = team / 2; other > 0; other /= 2) sum += __shfl_xor_sync(kAllLanes, sum, other);
    return sum;
  };
  const auto any_of_warp = [](bool wanted) { return __ballot_sync(kAllLanes, wanted) != 0; };
  __shared__ uint32_t streams[kBits == 1 ? kThreads / 4 : 1];  // a byte for each group
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
      const uint32_t least = least_taken(own.block_size, largest, count, any_of_warp);
      int64_t room = own.block_size / 5;
      if (any_of_warp(count(least) > room)) {  // equal ones that are not all taken: the first
        const int equal = int(count_from(coded, least) - count_from(coded, least + 1));
        room -= count(least + 1) + before_in_team<Sum>(equal, team);
      }
      codes = take_largest(coded, least, room);
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
      const int group = int(threadIdx.x) % team, start = 8 * (int(threadIdx.x) - group);
      const int previous = before_in_team<Last>(last_taken(codes, kGroup * group), team);
      BitWriter stream(streams);
      const int nbits = pack_group(codes, kGroup * group, previous, 0, stream, false);
      const int bit = start + before_in_team<Sum>(nbits, team);
      if (threadIdx.x % 4 == 0) streams[threadIdx.x / 4] = 0;
      __syncwarp();
      pack_group(codes, kGroup * group, previous, bit, stream, true);
      stream.flush();
      __syncwarp();
      if (exists) wire[own.codes + offset / kGroup] = reinterpret_cast<const uint8_t*>(streams)[threadIdx.x];
      __syncwarp();
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
      largest = max_nan(largest, __shfl_xor_sync(kAllLanes, largest, other));
    }
    __syncthreads();  // the array may still be read
    if (threadIdx.x % 32 == 0) largest_of_warp[threadIdx.x / 32] = largest;
    __syncthreads();
    for (int warp = 0; warp < kThreads / 32; warp++) largest = max_nan(largest, largest_of_warp[warp]);
    return bits_of(largest);
  };
  // For up to 2^40, in two halves.
  const auto sum_of_threads = [](uint64_t sum) {
    const uint64_t low = scan<Sum>(int32_t(sum & 0xfffff)).total;
    return low + (uint64_t(scan<Sum>(int32_t(sum >> 20)).total) << 20);
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
      int32_t sum = 0;
      for_each_group([&](int64_t, int, bool) { sum += int32_t(count_from(coded, least)); });
      return scan<Sum>(sum).total;
    };
    const auto any = [](bool wanted) { return wanted; };  // equal on all threads
    const uint32_t least = least_taken(own.block_size, largest_of_block, count, any);
    int64_t room = own.block_size / 5 - count(least + 1);
    uint64_t total = 0, taken = 0;
    for_each_group([&](int64_t offset, int, bool exists) {
      const Scanned equal = scan<Sum>(int32_t(count_from(coded, least) - count_from(coded, least + 1)));
      const uint64_t codes = take_largest(coded, least, room - equal.before);
      room -= equal.total;
      if (exists) largest_codes[(offset - start) / kGroup] = codes;
      total += total_of_taken(coded, codes, per_unit(exponent_of(largest_of_block)));
      taken += __popc(taken_of(codes));
    });
    total = sum_of_threads(total), taken = sum_of_threads(taken);
    scale = mean_scale(total, largest_of_block, int64_t(taken), int64_t(taken), 1, is_short);
    for (int64_t i = threadIdx.x; !(scale > 0) && i < own.block_size / kGroup; i += kThreads) largest_codes[i] = 0;

    __shared__ uint32_t words[kLargestOneBitBlock / 32];
    for (int i = threadIdx.x; i < kLargestOneBitBlock / 32; i += kThreads) words[i] = 0;
    __syncthreads();
    BitWriter stream(words);
    int previous = -1, bit = 0;
    for (int tile = 0; tile < own.block_size / kGroup; tile += kThreads) {
      const int group = tile + int(threadIdx.x);
      const uint64_t codes = group < own.block_size / kGroup ? largest_codes[group] : 0;
      const Scanned last = scan<Last>(last_taken(codes, kGroup * group));
      const int before = Last::of(previous, last.before);
      const Scanned nbits = scan<Sum>(pack_group(codes, kGroup * group, before, 0, stream, false));
      pack_group(codes, kGroup * group, before, bit + nbits.before, stream, true);
      previous = Last::of(previous, last.total), bit += nbits.total;
    }
    stream.flush();
    __syncthreads();
    uint8_t* wire = at(a.wire, row);
    for (int64_t i = threadIdx.x; i < own.block_size / kGroup; i += kThreads) {
      wire[own.codes + start / kGroup + i] = reinterpret_cast<const uint8_t*>(words)[i];
    }
    if (threadIdx.x == 0) store_scale(scale, wire + own.scales, uint32_t(block), a.wire.format.scale_bytes);
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

template <Source kSource, bool kCompensates, int kScaled>
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

template <Source kSource, int kScaled>
int encode_with(const EncodeArguments& a, cudaStream_t stream) {
  return a.compensates ? encode_from<kSource, true, kScaled>(a, stream) : encode_from<kSource, false, kScaled>(a, stream);
}

}  // namespace
}  // namespace zeropp::cuda
