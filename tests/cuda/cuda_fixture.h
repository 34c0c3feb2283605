// What the CUDA tests share: a clear skip without a GPU, and comparisons with the CPU.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "../tensor/reference.h"
#include "satchel/kernels/cuda/cuda.h"
#include "satchel/tensor/pack.h"

namespace satchel {

class Cuda : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::compiled()) GTEST_SKIP() << "built without CUDA";
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device on this machine";
  }
};

/// While it lives, torch's own products of float32 matrices are in TF32, or not.
class Tf32 {
 public:
  explicit Tf32(bool on) : before_(at::globalContext().allowTF32CuBLAS()) { at::globalContext().setAllowTF32CuBLAS(on); }
  ~Tf32() { at::globalContext().setAllowTF32CuBLAS(before_); }
  Tf32(const Tf32&) = delete;
  Tf32& operator=(const Tf32&) = delete;

 private:
  bool before_;
};

/// The same packed tensor on another device.
inline Packed moved(Packed packed, at::Device device) {
  packed.bytes = packed.bytes.to(device);
  if (packed.seed.defined()) packed.seed = packed.seed.to(device);
  return packed;
}

inline const at::ScalarType kTypes[] = {at::kFloat, at::kHalf, at::kBFloat16};

}  // namespace satchel
