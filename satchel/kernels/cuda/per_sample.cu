// Encode and decode of per-sample bits. Forward reads x twice: extremes of the blocks, then, with the bits allocated, the codes. A tile is
// 256 neighbouring values of one sample; its 16 threads take two groups of 8 each, which halves what the header costs.
#include "satchel/kernels/cuda/device.cuh"
#include "satchel/kernels/cuda/per_sample.h"

namespace satchel::cuda {
namespace {

constexpr int kTileGroups = 32, kTileThreads = 16;
constexpr int kQuads = 4;                            // that a thread decodes, 128 values apart
constexpr int64_t kQuadTile = int64_t{32} * kQuads;  // quads of one sample that a warp decodes

/// The code with its sizes worked out on the host: a thread divides no 64-bit numbers.
struct Sizes {
  int64_t samples, values, block, groups, blocks, unit, headers, entries;
  int shift;  // log2 of the groups of 8 values a block, or −1
  HeaderType header;
  Rounding rounding;

  explicit Sizes(const PerSampleCode& m)
      : samples(m.samples),
        values(m.values),
        block(m.block),
        groups(m.groups()),
        blocks(m.blocks()),
        unit(m.unit()),
        headers(m.headers_at()),
        entries(m.entries_at()),
        shift(-1),
        header(m.header),
        rounding(m.rounding) {
    for (int k = 0; k < 40; ++k) shift = block == kGroup << k ? k : shift;
  }
  /// The block, in its sample, of a group of 8 values.
  __device__ inline int64_t block_of(int64_t group) const { return shift >= 0 ? group >> shift : quotient(group * kGroup, block); }
};

struct Encode {
  Sizes code;
  const void* x;
  const uint64_t* seed;
  const F32Header* ranges;
  uint8_t* bytes;
};

__device__ inline uint32_t entry_of(const Sizes& code, const uint8_t* bytes, int64_t n) {
  return __ldg(reinterpret_cast<const uint32_t*>(bytes + code.entries) + n);
}

/// One warp a block.
template <DType type, bool vector>
__global__ void __launch_bounds__(kThreads)
    measure_blocks(const __grid_constant__ Sizes code, const void* x, F32Header* ranges, int64_t blocks) {
  const int64_t block = thread_index() / 32;
  if (block >= blocks) return;  // the whole warp
  const int64_t n = quotient(block, code.blocks), at = (block - n * code.blocks) * code.block;
  const int64_t base = n * code.values, length = code.block < code.values - at ? code.block : code.values - at;
  const int64_t begin = base + at, end = begin + length;
  Extremes e;
  for (int64_t i = begin + static_cast<int64_t>(threadIdx.x % 32) * 8; i < end; i += 256) {
    if (vector && i + 8 <= end) {
      float v[8];
      load8<type>(x, i, v);
      e.add8(v);
    } else {
      for (int64_t k = i; k < end && k < i + 8; ++k) e.add(load(x, type, k));
    }
  }
  e.reduce(32);
  if (threadIdx.x % 32 != 0) return;
  const Range r = make_range(flush(e.least), flush(e.most), e.finite(), HeaderType::f32);
  ranges[block] = {r.low, r.high};
}

/// One warp a sample; the order of the sum is per_sample_measure()'s on the CPU.
__global__ void __launch_bounds__(kThreads) sum_ranges(const F32Header* ranges, int64_t samples, int64_t blocks, double* squares) {
  const int64_t n = thread_index() / 32;
  if (n >= samples) return;  // the whole warp
  double sum = 0;
  for (int64_t b = threadIdx.x % 32; b < blocks; b += kRangeLanes) {
    const F32Header r = ranges[n * blocks + b];
    sum += squared_range({r.low, r.step});
  }
#pragma unroll
  for (int half = kRangeLanes / 2; half > 0; half /= 2) sum += __shfl_xor_sync(~0u, sum, half);
  if (threadIdx.x % 32 == 0) squares[n] = sum;
}

__device__ inline Extremes extremes_of(const F32Header& r) {
  Extremes e;
  e.least = r.low;
  e.most = r.step;
  return e;
}

/// Two groups of one sample in its bits, which lie in one block.
template <int bits>
__device__ inline void encode_pair(const Encode& a, int64_t n, uint32_t entry, const int64_t (&group)[2], const float (&v)[2][8],
                                   const Words (&noise)[2]) {
  const Sizes& m = a.code;
  const LevelTable even;  // even levels read no table
  uint8_t* const codes = a.bytes + m.unit * entry_before(entry);
  BlockRuler ruler;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if (group[k] >= m.groups) continue;
    const int64_t block = m.block_of(group[k]);
    if (k == 0) ruler = block_ruler<bits>(extremes_of(a.ranges[n * m.blocks + block]), m.header);
    if (group[k] * 8 == block * m.block) store_header(a.bytes + m.headers, m.header, n * m.blocks + block, ruler.header);
    const int64_t left = m.values - group[k] * 8;
    const int count = left < 8 ? static_cast<int>(left) : 8;
    uint64_t eight = encode8<bits, true>(v[k], ruler, even, noise[k]);
    if (count < 8) eight &= (uint64_t{1} << (bits * count)) - 1;
    store_codes<bits>(codes, group[k], eight, count);
    if (group[k] + 1 == m.groups) {  // what aligns the next sample
      for (int64_t i = code_bytes(m.values, bits); i < m.unit * bits; ++i) codes[i] = 0;
    }
  }
}

/// load8() serves every whole group, and a thread's two groups lie in one block.
template <DType type>
__global__ void __launch_bounds__(kThreads) encode_tiles(const __grid_constant__ Encode a, int64_t tiles, int64_t tiles_each) {
  const UniformSeed seed(a.seed);
  const int64_t tile = thread_index() / kTileThreads;
  if (tile >= tiles) return;
  const Sizes& m = a.code;
  const int64_t n = quotient(tile, tiles_each);
  const int64_t first = (tile - n * tiles_each) * kTileGroups + threadIdx.x % kTileThreads;
  const int64_t group[2] = {first, first + kTileThreads};
  float v[2][8];
  Words noise[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) load8_until<type, true>(a.x, n * m.values + group[k] * 8, (n + 1) * m.values, 0.0f, v[k]);
  const uint32_t entry = entry_of(m, a.bytes, n);
#pragma unroll
  for (int k = 0; k < 2; ++k) noise[k] = group_noise(seed, m.rounding, n * m.groups + group[k]);  // while the values are on their way
  switch (entry_bits(entry)) {
    case 1: return encode_pair<1>(a, n, entry, group, v, noise);
    case 2: return encode_pair<2>(a, n, entry, group, v, noise);
    case 3: return encode_pair<3>(a, n, entry, group, v, noise);
    case 4: return encode_pair<4>(a, n, entry, group, v, noise);
    case 5: return encode_pair<5>(a, n, entry, group, v, noise);
    case 6: return encode_pair<6>(a, n, entry, group, v, noise);
    case 7: return encode_pair<7>(a, n, entry, group, v, noise);
    default: return encode_pair<8>(a, n, entry, group, v, noise);
  }
}

/// Any samples: a group of 8 values a thread, by the definition.
template <DType type>
__global__ void __launch_bounds__(kThreads) encode_any(const __grid_constant__ Encode a) {
  const UniformSeed seed(a.seed);
  const Sizes& m = a.code;
  const int64_t at = thread_index(), n = quotient(at, m.groups), group = at - n * m.groups;
  if (n >= m.samples) return;
  const uint32_t entry = entry_of(m, a.bytes, n);
  LevelTable even;
  even.bits = entry_bits(entry);
  const int64_t block = m.block_of(group), left = m.values - group * 8;
  const int count = left < 8 ? static_cast<int>(left) : 8;
  const Header h = extremes_of(a.ranges[n * m.blocks + block]).header((1 << even.bits) - 1, m.header);
  const Ruler ruler = make_ruler(h);
  const Words noise = group_noise(seed, m.rounding, at);
  uint64_t eight = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (j >= count || is_poisoned(h)) break;
    const float y16 = position(load(a.x, type, n * m.values + group * 8 + j), ruler);
    eight |= static_cast<uint64_t>(code_of(y16, even, noise_of(noise, j))) << (even.bits * j);
  }
  uint8_t* const codes = a.bytes + m.unit * entry_before(entry);
  if (group * 8 == block * m.block) store_header(a.bytes + m.headers, m.header, n * m.blocks + block, h);
  for (int k = 0; k < (count * even.bits + 7) / 8; ++k) codes[group * even.bits + k] = static_cast<uint8_t>(eight >> (8 * k));
  if (group + 1 == m.groups) {  // what aligns the next sample
    for (int64_t i = code_bytes(m.values, even.bits); i < m.unit * even.bits; ++i) codes[i] = 0;
  }
}

