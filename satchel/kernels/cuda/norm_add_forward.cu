// Forward in one pass: x̂ = (x − mean)·rstd and its block code (the bytes of block_encode.cu), z = relu(γ·x̂ + β + skip) and its ReLU form
// (the bytes of side_encode.cu); all arithmetic in fp32, x, skip and z as they stand in memory. A block of values stays in a warp's
// registers from its only read to its only write.
#include "satchel/kernels/cuda/norm_add.cuh"

namespace satchel::cuda {
namespace norm_add {
namespace {

struct Forward {
  NormAddCode code;
  NormParameters with;
  const void *x, *skip;
  const uint64_t *norm_seed, *sum_seed;
  void* z;
  Wide wide;
};

/// The channels of the 256 values of a step.
struct Tables {
  Table mean, rstd, gamma, beta;

  __device__ inline void fill(const NormParameters& p, int64_t channels, int64_t first) {
#pragma unroll 1
    for (int k = static_cast<int>(threadIdx.x); k < kBlock; k += kWarps * 32) {
      const int64_t c = channel_of(first + k, channels);
      mean.put(k, p.mean[c]);
      rstd.put(k, p.rstd[c]);
      gamma.put(k, p.gamma[c]);
      beta.put(k, p.beta[c]);
    }
  }
};

/// x̂ and z, the latter not yet rounded.
template <DType type>
__device__ inline void add8(const Tables& table, int lane, const Eight<type>& x, const Eight<type>& skip, float (&hat)[8], float (&z)[8]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float mean[4], rstd[4], gamma[4], beta[4];
    table.mean.get_half(lane, half, mean);
    table.rstd.get_half(lane, half, rstd);
    table.gamma.get_half(lane, half, gamma);
    table.beta.get_half(lane, half, beta);
#pragma unroll
    for (int k = 0, j = 4 * half; k < 4; ++k, ++j) {
      hat[j] = (x[j] - mean[k]) * rstd[k];
      const float y = fmaf(gamma[k], hat[j], beta[k]) + skip[j];
      z[j] = chain_output(y, y > 0.0f ? 1.0f : 0.0f);
    }
  }
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

  __device__ inline uint32_t encode8(const float (&z)[8], const Words& noise) const {
    uint32_t eight = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float v = flush_signed(z[j]), d = fabsf(v - from), u = side::uniform_at(noise, j);
      uint32_t code = 1;
#pragma unroll
      for (int i = 0; i < kOn - 1; ++i) code = d > fmaf(u, gap[i], mark[i]) ? static_cast<uint32_t>(i + 2) : code;
      eight |= (v > 0.0f ? code : 0u) << (bits * j);
    }
    return eight;
  }
};

/// Codes of a poisoned block's values.
template <int bits>
__device__ inline uint32_t poisoned8(const float (&z)[8]) {
  uint32_t eight = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) eight |= side::poisoned_code(1.0f, 0.0f, z[j], 1) << (bits * j);
  return eight;
}

/// Extremes over the warp, of the first `count` of eight.
template <bool whole>
__device__ inline Extremes extremes_of(const float (&v)[8], int count) {
  Extremes e;
  if constexpr (whole) {
    e.add8(v);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j < count) e.add(v[j]);
    }
  }
  e.reduce_warp();
  return e;
}

/// What a warp needs at every step.
struct Warp {
  const Forward& a;
  const Tables& table;
  int lane;
  UniformSeed norm_seed, sum_seed;
};

/// Codes of eight values of which `count` exist.
template <int bits, bool whole>
__device__ inline void put8(const CodeParts& at, int64_t group, uint64_t eight, int count) {
  if constexpr (whole) return store_codes<bits>(at.codes, group, eight, 8);
  if (count > 0) store_codes<bits>(at.codes, group, eight & ((uint64_t{1} << (bits * count)) - 1), count);
}

/// Codes of a block of z. `sum_bits` 3: of 3 bits, or of 2 where its sample has no place.
template <int sum_bits, bool whole>
__device__ inline void put_sum(const Warp& w, int64_t block, int64_t group, const float (&z)[8], Range r, int count) {
  const SideCode& sum = w.a.code.sum;
  const CodeParts& at = w.a.code.sum_at;
  const Words noise = group_noise(w.sum_seed, sum.rounding, group);
  if constexpr (sum_bits == 3) {
    const int32_t slot = w.a.wide.slot(static_cast<uint32_t>(block));
    if (slot >= 0) {
      const uint32_t eight = is_poisoned(r) ? poisoned8<3>(z) : Marks<3>(side::Bounds(r), w.a.wide.table).encode8(z, noise);
      if (w.a.wide.slots == nullptr) return put8<3, whole>(at, group, eight, count);
      Codes c;
      c.three = true;
      c.split(eight);
      return w.a.wide.store(at.codes, group, static_cast<uint32_t>(block), c);
    }
  }
  const uint32_t eight = is_poisoned(r) ? poisoned8<2>(z) : Marks<2>(side::Bounds(r), sum.table).encode8(z, noise);
  put8<2, whole>(at, group, eight, count);
}

