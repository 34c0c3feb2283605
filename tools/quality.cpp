#include "tools/quality.h"

#include <ATen/Context.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cmath>

#include "satchel/core/error.h"
#include "satchel/kernels/codec_layout.h"
#include "satchel/kernels/cuda/cuda.h"
#include "satchel/train/options.h"
#include "tools/tool.h"

namespace satchel::tool {
namespace {

DType dtype_of(at::ScalarType type) { return type == at::kFloat ? DType::f32 : type == at::kHalf ? DType::f16 : DType::bf16; }

at::Tensor host_floats(const at::Tensor& x) { return x.to(at::kCPU).to(at::kFloat).contiguous(); }

double root_of_ratio(double a, double b) { return b > 0 ? std::sqrt(a / b) : 0.0; }

void compare(const at::Tensor& before, const at::Tensor& after, Quality& q) {
  const at::Tensor x = host_floats(before), y = host_floats(after);
  const float *a = x.const_data_ptr<float>(), *b = y.const_data_ptr<float>();
  double square = 0, error = 0, sum = 0, on_square = 0, on_error = 0;
  for (int64_t i = 0; i < x.numel(); ++i) {
    if (!is_finite(a[i])) ++q.bad_values;
    if (!is_finite(a[i]) || !is_finite(b[i])) continue;
    const double value = a[i], e = static_cast<double>(b[i]) - value;
    ++q.compared;
    square += value * value;
    error += e * e;
    sum += e;
    on_square += value > 0 ? value * value : 0;
    on_error += value > 0 ? e * e : 0;
  }
  if (q.compared == 0) return;
  const double n = static_cast<double>(q.compared), rms = std::sqrt(square / n);
  q.relative = root_of_ratio(error, square);
  q.on_relative = root_of_ratio(on_error, on_square);
  q.bias = rms > 0 ? sum / n / rms : 0.0;
  q.bias_spread = rms > 0 ? std::sqrt(error) / n / rms : 0.0;
}

void count_codes(const Packed& packed, Quality& q) {
  const CodecLayout plan = plan_of(packed.shape, dtype_of(packed.dtype), packed.spec, packed.channels, packed.inner, "inspect");
  if (plan.coding == Coding::keep || plan.values == 0) return;
  const at::Tensor host = packed.bytes.to(at::kCPU).contiguous();
  const uint8_t* bytes = host.const_data_ptr<uint8_t>();
  const Grid& grid = grid_of(plan);
  q.codes.assign(size_t{1} << packed.spec.bits, 0);
  q.blocks = grid.blocks();
  for (int64_t b = 0; b < q.blocks; ++b) {
    if (is_poisoned(load_header(bytes + plan.at.headers, packed.spec.header, b))) {
      ++q.bad_blocks;
      continue;
    }
    for (int64_t i = grid.begin(b); i < grid.end(b); ++i) ++q.codes[get_code(bytes + plan.at.codes, packed.spec.bits, i)];
  }
}

}  // namespace

Quality quality_of(const at::Tensor& x, const Packed& packed, const at::Tensor& unpacked) {
  Quality q;
  compare(x, unpacked, q);
  count_codes(packed, q);
  return q;
}

at::Tensor tensor_over(void* data, at::IntArrayRef shape, at::IntArrayRef strides, at::ScalarType type,
                       const std::function<void(void*)>& release) {
  return at::from_blob(data, shape, strides, release, at::TensorOptions().dtype(type));
}

at::Tensor to_device(const at::Tensor& x, const std::string& device, const char* op) {
  if (device == "cpu") return x;
  if (!cuda::compiled()) fail(op, "--device cuda needs a build with CUDA", "a build without");
  if (!at::hasCUDA()) fail(op, "--device cuda needs a GPU that torch can see", "none");
  return x.to(use_device(device, op));
}

at::Device use_device(const std::string& name, const char* op) {
  const at::Device device = device_of(name, op);
  if (device.is_cuda()) c10::impl::VirtualGuardImpl(at::kCUDA).setDevice(device);
  return device;
}

void wait_for(const std::string& device) {
  if (names_cuda(device)) at::detail::getCUDAHooks().deviceSynchronize(at::detail::getCUDAHooks().getCurrentDevice());
}

}  // namespace satchel::tool
