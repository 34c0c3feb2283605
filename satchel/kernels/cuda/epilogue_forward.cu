// Forward of norms in one pass, with block codes: x̂ = (x − mean)·rstd, y = γ·x̂ + β (+ skip), z, and what backward reads. All arithmetic is
// in fp32, activations as they stand in memory. A block of values stays in a warp's registers from its only read to its only write.
//
//   norm_add, norm_image   encode_steps: a block of 256 values a step: the code of x̂, and ReLU's mask, the ReLU form of z, or neither
//   norm_block           encode_stretches: 1024 values at a time in blocks of 128 to 1024: the code of x, masks of ReLU and dropout
#include "satchel/kernels/cuda/one_sided.cuh"

namespace satchel::cuda {
namespace epilogue {
namespace {

/// What becomes of y: z = y, relu(y) with its mask, or with a skip; with a skip and z in its ReLU form, of 2 bits with noise drawn, or as
/// Wide has it.
enum class End { norm, relu, add, form, wide_form };
constexpr bool adds(End end) { return end >= End::add; }
constexpr bool has_form(End end) { return end >= End::form; }

struct Forward {
  NormPass pass;
  int64_t values, channels;
  // x̂
  Places places;
  LevelTable levels;
  HeaderType header;
  Rounding rounding;
  void* headers;
  const uint64_t* seed;
  const F32Header* ranges = nullptr;  // null: taken in passing
  // z
  uint8_t* on = nullptr;
  F32Header* z_ranges = nullptr;
  NormAddCode add = {};
  Wide wide = {{}, {}};
  uint32_t first = 0, last = static_cast<uint32_t>(values / kBlock);  // whole blocks that are coded
  bool broken = values % kBlock != 0;                                 // … and the last, broken one
};

/// What a warp needs at every step.
struct Warp {
  const Forward& a;
  const NormTables<>& table;
  int lane;
  const RoundKeys &norm_seed, &sum_seed;
};

/// Noise of a group; `draws`: it is known to be drawn.
template <bool draws>
__device__ inline Words noise_at(const RoundKeys& seed, Rounding rounding, uint64_t group) {
  return draws ? rounding_noise(seed, group) : group_noise(seed, rounding, group);
}

/// Extremes over the warp, of the first `count` of eight.
template <bool whole>
__device__ inline Extremes extremes_of(const float (&v)[8], int count) {
  Extremes e;
  if constexpr (whole) {
    e = Extremes::of8(v);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j < count) e.add(v[j]);
    }
  }
  e.reduce_warp();
  return e;
}

/// The extremes of a warp's block as they stand in memory: rounding keeps the order. Every thread of the warp must call this.
template <DType type>
__device__ inline void put_range(F32Header* ranges, int64_t block, int lane, const float (&v)[8]) {
  Extremes e = extremes_of<true>(v, 8);
  if (lane != 0) return;
  if constexpr (type != DType::f32) {
    const uint32_t pair = half_pair<type>(e.least, e.most);
    e.least = low_half<type>(pair), e.most = high_half<type>(pair);
  }
  const Range r = e.range(HeaderType::f32);
  ranges[block] = {r.low, r.high};
}

/// Codes of eight values of which `count` exist.
template <int bits, bool whole>
__device__ inline void put8(uint8_t* codes, int64_t group, uint64_t eight, int count) {
  if constexpr (whole) return store_codes<bits>(codes, group, eight, 8);
  if (count > 0) store_codes<bits>(codes, group, eight & ((uint64_t{1} << (bits * count)) - 1), count);
}

/// What pass8() makes of y: y itself, z without an activation, or z of a ReLU.
enum class Pass { affine, chain, relu };

/// z, not yet rounded, in the place of a lane's eight x̂ (`of_x`: of x), and ReLU's bits. `add` gives y with value j's skip; what `kept` has
/// no bit for is dropped.
template <Pass pass, bool of_x, int pieces, class F>
__device__ inline uint32_t pass8(const NormTables<pieces>& table, int lane, int piece, const F& add, uint32_t kept, float scale,
                                 float (&v)[8]) {
  uint32_t on = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float mean[4], rstd[4], gamma[4], beta[4];
    if constexpr (of_x) table.mean.get_half(lane, half, mean, piece), table.rstd.get_half(lane, half, rstd, piece);
    table.gamma.get_half(lane, half, gamma, piece);
    table.beta.get_half(lane, half, beta, piece);
#pragma unroll
    for (int q = 0, j = 4 * half; q < 4; ++q, ++j) {
      if constexpr (of_x) v[j] = (v[j] - mean[q]) * rstd[q];
      const float y = add(fmaf(gamma[q], v[j], beta[q]), j);
      const bool passes = pass != Pass::relu || y > 0.0f;
      on |= (passes ? 1u : 0u) << j;
      v[j] = pass == Pass::affine ? y : chain_output(y, passes && (kept >> j & 1) != 0 ? scale : 0.0f);
    }
  }
  return on;
}

