// Forward of norms by row and of smooth activations. Statistics: a thread block a row, which it holds in registers. Codes: a warp a block
// of 256 values, eight a lane; the row of eight values is found by a division, so that blocks may span rows.
#include "satchel/kernels/cuda/row_norm.cuh"
#include "satchel/kernels/cuda/smooth.cuh"

namespace satchel::cuda {
namespace {

struct NormArgs {
  RowShape shape;
  RowNorm norm;
  const void* x;
  void* y;
};

/// y = γ·x̂ + β of eight neighbouring channels.
__device__ inline void affine8(const RowNorm& norm, int64_t channel, const float (&hat)[8], float (&y)[8]) {
  float gamma[8], beta[8];
  load8<DType::f32>(norm.gamma, channel, gamma);
  load8<DType::f32>(norm.beta, channel, beta);
#pragma unroll
  for (int j = 0; j < 8; ++j) y[j] = fmaf(gamma[j], hat[j], beta[j]);
}

__device__ inline void normalise8(const RowNorm& norm, float mean, float rstd, const float (&v)[8], float (&hat)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) hat[j] = norm.centred ? (v[j] - mean) * rstd : v[j] * rstd;
}

template <DType type>
__global__ void __launch_bounds__(kMostThreads) norm_rows(const __grid_constant__ NormArgs a) {
  __shared__ float parts[2][32];
  const int64_t column = static_cast<int64_t>(threadIdx.x) * 8;
  const bool active = column < a.shape.width;
  const float share = 1.0f / static_cast<float>(a.shape.width);
  int turn = 0;
  const auto sum = [&](float x) { return row_sum(x, parts[turn++ & 1]); };
  const auto squares = [&](const float(&v)[8], float less) {
    float total = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) total = fmaf(v[j] - less, v[j] - less, total);
    return active ? total : 0.0f;
  };
  for (int64_t row = blockIdx.x; row < a.shape.rows; row += gridDim.x) {
    const int64_t at = row * a.shape.width + (active ? column : 0);
    float v[8], hat[8];
    to_floats(read8<type, true>(a.x, at), v);
    float mean = 0.0f;
    if (a.norm.centred) {
      float total = 0.0f;
#pragma unroll
      for (int j = 0; j < 8; ++j) total += v[j];
      mean = sum(active ? total : 0.0f) * share;
    }
    const float rstd = rsqrtf(sum(squares(v, mean)) * share + static_cast<float>(a.norm.eps));
    if (threadIdx.x == 0) a.norm.mean[row] = mean, a.norm.rstd[row] = rstd;
    if (!active) continue;
    normalise8(a.norm, mean, rstd, v, hat);
    affine8(a.norm, column, hat, v);
    write8<type, true>(a.y, at, v);
  }
}

struct EncodeArgs {
  RowNorm norm;
  RowCode hat, slope;
  Smooth act;
  const void* x;
  void* z;
  uint32_t groups, blocks;  // of 8 values, of 256
  FastDivisor each_row;     // groups
};

constexpr int kWarps = kThreads / 32, kTurns = 4;  // blocks of 256 values a warp takes: keys of noise are made once

/// Bits of the slopes, 3 or 4, known when the kernel runs: one of each would be half as many kernels again.
__device__ inline bool has_three_bits(const RowCode& slope) { return slope.code.levels.bits == 3; }

