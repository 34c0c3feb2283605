// What every layer is told about saving: the method, and the name its saves go by in reports. And where seeds come from.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "satchel/core/method.h"

namespace satchel {

class BitShares;

/// Of who names none: `satchel`, parsed once.
const Method& default_method();

struct Saving {
  Method method = default_method();
  std::string name = {};
  std::shared_ptr<BitShares> shares = {};  // adaptive methods: who shares bits out between samples and layers; none: samples only
};

/// A seed of its own for one save: 64 bits from torch's default generator, so that torch::manual_seed fixes a run. An int64[1]
/// tensor on `device`; no host synchronisation. Where a SeedBank lives in this thread, its next seed.
at::Tensor fresh_seed(at::Device device);

/// `count` seeds in a line on `device`: the numbers that as many calls of fresh_seed() would have drawn, by one asynchronous copy.
at::Tensor draw_seeds(int64_t count, at::Device device);
/// The same into a line of seeds that stands already, in the order of the current stream.
void redraw_seeds(const at::Tensor& seeds);

/// While it lives, fresh_seed() in this thread hands out the seeds of a line in turn, as views, for the line's device: a step's
/// seeds reach the GPU together, and lie where a captured CUDA graph reads them anew. The innermost one serves.
class SeedBank {
 public:
  /// What fresh_seed() does when all are used: draw its own, as without a bank, or refuse: a graph would hold that one number for ever.
  enum class End : uint8_t { draws, refuses };

  explicit SeedBank(at::Tensor seeds, End end = End::draws);
  ~SeedBank();
  SeedBank(const SeedBank&) = delete;
  SeedBank& operator=(const SeedBank&) = delete;

  /// Seeds asked for so far, those drawn beyond the line too.
  int64_t asked() const { return asked_; }

 private:
  friend at::Tensor fresh_seed(at::Device device);
  /// The next seed; undefined where it is to be drawn.
  at::Tensor next();

  at::Tensor seeds_;
  End end_;
  int64_t asked_ = 0;
  SeedBank* outer_;
};

/// Throws `[op] rule, got value` unless 0 ≤ p < 1 − 2^−17: it is rounded to a multiple of 2^−16.
void check_dropout(double p, const char* op);
/// What kept values are multiplied with: 1/(1 − p), p rounded.
double dropout_scale(double p);

}  // namespace satchel
