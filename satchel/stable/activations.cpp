// A smooth activation with what backward and the next layer read: its slope and, where asked for, its result, each in a block code. The
// kernels are the C++ layers' own (kernels/cuda/row_norm.h); python/satchel/activation_ops.py has the same for the CPU, and the gradients.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "satchel/kernels/epilogue_codes.h"
#include "satchel/stable/arguments.h"

namespace satchel::stable {
namespace {

CodecLayout line_layout(int64_t values, DType type, const Numbers& spec, const char* op) {
  const int64_t shape[] = {values};
  return plan_of(shape, type, spec_of_list(spec, op), 0, 1, op);
}

/// Empty `output`: the result is not coded.
bool activation_fits(int64_t values, ScalarType dtype, const Numbers& slope, const Numbers& output) {
  constexpr const char* op = "activation";
  constexpr int64_t kMost = ((int64_t{1} << 32) - 1) * 8;
  if (!cuda::compiled() || values <= 0 || values % 8 != 0 || values > kMost) return false;
  const CodecLayout of_slope = line_layout(values, DType::f32, slope, op);
  if (!is_block_code(of_slope) || !cuda::slope_code_fits(of_slope.block)) return false;
  if (output.empty()) return true;
  const CodecLayout of_output = line_layout(values, dtype_of(dtype, op), output, op);
  return is_block_code(of_output) && cuda::output_code_fits(of_output.block);
}

Smooth smooth_of(int64_t kind, const char* op) {
  if (kind <= static_cast<int64_t>(Smooth::none) || kind > static_cast<int64_t>(Smooth::tanh)) fail(op, "kind must be 1 to 5", kind);
  return static_cast<Smooth>(kind);
}

/// z, the slopes' bytes and those of z. `seeds`: int64[2], of the slopes and of z.
std::tuple<Tensor, Tensor, Tensor> activation(const Tensor& given, const Tensor& seeds, int64_t kind, const Numbers& slope,
                                              const Numbers& output) {
  constexpr const char* op = "activation";
  const DType type = dtype_of(given.scalar_type(), op);
  const Smooth which = smooth_of(kind, op);
  check_cuda(given, op);
  check_two_seeds(seeds, given, op);
  if (!activation_fits(given.numel(), given.scalar_type(), slope, output))
    fail(op, "activation_fits must be true of size and specs", given.numel());
  const Place place(given, op);
  // Itself where its memory has no gap, else a copy in the order that torch gives results.
  const Tensor line = is_dense(given) ? given : torch::stable::clone(given), x = aligned(line);
  const Tensor z = empty_strided(x, sizes_of(line), strides_of(line), x.scalar_type());
  const CodecLayout of_slope = line_layout(x.numel(), DType::f32, slope, op);
  const Tensor slopes = new_bytes(x, of_slope.at.total);
  const auto* seed = static_cast<const uint64_t*>(seeds.const_data_ptr());
  const cuda::RowCode slope_code = row_code(of_slope, slopes.data_ptr(), seed);
  if (output.empty()) {
    const cuda::RowShape flat{x.numel() / 8, 8};
    cuda::row_encode(flat, {}, {}, slope_code, which, x.const_data_ptr(), type, z.data_ptr(), place.stream());
    return {z, slopes, new_bytes(x, 0)};
  }
  const CodecLayout of_output = line_layout(x.numel(), type, output, op);
  const Tensor coded = new_bytes(x, of_output.at.total);
  cuda::smooth_encode(slope_code, row_code(of_output, coded.data_ptr(), seed + 1), which, x.const_data_ptr(), type, x.numel(), z.data_ptr(),
                      place.stream());
  return {z, slopes, coded};
}

/// g · slope; `strides` are z's.
Tensor activation_backward(const Tensor& given, const Tensor& slopes, const Numbers& strides, const Numbers& spec) {
  constexpr const char* op = "activation_backward";
  const DType type = dtype_of(given.scalar_type(), op);
  if (!activation_fits(given.numel(), given.scalar_type(), spec, {}))
    fail(op, "activation_fits must be true of size and spec", given.numel());
  const Numbers shape = sizes_of(given);
  check_strides(shape, strides, op);
  const CodecLayout layout = line_layout(given.numel(), DType::f32, spec, op);
  check_cuda(given, op);
  check_bytes(slopes, layout.at.total, op, &given);
  const Place place(given, op);
  const Tensor g = in_strides(given, shape, strides);
  const Tensor out = empty_strided(g, shape, strides, g.scalar_type());
  const cuda::RowShape flat{g.numel() / 8, 8};
  cuda::slope_back(flat, row_code(layout, slopes.data_ptr(), nullptr), g.const_data_ptr(), type, out.data_ptr(), place.stream());
  return out;
}

}  // namespace
}  // namespace satchel::stable

STABLE_TORCH_LIBRARY_FRAGMENT(satchel_stable, m) {
  m.def("activation_fits(int values, ScalarType dtype, int[] slope, int[] output) -> bool");
  m.def("activation(Tensor x, Tensor seeds, int kind, int[] slope, int[] output) -> (Tensor, Tensor, Tensor)");
  m.def(
      "activation_forward(Tensor x, Tensor seeds, int kind, int[] slope, int[] output) -> (Tensor, Tensor, Tensor)");  // without a gradient
  m.def("activation_backward(Tensor g, Tensor slopes, int[] strides, int[] spec) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(satchel_stable, CUDA, m) {
  m.impl("activation", TORCH_BOX(&satchel::stable::activation));
  m.impl("activation_forward", TORCH_BOX(&satchel::stable::activation));
  m.impl("activation_backward", TORCH_BOX(&satchel::stable::activation_backward));
}
STABLE_TORCH_LIBRARY_IMPL(satchel_stable, CompositeExplicitAutograd, m) {
  m.impl("activation_fits", TORCH_BOX(&satchel::stable::activation_fits));
}
