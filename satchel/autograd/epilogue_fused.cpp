// Epilogues in one pass each way, CUDA: adapters of the fused kernels of the tensor room.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <numeric>
#include <string_view>
#include <utility>

#include "satchel/autograd/bit_allocator.h"
#include "satchel/autograd/epilogue_node.h"
#include "satchel/autograd/image_rows.h"
#include "satchel/autograd/input.h"
#include "satchel/autograd/node.h"
#include "satchel/core/error.h"
#include "satchel/core/stretch.h"
#include "satchel/tensor/epilogue.h"
#include "satchel/tensor/row_norm.h"

namespace satchel {
namespace {

/// BatchNorm of the batch, with γ and β, and ReLU or no activation.
bool is_usual(const EpilogueCall& call) {
  const bool has_weights = call.weights.gamma.defined() && call.weights.beta.defined();
  const bool known = call.activation == Activation::relu || call.activation == Activation::none;
  return call.has_norm() && call.axes.by_channel() && call.options.training && has_weights && known && call.x.numel() > 0;
}

/// Mean and deviation of each channel as lines.
ColumnMoments moments_of(const EpilogueCall& call) { return {call.known.mean.squeeze(0), call.known.rstd.squeeze(0)}; }

RunningMoments running_of(const EpilogueCall& call) {
  return {call.weights.running_mean, call.weights.running_var, call.options.eps, call.options.momentum};
}

/// Where the result may be written over x: its memory as `rows` have it, unless for_kernels() made a copy.
at::Tensor spare_rows(const EpilogueCall& call, const at::Tensor& rows) {
  if (!call.spare.defined() || call.spare.const_data_ptr() != rows.const_data_ptr()) return {};
  return rows_of_image(call.spare);
}

/// What the kernels read of a call: x's rows, γ, β and the skip. An x that comes in parts has no memory: the result goes to the spare one.
NormInput input_of(const EpilogueCall& call, const at::Tensor& rows, const ColumnMoments& moments) {
  const bool whole = !call.samples;
  const at::Tensor x = whole ? for_kernels(rows) : rows,
                   skip = call.skip.defined() ? for_kernels(rows_of_image(call.skip.detach())) : call.skip;
  NormInput in{
      x, moments, call.weights.gamma.detach(), call.weights.beta.detach(), skip, whole ? spare_rows(call, x) : rows_of_image(call.spare)};
  in.relu = call.activation == Activation::relu;
  if (whole && call.is_image()) in.image = call.in_sizes(x);
  return in;
}

/// The norm's own code and all that stands beside it.
at::Tensor keep_fused(NormResult made, const Keep& norm, EpilogueSaves& saves) {
  NormSave& save = made.save;
  saves.norm = Saved::of(std::move(save.code), norm);
  if (norm.of == Of::input) saves.mean = save.moments.mean;
  saves.rstd = save.moments.rstd;
  saves.on = save.on;
  saves.dropout_mask = save.kept;
  saves.dropout_seed = save.seed;
  saves.z_ranges = made.z_ranges;
  return made.z;
}

/// … as backward hands it to the kernels.
NormSave save_of(const EpilogueSaves& saves, FusedNorm pass) {
  NormSave save;
  save.pass = pass;
  save.moments = {saves.mean, saves.rstd};
  if (pass == FusedNorm::act) {
    save.code = saves.code->code;
    save.chain = saves.code->chain;
    save.seed = saves.code->seed;
    save.extra = saves.code->bits.extra;
    return save;
  }
  save.code = saves.norm.packed();
  save.on = saves.on;
  save.chain.dropout = saves.dropout;
  save.kept = saves.dropout_mask;
  save.seed = saves.dropout_seed;
  if (pass != FusedNorm::add || saves.code == nullptr) return save;
  save.sum = saves.code->code;
  save.extra = saves.code->bits.extra;
  return save;
}

/// norm_add's last pass by parts of the batch: g becomes the skip's gradient, and x's goes to `to` as it is made.
at::Tensor back_by_parts(const EpilogueSaves& saves, const at::Tensor& g, const NormSave& save, const NormActSums& sums, SavingNode& to) {
  const int64_t samples = saves.sizes[0], rows = g.size(0) / samples, some = part_samples(saves.sizes);
  const at::Tensor gamma = saves.gamma_values(), room = at::empty({std::min(some, samples) * rows, g.size(1)}, g.options());
  std::vector<int64_t> sizes = saves.sizes;
  for (int64_t first = 0; first < samples; first += some) {
    sizes[0] = std::min(some, samples - first);
    const at::Tensor dx = room.narrow(0, 0, sizes[0] * rows);
    norm_back_rows_(g, dx, first * rows, save, gamma, sums);
    to.take_part(first, image_of_rows(dx, sizes));
  }
  return at::zeros({1}, g.options()).expand(g.sizes());  // torch's anomaly mode looks for NaN in it
}

template <FusedNorm pass>
EpilogueGradients fused_back(const EpilogueSaves& saves, const at::Tensor& own, const EpilogueWants& wants) {
  const at::Tensor g = pass == FusedNorm::act ? own : for_kernels(own);
  if constexpr (pass == FusedNorm::add) {
    const bool large = saves.is_image() && g.numel() >= kPartsFrom && part_samples(saves.sizes) < saves.sizes[0];
    const bool parts = large && wants.skip && wants.x_parts != nullptr && saves.options.training && saves.code != nullptr &&
                       !saves.code->bits.extra.defined();
    if (parts && wants.x_parts->begin_parts()) {
      const NormSave save = save_of(saves, pass);
      const NormActSums sums = norm_sums(g, save);
      return {back_by_parts(saves, g, save, sums, *wants.x_parts), sums.gamma, sums.beta, g};
    }
  }
  at::Tensor dx;  // over g, unless the skip's gradient stands there
  if (wants.x) dx = wants.skip ? at::empty_like(g) : g;
  const NormSave save = save_of(saves, pass);
  const NormActSums sums = norm_sums(g, save);
  EpilogueGradients result{dx, sums.gamma, sums.beta, wants.skip ? g : at::Tensor()};
  if (!wants.x && !wants.skip) return result;
  at::Tensor* squares = saves.tells_squares && wants.x ? &result.squares : nullptr;
  norm_back_(g, dx, save, saves.gamma_values(), saves.options.training ? sums : NormActSums(), squares);
  return result;
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
    moments = column_moments(rows, running_of(call));
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
  NormResult result = norm_act_encode({rows, moments, affine.gamma, affine.beta, {}, into}, {spec, seed}, save.chain, save.bits.extra);
  save.code = std::move(result.save.code);
  save.seed = result.save.seed;
  saves.rstd = moments.rstd;
  saves.code = std::make_shared<SharedSave>(std::move(save));
  saves.code_is_normalised = true;
  return result.z;
}

// norm_add: x̂ for the norm alone, and the sum's ReLU form for the next layer.

bool add_fits(const EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor& rows) {
  const Keep *norm = find(keeps, Kind::norm), *sum = find(keeps, Kind::shared);
  if (!call.skip.defined() || norm == nullptr || sum == nullptr || sum->of != Of::output) return false;
  return is_usual(call) && fuses_norm_add(rows, norm->spec, sum->spec);
}

// norm_alone: x̂ for a norm of which nothing but a sum reads the result.

bool alone_fits(const EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor& rows) {
  const Keep* norm = find(keeps, Kind::norm);
  const bool alone = norm != nullptr && norm->of == Of::normalised && !norm->per_sample_bits && find(keeps, Kind::shared) == nullptr;
  if (!alone || !reads_producer(call.saving.method) || call.skip.defined() || call.activation != Activation::none) return false;
  return call.dropout == 0 && is_usual(call) && fuses_norm_add(rows, norm->spec, std::nullopt);
}

/// Both of them. An x that comes in parts of the batch is made twice: for the statistics, then to be coded.
at::Tensor add_forward(EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor& rows, EpilogueSaves& saves) {
  const Keep &norm = *find(keeps, Kind::norm), *sum = find(keeps, Kind::shared);
  RowsOf part;
  int64_t each = 0;
  ColumnMoments moments;
  if (call.samples) {
    const int64_t of_sample = rows.size(0) / call.sizes[0];
    each = part_samples(call.sizes) * of_sample;
    part = [&, of_sample](int64_t first, int64_t last) { return rows_of_image(call.samples(first / of_sample, last / of_sample)); };
    MomentsOfParts of_parts;
    for (int64_t first = 0; first < rows.size(0); first += each) of_parts.add(part(first, std::min(first + each, rows.size(0))));
    moments = of_parts.all(running_of(call));
  } else {
    take_statistics(call, rows);
    moments = moments_of(call);
  }
  const CodeChoice hat{norm.spec, norm_seed(call)};
  CodeChoice output;
  SharedSave save;
  if (sum != nullptr) {
    output.spec = sum->spec;
    save.bits = sample_bits(call, *sum, output.spec, /*splits=*/true);
    output.seed = fresh_seed(call.x.device());
  }
  NormResult result = norm_add_encode(input_of(call, rows, moments), hat, output, save.bits.extra, part, each);
  if (sum != nullptr) {
    save.code = std::move(result.save.sum);
    save.chain = {0, 0};
    saves.code = std::make_shared<SharedSave>(std::move(save));
  }
  return keep_fused(std::move(result), norm, saves);
}

// norm_block: rows of x in blocks, ReLU's mask and dropout's, each for itself.

bool block_fits(const EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor& rows) {
  const Keep* norm = find(keeps, Kind::norm);
  const bool alone = find(keeps, Kind::shared) == nullptr && norm != nullptr && norm->of == Of::input;
  if (!alone || call.is_image() || call.skip.defined() || call.activation != Activation::relu) return false;
  return is_usual(call) && rows.is_cuda() && fuses_norm_block(rows, norm->spec);
}

at::Tensor block_forward(EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor& rows, EpilogueSaves& saves) {
  const Keep& norm = *find(keeps, Kind::norm);
  const at::Tensor x = for_kernels(rows);
  const ColumnMoments moments = column_moments(x, running_of(call));
  const CodeChoice how{norm.spec, norm_seed(call)};
  NormBlockDropout dropout{call.dropout, {}, find(keeps, Kind::dropout) != nullptr};
  if (call.dropout > 0) dropout.seed = fresh_seed(call.x.device());
  return keep_fused(norm_block_encode(input_of(call, x, moments), how, dropout), norm, saves);
}

// norm_low_pass: images of which x is kept as a low-pass and its rest.

bool is_own_image(const EpilogueCall& call, const Keep* norm, Of of) {
  const bool sums_relu = !call.skip.defined() || call.activation == Activation::relu;
  return norm != nullptr && norm->of == of && call.is_image() && call.dropout == 0 && sums_relu && is_usual(call) && call.x.is_cuda() &&
         !reads_producer(call.saving.method);
}

bool low_pass_fits(const EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor&) {
  const Keep* norm = find(keeps, Kind::norm);
  return is_own_image(call, norm, Of::input) && !norm->per_sample_bits && fuses_norm_low_pass(call.x, norm->spec);
}

at::Tensor low_pass_forward(EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor& rows, EpilogueSaves& saves) {
  const Keep& norm = *find(keeps, Kind::norm);
  return keep_fused(norm_low_pass_encode(input_of(call, rows, {}), running_of(call), {norm.spec, norm_seed(call)}), norm, saves);
}

// norm_image: images of which x̂ is kept, in equal bits or in bits per sample.

bool image_fits(const EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor& rows) {
  const Keep* norm = find(keeps, Kind::norm);
  return is_own_image(call, norm, Of::normalised) && fuses_norm_image(call.in_sizes(rows), norm->spec, norm->per_sample_bits);
}

at::Tensor image_forward(EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor& rows, EpilogueSaves& saves) {
  const Keep& norm = *find(keeps, Kind::norm);
  take_statistics(call, rows);
  const CodeChoice how{norm.spec, norm_seed(call)};
  NormInput in = input_of(call, rows, moments_of(call));
  const bool allocated = norm.per_sample_bits && call.saving.allocator != nullptr;
  in.takes_ranges = allocated;
  saves.tells_squares = allocated && call.saving.allocator->wants_gradient(0);  // of all layers or of none
  const double bits = norm.per_sample_bits ? Saved::norm_bits(norm.spec, rows.numel() / call.x.size(0), call.saving) : 0;
  return keep_fused(norm_image_encode(in, how, bits), norm, saves);
}

// row_norm: x̂ of norms by row, with or without a smooth activation after them, whose derivative is kept beside it.

bool row_fits(const EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor& rows) {
  const Keep *norm = find(keeps, Kind::norm), *slope = find(keeps, Kind::derivative);
  const bool by_row = call.has_norm() && !call.axes.by_channel() && call.axes.groups == 0;
  const bool alone =
      find(keeps, Kind::shared) == nullptr && call.activation == Activation::none && !call.skip.defined() && call.dropout == 0;
  if (!by_row || !alone || norm == nullptr || norm->of != Of::normalised) return false;
  return slope == nullptr ? fuses_row_norm(rows, norm->spec) : fuses_row_norm(rows, norm->spec, slope->spec);
}

/// What the kernels read of a call: statistics where they stand.
RowNormInput row_input(const EpilogueCall& call, const at::Tensor& rows) {
  const Affine affine = affine_of(call);
  return {for_kernels(rows), for_kernels(affine.gamma), for_kernels(affine.beta), call.options.eps,
          call.axes.centred, call.known.mean,           call.known.rstd};
}

at::Tensor row_output(EpilogueCall& call, const at::Tensor& rows) {
  RowNormInput in = row_input(call, rows);
  const at::Tensor y = row_norm(in);
  call.known = {in.mean, in.rstd};
  return y;
}

void row_pack(const EpilogueCall& call, const Keep& keep, const at::Tensor& rows, EpilogueSaves& saves) {
  saves.norm = Saved::of(row_norm_encode(row_input(call, rows), {keep.spec, norm_seed(call)}), keep);
}

at::Tensor row_forward(EpilogueCall& call, const std::vector<Keep>& keeps, const at::Tensor& rows, EpilogueSaves& saves) {
  const Keep &norm = *find(keeps, Kind::norm), *slope = find(keeps, Kind::derivative);
  if (slope == nullptr) {
    const at::Tensor y = row_output(call, rows);
    saves.rstd = call.known.rstd;
    row_pack(call, norm, rows, saves);
    return y;
  }
  const CodeChoice hat{norm.spec, norm_seed(call)}, derivative{slope->spec, fresh_seed(call.x.device())};
  SmoothResult made = row_norm_encode(row_input(call, rows), hat, call.smooth, derivative);
  saves.rstd = call.known.rstd;
  saves.norm = Saved::of(std::move(made.norm), norm);
  saves.derivative = std::move(made.slope);
  return made.z;
}

EpilogueGradients row_back(const EpilogueSaves& saves, const at::Tensor& own, const EpilogueWants& wants) {
  const at::Tensor g = for_kernels(own);
  const at::Tensor gamma = saves.gamma_values();
  const RowNormInput in{{},
                        gamma.defined() ? for_kernels(gamma) : at::ones({g.size(1)}, g.options().dtype(at::kFloat)),
                        {},
                        saves.options.eps,
                        saves.axes.centred,
                        {},
                        saves.rstd};
  const Packed* slope = saves.derivative.bytes.defined() ? &saves.derivative : nullptr;
  const NormActSums sums = row_norm_back_(g, in, saves.norm.packed(), slope, saves.eps.has_value(), wants.x);
  return {wants.x ? g : at::Tensor(), sums.gamma, sums.beta, {}};
}

}  // namespace

int64_t part_samples(at::IntArrayRef sizes) {
  constexpr int64_t kParts = 4;
  const int64_t rows = c10::multiply_integers(sizes.slice(2));
  const int64_t step = std::lcm(8 / std::gcd<int64_t>(rows, 8), 1024 / std::gcd<int64_t>(rows * sizes[1], 1024));
  return ceil_div(ceil_div(sizes[0], kParts), step) * step;
}

std::span<const EpilogueKernel> epilogue_kernels() {
  static const std::array<EpilogueKernel, 8> kKernels = {{
      {"norm_act", act_fits, act_forward, fused_back<FusedNorm::act>},
      {"norm_add", add_fits, add_forward, fused_back<FusedNorm::add>},
      {"norm_alone", alone_fits, add_forward, fused_back<FusedNorm::add>},
      {"norm_block", block_fits, block_forward, fused_back<FusedNorm::block>},
      {"norm_low_pass", low_pass_fits, low_pass_forward, fused_back<FusedNorm::low_pass>},
      {"norm_image", image_fits, image_forward, fused_back<FusedNorm::image>},
      {"row_norm", row_fits, row_forward, row_back, row_output, row_pack},
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
