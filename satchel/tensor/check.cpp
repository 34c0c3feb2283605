#include "satchel/tensor/check.h"

#include "satchel/core/error.h"
#include "satchel/tensor/coders.h"

namespace satchel {

void check_tensor(const at::Tensor& x, const char* op, bool meta) {
  if (!x.defined()) fail(op, "tensor must be defined", "an undefined one");
  if (x.layout() != at::kStrided) fail(op, "tensor must be strided", x.layout());
  if (!x.is_cpu() && !x.is_cuda() && !(meta && x.is_meta())) fail(op, "device must be cpu or cuda", x.device());
}

void check_float(const at::Tensor& x, const char* op, bool meta) {
  check_tensor(x, op, meta);
  const at::ScalarType type = x.scalar_type();
  if (type != at::kFloat && type != at::kHalf && type != at::kBFloat16) {
    fail(op, "tensor must be float32, float16 or bfloat16", c10::toString(type));
  }
}

void check_seed(const at::Tensor& seed, at::Device device, const char* op) {
  if (!seed.defined()) fail(op, "seed must be defined", "an undefined tensor");
  if (seed.scalar_type() != at::kLong) fail(op, "seed must be int64", c10::toString(seed.scalar_type()));
  if (seed.numel() != 1) fail(op, "seed must hold one value", seed.numel());
  if (seed.device() != device) fail(op, "seed must be on the tensor's device", seed.device());
}

int64_t check_affine(const at::Tensor& x, const CodecSpec& spec, const at::Tensor& gamma, const at::Tensor& beta, int64_t dim,
                     const char* op) {
  if (spec.side != Side::one_sided && spec.side != Side::both) {
    fail(op, "side must be one or both", spec.side == Side::none ? "none" : "relu");
  }
  if (dim < -x.dim() || dim >= x.dim()) fail(op, "dim must be one of the tensor's dimensions", dim);
  const int64_t wrapped = dim < 0 ? dim + x.dim() : dim;
  const auto one = [&](const at::Tensor& t, const std::string& name) {
    if (!t.defined()) fail(op, name + " must be defined", "an undefined tensor");
    if (!at::isFloatingType(t.scalar_type())) fail(op, name + " must hold floats", c10::toString(t.scalar_type()));
    if (t.device() != x.device()) fail(op, name + " must be on the tensor's device", t.device());
    if (t.dim() != 1 || t.numel() != x.size(wrapped)) {
      fail(op, name + " must hold " + std::to_string(x.size(wrapped)) + " values, one a channel", t.sizes());
    }
  };
  one(gamma, "gamma");
  one(beta, "beta");
  return wrapped;
}

void check_product(at::IntArrayRef shape, const at::Tensor& g, at::Device device, const char* op) {
  check_float(g, op, true);
  if (shape.empty()) fail(op, "packed tensor must have one dimension or more", 0);
  if (g.device() != device) fail(op, "g must be on the packed tensor's device", g.device());
  if (g.dim() != static_cast<int64_t>(shape.size()) || g.sizes().slice(0, shape.size() - 1) != shape.slice(0, shape.size() - 1)) {
    fail(op, "g must have the packed tensor's sizes but for the last", g.sizes());
  }
}

CodecLayout check_packed(const Packed& packed, const char* op, bool meta) {
  if (packed.budget != 0) fail(op, "all samples must have the same bits", "bits per sample");
  check_tensor(packed.bytes, op, meta);
  const at::Tensor& bytes = packed.bytes;
  if (bytes.scalar_type() != at::kByte) fail(op, "bytes must be uint8", c10::toString(bytes.scalar_type()));
  if (bytes.dim() != 1 || !bytes.is_contiguous()) fail(op, "bytes must be one contiguous line", bytes.sizes());
  validate(packed.spec, op);
  const at::ScalarType type = packed.dtype;
  if (type != at::kFloat && type != at::kHalf && type != at::kBFloat16) {
    fail(op, "dtype must be float32, float16 or bfloat16", c10::toString(type));
  }
  const CodecLayout layout = plan_of(packed.shape, dtype_of(type), packed.spec, packed.channels, packed.inner, op);
  check_strides(packed.shape, packed.strides, op);
  if (bytes.numel() != layout.at.total) {
    fail(op, "bytes must be " + std::to_string(layout.at.total) + " for this shape and spec", bytes.numel());
  }
  if (layout.projected) check_seed(packed.seed, bytes.device(), op);
  return layout;
}

}  // namespace satchel
