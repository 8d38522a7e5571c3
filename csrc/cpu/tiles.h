// The CPU kernels' tiles: plain loops over memory that stays in the L1 cache, which the compiler turns
// into vector code. kernels.cpp includes this once for every kind of processor, in a namespace each.

namespace {

#if defined(__FMA__) || defined(__FP_FAST_FMAF)
constexpr bool kHasFma = true;
#else
constexpr bool kHasFma = false;
#endif

constexpr int64_t kTile = 1024;  // elements, unless one block is more
constexpr int64_t kStrip = 128;  // elements of a block that one loop goes through, where blocks are a multiple of it

// Some whole blocks of a segment, or some values that are sent as they are, of one row.
struct Tile {
  int64_t row0, row1;
  int64_t first;   // element of the segment
  int64_t count;   // elements
  int64_t block;   // the segment's first
  int64_t blocks;  // 0 where values are sent as they are
};

int64_t blocks_per_tile(const Segment& segment) {
  return segment.block_size ? std::max<int64_t>(kTile / segment.block_size, 1) : 0;
}

int64_t tile_size(const Segment& segment) {
  return segment.block_size ? blocks_per_tile(segment) * segment.block_size : kTile;
}

int64_t num_tiles(const Segment& segment) {
  return (segment.stop - segment.start + tile_size(segment) - 1) / tile_size(segment);
}

int64_t tiles_per_row(const Format& format) {
  int64_t tiles = 0;
  for (int s = 0; s < format.num_segments; s++) tiles += num_tiles(format.segments[s]);
  return tiles;
}

// Inputs of a block's scale.
struct Sums {
  uint32_t largest, nonzeros;
  uint64_t total;
};

struct Scratch {
  explicit Scratch(const Format& format) {
    int64_t size = kTile;
    for (int s = 0; s < format.num_segments; s++) size = std::max(size, tile_size(format.segments[s]));
    values.resize(size), sent.resize(size), error.resize(size), codes.resize(size);
    divided.resize(size), element_scales.resize(size), moved.resize(size);
    scales.resize(kTile / 8), sums.resize(kTile / 8);  // enough for the smallest blocks
  }
  std::vector<float> values, sent, error, scales, divided, element_scales;
  std::vector<int16_t> moved;
  std::vector<Sums> sums;
  std::vector<uint8_t> codes;
};

// Calls work(segment, tile) for the tiles [begin, end) of all rows.
template <class Work>
void for_each_tile(const Format& format, int64_t rows1, int64_t begin, int64_t end, const Work& work) {
  const int64_t per_row = tiles_per_row(format);
  for (int64_t row = begin / per_row; row * per_row < end; row++) {
    int64_t index = row * per_row;  // the segment's first tile
    for (int s = 0; s < format.num_segments; s++) {
      const Segment& segment = format.segments[s];
      const int64_t size = tile_size(segment), numel = segment.stop - segment.start, tiles = num_tiles(segment);
      const int64_t blocks = blocks_per_tile(segment);
      for (int64_t t = std::max<int64_t>(begin - index, 0); t < std::min(end - index, tiles); t++) {
        const int64_t count = std::min(size, numel - t * size);
        const bool is_cut = count < size && blocks > 0;
        work(segment, Tile{row / rows1, row % rows1, t * size, count, t * blocks,
                           is_cut ? (count + segment.block_size - 1) / segment.block_size : blocks});
      }
      index += tiles;
    }
  }
}

// Fetches what the next tile will read or write, while this one, of so many bytes, is worked on.
template <bool writes = false>
ZEROPP_INLINE void fetch_next(const void* from, int64_t bytes) {
  const char* next = static_cast<const char*>(from) + bytes;
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(next + i, writes);
}

// ---- Dense tensors.

template <class T>
void load_as(const T* from, int64_t count, float* values) {
  fetch_next(from, count * sizeof(T));
  for (int64_t i = 0; i < count; i++) values[i] = to_float(from[i]);
}

template <class T>
void add_as(const T* __restrict from, int64_t count, float* values) {
  fetch_next(from, count * sizeof(T));
#pragma GCC ivdep
  for (int64_t i = 0; i < count; i++) values[i] += to_float(from[i]);
}

template <class T>
void store_as(const float* __restrict values, int64_t count, T* __restrict to) {
  for (int64_t i = 0; i < count; i++) from_float(values[i], to[i]);
}

void load(const void* from, Type type, int64_t count, float* values) {
  if (type == Type::kFloat) load_as(static_cast<const float*>(from), count, values);
  if (type == Type::kBFloat16) load_as(static_cast<const BFloat16*>(from), count, values);
  if (type == Type::kHalf) load_as(static_cast<const Half*>(from), count, values);
}

void add(const void* from, Type type, int64_t count, float* values) {
  if (type == Type::kFloat) add_as(static_cast<const float*>(from), count, values);
  if (type == Type::kBFloat16) add_as(static_cast<const BFloat16*>(from), count, values);
  if (type == Type::kHalf) add_as(static_cast<const Half*>(from), count, values);
}

void store(const float* values, Type type, int64_t count, void* to) {
  if (type == Type::kFloat) store_as(values, count, static_cast<float*>(to));
  if (type == Type::kBFloat16) store_as(values, count, static_cast<BFloat16*>(to));
  if (type == Type::kHalf) store_as(values, count, static_cast<Half*>(to));
}

uint8_t* at(const Rows& rows, const Tile& tile, int64_t element) {
  const int64_t offset = tile.row0 * rows.stride0 + tile.row1 * rows.stride1 + element;
  return static_cast<uint8_t*>(rows.data) + offset * size_of(rows.type);
}

// ---- Scales of elements.

const uint8_t* at(const Exponents& exponents, int peer, const Tile& tile, int64_t element) {
  return exponents.data + peer * exponents.peer_stride + tile.row0 * exponents.stride0 +
         tile.row1 * exponents.stride1 + element;
}

void load_scales(const uint8_t* __restrict exponents, int64_t count, float* __restrict scales) {
  fetch_next(exponents, count);
  int64_t i = 0;
#ifdef __AVX512F__  // whose permutation looks 16 up at once
  const __m512i sixteenths = _mm512_loadu_si512(kSixteenths);
  for (; i + 16 <= count; i += 16) {
    const __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(exponents + i)));
    const __m512i octaves = _mm512_slli_epi32(_mm512_srli_epi32(e, 4), 23);
    _mm512_storeu_si512(scales + i, _mm512_sub_epi32(_mm512_permutexvar_epi32(e, sixteenths), octaves));
  }
