// The operators megatron_zpp::encode, decode, rotate, move_exponents and the ones for moved codes: checks, and the way to the
// kernels of the tensors' device.
// Their Python side, with what each argument means, is megatron_zpp/zeropp/wire/kernels.py.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
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

Exponents exponents_of(const OptionalTensor& tensor, bool has_peers, const Shape& shape) {
  if (!tensor) return {};
  TORCH_CHECK_TYPE(tensor->scalar_type() == at::kByte, "exponents are uint8, not ", tensor->scalar_type());
  const Leading leading(*tensor, has_peers);
  shape.check(*tensor, leading, shape.numel);
  return {tensor->data_ptr<uint8_t>(), has_peers ? tensor->stride(0) : 0, leading.strides[0], leading.strides[1]};
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
#define ZEROPP_RUN_MOVES(kernel, arguments, tensor) run_on_cuda(cuda::kernel, arguments, tensor)
#define ZEROPP_MOVES_ON_DEVICE(tensor) (tensor).is_cuda()
#else
constexpr bool kHasCuda = false;

#define ZEROPP_RUN(kernel, arguments, tensor) cpu::kernel(arguments)
#ifdef ZEROPP_CUDA_ON_CPU
#define ZEROPP_RUN_MOVES(kernel, arguments, tensor) TORCH_CHECK(cuda::kernel(arguments, nullptr) == 0, "a launch")
#define ZEROPP_MOVES_ON_DEVICE(tensor) true
#endif
#endif

void encode(const OptionalTensor& values, const OptionalTensor& peers, IntArrayRef peers_format,
            const OptionalTensor& addend, const Tensor& wire, IntArrayRef format,
            const OptionalTensor& error, const OptionalTensor& new_error, IntArrayRef error_format, double beta,
            double decay, std::optional<int64_t> noise_seed, bool keeps_scales, const OptionalTensor& kept,
            const OptionalTensor& exponents) {
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
  arguments.wire = wires_of(wire, false, wire_table, shape);
  arguments.error = wires_of(error, false, error_table, shape);
  arguments.new_error = wires_of(new_error, false, error_table, shape);
  arguments.averaging = {float(beta), float(1 - beta), float(decay)};
  arguments.compensates = !error_format.empty();
  arguments.stochastic = noise_seed.has_value();
  arguments.noise_seed = uint32_t(noise_seed.value_or(0));
  TORCH_CHECK_VALUE(!keeps_scales || (!wire_table.format.is_mean && error_format.empty()),
                    "scales are kept with the code absmax alone, and without LoCo");
  arguments.keeps_scales = keeps_scales;
  arguments.kept = wires_of(kept, false, wire_table, shape);
  TORCH_CHECK_VALUE(!keeps_scales || !exponents, "scales are kept of blocks whose elements have none");
  arguments.exponents = exponents_of(exponents, false, shape);
  ZEROPP_RUN(encode, arguments, wire);
}

void decode(const Tensor& peers, IntArrayRef format, const Tensor& out, bool accumulate,
            const OptionalTensor& exponents) {
  const FormatTable table(format);
  const Leading rows(out, 0);
  const Shape shape{rows.sizes[0], rows.sizes[1], table.numel(), out.device()};
  TORCH_CHECK_VALUE(!exponents || exponents->size(0) == peers.size(0), "exponents of all peers are needed");
  TORCH_CHECK_TYPE(!exponents || out.scalar_type() == at::kFloat, "with exponents out is fp32, not ", out.scalar_type());
  const DecodeArguments arguments{shape.rows0, shape.rows1, wires_of(peers, true, table, shape), rows_of(out, shape),
                                  accumulate, exponents_of(exponents, true, shape)};
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

void move_exponents(const OptionalTensor& exponents, const Tensor& wire, IntArrayRef format, IntArrayRef moves,
                    const Tensor& out) {
  const FormatTable table(format);
  TORCH_CHECK_VALUE(table.format.bits > 0, "values that are not quantized move no exponents");
  TORCH_CHECK_VALUE(moves.size() == (size_t(1) << table.format.bits) + 1, "a move for each size of a level is needed");
  const Leading rows(out, 0);
  const Shape shape{rows.sizes[0], rows.sizes[1], table.numel(), out.device()};
  MoveExponentsArguments arguments{shape.rows0, shape.rows1, wires_of(wire, false, table, shape),
                                   exponents_of(exponents, false, shape), exponents_of(out, false, shape), {}};
  LevelMoves& by_level = arguments.moves;
  by_level.first = int(moves[0]);
  for (size_t size = 1; size < moves.size(); size++) {
    if (moves[size] == moves[size - 1]) continue;
    TORCH_CHECK_VALUE(by_level.num_changes < kMostChanges, "moves change more than ", kMostChanges, " times");
    by_level.from[by_level.num_changes] = int(size);
    by_level.by[by_level.num_changes++] = int(moves[size] - moves[size - 1]);
  }
  ZEROPP_RUN(move_exponents, arguments, out);
}

// The codes of a wire buffer as moves.h describes them; `table` points into the other members or, where kernels read it, to
// what moves_table made of them.
struct Codes {
  explicit Codes(const FormatTable& of, const Tensor* moves_table = nullptr) {
    const Format& format = of.format;
    table.bits = format.bits, table.scale_bytes = format.scale_bytes;
    for (const Segment& s : of.segments) {
      if (s.block_size == 0) continue;
      const int64_t blocks = (s.stop - s.start + s.block_size - 1) / s.block_size;
      runs.push_back({table.num_codes, blocks * s.block_size, s.codes, s.scales, s.block_size, table.num_blocks});
      table.num_codes += blocks * s.block_size, table.num_blocks += blocks;
    }
    table.num_quantized = int(runs.size());
    for (const Segment& s : of.segments) {
      if (s.block_size != 0) continue;
      if (format.type == Type::kFloat) {
        raw.push_back({s.codes, 4 * (s.stop - s.start), table.raw_bytes});
        table.raw_bytes += raw.back().nbytes;
      } else {
        runs.push_back({table.num_codes, s.stop - s.start, s.codes, 0, 0, 0});
        table.num_codes += s.stop - s.start;
      }
    }
    table.runs = runs.data(), table.num_runs = int(runs.size());
    table.raw = raw.data(), table.num_raw = int(raw.size());
    if (moves_table == nullptr) return;
    TORCH_CHECK_VALUE(moves_table->numel() == nbytes_of_runs() + nbytes_of_raw(), "a table of another format's moves");
    table.runs = reinterpret_cast<const Run*>(moves_table->const_data_ptr<uint8_t>());
    table.raw = reinterpret_cast<const Raw*>(table.runs + runs.size());
  }
  Codes(const Codes&) = delete;

  int64_t nbytes_of_runs() const { return int64_t(runs.size() * sizeof(Run)); }
  int64_t nbytes_of_raw() const { return int64_t(raw.size() * sizeof(Raw)); }

  std::vector<Run> runs;
  std::vector<Raw> raw;
  CodeTable table;
};

// Returns what kernels read of the codes, in host memory: uint8 [n]. Kernels on a device want it there.
Tensor moves_table(IntArrayRef format) {
  const FormatTable table(format);
  const Codes codes(table);
  Tensor made = at::empty({codes.nbytes_of_runs() + codes.nbytes_of_raw()}, at::kByte);
  uint8_t* to = made.data_ptr<uint8_t>();
  std::copy_n(reinterpret_cast<const uint8_t*>(codes.runs.data()), codes.nbytes_of_runs(), to);
  std::copy_n(reinterpret_cast<const uint8_t*>(codes.raw.data()), codes.nbytes_of_raw(), to + codes.nbytes_of_runs());
  return made;
}

uint8_t* rows_of_bytes(const Tensor& tensor, int64_t rows, int64_t nbytes) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kByte, "wires are uint8, not ", tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.is_contiguous() && tensor.size(-1) == nbytes && tensor.numel() == rows * nbytes,
                    rows, " contiguous rows of ", nbytes, " bytes are needed, not ", tensor.sizes());
  return tensor.data_ptr<uint8_t>();
}

