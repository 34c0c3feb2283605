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
  explicit BatchNormImplBase(const torch::nn::BatchNormOptions& options, SavePolicy saving = {}, bool frozen = false);
  void reset() override;
  void reset_running_stats();
  void reset_parameters();
  at::Tensor forward(at::Tensor x);
  /// act(norm(x)), or act(norm(x) + skip) where a skip is given (ReLU or none), as one function. An x that was moved in and that nobody
  /// else holds may lend its memory to the result. `skip_gradient`: the skip is a residual block's input, and this is where its gradients
  /// meet (autograd/shared_gradient.h); null: autograd adds them up.
  at::Tensor forward_act(at::Tensor x, Activation activation, const at::Tensor& skip = {},
                         const std::shared_ptr<SharedGradient>& skip_gradient = nullptr);
  /// relu(norm(conv(x)) + skip), likewise: large results of the convolution never stand whole (autograd/norm_act.h).
  at::Tensor forward_sum(ConvOfSum conv, at::Tensor skip, const std::shared_ptr<SharedGradient>& skip_gradient = nullptr);
  /// norm(x) of a residual branch, of which nothing but a sum reads the result, or but a function that keeps its own, as SiLU: no
  /// activation shares its save. x as above.
  at::Tensor forward_to_sum(at::Tensor x);
  void pretty_print(std::ostream& stream) const override;

  torch::nn::BatchNormOptions options;
  SavePolicy saving;
  /// All numbers are constants: weight and bias are buffers, no batch is counted, and nothing of x is kept (torchvision's
  /// FrozenBatchNorm2d).
  bool frozen = false;
  at::Tensor weight, bias, running_mean, running_var, num_batches_tracked;

 private:
  /// Checks x and counts the batch.
  NormOptions begin(const at::Tensor& x);
  /// The function as a product and a sum, which keep nothing, where torch's own batch_norm would keep x.
  bool is_line() const { return frozen && is_baseline(saving.method); }
  at::Tensor line(const at::Tensor& x) const;
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
  explicit LayerNormImpl(const torch::nn::LayerNormOptions& options, SavePolicy saving = {});
  void reset() override;
  void reset_parameters();
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& stream) const override;

  torch::nn::LayerNormOptions options;
  SavePolicy saving;
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
  explicit RMSNormImpl(RMSNormOptions options, SavePolicy saving = {});
  void reset() override;
  void reset_parameters();
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& stream) const override;

  RMSNormOptions options;
  SavePolicy saving;
  at::Tensor weight;
};
TORCH_MODULE(RMSNorm);

class GroupNormImpl : public torch::nn::Cloneable<GroupNormImpl> {
 public:
  explicit GroupNormImpl(const torch::nn::GroupNormOptions& options, SavePolicy saving = {});
  void reset() override;
  void reset_parameters();
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& stream) const override;

  torch::nn::GroupNormOptions options;
  SavePolicy saving;
  at::Tensor weight, bias;
};
TORCH_MODULE(GroupNorm);

/// Norm → activation → dropout: what stands between two layers, with one save.
struct NormActOptions {
  int64_t channels = 0;
  Norm norm = Norm::batch;
  Activation activation = Activation::relu;
  double slope = 0.01;  // LeakyReLU's
  double alpha = 1;     // ELU's
  double dropout = 0;
  double eps = 1e-5, momentum = 0.1;
  SavePolicy saving = {};
};

/// Parameters and buffers as torch's BatchNorm1d and LayerNorm name them: weight, bias, running_mean, running_var.
class NormActImpl : public torch::nn::Module {
 public:
  explicit NormActImpl(const NormActOptions& options);
  void reset_parameters();
  /// The next layer's input from rows × channels. forward(std::move(x)) may reuse x's memory.
  at::Tensor forward(at::Tensor x);
  void pretty_print(std::ostream& stream) const override;

  NormActOptions options;

 private:
  NormWeights weights_;
};
TORCH_MODULE(NormAct);

}  // namespace satchel::nn
