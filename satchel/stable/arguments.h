// What the ops of this room check and allocate. Private to it.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <string>
#include <vector>

#include "satchel/core/error.h"
#include "satchel/stable/coders.h"

namespace satchel::stable {

using torch::headeronly::ScalarType;
using Numbers = std::vector<int64_t>;

inline CodecSpec spec_of_list(const Numbers& n, const char* op) {
  if (n.size() != 11) fail(op, "a spec has 11 numbers", n.size());
  return spec_of({n[0], n[1], n[2] != 0, n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10] != 0}, op);
}

inline DType dtype_of(ScalarType type, const char* op) {
  switch (type) {
    case ScalarType::Float: return DType::f32;
    case ScalarType::Half: return DType::f16;
    case ScalarType::BFloat16: return DType::bf16;
    default: fail(op, "tensor must be float32, float16 or bfloat16", torch::headeronly::toString(type));
  }
}

inline bool same_device(const Tensor& a, const Tensor& b) {
  return a.is_cuda() == b.is_cuda() && a.get_device_index() == b.get_device_index();
}

inline void check_seed(const Tensor& seed, const Tensor& x, const char* op) {
  if (seed.scalar_type() != ScalarType::Long) fail(op, "seed must be int64", torch::headeronly::toString(seed.scalar_type()));
  if (seed.numel() != 1) fail(op, "seed must hold one value", seed.numel());
  if (!same_device(seed, x)) fail(op, "seed must be on the tensor's device");
}

inline void check_two_seeds(const Tensor& seeds, const Tensor& x, const char* op) {
  if (seeds.scalar_type() != ScalarType::Long || seeds.numel() != 2 || !seeds.is_contiguous() || !same_device(seeds, x))
    fail(op, "seeds must be two numbers of int64 on the tensor's device", seeds.numel());
}

/// Do the strides put every value on its own place of a gapless stretch of memory?
template <class Sizes>
bool is_gapless(const Sizes& shape, const Sizes& strides) {
  size_t left = 0;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] == 0) return true;
    if (shape[d] > 1) ++left;
  }
  for (int64_t expected = 1; left > 0; --left) {
    size_t d = 0;
    while (d < shape.size() && (shape[d] == 1 || strides[d] != expected)) ++d;
    if (d == shape.size()) return false;
    expected *= shape[d];  // grows, so that no dimension is found twice
  }
  return true;
}
inline bool is_dense(const Tensor& x) { return x.is_contiguous() || is_gapless(x.sizes(), x.strides()); }

/// log2 of a table's size, 1 to 8.
inline int table_bits(const Tensor& table, const Tensor& x, const char* op) {
  int bits = 0;
  while (bits < 8 && int64_t{1} << bits < table.numel()) ++bits;
  if (bits == 0 || table.numel() != int64_t{1} << bits) fail(op, "a table must hold 2^1 to 2^8 values", table.numel());
  if (table.scalar_type() != ScalarType::Float || !table.is_contiguous()) fail(op, "a table must be one line of float32");
  if (!same_device(table, x)) fail(op, "a table must be on the tensor's device");
  return bits;
}

/// Throws unless the ops themselves can code this.
inline void check_coded(const CodecLayout& layout, const char* op) {
  if (layout.projected) fail(op, "this op takes no projection; satchel.pack() does");
  if (layout.coding == Coding::keep) fail(op, "this op codes; satchel.pack() keeps tensors as they are");
}

/// torch calls CUDA's way where any tensor is there.
inline void check_cuda(const Tensor& x, const char* op) {
  if (!x.is_cuda()) fail(op, "all tensors must be on one device, got some on CUDA and one on the CPU");
}

/// Throws unless `bytes` is one line of `count` uint8, on the device of `beside` where that is given.
inline void check_bytes(const Tensor& bytes, int64_t count, const char* op, const Tensor* beside = nullptr) {
  if (beside != nullptr && !same_device(bytes, *beside)) fail(op, "bytes must be on the tensor's device");
  if (bytes.scalar_type() != ScalarType::Byte) fail(op, "bytes must be uint8", torch::headeronly::toString(bytes.scalar_type()));
  if (bytes.dim() != 1 || !bytes.is_contiguous()) fail(op, "bytes must be one contiguous line", bytes.dim());
  if (bytes.numel() != count) fail(op, "bytes must be " + std::to_string(count) + " for this shape and spec", bytes.numel());
}

inline Tensor empty_strided(const Tensor& like, const Numbers& shape, const Numbers& strides, ScalarType type) {
  int32_t device = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  const auto number = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  AtenTensorHandle out = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(), number, device,
                                                  like.get_device_index(), &out));
  return Tensor(out);
}

/// One line of `count` values: torch::stable::new_empty() finds its op by name, which takes longer than the allocation.
inline Tensor new_line(const Tensor& like, int64_t count, ScalarType type) { return empty_strided(like, {count}, {1}, type); }
inline Tensor new_bytes(const Tensor& like, int64_t count) { return new_line(like, count, ScalarType::Byte); }

/// Kernels read 16 bytes at a time.
inline Tensor aligned(const Tensor& x) { return reinterpret_cast<uintptr_t>(x.data_ptr()) % kAlign == 0 ? x : torch::stable::clone(x); }

inline Numbers sizes_of(const Tensor& x) { return {x.sizes().begin(), x.sizes().end()}; }
inline Numbers strides_of(const Tensor& x) { return {x.strides().begin(), x.strides().end()}; }

/// Strides without gap whose innermost dimension is the second: rows of channels.
inline Numbers rows_strides(const Numbers& shape) {
  Numbers strides(shape.size());
  int64_t step = shape.size() > 1 ? shape[1] : 1;
  for (size_t d = shape.size(); d-- > 0;) {
    if (d == 1) continue;
    strides[d] = step;
    step *= shape[d];
  }
  if (shape.size() > 1) strides[1] = 1;
  return strides;
}

/// x where kernels can read it: itself where it has these strides and starts at a multiple of 16 bytes, else a copy that has them.
inline Tensor in_strides(const Tensor& x, const Numbers& shape, const Numbers& strides) {
  bool ordered = reinterpret_cast<uintptr_t>(x.data_ptr()) % kAlign == 0;
  for (size_t d = 0; d < shape.size(); ++d) ordered = ordered && (shape[d] == 1 || x.stride(static_cast<int64_t>(d)) == strides[d]);
  if (ordered) return x;
  Tensor copy = empty_strided(x, shape, strides, x.scalar_type());
  torch::stable::copy_(copy, x);
  return copy;
}

/// One float32 number a channel of x, whose second dimension these are.
inline const float* channel_numbers(const Tensor& t, const Tensor& x, const char* name, const char* op) {
  if (t.scalar_type() != ScalarType::Float || !t.is_contiguous() || t.numel() != x.size(1) || !same_device(t, x)) {
    fail(op, std::string(name) + " must hold " + std::to_string(x.size(1)) + " float32 numbers on the tensor's device", t.numel());
  }
  return static_cast<const float*>(t.const_data_ptr());
}

}  // namespace satchel::stable