#endif
  for (; i < count; i++) scales[i] = scale_of_exponent(exponents[i], kSixteenths);
}

// `divided` holds the gradients, without errors: an element that has none is sent as 0, and its error waits.
void divide(const float* __restrict values, const float* __restrict scales, int64_t count, float* __restrict divided) {
  for (int64_t i = 0; i < count; i++) divided[i] = divided[i] == 0 ? 0.f : values[i] / scales[i];
}

// ---- Packed codes.

// Codes that are moved at once: those in one byte of the stream, or eight.
template <int bits>
struct Word {
  using type __attribute__((may_alias)) = uint64_t;
};
template <>
struct Word<2> {
  using type __attribute__((may_alias)) = uint32_t;
};
template <>
struct Word<4> {
  using type __attribute__((may_alias)) = uint16_t;
};

template <int bits>
void pack_as(const uint8_t* codes, int64_t count, uint8_t* __restrict stream) {
  using Codes = typename Word<bits>::type;
  constexpr int64_t kCodes = sizeof(Codes), kBytes = kCodes * bits / 8;
  const Codes* __restrict from = reinterpret_cast<const Codes*>(codes);
  for (int64_t i = 0; i < count / kCodes; i++) {
    const Codes packed = pack<bits, Codes>(from[i]);
    if constexpr (kBytes == 1) stream[i] = uint8_t(packed);
    else memcpy(stream + kBytes * i, &packed, kBytes);
  }
}

// Three bytes of the stream hold 4 codes of 6 bits, or 8 of 3 bits. They are spread to words 16 bytes at a time, and the
// words unpacked in vectors: loads of three bytes alone take ten times as long. Returns the codes unpacked, maybe not all.
template <int bits>
int64_t unpack_triples(const uint8_t* __restrict stream, int64_t count, uint8_t* codes) {
#if __has_builtin(__builtin_shufflevector)
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  using Codes __attribute__((may_alias)) = std::conditional_t<bits == 6, uint32_t, uint64_t>;
  constexpr int64_t kCodes = 16, kBytes = kCodes * bits / 8;
  const int64_t rounds = std::max<int64_t>(0, (count * bits / 8 - int64_t(sizeof(Bytes)) + kBytes) / kBytes);
  for (int64_t i = 0; i < rounds; i++) {
    Bytes from;
    memcpy(&from, stream + kBytes * i, sizeof(from));
    if constexpr (bits == 6) from = __builtin_shufflevector(from, from, 0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 8, 9, 10, 11, 11);
    else from = __builtin_shufflevector(from, from, 0, 1, 2, 2, 2, 2, 2, 2, 3, 4, 5, 5, 5, 5, 5, 5);
    memcpy(codes + kCodes * i, &from, sizeof(from));
  }
  Codes* words = reinterpret_cast<Codes*>(codes);
  for (int64_t i = 0; i < rounds * kCodes / int64_t(sizeof(Codes)); i++) words[i] = unpack<bits, Codes>(words[i]);
  return rounds * kCodes;
#else
  return 0;
#endif
}

template <int bits>
void unpack_as(const uint8_t* __restrict stream, int64_t count, uint8_t* codes) {
  if constexpr (bits == 3 || bits == 6) {
    const int64_t done = unpack_triples<bits>(stream, count, codes);
    stream += done * bits / 8, codes += done, count -= done;
  }
  using Codes = typename Word<bits>::type;
  constexpr int64_t kCodes = sizeof(Codes), kBytes = kCodes * bits / 8;
  Codes* __restrict to = reinterpret_cast<Codes*>(codes);
  for (int64_t i = 0; i < (count + kCodes - 1) / kCodes; i++) {
    Codes packed = 0;
    if constexpr (kBytes == 1) packed = stream[i];
    else memcpy(&packed, stream + kBytes * i, kBytes);
    to[i] = unpack<bits, Codes>(packed);
  }
}