/// The code of a block of x̂ with these extremes, in bits and levels as they come.
__device__ inline void put_norm(const Warp& w, const Places::Step& at, uint32_t block, const Extremes& e, const float (&hat)[8],
                                const Words& noise, int count) {
  const BlockRuler ruler = block_ruler(at.bits, e, w.a.header);
  if (w.lane == 0) store_header(w.a.headers, w.a.header, block, ruler.header);
  const uint64_t eight = encode8(at.bits, w.a.levels.even, hat, ruler, w.a.levels, noise);
  if (count > 0) store_codes(at.bits, at.codes, w.lane, eight & ~uint64_t{0} >> (64 - at.bits * count), count);
}

/// … in these bits of even levels, if the block is a plain one.
template <int bits>
__device__ inline bool put_plain_norm(const Warp& w, const Places::Step& at, uint32_t block, const Extremes& e, const float (&hat)[8],
                                      const Words& noise) {
  if (at.bits != bits) return false;
  const BlockRuler ruler = plain_ruler(bits, e, w.a.header);
  if (!ruler.plain) return false;
  if (w.lane == 0) store_header(w.a.headers, w.a.header, block, ruler.header);
  store_codes<bits>(at.codes, w.lane, encode8<bits, true>(hat, {ruler.header, ruler.ruler, true}, w.a.levels, noise), 8);
  return true;
}

/// side_code_of() of core/side.h for the ReLU form: threshold 0 and code 0 for 0, so that all values of a block share their marks.
template <int bits>
struct Marks {
  static constexpr int kOn = (1 << bits) - 1;
  float from, mark[kOn - 1], gap[kOn - 1];

  __device__ inline Marks(const side::Bounds& b, const SideTable& t) : from(fminf(fmaxf(0.0f, b.low), b.high)) {
    const float length = b.high - from;
    const bool is_long = length > b.usual;
    float at = 0.0f;
#pragma unroll
    for (int i = 1; i < kOn; ++i) {
      const float next = i + 1 == kOn ? length : (is_long ? t.on_long[i] : t.on_short[i]) * length;  // the last level is 1
      mark[i - 1] = at;
      gap[i - 1] = next - at;
      at = next;
    }
  }

  __device__ inline uint32_t code_of(float z, float u) const {
    const float v = flush_signed(z), d = fabsf(v - from);
    uint32_t code = 1;
#pragma unroll
    for (int i = 0; i < kOn - 1; ++i) code = d > fmaf(u, gap[i], mark[i]) ? static_cast<uint32_t>(i + 2) : code;
    return v > 0.0f ? code : 0u;
  }
};

