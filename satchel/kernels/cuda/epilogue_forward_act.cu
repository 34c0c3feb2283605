// Forward in one pass: x̂ = (h − mean)·rstd, its one-sided code (the bytes of side_encode.cu) and z = kept·act(γ·x̂ + β)·scale (the
// bits of chain.cu); all arithmetic in fp32, h and z as they stand in memory. A block of values stays in a warp's registers from its only
// read to its only write.
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

/// Of a warp's channels; y is not −∞ where they cover a block of values from −2^60 on.
__device__ inline side::Usual usual_of(const ForwardTables& table, int lane) {
  float gamma[8], beta[8], threshold[8];
  table.gamma.get(lane, gamma);
  table.beta.get(lane, beta);
  table.threshold.get(lane, threshold);
  side::Usual usual;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    usual.add(gamma[j], threshold[j]);
    usual.rising = usual.rising && gamma[j] <= 0x1p60f && fabsf(beta[j]) <= 0x1p60f;
  }
  usual.reduce_warp();
  return usual;
}

/// Four of a thread's channels.
struct Gates {
  float threshold[4], gamma[4], beta[4];

  __device__ inline Gates(const ForwardTables& table, int lane, int half) {
    table.threshold.get_half(lane, half, threshold);
    table.gamma.get_half(lane, half, gamma);
    table.beta.get_half(lane, half, beta);
  }
};

/// side_code_of() of core/side.h for one off code and three on codes: values 4·half … 4·half + 3 of eight.
template <bool usual, int half>
__device__ inline void encode4(const float (&x)[8], const Gates& g, const side::Bounds& b, const SideTable& t, const Words& noise,
                               uint32_t& eight, side::OffSums& s) {
#pragma unroll
  for (int k = 0, j = 4 * half; k < 4; ++k, ++j) {
    const uint32_t unit = 1u << (2 * j);
    const float v = flush_signed(x[j]), u = side::uniform_at(noise, j);
    const side::Reach r = usual ? side::Reach{g.threshold[k], b.high} : side::reach_of({g.threshold[k], g.gamma[k], 0.0f, 0.0f}, b, true);
    const float d = fabsf(v - r.from), length = fabsf(r.far - r.from);
    const float middle = (!usual && length > b.usual ? t.on_long[1] : t.on_short[1]) * length;
    uint32_t code = d > u * middle ? 2 * unit : unit;
    code = d > fmaf(u, length - middle, middle) ? 3 * unit : code;
    side::put_or_sum(g.gamma[k], g.beta[k], v, code, eight, s.sum[j], s.count[j]);
  }
}

/// … for two off codes and six on codes.
template <bool usual, int half>
__device__ inline void encode4_wide(const float (&x)[8], const Gates& g, const side::Bounds& b, const SideTable& t, const Words& noise,
                                    Codes& c, side::OffSums& s) {
#pragma unroll
  for (int k = 0, j = 4 * half; k < 4; ++k, ++j) {
    const float v = flush_signed(x[j]), u = side::uniform_at(noise, j);
    const bool on = fmaf(g.gamma[k], v, g.beta[k]) > 0.0f;
    const side::Reach r =
        usual ? side::Reach{g.threshold[k], on ? b.high : b.low} : side::reach_of({g.threshold[k], g.gamma[k], 0.0f, 0.0f}, b, on);
    const float d = fabsf(v - r.from), length = fabsf(r.far - r.from);
    const bool is_long = length > b.usual;
    const uint32_t passing = side::level_code<6>(2, 1, d, length, is_long, t.on_short, t.on_long, u);
    const uint32_t blocked = side::level_code<2>(1, ~0u, d, length, is_long, t.off_short, t.off_long, u);
    c.put(j, on ? passing : blocked);
    s.sum[j] += on ? 0.0f : v;
    s.count[j] += on ? 0.0f : 1.0f;
  }
}

