// Forward in one pass: x̂ = (h − mean)·rstd, its one-sided code (the bytes of side_encode.cu) and z = kept·act(γ·x̂ + β)·scale (the
// bits of chain.cu); all arithmetic in fp32, h and z as they stand in memory. A block of values stays in a warp's registers from its only
// read to its only write.
#include "satchel/kernels/cuda/finish.cuh"
#include "satchel/kernels/cuda/one_sided.cuh"

namespace satchel::cuda {
namespace epilogue {
namespace {

constexpr int kCodeThreads = kSideEncode.threads;  // with kCodeBlocks: the partition that side_encode.cu sums off means by
constexpr int64_t kCodeBlocks = kSumProcessors * kSideEncode.each;

struct Forward {
  NormActCode c;
  NormPass pass;
  Layout at;
  Parts to;
  float2* partial;  // off sums and counts, 256 a thread block
  float* tail;      // x̂ of the last, broken block
  Wide wide;
  bool aligned;  // x and z start at multiples of 16
};

/// −β/γ as pack_side() has it.
__device__ inline float threshold_of(float gamma, float beta) { return gamma == 0.0f ? 0.0f : -beta / gamma; }

/// The channels of the 256 values of a step.
struct ForwardTables : NormTables<> {
  Table<> threshold;

  /// From the packed table, which stands already.
  __device__ inline void fill(const Channel* from, int64_t channels, int64_t first) {
#pragma unroll 1
    for (int k = static_cast<int>(threadIdx.x); k < kBlock; k += static_cast<int>(blockDim.x)) {
      const Channel c = from[channel_of(first + k, channels)];
      gamma.put(k, c.gamma), beta.put(k, c.beta), threshold.put(k, c.gamma == 0.0f ? float_of(0xff800000u) : c.threshold);
    }
  }
  __device__ inline void fill(const NormParameters& p, int64_t channels, int64_t first) {
    NormTables<>::fill(p, channels, first);
#pragma unroll 1
    for (int k = static_cast<int>(threadIdx.x); k < kBlock; k += static_cast<int>(blockDim.x)) {
      const float g = gamma.of(k), b = beta.of(k);  // this thread's own
      threshold.put(k, g == 0.0f ? float_of(0xff800000u) : threshold_of(g, b));
    }
  }
};

/// What a warp's channels must be like for blocks to be coded the short way: γ is positive, all numbers are of usual size, and the
/// threshold is −β/γ correctly rounded. Then a value above the threshold is on and a value below it is off: distances from the threshold
/// need no sign, and only a value that equals it asks fma(γ, x, β). x̂ is not subnormal, as x and mean are multiples of 2^−84 or far apart.
struct Usual {
  float least, most;  // thresholds, and what makes a block's ends of usual size

  /// Every thread of the warp must call this. `is_hat`: x is x̂ already, and mean and rstd are not read.
  __device__ inline Usual(const ForwardTables& table, int lane, const SideCode& code, bool is_hat, bool no_subnormals) {
    float gamma[8], beta[8], threshold[8];
    table.gamma.get(lane, gamma);
    table.beta.get(lane, beta);
    table.threshold.get(lane, threshold);
    bool fits = code.header == HeaderType::bf16 && code.rounding != Rounding::nearest;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float t = threshold[j];
      fits = fits && gamma[j] >= 0x1p-40f && gamma[j] <= 0x1p40f && fabsf(beta[j]) <= 0x1p40f && (t == 0.0f || fabsf(t) >= 0x1p-60f);
      if (is_hat) fits = fits && t == threshold_of(gamma[j], beta[j]);
    }
    if (!is_hat) {
      float mean[8], rstd[8];
      table.mean.get(lane, mean);
      table.rstd.get(lane, rstd);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        fits = fits && (fabsf(mean[j]) >= 0x1p-60f || (no_subnormals && mean[j] == 0.0f)) && rstd[j] >= 0x1p-20f;
      }
    }
    Extremes e = Extremes::of8(threshold);
    e.reduce_warp();
    least = __all_sync(~0u, fits) ? fminf(e.least, -0x1p-60f) : float_of(0xff800000u);  // nothing lies below
    most = fmaxf(e.most, 0x1p-60f);
  }

