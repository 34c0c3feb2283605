// What encode and decode of side codes share (theory.md 10, core/side.h). Where neighbouring values are neighbouring channels,
// threads walk the tensor in strides that keep each on its own channels, whose numbers then stay in registers.
#pragma once

#include <utility>

#include "satchel/kernels/cuda/device.cuh"

namespace satchel::cuda::side {

struct Args {
  SideCode code;
  const void* x;
  Channel* channels;
  const uint64_t* seed;
  uint8_t* codes;
  void* headers;
  float2* partial;  // off sums and counts, one row of a block's values a thread block
};

/// The codes of all whole blocks of 256 and their headers, the off plane, and the partial sums of off means, for one-sided codes of 2 bits
/// that fixed_blocks() gives so many thread blocks for; x starts at a multiple of 16. epilogue_forward_act.cu has it: the values of a norm
/// that has nothing to do.
void encode_one_sided(const Args& a, DType type, unsigned blocks, StreamHandle stream);

/// A channel as the kernels keep it: γ = 0 (the whole range is one side) is a threshold below everything.
struct Gate {
  float threshold, gamma, beta, off_mean;
};

/// The gates of `count` neighbouring values from value i on, where neighbours are neighbouring channels or there is just one.
template <int count>
__device__ inline void load_gates(const SideCode& code, const Channel* channels, int64_t i, Gate* g) {
  int64_t at = i % code.channels;
#pragma unroll
  for (int j = 0; j < count; ++j) {
    const Channel c = channels == nullptr ? relu_channel() : channels[at];
    g[j] = {c.gamma == 0.0f ? float_of(0xff800000u) : c.threshold, c.gamma, c.beta, off_value(c)};
    at = at + 1 < code.channels ? at + 1 : 0;
  }
}

/// What a block's values share.
struct Bounds {
  float low, high, usual;  // a side longer than `usual` is long

  __device__ inline explicit Bounds(Range r) : low(r.low), high(r.high), usual(0.8f * (r.high - r.low)) {}
};

/// stretch_of() of core/side.h.
struct Reach {
  float from, far;
};

__device__ inline Reach reach_of(const Gate& g, const Bounds& b, bool on) {
  const bool down = (g.gamma < 0.0f) == on && g.gamma != 0.0f;
  return {fminf(fmaxf(g.threshold, b.low), b.high), down ? b.low : b.high};
}

/// The channels that a warp meets. In a block that they fit no side is clamped, long or falling, no decoded value is subnormal (thresholds
/// are 0 or 2^-60 at least, the block's high end is 2^-60 at least, and so all are multiples of 2^-83), and off values are of usual size:
/// γ·x̂ + β of them is finite.
struct WarpChannels {
  float least = 0.0f, most = float_of(0x7f800000u);  // thresholds; nothing lies above infinity