#ifdef ZEROPP_MOVES_ON_DEVICE
// Wires are read and written as vectors.
uint8_t* vectors_of(const Tensor& wires) {
  const bool is_aligned = reinterpret_cast<intptr_t>(wires.const_data_ptr()) % 16 == 0 && wires.size(-1) % 16 == 0;
  TORCH_CHECK_VALUE(is_aligned, "wires must begin at multiples of 16 bytes: copy the slice");
  return wires.data_ptr<uint8_t>();
}

// measured: what measure_moves returns.
MovesArguments encoding(const Codes& codes, const Tensor& old, const Tensor& now, at::TensorList measured) {
  MovesArguments arguments{codes.table};
  arguments.old = vectors_of(old), arguments.now = vectors_of(now);
  arguments.flags = measured[1].data_ptr<uint8_t>(), arguments.headers = measured[2].data_ptr<uint8_t>();
  arguments.scales_before = measured[3].data_ptr<int32_t>(), arguments.chunk_starts = measured[4].data_ptr<int64_t>();
  return arguments;
}

std::vector<Tensor> measure_moves_on_device(const Codes& codes, const Tensor& old, const Tensor& now) {
  const int64_t num_flags = codes.table.flag_bytes(), num_chunks = codes.table.num_chunks();
  const auto options = old.options();
  const Tensor chunk_starts = at::empty({num_chunks + 1}, options.dtype(at::kLong));
  std::vector<Tensor> measured = {chunk_starts.narrow(0, -1, 1), at::empty({num_flags}, options),
                                  at::empty({kHeaderBytes * num_chunks}, options),
                                  at::empty({num_flags}, options.dtype(at::kInt)), chunk_starts};
  ZEROPP_RUN_MOVES(measure_moves, encoding(codes, old, now, measured), old);
  return measured;
}

