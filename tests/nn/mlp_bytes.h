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
inline std::vector<SavedTensor> mlp_saves(const std::string& method, int64_t rows, at::Device device) {
  const SavePolicy saving = saving_of(method);
  const auto floats = at::TensorOptions(device).dtype(at::kFloat);
  const auto leaf_of = [&](at::IntArrayRef shape) { return at::randn(shape, floats).requires_grad_(); };
  const NormWeights weights{leaf_of({kMlpWidth}), leaf_of({kMlpWidth}), {}, {}};
  const at::Tensor w = leaf_of({kMlpOut, kMlpWidth}), start = leaf_of({rows, kMlpWidth});
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

/// Issue 15: at least 6 times fewer bytes than torch's. Prints both.
inline void expect_few_mlp_bytes(int64_t rows, at::Device device) {
  const std::vector<SavedTensor> torchs = mlp_saves("fp32", rows, device), ours = mlp_saves("satchel", rows, device);
  const int64_t values = rows * kMlpWidth;
  // The norm's input, GELU's and the linear layer's, and a mean and a deviation a row.
  EXPECT_EQ(total_bytes(torchs), 3 * 4 * values + 8 * rows) << text_of(torchs);
  const double ratio = static_cast<double>(total_bytes(torchs)) / static_cast<double>(total_bytes(ours));
  EXPECT_GE(ratio, 6) << text_of(ours);
  std::printf("LayerNorm, GELU, linear of %lld x %lld: torch %lld bytes, satchel %lld, %.1f times fewer:%s\n", static_cast<long long>(rows),
              static_cast<long long>(kMlpWidth), static_cast<long long>(total_bytes(torchs)), static_cast<long long>(total_bytes(ours)),
              ratio, text_of(ours).c_str());
}

}  // namespace satchel::test
