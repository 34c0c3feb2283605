// Gᵀ·Z from the codes of Z: G is read once a tile of 128 channels, Z is decoded 32 rows at a time into shared memory.
//
//   thread block: a share of the rows, a tile of columns × 128 channels     warp: 16·fragments columns × 32 channels, some of the rows
//
//   step s     G of s + 2 is being copied     Z of s + 1 is decoded     G and Z of s are multiplied     one barrier
//
// Narrow tiles leave warps over: these form teams that share out a step's rows, and their sums are added at the end, in order. A second
// kernel adds the thread blocks' sums, in order too.
#include "satchel/kernels/cuda/one_sided.cuh"
#include "satchel/kernels/cuda/partial_sums.cuh"
#include "satchel/kernels/cuda/product_tile.h"
#include "satchel/kernels/cuda/tensor_core.cuh"

namespace satchel::cuda {
namespace epilogue::product {
namespace {

static_assert(sizeof(ChannelTables) == kTableBytes);

/// A number of G or Z in shared memory.
template <Math math>
using Raw = std::conditional_t<is_half(math), uint16_t, float>;
template <Math math>
constexpr DType kHalfType = math == Math::f16 ? DType::f16 : DType::bf16;

template <int fragments, int across>
struct Tile {
  static constexpr TileShape kShape = {fragments, across};
  static constexpr int kFragments = fragments, kAcross = across, kWidth = kShape.width(), kPitch = kShape.pitch(), kSums = kShape.sums();
  static constexpr int kTeams = kShape.teams(), kTeamThreads = kBlockThreads / kTeams, kTeamRows = kRows / kTeams;
};

/// The thread's number, asked for anew each time: what follows from it is worked out where it is needed and takes no register between.
__device__ inline int this_thread() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

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

template <class T, class R, int bytes>
__device__ inline void copy_step(const Product& a, int64_t column0, int64_t row0, R* to) {
  constexpr int kEach = bytes / static_cast<int>(sizeof(R)), kLine = T::kWidth / kEach;
#pragma unroll(bytes == 4 ? 1 : 4)
  for (int k = this_thread(); k < kRows * kLine; k += kBlockThreads) {
    const int r = k / kLine, c = k % kLine * kEach;
    const int64_t row = row0 + r, column = column0 + c;
    const bool exists = row < a.rows && column < a.columns, first = column < a.p.width;
    const R* from = static_cast<const R*>(first ? a.p.g[0] : a.p.g[1]) +
                    (first ? row * a.p.stride[0] + column : row * a.p.stride[1] + column - a.p.width);
    copy_async<bytes>(to + r * T::kPitch + c, exists ? from : a.p.g[0], exists);
  }
}

/// Rows row0 … row0 + 31 of a tile of G; zeros where there are none.
template <class T, class R>
__device__ inline void fetch(const Product& a, int64_t column0, int64_t row0, R* to) {
  if (a.chunk == 16) {
    copy_step<T, R, 16>(a, column0, row0, to);
  } else if (a.chunk == 4) {
    copy_step<T, R, 4>(a, column0, row0, to);
  } else if constexpr (sizeof(R) == 2) {
    copy_step<T, R, 2>(a, column0, row0, to);
  }
}

__device__ inline uint32_t rounded_tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

/// Which of Z's values a thread decodes: channels t % 16 · 8 … + 7 of row t / 16 of a step, or none.
struct Place {
  int lane, row;
  int64_t group;  // of 8 values; −1: none

  __device__ inline Place(const Product& a, int64_t row0, int64_t channel0) : lane(this_thread()), row(lane / 16), group(-1) {
    lane %= 16;
    const int64_t channel = channel0 + lane * 8;
    if (row0 + row < a.rows && channel < a.code.channels) group = ((row0 + row) * a.code.channels + channel) / 8;
  }
};

/// Those values as they stand in memory: what is made of them waits until they are needed.
struct Coded {
  uint32_t eight = 0;
  uint2 header = {0, 0};

