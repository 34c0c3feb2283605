// Method: what the layers of a model keep for backward, and how each of it is packed. A value, as CodecSpec is; a published
// method is a line of data. Layers get it as an argument; there is no global one.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "satchel/core/layer.h"
#include "satchel/core/spec.h"

namespace satchel {

struct Method {
  std::string name;              // as it was given
  bool torch_baseline = false;   // torch's own functions and saves: fp32
  CodecSpec input;               // what the gradients of weights read: inputs of linear and graph layers; no side code
  CodecSpec norm;                // what a norm reads: its input (layer by layer) or the normalised values (shared); no transform
  int64_t longest_block = 0;     // norm blocks given in rows are cut to this many values; 0: never
  bool shared = true;            // norm → activation → dropout → next layer keeps one thing (theory.md 10), else each its own
  bool keeps_aggregate = false;  // A·x is kept beside x, as EXACT and block-wise do; else recovered by algebra (theory.md 9)
  bool packs_data = false;       // the data set's own features are packed too; else a reference to them is kept
  bool keeps_dropout = false;    // dropout's mask is kept, a bit a value; else redrawn from its counter
  double norm_bias = 5e-4;       // shared methods: norms of few values take bits until their gradient's bias is below this; 0: they do not
  int residual = 0;              // bits of a norm that no other layer reads (shared methods); 0: as `norm`
  int derivative = 0;            // bits of a smooth activation's derivative; 0: by those of `norm` (core/keep.cpp)
  bool adaptive = false;         // images: bits are shared out by sample and layer, input.bits in the mean (theory.md 5)
  double mean = 0;               // images: what layers share has 2 or 3 bits per sample, so many in the mean; 0: all alike
  int64_t budget = 0;            // images: the same, with the mean that so many saved bytes in all allow (plan/image_plan.h); 0: none
  bool swap = false;             // images: packed bytes wait in pinned host memory
  bool operator==(const Method&) const = default;
};

struct MethodPreset {
  std::string_view name;
  std::string_view summary;  // one line for help texts
  Method method;
};

/// torch's own (fp32) first, then the published methods and their relatives, Satchel's last.
std::span<const MethodPreset> method_presets();

/// "blockwise,levels=even,block=16rows": a preset's name and what differs from its `input` spec, as parse_spec() reads it; or
/// a spec alone ("bits=4,block=128", "gact"): that spec in shared saves. Options go to `input` and `norm` alike, but for a
/// projection (inputs only) and a side (norms only). fp32 takes no options. A spec with a projection cannot be shared: each
/// layer keeps its own. The text becomes the method's name. Options of methods alone: norm_bits=1..8 (shared methods; formerly residual=),
/// derivative_bits=1..8 (of GELU and its like), mean_bits=2..3 (formerly mean=) or budget=SIZE (satchel: 2.25; 1.2GiB, 900MB, bytes),
/// norm_bias=0..1 (shared methods; off=mean alone makes it 0), adaptive=yes|no, level=0..5 (actnn, as its paper counts: none · 4-bit inputs
/// · 4 bits · 2 bits per sample · + swapped to the host · + an allocator setting against fragmentation, which is the trainer's).
Method parse_method(std::string_view text);

/// Several methods in one text: "fp32,blockwise,block=16rows,satchel". A part without `=` starts a method, one with `=` belongs
/// to the method before it; `;` ends a method in any case ("bits=4,block=128;bits=2").
std::vector<Method> parse_methods(std::string_view text);

/// The method's spec for what a norm alone keeps of rows of `width` values: no side code, `residual` bits; blocks given in rows
/// become values, at most longest_block. `count`: values a statistic, rows for BatchNorm, channels for LayerNorm; 0: the gradient of x does
/// not read the code (running statistics, or x needs none). A norm of few values takes more bits (docs/theory.md 8), `residual` ones aside.
CodecSpec norm_spec(const Method& method, int64_t width, int64_t count);

/// Layer by layer on maps: is a norm's code of the normalised values? Else of x itself, as a low-pass and full precision ask for.
inline bool codes_normalised(const CodecSpec& norm) { return norm.bits != kKeep && std::holds_alternative<Identity>(norm.transform); }

/// … of rows? EXACT and block-wise, the methods that keep A·x, publish codes of x itself; the others code x̂, whose range no mean widens.
inline bool codes_normalised_rows(const Method& method) { return !method.keeps_aggregate && method.norm.bits != kKeep; }

/// The spec of the one thing that norm → activation → dropout → next layer keeps (shared methods). Which side code fits:
///   ReLU after a norm            the method's own (`one_sided`, `both`), or none, with a mask beside it
///   ReLU without a norm          `relu` where the method has a side code, at most 3 bits
///   LeakyReLU                    `both` with one more bit (both sides pass gradients), at most 4, where the method has a side code
///   ELU                          the same, of ELU's output: its norm keeps norm_spec() apart. Layer by layer: always
///   no activation                no side code
/// More than 4 bits never have a side code; where there is none, a mask stands beside the values.
/// `count` as above. Off values of a ReLU after a norm are sampled (`off=sampled`) where the gradient of x reads them; below 4,096 values a
/// statistic a third bit has less noise, and fewer still take more (docs/theory.md 8 and 10).
CodecSpec shared_spec(const Method& method, Norm norm, Activation activation, int64_t width, int64_t count);

/// The bias of a norm's gradient, relative to the gradient, that a code of `count` values a statistic makes: its variance over count.
double norm_bias(const CodecSpec& spec, int64_t count);

/// Are bits allocated by layer or by sample? Then layers want a RunningBitAllocator (plan/bit_allocator.h).
bool allocates_bits(const Method& method);

/// How many of so many samples have 3 bits where shared maps have `mean` bits: the most that do not exceed it.
int64_t samples_of_three(double mean, int64_t samples);

/// Throws `[op] rule, got value` unless specs and flags fit each other.
void validate(const Method& method, const char* op);
/// … and unless they fit the layers of a graph: rows have no maps to filter and no samples to share bits out to.
void validate_for_graph(const Method& method, const char* op);

}  // namespace satchel
