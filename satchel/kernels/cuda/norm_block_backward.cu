// Backward from codes and masks: sums a channel, then the gradient in place. Both passes read the codes and masks (an eighth of the
// gradient's bytes in fp32) instead of keeping what they decode.
#include "satchel/kernels/cuda/channel_sums.cuh"
#include "satchel/kernels/cuda/norm_block.cuh"

namespace satchel::cuda {
namespace norm_block {
namespace {

constexpr int kTurns = 2;  // steps whose loads are in flight together

struct Backward {
  int64_t values, channels;
  int shift;  // groups of 8 a block, as a power of two
  HeaderType header;
  float level[4];
  uint32_t drop;  // 0 where dropout's mask is kept
  float scale;
  const uint64_t* seed;
  NormBlockSaves from;
  NormParameters with;
};

/// Codes of 8 values; those that do not exist as 0.
__device__ inline uint32_t load_codes(const uint8_t* codes, int64_t group, int count) {
  if (count == 8) return __ldg(reinterpret_cast<const uint16_t*>(codes) + group);
  uint32_t eight = 0;
  for (int k = 0; k * 4 < count; ++k) eight |= static_cast<uint32_t>(__ldg(codes + group * 2 + k)) << (8 * k);
  return eight;
}

/// Eight values of g and all that stands beside them; `count` of them exist.
struct Piece {
  float g[8];
  Header header;
  uint32_t codes, passes;
  int count = 0;

  template <DType type>
  __device__ inline void load(const Backward& a, const Dropout& dropout, const void* from, int64_t group) {
    const int64_t left = a.values - group * 8;
    count = left >= 8 ? 8 : left <= 0 ? 0 : static_cast<int>(left);
    if (count == 0) return;
    if (count == 8)
      read8<type>(from, group * 8, g);
    else
      read_some<type>(from, group * 8, count, 0.0f, g);
    codes = load_codes(a.from.codes, group, count);
    passes = __ldg(a.from.on + group);
    if (a.from.kept != nullptr) passes &= __ldg(a.from.kept + group);
    header = load_header(a.from.headers, a.header, group >> a.shift);
    passes &= dropout.kept(group);
  }

  /// g where it passes both masks; NaN and infinity stay visible.
  __device__ inline float passed(int j, float scale) const { return g[j] * ((passes >> j & 1) != 0 ? scale : 0.0f); }
};

/// What a block's codes stand for: NaN where it is poisoned, as 0·NaN is NaN too.
struct Decoder {
  float value[4];

