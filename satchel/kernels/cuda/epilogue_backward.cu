// Backward of norms from packed codes: sums a channel, then the gradients in one pass, and norm_act's next input again. Every pass reads
// the codes (a sixteenth to an eighth of the gradient's bytes in fp32 at 2 bits) instead of keeping what it decodes.
//
// The kernels are written once, over what backward reads. A code is a struct that a kernel takes as its argument, with
//
//   Tables   what a thread block has of its channels in shared memory
//   Own      what a thread keeps all the way: made before the barrier behind fill(), completed after it by begin()
//   Piece    what stands beside eight values of a lane: load(), later open(), then factor(j) = ∂z/∂y of value j and decode(half) = x̂ of
//            four of them
//   kTurns   steps whose loads are in flight together
//   kSumsResident   thread blocks of the sums on one processor
//   kBroken  values may end inside a step    kBatch  statistics are always the batch's    kAligned  g starts at a multiple of 16
//   kSkip    a skip's gradient, kSquares  and Σ of x's squared gradients a block may be asked for
//   kUsual   pieces that say `usual` are decoded in fewer instructions    kGates  of those, what does not pass is its channel's mean
//
// A warp's steps are whole; the last, broken one is the business of one warp, behind its whole ones.
#include "satchel/kernels/cuda/finish.cuh"
#include "satchel/kernels/cuda/one_sided.cuh"

namespace satchel::cuda {
namespace epilogue {
namespace {

/// How a piece is decoded: by the definition; in fewer instructions; so too, with off values as the off plane has drawn them.
enum class Way { general, usual, drawn };
template <Way way>
using WayOf = std::integral_constant<Way, way>;

/// What a thread has of its code; all threads construct it.
template <class Code>
struct Reader {
  const Code& a;
  const typename Code::Tables& table;
  int lane;
  typename Code::Own own;

  /// `first` is the thread block's first value.
  __device__ inline Reader(const Code& code, typename Code::Tables& tables, int own_lane, int64_t first)
      : a(code), table(tables), lane(own_lane), own(code) {
    code.fill(tables, first);
    __syncthreads();
    own.begin(code, table, lane);
  }
};

/// What most codes say of themselves.
struct Defaults {
  static constexpr int kTurns = 2, kSumsResident = kFewWalk.each;
  static constexpr bool kBroken = true, kBatch = true, kAligned = true, kSkip = false, kSquares = false, kUsual = false, kGates = false;

  struct Own {
    template <class Code>
    __device__ inline explicit Own(const Code&) {}
    template <class Code, class Tables>
    __device__ inline void begin(const Code&, const Tables&, int) {}
  };
  __device__ inline bool aligned() const { return true; }
  __device__ inline float gamma(const NormBack& o, int64_t channel) const { return o.gamma[channel]; }
};

/// norm_act: x̂ in a one-sided code. `samples`: off values as the off plane has them, where there is one, else their channel's mean.
template <Serves serves, bool samples>
struct OneSided : Defaults {
  static constexpr bool any = serves == Serves::any;
  static constexpr int kTurns = any ? 1 : 2, kSumsResident = kManyWalk.each;
  static constexpr bool relu = serves == Serves::relu;
  static constexpr bool kBatch = !any, kAligned = !any, kUsual = true, kGates = relu || serves == Serves::plain;
  struct RelusTables : ChannelTables {
    ShortKeys keys;  // of dropout
  };
  using Tables = std::conditional_t<relu, RelusTables, ChannelTables>;

  NormActCode c;
  Parts from;
  Wide wide;
  bool is_aligned;

  OneSided(const NormActCode& code, bool starts_aligned)
      : c(code), from(parts_of(c.side, c.bytes)), wide(c.side.table, c.extra), is_aligned(starts_aligned) {}
  __host__ __device__ inline int64_t values() const { return c.side.grid.values; }
  __host__ __device__ inline int64_t channels() const { return c.side.channels; }
  __device__ inline bool aligned() const { return kAligned || is_aligned; }
  __device__ inline float gamma(const NormBack&, int64_t channel) const { return from.channels[channel].gamma; }

  struct Own {
    Dropout dropout;
    uint32_t falling, flat = 0;
    side::WarpChannels warp = {};
    bool planes = false;
    OffKey key = {};

