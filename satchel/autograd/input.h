// What a layer keeps of its input for the gradient of its weights: Xᵀ·g. Private to the rooms that define functions.
#pragma once

#include <torch/csrc/autograd/saved_variable.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "satchel/autograd/saving.h"
#include "satchel/autograd/shared.h"
#include "satchel/core/saved.h"
#include "satchel/tensor/packed.h"

namespace satchel {

class InputSave {
 public:
  InputSave() = default;

  /// x as the method keeps it: the save that made it (shared methods), or packed bytes of its own.
  InputSave(const at::Tensor& x, const Method& method);
  /// x itself: the data set, which stands in memory anyway. Changing it before backward is an error, as in torch.
  static InputSave reference(const at::Tensor& x);

  bool defined() const { return reference_.has_value() || packed_.bytes.defined() || shared_ != nullptr; }

  /// Xᵀ·g for every g: columns of X × columns of g. X of more dimensions counts as rows of its last.
  std::vector<at::Tensor> transposed_products(const std::vector<at::Tensor>& gs) const;

  /// Can rows be had a stretch at a time?
  bool has_rows() const { return reference_.has_value() || shared_ != nullptr; }
  /// … of how many columns?
  int64_t columns() const;
  /// The tensor that a reference refers to.
  at::Tensor tensor() const { return reference_->unpack(); }
  bool is_reference() const { return reference_.has_value(); }
  /// gᵀ·X for every g (one or two), straight from the codes; empty where no kernel does that.
  std::vector<at::Tensor> products_from_codes(const std::vector<at::Tensor>& gs) const;
  /// Calls run(first, last, X's rows first to last as `type`) for stretches that cover all rows in their order.
  void for_rows(at::ScalarType type, const std::function<void(int64_t first, int64_t last, const at::Tensor& x)>& run) const;

  /// Adds its lines; none for a reference and for a save that another function made.
  void report(const std::string& name, const char* kind, std::vector<SavedTensor>& lines) const;
  void release();

 private:
  std::optional<torch::autograd::SavedVariable> reference_;
  Packed packed_;
  std::shared_ptr<const SharedSave> shared_;
};

/// sums (float32) += a·b, both float32 or both bfloat16.
void add_product_(const at::Tensor& sums, const at::Tensor& a, const at::Tensor& b);
/// a·b in float32.
at::Tensor product(const at::Tensor& a, const at::Tensor& b);

/// The line of packed bytes, and of their seed where there is one.
void report(const Packed& packed, const std::string& name, const char* kind, std::vector<SavedTensor>& lines);

}  // namespace satchel
