// Encode of side codes: every thread keeps the thresholds of its 8 channels in registers. Those of 2 bits with off means, the usual ones,
// are coded by encode_one_sided().
#include "satchel/kernels/cuda/finish.cuh"
#include "satchel/kernels/cuda/side.cuh"

namespace satchel::cuda {
namespace side {
namespace {

constexpr int kEncodeThreads = kSideEncode.threads, kEncodeEach = kSideEncode.each;  // 80 registers a thread
constexpr int64_t kEncodeBlocks = kSumProcessors * kEncodeEach;                      // that sum up off means

/// Codes of 8 values, packed.
template <int bits, int off, bool usual>
__device__ inline uint32_t encode8(const float (&x)[8], const Gate (&g)[8], const Bounds& b, const SideTable& t, const Words& noise) {
  uint32_t eight = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float v = flush_signed(x[j]);
    const bool on = fmaf(g[j].gamma, v, g[j].beta) > 0.0f;
    const uint32_t code = code_at<bits, off, usual>(v, on, g[j], b, t, uniform_at(noise, j), 1u << (bits * j));
    eight |= off > 1 || on ? code : 0;
  }
  return eight;
}

/// Blocks of 256 values, one a warp and step; the channels of a thread never change. Needs inner = 1 (or a single channel) and
/// steps that are multiples of the channels. Whole blocks only.
template <int bits, int off, DType type>
__global__ void __launch_bounds__(kEncodeThreads, kEncodeEach) encode_fixed(const __grid_constant__ Args a) {
  constexpr int kWarps = kEncodeThreads / 32;
  const uint32_t blocks = static_cast<uint32_t>(a.code.grid.values / 256), step = gridDim.x * kWarps, lane = threadIdx.x % 32;
  const UniformSeed seed(a.seed);
  Gate g[8];
  load_gates<8>(a.code, a.channels, static_cast<int64_t>(blockIdx.x) * 256 + lane * 8, g);
  const WarpChannels met(g, false);
  float ahead[8];  // the next block's values, on their way while this one is coded
  const auto read = [&](uint32_t from) { load8<type>(a.x, static_cast<int64_t>(static_cast<uint64_t>(from) * 256 + lane * 8), ahead); };
  uint32_t block = blockIdx.x + threadIdx.x / 32 * gridDim.x;
  if (block < blocks) read(block);
  for (uint32_t next; block < blocks; block = next) {
    next = block + step;
    const int64_t group = static_cast<int64_t>(static_cast<uint64_t>(block) * 32 + lane);
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = ahead[j];
    if (next < blocks) read(next);
    const Words noise = group_noise(seed, a.code.rounding, group);
    Extremes e;
    e.add8(v);
    e.reduce_warp();
    const Range r = e.range(a.code.header);
    if (lane == 0) store_range(a.headers, a.code.header, block, r);
    const Bounds b(r);
    uint32_t eight;
    if (met.fit(b))
      eight = encode8<bits, off, true>(v, g, b, a.code.table, noise);
    else
      eight = encode8<bits, off, false>(v, g, b, a.code.table, noise);
    if (is_poisoned(r)) {
      eight = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) eight |= poisoned_code(g[j].gamma, g[j].beta, v[j], off) << (bits * j);
    }
    store_codes<bits>(a.codes, group, eight, 8);
  }
}

/// Off means from the partial sums and the values from `first` on, which stand in none of them.
template <DType type>
__global__ void __launch_bounds__(kFinishThreads) finish_means(const __grid_constant__ Args a, int64_t entries, int64_t first) {
  const FinishShare share;
  const int64_t channels = a.code.channels, c = share.channel;
  double sums[2] = {};
  if (c < channels) {
    share.add_pairs(a.partial, entries, channels, sums);
    for (int64_t i = first_of_channel(first, c, channels) + share.own * channels; i < a.code.grid.values; i += share.all * channels) {
      const float v = flush(load(a.x, type, i));
      if (!is_on(v, a.channels[c])) sums[0] += v, sums[1] += 1;
    }
  }
  if (share.add_up(sums) && c < channels) a.channels[c].off_mean = mean_of(sums);
}

constexpr int64_t kMostParts = 64;

/// Off sums of any channels: one thread block a channel and part of its values. Parts are float32, as those of the other encoders.
template <DType type>
__global__ void __launch_bounds__(kThreads) sums_any(const __grid_constant__ Args a) {
  __shared__ double2 shared[kThreads / 32];
  const int64_t c = blockIdx.x, inner = a.code.inner, period = inner * a.code.channels;
  const int64_t own = ceil_div(a.code.grid.values, period) * inner;  // at most so many values are of this channel
  double sum = 0, count = 0;
  for (int64_t k = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x; k < own; k += static_cast<int64_t>(gridDim.y) * kThreads) {
    const int64_t row = quotient(k, inner), i = row * period + c * inner + k - row * inner;
    if (i >= a.code.grid.values) continue;
    const float v = flush(load(a.x, type, i));
    if (!is_on(v, a.channels[c])) sum += v, count += 1;
  }
  sum = warp_sum(sum), count = warp_sum(count);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = make_double2(sum, count);
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kThreads / 32; ++w) sum += shared[w].x, count += shared[w].y;
  a.partial[blockIdx.y * a.code.channels + c] = make_float2(static_cast<float>(sum), static_cast<float>(count));
}