struct Decode {
  Sizes code;
  const uint8_t* bytes;
  void* x;
  int64_t first;  // the sample that x starts with
};

/// A thread's quads of sample n.
template <int bits, DType type>
__device__ inline void decode_quads(const Decode& a, int64_t n, const uint8_t* codes, int64_t first) {
  const Sizes& m = a.code;
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const int64_t quad = first + 32 * q;
    if (quad * 4 >= m.values) return;
    const Header h = load_header(a.bytes + m.headers, m.header, n * m.blocks + m.block_of(quad / 2));
    const uint32_t four = load_four<bits>(codes, quad);
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float level = static_cast<float>(four >> (bits * j) & ((1u << bits) - 1));
      v[j] = is_poisoned(h) ? __uint_as_float(kCanonicalNaN) : flush(fmaf(level, h.step, h.low));
    }
    store4<type>(a.x, (n - a.first) * m.values + quad * 4, v);
  }
}

/// Samples of a multiple of 4 values: a warp has kQuadTile quads of one sample, so it writes whole lines and knows one number of bits.
template <DType type>
__global__ void __launch_bounds__(kThreads) decode_tiles(const __grid_constant__ Decode a, int64_t tiles, int64_t tiles_each) {
  const int64_t tile = thread_index() / 32;
  if (tile >= tiles) return;
  const int64_t in = quotient(tile, tiles_each), n = a.first + in;
  const int64_t first = (tile - in * tiles_each) * kQuadTile + threadIdx.x % 32;
  const uint32_t entry = entry_of(a.code, a.bytes, n);
  const uint8_t* const codes = a.bytes + a.code.unit * entry_before(entry);
  switch (entry_bits(entry)) {
    case 1: return decode_quads<1, type>(a, n, codes, first);
    case 2: return decode_quads<2, type>(a, n, codes, first);
    case 3: return decode_quads<3, type>(a, n, codes, first);
    case 4: return decode_quads<4, type>(a, n, codes, first);
    case 5: return decode_quads<5, type>(a, n, codes, first);
    case 6: return decode_quads<6, type>(a, n, codes, first);
    case 7: return decode_quads<7, type>(a, n, codes, first);
    default: return decode_quads<8, type>(a, n, codes, first);
  }
}

