// The one thing that norm → activation → dropout → next layer keeps (docs/theory.md 10): normalised or activated values, packed once,
// from which each reader rebuilds what it needs. Private to the rooms that define functions.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "satchel/autograd/node.h"
#include "satchel/autograd/saved.h"
#include "satchel/core/saved.h"
#include "satchel/core/spec.h"
#include "satchel/kernels/codec_layout.h"
#include "satchel/tensor/chain.h"
#include "satchel/tensor/device.h"
#include "satchel/tensor/extra_bit.h"
#include "satchel/tensor/packed.h"
#include "satchel/tensor/rows.h"

namespace satchel {

/// What an image is given where samples get 2 or 3 bits (mean_bits=), and who is told of its readers' gradients.
struct ImageBits {
  ExtraBit extra;  // samples of 3 bits among those of 2
  AllocatorNote note = {};
};

struct SharedSave {
  Packed code;             // rows × channels
  at::Tensor mask;         // one bit a value, on or off; undefined where the code itself tells, or nothing is off
  at::Tensor gamma, beta;  // fp32 copies made at forward; undefined: the identity, or inside a side code
  at::Tensor seed;         // of the dropout
  ChainOptions chain;
  std::vector<int64_t> sizes;  // N×C×spatial of an image whose rows these are, in channels_last order; empty: rows themselves
  ImageBits bits = {};

  int64_t rows() const { return code.shape[0]; }
  int64_t channels() const { return code.shape[1]; }
};

/// Bits of an image of these sizes (N×C×spatial) that is about to be coded with `spec`, 2 bits, which become 3 where all samples have so
/// many: `mean_bits` over all such images. `splits`: its coder can give samples bits of their own. Without `saving.allocator` all are
/// alike.
ImageBits image_bits(at::IntArrayRef sizes, at::Device device, const SavePolicy& saving, double mean_bits, CodecSpec& spec, bool splits);
/// … which has been coded, normalised values with γ, a ReLU's without: where gradients are asked for, its ranges are kept.
void watch(ImageBits& bits, const Packed& code, int64_t samples, const at::Tensor& gamma);

/// A node whose output the next layer may rebuild from what the node keeps, instead of packing it once more.
class SharingNode : public SavingNode {
 public:
  using SavingNode::SavingNode;
  /// Null where it has nothing to share.
  virtual std::shared_ptr<const SharedSave> shared() { return shared_; }
  uint32_t output_version() const { return version_; }
  /// Takes the save and marks `out`, untouched from here on, as what it stands for.
  void share(SharedSave save, const at::Tensor& out) {
    shared_ = std::make_shared<const SharedSave>(std::move(save));
    stands_for(out);
  }

  /// `out` is what it stands for, untouched from here on.
  void stands_for(const at::Tensor& out) { version_ = out._version(); }

 protected:
  std::shared_ptr<const SharedSave> shared_;

 private:
  uint32_t version_ = 0;
};

/// Rows of `width` values that are worked on at a time: as float32 1 MiB, which stays in a core's cache, or 48 MiB on a GPU,
/// whose products of many rows take one launch and one sum of partial results a stretch.
int64_t stretch_rows(int64_t rows, int64_t width, bool cuda);
/// Calls run(first, last) for stretches of so many rows; the last may be shorter. `unit`: they start at its multiples, those of a sample.
void for_stretches_of(int64_t rows, int64_t width, bool cuda, const std::function<void(int64_t first, int64_t last)>& run,
                      int64_t unit = 1);

/// Rows of a shared save, a stretch at a time: decoded values, and what its readers make of them. Lives as long as the save.
/// `first` is a multiple of 8, as for_stretches() gives it, but for values() and input().
class SharedRows {
 public:
  explicit SharedRows(const SharedSave& save);

  /// Calls run(first, last) for stretches of rows that stay in the cache (CPU) or are few (CUDA).
  void for_stretches(const std::function<void(int64_t first, int64_t last)>& run) const;

  /// Normalised or activated values.
  at::Tensor values(int64_t first, int64_t last, at::ScalarType type = at::kFloat) const;
  /// The next layer's input, kept · act(γ·values + β) · scale.
  at::Tensor input(int64_t first, int64_t last, at::ScalarType type = at::kFloat) const;
  /// g (rows from `first` on) becomes what passes activation and dropout, in place.
  void gradient_(const at::Tensor& g, int64_t first) const;
  /// Which values are on; all where nothing tells.
  at::Tensor on(int64_t first, int64_t last) const;

  /// Of the forward pass; undefined for the identity.
  const at::Tensor& gamma() const;

 private:
  at::Tensor bits(int64_t first, int64_t last) const;
  void read_table() const;

  const SharedSave& save_;
  Place place_;
  CodecLayout layout_;
  mutable Rows rows_;
  bool fused_;
  bool is_output_;                   // the values are the next layer's input: a ReLU's form, nothing dropped
  mutable at::Tensor on_;            // unpacked when first asked for
  mutable at::Tensor gamma_, beta_;  // fused kernels read the code's own: taken from it when asked for
};

/// Zᵀ·g for every g, Z being the next layer's input: channels × columns of g each. Rows are rebuilt once for all.
std::vector<at::Tensor> transposed_products(const SharedSave& save, const std::vector<at::Tensor>& gs);

/// Lines of the code, its mask and its affine numbers.
void report(const SharedSave& save, const std::string& name, const char* kind, std::vector<SavedTensor>& lines);

}  // namespace satchel
