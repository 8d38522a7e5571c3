// Decoding, the exponents of elements' scales and rotation; and which file encodes what.

#include "kernels.h"

namespace zeropp::cuda {
namespace {

// ---- Decoding: of one peer several groups at a time, of several peers one group.

constexpr int kDecodesInFlight = 2;  // groups whose loads a thread issues before it uses the first

template <class Out>
__device__ void write_out(const DecodeArguments& a, const VectorsOf<Out>& before, int valid, float (&values)[kGroup],
                          uint8_t* out) {
  if (a.accumulates) {
    float addend[kGroup];
    read_as<Out>(before, valid, addend);
    add(values, addend);
  }
  store_as<Out>(values, valid, out);
}

// The general one asks for one thread block a multiprocessor, or the compiler keeps to 64 registers.
template <int kBits, class Out>
__global__ void __launch_bounds__(kThreads, kBits == 0) decode_tiles(const __grid_constant__ Launch<DecodeArguments> launch) {
  const DecodeArguments& a = launch.arguments;
  const Item& item = item_of_block(launch);
  const Format& format = a.peers.format;
  const Row row = row_of_block(launch);
  const uint8_t* wire = at(a.peers, row);
  const int64_t first = (tile_of_block(launch) - item.first_tile) * kDecodesInFlight * kStride + threadIdx.x * kGroup;
  const bool is_plain = item.own.block_size == 0;
  Encoded encoded[kDecodesInFlight];
  VectorsOf<float> plain[kDecodesInFlight];
  VectorsOf<Out> before[kDecodesInFlight];
#pragma unroll
  for (int j = 0; j < kDecodesInFlight; j++) {
    const int64_t offset = first + j * kStride, element = item.own.start + offset;
    const int valid = num_valid(item.own, offset);
    const Place place = place_of<kBits>(format, item.own, element);
    if (is_plain) fetch(wire + place.codes, valid * int(size_of(format.type)), plain[j]);
    else fetch_codes<kBits>(wire, format, place, is_in_block(item.own, offset), encoded[j]);
    if (a.accumulates) fetch(at(a.out, row, element), valid * int(sizeof(Out)), before[j]);
  }
#pragma unroll
  for (int j = 0; j < kDecodesInFlight; j++) {
    const int64_t offset = first + j * kStride;
    const int valid = num_valid(item.own, offset);
    float values[kGroup];
    if (is_plain) read(plain[j], format.type, valid, values);
    else read_codes<kBits>(encoded[j], format, valid, values);
    write_out<Out>(a, before[j], valid, values, at(a.out, row, item.own.start + offset));
  }
}

template <int kBits, class Out>
__global__ void __launch_bounds__(kThreads) decode_sums(const __grid_constant__ Launch<DecodeArguments> launch) {
  const DecodeArguments& a = launch.arguments;
  const Item& item = item_of_block(launch);
  const Row row = row_of_block(launch);
  const int64_t offset = (tile_of_block(launch) - item.first_tile) * kStride + threadIdx.x * kGroup;
  const int64_t element = item.own.start + offset;
  const int valid = num_valid(item.own, offset);
  uint8_t* out = at(a.out, row, element);
  VectorsOf<Out> before;
  if (a.accumulates) fetch(out, valid * int(sizeof(Out)), before);
  float values[kGroup];
  read_sum<kBits>(a.peers, item.own, row, element, valid, values);
  write_out<Out>(a, before, valid, values, out);
}

// Sums peers whose elements have scales. The sum begins at 0, as in plain torch, which ends up the same as 0 added last.
template <int kBits>
constexpr int kScaledPeers = kBits == 0 ? 4 : 8;

template <int kBits>
__global__ void __launch_bounds__(kThreads) decode_scaled(const __grid_constant__ Launch<DecodeArguments> launch) {
  const DecodeArguments& a = launch.arguments;
  const Item& item = item_of_block(launch);
  const Format& format = a.peers.format;
  const Row row = row_of_block(launch);
  const int64_t offset = (tile_of_block(launch) - item.first_tile) * kStride + threadIdx.x * kGroup;
  const int64_t element = item.own.start + offset;
  const int valid = num_valid(item.own, offset);
  uint8_t* out = at(a.out, row, element);
  VectorsOf<float> before;
  if (a.accumulates) fetch(out, valid * int(sizeof(float)), before);
  __shared__ Sixteenths sixteenths;
  sixteenths.fill();
  float values[kGroup];
  if (item.own.block_size == 0) {
    read_sum<kBits>(a.peers, item.own, row, element, valid, values);
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; i++) values[i] = 0;
    const Place place = place_of<kBits>(format, item.own, element);
    const uint8_t *wire = at(a.peers, row), *exponents = at(a.exponents, row, element);
    const bool exists = is_in_block(item.own, offset);
    const auto add_peers = [&](auto at_once) {
      constexpr int kAtOnce = decltype(at_once)::value;
#pragma unroll 1
      for (int left = a.peers.num_peers; left > 0; left -= kAtOnce) {
        Encoded groups[kAtOnce];
        Bytes bytes[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; j++) {
          if (j >= left) continue;
          const uint8_t* peer = wire + j * a.peers.peer_stride;
          if constexpr (kAtOnce == 1) fetch_codes<kBits>(peer, format, place, exists, groups[j]);
          else if (exists) fetch_group_of_codes<kBits>(peer, format, place, groups[j]);
          fetch(exponents + j * a.exponents.peer_stride, valid, bytes[j]);
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; j++) {
          if (j >= left) continue;
          float addend[kGroup];
          read_codes<kBits>(groups[j], format, valid, addend);
          multiply(addend, read(bytes[j]), sixteenths);
          add(values, addend);
        }
        wire += kAtOnce * a.peers.peer_stride, exponents += kAtOnce * a.exponents.peer_stride;
      }
    };
    if (kBits == 0 && format.bits == 1) add_peers(std::integral_constant<int, 1>());
    else add_peers(std::integral_constant<int, kScaledPeers<kBits>>());
  }
#pragma unroll
  for (int i = 0; i < kGroup; i++) values[i] += 0.f;
  write_out<float>(a, before, valid, values, out);
}

// ---- Exponents, moved by the codes that were sent.

struct FetchedMove {
  Encoded group;
  Bytes exponents;
};

template <int kBits>
__device__ void fetch_move(const MoveExponentsArguments& a, const Segment& own, const Row& row, int64_t offset,
                           bool exists, FetchedMove& fetched) {
  const int valid = num_valid(own, offset);
  const int64_t element = own.start + offset;
  fetched.exponents = {};
  if (a.exponents.data != nullptr) fetch(at(a.exponents, row, element), valid, fetched.exponents);
  if (own.block_size == 0) return;
  const Format& format = a.wire.format;
  fetch_codes<kBits>(at(a.wire, row), format, place_of<kBits>(format, own, element), exists, fetched.group);
}

constexpr int kNoBlock = 1 << 20;  // more than any exponent

// Exponents before the block's least one is taken off. Returns the least of this group.
template <int kBits>
__device__ int moved_group(const MoveExponentsArguments& a, const FetchedMove& fetched, int valid, bool exists,
                           int (&moved)[kGroup]) {
  float codes[kGroup] = {};
  const float scale = exists ? fetched.group.scale : 0;
  const bool has_half_steps = is_mean<kBits>(a.wire.format) && scale > 0;
  if (exists) {
    with_bits<kBits>(a.wire.format.bits,
                     [&](auto bits) { read_stream_as<decltype(bits)::value>(fetched.group.stream, codes); });
  }
  const uint64_t exponents = read(fetched.exponents);
  const int first = moves_exponents(scale) ? a.moves.first : 0, changes = moves_exponents(scale) ? a.moves.num_changes : 0;
#pragma unroll
  for (int i = 0; i < kGroup; i++) moved[i] = (i < valid ? int(byte_of(exponents, i)) : kQuietest) - first;
#pragma unroll 1
  for (int t = 0; t < changes; t++) {
#pragma unroll
    for (int i = 0; i < kGroup; i++) {
      moved[i] -= doubled_level(int(codes[i]), has_half_steps) >= a.moves.from[t] ? a.moves.by[t] : 0;
    }
  }
  int least = exists ? moved[0] : kNoBlock;
#pragma unroll
  for (int i = 0; exists && i < kGroup; i++) least = moved[i] < least ? moved[i] : least;
  return least;
}

// All threads of a warp come here together.
__device__ void store_moved(const MoveExponentsArguments& a, const Row& row, int64_t element, int valid, int least,
                            const int (&moved)[kGroup]) {
  uint64_t bytes = 0;
#pragma unroll
  for (int i = 0; i < kGroup; i++) {
    const int quieter = moved[i] - least;
    bytes |= uint64_t(quieter < kQuietest ? quieter : kQuietest) << (8 * i);
  }
  store(bytes, valid, at(a.out, row, element));
}

constexpr int kMovesInFlight = 2;

// Blocks that a team of threads of a warp holds, and what is not quantized.
template <int kBits>
__global__ void __launch_bounds__(kThreads) move_exponents_of_tiles(
    const __grid_constant__ Launch<MoveExponentsArguments> launch) {
  const MoveExponentsArguments& a = launch.arguments;
  const Segment& own = item_of_block(launch).own;
  const Row row = row_of_block(launch);
  const int64_t first = (tile_of_block(launch) - item_of_block(launch).first_tile) * kMovesInFlight * kStride +
                        threadIdx.x * kGroup;
  const bool is_plain = own.block_size == 0;
  FetchedMove fetched[kMovesInFlight];
#pragma unroll
  for (int j = 0; j < kMovesInFlight; j++) {
    const int64_t offset = first + j * kStride;
    fetch_move<kBits>(a, own, row, offset, !is_plain && is_in_block(own, offset), fetched[j]);
  }
#pragma unroll
  for (int j = 0; j < kMovesInFlight; j++) {
    const int64_t offset = first + j * kStride;
    const int valid = num_valid(own, offset);
    int moved[kGroup];
    int least = moved_group<kBits>(a, fetched[j], valid, !is_plain && is_in_block(own, offset), moved);
    for (int other = int(own.block_size) / kGroup / 2; other > 0; other /= 2) {
      const int others = __shfl_xor_sync(kAllLanes, least, other);
      least = others < least ? others : least;
    }
    store_moved(a, row, own.start + offset, valid, is_plain ? 0 : least, moved);
  }
}

// Blocks of any other size: a thread block for each, which reads it twice.
template <int kBits>
__global__ void __launch_bounds__(kThreads) move_exponents_of_blocks(
    const __grid_constant__ Launch<MoveExponentsArguments> launch) {
  const MoveExponentsArguments& a = launch.arguments;
  const Segment& own = item_of_block(launch).own;
  const Row row = row_of_block(launch);
  const int64_t start = (tile_of_block(launch) - item_of_block(launch).first_tile) * own.block_size;
  const int64_t stop = start + own.block_size;
  int moved[kGroup];
  // work(offset, valid, the least) of a group of each thread at a time.
  const auto for_each_group = [&](const auto& work) {
    for (int64_t tile = start; tile < stop; tile += kStride) {
      const int64_t offset = tile + threadIdx.x * kGroup;
      const bool exists = offset < stop;
      const int valid = exists ? num_valid(own, offset) : 0;
      FetchedMove fetched;
      fetch_move<kBits>(a, own, row, exists ? offset : start, exists, fetched);
      work(offset, valid, moved_group<kBits>(a, fetched, valid, exists, moved));
    }
  };
  int least = kNoBlock;
  for_each_group([&](int64_t, int, int of_group) { least = of_group < least ? of_group : least; });
  __shared__ int least_of_thread[kThreads];
  least_of_thread[threadIdx.x] = least;
  __syncthreads();
#pragma unroll 1
  for (int thread = 0; thread < kThreads; thread++) {
    least = least_of_thread[thread] < least ? least_of_thread[thread] : least;
  }
  for_each_group([&](int64_t offset, int valid, int) { store_moved(a, row, own.start + offset, valid, least, moved); });
}

// ---- Rotation: a group of 32 elements is in the 32 threads of a warp, one each.

__global__ void __launch_bounds__(kThreads) rotate_tiles(const __grid_constant__ Launch<RotateArguments> launch) {
  const RotateArguments& a = launch.arguments;
  const Item& item = item_of_block(launch);
  const Row row = row_of_block(launch);
  const int64_t numel = item.own.stop - item.own.start, tile = (tile_of_block(launch) - item.first_tile) * kStride;
#pragma unroll
  for (int64_t offset = tile + threadIdx.x; offset < tile + kStride; offset += kThreads) {
    const bool exists = offset < numel;
    const int64_t element = item.own.start + offset;
    float value = 0;
    if (exists) {
      const uint8_t* from = at(a.values, row, element);
      if (a.values.type == Type::kFloat) value = *reinterpret_cast<const float*>(from);
      else if (a.values.type == Type::kBFloat16) value = to_float(*reinterpret_cast<const BFloat16*>(from));
      else value = to_float(*reinterpret_cast<const Half*>(from));
    }
    float rotated = value;
#pragma unroll
    for (int width = 1; width < 32; width *= 2) {
      const float other = __shfl_xor_sync(kAllLanes, rotated, width);
      rotated = threadIdx.x & width ? other - rotated : rotated + other;
    }
    const bool whole = item.own.block_size != 0 && offset / 32 * 32 + 32 <= numel;
    if (exists) *reinterpret_cast<float*>(at(a.out, row, element)) = whole ? rotated * kHadamardScale : value;
  }
}

template <int kBits, class Out>
int decode_bits_to(const DecodeArguments& a, cudaStream_t stream) {
  const auto wanted = [&a](const Segment& segment) { return !is_moved(a, segment); };
  const bool is_sum = a.peers.num_peers > 1;
  auto* kernel = is_sum ? decode_sums<kBits, Out> : decode_tiles<kBits, Out>;
  const auto tiles = is_sum ? num_tiles<1> : num_tiles<kDecodesInFlight>;
  const int status = launch(kernel, a, a.peers.format, nullptr, nullptr, stream, wanted, tiles);
  return status == cudaSuccess ? move(a, a.peers.format, stream) : status;
}

template <class Out>
int decode_to(const DecodeArguments& a, cudaStream_t stream) {
  switch (compiled_bits(a.peers.format)) {
    case 8: return decode_bits_to<8, Out>(a, stream);
    case 4: return decode_bits_to<4, Out>(a, stream);
    case 2: return decode_bits_to<2, Out>(a, stream);
    default: return decode_bits_to<0, Out>(a, stream);
  }
}

}  // namespace

