#include "satchel/tensor/chain.h"

#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <string>
#include <vector>

#include "satchel/core/error.h"
#include "satchel/kernels/chunks.h"
#include "satchel/kernels/epilogue_codes.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/coders.h"
#include "satchel/tensor/pack.h"

namespace satchel {
namespace {

void check_rows(const at::Tensor& x, const char* op) {
  check_tensor(x, op);
  if (x.scalar_type() != at::kFloat && x.scalar_type() != at::kBFloat16 && x.scalar_type() != at::kHalf) {
    fail(op, "tensor must be float32, bfloat16 or float16", c10::toString(x.scalar_type()));
  }
  if (x.dim() != 2) fail(op, "tensor must be rows x channels", x.sizes());
  if (!x.is_contiguous() || x.is_neg()) fail(op, "tensor must be contiguous", x.is_neg() ? "a negated view" : "other strides");
}

/// γ and β as pointers; null where both are undefined.
struct Affine {
  const float *gamma = nullptr, *beta = nullptr;

  Affine(const at::Tensor& x, const at::Tensor& g, const at::Tensor& b, const char* op) {
    if (g.defined() != b.defined()) fail(op, "gamma and beta must be given together", g.defined() ? "gamma alone" : "beta alone");
    gamma = checked(x, g, "gamma", op);
    beta = checked(x, b, "beta", op);
  }