/// The same four: their codes, then z in the place of x; y in its place where ReLU is left to who writes it.
template <Serves serves, bool usual, int half>
__device__ inline void code_and_pass(const ForwardTables& table, int lane, const side::Bounds& b, const SideTable& t, const Wide& w,
                                     const Words& noise, const Dropout& dropout, const Words& kept, float (&x)[8], Codes& c,
                                     side::OffSums& s) {
  const Gates g(table, lane, half);
  if (serves == Serves::any && c.three)
    encode4_wide<usual, half>(x, g, b, w.table, noise, c, s);
  else
    encode4<usual, half>(x, g, b, t, noise, c.two, s);
#pragma unroll
  for (int k = 0, j = 4 * half; k < 4; ++k, ++j) {
    const float y = fmaf(g.gamma[k], x[j], g.beta[k]);
    if constexpr (serves == Serves::codes) continue;
    if constexpr (serves != Serves::plain)
      x[j] = chain_output(y, dropout.factor(kept, j, y > 0.0f));
    else
      x[j] = usual ? y : chain_output(y, y > 0.0f ? 1.0f : 0.0f);
  }
}

/// Off bits of a lane's eight values in a drawn block, from the tables: few blocks are.
__device__ inline uint32_t off_bits8(const ForwardTables& table, int lane, const side::Bounds& b, const Words& noise, const float (&x)[8]) {
  uint32_t eight = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Gates g(table, lane, half);
#pragma unroll
    for (int k = 0, j = 4 * half; k < 4; ++k, ++j) {
      eight |= (side::off_bit(x[j], {g.threshold[k], g.gamma[k], g.beta[k], 0.0f}, b, side::uniform_at(noise, j)) ? 1u : 0u) << j;
    }
  }
  return eight;
}

/// Codes of a lane's eight values in a poisoned block.
__device__ inline void poison8(const ForwardTables& table, int lane, uint32_t off, const float (&x)[8], Codes& c) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float gamma[4], beta[4];
    table.gamma.get_half(lane, half, gamma);
    table.beta.get_half(lane, half, beta);
#pragma unroll
    for (int k = 0, j = 4 * half; k < 4; ++k, ++j) c.put(j, side::poisoned_code(gamma[k], beta[k], x[j], off));
  }
}

/// A thread block's off sums, its warps one after the other.
__device__ inline void write_sums(const side::OffSums& off, float2* partial) {
  constexpr int kCodeWarps = kCodeThreads / 32;
  __shared__ float2 shared[kCodeWarps][kBlock];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int j = 0; j < 8; ++j) shared[warp][lane * 8 + j] = make_float2(off.sum[j], off.count[j]);
  __syncthreads();