// A block of 1 bit: codes -1, 0 and 1, as quantization.py's pack_largest.
void pack_largest(const uint8_t* codes, int64_t block, uint8_t* __restrict stream) {
  memset(stream, 0, block / 8);
  int64_t at = 0, last = -1;  // bit of the stream, and element
  for (int64_t i = 0; i < block; i += 8) {
    uint64_t word;
    memcpy(&word, codes + i, 8);
    while (word) {
      const int byte = __builtin_ctzll(word) / 8;
      const uint32_t is_negative = word >> (8 * byte + 7) & 1, gap = uint32_t(i + byte - last - 1);
      at += gap >> 2;
      const uint32_t symbol = (1 | (gap & 3) << 1 | is_negative << 3) << (at & 7);
      stream[at >> 3] |= uint8_t(symbol);
      if (symbol >> 8) stream[(at >> 3) + 1] |= uint8_t(symbol >> 8);
      at += 4, last = i + byte;
      word &= ~(uint64_t(0xff) << (8 * byte));
    }
  }
}

// Reads up to 7 bytes more than the block's, which a wire always has: scales follow.
void unpack_largest(const uint8_t* stream, int64_t block, uint8_t* __restrict codes) {
  memset(codes, 0, block);
  uint64_t word = 0;  // the stream from bit `at` on, `valid` bits of it
  int64_t valid = 0;
  for (int64_t begin = 0, at = 0, place = -1; at < block;) {  // begin: of the symbol
    int64_t zeros = word ? __builtin_ctzll(word) : valid;
    if (zeros + 4 > valid) {  // the symbol goes on
      at += zeros;
      if (at >= block) return;
      memcpy(&word, stream + at / 8, 8);
      word >>= at & 7;
      valid = 64 - (at & 7);
      if (block - at < valid) valid = block - at, word &= (uint64_t(1) << valid) - 1;
      if (!(word & 1)) continue;
      zeros = 0;
    }
    const uint64_t symbol = word >> (zeros + 1);
    place += 4 * (at + zeros - begin) + int64_t(symbol & 3) + 1;
    if (place >= block) return;
    codes[place] = symbol & 4 ? 0xff : 1;
    word = symbol >> 3;
    valid -= zeros + 4;
    begin = at += zeros + 4;
  }
}

void pack_codes(int bits, const uint8_t* codes, int64_t count, int64_t block, uint8_t* stream) {
  for (int64_t i = 0; bits == 1 && i < count; i += block) pack_largest(codes + i, block, stream + i / 8);
  if (bits == 2) pack_as<2>(codes, count, stream);
  if (bits == 3) pack_as<3>(codes, count, stream);
  if (bits == 4) pack_as<4>(codes, count, stream);
  if (bits == 6) pack_as<6>(codes, count, stream);
}

void unpack_codes(int bits, const uint8_t* stream, int64_t count, int64_t block, uint8_t* codes) {
  for (int64_t i = 0; bits == 1 && i < count; i += block) unpack_largest(stream + i / 8, block, codes + i);
  if (bits == 2) unpack_as<2>(stream, count, codes);
  if (bits == 3) unpack_as<3>(stream, count, codes);
  if (bits == 4) unpack_as<4>(stream, count, codes);
  if (bits == 6) unpack_as<6>(stream, count, codes);
}

// ---- Wires.

float load_scale(const uint8_t* scales, int64_t block, int bytes) {
  if (bytes == 4) return reinterpret_cast<const float*>(scales)[block];
  return to_float(reinterpret_cast<const BFloat16*>(scales)[block]);
}

void store_scale(float scale, uint8_t* scales, int64_t block, int bytes) {
  if (bytes == 4) reinterpret_cast<float*>(scales)[block] = scale;
  else from_float(scale, reinterpret_cast<BFloat16*>(scales)[block]);  // exactly
}

template <class Arrives>
ZEROPP_INLINE void dequantize(const uint8_t* __restrict codes, int64_t first, int64_t count, Levels levels,
                              const Arrives& arrives) {
#pragma GCC ivdep
  for (int64_t i = first; i < first + count; i++) arrives(i, value_of(code_value(codes[i]), levels));
}

