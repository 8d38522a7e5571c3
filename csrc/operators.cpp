// The operators megatron_zpp::encode, decode and rotate: checks, and the way to the kernels of the tensors' device.
// Their Python side, with what each argument means, is megatron_zpp/zeropp/wire/kernels.py.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <optional>
#include <vector>

#include "kernel_arguments.h"
#include "moves.h"

#ifdef ZEROPP_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace zeropp {
namespace {

using at::IntArrayRef;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// A format as Python writes it: bits, element type, bytes of a wire, whether the code is "mean", bytes of a scale, and
// five numbers for each segment.
struct FormatTable {
  explicit FormatTable(IntArrayRef numbers) {
    if (numbers.empty()) return;
    TORCH_CHECK_VALUE(numbers.size() % 5 == 0, "a wire format has 5 + 5 n numbers, not ", numbers.size());
    nbytes = numbers[2];
    for (size_t i = 5; i < numbers.size(); i += 5) {
      segments.push_back({numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3], numbers[i + 4]});
    }
    format = {segments.data(), int(segments.size()), int(numbers[0]), numbers[3] != 0, int(numbers[4]), Type(numbers[1])};
  }
  FormatTable(const FormatTable&) = delete;

  int64_t numel() const { return segments.empty() ? 0 : segments.back().stop; }

  // Whether another format can be read or written tile by tile of this one: same blocks, or values as they are.
  void check_has_tiles_of(const FormatTable& other) const {
    TORCH_CHECK_VALUE(numel() == other.numel(), "wire formats of ", numel(), " and ", other.numel(), " elements");
    for (const Segment& tiled : other.segments) {
      const Segment& own = segment_at(format, tiled.start);
      const bool same = own.start == tiled.start && own.stop == tiled.stop && own.block_size == tiled.block_size;
      TORCH_CHECK_VALUE(same || (own.block_size == 0 && own.stop >= tiled.stop), "wire formats with other blocks");
    }
  }

  std::vector<Segment> segments;
  Format format;
  int64_t nbytes = 0;
};

Type type_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return Type::kFloat;
    case at::kBFloat16: return Type::kBFloat16;
    case at::kHalf: return Type::kHalf;
    default: TORCH_CHECK_TYPE(false, "fp32, bf16 or fp16 is needed, not ", tensor.scalar_type());
  }
}

// Leading dimensions of a tensor [R0, R1, last] of which both, one or none may be missing.
struct Leading {
  Leading(const Tensor& tensor, int64_t skipped) {
    const int64_t dims = tensor.dim() - 1 - skipped;
    TORCH_CHECK_VALUE(dims >= 0 && dims <= 2, "1 to 3 dimensions are needed, not ", tensor.dim() - skipped);
    TORCH_CHECK_VALUE(tensor.stride(-1) == 1 || tensor.size(-1) <= 1, "the last dimension must be contiguous");
    for (int64_t d = 0; d < dims; d++) {
      sizes[2 - dims + d] = tensor.size(skipped + d);
      strides[2 - dims + d] = tensor.stride(skipped + d);
    }
  }
  int64_t sizes[2] = {1, 1}, strides[2] = {0, 0};
};

struct Shape {
  int64_t rows0, rows1, numel;
  c10::Device device;

  void check(const Tensor& tensor, const Leading& leading, int64_t last) const {
    TORCH_CHECK_VALUE(tensor.device() == device, "tensors on ", tensor.device(), " and ", device);
    TORCH_CHECK_VALUE(leading.sizes[0] == rows0 && leading.sizes[1] == rows1 && tensor.size(-1) == last,
                      "a shape [", rows0, ", ", rows1, ", ", last, "] is needed, not ", tensor.sizes());
  }
};

Rows rows_of(const OptionalTensor& tensor, const Shape& shape) {
  if (!tensor) return {};
  const Leading leading(*tensor, 0);
  shape.check(*tensor, leading, shape.numel);
  return {tensor->data_ptr(), type_of(*tensor), leading.strides[0], leading.strides[1]};
}

