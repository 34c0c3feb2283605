// Decode of the block code: four neighbouring values a thread and step, or eight of a 16-bit type, so that a warp writes whole lines.
// Blocks of 256 values and more, the usual ones, have a kernel of their own.
#include "satchel/kernels/cuda/device.cuh"
#include "satchel/kernels/cuda/values.cuh"

namespace satchel::cuda {
namespace {

/// Where a code sits: by selection for 2 bits, from a table in shared memory (16 banks, no conflicts) for others.
template <int bits>
__device__ inline float level_at(uint32_t code, const LevelTable& levels, const float* table) {
  if (levels.even) return static_cast<float>(code);
  if constexpr (bits != 2) return table[code];
  const float lower = code == 0 ? 0.0f : levels.at[1], upper = code == 2 ? levels.at[2] : levels.at[3];
  return code < 2 ? lower : upper;
}

constexpr int kQuads = 4;  // a thread writes so many quads, 128 bytes apart over the warp

/// Four neighbouring values a thread and step, so that a warp writes 512 contiguous bytes of fp32. Blocks are multiples of 4. 0 bits: as
/// the code says.
template <int known, DType type, bool log>
__global__ void __launch_bounds__(kThreads)
    decode_quads(const __grid_constant__ BlockCode code, const uint8_t* codes, const void* headers, void* x, int shift) {
  __shared__ float table[16];
  const int bits = known > 0 ? known : code.levels.bits;
  if (known == 0) {
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
    uint32_t four = 0;
    if constexpr (known > 0)
      four = load_four<known>(codes, quad);
    else
      with_bits(bits, [&](auto own) { four = load_four<own()>(codes, quad); });
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float level = level_at<known>(four >> (bits * j) & ((1u << bits) - 1), code.levels, table);
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

/// Eight neighbouring values of a 16-bit type a thread and step. Blocks are 8 · 2^shift values. 0 bits: as the code says.
template <int known, DType type>
__global__ void __launch_bounds__(kThreads)
    decode_eights(const __grid_constant__ BlockCode code, const uint8_t* codes, const void* headers, void* x, int shift) {
  const int bits = known > 0 ? known : code.levels.bits;
  const uint32_t top = (1u << bits) - 1;
  __shared__ float table[16];
  if (threadIdx.x < 16) table[threadIdx.x] = code.levels.even ? static_cast<float>(threadIdx.x) : code.levels.at[threadIdx.x];
  __syncthreads();
  const int64_t groups = code.grid.values / 8, first = thread_index() / 32 * 32 * kQuads + threadIdx.x % 32;
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const int64_t group = first + 32 * q;
    if (group >= groups) return;
    const Header h = load_header(headers, code.header, group >> shift);
    const uint64_t eight = known > 0 ? load_eight<known>(codes, group) : load_eight(bits, codes, group);
    if (!is_usual(h, static_cast<float>(top))) {
#pragma unroll 1
      for (int j = 0; j < 8; ++j) store(x, type, group * 8 + j, value_of(static_cast<uint32_t>(eight >> (bits * j)) & top, h, code.levels));
      continue;
    }
    if constexpr (known == 2) {
      // The four values that there are, and of each pair of codes the bytes of its two.
      const uint32_t low = half_pair<type>(fmaf(table[0], h.step, h.low), fmaf(table[1], h.step, h.low));
      const uint32_t high = half_pair<type>(fmaf(table[2], h.step, h.low), fmaf(table[3], h.step, h.low));
      uint32_t w[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t two = static_cast<uint32_t>(eight) >> (4 * k);
        w[k] = __byte_perm(low, high, 0x1010u + (two & 3u) * 0x22u + (two >> 2 & 3u) * 0x2200u);
      }
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(x) + group * 8) = make_uint4(w[0], w[1], w[2], w[3]);
    } else {
      float v[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t c = static_cast<uint32_t>(eight >> (bits * j)) & top;
        v[j] = fmaf(code.levels.even ? float_of_code(c) : table[c], h.step, h.low);
      }
      write8<type, true>(x, group * 8, v);
    }
  }
}

/// Sixteen bytes of values from neighbouring codes of 1 to 4 or of 8 bits: eight of a 16-bit type, four of float32. Up to 4 bits every lane
/// works out one of the values that a block has, or for 1 and 2 bits and 16-bit types two side by side, and codes name the lane: a shuffle
/// looks at the lower five bits of a number alone, and lanes beyond the values hold them again. Every thread of the warp must call this,
/// with one header.
template <int bits, DType type>
struct WarpValues {
  static_assert(bits <= 4 || bits == 8);
  static constexpr uint32_t kTop = (1u << bits) - 1;
  static constexpr int kValues = type == DType::f32 ? 4 : 8;
  using Codes = std::conditional_t<(bits * kValues <= 32), uint32_t, uint64_t>;
  float first, second;  // levels of this lane