 private:
  static const float* checked(const at::Tensor& x, const at::Tensor& t, const std::string& name, const char* op) {
    if (!t.defined()) return nullptr;
    if (t.scalar_type() != at::kFloat) fail(op, name + " must be float32", c10::toString(t.scalar_type()));
    if (t.device() != x.device()) fail(op, name + " must be on the tensor's device", t.device());
    if (t.layout() != at::kStrided) fail(op, name + " must be strided", t.layout());
    if (t.dim() != 1 || t.numel() != x.size(1) || !t.is_contiguous()) {
      fail(op, name + " must hold " + std::to_string(x.size(1)) + " contiguous values, one a channel", t.sizes());
    }
    return t.const_data_ptr<float>();
  }
};

const uint8_t* check_on(const at::Tensor& x, const at::Tensor& on, const char* op) {
  if (!on.defined()) return nullptr;
  const int64_t bytes = ceil_div(x.numel(), 8);
  if (on.scalar_type() != at::kByte) fail(op, "on must be uint8", c10::toString(on.scalar_type()));
  if (on.device() != x.device()) fail(op, "on must be on the tensor's device", on.device());
  if (on.layout() != at::kStrided || !on.is_contiguous() || on.numel() != bytes) {
    fail(op, "on must be " + std::to_string(bytes) + " contiguous bytes", on.sizes());
  }
  return on.const_data_ptr<uint8_t>();
}

/// The chain of rows x, whose seed is looked at where something is dropped.
Chain chain_with_seed(const at::Tensor& x, const ChainOptions& options, const at::Tensor& seed, int64_t origin, const char* op) {
  const Chain c = make_chain(x.numel(), x.size(1), options.dropout, options.slope, origin, op);
  if (c.drop > 0) check_seed(seed, x.device(), op);
  return c;
}

/// Chunks in which the channels' table that a kernel makes first is the smaller part.
int64_t chunk_for(const Chain& c) { return std::max(kChunk, ceil_div(4 * c.channels, kGroup) * kGroup); }

/// Values from `first` on as floats, run(values), and what it made of them to the same places (unless `to` is null).
template <class Half, class F>
void through_floats(const void* from, void* to, int64_t first, int64_t count, const F& run) {
  const auto* halves = static_cast<const Half*>(from) + first;
  std::vector<float> values(halves, halves + count);
  run(values.data());
  if (to != nullptr) std::copy(values.begin(), values.end(), static_cast<Half*>(to) + first);
}

/// Calls run(part, first, x, z) for chunks of c on all threads: a chain of its own from value `first` on, with its values and its
/// place in `to` (where that is not null). Halves go through a chunk of fp32 that serves as both.
template <class F>
void for_parts(const Chain& c, int64_t chunk, DType type, const void* from, void* to, const F& run) {
  for_chunks(c.values, chunk, [&](int64_t first, int64_t last) {
    Chain part = c;
    part.values = last - first;
    part.origin = c.origin + first;
    if (type == DType::f32)
      return run(part, first, static_cast<const float*>(from) + first, to ? static_cast<float*>(to) + first : nullptr);
    const auto over = [&](float* values) { run(part, first, values, values); };
    if (type == DType::bf16) return through_floats<at::BFloat16>(from, to, first, part.values, over);
    through_floats<at::Half>(from, to, first, part.values, over);
  });
}

const uint8_t* bits_from(const uint8_t* bits, int64_t first) { return bits == nullptr ? nullptr : bits + first / kGroup; }

void multiply_gradient(const at::Tensor& g, const at::Tensor& on, const at::Tensor& seed, const ChainOptions& options, int64_t origin,
                       const at::Tensor& out, const char* op) {
  const Chain c = chain_with_seed(g, options, seed, origin, op);
  const uint8_t* bits = check_on(g, on, op);
  if (c.values == 0) return;
  const Place place(g.device(), op);
  void* to = out.mutable_data_ptr();  // first: it may move memory that g shares with copies
  const void* from = g.const_data_ptr();
  const DType type = dtype_of(g.scalar_type());
  if (place.cuda()) return cuda::chain_back(c, from, type, bits, c.drop > 0 ? seed_pointer(seed) : nullptr, to, place.stream());
  const uint64_t number = c.drop > 0 ? seed_value(seed) : 0;
  for_parts(c, kChunk, type, from, to, [&](const Chain& part, int64_t first, const float* in, float* z) {
    best_cpu_kernel().chain_back(part, in, bits_from(bits, first), number, z, 0, part.values);
  });
}

}  // namespace

Chain chain_of(at::IntArrayRef shape, const ChainOptions& options) {
  return make_chain(shape[0] * shape[1], shape[1], options.dropout, options.slope, 0, "chain");
}

at::Tensor apply_chain(const at::Tensor& x, const at::Tensor& gamma, const at::Tensor& beta, const at::Tensor& on, const at::Tensor& seed,
                       const ChainOptions& options, int64_t origin) {
  constexpr const char* op = "apply_chain";
  check_rows(x, op);
  const Chain c = chain_with_seed(x, options, seed, origin, op);
  const Affine affine(x, gamma, beta, op);
  const uint8_t* bits = check_on(x, on, op);
  const Place place(x.device(), op);
  at::Tensor out = at::empty(x.sizes(), x.options());
  if (c.values == 0) return out;
  const DType type = dtype_of(x.scalar_type());
  const void* from = x.const_data_ptr();
  void* to = out.mutable_data_ptr();
  if (place.cuda()) {
    cuda::chain(c, from, type, affine.gamma, affine.beta, bits, c.drop > 0 ? seed_pointer(seed) : nullptr, to, place.stream());
    return out;
  }
  const uint64_t number = c.drop > 0 ? seed_value(seed) : 0;
  for_parts(c, chunk_for(c), type, from, to, [&](const Chain& part, int64_t first, const float* values, float* z) {
    best_cpu_kernel().chain(part, values, affine.gamma, affine.beta, bits_from(bits, first), number, z, 0, part.values);
  });
  return out;
}

at::Tensor chain_gradient(const at::Tensor& g, const at::Tensor& on, const at::Tensor& seed, const ChainOptions& options, int64_t origin) {
  constexpr const char* op = "chain_gradient";
  check_rows(g, op);
  at::Tensor out = at::empty(g.sizes(), g.options());
  multiply_gradient(g, on, seed, options, origin, out, op);
  return out;
}

void chain_gradient_(const at::Tensor& g, const at::Tensor& on, const at::Tensor& seed, const ChainOptions& options, int64_t origin) {
  constexpr const char* op = "chain_gradient_";
  check_rows(g, op);
  multiply_gradient(g, on, seed, options, origin, g, op);
  if (!g.is_inference()) g.unsafeGetTensorImpl()->bump_version();  // whoever saved g sees that it changed
}

at::Tensor on_bits(const at::Tensor& x, const at::Tensor& gamma, const at::Tensor& beta) {
  constexpr const char* op = "on_bits";
  check_rows(x, op);
  const Affine affine(x, gamma, beta, op);
  const Place place(x.device(), op);
  at::Tensor bits = at::empty({ceil_div(x.numel(), 8)}, x.options().dtype(at::kByte));
  if (x.numel() == 0) return bits;
  const Chain c = make_chain(x.numel(), x.size(1), 0, 0, 0, op);
  const DType type = dtype_of(x.scalar_type());
  const void* from = x.const_data_ptr();
  auto* to = bits.mutable_data_ptr<uint8_t>();
  if (place.cuda()) {
    cuda::chain_on(c, from, type, affine.gamma, affine.beta, to, place.stream());
    return bits;
  }
  for_parts(c, chunk_for(c), type, from, nullptr, [&](const Chain& part, int64_t first, const float* values, float*) {
    best_cpu_kernel().chain_on(part, values, affine.gamma, affine.beta, to + first / kGroup, 0, part.values);
  });
  return bits;
}

at::Tensor on_bits(const Packed& side_code) {
  constexpr const char* op = "on_bits";
  const CodecLayout layout = check_packed(side_code, op);
  if (layout.coding != Coding::side) fail(op, "packed tensor must be a side code", to_string(side_code.spec));
  if (side_code.strides != contiguous_strides(side_code.shape))
    fail(op, "packed tensor must be contiguous", at::IntArrayRef(side_code.strides));
  const Place place(side_code.bytes.device(), op);
  at::Tensor bits = at::empty({ceil_div(layout.values, 8)}, side_code.bytes.options());
  if (layout.values == 0) return bits;
  const uint8_t* codes = side_code.bytes.const_data_ptr<uint8_t>() + layout.at.codes;
  auto* to = bits.mutable_data_ptr<uint8_t>();
  if (place.cuda()) {
    cuda::side_on(layout.side, codes, to, place.stream());
    return bits;
  }
  for_chunks(layout.values, kLongestChunk,
             [&](int64_t first, int64_t last) { best_cpu_kernel().side_on(layout.side, codes, to, first, last); });
  return bits;
}

PackedMask pack_mask(const at::Tensor& x) {
  constexpr const char* op = "pack_mask";
  check_tensor(x, op);
  const bool flags = x.scalar_type() == at::kBool;
  if (!flags) check_float(x, op);
  const Place place(x.device(), op);
  const at::Tensor real = flags ? x.to(at::kHalf) : x.detach().resolve_neg();
  const at::Tensor line = real.contiguous();
  PackedMask mask{at::empty({ceil_div(line.numel(), 8)}, line.options().dtype(at::kByte)), line.sizes().vec()};
  if (line.numel() == 0) return mask;
  auto* bits = mask.bits.mutable_data_ptr<uint8_t>();
  const Source source{line.const_data_ptr(), dtype_of(line.scalar_type())};
  if (place.cuda()) {
    cuda::mask(source.data, source.type, line.numel(), bits, place.stream());
  } else {
    for_chunks(line.numel(), kChunk, [&](int64_t first, int64_t last) { best_cpu_kernel().mask(source, bits, first, last); });
  }
  return mask;
}

at::Tensor unpack_mask(const PackedMask& mask) {
  constexpr const char* op = "unpack_mask";
  check_tensor(mask.bits, op);
  const int64_t values = count_of(mask.shape, op);
  if (mask.bits.scalar_type() != at::kByte) fail(op, "bits must be uint8", c10::toString(mask.bits.scalar_type()));
  if (mask.bits.numel() != ceil_div(values, 8) || !mask.bits.is_contiguous()) {
    fail(op, "bits must be " + std::to_string(ceil_div(values, 8)) + " contiguous bytes", mask.bits.numel());
  }
  const Place place(mask.bits.device(), op);
  const at::Tensor out = at::empty(mask.shape, mask.bits.options().dtype(at::kBool));
  if (values == 0) return out;
  const auto* bits = mask.bits.const_data_ptr<uint8_t>();
  auto* flags = static_cast<uint8_t*>(out.mutable_data_ptr());
  if (place.cuda()) {
    cuda::unmask(bits, values, flags, place.stream());
    return out;
  }
  for_chunks(values, kChunk, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) flags[i] = bits[i >> 3] >> (i & 7) & 1;
  });
  return out;
}

}  // namespace satchel