/// Headers of any blocks from `first` on: one warp a block of values.
template <DType type>
__global__ void __launch_bounds__(kThreads) measure_any(const __grid_constant__ Args a, int64_t first) {
  const int64_t b = first + thread_index() / 32;
  if (b >= a.code.grid.blocks()) return;
  Extremes e;
  for (int64_t i = a.code.grid.begin(b) + threadIdx.x % 32; i < a.code.grid.end(b); i += 32) e.add(load(a.x, type, i));
  e.reduce(32);
  if (threadIdx.x % 32 == 0) store_range(a.headers, a.code.header, b, e.range(a.code.header));
}

/// Codes of any groups of 8 values: several blocks, several channels; one value a turn, by the definition.
template <DType type>
__global__ void __launch_bounds__(kThreads) encode_any(const __grid_constant__ Args a, int64_t first_group) {
  const int64_t group = first_group + thread_index(), first = group * 8, n = a.code.grid.values;
  const UniformSeed seed(a.seed);
  if (first >= n) return;
  const int bits = a.code.table.bits, count = count_of(group, n);
  const Words noise = group_noise(seed, a.code.rounding, group);
  int64_t b = a.code.grid.block_of(first), end = a.code.grid.end(b);
  Range r = load_range(a.headers, a.code.header, b);
  const bool planes = a.code.plane.bytes != nullptr;
  OffKey key = {};
  if (planes) key = encoder_key(a.code, a.seed, thread_index() == 0);
  uint32_t eight = 0, off_bits = 0;
  const auto write_plane = [&](int64_t i) {  // a thread alone has the bits of its eight values in a block's slot
    if (planes && off_weight(a.code, key, b) > 0) a.code.plane.bytes[off_byte(a.code, b, i)] = static_cast<uint8_t>(off_bits);
    off_bits = 0;
  };
  for (int j = 0; j < count; ++j) {
    if (first + j >= end) {
      write_plane(first + j - 1);
      end = a.code.grid.end(++b);
      r = load_range(a.headers, a.code.header, b);
    }
    const Channel c = a.channels == nullptr ? relu_channel() : a.channels[(first + j) / a.code.inner % a.code.channels];
    const float v = load(a.x, type, first + j);
    const uint32_t code = is_poisoned(r) ? poisoned_code_of(v, c, a.code.table) : side_code_of(v, c, r, a.code.table, noise_of(noise, j));
    eight |= code << (bits * j);
    off_bits |= (planes && off_bit_of(v, c, r, noise_of(noise, j)) ? 1u : 0u) << j;
  }
  write_plane(first + count - 1);
  for (int k = 0; k < ceil_div(count * bits, 8); ++k) a.codes[group * bits + k] = static_cast<uint8_t>(eight >> (8 * k));
}

template <DType type>
void encode_typed(const Args& a, StreamHandle stream) {
  constexpr const char* op = "side_encode";
  const SideCode& code = a.code;
  const int64_t values = code.grid.values, channels = code.channels;
  const bool has_channels = a.channels != nullptr, means = has_channels && code.table.off == 1;
  const int64_t wanted = is_aligned(a.x) ? fixed_blocks(code, has_channels, 256, kEncodeBlocks) : 0;
  const int64_t coded = wanted > 0 ? values / 256 : 0;  // blocks of 256; by the definition from there on, whatever the block's size
  if (wanted > 0 && means && code.table.bits == 2) {
    encode_one_sided(a, type, static_cast<unsigned>(wanted), stream);
  } else if (wanted > 0) {
    const LaunchSize size = {grid_size(free_blocks(code, has_channels, 256, kSideEncode)), kEncodeThreads};
    with_table(code.table, [&](auto bits, auto off) { launch_kernel(op, stream, size, encode_fixed<bits(), off(), type>, a); });
  }
  if (const int64_t blocks = code.grid.blocks() - coded, start = code.grid.begin(coded); blocks > 0) {
    launch_kernel(op, stream, {blocks_for(blocks * 32)}, measure_any<type>, a, coded);
    launch_kernel(op, stream, {blocks_for(ceil_div(values - start, 8))}, encode_any<type>, a, start / 8);
  }
  if (!means) return;
  const int64_t parts = more_of(1, less_of(kEncodeBlocks * 256 / channels, kMostParts));  // as many as the scratch holds
  if (wanted == 0) launch_kernel(op, stream, {dim3(grid_size(channels), static_cast<unsigned>(parts))}, sums_any<type>, a);
  const int64_t entries = wanted > 0 ? wanted * 256 : parts * channels;
  launch_kernel(op, stream, finish_size(channels, entries / channels), finish_means<type>, a, entries, wanted > 0 ? coded * 256 : values);
}

}  // namespace
}  // namespace side

int64_t side_scratch_bytes(const SideCode& code) {
  return code.table.off == 1 ? more_of(side::kEncodeBlocks * 256, code.channels) * static_cast<int64_t>(sizeof(float2)) : 0;
}

void side_encode(const SideCode& code, const void* x, DType type, Channel* channels, const uint64_t* seed, uint8_t* codes, void* headers,
                 void* scratch, StreamHandle stream) {
  if (code.grid.values == 0) return;
  const side::Args a = {code, x, channels, seed, codes, headers, static_cast<float2*>(scratch)};
  with_type(type, [&](auto t) { side::encode_typed<t()>(a, stream); });
}

}  // namespace satchel::cuda
