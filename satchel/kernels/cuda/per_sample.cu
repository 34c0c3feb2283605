// Bits per sample: allocation, encode and decode. Forward reads x twice: extremes of the blocks, then, with the bits allocated, the codes.
// A tile is 256 neighbouring values of one sample; its 16 threads take two groups of 8 each, which halves what the header costs.
#include "satchel/kernels/cuda/per_sample.h"
#include "satchel/kernels/cuda/values.cuh"

namespace satchel::cuda {
namespace {

constexpr int kTileGroups = 32, kTileThreads = 16;
constexpr int kQuads = 4;                            // that a thread decodes, 128 values apart
constexpr int64_t kQuadTile = int64_t{32} * kQuads;  // quads of one sample that a warp decodes

/// The code with its sizes worked out on the host: a thread divides no 64-bit numbers.
struct Sizes : PerSampleCode {
  int64_t each_groups = groups(), each_blocks = blocks(), bit_bytes = unit(), headers = headers_at(), entries = entries_at();
  int shift = -1;  // log2 of the groups of 8 values a block, or −1

  explicit Sizes(const PerSampleCode& m) : PerSampleCode(m) {
    for (int k = 0; k < 40; ++k) shift = block == kGroup << k ? k : shift;
  }
  /// The block, in its sample, of a group of 8 values.
  __device__ inline int64_t block_of(int64_t group) const { return shift >= 0 ? group >> shift : quotient(group * kGroup, block); }
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
  const int64_t n = quotient(block, code.each_blocks), at = (block - n * code.each_blocks) * code.block;
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
  const Range r = e.range(HeaderType::f32);
  ranges[block] = {r.low, r.high};
}

/// One warp a sample; the order of the sum is per_sample_measure()'s on the CPU.
__global__ void __launch_bounds__(kThreads) sum_ranges(const F32Header* ranges, int64_t samples, int64_t blocks, double* squares) {
  const int64_t n = thread_index() / 32;
  if (n >= samples) return;  // the whole warp
  const auto* own = reinterpret_cast<const float2*>(ranges) + n * blocks;
  double sum = 0;
#pragma unroll 8  // loads in flight: there are few warps
  for (int64_t b = threadIdx.x % 32; b < blocks; b += kRangeLanes) {
    const float2 r = __ldg(own + b);
    sum += squared_range({r.x, r.y});
  }
  static_assert(kRangeLanes == 32);
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) squares[n] = sum;
}

/// Header of the block, where the group is its first, and codes of the group. 0 bits: as the sample's entry says.
template <int known>
__device__ inline void put_group(const Sizes& m, uint32_t entry, int64_t n, int64_t group, const float (&v)[8], const BlockRuler& ruler,
                                 const Words& noise, uint8_t* bytes) {
  const int bits = known > 0 ? known : entry_bits(entry), count = count_of(group, m.values);
  uint8_t* const codes = bytes + m.bit_bytes * entry_before(entry);
  const LevelTable levels;  // even levels read no table
  const int64_t block = m.block_of(group);
  if (group * 8 == block * m.block) store_header(bytes + m.headers, m.header, n * m.each_blocks + block, ruler.header);
  uint64_t eight;
  if constexpr (known > 0)
    eight = encode8<known, true>(v, {ruler.header, ruler.ruler, true}, levels, noise);
  else
    eight = encode8(bits, true, v, ruler, levels, noise);
  if (count < 8) eight &= (uint64_t{1} << (bits * count)) - 1;
  if constexpr (known > 0)
    store_codes<known>(codes, group, eight, count);
  else
    store_codes(bits, codes, group, eight, count);
  if (group + 1 == m.each_groups) {  // what aligns the next sample
    for (int64_t i = code_bytes(m.values, bits); i < m.bit_bytes * bits; ++i) codes[i] = 0;
  }
}

/// `usual`: load8() serves every whole group, and a thread's two lie in one block; others are of type `any`. Usual ones of 1 to 4 bits and
/// of plain blocks are read at once; the rest one after the other.
template <DType type, bool usual>
__global__ void __launch_bounds__(kThreads) encode_tiles(const __grid_constant__ Sizes m, const void* x, DType any, const uint64_t* from,
                                                         const F32Header* ranges, uint8_t* bytes, int64_t tiles, int64_t tiles_each) {
  const UniformSeed seed(from);
  const int64_t tile = thread_index() / kTileThreads;
  if (tile >= tiles) return;
  const int64_t n = quotient(tile, tiles_each);
  const int64_t first = (tile - n * tiles_each) * kTileGroups + threadIdx.x % kTileThreads;
  const auto value_of_group = [&](int64_t group) { return n * m.values + group * 8; };
  const auto noise_at = [&](int64_t group) { return group_noise(seed, m.rounding, n * m.each_groups + group); };
  const auto extremes_at = [&](int64_t group) {
    const F32Header range = ranges[n * m.each_blocks + m.block_of(group)];
    return Extremes{range.low, range.step};
  };
  if (usual && first < m.each_groups) {
    float v[2][8];
    Words noise[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) load8_until<type, true>(x, value_of_group(first + k * kTileThreads), (n + 1) * m.values, 0.0f, v[k]);
    const uint32_t entry = entry_of(m, bytes, n);
#pragma unroll
    for (int k = 0; k < 2; ++k) noise[k] = noise_at(first + k * kTileThreads);  // while the values are on their way
    const auto put = [&](auto known) {
      const BlockRuler ruler = plain_ruler(known(), extremes_at(first), m.header);
      if (!ruler.plain) return false;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int64_t group = first + k * kTileThreads;
        if (group < m.each_groups) put_group<known()>(m, entry, n, group, v[k], ruler, noise[k], bytes);
      }
      return true;
    };
    const int bits = entry_bits(entry);
    if (bits == 1 && put(std::integral_constant<int, 1>())) return;
    if (bits == 2 && put(std::integral_constant<int, 2>())) return;
    if (bits == 3 && put(std::integral_constant<int, 3>())) return;
    if (bits == 4 && put(std::integral_constant<int, 4>())) return;
  }
#pragma unroll 1
  for (int64_t group = first; group < m.each_groups && group < first + 2 * kTileThreads; group += kTileThreads) {
    const int64_t i = value_of_group(group), end = (n + 1) * m.values;
    const uint32_t entry = entry_of(m, bytes, n);
    float v[8];
    if constexpr (usual) {
      load8_until<type, true>(x, i, end, 0.0f, v);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = i + j < end ? load_any(x, any, i + j) : 0.0f;
    }
    const BlockRuler ruler = block_ruler(entry_bits(entry), extremes_at(group), m.header);
    put_group<0>(m, entry, n, group, v, ruler, noise_at(group), bytes);
  }
}