/// … for 2 bits where a block's least is 0 and its most, `high`, at least 2^-60: the side is long, marks start at 0, and a subnormal z lies
/// below all but the first. For each mark that z passes its bit is added to a float, whose lower bits from 2^23 on are an integer's.
__device__ inline uint32_t form8_from_0(const float (&z)[8], float high, const SideTable& t, const Words& noise) {
  const float middle = t.on_long[1] * high, rest = high - middle, subnormal = __uint_as_float(0x007fffffu);
  float codes[2] = {0x1p23f, 0.0f};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float u = side::uniform_at(noise, j), unit = static_cast<float>(1 << (2 * j));
    codes[j / 4] = fmaf(one_above(z[j], subnormal), unit, codes[j / 4]);
    codes[j / 4] = fmaf(one_above(z[j], u * middle), unit, codes[j / 4]);
    codes[j / 4] = fmaf(one_above(z[j], fmaf(u, rest, middle)), unit, codes[j / 4]);
  }
  return __float_as_uint(codes[0] + codes[1]) & 0xffffu;
}

template <int bits>
__device__ inline uint32_t form8(const float (&z)[8], Range r, const SideTable& t, const Words& noise) {
  uint32_t eight = 0;
  if (is_poisoned(r)) {
#pragma unroll
    for (int j = 0; j < 8; ++j) eight |= side::poisoned_code(1.0f, 0.0f, z[j], 1) << (bits * j);
  } else {
    if constexpr (bits == 2) {
      if (r.low == 0.0f && r.high >= 0x1p-60f) return form8_from_0(z, r.high, t, noise);
    }
    const Marks<bits> marks(side::Bounds(r), t);
#pragma unroll
    for (int j = 0; j < 8; ++j) eight |= marks.code_of(z[j], side::uniform_at(noise, j)) << (bits * j);
  }
  return eight;
}

/// The extremes of a block of relu's results in bf16, whose numbers are those of a header of bf16 or f32 already, and whose bits are in
/// order: as bits of floats, −0 as 0. Every thread of the warp must call this.
__device__ inline uint2 extremes_of_relu(const Eight<DType::bf16>& z) {
  PairExtremes<DType::bf16> e = {z.w[0], z.w[0]};
#pragma unroll
  for (int k = 1; k < 4; ++k) e.add(z.w[k]);
  const uint32_t low = e.least & 0x7fff7fffu, high = e.most & 0x7fff7fffu;
  return make_uint2(__reduce_min_sync(~0u, min(low << 16, low & 0x7fff0000u)), __reduce_max_sync(~0u, max(high << 16, high & 0x7fff0000u)));
}

/// The ReLU form of a block of z, which stands in memory as `out`.
template <DType type, bool wide, bool whole>
__device__ inline void put_form(const Warp& w, uint32_t block, uint64_t group, const Eight<type>& out, int count) {
  const SideCode& sum = w.a.add.sum;
  uint8_t* codes = w.a.add.sum_at.codes;
  const Words noise = noise_at<!wide>(w.sum_seed, sum.rounding, group);
  float z[8];
  to_floats(out, z);
  Range r;
  if constexpr (whole && type == DType::bf16) {
    const uint2 e = extremes_of_relu(out);
    constexpr uint32_t kLeast = 0x21800000, kEnd = 0x7f800000;  // 2^-60 and infinity
    if (!wide && sum.header == HeaderType::bf16 && e.x < 0x00800000u && e.y - kLeast < kEnd - kLeast) {
      if (w.lane == 0) static_cast<uint32_t*>(w.a.add.sum_at.headers)[block] = e.y;  // low = 0 is the header's lower half
      return store_codes<2>(codes, static_cast<int64_t>(group), form8_from_0(z, __uint_as_float(e.y), sum.table, noise), 8);
    }
    r = {flush(__uint_as_float(e.x)), flush(__uint_as_float(e.y))};
    if (e.y >= kEnd) r = {0.0f, __uint_as_float(kCanonicalNaN)};
  } else {
    r = extremes_of<whole>(z, count).range(sum.header);
  }
  if (w.lane == 0) store_range(w.a.add.sum_at.headers, sum.header, block, r);
  if (wide && w.a.wide.slot(block) >= 0) {
    const uint32_t eight = form8<3>(z, r, w.a.wide.table, noise);
    if (w.a.wide.streams()) return put8<3, whole>(codes, static_cast<int64_t>(group), eight, count);
    Codes c;
    c.three = true;
    c.split(eight);
    return w.a.wide.store(codes, static_cast<int64_t>(group), block, c);
  }
  put8<2, whole>(codes, static_cast<int64_t>(group), form8<2>(z, r, sum.table, noise), count);
}

