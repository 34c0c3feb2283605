// Forward of norms by row and of smooth activations. Statistics: a thread block a row, which it holds in registers. Codes: a warp a block
// of 256 values, eight a lane; the row of eight values is found by a division, so that blocks may span rows.
#include "satchel/kernels/cuda/row_norm.cuh"
#include "satchel/kernels/cuda/smooth.cuh"

namespace satchel::cuda {
namespace {

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
__global__ void __launch_bounds__(kMostThreads)
    norm_rows(const __grid_constant__ RowShape shape, const __grid_constant__ RowNorm norm, const void* x, void* y) {
  __shared__ float parts[2][32];
  const int64_t column = static_cast<int64_t>(threadIdx.x) * 8;
  const bool active = column < shape.width;
  const float share = 1.0f / static_cast<float>(shape.width);
  int turn = 0;
  const auto sum = [&](float v) { return row_sum(v, parts[turn++ & 1]); };
  const auto squares = [&](const float(&v)[8], float less) {
    float total = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) total = fmaf(v[j] - less, v[j] - less, total);
    return active ? total : 0.0f;
  };
  for (int64_t row = blockIdx.x; row < shape.rows; row += gridDim.x) {
    const int64_t at = row * shape.width + (active ? column : 0);
    float v[8], hat[8];
    to_floats(read8<type, true>(x, at), v);
    float mean = 0.0f;
    if (norm.centred) {
      float total = 0.0f;
#pragma unroll
      for (int j = 0; j < 8; ++j) total += v[j];
      mean = sum(active ? total : 0.0f) * share;
    }
    const float rstd = rsqrtf(sum(squares(v, mean)) * share + static_cast<float>(norm.eps));
    if (threadIdx.x == 0) norm.mean[row] = mean, norm.rstd[row] = rstd;
    if (!active) continue;
    normalise8(norm, mean, rstd, v, hat);
    affine8(norm, column, hat, v);
    write8<type, true>(y, at, v);
  }
}

constexpr int kWarps = kThreads / 32, kTurns = 4;  // blocks of 256 values a warp takes: keys of noise are made once

struct EncodeArgs {
  RowNorm norm;
  RowCode hat, slope;
  Smooth act;
  const void* x;
  void* z;
  uint32_t groups, blocks;  // of 8 values, of 256
  FastDivisor each_row;     // groups

  EncodeArgs(const RowNorm& of, const RowCode& hats, const RowCode& slopes, Smooth smooth, const void* from, void* to, int64_t values,
             int64_t width)
      : norm(of),
        hat(hats),
        slope(slopes),
        act(smooth),
        x(from),
        z(to),
        groups(static_cast<uint32_t>(values / 8)),
        blocks(static_cast<uint32_t>(ceil_div(values, 256))),
        each_row(static_cast<uint32_t>(width / 8)) {}
  LaunchSize size() const { return {grid_size(ceil_div(blocks, kWarps * kTurns))}; }
};

/// Of a warp's block; see put_block() of device.cuh.
template <int bits, bool even>
__device__ inline void put_code(const RowCode& to, const RoundKeys& keys, uint32_t block, uint32_t group, bool own, const float (&v)[8]) {
  const Words noise = group_noise(keys, to.code.rounding, group);
  put_block<bits, even>(to.code.levels, HeaderType::bf16, to.at.headers, block, to.at.codes, group, own, v, noise);
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
    if constexpr (bits > 0) put_code<bits, even>(a.hat, hat_keys, block, group, own, hat);
    if constexpr (slopes) {  // of 3 or 4 bits, known when the kernel runs: one of each would be half as many kernels again
      if (a.slope.code.levels.bits == 3)
        put_code<3, true>(a.slope, slope_keys, block, group, own, slope);
      else
        put_code<4, true>(a.slope, slope_keys, block, group, own, slope);
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
  const LaunchSize size = {grid_size(less_of(shape.rows, this_gpu().processors * int64_t{32})), row_threads(shape.width)};
  with_type(type, [&](auto t) { launch_kernel("row_norm", stream, size, norm_rows<t()>, shape, norm, x, y); });
}

void row_encode(const RowShape& shape, const RowNorm& norm, const RowCode& hat, const RowCode& slope, Smooth act, const void* x, DType type,
                void* z, StreamHandle stream) {
  const EncodeArgs a(norm, hat, slope, act, x, z, shape.rows * shape.width, shape.width);
  with_type(type, [&](auto t) {
    with_hat(hat, [&](auto bits, auto even) {
      if (slope.at.codes != nullptr) {
        launch_kernel("row_norm", stream, a.size(), encode_rows<t(), bits(), even(), true>, a);
      } else if constexpr (bits() > 0) {
        launch_kernel("row_norm", stream, a.size(), encode_rows<t(), bits(), even(), false>, a);
      }
    });
  });
}

void smooth_encode(const RowCode& slope, const RowCode& output, Smooth act, const void* x, DType type, int64_t values, void* z,
                   StreamHandle stream) {
  const EncodeArgs a({}, output, slope, act, x, z, values, 8);
  with_type(type, [&](auto t) { launch_kernel("smooth", stream, a.size(), encode_rows<t(), 2, false, true, true>, a); });
}

void smooth(Smooth act, const void* y, DType type, int64_t values, void* z, float* slope, StreamHandle stream) {
  if (values == 0) return;
  const LaunchSize size = {blocks_for(ceil_div(values, 8))};
  with_type(type, [&](auto t) { launch_kernel("smooth", stream, size, smooth_any<t()>, act, y, values, z, slope); });
}

}  // namespace satchel::cuda