  /// The range of a warp's block with these extremes, if the short way serves it; else anything.
  __device__ static inline Range range(AroundZero e) {
    e.reduce_warp();
    return {AroundZero::outwards(e.least), AroundZero::outwards(static_cast<uint32_t>(e.most))};
  }
  /// Does it? No side is clamped or long, and nothing overflows; NaN and infinity fail.
  __device__ inline bool covers(Range r) const {
    const float span = r.high - r.low;
    return r.low <= least && r.high >= most && r.high - least <= 0.8f * span && span <= 0x1p60f;
  }
};

/// Calls f(j, gate) for a lane's eight channels, of which it reads four at a time.
template <class F>
__device__ inline void for_gates(const ForwardTables& table, int lane, const F& f) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float threshold[4], gamma[4], beta[4];
    table.threshold.get_half(lane, half, threshold);
    table.gamma.get_half(lane, half, gamma);
    table.beta.get_half(lane, half, beta);
#pragma unroll
    for (int k = 0; k < 4; ++k) f(4 * half + k, side::Gate{threshold[k], gamma[k], beta[k], 0.0f});
  }
}

/// side_code_of() of core/side.h for a lane's eight, for one off code and three on codes or, `wide`, two and six; then y in the place of x.
template <bool wide>
__device__ inline void code8(const ForwardTables& table, int lane, const side::Bounds& b, const SideTable& t, const Words& noise,
                             float (&x)[8], Codes& c, side::OffSums& s) {
  for_gates(table, lane, [&](int j, const side::Gate& g) {
    const float v = flush_signed(x[j]), u = side::uniform_at(noise, j);
    const bool on = fmaf(g.gamma, v, g.beta) > 0.0f;
    if constexpr (wide) {
      c.put(j, side::code_at<3, 2, false>(v, on, g, b, t, u, 1));
      s.sum[j] += on ? 0.0f : v;
      s.count[j] += on ? 0.0f : 1.0f;
    } else {
      side::put_or_sum(g.gamma, g.beta, v, side::code_at<2, 1, false>(v, on, g, b, t, u, 1u << (2 * j)), c.two, s.sum[j], s.count[j]);
    }
    x[j] = fmaf(g.gamma, x[j], g.beta);
  });
}

/// z of a group's eight values in the place of y.
template <Serves serves, bool finite>
__device__ inline void pass8(const Dropout& dropout, const Words& kept, float (&y)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if constexpr (serves == Serves::relu && finite) {  // what is not on is below 0 or +0, and becomes 0 as it is stored
      y[j] = fmaf(y[j], dropout.keeps(kept, j) ? dropout.on : 0.0f, 0.0f);
      continue;
    }
    const bool on = y[j] > 0.0f;
    y[j] = chain_output(y[j], serves == Serves::plain ? (on ? 1.0f : 0.0f) : dropout.factor(kept, j, on));
  }
}

/// The short way in a block that Usual covers: codes of 2 bits, and y in the place of x.
__device__ inline uint32_t code8_usual(const ForwardTables& table, int lane, float high, float level, const Words& noise, float (&x)[8],
                                       side::OffSums& s) {
  float codes[2] = {0x1p23f + 0x0055, 0x5500};  // all as on; from 2^23 on a float's lower bits are those of an integer
  for_gates(table, lane, [&](int j, const side::Gate& g) {
    const float unit = static_cast<float>(1 << (2 * j));
    const float u = side::uniform_at(noise, j), d = x[j] - g.threshold, length = high - g.threshold, middle = level * length;
    const float y = fmaf(g.gamma, x[j], g.beta), off = one_up_to(y, 0.0f);
    float& own = codes[j / 4];
    own = fmaf(one_above(d, u * middle), unit, own);
    own = fmaf(one_above(d, fmaf(u, length - middle, middle)), unit, own);
    own = fmaf(off, -unit, own);
    s.sum[j] = fmaf(off, x[j], s.sum[j]);
    s.count[j] += off;
    x[j] = y;
  });
  return __float_as_uint(codes[0] + codes[1]);
}

