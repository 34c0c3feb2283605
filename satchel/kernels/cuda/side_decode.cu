// Decode of side codes: four or eight values a thread and step, the thread's channels in registers.
#include "satchel/kernels/cuda/one_sided.cuh"

namespace satchel::cuda {
namespace side {
namespace {

static_assert(kDecodeFours.threads == kThreads && kDecodeEights.threads == kThreads);

/// side_value_of() of core/side.h for a block that is not poisoned.
template <int bits, int off>
__device__ inline float value_at(uint32_t code, const Gate& g, const Bounds& b, const SideTable& t) {
  const bool on = code >= off;
  const Reach s = reach_of(g, b, off == 1 || on);
  const float signed_length = s.far - s.from;  // negative where the side lies below its threshold
  const bool is_long = fabsf(signed_length) > b.usual;
  const uint32_t level = on ? code - off : off - 1 - code;
  float position = level == 0 ? 0.0f : 1.0f;
#pragma unroll
  for (int i = 1; i + 1 < (1 << bits) - off; ++i) position = on && level == i ? (is_long ? t.on_long[i] : t.on_short[i]) : position;
  if constexpr (off > 2) {
#pragma unroll
    for (int i = 1; i + 1 < off; ++i) position = !on && level == i ? (is_long ? t.off_long[i] : t.off_short[i]) : position;
  }
  const float v = flush(fmaf(position, signed_length, s.from));
  return off == 1 && !on ? g.off_mean : v;
}

/// Eight values, the second four `next` past the first. Those of a 16-bit type stop at its largest number and have one NaN, as store() has
/// it. `small`: none needs that.
template <DType type, int next = 4>
__device__ inline void put8(void* x, int64_t i, const float (&v)[8], bool small) {
  if (type != DType::f32 && small) return write8<type, true>(x, i, v);
  store4<type>(x, i, {v[0], v[1], v[2], v[3]});
  store4<type>(x, i + next, {v[4], v[5], v[6], v[7]});
}
constexpr float kSmall = 0x1p15f;  // values up to here, and their codes' levels, are far from any type's end

/// Blocks of 256 values without an off plane, four neighbouring values a thread and step; the channels of a thread never change.
template <int bits, int off, DType type>
__global__ void __launch_bounds__(kThreads) decode_fixed(const __grid_constant__ Args a, void* x) {
  const int64_t quads = a.code.grid.values / 4, step = static_cast<int64_t>(gridDim.x) * kThreads;
  Gate g[4];
  load_gates<4>(a.code, a.channels, thread_index() * 4, g);
  for (int64_t quad = thread_index(); quad < quads; quad += step) {
    const Range r = load_range(a.headers, a.code.header, quad / 64);
    const Bounds b(r);
    const uint32_t four = load_four<bits>(a.codes, quad);
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      v[j] = value_at<bits, off>(four >> (bits * j) & ((1u << bits) - 1), g[j], b, a.code.table);
      if (is_poisoned(r)) v[j] = __uint_as_float(kCanonicalNaN);
    }
    store4<type>(x, quad * 4, v);
  }
}

/// Where a lane's eight values of a block stand, four and four, so that a warp writes whole lines: fp32 as 2 · 128 values, 16-bit types as
/// eight neighbours.
///
///   fp32   lane  0       1      …   31           0          1        …        bf16, f16   lane   0       1      …   31
///         value 0 … 3   4 … 7   …  124 … 127   128 … 131  132 … 135  …                   value 0 … 7   8 … 15  …  248 … 255
template <DType type>
struct Halves {
  static constexpr bool apart = type == DType::f32;
  static constexpr int kEach = apart ? 4 : 8, kNext = apart ? 128 : 4;  // from lane to lane, from the first four to the second

  __device__ static inline int value(int lane, int half) { return lane * kEach + half * kNext; }
  /// The codes of 2 bits of both as they are read, and together: the first four below.
  struct Codes {
    uint32_t first, second;

