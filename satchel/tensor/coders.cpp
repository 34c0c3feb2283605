#include "satchel/tensor/coders.h"

#include <ATen/ops/empty.h>

#include "satchel/tensor/chunks.h"

namespace satchel {
namespace {

int coded_bits(const Plan& plan) { return plan.coding == Coding::side ? plan.side.table.bits : plan.block.levels.bits; }
HeaderType header_of(const Plan& plan) { return plan.coding == Coding::side ? plan.side.header : plan.block.header; }

void zero_gap(const at::Tensor& bytes, int64_t from, int64_t to) {
  if (from < to) bytes.narrow(0, from, to - from).zero_();
}

}  // namespace

DType dtype_of(at::ScalarType type) { return type == at::kHalf ? DType::f16 : type == at::kBFloat16 ? DType::bf16 : DType::f32; }

at::ScalarType scalar_type_of(DType type) { return type == DType::f16 ? at::kHalf : type == DType::bf16 ? at::kBFloat16 : at::kFloat; }

at::Tensor flat(const at::Tensor& x) { return x.as_strided({x.numel()}, {1}); }

Parts parts_of(const Plan& plan, const at::Tensor& bytes) {
  auto* base = static_cast<uint8_t*>(bytes.data_ptr());
  Channel* channels = plan.channels == 0 ? nullptr : reinterpret_cast<Channel*>(base + plan.at.channels);
  uint8_t* plane = plan.off_plane && plan.values > 0 ? base + plan.at.plane : nullptr;
  return {base, base + plan.at.headers, reinterpret_cast<uint16_t*>(base + plan.at.means), channels, plane};
}

SideCode side_code_of(const Plan& plan, const Parts& parts) {
  SideCode code = plan.side;
  if (parts.plane != nullptr) code.plane = {parts.plane, code.grid.blocks(), off_slot_bytes(code.grid), 0};
  return code;
}

void zero_gaps(const Plan& plan, const at::Tensor& bytes) {
  if (plan.coding == Coding::keep) {
    zero_gap(bytes, plan.values * size_of(plan.type), plan.at.channels);
    return;
  }
  zero_gap(bytes, code_bytes(plan.values, coded_bits(plan)), plan.at.headers);
  zero_gap(bytes, plan.at.headers + grid_of(plan).blocks() * header_bytes(header_of(plan)), plan.at.means);
  if (plan.off_plane) zero_gap(bytes, plan.at.plane, plan.at.total);  // the encoders set bits; channels end at a multiple of 16
}

void encode(const Plan& plan, const at::Tensor& x, const at::Tensor& seed, const at::Tensor& bytes, const Place& place) {
  if (plan.values == 0) return;
  zero_gaps(plan, bytes);
  const Source source{x.const_data_ptr(), plan.type};
  switch (plan.coding) {
    case Coding::keep: bytes.narrow(0, 0, plan.values * size_of(plan.type)).copy_(x.view(at::kByte)); break;
    case Coding::block: encode_block(plan, source, seed, bytes, place); break;
    case Coding::side: encode_side(plan, source, seed, bytes, place); break;
    case Coding::low_pass: encode_low_pass(plan, source, seed, bytes, place); break;
  }
}

void decode(const Plan& plan, const at::Tensor& bytes, const at::Tensor& x, int64_t first, int64_t last, const Place& place) {
  if (first >= last) return;
  constexpr size_t kCaches = size_t{32} << 20;  // what is larger is written past the caches: nothing of it would still be there
  const Target target{x.data_ptr(), dtype_of(x.scalar_type()), first, x.nbytes() > kCaches};
  const Parts parts = parts_of(plan, bytes);
  switch (plan.coding) {
    case Coding::keep: {
      const int64_t size = size_of(plan.type);
      x.copy_(bytes.narrow(0, first * size, (last - first) * size).view(scalar_type_of(plan.type)));
      break;
    }
    case Coding::block: decode_block(plan, parts, target, first, last, place); break;
    case Coding::side: decode_side(plan, parts, target, first, last, place); break;
    case Coding::low_pass: decode_low_pass(plan, parts, target, first, last, place); break;
  }
}

int64_t decode_step(const Plan& plan, bool cuda) {
  if (plan.coding == Coding::keep) return 1;
  int64_t step = cuda ? quantum_of(grid_of(plan)) : kGroup;
  if (plan.coding == Coding::low_pass) step = common_multiple(step, plan.maps.map_values());
  if (cuda && plan.coding == Coding::side && plan.side.channels > 1) step = common_multiple(step, plan.side.channels * plan.side.inner);
  return step;
}

at::Tensor decoded(const Plan& plan, const at::Tensor& bytes, at::ScalarType type, int64_t first, int64_t last, const Place& place) {
  const int64_t step = decode_step(plan, place.cuda()), begin = first / step * step;
  const int64_t end = last > plan.values - step ? plan.values : ceil_div(last, step) * step;
  const at::Tensor line = at::empty({end - begin}, bytes.options().dtype(type));
  decode(plan, bytes, line, begin, end, place);
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
