// Sums over the threads of a block and of teams, which are 1 to 32 threads of a warp, and bits.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace zeropp::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAllLanes = 0xffffffffu;

struct Sum {
  static constexpr int32_t kNothing = 0;
  __device__ static int32_t of(int32_t a, int32_t b) { return a + b; }
};
struct Last {
  static constexpr int32_t kNothing = -1;
  __device__ static int32_t of(int32_t a, int32_t b) { return a > b ? a : b; }
};

// Over the threads of a team before this one. All threads of a warp come here together.
template <class Operation>
__device__ int32_t before_in_team(int32_t value, int team) {
  const int index = int(threadIdx.x) % team;
  for (int by = 1; by < team; by *= 2) {
    const int32_t other = __shfl_up_sync(kAllLanes, value, by);
    if (index >= by) value = Operation::of(other, value);
  }
  const int32_t previous = __shfl_up_sync(kAllLanes, value, 1);
  return index > 0 ? previous : Operation::kNothing;
}

struct Scanned {
  int32_t before, total;  // over the threads before this one, and over all
};

// All threads of a block come here together.
template <class Operation>
__device__ Scanned scan(int32_t value) {
  __shared__ int32_t of_warp[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t in_warp = before_in_team<Operation>(value, 32);
  if (lane == 31) of_warp[warp] = Operation::of(in_warp, value);
  __syncthreads();
  int32_t before = Operation::kNothing, total = Operation::kNothing;
  for (int w = 0; w < kWarps; w++) {
    if (w < warp) before = Operation::of(before, of_warp[w]);
    total = Operation::of(total, of_warp[w]);
  }
  __syncthreads();  // the next scan writes there
  return {Operation::of(before, in_warp), total};
}

// The lowest bits of four bytes, side by side; and back.
__device__ uint32_t side_by_side(uint32_t bytes) { return (bytes & 0x01010101u) * 0x10204080u >> 28; }
__device__ uint32_t a_byte_each(uint32_t bits) { return (bits & 15) * 0x00204081u & 0x01010101u; }

// Sets bits from a lower to a higher place. Other threads set other bits of the same words, which were zero.
struct BitWriter {
  uint32_t* words;
  int word = 0;
  uint32_t bits = 0;

  __device__ explicit BitWriter(uint32_t* words) : words(words) {}
  __device__ void set(int bit, int width, uint32_t value) {
    if (bit / 32 != word) flush(), word = bit / 32;
    bits |= value << bit % 32;
    if (bit % 32 + width > 32) flush(), word++, bits = value >> (32 - bit % 32);
  }
  __device__ void flush() {
    if (bits) atomicOr(words + word, bits);
    bits = 0;
  }
};

}  // namespace
}  // namespace zeropp::cuda