    __device__ inline explicit Own(const OneSided& a) : dropout(a.c.chain, a.c.seed, !relu) {}
    __device__ inline void begin(const OneSided& a, const Tables& table, int lane) {
      falling = table.falling(lane);
      if (any) flat = table.flat(lane);
      warp = table.met(lane);
      if (samples) planes = a.c.side.plane.bytes != nullptr;
      if (planes) key = stored_key(a.c.side);
    }
  };
  __device__ inline void fill(Tables& table, int64_t first) const {
    table.fill(from.channels, channels(), first);
    if constexpr (relu) table.keys.fill(c.seed, Stream::dropout);
  }
  using Reader = epilogue::Reader<OneSided>;

  struct Piece {
    Codes codes;
    uint32_t block, header;  // header: of bf16, as it stands
    Range range;
    Words kept;
    uint32_t weight, off_bits;  // of a block whose off values are drawn; weight 0: it is not
    bool usual;

    __device__ inline void load(const Reader& r, uint32_t own_block, int64_t group, int count) {
      block = own_block;
      if constexpr (any) {
        codes = r.a.wide.load(r.a.from.codes, group, block, count);
      } else {
        codes = {load_eight(r.a.from.codes, group, count), 0, false};
        header = __ldg(static_cast<const uint32_t*>(r.a.from.headers) + block);
      }
    }
    __device__ inline void open(const Reader& r, int64_t group) {
      const SideCode& code = r.a.c.side;
      range = any ? load_range(r.a.from.headers, code.header, block) : load_range(&header, HeaderType::bf16, 0);
      if constexpr (relu)
        kept = r.table.keys.draw(static_cast<uint32_t>(group));
      else if constexpr (serves != Serves::plain)
        kept = r.own.dropout.draw(group);
      weight = r.own.planes && !codes.three && !is_poisoned(range)
                   ? side::off_weight_of(r.own.key, block, static_cast<uint32_t>(code.plane.blocks))
                   : 0;
      const int64_t at = kOffKeyBytes + static_cast<int64_t>(block / kOffGroup) * (kBlock / 8) + r.lane;
      off_bits = weight > 0 ? __ldg(code.plane.bytes + at) : 0;
      usual = !codes.three && r.own.warp.fit(side::Bounds(range));
    }
    __device__ inline float factor(const Reader& r, int j) const {
      if constexpr (serves == Serves::plain) return codes.is_on(j) ? 1.0f : 0.0f;
      if constexpr (relu) return codes.is_on(j) ? on_factor(r, j) : 0.0f;
      return r.own.dropout.factor(kept, j, codes.is_on(j));
    }
    /// … of a value that is on.
    __device__ inline float on_factor(const Reader& r, int j) const {
      if constexpr (serves == Serves::plain) return 1.0f;
      return r.own.dropout.keeps(kept, j) ? r.own.dropout.on : 0.0f;
    }
    /// `gated`: for a factor of 0 any finite number will do.
    template <Way way, bool gated>
    __device__ inline void decode(const Reader& r, int half, float (&x)[4]) const {
      const Decoder decoder = r.table.decoder(r.lane, half, r.own.falling, r.own.flat);
      const side::Bounds b(range);
      const SideTable& table = r.a.c.side.table;
      const uint32_t two = codes.two >> (8 * half);
      if constexpr (way != Way::general) {
#pragma unroll
        for (int k = 0; k < 4; ++k)
          x[k] = gated && kGates ? decoder.on_value<true>(k, two, b, table) : decoder.value<true>(k, two, b, table);
        if constexpr (way == Way::drawn) decoder.sample_off<true>(two, off_bits >> (4 * half), static_cast<float>(weight), b, 0, x);
        return;
      }
      if (is_poisoned(range)) {
#pragma unroll
        for (int k = 0; k < 4; ++k) x[k] = __uint_as_float(kCanonicalNaN);
        return;
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (any && codes.three)
          x[k] = decoder.wide_value(k, codes.at(4 * half + k), b, r.a.wide.table);
        else
          x[k] = decoder.value<false>(k, two, b, table);
      }
      if (weight > 0) decoder.sample_off<false>(two, off_bits >> (4 * half), static_cast<float>(weight), b, decoder.falling, x);
    }
  };
};

/// Even levels as a table, where the others stand already.
void write_levels(LevelTable& levels) {
  for (int k = 0; levels.even && k < kMaxLevels; ++k) levels.at[k] = static_cast<float>(k);
}

/// What the four codes of a block of 2 bits stand for: NaN where it is poisoned, as 0·NaN is NaN too.
struct FourValues {
  float value[4];

