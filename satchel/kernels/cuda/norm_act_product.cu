// Gᵀ·Z from the codes of Z: G is read once a tile of 128 channels, Z is decoded 32 rows at a time into shared memory.
//
//   thread block    a share of the rows, a tile of columns × 128 channels
//   warp, copying   some lines of G                      warp, decoding    8 channels, a row a lane: channels' numbers stand once a warp
//   warp, adding    16·fragments columns × 32 channels, some of the rows
//
//   step s     G of s + 2 or later is being copied     Z of s + 1 is decoded     G and Z of s are multiplied     one barrier
//
// Half of the warps multiply first and the others decode first, so that tensor cores and the rest both have work. Narrow tiles leave warps
// over: these form teams that share out a step's rows, and their sums are added at the end, in order. A second kernel adds the thread
// blocks' sums, in order too.
#include "satchel/kernels/cuda/one_sided.cuh"
#include "satchel/kernels/cuda/partial_sums.cuh"
#include "satchel/kernels/cuda/product_sums.cuh"

namespace satchel::cuda {
namespace epilogue::product {
namespace {

static_assert(sizeof(ChannelTables) + sizeof(RoundKeys) == kTableBytes);

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

/// What a thread copies of G: the same chunk of columns in every step, of rows that are 512 / (chunks a row) apart.
template <class T, class R>
struct Copier {
  static constexpr int kPadded = T::kWidth > 128 ? 256 : T::kWidth > 64 ? 128 : 64;  // so that chunks a row divide the threads
  const R* from;                                                                     // of the next row
  int64_t advance;                                                                   // to the one after it
  int left;  // rows of the thread block from there on; none where the columns do not exist
  int to;    // place in a stage; below 0: the chunk belongs to the padding

  __device__ inline Copier(const Product& a, int64_t column0, int64_t row0, int rows) {
    const int each = a.chunk / static_cast<int>(sizeof(R)), line = kPadded / each, thread = static_cast<int>(threadIdx.x);
    const int row = thread / line, own = thread % line * each;
    const int64_t column = column0 + own;
    const bool second = column >= a.p.width;
    const int64_t stride = second ? a.p.stride[1] : a.p.stride[0];
    left = column < a.columns ? rows - row : 0;
    from = static_cast<const R*>(second && left > 0 ? a.p.g[1] : a.p.g[0]);
    if (left > 0) from += (row0 + row) * stride + column - (second ? a.p.width : 0);
    advance = left > 0 ? kBlockThreads / line * stride : 0;
    to = own < T::kWidth ? row * T::kPitch + own : -1;
  }

