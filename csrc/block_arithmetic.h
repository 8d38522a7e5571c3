// The arithmetic of one block, shared by the CPU and the CUDA kernels: tests of the CPU kernels cover both.
//
// Results equal megatron_zpp/zeropp/wire/quantization.py to the bit. That needs IEEE single precision and no contraction of
// a * b + c (compiled with -ffp-contract=off and --fmad=false).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define ZEROPP_INLINE __host__ __device__ __forceinline__
#define ZEROPP_UNROLL _Pragma("unroll")
#else
#define ZEROPP_INLINE inline __attribute__((always_inline))
#define ZEROPP_UNROLL _Pragma("GCC unroll 32")
#endif

namespace zeropp {

ZEROPP_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

ZEROPP_INLINE float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// ---- Element types. Conversions round to nearest even, as torch's do.

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

ZEROPP_INLINE float to_float(float value) { return value; }

ZEROPP_INLINE float to_float(BFloat16 value) { return float_of(uint32_t(value.bits) << 16); }

ZEROPP_INLINE float to_float(Half value) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(value.bits));
#else
  uint32_t magnitude = value.bits & 0x7fffu;
  // A multiplication moves the exponent's bias, and makes denormals normal on the way.
  uint32_t finite = bits_of(float_of(magnitude << 13) * 0x1p112f);
  uint32_t special = 0x7f800000u | magnitude << 13;
  return float_of((magnitude >= 0x7c00u ? special : finite) | (value.bits & 0x8000u) << 16);
#endif
}

ZEROPP_INLINE void from_float(float value, float& out) { out = value; }

ZEROPP_INLINE void from_float(float value, BFloat16& out) {
  uint32_t bits = bits_of(value);
  uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  out.bits = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded;
}

ZEROPP_INLINE void from_float(float value, Half& out) {
#ifdef __CUDA_ARCH__
  out.bits = __half_as_ushort(__float2half_rn(value));
#else
  uint32_t sign = bits_of(value) >> 16 & 0x8000u, magnitude = bits_of(value) & 0x7fffffffu;
  uint32_t normal = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
  // 2^-24 is the step of fp16's denormals and of fp32 numbers just above 0.5, so adding 0.5 rounds to it.
  uint32_t denormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  uint32_t half = magnitude < 0x38800000u ? denormal : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // from 65520 on, nearest is Inf
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  out.bits = uint16_t(sign | half);
#endif
}

// ---- Code "absmax": scale = absmax / qmax, code = round_half_even(value / scale).

ZEROPP_INLINE constexpr int qmax_of(int bits) { return bits == 1 ? 1 : (1 << (bits - 1)) - 1; }

// As an integer |value| keeps its order, and NaN and Inf come last: a maximum that never loses a NaN.
ZEROPP_INLINE uint32_t magnitude_of(float value) { return bits_of(value) & 0x7fffffffu; }

ZEROPP_INLINE bool is_finite(float value) { return magnitude_of(value) < 0x7f800000u; }

// Short scales, bf16, are rounded up: then no value is beyond the largest code.
// per_largest: the level that the largest value takes, qmax or less.
ZEROPP_INLINE float scale_of(uint32_t largest_magnitude, float per_largest, bool is_short) {
  float scale = float_of(largest_magnitude) / per_largest;
  if (is_short) scale = float_of((bits_of(scale) + 0xffffu) & 0xffff0000u);
  return largest_magnitude < 0x7f800000u && is_finite(scale) ? scale : float_of(0x7fc00000u);
}

// ---- Kept scales, of codes that move: quantization.py, kept_scales.

constexpr float kKeptFrom = 0.6f;

ZEROPP_INLINE float fresh_level(int qmax) { return float(0.9 * qmax); }

// Whether a block whose largest value is this keeps its scale.
ZEROPP_INLINE bool keeps(float scale, uint32_t largest_magnitude, int qmax) {
  const float magnitude = float_of(largest_magnitude), reach = scale * float(qmax);
  return magnitude <= reach && magnitude >= kKeptFrom * reach;
}

// Whether quotients by this scale may be found through its reciprocal: not for 0, NaN, and the ends of fp32's range.
ZEROPP_INLINE bool has_reciprocal(float scale) { return scale > 0x1p-100f && scale < 0x1p100f; }

// value / scale from the scale's rounded reciprocal: a product, moved by what is left of the value (Markstein). Division
// would cost most of a kernel's time. tests/zeropp/quotients.cpp shows, for all scales, that it rounds to an integer as the
// quotient does.
ZEROPP_INLINE float quotient_of(float value, float scale, float reciprocal) {
  const float product = value * reciprocal;
  return fmaf(fmaf(-product, scale, value), reciprocal, product);
}

// 1.5 * 2^23. A small number that is added to it is rounded to an integer, half to even, and is in the sum's low bits in
// two's complement.
constexpr float kIntegers = 12582912.f;

