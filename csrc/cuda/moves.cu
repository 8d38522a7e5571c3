// Moved codes on a GPU: encode_moves and apply_moves of megatron_zpp/zeropp/wire/moves.py, which says what the bytes are.
//
// A thread block has a chunk, a thread 64 of its codes when it encodes. Where its bits go follows from sums over the threads
// before it: of moves, of gaps' quotients, and the last place that moved. When a chunk is applied, the ones of a unary part
// are found 32 bits a thread, then every list is decoded side by side: the i-th one at bit p has p - i zeros before it.

#include <cuda_runtime.h>

#define ZEROPP_CUDA
#include "../moves.h"

namespace zeropp::cuda {
namespace {

constexpr int kMoveThreads = 256;
constexpr int kPerThread = kChunk / kMoveThreads;
constexpr int kWarps = kMoveThreads / 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// ---- Sums over the threads of a block. All threads come here together.

struct Sum {
  static constexpr int32_t kNothing = 0;
  __device__ static int32_t of(int32_t a, int32_t b) { return a + b; }
};
struct Last {
  static constexpr int32_t kNothing = -1;
  __device__ static int32_t of(int32_t a, int32_t b) { return a > b ? a : b; }
};

struct Scanned {
  int32_t before, total;  // over the threads before this one, and over all
};

template <class Operation>
__device__ Scanned scan(int32_t value) {
  __shared__ int32_t of_warp[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t upto = value;
  for (int width = 1; width < 32; width *= 2) {
    const int32_t other = __shfl_up_sync(kAllLanes, upto, width);
    if (lane >= width) upto = Operation::of(other, upto);
  }
  const int32_t previous = __shfl_up_sync(kAllLanes, upto, 1);
  if (lane == 31) of_warp[warp] = upto;
  __syncthreads();
  int32_t before = Operation::kNothing, total = Operation::kNothing;
  for (int w = 0; w < kWarps; w++) {
    if (w < warp) before = Operation::of(before, of_warp[w]);
    total = Operation::of(total, of_warp[w]);
  }
  __syncthreads();  // the next scan writes there
  return {lane > 0 ? Operation::of(before, previous) : before, total};
}

// ---- Bits at any place of a buffer.

__device__ uint32_t load_word(const uint8_t* at, const uint8_t* end) {
  uint32_t word = 0;
  for (int i = 0; i < 4 && at + i < end; i++) word |= uint32_t(at[i]) << 8 * i;
  return word;
}

// width <= 17. What is behind the end is zeros.
__device__ uint32_t load_bits(const uint8_t* from, const uint8_t* end, int64_t bit, int width) {
  return load_word(from + bit / 8, end) >> bit % 8 & ((1u << width) - 1);
}

// Other threads set other bits of the same words, which were zero. `buffer` begins at a multiple of 4 bytes.
__device__ void set_bits(uint8_t* buffer, int64_t bit, int width, uint32_t value) {
  uint32_t* word = reinterpret_cast<uint32_t*>(buffer) + bit / 32;
  const int shift = int(bit % 32);
  if (value << shift) atomicOr(word, value << shift);
  if (shift + width > 32 && value >> (32 - shift)) atomicOr(word + 1, value >> (32 - shift));
}

__device__ int64_t bytes_of(int64_t bits) { return (bits + 7) / 8; }

__device__ void store_little(uint8_t* to, uint32_t value, int nbytes) {
  for (int i = 0; i < nbytes; i++) to[i] = uint8_t(value >> 8 * i);
}

// ---- Encoding.

__global__ void __launch_bounds__(kMoveThreads) find_new_scales(const __grid_constant__ MovesArguments a) {
  const CodeTable& table = a.table;
  const int64_t byte = int64_t(blockIdx.x) * kMoveThreads + threadIdx.x;
  if (byte >= table.flag_bytes()) return;
  uint32_t flags = 0;
  for (int64_t block = 8 * byte; block < 8 * byte + 8 && block < table.num_blocks; block++) {
    const Run& run = table.runs[table.run_of(block, true)];
    const int64_t at = run.scales + (block - run.block) * table.scale_bytes;
    bool is_new = false;
    for (int i = 0; i < table.scale_bytes; i++) is_new |= a.old[at + i] != a.now[at + i];
    flags |= uint32_t(is_new) << (block - 8 * byte);
  }
  a.flags[byte] = uint8_t(flags);
}

// Measures a chunk and fills its header, or writes its body behind those of others.
template <bool kWrites>
__global__ void __launch_bounds__(kMoveThreads) encode_chunks(const __grid_constant__ MovesArguments a) {
  const int64_t chunk = blockIdx.x, first = chunk * kChunk + threadIdx.x * kPerThread;
  const auto each = [&](const auto& work) {
    each_move(a.table, a.old, a.now, first, first + kPerThread,
              [&](int index, int move) { work(int(threadIdx.x) * kPerThread + index, move); });
  };
  const auto size_of_move = [](int move) { return move < 0 ? -move : move; };

  int32_t count = 0, last = -1, further = 0, last_further = -1, sizes = 0;
  each([&](int position, int move) {
    last = position;
    if (size_of_move(move) > 1) further++, last_further = count, sizes += size_of_move(move) - 2;
    count++;
  });
  const Scanned counts = scan<Sum>(count), places = scan<Last>(last);
  const Scanned furthers = scan<Sum>(further);
  const Scanned further_places = scan<Last>(last_further < 0 ? -1 : counts.before + last_further);
  const int32_t m1 = counts.total, m2 = furthers.total;
  const int k1 = rice_parameter(places.total + 1 - m1, m1);
  const int k2 = rice_parameter(further_places.total + 1 - m2, m2);
  const int k3 = rice_parameter(scan<Sum>(sizes).total, m2);

  // work(index of the move, its gap, its move, index among the further ones, their gap) of this thread's.
  const auto each_coded = [&](const auto& work) {
    int32_t i = counts.before, previous = places.before, j = furthers.before, previous_further = further_places.before;
    each([&](int position, int move) {
      work(i, position - previous - 1, move, j, i - previous_further - 1);
      if (size_of_move(move) > 1) previous_further = i, j++;
      previous = position, i++;
    });
  };
  int32_t quotients = 0, further_quotients = 0, size_quotients = 0;
  each_coded([&](int32_t, int32_t gap, int move, int32_t, int32_t further_gap) {
    quotients += gap >> k1;
    if (size_of_move(move) > 1) further_quotients += further_gap >> k2, size_quotients += (size_of_move(move) - 2) >> k3;
  });
  const Scanned u1 = scan<Sum>(quotients), u2 = scan<Sum>(further_quotients), u3 = scan<Sum>(size_quotients);

  // Where the sections begin: unary and low bits of the gaps, signs, and the same of the further ones and their sizes.
  const int64_t low1 = bytes_of(int64_t(u1.total) + m1), signs = low1 + bytes_of(int64_t(m1) * k1);
  const int64_t unary2 = signs + bytes_of(m1), low2 = unary2 + bytes_of(int64_t(u2.total) + m2);
  const int64_t unary3 = low2 + bytes_of(int64_t(m2) * k2), low3 = unary3 + bytes_of(int64_t(u3.total) + m2);
  if constexpr (!kWrites) {
    if (threadIdx.x != 0) return;
    uint8_t* header = a.headers + chunk * kHeaderBytes;
    store_little(header, uint32_t(m1) | uint32_t(m2) << 16, 4);
    store_little(header + 4, uint32_t(k1 | k2 << 8 | k3 << 16), 4);
    store_little(header + 8, uint32_t(low3 + bytes_of(int64_t(m2) * k3)), 4);
  } else {
    const int64_t body = a.chunk_starts[chunk];
    int32_t unary_bits = u1.before, further_bits = u2.before, size_bits = u3.before;
    each_coded([&](int32_t i, int32_t gap, int move, int32_t j, int32_t further_gap) {
      unary_bits += gap >> k1;
      set_bits(a.moves, 8 * body + unary_bits + i, 1, 1);
      set_bits(a.moves, 8 * (body + low1) + int64_t(i) * k1, k1, gap & ((1 << k1) - 1));
      if (move < 0) set_bits(a.moves, 8 * (body + signs) + i, 1, 1);
      if (size_of_move(move) < 2) return;
      const int more = size_of_move(move) - 2;
      further_bits += further_gap >> k2, size_bits += more >> k3;
      set_bits(a.moves, 8 * (body + unary2) + further_bits + j, 1, 1);
      set_bits(a.moves, 8 * (body + low2) + int64_t(j) * k2, k2, further_gap & ((1 << k2) - 1));
      set_bits(a.moves, 8 * (body + unary3) + size_bits + j, 1, 1);
      set_bits(a.moves, 8 * (body + low3) + int64_t(j) * k3, k3, more & ((1 << k3) - 1));
    });
  }
}

// Flags, new scales, 32-bit values and headers; after the bodies, whose first word may hold a header's last bytes.
__global__ void __launch_bounds__(kMoveThreads) write_heads(const __grid_constant__ MovesArguments a) {
  const CodeTable& table = a.table;
  const int64_t thread = int64_t(blockIdx.x) * kMoveThreads + threadIdx.x;
  if (thread < table.flag_bytes()) {
    a.moves[thread] = a.flags[thread];
    uint8_t* to = a.moves + table.flag_bytes() + int64_t(a.scales_before[thread]) * table.scale_bytes;
    for (int64_t block = 8 * thread; block < 8 * thread + 8 && block < table.num_blocks; block++) {
      if (!(a.flags[thread] >> (block - 8 * thread) & 1)) continue;
      const Run& run = table.runs[table.run_of(block, true)];
      const uint8_t* scale = a.now + run.scales + (block - run.block) * table.scale_bytes;
      for (int i = 0; i < table.scale_bytes; i++) *to++ = scale[i];
    }
  }
  const int64_t num_header_bytes = kHeaderBytes * table.num_chunks(), headers = a.chunk_starts[0] - num_header_bytes;
  if (thread < num_header_bytes) a.moves[headers + thread] = a.headers[thread];
  for (int r = 0; r < table.num_raw; r++) {
    const Raw& raw = table.raw[r];
    if (thread < raw.nbytes) a.moves[headers - table.raw_bytes + raw.moves + thread] = a.now[raw.wire + thread];
  }
}

// ---- Where things are in a row of moves.

__global__ void __launch_bounds__(kMoveThreads) locate(const __grid_constant__ MovesArguments a) {
  const CodeTable& table = a.table;
  const int64_t row = blockIdx.x, num_flags = table.flag_bytes(), num_chunks = table.num_chunks();
  const uint8_t* flags = a.flags != nullptr ? a.flags : a.moves + row * a.move_bytes;
  const int64_t flags_each = (num_flags + kMoveThreads - 1) / kMoveThreads, flag = threadIdx.x * flags_each;
  int32_t new_scales = 0;
  for (int64_t i = flag; i < flag + flags_each && i < num_flags; i++) new_scales += __popc(flags[i]);
  const Scanned scales = scan<Sum>(new_scales);
  int32_t before = scales.before;
  for (int64_t i = flag; i < flag + flags_each && i < num_flags; i++) {
    a.scales_before[row * num_flags + i] = before;
    before += __popc(flags[i]);
  }
  const int64_t start = num_flags + int64_t(scales.total) * table.scale_bytes + table.raw_bytes;
  const uint8_t* headers = a.headers != nullptr ? a.headers : a.moves + row * a.move_bytes + start;
  const uint8_t* end = a.headers != nullptr ? headers + num_chunks * kHeaderBytes : a.moves + (row + 1) * a.move_bytes;
  const int64_t chunks_each = (num_chunks + kMoveThreads - 1) / kMoveThreads, chunk = threadIdx.x * chunks_each;
  const auto size_of_chunk = [&](int64_t c) { return int64_t(load_word(headers + c * kHeaderBytes + 8, end)); };
  int64_t nbytes = 0;
  for (int64_t c = chunk; c < chunk + chunks_each && c < num_chunks; c++) nbytes += size_of_chunk(c);
  // In two halves: a unit's moves may be more than 2^31 bytes.
  const Scanned low = scan<Sum>(int32_t(nbytes & 0xfffff)), high = scan<Sum>(int32_t(nbytes >> 20));
  const auto joined = [](int32_t high_part, int32_t low_part) { return (int64_t(high_part) << 20) + low_part; };
  int64_t at = start + num_chunks * kHeaderBytes + joined(high.before, low.before);
  int64_t* starts = a.chunk_starts + row * (num_chunks + 1);
  for (int64_t c = chunk; c < chunk + chunks_each && c < num_chunks; c++) {
    starts[c] = at;
    at += size_of_chunk(c);
  }
  if (threadIdx.x == 0) starts[num_chunks] = start + num_chunks * kHeaderBytes + joined(high.total, low.total);
}

// ---- Applying.

// Thread blocks for the blocks of codes of a row, and at least one for values of 32 bits.
ZEROPP_INLINE int64_t rescaling_blocks(const CodeTable& table) {
  return table.num_blocks > 0 ? (table.num_blocks + kWarps - 1) / kWarps : 1;
}

// Predicts the codes of blocks with new scales: a warp for each block of the codes, which it is through with before its
// scale is replaced. Copies 32-bit values.
__global__ void __launch_bounds__(kMoveThreads) rescale(const __grid_constant__ MovesArguments a) {
  const CodeTable& table = a.table;
  const int64_t per_row = rescaling_blocks(table), row = blockIdx.x / per_row;
  const int64_t block = blockIdx.x % per_row * kWarps + threadIdx.x / 32;
  uint8_t* wire = a.wires + row * a.wire_bytes;
  const uint8_t *moves = a.moves + row * a.move_bytes, *end = moves + a.move_bytes;
  const uint8_t* scales = moves + table.flag_bytes();
  const bool is_new = block < table.num_blocks && (moves[block / 8] >> block % 8 & 1);
  uint32_t after = 0;
  uint8_t* scale = nullptr;
  if (is_new) {
    const Run& run = table.runs[table.run_of(block, true)];
    const uint32_t before_it = __popc(moves[block / 8] & ((1u << block % 8) - 1));
    const int64_t rank = a.scales_before[row * table.flag_bytes() + block / 8] + before_it;
    after = load_word(scales + rank * table.scale_bytes, end) << (32 - 8 * table.scale_bytes);
    const float before = table.scale_at(wire, run, block - run.block);
    uint8_t* codes = wire + run.codes + (block - run.block) * run.block_size / 8 * table.bits;
    for (int64_t group = threadIdx.x % 32; group < run.block_size / 8; group += 32) {
      uint8_t* at = codes + group * table.bits;
      store_codes(predicted_codes(load_codes(at, table.bits), before, float_of(after), table.qmax()), table.bits, at);
    }
    scale = wire + run.scales + (block - run.block) * table.scale_bytes;
  }
  __syncthreads();
  if (is_new && threadIdx.x % 32 == 0) store_little(scale, after >> (32 - 8 * table.scale_bytes), table.scale_bytes);
  const int64_t raw_at = a.chunk_starts[row * (table.num_chunks() + 1)] - table.num_chunks() * kHeaderBytes - table.raw_bytes;
  for (int r = 0; r < table.num_raw; r++) {
    const Raw& raw = table.raw[r];
    const uint8_t* from = moves + raw_at + raw.moves;
    for (int64_t i = blockIdx.x % per_row * kMoveThreads + threadIdx.x; i < raw.nbytes; i += per_row * kMoveThreads) {
      if (from + i < end) wire[raw.wire + i] = from[i];
    }
  }
}

// Decodes `count` Rice codes from `at` on: the values, or where they lead to if they are gaps. Returns the byte after them.
__device__ const uint8_t* read_rice(const uint8_t* at, const uint8_t* end, int count, int k, bool are_gaps,
                                    uint16_t* values) {
  if (count == 0) return at;
  __shared__ int32_t last_one;
  if (threadIdx.x == 0) last_one = 0;
  int found = 0;
  for (const uint8_t* words = at; found < count && words < end; words += 4 * kMoveThreads) {
    uint32_t word = load_word(words + 4 * threadIdx.x, end);
    const Scanned ones = scan<Sum>(__popc(word));
    int i = found + ones.before;
    int bit = int(8 * (words - at)) + 32 * threadIdx.x;
    for (; word != 0 && i < count; i++, word &= word - 1) {
      const int one = bit + __popc((word & -word) - 1);
      values[i] = uint16_t(one);
      if (i + 1 == count) last_one = one;
    }
    found += ones.total;
  }
  __syncthreads();
  const uint8_t* lows = at + last_one / 8 + 1;
  const int each = (count + kMoveThreads - 1) / kMoveThreads, begin = threadIdx.x * each;
  const int stop = begin + each < count ? begin + each : count;
  int32_t sum = 0;
  for (int i = begin; i < stop; i++) sum += load_bits(lows, end, int64_t(i) * k, k);
  int32_t low_sum = scan<Sum>(sum).before, previous = begin > 0 && begin < stop ? values[begin - 1] : -1;
  __syncthreads();  // others read the last of this thread's
  for (int i = begin; i < stop; i++) {
    const int one = values[i], low = int(load_bits(lows, end, int64_t(i) * k, k));
    low_sum += low;
    values[i] = uint16_t(are_gaps ? ((one - i) << k) + low_sum + i : ((one - previous - 1) << k) + low);
    previous = one;
  }
  __syncthreads();
  return lows + bytes_of(int64_t(count) * k);
}

__global__ void __launch_bounds__(kMoveThreads, 1) move_chunks(const __grid_constant__ MovesArguments a) {
  __shared__ uint16_t codes[kChunk];  // modulo 2^16
  const CodeTable& table = a.table;
  const int64_t num_chunks = table.num_chunks();
  uint16_t* places = a.lists + int64_t(blockIdx.x) * 3 * kChunk;
  uint16_t *furthers = places + kChunk, *more = furthers + kChunk;
  const int64_t stride = num_chunks * a.rows < kMovingBlocks ? num_chunks * a.rows : kMovingBlocks;
  for (int64_t index = blockIdx.x; index < num_chunks * a.rows; index += stride) {
    const int64_t row = index / num_chunks, chunk = index % num_chunks;
    uint8_t* wire = a.wires + row * a.wire_bytes;
    const uint8_t *moves = a.moves + row * a.move_bytes, *end = moves + a.move_bytes;
    const int64_t* starts = a.chunk_starts + row * (num_chunks + 1);
    const uint8_t *at = moves + starts[chunk], *header = moves + starts[0] + (chunk - num_chunks) * kHeaderBytes;
    const uint32_t counts = load_word(header, end), ks = load_word(header + 4, end);
    const int m1 = counts & 0xffff, m2 = counts >> 16;
    if (m1 == 0 || m1 > kChunk || m2 > m1) continue;  // nothing moved; or the buffer is damaged

    at = read_rice(at, end, m1, ks & 15, true, places);
    const uint8_t* signs = at;
    at = read_rice(at + bytes_of(m1), end, m2, ks >> 8 & 15, true, furthers);
    read_rice(at, end, m2, ks >> 16 & 15, false, more);

    const int64_t first = chunk * kChunk + threadIdx.x * kPerThread;
    table.each_run(first, first + kPerThread, [&](const Run& run, int64_t begin, int64_t stop) {
      uint16_t* to = codes + (run.first - chunk * kChunk);
      if (run.block_size == 0) {
        for (int64_t i = begin; i < stop; i++) to[i] = uint16_t(ordered(wire + run.codes + 2 * i));
      } else {
        for (int64_t i = begin; i < stop; i += 8) {
          const uint64_t group = load_codes(wire + run.codes + i / 8 * table.bits, table.bits);
          for (int j = 0; j < 8; j++) to[i + j] = uint16_t(code_in(group, j));
        }
      }
    });
    __syncthreads();
    const auto add = [&](int i, int size) {
      if (places[i] < kChunk) codes[places[i]] += uint16_t(load_bits(signs, end, i, 1) ? -size : size);
    };
    for (int i = threadIdx.x; i < m1; i += kMoveThreads) add(i, 1);
    __syncthreads();
    for (int j = threadIdx.x; j < m2; j += kMoveThreads) {
      if (furthers[j] < m1) add(furthers[j], int(more[j]) + 1);
    }
    __syncthreads();
    table.each_run(first, first + kPerThread, [&](const Run& run, int64_t begin, int64_t stop) {
      const uint16_t* from = codes + (run.first - chunk * kChunk);
      if (run.block_size == 0) {
        for (int64_t i = begin; i < stop; i++) store_ordered(int16_t(from[i]), wire + run.codes + 2 * i);
      } else {
        for (int64_t i = begin; i < stop; i += 8) {
          uint64_t group = 0;
          for (int j = 0; j < 8; j++) group |= uint64_t(uint8_t(from[i + j])) << 8 * j;
          store_codes(group, table.bits, wire + run.codes + i / 8 * table.bits);
        }
      }
    });
    __syncthreads();  // the next chunk takes the same memory
  }
}

int run(void (*kernel)(MovesArguments), const MovesArguments& a, int64_t blocks, void* stream) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  MovesArguments arguments = a;
  void* parameters[] = {&arguments};
  return cudaLaunchKernel(
      kernel, dim3(unsigned(blocks)), dim3(kMoveThreads), parameters, 0, static_cast<cudaStream_t>(stream));
}

int64_t blocks_for(int64_t threads) { return (threads + kMoveThreads - 1) / kMoveThreads; }

}  // namespace

int measure_moves(const MovesArguments& a, void* stream) {
  if (const int error = run(find_new_scales, a, blocks_for(a.table.flag_bytes()), stream)) return error;
  if (const int error = run(encode_chunks<false>, a, a.table.num_chunks(), stream)) return error;
  return run(locate, a, 1, stream);
}

int write_moves(const MovesArguments& a, void* stream) {
  if (const int error = run(encode_chunks<true>, a, a.table.num_chunks(), stream)) return error;
  int64_t threads = a.table.flag_bytes();
  for (const int64_t other : {kHeaderBytes * a.table.num_chunks(), a.table.raw_bytes}) threads = other > threads ? other : threads;
  return run(write_heads, a, blocks_for(threads), stream);
}

int apply_moves(const MovesArguments& a, void* stream) {
  if (const int error = run(locate, a, a.rows, stream)) return error;
  if (const int error = run(rescale, a, a.rows * rescaling_blocks(a.table), stream)) return error;
  const int64_t chunks = a.rows * a.table.num_chunks();
  return run(move_chunks, a, chunks < kMovingBlocks ? chunks : kMovingBlocks, stream);
}

}  // namespace zeropp::cuda