  __device__ inline explicit WarpValues(const LevelTable& levels) {
    const uint32_t lane = threadIdx.x % 32, a = lane & kTop, b = lane >> bits & kTop;
    first = levels.even || bits == 8 ? static_cast<float>(a) : levels.at[a];
    second = levels.even || bits == 8 ? static_cast<float>(b) : levels.at[b];
  }
  __device__ static inline Codes load(const uint8_t* codes, uint32_t unit) {
    if constexpr (type == DType::f32)
      return load_four<bits>(codes, unit);
    else
      return static_cast<Codes>(load_eight<bits>(codes, unit));
  }
  __device__ inline uint4 of(Codes c, Header h) const {
    const float own = fmaf(first, h.step, h.low);
    uint32_t w[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (type == DType::f32) {
        w[k] = __float_as_uint(bits <= 4 ? chosen(own, c, k) : worked_out(c, k, h));
      } else if constexpr (bits <= 2) {
        w[k] = __shfl_sync(~0u, half_pair<type>(own, fmaf(second, h.step, h.low)), static_cast<int>(c >> (2 * bits * k)));
      } else if constexpr (bits <= 4) {
        const uint32_t half = half_pair<type>(own, 0.0f);
        w[k] = __byte_perm(chosen(half, c, 2 * k), chosen(half, c, 2 * k + 1), 0x5410);
      } else {
        w[k] = half_pair<type>(worked_out(c, 2 * k, h), worked_out(c, 2 * k + 1, h));
      }
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
  }

 private:
  template <class T>
  __device__ static inline T chosen(T own, Codes c, int j) {
    return __shfl_sync(~0u, own, static_cast<int>(static_cast<uint32_t>(c >> (bits * j))));
  }
  /// Of 8 bits: the code in the low bits of 2^23 makes a number without a conversion.
  __device__ static inline float worked_out(Codes c, int j, Header h) {
    const uint32_t word = static_cast<uint32_t>(j < 4 ? c : static_cast<uint64_t>(c) >> 32);
    return fmaf(__uint_as_float(__byte_perm(word, 0x4b00u, 0x5440u + j % 4)) - 8388608.0f, h.step, h.low);
  }
};

/// That decode_warps() counts in 32 bits, of 4 or 8 values, the last thread block's past the last one too.
constexpr int64_t kMostUnits = (int64_t{1} << 32) - kThreads * kQuads;

/// Parts of 256 values of a block, kQuads of them a warp; 16 bytes of values a thread and step. Blocks are 256 · 2^shift values.
template <int bits, DType type>
__global__ void __launch_bounds__(kThreads)
    decode_warps(const __grid_constant__ BlockCode code, const uint8_t* codes, const void* headers, uint4* x, int shift, uint32_t units) {
  using Values = WarpValues<bits, type>;
  constexpr int kSteps = 8 / Values::kValues, kTaken = type == DType::f32 ? 2 : kQuads;  // steps a part, parts a warp
  const uint32_t lane = threadIdx.x % 32, first = (blockIdx.x * (kThreads / 32) + threadIdx.x / 32) * kTaken;
  const bool is_bf16 = code.header == HeaderType::bf16;
  const auto begin = [&](int q) { return (first + q) * (32 * kSteps); };  // of a part
  uint2 raw[kTaken];
  typename Values::Codes own[kTaken][kSteps];
#pragma unroll
  for (int q = 0; q < kTaken; ++q) {  // all reads are on their way before the first is waited for
    if (begin(q) >= units) break;
    const uint32_t block = (first + q) >> shift;
    if (is_bf16)
      raw[q].x = __ldg(static_cast<const uint32_t*>(headers) + block);
    else
      raw[q] = __ldg(static_cast<const uint2*>(headers) + block);
#pragma unroll
    for (int e = 0; e < kSteps; ++e) {
      const uint32_t unit = begin(q) + e * 32 + lane;
      own[q][e] = unit < units ? Values::load(codes, unit) : 0;
    }
  }
  const Values values(code.levels);
#pragma unroll
  for (int q = 0; q < kTaken; ++q) {
    if (begin(q) >= units) return;
    const float low = __uint_as_float(is_bf16 ? raw[q].x << 16 : raw[q].x);
    const float step = __uint_as_float(is_bf16 ? raw[q].x & 0xffff0000u : raw[q].y);
    const Header h = {low, is_finite(step) ? step : __uint_as_float(kCanonicalNaN)};  // as load_header() has it
    const bool usual = is_usual(h, Values::kTop);
#pragma unroll
    for (int e = 0; e < kSteps; ++e) {
      const uint32_t unit = begin(q) + e * 32 + lane;
      if (usual) {
        const uint4 w = values.of(own[q][e], h);
        if (unit < units) x[unit] = w;
      } else if (unit < units) {
#pragma unroll 1
        for (int j = 0; j < Values::kValues; ++j) {
          const uint32_t c = static_cast<uint32_t>(own[q][e] >> (bits * j)) & Values::kTop;
          store(x, type, static_cast<int64_t>(unit) * Values::kValues + j, value_of(c, h, code.levels));
        }
      }
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
    const int64_t units = type == DType::f32 ? quads : whole / 8;
    const unsigned launched = blocks_for(ceil_div(whole, kQuads * 256) * 32), each = blocks_for(ceil_div(quads, kQuads * 32) * 32);
    const bool warps = !log && (eights || type == DType::f32) && shift >= 6 && units <= kMostUnits;
    with_bits(code.levels.bits, [&](auto bits) {
      constexpr int kOwn = bits() == 2 ? 2 : 0;  // short blocks of other bits are rare, and so are 5 to 7 bits
      if constexpr (!log && (bits() <= 4 || bits() == 8)) {
        if (warps) {
          const unsigned grid_of_warps = type == DType::f32 ? each : launched;
          uint4* const to = static_cast<uint4*>(x);
          decode_warps<bits(), type><<<grid_of_warps, kThreads, 0, s>>>(code, codes, headers, to, shift - 6, static_cast<uint32_t>(units));
          return;
        }
      }
      if constexpr (type != DType::f32) {
        if (eights) {
          decode_eights<kOwn, type><<<launched, kThreads, 0, s>>>(code, codes, headers, x, shift - 1);
          return;
        }
      }
      decode_quads<type == DType::f32 && !log ? kOwn : 0, type, log><<<each, kThreads, 0, s>>>(code, codes, headers, x, shift);
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