/// One block of a warp, its values read already; once they are used `read_next` may overwrite them. `optimal2`: x̂ in 2 bits of uneven
/// levels. `whole`: all values exist.
template <DType type, End end, bool optimal2, bool whole, class F>
__device__ inline void encode_step(const Warp& w, uint32_t block, const Eight<type>& x, const Eight<type>& skip, const F& read_next) {
  const Forward& a = w.a;
  const uint64_t group = static_cast<uint64_t>(block) * 32 + static_cast<uint32_t>(w.lane);
  const int count = whole ? 8 : count_of(static_cast<int64_t>(group), a.values);
  Extremes e;
  if (!has_form(end) && a.ranges != nullptr) {
    const float2 r = __ldg(reinterpret_cast<const float2*>(a.ranges) + block);
    e = {r.x, r.y};
  }
  float hat[8], z[8];
  w.table.normalise(w.lane, x, hat);
#pragma unroll
  for (int j = 0; j < 8; ++j) z[j] = hat[j];
  const auto add = [&](float y, int j) { return adds(end) ? y + skip[j] : y; };
  constexpr Pass pass = has_form(end) ? Pass::affine : end == End::norm ? Pass::chain : Pass::relu;
  const uint32_t on = pass8<pass, false>(w.table, w.lane, 0, add, 0xff, 1.0f, z);
  read_next();
  Eight<type> out;
  out.template set<has_form(end)>(z);
  auto* to = static_cast<typename Eight<type>::Raw*>(a.pass.z) + group * 8;
  if (whole || count == 8) {
    out.store(to);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j < count) to[j] = out.raw(j);
    }
  }
  if constexpr (!has_form(end)) {
    if constexpr (end != End::norm) a.on[group] = static_cast<uint8_t>(on);
    if (a.z_ranges != nullptr) put_range<type>(a.z_ranges, block, w.lane, z);
  }
  if (!(optimal2 && whole) && (has_form(end) || a.ranges == nullptr)) e = extremes_of<whole>(hat, count);
  const Words noise = noise_at<end == End::form>(w.norm_seed, a.rounding, group);
  if constexpr (optimal2 && whole)
    put_block<2, false>(a.levels, a.header, a.headers, block, a.places.first + static_cast<uint64_t>(block) * 64, w.lane, true, hat, noise);
  else {
    const Places::Step at = a.places.of(block);
    bool is_put = false;
    if constexpr (!has_form(end) && whole) {
      is_put = put_plain_norm<1>(w, at, block, e, hat, noise) || put_plain_norm<2>(w, at, block, e, hat, noise) ||
               put_plain_norm<3>(w, at, block, e, hat, noise) || put_plain_norm<4>(w, at, block, e, hat, noise);
    }
    if (!is_put) put_norm(w, at, block, e, hat, noise, count);
  }
  if constexpr (has_form(end)) put_form<type, end == End::wide_form, whole>(w, block, group, out, count);
}

/// Zeros between codes and headers.
__device__ inline void zero_gap(const CodeParts& at, int64_t values, int bits) {
  uint8_t* byte = at.codes + code_bytes(values, bits) + threadIdx.x;
  if (byte < static_cast<uint8_t*>(at.headers)) *byte = 0;
}