/// Off bits of a lane's eight values in a drawn block that Usual covers.
__device__ inline uint32_t off_bits8_usual(const ForwardTables& table, int lane, float low, const Words& noise, const float (&x)[8]) {
  float bits = 0x1p23f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float threshold[4];
    table.threshold.get_half(lane, half, threshold);
#pragma unroll
    for (int k = 0, j = 4 * half; k < 4; ++k, ++j) {
      const float u = side::uniform_at(noise, j);
      bits = fmaf(one_above(threshold[k] - x[j], u * (threshold[k] - low)), static_cast<float>(1 << j), bits);
    }
  }
  return __float_as_uint(bits);
}

/// Which blocks of whole groups the off plane has drawn. The key is read every time anew, from shared memory.
__device__ inline bool is_drawn(const volatile OffKey& key, uint32_t block) {
  static_assert(kOffGroup == 8);
  return block == (block & ~7u) + ((key.a * (block / 8) + key.b) >> 29);
}

/// x̂ of the broken block: z may be written over h before its codes are made.
template <DType type>
__device__ inline void keep_tail(const Forward& a) {
  const int64_t n = a.c.side.grid.values, whole = n / kBlock * kBlock;
#pragma unroll 1
  for (int64_t i = whole + threadIdx.x; i < n; i += blockDim.x) {
    const int64_t c = channel_of(i, a.c.side.channels);
    a.tail[i - whole] = (load(a.pass.x, type, i) - a.pass.with.mean[c]) * a.pass.with.rstd[c];
  }
}