// Tells arrives(i, value) what one wire buffer says of a tile. The tile is of another format, with the same blocks if any.
template <class Arrives>
void read_wire(const Wires& wires, int peer, const Segment& own, const Tile& tile, Scratch& scratch,
               const Arrives& arrives) {
  const Format& format = wires.format;
  const uint8_t* wire = wires.data + peer * wires.peer_stride + tile.row0 * wires.stride0 + tile.row1 * wires.stride1;
  const Segment& segment = segment_at(format, own.start);
  if (segment.block_size == 0) {
    const int64_t skipped = own.start + tile.first - segment.start;
    float* sent = scratch.sent.data();
    load(wire + segment.codes + skipped * size_of(format.type), format.type, tile.count, sent);
#pragma GCC ivdep
    for (int64_t i = 0; i < tile.count; i++) arrives(i, sent[i]);
    return;
  }
  const uint8_t* codes = wire + segment.codes + tile.first * format.bits / 8;
  fetch_next(codes, tile.count * format.bits / 8);
  if (format.bits != 8) {
    unpack_codes(format.bits, codes, tile.count, segment.block_size, scratch.codes.data());
    codes = scratch.codes.data();
  }
  const int64_t size = segment.block_size;
  for (int64_t b = 0; b < tile.blocks; b++) {
    const float scale = load_scale(wire + segment.scales, tile.block + b, format.scale_bytes);
    const int64_t first = b * size, count = std::min(size, tile.count - first);
    if (format.is_mean) dequantize(codes, first, count, levels_of(scale, true), arrives);
    else dequantize(codes, first, count, levels_of(scale, false), arrives);
  }
}

// The sum of values whose elements have scales; it begins at 0, as in plain torch.
void read_scaled_sum(const DecodeArguments& a, const Segment& own, const Tile& tile, Scratch& scratch,
                     float* __restrict values) {
  const float* __restrict scales = scratch.element_scales.data();
  for (int64_t i = 0; i < tile.count; i++) values[i] = 0;
  for (int peer = 0; peer < a.peers.num_peers; peer++) {
    if (own.block_size == 0) {
      read_wire(a.peers, peer, own, tile, scratch,
                [values](int64_t i, float value) __attribute__((always_inline)) { values[i] += value; });
    } else {
      load_scales(at(a.exponents, peer, tile, own.start + tile.first), tile.count, scratch.element_scales.data());
      read_wire(a.peers, peer, own, tile, scratch, [values, scales](int64_t i, float value)
                                                       __attribute__((always_inline)) { values[i] += value * scales[i]; });
    }
  }
}

void read_sum(const Wires& wires, const Segment& own, const Tile& tile, Scratch& scratch, float* __restrict values) {
  const auto set = [values](int64_t i, float value) __attribute__((always_inline)) { values[i] = value; };
  const auto add = [values](int64_t i, float value) __attribute__((always_inline)) { values[i] += value; };
  read_wire(wires, 0, own, tile, scratch, set);
  for (int peer = 1; peer < wires.num_peers; peer++) read_wire(wires, peer, own, tile, scratch, add);
}

// ---- Quantization.

// What the compiler knows about a code: kBits; 0 = nothing. 1 is the code "largest", 2 "mean", 4 and 8 are "absmax".
template <int kBits>
bool is_mean(const Format& format) {
  return kBits ? kBits == 2 : format.is_mean;
}

template <int kBits>
int code_bits(const Format& format) {
  return kBits ? kBits : format.bits;
}

struct Noise {
  bool wanted;
  uint32_t seed;
  uint32_t index;  // index of the tile's first element

  float at(int64_t i) const { return counter_uniform(index + uint32_t(i), seed); }
};

// The contribution of a strip of a block, kCount elements or `count` if that is 0, to the scale.
template <int64_t kCount>
ZEROPP_INLINE uint32_t largest_magnitude(const float* __restrict values, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < (kCount ? kCount : count); i++) largest = std::max(largest, magnitude_of(values[i]));
  return largest;
}

template <int64_t kCount>
ZEROPP_INLINE uint32_t num_nonzeros(const float* __restrict values, int64_t count) {
  uint32_t nonzeros = 0;
  for (int64_t i = 0; i < (kCount ? kCount : count); i++) nonzeros += values[i] != 0;
  return nonzeros;
}

template <int64_t kCount>
ZEROPP_INLINE uint64_t total_in_units(const float* __restrict values, int64_t count, float units) {
  const int64_t stop = kCount ? kCount : count;
  uint64_t total = 0;
  for (int64_t first = 0; first < stop; first += 256) {
    uint32_t part = 0;
    for (int64_t i = first; i < std::min(first + 256, stop); i++) part += in_units(values[i], units);
    total += part;
  }
  return total;
}

// Nobody asks what arrives.
struct Unasked {
  template <bool all_finite>
  ZEROPP_INLINE void tell(int64_t, float) const {}
};

// LoCo's error is what did not.
struct MovesError {
  const float* __restrict values;
  float* __restrict error;
  Averaging averaging;

  template <bool all_finite>
  ZEROPP_INLINE void tell(int64_t i, float sent) const {
    const auto moved = all_finite ? moved_finite_error : moved_error;
    error[i] = moved(error[i], values[i], sent, averaging);
  }
};

// The same where elements have scales; `values` and the error are in the gradients' units, `sent` in the codes' units.
struct MovesScaledError {
  MovesError moves;
  const float* __restrict scales;

  template <bool all_finite>
  ZEROPP_INLINE void tell(int64_t i, float sent) const {
    moves.tell<all_finite>(i, sent * scales[i]);
  }
};

