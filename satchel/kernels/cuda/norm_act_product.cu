// Gᵀ·Z from the codes of Z: G is read once a tile of 128 channels, Z is decoded 32 rows at a time into shared memory.
//
//   thread block: a share of the rows, a tile of columns × 128 channels     warp: 16·fragments columns × 32 channels, some of the rows
//
//   step s     G of s + 2 is being copied     Z of s + 1 is decoded     G and Z of s are multiplied     one barrier
//
// Narrow tiles leave warps over: these form teams that share out a step's rows, and their sums are added at the end, in order. A second
// kernel adds the thread blocks' sums, in order too.
#include <type_traits>

#include "satchel/kernels/cuda/norm_act_product.cuh"
#include "satchel/kernels/cuda/norm_act_product.h"
#include "satchel/kernels/cuda/partial_sums.cuh"

namespace satchel::cuda {
namespace epilogue::product {
namespace {

template <class T, Math math>
__global__ void __launch_bounds__(kBlockThreads, 1) multiply_codes(const __grid_constant__ Product a) {
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ ChannelTables table;
  static_assert(kStages == 3);
  constexpr int kG = kRows * T::kPitch, kZ = kRows * kPitch;
  auto* g = reinterpret_cast<Raw<math>*>(shared);
  auto* z = reinterpret_cast<float*>(g + kStages * kG);
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
  const WarpChannels met(table, thread % 32);
  decode<math>(a, table, dropout, met, falling, coded, row_of(first), channel0, z);
  if (first + 1 < last) coded.load(a, row_of(first + 1), channel0);

  const int team_row = warp / (4 * T::kAcross) * T::kTeamRows;
  Sums<T, math> sums(thread % 32, warp / 4 % T::kAcross * 16 * T::kFragments, warp % 4 * 32);
  int stage = 0, side = 0;
#pragma unroll 1
  for (int step = first; step < last; ++step) {
    await_copies();
    __syncthreads();  // G and Z of this step are there for all, and all are through with the last step
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
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const Split split(code, p);
  float* partial = static_cast<float*>(scratch);
  const int64_t rows = code.grid.values / code.channels, columns = p.count * p.width, each = p.width * code.channels;
  const int other = p.count - 1;
  const Product a = {
      code,    chain,       seed,   epilogue::parts_of(code, bytes), p.g[0], p.g[other], p.stride[0], p.stride[other], rows, p.width,
      columns, chunk_of(p), partial};
  const dim3 grid(grid_size(split.parts), grid_size(split.tiles));
  with_tile(split.shape, [&](auto tile) {
    with_math(math_of(p), [&](auto math) {
      using T = decltype(tile);
      constexpr int kShared = T::kShape.bytes(math());
      allow_shared(reinterpret_cast<const void*>(multiply_codes<T, math()>), kShared, op);
      multiply_codes<T, math()><<<grid, kBlockThreads, kShared, s>>>(a);
    });
  });
  check_launch(op);
  add_up(partial, split.parts, columns * code.channels, /*add=*/false, each, p.out[0], p.out[other], s, op);
}

}  // namespace satchel::cuda
