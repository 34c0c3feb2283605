// Small image models, what they keep beside the plan, and their gradients.
#pragma once

#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "satchel/autograd/report.h"
#include "satchel/models/image_model.h"
#include "satchel/plan/bit_allocator.h"
#include "satchel/plan/image_plan.h"
#include "satchel/train/memory.h"
#include "tests/support.h"

namespace satchel::testing_models {

// At 8 channels torch's own backward of a strided 1×1 convolution of channels_last maps crashes (2.11, oneDNN, AVX-512, two threads).
constexpr int64_t kImages = 3, kClasses = 7, kWidth = 16;

inline ImageModelOptions options_of(const std::string& name, const std::string& method, bool small_stem = true, double dropout = 0) {
  ImageModelOptions o;
  o.name = name;
  o.classes = kClasses;
  o.small_stem = small_stem;
  o.width = kWidth;
  o.dropout = dropout;
  o.saving.method = parse_method(method);
  return o;
}

inline at::Tensor images(int64_t side) {
  at::manual_seed(3);
  return at::randn({kImages, 3, side, side}).contiguous(at::MemoryFormat::ChannelsLast);
}

inline std::map<std::string, at::Tensor> named(const ImageModel& model) {
  std::map<std::string, at::Tensor> all;
  for (const auto& item : model->named_parameters()) all[item.key()] = item.value();
  for (const auto& item : model->named_buffers()) all[item.key()] = item.value();
  return all;
}

struct Measured {
  int64_t saved;  // by the allocator
  std::vector<SavedTensor> lines;
};

inline Measured measure(ImageModelOptions o, int64_t side) {
  if (allocates_bits(o.saving.method)) {  // as a run has it
    const auto shares = std::make_shared<RunningBitAllocator>(BitAllocatorOptions{kImages});
    std::vector<int64_t> samples(kImages);
    std::iota(samples.begin(), samples.end(), 0);
    shares->set_samples(samples);
    o.saving.allocator = shares;
  }
  ImageModel model = make_image_model(o);
  const at::Tensor x = images(side);
  model->forward(x);  // what is made once stands
  const MemoryMeter meter(at::kCPU);
  const at::Tensor logits = model->forward(x);
  return {meter.allocated() - static_cast<int64_t>(logits.nbytes()), saved_tensors(logits)};
}

inline void expect_plan(const ImageModelOptions& o, int64_t side) {
  const Measured got = measure(o, side);
  const auto plan = plan_image(shape_of(o), {kImages, side, side}, o.saving.method);
  const std::string where = o.name + ' ' + o.saving.method.name;
  if (o.saving.method.torch_baseline) {
    // The images stood before.
    EXPECT_EQ(got.saved, total_bytes(plan) - plan[0].bytes) << where;
    return;
  }
  for (size_t i = 0; i < std::min(got.lines.size(), plan.size()); ++i) {
    ASSERT_TRUE(got.lines[i] == plan[i]) << where << ": " << test::text_of(got.lines[i]) << ", planned " << test::text_of(plan[i]);
  }
  ASSERT_EQ(got.lines.size(), plan.size()) << where;
  EXPECT_EQ(got.saved, total_bytes(plan)) << where;
}

inline std::vector<at::Tensor> gradients(ImageModel& model, const at::Tensor& x) {
  model->zero_grad();
  const at::Tensor logits = model->forward(x);
  (logits * at::arange(logits.numel()).view(logits.sizes()).sin()).sum().backward();
  std::vector<at::Tensor> all = {logits.detach()};
  for (const at::Tensor& p : model->parameters()) all.push_back(p.grad());
  return all;
}

inline ImageModel same_weights(const ImageModel& from, const ImageModelOptions& o) {
  ImageModel model = make_image_model(o);
  const at::NoGradGuard no_grad;
  const auto theirs = named(from);
  for (auto& [name, tensor] : named(model)) at::Tensor(tensor).copy_(theirs.at(name));
  return model;
}

/// Over all parameters together.
inline double relative_error(const std::vector<at::Tensor>& expected, const std::vector<at::Tensor>& got) {
  double off = 0, all = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    off += (expected[i] - got[i]).square().sum().item<double>();
    all += expected[i].square().sum().item<double>();
  }
  return std::sqrt(off / all);
}

}  // namespace satchel::testing_models