  WarpChannels() = default;
  /// Eight channels of each of a warp's threads, all of which must call this. `decodes`: off means are read.
  __device__ inline WarpChannels(const Gate* g, bool decodes) {
    bool fits = true;
    float threshold[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      fits = fits && g[j].gamma > 0.0f && (!decodes || (g[j].gamma <= 0x1p60f && fabsf(g[j].off_mean) <= 0x1p15f));
      fits = fits && (decodes ? g[j].threshold == 0.0f || fabsf(g[j].threshold) >= 0x1p-60f : g[j].threshold == g[j].threshold);
      threshold[j] = g[j].threshold;
    }
    Extremes e = Extremes::of8(threshold);
    e.reduce_warp();
    if (__all_sync(~0u, fits)) least = e.least, most = fmaxf(e.most, 0x1p-60f);
  }
  __device__ inline bool fit(const Bounds& b) const { return b.low <= least && most <= b.high && b.high - least <= b.usual; }
};

/// uniform_of() for the noise of a slot: one byte permutation puts it under the exponent of 128. An instruction has room for one constant,
/// which should be the permutation: so the exponent is one that the compiler does not know (a grid is less than 2^16 deep).
__device__ inline float uniform_at(const Words& noise, int slot) {
  const uint32_t exponent = 0x4300u + (gridDim.z >> 16);
  return __uint_as_float(__byte_perm(noise.w[slot / 2], exponent, slot % 2 == 0 ? 0x5410 : 0x5432)) - 127.99999237060547f;
}

/// side_level() of core/side.h as a code: first, first + step, … for every mark, moved towards the next by u, that lies below d.
template <int count>
__device__ inline uint32_t level_code(uint32_t first, uint32_t step, float d, float length, bool is_long, const float* usual,
                                      const float* longer, float u) {
  float mark = 0.0f;
  uint32_t code = first;
#pragma unroll
  for (int i = 1; i < count; ++i) {
    const float next = i + 1 == count ? length : (is_long ? longer[i] : usual[i]) * length;  // the last level is 1
    code = d > fmaf(u, next - mark, mark) ? first + step * i : code;                         // marks rise: the last one passed decides
    mark = next;
  }
  return code;
}

/// side_code_of() of core/side.h times `unit`, for v without subnormals in a block that is not poisoned; of a single off code: as if v were
/// on. `usual`: WarpChannels fit the block.
template <int bits, int off, bool usual>
__device__ inline uint32_t code_at(float v, bool on, const Gate& g, const Bounds& b, const SideTable& t, float u, uint32_t unit) {
  const Reach side = usual ? Reach{g.threshold, off == 1 || on ? b.high : b.low} : reach_of(g, b, off == 1 || on);
  const float d = fabsf(v - side.from), length = fabsf(side.far - side.from);
  const bool is_long = (!usual || off > 1) && length > b.usual;
  const uint32_t passing = level_code<(1 << bits) - off>(unit * off, unit, d, length, is_long, t.on_short, t.on_long, u);
  if constexpr (off == 1) return passing;
  const uint32_t blocked = level_code<off>(unit * (off - 1), ~unit + 1, d, length, is_long, t.off_short, t.off_long, u);
  return on ? passing : blocked;
}

/// poisoned_code_of() of core/side.h.
__device__ inline uint32_t poisoned_code(float gamma, float beta, float x, uint32_t off) {
  return fmaf(gamma, flush(x), beta) <= 0.0f ? 0u : off;
}

/// What the sums of a thread's channels' off values have come to; in fp32, so they overflow where values reach 1e34.
struct OffSums {
  float sum[8] = {}, count[8] = {};
};

/// An on value adds its code to `codes`, an off value itself to its channel's sum and count: one predicate for all three, where the
/// compiler would select first.
__device__ inline void put_or_sum(float gamma, float beta, float v, uint32_t code, uint32_t& codes, float& sum, float& count) {
  asm("{.reg .pred on; .reg .f32 r; fma.rn.f32 r, %3, %5, %4; setp.gt.f32 on, r, 0f00000000;"
      "@on or.b32 %0, %0, %6; @!on add.f32 %1, %1, %5; @!on add.f32 %2, %2, 0f3F800000;}"
      : "+r"(codes), "+f"(sum), "+f"(count)
      : "f"(gamma), "f"(beta), "f"(v), "r"(code));
}

/// Of the off values of a channel: their sum and count.
__device__ inline float mean_of(const double (&sums)[2]) { return sums[1] > 0 ? static_cast<float>(sums[0] / sums[1]) : 0.0f; }

/// The off plane's key for an encoder, from the seed; `writes`: this thread puts it into the bytes.
__device__ inline OffKey encoder_key(const SideCode& code, const uint64_t* seed, bool writes) {
  const OffKey key = off_key(__ldg(reinterpret_cast<const unsigned long long*>(seed)));
  if (writes) *reinterpret_cast<uint4*>(code.plane.bytes) = make_uint4(key.a, key.b, 0, 0);
  return key;
}

/// off_weight() of core/off_plane.h for fewer than 2^32 blocks.
__device__ inline uint32_t off_weight_of(OffKey key, uint32_t block, uint32_t blocks) {
  const uint32_t group = block / kOffGroup, rest = blocks - group * kOffGroup, count = rest < kOffGroup ? rest : kOffGroup;
  return __umulhi(key.a * group + key.b, count) == block % kOffGroup ? count : 0;
}

/// off_bit_of() of core/off_plane.h for one value of a block that is not poisoned.
__device__ inline bool off_bit(float x, const Gate& g, const Bounds& b, float u) {
  const float v = flush_signed(x);
  const Reach r = reach_of(g, b, false);
  return !(fmaf(g.gamma, v, g.beta) > 0.0f) && fabsf(v - r.from) > u * fabsf(r.far - r.from);
}

/// off_value_of(): `from` and `far` of the off side, its mean as off_value() has it.
__device__ inline float off_value_at(bool bit, float weight, float from, float far, float mean) {
  const float v = bit ? from + (far - from) : from;
  return is_finite(mean) ? flush(fmaf(weight, flush(v) - mean, mean)) : mean;
}

/// Calls f with bits and off codes of a table as integral constants.
template <class F>
void with_table(const SideTable& t, F&& f) {
  using std::integral_constant;
  if (t.bits == 2)
    return t.off == 1 ? f(integral_constant<int, 2>(), integral_constant<int, 1>())
                      : f(integral_constant<int, 2>(), integral_constant<int, 2>());
  if (t.bits == 4) return f(integral_constant<int, 4>(), integral_constant<int, 8>());
  if (t.off == 1) return f(integral_constant<int, 3>(), integral_constant<int, 1>());
  if (t.off == 2) return f(integral_constant<int, 3>(), integral_constant<int, 2>());
  f(integral_constant<int, 3>(), integral_constant<int, 4>());
}

inline int64_t common_divisor(int64_t a, int64_t b) {
  while (b != 0) std::swap(a %= b, b);
  return a;
}

/// Thread blocks come in multiples of this many, so that `values_each · blocks` is a multiple of the channels.
inline int64_t block_unit(const SideCode& code, bool has_channels, int64_t values_each) {
  const int64_t channels = has_channels ? code.channels : 1;
  return channels / common_divisor(values_each, channels);
}

/// Thread blocks for the fixed kernels, `most` at most; 0 where those are too few.
inline int64_t fixed_blocks(const SideCode& code, bool has_channels, int64_t values_each, int64_t most) {
  if (code.grid.block != 256 || !code.grid.is_straight() || code.grid.values / 256 >= (int64_t{1} << 31) ||
      (has_channels && code.inner != 1 && code.channels != 1))
    return 0;
  const int64_t unit = block_unit(code, has_channels, values_each);
  return most / unit * unit;
}

/// The same for kernels that sum nothing up: as many as the device holds at once.
inline int64_t free_blocks(const SideCode& code, bool has_channels, int64_t values_each, const BlockNeeds& needs) {
  const int64_t most = fixed_blocks(code, has_channels, values_each, kSumProcessors * needs.each);
  return most == 0 ? 0 : blocks_in_units(int64_t{1} << 31, block_unit(code, has_channels, values_each), resident(this_gpu(), needs));
}

}  // namespace satchel::cuda::side
