// Encode of the block code: reads x once where a block fits into a warp's or a thread block's registers: 8 values a thread and
// chunk, one Philox call, `bits` bytes. Other block sizes take two passes: headers, then codes.
#include "satchel/kernels/cuda/values.cuh"

namespace satchel::cuda {
namespace {

struct Args {
  BlockCode code;
  const void* x;
  DType type;
  const uint64_t* seed;
  uint8_t* codes;
  void* headers;
  int64_t row = 0, gap = 0;               // values a row, and between two rows; gap 0: there are none
  FastDivisor each_row = FastDivisor(1);  // groups of 8 values
  uint32_t gap_bytes = 0;
};

/// The kernels that read x once count groups of 8 values in 32 bits, and a last thread block counts past the last one. Gaps in values.
constexpr int64_t kMostGroups = (int64_t{1} << 32) - 4096, kMostGap = kMostGroups / 4;

/// The 8 values of a group, of x that starts at a multiple of 16 bytes: rows are whole groups. No branch: four instructions serve the gaps.
template <DType type>
__device__ inline Eight<type> read_group(const Args& a, uint32_t group) {
  const char* row = static_cast<const char*>(a.x) + static_cast<uint64_t>(a.each_row.divide(group)) * a.gap_bytes;
  return read8<type, true>(row + static_cast<uint64_t>(group) * (8 * size_of(type)), 0);
}
__device__ inline int64_t value_at(const Args& a, int64_t i) { return a.gap == 0 ? i : i + quotient(i, a.row) * a.gap; }

/// Value i, or the power of it that is coded.
template <bool exp>
__device__ inline float coded_value(const Args& a, int64_t i) {
  const float v = load_any(a.x, a.type, value_at(a, i));
  return exp ? expf(v) : v;
}

/// Least and most of a team's block, of which every thread holds `chunks` · 8 values.
template <DType type, int chunks>
__device__ inline Extremes team_extremes(const Eight<type> (&x)[chunks], uint32_t lanes) {
  if constexpr (type == DType::f32) {
    Extremes e = Extremes::of8(x[0].v);
#pragma unroll
    for (int c = 1; c < chunks; ++c) e.add8(x[c].v);
    e.reduce(static_cast<int>(lanes));
    return e;
  } else {
    PairExtremes<type> e = {x[0].w[0], x[0].w[0]};
#pragma unroll
    for (int i = 1; i < chunks * 4; ++i) e.add(x[i / 4].w[i % 4]);
    return e.reduced(lanes);
  }
}

/// Codes of a group that lies in one block; 0 bits: bits and levels as the code says.
template <int bits, bool even>
__device__ inline void put_group(const Args& a, int64_t group, const float (&v)[8], const BlockRuler& b, const Words& noise) {
  const LevelTable& levels = a.code.levels;
  if constexpr (bits > 0)
    store_codes<bits>(a.codes, group, encode8_inside<bits, even>(v, b, levels, noise), 8);
  else
    store_codes(levels.bits, a.codes, group, encode8(levels.bits, levels.even, v, b, levels, noise), 8);
}

constexpr int kMostTurns = 4;
static_assert(kThreads * kMostTurns <= 4096);  // blocks of a thread block

/// Teams of 2^lanes_log threads code one whole block each and turn: G = 8 · lanes · chunks values. 0 bits: bits and levels as the code
/// says.
template <int bits, bool even, DType type, int chunks, bool exp>
__global__ void __launch_bounds__(kThreads, chunks == 4 ? 3 : 5)
    encode_teams(const __grid_constant__ Args a, int lanes_log, uint32_t blocks, int turns) {
  __shared__ RoundKeys keys;
  keys.fill(a.seed);
  __syncthreads();
  const uint32_t lanes = 1u << lanes_log, lane = threadIdx.x & (lanes - 1), each = kThreads >> lanes_log;
  // From the last values on: a tensor is packed just after something made or read it, which leaves those in the cache.
  uint32_t block = (gridDim.x - 1 - blockIdx.x) * (each * turns) + (threadIdx.x >> lanes_log);
  for (int turn = 0; turn < turns; ++turn, block += each) {
    const bool idle = block >= blocks;  // takes part in the warp's reductions only
    const uint32_t first = (idle ? 0 : block) * (lanes * chunks) + lane;
    Eight<type> x[chunks];
    Words noise[chunks];
#pragma unroll
    for (int c = 0; c < chunks; ++c) x[c] = read_group<type>(a, first + c * lanes);
    rounding_noises(keys, first, lanes, noise);  // while the values are on their way
    if constexpr (exp) {
#pragma unroll
      for (int i = 0; i < chunks * 8; ++i) x[i / 8].v[i % 8] = expf(x[i / 8].v[i % 8]);
    }
    const Extremes e = team_extremes(x, lanes);
    if (idle) continue;
    const auto put_codes = [&](const BlockRuler& b) {
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
        float v[8];
        to_floats(x[c], v);
        put_group<bits, even>(a, first + c * lanes, v, b, noise[c]);
      }
    };
    if constexpr (bits > 0) {
      const BlockRuler b = usual_ruler<bits, type == DType::bf16>(e, a.code.header);
      if (b.plain && a.code.rounding != Rounding::nearest) {
        if (lane == 0) static_cast<uint32_t*>(a.headers)[block] = bf16_header(b.header);
        put_codes({b.header, b.ruler, true});
        continue;
      }
    }
    if (a.code.rounding == Rounding::nearest) {
#pragma unroll
      for (int c = 0; c < chunks; ++c) noise[c] = nearest_noise();
    }
    const BlockRuler any = block_ruler(bits > 0 ? bits : a.code.levels.bits, e, a.code.header);
    if (lane == 0) store_header(a.headers, a.code.header, block, any.header);
    put_codes(any);
  }
}

/// Wide blocks of up to 8 · threads values: one thread block each.
template <int bits, bool even, DType type>
__global__ void __launch_bounds__(1024) encode_wide(const __grid_constant__ Args a, int groups) {
  __shared__ float2 pairs[32];
  __shared__ BlockRuler ruler;
  const int64_t block = blockIdx.x, group = block * groups + threadIdx.x;
  const bool active = static_cast<int>(threadIdx.x) < groups;
  const UniformSeed seed(a.seed);
  float v[8];
  Extremes e;
  if (active) to_floats(read_group<type>(a, static_cast<uint32_t>(group)), v);
  const Words noise = group_noise(seed, a.code.rounding, group);
  if (active) e.add8(v);
  const BlockRuler b = shared_ruler(bits > 0 ? bits : a.code.levels.bits, e, a.code.header, a.headers, block, pairs, &ruler);
  if (active) put_group<bits, even>(a, group, v, b, noise);
}

/// Headers of any blocks from `first` on: one thread block a block of values.
template <bool exp>
__global__ void __launch_bounds__(kThreads) measure_any(const __grid_constant__ Args a, int64_t first) {
  __shared__ float2 shared[kThreads / 32];
  for (int64_t b = first + blockIdx.x; b < a.code.grid.blocks(); b += gridDim.x) {
    const int64_t end = a.code.grid.end(b);
    Extremes e;
    for (int64_t i = a.code.grid.begin(b) + threadIdx.x; i < end; i += kThreads) e.add(coded_value<exp>(a, i));
    __syncthreads();  // the last turn's numbers have been read
    e.reduce_block(shared);
    if (threadIdx.x == 0) store_header(a.headers, a.code.header, b, e.header((1 << a.code.levels.bits) - 1, a.code.header));
  }
}

/// Headers of short blocks from `first` on: one warp a block of values.
template <bool exp>
__global__ void __launch_bounds__(kThreads) measure_short(const __grid_constant__ Args a, int64_t first) {
  const int64_t b = first + thread_index() / 32;
  if (b >= a.code.grid.blocks()) return;
  const int64_t end = a.code.grid.end(b);
  Extremes e;
  for (int64_t i = a.code.grid.begin(b) + threadIdx.x % 32; i < end; i += 32) e.add(coded_value<exp>(a, i));
  e.reduce(32);
  if (threadIdx.x % 32 == 0) store_header(a.headers, a.code.header, b, e.header((1 << a.code.levels.bits) - 1, a.code.header));
}

/// Codes of any groups of 8 values: they may lie in several blocks.
template <bool exp>
__global__ void __launch_bounds__(kThreads) encode_any(const __grid_constant__ Args a, int64_t first_group) {
  const int64_t group = first_group + thread_index(), first = group * 8, n = a.code.grid.values;
  const UniformSeed seed(a.seed);
  if (first >= n) return;
  const int bits = a.code.levels.bits, count = count_of(group, n);
  const Words noise = group_noise(seed, a.code.rounding, group);
  int64_t b = a.code.grid.block_of(first), end = a.code.grid.end(b);
  Header h = load_header(a.headers, a.code.header, b);
  Ruler ruler = make_ruler(h);
  float v[8];
  uint32_t draws[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = j < count ? coded_value<exp>(a, first + j) : 0.0f, draws[j] = noise_of(noise, j);
  uint64_t eight = 0;
#pragma unroll 1
  for (int j = 0; j < count; ++j) {
    if (first + j >= end) {
      end = a.code.grid.end(++b);
      h = load_header(a.headers, a.code.header, b);
      ruler = make_ruler(h);
    }
    if (is_poisoned(h)) continue;
    eight |= static_cast<uint64_t>(code_of(position(v[j], ruler), a.code.levels, draws[j])) << (bits * j);
  }
  const int64_t bytes = ceil_div(count * bits, 8);
  for (int k = 0; k < bytes; ++k) a.codes[group * bits + k] = static_cast<uint8_t>(eight >> (8 * k));
}

/// Common codes have kernels of their own; others share one, and are coded in two passes and as wide blocks where blocks have 8 and 1024
/// values.
constexpr bool is_common(int bits, bool even) { return bits == 2 || (even && (bits == 4 || bits == 8)); }

/// Calls f(bits, even) with both as integral constants; 0 bits: no common code.
template <class F>
void with_common(const LevelTable& levels, F&& f) {
  using std::false_type, std::true_type;
  if (!is_common(levels.bits, levels.even)) return f(std::integral_constant<int, 0>(), true_type());
  if (levels.bits == 4) return f(std::integral_constant<int, 4>(), true_type());
  if (levels.bits == 8) return f(std::integral_constant<int, 8>(), true_type());
  levels.even ? f(std::integral_constant<int, 2>(), true_type()) : f(std::integral_constant<int, 2>(), false_type());
}

/// Threads of a team for this block size and the groups of 8 values each takes; 0 where a warp's registers do not hold it. Two
/// groups a thread halve what the header costs.
int team_lanes(int64_t block, bool common, int& chunks) {
  chunks = 2;
  for (int lanes = 1; lanes <= 32; lanes *= 2) {
    if (block == 8 * lanes * chunks) return lanes;
  }
  chunks = block == 8 ? 1 : 4;
  return common && block == 8 ? 1 : common && block == 8 * 32 * chunks ? 32 : 0;
}

/// How many blocks one after the other a team takes: a thread block reads the keys of its noise once. One where the GPU would not be full.
int turns_for(int64_t threads) {
  const Gpu& gpu = this_gpu();
  return threads >= int64_t{gpu.processors} * gpu.threads * kMostTurns ? kMostTurns : 1;
}

/// Blocks from `first` on, whatever their size; `first` starts a group of 8 values.
template <bool exp>
void encode_rest(const Args& a, int64_t first, cudaStream_t stream) {
  const int64_t blocks = a.code.grid.blocks() - first, start = a.code.grid.begin(first), most = 1 << 20;
  if (blocks <= 0) return;
  if (a.code.grid.block <= 512)
    measure_short<exp><<<blocks_for(blocks * 32), kThreads, 0, stream>>>(a, first);
  else
    measure_any<exp><<<static_cast<unsigned>(blocks < most ? blocks : most), kThreads, 0, stream>>>(a, first);
  check_launch("encode");
  encode_any<exp><<<blocks_for(ceil_div(a.code.grid.values - start, 8)), kThreads, 0, stream>>>(a, start / 8);
  check_launch("encode");
}

/// Of powers blocks of 16 to 512 values have a kernel that reads x once.
template <DType type, bool exp>
void encode_typed(const Args& a, cudaStream_t stream) {
  const Grid& grid = a.code.grid;
  const int64_t whole = grid.values / grid.block;
  const LevelTable& levels = a.code.levels;
  const bool fits = whole > 0 && grid.values / 8 <= kMostGroups && a.gap <= kMostGap && is_aligned(a.x) && grid.is_straight();
  int chunks = 1;
  const int lanes = fits ? team_lanes(grid.block, !exp && is_common(levels.bits, levels.even), chunks) : 0;
  const bool wide = fits && !exp && lanes == 0 && grid.block % 8 == 0 && grid.block > 256 && grid.block <= 8192;
  if (lanes == 0 && !wide) return encode_rest<exp>(a, 0, stream);
  const int turns = turns_for(whole * lanes), log = log2_up(lanes);
  const unsigned teams = blocks_for(ceil_div(whole * lanes, turns));
  const uint32_t count = static_cast<uint32_t>(whole);
  if constexpr (exp) {
    encode_teams<0, true, type, 2, true><<<teams, kThreads, 0, stream>>>(a, log, count, turns);
  } else {
    with_common(levels, [&](auto bits, auto even) {
      if (wide) {
        const unsigned threads = static_cast<unsigned>(ceil_div(grid.block, 256) * 32);
        constexpr int kOwn = bits() == 2 ? 2 : 0;  // wide blocks of other bits are rare
        encode_wide<kOwn, even(), type><<<grid_size(whole), threads, 0, stream>>>(a, static_cast<int>(grid.block / 8));
      } else if (chunks == 2) {
        encode_teams<bits(), even(), type, 2, false><<<teams, kThreads, 0, stream>>>(a, log, count, turns);
      } else if constexpr (bits() > 0) {
        if (chunks == 1)
          encode_teams<bits(), even(), type, 1, false><<<teams, kThreads, 0, stream>>>(a, log, count, turns);
        else
          encode_teams<bits(), even(), type, 4, false><<<teams, kThreads, 0, stream>>>(a, log, count, turns);
      }
    });
  }
  check_launch("encode");
  encode_rest<exp>(a, whole, stream);
}

}  // namespace

bool compiled() { return true; }

void encode(const BlockCode& code, const void* x, DType type, const uint64_t* seed, uint8_t* codes, void* headers, StreamHandle stream,
            RowsWithGaps rows) {
  if (code.grid.values == 0) return;
  Args args{code, x, type, seed, codes, headers, rows.width, rows.width == 0 ? 0 : rows.pitch - rows.width};
  if (args.gap != 0 && args.gap <= kMostGap) {
    args.each_row = FastDivisor(static_cast<uint32_t>(rows.width / 8));
    args.gap_bytes = static_cast<uint32_t>(args.gap * size_of(type));
  }
  with_type(type, [&](auto t) { encode_typed<t(), false>(args, static_cast<cudaStream_t>(stream)); });
}

void encode_exp(const BlockCode& code, const float* x, const uint64_t* seed, uint8_t* codes, void* headers, StreamHandle stream) {
  if (code.grid.values > 0) encode_typed<DType::f32, true>({code, x, DType::f32, seed, codes, headers}, static_cast<cudaStream_t>(stream));
}

}  // namespace satchel::cuda