  __device__ inline void load(const Product& a, int64_t row0, int64_t channel0) {
    const Place place(a, row0, channel0);
    if (place.group < 0) return;
    eight = __ldg(reinterpret_cast<const uint16_t*>(a.from.codes) + place.group);  // channels are a multiple of 8: all eight exist
    if (a.code.header == HeaderType::f32)
      header = __ldg(static_cast<const uint2*>(a.from.headers) + place.group / (kBlock / 8));
    else
      header.x = __ldg(static_cast<const uint32_t*>(a.from.headers) + place.group / (kBlock / 8));
  }
};

/// Stores four values as the product takes them.
template <Math math>
__device__ inline void put_four(Raw<math>* to, const float (&x)[4]) {
  if constexpr (is_half(math)) {
    *reinterpret_cast<uint2*>(to) = make_uint2(half_pair<kHalfType<math>>(x[0], x[1]), half_pair<kHalfType<math>>(x[2], x[3]));
  } else if constexpr (math == Math::tf32) {
    *reinterpret_cast<uint4*>(to) = make_uint4(rounded_tf32(x[0]), rounded_tf32(x[1]), rounded_tf32(x[2]), rounded_tf32(x[3]));
  } else {
    *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
  }
}

/// A thread's values of the step from row0 on, to one buffer of Z; zeros where there are none. input_steps() of epilogue_backward.cu,
/// value for value.
template <Math math>
__device__ inline void decode(const Product& a, const ChannelTables& table, const Dropout& dropout, const side::WarpChannels& met,
                              uint32_t falling, const Coded& c, int64_t row0, int64_t channel0, Raw<math>* z) {
  const Place place(a, row0, channel0);
  Raw<math>* to = z + place.row * kPitch + place.lane * 8;
  if (place.group < 0) {
    const float zeros[4] = {};
    put_four<math>(to, zeros);
    put_four<math>(to + 4, zeros);
    return;
  }
  const Range r = load_range(&c.header, a.code.header, 0);
  const side::Bounds b(r);
  const bool usual = met.fit(b);
  const Words kept = dropout.draw(place.group);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Decoder decoder = table.decoder(place.lane, half, falling);
    const uint32_t four = c.eight >> (8 * half);
    float gamma[4], beta[4], x[4];
    table.gamma.get_half(place.lane, half, gamma);
    table.beta.get_half(place.lane, half, beta);
    if (usual) {
#pragma unroll
      for (int k = 0; k < 4; ++k) x[k] = decoder.value<true>(k, four, b, a.code.table);
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) x[k] = is_poisoned(r) ? __uint_as_float(kCanonicalNaN) : decoder.value<false>(k, four, b, a.code.table);
    }
#pragma unroll
    for (int k = 0, j = 4 * half; k < 4; ++k, ++j) {
      x[k] = chain_output(fmaf(gamma[k], x[k], beta[k]), dropout.factor(kept, j, is_on(c.eight, j)));
    }
    put_four<math>(to + 4 * half, x);
  }
}

/// A thread's sums by FMA: 2·fragments columns × 8 channels. Lanes stand so that neighbours (i, i ^ 1) share G's values and (i, i ^ 2)
/// Z's: 16-byte reads of both then go out two quarters of a warp at a time.
template <class T, Math math>
struct Sums {
  static constexpr int kPiece = T::kFragments % 2 == 0 ? 4 : 2, kMine = 2 * T::kFragments;
  float sum[T::kSums] = {};
  int column, channel;  // the first of a thread's

  __device__ inline Sums(int lane, int column0, int channel0)
      : column(column0 + ((lane >> 1 & 1) | (lane >> 2 & 6)) * kPiece), channel(channel0 + ((lane & 1) | (lane >> 1 & 2)) * 4) {}

