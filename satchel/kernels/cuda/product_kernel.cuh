// Gᵀ·Z from the codes of Z: G is read once a tile of 128 channels, Z is decoded 32 rows at a time into shared memory.
//
//   thread block    a share of the rows, a tile of columns × 128 channels
//   warp, copying   some lines of G                      warp, decoding    8 channels, a row a lane: channels' numbers stand once a warp
//   warp, adding    16·fragments columns × 32 channels, some of the rows
//
//   step s     G of s + 2 or later is being copied     Z of s + 1 is decoded     G and Z of s are multiplied     one barrier
//
// Half of the warps multiply first and the others decode first, so that tensor cores and the rest both have work. (Panels, as Hopper's
// wgmma reads them: products start first and go on while all warps decode.) Narrow tiles leave warps over: these form teams that share out
// a step's rows, and their sums are added at the end, in order. A second kernel adds the thread blocks' sums, in order too.
#pragma once

#include "satchel/kernels/cuda/one_sided.cuh"
#include "satchel/kernels/cuda/product_sums.cuh"

namespace satchel::cuda::epilogue::product {

struct Product {
  SideCode code;
  Chain chain;
  const uint64_t* seed;
  Parts from;
  ProductGradients p;
  int64_t rows, columns;  // columns: of all gradients
  int chunk;              // bytes of G that stand together, aligned: 16, 4 or 2
  float* partial;         // share × columns × channels
};

/// multiply_codes() of tiles of 256 columns of 16 bits by instructions that Hopper alone has, which split_fits() tells of.
void multiply_panels(const Product&, Math, dim3 grid, StreamHandle, const char* op);

namespace {

static_assert(sizeof(ChannelTables) + sizeof(RoundKeys) == kTableBytes);

/// What a thread copies of G: the same chunk of columns in every step, of rows that are 512 / (chunks a row) apart.
template <class T, Math math>
struct Copier {
  using R = Raw<math>;
  static constexpr int kPadded = T::kWidth > 128 ? 256 : T::kWidth > 64 ? 128 : 64;  // so that chunks a row divide the threads
  // Of the next row, and how far the one after it is; rows of the thread block from there on, none where the columns do not exist.
  const R* from;
  int64_t advance;
  int left;
  int row, own;  // place in a stage; columns from T::kWidth on are padding

  __device__ inline Copier(const Product& a, int64_t column0, int64_t row0, int rows) {
    const int each = a.chunk / static_cast<int>(sizeof(R)), line = kPadded / each, thread = static_cast<int>(threadIdx.x);
    row = thread / line, own = thread % line * each;
    const int64_t column = column0 + own;
    const bool second = column >= a.p.width;
    const int64_t stride = second ? a.p.stride[1] : a.p.stride[0];
    left = column < a.columns ? rows - row : 0;
    from = static_cast<const R*>(second && left > 0 ? a.p.g[1] : a.p.g[0]);
    if (left > 0) from += (row0 + row) * stride + column - (second ? a.p.width : 0);
    advance = left > 0 ? kBlockThreads / line * stride : 0;
  }

  template <int bytes>
  __device__ inline void copy(R* stage) {
    constexpr int kRowsEach = kBlockThreads * bytes / static_cast<int>(sizeof(R)) / kPadded;
#pragma unroll(bytes == 16 ? 8 : 2)
    for (int r = 0; r < kRows; r += kRowsEach) {
      if (own < T::kWidth) copy_async<bytes>(stage + Places<T>::of_g(row + r, own), from, left > r);
      from += advance;
    }
    left -= kRows;
  }