    __device__ inline void read(const uint8_t* block, int lane) {
      if constexpr (apart) {
        block += lane;
        first = __ldg(block), second = __ldg(block + 32);
      } else {
        first = __ldg(reinterpret_cast<const uint16_t*>(block) + lane);
      }
    }
    __device__ inline uint32_t eight() const { return apart ? first | second << 8 : first; }
  };
  /// The off plane's bits of one.
  __device__ static inline uint32_t off_bits(const uint8_t* slot, int lane, int half) {
    const int first = value(lane, half);
    return static_cast<uint32_t>(__ldg(slot + first / 8)) >> (first % 8);
  }
};

/// Decoder::value<true>() of one_sided.cuh in six instructions, from the code's two bits, each in any place: the upper one holds the sum
/// back, where the compiler would select.
__device__ inline float usual_value(uint32_t lower, uint32_t upper, float off, float threshold, float high, float middle) {
  float v = lower != 0 ? threshold : off;
  const float level = lower != 0 ? 1.0f : middle;
  asm("{.reg .pred on; setp.ne.u32 on, %1, 0; @on fma.rn.f32 %0, %2, %3, %4;}"
      : "+f"(v)
      : "r"(upper), "f"(level), "f"(high - threshold), "f"(threshold));
  return v;
}

/// Whole blocks of 256 values of one-sided codes of 2 bits, one a warp and step: decode_fixed() in fewer instructions, where the channels
/// fit.
template <DType type>
__global__ void __launch_bounds__(kThreads, 4) decode_one_sided(const __grid_constant__ Args a, void* x) {
  using Own = Halves<type>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t blocks = static_cast<uint32_t>(a.code.grid.values / 256), step = gridDim.x * (kThreads / 32);
  uint32_t block = (blockIdx.x * kThreads + threadIdx.x) / 32;
  epilogue::Decoder half[2] = {};
  Gate g[8];
#pragma unroll
  for (int k = 0; k < 2; ++k) load_gates<4>(a.code, a.channels, static_cast<int64_t>(block) * 256 + Own::value(lane, k), g + 4 * k);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    epilogue::Decoder& own = half[j / 4];
    own.threshold[j % 4] = g[j].threshold + 0.0f, own.off[j % 4] = g[j].off_mean;  // −0 as +0
    own.falling |= (g[j].gamma < 0.0f ? 1u : 0u) << (j % 4);
    own.flat |= (g[j].gamma == 0.0f ? 1u : 0u) << (j % 4);
  }
  const WarpChannels met(g, true);
  const bool planes = a.code.plane.bytes != nullptr, is_bf16 = a.code.header == HeaderType::bf16;
  const OffKey key = planes ? stored_key(a.code) : OffKey{};
  const uint32_t first = static_cast<uint32_t>(a.code.plane.first_block);
  const float middle = a.code.table.on_short[1];
  // The next block's header and codes, on their way while this one is decoded.
  uint2 header = {};
  typename Own::Codes codes = {};
  const auto read = [&](uint32_t from) {
    if (is_bf16)
      header.x = __ldg(static_cast<const uint32_t*>(a.headers) + from);
    else
      header = __ldg(static_cast<const uint2*>(a.headers) + from);
    codes.read(a.codes + static_cast<uint64_t>(from) * 64, lane);
  };
  if (block < blocks) read(block);
  for (uint32_t next; block < blocks; block = next) {
    const float low = __uint_as_float(is_bf16 ? header.x << 16 : header.x);
    const float stored = __uint_as_float(is_bf16 ? header.x & 0xffff0000u : header.y);
    const Range r = {low, is_finite(stored) ? stored : __uint_as_float(kCanonicalNaN)};  // as load_range() has it
    const uint32_t eight = codes.eight();
    next = block + step;
    if (next < blocks) read(next);
    const uint32_t weight = planes && !is_poisoned(r) ? off_weight_of(key, first + block, static_cast<uint32_t>(a.code.plane.blocks)) : 0;
    const Bounds b(r);
    float v[8];
    const bool usual = weight == 0 && met.fit(b) && b.low >= -kSmall && b.high <= kSmall;
    if (usual) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const epilogue::Decoder& own = half[j / 4];
        v[j] = usual_value(eight & 1u << (2 * j), eight & 2u << (2 * j), own.off[j % 4], own.threshold[j % 4], b.high, middle);
      }
    } else {
      const uint8_t* slot = a.code.plane.bytes + kOffKeyBytes + static_cast<int64_t>((first + block) / kOffGroup) * 32;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float four[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          four[j] = is_poisoned(r) ? __uint_as_float(kCanonicalNaN) : half[k].value<false>(j, eight >> (k * 8), b, a.code.table);
        }
        if (weight > 0) {
          half[k].sample_off<false>(eight >> (k * 8), Own::off_bits(slot, lane, k), static_cast<float>(weight), b,
                                    half[k].falling | half[k].flat, four);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) v[k * 4 + j] = four[j];
      }
    }
    put8<type, Own::kNext>(x, static_cast<int64_t>(block) * 256 + Own::value(lane, 0), v, usual);
  }
}

/// What the codes of a block of a ReLU's output stand for: its values have one threshold, 0.
template <int bits>
struct ReluValues {
  float value[1 << bits];

  __device__ inline ReluValues(Range r, const SideTable& t) {
    const Bounds b(r);
    const Gate relu = {0.0f, 1.0f, 0.0f, 0.0f};
#pragma unroll
    for (int code = 0; code < 1 << bits; ++code) {
      value[code] = is_poisoned(r) ? __uint_as_float(kCanonicalNaN) : value_at<bits, 1>(static_cast<uint32_t>(code), relu, b, t);
    }
  }
  __device__ inline float at(uint32_t code) const { return choose<0, 1 << (bits - 1)>(code); }

