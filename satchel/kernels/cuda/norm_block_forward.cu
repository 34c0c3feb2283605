// Forward in one pass: the block code of h (the bytes of block_encode.cu), both masks, and z = kept·relu(γ·x̂ + β)·scale with
// x̂ = (h − mean)·rstd. A block of values stays in a warp's registers from its only read to its only write.
#include "satchel/kernels/cuda/norm_block.cuh"

namespace satchel::cuda {
namespace norm_block {
namespace {

constexpr int kStretchGroups = kPieces * 32;
constexpr int64_t kStretch = kPieces * kStep;

struct Forward {
  BlockCode code;
  Chain chain;
  NormParameters with;
  const void* h;
  const uint64_t *code_seed, *drop_seed;
  NormBlockSaves to;
  void* z;
};

struct Tables {
  Table<kPieces> mean, rstd, gamma, beta;

  __device__ inline void fill(const NormParameters& p, int64_t channels, int64_t first) {
#pragma unroll 1
    for (int k = static_cast<int>(threadIdx.x); k < kStretch; k += kWarps * 32) {
      const int64_t c = channel_of(first + k, channels);
      mean.put(k, p.mean[c]);
      rstd.put(k, p.rstd[c]);
      gamma.put(k, p.gamma[c]);
      beta.put(k, p.beta[c]);
    }
  }
};

/// Eight values of a lane: z in the place of h. Gives ReLU's bits.
__device__ inline uint32_t pass8(const Tables& table, int lane, int piece, uint32_t kept, float scale, float (&v)[8]) {
  uint32_t on = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float mean[4], rstd[4], gamma[4], beta[4];
    table.mean.get_half(lane, piece, half, mean);
    table.rstd.get_half(lane, piece, half, rstd);
    table.gamma.get_half(lane, piece, half, gamma);
    table.beta.get_half(lane, piece, half, beta);
#pragma unroll
    for (int k = 0, j = 4 * half; k < 4; ++k, ++j) {
      const float y = fmaf(gamma[k], (v[j] - mean[k]) * rstd[k], beta[k]);
      const bool is_on = y > 0.0f;
      on |= (is_on ? 1u : 0u) << j;
      v[j] = chain_output(y, is_on && (kept >> j & 1) != 0 ? scale : 0.0f);
    }
  }
  return on;
}

/// What a warp needs at every turn.
struct Turn {
  const Forward& a;
  const Tables& table;
  int lane;
  UniformSeed seed;
  Dropout dropout;
};

/// One stretch of a warp. `whole`: all its values exist; else groups may be broken or missing, and so may blocks.
template <DType type, int block, bool even, bool whole>
__device__ inline void encode_stretch(const Turn& t, int64_t stretch) {
  constexpr int kEach = block <= kStep ? 1 : static_cast<int>(block / kStep);  // pieces that share a block
  constexpr int kLanes = block < kStep ? static_cast<int>(block / 8) : 32;     // lanes that share one
  const Forward& a = t.a;
  const int64_t n = a.code.grid.values, first = stretch * kStretchGroups + t.lane;
  const auto count_of = [&](int piece) {  // of the lane's values
    const int64_t left = n - (first + piece * 32) * 8;
    return whole || left >= 8 ? 8 : left <= 0 ? 0 : static_cast<int>(left);
  };
  float v[kPieces][8];
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const int64_t i = (first + p * 32) * 8;
    if (whole || i + 8 <= n)
      read8<type>(a.h, i, v[p]);
    else if (i < n)  // what is missing repeats what exists, which leaves the extremes alone
      read_some<type>(a.h, i, count_of(p), load(a.h, type, i), v[p]);
  }
#pragma unroll
  for (int head = 0; head < kPieces; head += kEach) {
    Extremes e;
#pragma unroll
    for (int p = head; p < head + kEach; ++p) {
      if (whole || count_of(p) > 0) e.add8(v[p]);
    }
    e.reduce(kLanes);
    const BlockRuler ruler = block_ruler<2>(e, a.code.header);
    const int64_t begin = (first + head * 32) * 8;  // of the block, for the lane that starts it
    if (t.lane % kLanes == 0 && (whole || begin < n)) store_header(a.to.headers, a.code.header, begin / block, ruler.header);
#pragma unroll
    for (int p = head; p < head + kEach; ++p) {
      const int count = count_of(p);
      if (!whole && count == 0) continue;
      const int64_t group = first + p * 32;
      const uint32_t exist = (1u << count) - 1, kept = t.dropout.kept(group);
      const Words noise = group_noise(t.seed, a.code.rounding, group);
      const uint64_t eight = encode8<2, even>(v[p], ruler, a.code.levels, noise);
      store_codes<2>(a.to.codes, group, whole ? eight : eight & ((1u << (2 * count)) - 1), count);
      const uint32_t on = pass8(t.table, t.lane, p, kept, a.chain.scale, v[p]);
      a.to.on[group] = static_cast<uint8_t>(on & exist);
      if (a.to.kept != nullptr) a.to.kept[group] = static_cast<uint8_t>(kept & exist);
      if (whole || count == 8)
        write8<type>(a.z, group * 8, v[p]);
      else
        write_some<type>(a.z, group * 8, count, v[p]);
    }
  }
}

template <DType type, int block, bool even>
__global__ void __launch_bounds__(kWarps * 32, 3) encode_stretches(const __grid_constant__ Forward a) {
  __shared__ Tables table;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t n = a.code.grid.values, step = static_cast<int64_t>(gridDim.x) * kWarps;
  table.fill(a.with, a.chain.channels, static_cast<int64_t>(blockIdx.x) * kStretch);
  const Turn turn = {a, table, lane, UniformSeed(a.code_seed), Dropout(a.chain.drop, a.drop_seed)};
  if (blockIdx.x == 0 && a.to.codes + code_bytes(n, 2) + threadIdx.x < static_cast<uint8_t*>(a.to.headers)) {
    a.to.codes[code_bytes(n, 2) + threadIdx.x] = 0;
  }
  __syncthreads();
  for (int64_t s = blockIdx.x + warp * static_cast<int64_t>(gridDim.x); s * kStretch < n; s += step) {
    if ((s + 1) * kStretch <= n)
      encode_stretch<type, block, even, true>(turn, s);
    else
      encode_stretch<type, block, even, false>(turn, s);
  }
}

template <DType type, int block>
void launch(const Forward& a, cudaStream_t stream) {
  const unsigned blocks = grid_size(walk_blocks(a.code.grid.values, a.chain.channels, kStretch, kFewBlocks));
  if (a.code.levels.even)
    encode_stretches<type, block, true><<<blocks, kWarps * 32, 0, stream>>>(a);
  else
    encode_stretches<type, block, false><<<blocks, kWarps * 32, 0, stream>>>(a);
}

}  // namespace
}  // namespace norm_block

