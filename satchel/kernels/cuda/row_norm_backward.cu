// Backward of norms by row and of smooth activations, one read of g. A thread block takes every so many rows, one at a time in registers:
// a row's sums go round the thread block, and the channels' sums stay with the thread whose channels they are until the end.
//
//   gz = g · slope       dβ = Σ gz      dγ = Σ gz·x̂      over rows
//   dx = rstd·(c·γ·gz − mean(γ·gz) − x̂·mean(γ·gz·x̂)),    c = 1 + (mean(x̂²) − 1 + eps·rstd²)/width, or 1    (RMSNorm: no mean of γ·gz)
#include "satchel/kernels/cuda/partial_sums.cuh"
#include "satchel/kernels/cuda/row_norm.cuh"

namespace satchel::cuda {
namespace {

struct BackArgs {
  RowShape shape;
  RowNorm norm;
  RowCode hat, slope;
  RowGradients to;
  float* partial;  // of every thread block: width sums for β, then as many for γ
};

/// The codes of a group of eight, `bits` bytes of them; the lowest code first.
__device__ inline uint32_t load_group(const uint8_t* codes, int bits, int64_t group) {
  if (bits == 1) return __ldg(codes + group);
  if (bits == 2) return __ldg(reinterpret_cast<const uint16_t*>(codes) + group);
  const uint8_t* at = codes + group * 3;
  return __ldg(at) | static_cast<uint32_t>(__ldg(at + 1)) << 8 | static_cast<uint32_t>(__ldg(at + 2)) << 16;
}

/// Eight slopes of 4 bits, even levels. A poisoned block's step is NaN, and so are its values.
__device__ inline void slopes8(const RowCode& slope, int64_t group, float (&v)[8]) {
  const Header h = load_header(slope.at.headers, slope.code.header, group / 32);
  const uint32_t codes = __ldg(reinterpret_cast<const uint32_t*>(slope.at.codes) + group);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float code = __uint_as_float(0x4b000000u | (codes >> (4 * j) & 15u)) - 8388608.0f;  // 2^23 + code, less 2^23
    v[j] = fmaf(code, h.step, h.low);
  }
}

/// Resident threads of a multiprocessor: registers for as many, and for three thread blocks of up to 384.
constexpr int kFewThreads = 384, kResidentFew = 1152, kResidentMany = 1024;

template <DType type, bool slopes, int most>
__global__ void __launch_bounds__(most, most == kFewThreads ? kResidentFew / kFewThreads : 1) back_rows(const __grid_constant__ BackArgs a) {
  __shared__ float4 parts[2][32];
  __shared__ float table[8];
  const LevelTable& levels = a.hat.code.levels;
  const int bits = levels.bits;
  if (threadIdx.x < 8) table[threadIdx.x] = levels.even ? static_cast<float>(threadIdx.x) : levels.at[threadIdx.x];
  __syncthreads();
  const uint32_t mask = (1u << bits) - 1;
  const int64_t width = a.shape.width, column = static_cast<int64_t>(threadIdx.x) * 8;
  const bool active = column < width;
  const float share = 1.0f / static_cast<float>(width);
  float beta[8] = {}, gamma[8] = {};
  int turn = 0;
  for (int64_t row = blockIdx.x; row < a.shape.rows; row += gridDim.x, ++turn) {
    const int64_t at = row * width + column, group = at / 8;
    float g[8] = {}, hat[8] = {};
    float4 sum = {};
    if (active) {
      to_floats(read8<type, true>(a.to.g, at), g);
      const Header h = load_header(a.hat.at.headers, a.hat.code.header, group / 32);
      const uint32_t codes = load_group(a.hat.at.codes, bits, group);
      if constexpr (slopes) {
        float slope[8];
        slopes8(a.slope, group, slope);
#pragma unroll
        for (int j = 0; j < 8; ++j) g[j] *= slope[j];
      }
      float scale[8];
      channels8(a.norm.gamma, column, 1.0f, scale);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        hat[j] = fmaf(table[codes >> (bits * j) & mask], h.step, h.low);
        beta[j] += g[j];
        gamma[j] = fmaf(g[j], hat[j], gamma[j]);
        g[j] *= scale[j];
        sum.x += g[j];
        sum.y = fmaf(g[j], hat[j], sum.y);
        sum.z = fmaf(hat[j], hat[j], sum.z);
      }
    }
    if (a.to.x == nullptr) continue;
    sum = row_sums(sum, parts[turn & 1]);
    if (!active) continue;
    const float rstd = __ldg(a.norm.rstd + row), offset = a.norm.centred ? sum.x * share * rstd : 0.0f, along = sum.y * share * rstd;
    float own = rstd;
    if (a.to.corrects) own *= 1.0f + (sum.z * share - 1.0f + static_cast<float>(a.norm.eps) * rstd * rstd) * share;
#pragma unroll
    for (int j = 0; j < 8; ++j) g[j] = fmaf(own, g[j], -fmaf(along, hat[j], offset));
    write8<type, true>(a.to.x, at, g);
  }
  if (!active) return;
  float* mine = a.partial + static_cast<int64_t>(blockIdx.x) * 2 * width + column;
  write8<DType::f32, true>(mine, 0, beta);
  write8<DType::f32, true>(mine, width, gamma);
}

template <DType type>
__global__ void __launch_bounds__(kThreads) back_slopes(const __grid_constant__ RowCode slope, const void* g, void* out, int64_t groups) {
  const int64_t group = thread_index();
  if (group >= groups) return;
  const Eight<type> given = read8<type, true>(g, group * 8);
  float v[8];
  slopes8(slope, group, v);
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] *= given[j];
  write8<type, true>(out, group * 8, v);
}

/// Thread blocks, which take turns at the rows: as many as an H200 holds. The order of the sums depends on sizes alone.
int64_t parts_of_rows(const RowShape& s) {
  const int64_t threads = row_threads(s.width), resident = threads <= kFewThreads ? kResidentFew : kResidentMany;
  const int64_t parts = 132 * (resident / threads < 32 ? resident / threads : 32);
  return s.rows < parts ? s.rows : parts;
}

}  // namespace

int64_t row_back_scratch_bytes(const RowShape& s) { return parts_of_rows(s) * 2 * s.width * static_cast<int64_t>(sizeof(float)); }

void row_back(const RowShape& shape, const RowNorm& norm, const RowCode& hat, const RowCode& slope, const RowGradients& to, void* scratch,
              StreamHandle stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const int64_t parts = parts_of_rows(shape);
  const unsigned threads = row_threads(shape.width), grid = grid_size(parts);
  const BackArgs a{shape, norm, hat, slope, to, static_cast<float*>(scratch)};
  with_type(to.type, [&](auto t) {
    const auto launch = [&](auto slopes) {
      if (threads <= kFewThreads)
        back_rows<t(), slopes(), kFewThreads><<<grid, threads, 0, s>>>(a);
      else
        back_rows<t(), slopes(), kMostThreads><<<grid, threads, 0, s>>>(a);
    };
    slope.at.codes != nullptr ? launch(std::true_type()) : launch(std::false_type());
  });
  check_launch("row_norm");
  add_up(a.partial, parts, 2 * shape.width, false, shape.width, to.beta, to.gamma, s, "row_norm");
}

void slope_back(const RowShape& shape, const RowCode& slope, const void* g, DType type, void* out, StreamHandle stream) {
  const int64_t groups = shape.rows * shape.width / 8;
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  with_type(type, [&](auto t) { back_slopes<t()><<<blocks_for(groups), kThreads, 0, s>>>(slope, g, out, groups); });
  check_launch("slope");
}

}  // namespace satchel::cuda
