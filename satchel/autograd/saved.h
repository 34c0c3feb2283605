// What a function keeps of one tensor from forward to backward. Private to the rooms that define functions.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "satchel/autograd/host_offload.h"
#include "satchel/autograd/save_policy.h"
#include "satchel/core/keep.h"
#include "satchel/core/saved.h"
#include "satchel/tensor/packed.h"

namespace satchel {

/// A tensor's memory as it stands now, and where work on it goes. While the tensor lives the memory is its own, and the version tells of
/// changes. Tensors of inference mode have no version, and no key.
struct MemoryKey {
  const void* data;
  std::vector<int64_t> sizes, strides;
  at::ScalarType type;
  uint32_t version;
  std::optional<c10::Stream> stream;

  explicit MemoryKey(const at::Tensor& x);
  bool operator==(const MemoryKey&) const = default;
};
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

/// What a fused pass has found out about a tensor that it made, for the Saved that meets this very tensor, untouched, next in this thread;
/// whichever comes next forgets it, ranges where samples are packed in bits of their own, squares where a gradient is told. ranges: as
/// pack_per_sample() takes them. squares: squared norms of the samples of a gradient, float32[n].
void pass_on_ranges(const at::Tensor& x, at::Tensor ranges);
void pass_on_squares(const at::Tensor& g, at::Tensor squares);

/// Who allocates the bits of the next steps, and what it is told about this one's save (BitAllocator::saw_gradient()).
struct AllocatorNote {
  std::shared_ptr<BitAllocator> allocator;  // null: nobody asks
  int64_t layer = -1;
  at::Tensor ranges;  // ‖R_n‖² of the samples, float64[n]
  double factor = 1;

  /// To call in backward by each layer that reads what was saved, with its output gradient, samples first. `weights_per_value` = K / groups
  /// of a convolution, the weights that one value of one channel meets; 1 for a linear layer.
  void tell(const at::Tensor& g, double weights_per_value) const;
  /// The line of its ranges.
  void report(const std::string& name, std::vector<SavedTensor>& lines) const;
};

/// A value: copies have the same bytes. x itself, or x packed: in equal bits, or in bits per sample (ActNN's, docs/theory.md 5), on its
/// device or in host memory until backward asks for it.
class Saved {
 public:
  Saved() = default;

  /// Packs x as `keep` says. Where samples (the first dimension) have bits of their own, mean bits and sensitivities come from
  /// `saving.allocator`; without it the mean is the spec's bits and all samples count alike. A norm's samples get bits by their ranges
  /// alone, the mean from the layer before. `seed`: of the code; undefined: a fresh one.
  Saved(const at::Tensor& x, const SavePolicy& saving, const Keep& keep, const at::Tensor& seed = {});
  /// … the input of a layer with weights.
  Saved(const at::Tensor& x, const SavePolicy& saving) : Saved(x, saving, keeps_of(saving.method, {Role::weight_input}).front()) {}

  /// Takes what a fused pass has packed.
  static Saved of(Packed packed, const Keep& keep);
  /// x itself: the data set, which stands in memory anyway. Changing it before backward is an error, as in torch.
  static Saved reference(const at::Tensor& x);
  /// The mean bits of a norm's save of `values` values a sample.
  static double norm_bits(const CodecSpec& spec, int64_t values, const SavePolicy& saving);

  bool defined() const { return is_reference() || is_packed(); }
  bool is_reference() const { return reference_ != nullptr; }
  bool is_packed() const { return offloaded_.defined() || packed_.bytes.defined(); }
  bool has_bits_per_sample() const { return packed_.budget > 0; }
  bool is_cuda() const { return cuda_; }
  /// How x was coded, and its shape.
  const CodecSpec& spec() const { return packed_.spec; }
  std::vector<int64_t> shape() const;

  /// The packed bytes, back from host memory.
  Packed packed() const;
  /// All of x; samples first to last of it, in x's dtype and order of dimensions.
  at::Tensor restore() const;
  at::Tensor samples(int64_t first, int64_t last) const;
  /// xᵀ·g for every g, x of more dimensions as rows of its last: columns of x × columns of g.
  std::vector<at::Tensor> transposed_products(const std::vector<at::Tensor>& gs) const;
  /// Starts the way back of bytes that stand in host memory (Keep::offload), if they do.
  void fetch() const;
  /// To call in backward, before release(): see AllocatorNote::tell().
  void gradient_seen(const at::Tensor& g, double weights_per_value = 1) const { note_.tell(g, weights_per_value); }

  /// Adds the lines of its bytes, those in host memory too; none of a reference.
  void report(const std::string& name, const char* kind, std::vector<SavedTensor>& lines) const;
  void release() { *this = {}; }

 private:
  std::shared_ptr<torch::autograd::SavedVariable> reference_;
  Packed packed_;  // its bytes stand in `offloaded_` where that is defined
  HostOffload offloaded_;
  AllocatorNote note_;
  bool cuda_ = false;
};

/// The line of packed bytes, and of their seed where there is one.
void report(const Packed& packed, const std::string& name, const char* kind, std::vector<SavedTensor>& lines);

}  // namespace satchel