Wires wires_of(const OptionalTensor& tensor, bool has_peers, const FormatTable& table, const Shape& shape) {
  Wires wires;
  wires.format = table.format;
  if (!tensor) return wires;
  TORCH_CHECK_TYPE(tensor->scalar_type() == at::kByte, "wires are uint8, not ", tensor->scalar_type());
  const Leading leading(*tensor, has_peers);
  shape.check(*tensor, leading, table.nbytes);
  wires.data = tensor->data_ptr<uint8_t>();
  wires.num_peers = has_peers ? int(tensor->size(0)) : 1;
  wires.peer_stride = has_peers ? tensor->stride(0) : 0;
  wires.stride0 = leading.strides[0];
  wires.stride1 = leading.strides[1];
  // Codes are read and written as vectors. One that is not aligned ends a GPU's context.
  const int64_t offsets = reinterpret_cast<intptr_t>(wires.data) | wires.peer_stride | wires.stride0 | wires.stride1;
  const bool is_aligned = offsets % 16 == 0 || tensor->numel() == 0;
  TORCH_CHECK_VALUE(is_aligned, "wires must begin at multiples of 16 bytes: copy the slice");
  return wires;
}

#ifdef ZEROPP_WITH_CUDA
constexpr bool kHasCuda = true;

template <class Arguments>
void run_on_cuda(int (*kernel)(const Arguments&, void*), const Arguments& arguments, const Tensor& tensor) {
  const c10::cuda::CUDAGuard guard(tensor.device());
  C10_CUDA_CHECK(cudaError_t(kernel(arguments, c10::cuda::getCurrentCUDAStream().stream())));
}
#define ZEROPP_RUN(kernel, arguments, tensor) \
  ((tensor).is_cuda() ? run_on_cuda(cuda::kernel, arguments, tensor) : cpu::kernel(arguments))
#else
constexpr bool kHasCuda = false;

#define ZEROPP_RUN(kernel, arguments, tensor) cpu::kernel(arguments)
#endif

void encode(const OptionalTensor& values, const OptionalTensor& peers, IntArrayRef peers_format,
            const OptionalTensor& addend, double addend_sign, const Tensor& wire, IntArrayRef format,
            const OptionalTensor& error, const OptionalTensor& new_error, IntArrayRef error_format, double beta,
            double decay, std::optional<int64_t> noise_seed) {
  TORCH_CHECK_VALUE(values.has_value() != peers.has_value(), "either values or peers are encoded");
  const FormatTable wire_table(format), peers_table(peers_format), error_table(error_format);
  if (peers) peers_table.check_has_tiles_of(wire_table);
  if (!error_format.empty()) {
    error_table.check_has_tiles_of(wire_table);
    const Format& kept = error_table.format;
    TORCH_CHECK_VALUE(kept.bits == 0 || (kept.bits == 8 && kept.scale_bytes == 4),
                      "errors are kept in 8 bits with fp32 scales, or unquantized");
  }
  const Leading rows(wire, 0);
  const Shape shape{rows.sizes[0], rows.sizes[1], wire_table.numel(), wire.device()};

  EncodeArguments arguments{shape.rows0, shape.rows1, shape.numel};
  arguments.values = rows_of(values, shape);
  arguments.peers = wires_of(peers, true, peers_table, shape);
  arguments.addend = rows_of(addend, shape);
  arguments.addend_sign = float(addend_sign);
  arguments.wire = wires_of(wire, false, wire_table, shape);
  arguments.error = wires_of(error, false, error_table, shape);
  arguments.new_error = wires_of(new_error, false, error_table, shape);
  arguments.averaging = {float(beta), float(1 - beta), float(decay)};
  arguments.compensates = !error_format.empty();
  arguments.stochastic = noise_seed.has_value();
  arguments.noise_seed = uint32_t(noise_seed.value_or(0));
  ZEROPP_RUN(encode, arguments, wire);
}

void decode(const Tensor& peers, IntArrayRef format, const Tensor& out, bool accumulate) {
  const FormatTable table(format);
  const Leading rows(out, 0);
  const Shape shape{rows.sizes[0], rows.sizes[1], table.numel(), out.device()};
  const DecodeArguments arguments{
      shape.rows0, shape.rows1, wires_of(peers, true, table, shape), rows_of(out, shape), accumulate};
  ZEROPP_RUN(decode, arguments, out);
}