/// A warp has kQuadTile quads of one sample, so it writes whole lines and knows one number of bits. x starts with sample `begin`. `whole`:
/// samples are multiples of 4 values, and start at multiples of them; others are of type `any`.
template <DType type, bool whole>
__global__ void __launch_bounds__(kThreads) decode_tiles(const __grid_constant__ Sizes m, const uint8_t* bytes, void* x, DType any,
                                                         int64_t begin, int64_t tiles, int64_t tiles_each) {
  const int64_t tile = thread_index() / 32;
  if (tile >= tiles) return;
  const int64_t in = quotient(tile, tiles_each), n = begin + in;
  const int64_t first = (tile - in * tiles_each) * kQuadTile + threadIdx.x % 32;
  const uint32_t entry = entry_of(m, bytes, n);
  const uint8_t* const codes = bytes + m.bit_bytes * entry_before(entry);
  const int bits = entry_bits(entry);
  uint32_t four[kQuads];
  with_bits(bits, [&](auto known) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      if ((first + 32 * q) * 4 < m.values) four[q] = load_four<known()>(codes, first + 32 * q);  // of a broken quad too: samples are padded
    }
  });
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const int64_t quad = first + 32 * q, to = in * m.values + quad * 4;
    if (quad * 4 >= m.values) return;
    const Header h = load_header(bytes + m.headers, m.header, n * m.each_blocks + m.block_of(quad / 2));
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float level = static_cast<float>(four[q] >> (bits * j) & ((1u << bits) - 1));
      v[j] = is_poisoned(h) ? __uint_as_float(kCanonicalNaN) : flush(fmaf(level, h.step, h.low));
    }
    if constexpr (whole) {
      store4<type>(x, to, v);
    } else {
#pragma unroll 1
      for (int j = 0; j < 4 && quad * 4 + j < m.values; ++j) store(x, any, to + j, j == 0 ? v[0] : j == 1 ? v[1] : j == 2 ? v[2] : v[3]);
    }
  }
}