  __device__ inline Decoder(const Backward& a, Header h) {
#pragma unroll
    for (int k = 0; k < 4; ++k) value[k] = fmaf(a.level[k], h.step, h.low);
  }
  __device__ inline float at(uint32_t code) const {
    const float lower = (code & 1) != 0 ? value[1] : value[0], upper = (code & 1) != 0 ? value[3] : value[2];
    return (code & 2) != 0 ? upper : lower;
  }
};

/// Σ gz and Σ gz·x̂ of the 256 values that a thread block's steps meet.
template <DType type>
__global__ void __launch_bounds__(kWarps * 32, 3) sum_steps(const __grid_constant__ Backward a, const void* g, float2* partial) {
  __shared__ Table<1> means, rstds;
  __shared__ float2 shared[kWarps][kStep];
  const Walk walk(a.values);
  const int own = static_cast<int>(threadIdx.x);
  const int64_t channel = channel_of(static_cast<int64_t>(blockIdx.x) * kStep + own, a.channels);
  means.put(own, a.with.mean[channel]);
  rstds.put(own, a.with.rstd[channel]);
  const Dropout dropout(a.drop, a.seed);
  __syncthreads();
  float sum[8] = {}, along[8] = {};
  for (int k = 0; k < walk.count; k += kTurns) {
    Piece piece[kTurns];
#pragma unroll
    for (int u = 0; u < kTurns; ++u) {
      if (k + u < walk.count) piece[u].load<type>(a, dropout, g, walk.group(k + u));
    }
#pragma unroll
    for (int u = 0; u < kTurns; ++u) {
      if (piece[u].count == 0) continue;
      const Decoder decoder(a, piece[u].header);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float mean[4], rstd[4];
        means.get_half(walk.lane, 0, half, mean);
        rstds.get_half(walk.lane, 0, half, rstd);
#pragma unroll
        for (int q = 0, j = 4 * half; q < 4; ++q, ++j) {
          const float gz = piece[u].passed(j, a.scale), x = (decoder.at(piece[u].codes >> (2 * j)) - mean[q]) * rstd[q];
          sum[j] += gz;
          along[j] = j < piece[u].count ? fmaf(gz, x, along[j]) : along[j];  // behind the end gz is 0, but 0·NaN is not
        }
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) shared[walk.warp][walk.lane * 8 + j] = make_float2(sum[j], along[j]);
  __syncthreads();
  float2 total = shared[0][own];
  for (int w = 1; w < kWarps; ++w) total.x += shared[w][own].x, total.y += shared[w][own].y;
  partial[static_cast<int64_t>(blockIdx.x) * kStep + own] = total;
}
static_assert(kWarps * 32 == kStep);

/// Σgz/N, Σgz·x̂/N, mean, rstd and γ·rstd of a step's channels.
struct BackTables {
  Table<1> offset, along, mean, rstd, scale;
};

/// From the last step to the first: the sums' pass, which went the other way, has left the last ones in the cache.
template <DType type>
__global__ void __launch_bounds__(kWarps * 32, 4)
    back_steps(const __grid_constant__ Backward a, const float* sum_g, const float* sum_gx, float share, void* g) {
  __shared__ BackTables table;
  const Walk walk(a.values);
  const int own = static_cast<int>(threadIdx.x);
  const int64_t c = channel_of(static_cast<int64_t>(blockIdx.x) * kStep + own, a.channels);
  table.offset.put(own, sum_g[c] * share);
  table.along.put(own, sum_gx[c] * share);
  table.mean.put(own, a.with.mean[c]);
  table.rstd.put(own, a.with.rstd[c]);
  table.scale.put(own, a.with.gamma[c] * a.with.rstd[c]);
  const Dropout dropout(a.drop, a.seed);
  __syncthreads();
  for (int k = walk.count; k > 0; k -= kTurns) {
    Piece piece[kTurns];
#pragma unroll
    for (int u = 0; u < kTurns; ++u) {
      if (k - 1 - u >= 0) piece[u].load<type>(a, dropout, g, walk.group(k - 1 - u));
    }
#pragma unroll
    for (int u = 0; u < kTurns; ++u) {
      if (piece[u].count == 0) continue;
      const Decoder decoder(a, piece[u].header);
      float out[8];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float offset[4], along[4], mean[4], rstd[4], scale[4];
        table.offset.get_half(walk.lane, 0, half, offset);
        table.along.get_half(walk.lane, 0, half, along);
        table.mean.get_half(walk.lane, 0, half, mean);
        table.rstd.get_half(walk.lane, 0, half, rstd);
        table.scale.get_half(walk.lane, 0, half, scale);
#pragma unroll
        for (int q = 0, j = 4 * half; q < 4; ++q, ++j) {
          const float x = (decoder.at(piece[u].codes >> (2 * j)) - mean[q]) * rstd[q];
          out[j] = (piece[u].passed(j, a.scale) - fmaf(x, along[q], offset[q])) * scale[q];
        }
      }
      if (piece[u].count == 8)
        write8<type>(g, walk.group(k - 1 - u) * 8, out);
      else
        write_some<type>(g, walk.group(k - 1 - u) * 8, piece[u].count, out);
    }
  }
}

Backward backward_of(const BlockCode& code, const Chain& chain, const NormParameters& with, const uint64_t* seed,
                     const NormBlockSaves& from) {
  Backward a = {code.grid.values, chain.channels, 0,    code.header, {0.0f, 1.0f, 2.0f, 3.0f}, from.kept == nullptr ? chain.drop : 0,
                chain.scale,      seed,           from, with};
  while (int64_t{8} << a.shift < code.grid.block) ++a.shift;
  for (int k = 0; k < 4 && !code.levels.even; ++k) a.level[k] = code.levels.at[k];
  return a;
}

unsigned grid_of(const BlockCode& code, const Chain& chain, int64_t most) {
  return grid_size(walk_blocks(code.grid.values, chain.channels, kStep, most));
}

}  // namespace
}  // namespace norm_block

int64_t norm_block_scratch_bytes() { return norm_block::kFewBlocks * norm_block::kStep * static_cast<int64_t>(sizeof(float2)); }

void norm_block_sums(const BlockCode& code, const Chain& chain, const void* g, DType type, const NormParameters& with,
                     const uint64_t* drop_seed, const NormBlockSaves& from, float* sum_g, float* sum_gx, void* scratch,
                     StreamHandle stream) {
  constexpr const char* op = "norm_block_sums";
  using namespace norm_block;
  check_fit(code, chain, g, from, op);
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  float2* partial = static_cast<float2*>(scratch);
  const unsigned blocks = grid_of(code, chain, kFewBlocks);
  const Backward a = backward_of(code, chain, with, drop_seed, from);
  with_type(type, [&](auto t) { sum_steps<t()><<<blocks, kWarps * 32, 0, s>>>(a, g, partial); });
  check_launch(op);
  finish_sums<<<grid_size(ceil_div(chain.channels, 32)), kFinishWarps * 32, 0, s>>>(partial, blocks * kStep, chain.channels, sum_g, sum_gx);
  check_launch(op);
}

void norm_block_back(const BlockCode& code, const Chain& chain, const NormParameters& with, const uint64_t* drop_seed,
                     const NormBlockSaves& from, const float* sum_g, const float* sum_gx, void* g, DType type, StreamHandle stream) {
  constexpr const char* op = "norm_block_back";
  using namespace norm_block;
  check_fit(code, chain, g, from, op);
  const Backward a = backward_of(code, chain, with, drop_seed, from);
  const auto rows = static_cast<double>(code.grid.values / chain.channels);
  with_type(type, [&](auto t) {
    back_steps<t()><<<grid_of(code, chain, kManyBlocks), kWarps * 32, 0, static_cast<cudaStream_t>(stream)>>>(
        a, sum_g, sum_gx, static_cast<float>(1 / rows), g);
  });
  check_launch(op);
}

}  // namespace satchel::cuda
