// The codec as torch ops over torch's stable ABI: one binary serves every torch from 2.10 on, and every Python. Sizes without data are
// told in Python (python/satchel/_ops.py). The namespace is not libsatchel's, so that one process can hold both.
//
// A spec travels as the eleven numbers of SpecNumbers (kernels/codec_layout.h). What keeps a tensor as it is (bits=32) and the product of a
// projection are Python's: both are torch's own ops.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "satchel/core/error.h"
#include "satchel/kernels/chunks.h"
#include "satchel/kernels/slope.h"
#include "satchel/stable/arguments.h"
#include "satchel/stable/coders.h"

namespace satchel::stable {
namespace {

bool is_low_pass(const CodecSpec& spec) { return std::holds_alternative<LowPass>(spec.transform); }

/// Are x's own strides kept, as tensor/order.cpp says?
bool keeps_order(const Tensor& x, const CodecSpec& spec) {
  return x.is_contiguous() || (is_dense(x) && any_order_serves(sizes_of(x), strides_of(x), spec));
}

Tensor pack(const Tensor& x, const Tensor& seed, const std::optional<Tensor>& channels, int64_t inner, const Numbers& numbers) {
  constexpr const char* op = "pack";
  const CodecSpec spec = spec_of_list(numbers, op);
  const DType type = dtype_of(x.scalar_type(), op);
  check_seed(seed, x, op);
  const Place place(x, op);
  const Numbers shape = sizes_of(x);
  if (channels && (channels->dim() != 2 || channels->size(1) != 16 || channels->scalar_type() != ScalarType::Byte)) {
    fail(op, "channels must be rows of 16 bytes", channels->numel());
  }
  const int64_t count = channels ? channels->size(0) : 0;
  const CodecLayout layout = plan_of(shape, type, spec, count, inner, op);
  check_coded(layout, op);
  if (layout.channels != count) fail(op, "a side code with thresholds takes a table of its channels", count);
  const bool as_it_lies = is_low_pass(spec) ? x.is_contiguous() : keeps_order(x, spec);
  const Tensor in_order = aligned(as_it_lies ? x : torch::stable::contiguous(x));
  const Tensor bytes = new_bytes(x, layout.at.total);
  zero_gaps(layout, bytes);
  if (channels) {
    Tensor part = torch::stable::narrow(const_cast<Tensor&>(bytes), 0, layout.at.channels, count * 16);
    torch::stable::copy_(part, torch::stable::flatten(*channels, 0, -1));
  }
  if (layout.values > 0) encode(layout, in_order.const_data_ptr(), seed, bytes, place);
  return bytes;
}

Tensor unpack(const Tensor& given, const Numbers& shape, const Numbers& strides, ScalarType dtype, const Numbers& numbers, int64_t channels,
              int64_t inner) {
  constexpr const char* op = "unpack";
  const CodecSpec spec = spec_of_list(numbers, op);
  const CodecLayout layout = plan_of(shape, dtype_of(dtype, op), spec, channels, inner, op);
  check_coded(layout, op);
  check_strides(shape, strides, op);
  check_bytes(given, layout.at.total, op);
  const Place place(given, op);
  Tensor out = empty_strided(given, shape, strides, dtype);
  if (layout.values == 0) return out;
  const Tensor bytes = aligned(given);
  if (is_low_pass(spec) && !is_in_shape_order(shape, strides)) {
    const Tensor line = torch::stable::new_empty(out, shape, dtype);
    decode(layout, bytes, line.data_ptr(), place);
    torch::stable::copy_(out, line);
  } else {
    decode(layout, bytes, out.data_ptr(), place);
  }
  return out;
}

void mask_flags(const uint8_t* flags, int64_t values, uint8_t* mask, const Place& place) {
  if (place.cuda()) return cuda::mask_flags(flags, values, mask, place.stream());
  for_chunks(values, kChunk, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += 8) {
      uint32_t bits = 0;
      for (int64_t j = 0; j < std::min<int64_t>(8, last - i); ++j) bits |= (flags[i + j] != 0 ? 1u : 0u) << j;
      mask[i / 8] = static_cast<uint8_t>(bits);
    }
  });
}