 private:
  /// The value of [from, from + 2·half) that the bits of `code` below `half`'s and its own point to.
  template <int from, int half>
  __device__ inline float choose(uint32_t code) const {
    if constexpr (half == 0) {
      return value[from];
    } else {
      return (code & half) == 0 ? choose<from, half / 2>(code) : choose<from + half, half / 2>(code);
    }
  }
};

/// Values [first, last) of a ReLU's output in blocks of 256 with samples of 3 bits among those of 2, eight a thread and step.
template <DType type>
__global__ void __launch_bounds__(kThreads)
    decode_relu(const __grid_constant__ Args a, const __grid_constant__ epilogue::Wide w, int64_t first, int64_t last, void* x) {
  const int64_t end = last / 8, step = static_cast<int64_t>(gridDim.x) * kThreads;
#pragma unroll 1
  for (int64_t group = first / 8 + thread_index(); group < end; group += step) {
    const uint32_t block = static_cast<uint32_t>(group / 32);
    const Range r = load_range(a.headers, a.code.header, block);
    const epilogue::Codes c = w.load(a.codes, group, block, 8);
    float v[8];
    if (c.three) {
      const ReluValues<3> values(r, w.table);
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = values.at(c.at(j));
    } else {
      const ReluValues<2> values(r, a.code.table);
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = values.at(c.two >> (2 * j));
    }
    put8<type>(x, group * 8 - first, v, r.high <= kSmall);
  }
}

/// A ReLU's output in 2 bits as a 16-bit type, a block a warp and step: a lane works out one of the 16 pairs of values that a block has,
/// lanes from 16 on those again, and every two codes name a lane; a shuffle looks at the lower five bits of a number alone.
template <DType type>
__global__ void __launch_bounds__(kThreads) decode_relu_pairs(const __grid_constant__ Args a, uint4* x) {
  const uint32_t groups = static_cast<uint32_t>(a.code.grid.values / 8), lane = threadIdx.x % 32, step = gridDim.x * (kThreads / 32);
  const uint16_t* codes = reinterpret_cast<const uint16_t*>(a.codes);
  for (uint32_t block = (blockIdx.x * kThreads + threadIdx.x) / 32; block * 32 < groups; block += step) {
    const uint32_t group = block * 32 + lane;
    const bool own = group < groups;
    const uint32_t eight = own ? __ldg(codes + group) : 0;
    const Range r = load_range(a.headers, a.code.header, block);
    const Bounds b(r);
    const auto value = [&](uint32_t code) {
      const float v = value_at<2, 1>(code, {0.0f, 1.0f, 0.0f, 0.0f}, b, a.code.table);
      return is_poisoned(r) ? __uint_as_float(kCanonicalNaN) : v;
    };
    const float low = value(lane & 3), high = value(lane >> 2 & 3);
    uint32_t pair;
    if (r.high <= kSmall)
      pair = half_pair<type>(low, high);
    else  // stops at the type's largest number, as store() has it
      pair = type == DType::f16 ? to_f16(low) | static_cast<uint32_t>(to_f16(high)) << 16
                                : to_bf16(low) | static_cast<uint32_t>(to_bf16(high)) << 16;
    const auto two = [&](int k) { return __shfl_sync(~0u, pair, static_cast<int>(eight >> (4 * k))); };
    const uint4 w = make_uint4(two(0), two(1), two(2), two(3));
    if (own) x[group] = w;
  }
}

/// … of float32: a lane works out one of a block's four values, and every code names a lane.
__global__ void __launch_bounds__(kThreads) decode_relu_floats(const __grid_constant__ Args a, float4* x) {
  const uint32_t fours = static_cast<uint32_t>(a.code.grid.values / 8) * 2, lane = threadIdx.x % 32, step = gridDim.x * (kThreads / 32);
  const uint32_t blocks =
      static_cast<uint32_t>(ceil_div(a.code.grid.values / 8, 32));  // block · 64 does not fit 32 bits behind the last one
  for (uint32_t block = (blockIdx.x * kThreads + threadIdx.x) / 32; block < blocks; block += step) {
    const uint32_t left = fours - block * 64;
    const uint8_t* codes = a.codes + static_cast<uint64_t>(block) * 64 + lane;
    const uint32_t four[2] = {lane < left ? __ldg(codes) : uint32_t{0}, lane + 32 < left ? __ldg(codes + 32) : uint32_t{0}};
    const Range r = load_range(a.headers, a.code.header, block);
    const float known = value_at<2, 1>(lane & 3, {0.0f, 1.0f, 0.0f, 0.0f}, Bounds(r), a.code.table);
    const float own = is_poisoned(r) ? __uint_as_float(kCanonicalNaN) : known;
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const auto at = [&](int j) { return __shfl_sync(~0u, own, static_cast<int>(four[half] >> (2 * j))); };
      const float4 v = make_float4(at(0), at(1), at(2), at(3));
      if (lane + 32 * half < left) x[static_cast<uint64_t>(block) * 64 + lane + 32 * half] = v;
    }
  }
}

