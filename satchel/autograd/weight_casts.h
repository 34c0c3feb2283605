// Weights in the 16-bit type of a model's activations: made in one kernel a training step, where each use makes its own otherwise. Private
// to the library.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <vector>

namespace satchel {

/// A model's. The memory stays the same from step to step, and nodes refer to it until backward. A weight that changes in between is
/// refused by its own version; until it does, a second forward pass writes the same values. For training alone: one thread trains a model.
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

  /// Memory for these weights' casts, where it does not stand yet.
  void reserve(const std::vector<at::Tensor>& weights, at::ScalarType type);
  /// Casts them anew.
  void update(const std::vector<at::Tensor>& weights, at::ScalarType type);
  int64_t bytes() const;
  /// Undefined where there is none in this type.
  at::Tensor of(const at::Tensor& weight, at::ScalarType type) const;

 private:
  std::vector<at::Tensor> weights_, casts_;
};

/// The weight in `type`, without a gradient: itself, a cast in use, or one of its own.
at::Tensor cast_weight(const at::Tensor& weight, at::ScalarType type);

/// A weight that backward reads, and its cast where forward used a standing one. Under saved-tensor hooks there is no cast: what they give
/// back may be the weight as it was, which torch lets change then.
class SavedWeight {
 public:
  SavedWeight() = default;
  SavedWeight(const at::Tensor& weight, at::ScalarType type);
  /// As forward read it, in that type; throws where it has changed since.
  at::Tensor unpack(at::ScalarType type) const;
  at::Tensor unpack() const { return weight_.unpack(); }
  void reset_data();

 private:
  torch::autograd::SavedVariable weight_;
  at::Tensor cast_;
};

}  // namespace satchel
