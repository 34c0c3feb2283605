// Softmax and cross entropy of every row in one read and one write: a team of up to 32 threads a row, eight classes a thread in
// registers (more are read again from the cache). Every thread writes only what it has read itself. Row losses are added in double,
// thread by thread, then by a tree, so that a run repeats to the bit.
#include "satchel/kernels/cuda/loss.h"
#include "satchel/kernels/cuda/values.cuh"

namespace satchel::cuda {
namespace {

constexpr int kHeld = 8;                        // classes a thread keeps in registers
constexpr int64_t kParts = kSumProcessors * 8;  // thread blocks that share the rows; one partial sum each

/// Threads a row: the fewest that hold it, a power of two.
int team_size(int64_t classes) {
  int lanes = 1;
  while (lanes < 32 && lanes * kHeld < classes) lanes *= 2;
  return lanes;
}

/// Calls f(class, place in registers) for the classes of one thread.
template <bool held, class F>
__device__ inline void for_classes(int64_t classes, int lane, int lanes, const F& f) {
  if constexpr (held) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (lane + k * lanes < classes) f(static_cast<int64_t>(lane + k * lanes), k);
    }
  } else {
    for (int64_t c = lane; c < classes; c += lanes) f(c, 0);
  }
}

/// Over teams of neighbouring threads; every thread of the warp takes part.
__device__ inline float team_max(float v, int lanes) {
  for (int o = lanes / 2; o > 0; o /= 2) v = max_nan(v, __shfl_xor_sync(~0u, v, o));
  return v;
}
__device__ inline float team_sum(float v, int lanes) {
  for (int o = lanes / 2; o > 0; o /= 2) v += __shfl_xor_sync(~0u, v, o);
  return v;
}

/// The sum over a thread block of kThreads threads, for its first thread.
__device__ inline double block_sum(double v) {
  __shared__ double warps[kThreads / 32];
  for (int o = 16; o > 0; o /= 2) v += __shfl_down_sync(~0u, v, o);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
  __syncthreads();
  double sum = 0;
  if (threadIdx.x == 0) {
    for (const double w : warps) sum += w;
  }
  return sum;
}

template <DType type, bool held>
__global__ void __launch_bounds__(kThreads) cross_entropy_rows(const __grid_constant__ LabelledRows r, void* logits, const int64_t* labels,
                                                               bool write, int lanes, double* partial) {
  const float fraction = static_cast<float>(r.scale / static_cast<double>(r.counted));
  const int lane = static_cast<int>(threadIdx.x) % lanes, team = static_cast<int>(threadIdx.x) / lanes, teams = kThreads / lanes;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * teams;
  const auto label_of = [&](int64_t row) { return row < r.rows ? __ldg(reinterpret_cast<const long long*>(labels) + row) : kIgnored; };
  double sum = 0;
  int64_t first = static_cast<int64_t>(blockIdx.x) * teams, label = label_of(first + team), next = kIgnored;
  // The bound is the same for a whole thread block: no thread leaves while others shuffle. Labels are read a row ahead of their use.
  for (; first < r.rows; first += stride, label = next) {
    const int64_t row = first + team, at = row * r.classes;
    next = label_of(row + stride);
    const bool counts = label != kIgnored, known = label >= 0 && label < r.classes;
    float v[kHeld] = {}, most = float_of(0xff800000u), total = 0.0f, own = 0.0f;
    const auto value = [&](int64_t c, int k) { return held ? v[k] : read1<type>(logits, at + c); };
    const auto power = [&](int64_t c, int k) { return held ? v[k] : expf(value(c, k) - most); };  // once v holds powers
    if (counts) {
      for_classes<held>(r.classes, lane, lanes, [&](int64_t c, int k) {
        if (held) v[k] = read1<type>(logits, at + c);
        most = max_nan(most, value(c, k));
      });
    }
    most = team_max(most, lanes);
    if (counts) {
      for_classes<held>(r.classes, lane, lanes, [&](int64_t c, int k) {
        const float above = value(c, k) - most, e = expf(above);
        if (c == label) own = above;
        if (held) v[k] = e;
        total += e;
      });
    }
    total = team_sum(total, lanes);
    if (counts && !known) {
      total = float_of(0x7fc00000u);
      sum = total;
    }
    if (known && static_cast<int>(label & (lanes - 1)) == lane) sum += static_cast<double>(logf(total) - own);
    if (!write || row >= r.rows) continue;  // what follows is each thread's own
    const float scale = fraction / total;
    for_classes<held>(r.classes, lane, lanes, [&](int64_t c, int k) {
      const float g = counts ? fmaf(power(c, k), scale, c == label ? -fraction : 0.0f) : 0.0f;
      write1<type>(logits, at + c, g);
    });
  }
  const double all = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = all;
}