/// Any values, by the definition.
template <DType type>
__global__ void __launch_bounds__(kThreads) decode_any(const __grid_constant__ Args a, void* x, int64_t first) {
  const int64_t i = first + thread_index();
  if (i >= a.code.grid.values) return;
  const Channel c = a.channels == nullptr ? relu_channel() : a.channels[i / a.code.inner % a.code.channels];
  const int64_t block = a.code.grid.block_of(i);
  const Range r = load_range(a.headers, a.code.header, block);
  const uint32_t code = get_code(a.codes, a.code.table.bits, i);
  if (code == 0 && a.code.plane.bytes != nullptr && !is_poisoned(r)) {
    const uint32_t weight = off_weight(a.code, stored_key(a.code), block);
    const bool bit = weight > 0 && (a.code.plane.bytes[off_byte(a.code, block, i)] >> (i % 8) & 1) != 0;
    if (weight > 0) return store(x, type, i, off_value_of(bit, weight, c, r));
  }
  store(x, type, i, side_value_of(code, c, r, a.code.table));
}

}  // namespace
}  // namespace side

void side_decode_extra(const SideCode& code, const ExtraBitView& extra, const uint8_t* codes, const void* headers, int64_t first,
                       int64_t last, void* x, DType type, StreamHandle stream) {
  constexpr const char* op = "side_decode";
  epilogue::check_extra_bit(code, extra, op);
  if (code.table.side != Side::relu || code.grid.block != epilogue::kBlock || !code.grid.is_straight()) {
    fail(op, "extra bits are decoded of ReLU codes in blocks of 256", code.grid.block);
  }
  if (first % 8 != 0 || last % 8 != 0 || first < 0 || last > code.grid.values) fail(op, "values must exist, multiples of 8", last);
  if (!is_aligned(x)) fail(op, "values must start at a multiple of 16");
  if (first >= last) return;
  const side::Args a = {code, nullptr, nullptr, nullptr, const_cast<uint8_t*>(codes), const_cast<void*>(headers), nullptr};
  const LaunchSize size = {blocks_for((last - first) / 8)};
  with_type(type, [&](auto t) { launch_kernel(op, stream, size, side::decode_relu<t()>, a, {code.table, extra}, first, last, x); });
}

void side_decode(const SideCode& code, const uint8_t* codes, const Channel* channels, const void* headers, void* x, DType type,
                 StreamHandle stream) {
  if (code.grid.values == 0) return;
  const side::Args a = {code,   nullptr, const_cast<Channel*>(channels), nullptr, const_cast<uint8_t*>(codes), const_cast<void*>(headers),
                        nullptr};
  const auto launch = [&](int64_t blocks, auto kernel, const auto&... args) {
    launch_kernel("side_decode", stream, {grid_size(blocks)}, kernel, a, args...);
  };
  const bool aligned = is_aligned(x) && is_aligned(codes, code_alignment(code.table.bits));
  const int64_t fours = aligned ? side::free_blocks(code, channels != nullptr, 4 * kThreads, kDecodeFours) : 0;
  const bool eights =
      fours > 0 && is_aligned(codes, 2) && code.table.bits == 2 && code.table.off == 1 && code.grid.values / 8 < int64_t{1} << 31;
  const bool one_sided = eights && channels != nullptr, drawn = code.plane.bytes != nullptr, relu = eights && !one_sided && !drawn;
  const int64_t values = code.grid.values, each = one_sided ? 256 : relu ? 8 : 4;
  const int64_t done = one_sided || (fours > 0 && !drawn) ? values / each * each : 0;
  with_type(type, [&](auto t) {
    if (one_sided) {
      launch(blocks_in_units(int64_t{1} << 31, side::block_unit(code, true, 8 * kThreads), resident(this_gpu(), kDecodeEights)),
             side::decode_one_sided<t()>, x);
    } else if (relu) {
      if constexpr (t() == DType::f32)
        launch(fours, side::decode_relu_floats, static_cast<float4*>(x));
      else
        launch(fours, side::decode_relu_pairs<t()>, static_cast<uint4*>(x));
    } else if (done > 0) {
      side::with_table(code.table, [&](auto bits, auto off) { launch(fours, side::decode_fixed<bits(), off(), t()>, x); });
    }
    if (done < values) launch(ceil_div(values - done, kThreads), side::decode_any<t()>, x, done);
  });
}

}  // namespace satchel::cuda