// ---- allocation ------------------------------------------------------------------------------------------------------
//
// Who gets the bits, in one thread block: of all gains C_n·bit_gain(b) the budget − n largest are taken. Bisection on the gains' bit
// patterns finds the least one taken; equal ones go by fewer bits, then by sample. Counts are integers: any order gives the same.

constexpr int kShareThreads = 1024, kShareWarps = kShareThreads / 32;  // at most

/// As many warps as the samples fill: fewer wait for one another.
unsigned share_threads(int64_t samples) { return static_cast<unsigned>(less_of(ceil_div(samples, 32) * 32, kShareThreads)); }
constexpr unsigned long long kInfinity = 0x7ff0000000000000ull;

struct Samples {
  const double* squares;
  const float* weights;
  int64_t count;

  __device__ inline double sensitivity(int64_t n) const {
    return per_sample_sensitivity(squares[n], weights == nullptr ? 1.0f : weights[n]);
  }
};

__device__ inline double gain_of(unsigned long long pattern) { return __longlong_as_double(static_cast<long long>(pattern)); }

/// Bits beyond the least that gains of at least `least` give one sample.
__device__ inline uint32_t bits_taken(double c, double least) {
  uint32_t taken = 0;
#pragma unroll
  for (int b = kLeastSampleBits; b < kMostSampleBits; ++b) taken += c * bit_gain(b) >= least ? 1u : 0u;
  return taken;
}

/// What the warp of this lane's number has put there.
__device__ inline uint32_t slot_of_lane(const uint32_t* slots) { return threadIdx.x % 32 < blockDim.x / 32 ? slots[threadIdx.x % 32] : 0; }

/// The sum over the thread block, for all threads. `slots` must not be those of the call before: no thread may still read them.
__device__ inline uint32_t block_sum(uint32_t mine, uint32_t* slots) {
  const uint32_t warp = __reduce_add_sync(~0u, mine);
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = warp;
  __syncthreads();
  return __reduce_add_sync(~0u, slot_of_lane(slots));
}

/// What the threads before this one hold, and in `total` what all do. Safe to call again at once.
__device__ inline uint32_t block_scan(uint32_t mine, uint32_t* slots, uint32_t& total) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t sum = mine;
#pragma unroll
  for (unsigned o = 1; o < 32; o *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, sum, o);
    sum += lane >= o ? other : 0u;
  }
  if (lane == 31) slots[warp] = sum;
  __syncthreads();
  const uint32_t each = slot_of_lane(slots);
  total = __reduce_add_sync(~0u, each);
  const uint32_t before = __reduce_add_sync(~0u, lane < warp ? each : 0u);
  __syncthreads();
  return before + sum - mine;
}

struct Cut {
  double taken;   // gains of at least this are taken
  double tied;    // of those that equal this,
  uint32_t rest;  // so many are
};

__device__ inline Cut find_cut(const Samples& s, uint32_t want, uint32_t (&slots)[2][kShareWarps]) {
  // At least `want` gains reach `low`, fewer reach `high`.
  unsigned long long low = 0, high = kInfinity;
  uint32_t above = 0;  // gains that reach `high`
  if (want == 0) return {gain_of(kInfinity), 0.0, 0};
  const double first = threadIdx.x < s.count ? s.sensitivity(threadIdx.x) : 0.0;  // in a register all the way
  for (int turn = 0; high - low > 1; turn ^= 1) {
    const unsigned long long middle = low + (high - low) / 2;
    const double least = gain_of(middle);
    uint32_t mine = bits_taken(first, least);
    for (int64_t n = threadIdx.x + blockDim.x; n < s.count; n += blockDim.x) mine += bits_taken(s.sensitivity(n), least);
    const uint32_t reach = block_sum(mine, slots[turn]);
    if (reach == want) return {least, 0.0, 0};
    if (reach > want) {
      low = middle;
    } else {
      high = middle;
      above = reach;
    }
  }
  return {gain_of(high), gain_of(low), want - above};
}

/// Equal gains: a bit each to the first `rest` of them, by fewer bits, then by sample.
__device__ inline void share_ties(const Samples& s, const Cut& cut, uint32_t* entries, uint32_t* slots) {
  uint32_t before = 0;
  for (int b = kLeastSampleBits; b < kMostSampleBits; ++b) {
    for (int64_t base = 0; base < s.count; base += blockDim.x) {
      if (before >= cut.rest) return;  // the same in all threads
      const int64_t n = base + threadIdx.x;
      const bool tied = n < s.count && s.sensitivity(n) * bit_gain(b) == cut.tied;
      uint32_t total;
      const uint32_t rank = before + block_scan(tied ? 1u : 0u, slots, total);
      if (tied && rank < cut.rest) ++entries[n];  // sample n is this thread's throughout
      before += total;
    }
  }
}