  __device__ inline void add(const float* g, const float* z) {
#pragma unroll 2
    for (int r = 0; r < T::kTeamRows; ++r) {
      float a[kMine], b[8];
#pragma unroll
      for (int i = 0; i < kMine; i += kPiece) {
        const float* from = g + r * T::kPitch + column + i * 8;
        if constexpr (kPiece == 4) {
          const float4 v = *reinterpret_cast<const float4*>(from);
          a[i] = v.x, a[i + 1] = v.y, a[i + 2] = v.z, a[i + 3] = v.w;
        } else {
          const float2 v = *reinterpret_cast<const float2*>(from);
          a[i] = v.x, a[i + 1] = v.y;
        }
      }
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        const float4 v = *reinterpret_cast<const float4*>(z + r * kPitch + channel + j * 4);
        b[j] = v.x, b[j + 1] = v.y, b[j + 2] = v.z, b[j + 3] = v.w;
      }
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[i * 8 + j] = fmaf(a[i], b[j], sum[i * 8 + j]);
      }
    }
  }

  /// Calls f(column, channel, x, y) for neighbouring channels.
  template <class F>
  __device__ inline void for_pairs(F&& f) const {
#pragma unroll
    for (int k = 0; k < T::kSums; k += 2) {
      const int i = k / 8, j = k % 8;
      f(column + i / kPiece * kPiece * 8 + i % kPiece, channel + j / 4 * 16 + j % 4, sum[k], sum[k + 1]);
    }
  }
};

/// A thread's sums by tensor cores: fragments of 16 columns × 8 channels.
template <class T>
struct FragmentSums {
  float sum[T::kSums] = {};
  int lane, column, channel;  // column, channel: the warp's first

  __device__ inline FragmentSums(int lane, int column0, int channel0) : lane(lane), column(column0), channel(channel0) {}

  template <class F>
  __device__ inline void for_pairs(F&& f) const {
#pragma unroll
    for (int k = 0; k < T::kSums; k += 2)
      f(column + k / 16 * 16 + k % 4 / 2 * 8 + lane / 4, channel + k / 4 % 4 * 8 + lane % 4 * 2, sum[k], sum[k + 1]);
  }
};

/// … of float32 as tf32, eight rows at a time.
template <class T>
struct Sums<T, Math::tf32> : FragmentSums<T> {
  using Base = FragmentSums<T>;
  using Base::Base, Base::sum, Base::lane, Base::column, Base::channel;

  __device__ static inline void multiply(float* c, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }

  __device__ inline void add(const float* g, const float* z) {
#pragma unroll 1  // two at a time take more than 128 registers
    for (int r = 0; r < T::kTeamRows; r += 8) {
      const float* from = g + (r + lane % 4) * T::kPitch + column + lane / 4;
      const float* with = z + (r + lane % 4) * kPitch + channel + lane / 4;
      uint32_t b[4][2];
#pragma unroll
      for (int j = 0; j < 4; ++j) b[j][0] = __float_as_uint(with[j * 8]), b[j][1] = __float_as_uint(with[j * 8 + 4 * kPitch]);
#pragma unroll
      for (int i = 0; i < T::kFragments; ++i) {
        const uint32_t a[4] = {rounded_tf32(from[i * 16]), rounded_tf32(from[i * 16 + 8]), rounded_tf32(from[i * 16 + 4 * T::kPitch]),
                               rounded_tf32(from[i * 16 + 8 + 4 * T::kPitch])};
#pragma unroll
        for (int j = 0; j < 4; ++j) multiply(sum + (i * 4 + j) * 4, a, b[j]);
      }
    }
  }
};

