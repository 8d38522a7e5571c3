// Arguments that the operators hand to the kernels: tensors as pointers and strides, and the wire format of
// megatron_zpp/zeropp/wire/layout.py as a table of segments.
//
// R rows (of two dimensions, so that a transposed tensor needs no copy) of L elements:
//
//   encode           values, or the sum of what several peers sent   -> + addend -> + error -> wire, new error
//   decode           the sum of what several peers sent              -> + out    -> out
//   rotate           values                                          -> out, Hadamard-rotated
//   move_exponents   exponents, and the wire that was sent           -> exponents for the next one
//
// With exponents, quantized values are divided by the scales of their elements before they are encoded, and multiplied by
// them after they are decoded.
#pragma once

#include <cstdint>

#include "block_arithmetic.h"

namespace zeropp {

enum class Type : int { kFloat, kBFloat16, kHalf };

ZEROPP_INLINE int64_t size_of(Type type) { return type == Type::kFloat ? 4 : 2; }

// A run of elements of a shard that share one encoding.
struct Segment {
  int64_t start, stop;  // elements [start, stop) of the shard
  int64_t block_size;   // elements that share a scale, a multiple of 8; 0: the values are sent as they are
  int64_t codes;        // where their packed codes, or their values, begin in the wire, in bytes
  int64_t scales;       // where their scales begin
};

struct Format {
  const Segment* segments = nullptr;
  int num_segments = 0;
  int bits = 0;  // per code; 0 = unquantized
  bool is_mean = false;  // the code: "mean" with 1 to 4 bits, or "absmax" with 2 and more
  int scale_bytes = 4;   // per scale: fp32, or 2 for bf16
  Type type = Type::kFloat;  // type of the unquantized values
};

// Tensors [R0, R1, L] with contiguous rows; strides in elements. data is null where there is none.
struct Rows {
  void* data = nullptr;
  Type type = Type::kFloat;
  int64_t stride0 = 0, stride1 = 0;
};

// Wire buffers [G peers, R0, R1, bytes]; strides in bytes.
struct Wires {
  uint8_t* data = nullptr;
  int num_peers = 1;
  int64_t peer_stride = 0, stride0 = 0, stride1 = 0;
  Format format;
};

// One byte for each element, uint8 [G peers, R0, R1, L]; strides in bytes. Rows begin anywhere.
struct Exponents {
  uint8_t* data = nullptr;
  int64_t peer_stride = 0, stride0 = 0, stride1 = 0;
};

struct EncodeArguments {
  int64_t rows0, rows1, numel;  // R0, R1, L
  Rows values;                  // the source: these,
  Wires peers;                  // or the sum of these
  Rows addend;
  Wires wire;
  Wires error, new_error;  // LoCo; error.data is null at its first step, new_error.data when it is to be forgotten
  Averaging averaging;
  bool compensates = false;  // whether there is LoCo
  bool stochastic = false;
  uint32_t noise_seed = 0;
  bool keeps_scales = false;  // blocks keep the scales that they have in `kept`, while they fit
  Wires kept;                 // in the wire's format; data is null where all scales are fresh
  Exponents exponents;        // data is null where elements have no scales

  bool has_exponents() const { return exponents.data != nullptr; }
  ZEROPP_INLINE Type plain_type() const { return wire.format.type; }
  // Whether values that are sent as they are only change their place.
  ZEROPP_INLINE bool moves_bits() const {
    return values.data != nullptr && values.type == wire.format.type && addend.data == nullptr && !compensates;
  }
};

struct DecodeArguments {
  int64_t rows0, rows1;
  Wires peers;
  Rows out;
  bool accumulates = false;
  Exponents exponents;  // per peer; then out is fp32

  ZEROPP_INLINE Type plain_type() const { return peers.format.type; }
  ZEROPP_INLINE bool moves_bits() const {
    return out.type == peers.format.type && peers.num_peers == 1 && !accumulates && exponents.data == nullptr;
  }
};

struct MoveExponentsArguments {
  int64_t rows0, rows1;
  Wires wire;
  Exponents exponents, out;  // exponents.data is null where all are 0
  LevelMoves moves;
};

struct RotateArguments {
  int64_t rows0, rows1, numel;
  Format format;  // only its quantized segments are rotated
  Rows values;
  Rows out;  // fp32
};

// The segment of a format that holds an element.
inline const Segment& segment_at(const Format& format, int64_t element) {
  const Segment* segment = format.segments;
  while (segment->stop <= element) segment++;
  return *segment;
}

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

namespace cpu {
void encode(const EncodeArguments&);
void decode(const DecodeArguments&);
void rotate(const RotateArguments&);
void move_exponents(const MoveExponentsArguments&);
}  // namespace cpu

namespace cuda {
// stream: a cudaStream_t. Returns a cudaError_t.
int encode(const EncodeArguments&, void* stream);
int decode(const DecodeArguments&, void* stream);
int rotate(const RotateArguments&, void* stream);
int move_exponents(const MoveExponentsArguments&, void* stream);
}  // namespace cuda

}  // namespace zeropp