/// One block of a warp, its values read already. `whole`: all of them exist.
template <DType type, int bits, bool even, int sum_bits, bool whole>
__device__ inline void encode_block(const Warp& w, int64_t block, const Eight<type>& x, const Eight<type>& skip) {
  const BlockCode& norm = w.a.code.norm;
  const SideCode& sum = w.a.code.sum;
  const int64_t group = block * 32 + w.lane, left = norm.grid.values - group * 8;
  const int count = whole || left >= 8 ? 8 : left <= 0 ? 0 : static_cast<int>(left);
  float hat[8], z[8];
  add8<type>(w.table, w.lane, x, skip, hat, z);
  Eight<type> out;
  out.set(z);
  auto* to = static_cast<typename Eight<type>::Raw*>(w.a.z) + group * 8;
  if (whole || count == 8) {
    out.store(to);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j < count) to[j] = out.raw(j);
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) z[j] = out[j];  // what stands in memory is what is coded

  const BlockRuler ruler = block_ruler<bits>(extremes_of<whole>(hat, count), norm.header);
  if (w.lane == 0) store_header(w.a.code.norm_at.headers, norm.header, block, ruler.header);
  put8<bits, whole>(w.a.code.norm_at, group, encode8<bits, even>(hat, ruler, norm.levels, group_noise(w.norm_seed, norm.rounding, group)),
                    count);

  const Range r = extremes_of<whole>(z, count).range(sum.header);
  if (w.lane == 0) store_range(w.a.code.sum_at.headers, sum.header, block, r);
  put_sum<sum_bits, whole>(w, block, group, z, r, count);
}

/// Zeros between codes and headers.
__device__ inline void zero_gap(const CodeParts& at, int64_t values, int bits) {
  uint8_t* byte = at.codes + code_bytes(values, bits) + threadIdx.x;
  if (byte < static_cast<uint8_t*>(at.headers)) *byte = 0;
}

template <DType type, int bits, bool even, int sum_bits>
__global__ void __launch_bounds__(kWarps * 32, 3) encode_blocks(const __grid_constant__ Forward a) {
  __shared__ Tables table;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t n = a.code.norm.grid.values;
  const uint32_t blocks = static_cast<uint32_t>(n / kBlock), step = gridDim.x * kWarps;  // whole ones
  table.fill(a.with, a.code.channels, static_cast<int64_t>(blockIdx.x) * kBlock);
  if (blockIdx.x == 0) zero_gap(a.code.norm_at, n, bits), zero_gap(a.code.sum_at, n, a.code.sum.table.bits);
  const Warp w = {a, table, lane, UniformSeed(a.norm_seed), UniformSeed(a.sum_seed)};
  __syncthreads();
  const auto first_of = [lane](uint32_t block) { return (static_cast<int64_t>(block) * 32 + lane) * 8; };
  Eight<type> x, skip;  // the next block's values, on their way while this one is coded
  uint32_t block = blockIdx.x + static_cast<uint32_t>(warp) * gridDim.x;
  if (block < blocks) x = read8<type, true>(a.x, first_of(block)), skip = read8<type, true>(a.skip, first_of(block));
  for (; block < blocks; block += step) {
    const Eight<type> own_x = x, own_skip = skip;
    if (block + step < blocks) {
      x = read8<type, true>(a.x, first_of(block + step));
      skip = read8<type, true>(a.skip, first_of(block + step));
    }
    encode_block<type, bits, even, sum_bits, true>(w, block, own_x, own_skip);
  }
  if (block != blocks || n % kBlock == 0) return;  // one warp of all meets the last, broken block
  x = read8_until<type, true>(a.x, first_of(block), n);
  skip = read8_until<type, true>(a.skip, first_of(block), n);
  encode_block<type, bits, even, sum_bits, false>(w, block, x, skip);
}

}  // namespace
}  // namespace norm_add

bool norm_add_fits(const NormAddCode& code) {
  using namespace norm_add;
  const Grid& g = code.norm.grid;
  const SideTable& t = code.sum.table;
  return code.norm.levels.bits >= 1 && code.norm.levels.bits <= 4 && t.side == Side::relu && (t.bits == 2 || t.bits == 3) && t.off == 1 &&
         t.on == (1 << t.bits) - 1 && is_straight_256(g) && is_straight_256(code.sum.grid) && g.values == code.sum.grid.values &&
         g.values < int64_t{1} << 38 && code.channels > 0 && g.values % code.channels == 0 &&
         walk_blocks(g.values, code.channels, kFewBlocks) > 0;
}

void norm_add_encode(const NormAddCode& code, const void* x, const void* skip, DType type, const NormParameters& with,
                     const uint64_t* norm_seed, const uint64_t* sum_seed, void* z, StreamHandle stream) {
  constexpr const char* op = "norm_add_encode";
  using namespace norm_add;
  check_fit(code, op);
  for (const void* p : {x, skip, static_cast<const void*>(z)}) check_values(p, op);
  const Forward a = {code, with, x, skip, norm_seed, sum_seed, z, {code.sum.table, code.extra}};
  const unsigned grid = grid_size(walk_blocks(code.norm.grid.values, code.channels, kFewBlocks));
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  with_type(type, [&](auto t) {
    with_both_bits(code, [&](auto bits, auto sum_bits) {
      if constexpr (bits() > 1) {
        if (!code.norm.levels.even) {
          encode_blocks<t(), bits(), false, sum_bits()><<<grid, kWarps * 32, 0, s>>>(a);
          return;
        }
      }
      encode_blocks<t(), bits(), true, sum_bits()><<<grid, kWarps * 32, 0, s>>>(a);
    });
  });
  check_launch(op);
}

}  // namespace satchel::cuda
