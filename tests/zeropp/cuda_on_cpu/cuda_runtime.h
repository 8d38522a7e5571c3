// As much of CUDA as csrc/cuda uses, for a C++ compiler: its kernels then run on a CPU, thread by thread, and
// their logic is tested where there is no GPU. Nothing here says how fast they are, or what nvcc makes of them.
//
// The threads of a block are coroutines of one operating-system thread. A coroutine runs until a barrier, of its warp or
// of its block, where it waits for the others; so a kernel that not all threads follow to a barrier is found as well. After
// each barrier they run in another order, which CUDA_ON_CPU_SEED chooses: a result that depends on it is found, too.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __constant__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one after the other

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  explicit dim3(unsigned x, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9;

namespace cuda_on_cpu {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

// ucontext begins a coroutine on its own stack; between them it would ask the kernel about signals at every barrier.
struct Coroutine {
  ucontext_t beginning;
  jmp_buf state;
  std::vector<char> stack = std::vector<char>(64 << 10);
  bool has_begun = false, is_done = false;
};

struct Barrier {
  int size, arrived = 0, generation = 0;
};

inline Index thread_index, block_index;
inline std::vector<std::unique_ptr<Coroutine>> coroutines;
inline std::vector<Barrier> warp_barriers;
inline Barrier block_barrier{0};
inline std::vector<uint32_t> shuffled;  // the bits of one value of each thread
inline jmp_buf scheduler;
inline std::vector<unsigned> order;  // the order of a block's threads
inline std::minstd_rand random_numbers(std::getenv("CUDA_ON_CPU_SEED") ? std::atoi(std::getenv("CUDA_ON_CPU_SEED")) : 1);
inline void (*body)(void*);
inline void* body_argument;

inline void wait_at(Barrier& barrier) {
  const int generation = barrier.generation;
  if (++barrier.arrived == barrier.size) {
    barrier.arrived = 0;
    barrier.generation++;
  }
  Coroutine& own = *coroutines[thread_index.x];
  while (barrier.generation == generation) {
    if (_setjmp(own.state) == 0) _longjmp(scheduler, 1);
  }
}

// One thread of each block after the other: to begin on a stack takes system calls.
inline void run_coroutine() {
  for (;;) {
    body(body_argument);
    Coroutine& own = *coroutines[thread_index.x];
    own.is_done = true;
    if (_setjmp(own.state) == 0) _longjmp(scheduler, 1);
  }
}

// Until it waits or is done.
inline void resume(Coroutine& coroutine) {
  if (_setjmp(scheduler) != 0) return;
  if (coroutine.has_begun) _longjmp(coroutine.state, 1);
  coroutine.has_begun = true;
  setcontext(&coroutine.beginning);
}

inline void run_block(unsigned threads) {
  while (coroutines.size() < threads) coroutines.push_back(std::make_unique<Coroutine>());
  warp_barriers.assign(threads / 32, Barrier{32});
  block_barrier = Barrier{int(threads)};
  shuffled.assign(threads, 0);
  order.resize(threads);
  std::iota(order.begin(), order.end(), 0);
  for (unsigned t = 0; t < threads; t++) {
    Coroutine& coroutine = *coroutines[t];
    coroutine.is_done = false;
    if (coroutine.has_begun) continue;
    getcontext(&coroutine.beginning);
    coroutine.beginning.uc_stack.ss_sp = coroutine.stack.data();
    coroutine.beginning.uc_stack.ss_size = coroutine.stack.size();
    makecontext(&coroutine.beginning, run_coroutine, 0);
  }
  for (unsigned left = threads, rounds = 0; left > 0; rounds++) {
    left = 0;
    std::shuffle(order.begin(), order.end(), random_numbers);
    for (const unsigned t : order) {
      if (coroutines[t]->is_done) continue;
      thread_index.x = t;
      resume(*coroutines[t]);
      left += !coroutines[t]->is_done;
    }
    if (rounds > 1000000) {
      std::fprintf(stderr, "threads wait at a barrier that the others of block %u do not reach\n", block_index.x);
      std::abort();
    }
  }
}

}  // namespace cuda_on_cpu

#define threadIdx cuda_on_cpu::thread_index
#define blockIdx cuda_on_cpu::block_index

inline void __syncthreads() { cuda_on_cpu::wait_at(cuda_on_cpu::block_barrier); }
inline void __syncwarp() { cuda_on_cpu::wait_at(cuda_on_cpu::warp_barriers[threadIdx.x / 32]); }

namespace cuda_on_cpu {

template <class T>
T shuffle(T value, unsigned source) {
  static_assert(sizeof(T) == sizeof(uint32_t));
  const unsigned own = threadIdx.x;
  std::memcpy(&shuffled[own], &value, sizeof value);
  wait_at(warp_barriers[own / 32]);
  T other;
  std::memcpy(&other, &shuffled[source], sizeof other);
  wait_at(warp_barriers[own / 32]);  // all have read before any writes again
  return other;
}

}  // namespace cuda_on_cpu

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return cuda_on_cpu::shuffle(value, threadIdx.x ^ unsigned(mask));
}

