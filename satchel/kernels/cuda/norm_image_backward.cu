// Backward from codes and mask: sums a channel, then the gradients in one pass. Both passes read codes and mask (an eleventh of the
// gradient's bytes in fp32 at 2 bits) instead of keeping what they decode.
#include "satchel/kernels/cuda/channel_sums.cuh"
#include "satchel/kernels/cuda/norm_image.cuh"

namespace satchel::cuda {
namespace norm_image {
namespace {

constexpr int kTurns = 2;  // steps whose loads are in flight together

struct Backward {
  Codes codes;
  int64_t values, channels;
  HeaderType header;
  const void* headers;
  const uint8_t* on;  // null: everything passes
};

/// Eight values of g and what stands beside them.
template <DType type>
struct Piece {
  Eight<type> g;
  Header header;
  uint32_t low, high;  // codes
  uint32_t passes;
  int bits;

  __device__ inline void load(const Backward& a, const void* from, int64_t group, int lane) {
    const int64_t block = group / 32;
    const Codes::Step at = a.codes.of(static_cast<uint32_t>(block));
    g = read8<type, true>(from, group * 8);
    passes = a.on == nullptr ? 0xffu : __ldg(a.on + group);
    header = load_header(a.headers, a.header, block);
    bits = at.bits;
    // `bits` bytes from lane·bits on, out of whole words; what is read lies inside the step's 32·bits bytes.
    const int byte = lane * bits, shift = byte % 4 * 8, end = shift + 8 * bits;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(at.codes) + byte / 4;
    const uint32_t first = __ldg(words), second = end > 32 ? __ldg(words + 1) : 0, extra = end > 64 ? __ldg(words + 2) : 0;
    low = __funnelshift_r(first, second, shift);
    high = __funnelshift_r(second, extra, shift);
  }

  /// g where it passes; NaN and infinity stay visible.
  __device__ inline float passed(int j) const { return g[j] * ((passes >> j & 1) != 0 ? 1.0f : 0.0f); }

  /// x̂: NaN where the block is poisoned.
  __device__ inline void decode(float (&hat)[8]) const {
    const uint32_t mask = (1u << bits) - 1;
    if (bits <= 4) {
#pragma unroll
      for (int j = 0; j < 8; ++j) hat[j] = fmaf(level(low >> (bits * j), mask), header.step, header.low);
    } else {
      const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
#pragma unroll
      for (int j = 0; j < 8; ++j) hat[j] = fmaf(level(static_cast<uint32_t>(both >> (bits * j)), mask), header.step, header.low);
    }
  }