/// Header and codes of a warp's block, eight values a lane. `own`: they exist; where not, they are another lane's, and the block's extremes
/// stay.
template <int bits, bool even>
__device__ inline void put_block(const RowCode& to, const RoundKeys& keys, uint32_t block, uint32_t group, bool own, AroundZero near,
                                 const float (&v)[8]) {
  const bool leads = threadIdx.x % 32 == 0;
  Words noise = rounding_noise(keys, group);
  near.reduce_warp();
  const BlockRuler usual = usual_ruler<bits>(near, HeaderType::bf16);
  if (usual.plain && to.code.rounding != Rounding::nearest) {
    if (leads) static_cast<uint32_t*>(to.at.headers)[block] = bf16_header(usual.header);
    const uint64_t eight = encode8_inside<bits, even>(v, {usual.header, usual.ruler, true}, to.code.levels, noise);
    if (own) store_codes<bits>(to.at.codes, group, eight, 8);
    return;
  }
  Extremes e = Extremes::of8(v);
  e.reduce_warp();
  const BlockRuler ruler = block_ruler<bits>(e, HeaderType::bf16);
  if (leads) store_header(to.at.headers, HeaderType::bf16, block, ruler.header);
  if (to.code.rounding == Rounding::nearest) noise = nearest_noise();
  if (own) store_codes<bits>(to.at.codes, group, encode8_inside<bits, even>(v, ruler, to.code.levels, noise), 8);
}

/// `bits` of x̂; 0: there is no norm, and y is x. `slopes`: there is an activation. `output`: there is no norm either, and z is coded in
/// the place of x̂.
template <DType type, int bits, bool even, bool slopes, bool output = false>
__global__ void __launch_bounds__(kThreads, !slopes                                       ? 6
                                            : bits == 0 || (output && type != DType::f16) ? 5
                                                                                          : 4)
    encode_rows(const __grid_constant__ EncodeArgs a) {
  __shared__ RoundKeys hat_keys, slope_keys;
  if constexpr (bits > 0) hat_keys.fill(a.hat.seed);
  if constexpr (slopes) slope_keys.fill(a.slope.seed);
  __syncthreads();
  uint32_t block = blockIdx.x * (kWarps * kTurns) + threadIdx.x / 32;
  for (int turn = 0; turn < kTurns && block < a.blocks; ++turn, block += kWarps) {
    const bool own = block * 32 + threadIdx.x % 32 < a.groups;
    const uint32_t group = block * 32 + (own ? threadIdx.x % 32 : 0);  // past the end the first lane's: the extremes stay
    float hat[8], y[8], slope[8];
    to_floats(read8<type, true>(a.x, static_cast<int64_t>(group) * 8), y);
    if constexpr (bits > 0 && !output) {
      const uint32_t row = a.each_row.divide(group);
      normalise8(a.norm, a.norm.centred ? __ldg(a.norm.mean + row) : 0.0f, __ldg(a.norm.rstd + row), y, hat);
      if constexpr (slopes) {
        affine8(a.norm, (group - row * a.each_row.divisor) * 8, hat, y);
        as_stored<type>(y);
      }
    }
    if constexpr (slopes) {
      float z[8];
      smooth8(a.act, y, z, slope);
      Eight<type> stored;
      stored.set(z);
      if (own) stored.store(static_cast<typename Eight<type>::Raw*>(a.z) + static_cast<int64_t>(group) * 8);
      if constexpr (output) to_floats(stored, hat);
    }
    if constexpr (bits > 0) put_block<bits, even>(a.hat, hat_keys, block, group, own, AroundZero::of8(hat), hat);
    if constexpr (slopes) {
      const AroundZero near = AroundZero::of8(slope);
      if (has_three_bits(a.slope))
        put_block<3, true>(a.slope, slope_keys, block, group, own, near, slope);
      else
        put_block<4, true>(a.slope, slope_keys, block, group, own, near, slope);
    }
  }
}

/// Any number of values, from anywhere.
template <DType type>
__global__ void __launch_bounds__(kThreads) smooth_any(Smooth act, const void* y, int64_t values, void* z, float* slope) {
  const int64_t i = thread_index() * 8;
  if (i >= values) return;
  float v[8], out[8], by[8];
  to_floats(read8_until<type, false>(y, i, values), v);
  smooth8(act, v, out, by);
  write8_within<type, false>(z, i, 0, values, out);
  write8_within<DType::f32, false>(slope, i, 0, values, by);
}

