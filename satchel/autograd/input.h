// What a layer keeps of its input for the gradient of its weights. Private to the rooms that define functions.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "satchel/autograd/image_rows.h"
#include "satchel/autograd/save_policy.h"
#include "satchel/autograd/saved.h"
#include "satchel/autograd/shared.h"
#include "satchel/core/saved.h"
#include "satchel/tensor/packed.h"

namespace satchel {

struct OwnInput;
struct ScaledInput;

/// How a layer reads its input: rows of the last dimension (linear and graph layers), or samples of N×C×spatial maps (convolutions).
enum class Reads : uint8_t { rows, samples };

struct InputOptions {
  Reads reads = Reads::rows;
  at::Tensor as = {};            // what to pack: x's values in another type or order; undefined: x
  double weights_per_value = 1;  // weights that one value of one channel meets (AllocatorNote::tell())
};

class InputSave {
 public:
  InputSave() = default;

  /// x as the method keeps it: the save that made it (shared methods), or packed bytes, which layers that read the same x share in one
  /// thread and one stream.
  InputSave(const at::Tensor& x, const SavePolicy& saving, const InputOptions& options = {});
  InputSave(const at::Tensor& x, const Method& method) : InputSave(x, SavePolicy{method, {}, {}}) {}
  /// x itself: the data set, which stands in memory anyway. Changing it before backward is an error, as in torch.
  static InputSave reference(const at::Tensor& x);

  bool defined() const { return reference_.defined() || own_ != nullptr || shared_ != nullptr || scaled_ != nullptr; }

  /// Xᵀ·g for every g: columns of X × columns of g. X of more dimensions counts as rows of its last.
  std::vector<at::Tensor> transposed_products(const std::vector<at::Tensor>& gs) const;

  /// Can rows be had a stretch at a time?
  bool has_rows() const { return reference_.defined() || shared_ != nullptr; }
  /// … of how many columns?
  int64_t columns() const;
  /// The tensor that a reference refers to.
  at::Tensor tensor() const { return reference_.restore(); }
  bool is_reference() const { return reference_.defined(); }
  /// gᵀ·X for every g (one or two), straight from the codes; empty where no kernel does that.
  std::vector<at::Tensor> products_from_codes(const std::vector<at::Tensor>& gs) const;
  /// Calls run(first, last, X's rows first to last as `type`) for stretches that cover all rows in their order.
  void for_rows(at::ScalarType type, const std::function<void(int64_t first, int64_t last, const at::Tensor& x)>& run) const;

  /// Samples [first, last) as `type`; maps in channels_last order. `first` is 0 or one that for_samples() gives.
  at::Tensor samples(int64_t first, int64_t last, at::ScalarType type) const;
  /// Calls run(first, last, samples) for stretches that cover all samples, 8 MiB of float32 in their order, or 128 MiB from the last on on
  /// a GPU, in whose cache the last of what backward has just made stand.
  void for_samples(at::ScalarType type, const std::function<void(int64_t first, int64_t last, const at::Tensor& x)>& run) const;
  /// … that cover samples [first, last).
  void for_samples(at::ScalarType type, int64_t first, int64_t last,
                   const std::function<void(int64_t first, int64_t last, const at::Tensor& x)>& run) const;
  /// May that be any part of the batch whose rows start at a multiple of 8? And is gradient_seen() of no use?
  bool has_parts() const { return shared_ != nullptr && shared_->bits.note.allocator == nullptr; }
  /// Backward has begun: bytes in host memory start their way back.
  void fetch() const;
  /// The gradient of the layer's output, for the allocator of bits.
  void gradient_seen(const at::Tensor& g) const;

  /// Adds its lines; none for a reference and for a save that another function made.
  void report(const std::string& name, const char* kind, std::vector<SavedTensor>& lines) const;
  void release();

 private:
  /// The layer's own save, or the reference.
  const Saved& saved() const;
  std::vector<int64_t> sizes() const;
  bool is_cuda() const;
  /// Parts start at multiples of so many samples: shared rows start at multiples of 8.
  int64_t sample_step() const;
  int64_t samples_at_a_time() const;

  Saved reference_;
  std::shared_ptr<const OwnInput> own_;
  std::shared_ptr<const char> ticket_;  // who of those that share `own_` reports it
  std::shared_ptr<const SharedSave> shared_;
  std::shared_ptr<const ScaledInput> scaled_;
  double weights_per_value_ = 1;
};

/// A map that a gate keeps, and what it was multiplied with: one number a channel of each sample, without a history.
struct ScaledInput {
  InputSave x;
  at::Tensor scale;
  Method method;
};
/// A node whose output is such a product: in methods whose layers share, a convolution that reads it rebuilds it from what the node keeps.
class ScalingNode : public SavingNode {
 public:
  using SavingNode::SavingNode;
  /// Null where x, the node's output, was changed, or the map is not kept.
  std::shared_ptr<const ScaledInput> scaled(const at::Tensor& out) const {
    return scaled_ != nullptr && scaled_->x.defined() && out._version() == version_ ? scaled_ : nullptr;
  }

 protected:
  std::shared_ptr<const ScaledInput> scaled_;
  uint32_t version_ = 0;
};

/// A sharing node whose output is packed on demand, when the first layer asks for it: never where only sums and norms read it.
class OnDemandNode : public SharingNode {
 public:
  using SharingNode::SharingNode;
  /// `out`, untouched from here on, N×C×spatial in channels_last order, is packed so.
  void pack_on_demand(const CodecSpec& spec, const at::Tensor& out);
  /// The save of the node's output x; null where x was changed or is not packed on demand.
  std::shared_ptr<const SharedSave> packed_on_demand(const at::Tensor& x);
  const std::optional<CodecSpec>& on_demand() const { return on_demand_; }
  /// … and is x, the node's output, unchanged?
  bool is_on_demand(const at::Tensor& x) const;

 private:
  std::optional<CodecSpec> on_demand_;
  int64_t on_demand_version_ = 0;
};

/// Where this thread's work on x goes; none on the CPU.
std::optional<c10::Stream> current_stream(const at::Tensor& x);
/// Did the node that made x run on this thread's current stream? Its backward will, and reads its saves there. On the CPU: yes.
bool made_on_current_stream(const at::Tensor& x);
/// The shared save that made x, where x is the untouched output of such a function and the current stream made it; else null. A save is
/// written, read and given back on one stream: a reader on another one, which has waited for x alone, packs its own.
std::shared_ptr<const SharedSave> readable_save_of(const at::Tensor& x);

/// A tensor of these sizes and of no memory, where torch's backward functions read sizes only.
at::Tensor sizes_only(at::IntArrayRef sizes, const at::TensorOptions& options);
/// The type in which autocast has a layer with weights compute; x's own without autocast.
at::ScalarType layer_type(const at::Tensor& x);
/// … and layer_norm, group_norm and upsampling: float32 on CUDA, as torch's; on the CPU torch casts none of them.
at::ScalarType precise_type(const at::Tensor& x);

/// sums (float32) += a·b, both float32 or both of one type of 16 bits.
void add_product_(const at::Tensor& sums, const at::Tensor& a, const at::Tensor& b);
/// a·b in float32.
at::Tensor product(const at::Tensor& a, const at::Tensor& b);

}  // namespace satchel