// The definition. 0 / 0, NaN and Inf give 0; a denormal scale is inexact, hence the clamp.
ZEROPP_INLINE float clamp_code(float rounded, int qmax) {
  return rounded == rounded ? fminf(fmaxf(rounded, -float(qmax)), float(qmax)) : 0.f;
}

ZEROPP_INLINE float round_quotient(float value, float scale, int qmax) {
  return clamp_code(rintf(value / scale), qmax);
}

// Stochastic rounding; uniform in [0, 1).
ZEROPP_INLINE float round_quotient(float value, float scale, int qmax, float uniform) {
  return clamp_code(floorf(value / scale + uniform), qmax);
}

// ---- Code "mean": scale = step * mean |x|. |x| is counted in units of 2^(exponent of the block's largest - 22): a sum of
// integers does not depend on the order. Up to 256 of them are below 2^31.

constexpr int kFixedPoint = 22;

// The step over mean |x|, as in quantization.py.
ZEROPP_INLINE float step_of(int bits, bool has_zeros) {
  switch (bits) {
    case 1: return 1;  // code "largest": their mean
    case 2: return has_zeros ? 1.5f : 1.25f;
    case 3: return has_zeros ? 0.8125f : 0.75f;
    default: return 0.4375f;
  }
}

// The exponent's bits in fp32; below 2^-63 every block counts as one with this exponent.
ZEROPP_INLINE uint32_t exponent_of(uint32_t largest_magnitude) {
  const uint32_t exponent = largest_magnitude & 0x7f800000u, smallest = (127u - 63u) << 23;
  return exponent > smallest ? exponent : smallest;
}

ZEROPP_INLINE float per_unit(uint32_t exponent) { return float_of(((127u + kFixedPoint + 127u) << 23) - exponent); }

ZEROPP_INLINE uint32_t in_units(float value, float per_unit) { return uint32_t(int32_t(fabsf(value) * per_unit)); }

// The scale that is sent, of a block of `size` elements with so many nonzero: negative where zeros must stay zeros.
ZEROPP_INLINE float mean_scale(
    uint64_t total, uint32_t largest_magnitude, int64_t size, int64_t nonzeros, int bits, bool is_short) {
  const bool has_zeros = bits > 1 && 4 * (size - nonzeros) >= size;
  const int64_t count = has_zeros ? nonzeros : size;
  const float unit = float_of(exponent_of(largest_magnitude) - (kFixedPoint << 23));
  float scale = step_of(bits, has_zeros) * float(total) / float(count > 1 ? count : 1) * unit;
  if (is_short) {
    BFloat16 rounded;
    from_float(scale, rounded);
    scale = to_float(rounded);
  }
  if (!(largest_magnitude < 0x7f800000u && is_finite(scale))) return float_of(0x7fc00000u);
  return has_zeros && scale > 0 ? -scale : scale;
}

// The value of a code c: (c + offset) * scale.
struct Levels {
  float scale, offset;
};

// Adding -0 changes nothing, so that compilers leave it out.
ZEROPP_INLINE Levels levels_of(float sent_scale, bool is_mean) {
  return {fabsf(sent_scale), is_mean && !(sent_scale < 0) ? 0.5f : -0.f};
}

ZEROPP_INLINE float value_of(float code, Levels levels) { return (code + levels.offset) * levels.scale; }

// The code of a value in a block with a scale above 0. uniform in [0, 1) rounds stochastically, 1/2 to the nearest level.
ZEROPP_INLINE float mean_code(float value, float reciprocal, Levels levels, int qmax, float uniform) {
  const float code = floorf(value * reciprocal + (uniform - levels.offset));
  const float lowest = float(-qmax) - 2 * levels.offset, capped = code < float(qmax) ? code : float(qmax);
  return capped > lowest ? capped : lowest;
}

// Numbers in [0, 1) that depend on index and seed alone: the low bias 32-bit integer hash of Chris Wellons.
ZEROPP_INLINE float counter_uniform(uint32_t index, uint32_t seed) {
  uint32_t x = index + seed * 0x9e3779b9u;
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return float((x ^ x >> 16) >> 8) * 0x1p-24f;
}

// ---- Packing: bytes become a little-endian stream of their low `bits` bits. Word: 4 or 8 bytes at a time.

// Ones in the low `width` bits of every `pitch` bits.
template <class Word>
ZEROPP_INLINE constexpr Word repeated_ones(int width, int pitch) {
  Word ones = 0;
  for (int at = 0; at < int(8 * sizeof(Word)); at += pitch) ones |= ((Word(1) << width) - 1) << at;
  return ones;
}

