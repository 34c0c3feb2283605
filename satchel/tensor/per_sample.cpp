#include "satchel/tensor/per_sample.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <cmath>
#include <variant>

#include "satchel/core/error.h"
#include "satchel/kernels/chunks.h"
#include "satchel/kernels/cpu/per_sample.h"
#include "satchel/kernels/cuda/per_sample.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/coders.h"
#include "satchel/tensor/order.h"
#include "satchel/tensor/pack.h"
#include "satchel/tensor/rows.h"

namespace satchel {
namespace {

void check_per_sample_spec(const CodecSpec& spec, const char* op) {
  validate(spec, op);
  if (!takes_per_sample_bits(spec)) {
    fail(op, "per-sample bits take 1 to 8 bits in even levels, blocks of a multiple of 8 values, no side and no transform",
         to_string(spec));
  }
}

void check_mean(double mean_bits, const char* op) {
  if (!(mean_bits >= kLeastSampleBits && mean_bits <= kMostSampleBits)) fail(op, "mean bits must be 1 to 8", mean_bits);
}

PerSampleCode code_for(at::IntArrayRef shape, const CodecSpec& spec, int64_t budget, const char* op) {
  if (shape.empty()) fail(op, "per-sample bits take tensors of samples", "a scalar");
  const int64_t values = count_of({shape.data(), shape.size()}, op);
  if (shape[0] > kMostSamples) fail(op, "per-sample bits take at most 2^25 samples", shape[0]);
  PerSampleCode code;
  code.samples = values == 0 ? 0 : shape[0];
  code.values = values == 0 ? 0 : values / shape[0];
  code.block = std::clamp<int64_t>(spec.block, kGroup, std::max<int64_t>(code.groups(), 1) * kGroup);
  code.budget = values == 0 ? 0 : budget;
  code.header = spec.header;
  code.rounding = spec.rounding;
  return code;
}

void check_weights(const at::Tensor& weights, const at::Tensor& x, const char* op) {
  if (!weights.defined()) return;
  if (weights.scalar_type() != at::kFloat || weights.dim() != 1 || weights.numel() != x.size(0) || weights.device() != x.device()) {
    fail(op, "weights must be one float32 number a sample, on the tensor's device", weights.numel());
  }
}

void check_ranges(const at::Tensor& ranges, const PerSampleCode& code, const Place& place, const char* op) {
  if (!ranges.defined()) return;
  const bool whole = code.block == kRangeBlock && code.values % kRangeBlock == 0;
  if (!place.cuda() || !ranges.is_cuda() || ranges.scalar_type() != at::kFloat || !whole || !ranges.is_contiguous() ||
      ranges.numel() != 2 * code.samples * code.blocks()) {
    fail(op, "ranges must be two float32 numbers for each whole block of 256 values, on CUDA", ranges.numel());
  }
}

/// Runs run(begin, end) over samples [first, last) on all threads.
template <class Run>
void for_samples(const PerSampleCode& code, int64_t first, int64_t last, const Run& run) {
  at::parallel_for(first, last, std::max<int64_t>(1, 8 * kChunk / std::max<int64_t>(code.values, 1)), run);
}

void encode_cpu(const PerSampleCode& code, Source x, uint64_t seed, const float* weights, double* squares, uint8_t* bytes) {
  std::vector<F32Header> ranges(static_cast<size_t>(code.samples * code.blocks()));
  for_samples(code, 0, code.samples,
              [&](int64_t first, int64_t last) { per_sample_measure(code, x, ranges.data(), squares, first, last); });
  per_sample_allocate(code, {squares, static_cast<size_t>(code.samples)}, weights, reinterpret_cast<uint32_t*>(bytes + code.entries_at()));
  for_samples(code, 0, code.samples,
              [&](int64_t first, int64_t last) { per_sample_encode(code, x, seed, ranges.data(), bytes, first, last); });
}

/// `known`: undefined, or the blocks' extremes.
void encode_cuda(const PerSampleCode& code, Source x, const uint64_t* seed, const at::Tensor& known, const float* weights, double* squares,
                 const at::Tensor& packed, const Place& place) {
  uint8_t* const bytes = packed.mutable_data_ptr<uint8_t>();
  const at::Tensor ranges = known.defined() ? known : at::empty({code.samples * code.blocks(), 2}, packed.options().dtype(at::kFloat));
  auto* const extremes = reinterpret_cast<F32Header*>(ranges.mutable_data_ptr<float>());
  if (known.defined()) {
    cuda::per_sample_squares(code, extremes, squares, place.stream());
  } else {
    cuda::per_sample_measure(code, x.data, x.type, extremes, squares, place.stream());
  }
  cuda::per_sample_allocate(code, squares, weights, bytes, place.stream());
  cuda::per_sample_encode(code, x.data, x.type, seed, extremes, bytes, place.stream());
}

}  // namespace

bool takes_per_sample_bits(const CodecSpec& spec) {
  return spec.bits >= kLeastSampleBits && spec.bits <= kMostSampleBits && spec.levels == Levels::even && spec.side == Side::none &&
         std::holds_alternative<Identity>(spec.transform) && spec.block > 0 && spec.block % kGroup == 0;
}

/// Bytes of the entries are trusted, as a pack's headers are.
PerSampleCode per_sample_code(const Packed& packed, const char* op) {
  check_tensor(packed.bytes, op);
  check_per_sample_spec(packed.spec, op);
  const PerSampleCode code = code_for(packed.shape, packed.spec, packed.budget, op);
  if (code.budget < code.samples * kLeastSampleBits || code.budget > code.samples * kMostSampleBits) {
    fail(op, "a budget must be 1 to 8 bits a sample", packed.budget);
  }
  check_strides(packed.shape, packed.strides, op);
  if (packed.bytes.scalar_type() != at::kByte || packed.bytes.dim() != 1 || !packed.bytes.is_contiguous()) {
    fail(op, "bytes must be one line of uint8", c10::toString(packed.bytes.scalar_type()));
  }
  if (packed.bytes.numel() != code.total()) fail(op, "bytes must be " + std::to_string(code.total()), packed.bytes.numel());
  return code;
}

Packed room_for_per_sample(const at::Tensor& in_order, at::ScalarType dtype, const CodecSpec& spec, double mean_bits) {
  Packed packed;
  packed.spec = spec;
  packed.spec.per_sample = true;
  packed.spec.bits = static_cast<int>(std::lround(mean_bits));
  packed.shape = in_order.sizes().vec();
  packed.strides = strides_of(in_order);
  packed.dtype = dtype;
  packed.budget = per_sample_budget(in_order.size(0), mean_bits);
  const PerSampleCode code = code_for(packed.shape, packed.spec, packed.budget, "pack_per_sample");
  packed.bytes = at::empty({code.total()}, in_order.options().memory_format(c10::nullopt).dtype(at::kByte));
  return packed;
}

Packed pack_per_sample(const at::Tensor& x, const CodecSpec& spec, const at::Tensor& seed, double mean_bits, const at::Tensor& weights,
                       at::Tensor* range_squares, const at::Tensor& ranges) {
  constexpr const char* op = "pack_per_sample";
  check_float(x, op);
  check_per_sample_spec(spec, op);
  check_mean(mean_bits, op);
  check_seed(seed, x.device(), op);
  if (x.dim() == 0) fail(op, "per-sample bits take tensors of samples", "a scalar");
  check_weights(weights, x, op);
  const Place place(x.device(), op);

  CodecSpec by_sample_spec = spec;
  by_sample_spec.per_sample = true;
  const at::Tensor in_order = ordered(x.detach(), by_sample_spec);
  Packed packed = room_for_per_sample(in_order, x.scalar_type(), spec, mean_bits);
  const PerSampleCode code = per_sample_code(packed, op);
  check_ranges(ranges, code, place, op);

  const auto plain = x.options().memory_format(c10::nullopt);
  const at::Tensor squares = at::empty({x.size(0)}, plain.dtype(at::kDouble));
  const at::Tensor by_sample = weights.defined() ? weights.detach().contiguous() : weights;
  if (code.samples == 0) {
    squares.zero_();
  } else {
    const Source from{in_order.const_data_ptr(), dtype_of(packed.dtype)};
    const float* const w = by_sample.defined() ? by_sample.const_data_ptr<float>() : nullptr;
    auto* const sums = squares.mutable_data_ptr<double>();
    if (place.cuda()) {
      encode_cuda(code, from, seed_pointer(seed), ranges, w, sums, packed.bytes, place);
    } else {
      encode_cpu(code, from, seed_value(seed), w, sums, packed.bytes.mutable_data_ptr<uint8_t>());
    }
  }
  if (range_squares != nullptr) *range_squares = squares;
  return packed;
}

Packed pack_per_sample(const at::Tensor& x, const CodecSpec& spec, uint64_t seed, double mean_bits, const at::Tensor& weights) {
  check_float(x, "pack_per_sample");
  return pack_per_sample(x, spec, seed_tensor(seed, x.device()), mean_bits, weights);
}

at::Tensor unpack_per_sample(const Packed& packed) { return unpack_per_sample(packed, 0, packed.shape.empty() ? 0 : packed.shape[0]); }

at::Tensor unpack_per_sample(const Packed& packed, int64_t first, int64_t last) {
  constexpr const char* op = "unpack_per_sample";
  const PerSampleCode code = per_sample_code(packed, op);
  if (first < 0 || last < first || last > packed.shape[0]) {
    fail(op, "samples must lie within 0 to " + std::to_string(packed.shape[0]), std::to_string(first) + " to " + std::to_string(last));
  }
  const Place place(packed.bytes.device(), op);
  std::vector<int64_t> shape = packed.shape;
  shape[0] = last - first;
  const at::Tensor out = at::empty_strided(shape, packed.strides, packed.bytes.options().dtype(packed.dtype));
  if (out.numel() == 0) return out;
  const at::Tensor bytes = aligned(packed.bytes);
  const auto* const from = bytes.const_data_ptr<uint8_t>();
  const DType type = dtype_of(packed.dtype);
  if (place.cuda()) {
    cuda::per_sample_decode(code, from, out.mutable_data_ptr(), type, first, last, place.stream());
    return out;
  }
  for_samples(code, first, last,
              [&](int64_t begin, int64_t end) { per_sample_decode(code, from, out.mutable_data_ptr(), type, first, begin, end); });
  return out;
}

at::Tensor bits_of(const Packed& packed) {
  const PerSampleCode code = per_sample_code(packed, "bits_of");
  const at::Tensor entries = packed.bytes.narrow(0, code.entries_at(), code.samples * 4).clone().view(at::kInt);
  return entries.bitwise_and((1 << kEntryBits) - 1).to(at::kByte);
}

int64_t per_sample_bytes(at::IntArrayRef shape, const CodecSpec& spec, double mean_bits) {
  constexpr const char* op = "per_sample_bytes";
  check_per_sample_spec(spec, op);
  check_mean(mean_bits, op);
  return code_for(shape, spec, shape.empty() ? 0 : per_sample_budget(shape[0], mean_bits), op).total();
}

}  // namespace satchel