// The codes of a strip of a block, which begins at `first` of the tile, a byte each. code_of(i) is a code plus kIntegers;
// `arrives` is told what it stands for.
template <int64_t kCount, bool all_finite, class CodeOf, class Arrives>
ZEROPP_INLINE void put_codes(int64_t first, int64_t count, Levels levels, uint8_t* __restrict codes,
                             const CodeOf& code_of, const Arrives& arrives) {
#pragma GCC ivdep
  for (int64_t i = first; i < first + (kCount ? kCount : count); i++) {
    const float code = code_of(i);
    codes[i] = uint8_t(bits_of(code));
    arrives.template tell<all_finite>(i, value_of(code - kIntegers, levels));
  }
}

// The codes -1, 0 and 1 of a block of 1 bit, a byte each, and what its scale depends on: the largest fifth of its values,
// of equal ones the first. Not of a block that holds a NaN or an Inf. guess: the least of them in the block before.
template <int64_t kCount>
Sums take_largest(const float* __restrict values, int64_t block, uint32_t largest, uint8_t* __restrict codes,
                  uint32_t& guess) {
  const int64_t stop = kCount ? kCount : block, wanted = stop / 5;
  memset(codes, 0, stop);
  if (largest == 0 || largest >= 0x7f800000u) return {largest, 0, 0};
  const auto count_from = [values, stop](uint32_t least) __attribute__((always_inline)) {
    uint32_t count = 0;
    for (int64_t i = 0; i < stop; i++) count += magnitude_of(values[i]) >= least;
    return int64_t(count);
  };
  // Narrows the range in which the least of them is, until so many are at or above its lower end, or equal to it.
  uint32_t least = 1, above = largest + 1, step = 1u << 21;
  int64_t count = count_from(least);
  bool is_below = true, is_above = true;  // all probes so far were: the range is still open there
  for (uint32_t probe = guess; count > wanted && above - least > 1;) {
    if (probe <= least || probe >= above) probe = least + (above - least) / 2;
    const int64_t from_probe = count_from(probe);
    if (from_probe >= wanted) least = probe, count = from_probe, is_above = false;
    else above = probe, is_below = false;
    // Away from the guess in growing steps, then by halves.
    if (is_below || is_above) probe = is_below ? least + step : above - std::min(step, above);
    else probe = least + (above - least) / 2;
    step *= 2;
  }
  guess = least;
  for (int64_t i = 0; i < stop; i++) {
    codes[i] = magnitude_of(values[i]) >= least ? (bits_of(values[i]) >> 31 ? 0xff : 1) : 0;
  }
  for (int64_t i = stop - 1; count > wanted; i--) {  // equal ones, from the last on
    if (magnitude_of(values[i]) == least) codes[i] = 0, count--;
  }
  const float units = per_unit(exponent_of(largest));
  uint64_t total = 0;
  for (int64_t first = 0; first < stop; first += 256) {
    uint32_t part = 0;
    for (int64_t i = first; i < std::min(first + 256, stop); i++) part += codes[i] ? in_units(values[i], units) : 0;
    total += part;
  }
  return {largest, uint32_t(count), total};
}

// The codes of a strip of a tile whose elements from `size` on are padding.
template <int kBits, int64_t kCount, class Arrives>
ZEROPP_INLINE void quantize_strip(const float* __restrict values, int64_t first, int64_t count, int64_t size,
                                  float sent_scale, const Format& format, const Noise& noise, uint8_t* codes,
                                  const Arrives& arrives) {
  const int qmax = qmax_of(code_bits<kBits>(format));
  const Levels levels = levels_of(sent_scale, is_mean<kBits>(format));
  const float scale = levels.scale, reciprocal = 1 / scale;
  const auto put = [&](const auto& code_of) __attribute__((always_inline)) {
    put_codes<kCount, false>(first, count, levels, codes, code_of, arrives);
  };
  if (is_mean<kBits>(format)) {
    if (!(scale > 0)) {
      put([](int64_t) { return kIntegers; });
    } else if (noise.wanted) {
      put([&](int64_t i) {
        return mean_code(values[i], reciprocal, levels, qmax, i < size ? noise.at(i) : 0.5f) + kIntegers;
      });
    } else {
      put([&](int64_t i) { return mean_code(values[i], reciprocal, levels, qmax, 0.5f) + kIntegers; });
    }
  } else if (noise.wanted) {
    put([&](int64_t i) { return round_quotient(values[i], scale, qmax, noise.at(i)) + kIntegers; });
  } else if (has_reciprocal(scale)) {  // then nothing has to be clamped, and all is finite
    const auto code_of = [&](int64_t i) __attribute__((always_inline)) {
      return (kHasFma ? quotient_of(values[i], scale, reciprocal) : values[i] / scale) + kIntegers;
    };
    put_codes<kCount, true>(first, count, levels, codes, code_of, arrives);
  } else {
    put([&](int64_t i) { return round_quotient(values[i], scale, qmax) + kIntegers; });
  }
}

// Whether blocks keep their scales, and where the tile's segment stores them; null: nowhere.
struct Kept {
  bool wanted = false;
  const uint8_t* scales = nullptr;
};