// Fields of `width` bits, one in every `pitch`, move together in pairs, then in pairs of pairs.
template <int width, int pitch, class Word>
ZEROPP_INLINE Word pack_fields(Word fields) {
  if constexpr (pitch == 8 * sizeof(Word)) {
    return fields;
  } else {
    constexpr Word first = repeated_ones<Word>(width, 2 * pitch), second = first << width;
    return pack_fields<2 * width, 2 * pitch>((fields & first) | (fields >> (pitch - width) & second));
  }
}

template <int width, int pitch, class Word>
ZEROPP_INLINE Word unpack_fields(Word fields) {
  if constexpr (pitch < 8) {
    return fields;
  } else {
    constexpr Word first = repeated_ones<Word>(width, 2 * pitch), second = first << width;
    return unpack_fields<width / 2, pitch / 2>((fields & first) | (fields & second) << (pitch - width));
  }
}

template <int bits, class Word>
ZEROPP_INLINE Word pack(Word bytes) {
  return bits == 8 ? bytes : pack_fields<bits, 8>(Word(bytes & repeated_ones<Word>(bits, 8)));
}

// Bytes with the code's sign in all upper bits.
template <int bits, class Word>
ZEROPP_INLINE Word unpack(Word stream) {
  if constexpr (bits == 8) {
    return stream;
  } else {
    constexpr Word signs = repeated_ones<Word>(1, 8) << (bits - 1);
    const Word fields = unpack_fields<bits * int(sizeof(Word)) / 2, 4 * int(sizeof(Word))>(stream);
    return fields | (fields & signs) * Word((1 << (9 - bits)) - 2);
  }
}

// A code in a byte, as a float. Exactly, either way: a GPU converts few integers at a time, but adds many floats.
ZEROPP_INLINE float code_value(uint8_t byte) {
#ifdef ZEROPP_CUDA
  return float_of(0x4b000000u | (byte ^ 0x80u)) - float(0x800000 + 0x80);  // 2^23 + code + 128 - (2^23 + 128)
#else
  return float(int8_t(byte));
#endif
}

// ---- LoCo (arXiv 2407.04480): e <- beta * e + (1 - beta) * (compensated - sent). A NaN or Inf is not remembered.

struct Averaging {
  float beta, one_minus_beta;
  float decay;  // factor of the new error
};

ZEROPP_INLINE float moved_error(float error, float compensated, float sent, Averaging averaging) {
  float moved = averaging.beta * error + averaging.one_minus_beta * (compensated - sent);
  return (magnitude_of(moved) < 0x7f800000u ? moved : error) * averaging.decay;
}

// The same of a block whose scale has_reciprocal: then all of it is finite.
ZEROPP_INLINE float moved_finite_error(float error, float compensated, float sent, Averaging averaging) {
  return (averaging.beta * error + averaging.one_minus_beta * (compensated - sent)) * averaging.decay;
}

// ---- Scales of elements (megatron_zpp/zeropp/wire/scales.py): s = 2^(-e / 16) for an exponent e of one byte.

// 2^(-k / 16) in fp32, as bits. A whole octave is one less in the fp32 exponent.
#ifdef ZEROPP_CUDA
__constant__
#endif
    constexpr uint32_t kSixteenths[16] = {0x3f800000, 0x3f75257d, 0x3f6ac0c7, 0x3f60ccdf, 0x3f5744fd, 0x3f4e248c,
                                          0x3f45672a, 0x3f3d08a4, 0x3f3504f3, 0x3f2d583f, 0x3f25fed7, 0x3f1ef532,
                                          0x3f1837f0, 0x3f11c3d3, 0x3f0b95c2, 0x3f05aac3};

// sixteenths: kSixteenths, in the memory that the caller reads fastest.
ZEROPP_INLINE float scale_of_exponent(uint32_t exponent, const uint32_t* sixteenths) {
  return float_of(sixteenths[exponent & 15] - (exponent >> 4 << 23));
}

constexpr int kQuietest = 255;
constexpr int kMostChanges = 32;  // 8 bits have 28 at most

// How far an exponent falls, by twice the size of its code's level: `first`, and by[t] more from from[t] on.
struct LevelMoves {
  int num_changes;
  int first;
  int from[kMostChanges], by[kMostChanges];
};

// Twice the size of a code's level. A scale that is positive says that levels lie halfway between codes, with code "mean".
ZEROPP_INLINE int doubled_level(int code, bool has_half_steps) {
  const int doubled = 2 * code + has_half_steps;
  return doubled < 0 ? -doubled : doubled;
}

// Whether a block's codes carry values: false for a block of zeros, or one with a NaN.
ZEROPP_INLINE bool moves_exponents(float sent_scale) { return fabsf(sent_scale) > 0; }

// ---- The orthonormal 32 x 32 Hadamard rotation, its own inverse: for each width of 1, 2, 4, 8 and 16, elements i and
// i + width become their sum and difference; then all are multiplied.

constexpr float kHadamardScale = 0.17677669529663687f;  // 32^-0.5

}  // namespace zeropp