  __device__ inline FourValues(const LevelTable& levels, Header h) {
#pragma unroll
    for (int k = 0; k < 4; ++k) value[k] = fmaf(levels.at[k], h.step, h.low);
  }
  __device__ inline float at(uint32_t code) const {
    const float lower = (code & 1) != 0 ? value[1] : value[0], upper = (code & 1) != 0 ? value[3] : value[2];
    return (code & 2) != 0 ? upper : lower;
  }
};

/// norm_add: x̂ in a block code, the sum in its ReLU form, whose codes but 0 pass. `bits` of x̂: 2, or 0 for 1 to 4 as they come. `wide`: the
/// sum may have 3 bits. `alone`: there is no sum, and all pass.
template <int bits, bool wide, bool alone = false>
struct BlocksAndReluForm : Defaults {
  static constexpr bool kLean = bits == 2 && !wide, kBatch = kLean && !alone, kSkip = true;
  static constexpr int kSumsResident = kLean ? kManyWalk.each : kFewWalk.each;
  struct Tables {
    float level[kMaxLevels];  // 16 banks, no conflicts
  };

  NormAddCode c;
  Wide sum_codes;

  explicit BlocksAndReluForm(const NormAddCode& code) : c(code), sum_codes(c.sum.table, c.extra) { write_levels(c.norm.levels); }
  __host__ __device__ inline int64_t values() const { return c.norm.grid.values; }
  __host__ __device__ inline int64_t channels() const { return c.channels; }

  __device__ inline void fill(Tables& table, int64_t) const {
    if (threadIdx.x < kMaxLevels) table.level[threadIdx.x] = c.norm.levels.at[threadIdx.x];
  }
  using Reader = epilogue::Reader<BlocksAndReluForm>;

  struct Piece {
    static constexpr bool usual = false;
    static constexpr uint32_t weight = 0;
    Header header;
    uint32_t norm = 0, sum;

    __device__ inline void load(const Reader& r, uint32_t block, int64_t group, int count) {
      const NormAddCode& c = r.a.c;
      if constexpr (bits == 2) {
        norm = load_eight(c.norm_at.codes, group, count);
      } else {
        const int own = c.norm.levels.bits;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (k * 8 < count * own) norm |= static_cast<uint32_t>(__ldg(c.norm_at.codes + group * own + k)) << (8 * k);
        }
      }
      if constexpr (alone) {
        sum = 0;
      } else if constexpr (wide) {
        const Codes codes = r.a.sum_codes.load(c.sum_at.codes, group, block, count);
        sum = codes.two | codes.extra << 16;
      } else {
        sum = load_eight(c.sum_at.codes, group, count);
      }
      header = load_header(c.norm_at.headers, c.norm.header, block);
    }
    __device__ inline void open(const Reader&, int64_t) {}
    __device__ inline float factor(const Reader&, int j) const {
      if constexpr (alone) return 1.0f;
      const uint32_t code = wide ? (sum >> (2 * j) & 3) | (sum >> (16 + j) & 1) : sum >> (2 * j) & 3;  // 0 or not
      return code != 0 ? 1.0f : 0.0f;
    }
    template <Way, bool>
    __device__ inline void decode(const Reader& r, int half, float (&x)[4]) const {
      const LevelTable& levels = r.a.c.norm.levels;
      const FourValues four(levels, header);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t code = norm >> ((bits == 2 ? 2 : levels.bits) * (4 * half + k));
        x[k] = bits == 2 ? four.at(code) : fmaf(r.table.level[code & ((1u << levels.bits) - 1)], header.step, header.low);
      }
    }
  };
};

/// norm_block: the norm's input x in a block code of 2 bits, masks of ReLU and dropout.
struct BlocksAndMasks : Defaults {
  struct Tables {
    Table<> mean, rstd;
  };

  NormBlockCode c;
  int shift = 0;  // groups of 8 a block, as a power of two