/// x > 0, one bit a value, in the order of x's memory where that has no gap.
Tensor pack_mask(const Tensor& x) {
  constexpr const char* op = "pack_mask";
  const bool flags = x.scalar_type() == ScalarType::Bool;
  const DType type = flags ? DType::f32 : dtype_of(x.scalar_type(), op);
  const Place place(x, op);
  const Tensor dense = is_dense(x) ? x : torch::stable::contiguous(x);
  const Tensor line = flags ? dense : aligned(dense);
  const int64_t values = x.numel();
  const Tensor bits = new_bytes(x, ceil_div(values, 8));
  if (values == 0) return bits;
  auto* to = static_cast<uint8_t*>(bits.data_ptr());
  if (flags) {
    mask_flags(static_cast<const uint8_t*>(line.const_data_ptr()), values, to, place);
  } else if (place.cuda()) {
    cuda::mask(line.const_data_ptr(), type, values, to, place.stream());
  } else {
    const Source source{line.const_data_ptr(), type};
    for_chunks(values, kChunk, [&](int64_t first, int64_t last) { best_cpu_kernel().mask(source, to, first, last); });
  }
  return bits;
}

/// 1 and 0 as `dtype`.
Tensor unpack_mask(const Tensor& given, const Numbers& shape, const Numbers& strides, ScalarType dtype) {
  constexpr const char* op = "unpack_mask";
  const int64_t values = count_of(shape, op);
  check_strides(shape, strides, op);
  check_bytes(given, ceil_div(values, 8), op);
  const Place place(given, op);
  const Tensor out = empty_strided(given, shape, strides, ScalarType::Bool), bits = aligned(given);
  if (values > 0) {
    const auto* from = static_cast<const uint8_t*>(bits.const_data_ptr());
    auto* to = static_cast<uint8_t*>(out.data_ptr());
    if (place.cuda()) {
      cuda::unmask(from, values, to, place.stream());
    } else {
      for_chunks(values, kChunk, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) to[i] = from[i / 8] >> (i % 8) & 1;
      });
    }
  }
  return dtype == ScalarType::Bool ? out : torch::stable::to(out, dtype);
}

Tensor narrow(const Tensor& x, int64_t least, int64_t most) {
  constexpr const char* op = "narrow";
  if (x.scalar_type() != ScalarType::Long) fail(op, "tensor must be int64", torch::headeronly::toString(x.scalar_type()));
  if (least > most) fail(op, "least must not be above most, " + std::to_string(most), least);
  const Place place(x, op);
  const Tensor line = is_dense(x) ? x : torch::stable::contiguous(x);
  const int bits = bits_needed(least, most);
  const Tensor bytes = new_bytes(x, code_bytes(x.numel(), bits));
  if (bits == 0 || x.numel() == 0) return bytes;
  const auto* data = static_cast<const int64_t*>(line.const_data_ptr());
  auto* codes = static_cast<uint8_t*>(bytes.data_ptr());
  if (place.cuda()) {
    cuda::narrow(data, x.numel(), least, bits, codes, place.stream());
  } else {
    for_chunks(x.numel(), kChunk, [&](int64_t first, int64_t last) { satchel::narrow(data, least, bits, codes, first, last); });
  }
  return bytes;
}

Tensor widen(const Tensor& bytes, const Numbers& shape, const Numbers& strides, int64_t least, int64_t bits) {
  constexpr const char* op = "widen";
  if (bits < 0 || bits > 64) fail(op, "bits must be 0 to 64", bits);
  const int64_t values = count_of(shape, op);
  check_strides(shape, strides, op);
  check_bytes(bytes, code_bytes(values, static_cast<int>(bits)), op);
  const Place place(bytes, op);
  const Tensor out = empty_strided(bytes, shape, strides, ScalarType::Long);
  if (values == 0) return out;
  const auto* codes = static_cast<const uint8_t*>(bytes.const_data_ptr());
  auto* data = static_cast<int64_t*>(out.data_ptr());
  if (place.cuda()) {
    cuda::widen(codes, values, least, static_cast<int>(bits), data, place.stream());
  } else {
    for_chunks(values, kChunk,
               [&](int64_t first, int64_t last) { satchel::widen(codes, least, static_cast<int>(bits), data, first, last); });
  }
  return out;
}

