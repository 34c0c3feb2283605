// Random projection of rows (theory.md 4). On the CPU and on the way back matrices are drawn a group at a time and
// multiplied by torch; CUDA's kernels draw their own, forward and, for one matrix of usual width, on the way back.
#include "satchel/tensor/project.h"

#include <ATen/Parallel.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <functional>
#include <limits>

#include "satchel/core/error.h"
#include "satchel/kernels/cuda/project_product.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/coders.h"
#include "satchel/tensor/pack.h"
#include "satchel/tensor/rows.h"

namespace satchel {
namespace {

/// Matrices [first, last), (last − first) × columns × width.
at::Tensor draw(const Projection& p, const at::Tensor& seed, int64_t first, int64_t last, const Place& place) {
  const at::Tensor out = at::empty({last - first, p.columns, p.width}, seed.options().dtype(at::kFloat));
  auto* data = out.mutable_data_ptr<float>();
  if (place.cuda()) {
    cuda::draw_projection(p, seed_pointer(seed), data, first, last, place.stream());
    return out;
  }
  const int64_t entries = static_cast<int64_t>(p.columns) * p.width, grain = std::max<int64_t>(1, 65536 / entries);
  at::parallel_for(first, last, grain,
                   [&](int64_t begin, int64_t end) { draw_projection(p, seed_value(seed), data + (begin - first) * entries, begin, end); });
  return out;
}

/// Matrices that serve rows [first, last): one for all of them, or as many as have the same number of rows each.
struct Group {
  at::Tensor matrices;  // count × columns × width
  int64_t first, last;
};

/// All rows, in groups whose matrices, and the rows of more than one matrix, fit stretch_values().
void for_groups(const Projection& p, const at::Tensor& seed, const Place& place, const std::function<void(const Group&)>& run) {
  const int64_t full = p.rows / p.per_matrix, count = p.matrices();  // the last matrix may serve fewer rows
  const int64_t longest = std::max<int64_t>(p.width, std::min(p.per_matrix, p.rows));
  const int64_t at_once = std::max<int64_t>(1, stretch_values(place.cuda()) / (longest * p.columns));
  for (int64_t first = 0; first < count;) {
    const int64_t last = first < full ? std::min(first + at_once, full) : count;
    run({draw(p, seed, first, last, place), first * p.per_matrix, std::min(last * p.per_matrix, p.rows)});
    first = last;
  }
}

/// A group's rows: all at once where it has several matrices, else in stretches.
void for_stretches(const Group& group, int64_t columns, const Place& place, const std::function<void(int64_t first, int64_t last)>& run) {
  const int64_t some = std::max<int64_t>(kGroup, stretch_values(place.cuda()) / columns / kGroup * kGroup);
  const int64_t length = group.matrices.size(0) > 1 ? group.last - group.first : some;
  for (int64_t first = group.first; first < group.last; first += length) {
    run(first, std::min(first + length, group.last));
  }
}

/// rows × n as count × (rows / count) × n.
at::Tensor by_matrix(const at::Tensor& rows, const Group& group) { return rows.view({group.matrices.size(0), -1, rows.size(1)}); }

/// Saturates finite values at the type's largest, as the codec's own decoding does.
at::Tensor saturated(const at::Tensor& x, at::ScalarType type) {
  if (type == at::kFloat) return x;
  const double most = type == at::kHalf ? 65504.0 : 3.3895313892515355e38;
  return at::where(at::isfinite(x), at::clamp(x, -most, most), x);
}

/// Ĥ = Z·Pᵀ into `out`; read(first, last) gives rows of Z.
template <class Read>
void undo(const Projection& p, const Read& read, const at::Tensor& seed, const at::Tensor& out, const Place& place) {
  for_groups(p, seed, place, [&](const Group& group) {
    const at::Tensor back = group.matrices.transpose(1, 2);
    for_stretches(group, p.columns, place, [&](int64_t first, int64_t last) {
      const at::Tensor z = by_matrix(read(first, last), group), to = by_matrix(out.narrow(0, first, last - first), group);
      if (out.scalar_type() == at::kFloat) {
        at::bmm_out(const_cast<at::Tensor&>(to), z, back);
      } else {
        to.copy_(saturated(at::bmm(z, back), out.scalar_type()));
      }
    });
  });
}

CodecSpec spec_with(const RandomProjection& transform, const char* op) {
  CodecSpec spec;
  spec.transform = transform;
  validate(spec, op);
  return spec;
}

/// The last dimension replaced.
std::vector<int64_t> with_last(at::IntArrayRef shape, int64_t size) {
  std::vector<int64_t> out = shape.vec();
  if (!out.empty()) out.back() = size;
  return out;
}

/// P·(Zᵀ·g), added to `sum`.
void add_projected(const CodecLayout& layout, const Packed& packed, const at::Tensor& g, const at::Tensor& sum, const Place& place) {
  const Projection& p = layout.projection;
  Rows rows(layout, packed.bytes, place);
  for_groups(p, packed.seed, place, [&](const Group& group) {
    const int64_t count = group.matrices.size(0);
    const at::Tensor inner = at::zeros({count, p.width, g.size(1)}, sum.options());
    for_stretches(group, p.columns, place, [&](int64_t first, int64_t last) {
      const at::Tensor z = by_matrix(rows.read(first, last), group);
      const at::Tensor part = g.narrow(0, first, last - first).to(at::kFloat).contiguous();
      inner.baddbmm_(z.transpose(1, 2), by_matrix(part, group));
    });
    const at::Tensor beside = group.matrices.permute({1, 0, 2}).reshape({p.columns, count * p.width});
    sum.addmm_(beside, inner.view({count * p.width, g.size(1)}));
  });
}

/// P·(Zᵀ·g) straight from the codes, where the fused kernel serves; else undefined.
at::Tensor fused_product(const CodecLayout& layout, const Packed& packed, const at::Tensor& g, const Place& place) {
  if (!place.cuda() || !layout.projected || layout.coding != Coding::block) return {};
  const at::Tensor rows = g.contiguous();
  const DType type = dtype_of(rows.scalar_type());
  const int64_t columns = rows.size(1);
  if (reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % kAlign != 0) return {};
  if (!cuda::project_product_fits(layout.projection, layout.block, columns)) return {};
  const at::Tensor bytes = aligned(packed.bytes);
  const at::Tensor out = at::empty({layout.projection.columns, columns}, rows.options().dtype(at::kFloat));
  const at::Tensor scratch = at::empty({cuda::project_product_scratch_bytes(layout.projection, columns)}, bytes.options());
  const Parts from = parts_of(layout, bytes);
  cuda::project_product(layout.projection, layout.block, from.codes, from.headers, seed_pointer(packed.seed), rows.const_data_ptr(), type,
                        columns, out.mutable_data_ptr<float>(), scratch.mutable_data_ptr(), place.stream());
  return out;
}

/// Hᵀ·g by stretches of rows, added to `sum`.
void add_decoded(const CodecLayout& layout, const Packed& packed, const at::Tensor& g, const at::Tensor& sum, const Place& place) {
  Rows rows(layout, packed.bytes, place);
  const int64_t some = std::max<int64_t>(kGroup, stretch_values(place.cuda()) / layout.row / kGroup * kGroup);
  for (int64_t first = 0; first < g.size(0); first += some) {
    const int64_t last = std::min(first + some, g.size(0));
    sum.addmm_(rows.read(first, last).t(), g.narrow(0, first, last - first).to(at::kFloat));
  }
}

}  // namespace

Projection projection_of(int64_t rows, int64_t columns, const RandomProjection& transform) {
  constexpr const char* op = "projection_of";
  const int64_t shape[] = {rows, columns};
  return plan_of(shape, DType::f32, spec_with(transform, op), 0, 1, op).projection;
}

at::Tensor project(const Projection& p, const at::Tensor& h, const at::Tensor& seed, const Place& place) {
  const at::Tensor z = at::empty({p.rows, p.width}, h.options().dtype(at::kFloat));
  if (place.cuda()) {
    cuda::project(p, h.const_data_ptr(), dtype_of(h.scalar_type()), seed_pointer(seed), z.mutable_data_ptr<float>(), place.stream());
    return z;
  }
  for_groups(p, seed, place, [&](const Group& group) {
    for_stretches(group, p.columns, place, [&](int64_t first, int64_t last) {
      at::Tensor to = by_matrix(z.narrow(0, first, last - first), group);
      at::bmm_out(to, by_matrix(h.narrow(0, first, last - first).to(at::kFloat), group), group.matrices);
    });
  });
  return z;
}

void encode_projected(const CodecLayout& layout, const at::Tensor& h, const at::Tensor& seed, const at::Tensor& bytes, const Place& place) {
  if (!place.cuda() || layout.coding != Coding::block) {
    return encode(layout, flat(project(layout.projection, h, seed, place)), seed, bytes, place);
  }
  const int64_t unfused = cuda::project_scratch_bytes(layout.projection, layout.block);
  if (unfused > 0) zero_gaps(layout, bytes);  // the fused kernel writes the gap itself
  const at::Tensor scratch = at::empty({unfused}, bytes.options());
  const Parts to = parts_of(layout, bytes);
  cuda::project_encode(layout.projection, layout.block, h.const_data_ptr(), dtype_of(h.scalar_type()), seed_pointer(seed), to.codes,
                       to.headers, scratch.mutable_data_ptr(), place.stream());
}

void unpack_projected(const CodecLayout& layout, const Packed& packed, const at::Tensor& out, const Place& place) {
  Rows rows(layout, packed.bytes, place);
  undo(
      layout.projection, [&](int64_t first, int64_t last) { return rows.read(first, last); }, packed.seed, out, place);
}

at::Tensor apply_projection(const at::Tensor& h, const RandomProjection& transform, const at::Tensor& seed) {
  constexpr const char* op = "apply_projection";
  check_float(h, op);
  check_seed(seed, h.device(), op);
  const CodecLayout layout = plan_of(h.sizes(), DType::f32, spec_with(transform, op), 0, 1, op);
  const int64_t width = h.dim() == 0 ? 1 : ceil_div(h.size(-1), transform.ratio);
  const auto shape = with_last(h.sizes(), width);
  if (layout.values == 0) return at::empty(shape, h.options().dtype(at::kFloat));
  const Place place(h.device(), op);
  const at::Tensor rows = h.detach().resolve_neg().contiguous().view({layout.projection.rows, layout.projection.columns});
  return project(layout.projection, rows, seed, place).view(shape);
}

at::Tensor undo_projection(const at::Tensor& z, int64_t columns, const RandomProjection& transform, const at::Tensor& seed) {
  constexpr const char* op = "undo_projection";
  check_float(z, op);
  check_seed(seed, z.device(), op);
  if (columns < 0 || (z.dim() == 0 && columns != 1)) fail(op, "columns must be those of the projected rows", columns);
  const auto shape = with_last(z.sizes(), columns);
  const CodecLayout layout = plan_of(shape, DType::f32, spec_with(transform, op), 0, 1, op);
  if (z.dim() > 0 && z.size(-1) != ceil_div(columns, transform.ratio)) {
    fail(op, "rows must be " + std::to_string(ceil_div(columns, transform.ratio)) + " wide", z.size(-1));
  }
  const at::Tensor out = at::empty(shape, z.options().dtype(at::kFloat));
  if (layout.values == 0) return out;
  const Place place(z.device(), op);
  const at::Tensor rows = z.detach().to(at::kFloat).contiguous().view({layout.projection.rows, layout.projection.width});
  const auto read = [&](int64_t first, int64_t last) { return rows.narrow(0, first, last - first); };
  undo(layout.projection, read, seed, out.view({layout.projection.rows, columns}), place);
  return out;
}

at::Tensor transposed_product(const Packed& packed, const at::Tensor& g) {
  constexpr const char* op = "transposed_product";
  const CodecLayout layout = check_packed(packed, op);
  check_product(packed.shape, g, packed.bytes.device(), op);
  const int64_t columns = packed.shape.back();
  const Place place(g.device(), op);
  const auto zeros = [&] { return at::zeros({columns, g.size(-1)}, g.options().dtype(at::kFloat)); };
  if (layout.values == 0 || g.numel() == 0) return zeros();
  const at::Tensor rows = g.detach().reshape({-1, g.size(-1)});
  if (const at::Tensor product = fused_product(layout, packed, rows, place); product.defined()) return product;
  const at::Tensor sum = zeros();
  if (layout.projected) {
    add_projected(layout, packed, rows, sum, place);
  } else if (packed.strides == contiguous_strides(packed.shape)) {
    add_decoded(layout, packed, rows, sum, place);
  } else {
    sum.addmm_(unpack(packed).reshape({-1, columns}).to(at::kFloat).t(), rows.to(at::kFloat));
  }
  return sum;
}

}  // namespace satchel
