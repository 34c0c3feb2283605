// Weights in the 16-bit type of a model's activations: made in one kernel a step, where each use made its own. Private to the library.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <vector>

namespace satchel {

/// A model's. The memory stays the same from step to step, so nodes may refer to it until backward: weights that change in between are refused
/// by their own version, and a second forward pass writes the same values.
class WeightCasts {
 public:
  /// While it lives, this thread's layers find the casts.
  class Use {
   public:
    explicit Use(const WeightCasts& casts);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    const WeightCasts* before_;
  };

  /// Casts them anew.
  void update(const std::vector<at::Tensor>& weights, at::ScalarType type);
  /// Undefined where there is none in this type.
  at::Tensor of(const at::Tensor& weight, at::ScalarType type) const;

 private:
  std::vector<at::Tensor> weights_, casts_;
};

/// The weight in `type`, without a gradient: itself, a cast in use, or one of its own.
at::Tensor cast_weight(const at::Tensor& weight, at::ScalarType type);

/// A weight that backward reads, and its cast where forward used a standing one.
class SavedWeight {
 public:
  SavedWeight() = default;
  SavedWeight(const at::Tensor& weight, at::ScalarType type);
  /// In that type; throws where the weight has changed since forward.
  at::Tensor unpack(at::ScalarType type) const;
  /// Rows (outputs) and columns (inputs) of a matrix.
  at::Tensor unpack() const { return weight_.unpack(); }
  void reset_data();

 private:
  torch::autograd::SavedVariable weight_;
  at::Tensor cast_;
};

}  // namespace satchel