int encode(const EncodeArguments& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (a.rows0 * a.rows1 == 0) return cudaSuccess;
  if (a.values.data == nullptr) {
    const bool are_8_bits = compiled_bits(a.peers.format) == 8;
    if (a.has_exponents()) return are_8_bits ? encode_scaled_wires_of_8_bits(a, on) : encode_scaled_wires(a, on);
    return are_8_bits ? encode_wires_of_8_bits(a, on) : encode_wires(a, on);
  }
  return a.values.type == Type::kFloat ? encode_floats(a, on) : encode_16_bits(a, on);
}

int decode(const DecodeArguments& a, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (a.rows0 * a.rows1 == 0) return cudaSuccess;
  if (a.exponents.data != nullptr) {
    const auto all = [](const Segment&) { return true; };
    auto* kernel = compiled_bits(a.peers.format) == 2 ? decode_scaled<2> : decode_scaled<0>;
    return launch(kernel, a, a.peers.format, nullptr, nullptr, on, all, num_tiles<1>);
  }
  if (a.out.type == Type::kFloat) return decode_to<float>(a, on);
  if (a.out.type == Type::kBFloat16) return decode_to<BFloat16>(a, on);
  return decode_to<Half>(a, on);
}

int rotate(const RotateArguments& a, void* stream) {
  if (a.rows0 * a.rows1 == 0) return cudaSuccess;
  const auto all = [](const Segment&) { return true; };
  return launch(rotate_tiles, a, a.format, nullptr, nullptr, static_cast<cudaStream_t>(stream), all, num_tiles<1>);
}

int move_exponents(const MoveExponentsArguments& a, void* stream) {
  if (a.rows0 * a.rows1 == 0) return cudaSuccess;
  const auto on = static_cast<cudaStream_t>(stream);
  const Format& format = a.wire.format;
  const bool is_common = compiled_bits(format) == 2;
  auto* tiles = is_common ? move_exponents_of_tiles<2> : move_exponents_of_tiles<0>;
  const int status = launch(tiles, a, format, nullptr, nullptr, on, fits_a_warp, num_tiles<kMovesInFlight>);
  if (status != cudaSuccess) return status;
  const auto others = [](const Segment& segment) { return !fits_a_warp(segment); };
  return launch(move_exponents_of_blocks<0>, a, format, nullptr, nullptr, on, others, num_blocks);
}

}  // namespace zeropp::cuda