/// What a thread block of encode_steps() needs. The norm alone takes fewer registers.
template <End end, bool optimal2>
constexpr BlockNeeds kStepWalk = optimal2 && !adds(end) ? kManyWalk : kFewWalk;

template <DType type, End end, bool optimal2>
__global__ void __launch_bounds__(kWarps * 32, kStepWalk<end, optimal2>.each) encode_steps(const __grid_constant__ Forward a) {
  __shared__ NormTables<> table;
  const Walk walk(a.first, a.last);
  table.fill(a.pass.with, a.channels, (static_cast<int64_t>(a.first) + blockIdx.x) * kBlock);
  if ((has_form(end) || optimal2) && blockIdx.x == 0) zero_gap(a.add.norm_at, a.values, a.add.norm.levels.bits);
  if (has_form(end) && blockIdx.x == 0) zero_gap(a.add.sum_at, a.values, a.add.sum.table.bits);
  __shared__ RoundKeys norm_seed, sum_seed;
  norm_seed.fill(a.seed);
  if constexpr (has_form(end)) sum_seed.fill(a.add.sum_seed);
  const Warp w = {a, table, walk.lane, norm_seed, sum_seed};
  __syncthreads();
  Eight<type> x, skip;  // the next step's values, on their way while this one is coded
  using Raw = typename Eight<type>::Raw;
  const Raw* from = static_cast<const Raw*>(a.pass.x) + walk.lane * 8;
  const Raw* and_from = adds(end) ? static_cast<const Raw*>(a.pass.skip) + walk.lane * 8 : nullptr;
  if constexpr (type != DType::f32 && end == End::form) from = held(from), and_from = held(and_from);  // fp32 has no register left
  // measure_steps(), if it ran, has left the last steps in the cache.
  const bool backwards = !has_form(end) && !optimal2 && a.ranges != nullptr;
  const auto step = [&](int k) { return walk.step(backwards ? walk.count - 1 - k : k); };
  const auto read = [&](int k) {
    const uint64_t first = static_cast<uint64_t>(step(k)) * kBlock;
    x = read8<type, true>(from + first, 0);
    if constexpr (adds(end)) skip = read8<type, true>(and_from + first, 0);
  };
  if (walk.count > 0) read(0);
  for (int k = 0; k < walk.count; ++k) {
    encode_step<type, end, optimal2, true>(w, step(k), x, skip, [&] {
      if (k + 1 < walk.count) read(k + 1);
    });
  }
  if constexpr (has_form(end) || optimal2) {  // one warp of all meets the last, broken block
    const uint32_t block = walk.step(walk.count);
    if (!a.broken || block != a.last) return;
    const int64_t first = (static_cast<int64_t>(block) * 32 + walk.lane) * 8;
    x = read8_until<type, true>(a.pass.x, first, a.values);
    if constexpr (adds(end)) skip = read8_until<type, true>(a.pass.skip, first, a.values);
    encode_step<type, end, optimal2, false>(w, block, x, skip, [] {});
  }
}

/// Extremes of every block of x̂.
template <DType type>
__global__ void __launch_bounds__(kWarps * 32, 4)
    measure_steps(const __grid_constant__ NormPass pass, int64_t values, int64_t channels, F32Header* ranges) {
  constexpr int kTurns = 4;  // steps whose loads are in flight together
  __shared__ NormTables<> table;
  const Walk walk(0, steps_of(values));
  table.fill({pass.with.mean, pass.with.rstd, nullptr, nullptr}, channels, blockIdx.x * kBlock);
  __syncthreads();
  for (int k = 0; k < walk.count; k += kTurns) {
    Eight<type> v[kTurns];
#pragma unroll
    for (int u = 0; u < kTurns; ++u) {
      if (k + u < walk.count) v[u] = read8<type, true>(pass.x, (static_cast<int64_t>(walk.step(k + u)) * 32 + walk.lane) * 8);
    }
#pragma unroll
    for (int u = 0; u < kTurns; ++u) {
      if (k + u >= walk.count) break;  // the whole warp
      float hat[8];
      table.normalise(walk.lane, v[u], hat);
      put_range<DType::f32>(ranges, walk.step(k + u), walk.lane, hat);
    }
  }
}