/// The slopes of an activation at x, each as its place among the levels, in the order of x's memory where that has no gap.
Tensor pack_slope(const Tensor& x, const Tensor& seed, const Tensor& levels, int64_t kind) {
  constexpr const char* op = "pack_slope";
  const DType type = dtype_of(x.scalar_type(), op);
  check_seed(seed, x, op);
  if (kind < 0 || kind >= kSlopes) fail(op, "kind must be 0 to 3", kind);
  const int bits = table_bits(levels, x, op);
  const Place place(x, op);
  const Tensor line = aligned(is_dense(x) ? x : torch::stable::contiguous(x));
  const int64_t values = x.numel();
  const Tensor bytes = new_bytes(x, code_bytes(values, bits));
  if (values == 0) return bytes;
  const auto* table = static_cast<const float*>(levels.const_data_ptr());
  const auto* number = static_cast<const uint64_t*>(seed.const_data_ptr());
  auto* codes = static_cast<uint8_t*>(bytes.data_ptr());
  const auto which = static_cast<SlopeOf>(kind);
  if (place.cuda()) {
    cuda::slope_encode(which, line.const_data_ptr(), type, values, table, bits, number, codes, place.stream());
  } else {
    for_chunks(values, kChunk, [&](int64_t first, int64_t last) {
      slope_encode(which, line.const_data_ptr(), type, table, bits, *number, codes, first, last);
    });
  }
  return bytes;
}

/// table[code] of every value.
Tensor unpack_table(const Tensor& given, const Tensor& table, const Numbers& shape, const Numbers& strides, ScalarType dtype) {
  constexpr const char* op = "unpack_table";
  const DType type = dtype_of(dtype, op);
  const int bits = table_bits(table, given, op);
  const int64_t values = count_of(shape, op);
  check_strides(shape, strides, op);
  check_bytes(given, code_bytes(values, bits), op);
  const Place place(given, op);
  const Tensor out = empty_strided(given, shape, strides, dtype);
  decode_table(given, table, bits, values, out.data_ptr(), type, place);
  return out;
}

/// Matrices [first, last) of the projection of rows × columns values: count × columns × width, fp32.
Tensor draw_projection(const Tensor& seed, int64_t rows, int64_t columns, int64_t first, int64_t last, const Numbers& numbers) {
  constexpr const char* op = "draw_projection";
  const CodecSpec spec = spec_of_list(numbers, op);
  check_seed(seed, seed, op);
  const int64_t shape[] = {rows, columns};
  const CodecLayout layout = plan_of(shape, DType::f32, spec, 0, 1, op);
  const Projection& p = layout.projection;
  if (!layout.projected) fail(op, "spec must have a projection, of one row or more", rows);
  if (first < 0 || first > last || last > p.matrices()) fail(op, "matrices must lie within 0 to " + std::to_string(p.matrices()), last);
  const Place place(seed, op);
  const Tensor out = torch::stable::new_empty(seed, {last - first, p.columns, p.width}, ScalarType::Float);
  auto* data = static_cast<float*>(out.data_ptr());
  const auto* number = static_cast<const uint64_t*>(seed.const_data_ptr());
  if (first == last) return out;
  if (place.cuda()) {
    cuda::draw_projection(p, number, data, first, last, place.stream());
  } else {
    const int64_t entries = static_cast<int64_t>(p.columns) * p.width;
    parallel_for(first, last, std::max<int64_t>(1, 65536 / entries),
                 [&](int64_t begin, int64_t end) { satchel::draw_projection(p, *number, data + (begin - first) * entries, begin, end); });
  }
  return out;
}

Numbers packed_strides(const Tensor& x, const Numbers& numbers) {
  const Numbers shape = sizes_of(x);
  const bool own = x.numel() > 0 && keeps_order(x, spec_of_list(numbers, "packed_strides"));
  return own ? strides_of(x) : contiguous_strides(shape);
}

/// coding (0 keep · 1 block · 2 side · 3 low-pass), values coded, values a block, blocks, channels, matrices of a projection, then where
/// headers, means, channels and off plane start, and all bytes.
Numbers layout(const Numbers& shape, ScalarType dtype, int64_t channels, int64_t inner, const Numbers& numbers) {
  constexpr const char* op = "layout";
  const CodecLayout l = plan_of(shape, dtype_of(dtype, op), spec_of_list(numbers, op), channels, inner, op);
  const bool coded = l.coding != Coding::keep;
  const Grid grid = coded ? grid_of(l) : Grid{l.values, 1, l.values};
  return {static_cast<int64_t>(l.coding),
          l.values,
          coded ? grid.block : 0,
          coded ? grid.blocks() : 0,
          l.channels,
          l.projected ? l.projection.matrices() : 0,
          l.at.headers,
          l.at.means,
          l.at.channels,
          l.at.plane,
          l.at.total};
}

