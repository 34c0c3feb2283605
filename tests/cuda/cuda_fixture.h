// What the CUDA tests share: a clear skip without a GPU, and comparisons with the CPU.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <ios>
#include <sstream>
#include <stdexcept>
#include <string>

#include "../tensor/reference.h"
#include "satchel/kernels/cuda/cuda.h"
#include "satchel/tensor/pack.h"

namespace satchel {

/// Loops of many cases take minutes under compute-sanitizer, so processes can share them (scripts/sanitize_cuda.sh): with
/// SATCHEL_TEST_CASES="i/n" this one runs a test's i-th case and every n-th from there on; where that is not set, all of them.
class Cases {
 public:
  /// At the start of every test. Throws where the variable says anything else.
  void restart() {
    *this = {};
    const char* text = std::getenv("SATCHEL_TEST_CASES");
    if (text == nullptr) return;
    std::istringstream in(text);
    char slash = 0;
    in >> std::noskipws >> which_ >> slash >> of_;
    if (in.fail() || !in.eof() || slash != '/' || which_ < 1 || which_ > of_) {
      throw std::runtime_error(std::string("[test] SATCHEL_TEST_CASES must be i/n with 1 ≤ i ≤ n, got \"") + text + "\"");
    }
  }
  bool next_is_mine() { return asked_++ % of_ == which_ - 1; }
  bool are_shared() const { return of_ > 1; }

 private:
  int64_t which_ = 1, of_ = 1, asked_ = 0;
};

inline Cases& cases() {
  static Cases of_the_running_test;
  return of_the_running_test;
}

/// Whether the next case of a long loop is this process's. A case asks once, before any work, but after it has drawn what differs from
/// case to case, so that it is the same case in every process.
inline bool mine() { return cases().next_is_mine(); }

/// Not worth its time under compute-sanitizer: the same kernel with the same input once more.
inline bool repeats() { return !cases().are_shared(); }

class Cuda : public testing::Test {
 protected:
  void SetUp() override {
    cases().restart();
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
