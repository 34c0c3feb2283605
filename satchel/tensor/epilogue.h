// A norm and what follows it (a sum with a skip, an activation, dropout) in one pass over the values each way, with packed codes as all
// that backward reads: CUDA, where a fused kernel of kernels/cuda/epilogue.h fits. What is kept is what pack(), pack_side(),
// pack_per_sample() and pack_mask() keep of the same values. Activations (x, skip, z, g) are float32, bfloat16 or float16, everything else
// is float32, one number a channel. `sums` are the gradients of β and γ for g, that of z. `back_`: g becomes the gradient of skip and dx
// that of x; `dx` has g's shape and type, contiguous from a multiple of 16 bytes on; undefined: only g is written; g itself: only x's
// gradient is, over g. Private to the library.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "satchel/tensor/chain.h"
#include "satchel/tensor/extra_bit.h"
#include "satchel/tensor/packed.h"
#include "satchel/tensor/per_sample.h"

namespace satchel {

/// x itself, or a copy, where all kernels can read it: contiguous, from a multiple of 16 bytes on.
at::Tensor for_kernels(const at::Tensor& x);

/// One number a channel each.
struct ColumnMoments {
  at::Tensor mean, rstd;
};
/// Running statistics that a pass updates; undefined: none.
struct RunningMoments {
  at::Tensor mean, var;
  double eps = 1e-5, momentum = 0.1;
};
/// Of every channel over rows.
ColumnMoments column_moments(const at::Tensor& x, const RunningMoments& running);
/// Σ over rows of rows × columns in float32, where sums_columns() is true of them: of a type that the kernels know, without gaps.
bool sums_columns(const at::Tensor& g);
at::Tensor sum_columns(const at::Tensor& g);
/// Moments of rows that come in parts: each part's, merged in the order they came.
class MomentsOfParts {
 public:
  void add(const at::Tensor& x);
  ColumnMoments all(const RunningMoments& running) const;