Numbers parse_spec(const std::string& text) {
  const SpecNumbers n = numbers_of(satchel::parse_spec(text));
  return {n.bits, n.block, n.per_sample, n.levels, n.rounding, n.header, n.side, n.transform, n.p0, n.p1, n.p2};
}

std::string spec_text(const Numbers& numbers) { return to_string(spec_of_list(numbers, "spec_text")); }

/// A line a preset: its name, a tab, its summary.
std::string presets() {
  std::string text;
  for (const Preset& preset : satchel::presets()) text += std::string(preset.name) + '\t' + std::string(preset.summary) + '\n';
  return text;
}

bool cuda_compiled() { return cuda::compiled(); }
std::string cpu_kernel() { return best_cpu_kernel().name; }

}  // namespace
}  // namespace satchel::stable

STABLE_TORCH_LIBRARY(satchel_stable, m) {
  m.def("pack(Tensor x, Tensor seed, Tensor? channels, int inner, int[] spec) -> Tensor");
  m.def(
      "unpack(Tensor bytes, SymInt[] shape, SymInt[] strides, ScalarType dtype, int[] spec, int channels=0, int inner=1) "
      "-> Tensor");
  m.def("pack_mask(Tensor x) -> Tensor");
  m.def("unpack_mask(Tensor bits, SymInt[] shape, SymInt[] strides, ScalarType dtype) -> Tensor");
  m.def("narrow(Tensor x, int least, int most) -> Tensor");
  m.def("widen(Tensor bytes, SymInt[] shape, SymInt[] strides, int least, int bits) -> Tensor");
  m.def("pack_slope(Tensor x, Tensor seed, Tensor levels, int kind) -> Tensor");
  m.def("unpack_table(Tensor bytes, Tensor table, SymInt[] shape, SymInt[] strides, ScalarType dtype) -> Tensor");
  m.def("draw_projection(Tensor seed, int rows, int columns, int first, int last, int[] spec) -> Tensor");
  m.def("packed_strides(Tensor x, int[] spec) -> int[]");
  m.def("layout(int[] shape, ScalarType dtype, int channels, int inner, int[] spec) -> int[]");
  m.def("parse_spec(str text) -> int[]");
  m.def("spec_text(int[] spec) -> str");
  m.def("presets() -> str");
  m.def("cuda_compiled() -> bool");
  m.def("cpu_kernel() -> str");
}

#define SATCHEL_IMPLEMENT(m)                                         \
  m.impl("pack", TORCH_BOX(&satchel::stable::pack));                 \
  m.impl("unpack", TORCH_BOX(&satchel::stable::unpack));             \
  m.impl("pack_mask", TORCH_BOX(&satchel::stable::pack_mask));       \
  m.impl("unpack_mask", TORCH_BOX(&satchel::stable::unpack_mask));   \
  m.impl("narrow", TORCH_BOX(&satchel::stable::narrow));             \
  m.impl("widen", TORCH_BOX(&satchel::stable::widen));               \
  m.impl("pack_slope", TORCH_BOX(&satchel::stable::pack_slope));     \
  m.impl("unpack_table", TORCH_BOX(&satchel::stable::unpack_table)); \
  m.impl("draw_projection", TORCH_BOX(&satchel::stable::draw_projection));

STABLE_TORCH_LIBRARY_IMPL(satchel_stable, CPU, m){SATCHEL_IMPLEMENT(m)} STABLE_TORCH_LIBRARY_IMPL(satchel_stable, CUDA, m){
    SATCHEL_IMPLEMENT(m)} STABLE_TORCH_LIBRARY_IMPL(satchel_stable, CompositeExplicitAutograd, m) {
  m.impl("packed_strides", TORCH_BOX(&satchel::stable::packed_strides));
  m.impl("layout", TORCH_BOX(&satchel::stable::layout));
  m.impl("parse_spec", TORCH_BOX(&satchel::stable::parse_spec));
  m.impl("spec_text", TORCH_BOX(&satchel::stable::spec_text));
  m.impl("presets", TORCH_BOX(&satchel::stable::presets));
  m.impl("cuda_compiled", TORCH_BOX(&satchel::stable::cuda_compiled));
  m.impl("cpu_kernel", TORCH_BOX(&satchel::stable::cpu_kernel));
}