#pragma unroll 1
  for (int k = static_cast<int>(threadIdx.x); k < kBlock; k += kCodeThreads) {
    float2 total = make_float2(0.0f, 0.0f);
    for (int w = 0; w < kCodeWarps; ++w) total.x += shared[w][k].x, total.y += shared[w][k].y;
    partial[k] = total;
  }
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
  __shared__ RoundKeys seed;
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
  seed.fill(a.c.seed);
  const Dropout dropout(a.c.chain, a.c.seed);
  __syncthreads();
  const side::Usual usual = usual_of(table, lane);
  side::OffSums off;
  const auto read = [&](uint32_t block) {
    const int64_t first = (static_cast<int64_t>(block) * 32 + lane) * 8;
    return !any || a.aligned ? read8<type, true>(a.pass.x, first) : read8<type, false>(a.pass.x, first);
  };
  Eight<type> ahead;  // the next block's values, on their way while this one is coded
  uint32_t block = blockIdx.x + static_cast<uint32_t>(warp) * gridDim.x;
  if (block < blocks) ahead = read(block);
  for (; block < blocks; block += step) {
    const int64_t group = static_cast<int64_t>(block) * 32 + lane;
    float x[8];
    if constexpr (serves == Serves::codes) {
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = ahead[j];
    } else {
      table.normalise(lane, ahead, x);
    }
    if (block + step < blocks) ahead = read(block + step);
    Extremes e;
    e.add8(x);
    e.reduce_warp();
    const Range r = e.range(code.header);
    if (lane == 0) store_range(a.to.headers, code.header, block, r);
    const side::Bounds b(r);
    const Words noise = group_noise(seed, code.rounding, group);
    if (planes && side::off_weight_of(key, block, static_cast<uint32_t>(code.plane.blocks)) > 0) {
      const uint32_t bits = is_poisoned(r) ? 0 : off_bits8(table, lane, b, noise, x);
      code.plane.bytes[kOffKeyBytes + static_cast<int64_t>(block / kOffGroup) * (kBlock / 8) + lane] = static_cast<uint8_t>(bits);
    }
    Words kept;
    if constexpr (any || serves == Serves::dropped) kept = dropout.draw(group);
    Codes c;
    if constexpr (any) c.three = a.wide.slot(block) >= 0;
    const auto put = [&](auto is_usual) {
      code_and_pass<serves, is_usual(), 0>(table, lane, b, code.table, a.wide, noise, dropout, kept, x, c, off);
      code_and_pass<serves, is_usual(), 1>(table, lane, b, code.table, a.wide, noise, dropout, kept, x, c, off);
      if constexpr (serves == Serves::codes) return;
      if constexpr (serves == Serves::plain && is_usual()) {
        Eight<type> z;
        z.template set<true>(x);
        z.store(static_cast<typename Eight<type>::Raw*>(a.pass.z) + group * 8);
      } else {
        write_some<type>(a.pass.z, group * 8, 8, !any || a.aligned, x);
      }
    };
    if (usual.covers(b) && b.low >= -0x1p60f) {
      put(std::true_type());
    } else {
      Codes poisoned;
      if (is_poisoned(r)) poison8(table, lane, any && c.three ? 2 : 1, x, poisoned);
      put(std::false_type());
      if (is_poisoned(r)) c.two = poisoned.two, c.extra = poisoned.extra;
    }
    if constexpr (any)
      a.wide.store(a.to.codes, group, block, c);
    else
      store_codes<2>(a.to.codes, group, c.two, 8);
  }
  write_sums(off, a.partial + blockIdx.x * kBlock);
}

/// The broken block by the definition, and zeros between the parts of the packed bytes. One warp.
__device__ inline void finish_tail(const Forward& a) {
  const int lane = static_cast<int>(threadIdx.x);
  const SideCode& code = a.c.side;
  const int bits = code.table.bits;
  const int64_t n = code.grid.values, whole = n / kBlock * kBlock, blocks = code.grid.blocks();
  for (int64_t i = code_bytes(n, bits) + lane; i < a.at.headers; i += 32) a.c.bytes[i] = 0;
  for (int64_t i = a.at.headers + blocks * header_bytes(code.header) + lane; i < a.at.channels; i += 32) a.c.bytes[i] = 0;
  if (whole == n) return;
  const UniformSeed seed(a.c.seed);
  const Dropout dropout(a.c.chain, a.c.seed);
  Extremes e;
  for (int64_t k = lane; k < n - whole; k += 32) e.add(a.tail[k]);
  e.reduce(32);
  const Range r = e.range(code.header);
  if (lane == 0) store_range(a.to.headers, code.header, blocks - 1, r);
  const bool drawn = code.plane.bytes != nullptr && off_weight(side::encoder_key(code, a.c.seed, false), blocks - 1, blocks) > 0;
  uint8_t* plane = code.plane.bytes + kOffKeyBytes + (blocks - 1) / kOffGroup * (kBlock / 8) + lane;
  if (drawn) *plane = 0;
  const int64_t group = whole / 8 + lane, first = group * 8;
  if (first >= n) return;
  const int count = n - first < 8 ? static_cast<int>(n - first) : 8;
  const Words noise = group_noise(seed, code.rounding, group), kept = dropout.draw(group);
  uint32_t eight = 0, off_bits = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (j >= count) break;
    const int64_t at = channel_of(first + j, code.channels);
    const float x = a.tail[first + j - whole], gamma = a.pass.with.gamma[at], beta = a.pass.with.beta[at], y = fmaf(gamma, x, beta);
    const Channel c = {threshold_of(gamma, beta), gamma, beta, 0.0f};
    eight |= (is_poisoned(r) ? poisoned_code_of(x, c, code.table) : side_code_of(x, c, r, code.table, noise_of(noise, j))) << (bits * j);
    if (drawn) off_bits |= (off_bit_of(x, c, r, noise_of(noise, j)) ? 1u : 0u) << j;
    write_any(a.pass.z, a.pass.type, first + j, chain_output(y, dropout.factor(kept, j, y > 0.0f)));
  }
  if (drawn) *plane = static_cast<uint8_t>(off_bits);
  if (bits == 2)
    store_codes<2>(a.to.codes, group, eight, count);
  else
    store_codes<3>(a.to.codes, group, eight, count);
}