  template <int bytes>
  __device__ inline void copy(R* stage) {
    constexpr int kRowsEach = kBlockThreads * bytes / static_cast<int>(sizeof(R)) / kPadded;
#pragma unroll(bytes == 16 ? 8 : 2)
    for (int r = 0; r < kRows; r += kRowsEach) {
      if (to >= 0) copy_async<bytes>(stage + to + r * T::kPitch, from, left > r);
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

constexpr bool kTakesTurns = true;  // half of the warps multiply first
constexpr int kAhead = 3;           // steps that codes are asked for before they are read

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
  constexpr int kG = kRows * T::kPitch, kZ = kRows * kPitch;
  auto* g = reinterpret_cast<Raw<math>*>(shared);
  Raw<math>* z = g + kStages * kG;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int channel_tiles = static_cast<int>(ceil_div(a.code.channels, kChannels)), tile = static_cast<int>(blockIdx.y);
  const int column0 = tile / channel_tiles * T::kWidth, channel0 = tile % channel_tiles * kChannels;
  const int64_t all = ceil_div(a.rows, kRows), first = all * blockIdx.x / gridDim.x;
  const int steps = static_cast<int>(all * (blockIdx.x + 1) / gridDim.x - first);
  const int rows = static_cast<int>(less_of(a.rows - first * kRows, int64_t{steps} * kRows));

  table.fill(a.from.channels, a.code.channels, channel0);
  if (a.chain.drop != 0) keys.fill(a.seed);
  Copier<T, Raw<math>> copier(a, column0, first * kRows, rows);
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
  Raw<math>* to = z + lane * kPitch + warp * 8;
  const auto decode_next = [&](int side) {
#pragma unroll
    for (int i = 0; i < kRows / 32; ++i) {
      decode<math>(a, own, coded[i], to + side * kZ + i * 32 * kPitch);
      coded[i].load_next(a, warp == 0);
    }
  };
  decode_next(0);

  Sums<T, math> sums;
  const bool multiplies_first = kTakesTurns && warp / 4 % 2 == 0;  // half of each scheduler's warps
  int stage = 0, side = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    await_copies<kStages - 2>();  // this step's; the next ones' go on
    __syncthreads();              // G and Z of this step are there for all, and all are through with the last step
    copier.step(a.chunk, g + (stage == 0 ? kStages - 1 : stage - 1) * kG);
    end_copies();
    if (multiplies_first) sums.add(g + stage * kG, z + side * kZ);
    decode_next(side ^ 1);
    if (!multiplies_first) sums.add(g + stage * kG, z + side * kZ);
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

/// Calls f with a tile of kTiles as a type.
template <class F>
void with_tile(const TileShape& shape, F&& f) {
  if (shape.width() == 48) return f(Tile<3, 1>());
  if (shape.width() == 96) return f(Tile<3, 2>());
  if (shape.width() == 128) return f(Tile<4, 2>());
  return f(Tile<4, 4>());
}

Math math_of(const ProductGradients& p) {
  if (p.type == DType::f32) return p.tf32 ? Math::tf32 : Math::full;
  return p.type == DType::bf16 ? Math::bf16 : Math::f16;
}

template <class F>
void with_math(Math math, F&& f) {
  if (math == Math::full) return f(std::integral_constant<Math, Math::full>());
  if (math == Math::tf32) return f(std::integral_constant<Math, Math::tf32>());
  if (math == Math::bf16) return f(std::integral_constant<Math, Math::bf16>());
  return f(std::integral_constant<Math, Math::f16>());
}

/// Tiles of a product on the current device, and thread blocks a tile.
struct Split {
  TileShape shape;
  int64_t tiles, parts;

  Split(const SideCode& code, const ProductGradients& p) : shape(tile_of(this_gpu(), p.count * p.width, math_of(p))) {
    tiles = ceil_div(p.count * p.width, shape.width()) * ceil_div(code.channels, kChannels);
    parts = parts_of_tiles(tiles, ceil_div(code.grid.values / code.channels, kRows), resident(this_gpu(), shape.needs(math_of(p))));
  }
};

/// Bytes that every row of every gradient can be copied by.
int chunk_of(const ProductGradients& p) {
  const int64_t size = size_of(p.type);
  for (const int bytes : {16, 4}) {
    bool all = p.width * size % bytes == 0;
    for (int i = 0; i < p.count; ++i) all = all && is_aligned(p.g[i], static_cast<uintptr_t>(bytes)) && p.stride[i] * size % bytes == 0;
    if (all) return bytes;
  }
  return 2;
}

}  // namespace
}  // namespace epilogue::product

bool norm_act_product_fits(const SideCode& code, const ProductGradients& p) {
  using namespace epilogue::product;
  const int64_t channels = code.channels, padded = ceil_div(channels, kChannels) * kChannels;
  return norm_act_fits(code) && code.table.bits == 2 && code.grid.values > 0 && channels % 8 == 0 && channels <= 512 &&
         2 * padded <= 3 * channels && (p.count == 1 || p.count == 2) && p.width >= 1 && p.width <= 256 &&
         tile_of(this_gpu(), p.count * p.width, math_of(p)).fragments > 0;
}

int64_t norm_act_product_scratch_bytes(const SideCode& code, const ProductGradients& p) {
  return epilogue::product::Split(code, p).parts * p.count * p.width * code.channels * static_cast<int64_t>(sizeof(float));
}

void norm_act_product(const SideCode& code, const Chain& chain, const uint8_t* bytes, const uint64_t* seed, const ProductGradients& p,
                      void* scratch, StreamHandle stream) {
  constexpr const char* op = "norm_act_product";
  using namespace epilogue::product;
  if (!norm_act_product_fits(code, p)) fail(op, "norm_act_product_fits must be true of code and gradients");
  if (!is_aligned(bytes) || !is_aligned(scratch)) fail(op, "packed bytes and scratch must start at a multiple of 16");
  const Split split(code, p);
  float* partial = static_cast<float*>(scratch);
  const int64_t rows = code.grid.values / code.channels, columns = p.count * p.width, each = p.width * code.channels;
  const Product a = {code, chain, seed, epilogue::parts_of(code, bytes), p, rows, columns, chunk_of(p), partial};
  const dim3 grid(grid_size(split.parts), grid_size(split.tiles));
  with_tile(split.shape, [&](auto tile) {
    with_math(math_of(p), [&](auto math) {
      using T = decltype(tile);
      if constexpr (T::kShape.serves(math())) {
        constexpr int kShared = T::kShape.bytes(math());
        allow_shared(reinterpret_cast<const void*>(multiply_codes<T, math()>), kShared, op);
        launch_kernel(op, stream, {grid, kBlockThreads, kShared}, multiply_codes<T, math()>, a);
      }
    });
  });
  add_up(partial, split.parts, columns * code.channels, /*add=*/false, each, p.out[0], p.out[p.count - 1], stream, op);
}

}  // namespace satchel::cuda