__global__ void __launch_bounds__(kThreads) finish_loss(const double* partial, int64_t parts, int64_t counted, float* loss) {
  double sum = 0;
  for (int64_t p = threadIdx.x; p < parts; p += kThreads) sum += partial[p];
  const double all = block_sum(sum);
  if (threadIdx.x == 0) *loss = static_cast<float>(all / static_cast<double>(counted));
}

/// Four neighbours at an aligned address.
template <DType type>
__device__ inline void write4(void* x, int64_t i, const float (&v)[4]) {
  if constexpr (type == DType::f32)
    *reinterpret_cast<float4*>(static_cast<float*>(x) + i) = make_float4(v[0], v[1], v[2], v[3]);
  else
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(x) + i) = make_uint2(half_pair<type>(v[0], v[1]), half_pair<type>(v[2], v[3]));
}

template <DType type, bool vector>
__global__ void __launch_bounds__(kThreads) scale_values(void* x, int64_t values, const float* factor) {
  const float f = __ldg(factor);
  if (f == 1.0f) return;
  constexpr int kEach = vector ? 4 : 1;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x * kEach;
  for (int64_t i = thread_index() * kEach; i < values; i += stride) {
    if (vector && i + 4 <= values) {
      float v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = read1<type>(x, i + j) * f;
      write4<type>(x, i, v);
    } else {
      for (int64_t j = i; j < i + kEach && j < values; ++j) write1<type>(x, j, read1<type>(x, j) * f);
    }
  }
}

}  // namespace

int64_t cross_entropy_scratch_bytes() { return kParts * static_cast<int64_t>(sizeof(double)); }

void cross_entropy(const LabelledRows& r, void* logits, DType type, const int64_t* labels, bool write, float* loss, void* scratch,
                   StreamHandle stream) {
  if (r.counted < 1) fail("cross_entropy", "at least one row must count", r.counted);
  const int lanes = team_size(r.classes);
  const int64_t all = ceil_div(r.rows, kThreads / lanes), parts = all < kParts ? all : kParts;
  double* partial = static_cast<double*>(scratch);
  if (parts > 0) {
    with_values(type, r.classes <= static_cast<int64_t>(lanes) * kHeld, [&](auto t, auto held) {
      launch_kernel("cross_entropy", stream, {grid_size(parts)}, cross_entropy_rows<t(), held()>, r, logits, labels, write, lanes, partial);
    });
  }
  launch_kernel("cross_entropy", stream, {1}, finish_loss, partial, parts, r.counted, loss);
}

void scale(void* x, DType type, int64_t values, const float* factor, StreamHandle stream) {
  if (values == 0) return;
  const bool vector = is_aligned(x);
  const int64_t blocks = blocks_in_units(ceil_div(values, kThreads * (vector ? 4 : 1)), 1, resident(this_gpu(), kScale));
  with_values(type, vector, [&](auto t, auto by_16) {
    launch_kernel("scale", stream, {grid_size(blocks)}, scale_values<t(), by_16()>, x, values, factor);
  });
}

}  // namespace satchel::cuda