/// … of 16 bits, sixteen rows at a time. Both factors stand row after row, so ldmatrix turns them into columns.
template <class T, Math math>
requires(is_half(math)) struct Sums<T, math> : FragmentSums<T> {
  using Base = FragmentSums<T>;
  using Base::Base, Base::sum, Base::lane, Base::column, Base::channel;

  __device__ inline void add(const uint16_t* g, const uint16_t* z) {
    const int line = lane % 8, second = lane / 8 % 2 * 8, third = lane / 16 * 8;  // the lane's line, and its 8 × 8 numbers among the four
    const uint16_t* from = g + (line + third) * T::kPitch + column + second;
    const uint16_t* with = z + (line + second) * kPitch + channel + third;
#pragma unroll 1
    for (int r = 0; r < T::kTeamRows; r += 16) {
      uint32_t b[2][4];
#pragma unroll
      for (int j = 0; j < 2; ++j) load_halves<true>(b[j], with + r * kPitch + j * 16);
#pragma unroll
      for (int i = 0; i < T::kFragments; ++i) {
        uint32_t a[4];
        load_halves<true>(a, from + r * T::kPitch + i * 16);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          multiply_halves<kHalfType<math>>(sum + (i * 4 + j) * 4, a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
};

/// Team 0's sums become those of all teams, which hold the same columns and channels thread by thread.
template <class T>
__device__ inline void add_teams(float (&sum)[T::kSums], float* shared) {
  const int own = static_cast<int>(threadIdx.x) % T::kTeamThreads, team = static_cast<int>(threadIdx.x) / T::kTeamThreads;
#pragma unroll 1
  for (int t = 1; t < T::kTeams; ++t) {
    __syncthreads();  // what stood in shared memory has been read
    if (team == t) {
#pragma unroll
      for (int k = 0; k < T::kSums; ++k) shared[k * T::kTeamThreads + own] = sum[k];
    }
    __syncthreads();
    if (team == 0) {
#pragma unroll
      for (int k = 0; k < T::kSums; ++k) sum[k] += shared[k * T::kTeamThreads + own];
    }
  }
}

template <class T, Math math>
__global__ void __launch_bounds__(kBlockThreads, 1) multiply_codes(const __grid_constant__ Product a) {
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ ChannelTables table;
  static_assert(kStages == 3);
  constexpr int kG = kRows * T::kPitch, kZ = kRows * kPitch;
  auto* g = reinterpret_cast<Raw<math>*>(shared);
  Raw<math>* z = g + kStages * kG;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const int channel_tiles = static_cast<int>(ceil_div(a.code.channels, kChannels)), tile = static_cast<int>(blockIdx.y);
  const int column0 = tile / channel_tiles * T::kWidth, channel0 = tile % channel_tiles * kChannels;
  const int64_t steps = ceil_div(a.rows, kRows);
  const int first = static_cast<int>(steps * blockIdx.x / gridDim.x), last = static_cast<int>(steps * (blockIdx.x + 1) / gridDim.x);
  const auto row_of = [](int step) { return static_cast<int64_t>(step) * kRows; };

  table.fill(a.from.channels, a.code.channels, channel0);
  const Dropout dropout(a.chain, a.seed);
  fetch<T>(a, column0, row_of(first), g);
  end_copies();
  if (first + 1 < last) fetch<T>(a, column0, row_of(first + 1), g + kG);
  end_copies();
  Coded coded;
  coded.load(a, row_of(first), channel0);
  __syncthreads();  // the table
  const uint32_t falling = table.falling(thread % 16);
  const side::WarpChannels met = table.met(thread % 32);
  decode<math>(a, table, dropout, met, falling, coded, row_of(first), channel0, z);
  if (first + 1 < last) coded.load(a, row_of(first + 1), channel0);

  const int team_row = warp / (4 * T::kAcross) * T::kTeamRows;
  Sums<T, math> sums(thread % 32, warp / 4 % T::kAcross * 16 * T::kFragments, warp % 4 * 32);
  int stage = 0, side = 0;
#pragma unroll 1
  for (int step = first; step < last; ++step) {
    await_copies<1>();  // this step's; the next one's go on
    __syncthreads();    // G and Z of this step are there for all, and all are through with the last step
    if (step + 2 < last) fetch<T>(a, column0, row_of(step + 2), g + (stage == 0 ? 2 : stage - 1) * kG);
    end_copies();
    if (step + 1 < last) decode<math>(a, table, dropout, met, falling, coded, row_of(step + 1), channel0, z + (side ^ 1) * kZ);
    if (step + 2 < last) coded.load(a, row_of(step + 2), channel0);
    sums.add(g + stage * kG + team_row * T::kPitch, z + side * kZ + team_row * kPitch);
    stage = stage == 2 ? 0 : stage + 1, side ^= 1;
  }
  add_teams<T>(sums.sum, reinterpret_cast<float*>(shared));
  if (thread >= T::kTeamThreads) return;
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
