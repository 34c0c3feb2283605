// fp32 products on Hopper's tensor cores: each factor stands as the sum of two f16 numbers, 22 bits of mantissa together.
//
//   x·2^e = high + low,  y·2^f = high' + low',  e and f such that the largest of 32 values of a line reaches 2^14
//   Σ x·y = 2^−(e + f) · Σ (low·high' + high·low' + high·high')         low·low', 2^−22 of the product, is left out
//
// f16 ends at 2^−24, so what a value loses is 2^−22 of itself or 2^−39 of the largest of its 32, whichever is more. Tensor cores cut their
// sums off instead of rounding them, toward zero; over thousands of rows that would add up. So they sum over a depth of 32 only, the small
// terms first, and FMAs add these sums in fp32.
//
//   thread block     warpgroups 0, 1: multiply, 64 rows of the tile each        warpgroups 2, 3: read, cut and write tiles
//   stages           | s: being multiplied | s + 1: full | s + 2: being written |, in a ring
#pragma once

#include <type_traits>

#include "satchel/kernels/cuda/values.cuh"

namespace satchel::cuda::split {

constexpr int kDepth = 32;  // summed by tensor cores
constexpr int kRows = 128;  // of a thread block's tile
constexpr int kWarpgroup = 128;
constexpr int kSide = 2 * kWarpgroup;  // threads that multiply; as many write tiles
constexpr int kBlockThreads = 2 * kSide;
constexpr int kStages = 3;

/// Powers of two: `to` brings the largest magnitude to [2^14, 2^15), `back` undoes it. Below 2^−100 both stay where they are.
struct Scale {
  float to, back;
};
__device__ inline Scale scale_of(float largest) {
  const uint32_t exponent = max(__float_as_uint(largest) >> 23, 27u);
  return {__uint_as_float((268u - exponent) << 23), __uint_as_float((exponent - 14u) << 23)};
}

__device__ inline uint32_t rest(float x, float y, uint32_t high) {
  return f16_pair(x - low_half<DType::f16>(high), y - high_half<DType::f16>(high));
}
/// `count` values of a line in two pieces, whole words of 4 or 8.
template <int count, class T>
__device__ inline void put(T& tile, int line, int depth, const float (&v)[count], float scale) {
  using Word = std::conditional_t<count == 8, uint4, uint2>;
  alignas(16) uint32_t high[count / 2], low[count / 2];
#pragma unroll
  for (int k = 0; k < count / 2; ++k) {
    const float x = v[2 * k] * scale, y = v[2 * k + 1] * scale;
    high[k] = f16_pair(x, y), low[k] = rest(x, y, high[k]);
  }
  const int at = static_cast<int>(T::index(line, depth));
  *reinterpret_cast<Word*>(tile.high + at) = *reinterpret_cast<const Word*>(high);
  *reinterpret_cast<Word*>(tile.low + at) = *reinterpret_cast<const Word*>(low);
}

/// Both pieces of a tile in shared memory: lines of 32, in matrices of 8 lines × 8 as tensor cores read them, 128 bytes each.
///
///   line 0–7, depth 0–7 | 8–15 | 16–23 | 24–31 | line 8–15, depth 0–7 | …
///
/// `across` bytes from a matrix to the next of greater depth and `down` to the next eight lines: such that those who write at a time meet
/// different banks.
template <int lines, int across, int down>
struct Tile {
  static_assert(across >= 128 && down >= kDepth / 8 * across && across % 16 == 0 && down % 16 == 0);
  static constexpr int kHalves = lines / 8 * (down / 2);
  alignas(128) uint16_t high[kHalves], low[kHalves];

  __host__ __device__ static constexpr int64_t index(int64_t line, int depth) {
    return line / 8 * (down / 2) + depth / 8 * (across / 2) + line % 8 * 8 + depth % 8;
  }

  /// What describes a piece from `line` on to tensor cores: address and both distances in words of 16 bytes.
  __device__ static inline uint64_t described(const uint16_t* piece, int line) {
    const uint64_t address = static_cast<uint32_t>(__cvta_generic_to_shared(piece + index(line, 0)));
    return (address & 0x3ffff) >> 4 | uint64_t{across >> 4} << 16 | uint64_t{down >> 4} << 32;
  }
  static constexpr uint64_t kDeeper = 2 * across >> 4;  // a description 16 deeper
};

/// d (+)= 64 lines × 16 deep times 128 or 64 lines × 16 deep; under way until awaited.
__device__ inline void multiply(float (&d)[64], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, "
      "%43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, 0, "
      "0;}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]),
        "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),
        "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]),
        "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]),
        "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b), "r"(add));
}
__device__ inline void multiply(float (&d)[32], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, 0;}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]),
        "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),
        "+f"(d[31])
      : "l"(a), "l"(b), "r"(add));
}
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ inline void await_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

