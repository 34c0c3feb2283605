// A save whose samples have bits of their own, 1 to 8 around a mean: ActNN's (theory.md 5). Private to the rooms that define functions.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "satchel/autograd/saving.h"
#include "satchel/core/keep.h"
#include "satchel/core/saved.h"
#include "satchel/tensor/mixed.h"

namespace satchel {

/// What a fused pass has found out about a tensor that it made, for the AdaptiveSave that meets this very tensor, untouched, next in this
/// thread; whichever AdaptiveSave comes next forgets it. ranges: as pack_mixed() takes them. squares: squared norms of the samples of a
/// gradient, float32[n].
void pass_on_ranges(const at::Tensor& x, at::Tensor ranges);
void pass_on_squares(const at::Tensor& g, at::Tensor squares);

/// A value: copies share one packed save. Samples are the first dimension; strides come back as they were where samples are stretches of
/// memory (contiguous and channels_last are).
class AdaptiveSave {
 public:
  AdaptiveSave() = default;

  /// Packs x as `keep` says. Mean bits and sensitivities come from `saving.shares`; without it the mean is the spec's bits and all samples
  /// count alike. A norm's samples get bits by their ranges alone, the mean from the layer before. `seed`: of the code; undefined: a fresh
  /// one.
  AdaptiveSave(const at::Tensor& x, const Saving& saving, const Keep& keep, const at::Tensor& seed = {});
  /// … the input of a layer with weights.
  AdaptiveSave(const at::Tensor& x, const Saving& saving)
      : AdaptiveSave(x, saving, keeps_of(saving.method, {Role::weight_input}).front()) {}

  /// Takes what a fused pass has packed for a norm in norm_bits() bits.
  static AdaptiveSave of_norm(MixedPacked packed, const Keep& keep);
  /// The mean bits of a norm's save of `values` values a sample.
  static double norm_bits(const CodecSpec& spec, int64_t values, const Saving& saving);

  bool defined() const { return kept_ != nullptr; }
  /// The packed bytes, back from host memory; undefined ones where nothing could be shared out.
  MixedPacked packed() const;
  /// Samples first to last, in x's dtype and order of dimensions.
  at::Tensor samples(int64_t first, int64_t last) const;
  /// All of x.
  at::Tensor restore() const;
  /// Starts the way back of bytes that wait in host memory (Keep::offload), if they do.
  void fetch() const;
  /// To call in backward by each layer that reads x, with its output gradient (samples first), before release(). `reach` = K / groups of a
  /// convolution, the weights that one value of one channel meets; 1 for a linear layer. No-op for norms and without shares.
  void gradient_seen(const at::Tensor& g, double reach = 1) const;

  /// The shape of x.
  std::vector<int64_t> shape() const;
  /// Adds the lines of its bytes; copies keep the same ones. Bytes that wait in host memory count too.
  void report(const std::string& name, const char* kind, std::vector<SavedTensor>& lines) const;
  /// Lets go of this copy.
  void release() { kept_.reset(); }

 private:
  struct Kept;
  std::shared_ptr<const Kept> kept_;
};

}  // namespace satchel