// Scales and codes, a byte each, of a tile; kCount: elements of a strip, 0 = a block. One loop over the tile after the
// other, so that no block waits for the reductions and divisions of another.
template <int kBits, int64_t kCount, class Arrives>
void quantize(const float* values, int64_t block, const Tile& tile, const Format& format, const Noise& noise,
              const Kept& kept, Sums* sums, float* scales, uint8_t* codes, const Arrives& arrives) {
  const int bits = code_bits<kBits>(format);
  const bool is_short = format.scale_bytes == 2;
  const int64_t strip = kCount ? kCount : block;
  for (int64_t b = 0; b < tile.blocks; b++) {
    sums[b] = {0, 0, 0};
    for (const float* at = values + b * block; at < values + (b + 1) * block; at += strip) {
      sums[b].largest = std::max(sums[b].largest, largest_magnitude<kCount>(at, strip));
    }
  }
  if (bits == 1) {
    uint32_t guess = 0;
    for (int64_t b = 0; b < tile.blocks; b++) {
      const float* of_block = values + b * block;
      uint8_t* to = codes + b * block;
      sums[b] = block == kCount ? take_largest<kCount>(of_block, block, sums[b].largest, to, guess)
                                : take_largest<0>(of_block, block, sums[b].largest, to, guess);
      const auto [largest, count, total] = sums[b];
      scales[b] = mean_scale(total, largest, count, count, bits, is_short);
      if (!(scales[b] > 0)) memset(to, 0, block);
      const Levels levels = levels_of(scales[b], false);
      for (int64_t i = b * block; i < (b + 1) * block; i++) {
        arrives.template tell<false>(i, value_of(code_value(codes[i]), levels));
      }
    }
    return;
  }
  if (is_mean<kBits>(format)) {
    for (int64_t b = 0; b < tile.blocks; b++) {
      const float units = per_unit(exponent_of(sums[b].largest));
      for (const float* at = values + b * block; at < values + (b + 1) * block; at += strip) {
        sums[b].nonzeros += num_nonzeros<kCount>(at, strip);
        sums[b].total += total_in_units<kCount>(at, strip, units);
      }
    }
    for (int64_t b = 0; b < tile.blocks; b++) {
      const auto [largest, nonzeros, total] = sums[b];
      scales[b] = mean_scale(total, largest, std::min(block, tile.count - b * block), nonzeros, bits, is_short);
    }
  } else {
    const int qmax = qmax_of(bits);
    const float level = kept.wanted ? fresh_level(qmax) : float(qmax);
    for (int64_t b = 0; b < tile.blocks; b++) scales[b] = scale_of(sums[b].largest, level, is_short);
    for (int64_t b = 0; kept.scales && b < tile.blocks; b++) {
      const float scale = load_scale(kept.scales, tile.block + b, format.scale_bytes);
      if (keeps(scale, sums[b].largest, qmax)) scales[b] = scale;
    }
  }
  for (int64_t b = 0; b < tile.blocks; b++) {
    for (int64_t s = b * block; s < (b + 1) * block; s += strip) {
      quantize_strip<kBits, kCount>(values, s, strip, tile.count, scales[b], format, noise, codes, arrives);
    }
  }
}

template <int kBits, class Arrives>
void write_blocks(const Format& format, const Segment& segment, uint8_t* wire, const Tile& tile, const Noise& noise,
                  const Kept& kept, Scratch& scratch, float* values, const Arrives& arrives) {
  const int64_t block = segment.block_size, padded = tile.blocks * block;
  const int bits = code_bits<kBits>(format);
  std::fill(values + tile.count, values + padded, 0.f);
  uint8_t* stream = wire + segment.codes + tile.first * bits / 8;
  fetch_next<true>(stream, padded * bits / 8);
  uint8_t* codes = bits == 8 ? stream : scratch.codes.data();
  float* scales = scratch.scales.data();
  const auto run = block % kStrip == 0 ? quantize<kBits, kStrip, Arrives> : quantize<kBits, 0, Arrives>;
  run(values, block, tile, format, noise, kept, scratch.sums.data(), scales, codes, arrives);
  for (int64_t b = 0; b < tile.blocks; b++) {
    store_scale(scales[b], wire + segment.scales, tile.block + b, format.scale_bytes);
  }
  if (bits != 8) pack_codes(bits, codes, padded, block, stream);
}

// The gaps that alignment leaves behind the last code and the last scale.
void zero_gaps(const Segment& segment, const Format& format, uint8_t* wire) {
  const auto zero_from = [wire](int64_t stop) { memset(wire + stop, 0, round_up(stop, 16) - stop); };
  const int64_t numel = segment.stop - segment.start;
  if (segment.block_size == 0) return zero_from(segment.codes + numel * size_of(format.type));
  const int64_t blocks = (numel + segment.block_size - 1) / segment.block_size;
  zero_from(segment.codes + blocks * segment.block_size * format.bits / 8);
  zero_from(segment.scales + format.scale_bytes * blocks);
}

