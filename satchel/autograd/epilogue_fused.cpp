// Epilogues in one pass each way, CUDA: adapters of the fused kernels of the tensor room.
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "satchel/autograd/bit_allocator.h"
#include "satchel/autograd/epilogue_kernel.h"
#include "satchel/autograd/image_rows.h"
#include "satchel/autograd/input.h"
#include "satchel/autograd/node.h"
#include "satchel/core/error.h"
#include "satchel/tensor/epilogue.h"

namespace satchel {
namespace {

bool has_weights(const EpilogueCall& call) { return call.weights.gamma.defined() && call.weights.beta.defined(); }

/// BatchNorm of the batch, with γ and β, and ReLU or no activation.
bool is_usual(const EpilogueCall& call) {
  const bool known = call.activation == Activation::relu || call.activation == Activation::none;
  return call.has_norm() && call.axes.by_channel() && call.options.training && has_weights(call) && known && call.x.numel() > 0;
}

/// Mean and deviation of each channel as lines.
ColumnMoments moments_of(const EpilogueCall& call) { return {call.known.mean.squeeze(0), call.known.rstd.squeeze(0)}; }

/// Where the result may be written over x: its memory as `rows` have it, unless for_kernels() made a copy.
at::Tensor spare_rows(const EpilogueCall& call, const at::Tensor& rows) {
  if (!call.spare.defined() || call.spare.const_data_ptr() != rows.const_data_ptr()) return {};
  return rows_of_image(call.spare);
}

/// What the kernels read of a call: x's rows, γ, β and the skip.
NormInput input_of(const EpilogueCall& call, const at::Tensor& rows, const ColumnMoments& moments) {
  const at::Tensor x = for_kernels(rows), skip = call.skip.defined() ? for_kernels(rows_of_image(call.skip.detach())) : call.skip;
  return {x, moments, call.weights.gamma.detach(), call.weights.beta.detach(), skip, spare_rows(call, x)};
}

/// Memory for x's gradient: that of g, unless the skip's stands there.
at::Tensor memory_for_x(const at::Tensor& g, const EpilogueWants& wants) {
  if (!wants.x) return {};
  return wants.skip ? at::empty_like(g) : g;
}

// norm_act: x̂ in a one-sided code serves norm, ReLU, dropout and the next layer.

bool act_fits(const EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor& rows) {
  const Keep* shared = find(keeps, Kind::shared);
  return shared != nullptr && shared->of == Of::normalised && call.axes.by_channel() && fuses_norm_act(rows, shared->spec);
}

at::Tensor act_forward(EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor& rows, EpilogueSaves& saves) {
  const NormWeights& w = call.weights;
  ColumnMoments moments;
  if (call.known.rstd.defined()) {
    moments = moments_of(call);
  } else if (call.options.training) {
    moments = column_moments(rows, w.running_mean, w.running_var, call.options.eps, call.options.momentum);
  } else {
    moments = {w.running_mean, w.running_var.add(call.options.eps).rsqrt_()};
  }
  const Keep& keep = *find(keeps, Kind::shared);
  const at::Tensor seed = norm_seed(call), into = call.spare.defined() ? rows_of_image(call.spare) : call.spare;
  const Affine affine = affine_of(call);
  CodecSpec spec = keep.spec;
  SharedSave save;
  save.bits = sample_bits(call, keep, spec, /*splits=*/true);
  save.chain = {call.dropout, call.slope};
  if (call.dropout > 0) save.seed = seed;
  NormActResult result = norm_act_encode({rows, moments, affine.gamma, affine.beta, {}, into}, {spec, seed}, save.chain, save.bits.extra);
  save.code = std::move(result.code);
  saves.rstd = moments.rstd;
  saves.code = std::make_shared<SharedSave>(std::move(save));
  saves.code_is_normalised = true;
  return result.z;
}

EpilogueGradients act_back(const EpilogueSaves& saves, const at::Tensor& g, const EpilogueWants& wants) {
  const SharedSave& save = *saves.code;
  const ExtraBit& extra = save.bits.extra;
  const NormActSums sums = norm_act_sums(g, save.code, save.seed, save.chain, extra);
  if (wants.x) norm_act_back_(g, save.code, save.seed, save.chain, saves.rstd, sums, saves.training, extra);
  return {wants.x ? g : at::Tensor(), sums.gamma, sums.beta, {}};
}

// norm_add: x̂ for the norm alone, and the sum's ReLU form for the next layer.

bool add_fits(const EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor& rows) {
  const Keep *norm = find(keeps, Kind::norm), *sum = find(keeps, Kind::shared);
  if (!call.skip.defined() || norm == nullptr || sum == nullptr || sum->of != Of::output) return false;
  return is_usual(call) && fuses_norm_add(rows, norm->spec, sum->spec);
}

at::Tensor add_forward(EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor& rows, EpilogueSaves& saves) {
  const Keep &norm = *find(keeps, Kind::norm), &sum = *find(keeps, Kind::shared);
  take_statistics(call, rows);
  const at::Tensor seed = norm_seed(call);
  CodecSpec spec = sum.spec;
  SharedSave save;
  save.bits = sample_bits(call, sum, spec, /*splits=*/true);
  const NormInput in = input_of(call, rows, moments_of(call));
  NormAddResult result = norm_add_encode(in, {norm.spec, seed}, {spec, fresh_seed(call.x.device())}, save.bits.extra);
  save.code = std::move(result.sum);
  save.chain = {0, 0};
  saves.norm = Saved::of(std::move(result.norm), norm);
  saves.rstd = call.known.rstd.squeeze(0);
  saves.code = std::make_shared<SharedSave>(std::move(save));
  return result.z;
}

EpilogueGradients add_back(const EpilogueSaves& saves, const at::Tensor& own, const EpilogueWants& wants) {
  const at::Tensor g = for_kernels(own), dx = memory_for_x(g, wants);
  const NormAddCodes codes{saves.norm.packed(), saves.code->code, saves.code->bits.extra};
  const NormActSums sums = norm_add_sums(g, codes);
  if (wants.x || wants.skip) norm_add_back_(g, dx, codes, saves.gamma->unpack().detach(), saves.rstd, sums, saves.training);
  return {dx, sums.gamma, sums.beta, wants.skip ? g : at::Tensor()};
}

// norm_block: rows of x in blocks, ReLU's mask and dropout's, each for itself.

bool block_fits(const EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor& rows) {
  const Keep* norm = find(keeps, Kind::norm);
  const bool alone = find(keeps, Kind::shared) == nullptr && norm != nullptr && norm->of == Of::input;
  if (!alone || call.is_image() || call.skip.defined() || call.activation != Activation::relu) return false;
  return is_usual(call) && rows.is_cuda() && fuses_norm_block(rows, norm->spec);
}

at::Tensor block_forward(EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor& rows, EpilogueSaves& saves) {
  const NormWeights& w = call.weights;
  const at::Tensor x = for_kernels(rows);
  const ColumnMoments moments = column_moments(x, w.running_mean, w.running_var, call.options.eps, call.options.momentum);
  const at::Tensor seed = norm_seed(call);
  NormBlockDropout dropout{call.dropout, {}, find(keeps, Kind::dropout) != nullptr};
  if (call.dropout > 0) dropout.seed = fresh_seed(call.x.device());
  NormBlockResult result = norm_block_encode(input_of(call, x, moments), {find(keeps, Kind::norm)->spec, seed}, dropout);
  saves.norm = Saved::of(std::move(result.save.code), *find(keeps, Kind::norm));
  saves.mean = result.save.moments.mean;
  saves.rstd = result.save.moments.rstd;
  saves.on = result.save.on;
  saves.dropout = call.dropout;
  saves.dropout_mask = result.save.kept;
  saves.dropout_seed = result.save.seed;
  return result.z;
}

EpilogueGradients block_back(const EpilogueSaves& saves, const at::Tensor& own, const EpilogueWants& wants) {
  const at::Tensor g = for_kernels(own);
  const NormBlockSave save{saves.norm.packed(), {saves.mean, saves.rstd}, saves.on, saves.dropout_mask, saves.dropout_seed, saves.dropout};
  const NormActSums sums = norm_block_sums(g, save);
  if (wants.x) norm_block_back_(g, save, saves.gamma->unpack().detach(), sums);
  return {wants.x ? g : at::Tensor(), sums.gamma, sums.beta, {}};
}

// norm_low_pass: images of which x is kept as a low-pass and its rest.

bool is_own_image(const EpilogueCall& call, const Keep* norm, Of of) {
  const bool sums_relu = !call.skip.defined() || call.activation == Activation::relu;
  return norm != nullptr && norm->of == of && call.is_image() && call.dropout == 0 && sums_relu && is_usual(call) && call.x.is_cuda() &&
         !reads_producer(call.saving.method);
}

/// In channels_last order from a multiple of 16 bytes on, without a history: a view or a copy.
at::Tensor for_image_kernels(const at::Tensor& x) { return image_of_rows(for_kernels(rows_of_image(x.detach())), x.sizes()); }

bool low_pass_fits(const EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor&) {
  const Keep* norm = find(keeps, Kind::norm);
  return is_own_image(call, norm, Of::input) && !norm->per_sample_bits && fuses_norm_low_pass(call.x, norm->spec);
}

at::Tensor low_pass_forward(EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor&, EpilogueSaves& saves) {
  const NormWeights& w = call.weights;
  const at::Tensor x = for_image_kernels(call.x);
  const bool over_x = call.spare.defined() && call.spare.const_data_ptr() == x.const_data_ptr();
  const NormLowPassCall kernel{w.gamma.detach(),
                               w.beta.detach(),
                               w.running_mean,
                               w.running_var,
                               call.options.eps,
                               call.options.momentum,
                               call.activation == Activation::relu,
                               call.skip.defined() ? for_image_kernels(call.skip) : call.skip};
  NormLowPassResult result = norm_low_pass_encode(x, kernel, {find(keeps, Kind::norm)->spec, norm_seed(call)}, over_x ? x : at::Tensor());
  saves.norm = Saved::of(std::move(result.save.code), *find(keeps, Kind::norm));
  saves.mean = result.save.moments.mean;
  saves.rstd = result.save.moments.rstd;
  saves.on = result.save.on;
  return rows_of_image(result.z);
}

EpilogueGradients low_pass_back(const EpilogueSaves& saves, const at::Tensor& own, const EpilogueWants& wants) {
  const at::Tensor g = image_of_rows(for_kernels(own), saves.sizes), dx = memory_for_x(g, wants);
  const NormLowPassSave save{saves.norm.packed(), {saves.mean, saves.rstd}, saves.on};
  const NormActSums sums = norm_low_pass_sums(g, save);
  if (wants.x || wants.skip) norm_low_pass_back_(g, dx, save, saves.gamma->unpack().detach(), sums);
  const auto rows = [](const at::Tensor& t) { return t.defined() ? rows_of_image(t) : t; };
  return {rows(dx), sums.gamma, sums.beta, wants.skip ? rows(g) : at::Tensor()};
}

// norm_image: images of which x̂ is kept, in equal bits or in bits per sample.

bool image_fits(const EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor& rows) {
  const Keep* norm = find(keeps, Kind::norm);
  return is_own_image(call, norm, Of::normalised) &&
         fuses_norm_image(in_sizes(rows, call.x.sizes(), call.axes), norm->spec, norm->per_sample_bits);
}

at::Tensor image_forward(EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor& rows, EpilogueSaves& saves) {
  const Keep& norm = *find(keeps, Kind::norm);
  take_statistics(call, rows);
  const CodeChoice how{norm.spec, norm_seed(call)};
  NormImageInput in{input_of(call, rows, moments_of(call)), in_sizes(rows, call.x.sizes(), call.axes)};
  in.relu = call.activation == Activation::relu;
  in.takes_ranges = norm.per_sample_bits && call.saving.allocator != nullptr;
  NormImageResult result;
  if (norm.per_sample_bits) {
    const double bits = Saved::norm_bits(norm.spec, rows.numel() / call.x.size(0), call.saving);
    result = norm_image_encode_per_sample(in, how, bits);
    saves.z_ranges = std::move(result.z_ranges);
    saves.tells_squares = call.saving.allocator != nullptr && call.saving.allocator->wants_gradient(0);  // of all layers or of none
  } else {
    result = norm_image_encode(in, how);
  }
  saves.norm = Saved::of(std::move(result.code), norm);
  saves.rstd = call.known.rstd.squeeze(0);
  saves.on = std::move(result.on);
  return result.z;
}

EpilogueGradients image_back(const EpilogueSaves& saves, const at::Tensor& own, const EpilogueWants& wants) {
  const at::Tensor g = for_kernels(own), dx = memory_for_x(g, wants);
  const Packed codes = saves.norm.packed();
  const NormActSums sums = norm_image_sums(g, codes, saves.on);
  EpilogueGradients result{dx, sums.gamma, sums.beta, wants.skip ? g : at::Tensor()};
  at::Tensor* squares = saves.tells_squares && wants.x ? &result.squares : nullptr;
  if (wants.x || wants.skip) norm_image_back_(g, dx, codes, saves.on, saves.gamma->unpack().detach(), saves.rstd, sums, squares);
  return result;
}

}  // namespace

std::span<const EpilogueKernel> epilogue_kernels() {
  static const std::array<EpilogueKernel, 6> kKernels = {{
      {"norm_act", act_fits, act_forward, act_back},
      {"norm_add", add_fits, add_forward, add_back},
      {"norm_block", block_fits, block_forward, block_back},
      {"norm_low_pass", low_pass_fits, low_pass_forward, low_pass_back},
      {"norm_image", image_fits, image_forward, image_back},
      kUnfusedEpilogue,
  }};
  return kKernels;
}

const EpilogueKernel& epilogue_kernel(const EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor& rows) {
  const std::span<const EpilogueKernel> all = epilogue_kernels();
  const char* given = std::getenv("SATCHEL_EPILOGUE");
  const std::string_view forced = given == nullptr ? "" : given;
  if (!forced.empty() && std::ranges::find(all, forced, [](const EpilogueKernel& k) { return std::string_view(k.name); }) == all.end()) {
    fail("epilogue", "SATCHEL_EPILOGUE must be the name of a kernel", forced);
  }
  for (const EpilogueKernel& kernel : all.first(all.size() - 1)) {
    const bool allowed = forced.empty() || forced == kernel.name;
    if (allowed && rows.is_cuda() && kernel.fits(call, keeps, rows)) return kernel;
  }
  return all.back();
}

}  // namespace satchel