  explicit BlocksAndMasks(const NormBlockCode& code) : c(code) {
    while (int64_t{8} << shift < c.code.grid.block) ++shift;
    if (c.kept != nullptr) c.chain.drop = 0;  // no need to draw again
    write_levels(c.code.levels);
  }
  __host__ __device__ inline int64_t values() const { return c.code.grid.values; }
  __host__ __device__ inline int64_t channels() const { return c.chain.channels; }

  struct Own {
    Dropout dropout;
    __device__ inline explicit Own(const BlocksAndMasks& a) : dropout(a.c.chain, a.c.drop_seed) {}
    __device__ inline void begin(const BlocksAndMasks&, const Tables&, int) {}
  };
  __device__ inline void fill(Tables& table, int64_t) const {
    const int64_t channel = own_channel(channels());
    table.mean.put(static_cast<int>(threadIdx.x), c.mean[channel]);
    table.rstd.put(static_cast<int>(threadIdx.x), c.rstd[channel]);
  }
  using Reader = epilogue::Reader<BlocksAndMasks>;

  struct Piece {
    static constexpr bool usual = false;
    static constexpr uint32_t weight = 0;
    Header header;
    uint32_t codes, passes;

    __device__ inline void load(const Reader& r, uint32_t, int64_t group, int count) {
      const NormBlockCode& c = r.a.c;
      codes = load_eight(c.at.codes, group, count);
      passes = __ldg(c.on + group);
      if (c.kept != nullptr) passes &= __ldg(c.kept + group);
      header = load_header(c.at.headers, c.code.header, group >> r.a.shift);
    }
    __device__ inline void open(const Reader& r, int64_t group) { passes &= r.own.dropout.kept(group); }
    __device__ inline float factor(const Reader& r, int j) const { return (passes >> j & 1) != 0 ? r.own.dropout.on : 0.0f; }
    template <Way, bool>
    __device__ inline void decode(const Reader& r, int half, float (&x)[4]) const {
      float mean[4], rstd[4];
      r.table.mean.get_half(r.lane, half, mean);
      r.table.rstd.get_half(r.lane, half, rstd);
      const FourValues four(r.a.c.code.levels, header);
#pragma unroll
      for (int k = 0; k < 4; ++k) x[k] = (four.at(codes >> (8 * half + 2 * k)) - mean[k]) * rstd[k];
    }
  };
};

/// norm_image: x̂ in blocks of even levels, in equal bits or in bits per sample, and ReLU's mask, if there is one.
struct SamplesAndMask : Defaults {
  static constexpr bool kBroken = false, kSkip = true, kSquares = true;
  static constexpr int kSumsResident = kManyWalk.each;
  struct Tables {};

  NormImageCode c;
  Places places;

  explicit SamplesAndMask(const NormImageCode& code) : c(code), places(code) {}
  __host__ __device__ inline int64_t values() const { return values_of(c); }
  __host__ __device__ inline int64_t channels() const { return c.channels; }

  __device__ inline void fill(Tables&, int64_t) const {}
  using Reader = epilogue::Reader<SamplesAndMask>;

  struct Piece {
    static constexpr bool usual = false;
    static constexpr uint32_t weight = 0;
    Header header;
    uint32_t low, high;  // codes
    uint32_t passes;
    int bits;

    __device__ inline void load(const Reader& r, uint32_t block, int64_t group, int) {
      const NormImageCode& c = r.a.c;
      const Places::Step at = r.a.places.of(block);
      passes = c.on == nullptr ? 0xffu : __ldg(c.on + group);
      header = load_header(c.at.headers, c.header, block);
      bits = at.bits;
      // `bits` bytes from lane·bits on, out of whole words; what is read lies inside the step's 32·bits bytes.
      const int byte = r.lane * bits, shift = byte % 4 * 8, end = shift + 8 * bits;
      const uint32_t* words = reinterpret_cast<const uint32_t*>(at.codes) + byte / 4;
      const uint32_t first = __ldg(words), second = end > 32 ? __ldg(words + 1) : 0, extra = end > 64 ? __ldg(words + 2) : 0;
      low = __funnelshift_r(first, second, shift);
      high = __funnelshift_r(second, extra, shift);
    }
    __device__ inline void open(const Reader&, int64_t) {}
    __device__ inline float factor(const Reader&, int j) const { return (passes >> j & 1) != 0 ? 1.0f : 0.0f; }
    template <Way, bool>
    __device__ inline void decode(const Reader&, int half, float (&x)[4]) const {
      const uint32_t four = half == 0 ? low : __funnelshift_rc(low, high, 4 * bits), mask = (1u << bits) - 1;
#pragma unroll
      for (int k = 0; k < 4; ++k) {  // a code in the low bits of 2^23 is a number without a conversion instruction
        x[k] = fmaf(__uint_as_float((four >> (bits * k) & mask) | 0x4b000000u) - 8388608.0f, header.step, header.low);
      }
    }
  };
};

/// Two read g, the last one none: it makes the next layer's input.
enum class Pass { sums, back, input };

/// Eight values of g, of which `count` exist, and what stands beside them.
template <class Code, DType type>
struct Step {
  Eight<type> g;
  typename Code::Piece code;