/// Blocks of 256 values, one a warp and step, whole ones only; thread blocks, warps and steps as side_encode.cu has them.
template <DType type, Serves serves>
__global__ void __launch_bounds__(kCodeThreads, 6) encode_blocks(const __grid_constant__ Forward a) {
  constexpr bool any = serves == Serves::any;
  __shared__ ForwardTables table;
  __shared__ OffKey key;
  constexpr bool is_short = serves == Serves::plain || serves == Serves::relu;
  __shared__ std::conditional_t<is_short, ShortKeys, RoundKeys> seed;
  __shared__ ShortKeys drop_seed;
  const SideCode& code = a.c.side;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const bool planes = code.plane.bytes != nullptr;
  if (planes && threadIdx.x == 0) key = side::encoder_key(code, a.c.seed, blockIdx.x == 0);
  const uint32_t blocks = static_cast<uint32_t>(code.grid.values / kBlock), step = gridDim.x * (kCodeThreads / 32);
  if constexpr (serves == Serves::codes) {
    table.fill(a.to.channels, code.channels, blockIdx.x * kBlock);
  } else {
    if (blockIdx.x == 0) keep_tail<type>(a);
    table.fill(a.pass.with, code.channels, blockIdx.x * kBlock);
  }
  if constexpr (is_short)
    seed.fill(a.c.seed, Stream::rounding);
  else
    seed.fill(a.c.seed);
  if (serves == Serves::relu) drop_seed.fill(a.c.seed, Stream::dropout);
  const Dropout dropout(a.c.chain, a.c.seed, serves != Serves::relu);
  const auto kept_of = [&](uint64_t group) {
    if constexpr (serves == Serves::relu) return drop_seed.draw(static_cast<uint32_t>(group));
    if constexpr (serves == Serves::plain) return Words{};
    return dropout.draw(static_cast<int64_t>(group));
  };
  __syncthreads();
  constexpr bool is_hat = serves == Serves::codes;
  const Usual usual(table, lane, code, is_hat, type == DType::f16);
  const uint32_t grouped = planes ? static_cast<uint32_t>(code.plane.blocks) & ~7u : ~0u;  // blocks of whole groups of the off plane
  side::OffSums off;
  using Raw = typename Eight<type>::Raw;
  const Raw* from = static_cast<const Raw*>(a.pass.x) + lane * 8;
  Raw* to = static_cast<Raw*>(a.pass.z) + lane * 8;
  if constexpr (type != DType::f32 && (serves == Serves::plain || is_hat)) from = held(from);  // the others have no register left
  if constexpr (type != DType::f32 && serves == Serves::plain) to = held(to);
  const auto read = [&](uint32_t block) {
    const Raw* const x = from + static_cast<uint64_t>(block) * kBlock;
    return !any || a.aligned ? read8<type, true>(x, 0) : read8<type, false>(x, 0);
  };
  Eight<type> ahead;  // the next block's values, on their way while this one is coded
  uint32_t block = blockIdx.x + static_cast<uint32_t>(warp) * gridDim.x;
  if (block < blocks) ahead = read(block);
  for (uint32_t next; block < blocks; block = next) {
    next = block + step;
    const uint64_t group = static_cast<uint64_t>(block) * 32 + static_cast<uint32_t>(lane);
    float x[8];
    if constexpr (is_hat) {
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = type == DType::f16 ? ahead[j] : flush_signed(ahead[j]);
    } else {
      table.normalise(lane, ahead, x);
    }
    if (next < blocks) ahead = read(next);
    Words noise;
    if constexpr (is_short)
      noise = seed.draw(static_cast<uint32_t>(group));
    else
      noise = rounding_noise(seed, group);
    uint8_t* const plane = code.plane.bytes + kOffKeyBytes + static_cast<uint64_t>(block / kOffGroup) * (kBlock / 8) + lane;
    Codes c;
    if constexpr (any) c.three = a.wide.slot(block) >= 0;
    const Range near = Usual::range(AroundZero::of8(x));
    if (usual.covers(near) && block < grouped && (!any || (!c.three && a.aligned))) {
      const uint32_t header = bf16_header({near.low, near.high});
      if (lane == 0) static_cast<uint32_t*>(a.to.headers)[block] = header;
      if (planes && is_drawn(key, block)) *plane = static_cast<uint8_t>(off_bits8_usual(table, lane, near.low, noise, x));
      const uint32_t eight = code8_usual(table, lane, near.high, code.table.on_short[1], noise, x, off);
      store_codes<2>(a.to.codes, static_cast<int64_t>(group), eight, 8);
      if constexpr (!is_hat) {
        if constexpr (serves != Serves::plain) pass8<serves, true>(dropout, kept_of(group), x);
        Eight<type> z;
        z.template set<is_short>(x);
        z.store(to + static_cast<uint64_t>(block) * kBlock);
      }
      continue;
    }
    if (code.rounding == Rounding::nearest) noise = nearest_noise();
    Extremes e = Extremes::of8(x);
    e.reduce_warp();
    const Range r = e.range(code.header);
    if (lane == 0) store_range(a.to.headers, code.header, block, r);
    const side::Bounds b(r);
    if (planes && side::off_weight_of(key, block, static_cast<uint32_t>(code.plane.blocks)) > 0) {
      uint32_t bits = 0;
      if (!is_poisoned(r)) {
        for_gates(table, lane,
                  [&](int j, const side::Gate& g) { bits |= (side::off_bit(x[j], g, b, side::uniform_at(noise, j)) ? 1u : 0u) << j; });
      }
      *plane = static_cast<uint8_t>(bits);
    }
    const bool wide = any && c.three;
    Codes poisoned;
    if (is_poisoned(r)) {
      for_gates(table, lane,
                [&](int j, const side::Gate& g) { poisoned.put(j, side::poisoned_code(g.gamma, g.beta, x[j], wide ? 2 : 1)); });
    }
    wide ? code8<true>(table, lane, b, a.wide.table, noise, x, c, off) : code8<false>(table, lane, b, code.table, noise, x, c, off);
    if (is_poisoned(r)) c.two = poisoned.two, c.extra = poisoned.extra;
    if constexpr (any)
      a.wide.store(a.to.codes, static_cast<int64_t>(group), block, c);
    else
      store_codes<2>(a.to.codes, static_cast<int64_t>(group), c.two, 8);
    if constexpr (!is_hat) {
      pass8<serves, false>(dropout, kept_of(group), x);
      write_some<type>(to + static_cast<uint64_t>(block) * kBlock, 0, 8, !any || a.aligned, x);
    }
  }
  write_sums<kCodeThreads / 32>(off.sum, off.count, a.partial);
}