  /// The next 32 rows of a tile of G; zeros where there are none.
  __device__ inline void step(int chunk, R* stage) {
    if (chunk == 16) {
      copy<16>(stage);
    } else if (chunk == 4) {
      copy<4>(stage);
    } else if constexpr (sizeof(R) == 2) {
      copy<2>(stage);
    }
  }
};

constexpr int kAhead = 3;  // steps that codes are asked for before they are read

__device__ inline void bring_closer(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory"); }

/// What is the same in all of a warp's threads, in one of the warp's uniform registers.
__device__ inline uint32_t of_warp(uint32_t x) { return __reduce_or_sync(~0u, x); }
__device__ inline float of_warp(float x) { return __uint_as_float(of_warp(__float_as_uint(x))); }

/// Eight channels that a warp decodes, each lane a row of every step.
struct Octet {
  const ChannelTables& table;
  const RoundKeys& keys;
  int number;
  float threshold[8], gamma[8];
  side::WarpChannels met;  // fits the blocks of which usual_eight() decodes the rows
  Dropout dropout;

  __device__ inline Octet(const Product& a, const ChannelTables& channels, const RoundKeys& of, int octet)
      : table(channels), keys(of), number(octet), dropout(a.chain, a.seed) {
    table.threshold.get(octet, threshold);
    table.gamma.get(octet, gamma);
#pragma unroll
    for (int j = 0; j < 8; ++j) threshold[j] = of_warp(threshold[j]), gamma[j] = of_warp(gamma[j]);
    const float middle = a.code.table.on_short[1];
    if (a.chain.slope == 0.0f && middle > 0.0f && middle < 1.0f) met = table.met(octet);
    met.least = of_warp(met.least), met.most = of_warp(met.most);
  }

  /// dropout.draw().
  __device__ inline Words draw(uint64_t group) const {
    if (dropout.least == 0) return Words{};
    uint4 k = {};
    return noise_of_group(Stream::dropout, group, [&](int round) {
      if (round % 2 == 0) k = keys.of(round / 2);
      return round % 2 == 0 ? make_uint2(k.x, k.y) : make_uint2(k.z, k.w);
    });
  }
};

/// Codes of a row of every step as they stand in memory: what is made of them waits until they are needed.
struct Coded {
  uint64_t group;  // of 8 values
  int left;        // rows of the thread block from this one on; none where the channels do not exist
  uint32_t eight = 0;
  uint2 header = {0, 0};

  /// Before the first step; `row` of a step.
  __device__ inline void begin(const Product& a, int64_t channel, int64_t row0, int rows, int row) {
    group = static_cast<uint64_t>(((row0 + row - kRows) * a.code.channels + channel) / 8);
    left = channel < a.code.channels ? rows - row + kRows : 0;
  }

  __device__ inline const uint16_t* codes(const Product& a, uint64_t of) const {
    return reinterpret_cast<const uint16_t*>(a.from.codes) + of;
  }
  __device__ inline const uint32_t* headers(const Product& a, uint64_t of) const {
    return static_cast<const uint32_t*>(a.from.headers) + of / (kBlock / 8) * (a.code.header == HeaderType::f32 ? 2 : 1);
  }

  /// Of the next step. `leads`: the warp that brings what the thread block will want kAhead steps later into the cache.
  __device__ inline void load_next(const Product& a, bool leads) {
    const uint64_t step = static_cast<uint64_t>(kRows / 8 * a.code.channels);
    group += step, left -= kRows;
    if (left <= 0) return;
    eight = __ldg(codes(a, group));  // channels are a multiple of 8: all eight exist
    if (a.code.header == HeaderType::f32)
      header = __ldg(reinterpret_cast<const uint2*>(headers(a, group)));
    else
      header.x = __ldg(headers(a, group));
    if (leads && left > kAhead * kRows) {
      const uint64_t later = group + kAhead * step;
      bring_closer(codes(a, later));
      bring_closer(headers(a, later));
    }
  }
};

/// min(max(a + b, 0), 1).
__device__ inline float saturated_sum(float a, float b) {
  float y;
  asm("add.sat.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

/// z of eight codes in a block that the octet fits, behind a ReLU. What is off comes out as 0, whatever its channel's mean.
__device__ inline void usual_eight(const Product& a, const Octet& own, const Words& kept, uint32_t eight, float high, float (&z)[8]) {
  const float middle = a.code.table.on_short[1];
  const uint32_t all = eight | 0x4b000000u;  // codes in the low bits of 2^23
  float beta[8];
  own.table.beta.get_half(own.number, 0, reinterpret_cast<float(&)[4]>(beta));
  own.table.beta.get_half(own.number, 1, reinterpret_cast<float(&)[4]>(beta[4]));
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const uint32_t at = all & (0xff000000u | 3u << (2 * j));
    const float place = __uint_as_float(at) - static_cast<float>((1 << 23) + (2 << (2 * j)));  // (code − 2)·4^j, exactly
    const float level = saturated_sum(place, middle);                                          // 0, middle, 1 for codes 1, 2, 3
    const float x = fmaf(level, high - own.threshold[j], own.threshold[j]);
    z[j] = fmaf(own.gamma[j], x, beta[j]) * (is_on(eight, j) && own.dropout.keeps(kept, j) ? own.dropout.on : 0.0f);
  }
}

/// … in any block, behind any activation.
__device__ inline void any_eight(const Product& a, const Octet& own, const Words& kept, uint32_t eight, Range r, float (&z)[8]) {
  const side::Bounds b(r);
  const uint32_t falling = own.table.falling(own.number);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Decoder decoder = own.table.decoder(own.number, half, falling);
    float gamma[4], beta[4];
    own.table.gamma.get_half(own.number, half, gamma);
    own.table.beta.get_half(own.number, half, beta);
#pragma unroll
    for (int k = 0, j = 4 * half; k < 4; ++k, ++j) {
      const float x = is_poisoned(r) ? __uint_as_float(kCanonicalNaN) : decoder.value<false>(k, eight >> (8 * half), b, a.code.table);
      z[j] = chain_output(fmaf(gamma[k], x, beta[k]), own.dropout.factor(kept, j, is_on(eight, j)));
    }
  }
}

/// Stores eight values as the product takes them.
template <Math math>
__device__ inline void put_eight(Raw<math>* to, const float (&z)[8]) {
  if constexpr (is_half(math)) {
    write8<kHalfType<math>, true>(to, 0, z);
  } else if constexpr (math == Math::tf32) {
    uint4* words = reinterpret_cast<uint4*>(to);
    words[0] = make_uint4(rounded_tf32(z[0]), rounded_tf32(z[1]), rounded_tf32(z[2]), rounded_tf32(z[3]));
    words[1] = make_uint4(rounded_tf32(z[4]), rounded_tf32(z[5]), rounded_tf32(z[6]), rounded_tf32(z[7]));
  } else {
    write8<DType::f32, true>(to, 0, z);
  }
}

/// A lane's values of a step, to its place in a buffer of Z; zeros where there are none. input_steps() of epilogue_backward.cu, value for
/// value, but for the sign of a zero.
template <Math math>
__device__ inline void decode(const Product& a, const Octet& own, const Coded& c, Raw<math>* to) {
  float z[8] = {};
  if (c.left > 0) {
    const Range r = load_range(&c.header, a.code.header, 0);
    const Words kept = own.draw(c.group);
    if (own.met.fit(side::Bounds(r)))
      usual_eight(a, own, kept, c.eight, r.high, z);
    else
      any_eight(a, own, kept, c.eight, r, z);
  }
  put_eight<math>(to, z);
}

template <class T, Math math>
__global__ void __launch_bounds__(kBlockThreads, 1) multiply_codes(const __grid_constant__ Product a) {
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ ChannelTables table;
  __shared__ RoundKeys keys;
  static_assert(kRows % 32 == 0 && kChannels == kBlockThreads / 32 * 8);
  constexpr int kStages = T::kShape.stages(math);
  using At = Places<T>;
  constexpr int kG = At::kG, kZ = At::kZ;
  auto* g = reinterpret_cast<Raw<math>*>(shared + (T::kPanels ? (0u - shared_address(shared)) & (kPanelBytes - 16) : 0u));
  Raw<math>* z = g + kStages * kG;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int channel_tiles = static_cast<int>(ceil_div(a.code.channels, kChannels)), tile = static_cast<int>(blockIdx.y);
  const int column0 = tile / channel_tiles * T::kWidth, channel0 = tile % channel_tiles * kChannels;
  const int64_t all = ceil_div(a.rows, kRows), first = all * blockIdx.x / gridDim.x;
  const int steps = static_cast<int>(all * (blockIdx.x + 1) / gridDim.x - first);
  const int rows = static_cast<int>(less_of(a.rows - first * kRows, int64_t{steps} * kRows));

  table.fill(a.from.channels, a.code.channels, channel0);
  if (a.chain.drop != 0) keys.fill(a.seed);
  Copier<T, math> copier(a, column0, first * kRows, rows);
#pragma unroll
  for (int k = 0; k < kStages - 1; ++k) {
    copier.step(a.chunk, g + k * kG);
    end_copies();
  }
  Coded coded[kRows / 32];
#pragma unroll
  for (int i = 0; i < kRows / 32; ++i) {
    coded[i].begin(a, channel0 + warp * 8, first * kRows, rows, i * 32 + lane);
    coded[i].load_next(a, warp == 0);
  }
  __syncthreads();  // the tables
  const Octet own(a, table, keys, warp);
  Raw<math>* to = z + At::of_z(lane, warp * 8);
  const auto decode_next = [&](int side) {
#pragma unroll
    for (int i = 0; i < kRows / 32; ++i) {
      decode<math>(a, own, coded[i], to + side * kZ + i * At::of_z(32, 0));
      coded[i].load_next(a, warp == 0);
    }
  };
  decode_next(0);

  Sums<T, math> sums;
  const bool multiplies_first = T::kPanels || warp / 4 % 2 == 0;  // half of each scheduler's warps
  int stage = 0, side = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    await_copies<kStages - 2>();  // this step's; the next ones' go on
    if constexpr (T::kPanels) show_copies();
    __syncthreads();  // G and Z of this step are there for all, and all are through with the last step
    copier.step(a.chunk, g + (stage == 0 ? kStages - 1 : stage - 1) * kG);
    end_copies();
    if (multiplies_first) sums.add(g + stage * kG, z + side * kZ);
    decode_next(side ^ 1);
    if constexpr (T::kPanels)
      sums.await();
    else if (!multiplies_first)
      sums.add(g + stage * kG, z + side * kZ);
    stage = stage == kStages - 1 ? 0 : stage + 1, side ^= 1;
  }
  await_copies<0>();  // zeros behind the last step, or they would overwrite what teams leave each other
  add_teams<T>(sums.sum, reinterpret_cast<float*>(shared));
  if (static_cast<int>(threadIdx.x) >= T::kTeamThreads) return;
  float* out = a.partial + static_cast<int64_t>(blockIdx.x) * a.columns * a.code.channels;
  sums.for_pairs([&](int column, int channel, float x, float y) {
    const int64_t m = column0 + column, c = channel0 + channel;
    if (m < a.columns && c < a.code.channels) *reinterpret_cast<float2*>(out + m * a.code.channels + c) = make_float2(x, y);
  });
}

}  // namespace
}  // namespace satchel::cuda::epilogue::product