template <class T>
T __shfl_down_sync(unsigned, T value, unsigned by) {
  const unsigned own = threadIdx.x;
  return cuda_on_cpu::shuffle(value, own % 32 + by < 32 ? own + by : own);
}

template <class T>
T __shfl_up_sync(unsigned, T value, int by) {
  const unsigned own = threadIdx.x;
  return cuda_on_cpu::shuffle(value, int(own % 32) >= by ? own - unsigned(by) : own);
}

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return cuda_on_cpu::shuffle(value, threadIdx.x / 32 * 32 + unsigned(lane));
}

inline uint32_t __ballot_sync(unsigned, bool value) {
  uint32_t ballot = uint32_t(value) << threadIdx.x % 32;
  for (int width = 1; width < 32; width *= 2) ballot |= __shfl_xor_sync(0xffffffffu, ballot, width);
  return ballot;
}

inline int __clz(int value) { return value ? __builtin_clz(uint32_t(value)) : 32; }
inline int __popc(uint32_t value) { return __builtin_popcount(value); }
inline int __popcll(uint64_t value) { return __builtin_popcountll(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline int __clzll(long long value) { return value ? __builtin_clzll(uint64_t(value)) : 64; }

inline uint32_t atomicOr(uint32_t* at, uint32_t value) {
  const uint32_t before = *at;
  *at |= value;
  return before;
}

inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) result |= uint32_t(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  return result;
}

// What CUDA refuses to launch on any card: https://docs.nvidia.com/cuda/cuda-c-programming-guide, compute capabilities.
// Vectors that are not aligned trap: the tests compile with -fsanitize=alignment.
inline cudaError_t check_launch(dim3 grid, dim3 threads, std::size_t parameter_bytes, std::size_t shared_bytes) {
  const bool grid_fits = grid.x - 1 < 0x7fffffffu && grid.y - 1 < 65535u && grid.z - 1 < 65535u;
  const bool block_fits = threads.x - 1 < 1024u && threads.y - 1 < 1024u && threads.z - 1 < 64u &&
                          uint64_t(threads.x) * threads.y * threads.z <= 1024u;
  if (!grid_fits || !block_fits) return cudaErrorInvalidConfiguration;
  return parameter_bytes > 4096 || shared_bytes > 48 << 10 ? cudaErrorInvalidValue : cudaSuccess;
}

template <class Parameters>
cudaError_t cudaLaunchKernel(
    void (*kernel)(Parameters), dim3 grid, dim3 threads, void** parameters, std::size_t shared, cudaStream_t) {
  if (const cudaError_t error = check_launch(grid, threads, sizeof(Parameters), shared)) return error;
  struct Call {
    void (*kernel)(Parameters);
    const Parameters* parameters;
  } call{kernel, static_cast<const Parameters*>(parameters[0])};
  cuda_on_cpu::body = [](void* argument) {
    const Call& called = *static_cast<Call*>(argument);
    called.kernel(*called.parameters);
  };
  cuda_on_cpu::body_argument = &call;
  for (unsigned y = 0; y < grid.y; y++) {
    for (unsigned x = 0; x < grid.x; x++) {
      blockIdx = {x, y, 0};
      cuda_on_cpu::run_block(threads.x);
    }
  }
  return cudaSuccess;
}
