// The one-sided code of norm_act (theory.md 10) on the device: where its bytes stand, codes of 2 and of 3 bits, channels, decoding.
#pragma once

#include "satchel/kernels/cuda/epilogue.cuh"

namespace satchel::cuda::epilogue {

/// Throws unless blocks fill the samples, of which some have 3 bits in place of 2.
inline void check_extra_bit(const SideCode& code, const ExtraBitView& extra, const char* op) {
  if (code.table.bits != 2 || extra.table.bits != 3) fail(op, "extra bits stand beside codes of 2", code.table.bits);
  if (extra.sample < kBlock || extra.sample % kBlock != 0 || code.grid.values % extra.sample != 0) {
    fail(op, "a sample must be whole blocks of 256 values", extra.sample);
  }
}

inline void check_fit(const NormActCode& c, const char* op) {
  if (!norm_act_fits(c.side)) fail(op, "norm_act_fits must be true of the code");
  if (c.extra.slots != nullptr) check_extra_bit(c.side, c.extra, op);
  if (!is_aligned(c.bytes)) fail(op, "packed bytes must start at a multiple of 16");
}

/// What a kernel of one-sided codes serves. All but `any` ask for 2 bits and activations at multiples of 16; backward also for headers of
/// bf16 and the batch's statistics.
///   plain    ReLU without dropout    dropped  any activation, with dropout or without    relu  ReLU with dropout
///   any      everything              codes    encoding alone: x is x̂ already, and no z is written
/// Forward, plain, dropped and relu draw with short keys: at most kShortValues values.
enum class Serves { plain, dropped, any, codes, relu };

inline bool is_plain(const Chain& c) { return c.drop == 0 && c.slope == 0.0f && c.scale == 1.0f; }
inline bool is_relu(const Chain& c, int64_t values) { return c.drop > 0 && c.slope == 0.0f && values <= kShortValues; }

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

/// Codes of 2 bits, of 3, or of 2 with samples of 3 among them (ExtraBitView), as a kernel that serves all of them reads and writes them.
struct Wide {
  SideTable table;
  const int32_t* slots;  // null: all samples have the table's bits
  uint8_t* plane;
  uint32_t sample;  // blocks of 256

  __host__ __device__ inline Wide(const SideTable& own, const ExtraBitView& extra)
      : table(extra.slots == nullptr ? own : extra.table),
        slots(extra.slots),
        plane(extra.plane),
        sample(static_cast<uint32_t>(extra.sample / kBlock)) {}

  /// A stream of 3 bits a value, and no plane?
  __device__ inline bool streams() const { return slots == nullptr && table.bits == 3; }
  /// The place of a block's sample; −1: it has 2 bits.
  __device__ inline int32_t slot(uint32_t block) const { return slots == nullptr ? table.bits - 3 : __ldg(slots + block / sample); }
  /// Bit 2 of eight codes of that sample.
  __device__ inline uint8_t* at(int64_t group, uint32_t block, int32_t slot) const {
    return plane + (static_cast<int64_t>(slot) - block / sample) * sample * (kBlock / 8) + group;
  }

  /// `count` of the eight exist; the others as 0.
  __device__ inline Codes load(const uint8_t* codes, int64_t group, uint32_t block, int count) const {
    Codes c;
    const int32_t own = slot(block);
    c.three = own >= 0;
    if (streams()) {
      const int bytes = (count * 3 + 7) / 8;
      uint32_t eight = 0;
#pragma unroll
      for (int k = 0; k < 3; ++k) eight |= k < bytes ? static_cast<uint32_t>(__ldg(codes + group * 3 + k)) << (8 * k) : 0;
      c.split(eight);
    } else {
      c.two = load_eight(codes, group, count);
      if (c.three) c.extra = __ldg(at(group, block, own));
    }
    return c;
  }
  /// All eight exist.
  __device__ inline void store(uint8_t* codes, int64_t group, uint32_t block, const Codes& c) const {
    if (streams()) return store_codes<3>(codes, group, c.joined(), 8);
    store_codes<2>(codes, group, c.two, 8);
    if (c.three) *at(group, block, slot(block)) = static_cast<uint8_t>(c.extra);
  }
};

/// Four channels as decoding needs them: side_value_of() of core/side.h for one off code and three on.
struct Decoder {
  float threshold[4], off[4];
  uint32_t falling;   // a bit a channel: γ < 0
  uint32_t flat = 0;  // … γ = 0; read for 3 bits alone