Tensor write_moves_on_device(const Codes& codes, const Tensor& old, const Tensor& now, at::TensorList measured,
                             int64_t nbytes) {
  MovesArguments arguments = encoding(codes, old, now, measured);
  Tensor out = at::zeros({nbytes + 3}, old.options()).narrow(0, 0, nbytes);  // bits are set in words of 4 bytes
  arguments.moves = out.data_ptr<uint8_t>();
  ZEROPP_RUN_MOVES(write_moves, arguments, old);
  return out;
}

void apply_moves_on_device(const Codes& codes, const Tensor& moves, const Tensor& wires) {
  const CodeTable& table = codes.table;
  const int64_t rows = moves.size(0), blocks = std::min<int64_t>(cuda::kMovingBlocks, table.num_chunks() * rows);
  TORCH_CHECK_VALUE(moves.size(1) >= table.flag_bytes() + table.raw_bytes + kHeaderBytes * table.num_chunks(),
                    "a buffer of moves ends too early");
  MovesArguments arguments{table, rows};
  arguments.wires = vectors_of(wires), arguments.wire_bytes = wires.size(-1);
  arguments.moves = moves.data_ptr<uint8_t>(), arguments.move_bytes = moves.size(1);
  // All of these must be held until the kernels have been launched.
  const auto options = wires.options();
  const Tensor scales_before = at::empty({rows, table.flag_bytes()}, options.dtype(at::kInt));
  const Tensor chunk_starts = at::empty({rows, table.num_chunks() + 1}, options.dtype(at::kLong));
  const Tensor lists = at::empty({blocks, 2 * 3 * kChunk}, options);
  arguments.scales_before = scales_before.data_ptr<int32_t>(), arguments.chunk_starts = chunk_starts.data_ptr<int64_t>();
  arguments.lists = reinterpret_cast<uint16_t*>(lists.data_ptr<uint8_t>());
  ZEROPP_RUN_MOVES(apply_moves, arguments, wires);
}
#endif

// Returns the bytes of the moves, int64 [1] on their device, and what write_moves needs besides.
std::vector<Tensor> measure_moves(const Tensor& old, const Tensor& now, IntArrayRef format, const Tensor& moves_table) {
  const FormatTable table(format);
  const Codes codes(table, &moves_table);
  const uint8_t *before = rows_of_bytes(old, 1, table.nbytes), *after = rows_of_bytes(now, 1, table.nbytes);
#ifdef ZEROPP_MOVES_ON_DEVICE
  if (ZEROPP_MOVES_ON_DEVICE(old)) return measure_moves_on_device(codes, old, now);
#endif
  std::vector<uint8_t> moves;
  cpu::encode_moves(codes.table, before, after, moves);
  Tensor written = at::empty({int64_t(moves.size())}, old.options());
  if (!moves.empty()) memcpy(written.data_ptr(), moves.data(), moves.size());
  Tensor nbytes = at::empty({1}, old.options().dtype(at::kLong));
  *nbytes.data_ptr<int64_t>() = int64_t(moves.size());
  return {nbytes, written};
}

