// What the fused passes of norm → activation → dropout share (theory.md 10): one-sided codes of 2 or 3 bits, rows × channels of fp32, bf16
// or f16.
//
//   block of 256 values = one warp and step    lane   0        1              31
//                                              value 0 … 7   8 … 15   …   248 … 255
//
// A thread block takes blocks b, b + grid, b + 2·grid, … and 256·grid is a multiple of the channels: whatever the warp and the step,
// lane l always meets the same eight channels. Their numbers stand in a table in shared memory or in registers.
//
// `wide` kernels serve 3 bits, and samples of 3 bits among those of 2 (ExtraBitView): a warp's block has one or the other.
#pragma once

#include "satchel/kernels/cuda/side.cuh"
#include "satchel/kernels/cuda/values.cuh"

namespace satchel::cuda::norm_act {

constexpr int64_t kBlock = 256;           // values
constexpr int kWarps = 8;                 // of the kernels that read codes
constexpr int64_t kWalkBlocks = 132 * 4;  // all resident at once on an H200 at half occupancy
constexpr int kCodeThreads = 128;         // of the encoder, with kCodeBlocks: the partition that side_encode.cu sums off means by
constexpr int64_t kCodeBlocks = 132 * 6;

/// Thread blocks of kWarps warps for `blocks` blocks of values, so that lanes keep their channels.
inline int64_t walk_blocks(int64_t channels, int64_t blocks) {
  const int64_t unit = channels / side::common_divisor(kBlock, channels), most = kWalkBlocks / unit * unit;
  const int64_t wanted = ceil_div(ceil_div(blocks, kWarps), unit) * unit;
  return wanted < most ? wanted : most;
}

/// Throws unless blocks fill the samples, of which some have 3 bits in place of 2.
inline void check_extra_bit(const SideCode& code, const ExtraBitView& extra, const char* op) {
  if (code.table.bits != 2 || extra.table.bits != 3) fail(op, "extra bits stand beside codes of 2", code.table.bits);
  if (extra.sample < kBlock || extra.sample % kBlock != 0 || code.grid.values % extra.sample != 0) {
    fail(op, "a sample must be whole blocks of 256 values", extra.sample);
  }
}

/// Parts of the packed bytes.
struct Parts {
  uint8_t* codes;
  void* headers;
  Channel* channels;
};

inline Parts parts_of(const SideCode& code, const uint8_t* bytes) {
  const Layout at = layout_of(code.grid, code.table.bits, code.header, 0, code.channels);
  uint8_t* start = const_cast<uint8_t*>(bytes);
  return {start + at.codes, start + at.headers, reinterpret_cast<Channel*>(start + at.channels)};
}

inline void check_fit(const SideCode& code, const void* bytes, const char* op, const ExtraBitView& extra = {}) {
  if (!norm_act_fits(code)) fail(op, "norm_act_fits must be true of the code");
  if (extra.slots != nullptr) check_extra_bit(code, extra, op);
  if (!is_aligned(bytes)) fail(op, "packed bytes must start at a multiple of 16");
}

__device__ inline int64_t channel_of(int64_t value, int64_t channels) { return value - quotient(value, channels) * channels; }

/// Numbers of the 256 values of a step, one a channel: written by value, read by lane without bank conflicts.
struct Table {
  alignas(16) float at[kBlock];

  __device__ inline void put(int value, float x) { at[value % 8 / 4 * 128 + value / 8 * 4 + value % 4] = x; }
  __device__ inline void get(int lane, float (&x)[8]) const {
    const float4 a = *reinterpret_cast<const float4*>(at + lane * 4), b = *reinterpret_cast<const float4*>(at + 128 + lane * 4);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
  }
  /// Four of them (half 0 or 1), every time anew: the compiler keeps nothing in registers.
  __device__ inline void get_half(int lane, int half, float (&x)[4]) const {
    const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(at)) + static_cast<unsigned>(half * 512 + lane * 16);
    asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(from)
                 : "memory");
  }
};

/// Codes of 8 values; those that do not exist as 0.
__device__ inline uint32_t load_eight(const uint8_t* codes, int64_t group, int64_t values) {
  const int64_t rest = values - group * 8;
  if (rest >= 8) return __ldg(reinterpret_cast<const uint16_t*>(codes) + group);
  uint32_t eight = 0;
  for (int k = 0; k * 4 < rest; ++k) eight |= static_cast<uint32_t>(__ldg(codes + group * 2 + k)) << (8 * k);
  return eight;
}

/// Codes of eight values: bits 0 and 1 of each, two a value, and bit 2 of each.
struct Codes {
  uint32_t two = 0, extra = 0;
  bool three = false;  // they have 3 bits