__global__ void __launch_bounds__(kShareThreads) share_out(const __grid_constant__ Samples s, uint32_t want, uint32_t* entries) {
  __shared__ uint32_t slots[2][kShareWarps];
  const Cut cut = find_cut(s, want, slots);
  for (int64_t n = threadIdx.x; n < s.count; n += blockDim.x) entries[n] = kLeastSampleBits + bits_taken(s.sensitivity(n), cut.taken);
  __syncthreads();  // the last turn's slots have been read
  share_ties(s, cut, entries, slots[0]);
  uint32_t before = 0;
  for (int64_t base = 0; base < s.count; base += blockDim.x) {
    const int64_t n = base + threadIdx.x;
    const uint32_t bits = n < s.count ? entries[n] : 0u;
    uint32_t total;
    const uint32_t rank = block_scan(bits, slots[0], total);
    if (n < s.count) entries[n] = make_entry(before + rank, bits);
    before += total;
  }
}

// ---- launch ----------------------------------------------------------------------------------------------------------

/// May load8() serve every whole group of every sample?
bool is_vector(const PerSampleCode& code, const void* x, DType type) { return is_aligned(x) && code.values * size_of(type) % 16 == 0; }

}  // namespace

void per_sample_measure(const PerSampleCode& code, const void* x, DType type, F32Header* ranges, double* squares, StreamHandle stream) {
  const int64_t blocks = code.samples * code.blocks();
  if (blocks == 0) return;
  with_values(type, is_vector(code, x, type), [&](auto t, auto vector) {
    launch_kernel("per_sample_measure", stream, {blocks_for(blocks * 32)}, measure_blocks<t(), vector()>, Sizes(code), x, ranges, blocks);
  });
  per_sample_squares(code, ranges, squares, stream);
}

void per_sample_squares(const PerSampleCode& code, const F32Header* ranges, double* squares, StreamHandle stream) {
  if (code.samples == 0) return;
  launch_kernel("per_sample_squares", stream, {blocks_for(code.samples * 32)}, sum_ranges, ranges, code.samples, code.blocks(), squares);
}

void per_sample_allocate(const PerSampleCode& code, const double* squares, const float* weights, uint8_t* bytes, StreamHandle stream) {
  if (code.samples == 0) return;
  const auto want = static_cast<uint32_t>(code.budget - code.samples * kLeastSampleBits);
  launch_kernel("per_sample_allocate", stream, {1, share_threads(code.samples)}, share_out, {squares, weights, code.samples}, want,
                reinterpret_cast<uint32_t*>(bytes + code.entries_at()));
}

void per_sample_encode(const PerSampleCode& code, const void* x, DType type, const uint64_t* seed, const F32Header* ranges, uint8_t* bytes,
                       StreamHandle stream) {
  const int64_t tiles_each = ceil_div(code.groups(), kTileGroups), tiles = code.samples * tiles_each;
  if (tiles == 0) return;
  const bool one_block = code.block % 256 == 0 || code.blocks() == 1;
  const auto launch = [&](auto kernel) {
    launch_kernel("per_sample_encode", stream, {blocks_for(tiles * kTileThreads)}, kernel, Sizes(code), x, type, seed, ranges, bytes, tiles,
                  tiles_each);
  };
  if (!one_block || !is_vector(code, x, type)) return launch(encode_tiles<DType::f32, false>);
  with_type(type, [&](auto t) { launch(encode_tiles<t(), true>); });
}

void per_sample_decode(const PerSampleCode& code, const uint8_t* bytes, void* x, DType type, int64_t first, int64_t last,
                       StreamHandle stream) {
  if (last <= first || code.values == 0) return;
  const int64_t tiles_each = ceil_div(code.values, 4 * kQuadTile), tiles = (last - first) * tiles_each;
  const auto launch = [&](auto kernel) {
    launch_kernel("per_sample_decode", stream, {blocks_for(tiles * 32)}, kernel, Sizes(code), bytes, x, type, first, tiles, tiles_each);
  };
  if (!is_aligned(x) || code.values % 4 != 0) return launch(decode_tiles<DType::f32, false>);
  with_type(type, [&](auto t) { launch(decode_tiles<t(), true>); });
}

}  // namespace satchel::cuda