 private:
  /// A code of few bits as a number: in the low bits of 2^23 it needs no conversion instruction.
  __device__ static inline float level(uint32_t code, uint32_t mask) { return __uint_as_float((code & mask) | 0x4b000000u) - 8388608.0f; }
};

/// Σ gy and Σ gy·x̂ of the 256 values that a thread block's steps meet.
template <DType type>
__global__ void __launch_bounds__(kWarps * 32, 3) sum_steps(const __grid_constant__ Backward a, const void* g, float2* partial) {
  __shared__ float2 shared[kWarps][kStep];
  const Walk walk(a.values);
  const int own = static_cast<int>(threadIdx.x);
  float sum[8] = {}, along[8] = {};
  for (int k = 0; k < walk.count; k += kTurns) {
    Piece<type> piece[kTurns];
#pragma unroll
    for (int u = 0; u < kTurns; ++u) {
      if (k + u < walk.count) piece[u].load(a, g, walk.group(k + u), walk.lane);
    }
#pragma unroll
    for (int u = 0; u < kTurns; ++u) {
      if (k + u >= walk.count) break;
      float hat[8];
      piece[u].decode(hat);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float gy = piece[u].passed(j);
        sum[j] += gy;
        along[j] = fmaf(gy, hat[j], along[j]);
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

/// What the last pass reads a channel and where it writes.
struct Outputs {
  const float *gamma, *rstd, *sum_g, *sum_gx;
  float share;  // 1/N
  NormImageGradients to;
};

/// Σgy/N, Σgy·x̂/N and γ·rstd of a step's channels.
struct BackTables {
  Table<1> offset, along, scale;
};

/// Over the warp, for all its threads.
__device__ inline float squared_sum(const float (&v)[8]) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < 8; ++j) sum = fmaf(v[j], v[j], sum);
#pragma unroll
  for (int half = 16; half > 0; half /= 2) sum += __shfl_xor_sync(~0u, sum, half);
  return sum;
}

/// From the last step to the first: the sums' pass, which went the other way, has left the last ones in the cache.
template <DType type>
__global__ void __launch_bounds__(kWarps * 32, 4)
    back_steps(const __grid_constant__ Backward a, const __grid_constant__ Outputs o, const void* g) {
  __shared__ BackTables table;
  const Walk walk(a.values);
  const int own = static_cast<int>(threadIdx.x);
  const int64_t c = channel_of(static_cast<int64_t>(blockIdx.x) * kStep + own, a.channels);
  table.offset.put(own, o.sum_g[c] * o.share);
  table.along.put(own, o.sum_gx[c] * o.share);
  table.scale.put(own, o.gamma[c] * o.rstd[c]);
  __syncthreads();
  for (int k = walk.count; k > 0; k -= kTurns) {
    Piece<type> piece[kTurns];
#pragma unroll
    for (int u = 0; u < kTurns; ++u) {
      if (k - 1 - u >= 0) piece[u].load(a, g, walk.group(k - 1 - u), walk.lane);
    }
#pragma unroll
    for (int u = 0; u < kTurns; ++u) {
      if (k - 1 - u < 0) break;
      const int64_t first = walk.group(k - 1 - u) * 8;
      float hat[8], gy[8];
      piece[u].decode(hat);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float offset[4], along[4], scale[4];
        table.offset.get_half(walk.lane, 0, half, offset);
        table.along.get_half(walk.lane, 0, half, along);
        table.scale.get_half(walk.lane, 0, half, scale);
#pragma unroll
        for (int q = 0, j = 4 * half; q < 4; ++q, ++j) {
          gy[j] = piece[u].passed(j);
          hat[j] = (gy[j] - fmaf(hat[j], along[q], offset[q])) * scale[q];
        }
      }
      if (o.to.skip != nullptr) write8<type, true>(o.to.skip, first, gy);
      if (o.to.x != nullptr) write8<type, true>(o.to.x, first, hat);
      if (o.to.squares != nullptr) {
        const float sum = squared_sum(hat);
        if (walk.lane == 0) o.to.squares[first / kStep] = sum;
      }
    }
  }
}

Backward backward_of(const NormImageCode& c, const uint8_t* on) { return {Codes(c), values_of(c), c.channels, c.header, c.headers, on}; }

}  // namespace
}  // namespace norm_image

int64_t norm_image_scratch_bytes() { return norm_image::kFewBlocks * norm_image::kStep * static_cast<int64_t>(sizeof(float2)); }

void norm_image_sums(const NormImageCode& code, const uint8_t* on, const void* g, DType type, float* sum_g, float* sum_gx, void* scratch,
                     StreamHandle stream) {
  constexpr const char* op = "norm_image_sums";
  using namespace norm_image;
  check_fit(code, op);
  check_values(g, op);
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  float2* partial = static_cast<float2*>(scratch);
  const unsigned grid = grid_of(code, kFewBlocks);
  const Backward a = backward_of(code, on);
  with_type(type, [&](auto t) { sum_steps<t()><<<grid, kWarps * 32, 0, s>>>(a, g, partial); });
  check_launch(op);
  finish_sums<<<grid_size(ceil_div(code.channels, 32)), kFinishWarps * 32, 0, s>>>(partial, grid * kStep, code.channels, sum_g, sum_gx);
  check_launch(op);
}

void norm_image_back(const NormImageCode& code, const uint8_t* on, const void* g, DType type, const float* gamma, const float* rstd,
                     const float* sum_g, const float* sum_gx, const NormImageGradients& to, StreamHandle stream) {
  constexpr const char* op = "norm_image_back";
  using namespace norm_image;
  check_fit(code, op);
  for (const void* p : {g, static_cast<const void*>(to.skip), static_cast<const void*>(to.x)}) check_values(p, op);
  const auto rows = static_cast<double>(values_of(code) / code.channels);
  const Backward a = backward_of(code, on);
  const Outputs o = {gamma, rstd, sum_g, sum_gx, static_cast<float>(1 / rows), to};
  const unsigned grid = grid_of(code, kManyBlocks);
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  with_type(type, [&](auto t) { back_steps<t()><<<grid, kWarps * 32, 0, s>>>(a, o, g); });
  check_launch(op);
}

}  // namespace satchel::cuda
