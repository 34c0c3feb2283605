// What a method keeps at each place of a model. keeps_of() is the one reader of a method's flags: layers save what it says, and plans count
// the same, so that what is planned is what is kept. No torch.
#pragma once

#include <cstdint>
#include <vector>

#include "satchel/core/layer.h"
#include "satchel/core/method.h"

namespace satchel {

/// Places of a model that keep something.
enum class Role : uint8_t {
  weight_input,  // what a linear, convolution or graph layer multiplies its weights with
  data,          // … where that is the data set's own features
  aggregate,     // A·x of a graph layer, beside x
  epilogue,      // norm → (+ skip) → activation → dropout, or those of them that there are
  derivative,    // of a smooth activation: GELU, SiLU, tanh, sigmoid
};

/// One place. `width` and `count` decide how many bits norms of few values take (norm_spec() in core/method.h).
struct Site {
  Role role = Role::epilogue;
  Norm norm = Norm::none;  // statistics of a channel (batch), or of a row or group (layer)
  Activation activation = Activation::none;
  bool adds_skip = false;  // a residual sum before the activation
  bool drops = false;      // dropout, and training
  bool next_reads = true;  // a layer with weights reads the result; false: a norm or an activation as a function of its own, ReLU aside
  bool image = false;      // N×C×spatial, else rows
  int64_t width = 1;       // channels
  int64_t count = 0;       // values a statistic; 0: the gradient of x does not read the norm's values
};

/// What is kept, by the name that it has in reports.
enum class Kind : uint8_t { input, aggregate, norm, activation, shared, derivative, mask, affine, statistics, dropout, seed };
const char* name_of(Kind kind);

/// Of which tensor.
enum class Of : uint8_t { input, normalised, output };

struct Keep {
  Kind kind = Kind::input;
  CodecSpec spec = {};           // of what is coded: input, aggregate, norm, activation, shared, derivative
  Of of = Of::input;             // … and which tensor
  bool per_sample_bits = false;  // … samples have bits of their own, spec.bits in the mean (core/per_sample.h)
  double mean_bits = 0;          // shared images: samples have 2 or 3 bits, so many in the mean; 0: all alike
  bool offload = false;          // its bytes wait in host memory
  int numbers = 0;               // statistics: numbers a channel, row or group: the deviation, or mean and deviation
};

/// In the order of the reports. Empty where nothing is kept, and for methods of torch's own functions (is_baseline()).
std::vector<Keep> keeps_of(const Method& method, const Site& site);
/// The one of a kind; null where it is not kept.
const Keep* find(const std::vector<Keep>& keeps, Kind kind);

/// torch's own functions and saves: fp32.
bool is_baseline(const Method& method);
/// Are inputs of layers and norms coded, in fewer than 32 bits?
bool packs_rows(const Method& method);
/// Does a layer rebuild its input from what the layer before it keeps, where that is enough? Else every function keeps its own.
bool reads_producer(const Method& method);
/// The saved bytes in all that images may take; 0: no budget. A plan works out the mean bits that they allow (plan/image_plan.h).
int64_t budget_of(const Method& method);
/// The method with so many mean bits in shared images, and no budget.
Method with_mean_bits(Method method, double mean);
/// Does training of images ask for torch's allocator to grow its segments in place? Every method that packs does: its small saves between
/// large maps leave gaps, which took a third of a GPU's memory.
bool wants_growing_segments(const Method& method);
/// Has a code of `spec` as many bits as this method gives what layers with weights read? A producer may have been told fewer.
bool serves_weights(const Method& method, const CodecSpec& spec, bool after_relu);

}  // namespace satchel
