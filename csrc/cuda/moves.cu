// Moved codes on a GPU: encode_moves and apply_moves of megatron_zpp/zeropp/wire/moves.py, which says what the bytes are.
//
// A thread block has a chunk. When it encodes, a thread reads every 256th group of 8 codes as a vector, and leaves three bits
// of each code in shared memory; then it takes 64 codes side by side. Where a thread's bits go follows from sums over the
// threads before it: of moves, of gaps' quotients, and the last place that moved. When a chunk is applied, the ones of a unary
// part are found 32 bits a thread, then every list is decoded side by side: the i-th one at bit p has p - i zeros before it.
// The codes' moves are put together in shared memory, and only groups that move are read and written.
//
// Wires begin at multiples of 16 bytes. Aligned words with a byte of a buffer are read whole: allocations are whole words.

#include <cuda_runtime.h>

#define ZEROPP_CUDA
#include "../moves.h"
#include "scan.h"

namespace zeropp::cuda {
namespace {

constexpr int kPerThread = kChunk / kThreads;
constexpr uint32_t kMostChunkBytes = 1 << 22;  // more than any has; a damaged header may say anything

// ---- Bits at any place of a buffer.

// The four bytes from `at` on. What is behind the end is zeros.
__device__ uint32_t load_word(const uint8_t* at, const uint8_t* end) {
  const int64_t left = end - at;
  if (left <= 0) return 0;
  const uint32_t shift = 8 * uint32_t(reinterpret_cast<uintptr_t>(at) % 4);
  const uint32_t* words = reinterpret_cast<const uint32_t*>(at - shift / 8);
  uint32_t word = words[0] >> shift;
  if (shift > 0 && left > 4 - shift / 8) word |= words[1] << (32 - shift);
  return left < 4 ? word & ((1u << 8 * left) - 1) : word;
}

// Takes numbers of up to 16 bits, one after the other.
struct BitReader {
  const uint8_t *at, *end;
  uint64_t bits = 0;
  int filled = 0;

