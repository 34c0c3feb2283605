// Forward: extremes of x̂ for bits that are shared out, then one pass from x to z, mask and codes. A block of values stays in a warp's
// registers from its only read to its only write.
#include "satchel/kernels/cuda/norm_image.cuh"

namespace satchel::cuda {
namespace norm_image {
namespace {

constexpr int kTurns = 4;  // steps of the extremes whose loads are in flight together

struct Normaliser {
  Table<1> mean, rstd;

  __device__ inline void fill(const NormParameters& p, int64_t channels) {
    const int own = static_cast<int>(threadIdx.x);
    const int64_t c = channel_of(static_cast<int64_t>(blockIdx.x) * kStep + own, channels);
    mean.put(own, p.mean[c]);
    rstd.put(own, p.rstd[c]);
  }
  template <DType type>
  __device__ inline void apply(int lane, const Eight<type>& x, float (&hat)[8]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float m[4], r[4];
      mean.get_half(lane, 0, half, m);
      rstd.get_half(lane, 0, half, r);
#pragma unroll
      for (int q = 0, j = 4 * half; q < 4; ++q, ++j) hat[j] = (x[j] - m[q]) * r[q];
    }
  }
};
static_assert(kWarps * 32 == kStep);

/// The extremes of a warp's block as they stand in memory: rounding keeps the order. Every thread of the warp must call this.
template <DType type>
__device__ inline void put_range(F32Header* ranges, int64_t block, int lane, const float (&v)[8]) {
  Extremes e;
  e.add8(v);
  e.reduce_warp();
  if (lane != 0) return;
  if constexpr (type != DType::f32) {
    const uint32_t pair = half_pair<type>(e.least, e.most);
    e.least = low_half<type>(pair), e.most = high_half<type>(pair);
  }
  const Range r = make_range(flush(e.least), flush(e.most), e.finite(), HeaderType::f32);
  ranges[block] = {r.low, r.high};
}

template <DType type>
__global__ void __launch_bounds__(kWarps * 32, 4)
    measure_steps(const void* x, int64_t values, int64_t channels, const __grid_constant__ NormParameters with, F32Header* ranges) {
  __shared__ Normaliser table;
  const Walk walk(values);
  table.fill(with, channels);
  __syncthreads();
  for (int k = 0; k < walk.count; k += kTurns) {
    Eight<type> v[kTurns];
#pragma unroll
    for (int u = 0; u < kTurns; ++u) {
      if (k + u < walk.count) v[u] = read8<type, true>(x, walk.group(k + u) * 8);
    }
#pragma unroll
    for (int u = 0; u < kTurns; ++u) {
      if (k + u >= walk.count) break;  // the whole warp
      float hat[8];
      table.apply<type>(walk.lane, v[u], hat);
      put_range<DType::f32>(ranges, walk.group(k + u) / 32, walk.lane, hat);
    }
  }
}

struct Forward {
  Codes codes;
  int64_t values, channels;
  HeaderType header;
  Rounding rounding;
  void* headers;
  NormImagePass pass;
  NormParameters with;
  const uint64_t* seed;
};

struct Tables {
  Normaliser norm;
  Table<1> gamma, beta;