 private:
  int64_t rows_ = 0;
  at::Tensor mean_, squares_;  // float64; squared differences from the mean
};

/// What goes into a norm: rows × channels as for_kernels() gives them; x of norm_act may stand anywhere.
struct NormInput {
  at::Tensor x;
  ColumnMoments moments;
  at::Tensor gamma, beta;
  at::Tensor skip = {};   // of x's sizes and type; undefined: nothing is added
  at::Tensor into = {};   // where z is written, of x's sizes and type, x or skip themselves included; undefined: memory of its own
  at::Tensor image = {};  // norm_image and norm_low_pass: x as N×C×spatial in channels_last order, whose sizes and strides the codes have
  bool relu = true;       // … norm_image: with a skip always; norm_low_pass: a skip needs it
  bool takes_ranges = false;  // norm_image: of z
};
/// How a code is made.
struct CodeChoice {
  CodecSpec spec;
  at::Tensor seed;
};

// The fused passes, and what they serve:
//
//   act       norm → activation → dropout: x̂ in a one-sided code, which serves the next layer as well
//   add       z = relu(γ·x̂ + β + skip): x̂ in a block code of 1 to 4 bits and z in its ReLU form, both in blocks of 256; or, without a
//             skip, z = γ·x̂ + β: x̂ in a block code of 2 bits, and nothing else
//   block     norm → ReLU → dropout of rows, for methods that keep each function's own
//   image     norm [+ skip] [→ ReLU] of images, likewise; x̂ in equal bits or in bits per sample
//   low_pass  norm [+ skip] [→ ReLU] of images, likewise; x as a low-pass (DIVISION)

enum class FusedNorm : uint8_t { act, add, block, image, low_pass };

/// What backward reads, next to γ: of each pass some.
struct NormSave {
  FusedNorm pass = FusedNorm::act;
  Packed code = {};            // act, add, image: of x̂; block, low_pass: of x
  ColumnMoments moments = {};  // add, image: the mean is not read; act: its code has γ
  at::Tensor on = {};          // block, image, low_pass: ReLU's mask, a bit a value; undefined: no ReLU
  Packed sum = {};             // add: of z, Side::relu, whose on bits are ReLU's mask; without bytes where there was no skip
  ExtraBit extra = {};         // act, add: samples of 3 bits among those of 2; of the sum where there is one
  ChainOptions chain = {};     // act: slope and dropout; block: dropout
  at::Tensor seed = {};        // act, block: of the dropout; undefined: nothing is dropped, or `kept` tells
  at::Tensor kept = {};        // block: dropout's mask, a bit a value
};
struct NormResult {
  NormSave save;
  at::Tensor z = {};         // the next layer's input
  at::Tensor z_ranges = {};  // least and most of each block of 256 values of z, float32[blocks, 2]; undefined where not asked for
};
struct NormBlockDropout {
  double chance = 0;
  at::Tensor seed = {};     // undefined where the chance is 0
  bool keeps_mask = false;  // instead of the seed
};

/// Do the fused kernels serve x, rows × channels or an image, with this spec? `per_sample`: samples have bits of their own.
bool fuses_norm_act(const at::Tensor& x, const CodecSpec& spec);
bool fuses_norm_add(const at::Tensor& x, const CodecSpec& norm, const std::optional<CodecSpec>& sum);
bool fuses_norm_block(const at::Tensor& x, const CodecSpec& spec);
bool fuses_norm_image(const at::Tensor& x, const CodecSpec& spec, bool per_sample);
bool fuses_norm_low_pass(const at::Tensor& x, const CodecSpec& spec);

NormResult norm_act_encode(const NormInput& in, const CodeChoice& how, const ChainOptions& options, const ExtraBit& extra = {});
/// `sum`: not read without a skip. `rows`, where given: x comes in parts, `each` rows at a time but for the last, so that it never stands
/// whole: in.x has its sizes and type, and no memory. Rows of a part make whole blocks of 256 values.
using RowsOf = std::function<at::Tensor(int64_t first, int64_t last)>;
NormResult norm_add_encode(const NormInput& in, const CodeChoice& norm, const CodeChoice& sum, const ExtraBit& extra = {},
                           const RowsOf& rows = {}, int64_t each = 0);
NormResult norm_block_encode(const NormInput& in, const CodeChoice& how, const NormBlockDropout& dropout);
/// `mean_bits`: bits allocated by the samples' ranges, so many in the mean; 0: the spec's for all.
NormResult norm_image_encode(const NormInput& in, const CodeChoice& how, double mean_bits = 0);
/// Two reads of x. Takes the moments itself.
NormResult norm_low_pass_encode(const NormInput& in, const RunningMoments& running, const CodeChoice& how);

/// Gradients of β and γ.
struct NormActSums {
  at::Tensor beta, gamma;
};
NormActSums norm_sums(const at::Tensor& g, const NormSave& save);
/// `gamma`: not read of act, whose code has it. `sums`: undefined ones: the statistics were not the batch's (act, add). `squares` (image):
/// where not null, becomes the squared norm of each sample's dx, float32[samples].
void norm_back_(const at::Tensor& g, const at::Tensor& dx, const NormSave& save, const at::Tensor& gamma, const NormActSums& sums,
                at::Tensor* squares = nullptr);
/// The same for rows [first, first + dx's own), which g and the save have all of; `sums` are those of all. Of add alone, without an extra
/// bit; first·channels is a multiple of 1024.
void norm_back_rows_(const at::Tensor& g, const at::Tensor& dx, int64_t first, const NormSave& save, const at::Tensor& gamma,
                     const NormActSums& sums);

// What else is read of norm_act's code.

/// Do the fused kernels serve it?
bool fuses_norm_act(const Packed& code);
/// Rows [first, last) of z again.
at::Tensor norm_act_input(const Packed& code, const at::Tensor& seed, const ChainOptions& options, int64_t first, int64_t last,
                          at::ScalarType type = at::kFloat, const ExtraBit& extra = {});

/// Does the kernel of norm_act_product() serve these gradients (one or two, rows × columns, all of one width and type)?
bool fuses_norm_act_product(const Packed& code, const std::vector<at::Tensor>& gs);
/// The gradient of a layer's weights from its packed input: gᵀ·z for every g, columns × channels in float32, z as norm_act_input() gives it
/// in g's type. 16 bits go through the tensor cores, float32 too where torch's own products may use TF32. The order of the sums depends on
/// sizes and types alone.
std::vector<at::Tensor> norm_act_product(const Packed& code, const at::Tensor& seed, const ChainOptions& options,
                                         const std::vector<at::Tensor>& gs);

/// g = scale·g + along·x + offset in place, a number of each a channel: the end of a norm's gradient from values that stand decoded. g and
/// x are rows × channels of one type, contiguous, on CUDA.
void norm_rows_back_(const at::Tensor& g, const at::Tensor& x, const at::Tensor& scale, const at::Tensor& along, const at::Tensor& offset);

}  // namespace satchel