/// The extremes of what a thread block's threads have, for all of them, which must call this.
__device__ inline Extremes extremes_of_block(Extremes e) {
  __shared__ float2 pairs[kFinishThreads / 32];
  e.reduce_warp();
  if (threadIdx.x % 32 == 0) pairs[threadIdx.x / 32] = make_float2(e.least, e.most);
  __syncthreads();
  for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) {
    e.least = min_nan(e.least, pairs[w].x);
    e.most = max_nan(e.most, pairs[w].y);
  }
  return e;
}

/// The broken block by the definition, a value a thread, and zeros between the parts of the packed bytes. One thread block of 256 or more.
__device__ inline void finish_tail(const Forward& a) {
  const int own = static_cast<int>(threadIdx.x), slot = own % 8;
  const SideCode& code = a.c.side;
  const int bits = code.table.bits;
  const int64_t n = code.grid.values, whole = n / kBlock * kBlock, blocks = code.grid.blocks();
  const bool exists = own < n - whole;
  const int64_t at = exists ? channel_of(whole + own, code.channels) : 0;
  const float x = exists ? a.tail[own] : 0.0f, gamma = a.pass.with.gamma[at], beta = a.pass.with.beta[at];
  for (int64_t i = code_bytes(n, bits) + own; i < a.at.headers; i += blockDim.x) a.c.bytes[i] = 0;
  for (int64_t i = a.at.headers + blocks * header_bytes(code.header) + own; i < a.at.channels; i += blockDim.x) a.c.bytes[i] = 0;
  if (whole == n) return;
  const UniformSeed seed(a.c.seed);
  const Dropout dropout(a.c.chain, a.c.seed);
  const int64_t group = whole / 8 + own / 8;
  const auto word_of = [&](const Words& noise) {
    return slot < 4 ? slot < 2 ? noise.w[0] : noise.w[1] : slot < 6 ? noise.w[2] : noise.w[3];
  };
  const uint32_t word = word_of(group_noise(seed, code.rounding, group)), noise = slot % 2 == 0 ? word & 0xffffu : word >> 16;
  const bool kept = dropout.keeps(word_of(dropout.draw(group)), slot);
  Extremes e;
  if (exists) e.add(x);
  const Range r = extremes_of_block(e).range(code.header);
  if (own == 0) store_range(a.to.headers, code.header, blocks - 1, r);
  const bool drawn = code.plane.bytes != nullptr && off_weight(side::encoder_key(code, a.c.seed, false), blocks - 1, blocks) > 0;
  const float y = fmaf(gamma, x, beta);
  const Channel c = {threshold_of(gamma, beta), gamma, beta, 0.0f};
  uint32_t eight = 0, off_bits = 0;
  if (exists) {
    eight = (is_poisoned(r) ? poisoned_code_of(x, c, code.table) : side_code_of(x, c, r, code.table, noise)) << (bits * slot);
    if (drawn) off_bits = (off_bit_of(x, c, r, noise) ? 1u : 0u) << slot;
    write_any(a.pass.z, a.pass.type, whole + own, chain_output(y, kept ? (y > 0.0f ? dropout.on : dropout.off) : 0.0f));
  }
#pragma unroll
  for (int o = 1; o < 8; o *= 2) eight |= __shfl_xor_sync(~0u, eight, o), off_bits |= __shfl_xor_sync(~0u, off_bits, o);
  if (slot != 0 || own >= kBlock) return;
  if (drawn) code.plane.bytes[kOffKeyBytes + (blocks - 1) / kOffGroup * (kBlock / 8) + own / 8] = static_cast<uint8_t>(off_bits);
  const int count = count_of(group, n);
  if (count == 0) return;
  if (bits == 2)
    store_codes<2>(a.to.codes, group, eight, count);
  else
    store_codes<3>(a.to.codes, group, eight, count);
}

