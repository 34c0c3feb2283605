// Backward from the packed bytes: sums a channel, the gradient in place, and the next layer's input again. Every pass reads the codes
// (a sixteenth of the gradient's bytes in fp32, at 3 bits a tenth) instead of keeping what it decodes.
#include "satchel/kernels/cuda/channel_sums.cuh"
#include "satchel/kernels/cuda/norm_act.cuh"

namespace satchel::cuda {
namespace norm_act {
namespace {

struct Backward {
  SideCode code;
  Chain chain;
  const uint64_t* seed;
  Parts from;
  Wide wide;
};

/// The walk of one warp over blocks [first, last) of values: start, start + step, …
struct Walk {
  int lane, warp;
  uint32_t start, step, count;

  __device__ inline Walk(uint32_t first, uint32_t last)
      : lane(static_cast<int>(threadIdx.x) % 32),
        warp(static_cast<int>(threadIdx.x) / 32),
        start(first + blockIdx.x + static_cast<uint32_t>(warp) * gridDim.x),
        step(gridDim.x * kWarps),
        count(start < last ? (last - 1 - start) / step + 1 : 0) {}
};

__device__ inline uint32_t blocks_of(int64_t values) { return static_cast<uint32_t>(ceil_div(values, kBlock)); }

/// Σ gz and Σ gz·x̂ of the 256 values that a thread block's steps meet.
template <DType type, bool vector, bool wide>
__global__ void __launch_bounds__(kWarps * 32, 4) sum_blocks(const __grid_constant__ Backward a, const void* g, float2* partial) {
  __shared__ ChannelTables table;
  __shared__ float2 shared[kWarps][kBlock];
  const int64_t n = a.code.grid.values;
  const Walk walk(0, blocks_of(n));
  table.fill(a.from.channels, a.code.channels, static_cast<int64_t>(blockIdx.x) * kBlock);
  const Dropout dropout(a.chain, a.seed);
  __syncthreads();
  const uint32_t falling = table.falling(walk.lane), flat = wide ? table.flat(walk.lane) : 0;
  float sum[8] = {}, along[8] = {};
  for (uint32_t k = 0, block = walk.start; k < walk.count; ++k, block += walk.step) {
    const int64_t group = static_cast<int64_t>(block) * 32 + walk.lane, left = n - group * 8;
    if (left <= 0) break;  // behind the end of the last, broken block
    const Eight<type> v = read8_until<type, vector>(g, group * 8, n);
    const Codes codes = load_codes<wide>(a.wide, a.from.codes, group, block, n);
    const Range r = load_range(a.from.headers, a.code.header, block);
    const side::Bounds b(r);
    const Words kept = dropout.draw(group);
    const int count = left < 8 ? static_cast<int>(left) : 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[4];
      table.decoder(walk.lane, half, falling, flat).template decode<wide>(codes, half, b, is_poisoned(r), a.code.table, a.wide, x);
#pragma unroll
      for (int k = 0, j = 4 * half; k < 4; ++k, ++j) {
        const float gz = v[j] * dropout.factor(kept, j, codes.is_on(j));
        sum[j] += gz;
        along[j] = j < count ? fmaf(gz, x[k], along[j]) : along[j];  // behind the end gz is 0, but 0·NaN is not
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) shared[walk.warp][walk.lane * 8 + j] = make_float2(sum[j], along[j]);
  __syncthreads();
  const int k = static_cast<int>(threadIdx.x);
  float2 total = shared[0][k];
  for (int w = 1; w < kWarps; ++w) total.x += shared[w][k].x, total.y += shared[w][k].y;
  partial[static_cast<int64_t>(blockIdx.x) * kBlock + k] = total;
}
static_assert(kWarps * 32 == kBlock);

/// Sums of a channel over N rows, as the gradient takes them.
struct ChannelSums {
  const float *rstd, *sum_g, *sum_gx;
  float share;  // 1/N
};

/// g = γ·rstd·(gz − Σgz/N − x̂·Σgz·x̂/N), or γ·rstd·gz for statistics that are not the batch's. From the last block to the first: the
/// sums' pass, which went the other way, has left the last ones in the cache.
template <DType type, bool vector, bool wide, bool batch>
__global__ void __launch_bounds__(kWarps * 32, 4)
    back_blocks(const __grid_constant__ Backward a, const __grid_constant__ ChannelSums sums, void* g) {
  __shared__ ChannelTables table;
  __shared__ Table scales, offsets, alongs;
  const int64_t n = a.code.grid.values, first = static_cast<int64_t>(blockIdx.x) * kBlock;
  const Walk walk(0, blocks_of(n));
  table.fill(a.from.channels, a.code.channels, first);
  for (int k = static_cast<int>(threadIdx.x); k < kBlock; k += kWarps * 32) {
    const int64_t c = channel_of(first + k, a.code.channels);
    scales.put(k, a.from.channels[c].gamma * sums.rstd[c]);
    if constexpr (batch) offsets.put(k, sums.sum_g[c] * sums.share), alongs.put(k, sums.sum_gx[c] * sums.share);
  }
  const Dropout dropout(a.chain, a.seed);
  __syncthreads();
  const bool planes = batch && a.code.plane.bytes != nullptr;
  const OffKey key = planes ? stored_key(a.code) : OffKey{};
  const uint32_t falling = table.falling(walk.lane), flat = wide ? table.flat(walk.lane) : 0;
  for (uint32_t k = walk.count; k-- > 0;) {
    const uint32_t block = walk.start + k * walk.step;
    const int64_t group = static_cast<int64_t>(block) * 32 + walk.lane;
    if (group * 8 >= n) continue;
    const Eight<type> given = read8_until<type, vector>(g, group * 8, n);
    float v[8];
    const Codes codes = load_codes<wide>(a.wide, a.from.codes, group, block, n);
    const Words kept = dropout.draw(group);
    const Range r = batch ? load_range(a.from.headers, a.code.header, block) : Range{0.0f, 0.0f};
    const side::Bounds b(r);
    const uint32_t weight = planes && !codes.three && !is_poisoned(r) ? off_weight(key, block, a.code.plane.blocks) : 0;
    const uint32_t off_bits =
        weight > 0 ? __ldg(a.code.plane.bytes + kOffKeyBytes + static_cast<int64_t>(block / kOffGroup) * (kBlock / 8) + walk.lane) : 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float offset[4], along[4], scale[4], x[4];
      if constexpr (batch) {
        const Decoder decoder = table.decoder(walk.lane, half, falling, flat);
        decoder.template decode<wide>(codes, half, b, is_poisoned(r), a.code.table, a.wide, x);
        if (weight > 0) decoder.sample_off(codes.two >> (8 * half), off_bits >> (4 * half), static_cast<float>(weight), b, x);
        offsets.get_half(walk.lane, half, offset), alongs.get_half(walk.lane, half, along);
      }
      scales.get_half(walk.lane, half, scale);
#pragma unroll
      for (int k = 0, j = 4 * half; k < 4; ++k, ++j) {
        v[j] = given[j] * dropout.factor(kept, j, codes.is_on(j));
        if constexpr (batch) v[j] -= fmaf(x[k], along[k], offset[k]);
        v[j] *= scale[k];
      }
    }
    write8_within<type, vector>(g, group * 8, 0, n, v);
  }
}

/// Values [begin, end) of the next layer's input: decoded, then the chain with the code's own on bits.
template <DType type, bool vector, bool wide>
__global__ void __launch_bounds__(kWarps * 32, 4) input_blocks(const __grid_constant__ Backward a, int64_t begin, int64_t end, void* z) {
  __shared__ ChannelTables table;
  const uint32_t first = static_cast<uint32_t>(begin / kBlock);
  const Walk walk(first, blocks_of(end));
  table.fill(a.from.channels, a.code.channels, (static_cast<int64_t>(first) + blockIdx.x) * kBlock);
  const Dropout dropout(a.chain, a.seed);
  __syncthreads();
  const uint32_t falling = table.falling(walk.lane), flat = wide ? table.flat(walk.lane) : 0;
  for (uint32_t k = 0, block = walk.start; k < walk.count; ++k, block += walk.step) {
    const int64_t group = static_cast<int64_t>(block) * 32 + walk.lane, i = group * 8;
    if (i + 8 <= begin || i >= end) continue;
    const Codes codes = load_codes<wide>(a.wide, a.from.codes, group, block, a.code.grid.values);
    const Range r = load_range(a.from.headers, a.code.header, block);
    const side::Bounds b(r);
    const Words kept = dropout.draw(group);
    float x[8];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float gamma[4], beta[4], value[4];
      table.decoder(walk.lane, half, falling, flat).template decode<wide>(codes, half, b, is_poisoned(r), a.code.table, a.wide, value);
      table.gamma.get_half(walk.lane, half, gamma);
      table.beta.get_half(walk.lane, half, beta);
#pragma unroll
      for (int k = 0, j = 4 * half; k < 4; ++k, ++j) {
        const float y = fmaf(gamma[k], value[k], beta[k]);
        x[j] = chain_output(y, dropout.factor(kept, j, codes.is_on(j)));
      }
    }
    write8_within<type, vector>(z, i, begin, end, x);
  }
}

/// Calls f with type, 16-byte accesses and whether codes may have 3 bits, as integral constants.
template <class F>
void with_kernel(const Backward& a, DType type, bool vector, F&& f) {
  const bool wide = a.code.table.bits == 3 || a.wide.slots != nullptr;
  with_values(type, vector, [&](auto t, auto v) { return wide ? f(t, v, std::true_type()) : f(t, v, std::false_type()); });
}

unsigned grid_of(const SideCode& code, int64_t blocks) { return grid_size(walk_blocks(code.channels, blocks)); }

}  // namespace
}  // namespace norm_act

