// Prints what the fake device says to launches that CUDA refuses, and to one that it does not; then reads a vector that
// is not aligned, which must trap.
#include "cuda_runtime.h"

template <int kBytes>
struct Parameters {
  char bytes[kBytes];
};

template <int kBytes>
void kernel(Parameters<kBytes>) {}

template <int kBytes = 8>
void launch(dim3 grid, dim3 threads, std::size_t shared = 0) {
  Parameters<kBytes> parameters{};
  void* all[] = {&parameters};
  std::printf("%d ", cudaLaunchKernel(kernel<kBytes>, grid, threads, all, shared, nullptr));
}

int main(int, char** arguments) {
  launch(dim3(1), dim3(32));
  launch(dim3(0), dim3(32));
  launch(dim3(0x80000000u), dim3(32));
  launch(dim3(1, 65536), dim3(32));
  launch(dim3(1, 1, 65536), dim3(32));
  launch(dim3(1), dim3(1056));
  launch(dim3(1), dim3(32, 33));
  launch(dim3(1), dim3(32), (48 << 10) + 1);
  launch<4097>(dim3(1), dim3(32));
  std::fflush(stdout);
  alignas(16) char memory[32] = {};
  const uint4* vector = reinterpret_cast<const uint4*>(memory + std::atoi(arguments[1]));
  std::printf("read %u", vector->x);
}
