// A norm and what follows it, one pass each way: statistics → affine (→ + skip) → activation (→ dropout). Forward writes z and packed
// codes, backward reads nothing else. A code says what is kept:
//
//   NormActCode      x̂ in a one-sided code, which serves norm, activation, dropout and the next layer
//   NormAddCode      x̂ in a block code, z = relu(γ·x̂ + β + skip) in its ReLU form; or x̂ alone, z = γ·x̂ + β
//   NormBlockCode    the norm's input in a block code, a bit a value for ReLU's mask and one for dropout's
//   NormImageCode      x̂ of channels_last images in a block code, whose samples may have bits of their own, and ReLU's mask
//   NormLowPassCode  the norm's input as a low-pass and the block code of the rest (DIVISION), and ReLU's mask
//
// x̂ = (x − mean)·rstd. Activations (x, skip, z, g) are rows × channels of f32, bf16 or f16, from a multiple of 16 bytes on (NormActCode:
// from anywhere); all else is float32. Codes and headers start at multiples of 16. Where CMake found no CUDA, none.cpp stands in: nothing
// fits, and the rest throws.
#pragma once

#include <cstdint>

#include "satchel/core/per_sample.h"
#include "satchel/kernels/cuda/cuda.h"

namespace satchel::cuda {

/// One number a channel each.
struct NormParameters {
  const float *mean, *rstd, *gamma, *beta;
};

/// Codes and headers of one packed tensor as core/layout.h has them.
struct CodeParts {
  uint8_t* codes;
  void* headers;
};

/// What forward reads and writes beside a code.
struct NormPass {
  const void* x;
  DType type;  // of x, skip and z
  NormParameters with;
  void* z;  // may be x or skip
  const void* skip = nullptr;
  int64_t first_row = 0, rows = 0;  // NormAddCode: x has these rows alone, and they alone are coded; 0 rows: all
};

/// A channel's sums over rows, Σ gz (β's gradient) and Σ gz·x̂ (γ's); gz = g where it passes activation and dropout, scaled as z is.
struct NormSums {
  const void* g;
  DType type;
  float *beta, *gamma;
  void* scratch;
};

/// The last pass, one read of g: gz goes to `skip`, γ·rstd·(gz − Σgz/N − x̂·Σgz·x̂/N) to `x`. Either may be g, or null: not wanted.
struct NormBack {
  const void* g;
  DType type;                   // of g, skip and x
  const float *gamma, *rstd;    // NormActCode has γ of its own
  const float *sum_g, *sum_gx;  // of norm_sums(); null (NormActCode, NormAddCode): γ·rstd·gz, for statistics that are not the batch's
  void *skip, *x;               // NormActCode and NormBlockCode: x is g, skip is null
  float* squares = nullptr;     // NormImageCode: Σ of x's squared gradients a block; null: not wanted
  int64_t rows = 0;             // N, where the code is a part of what the sums were taken of; 0: the code's own rows
};

/// `bytes` is the packed tensor as core/layout.h lays it out, at a multiple of 16; of the chain slope, drop and scale are read.
struct NormActCode {
  SideCode side;
  Chain chain;
  uint8_t* bytes;
  const uint64_t* seed;     // of rounding and dropout; may be null in backward where nothing is dropped
  ExtraBitView extra = {};  // samples of 3 bits among those of 2, whose blocks of 256 fill every sample
};

struct NormAddCode {
  BlockCode norm;  // of x̂, fp32
  SideCode sum;    // of z, as it stands in memory
  int64_t channels;
  CodeParts norm_at, sum_at;
  ExtraBitView extra = {};                                   // of the sum: samples of 3 bits among those of 2, as above
  const uint64_t *norm_seed = nullptr, *sum_seed = nullptr;  // forward
  bool alone = false;                                        // x̂ alone: no skip and no ReLU, and of the sum nothing is read
};

/// Of the chain channels, drop and scale are read.
struct NormBlockCode {
  BlockCode code;
  Chain chain;
  CodeParts at;
  uint8_t* on;                          // ReLU's mask, a byte for every 8 values begun
  uint8_t* kept;                        // dropout's; null: none dropped, or redrawn from drop_seed
  const uint64_t* drop_seed;            // read where drop > 0: forward, and backward where `kept` is null
  const float *mean, *rstd;             // backward
  const uint64_t* code_seed = nullptr;  // forward
};

/// Even levels: of all samples alike as core/layout.h has them, or as core/per_sample.h has them.
struct NormImageCode {
  int64_t samples, values;  // values a sample
  int64_t channels, block;
  int bits;  // of every sample; 0: its own, as its entry says
  HeaderType header;
  Rounding rounding;
  CodeParts at = {};
  const uint32_t* entries = nullptr;  // null where bits are given
  uint8_t* on = nullptr;              // ReLU's mask, a byte for every 8 values; null: no ReLU
  const uint64_t* seed = nullptr;     // forward
};

/// A packed low-pass of whole samples: shape and code, and where its parts stand.
struct LowPassParts {
  LowPassShape maps;
  BlockCode code;
  int64_t channels;
  uint8_t* codes;
  void* headers;
  uint16_t* means;
};
struct NormLowPassCode {
  LowPassParts parts;
  uint8_t* on;               // ReLU's mask, a bit a value of samples × pixels × channels; null: no ReLU
  const float *mean, *rstd;  // backward
};

// Does a code fit? Pointers are not looked at. Where it does not, pack, pack_mask and chain serve.

/// One-sided codes of 2 or 3 bits in blocks of 256 (so 256 values at least) that start nowhere anew, inner = 1, and channels of which
/// 528·256 can be a multiple: all up to 528, and more with a large power of two in them.
bool norm_act_fits(const SideCode&);
/// Straight blocks of 256 values, 1 to 4 bits of x̂ (alone: 2 of uneven levels), Side::relu in 2 or 3 bits of z, and channels of which
/// 396·256 can be a multiple: all up to 396, and more with a power of two in them.
bool norm_add_fits(const NormAddCode&);
/// 2 bits in straight blocks of 128, 256, 512 or 1024 values, and channels as for norm_add.
bool norm_block_fits(const BlockCode&, int64_t channels);
/// 1 to 8 bits in blocks of 256 values that fill every sample, and channels as for norm_add.
bool norm_image_fits(const NormImageCode&);
/// Planes in windows of 8, 2 bits, even levels, one block a map of 8 values or more, channels in multiples of 8, less than 2^24 rows; rows
/// of pixels in multiples of 4 that make maps of multiples of 8, or maps of which 32 fit the current device's shared memory.
bool norm_low_pass_fits(const LowPassParts&, DType);

/// Scratch of what takes some: all of norm_act, the sums of add, block and image, all of low_pass.
int64_t norm_act_scratch_bytes();
int64_t norm_scratch_bytes();
int64_t norm_low_pass_scratch_bytes(const LowPassParts&);

/// All of `bytes`, the channel table and the gaps included, and z: what pack_side() and chain() give of x̂.
void norm_encode(const NormActCode&, const NormPass&, void* scratch, StreamHandle);
/// The bytes of encode() of x̂ and of side_encode() of z with the gaps before the headers. ReLU as torch has it: NaN stays, −∞ becomes 0.
void norm_encode(const NormAddCode&, const NormPass&, StreamHandle);
/// The bytes of encode() of x with the gap before the headers, of mask() of y = γ·x̂ + β and of what is kept; z = kept·relu(y)·scale.
void norm_encode(const NormBlockCode&, const NormPass&, StreamHandle);
/// y = γ·x̂ + β (+ skip); z = relu(y), or y where there is no mask. The bytes of encode() or per_sample_encode() of x̂, without gaps, and of
/// mask() of y; entries of bits per sample stand already. `ranges`: extremes of every block of x̂, for bits per sample; null: taken in
/// passing. `z_ranges` become those of z as it stands in memory; null: not wanted.
void norm_encode(const NormImageCode&, const NormPass&, const F32Header* ranges, F32Header* z_ranges, StreamHandle);
/// Extremes of every block of x̂, as per_sample_measure() gives them. Of the pass x, type and with are read.
void norm_image_measure(const NormImageCode&, const NormPass&, F32Header* ranges, StreamHandle);
/// One read of x: the moments and, where the maps are not small, means and headers.
void norm_low_pass_measure(const LowPassParts&, const void* x, DType, const Moments&, void* scratch, StreamHandle);
/// After norm_low_pass_measure(), one read of x: the rest of the code, to the bit what low_pass_last_encode() gives, and z = γ'·x + β' of
/// the folded norm (γ' = γ·rstd, β' = β − mean·γ') with skip and ReLU, as chain() gives it. A skip needs a mask.
void norm_encode(const NormLowPassCode&, const NormPass&, const uint64_t* seed, StreamHandle);

void norm_sums(const NormActCode&, const NormSums&, StreamHandle);
void norm_sums(const NormAddCode&, const NormSums&, StreamHandle);
void norm_sums(const NormBlockCode&, const NormSums&, StreamHandle);
void norm_sums(const NormImageCode&, const NormSums&, StreamHandle);
void norm_sums(const NormLowPassCode&, const NormSums&, StreamHandle);

void norm_back(const NormActCode&, const NormBack&, StreamHandle);
void norm_back(const NormAddCode&, const NormBack&, StreamHandle);
void norm_back(const NormBlockCode&, const NormBack&, StreamHandle);
void norm_back(const NormImageCode&, const NormBack&, StreamHandle);
void norm_back(const NormLowPassCode&, const NormBack&, StreamHandle);

/// Rows [first, last) of the next layer's input: what decode and chain() with the code's own on bits give.
void norm_act_input(const NormActCode&, int64_t first, int64_t last, void* z, DType, StreamHandle);

// The weights' gradient from the packed input of a layer: Gᵀ·Z, Z decoded inside the product (theory.md 10).

/// One or two gradients of `width` columns each, rows `stride` values apart, and where their products (width × channels) go.
struct ProductGradients {
  DType type = DType::f32;
  bool tf32 = false;  // float32 may go through the tensor cores, each factor rounded to tf32
  int count = 1;
  int64_t width = 0;
  const void* g[2] = {};
  int64_t stride[2] = {};
  float* out[2] = {};
};

/// Fits, beside norm_act_fits: channels a multiple of 8, up to 512, that fill at least two thirds of tiles of 128; 1 or 2 gradients
/// with 1 to 256 columns; a current device with 65 KiB of shared memory a thread block. Any stride and address does;
/// multiples of 16 bytes are copied faster.
bool norm_act_product_fits(const SideCode&, const ProductGradients&);
int64_t norm_act_product_scratch_bytes(const SideCode&, const ProductGradients&);
/// out[i] = g[i]ᵀ·Z for the Z of norm_act_input(), to the bit: of float32, or of 16 bits where g is. Sums in float32 whose order depends on
/// sizes, types and the GPU's model: last bits differ between models. `scratch` starts at a multiple of 16.
void norm_act_product(const SideCode&, const Chain&, const uint8_t* bytes, const uint64_t* seed, const ProductGradients&, void* scratch,
                      StreamHandle);

}  // namespace satchel::cuda