void rotate(const Tensor& values, IntArrayRef format, const Tensor& out) {
  FormatTable table(format);
  // Groups of 32 count from a parameter's first element, whatever its blocks are.
  for (Segment& segment : table.segments) segment.block_size = segment.block_size ? 32 : 0;
  TORCH_CHECK_TYPE(out.scalar_type() == at::kFloat, "a rotation gives fp32, not ", out.scalar_type());
  const Leading rows(out, 0);
  const Shape shape{rows.sizes[0], rows.sizes[1], table.numel(), out.device()};
  const RotateArguments arguments{
      shape.rows0, shape.rows1, shape.numel, table.format, rows_of(values, shape), rows_of(out, shape)};
  ZEROPP_RUN(rotate, arguments, out);
}

const uint8_t* rows_of_bytes(const Tensor& tensor, int64_t rows, int64_t nbytes) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kByte, "wires are uint8, not ", tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.is_contiguous() && tensor.size(-1) == nbytes && tensor.numel() == rows * nbytes,
                    rows, " contiguous rows of ", nbytes, " bytes are needed, not ", tensor.sizes());
  return tensor.const_data_ptr<uint8_t>();
}

void requantize(const Tensor& values, const OptionalTensor& old, IntArrayRef format, const Tensor& wire) {
  const FormatTable table(format);
  TORCH_CHECK_VALUE(values.is_contiguous() && values.size(-1) == table.numel(), "contiguous rows are needed");
  const int64_t rows = table.numel() ? values.numel() / table.numel() : 0;
  uint8_t* out = const_cast<uint8_t*>(rows_of_bytes(wire, rows, table.nbytes));
  const uint8_t* before = old ? rows_of_bytes(*old, rows, table.nbytes) : nullptr;
  const auto* from = static_cast<const uint8_t*>(values.const_data_ptr());
  for (int64_t row = 0; row < rows; row++) {
    cpu::requantize(table.format, from + row * table.numel() * values.element_size(), type_of(values),
                    before ? before + row * table.nbytes : nullptr, out + row * table.nbytes);
  }
}

Tensor encode_moves(const Tensor& old, const Tensor& now, IntArrayRef format) {
  const FormatTable table(format);
  rows_of_bytes(old, 1, table.nbytes), rows_of_bytes(now, 1, table.nbytes);
  return cpu::encode_moves(table.format, old, now);
}

void apply_moves(const Tensor& moves, IntArrayRef format, const Tensor& wires) {
  const FormatTable table(format);
  const int64_t rows = moves.size(0), nbytes = moves.size(1);
  const uint8_t* from = rows_of_bytes(moves, rows, nbytes);
  uint8_t* wire = const_cast<uint8_t*>(rows_of_bytes(wires, rows, table.nbytes));
  for (int64_t row = 0; row < rows; row++) {
    cpu::apply_moves(table.format, from + row * nbytes, nbytes, wire + row * table.nbytes);
  }
}

}  // namespace

TORCH_LIBRARY(megatron_zpp, library) {
  library.def(
      "encode(Tensor? values, Tensor? peers, int[] peers_format, Tensor? addend, float addend_sign, Tensor(a!) wire, "
      "int[] format, Tensor? error, Tensor(b!)? new_error, int[] error_format, float beta, float decay, "
      "int? noise_seed) -> ()");
  library.def("decode(Tensor peers, int[] format, Tensor(a!) out, bool accumulate) -> ()");
  library.def("rotate(Tensor values, int[] format, Tensor(a!) out) -> ()");
  // Moved codes, on a CPU: megatron_zpp/zeropp/wire/moves.py.
  library.def("requantize(Tensor values, Tensor? old, int[] format, Tensor(a!) wire) -> ()");
  library.def("encode_moves(Tensor old, Tensor now, int[] format) -> Tensor");
  library.def("apply_moves(Tensor moves, int[] format, Tensor(a!) wires) -> ()");
  library.def("has_cuda() -> bool", [] { return kHasCuda; });
}

TORCH_LIBRARY_IMPL(megatron_zpp, CPU, library) {
  library.impl("encode", &encode);
  library.impl("decode", &decode);
  library.impl("rotate", &rotate);
  library.impl("requantize", &requantize);
  library.impl("encode_moves", &encode_moves);
  library.impl("apply_moves", &apply_moves);
}

#ifdef ZEROPP_WITH_CUDA
TORCH_LIBRARY_IMPL(megatron_zpp, CUDA, library) {
  library.impl("encode", &encode);
  library.impl("decode", &decode);
  library.impl("rotate", &rotate);
}
#endif

}  // namespace zeropp
