// The product from codes (product_kernel.cuh) by wgmma, which Hopper alone has: no warp reads its factors, and products go on while the
// warps that asked for them decode.
//
//   warpgroup: 64 columns × 128 channels
#include "satchel/kernels/cuda/product_kernel.cuh"

namespace satchel::cuda::epilogue::product {
namespace {

using Panels = Tile<4, 4, true>;
static_assert(Panels::kWidth == kPanelColumns);

/// d += 64 lines × 16 deep times 128 lines × 16 deep, of columns both; under way until awaited.
template <Math math>
__device__ inline void multiply_columns(float (&d)[64], uint64_t a, uint64_t b) {
#define SATCHEL_MULTIPLY(type)                                                                                                            \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                                                               \
               " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "    \
               "%25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
               "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, 1, 1, 1, 1, 1;"                     \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),  \
                 "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),     \
                 "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),     \
                 "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]),     \
                 "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]),     \
                 "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]),     \
                 "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])      \
               : "l"(a), "l"(b))
  if constexpr (math == Math::f16)
    SATCHEL_MULTIPLY("f16");
  else
    SATCHEL_MULTIPLY("bf16");
#undef SATCHEL_MULTIPLY
}

}  // namespace

template <Math math>
struct Sums<Panels, math> {
  using At = Places<Panels>;
  static constexpr uint32_t kWords = 16 / sizeof(uint16_t);  // descriptions count in words of 16 bytes
  float sum[64] = {};
  uint32_t own;  // of the warpgroup's panel

  __device__ inline Sums() : own(__reduce_or_sync(~0u, threadIdx.x / 128 * (At::kPanel / kWords))) {}

  /// A factor from `word` on: to the next 64 numbers a panel, to the next eight rows 1,024 bytes; and words of 128 bytes change places.
  __device__ static inline uint64_t described(uint32_t word) {
    constexpr uint64_t kHigh = uint64_t{At::kPanel / kWords} << 16 | uint64_t{1024 / 16} << 32 | uint64_t{1} << 62;
    return kHigh | word;
  }

  __device__ inline void add(const uint16_t* g, const uint16_t* z) {
    const uint32_t of_g = shared_address(g) / 16 + own, of_z = shared_address(z) / 16;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (uint32_t r = 0; r < kRows; r += 16)
      multiply_columns<math>(sum, described(of_g + r * (64 / kWords)), described(of_z + r * (64 / kWords)));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }
  __device__ inline void await() {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (float& x : sum) asm volatile("" : "+f"(x)::"memory");  // not before
  }

  template <class F>
  __device__ inline void for_pairs(F&& f) const {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
#pragma unroll
    for (int k = 0; k < 64; k += 2) f(thread / 32 * 16 + lane / 4 + k / 2 % 2 * 8, k / 4 * 8 + lane % 4 * 2, sum[k], sum[k + 1]);
  }
};

void multiply_panels(const Product& a, Math math, dim3 grid, StreamHandle stream, const char* op) {
  constexpr int kShared = Panels::kShape.bytes(Math::f16);
  static_assert((Panels::kShape.stages(Math::f16) * Places<Panels>::kG + 2 * Places<Panels>::kZ) * 2 + kPanelBytes <= kShared);
  const auto kernel = math == Math::f16 ? multiply_codes<Panels, Math::f16> : multiply_codes<Panels, Math::bf16>;
  allow_shared(reinterpret_cast<const void*>(kernel), kShared, op);
  launch_kernel(op, stream, {grid, kBlockThreads, kShared}, kernel, a);
}

}  // namespace satchel::cuda::epilogue::product