  template <Pass pass, bool whole>
  __device__ inline void load(const typename Code::Reader& from, const void* given, uint32_t block, int count) {
    const int64_t group = static_cast<int64_t>(block) * 32 + from.lane;
    if constexpr (pass != Pass::input) {
      if (whole && from.a.aligned())
        g = read8<type, true>(given, group * 8);
      else if (whole)
        g = read8<type, false>(given, group * 8);
      else
        g = read8_until<type, false>(given, group * 8, from.a.values());
    }
    code.load(from, block, group, whole ? 8 : count);
  }
};

/// Calls f with every step of a warp, its block, how many of a lane's eight values exist, whether it is whole, and how it is decoded. The
/// walk has the whole steps; of those around it the warp has what is_broken(block) says. Sums go from the last to the first: what has
/// just made g has left its last values in the cache.
template <class Code, DType type, Pass pass, class W, class F>
__device__ inline void for_each_step(const typename Code::Reader& from, const Walk& walk, const void* g, const W& is_broken, const F& f) {
  const auto open = [&](Step<Code, type>& step, uint32_t block, int count, auto is_whole) {
    step.code.open(from, static_cast<int64_t>(block) * 32 + walk.lane);
    if constexpr (Code::kUsual && is_whole()) {
      if (step.code.usual && step.code.weight == 0) return f(step, block, count, is_whole, WayOf<Way::usual>());
      if constexpr (pass == Pass::back) {  // the one that reads the off plane
        if (step.code.usual) return f(step, block, count, is_whole, WayOf<Way::drawn>());
      }
    }
    f(step, block, count, is_whole, WayOf<Way::general>());
  };
  const auto broken = [&] {
#pragma unroll 1
    for (int side = 0; side < (pass == Pass::input ? 2 : 1); ++side) {
      const uint32_t block = walk.step(side == 0 ? walk.count : -1);
      const int count = Code::kBroken && is_broken(block) ? count_of(static_cast<int64_t>(block) * 32 + walk.lane, from.a.values()) : 0;
      if (count == 0) continue;
      Step<Code, type> step;
      step.template load<pass, false>(from, g, block, count);
      open(step, block, count, std::false_type());
    }
  };
  constexpr bool backwards = pass == Pass::sums;
  if (backwards) broken();
#pragma unroll 1
  for (int k = 0; k < walk.count; k += Code::kTurns) {
    Step<Code, type> step[Code::kTurns];
    const auto block = [&](int u) { return walk.step(backwards ? walk.count - 1 - k - u : k + u); };
#pragma unroll
    for (int u = 0; u < Code::kTurns; ++u) {
      if (k + u < walk.count) step[u].template load<pass, true>(from, g, block(u), 8);
    }
#pragma unroll
    for (int u = 0; u < Code::kTurns; ++u) {
      if (k + u < walk.count) open(step[u], block(u), 8, std::true_type());
    }
  }
  if (!backwards) broken();
}

/// … of all values.
template <class Code, DType type, Pass pass, class F>
__device__ inline void for_all_steps(const typename Code::Reader& from, const void* g, const F& f) {
  const uint32_t whole = static_cast<uint32_t>(from.a.values() / kBlock);
  for_each_step<Code, type, pass>(
      from, Walk(0, whole), g, [&](uint32_t block) { return block == whole; }, f);
}

/// Σ gz and Σ gz·x̂ of the 256 values that a thread block's steps meet.
template <class Code, DType type>
__global__ void __launch_bounds__(kWarps * 32, Code::kSumsResident)
    sum_steps(const __grid_constant__ Code a, const void* g, float2* partial) {
  __shared__ typename Code::Tables table;
  const typename Code::Reader from(a, table, static_cast<int>(threadIdx.x) % 32, blockIdx.x * kBlock);
  float sum[8] = {}, along[8] = {};
  for_all_steps<Code, type, Pass::sums>(from, g, [&](const Step<Code, type>& step, uint32_t, int count, auto whole, auto way) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float hat[4];
      step.code.template decode<way(), true>(from, half, hat);
#pragma unroll
      for (int q = 0, j = 4 * half; q < 4; ++q, ++j) {
        const float gz = step.g[j] * step.code.factor(from, j);  // not 0 in its place: NaN and infinity stay visible
        sum[j] += gz;
        if (whole() || j < count) along[j] = fmaf(gz, hat[q], along[j]);  // behind the end gz is 0, but 0·NaN is not
      }
    }
  });
  write_sums<kWarps>(sum, along, partial);
}