  /// The same as a stream of 3 bits a value, and out of one.
  __device__ inline uint32_t joined() const {
    uint32_t eight = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) eight |= at(j) << (3 * j);
    return eight;
  }
  __device__ inline void split(uint32_t eight) {
#pragma unroll
    for (int j = 0; j < 8; ++j) put(j, eight >> (3 * j) & 7);
  }
  __device__ inline uint32_t at(int j) const { return (two >> (2 * j) & 3) | (extra >> j & 1) << 2; }
  __device__ inline void put(int j, uint32_t code) { two |= (code & 3) << (2 * j), extra |= code >> 2 << j; }
  __device__ inline bool is_on(int j) const { return three ? at(j) >= 2 : (two >> (2 * j) & 3) != 0; }
};

/// Where codes of 3 bits stand.
struct Wide {
  SideTable table;
  const int32_t* slots;  // null: a stream of 3 bits, no plane
  uint8_t* plane;
  uint32_t sample;  // blocks of 256

  __host__ __device__ inline Wide(const SideTable& own, const ExtraBitView& extra)
      : table(extra.slots == nullptr ? own : extra.table),
        slots(extra.slots),
        plane(extra.plane),
        sample(static_cast<uint32_t>(extra.sample / kBlock)) {}

  /// The place of a block's sample; −1: it has 2 bits.
  __device__ inline int32_t slot(uint32_t block) const { return slots == nullptr ? 0 : __ldg(slots + block / sample); }
  /// Bit 2 of eight codes of that sample.
  __device__ inline uint8_t* at(int64_t group, uint32_t block, int32_t slot) const {
    return plane + (static_cast<int64_t>(slot) - block / sample) * sample * (kBlock / 8) + group;
  }

  __device__ inline Codes load(const uint8_t* codes, int64_t group, uint32_t block, int64_t values) const {
    Codes c;
    const int32_t own = slot(block);
    c.three = own >= 0;
    if (slots == nullptr) {
      const int64_t rest = values - group * 8;
      const int bytes = rest >= 8 ? 3 : static_cast<int>(ceil_div(rest * 3, 8));
      uint32_t eight = 0;
#pragma unroll
      for (int k = 0; k < 3; ++k) eight |= k < bytes ? static_cast<uint32_t>(__ldg(codes + group * 3 + k)) << (8 * k) : 0;
      c.split(eight);
    } else {
      c.two = load_eight(codes, group, values);
      if (c.three) c.extra = __ldg(at(group, block, own));
    }
    return c;
  }
  /// All eight exist.
  __device__ inline void store(uint8_t* codes, int64_t group, uint32_t block, const Codes& c) const {
    if (slots == nullptr) return store_codes<3>(codes, group, c.joined(), 8);
    store_codes<2>(codes, group, c.two, 8);
    if (c.three) *at(group, block, slot(block)) = static_cast<uint8_t>(c.extra);
  }
};

/// Eight codes, of 2 bits in kernels that are not wide.
template <bool wide>
__device__ inline Codes load_codes(const Wide& w, const uint8_t* codes, int64_t group, uint32_t block, int64_t values) {
  if constexpr (wide) return w.load(codes, group, block, values);
  return {load_eight(codes, group, values), 0, false};
}

/// chain_factor() of kernels/chain.h, eight at a time. Every thread of the warp must construct it.
struct Dropout {
  uint32_t k0, k1;  // the seed, in the warp's uniform registers as UniformSeed has it
  uint32_t least;   // noise in the upper half of a word, at `least` or above: kept
  float on, off;

  __device__ inline Dropout(const Chain& c, const uint64_t* seed) : least(c.drop << 16), on(c.scale), off(c.slope * c.scale) {
    const uint64_t s = c.drop == 0 ? 0 : __ldg(reinterpret_cast<const unsigned long long*>(seed));
    k0 = __reduce_or_sync(~0u, static_cast<uint32_t>(s));
    k1 = __reduce_or_sync(~0u, static_cast<uint32_t>(s >> 32));
  }

  /// noise_group() of core/noise.h; anything where nothing is dropped.
  __device__ inline Words draw(int64_t group) const {
    Words c = {static_cast<uint32_t>(group), static_cast<uint32_t>(static_cast<uint64_t>(group) >> 32),
               static_cast<uint32_t>(Stream::dropout), 0};
    if (least == 0) return c;
    uint32_t a = k0, b = k1;
#pragma unroll
    for (int round = 0; round < kNoiseRounds; ++round, a += kPhiloxW0, b += kPhiloxW1) {
      uint32_t high0, low0, high1, low1;
      multiply_wide(c.w[0], kPhiloxM0, high0, low0);
      multiply_wide(c.w[2], kPhiloxM1, high1, low1);
      c = {high1 ^ c.w[1] ^ a, low1, high0 ^ c.w[3] ^ b, low0};
    }
    return c;
  }

  __device__ inline float factor(const Words& noise, int slot, bool is_on) const {
    const uint32_t word = slot % 2 == 0 ? noise.w[slot / 2] << 16 : noise.w[slot / 2];
    return word >= least ? (is_on ? on : off) : 0.0f;
  }
};

