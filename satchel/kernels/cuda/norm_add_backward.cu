// Backward from the two codes: sums a channel, then both gradients in one pass. Both passes read the codes (an eighth of the gradient's
// bytes in fp32 at 2 bits) instead of keeping what they decode.
#include "satchel/kernels/cuda/channel_sums.cuh"
#include "satchel/kernels/cuda/norm_add.cuh"

namespace satchel::cuda {
namespace norm_add {
namespace {

constexpr int kTurns = 2;  // steps whose loads are in flight together

struct Backward {
  int64_t values, channels;
  const uint8_t *norm, *sum;  // codes
  const void* headers;        // the norm's
  HeaderType header;
  float level[kMaxLevels];
  Wide wide;  // of the sum
};

/// Codes of 8 values; those that do not exist as 0.
template <int bits>
__device__ inline uint32_t load_codes(const uint8_t* codes, int64_t group, int count) {
  const uint8_t* at = codes + group * bits;
  if (count == 8) {
    if constexpr (bits == 1) return __ldg(at);
    if constexpr (bits == 2) return __ldg(reinterpret_cast<const uint16_t*>(at));
    if constexpr (bits == 3) return __ldg(at) | static_cast<uint32_t>(__ldg(at + 1)) << 8 | static_cast<uint32_t>(__ldg(at + 2)) << 16;
    if constexpr (bits == 4) return __ldg(reinterpret_cast<const uint32_t*>(at));
  }
  uint32_t eight = 0;
  for (int k = 0; k * 8 < count * bits; ++k) eight |= static_cast<uint32_t>(__ldg(at + k)) << (8 * k);
  return eight;
}

/// Eight values of g and what stands beside them; `count` of them exist.
template <DType type, int bits, int sum_bits>
struct Piece {
  Eight<type> g;
  Header header;
  uint32_t norm, sum;
  int count = 0;

  __device__ inline void load(const Backward& a, const void* from, int64_t group) {
    const int64_t left = a.values - group * 8;
    count = left >= 8 ? 8 : left <= 0 ? 0 : static_cast<int>(left);
    if (count == 0) return;
    g = read8_until<type, true>(from, group * 8, a.values);
    norm = load_codes<bits>(a.norm, group, count);
    if constexpr (sum_bits == 2) {
      sum = load_codes<2>(a.sum, group, count);
    } else {
      const Codes c = a.wide.load(a.sum, group, static_cast<uint32_t>(group / 32), a.values);
      sum = c.two | c.extra << 16;
    }
    header = load_header(a.headers, a.header, group / 32);
  }

  /// g where z is above 0; NaN and infinity stay visible.
  __device__ inline float passed(int j) const {
    const uint32_t code = sum_bits == 2 ? sum >> (2 * j) & 3 : (sum >> (2 * j) & 3) | (sum >> (16 + j) & 1);  // 0 or not
    return g[j] * (code != 0 ? 1.0f : 0.0f);
  }
};

/// What a block's codes stand for: NaN where it is poisoned, as 0·NaN is NaN too.
template <int bits>
struct Decoder {
  float value[4];
  Header header;
  const float* table;  // of levels, in shared memory: 16 banks, no conflicts

  __device__ inline Decoder(const Backward& a, Header h, const float* levels) : header(h), table(levels) {
    if constexpr (bits <= 2) {
#pragma unroll
      for (int k = 0; k < 1 << bits; ++k) value[k] = fmaf(a.level[k], h.step, h.low);
    }
  }
  /// Of code j of eight.
  __device__ inline float at(uint32_t eight, int j) const {
    const uint32_t code = eight >> (bits * j);
    if constexpr (bits == 1) return (code & 1) != 0 ? value[1] : value[0];
    if constexpr (bits == 2) {
      const float lower = (code & 1) != 0 ? value[1] : value[0], upper = (code & 1) != 0 ? value[3] : value[2];
      return (code & 2) != 0 ? upper : lower;
    }
    return fmaf(table[code & ((1u << bits) - 1)], header.step, header.low);
  }
};

/// Steps of one warp: start, start + every, …, `count` of them.
struct Walk {
  int lane, warp;
  uint32_t start, every;
  int count;