// Writes a tile to a wire. Sets the padding of ``values`` to zero.
template <int kBits, class Arrives>
void write_wire(const Wires& wires, const Segment& own, const Tile& tile, const Noise& noise, const Kept& kept,
                Scratch& scratch, float* values, const Arrives& arrives) {
  const Format& format = wires.format;
  uint8_t* wire = wires.data + tile.row0 * wires.stride0 + tile.row1 * wires.stride1;
  const Segment& segment = segment_at(format, own.start);
  if (segment.block_size == 0) {
    const int64_t skipped = own.start + tile.first - segment.start;
    uint8_t* to = wire + segment.codes + skipped * size_of(format.type);
    store(values, format.type, tile.count, to);
    if constexpr (!std::is_same_v<Arrives, Unasked>) {
      float* sent = scratch.sent.data();
      load(to, format.type, tile.count, sent);
      for (int64_t i = 0; i < tile.count; i++) arrives.template tell<false>(i, sent[i]);
    }
  } else {
    write_blocks<kBits>(format, segment, wire, tile, noise, kept, scratch, values, arrives);
  }
  if (own.start + tile.first + tile.count == segment.stop) zero_gaps(segment, format, wire);
}

// ---- The kernels, for tiles [begin, end).

// Where a tile's values begin in the wire, of a segment that is not quantized.
int64_t value_offset(const Segment& segment, const Tile& tile, const Format& format) {
  return segment.codes + tile.first * size_of(format.type);
}

template <int kBits>
void encode_tiles(const EncodeArguments& a, int64_t begin, int64_t end) {
  Scratch scratch(a.wire.format);
  float *values = scratch.values.data(), *error = scratch.error.data();
  for_each_tile(a.wire.format, a.rows1, begin, end, [&](const Segment& segment, const Tile& tile) {
    const int64_t element = segment.start + tile.first, row = tile.row0 * a.rows1 + tile.row1;
    const Noise noise{a.stochastic, a.noise_seed, uint32_t(row * a.numel + element)};
    if (segment.block_size == 0 && a.moves_bits()) {  // a conversion and back would change NaNs
      uint8_t* wire = a.wire.data + tile.row0 * a.wire.stride0 + tile.row1 * a.wire.stride1;
      memcpy(wire + value_offset(segment, tile, a.wire.format), at(a.values, tile, element),
             tile.count * size_of(a.values.type));
      if (element + tile.count == segment.stop) zero_gaps(segment, a.wire.format, wire);
      return;
    }
    if (a.values.data) load(at(a.values, tile, element), a.values.type, tile.count, values);
    else read_sum(a.peers, segment, tile, scratch, values);
    if (a.addend.data) add(at(a.addend, tile, element), a.addend.type, tile.count, values);
    const bool is_scaled = a.exponents.data && segment.block_size;
    float *scales = scratch.element_scales.data(), *coded = is_scaled ? scratch.divided.data() : values;
    if (is_scaled) std::copy(values, values + tile.count, coded);
    if (a.error.data) {
      read_wire(a.error, 0, segment, tile, scratch, [values, error](int64_t i, float value)
                                                        __attribute__((always_inline)) {
        error[i] = value;
        values[i] += value;
      });
    } else if (a.compensates) {  // the first error is 0: added, as -0 + 0 is 0
      for (int64_t i = 0; i < tile.count; i++) error[i] = 0, values[i] += 0.f;
    }
    Kept kept{a.keeps_scales};
    if (a.kept.data) kept.scales = a.kept.data + tile.row0 * a.kept.stride0 + tile.row1 * a.kept.stride1 + segment.scales;
    if (is_scaled) {
      load_scales(at(a.exponents, 0, tile, element), tile.count, scales);
      divide(values, scales, tile.count, coded);
    }
    if (!a.new_error.data) return write_wire<kBits>(a.wire, segment, tile, noise, kept, scratch, coded, Unasked{});

    const MovesError moves{values, error, a.averaging};
    if (is_scaled) write_wire<kBits>(a.wire, segment, tile, noise, kept, scratch, coded, MovesScaledError{moves, scales});
    else write_wire<kBits>(a.wire, segment, tile, noise, kept, scratch, values, moves);
    write_wire<8>(a.new_error, segment, tile, Noise{}, Kept{}, scratch, error, Unasked{});
  });
}

void encode(const EncodeArguments& a, int64_t begin, int64_t end) {
  const Format& format = a.wire.format;
  if (format.is_mean && format.bits == 2) encode_tiles<2>(a, begin, end);
  else if (format.bits == 1) encode_tiles<1>(a, begin, end);
  else if (!format.is_mean && format.bits == 4) encode_tiles<4>(a, begin, end);
  else if (!format.is_mean && format.bits == 8) encode_tiles<8>(a, begin, end);
  else encode_tiles<0>(a, begin, end);
}

