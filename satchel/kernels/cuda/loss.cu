// Softmax and cross entropy of every row in one read and one write. A thread block takes up to 256 rows at a time, those that count first:
// a team of up to 32 threads a row, six pairs of classes a thread in registers (of more, single classes are read again from the cache).
// Every thread writes only what it has read itself. Row losses are added in double, row by row, then by a tree, so that a run repeats to
// the bit.
#include "satchel/kernels/cuda/loss.h"
#include "satchel/kernels/cuda/values.cuh"

namespace satchel::cuda {
namespace {

constexpr int kPairs = 6;                       // a thread's, in registers
constexpr int64_t kParts = kSumProcessors * 8;  // thread blocks that share the rows; one partial sum each
constexpr int kLossThreads = 1024;              // that add them up

/// How a thread reads its classes: pairs at multiples of their size, pairs one class after the other, or classes beyond registers.
enum class Row { pairs, halves, many };

/// Threads a row, as a power of two: the fewest that hold it.
int team_shift(int64_t classes) {
  int shift = 0;
  while (shift < 5 && (2 * kPairs << shift) < classes) ++shift;
  return shift;
}

/// Rows that a thread block takes at a time: up to four a team, where thread blocks stay enough for the device.
int rows_at_once(int64_t rows, int shift) {
  int each = kThreads >> shift;
  for (int turn = 0; turn < 2 && each < kThreads && rows > each * 2 * kSumProcessors * 4; ++turn) each *= 2;
  return each;
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

/// The sum over a thread block of so many threads, for its first thread.
template <int threads>
__device__ inline double block_sum(double v) {
  __shared__ double warps[threads / 32];
  for (int o = 16; o > 0; o /= 2) v += __shfl_down_sync(~0u, v, o);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
  __syncthreads();
  double sum = 0;
  if (threadIdx.x == 0) {
    for (const double w : warps) sum += w;
  }
  return sum;
}

/// Two neighbours as they stand in memory.
template <DType type>
struct Pair {
  using Raw = uint16_t;
  uint32_t both = type == DType::bf16 ? 0xff80ff80u : 0xfc00fc00u;  // −∞

  __device__ inline void load(const Raw* x) { both = *reinterpret_cast<const uint32_t*>(x); }
  __device__ inline void load1(const Raw* x, bool second) {
    both = (both & 0xffff0000u) | x[0];
    if (second) both = (both & 0xffffu) | static_cast<uint32_t>(x[1]) << 16;
  }
  __device__ inline float first() const { return low_half<type>(both); }
  __device__ inline float second() const { return high_half<type>(both); }
  __device__ static inline void store(Raw* x, float a, float b) { *reinterpret_cast<uint32_t*>(x) = half_pair<type>(a, b); }
};
template <>
struct Pair<DType::f32> {
  using Raw = float;
  float2 both = make_float2(float_of(0xff800000u), float_of(0xff800000u));

  __device__ inline void load(const Raw* x) { both = *reinterpret_cast<const float2*>(x); }
  __device__ inline void load1(const Raw* x, bool second) {
    both.x = x[0];
    if (second) both.y = x[1];
  }
  __device__ inline float first() const { return both.x; }
  __device__ inline float second() const { return both.y; }
  __device__ static inline void store(Raw* x, float a, float b) { *reinterpret_cast<float2*>(x) = make_float2(a, b); }
};

/// A thread's classes of a row whose values start at `x`: pairs lane, lane + lanes, …. What does not exist is −∞, of which the power is 0.
template <DType type, Row row>
struct Held {
  using Raw = typename Pair<type>::Raw;
  Raw* x;
  int first, left, step;  // the thread's first class; classes from there on; values from a pair to the next
  float v[kPairs][2];

  __device__ inline Held(Raw* from, int classes, int lane, int lanes)
      : x(held(from + 2 * lane)), first(2 * lane), left(classes - 2 * lane), step(2 * lanes) {}
  /// Which of the team's threads has this class?
  __device__ static inline int lane_of(int label, int lanes) { return label / 2 & (lanes - 1); }

  /// The most of them, which are read.
  __device__ inline float most() {
    Pair<type> pair[kPairs];
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      if (k * step >= left) continue;
      if constexpr (row == Row::pairs)
        pair[k].load(x + k * step);
      else
        pair[k].load1(x + k * step, k * step + 1 < left);
    }
    float m = max_nan(pair[0].first(), pair[0].second());
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      v[k][0] = pair[k].first(), v[k][1] = pair[k].second();
      if (k > 0) m = max_nan(m, max_nan(v[k][0], v[k][1]));
    }
    return m;
  }
  /// The sum of e^(value − top).
  __device__ inline float powers(float top) {
    float total[2] = {};
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      if (k > 0 && k * step >= left) break;
#pragma unroll
      for (int j = 0; j < 2; ++j) total[j] += v[k][j] = expf(v[k][j] - top);
    }
    return total[0] + total[1];
  }
  /// Powers times `scale`, and `of_label` for one class; −1: for none.
  __device__ inline void write(float scale, int label, float of_label) const {
    const int place = label - first;
    put([&](int k, int j) { return k * step + j == place ? of_label : v[k][j] * scale; });
  }
  __device__ inline void clear() const {
    put([](int, int) { return 0.0f; });
  }

