// What the tests of emulated kernels share: memory at any address with guards around it, and comparisons.
#pragma once

#include <cmath>

#include "satchel/kernels/cuda/gpu.h"
#include "tests/kernels/side_common.h"

namespace emulation {

/// Grids that walk over all values walk; the shared memory of an RTX 4090.
constexpr satchel::cuda::Gpu kFewProcessors = {2, 1024, 16, satchel::cuda::kRegisters, 100 << 10, 99 << 10};
extern satchel::cuda::Gpu gpu;  // what this_gpu() gives

}  // namespace emulation

namespace satchel::test {

/// As long as it lives, thread blocks may have an H200's shared memory.
struct LargeShared {
  LargeShared() { ::emulation::gpu.shared = 228 << 10, ::emulation::gpu.shared_block = 227 << 10; }
  ~LargeShared() { ::emulation::gpu = ::emulation::kFewProcessors; }
  LargeShared(const LargeShared&) = delete;
  LargeShared& operator=(const LargeShared&) = delete;
};

/// The bytes on a multiple of 64, or `shift` bytes past one, and a guard around them.
struct Placed {
  Guarded memory;
  int64_t shift;
  explicit Placed(const Bytes& x, int64_t shift = 0) : memory(static_cast<int64_t>(x.size()) + shift), shift(shift) {
    if (!x.empty()) std::memcpy(data(), x.data(), x.size());
  }
  explicit Placed(int64_t bytes, int64_t shift = 0) : memory(bytes + shift), shift(shift) {}
  uint8_t* data() { return memory.data() + shift; }
  float* floats() { return reinterpret_cast<float*>(data()); }
  bool intact() const { return memory.intact(); }
  Bytes bytes() const {
    const Bytes all = memory.bytes();
    return Bytes(all.begin() + shift, all.end());
  }
};

inline int64_t shift_of(DType type, Random& random) { return random.one_in(3) ? size_of(type) : 0; }

/// Half an ulp of 1 in float32: what one operation may be off by, relatively.
constexpr double kUnit = 0x1p-24;

/// What rounding a number to memory may change it by: half an ulp, or half of the least subnormal.
inline double rounding_of(DType type, double v) {
  const double relative = type == DType::f32 ? 0x1p-24 : type == DType::bf16 ? 0x1p-8 : 0x1p-11;
  return relative * std::abs(v) + (type == DType::f16 ? 0x1p-25 : 0x1p-126);
}

/// As torch stores an activation: what is too large for f16 becomes infinite, where decoding makes it the largest number.
inline void put(Bytes& x, DType type, int64_t i, float v) {
  store(x.data(), type, i, v);
  if (type == DType::f16) {
    const _Float16 h = static_cast<_Float16>(v);
    std::memcpy(x.data() + 2 * i, &h, 2);
  }
}
inline Bytes stored(const Floats& v, DType type) {
  Bytes x(v.size() * static_cast<size_t>(size_of(type)));
  for (size_t i = 0; i < v.size(); ++i) put(x, type, static_cast<int64_t>(i), v[i]);
  return x;
}

/// Bits of one number, NaN of whatever sign and payload as NaN.
inline testing::AssertionResult same(const Bytes& own, const Bytes& truth, DType type) {
  if (own == truth) return testing::AssertionSuccess();
  if (own.size() != truth.size()) return testing::AssertionFailure() << own.size() << " bytes for " << truth.size();
  const size_t size = static_cast<size_t>(size_of(type));
  for (size_t i = 0; i < own.size() / size; ++i) {
    const float a = load(own.data(), type, static_cast<int64_t>(i)), b = load(truth.data(), type, static_cast<int64_t>(i));
    if (std::memcmp(own.data() + i * size, truth.data() + i * size, size) != 0 && !(a != a && b != b)) {
      return testing::AssertionFailure() << "value " << i << " of " << own.size() / size << " is " << a << ", not " << b;
    }
  }
  return testing::AssertionSuccess();
}

/// As memory of that type gives a number that is off by `bound` at most before it is rounded.
inline bool is_near(float own, double truth, double bound, DType type = DType::f32) {
  if (std::isnan(truth) || std::isnan(bound)) return own != own;
  if (std::isinf(truth)) return own == static_cast<float>(truth);
  if (std::isinf(own)) return type == DType::f16 && std::abs(truth) + bound >= 65504 && (own > 0) == (truth > 0);
  return std::abs(own - truth) <= bound + rounding_of(type, std::abs(truth) + bound);
}

}  // namespace satchel::test