bool norm_block_fits(const BlockCode& code, int64_t channels) {
  const Grid& g = code.grid;
  const bool block = g.block == 128 || g.block == 256 || g.block == 512 || g.block == 1024;
  return block && code.levels.bits == 2 && channels > 0 && g.values > 0 && g.values < int64_t{1} << 38 && g.values % channels == 0 &&
         g.is_straight() && norm_block::walk_blocks(g.values, channels, norm_block::kStep, norm_block::kFewBlocks) > 0;
}

void norm_block_encode(const BlockCode& code, const Chain& chain, const void* h, DType type, const NormParameters& with,
                       const uint64_t* code_seed, const uint64_t* drop_seed, const NormBlockSaves& to, void* z, StreamHandle stream) {
  constexpr const char* op = "norm_block_encode";
  using namespace norm_block;
  check_fit(code, chain, h, to, op);
  if (!is_aligned(z)) fail(op, "z must start at a multiple of 16");
  const Forward a = {code, chain, with, h, code_seed, drop_seed, to, z};
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  with_type(type, [&](auto t) {
    switch (code.grid.block) {
      case 128: return launch<t(), 128>(a, s);
      case 256: return launch<t(), 256>(a, s);
      case 512: return launch<t(), 512>(a, s);
      default: return launch<t(), 1024>(a, s);
    }
  });
  check_launch(op);
}

}  // namespace satchel::cuda