/// Which stage, and how often the ring has gone round: the parity of the phase that its barriers are in. Writers and multipliers each
/// count.
struct Turn {
  int stage = 0;
  uint32_t parity = 0;

  __device__ inline Turn next() const { return stage + 1 == kStages ? Turn{0, parity ^ 1u} : Turn{stage + 1, parity}; }
};

/// Who waits for whom, by two barriers in shared memory a stage. In round r of the ring phase r of `full` ends when all writers have
/// arrived, and phase r of `empty` when all who multiply have. Writers of round r wait for phase r − 1 of `empty`, whose parity is
/// the other one; before the first round nobody has arrived, and a wait for the phase before the first ends at once.
///
/// So nobody arrives twice in a phase, and each phase has been waited for before anybody arrives in the next: a writer has seen the stage
/// empty, a multiplier has seen it full.
struct Ring {
  alignas(8) uint64_t full[kStages], empty[kStages];

  /// By one thread; the others use the ring after __syncthreads().
  __device__ inline void begin() {
    for (int stage = 0; stage < kStages; ++stage) begin(full + stage, kSide), begin(empty + stage, kSide);
  }

  __device__ inline void await_empty(const Turn& t) const { await(empty + t.stage, t.parity ^ 1u); }
  /// Each writer says so for itself, of all that it has written and copied to the stage.
  __device__ inline void say_full(const Turn& t) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // tensor cores see what this thread wrote
    arrive(full + t.stage);
  }

  __device__ inline void await_full(const Turn& t) const {
    await(full + t.stage, t.parity);
    __syncwarp();  // tensor cores take whole warps
  }
  /// After await_products(): tensor cores have read the stage, and each thread its scales. One lane could speak for its warp; racecheck
  /// would not follow it, and it takes no less time.
  __device__ inline void say_empty(const Turn& t) { arrive(empty + t.stage); }

 private:
  __device__ static inline uint32_t address(const uint64_t* barrier) { return static_cast<uint32_t>(__cvta_generic_to_shared(barrier)); }
  __device__ static inline void begin(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(arrivals) : "memory");
  }
  __device__ static inline void arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
  }
  /// Returns when the phase of this parity has ended.
  __device__ static inline void await(const uint64_t* barrier, uint32_t parity) {
    uint32_t ended = 0;
    while (ended == 0) {
      asm volatile(
          "{.reg .pred p;\n"
          "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;}\n"
          : "=r"(ended)
          : "r"(address(barrier)), "r"(parity)
          : "memory");
    }
  }
};

/// Registers go from those who write to those who multiply.
__device__ inline void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 104;"); }
__device__ inline void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 152;"); }

/// A warpgroup's sums: 64 rows × width columns. sum[4·j + 2·h + i] is that of row + 8·h and column + 8·j + i.
template <int width>
struct Sums {
  float sum[width / 2] = {};
  int row, column;

  __device__ inline Sums() {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    row = warp * 16 + lane / 4, column = lane % 4 * 2;
  }

  /// What the left's line `row` and the right's line `column` were scaled by is undone by back_row and back_column.
  template <class Left, class Right>
  __device__ inline void add(const Left& left, const Right& right, const float* back_row, const float* back_column) {
    float part[width / 2];
    fence(part);
    const int own = static_cast<int>(threadIdx.x) / kWarpgroup * 64;
    const uint64_t high = Left::described(left.high, own), low = Left::described(left.low, own);
    const uint64_t other_high = Right::described(right.high, 0), other_low = Right::described(right.low, 0);
    begin_products();
    multiply(part, low, other_high, 0);
    multiply(part, low + Left::kDeeper, other_high + Right::kDeeper, 1);
    multiply(part, high, other_low, 1);
    multiply(part, high + Left::kDeeper, other_low + Right::kDeeper, 1);
    multiply(part, high, other_high, 1);
    multiply(part, high + Left::kDeeper, other_high + Right::kDeeper, 1);
    end_products();
    await_products();
    fence(part);
    const float by_row[2] = {back_row[row], back_row[row + 8]};
#pragma unroll
    for (int j = 0; j < width / 8; ++j) {
      const float2 by_column = *reinterpret_cast<const float2*>(back_column + column + 8 * j);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float* to = sum + 4 * j + 2 * h;
        to[0] = fmaf(part[4 * j + 2 * h] * by_row[h], by_column.x, to[0]);
        to[1] = fmaf(part[4 * j + 2 * h + 1] * by_row[h], by_column.y, to[1]);
      }
    }
  }

  __device__ inline void clear() {
#pragma unroll
    for (float& x : sum) x = 0.0f;
  }

 private:
  /// The compiler moves no use of `part` across.
  __device__ static inline void fence(float (&part)[width / 2]) {
#pragma unroll
    for (float& x : part) asm volatile("" : "+f"(x)::"memory");
  }
};

}  // namespace satchel::cuda::split
