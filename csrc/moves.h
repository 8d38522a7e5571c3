// Moved codes, as the operators call them, and what the kernels of both devices share;
// megatron_zpp/zeropp/wire/moves.py is the definition.
#pragma once

#include <vector>

#include "kernel_arguments.h"

namespace zeropp {

constexpr int kChunk = 16384;  // codes
constexpr int kHeaderBytes = 12;

// A run of codes in a wire buffer: a quantized segment's codes, or unquantized values of 16 bits.
struct Run {
  int64_t first;       // index of its first code
  int64_t count;       // a multiple of 8 where bits < 16
  int64_t codes;       // where they begin, in bytes
  int64_t scales;      // where their scales begin
  int64_t block_size;  // 0 = unquantized
  int64_t block;       // index of its first block
};

// Unquantized values of 32 bits, which are sent as they are.
struct Raw {
  int64_t wire, nbytes;  // where they are in a wire buffer
  int64_t moves;         // and among all of them
};

// The codes of a wire buffer in their order: the quantized ones, then values of 16 bits.
struct CodeTable {
  const Run* runs = nullptr;
  const Raw* raw = nullptr;
  int num_runs = 0, num_quantized = 0, num_raw = 0;
  int bits = 0, scale_bytes = 4;
  int64_t num_codes = 0, num_blocks = 0, raw_bytes = 0;

  ZEROPP_INLINE int64_t num_chunks() const { return (num_codes + kChunk - 1) / kChunk; }
  ZEROPP_INLINE int64_t flag_bytes() const { return (num_blocks + 7) / 8; }
  ZEROPP_INLINE int qmax() const { return qmax_of(bits ? bits : 8); }

  ZEROPP_INLINE float scale_at(const uint8_t* wire, const Run& run, int64_t block) const {
    const uint8_t* at = wire + run.scales + block * scale_bytes;
    uint32_t scale = 0;
    for (int i = 0; i < scale_bytes; i++) scale |= uint32_t(at[i]) << 8 * (i + 4 - scale_bytes);
    return float_of(scale);
  }

  // The run with the code or, if `by_block`, the block of this index.
  ZEROPP_INLINE int run_of(int64_t index, bool by_block = false) const {
    int low = 0, high = by_block ? num_quantized : num_runs;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if ((by_block ? runs[middle].block : runs[middle].first) <= index) low = middle;
      else high = middle;
    }
    return low;
  }

  // Calls work(run, begin, end) for the codes of each run that are in [first, last) of all.
  template <class Work>
  ZEROPP_INLINE void each_run(int64_t first, int64_t last, const Work& work) const {
    if (last > num_codes) last = num_codes;
    if (first >= last) return;
    for (int r = run_of(first); first < last; r++) {
      const int64_t end = runs[r].first + runs[r].count < last ? runs[r].first + runs[r].count : last;
      if (first < end) work(runs[r], first - runs[r].first, end - runs[r].first);
      first = end;
    }
  }
};

// Eight codes of `bits` bits each, a byte each.
ZEROPP_INLINE uint64_t load_codes(const uint8_t* from, int bits) {
  uint64_t stream = 0;
  for (int i = 0; i < bits; i++) stream |= uint64_t(from[i]) << 8 * i;
  return bits == 4 ? unpack<4>(stream) : bits == 6 ? unpack<6>(stream) : stream;
}

ZEROPP_INLINE void store_codes(uint64_t codes, int bits, uint8_t* to) {
  const uint64_t stream = bits == 4 ? pack<4>(codes) : bits == 6 ? pack<6>(codes) : codes;
  for (int i = 0; i < bits; i++) to[i] = uint8_t(stream >> 8 * i);
}

ZEROPP_INLINE int code_in(uint64_t codes, int i) { return int8_t(codes >> 8 * i); }

// The predicted code under the scale `after` of a code under the scale `before`.
ZEROPP_INLINE int predicted(int code, float before, float after, int qmax) {
  if (before == after) return code;
  const float rounded = rintf(float(code) * (before / after));
  return is_finite(rounded) ? int(fminf(fmaxf(rounded, -float(qmax)), float(qmax))) : 0;
}

ZEROPP_INLINE uint64_t predicted_codes(uint64_t codes, float before, float after, int qmax) {
  uint64_t result = 0;
  for (int i = 0; i < 8; i++) result |= uint64_t(uint8_t(predicted(code_in(codes, i), before, after, qmax))) << 8 * i;
  return result;
}

// The bits of a 16-bit number, in the order of the values, and back.
ZEROPP_INLINE int ordered(const uint8_t* at) {
  const int16_t bits = int16_t(at[0] | at[1] << 8);
  return bits < 0 ? -1 - (bits & 0x7fff) : bits;
}

ZEROPP_INLINE void store_ordered(int value, uint8_t* at) {
  const int bits = value < 0 ? -1 - value - 0x8000 : value;
  at[0] = uint8_t(bits), at[1] = uint8_t(bits >> 8);
}

// The best k for a geometric distribution of the same mean, to a few percent (Kiely 2004).
ZEROPP_INLINE int rice_parameter(int64_t sum, int64_t count) {
  int64_t middle = (2 * sum + count) * 77 / (160 * (count > 0 ? count : 1));
  int k = 0;
  while (middle >>= 1) k++;
  return k;
}

namespace cpu {
void encode_moves(const CodeTable&, const uint8_t* old, const uint8_t* now, std::vector<uint8_t>& moves);
// Returns false if the moves, `nbytes` of them, end too early.
bool apply_moves(const CodeTable&, const uint8_t* moves, int64_t nbytes, uint8_t* wire);
}  // namespace cpu

// Rows of moves and of wires, and what kernels write for those after them. All of it is in the device's memory.
struct MovesArguments {
  CodeTable table;
  int64_t rows = 1;
  const uint8_t *old = nullptr, *now = nullptr;  // encoding: one row
  uint8_t* wires = nullptr;                      // applying: [rows, wire_bytes]
  int64_t wire_bytes = 0;
  uint8_t* moves = nullptr;  // [rows, move_bytes]
  int64_t move_bytes = 0;
  uint8_t* flags = nullptr;         // encoding: uint8 [flag_bytes], whether each block has a new scale
  uint8_t* headers = nullptr;       // encoding: uint8 [chunks, kHeaderBytes]
  int32_t* scales_before = nullptr; // [rows, flag_bytes]: new scales of all blocks before a byte of flags
  int64_t* chunk_starts = nullptr;  // [rows, chunks + 1]: where the body of each begins, and the end of the last
  uint16_t* lists = nullptr;        // applying: [kMovingBlocks, 3, kChunk], decoded
};

namespace cuda {
constexpr int kMovingBlocks = 264;  // thread blocks that apply moves: each keeps its lists in memory
// stream: a cudaStream_t. Return a cudaError_t. Encoding is two steps: the first fills chunk_starts, whose last is the
// size of the moves, and the second fills them; they must be zero.
int measure_moves(const MovesArguments&, void* stream);
int write_moves(const MovesArguments&, void* stream);
int apply_moves(const MovesArguments&, void* stream);
}  // namespace cuda

}  // namespace zeropp