/// Two sums a channel, from `entries` parts in all.
__global__ void __launch_bounds__(kFinishThreads)
    add_up_parts(const float2* partial, int64_t entries, int64_t channels, float* sum_g, float* sum_gx) {
  const FinishShare share;
  double sums[2] = {};
  if (share.channel < channels) share.add_pairs(partial, entries, channels, sums);
  if (!share.add_up(sums) || share.channel >= channels) return;
  sum_g[share.channel] = static_cast<float>(sums[0]);
  sum_gx[share.channel] = static_cast<float>(sums[1]);
}

/// `bits` ≠ 0 ? a : b, and no branch around what a takes.
__device__ inline float pick(uint32_t bits, float a, float b) {
  float y;
  asm("{.reg .pred p; setp.ne.u32 p, %1, 0; selp.f32 %0, %2, %3, p;}" : "=f"(y) : "r"(bits), "f"(a), "f"(b));
  return y;
}

/// The last pass of NormBack; `inverse` is 1/N. From the first step to the last: the sums' pass, which went the other way, has left the
/// first ones in the cache.
template <class Code, DType type>
__global__ void __launch_bounds__(kWarps * 32, 4)
    back_steps(const __grid_constant__ Code a, const __grid_constant__ NormBack o, float inverse) {
  __shared__ typename Code::Tables table;
  __shared__ Table<> offsets, alongs, scales, blocked;
  const bool batch = Code::kBatch || o.sum_g != nullptr;
  const int own = static_cast<int>(threadIdx.x), lane = own % 32;
  const int64_t c = own_channel(a.channels());
  scales.put(own, a.gamma(o, c) * o.rstd[c]);
  if (batch) offsets.put(own, o.sum_g[c] * inverse), alongs.put(own, o.sum_gx[c] * inverse);
  const typename Code::Reader from(a, table, lane, blockIdx.x * kBlock);
  if constexpr (Code::kGates) {  // the gradient of what does not pass
    blocked.put(own, (0.0f - fmaf(table.off.of(own), alongs.of(own), offsets.of(own))) * scales.of(own));
    __syncthreads();
  }
  for_all_steps<Code, type, Pass::back>(from, o.g, [&](const auto& step, uint32_t block, int count, auto whole, auto way) {
    float gz[8], dx[8];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      constexpr bool gated = Code::kGates && way() == Way::usual;
      float hat[4] = {}, offset[4] = {}, along[4] = {}, scale[4], none[4] = {};
      if (batch) {
        step.code.template decode<way(), gated>(from, half, hat);
        offsets.get_half(lane, half, offset);
        alongs.get_half(lane, half, along);
      }
      scales.get_half(lane, half, scale);
      if constexpr (gated) blocked.get_half(lane, half, none);
#pragma unroll
      for (int q = 0, j = 4 * half; q < 4; ++q, ++j) {
        if constexpr (gated) {
          const float passing = step.g[j] * step.code.on_factor(from, j);
          dx[j] = pick(step.code.codes.two & 3u << (2 * j), (passing - fmaf(hat[q], along[q], offset[q])) * scale[q], none[q]);
          continue;
        }
        gz[j] = step.g[j] * step.code.factor(from, j);
        dx[j] = (batch ? gz[j] - fmaf(hat[q], along[q], offset[q]) : gz[j]) * scale[q];
      }
    }
    const int64_t first = (static_cast<int64_t>(block) * 32 + lane) * 8;
    const int written = whole() ? 8 : count;
    if (Code::kSkip && o.skip != nullptr) write_some<type>(o.skip, first, written, a.aligned(), gz);
    if (!Code::kSkip || o.x != nullptr) write_some<type>(o.x, first, written, a.aligned(), dx);
    if (Code::kSquares && o.squares != nullptr) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < 8; ++j) sum = fmaf(dx[j], dx[j], sum);
      sum = warp_sum(sum);
      if (lane == 0) o.squares[block] = sum;
    }
  });
}

