// Launches of the product from codes (product_kernel.cuh).
#include "satchel/kernels/cuda/partial_sums.cuh"
#include "satchel/kernels/cuda/product_kernel.cuh"
#include "satchel/kernels/cuda/split_product.h"

namespace satchel::cuda {
namespace epilogue::product {
namespace {

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
  const Math math = math_of(p);
  if (is_half(math) && split.shape.width() == kPanelColumns && split_fits())
    multiply_panels(a, math, grid, stream, op);
  else
    with_tile(split.shape, [&](auto tile) {
      with_math(math, [&](auto known) {
        using T = decltype(tile);
        if constexpr (T::kShape.serves(known())) {
          constexpr int kShared = T::kShape.bytes(known());
          allow_shared(reinterpret_cast<const void*>(multiply_codes<T, known()>), kShared, op);
          launch_kernel(op, stream, {grid, kBlockThreads, kShared}, multiply_codes<T, known()>, a);
        }
      });
    });
  add_up(partial, split.parts, columns * code.channels, /*add=*/false, each, p.out[0], p.out[p.count - 1], stream, op);
}

}  // namespace satchel::cuda