 private:
  template <class F>
  __device__ inline void put(const F& f) const {
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      if (k * step >= left) continue;
      if constexpr (row == Row::pairs) {
        Pair<type>::store(x + k * step, f(k, 0), f(k, 1));
      } else {
        write1<type>(x, k * step, f(k, 0));
        if (k * step + 1 < left) write1<type>(x, k * step + 1, f(k, 1));
      }
    }
  }
};

/// … classes lane, lane + lanes, …, read every time anew.
template <DType type>
struct Held<type, Row::many> {
  using Raw = typename Pair<type>::Raw;
  Raw* x;
  int classes, lane, lanes;
  float top = 0.0f;

  __device__ inline Held(Raw* from, int all, int own, int each) : x(from), classes(all), lane(own), lanes(each) {}
  __device__ static inline int lane_of(int label, int lanes) { return label & (lanes - 1); }

  __device__ inline float most() const {
    float m = float_of(0xff800000u);
    for (int c = lane; c < classes; c += lanes) m = max_nan(m, read1<type>(x, c));
    return m;
  }
  __device__ inline float powers(float of) {
    top = of;
    float total = 0.0f;
    for (int c = lane; c < classes; c += lanes) total += expf(read1<type>(x, c) - top);
    return total;
  }
  __device__ inline void write(float scale, int label, float of_label) const {
    for (int c = lane; c < classes; c += lanes) write1<type>(x, c, c == label ? of_label : expf(read1<type>(x, c) - top) * scale);
  }
  __device__ inline void clear() const {
    for (int c = lane; c < classes; c += lanes) write1<type>(x, c, 0.0f);
  }
};

struct LossPass {
  LabelledRows rows;
  void* logits;
  const int64_t* labels;
  bool write;
  float fraction;   // scale / counted
  int shift, each;  // threads a row, as a power of two; rows at a time
  double* partial;
};

/// The rows that a thread block has before it: those that count come first.
struct Queue {
  int order[kThreads], label[kThreads];  // label −1: out of range
  float loss[kThreads];                  // of each row
  int counted[kThreads / 32];            // rows of a warp's that count

  /// Fills it for rows from `first` on; how many count. Every thread of the block must call this.
  __device__ inline int fill(const LossPass& a, int64_t first) {
    const int own = static_cast<int>(threadIdx.x), warp = own / 32;
    const bool exists = own < a.each && first + own < a.rows.rows;
    const int64_t of = exists ? __ldg(reinterpret_cast<const long long*>(a.labels) + first + own) : kIgnored;
    const uint32_t mask = __ballot_sync(~0u, of != kIgnored);
    if (own % 32 == 0) counted[warp] = __popc(mask);
    loss[own] = 0.0f;
    __syncthreads();
    int before = __popc(mask & ((1u << own % 32) - 1)), all = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) {
      before += w < warp ? counted[w] : 0;
      all += counted[w];
    }
    const int place = of != kIgnored ? before : all + own - before;
    order[place] = own;
    label[place] = of >= 0 && of < a.rows.classes ? static_cast<int>(of) : -1;
    __syncthreads();
    return all;
  }
};