/// Values [begin, end) of the next layer's input: decoded, then the chain with the code's own on bits.
template <class Code, DType type>
__global__ void __launch_bounds__(kWarps * 32, 4) input_steps(const __grid_constant__ Code a, int64_t begin, int64_t end, void* z) {
  __shared__ typename Code::Tables table;
  const Walk walk(steps_of(begin), static_cast<uint32_t>(end / kBlock));
  const typename Code::Reader from(a, table, walk.lane, (static_cast<int64_t>(steps_of(begin)) + blockIdx.x) * kBlock);
  const auto is_edge = [&](uint32_t block) {  // with any of the lane's eight
    const int64_t i = (static_cast<int64_t>(block) * 32 + walk.lane) * 8;
    return (block == begin / kBlock || block == end / kBlock) && i + 8 > begin && i < end;
  };
  const auto put = [&](const auto& step, uint32_t block, int, auto inside, auto way) {
    float x[8];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float gamma[4], beta[4], hat[4];
      step.code.template decode<way(), true>(from, half, hat);
      table.gamma.get_half(walk.lane, half, gamma);
      table.beta.get_half(walk.lane, half, beta);
#pragma unroll
      for (int q = 0, j = 4 * half; q < 4; ++q, ++j) x[j] = chain_output(fmaf(gamma[q], hat[q], beta[q]), step.code.factor(from, j));
    }
    const int64_t i = (static_cast<int64_t>(block) * 32 + walk.lane) * 8;
    if (inside() && a.aligned())
      write8<type, true>(z, i - begin, x);
    else
      write8_within<type, false>(z, i, begin, end, x);
  };
  for_each_step<Code, type, Pass::input>(from, walk, nullptr, is_edge, put);
}

// ---- launch ----------------------------------------------------------------------------------------------------------

/// Calls f with a code as kernels take it, the leanest that serves. `samples` and `aligned` are norm_act's.
template <bool samples, class F>
void with_code(const NormActCode& c, bool aligned, bool batch, F&& f) {
  if (!aligned || !batch || c.side.table.bits != 2 || c.extra.slots != nullptr || c.side.header != HeaderType::bf16)
    return f(OneSided<Serves::any, samples>(c, aligned));
  if (is_relu(c.chain, c.side.grid.values)) return f(OneSided<Serves::relu, samples>(c, true));
  if (!is_plain(c.chain)) return f(OneSided<Serves::dropped, samples>(c, true));
  f(OneSided<Serves::plain, samples>(c, true));
}
template <bool, class F>
void with_code(const NormAddCode& c, bool, bool batch, F&& f) {
  const bool narrow = c.sum.table.bits == 2 && c.extra.slots == nullptr;
  if (c.alone) return f(BlocksAndReluForm<2, false, true>(c));
  if (c.norm.levels.bits != 2) return f(BlocksAndReluForm<0, true>(c));
  if (narrow && batch) return f(BlocksAndReluForm<2, false>(c));
  f(BlocksAndReluForm<2, true>(c));
}
template <bool, class F>
void with_code(const NormBlockCode& c, bool, bool, F&& f) {
  f(BlocksAndMasks(c));
}
template <bool, class F>
void with_code(const NormImageCode& c, bool, bool, F&& f) {
  f(SamplesAndMask(c));
}

