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

/// A block's header as it stands: low in the lower half. A poisoned block's step is NaN, and so are its values.
__device__ inline uint32_t raw_header(const RowCode& code, uint32_t group) {
  return __ldg(static_cast<const uint32_t*>(code.at.headers) + group / 32);
}
__device__ inline Header header_in(uint32_t raw) { return {low_half<DType::bf16>(raw), high_half<DType::bf16>(raw)}; }

/// The words that hold the codes of eight slopes, as they stand: nothing waits for them here. Of 3 bits (known when the kernel runs: one
/// more of each kernel would be half as many again) they are two words or one; what lies beyond the last codes is their own gap.
struct SlopeWords {
  uint32_t first = 0, last = 0;

  SlopeWords() = default;
  __device__ inline SlopeWords(const RowCode& slope, uint32_t group) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(slope.at.codes);
    const uint64_t byte = static_cast<uint64_t>(group) * static_cast<uint32_t>(slope.code.levels.bits);
    first = __ldg(words + byte / 4);
    if (slope.code.levels.bits == 3) last = __ldg(words + (byte + 2) / 4);
  }

  /// Four bits a code: those of 3 bits are spread, four from four, two from two, one from one.
  __device__ inline uint32_t codes(const RowCode& slope, uint32_t group) const {
    if (slope.code.levels.bits == 4) return first;
    uint32_t c = __funnelshift_r(first, last, group * 3 % 4 * 8);
    c = (c & 0x00000fffu) | (c & 0x00fff000u) << 4;
    c = (c & 0x003f003fu) | (c & 0x0fc00fc0u) << 2;
    return (c & 0x07070707u) | (c & 0x38383838u) << 1;
  }
};

/// Slopes of even levels; four bits a code.
__device__ inline float slope_at(uint32_t codes, Header h, int j) {
  return fmaf(__uint_as_float(0x4b000000u | (codes >> (4 * j) & 15u)) - 8388608.0f, h.step, h.low);  // 2^23 + code, less 2^23
}

/// What a thread reads of a row.
template <DType type, int bits, bool slopes>
struct RowPart {
  Eight<type> g;
  uint32_t hat_codes, hat, slope = 0;
  SlopeWords slope_words;

  __device__ inline RowPart(const BackArgs& a, uint32_t group) : g(read8<type, true>(a.to.g, static_cast<int64_t>(group) * 8)) {
    hat_codes = static_cast<uint32_t>(load_eight<bits>(a.hat.at.codes, group));
    hat = raw_header(a.hat, group);
    if (!slopes) return;
    slope_words = SlopeWords(a.slope, group);
    slope = raw_header(a.slope, group);
  }
};

/// Threads of a multiprocessor: rows of up to 3,072 values have registers to read the next row ahead, two thread blocks of 384 at a time.
constexpr int kFewThreads = 384, kResidentFew = 2 * kFewThreads, kResidentMany = 1024;

