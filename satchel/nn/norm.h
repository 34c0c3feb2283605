// Norms as modules with torch's options, names and initial values; state dicts are torch's. A norm followed by satchel::nn::ReLU and the
// next layer keeps one packed save for all three; forward_act() does the same in one pass.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/options/batchnorm.h>
#include <torch/nn/options/normalization.h>
#include <torch/nn/pimpl.h>

#include "satchel/autograd/norm_act.h"

namespace satchel::nn {

/// weight, bias, running_mean, running_var and num_batches_tracked as torch's; undefined where the options say so.
template <size_t D, class Derived>
class BatchNormImplBase : public torch::nn::Cloneable<Derived> {
 public:
  explicit BatchNormImplBase(const torch::nn::BatchNormOptions& options, Saving saving = {});
  void reset() override;
  void reset_running_stats();
  void reset_parameters();
  at::Tensor forward(at::Tensor x);
  /// act(norm(x)), or act(norm(x) + skip) where a skip is given (ReLU or none), as one function. An x that was moved in and that nobody
  /// else holds may lend its memory to the result.
  at::Tensor forward_act(at::Tensor x, Activation activation, const at::Tensor& skip = {});
  void pretty_print(std::ostream& stream) const override;

  torch::nn::BatchNormOptions options;
  Saving saving;
  at::Tensor weight, bias, running_mean, running_var, num_batches_tracked;

 private:
  /// Checks x and counts the batch.
  NormOptions begin(const at::Tensor& x);
  NormWeights weights() const { return {weight, bias, running_mean, running_var}; }
};

class BatchNorm1dImpl : public BatchNormImplBase<1, BatchNorm1dImpl> {
 public:
  using BatchNormImplBase::BatchNormImplBase;
};
class BatchNorm2dImpl : public BatchNormImplBase<2, BatchNorm2dImpl> {
 public:
  using BatchNormImplBase::BatchNormImplBase;
};
class BatchNorm3dImpl : public BatchNormImplBase<3, BatchNorm3dImpl> {
 public:
  using BatchNormImplBase::BatchNormImplBase;
};
TORCH_MODULE(BatchNorm1d);
TORCH_MODULE(BatchNorm2d);
TORCH_MODULE(BatchNorm3d);

class LayerNormImpl : public torch::nn::Cloneable<LayerNormImpl> {
 public:
  explicit LayerNormImpl(const torch::nn::LayerNormOptions& options, Saving saving = {});
  void reset() override;
  void reset_parameters();
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& stream) const override;

  torch::nn::LayerNormOptions options;
  Saving saving;
  at::Tensor weight, bias;
};
TORCH_MODULE(LayerNorm);

/// torch's C++ has no such module; names and options are those of its Python one.
struct RMSNormOptions {
  std::vector<int64_t> normalized_shape;
  double eps = 1e-6;
  bool elementwise_affine = true;
};
class RMSNormImpl : public torch::nn::Cloneable<RMSNormImpl> {
 public:
  explicit RMSNormImpl(RMSNormOptions options, Saving saving = {});
  void reset() override;
  void reset_parameters();
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& stream) const override;

  RMSNormOptions options;
  Saving saving;
  at::Tensor weight;
};
TORCH_MODULE(RMSNorm);

class GroupNormImpl : public torch::nn::Cloneable<GroupNormImpl> {
 public:
  explicit GroupNormImpl(const torch::nn::GroupNormOptions& options, Saving saving = {});
  void reset() override;
  void reset_parameters();
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& stream) const override;

  torch::nn::GroupNormOptions options;
  Saving saving;
  at::Tensor weight, bias;
};
TORCH_MODULE(GroupNorm);

}  // namespace satchel::nn