// ---- norm_block ------------------------------------------------------------------------------------------------------

constexpr int kPieces = 4;  // steps of a warp at once: its stretch is the longest block
constexpr int64_t kStretch = kPieces * kBlock;

template <DType type, int block>
__global__ void __launch_bounds__(kWarps * 32, 3)
    encode_stretches(const __grid_constant__ NormBlockCode c, const __grid_constant__ NormPass pass) {
  constexpr int kEach = block <= kBlock ? 1 : static_cast<int>(block / kBlock);  // pieces that share a block
  constexpr int kLanes = block < kBlock ? static_cast<int>(block / 8) : 32;      // lanes that share one
  __shared__ NormTables<kPieces> table;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const BlockCode& code = c.code;
  const int64_t n = code.grid.values, step = static_cast<int64_t>(gridDim.x) * kWarps;
  table.fill(pass.with, c.chain.channels, blockIdx.x * kStretch);
  const UniformSeed seed(c.code_seed);
  const Dropout dropout(c.chain, c.drop_seed);
  if (blockIdx.x == 0) zero_gap(c.at, n, 2);
  __syncthreads();
  // One stretch of a warp. `whole`: all its values exist; else groups may be broken or missing, and so may blocks: that is the last one
  // alone, which takes loops.
  const auto encode = [&](int64_t stretch, auto whole) {
    [[maybe_unused]] constexpr int kUnrolled = whole() ? kPieces : 1;
    const int64_t first = stretch * kPieces * 32 + lane;
    const auto count_at = [&](int piece) { return whole() ? 8 : count_of(first + piece * 32, n); };
    float v[kPieces][8];
#pragma unroll(kUnrolled)
    for (int p = 0; p < kPieces; ++p) {
      const int64_t i = (first + p * 32) * 8;
      if (whole() || i + 8 <= n) {
        to_floats(read8<type, true>(pass.x, i), v[p]);
      } else if (i < n) {  // what is missing repeats what exists, which leaves the extremes alone
#pragma unroll
        for (int j = 0; j < 8; ++j) v[p][j] = read1<type>(pass.x, j < count_at(p) ? i + j : i);
      }
    }
#pragma unroll(kUnrolled)
    for (int head = 0; head < kPieces; head += kEach) {
      Extremes e;
#pragma unroll(kUnrolled)
      for (int p = head; p < head + kEach; ++p) {
        if (whole() || count_at(p) > 0) e.add8(v[p]);
      }
      e.reduce(kLanes);
      const BlockRuler ruler = block_ruler(2, e, code.header);
      const int64_t begin = (first + head * 32) * 8;  // of the block, for the lane that starts it
      if (lane % kLanes == 0 && (whole() || begin < n)) store_header(c.at.headers, code.header, begin / block, ruler.header);
#pragma unroll(kUnrolled)
      for (int p = head; p < head + kEach; ++p) {
        const int count = count_at(p);
        if (!whole() && count == 0) continue;
        const int64_t group = first + p * 32;
        const uint32_t exist = (1u << count) - 1, kept = dropout.kept(group);
        const Words noise = group_noise(seed, code.rounding, group);
        const uint64_t eight = !whole() || !ruler.plain ? encode8(2, code.levels.even, v[p], ruler, code.levels, noise)
                               : code.levels.even       ? encode8_by_bytes<2, true>(v[p], ruler, code.levels, noise)
                                                        : encode8_by_bytes<2, false>(v[p], ruler, code.levels, noise);
        put8<2, whole()>(c.at.codes, group, eight, count);
        const uint32_t on = pass8<Pass::relu, true>(
            table, lane, p, [](float y, int) { return y; }, kept, dropout.on, v[p]);
        c.on[group] = static_cast<uint8_t>(on & exist);
        if (c.kept != nullptr) c.kept[group] = static_cast<uint8_t>(kept & exist);
        write_some<type>(pass.z, group * 8, count, true, v[p]);
      }
    }
  };
  for (int64_t s = blockIdx.x + warp * static_cast<int64_t>(gridDim.x); s * kStretch < n; s += step) {
    (s + 1) * kStretch <= n ? encode(s, std::true_type()) : encode(s, std::false_type());
  }
}

