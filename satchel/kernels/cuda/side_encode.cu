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
  constexpr int kOn = (1 << bits) - off;
  uint32_t eight = 0;
  const auto one = [&](auto slot) {
    constexpr int j = slot();
    constexpr uint32_t kUnit = 1u << (bits * j);
    const float v = flush_signed(x[j]), u = uniform_at(noise, j);
    const bool on = fmaf(g[j].gamma, v, g[j].beta) > 0.0f;
    const Reach side = usual ? Reach{g[j].threshold, off == 1 || on ? b.high : b.low} : reach_of(g[j], b, off == 1 || on);
    const float d = fabsf(v - side.from), length = fabsf(side.far - side.from);
    const bool is_long = (!usual || off > 1) && length > b.usual;
    const uint32_t passing = level_code<kOn>(kUnit * off, kUnit, d, length, is_long, t.on_short, t.on_long, u);
    if constexpr (off > 1) {
      const uint32_t blocked = level_code<off>(kUnit * (off - 1), ~kUnit + 1, d, length, is_long, t.off_short, t.off_long, u);
      eight |= on ? passing : blocked;
    } else {
      eight |= on ? passing : 0;
    }
  };
  one(std::integral_constant<int, 0>()), one(std::integral_constant<int, 1>()), one(std::integral_constant<int, 2>());
  one(std::integral_constant<int, 3>()), one(std::integral_constant<int, 4>()), one(std::integral_constant<int, 5>());
  one(std::integral_constant<int, 6>()), one(std::integral_constant<int, 7>());
  return eight;
}