constexpr int kFinishWarps = 32;

/// The channel table with its off means: a thread a channel, rows of partial sums shared out over the warps, in the order of
/// side_encode.cu. The last thread block codes the tail.
__global__ void __launch_bounds__(kFinishWarps * 32) finish_encode(const __grid_constant__ Forward a, int64_t entries) {
  __shared__ double2 shared[kFinishWarps][33];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  if (blockIdx.x + 1 == gridDim.x) {
    if (warp == 0) finish_tail(a);
    return;
  }
  const int64_t channels = a.c.side.channels, n = a.c.side.grid.values, c = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  const int64_t whole = n / kBlock * kBlock;
  Channel own = {};
  double2 total = make_double2(0, 0);
  if (c < channels) {
    own = {0.0f, a.pass.with.gamma[c], a.pass.with.beta[c], 0.0f};
    own.threshold = threshold_of(own.gamma, own.beta);
#pragma unroll 16
    for (int64_t p = c + channels * warp; p < entries; p += channels * kFinishWarps) {
      const float2 part = a.partial[p];
      total.x += part.x, total.y += part.y;
    }
    for (int64_t i = whole + warp; i < n; i += kFinishWarps) {
      const float v = flush(a.tail[i - whole]);
      if (channel_of(i, channels) == c && !is_on(v, own)) total.x += v, total.y += 1;
    }
  }
  shared[warp][lane] = total;
  __syncthreads();
  if (warp != 0 || c >= channels) return;
  for (int w = 1; w < kFinishWarps; ++w) total.x += shared[w][lane].x, total.y += shared[w][lane].y;
  if (a.c.side.table.off == 1) own.off_mean = total.y > 0 ? static_cast<float>(total.x / total.y) : 0.0f;
  a.to.channels[c] = own;
}

}  // namespace
}  // namespace epilogue

void side::encode_one_sided(const Args& from, DType type, unsigned blocks, cudaStream_t stream) {
  epilogue::Forward a = {{from.code, {}, nullptr, from.seed},
                         {from.x, type, {}, nullptr},
                         {},
                         {from.codes, from.headers, from.channels},
                         from.partial,
                         nullptr,
                         {from.code.table, {}},
                         true};
  with_type(type, [&](auto t) { epilogue::encode_blocks<t(), epilogue::Serves::codes><<<blocks, epilogue::kCodeThreads, 0, stream>>>(a); });
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
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
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
  with_type(pass.type, [&](auto t) {
    if (!aligned || c.side.table.bits != 2 || c.extra.slots != nullptr)
      encode_blocks<t(), Serves::any><<<grid, kCodeThreads, 0, s>>>(a);
    else if (is_plain(c.chain))
      encode_blocks<t(), Serves::plain><<<grid, kCodeThreads, 0, s>>>(a);
    else
      encode_blocks<t(), Serves::dropped><<<grid, kCodeThreads, 0, s>>>(a);
  });
  check_launch(op);
  finish_encode<<<grid_size(ceil_div(c.side.channels, 32) + 1), kFinishWarps * 32, 0, s>>>(a, grid * kBlock);
  check_launch(op);
}

}  // namespace satchel::cuda