/// Calls f(bits, even): 0 bits where there is no code.
template <class F>
void with_hat(const RowCode& hat, F&& f) {
  using std::false_type, std::true_type;
  if (hat.at.codes == nullptr) return f(std::integral_constant<int, 0>(), true_type());
  const LevelTable& levels = hat.code.levels;
  if (levels.bits == 1) return f(std::integral_constant<int, 1>(), true_type());
  if (levels.bits == 3) return f(std::integral_constant<int, 3>(), false_type());
  if (levels.even) return f(std::integral_constant<int, 2>(), true_type());
  f(std::integral_constant<int, 2>(), false_type());
}

bool is_usual(const BlockCode& code) {
  return code.grid.is_straight() && code.grid.block == 256 && code.grid.values % 8 == 0 && code.header == HeaderType::bf16;
}

}  // namespace

bool row_norm_fits(const RowShape& s) {
  return s.rows > 0 && s.width >= 8 && s.width <= 8 * kMostThreads && s.width % 8 == 0 &&
         s.rows <= ((int64_t{1} << 32) - 1) / (s.width / 8);
}

bool row_norm_code_fits(const BlockCode& code) {
  const int bits = code.levels.bits;
  return is_usual(code) && (bits == 1 || bits == 2 || (bits == 3 && !code.levels.even));
}

bool output_code_fits(const BlockCode& code) { return is_usual(code) && code.levels.bits == 2 && !code.levels.even; }

bool slope_code_fits(const BlockCode& code) {
  return is_usual(code) && (code.levels.bits == 3 || code.levels.bits == 4) && code.levels.even;
}

void row_norm(const RowShape& shape, const RowNorm& norm, const void* x, DType type, void* y, StreamHandle stream) {
  const unsigned threads = row_threads(shape.width);
  const int64_t most = this_gpu().processors * int64_t{32}, grid = shape.rows < most ? shape.rows : most;
  with_type(type, [&](auto t) {
    norm_rows<t()><<<grid_size(grid), threads, 0, static_cast<cudaStream_t>(stream)>>>(NormArgs{shape, norm, x, y});
  });
  check_launch("row_norm");
}

void row_encode(const RowShape& shape, const RowNorm& norm, const RowCode& hat, const RowCode& slope, Smooth act, const void* x, DType type,
                void* z, StreamHandle stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const int64_t groups = shape.rows * shape.width / 8;
  const EncodeArgs a{norm,
                     hat,
                     slope,
                     act,
                     x,
                     z,
                     static_cast<uint32_t>(groups),
                     static_cast<uint32_t>(ceil_div(groups, 32)),
                     FastDivisor(static_cast<uint32_t>(shape.width / 8))};
  const unsigned grid = grid_size(ceil_div(groups, 32 * kWarps * kTurns));
  with_type(type, [&](auto t) {
    with_hat(hat, [&](auto bits, auto even) {
      if (slope.at.codes != nullptr) {
        encode_rows<t(), bits(), even(), true><<<grid, kThreads, 0, s>>>(a);
      } else if constexpr (bits() > 0) {
        encode_rows<t(), bits(), even(), false><<<grid, kThreads, 0, s>>>(a);
      }
    });
  });
  check_launch("row_norm");
}

void smooth_encode(const RowCode& slope, const RowCode& output, Smooth act, const void* x, DType type, int64_t values, void* z,
                   StreamHandle stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const int64_t groups = values / 8;
  const EncodeArgs a{
      {}, output, slope, act, x, z, static_cast<uint32_t>(groups), static_cast<uint32_t>(ceil_div(groups, 32)), FastDivisor(1)};
  const unsigned grid = grid_size(ceil_div(groups, 32 * kWarps * kTurns));
  with_type(type, [&](auto t) { encode_rows<t(), 2, false, true, true><<<grid, kThreads, 0, s>>>(a); });
  check_launch("smooth");
}

void smooth(Smooth act, const void* y, DType type, int64_t values, void* z, float* slope, StreamHandle stream) {
  if (values == 0) return;
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  with_type(type, [&](auto t) { smooth_any<t()><<<blocks_for(ceil_div(values, 8)), kThreads, 0, s>>>(act, y, values, z, slope); });
  check_launch("smooth");
}

}  // namespace satchel::cuda
