// Who gets the bits, in one thread block: of all gains C_n·bit_gain(b) the budget − n largest are taken. Bisection on the gains' bit
// patterns finds the least one taken; equal ones go by fewer bits, then by sample. Counts are integers: any order gives the same.
#include "satchel/kernels/cuda/device.cuh"
#include "satchel/kernels/cuda/per_sample.h"

namespace satchel::cuda {
namespace {

constexpr int kShareThreads = 1024, kShareWarps = kShareThreads / 32;
constexpr unsigned long long kInfinity = 0x7ff0000000000000ull;

struct Samples {
  const double* squares;
  const float* weights;
  int64_t count;

  __device__ inline double sensitivity(int64_t n) const {
    return per_sample_sensitivity(squares[n], weights == nullptr ? 1.0f : weights[n]);
  }
};

__device__ inline double gain_of(unsigned long long pattern) { return __longlong_as_double(static_cast<long long>(pattern)); }

/// Bits beyond the least that gains of at least `least` give one sample.
__device__ inline uint32_t bits_taken(double c, double least) {
  uint32_t taken = 0;
#pragma unroll
  for (int b = kLeastSampleBits; b < kMostSampleBits; ++b) taken += c * bit_gain(b) >= least ? 1u : 0u;
  return taken;
}

/// The sum over the thread block, for all threads. `slots` must not be those of the call before: no thread may still read them.
__device__ inline uint32_t block_sum(uint32_t mine, uint32_t* slots) {
  const uint32_t warp = __reduce_add_sync(~0u, mine);
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = warp;
  __syncthreads();
  return __reduce_add_sync(~0u, slots[threadIdx.x % 32]);
}

/// What the threads before this one hold, and in `total` what all do. Safe to call again at once.
__device__ inline uint32_t block_scan(uint32_t mine, uint32_t* slots, uint32_t& total) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t sum = mine;
#pragma unroll
  for (unsigned o = 1; o < 32; o *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, sum, o);
    sum += lane >= o ? other : 0u;
  }
  if (lane == 31) slots[warp] = sum;
  __syncthreads();
  const uint32_t each = slots[lane];
  total = __reduce_add_sync(~0u, each);
  const uint32_t before = __reduce_add_sync(~0u, lane < warp ? each : 0u);
  __syncthreads();
  return before + sum - mine;
}

struct Cut {
  double taken;   // gains of at least this are taken
  double tied;    // of those that equal this,
  uint32_t rest;  // so many are
};

__device__ inline Cut find_cut(const Samples& s, uint32_t want, uint32_t (&slots)[2][kShareWarps]) {
  // At least `want` gains reach `low`, fewer reach `high`.
  unsigned long long low = 0, high = kInfinity;
  uint32_t above = 0;  // gains that reach `high`
  if (want == 0) return {gain_of(kInfinity), 0.0, 0};
  for (int turn = 0; high - low > 1; turn ^= 1) {
    const unsigned long long middle = low + (high - low) / 2;
    const double least = gain_of(middle);
    uint32_t mine = 0;
    for (int64_t n = threadIdx.x; n < s.count; n += kShareThreads) mine += bits_taken(s.sensitivity(n), least);
    const uint32_t reach = block_sum(mine, slots[turn]);
    if (reach == want) return {least, 0.0, 0};
    if (reach > want) {
      low = middle;
    } else {
      high = middle;
      above = reach;
    }
  }
  return {gain_of(high), gain_of(low), want - above};
}

/// Equal gains: a bit each to the first `rest` of them, by fewer bits, then by sample.
__device__ inline void share_ties(const Samples& s, const Cut& cut, uint32_t* entries, uint32_t* slots) {
  uint32_t before = 0;
  for (int b = kLeastSampleBits; b < kMostSampleBits; ++b) {
    for (int64_t base = 0; base < s.count; base += kShareThreads) {
      if (before >= cut.rest) return;  // the same in all threads
      const int64_t n = base + threadIdx.x;
      const bool tied = n < s.count && s.sensitivity(n) * bit_gain(b) == cut.tied;
      uint32_t total;
      const uint32_t rank = before + block_scan(tied ? 1u : 0u, slots, total);
      if (tied && rank < cut.rest) ++entries[n];  // sample n is this thread's throughout
      before += total;
    }
  }
}

__global__ void __launch_bounds__(kShareThreads) share_out(const __grid_constant__ Samples s, uint32_t want, uint32_t* entries) {
  __shared__ uint32_t slots[2][kShareWarps];
  const Cut cut = find_cut(s, want, slots);
  for (int64_t n = threadIdx.x; n < s.count; n += kShareThreads) entries[n] = kLeastSampleBits + bits_taken(s.sensitivity(n), cut.taken);
  __syncthreads();  // the last turn's slots have been read
  share_ties(s, cut, entries, slots[0]);
  uint32_t before = 0;
  for (int64_t base = 0; base < s.count; base += kShareThreads) {
    const int64_t n = base + threadIdx.x;
    const uint32_t bits = n < s.count ? entries[n] : 0u;
    uint32_t total;
    const uint32_t rank = block_scan(bits, slots[0], total);
    if (n < s.count) entries[n] = make_entry(before + rank, bits);
    before += total;
  }
}

}  // namespace

void per_sample_allocate(const PerSampleCode& code, const double* squares, const float* weights, uint8_t* bytes, StreamHandle stream) {
  if (code.samples == 0) return;
  const auto want = static_cast<uint32_t>(code.budget - code.samples * kLeastSampleBits);
  share_out<<<1, kShareThreads, 0, static_cast<cudaStream_t>(stream)>>>({squares, weights, code.samples}, want,
                                                                        reinterpret_cast<uint32_t*>(bytes + code.entries_at()));
  check_launch("per_sample_allocate");
}

}  // namespace satchel::cuda