/// Four channels as decoding needs them: side_value_of() of core/side.h for one off code and three on.
struct Decoder {
  float threshold[4], off[4];
  uint32_t falling;   // a bit a channel: γ < 0
  uint32_t flat = 0;  // … γ = 0; read by wide kernels alone

  /// Value j of the four whose codes stand in `codes` from bit 0 on; `poisoned` where the block's range is.
  __device__ inline float value(int j, uint32_t codes, const side::Bounds& b, bool poisoned, const SideTable& t) const {
    const uint32_t code = codes >> (2 * j) & 3;
    const float from = fminf(fmaxf(threshold[j], b.low), b.high), length = ((falling >> j & 1) != 0 ? b.low : b.high) - from;
    const float middle = fabsf(length) > b.usual ? t.on_long[1] : t.on_short[1];
    const float v = flush(fmaf(code == 1 ? 0.0f : code == 2 ? middle : 1.0f, length, from));
    return poisoned ? __uint_as_float(kCanonicalNaN) : code == 0 ? off[j] : v;
  }

  /// The same for two off codes and six on.
  __device__ inline float wide_value(int j, uint32_t code, const side::Bounds& b, bool poisoned, const SideTable& t) const {
    const bool up = (flat >> j & 1) != 0 || (code >= 2) != ((falling >> j & 1) != 0);
    const float from = fminf(fmaxf(threshold[j], b.low), b.high), length = (up ? b.high : b.low) - from;
    const bool is_long = fabsf(length) > b.usual;
    float level = code == 1 || code == 2 ? 0.0f : 1.0f;
#pragma unroll
    for (int i = 1; i < 5; ++i) level = code == static_cast<uint32_t>(i + 2) ? (is_long ? t.on_long[i] : t.on_short[i]) : level;
    const float v = flush(fmaf(level, length, from));
    return poisoned ? __uint_as_float(kCanonicalNaN) : v;
  }

  /// Off values among four of a drawn block, as the off plane has them: x̂ becomes m + weight·(v − m). Of channels with γ = 0, whose
  /// gradient is 0, not.
  __device__ inline void sample_off(uint32_t codes, uint32_t bits, float weight, const side::Bounds& b, float (&x)[4]) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float from = fminf(fmaxf(threshold[k], b.low), b.high), far = (falling >> k & 1) != 0 ? b.high : b.low;
      if ((codes >> (2 * k) & 3) == 0) x[k] = side::off_value_at((bits >> k & 1) != 0, weight, from, far, off[k]);
    }
  }

  /// Values 4·half … 4·half + 3 of eight codes.
  template <bool wide>
  __device__ inline void decode(const Codes& c, int half, const side::Bounds& b, bool poisoned, const SideTable& t, const Wide& w,
                                float (&x)[4]) const {
    if (wide && c.three) {
#pragma unroll
      for (int k = 0; k < 4; ++k) x[k] = wide_value(k, c.at(4 * half + k), b, poisoned, w.table);
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) x[k] = value(k, c.two >> (8 * half), b, poisoned, t);
    }
  }
};

/// Is value j of eight codes on?
__device__ inline bool is_on(uint32_t eight, int j) { return (eight >> (2 * j) & 3) != 0; }

/// The channels of a thread block's values, from the packed table; the caller synchronises. `first` is its first value.
struct ChannelTables {
  Table threshold, gamma, beta, off;

  __device__ inline void fill(const Channel* channels, int64_t count, int64_t first) {
#pragma unroll 1
    for (int k = static_cast<int>(threadIdx.x); k < kBlock; k += static_cast<int>(blockDim.x)) {
      const Channel c = channels[channel_of(first + k, count)];
      threshold.put(k, c.gamma == 0.0f ? float_of(0xff800000u) : c.threshold);
      gamma.put(k, c.gamma);
      beta.put(k, c.beta);
      off.put(k, off_value(c));
    }
  }

  /// Bit j: γ of a lane's channel j is negative.
  __device__ inline uint32_t falling(int lane) const {
    float own[8];
    gamma.get(lane, own);
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) bits |= (own[j] < 0.0f ? 1u : 0u) << j;
    return bits;
  }
  /// … is zero.
  __device__ inline uint32_t flat(int lane) const {
    float own[8];
    gamma.get(lane, own);
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) bits |= (own[j] == 0.0f ? 1u : 0u) << j;
    return bits;
  }

  __device__ inline Decoder decoder(int lane, int half, uint32_t falling, uint32_t flat = 0) const {
    Decoder d;
    threshold.get_half(lane, half, d.threshold);
    off.get_half(lane, half, d.off);
    d.falling = falling >> (4 * half);
    d.flat = flat >> (4 * half);
    return d;
  }
};

}  // namespace satchel::cuda::norm_act