// ---- launch ----------------------------------------------------------------------------------------------------------

template <End end, bool optimal2>
void launch(const char* op, const Forward& a, StreamHandle stream) {
  const int64_t values = a.values - static_cast<int64_t>(a.first) * kBlock;
  const unsigned grid = grid_size(free_walk_blocks(values, a.channels, kStepWalk<end, optimal2>));
  with_type(a.pass.type, [&](auto t) { launch_kernel(op, stream, {grid}, encode_steps<t(), end, optimal2>, a); });
}

/// May a norm of so many values and channels be walked over?
bool fits_walk(int64_t values, int64_t channels) {
  return values > 0 && values < int64_t{1} << 38 && channels > 0 && values % channels == 0 && walk_blocks(values, channels, kFewBlocks) > 0;
}

}  // namespace

void check_fit(const NormAddCode& c, const char* op) {
  if (!norm_add_fits(c)) fail(op, "norm_add_fits must be true of the codes");
  if (c.extra.slots != nullptr) check_extra_bit(c.sum, c.extra, op);
  check_aligned({c.norm_at.codes, c.norm_at.headers, c.sum_at.codes, c.sum_at.headers}, op);
}

void check_fit(const NormBlockCode& c, const char* op) {
  if (!norm_block_fits(c.code, c.chain.channels)) fail(op, "norm_block_fits must be true of code and channels");
  check_aligned({c.at.codes, c.at.headers}, op);
}

void check_fit(const NormImageCode& c, const char* op) {
  if (!norm_image_fits(c)) fail(op, "norm_image_fits must be true of the code");
  if ((c.bits == 0) != (c.entries != nullptr)) fail(op, "bits or entries must be given");
  check_aligned({c.at.codes, c.at.headers}, op);
}

}  // namespace epilogue

using namespace epilogue;

bool norm_add_fits(const NormAddCode& c) {
  const int bits = c.norm.levels.bits;
  const SideTable& t = c.sum.table;
  if (c.alone) return bits == 2 && !c.norm.levels.even && is_straight_256(c.norm.grid) && fits_walk(c.norm.grid.values, c.channels);
  return bits >= 1 && bits <= 4 && t.side == Side::relu && (t.bits == 2 || t.bits == 3) && t.off == 1 && t.on == (1 << t.bits) - 1 &&
         is_straight_256(c.norm.grid) && is_straight_256(c.sum.grid) && c.norm.grid.values == c.sum.grid.values &&
         fits_walk(c.norm.grid.values, c.channels);
}

bool norm_block_fits(const BlockCode& code, int64_t channels) {
  const int64_t block = code.grid.block;
  return (block == 128 || block == 256 || block == 512 || block == 1024) && code.levels.bits == 2 && code.grid.is_straight() &&
         fits_walk(code.grid.values, channels);
}

bool norm_image_fits(const NormImageCode& c) {
  return c.block == kBlock && c.bits >= 0 && c.bits <= 8 && c.samples > 0 && c.values > 0 && c.values % kBlock == 0 &&
         c.samples <= (int64_t{1} << 38) / c.values && c.channels > 0 && c.values % c.channels == 0 && fits_walk(values_of(c), c.channels);
}