void decode(const DecodeArguments& a, int64_t begin, int64_t end) {
  Scratch scratch(a.peers.format);
  for_each_tile(a.peers.format, a.rows1, begin, end, [&](const Segment& segment, const Tile& tile) {
    uint8_t* out = at(a.out, tile, segment.start + tile.first);
    if (segment.block_size == 0 && a.moves_bits()) {
      const uint8_t* wire = a.peers.data + tile.row0 * a.peers.stride0 + tile.row1 * a.peers.stride1;
      memcpy(out, wire + value_offset(segment, tile, a.peers.format), tile.count * size_of(a.out.type));
      return;
    }
    const bool straight = a.out.type == Type::kFloat && !a.accumulates;
    float* values = straight ? reinterpret_cast<float*>(out) : scratch.values.data();
    if (a.exponents.data) read_scaled_sum(a, segment, tile, scratch, values);
    else read_sum(a.peers, segment, tile, scratch, values);
    if (a.accumulates) add(out, a.out.type, tile.count, values);
    if (!straight) store(values, a.out.type, tile.count, out);
  });
}

// How far the exponents of a block fall, by its codes; up to 4 changes of the move at a time.
void moves_of_block(const uint8_t* __restrict codes, int64_t count, bool has_half_steps, const LevelMoves& moves,
                    int16_t* __restrict moved) {
  for (int64_t i = 0; i < count; i++) moved[i] = int16_t(moves.first);
  for (int t = 0; t < moves.num_changes; t += 4) {
    int16_t from[4] = {}, by[4] = {};
    for (int j = 0; j < std::min(moves.num_changes - t, 4); j++) from[j] = moves.from[t + j], by[j] = moves.by[t + j];
    for (int64_t i = 0; i < count; i++) {
      const int16_t level = doubled_level(int8_t(codes[i]), has_half_steps);
      int16_t move = moved[i];
      ZEROPP_UNROLL
      for (int j = 0; j < 4; j++) move += level >= from[j] ? by[j] : 0;
      moved[i] = move;
    }
  }
}

// Exponents of `count` elements of a block, the rest of which is padding, after `moved`, which gets overwritten.
void move_block(const uint8_t* __restrict exponents, int64_t count, int64_t block, int16_t* __restrict moved,
                uint8_t* __restrict out) {
  for (int64_t i = 0; i < count; i++) moved[i] = int16_t((exponents ? exponents[i] : 0) - moved[i]);
  for (int64_t i = count; i < block; i++) moved[i] = int16_t(kQuietest - moved[i]);
  int16_t least = moved[0];
  for (int64_t i = 0; i < block; i++) least = std::min(least, moved[i]);
  for (int64_t i = 0; i < count; i++) out[i] = uint8_t(std::min<int16_t>(moved[i] - least, kQuietest));
}

void move_exponents(const MoveExponentsArguments& a, int64_t begin, int64_t end) {
  const Format& format = a.wire.format;
  Scratch scratch(format);
  for_each_tile(format, a.rows1, begin, end, [&](const Segment& segment, const Tile& tile) {
    const int64_t element = segment.start + tile.first, size = segment.block_size;
    const uint8_t* exponents = a.exponents.data ? at(a.exponents, 0, tile, element) : nullptr;
    uint8_t* out = const_cast<uint8_t*>(at(a.out, 0, tile, element));
    if (size == 0) {
      for (int64_t i = 0; i < tile.count; i++) out[i] = exponents ? exponents[i] : 0;
      return;
    }
    const uint8_t* wire = a.wire.data + tile.row0 * a.wire.stride0 + tile.row1 * a.wire.stride1;
    const uint8_t* codes = wire + segment.codes + tile.first * format.bits / 8;
    if (format.bits != 8) {
      unpack_codes(format.bits, codes, tile.blocks * size, size, scratch.codes.data());
      codes = scratch.codes.data();
    }
    for (int64_t b = 0; b < tile.blocks; b++) {
      const float scale = load_scale(wire + segment.scales, tile.block + b, format.scale_bytes);
      int16_t* moved = scratch.moved.data();
      if (moves_exponents(scale)) moves_of_block(codes + b * size, size, format.is_mean && scale > 0, a.moves, moved);
      else std::fill(moved, moved + size, 0);
      const int64_t first = b * size;
      move_block(exponents ? exponents + first : nullptr, std::min(size, tile.count - first), size, moved, out + first);
    }
  });
}

template <int width>
void rotate_pairs(float* values, int64_t count) {
  for (int64_t pair = 0; pair < count; pair += 2 * width) {
    ZEROPP_UNROLL
    for (int i = 0; i < width; i++) {
      const float first = values[pair + i], second = values[pair + i + width];
      values[pair + i] = first + second;
      values[pair + i + width] = first - second;
    }
  }
}

void rotate(const RotateArguments& a, int64_t begin, int64_t end) {
  for_each_tile(a.format, a.rows1, begin, end, [&](const Segment& segment, const Tile& tile) {
    const int64_t element = segment.start + tile.first;
    float* out = reinterpret_cast<float*>(at(a.out, tile, element));
    load(at(a.values, tile, element), a.values.type, tile.count, out);
    if (segment.block_size == 0) return;
    const int64_t whole = tile.count / 32 * 32;
    rotate_pairs<1>(out, whole);
    rotate_pairs<2>(out, whole);
    rotate_pairs<4>(out, whole);
    rotate_pairs<8>(out, whole);
    rotate_pairs<16>(out, whole);
    for (int64_t i = 0; i < whole; i++) out[i] *= kHadamardScale;
  });
}

}  // namespace