  __device__ inline explicit Walk(int64_t values)
      : lane(static_cast<int>(threadIdx.x) % 32),
        warp(static_cast<int>(threadIdx.x) / 32),
        start(blockIdx.x + static_cast<uint32_t>(warp) * gridDim.x),
        every(gridDim.x * kWarps) {
    const uint32_t steps = static_cast<uint32_t>(ceil_div(values, kBlock));
    count = start < steps ? static_cast<int>((steps - 1 - start) / every) + 1 : 0;
  }
  /// The lane's group in turn k.
  __device__ inline int64_t group(int k) const { return (static_cast<int64_t>(start) + static_cast<int64_t>(k) * every) * 32 + lane; }
};

/// Σ gz and Σ gz·x̂ of the 256 values that a thread block's steps meet.
template <DType type, int bits, int sum_bits>
__global__ void __launch_bounds__(kWarps * 32, 3) sum_steps(const __grid_constant__ Backward a, const void* g, float2* partial) {
  __shared__ float levels[kMaxLevels];
  __shared__ float2 shared[kWarps][kBlock];
  const Walk walk(a.values);
  const int own = static_cast<int>(threadIdx.x);
  if (own < kMaxLevels) levels[own] = a.level[own];
  __syncthreads();
  float sum[8] = {}, along[8] = {};
  for (int k = 0; k < walk.count; k += kTurns) {
    Piece<type, bits, sum_bits> piece[kTurns];
#pragma unroll
    for (int u = 0; u < kTurns; ++u) {
      if (k + u < walk.count) piece[u].load(a, g, walk.group(k + u));
    }
#pragma unroll
    for (int u = 0; u < kTurns; ++u) {
      if (piece[u].count == 0) continue;
      const Decoder<bits> decoder(a, piece[u].header, levels);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float gz = piece[u].passed(j);
        sum[j] += gz;
        along[j] = j < piece[u].count ? fmaf(gz, decoder.at(piece[u].norm, j), along[j]) : along[j];  // behind the end: 0·NaN is not 0
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) shared[walk.warp][walk.lane * 8 + j] = make_float2(sum[j], along[j]);
  __syncthreads();
  float2 total = shared[0][own];
  for (int w = 1; w < kWarps; ++w) total.x += shared[w][own].x, total.y += shared[w][own].y;
  partial[static_cast<int64_t>(blockIdx.x) * kBlock + own] = total;
}
static_assert(kWarps * 32 == kBlock);

/// What the last pass reads a channel and where it writes.
struct Outputs {
  const float *gamma, *rstd, *sum_g, *sum_gx;  // null sums: statistics that are not the batch's
  float share;                                 // 1/N
  void *g_skip, *dx;                           // null: not wanted
};

/// Σgz/N, Σgz·x̂/N and γ·rstd of a step's channels.
struct BackTables {
  Table offset, along, scale;
};

/// From the last step to the first: the sums' pass, which went the other way, has left the last ones in the cache.
template <DType type, int bits, int sum_bits>
__global__ void __launch_bounds__(kWarps * 32, 4)
    back_steps(const __grid_constant__ Backward a, const __grid_constant__ Outputs o, const void* g) {
  __shared__ BackTables table;
  __shared__ float levels[kMaxLevels];
  const Walk walk(a.values);
  const int own = static_cast<int>(threadIdx.x);
  const int64_t c = channel_of(static_cast<int64_t>(blockIdx.x) * kBlock + own, a.channels);
  const bool batch = o.sum_g != nullptr;
  table.offset.put(own, batch ? o.sum_g[c] * o.share : 0.0f);
  table.along.put(own, batch ? o.sum_gx[c] * o.share : 0.0f);
  table.scale.put(own, o.gamma[c] * o.rstd[c]);
  if (own < kMaxLevels) levels[own] = a.level[own];
  __syncthreads();
  for (int k = walk.count; k > 0; k -= kTurns) {
    Piece<type, bits, sum_bits> piece[kTurns];
#pragma unroll
    for (int u = 0; u < kTurns; ++u) {
      if (k - 1 - u >= 0) piece[u].load(a, g, walk.group(k - 1 - u));
    }
#pragma unroll
    for (int u = 0; u < kTurns; ++u) {
      if (piece[u].count == 0) continue;
      const Decoder<bits> decoder(a, piece[u].header, levels);
      const int64_t first = walk.group(k - 1 - u) * 8;
      float gz[8], dx[8];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float offset[4], along[4], scale[4];
        table.offset.get_half(walk.lane, half, offset);
        table.along.get_half(walk.lane, half, along);
        table.scale.get_half(walk.lane, half, scale);
#pragma unroll
        for (int q = 0, j = 4 * half; q < 4; ++q, ++j) {
          gz[j] = piece[u].passed(j);
          dx[j] = (batch ? gz[j] - fmaf(decoder.at(piece[u].norm, j), along[q], offset[q]) : gz[j]) * scale[q];
        }
      }
      if (o.g_skip != nullptr) write8_within<type, true>(o.g_skip, first, 0, a.values, gz);
      if (o.dx != nullptr) write8_within<type, true>(o.dx, first, 0, a.values, dx);
    }
  }
}

Backward backward_of(const NormAddCode& code) {
  Backward a = {
      code.norm.grid.values,       code.channels, code.norm_at.codes, code.sum_at.codes, code.norm_at.headers, code.norm.header, {},
      {code.sum.table, code.extra}};
  for (int k = 0; k < kMaxLevels; ++k) a.level[k] = code.norm.levels.even ? static_cast<float>(k) : code.norm.levels.at[k];
  return a;
}

}  // namespace
}  // namespace norm_add

int64_t norm_add_scratch_bytes() { return norm_add::kFewBlocks * norm_add::kBlock * static_cast<int64_t>(sizeof(float2)); }

void norm_add_sums(const NormAddCode& code, const void* g, DType type, float* sum_g, float* sum_gx, void* scratch, StreamHandle stream) {
  constexpr const char* op = "norm_add_sums";
  using namespace norm_add;
  check_fit(code, op);
  check_values(g, op);
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  float2* partial = static_cast<float2*>(scratch);
  const unsigned grid = grid_size(walk_blocks(code.norm.grid.values, code.channels, kFewBlocks));
  const Backward a = backward_of(code);
  with_type(type, [&](auto t) {
    with_both_bits(code, [&](auto bits, auto sum_bits) { sum_steps<t(), bits(), sum_bits()><<<grid, kWarps * 32, 0, s>>>(a, g, partial); });
  });
  check_launch(op);
  finish_sums<<<grid_size(ceil_div(code.channels, 32)), kFinishWarps * 32, 0, s>>>(partial, grid * kBlock, code.channels, sum_g, sum_gx);
  check_launch(op);
}

void norm_add_back(const NormAddCode& code, const void* g, DType type, const float* gamma, const float* rstd, const float* sum_g,
                   const float* sum_gx, void* g_skip, void* dx, StreamHandle stream) {
  constexpr const char* op = "norm_add_back";
  using namespace norm_add;
  check_fit(code, op);
  for (const void* p : {g, static_cast<const void*>(g_skip), static_cast<const void*>(dx)}) check_values(p, op);
  const auto rows = static_cast<double>(code.norm.grid.values / code.channels);
  const Backward a = backward_of(code);
  const Outputs o = {gamma, rstd, sum_g, sum_gx, static_cast<float>(1 / rows), g_skip, dx};
  const unsigned grid = grid_size(walk_blocks(code.norm.grid.values, code.channels, kManyBlocks));
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  with_type(type, [&](auto t) {
    with_both_bits(code, [&](auto bits, auto sum_bits) { back_steps<t(), bits(), sum_bits()><<<grid, kWarps * 32, 0, s>>>(a, o, g); });
  });
  check_launch(op);
}

}  // namespace satchel::cuda
