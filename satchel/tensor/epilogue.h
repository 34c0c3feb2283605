// A norm and what follows it (a sum with a skip, an activation, dropout) in one pass over the values each way, with packed codes as all
// that backward reads: CUDA, where a fused kernel of kernels/cuda/epilogue.h fits. What is kept is what pack(), pack_side(),
// pack_per_sample() and pack_mask() keep of the same values. Activations (x, skip, z, g) are float32, bfloat16 or float16, everything else
// is float32, one number a channel. `sums` are the gradients of β and γ for g, that of z. `back_`: g becomes the gradient of skip and dx
// that of x; `dx` has g's shape and type, contiguous from a multiple of 16 bytes on; undefined: only g is written; g itself: only x's
// gradient is, over g. Private to the library.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "satchel/tensor/chain.h"
#include "satchel/tensor/extra_bit.h"
#include "satchel/tensor/packed.h"
#include "satchel/tensor/per_sample.h"

namespace satchel {

/// x itself, or a copy, where all kernels can read it: contiguous, from a multiple of 16 bytes on.
at::Tensor for_kernels(const at::Tensor& x);

struct ColumnMoments {
  at::Tensor mean, rstd;  // one number a channel
};
/// Of every channel over rows, which also updates the running ones where they are defined.
ColumnMoments column_moments(const at::Tensor& x, const at::Tensor& running_mean, const at::Tensor& running_var, double eps,
                             double momentum);

/// What goes into a norm: rows × channels as for_kernels() gives them; x of norm_act may stand anywhere.
struct NormInput {
  at::Tensor x;
  ColumnMoments moments;
  at::Tensor gamma, beta;
  at::Tensor skip = {};  // of x's sizes and type; undefined: nothing is added
  at::Tensor into = {};  // where z is written, of x's sizes and type, x or skip themselves included; undefined: memory of its own
};
/// How a code is made.
struct CodeChoice {
  CodecSpec spec;
  at::Tensor seed;
};

/// Gradients of β and γ.
struct NormActSums {
  at::Tensor beta, gamma;
};

// norm_act: norm → activation → dropout with x̂ in a one-sided code. `extra`: samples of 3 bits among those of 2.

/// Do the fused kernels serve x (rows × channels) with this spec?
bool fuses_norm_act(const at::Tensor& x, const CodecSpec& spec);
/// … and a packed one?
bool fuses_norm_act(const Packed& code);

struct NormActResult {
  Packed code;
  at::Tensor z;  // the next layer's input
};
NormActResult norm_act_encode(const NormInput& in, const CodeChoice& how, const ChainOptions& options, const ExtraBit& extra = {});
NormActSums norm_act_sums(const at::Tensor& g, const Packed& code, const at::Tensor& seed, const ChainOptions& options,
                          const ExtraBit& extra = {});
/// g becomes the gradient of x, in place; `training`: the statistics were the batch's.
void norm_act_back_(const at::Tensor& g, const Packed& code, const at::Tensor& seed, const ChainOptions& options, const at::Tensor& rstd,
                    const NormActSums& sums, bool training, const ExtraBit& extra = {});
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

// norm_add: z = relu(γ·x̂ + β + skip) with x̂ in a block code of 1 to 4 bits and z in its ReLU form, both in blocks of 256.

bool fuses_norm_add(const at::Tensor& x, const CodecSpec& norm, const CodecSpec& sum);

/// What backward reads, next to γ and rstd.
struct NormAddCodes {
  Packed norm;          // of x̂
  Packed sum;           // of z: Side::relu, whose on bits are ReLU's mask
  ExtraBit extra = {};  // of the sum's samples of 3 bits
};
struct NormAddResult {
  Packed norm, sum;
  at::Tensor z;
};
NormAddResult norm_add_encode(const NormInput& in, const CodeChoice& norm, const CodeChoice& sum, const ExtraBit& extra = {});
NormActSums norm_add_sums(const at::Tensor& g, const NormAddCodes& codes);
/// `training`: the statistics were the batch's.
void norm_add_back_(const at::Tensor& g, const at::Tensor& dx, const NormAddCodes& codes, const at::Tensor& gamma, const at::Tensor& rstd,
                    const NormActSums& sums, bool training);

// norm_block: norm → ReLU → dropout of rows for methods that keep each function's own.

bool fuses_norm_block(const at::Tensor& x, const CodecSpec& spec);

/// What backward reads, next to γ.
struct NormBlockSave {
  Packed code;            // of the norm's input
  ColumnMoments moments;  // its mean and deviation
  at::Tensor on;          // ReLU's mask, a bit a value
  at::Tensor kept;        // dropout's; undefined: none, or redrawn from the seed
  at::Tensor seed;        // of the dropout; may be undefined where `kept` is not
  double dropout = 0;
};
struct NormBlockDropout {
  double chance = 0;
  at::Tensor seed = {};     // undefined where the chance is 0
  bool keeps_mask = false;  // instead of the seed
};
struct NormBlockResult {
  NormBlockSave save;
  at::Tensor z;
};
NormBlockResult norm_block_encode(const NormInput& in, const CodeChoice& how, const NormBlockDropout& dropout);
NormActSums norm_block_sums(const at::Tensor& g, const NormBlockSave& save);
/// g becomes the gradient of x, in place.
void norm_block_back_(const at::Tensor& g, const NormBlockSave& save, const at::Tensor& gamma, const NormActSums& sums);

// norm_image: norm [+ skip] [→ ReLU] of channels_last images for methods that keep each function's own; x̂ in equal bits or in bits per
// sample.

/// Do the fused kernels serve the image x with this spec? `per_sample`: samples have bits of their own.
bool fuses_norm_image(const at::Tensor& x, const CodecSpec& spec, bool per_sample);

struct NormImageInput {
  NormInput rows;
  at::Tensor map;             // x, whose sizes and strides the codes have
  bool relu = true;           // with a skip always
  bool takes_ranges = false;  // of z
};
struct NormImageResult {
  Packed code;          // the normalised values in the image's sizes
  at::Tensor on;        // ReLU's mask, a bit a value; undefined without ReLU
  at::Tensor z;         // rows
  at::Tensor z_ranges;  // least and most of each block of 256 values of z, float32[blocks, 2]; undefined where not asked for
};
NormImageResult norm_image_encode(const NormImageInput& in, const CodeChoice& how);
/// … in bits allocated by the samples' ranges, `mean_bits` in the mean.
NormImageResult norm_image_encode_per_sample(const NormImageInput& in, const CodeChoice& how, double mean_bits);
/// Undefined `on`: no ReLU.
NormActSums norm_image_sums(const at::Tensor& g, const Packed& code, const at::Tensor& on);
/// `squares`: where not null, becomes the squared norm of each sample's dx, float32[samples].
void norm_image_back_(const at::Tensor& g, const at::Tensor& dx, const Packed& code, const at::Tensor& on, const at::Tensor& gamma,
                      const at::Tensor& rstd, const NormActSums& sums, at::Tensor* squares = nullptr);

// norm_low_pass: norm [+ skip] [→ ReLU] of channels_last planes for methods that keep the norm's input as a low-pass (DIVISION).
// Activations are N×C×H×W in channels_last order from a multiple of 16 bytes on.

bool fuses_norm_low_pass(const at::Tensor& x, const CodecSpec& spec);

/// What backward reads, next to γ.
struct NormLowPassSave {
  Packed code;            // of the norm's input
  ColumnMoments moments;  // its mean and deviation
  at::Tensor on;          // ReLU's mask, a bit a value of samples × pixels × channels; undefined: no ReLU
};
/// The norm, and what is done with its output.
struct NormLowPassCall {
  at::Tensor gamma, beta, running_mean, running_var;  // the running ones may be undefined
  double eps = 1e-5, momentum = 0.1;
  bool relu = true;
  at::Tensor skip;  // undefined: no sum; only with ReLU
};
struct NormLowPassResult {
  NormLowPassSave save;
  at::Tensor z;
};
/// Two reads of x. `into`: where z is written, of x's sizes, strides and type, x or skip themselves included; undefined: memory of its own.
NormLowPassResult norm_low_pass_encode(const at::Tensor& x, const NormLowPassCall& call, const CodeChoice& how,
                                       const at::Tensor& into = {});
NormActSums norm_low_pass_sums(const at::Tensor& g, const NormLowPassSave& save);
void norm_low_pass_back_(const at::Tensor& g, const at::Tensor& dx, const NormLowPassSave& save, const at::Tensor& gamma,
                         const NormActSums& sums);

/// g = scale·g + along·x + offset in place, a number of each a channel: the end of a norm's gradient from values that stand decoded. g and
/// x are rows × channels of one type, contiguous, on CUDA.
void norm_rows_back_(const at::Tensor& g, const at::Tensor& x, const at::Tensor& scale, const at::Tensor& along, const at::Tensor& offset);

}  // namespace satchel
