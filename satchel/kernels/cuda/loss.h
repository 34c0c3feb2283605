// The loss on CUDA: raw device pointers and a stream in, a checked launch out, as in cuda.h.
#pragma once

#include "satchel/kernels/cuda/cuda.h"

namespace satchel::cuda {

/// Label of a row that does not count, torch's own.
constexpr int64_t kIgnored = -100;

/// Rows of logits, one after another, with a label each.
struct LabelledRows {
  int64_t rows = 0, classes = 1;
  int64_t counted = 1;  // rows whose label is not kIgnored: the mean is over these
  double scale = 1;     // what the gradient is multiplied by: the loss is not
};

/// *loss = mean cross entropy of the rows that count; with `write` the logits become their gradient, zero in the other rows.
/// A label that is neither kIgnored nor 0 to classes − 1 makes the loss and its row NaN. The order of the sums depends on the sizes
/// alone. `scratch` holds cross_entropy_scratch_bytes() bytes.
int64_t cross_entropy_scratch_bytes();
void cross_entropy(const LabelledRows&, void* logits, DType, const int64_t* labels, bool write, float* loss, void* scratch, StreamHandle);

/// x *= *factor; a factor of 1 costs no pass.
void scale(void* x, DType, int64_t values, const float* factor, StreamHandle);

}  // namespace satchel::cuda