/// Blocks of 256 values, one a warp and step; the channels of a thread never change. Needs inner = 1 (or a single channel) and
/// steps that are multiples of the channels. Whole blocks only.
template <int bits, int off, DType type>
__global__ void __launch_bounds__(kEncodeThreads, kEncodeEach) encode_fixed(const __grid_constant__ Args a) {
  constexpr int kWarps = kEncodeThreads / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const uint32_t blocks = static_cast<uint32_t>(a.code.grid.values / 256), step = gridDim.x * kWarps;
  const UniformSeed seed(a.seed);
  Gate g[8];
  load_gates(a.code, a.channels, static_cast<int64_t>(blockIdx.x) * 256 + lane * 8, g);
  Usual usual;
#pragma unroll
  for (int j = 0; j < 8; ++j) usual.add(g[j].gamma, g[j].threshold);
  usual.reduce_warp();
  float ahead[8];  // the next block's values, on their way while this one is coded
  uint32_t block = blockIdx.x + static_cast<uint32_t>(warp) * gridDim.x;
  if (block < blocks) load8<type>(a.x, (static_cast<int64_t>(block) * 32 + lane) * 8, ahead);
  for (; block < blocks; block += step) {
    const int64_t group = static_cast<int64_t>(block) * 32 + lane;
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = ahead[j];
    if (block + step < blocks) load8<type>(a.x, (static_cast<int64_t>(block + step) * 32 + lane) * 8, ahead);
    const Words noise = group_noise(seed, a.code.rounding, group);
    Extremes e;
    e.add8(v);
    e.reduce_warp();
    const Range r = e.range(a.code.header);
    if (lane == 0) store_range(a.headers, a.code.header, block, r);
    const Bounds b(r);
    uint32_t eight;
    if (usual.covers(b))
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

/// Off means from the partial sums and the values of the last, broken block.
template <DType type>
__global__ void __launch_bounds__(kFinishThreads, kFinishEach) finish_means(const __grid_constant__ Args a, int64_t entries) {
  const FinishShare share;
  const int64_t channels = a.code.channels, c = share.channel, n = a.code.grid.values;
  double sums[2] = {};
  if (c < channels) {
    share.each(a.partial, quotient(entries, channels), channels, [&](int64_t, float2 part) { sums[0] += part.x, sums[1] += part.y; });
    for (int64_t i = n / 256 * 256 + share.own; i < n; i += kFinishShares) {
      const float v = flush(load(a.x, type, i));
      if (i % channels == c && !is_on(v, a.channels[c])) sums[0] += v, sums[1] += 1;
    }
  }
  if (share.add_up(sums) && c < channels) a.channels[c].off_mean = sums[1] > 0 ? static_cast<float>(sums[0] / sums[1]) : 0.0f;
}

constexpr int64_t kMostParts = 64;

/// Thread blocks that share a channel's values; what they sum up fits into the scratch.
int64_t parts_of(int64_t channels) {
  const int64_t room = kEncodeBlocks * 256 / 2 / channels;
  return room < 1 ? 0 : room < kMostParts ? room : kMostParts;
}

/// Off sums of any channels: one thread block a channel and part of its values. Without parts it writes the mean itself.
template <DType type>
__global__ void __launch_bounds__(kThreads) sums_any(const __grid_constant__ Args a, int64_t parts) {
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
  for (int o = 16; o > 0; o /= 2) sum += __shfl_xor_sync(~0u, sum, o), count += __shfl_xor_sync(~0u, count, o);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = make_double2(sum, count);
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kThreads / 32; ++w) sum += shared[w].x, count += shared[w].y;
  if (parts == 0)
    a.channels[c].off_mean = count > 0 ? static_cast<float>(sum / count) : 0.0f;
  else
    reinterpret_cast<double2*>(a.partial)[c * parts + blockIdx.y] = make_double2(sum, count);
}

/// Off means from the parts, always in the same order.
__global__ void __launch_bounds__(kThreads) finish_any(const __grid_constant__ Args a, int64_t parts) {
  const int64_t c = thread_index();
  if (c >= a.code.channels) return;
  double2 total = make_double2(0, 0);
  for (int64_t p = 0; p < parts; ++p) {
    const double2 part = reinterpret_cast<const double2*>(a.partial)[c * parts + p];
    total.x += part.x, total.y += part.y;
  }
  a.channels[c].off_mean = total.y > 0 ? static_cast<float>(total.x / total.y) : 0.0f;
}

template <DType type>
void means_of_any(const Args& a, cudaStream_t stream) {
  const int64_t channels = a.code.channels, parts = parts_of(channels);
  const dim3 grid(grid_size(channels), static_cast<unsigned>(parts == 0 ? 1 : parts));
  sums_any<type><<<grid, kThreads, 0, stream>>>(a, parts);
  check_launch("side_encode");
  if (parts > 0) finish_any<<<blocks_for(channels), kThreads, 0, stream>>>(a, parts);
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
  const int bits = a.code.table.bits, count = n - first < 8 ? static_cast<int>(n - first) : 8;
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

bool needs_means(const SideCode& code, const Channel* channels) { return channels != nullptr && code.table.off == 1; }

/// Codes from block `first` on, whatever its size.
template <DType type>
void encode_rest(const Args& a, int64_t first, cudaStream_t stream) {
  const int64_t blocks = a.code.grid.blocks() - first, start = a.code.grid.begin(first);
  if (blocks <= 0) return;
  measure_any<type><<<blocks_for(blocks * 32), kThreads, 0, stream>>>(a, first);
  check_launch("side_encode");
  encode_any<type><<<blocks_for(ceil_div(a.code.grid.values - start, 8)), kThreads, 0, stream>>>(a, start / 8);
  check_launch("side_encode");
}

template <DType type>
void encode_typed(const Args& a, cudaStream_t stream) {
  const SideCode& code = a.code;
  const bool means = needs_means(code, a.channels);
  const int64_t wanted = is_aligned(a.x) ? fixed_blocks(code, a.channels != nullptr, 256, kEncodeBlocks) : 0;
  if (wanted > 0) {
    if (means && code.table.bits == 2) {
      encode_one_sided(a, type, static_cast<unsigned>(wanted), stream);
    } else {
      const unsigned blocks = grid_size(free_blocks(code, a.channels != nullptr, 256, kSideEncode));
      with_table(code.table, [&](auto bits, auto off) { encode_fixed<bits(), off(), type><<<blocks, kEncodeThreads, 0, stream>>>(a); });
    }
    check_launch("side_encode");
    encode_rest<type>(a, code.grid.values / 256, stream);
    if (means) finish_means<type><<<finish_blocks(code.channels), kFinishThreads, 0, stream>>>(a, wanted * 256);
  } else {
    encode_rest<type>(a, 0, stream);
    if (means) means_of_any<type>(a, stream);
  }
  check_launch("side_encode");
}

}  // namespace
}  // namespace side

int64_t side_scratch_bytes(const SideCode& code) {
  return code.table.off == 1 ? side::kEncodeBlocks * 256 * static_cast<int64_t>(sizeof(float2)) : 0;
}

void side_encode(const SideCode& code, const void* x, DType type, Channel* channels, const uint64_t* seed, uint8_t* codes, void* headers,
                 void* scratch, StreamHandle stream) {
  if (code.grid.values == 0) return;
  const side::Args a = {code, x, channels, seed, codes, headers, static_cast<float2*>(scratch)};
  with_type(type, [&](auto t) { side::encode_typed<t()>(a, static_cast<cudaStream_t>(stream)); });
}

}  // namespace satchel::cuda