template <class Kept>
void run_sums(const Kept& code, const NormSums& o, StreamHandle stream, const char* op) {
  check_fit(code, op);
  float2* partial = static_cast<float2*>(o.scratch);
  with_code<false>(code, is_aligned(o.g), true, [&](const auto& a) {
    using Code = std::decay_t<decltype(a)>;
    if (Code::kAligned) check_aligned({o.g}, op);
    const unsigned grid = grid_size(walk_blocks(a.values(), a.channels(), kSumProcessors * Code::kSumsResident));
    if (grid > 0) with_type(o.type, [&](auto t) { launch_kernel(op, stream, {grid}, sum_steps<Code, t()>, a, o.g, partial); });
    finish_sums(op, partial, grid * kBlock, a.channels(), o.beta, o.gamma, stream);
  });
}

template <class Kept>
void run_back(const Kept& code, const NormBack& o, StreamHandle stream, const char* op) {
  check_fit(code, op);
  with_code<true>(code, is_aligned(o.g) && is_aligned(o.x), o.sum_g != nullptr, [&](const auto& a) {
    using Code = std::decay_t<decltype(a)>;
    if (Code::kAligned) check_aligned({o.g, o.skip, o.x}, op);
    if (a.values() == 0) return;
    const auto rows = static_cast<double>(o.rows > 0 ? o.rows : a.values() / a.channels());
    const unsigned grid = grid_size(free_walk_blocks(a.values(), a.channels(), kManyWalk));
    with_type(o.type, [&](auto t) { launch_kernel(op, stream, {grid}, back_steps<Code, t()>, a, o, static_cast<float>(1 / rows)); });
  });
}

}  // namespace
}  // namespace epilogue

using namespace epilogue;

void finish_sums(const char* op, const float2* partial, int64_t entries, int64_t channels, float* sum_g, float* sum_gx,
                 StreamHandle stream) {
  if (channels == 0) return;
  launch_kernel(op, stream, finish_size(channels, entries / channels), add_up_parts, partial, entries, channels, sum_g, sum_gx);
}

int64_t norm_scratch_bytes() { return kManyBlocks * kBlock * static_cast<int64_t>(sizeof(float2)); }

void norm_sums(const NormActCode& code, const NormSums& o, StreamHandle stream) { run_sums(code, o, stream, "norm_act_sums"); }
void norm_sums(const NormAddCode& code, const NormSums& o, StreamHandle stream) { run_sums(code, o, stream, "norm_add_sums"); }
void norm_sums(const NormBlockCode& code, const NormSums& o, StreamHandle stream) { run_sums(code, o, stream, "norm_block_sums"); }
void norm_sums(const NormImageCode& code, const NormSums& o, StreamHandle stream) { run_sums(code, o, stream, "norm_image_sums"); }

void norm_back(const NormActCode& code, const NormBack& o, StreamHandle stream) { run_back(code, o, stream, "norm_act_back"); }
void norm_back(const NormAddCode& code, const NormBack& o, StreamHandle stream) { run_back(code, o, stream, "norm_add_back"); }
void norm_back(const NormBlockCode& code, const NormBack& o, StreamHandle stream) { run_back(code, o, stream, "norm_block_back"); }
void norm_back(const NormImageCode& code, const NormBack& o, StreamHandle stream) { run_back(code, o, stream, "norm_image_back"); }

void norm_act_input(const NormActCode& code, int64_t first, int64_t last, void* z, DType type, StreamHandle stream) {
  constexpr const char* op = "norm_act_input";
  check_fit(code, op);
  const int64_t begin = first * code.side.channels, end = last * code.side.channels;
  if (first < 0 || end > code.side.grid.values) fail(op, "rows must exist", last);
  if (begin >= end) return;
  const int64_t values = (ceil_div(end, kBlock) - begin / kBlock) * kBlock;  // of the blocks that are met
  const unsigned grid = grid_size(free_walk_blocks(values, code.side.channels, kManyWalk));
  // A group starts at a multiple of 8 values: so many past an aligned one of the buffer as `begin` lies before it.
  const bool aligned = is_aligned(z) && begin * size_of(type) % 16 == 0;
  with_code<false>(code, aligned, true, [&](const auto& a) {
    using Code = std::decay_t<decltype(a)>;
    with_type(type, [&](auto t) { launch_kernel(op, stream, {grid}, input_steps<Code, t()>, a, begin, end, z); });
  });
}

}  // namespace satchel::cuda