  __device__ BitReader(const uint8_t* from, const uint8_t* end, int64_t bit) : at(from + bit / 8), end(end) { take(bit % 8); }
  __device__ uint32_t take(int width) {
    if (filled < width) bits |= uint64_t(load_word(at, end)) << filled, at += 4, filled += 32;
    const uint32_t taken = uint32_t(bits) & ((1u << width) - 1);
    bits >>= width, filled -= width;
    return taken;
  }
};

__device__ int bytes_of(int bits) { return (bits + 7) / 8; }

__device__ void store_little(uint8_t* to, uint32_t value, int nbytes) {
  for (int i = 0; i < nbytes; i++) to[i] = uint8_t(value >> 8 * i);
}

// ---- Groups of 8 codes of a wire. Of quantized ones each begins at a whole byte, of 8 bits and 4 at a whole word.

// Calls work(run, index of its code, place in the group, number) for the codes [first, first + 8) of all that are before
// `stop`: once, but where runs of unquantized values meet. `r` rises to the group's run.
template <class Work>
__device__ void each_part(const CodeTable& table, int& r, int64_t first, int64_t stop, const Work& work) {
  const int64_t end = first + 8 < stop ? first + 8 : stop;
  for (int64_t at = first; at < end;) {
    while (at >= table.runs[r].first + table.runs[r].count) r++;
    const Run& run = table.runs[r];
    const int64_t next = run.first + run.count < end ? run.first + run.count : end;
    work(run, at - run.first, int(at - first), int(next - at));
    at = next;
  }
}

// A byte each.
__device__ uint64_t load_group(const uint8_t* from, int bits) {
  if (bits == 8) {
    const uint2 codes = *reinterpret_cast<const uint2*>(from);
    return codes.x | uint64_t(codes.y) << 32;
  }
  const uint32_t before = uint32_t(reinterpret_cast<uintptr_t>(from) % 4);
  const uint32_t* words = reinterpret_cast<const uint32_t*>(from - before);
  if (bits == 4) return unpack<4>(uint64_t(words[0]));
  return unpack<6>((words[0] | uint64_t(words[1]) << 32) >> 8 * before);
}

__device__ void store_group(uint64_t codes, int bits, uint8_t* to) {
  if (bits == 8) {
    *reinterpret_cast<uint2*>(to) = make_uint2(uint32_t(codes), uint32_t(codes >> 32));
  } else if (bits == 4) {
    *reinterpret_cast<uint32_t*>(to) = uint32_t(pack<4>(codes));
  } else {
    const uint64_t stream = pack<6>(codes);
    for (int i = 0; i < 3; i++) reinterpret_cast<uint16_t*>(to)[i] = uint16_t(stream >> 16 * i);
  }
}

// A block's scale as its bits, which begin at a multiple of their bytes.
__device__ uint32_t scale_bits(const CodeTable& table, const uint8_t* wire, const Run& run, int64_t block) {
  const uint8_t* at = wire + run.scales + block * table.scale_bytes;
  return table.scale_bytes == 4 ? *reinterpret_cast<const uint32_t*>(at)
                                : uint32_t(*reinterpret_cast<const uint16_t*>(at)) << 16;
}

__device__ uint32_t block_of(const Run& run, int64_t code) {
  const uint32_t group = uint32_t(uint64_t(code) / 8), groups = uint32_t(run.block_size) / 8;
  return (groups & (groups - 1)) == 0 ? group >> (__ffs(groups) - 1) : group / groups;
}

// Whether 8 unquantized values of 16 bits are a vector.
__device__ bool is_vector(const uint8_t* at, int count) { return count == 8 && reinterpret_cast<uintptr_t>(at) % 16 == 0; }

// Two numbers of 16 bits in the order of the values, and back.
__device__ uint32_t both_ordered(uint32_t bits) { return bits ^ (bits >> 15 & 0x00010001u) * 0x7fff; }

__device__ uint32_t add_lanes(uint32_t a, uint32_t b, uint32_t highs) {
  return ((a & ~highs) + (b & ~highs)) ^ ((a ^ b) & highs);
}

constexpr uint32_t kHighBits = 0x80808080u;  // the high bit of each byte

// The high bit of each byte that is not zero.
__device__ uint32_t nonzero(uint32_t bytes) { return (((bytes & ~kHighBits) + ~kHighBits) | bytes) & kHighBits; }

// A bit for each code of a group.
struct Masks {
  uint32_t moved = 0, further = 0, negative = 0;

