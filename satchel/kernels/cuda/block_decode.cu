// Decode of the block code: four neighbouring values a thread and step, or eight of a 16-bit type, so that a warp writes whole lines.
#include "satchel/kernels/cuda/device.cuh"
#include "satchel/kernels/cuda/values.cuh"

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
template <int bits, DType type, bool log>
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
      if constexpr (log) v[j] = logf(v[j]);
    }
    store4<type>(x, quad * 4, v);
  }
}

/// Low and step are 0 or so large that no value is subnormal, and every value is far from the end of any type: nothing is to be flushed or
/// cut off.
__device__ inline bool is_usual(Header h, float top) {
  const auto between = [](float x, float least) { return (x == 0.0f) | ((fabsf(x) >= least) & (fabsf(x) <= 0x1p14f)); };
  return between(h.low, 0x1p-64f) & between(h.step * top, 0x1p-110f);
}

/// A whole number below 2^23 in the low bits of one from 2^23 on: no conversion instruction.
__device__ inline float float_of_code(uint32_t code) { return __uint_as_float(0x4b000000u | code) - 8388608.0f; }

/// Eight neighbouring values of a 16-bit type a thread and step. Blocks are 8 · 2^shift values.
template <int bits, DType type>
__global__ void __launch_bounds__(kThreads)
    decode_eights(const __grid_constant__ BlockCode code, const uint8_t* codes, const void* headers, void* x, int shift) {
  constexpr uint32_t kTop = (1u << bits) - 1;
  __shared__ float table[16];
  if (threadIdx.x < 16) table[threadIdx.x] = code.levels.even || bits > 4 ? static_cast<float>(threadIdx.x) : code.levels.at[threadIdx.x];
  __syncthreads();
  const int64_t groups = code.grid.values / 8, first = thread_index() / 32 * 32 * kQuads + threadIdx.x % 32;
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const int64_t group = first + 32 * q;
    if (group >= groups) return;
    const Header h = load_header(headers, code.header, group >> shift);
    const uint64_t eight = load_eight<bits>(codes, group);
    if (!is_usual(h, kTop)) {
      for (int j = 0; j < 8; ++j)
        store(x, type, group * 8 + j, value_of(static_cast<uint32_t>(eight >> (bits * j)) & kTop, h, code.levels));
      continue;
    }
    if constexpr (bits <= 2) {
      // The four values that there are, and of each pair of codes the bytes of its two.
      const uint32_t low = half_pair<type>(fmaf(table[0], h.step, h.low), fmaf(table[1], h.step, h.low));
      const uint32_t high = bits == 1 ? 0u : half_pair<type>(fmaf(table[2], h.step, h.low), fmaf(table[3], h.step, h.low));
      uint32_t w[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t two = static_cast<uint32_t>(eight) >> (2 * bits * k);
        w[k] = __byte_perm(low, high, 0x1010u + (two & kTop) * 0x22u + (two >> bits & kTop) * 0x2200u);
      }
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(x) + group * 8) = make_uint4(w[0], w[1], w[2], w[3]);
    } else {
      float v[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t c = static_cast<uint32_t>(eight >> (bits * j)) & kTop;
        v[j] = fmaf(bits <= 4 ? table[c] : float_of_code(c), h.step, h.low);
      }
      write8<type, true>(x, group * 8, v);
    }
  }
}

/// Any values: one a thread.
template <DType type, bool log>
__global__ void __launch_bounds__(kThreads)
    decode_any(const __grid_constant__ BlockCode code, const uint8_t* codes, const void* headers, void* x, int64_t first) {
  const int64_t i = first + thread_index();
  if (i >= code.grid.values) return;
  const Header h = load_header(headers, code.header, code.grid.block_of(i));
  const float v = value_of(get_code(codes, code.levels.bits, i), h, code.levels);
  store(x, type, i, log ? logf(v) : v);
}

template <DType type, bool log>
void decode_typed(const BlockCode& code, const uint8_t* codes, const void* headers, void* x, cudaStream_t s) {
  const Grid& grid = code.grid;
  const int64_t quads = grid.is_straight() && grid.block % 4 == 0 && is_aligned(x) && is_aligned(codes, code_alignment(code.levels.bits))
                            ? grid.values / 4
                            : 0;
  int shift = -1;
  for (int k = 0; k < 40; ++k) shift = grid.block == int64_t{4} << k ? k : shift;
  const bool eights = quads > 1 && shift > 0 && type != DType::f32 && is_aligned(codes, 8);
  const int64_t whole = eights ? quads / 2 * 8 : quads * 4;
  if (quads > 0) {
    with_bits(code.levels.bits, [&](auto bits) {
      if constexpr (type != DType::f32) {
        if (eights) {
          const unsigned blocks = blocks_for(ceil_div(whole / 8, kQuads * 32) * 32);
          decode_eights<bits(), type><<<blocks, kThreads, 0, s>>>(code, codes, headers, x, shift - 1);
          return;
        }
      }
      decode_quads<bits(), type, log><<<blocks_for(ceil_div(quads, kQuads * 32) * 32), kThreads, 0, s>>>(code, codes, headers, x, shift);
    });
    check_launch("decode");
  }
  if (const int64_t left = grid.values - whole; left > 0) {
    decode_any<type, log><<<blocks_for(left), kThreads, 0, s>>>(code, codes, headers, x, whole);
    check_launch("decode");
  }
}

}  // namespace

void decode(const BlockCode& code, const uint8_t* codes, const void* headers, void* x, DType type, StreamHandle stream) {
  if (code.grid.values == 0) return;
  with_type(type, [&](auto t) { decode_typed<t(), false>(code, codes, headers, x, static_cast<cudaStream_t>(stream)); });
}

void decode_log(const BlockCode& code, const uint8_t* codes, const void* headers, float* x, StreamHandle stream) {
  if (code.grid.values > 0) decode_typed<DType::f32, true>(code, codes, headers, x, static_cast<cudaStream_t>(stream));
}

}  // namespace satchel::cuda