void norm_encode(const NormAddCode& code, const NormPass& pass, StreamHandle stream) {
  constexpr const char* op = "norm_add_encode";
  check_fit(code, op);
  check_aligned({pass.x, pass.skip, pass.z}, op);
  const BlockCode& norm = code.norm;
  Forward a = {pass,          norm.grid.values,     code.channels, {code.norm_at.codes, norm.levels.bits}, norm.levels, norm.header,
               norm.rounding, code.norm_at.headers, code.norm_seed};
  a.add = code;
  a.wide = {code.sum.table, code.extra};
  if (pass.rows > 0) {  // values are counted from the first of all rows on
    const int64_t begin = pass.first_row * code.channels, end = begin + pass.rows * code.channels;
    if (begin % kBlock != 0 || end > a.values || (end < a.values && end % kBlock != 0))
      fail(op, "rows must be whole blocks", pass.first_row);
    a.pass.x = static_cast<const uint8_t*>(pass.x) - begin * size_of(pass.type);
    a.first = static_cast<uint32_t>(begin / kBlock);
    a.last = static_cast<uint32_t>(end / kBlock);
    a.broken = end % kBlock != 0;
  }
  if (code.alone)
    launch<End::norm, true>(op, a, stream);
  else if (norm.levels.bits != 2 || norm.levels.even)
    launch<End::wide_form, false>(op, a, stream);
  else if (code.sum.table.bits == 3 || code.extra.slots != nullptr || norm.rounding == Rounding::nearest ||
           code.sum.rounding == Rounding::nearest)
    launch<End::wide_form, true>(op, a, stream);
  else
    launch<End::form, true>(op, a, stream);
}

void norm_encode(const NormImageCode& code, const NormPass& pass, const F32Header* ranges, F32Header* z_ranges, StreamHandle stream) {
  constexpr const char* op = "norm_image_encode";
  check_fit(code, op);
  check_aligned({pass.x, pass.skip, pass.z}, op);
  if (code.bits == 0 && ranges == nullptr) fail(op, "bits per sample need the blocks' extremes");
  if (pass.skip != nullptr && code.on == nullptr) fail(op, "a sum must have its ReLU");
  const Forward a = {pass,          values_of(code), code.channels, Places(code), {},      code.header,
                     code.rounding, code.at.headers, code.seed,     ranges,       code.on, z_ranges};
  if (pass.skip != nullptr)
    launch<End::add, false>(op, a, stream);
  else if (code.on != nullptr)
    launch<End::relu, false>(op, a, stream);
  else
    launch<End::norm, false>(op, a, stream);
}

void norm_image_measure(const NormImageCode& code, const NormPass& pass, F32Header* ranges, StreamHandle stream) {
  constexpr const char* op = "norm_image_measure";
  check_fit(code, op);
  check_aligned({pass.x}, op);
  const unsigned grid = grid_size(free_walk_blocks(values_of(code), code.channels, kManyWalk));
  with_type(pass.type,
            [&](auto t) { launch_kernel(op, stream, {grid}, measure_steps<t()>, pass, values_of(code), code.channels, ranges); });
}

void norm_encode(const NormBlockCode& code, const NormPass& pass, StreamHandle stream) {
  constexpr const char* op = "norm_block_encode";
  check_fit(code, op);
  check_aligned({pass.x, pass.z}, op);
  const unsigned grid = grid_size(free_walk_blocks(code.code.grid.values, code.chain.channels, kFewWalk, kStretch));
  const int64_t block = code.code.grid.block;
  with_type(pass.type, [&](auto t) {
    const auto kernel = block == 128   ? encode_stretches<t(), 128>
                        : block == 256 ? encode_stretches<t(), 256>
                        : block == 512 ? encode_stretches<t(), 512>
                                       : encode_stretches<t(), 1024>;
    launch_kernel(op, stream, {grid}, kernel, code, pass);
  });
}

}  // namespace satchel::cuda
