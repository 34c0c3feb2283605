// A batch norm with what follows it, whole: statistics, norm, (sum with a skip), ReLU, and the codes that backward and the next layer read.
// The kernels are the C++ layers' own (kernels/cuda/epilogue.h); python/satchel/norm_ops.py has the same for the CPU, and the gradients.
//
//   form   z                      code                          sum
//   act    relu(γ·x̂ + β)          x̂ in a one-sided code         –
//   add    relu(γ·x̂ + β + skip)   x̂ in blocks                   z in its ReLU form
//   alone  γ·x̂ + β                x̂ in blocks                   –
//
// Tensors are rows × channels, or images whose channels are innermost in memory; other orders are copied.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "satchel/kernels/epilogue_codes.h"
#include "satchel/stable/arguments.h"

namespace satchel::stable {
namespace {

enum class Form : uint8_t { act, add, alone };

Form form_of(int64_t number, const char* op) {
  if (number < 0 || number > static_cast<int64_t>(Form::alone)) fail(op, "form must be 0 to 2", number);
  return static_cast<Form>(number);
}

/// Layouts of the codes of rows × channels; `sum` of form add alone.
struct Codes : NormAddLayouts {
  Form form;
};

cuda::NormActCode act_code(const CodecLayout& layout, const Tensor& bytes, const uint64_t* seed) {
  return norm_act_code(layout, bytes.data_ptr(), make_chain(layout.values, layout.channels, 0, 0, 0, "norm"), seed);
}

cuda::NormAddCode add_code(const Codes& c, int64_t channels, const Tensor& norm, const Tensor& sum) {
  return norm_add_code(c, channels, norm.data_ptr(), sum.data_ptr());
}

/// The codes where the kernels serve them.
std::optional<Codes> served(int64_t rows, int64_t channels, ScalarType dtype, int64_t form, const Numbers& norm, const Numbers& sum,
                            const char* op) {
  if (!cuda::compiled() || rows <= 0 || channels <= 0) return std::nullopt;
  const CodecSpec of_norm = spec_of_list(norm, op);
  const Form which = form_of(form, op);
  const std::optional<CodecSpec> of_sum = which == Form::add ? std::optional(spec_of_list(sum, op)) : std::nullopt;
  const DType type = dtype_of(dtype, op);
  if (which == Form::act) {
    const auto layout = norm_act_layout(rows, channels, of_norm, op);
    return layout ? std::optional(Codes{{*layout, std::nullopt}, which}) : std::nullopt;
  }
  const auto layouts = norm_add_layouts(rows, channels, type, of_norm, of_sum, op);
  return layouts ? std::optional(Codes{*layouts, which}) : std::nullopt;
}

bool norm_fits(int64_t rows, int64_t channels, ScalarType dtype, int64_t form, const Numbers& norm, const Numbers& sum) {
  return served(rows, channels, dtype, form, norm, sum, "norm").has_value();
}

/// … of an image, or throws.
Codes served(const Tensor& x, int64_t form, const Numbers& norm, const Numbers& sum, const char* op) {
  const int64_t channels = x.size(1), rows = channels == 0 ? 0 : x.numel() / channels;
  const std::optional<Codes> codes = served(rows, channels, x.scalar_type(), form, norm, sum, op);
  if (!codes) fail(op, "norm_fits must be true of sizes and specs", channels);
  return *codes;
}

Tensor floats(const Tensor& like, int64_t count) { return new_line(like, count, ScalarType::Float); }
float* room(const Tensor& t) { return static_cast<float*>(t.data_ptr()); }

void check_like(const Tensor& x, const Tensor& other, const char* name, const char* op) {
  if (other.scalar_type() != x.scalar_type() || sizes_of(other) != sizes_of(x) || !same_device(other, x))
    fail(op, std::string(name) + " must have x's sizes, type and device", other.numel());
}

struct Made {
  Tensor z, code, sum, mean, rstd;
};

/// `to`: what of the moments is wanted beside mean and rstd. `seeds`: int64[2], of the code and of the sum.
Made run(const Tensor& given, const std::optional<Tensor>& skip, const Tensor& gamma, const Tensor& beta, const Tensor& seeds, int64_t form,
         const Numbers& norm_spec, const Numbers& sum_spec, cuda::Moments to, const char* op) {
  const DType type = dtype_of(given.scalar_type(), op);
  if (given.dim() < 2) fail(op, "x must have a dimension of channels", given.dim());
  check_two_seeds(seeds, given, op);
  const Numbers shape = sizes_of(given), strides = rows_strides(shape);
  const Codes codes = served(given, form, norm_spec, sum_spec, op);
  const int64_t channels = shape[1], rows = given.numel() / channels;
  if (skip.has_value() != (codes.form == Form::add)) fail(op, "a skip must come with form add alone", form);
  if (skip) check_like(given, *skip, "skip", op);
  check_cuda(given, op);
  const float *scale = channel_numbers(gamma, given, "gamma", op), *offset = channel_numbers(beta, given, "beta", op);
  const Place place(given, op);
  const Tensor x = in_strides(given, shape, strides), z = empty_strided(given, shape, strides, given.scalar_type());
  const Tensor mean = floats(x, channels), rstd = floats(x, channels);
  const Tensor scratch = new_bytes(x, std::max(cuda::column_moments_scratch_bytes(channels), cuda::norm_act_scratch_bytes()));
  to.mean = room(mean);
  to.rstd = room(rstd);
  cuda::column_moments(x.const_data_ptr(), type, rows, channels, to, scratch.data_ptr(), place.stream());
  const Tensor bytes = new_bytes(x, codes.norm.at.total), sum = new_bytes(x, codes.sum ? codes.sum->at.total : 0);
  const cuda::NormParameters with{room(mean), room(rstd), scale, offset};
  cuda::NormPass pass{x.const_data_ptr(), type, with, z.data_ptr()};
  const auto* seed = static_cast<const uint64_t*>(seeds.const_data_ptr());
  if (codes.form == Form::act) {
    cuda::norm_encode(act_code(codes.norm, bytes, seed), pass, scratch.data_ptr(), place.stream());
    return {z, bytes, sum, mean, rstd};
  }
  const Tensor other = skip ? in_strides(*skip, shape, strides) : x;
  if (skip) pass.skip = other.const_data_ptr();
  cuda::NormAddCode code = add_code(codes, channels, bytes, sum);
  code.norm_seed = seed;
  code.sum_seed = seed + 1;
  cuda::norm_encode(code, pass, place.stream());
  return {z, bytes, sum, mean, rstd};
}

/// z, codes, sum, mean, rstd and the biased variance.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> norm(const Tensor& x, const std::optional<Tensor>& skip, const Tensor& gamma,
                                                                const Tensor& beta, const Tensor& seeds, double eps, int64_t form,
                                                                const Numbers& norm_spec, const Numbers& sum_spec) {
  constexpr const char* op = "norm";
  if (x.dim() < 2) fail(op, "x must have a dimension of channels", x.dim());
  const Tensor var = floats(x, x.size(1));
  const Made made =
      run(x, skip, gamma, beta, seeds, form, norm_spec, sum_spec, {nullptr, nullptr, room(var), nullptr, nullptr, eps, 0}, op);
  return {made.z, made.code, made.sum, made.mean, made.rstd, var};
}

/// z, codes, sum and rstd; running statistics, where they are given, move.
std::tuple<Tensor, Tensor, Tensor, Tensor> norm_moving(const Tensor& x, const std::optional<Tensor>& skip, const Tensor& gamma,
                                                       const Tensor& beta, const std::optional<Tensor>& running_mean,
                                                       const std::optional<Tensor>& running_var, double momentum, const Tensor& seeds,
                                                       double eps, int64_t form, const Numbers& norm_spec, const Numbers& sum_spec) {
  constexpr const char* op = "norm_moving";
  if (x.dim() < 2) fail(op, "x must have a dimension of channels", x.dim());
  if (running_mean.has_value() != running_var.has_value()) fail(op, "running mean and variance must come together", x.dim());
  cuda::Moments to{nullptr, nullptr, nullptr, nullptr, nullptr, eps, momentum};
  if (running_mean) {
    channel_numbers(*running_mean, x, "running mean", op);
    channel_numbers(*running_var, x, "running variance", op);
    to.running_mean = room(*running_mean);
    to.running_var = room(*running_var);
  }
  const Made made = run(x, skip, gamma, beta, seeds, form, norm_spec, sum_spec, to, op);
  return {made.z, made.code, made.sum, made.rstd};
}

/// Gradients of x, of the skip, of γ and of β for g, that of z. What is not wanted is empty.
std::tuple<Tensor, Tensor, Tensor, Tensor> norm_backward(const Tensor& given, const Tensor& bytes, const Tensor& sum, const Tensor& rstd,
                                                         const Tensor& gamma, int64_t form, const Numbers& norm_spec,
                                                         const Numbers& sum_spec, bool needs_x, bool needs_skip) {
  constexpr const char* op = "norm_backward";
  const DType type = dtype_of(given.scalar_type(), op);
  if (given.dim() < 2) fail(op, "g must have a dimension of channels", given.dim());
  const Numbers shape = sizes_of(given), strides = rows_strides(shape);
  const Codes codes = served(given, form, norm_spec, sum_spec, op);
  const int64_t channels = shape[1];
  check_cuda(given, op);
  check_bytes(bytes, codes.norm.at.total, op, &given);
  check_bytes(sum, codes.sum ? codes.sum->at.total : 0, op, &given);
  const Place place(given, op);
  const Tensor g = in_strides(given, shape, strides), nothing = new_line(g, 0, g.scalar_type());
  const bool adds = codes.form == Form::add && needs_skip;
  const Tensor dx = needs_x ? empty_strided(g, shape, strides, g.scalar_type()) : nothing;
  const Tensor dskip = adds ? empty_strided(g, shape, strides, g.scalar_type()) : nothing;
  const Tensor dgamma = floats(g, channels), dbeta = floats(g, channels);
  const cuda::NormBack back{g.const_data_ptr(), type,         channel_numbers(gamma, g, "gamma", op), channel_numbers(rstd, g, "rstd", op),
                            room(dbeta),        room(dgamma), adds ? dskip.data_ptr() : nullptr,      needs_x ? dx.data_ptr() : nullptr};
  const auto run = [&](const auto& code, int64_t scratch_bytes) {
    const Tensor scratch = new_bytes(g, scratch_bytes);
    cuda::norm_sums(code, {g.const_data_ptr(), type, room(dbeta), room(dgamma), scratch.data_ptr()}, place.stream());
    if (needs_x || adds) cuda::norm_back(code, back, place.stream());
  };
  if (codes.form == Form::act)
    run(act_code(codes.norm, bytes, nullptr), cuda::norm_act_scratch_bytes());
  else
    run(add_code(codes, channels, bytes, sum), cuda::norm_scratch_bytes());
  return {dx, dskip, dgamma, dbeta};
}

/// z again, of forms act (from its code) and add (from its sum): images with channels innermost.
Tensor norm_output(const Tensor& bytes, const Numbers& shape, ScalarType dtype, int64_t form, const Numbers& spec) {
  constexpr const char* op = "norm_output";
  const DType type = dtype_of(dtype, op);
  if (shape.size() < 2 || shape[1] <= 0) fail(op, "shape must have a dimension of channels", shape.size());
  int64_t rows = 1;
  for (size_t d = 0; d < shape.size(); ++d) rows *= d == 1 ? 1 : shape[d];
  if (form_of(form, op) == Form::alone) fail(op, "form must be act or add", form);
  const int64_t matrix[] = {rows, shape[1]};
  const bool act = form_of(form, op) == Form::act;
  const CodecLayout layout = plan_of(matrix, act ? DType::f32 : type, spec_of_list(spec, op), act ? shape[1] : 0, 1, op);
  check_bytes(bytes, layout.at.total, op);
  if (layout.coding != Coding::side || (act && !cuda::norm_act_fits(layout.side)))
    fail(op, "norm_fits must be true of sizes and spec", shape[1]);
  const Place place(bytes, op);
  const Tensor z = empty_strided(bytes, shape, rows_strides(shape), dtype);
  if (layout.values == 0) return z;
  if (act)
    cuda::norm_act_input(act_code(layout, bytes, nullptr), 0, rows, z.data_ptr(), type, place.stream());
  else
    decode(layout, bytes, z.data_ptr(), place);
  return z;
}

}  // namespace
}  // namespace satchel::stable