template <DType type, int bits, bool slopes, int most>
__global__ void __launch_bounds__(most, most == kFewThreads ? 2 : 1) back_rows(const __grid_constant__ BackArgs a) {
  __shared__ float4 parts[2][32];
  __shared__ float table[8];
  const LevelTable& levels = a.hat.code.levels;
  if (threadIdx.x < 8) table[threadIdx.x] = levels.even ? static_cast<float>(threadIdx.x) : levels.at[threadIdx.x];
  __syncthreads();
  const uint32_t groups = static_cast<uint32_t>(a.shape.width / 8), rows = static_cast<uint32_t>(a.shape.rows);
  const bool active = threadIdx.x < groups;
  const uint32_t column = active ? threadIdx.x : 0;  // idle threads follow the first one's values, and add and write nothing
  const float share = 1.0f / static_cast<float>(a.shape.width);
  const auto part_of = [&](uint32_t row) { return RowPart<type, bits, slopes>(a, row * groups + column); };
  float beta[8] = {}, gamma[8] = {};
  RowPart<type, bits, slopes> next = part_of(blockIdx.x);
  int turn = 0;
  for (uint32_t row = blockIdx.x; row < rows; row += gridDim.x, ++turn) {
    const RowPart<type, bits, slopes> part = next;
    if (most == kFewThreads) next = part_of(row + gridDim.x < rows ? row + gridDim.x : row);
    const Header h = header_in(part.hat), slope = header_in(part.slope);
    const uint32_t slope_codes = slopes ? part.slope_words.codes(a.slope, row * groups + column) : 0;
    float g[8], hat[8], scale[8];
    load8<DType::f32>(a.norm.gamma, column * 8, scale);
    float4 sum = {};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      g[j] = slopes ? part.g[j] * slope_at(slope_codes, slope, j) : part.g[j];
      hat[j] = fmaf(table[part.hat_codes >> (bits * j) & ((1u << bits) - 1)], h.step, h.low);
      beta[j] += g[j];
      gamma[j] = fmaf(g[j], hat[j], gamma[j]);
      g[j] *= scale[j];
      sum.x += g[j];
      sum.y = fmaf(g[j], hat[j], sum.y);
      sum.z = fmaf(hat[j], hat[j], sum.z);
    }
    if (a.to.x != nullptr) {
      sum = row_sums(active ? sum : float4{}, parts[turn & 1]);
      const float rstd = __ldg(a.norm.rstd + row), offset = a.norm.centred ? sum.x * share * rstd : 0.0f, along = sum.y * share * rstd;
      float own = rstd;
      if (a.to.corrects) own *= 1.0f + (sum.z * share - 1.0f + static_cast<float>(a.norm.eps) * rstd * rstd) * share;
#pragma unroll
      for (int j = 0; j < 8; ++j) g[j] = fmaf(own, g[j], -fmaf(along, hat[j], offset));
      if (active) write8<type, true>(a.to.x, static_cast<int64_t>(row * groups + column) * 8, g);
    }
    if (most != kFewThreads && row + gridDim.x < rows) next = part_of(row + gridDim.x);
  }
  if (!active) return;
  float* mine = a.partial + static_cast<int64_t>(blockIdx.x) * 2 * a.shape.width + column * 8;
  write8<DType::f32, true>(mine, 0, beta);
  write8<DType::f32, true>(mine, a.shape.width, gamma);
}

template <DType type>
__global__ void __launch_bounds__(kThreads) back_slopes(const __grid_constant__ RowCode slope, const void* g, void* out, int64_t groups) {
  const int64_t index = thread_index();
  if (index >= groups) return;
  const uint32_t group = static_cast<uint32_t>(index), codes = SlopeWords(slope, group).codes(slope, group);
  const Eight<type> given = read8<type, true>(g, index * 8);
  const Header h = header_in(raw_header(slope, group));
  float v[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = given[j] * slope_at(codes, h, j);
  write8<type, true>(out, index * 8, v);
}

/// Thread blocks, which take turns at the rows: as many as an H200 holds. The order of the sums depends on sizes alone.
int64_t parts_of_rows(const RowShape& s) {
  const int64_t threads = row_threads(s.width), resident = threads <= kFewThreads ? kResidentFew : kResidentMany;
  return less_of(s.rows, kSumProcessors * less_of(resident / threads, 32));
}

}  // namespace

int64_t row_back_scratch_bytes(const RowShape& s) { return parts_of_rows(s) * 2 * s.width * static_cast<int64_t>(sizeof(float)); }

void row_back(const RowShape& shape, const RowNorm& norm, const RowCode& hat, const RowCode& slope, const RowGradients& to, void* scratch,
              StreamHandle stream) {
  const int64_t parts = parts_of_rows(shape);
  const unsigned threads = row_threads(shape.width);
  const BackArgs a{shape, norm, hat, slope, to, static_cast<float*>(scratch)};
  with_type(to.type, [&](auto t) {
    const auto launch = [&](auto bits, auto slopes) {
      const auto kernel =
          threads <= kFewThreads ? back_rows<t(), bits(), slopes(), kFewThreads> : back_rows<t(), bits(), slopes(), kMostThreads>;
      launch_kernel("row_norm", stream, {grid_size(parts), threads}, kernel, a);
    };
    const auto with_slopes = [&](auto bits) {
      slope.at.codes != nullptr ? launch(bits, std::true_type()) : launch(bits, std::false_type());
    };
    switch (hat.code.levels.bits) {
      case 1: return with_slopes(std::integral_constant<int, 1>());
      case 2: return with_slopes(std::integral_constant<int, 2>());
      default: return with_slopes(std::integral_constant<int, 3>());
    }
  });
  add_up(a.partial, parts, 2 * shape.width, false, shape.width, to.beta, to.gamma, stream, "row_norm");
}

void slope_back(const RowShape& shape, const RowCode& slope, const void* g, DType type, void* out, StreamHandle stream) {
  const int64_t groups = shape.rows * shape.width / 8;
  with_type(type, [&](auto t) { launch_kernel("slope", stream, {blocks_for(groups)}, back_slopes<t()>, slope, g, out, groups); });
}

}  // namespace satchel::cuda