  /// Value j of the four whose codes stand in `codes` from bit 0 on, of a block that is not poisoned; an off value as a code 1.
  /// `usual`: WarpChannels fit the block.
  template <bool usual>
  __device__ inline float on_value(int j, uint32_t codes, const side::Bounds& b, const SideTable& t) const {
    const float from = usual ? threshold[j] : fminf(fmaxf(threshold[j], b.low), b.high);
    const float length = (!usual && (falling >> j & 1) != 0 ? b.low : b.high) - from;
    const float middle = !usual && fabsf(length) > b.usual ? t.on_long[1] : t.on_short[1];
    const float level = (codes >> (2 * j) & 2) == 0 ? 0.0f : (codes >> (2 * j) & 1) == 0 ? middle : 1.0f;
    const float v = fmaf(level, length, from);
    return usual ? v : flush_once(v);
  }
  /// The same, an off value as its channel's mean.
  template <bool usual>
  __device__ inline float value(int j, uint32_t codes, const side::Bounds& b, const SideTable& t) const {
    const float v = on_value<usual>(j, codes, b, t);
    return (codes >> (2 * j) & 3) == 0 ? off[j] : v;
  }

  /// The same for two off codes and six on.
  __device__ inline float wide_value(int j, uint32_t code, const side::Bounds& b, const SideTable& t) const {
    const bool up = (flat >> j & 1) != 0 || (code >= 2) != ((falling >> j & 1) != 0);
    const float from = fminf(fmaxf(threshold[j], b.low), b.high), length = (up ? b.high : b.low) - from;
    const bool is_long = fabsf(length) > b.usual;
    float level = code == 1 || code == 2 ? 0.0f : 1.0f;
#pragma unroll
    for (int i = 1; i < 5; ++i) level = code == static_cast<uint32_t>(i + 2) ? (is_long ? t.on_long[i] : t.on_short[i]) : level;
    return flush(fmaf(level, length, from));
  }

  /// Off values among four of a drawn block, as the off plane has them: x̂ becomes m + weight·(v − m). `down`: a bit a channel whose off
  /// side ends at the block's high: γ < 0, or γ = 0, which gradients need not tell, as they are 0. `usual`: WarpChannels fit the block.
  template <bool usual>
  __device__ inline void sample_off(uint32_t codes, uint32_t bits, float weight, const side::Bounds& b, uint32_t down,
                                    float (&x)[4]) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float from = usual ? threshold[k] : fminf(fmaxf(threshold[k], b.low), b.high);
      const float far = !usual && (down >> k & 1) != 0 ? b.high : b.low;
      if constexpr (usual) {  // its mean is finite, and a threshold is not subnormal
        const float v = (bits >> k & 1) != 0 ? flush_once(from + (far - from)) : from;
        const float drawn = flush_once(fmaf(weight, v - off[k], off[k]));
        x[k] = (codes >> (2 * k) & 3) == 0 ? drawn : x[k];
        continue;
      }
      if ((codes >> (2 * k) & 3) == 0) x[k] = side::off_value_at((bits >> k & 1) != 0, weight, from, far, off[k]);
    }
  }
};

/// Is value j of eight codes of 2 bits on?
__device__ inline bool is_on(uint32_t eight, int j) { return (eight >> (2 * j) & 3) != 0; }

/// The channels of a thread block's values, from the packed table; the caller synchronises. `first` is its first value.
struct ChannelTables {
  Table<> threshold, gamma, beta, off;

  __device__ inline void fill(const Channel* channels, int64_t count, int64_t first) {
#pragma unroll 1
    for (int k = static_cast<int>(threadIdx.x); k < kBlock; k += static_cast<int>(blockDim.x)) {
      const Channel c = channels[channel_of(first + k, count)];
      threshold.put(k, c.gamma == 0.0f ? float_of(0xff800000u) : c.threshold + 0.0f);  // −0 as +0
      gamma.put(k, c.gamma);
      beta.put(k, c.beta);
      off.put(k, off_value(c));
    }
  }

  /// Of a warp, all of whose threads must call this.
  __device__ inline side::WarpChannels met(int lane) const {
    float limit[8], slope[8], mean[8];
    threshold.get(lane, limit);
    gamma.get(lane, slope);
    off.get(lane, mean);
    side::Gate g[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) g[j] = {limit[j], slope[j], 0.0f, mean[j]};
    return side::WarpChannels(g, true);
  }

  /// Bit j: γ of a lane's channel j is negative.
  __device__ inline uint32_t falling(int lane) const {
    return bits_of(lane, [](float g) { return g < 0.0f; });
  }
  /// … is zero.
  __device__ inline uint32_t flat(int lane) const {
    return bits_of(lane, [](float g) { return g == 0.0f; });
  }

  __device__ inline Decoder decoder(int lane, int half, uint32_t falling, uint32_t flat = 0) const {
    Decoder d;
    threshold.get_half(lane, half, d.threshold);
    off.get_half(lane, half, d.off);
    d.falling = falling >> (4 * half);
    d.flat = flat >> (4 * half);
    return d;
  }

 private:
  template <class F>
  __device__ inline uint32_t bits_of(int lane, F&& f) const {
    float own[8];
    gamma.get(lane, own);
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) bits |= (f(own[j]) ? 1u : 0u) << j;
    return bits;
  }
};

}  // namespace satchel::cuda::epilogue