  __device__ void add(int place, int move) {
    moved |= uint32_t(move != 0) << place, negative |= uint32_t(move < 0) << place;
    further |= uint32_t(move > 1 || move < -1) << place;
  }
  // Four codes, signed bytes, from a place on.
  __device__ void add(int place, uint32_t from, uint32_t to) {
    const uint32_t difference = ((to | kHighBits) - (from & ~kHighBits)) ^ ((to ^ ~from) & kHighBits);  // modulo 256
    const uint32_t less = ((to & ~from) | ((to | ~from) & difference)) & kHighBits;
    const uint32_t one_step = (less >> 7) * 0xfe + 0x01010101u;
    const uint32_t moves = nonzero(difference);
    moved |= side_by_side(moves >> 7) << place, negative |= side_by_side(less >> 7) << place;
    further |= side_by_side((moves & nonzero(difference ^ one_step)) >> 7) << place;
  }
};

// ---- Encoding.

__global__ void __launch_bounds__(kThreads) find_new_scales(const __grid_constant__ MovesArguments a) {
  const CodeTable& table = a.table;
  const int64_t byte = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (byte >= table.flag_bytes()) return;
  uint32_t flags = 0;
  for (int64_t block = 8 * byte; block < 8 * byte + 8 && block < table.num_blocks; block++) {
    const Run& run = table.runs[table.run_of(block, true)];
    const bool is_new = scale_bits(table, a.old, run, block - run.block) != scale_bits(table, a.now, run, block - run.block);
    flags |= uint32_t(is_new) << (block - 8 * byte);
  }
  a.flags[byte] = uint8_t(flags);
}

// What a thread block knows about its chunk: for each group of 8 codes one byte in each of three masks, and what codes that moved
// further moved beyond two.
struct Chunk {
  uint64_t moved[kThreads], further[kThreads], negative[kThreads];
  uint16_t more[kChunk];
};

// Returns the sum of `more` over this thread's groups.
__device__ int32_t compare(const CodeTable& table, const uint8_t* old, const uint8_t* now, int64_t start, Chunk& chunk) {
  const int64_t stop = start + kChunk < table.num_codes ? start + kChunk : table.num_codes;
  int32_t sum = 0;
  int r = table.run_of(start);
#pragma unroll 2
  for (int group = threadIdx.x; group < kChunk / 8; group += kThreads) {
    Masks masks;
    const auto goes_further = [&](int place, int size) {
      sum += size - 2;
      chunk.more[8 * group + place] = uint16_t(size - 2);
    };
    each_part(table, r, start + 8 * group, stop, [&](const Run& run, int64_t at, int first, int count) {
      if (run.block_size == 0) {
        const uint8_t *before = old + run.codes + 2 * at, *after = now + run.codes + 2 * at;
        const auto compare_one = [&](int place, int from, int to) {
          const int size = to < from ? from - to : to - from;
          masks.add(place, to - from);
          if (size > 1) goes_further(place, size);
        };
        const auto compare_two = [&](int place, uint32_t from, uint32_t to) {
          if (from == to) return;
          from = both_ordered(from), to = both_ordered(to);
          compare_one(place, int16_t(from), int16_t(to));
          compare_one(place + 1, int32_t(from) >> 16, int32_t(to) >> 16);
        };
        if (is_vector(before, count) && is_vector(after, count)) {
          const uint4 from = *reinterpret_cast<const uint4*>(before), to = *reinterpret_cast<const uint4*>(after);
          compare_two(0, from.x, to.x), compare_two(2, from.y, to.y);
          compare_two(4, from.z, to.z), compare_two(6, from.w, to.w);
        } else {
          for (int i = 0; i < count; i++) compare_one(first + i, ordered(before + 2 * i), ordered(after + 2 * i));
        }
        return;
      }
      const int64_t codes = run.codes + int64_t(uint64_t(at) / 8 * uint32_t(table.bits));
      uint64_t from = load_group(old + codes, table.bits);
      const uint64_t to = load_group(now + codes, table.bits);
      const uint32_t block = block_of(run, at);
      const float scale = float_of(scale_bits(table, old, run, block)), new_scale = float_of(scale_bits(table, now, run, block));
      if (scale != new_scale) from = predicted_codes(from, scale, new_scale, table.qmax());
      if (from == to) return;
      masks.add(0, uint32_t(from), uint32_t(to));
      masks.add(4, uint32_t(from >> 32), uint32_t(to >> 32));
      for (uint32_t left = masks.further; left != 0; left &= left - 1) {
        const int place = __ffs(left) - 1, move = code_in(to, place) - code_in(from, place);
        goes_further(place, move < 0 ? -move : move);
      }
    });
    reinterpret_cast<uint8_t*>(chunk.moved)[group] = uint8_t(masks.moved);
    reinterpret_cast<uint8_t*>(chunk.further)[group] = uint8_t(masks.further);
    reinterpret_cast<uint8_t*>(chunk.negative)[group] = uint8_t(masks.negative);
  }
  return sum;
}

__device__ int last_of(uint64_t mask) { return 63 - __clzll(mask); }

// Measures a chunk and fills its header, or writes its body after the bodies of earlier chunks.
template <bool kWrites>
__global__ void __launch_bounds__(kThreads) encode_chunks(const __grid_constant__ MovesArguments a) {
  __shared__ Chunk chunk;
  const int32_t more = compare(a.table, a.old, a.now, int64_t(blockIdx.x) * kChunk, chunk);
  __syncthreads();
  const int first = int(threadIdx.x) * kPerThread;
  const uint64_t moved = chunk.moved[threadIdx.x], further = chunk.further[threadIdx.x];

  // In one sum: how many moved, and in the upper half how many further.
  const Scanned counts = scan<Sum>(__popcll(moved) | __popcll(further) << 16);
  const int m1 = counts.total & 0xffff, m2 = counts.total >> 16;
  const int moves_before = counts.before & 0xffff, furthers_before = counts.before >> 16;
  const auto index_of = [&](int bit) { return moves_before + __popcll(moved & ((uint64_t(1) << bit) - 1)); };
  const Scanned places = scan<Last>(moved ? first + last_of(moved) : Last::kNothing);
  Scanned further_places{Last::kNothing, 0}, sizes{};
  if (m2 > 0) {
    further_places = scan<Last>(further ? index_of(last_of(further)) : Last::kNothing);
    sizes = scan<Sum>(more);
  }
  const int k1 = rice_parameter(places.total + 1 - m1, m1);
  const int k2 = m2 > 0 ? rice_parameter(further_places.total + 1 - m2, m2) : 0, k3 = rice_parameter(sizes.total, m2);

  // work(index, gap, bit) of each of this thread's moves; the same of the further ones, whose gaps are counted in moves.
  const auto each_move = [&](const auto& work) {
    int i = moves_before, previous = places.before;
    for (uint64_t left = moved; left != 0; left &= left - 1, i++) {
      const int bit = __ffsll(left) - 1;
      work(i, first + bit - previous - 1, bit);
      previous = first + bit;
    }
  };
  const auto each_further_move = [&](const auto& work) {
    int j = furthers_before, previous = further_places.before;
    for (uint64_t left = further; left != 0; left &= left - 1, j++) {
      const int bit = __ffsll(left) - 1, i = index_of(bit);
      work(j, i - previous - 1, bit);
      previous = i;
    }
  };
  int32_t quotients = 0, size_quotients = 0;  // further gaps' in the upper half: of neither there are more than 16,384
  each_move([&](int, int gap, int) { quotients += gap >> k1; });
  each_further_move([&](int, int gap, int bit) {
    quotients += gap >> k2 << 16;
    size_quotients += chunk.more[first + bit] >> k3;
  });
  const Scanned u12 = scan<Sum>(quotients);
  const Scanned u3 = m2 > 0 ? scan<Sum>(size_quotients) : Scanned{};

  // Where the sections begin: unary and low bits of the gaps, signs, and the same of the further ones and their sizes.
  const int low1 = bytes_of((u12.total & 0xffff) + m1), signs = low1 + bytes_of(m1 * k1);
  const int unary2 = signs + bytes_of(m1), low2 = unary2 + bytes_of((u12.total >> 16) + m2);
  const int unary3 = low2 + bytes_of(m2 * k2), low3 = unary3 + bytes_of(u3.total + m2);
  if constexpr (!kWrites) {
    if (threadIdx.x != 0) return;
    uint8_t* header = a.headers + int64_t(blockIdx.x) * kHeaderBytes;
    store_little(header, uint32_t(m1) | uint32_t(m2) << 16, 4);
    store_little(header + 4, uint32_t(k1 | k2 << 8 | k3 << 16), 4);
    store_little(header + 8, uint32_t(low3 + bytes_of(m2 * k3)), 4);
  } else {
    const uint64_t negative = chunk.negative[threadIdx.x];
    const int64_t body = a.chunk_starts[blockIdx.x];
    uint32_t* words = reinterpret_cast<uint32_t*>(a.moves) + body / 4;
    const auto bits_from = [&](int section) { return 8 * (int(body % 4) + section); };
    BitWriter unary(words), low(words), sign(words);
    int before = bits_from(0) + (u12.before & 0xffff);
    each_move([&](int i, int gap, int bit) {
      before += gap >> k1;
      unary.set(before + i, 1, 1);
      low.set(bits_from(low1) + i * k1, k1, gap & ((1 << k1) - 1));
      sign.set(bits_from(signs) + i, 1, uint32_t(negative >> bit) & 1);
    });
    unary.flush(), low.flush(), sign.flush();
    if (further == 0) return;
    BitWriter size_unary(words), size_low(words);
    before = bits_from(unary2) + (u12.before >> 16);
    int size_before = bits_from(unary3) + u3.before;
    each_further_move([&](int j, int gap, int bit) {
      const uint32_t size = chunk.more[first + bit];
      before += gap >> k2, size_before += int(size >> k3);
      unary.set(before + j, 1, 1);
      low.set(bits_from(low2) + j * k2, k2, gap & ((1 << k2) - 1));
      size_unary.set(size_before + j, 1, 1);
      size_low.set(bits_from(low3) + j * k3, k3, size & ((1u << k3) - 1));
    });
    unary.flush(), low.flush(), size_unary.flush(), size_low.flush();
  }
}

// Flags, new scales, 32-bit values and headers; after the bodies, whose first word may hold a header's last bytes.
__global__ void __launch_bounds__(kThreads) write_heads(const __grid_constant__ MovesArguments a) {
  const CodeTable& table = a.table;
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
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

__global__ void __launch_bounds__(kThreads) locate(const __grid_constant__ MovesArguments a) {
  const CodeTable& table = a.table;
  const int64_t row = blockIdx.x, num_flags = table.flag_bytes(), num_chunks = table.num_chunks();
  const uint8_t* flags = a.flags != nullptr ? a.flags : a.moves + row * a.move_bytes;
  int32_t new_scales = 0;
  for (int64_t tile = 0; tile < num_flags; tile += 4 * kThreads) {
    const int64_t flag = tile + 4 * threadIdx.x;
    const uint32_t word = load_word(flags + flag, flags + num_flags);
    const Scanned scales = scan<Sum>(__popc(word));
    for (int i = 0; i < 4 && flag + i < num_flags; i++) {
      a.scales_before[row * num_flags + flag + i] = new_scales + scales.before + __popc(word & ((1u << 8 * i) - 1));
    }
    new_scales += scales.total;
  }
  const int64_t start = num_flags + int64_t(new_scales) * table.scale_bytes + table.raw_bytes;
  const uint8_t* headers = a.headers != nullptr ? a.headers : a.moves + row * a.move_bytes + start;
  const uint8_t* end = a.headers != nullptr ? headers + num_chunks * kHeaderBytes : a.moves + (row + 1) * a.move_bytes;
  int64_t* starts = a.chunk_starts + row * (num_chunks + 1);
  int64_t at = start + num_chunks * kHeaderBytes;
  for (int64_t tile = 0; tile < num_chunks; tile += kThreads) {
    const int64_t chunk = tile + threadIdx.x;
    const uint32_t nbytes = chunk < num_chunks ? load_word(headers + chunk * kHeaderBytes + 8, end) : 0;
    const Scanned bytes = scan<Sum>(int32_t(nbytes < kMostChunkBytes ? nbytes : kMostChunkBytes));
    if (chunk < num_chunks) starts[chunk] = at + bytes.before;
    at += bytes.total;
  }
  if (threadIdx.x == 0) starts[num_chunks] = at;
}

// ---- Applying.

// Thread blocks of a row, whose warps have 32 blocks of codes each, and whose threads copy 32-bit values.
ZEROPP_INLINE int64_t rescaling_blocks(const CodeTable& table) {
  const int64_t for_codes = (table.num_blocks + kThreads - 1) / kThreads;
  const int64_t for_values = (table.raw_bytes / 4 + kThreads - 1) / kThreads;
  return for_codes > for_values ? for_codes : for_values > 0 ? for_values : 1;
}

// Predicts the codes of blocks with new scales: a warp is through with a block before it replaces its scale. Copies 32-bit
// values.
__global__ void __launch_bounds__(kThreads) rescale(const __grid_constant__ MovesArguments a) {
  const CodeTable& table = a.table;
  const int64_t per_row = rescaling_blocks(table), row = blockIdx.x / per_row;
  const int64_t thread = blockIdx.x % per_row * kThreads + threadIdx.x;
  uint8_t* wire = a.wires + row * a.wire_bytes;
  const uint8_t *moves = a.moves + row * a.move_bytes, *end = moves + a.move_bytes;
  const uint8_t* scales = moves + table.flag_bytes();
  const int64_t first = thread / 32 * 32, flag = first / 8;
  const uint32_t flags = first < table.num_blocks ? load_word(moves + flag, moves + table.flag_bytes()) : 0;
  for (uint32_t left = flags; left != 0; left &= left - 1) {
    const int bit = __ffs(left) - 1;
    const int64_t index = first + bit;
    if (index >= table.num_blocks) break;
    const Run& run = table.runs[table.run_of(index, true)];
    const int64_t block = index - run.block, groups = run.block_size / 8;
    const int64_t rank = a.scales_before[row * table.flag_bytes() + flag] + __popc(flags & ((1u << bit) - 1));
    const uint32_t after = load_word(scales + rank * table.scale_bytes, end) << (32 - 8 * table.scale_bytes);
    const float before = float_of(scale_bits(table, wire, run, block));
    uint8_t* codes = wire + run.codes + block * groups * table.bits;
    for (int64_t group = threadIdx.x % 32; group < groups; group += 32) {
      uint8_t* at = codes + group * table.bits;
      store_group(predicted_codes(load_group(at, table.bits), before, float_of(after), table.qmax()), table.bits, at);
    }
    __syncwarp();
    uint8_t* scale = wire + run.scales + block * table.scale_bytes;
    if (threadIdx.x % 32 == 0) store_little(scale, after >> (32 - 8 * table.scale_bytes), table.scale_bytes);
  }
  const int64_t raw_at = a.chunk_starts[row * (table.num_chunks() + 1)] - table.num_chunks() * kHeaderBytes - table.raw_bytes;
  for (int r = 0; r < table.num_raw; r++) {
    const Raw& raw = table.raw[r];
    const uint8_t* from = moves + raw_at + raw.moves;
    for (int64_t i = 4 * thread; i < raw.nbytes; i += 4 * per_row * kThreads) {
      if (from + i < end) *reinterpret_cast<uint32_t*>(wire + raw.wire + i) = load_word(from + i, end);
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
  for (const uint8_t* words = at; found < count && words < end; words += 4 * kThreads) {
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
  const int each = (count + kThreads - 1) / kThreads, begin = threadIdx.x * each;
  const int stop = begin + each < count ? begin + each : count;
  int32_t sum = 0;
  BitReader summed(lows, end, int64_t(begin) * k), low_bits = summed;
  for (int i = begin; i < stop; i++) sum += int32_t(summed.take(k));
  int32_t low_sum = scan<Sum>(sum).before, previous = begin > 0 && begin < stop ? values[begin - 1] : -1;
  __syncthreads();  // others read the last of this thread's
  for (int i = begin; i < stop; i++) {
    const int one = values[i], low = int(low_bits.take(k));
    low_sum += low;
    values[i] = uint16_t(are_gaps ? ((one - i) << k) + low_sum + i : ((one - previous - 1) << k) + low);
    previous = one;
  }
  __syncthreads();
  return lows + bytes_of(count * k);
}

__global__ void __launch_bounds__(kThreads, 1) move_chunks(const __grid_constant__ MovesArguments a) {
  __shared__ uint4 deltas[kChunk / 8];  // a group of 8 codes each, modulo 2^16
  uint16_t* delta = reinterpret_cast<uint16_t*>(deltas);
  const CodeTable& table = a.table;
  const int64_t num_chunks = table.num_chunks();
  uint16_t* places = a.lists + int64_t(blockIdx.x) * 3 * kChunk;
  uint16_t *furthers = places + kChunk, *more = furthers + kChunk;
  const int64_t stride = num_chunks * a.rows < kMovingBlocks ? num_chunks * a.rows : kMovingBlocks;
  for (int64_t index = blockIdx.x; index < num_chunks * a.rows; index += stride) {
    const int64_t row = index / num_chunks, chunk = index % num_chunks;
    uint8_t* wire = a.wires + row * a.wire_bytes;
    const uint8_t *moves = a.moves + row * a.move_bytes, *end_of_row = moves + a.move_bytes;
    const int64_t* starts = a.chunk_starts + row * (num_chunks + 1);
    const uint8_t *at = moves + starts[chunk], *header = moves + starts[0] + (chunk - num_chunks) * kHeaderBytes;
    const uint8_t* end = starts[chunk + 1] < a.move_bytes ? moves + starts[chunk + 1] : end_of_row;
    const uint32_t counts = load_word(header, end_of_row), ks = load_word(header + 4, end_of_row);
    const int m1 = counts & 0xffff, m2 = counts >> 16;
    if (m1 == 0 || m1 > kChunk || m2 > m1) continue;  // nothing moved; or the buffer is damaged

    for (int group = threadIdx.x; group < kChunk / 8; group += kThreads) deltas[group] = make_uint4(0, 0, 0, 0);
    at = read_rice(at, end, m1, ks & 15, true, places);
    const uint8_t* signs = at;
    at = read_rice(at + bytes_of(m1), end, m2, ks >> 8 & 15, true, furthers);
    read_rice(at, end, m2, ks >> 16 & 15, false, more);
    for (int i = threadIdx.x; i < m1; i += kThreads) {
      const bool is_negative = load_word(signs + i / 8, end) >> i % 8 & 1;
      if (places[i] < kChunk) delta[places[i]] = uint16_t(is_negative ? -1 : 1);
    }
    __syncthreads();
    for (int j = threadIdx.x; j < m2; j += kThreads) {
      const int place = furthers[j] < m1 ? places[furthers[j]] : kChunk;
      if (place < kChunk) delta[place] *= more[j] + 2;
    }
    __syncthreads();
    const int64_t start = chunk * kChunk, stop = start + kChunk < table.num_codes ? start + kChunk : table.num_codes;
    int r = table.run_of(start);
    for (int group = threadIdx.x; group < kChunk / 8; group += kThreads) {
      const uint4 moved = deltas[group];
      if ((moved.x | moved.y | moved.z | moved.w) == 0) continue;
      each_part(table, r, start + 8 * group, stop, [&](const Run& run, int64_t at, int first, int count) {
        if (run.block_size == 0) {
          uint8_t* values = wire + run.codes + 2 * at;
          const auto two = [](uint32_t bits, uint32_t by) {
            return both_ordered(add_lanes(both_ordered(bits), by, 0x80008000u));
          };
          if (is_vector(values, count)) {
            uint4& vector = *reinterpret_cast<uint4*>(values);
            const uint4 bits = vector;
            vector = make_uint4(two(bits.x, moved.x), two(bits.y, moved.y), two(bits.z, moved.z), two(bits.w, moved.w));
          } else {
            for (int i = 0; i < count; i++) {
              store_ordered(int16_t(ordered(values + 2 * i) + delta[8 * group + first + i]), values + 2 * i);
            }
          }
          return;
        }
        uint8_t* codes = wire + run.codes + int64_t(uint64_t(at) / 8 * uint32_t(table.bits));
        const uint64_t before = load_group(codes, table.bits);
        const uint32_t low = add_lanes(uint32_t(before), __byte_perm(moved.x, moved.y, 0x6420), kHighBits);
        const uint32_t high = add_lanes(uint32_t(before >> 32), __byte_perm(moved.z, moved.w, 0x6420), kHighBits);
        store_group(low | uint64_t(high) << 32, table.bits, codes);
      });
    }
    __syncthreads();  // the next chunk takes the same memory
  }
}

int run(void (*kernel)(MovesArguments), const MovesArguments& a, int64_t blocks, void* stream) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  MovesArguments arguments = a;
  void* parameters[] = {&arguments};
  return cudaLaunchKernel(
      kernel, dim3(unsigned(blocks)), dim3(kThreads), parameters, 0, static_cast<cudaStream_t>(stream));
}

int64_t blocks_for(int64_t threads) { return (threads + kThreads - 1) / kThreads; }

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
