// What LayerNorm → GELU → linear keeps for backward, with torch's functions and with Satchel's. For the CPU and for CUDA.
#pragma once

#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "satchel/autograd/linear.h"
#include "satchel/autograd/norm.h"
#include "satchel/autograd/report.h"
#include "satchel/autograd/smooth.h"
#include "satchel/train/memory.h"
#include "tests/support.h"
#include "tests/torch_support.h"

namespace satchel::test {

constexpr int64_t kMlpRows = 16384, kMlpWidth = 3072, kMlpOut = 8;  // the output's width is no part of what is kept

/// The lines of the report; the allocator must hold as much beside the output.
inline std::vector<SavedTensor> mlp_saves(const std::string& method, int64_t rows, at::Device device, at::ScalarType type) {
  const SavePolicy saving = saving_of(method);
  const auto leaf_of = [&](at::IntArrayRef shape, at::ScalarType as) {
    return at::randn(shape, at::TensorOptions(device).dtype(as)).requires_grad_();
  };
  const NormWeights weights{leaf_of({kMlpWidth}, at::kFloat), leaf_of({kMlpWidth}, at::kFloat), {}, {}};
  const at::Tensor w = leaf_of({kMlpOut, kMlpWidth}, type), start = leaf_of({rows, kMlpWidth}, type);
  const auto forward = [&] {
    const at::Tensor x = start * 1;  // made by another layer: what a norm keeps of it is kept for backward alone
    return linear(gelu(layer_norm(x, weights, {}, saving), "none", saving), w, {}, saving);
  };
  if (device.is_cuda()) forward();  // workspaces are made once
  const MemoryMeter meter(device);
  const at::Tensor out = forward();
  const std::vector<SavedTensor> lines = saved_tensors(out);
  const int64_t kept = meter.allocated() - static_cast<int64_t>(out.nbytes());
  const int64_t rounding = device.is_cuda() ? 512 * static_cast<int64_t>(2 * lines.size() + 1) : 0;  // torch's, of each tensor
  EXPECT_GE(kept, total_bytes(lines)) << method;
  EXPECT_LE(kept, total_bytes(lines) + rounding) << method;
  return lines;
}

/// Issue 15: at least 6 times fewer bytes than torch's, of bf16 too. Prints both.
inline void expect_few_mlp_bytes(int64_t rows, at::Device device, at::ScalarType type) {
  const std::vector<SavedTensor> torchs = mlp_saves("fp32", rows, device, type), ours = mlp_saves("satchel", rows, device, type);
  const int64_t values = rows * kMlpWidth, size = static_cast<int64_t>(at::elementSize(type));
  // The norm's input, GELU's and the linear layer's, and a mean and a deviation a row. Of bf16 the CPU keeps these in bf16, and γ and β are
  // made bf16 for torch.
  const int64_t numbers = total_bytes(torchs) - 3 * size * values, copies = 2 * kMlpWidth * size;
  if (type == at::kFloat) {
    EXPECT_EQ(numbers, 8 * rows) << text_of(torchs);
  }
  EXPECT_GE(numbers, 2 * size * rows) << text_of(torchs);
  EXPECT_LE(numbers, 8 * rows + copies) << text_of(torchs);
  // x̂ and the linear layer's input in 2 bits, the derivative in 3, a header of 4 bytes each a block, and a deviation a row.
  EXPECT_EQ(total_bytes(ours), values * 7 / 8 + 3 * values / 256 * 4 + 4 * rows) << text_of(ours);
  const double ratio = static_cast<double>(total_bytes(torchs)) / static_cast<double>(total_bytes(ours));
  EXPECT_GE(ratio, 6) << text_of(ours);
  std::printf("LayerNorm, GELU, linear of %lld x %lld %s: torch %lld bytes, satchel %lld, %.1f times fewer:%s\n",
              static_cast<long long>(rows), static_cast<long long>(kMlpWidth), c10::toString(type),
              static_cast<long long>(total_bytes(torchs)), static_cast<long long>(total_bytes(ours)), ratio, text_of(ours).c_str());
}

}  // namespace satchel::test