template <DType type, Row row>
__global__ void __launch_bounds__(kThreads, 5) cross_entropy_rows(const __grid_constant__ LossPass a) {
  __shared__ Queue queue;
  const int lanes = 1 << a.shift, teams = kThreads >> a.shift;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1), team = static_cast<int>(threadIdx.x) >> a.shift;
  const int leader = static_cast<int>(threadIdx.x) / 32 * 32 >> a.shift;  // the warp's first team
  const int classes = static_cast<int>(a.rows.classes);
  double sum = 0;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * a.each; first < a.rows.rows; first += static_cast<int64_t>(gridDim.x) * a.each) {
    const int counted = queue.fill(a, first), exist = static_cast<int>(min(static_cast<int64_t>(a.each), a.rows.rows - first));
    const auto row_at = [&](int i) {
      return Held<type, row>(static_cast<typename Pair<type>::Raw*>(a.logits) + (first + queue.order[i]) * a.rows.classes, classes, lane,
                             lanes);
    };
    for (int turn = 0; turn + leader < counted; turn += teams) {  // the same for a warp, whose threads shuffle
      const bool is_row = turn + team < counted;
      const int i = is_row ? turn + team : turn + leader, label = queue.label[i];
      Held<type, row> own_row = row_at(i);
      const bool leads = is_row && label >= 0 && Held<type, row>::lane_of(label, lanes) == lane;
      const int64_t at = (first + queue.order[i]) * a.rows.classes + label;
      const float own = leads ? read1<type>(a.logits, at) : 0.0f;  // by the thread that writes it
      const float most = team_max(own_row.most(), lanes), powers = team_sum(own_row.powers(most), lanes);
      const float total = label >= 0 ? powers : float_of(0x7fc00000u), scale = a.fraction / total;
      if (leads || (is_row && label < 0 && lane == 0)) queue.loss[queue.order[i]] = logf(total) - (own - most);
      if (!a.write || !is_row) continue;
      own_row.write(scale, leads ? label : -1, leads ? fmaf(expf(own - most), scale, -a.fraction) : 0.0f);
    }
    for (int i = counted + team; a.write && i < a.each; i += teams) {
      if (queue.order[i] < exist) row_at(i).clear();
    }
    __syncthreads();
    sum += static_cast<double>(queue.loss[threadIdx.x]);
  }
  const double all = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) a.partial[blockIdx.x] = all;
}

__global__ void __launch_bounds__(kLossThreads) finish_loss(const double* partial, int64_t parts, int64_t counted, float* loss) {
  constexpr int kEach = static_cast<int>(ceil_div(kParts, kLossThreads));
  double own[kEach], sum = 0;
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const int64_t p = threadIdx.x + k * kLossThreads;
    own[k] = p < parts ? partial[p] : 0;
  }
#pragma unroll
  for (int k = 0; k < kEach; ++k) sum += own[k];
  const double all = block_sum<kLossThreads>(sum);
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
  if (r.classes >= int64_t{1} << 31) fail("cross_entropy", "there must be fewer than 2^31 classes", r.classes);
  const int shift = team_shift(r.classes), each = rows_at_once(r.rows, shift);
  const int64_t all = ceil_div(r.rows, each), parts = all < kParts ? all : kParts;
  const float fraction = static_cast<float>(r.scale / static_cast<double>(r.counted));
  const LossPass a = {r, logits, labels, write, fraction, shift, each, static_cast<double*>(scratch)};
  if (parts > 0) {
    const bool many = r.classes > (2 * kPairs << shift), aligned = is_aligned(logits, static_cast<uintptr_t>(2 * size_of(type)));
    with_type(type, [&](auto t) {
      const auto kernel = many                            ? cross_entropy_rows<t(), Row::many>
                          : aligned && r.classes % 2 == 0 ? cross_entropy_rows<t(), Row::pairs>
                                                          : cross_entropy_rows<t(), Row::halves>;
      launch_kernel("cross_entropy", stream, {grid_size(parts)}, kernel, a);
    });
  }
  launch_kernel("cross_entropy", stream, {1, kLossThreads}, finish_loss, a.partial, parts, r.counted, loss);
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