/// The channel table with its off means. The last thread block codes the tail.
__global__ void __launch_bounds__(kFinishThreads) finish_encode(const __grid_constant__ Forward a, int64_t entries) {
  if (blockIdx.x + 1 == gridDim.x) return finish_tail(a);
  const FinishShare share;
  const int64_t channels = a.c.side.channels, n = a.c.side.grid.values, whole = n / kBlock * kBlock, c = share.channel;
  Channel own = {};
  double sums[2] = {};
  if (c < channels) {
    own = {0.0f, a.pass.with.gamma[c], a.pass.with.beta[c], 0.0f};
    share.add_pairs(a.partial, entries, channels, sums);
    own.threshold = threshold_of(own.gamma, own.beta);
    for (int64_t i = first_of_channel(whole, c, channels) + share.own * channels; i < n; i += share.all * channels) {
      const float v = flush(a.tail[i - whole]);
      if (!is_on(v, own)) sums[0] += v, sums[1] += 1;
    }
  }
  if (!share.add_up(sums) || c >= channels) return;
  if (a.c.side.table.off == 1) own.off_mean = side::mean_of(sums);
  a.to.channels[c] = own;
}

}  // namespace
}  // namespace epilogue

void side::encode_one_sided(const Args& from, DType type, unsigned blocks, StreamHandle stream) {
  epilogue::Forward a = {{from.code, {}, nullptr, from.seed},
                         {from.x, type, {}, nullptr},
                         {},
                         {from.codes, from.headers, from.channels},
                         from.partial,
                         nullptr,
                         {from.code.table, {}},
                         true};
  with_type(type, [&](auto t) {
    launch_kernel("side_encode", stream, {blocks, epilogue::kCodeThreads}, epilogue::encode_blocks<t(), epilogue::Serves::codes>, a);
  });
}

using namespace epilogue;

bool norm_act_fits(const SideCode& code) {
  return code.table.side == Side::one_sided && (code.table.bits == 2 || code.table.bits == 3) && code.channels > 0 &&
         (code.inner == 1 || code.channels == 1) && code.grid.values % code.channels == 0 &&
         side::fixed_blocks(code, true, kBlock, kManyBlocks) > 0;
}

int64_t norm_act_scratch_bytes() {
  constexpr int64_t kTail = kBlock * sizeof(float);
  static_assert(kCodeBlocks >= kManyBlocks);
  return kCodeBlocks * kBlock * static_cast<int64_t>(sizeof(float2)) + kTail;
}

void norm_encode(const NormActCode& c, const NormPass& pass, void* scratch, StreamHandle stream) {
  constexpr const char* op = "norm_act_encode";
  check_fit(c, op);
  if (c.side.grid.values == 0) return;
  float2* partial = static_cast<float2*>(scratch);
  const bool aligned = is_aligned(pass.x) && is_aligned(pass.z);
  const Forward a = {c,
                     pass,
                     layout_of(c.side.grid, c.side.table.bits, c.side.header, 0, c.side.channels),
                     parts_of(c.side, c.bytes),
                     partial,
                     reinterpret_cast<float*>(partial + kCodeBlocks * kBlock),
                     {c.side.table, c.extra},
                     aligned};
  const unsigned grid = grid_size(side::fixed_blocks(c.side, true, kBlock, kCodeBlocks));
  const bool narrow = aligned && c.side.table.bits == 2 && c.extra.slots == nullptr && c.side.grid.values <= kShortValues;
  with_type(pass.type, [&](auto t) {
    const auto kernel = !narrow                                ? encode_blocks<t(), Serves::any>
                        : is_plain(c.chain)                    ? encode_blocks<t(), Serves::plain>
                        : is_relu(c.chain, c.side.grid.values) ? encode_blocks<t(), Serves::relu>
                                                               : encode_blocks<t(), Serves::dropped>;
    launch_kernel(op, stream, {grid, kCodeThreads}, kernel, a);
  });
  LaunchSize finish = finish_size(c.side.channels, grid * kBlock / c.side.channels);
  finish.blocks.x += 1;
  launch_kernel(op, stream, finish, finish_encode, a, grid * kBlock);
}

}  // namespace satchel::cuda
