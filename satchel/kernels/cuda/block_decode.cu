// Decode of the block code: four neighbouring values a thread and step, so that a warp writes whole lines.
#include "satchel/kernels/cuda/device.cuh"

namespace satchel::cuda {
namespace {

/// Where a code sits: by selection for 2 bits, from a table in shared memory (16 banks, no conflicts) for 3 and 4.
template <int bits>
__device__ inline float level_at(uint32_t code, const LevelTable& levels, const float* table) {
  if constexpr (bits == 1 || bits > 4) return static_cast<float>(code);
  if (levels.even) return static_cast<float>(code);
  if constexpr (bits > 2) return table[code];
  const float lower = code == 0 ? 0.0f : levels.at[1], upper = code == 2 ? levels.at[2] : levels.at[3];
  return code < 2 ? lower : upper;
}

constexpr int kQuads = 4;  // a thread writes so many quads, 128 bytes apart over the warp

/// Four neighbouring values a thread and step, so that a warp writes 512 contiguous bytes of fp32. Blocks are multiples of 4.
template <int bits, DType type>
__global__ void __launch_bounds__(kThreads)
    decode_quads(const __grid_constant__ BlockCode code, const uint8_t* codes, const void* headers, void* x, int shift) {
  __shared__ float table[16];
  if (bits == 3 || bits == 4) {
    if (threadIdx.x < 16) table[threadIdx.x] = code.levels.at[threadIdx.x];
    __syncthreads();
  }
  const int64_t quads = code.grid.values / 4, warp = thread_index() / 32;
  const int64_t first = warp * 32 * kQuads + threadIdx.x % 32;
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const int64_t quad = first + 32 * q;
    if (quad >= quads) return;
    const int64_t b = shift >= 0 ? quad >> shift : quad * 4 / code.grid.block;
    const Header h = load_header(headers, code.header, b);
    const uint32_t four = load_four<bits>(codes, quad);
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float level = level_at<bits>(four >> (bits * j) & ((1u << bits) - 1), code.levels, table);
      v[j] = is_poisoned(h) ? __uint_as_float(kCanonicalNaN) : flush(fmaf(level, h.step, h.low));
    }
    store4<type>(x, quad * 4, v);
  }
}

/// Any values: one a thread.
template <DType type>
__global__ void __launch_bounds__(kThreads)
    decode_any(const __grid_constant__ BlockCode code, const uint8_t* codes, const void* headers, void* x, int64_t first) {
  const int64_t i = first + thread_index();
  if (i >= code.grid.values) return;
  const Header h = load_header(headers, code.header, code.grid.block_of(i));
  store(x, type, i, value_of(get_code(codes, code.levels.bits, i), h, code.levels));
}

}  // namespace

void decode(const BlockCode& code, const uint8_t* codes, const void* headers, void* x, DType type, StreamHandle stream) {
  const Grid& grid = code.grid;
  if (grid.values == 0) return;
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const int64_t quads = grid.is_straight() && grid.block % 4 == 0 && is_aligned(x) && is_aligned(codes, code_alignment(code.levels.bits))
                            ? grid.values / 4
                            : 0;
  int shift = -1;
  for (int k = 0; k < 40; ++k) shift = grid.block == int64_t{4} << k ? k : shift;
  with_type(type, [&](auto t) {
    if (quads > 0) {
      with_bits(code.levels.bits, [&](auto bits) {
        decode_quads<bits(), t()><<<blocks_for(ceil_div(quads, kQuads * 32) * 32), kThreads, 0, s>>>(code, codes, headers, x, shift);
      });
      check_launch("decode");
    }
    if (const int64_t left = grid.values - quads * 4; left > 0) {
      decode_any<t()><<<blocks_for(left), kThreads, 0, s>>>(code, codes, headers, x, quads * 4);
      check_launch("decode");
    }
  });
}

}  // namespace satchel::cuda
