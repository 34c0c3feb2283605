#include "satchel/tensor/extra_bit.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "satchel/core/error.h"
#include "satchel/core/levels.h"
#include "satchel/kernels/chunks.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/coders.h"
#include "satchel/tensor/pack.h"

namespace satchel {
namespace {

constexpr const char* kOp = "extra_bit";
constexpr int64_t kBlock = 256;

SideCode wide_of(const SideCode& code, const ExtraBitView& extra) {
  SideCode wide = code;
  wide.table = extra.table;
  return wide;
}

/// Extra bits of a chosen sample, from value `first` of all samples on.
uint8_t* plane_from(const ExtraBitView& extra, int64_t sample, int64_t first) {
  return extra.plane + extra.slots[sample] * (extra.sample / 8) + (first - sample * extra.sample) / 8;
}

/// 3-bit codes of `values` values, eight at a time, become two planes, and back.
void split(const uint8_t* stream, int64_t values, uint8_t* two, uint8_t* plane) {
  for (int64_t g = 0; g < values / 8; ++g) {
    const uint32_t eight = stream[g * 3] | static_cast<uint32_t>(stream[g * 3 + 1]) << 8 | static_cast<uint32_t>(stream[g * 3 + 2]) << 16;
    uint32_t low = 0, extra = 0;
    for (int j = 0; j < 8; ++j) {
      low |= (eight >> (3 * j) & 3) << (2 * j);
      extra |= (eight >> (3 * j + 2) & 1) << j;
    }
    two[g * 2] = static_cast<uint8_t>(low);
    two[g * 2 + 1] = static_cast<uint8_t>(low >> 8);
    plane[g] = static_cast<uint8_t>(extra);
  }
}
std::vector<uint8_t> join(const uint8_t* two, const uint8_t* plane, int64_t values) {
  std::vector<uint8_t> stream;
  for (int64_t g = 0; g < values / 8; ++g) {
    const uint32_t low = two[g * 2] | static_cast<uint32_t>(two[g * 2 + 1]) << 8;
    uint32_t eight = 0;
    for (int j = 0; j < 8; ++j) eight |= ((low >> (2 * j) & 3) | (plane[g] >> j & 1u) << 2) << (3 * j);
    for (int k = 0; k < 3; ++k) stream.push_back(static_cast<uint8_t>(eight >> (8 * k)));
  }
  return stream;
}

/// Where the 3-bit stream of element 0 would start if that of element `first` starts at `at`. An address only: nothing is read there.
template <class Byte>
Byte* stream_before(Byte* at, int64_t first) {
  return reinterpret_cast<Byte*>(reinterpret_cast<uintptr_t>(at) - static_cast<uintptr_t>(first / 8 * 3));
}

/// Calls run(sample, first, last) for the parts of samples within values [begin, end), on all threads; parts start at multiples of 256.
template <class Run>
void for_sample_parts(const ExtraBitView& extra, int64_t begin, int64_t end, const Run& run) {
  const int64_t from = begin / kChunk;
  for_chunks(end - from * kChunk, kChunk, [&](int64_t a, int64_t b) {
    const int64_t last = std::min(from * kChunk + b, end);
    for (int64_t first = std::max(from * kChunk + a, begin); first < last;) {
      const int64_t sample = first / extra.sample, stop = std::min(last, (sample + 1) * extra.sample);
      run(sample, first, stop);
      first = stop;
    }
  });
}

/// Values [begin, end), multiples of 256.
void decode_parts(const CodecLayout& layout, const ExtraBitView& extra, const Parts& from, float* x, int64_t begin, int64_t end) {
  const CpuKernels& kernels = best_cpu_kernel();
  const SideCode narrow = side_code_of(layout, from), wide = wide_of(layout.side, extra);
  for_sample_parts(extra, begin, end, [&](int64_t sample, int64_t first, int64_t last) {
    const Target to{x, DType::f32, begin};
    if (extra.slots[sample] < 0) return kernels.side_decode(narrow, from.codes, from.channels, from.headers, to, first, last);
    const std::vector<uint8_t> stream = join(from.codes + first / 4, plane_from(extra, sample, first), last - first);
    kernels.side_decode(wide, stream_before(stream.data(), first), from.channels, from.headers, to, first, last);
  });
}

void check_cpu(const at::Tensor& t) {
  if (!t.is_cpu()) fail(kOp, "samples of their own bits are coded by the fused kernels on CUDA", t.device());
}

}  // namespace

bool takes_extra_bit(const CodecSpec& spec, int64_t sample_values) {
  return spec.bits == 2 && (spec.side == Side::one_sided || spec.side == Side::relu) && spec.block == kBlock && !spec.per_sample &&
         sample_values > 0 && sample_values % kBlock == 0;
}

ExtraBit extra_bit_plane(const at::Tensor& slots, int64_t count, int64_t sample_values) {
  if (slots.scalar_type() != at::kInt || slots.dim() != 1 || !slots.is_contiguous())
    fail(kOp, "slots must be a line of int32", slots.sizes());
  if (count < 0 || count > slots.numel()) fail(kOp, "the chosen samples must be among all", count);
  return {slots, at::empty({count * (sample_values / 8)}, slots.options().dtype(at::kByte))};
}

ExtraBitView extra_bit_view(const Packed& code, const ExtraBit& extra) {
  if (!extra.defined()) return {};
  const int64_t samples = extra.slots.numel(), values = count_of(code.shape, kOp);
  if (samples == 0 || values % samples != 0 || !takes_extra_bit(code.spec, values / samples))
    fail(kOp, "blocks must fill every sample", values);
  if (extra.slots.device() != code.bytes.device()) fail(kOp, "slots must be on the code's device", extra.slots.device());
  ExtraBitView bits;
  bits.table = side_table(3, code.spec.side, code.spec.levels, kBlock);
  bits.slots = extra.slots.const_data_ptr<int32_t>();
  bits.plane = extra.plane.mutable_data_ptr<uint8_t>();
  bits.sample = values / samples;
  return bits;
}

Packed pack_extra_bit(const at::Tensor& x, const CodecSpec& spec, const at::Tensor& seed, const at::Tensor& gamma, const at::Tensor& beta,
                      const ExtraBit& extra) {
  if (extra.defined()) check_cpu(x);
  Packed code = gamma.defined() ? pack_side(x, spec, seed, gamma, beta) : pack(x, spec, seed);
  if (!extra.defined()) return code;
  const ExtraBitView bits = extra_bit_view(code, extra);
  const CodecLayout layout = check_packed(code, kOp);
  const Parts to = parts_of(layout, code.bytes);
  const SideCode wide = wide_of(layout.side, bits);
  const at::Tensor line = flat(x);
  const Source from{line.const_data_ptr(), layout.type};
  const uint64_t number = seed_value(seed);
  for_sample_parts(bits, 0, layout.values, [&](int64_t sample, int64_t first, int64_t last) {
    if (bits.slots[sample] < 0) return;
    std::vector<uint8_t> stream(static_cast<size_t>((last - first) / 8 * 3));
    best_cpu_kernel().side_encode(wide, from, to.channels, number, to.headers, stream_before(stream.data(), first), first, last);
    split(stream.data(), last - first, to.codes + first / 4, plane_from(bits, sample, first));
  });
  return code;
}

at::Tensor extra_bit_rows(const Packed& code, const ExtraBit& extra, int64_t first, int64_t last, at::ScalarType type) {
  const Place place(code.bytes.device(), kOp);
  const CodecLayout layout = check_packed(code, kOp);
  const ExtraBitView bits = extra_bit_view(code, extra);
  const Parts from = parts_of(layout, code.bytes);
  const int64_t width = code.shape[1], unit = place.cuda() ? 8 : kBlock;
  const int64_t begin = first * width / unit * unit, end = std::min(ceil_div(last * width, unit) * unit, layout.values);
  const at::Tensor line = at::empty({end - begin}, code.bytes.options().dtype(place.cuda() ? type : at::kFloat));
  if (place.cuda()) {
    cuda::side_decode_extra(layout.side, bits, from.codes, from.headers, begin, end, line.mutable_data_ptr(), dtype_of(type),
                            place.stream());
  } else {
    decode_parts(layout, bits, from, line.mutable_data_ptr<float>(), begin, end);
  }
  return line.narrow(0, first * width - begin, (last - first) * width).view({last - first, width}).to(type);
}

at::Tensor extra_bit_on(const Packed& code, const ExtraBit& extra) {
  check_cpu(code.bytes);
  const CodecLayout layout = check_packed(code, kOp);
  const ExtraBitView bits = extra_bit_view(code, extra);
  const uint8_t* two = parts_of(layout, code.bytes).codes;
  const at::Tensor on = at::empty({layout.values / 8}, code.bytes.options());
  auto* to = on.mutable_data_ptr<uint8_t>();
  const CpuKernels& kernels = best_cpu_kernel();
  const SideCode wide = wide_of(layout.side, bits);
  for_sample_parts(bits, 0, layout.values, [&](int64_t sample, int64_t first, int64_t last) {
    if (bits.slots[sample] < 0) return kernels.side_on(layout.side, two, to, first, last);
    const std::vector<uint8_t> stream = join(two + first / 4, plane_from(bits, sample, first), last - first);
    kernels.side_on(wide, stream_before(stream.data(), first), to, first, last);
  });
  return on;
}

at::Tensor squared_ranges(const Packed& code, int64_t samples) {
  const CodecLayout layout = check_packed(code, kOp);
  if (layout.coding != Coding::side || samples < 1) fail(kOp, "ranges are those of a side code's samples", samples);
  const Grid& grid = layout.side.grid;
  const bool narrow = layout.side.header == HeaderType::bf16;
  const at::Tensor headers = code.bytes.narrow(0, layout.at.headers, grid.blocks() * header_bytes(layout.side.header))
                                 .view(narrow ? at::kBFloat16 : at::kFloat)
                                 .view({grid.blocks(), 2})
                                 .to(at::kDouble);
  const at::Tensor squares = headers.select(1, 1).sub(headers.select(1, 0)).square_();
  if (grid.blocks() % samples == 0 && layout.values % samples == 0 && layout.values / samples % grid.block == 0)
    return squares.view({samples, -1}).sum(1);
  return squares.sum().div(samples).expand({samples}).contiguous();
}

}  // namespace satchel
