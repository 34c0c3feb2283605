// The codings of a plan, on either device: values in coding order (gapless memory) to packed bytes and back. Private.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "satchel/kernels/coding.h"
#include "satchel/tensor/device.h"

namespace satchel {

DType dtype_of(at::ScalarType type);
at::ScalarType scalar_type_of(DType type);

/// The memory of a gapless tensor as one line.
at::Tensor flat(const at::Tensor& x);

/// All coded values into `bytes` (uint8, plan.at.total of them). `x` is one line of plan.values values of plan.type;
/// a side code's thresholds stand in the bytes already.
void encode(const CodecLayout& plan, const at::Tensor& x, const at::Tensor& seed, const at::Tensor& bytes, const Place& place);

/// Zeros in the few bytes between the parts, so that equal tensors have equal bytes.
void zero_gaps(const CodecLayout& plan, const at::Tensor& bytes);

/// Coded values [first, last) into `x`, one line of that many values of any of the three types. first is a multiple of
/// decode_step(plan, device), last too unless it is the end.
void decode(const CodecLayout& plan, const at::Tensor& bytes, const at::Tensor& x, int64_t first, int64_t last, const Place& place);

/// The same for any first and last, as a line of its own; a little more is decoded where they stand inside a block or a byte.
at::Tensor decoded(const CodecLayout& plan, const at::Tensor& bytes, at::ScalarType type, int64_t first, int64_t last, const Place& place);

inline Parts parts_of(const CodecLayout& plan, const at::Tensor& bytes) { return parts_of(plan, bytes.data_ptr()); }

/// Scratch memory beside packed bytes, for as long as it lives.
class Scratch {
 public:
  explicit Scratch(const at::Tensor& bytes) : options_(bytes.options()) {}
  void* operator()(int64_t count);
  /// Where encoders work; this must outlive it.
  Device at(const Place& place) { return {place.cuda(), place.stream(), std::ref(*this)}; }

 private:
  at::TensorOptions options_;
  std::vector<at::Tensor> held_;
};

/// The channels' numbers as floats (channels × 4: threshold, γ, β, off mean), inside the packed bytes.
at::Tensor channel_table(const CodecLayout& plan, const at::Tensor& bytes);

/// The low-pass of tensors whose memory is not in the shape's order: all of x, and the maps [first, first + x's) into x.
void encode_low_pass_last(const CodecLayout& plan, const at::Tensor& x, const at::Tensor& seed, const at::Tensor& bytes,
                          const Place& place);
void decode_low_pass_last(const CodecLayout& plan, const at::Tensor& bytes, const at::Tensor& x, int64_t first, const Place& place);

/// Activation and dropout of rows × channels as the kernels take them.
struct ChainOptions;
Chain chain_of(at::IntArrayRef shape, const ChainOptions& options);

/// The seed where a kernel reads it: at once on the CPU, from device memory on CUDA.
inline uint64_t seed_value(const at::Tensor& seed) { return static_cast<uint64_t>(*seed.const_data_ptr<int64_t>()); }
inline const uint64_t* seed_pointer(const at::Tensor& seed) { return reinterpret_cast<const uint64_t*>(seed.const_data_ptr<int64_t>()); }

}  // namespace satchel