void norm_act_sums(const SideCode& code, const Chain& chain, const void* g, DType type, const uint8_t* bytes, const uint64_t* seed,
                   float* sum_g, float* sum_gx, void* scratch, StreamHandle stream, const ExtraBitView& extra) {
  constexpr const char* op = "norm_act_sums";
  using namespace norm_act;
  check_fit(code, bytes, op, extra);
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  float2* partial = static_cast<float2*>(scratch);
  const unsigned blocks = grid_of(code, ceil_div(code.grid.values, kBlock));
  const Backward a = {code, chain, seed, parts_of(code, bytes), {code.table, extra}};
  if (blocks > 0) {
    with_kernel(a, type, is_aligned(g),
                [&](auto t, auto vector, auto wide) { sum_blocks<t(), vector(), wide()><<<blocks, kWarps * 32, 0, s>>>(a, g, partial); });
  }
  check_launch(op);
  finish_sums<<<grid_size(ceil_div(code.channels, 32)), kFinishWarps * 32, 0, s>>>(partial, blocks * kBlock, code.channels, sum_g, sum_gx);
  check_launch(op);
}

void norm_act_back(const SideCode& code, const Chain& chain, const uint8_t* bytes, const uint64_t* seed, const float* rstd,
                   const float* sum_g, const float* sum_gx, void* g, DType type, StreamHandle stream, const ExtraBitView& extra) {
  constexpr const char* op = "norm_act_back";
  using namespace norm_act;
  check_fit(code, bytes, op, extra);
  if (code.grid.values == 0) return;
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const unsigned blocks = grid_of(code, ceil_div(code.grid.values, kBlock));
  const Backward a = {code, chain, seed, parts_of(code, bytes), {code.table, extra}};
  const auto rows = static_cast<double>(code.grid.values / code.channels);
  const ChannelSums sums = {rstd, sum_g, sum_gx, static_cast<float>(1 / rows)};
  with_kernel(a, type, is_aligned(g), [&](auto t, auto vector, auto wide) {
    if (sum_g != nullptr)
      back_blocks<t(), vector(), wide(), true><<<blocks, kWarps * 32, 0, s>>>(a, sums, g);
    else
      back_blocks<t(), vector(), wide(), false><<<blocks, kWarps * 32, 0, s>>>(a, sums, g);
  });
  check_launch(op);
}

void norm_act_input(const SideCode& code, const Chain& chain, const uint8_t* bytes, const uint64_t* seed, int64_t first, int64_t last,
                    void* z, DType type, StreamHandle stream, const ExtraBitView& extra) {
  constexpr const char* op = "norm_act_input";
  using namespace norm_act;
  check_fit(code, bytes, op, extra);
  const int64_t begin = first * code.channels, end = last * code.channels;
  if (first < 0 || end > code.grid.values) fail(op, "rows must exist", last);
  if (begin >= end) return;
  const unsigned blocks = grid_of(code, ceil_div(end, kBlock) - begin / kBlock);
  const Backward a = {code, chain, seed, parts_of(code, bytes), {code.table, extra}};
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  // A group starts at a multiple of 8 values: so many past an aligned one of the buffer as `begin` lies before it.
  with_kernel(a, type, is_aligned(z) && begin * size_of(type) % 16 == 0, [&](auto t, auto vector, auto wide) {
    input_blocks<t(), vector(), wide()><<<blocks, kWarps * 32, 0, s>>>(a, begin, end, z);
  });
  check_launch(op);
}

}  // namespace satchel::cuda
