// Where csrc/cuda sends the segments of a wire format: its own dispatch, whose launches are written down and
// not run.
#define cudaLaunchKernel run_on_cpu
#include "cuda_runtime.h"
#undef cudaLaunchKernel

using Kernel = void (*)();

struct Launched {
  Kernel kernel;
  int segments;
};
static std::vector<Launched> launched;

template <class Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters), dim3, dim3, void** parameters, std::size_t, cudaStream_t) {
  launched.push_back({reinterpret_cast<Kernel>(kernel), static_cast<Parameters*>(parameters[0])->num_items});
  return cudaSuccess;
}

#include "../../../csrc/cuda/encode_16_bits.cu"
#include "../../../csrc/cuda/encode_floats.cu"
#include "../../../csrc/cuda/encode_scaled_wires.cu"
#include "../../../csrc/cuda/encode_scaled_wires_of_8_bits.cu"
#include "../../../csrc/cuda/encode_wires.cu"
#include "../../../csrc/cuda/encode_wires_of_8_bits.cu"
#include "../../../csrc/cuda/kernels.cu"

namespace zeropp {
namespace {

// A format as operators.cpp takes it.
struct Table {
  explicit Table(const int64_t* numbers, int64_t size) {
    if (size == 0) return;
    for (int64_t i = 5; i < size; i += 5) {
      segments.push_back({numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3], numbers[i + 4]});
    }
    format = {segments.data(), int(segments.size()), int(numbers[0]), numbers[3] != 0, int(numbers[4]), Type(numbers[1])};
  }
  Table(const Table&) = delete;

  std::vector<Segment> segments;
  Format format;
};

template <cuda::Source kSource>
bool is_for_blocks(Kernel kernel) {
  return kernel == reinterpret_cast<Kernel>(cuda::encode_blocks<false, kSource, false, 0>) ||
         kernel == reinterpret_cast<Kernel>(cuda::encode_blocks<false, kSource, true, 0>);
}

uint8_t somewhere;

}  // namespace

// Segments that kernels for tiles encode, and those that kernels for blocks do. type: of the values; -1: there are peers'
// wires in their place.
extern "C" void encoded_by(int64_t type, const int64_t* format, int64_t format_size, const int64_t* peers,
                           int64_t peers_size, const int64_t* error, int64_t error_size, int64_t* segments) {
  const Table own(format, format_size), source(peers, peers_size), kept(error, error_size);
  EncodeArguments arguments{1, 1, own.segments.back().stop};
  if (type >= 0) arguments.values = {&somewhere, Type(type)};
  arguments.wire.format = own.format;
  arguments.peers.format = source.format;
  arguments.error.format = kept.format;
  arguments.compensates = error_size > 0;
  launched.clear();
  cuda::encode(arguments, nullptr);
  using cuda::Source;
  for (const auto& [kernel, number] : launched) {
    const bool blocks = is_for_blocks<Source::kFloat>(kernel) || is_for_blocks<Source::k16Bit>(kernel) ||
                        is_for_blocks<Source::kWires8>(kernel) || is_for_blocks<Source::kWires>(kernel);
    segments[blocks] += number;
  }
}

}  // namespace zeropp