STABLE_TORCH_LIBRARY_FRAGMENT(satchel_stable, m) {
  m.def("norm_fits(int rows, int channels, ScalarType dtype, int form, int[] norm, int[] sum) -> bool");
  m.def(
      "norm(Tensor x, Tensor? skip, Tensor gamma, Tensor beta, Tensor seeds, float eps, int form, int[] norm, int[] sum) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(  // … without a gradient: what compiled graphs call
      "norm_forward(Tensor x, Tensor? skip, Tensor gamma, Tensor beta, Tensor seeds, float eps, int form, int[] norm, int[] sum) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "norm_moving(Tensor x, Tensor? skip, Tensor gamma, Tensor beta, Tensor(a!)? running_mean, Tensor(b!)? running_var, float momentum, "
      "Tensor seeds, float eps, int form, int[] norm, int[] sum) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "norm_backward(Tensor g, Tensor bytes, Tensor sum, Tensor rstd, Tensor gamma, int form, int[] norm, int[] sum_spec, bool needs_x, "
      "bool needs_skip) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("norm_output(Tensor bytes, SymInt[] shape, ScalarType dtype, int form, int[] spec) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(satchel_stable, CUDA, m) {
  m.impl("norm", TORCH_BOX(&satchel::stable::norm));
  m.impl("norm_forward", TORCH_BOX(&satchel::stable::norm));
  m.impl("norm_moving", TORCH_BOX(&satchel::stable::norm_moving));
  m.impl("norm_backward", TORCH_BOX(&satchel::stable::norm_backward));
  m.impl("norm_output", TORCH_BOX(&satchel::stable::norm_output));
}
STABLE_TORCH_LIBRARY_IMPL(satchel_stable, CompositeExplicitAutograd, m) { m.impl("norm_fits", TORCH_BOX(&satchel::stable::norm_fits)); }
