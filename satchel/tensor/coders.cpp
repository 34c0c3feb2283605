#include "satchel/tensor/coders.h"

#include <ATen/ops/empty.h>

#include "satchel/tensor/chunks.h"

namespace satchel {
namespace {

int coded_bits(const CodecLayout& layout) { return layout.coding == Coding::side ? layout.side.table.bits : layout.block.levels.bits; }
HeaderType header_of(const CodecLayout& layout) { return layout.coding == Coding::side ? layout.side.header : layout.block.header; }

void zero_gap(const at::Tensor& bytes, int64_t from, int64_t to) {
  if (from < to) bytes.narrow(0, from, to - from).zero_();
}

}  // namespace

DType dtype_of(at::ScalarType type) { return type == at::kHalf ? DType::f16 : type == at::kBFloat16 ? DType::bf16 : DType::f32; }

at::ScalarType scalar_type_of(DType type) { return type == DType::f16 ? at::kHalf : type == DType::bf16 ? at::kBFloat16 : at::kFloat; }

at::Tensor flat(const at::Tensor& x) { return x.as_strided({x.numel()}, {1}); }

Parts parts_of(const CodecLayout& layout, const at::Tensor& bytes) {
  auto* base = static_cast<uint8_t*>(bytes.data_ptr());
  Channel* channels = layout.channels == 0 ? nullptr : reinterpret_cast<Channel*>(base + layout.at.channels);
  uint8_t* plane = layout.off_plane && layout.values > 0 ? base + layout.at.plane : nullptr;
  return {base, base + layout.at.headers, reinterpret_cast<uint16_t*>(base + layout.at.means), channels, plane};
}

SideCode side_code_of(const CodecLayout& layout, const Parts& parts) {
  SideCode code = layout.side;
  if (parts.plane != nullptr) code.plane = {parts.plane, code.grid.blocks(), off_slot_bytes(code.grid), 0};
  return code;
}

void zero_gaps(const CodecLayout& layout, const at::Tensor& bytes) {
  if (layout.coding == Coding::keep) {
    zero_gap(bytes, layout.values * size_of(layout.type), layout.at.channels);
    return;
  }
  zero_gap(bytes, code_bytes(layout.values, coded_bits(layout)), layout.at.headers);
  zero_gap(bytes, layout.at.headers + grid_of(layout).blocks() * header_bytes(header_of(layout)), layout.at.means);
  if (layout.off_plane) zero_gap(bytes, layout.at.plane, layout.at.total);  // the encoders set bits; channels end at a multiple of 16
}

void encode(const CodecLayout& layout, const at::Tensor& x, const at::Tensor& seed, const at::Tensor& bytes, const Place& place) {
  if (layout.values == 0) return;
  zero_gaps(layout, bytes);
  const Source source{x.const_data_ptr(), layout.type};
  switch (layout.coding) {
    case Coding::keep: bytes.narrow(0, 0, layout.values * size_of(layout.type)).copy_(x.view(at::kByte)); break;
    case Coding::block: encode_block(layout, source, seed, bytes, place); break;
    case Coding::side: encode_side(layout, source, seed, bytes, place); break;
    case Coding::low_pass: encode_low_pass(layout, source, seed, bytes, place); break;
  }
}

void decode(const CodecLayout& layout, const at::Tensor& bytes, const at::Tensor& x, int64_t first, int64_t last, const Place& place) {
  if (first >= last) return;
  constexpr size_t kCaches = size_t{32} << 20;  // what is larger is written past the caches: nothing of it would still be there
  const Target target{x.data_ptr(), dtype_of(x.scalar_type()), first, x.nbytes() > kCaches};
  const Parts parts = parts_of(layout, bytes);
  switch (layout.coding) {
    case Coding::keep: {
      const int64_t size = size_of(layout.type);
      x.copy_(bytes.narrow(0, first * size, (last - first) * size).view(scalar_type_of(layout.type)));
      break;
    }
    case Coding::block: decode_block(layout, parts, target, first, last, place); break;
    case Coding::side: decode_side(layout, parts, target, first, last, place); break;
    case Coding::low_pass: decode_low_pass(layout, parts, target, first, last, place); break;
  }
}

int64_t decode_step(const CodecLayout& layout, bool cuda) {
  if (layout.coding == Coding::keep) return 1;
  int64_t step = cuda ? quantum_of(grid_of(layout)) : kGroup;
  if (layout.coding == Coding::low_pass) step = common_multiple(step, layout.maps.map_values());
  if (cuda && layout.coding == Coding::side && layout.side.channels > 1)
    step = common_multiple(step, layout.side.channels * layout.side.inner);
  return step;
}

at::Tensor decoded(const CodecLayout& layout, const at::Tensor& bytes, at::ScalarType type, int64_t first, int64_t last,
                   const Place& place) {
  const int64_t step = decode_step(layout, place.cuda()), begin = first / step * step;
  const int64_t end = last > layout.values - step ? layout.values : ceil_div(last, step) * step;
  const at::Tensor line = at::empty({end - begin}, bytes.options().dtype(type));
  decode(layout, bytes, line, begin, end, place);
  return line.narrow(0, first - begin, last - first);
}

Grid part_of(const Grid& grid, int64_t first, int64_t last) {
  return {last - first, grid.block, grid.span == grid.values ? last - first : grid.span};
}

const uint8_t* headers_from(const Grid& grid, HeaderType type, const uint8_t* headers, int64_t first) {
  return headers + grid.block_of(first) * header_bytes(type);
}

const uint8_t* codes_from(const uint8_t* codes, int bits, int64_t first) { return codes + code_bytes(first, bits); }

}  // namespace satchel