// Writes measured moves into `nbytes` bytes or, at their end, less.
Tensor write_moves(const Tensor& old, const Tensor& now, IntArrayRef format, const Tensor& moves_table,
                   at::TensorList measured, int64_t nbytes) {
#ifdef ZEROPP_MOVES_ON_DEVICE
  if (ZEROPP_MOVES_ON_DEVICE(old)) {
    const FormatTable table(format);
    return write_moves_on_device(Codes(table, &moves_table), old, now, measured, nbytes);
  }
#endif
  const Tensor& written = measured[1];
  TORCH_CHECK_VALUE(nbytes >= written.numel(), "moves of ", written.numel(), " bytes do not fit into ", nbytes);
  Tensor out = at::zeros({nbytes}, old.options());
  out.narrow(0, 0, written.numel()).copy_(written);
  return out;
}

void apply_moves(const Tensor& moves, IntArrayRef format, const Tensor& moves_table, const Tensor& wires) {
  const FormatTable table(format);
  const Codes codes(table, &moves_table);
  const int64_t rows = moves.size(0), nbytes = moves.size(1);
  const uint8_t* from = rows_of_bytes(moves, rows, nbytes);
  uint8_t* wire = rows_of_bytes(wires, rows, table.nbytes);
#ifdef ZEROPP_MOVES_ON_DEVICE
  if (ZEROPP_MOVES_ON_DEVICE(wires)) return apply_moves_on_device(codes, moves, wires);
#endif
  for (int64_t row = 0; row < rows; row++) {
    const bool is_whole = cpu::apply_moves(codes.table, from + row * nbytes, nbytes, wire + row * table.nbytes);
    TORCH_CHECK_VALUE(is_whole, "a buffer of moves ends too early");
  }
}

}  // namespace

TORCH_LIBRARY(megatron_zpp, library) {
  library.def(
      "encode(Tensor? values, Tensor? peers, int[] peers_format, Tensor? addend, Tensor(a!) wire, "
      "int[] format, Tensor? error, Tensor(b!)? new_error, int[] error_format, float beta, float decay, "
      "int? noise_seed, bool keeps_scales=False, Tensor? kept=None, Tensor? exponents=None) -> ()");
  library.def("decode(Tensor peers, int[] format, Tensor(a!) out, bool accumulate, Tensor? exponents=None) -> ()");
  library.def("rotate(Tensor values, int[] format, Tensor(a!) out) -> ()");
  library.def("move_exponents(Tensor? exponents, Tensor wire, int[] format, int[] moves, Tensor(a!) out) -> ()");
  // Moved codes: megatron_zpp/zeropp/wire/moves.py.
  library.def("moves_table(int[] format) -> Tensor");
  library.def("measure_moves(Tensor old, Tensor now, int[] format, Tensor moves_table) -> Tensor[]");
  library.def(
      "write_moves(Tensor old, Tensor now, int[] format, Tensor moves_table, Tensor[] measured, int nbytes) -> Tensor");
  library.def("apply_moves(Tensor moves, int[] format, Tensor moves_table, Tensor(a!) wires) -> ()");
  library.def("has_cuda() -> bool", [] { return kHasCuda; });
}

TORCH_LIBRARY_IMPL(megatron_zpp, CompositeExplicitAutograd, library) { library.impl("moves_table", &moves_table); }

void implement(torch::Library& library) {
  library.impl("encode", &encode);
  library.impl("decode", &decode);
  library.impl("rotate", &rotate);
  library.impl("move_exponents", &move_exponents);
  library.impl("measure_moves", &measure_moves);
  library.impl("write_moves", &write_moves);
  library.impl("apply_moves", &apply_moves);
}

TORCH_LIBRARY_IMPL(megatron_zpp, CPU, library) { implement(library); }
#if defined(ZEROPP_WITH_CUDA)
TORCH_LIBRARY_IMPL(megatron_zpp, CUDA, library) { implement(library); }
#elif defined(ZEROPP_CUDA_ON_CPU)
TORCH_LIBRARY_IMPL(megatron_zpp, PrivateUse1, library) { implement(library); }  // tests/zeropp/cuda_on_cpu/device.cpp
#endif

}  // namespace zeropp