  __device__ inline void fill(const NormParameters& p, int64_t channels) {
    const int own = static_cast<int>(threadIdx.x);
    const int64_t c = channel_of(static_cast<int64_t>(blockIdx.x) * kStep + own, channels);
    norm.fill(p, channels);
    gamma.put(own, p.gamma[c]);
    beta.put(own, p.beta[c]);
  }
};

/// z, not yet rounded, and ReLU's bits.
template <DType type, bool adds, bool relu>
__device__ inline uint32_t pass8(const Tables& table, int lane, const float (&hat)[8], const Eight<type>& skip, float (&z)[8]) {
  uint32_t on = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float gamma[4], beta[4];
    table.gamma.get_half(lane, 0, half, gamma);
    table.beta.get_half(lane, 0, half, beta);
#pragma unroll
    for (int q = 0, j = 4 * half; q < 4; ++q, ++j) {
      float y = fmaf(gamma[q], hat[j], beta[q]);
      if constexpr (adds) y += skip[j];
      const bool passes = !relu || y > 0.0f;
      on |= (passes ? 1u : 0u) << j;
      z[j] = chain_output(y, passes ? 1.0f : 0.0f);
    }
  }
  return on;
}

/// Eight values of a block with these extremes.
template <int bits>
__device__ inline void put_codes(const Forward& a, const Codes::Step& at, int lane, int64_t block, const Extremes& e, const float (&hat)[8],
                                 const Words& noise) {
  const LevelTable even;  // even levels read no table
  const BlockRuler ruler = block_ruler<bits>(e, a.header);
  if (lane == 0) store_header(a.headers, a.header, block, ruler.header);
  store_codes<bits>(at.codes, lane, encode8<bits, true>(hat, ruler, even, noise), 8);
}

template <DType type, bool adds, bool relu>
__global__ void __launch_bounds__(kWarps * 32, 3) encode_steps(const __grid_constant__ Forward a) {
  __shared__ Tables table;
  const Walk walk(a.values);
  table.fill(a.with, a.channels);
  const UniformSeed seed(a.seed);
  __syncthreads();
  Eight<type> x, skip;  // the next step's values, on their way while this one is coded
  const auto read = [&](int k) {
    x = read8<type, true>(a.pass.x, walk.group(k) * 8);
    if constexpr (adds) skip = read8<type, true>(a.pass.skip, walk.group(k) * 8);
  };
  if (walk.count > 0) read(0);
  for (int k = 0; k < walk.count; ++k) {
    const Eight<type> own_x = x, own_skip = skip;
    if (k + 1 < walk.count) read(k + 1);
    const int64_t group = walk.group(k), block = group / 32;
    const Codes::Step at = a.codes.of(static_cast<uint32_t>(block));
    Extremes e;
    if (a.pass.ranges != nullptr) {
      const float2 r = __ldg(reinterpret_cast<const float2*>(a.pass.ranges) + block);
      e.least = r.x, e.most = r.y;
    }
    float hat[8], z[8];
    table.norm.apply<type>(walk.lane, own_x, hat);
    const uint32_t on = pass8<type, adds, relu>(table, walk.lane, hat, own_skip, z);
    write8<type, true>(a.pass.z, group * 8, z);
    if constexpr (relu) a.pass.on[group] = static_cast<uint8_t>(on);
    if (a.pass.z_ranges != nullptr) put_range<type>(a.pass.z_ranges, block, walk.lane, z);
    if (a.pass.ranges == nullptr) {
      e.add8(hat);
      e.reduce_warp();
    }
    const Words noise = group_noise(seed, a.rounding, group);
    switch (at.bits) {
      case 1: put_codes<1>(a, at, walk.lane, block, e, hat, noise); break;
      case 2: put_codes<2>(a, at, walk.lane, block, e, hat, noise); break;
      case 3: put_codes<3>(a, at, walk.lane, block, e, hat, noise); break;
      case 4: put_codes<4>(a, at, walk.lane, block, e, hat, noise); break;
      case 5: put_codes<5>(a, at, walk.lane, block, e, hat, noise); break;
      case 6: put_codes<6>(a, at, walk.lane, block, e, hat, noise); break;
      case 7: put_codes<7>(a, at, walk.lane, block, e, hat, noise); break;
      default: put_codes<8>(a, at, walk.lane, block, e, hat, noise); break;
    }
  }
}

}  // namespace
}  // namespace norm_image

bool norm_image_fits(const NormImageCode& c) {
  return c.block == norm_image::kStep && c.bits >= 0 && c.bits <= 8 && c.samples > 0 && c.values > 0 && c.values % norm_image::kStep == 0 &&
         c.values < int64_t{1} << 38 && c.samples <= (int64_t{1} << 38) / c.values && c.channels > 0 && c.values % c.channels == 0 &&
         norm_block::walk_blocks(norm_image::values_of(c), c.channels, norm_image::kStep, norm_image::kFewBlocks) > 0;
}

void norm_image_measure(const NormImageCode& code, const void* x, DType type, const NormParameters& with, F32Header* ranges,
                        StreamHandle stream) {
  constexpr const char* op = "norm_image_measure";
  using namespace norm_image;
  check_fit(code, op);
  check_values(x, op);
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const unsigned grid = grid_of(code, kManyBlocks);
  with_type(type, [&](auto t) { measure_steps<t()><<<grid, kWarps * 32, 0, s>>>(x, values_of(code), code.channels, with, ranges); });
  check_launch(op);
}

void norm_image_encode(const NormImageCode& code, const NormImagePass& pass, DType type, const NormParameters& with, const uint64_t* seed,
                       StreamHandle stream) {
  constexpr const char* op = "norm_image_encode";
  using namespace norm_image;
  check_fit(code, op);
  for (const void* p : {pass.x, pass.skip, static_cast<const void*>(pass.z)}) check_values(p, op);
  if (code.bits == 0 && pass.ranges == nullptr) fail(op, "mixed bits need the blocks' extremes");
  if (pass.skip != nullptr && pass.on == nullptr) fail(op, "a sum must have its ReLU");
  const Forward a = {Codes(code), values_of(code), code.channels, code.header, code.rounding, code.headers, pass, with, seed};
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const unsigned grid = grid_of(code, kFewBlocks);
  with_type(type, [&](auto t) {
    if (pass.skip != nullptr)
      encode_steps<t(), true, true><<<grid, kWarps * 32, 0, s>>>(a);
    else if (pass.on != nullptr)
      encode_steps<t(), false, true><<<grid, kWarps * 32, 0, s>>>(a);
    else
      encode_steps<t(), false, false><<<grid, kWarps * 32, 0, s>>>(a);
  });
  check_launch(op);
}

}  // namespace satchel::cuda