/// Any samples: one value a thread.
template <DType type>
__global__ void __launch_bounds__(kThreads) decode_any(const __grid_constant__ Decode a, int64_t values) {
  const int64_t i = thread_index();
  if (i >= values) return;
  const Sizes& m = a.code;
  const int64_t in = quotient(i, m.values), at = i - in * m.values, n = a.first + in;
  const uint32_t entry = entry_of(m, a.bytes, n);
  const Header h = load_header(a.bytes + m.headers, m.header, n * m.blocks + m.block_of(at / kGroup));
  LevelTable levels;
  levels.bits = entry_bits(entry);
  store(a.x, type, i, value_of(get_code(a.bytes + m.unit * entry_before(entry), levels.bits, at), h, levels));
}

/// May load8() serve every whole group of every sample?
bool is_vector(const PerSampleCode& code, const void* x, DType type) { return is_aligned(x) && code.values * size_of(type) % 16 == 0; }

}  // namespace

void per_sample_measure(const PerSampleCode& code, const void* x, DType type, F32Header* ranges, double* squares, StreamHandle stream) {
  const int64_t blocks = code.samples * code.blocks();
  if (blocks == 0) return;
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  with_type(type, [&](auto t) {
    if (is_vector(code, x, type))
      measure_blocks<t(), true><<<blocks_for(blocks * 32), kThreads, 0, s>>>(Sizes(code), x, ranges, blocks);
    else
      measure_blocks<t(), false><<<blocks_for(blocks * 32), kThreads, 0, s>>>(Sizes(code), x, ranges, blocks);
  });
  check_launch("per_sample_measure");
  per_sample_squares(code, ranges, squares, stream);
}

void per_sample_squares(const PerSampleCode& code, const F32Header* ranges, double* squares, StreamHandle stream) {
  if (code.samples == 0) return;
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  sum_ranges<<<blocks_for(code.samples * 32), kThreads, 0, s>>>(ranges, code.samples, code.blocks(), squares);
  check_launch("per_sample_squares");
}

void per_sample_encode(const PerSampleCode& code, const void* x, DType type, const uint64_t* seed, const F32Header* ranges, uint8_t* bytes,
                       StreamHandle stream) {
  const int64_t tiles_each = ceil_div(code.groups(), kTileGroups), tiles = code.samples * tiles_each;
  if (tiles == 0) return;
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const Encode a = {Sizes(code), x, seed, ranges, bytes};
  const bool one_block = code.block % 256 == 0 || code.blocks() == 1;
  with_type(type, [&](auto t) {
    if (one_block && is_vector(code, x, type))
      encode_tiles<t()><<<blocks_for(tiles * kTileThreads), kThreads, 0, s>>>(a, tiles, tiles_each);
    else
      encode_any<t()><<<blocks_for(code.samples * code.groups()), kThreads, 0, s>>>(a);
  });
  check_launch("per_sample_encode");
}

void per_sample_decode(const PerSampleCode& code, const uint8_t* bytes, void* x, DType type, int64_t first, int64_t last,
                       StreamHandle stream) {
  if (last <= first || code.values == 0) return;
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const Decode a = {Sizes(code), bytes, x, first};
  const int64_t tiles_each = ceil_div(code.values, 4 * kQuadTile), tiles = (last - first) * tiles_each;
  with_type(type, [&](auto t) {
    if (is_aligned(x) && code.values % 4 == 0)
      decode_tiles<t()><<<blocks_for(tiles * 32), kThreads, 0, s>>>(a, tiles, tiles_each);
    else
      decode_any<t()><<<blocks_for((last - first) * code.values), kThreads, 0, s>>>(a, (last - first) * code.values);
  });
  check_launch("per_sample_decode");
}

}  // namespace satchel::cuda
