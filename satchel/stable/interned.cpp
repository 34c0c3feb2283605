// Ops that know a tensor's layout by a number. Every item of a list costs a call into torch, at every call of an op: shape, strides, type
// and spec are handed over once, and Python holds the number for as long as it is used (python/satchel/_ops.py).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "satchel/stable/arguments.h"
#include "satchel/stable/coders.h"

namespace satchel::stable {
namespace {

constexpr int64_t kLongestBlock = 4096;            // of rows with gaps, which the CPU puts together block by block
constexpr int64_t kMostInRows = int64_t{1} << 35;  // values

struct Interned {
  Numbers shape;
  Numbers given;    // strides of what is packed
  Numbers strides;  // of what comes out: the order in which values are coded
  ScalarType dtype = ScalarType::Float;
  int64_t values = 0;
  bool coded = false;  // has a spec
  CodecLayout layout;
  bool gapless = true;
  RowsWithGaps rows;  // width 0 where what is packed has gaps of another kind
};

/// Sets `gapless` and `rows` from the strides: the dimensions in the order of the code, innermost first, are one run, or one run of runs.
void find_rows(Interned& e) {
  std::vector<size_t> order;
  for (size_t d = 0; d < e.shape.size(); ++d) {
    if (e.shape[d] > 1) order.push_back(d);
  }
  std::ranges::sort(order, {}, [&](size_t d) { return e.strides[d]; });
  int64_t width = 1, pitch = 0, next = 0;
  bool two = true;
  for (const size_t d : order) {
    const int64_t step = e.given[d], size = e.shape[d];
    if (pitch == 0 && step == width) {
      width *= size;
    } else if (pitch == 0) {
      pitch = step;
      next = step * size;
    } else {
      two = two && step == next;
      next *= size;
    }
  }
  e.gapless = e.values == 0 || pitch == 0;
  const Grid& grid = e.layout.block.grid;
  const bool blocks =
      e.coded && e.layout.coding == Coding::block && grid.is_straight() && grid.block % 8 == 0 && grid.block <= kLongestBlock;
  if (!e.gapless && two && blocks && width % 8 == 0 && pitch % 8 == 0 && e.values < kMostInRows) e.rows = {width, pitch};
}

class Table {
 public:
  int64_t add(Interned&& e) {
    const std::lock_guard<std::mutex> lock(mutex_);
    found_.emplace(++last_, std::make_shared<const Interned>(std::move(e)));
    return last_;
  }
  std::shared_ptr<const Interned> get(int64_t id, const char* op) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = found_.find(id);
    if (found == found_.end()) fail(op, "layout must be a number that layout_id() gave", id);
    return found->second;
  }
  void forget(int64_t id) {
    const std::lock_guard<std::mutex> lock(mutex_);
    found_.erase(id);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<const Interned>> found_;
  int64_t last_ = 0;
};

Table& table_of_layouts() {
  static Table* const table = new Table;  // Python may forget layouts while the process ends
  return *table;
}

/// given: strides of what is packed; strides: gapless ones, of the order in which values are coded and come back. No spec: a shape alone.
int64_t layout_id(const Numbers& shape, const Numbers& given, const Numbers& strides, ScalarType dtype, const Numbers& spec) {
  constexpr const char* op = "layout_id";
  Interned e;
  e.shape = shape, e.given = given, e.strides = strides, e.dtype = dtype;
  e.values = count_of(shape, op);
  check_strides(shape, strides, op);
  if (given.size() != shape.size()) fail(op, "strides must be as many as sizes", given.size());
  if (e.coded = !spec.empty(); e.coded) {
    const CodecSpec parsed = spec_of_list(spec, op);
    e.layout = plan_of(shape, dtype_of(dtype, op), parsed, 0, 1, op);
    if (e.layout.coding != Coding::block || e.layout.projected || e.layout.part != Part::both || parsed.block < 0 || parsed.per_sample) {
      fail(op, "spec must be of plain blocks, which do not ask for a shape", to_string(parsed));
    }
  }
  find_rows(e);
  return table_of_layouts().add(std::move(e));
}

void forget_layout(int64_t id) { table_of_layouts().forget(id); }

template <class List>
bool equal(const List& a, const Numbers& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin());
}

/// A layout with a spec that x is packed by, of its type and shape.
std::shared_ptr<const Interned> layout_for(const Tensor& x, const Tensor& seed, int64_t id, const char* op) {
  auto found = table_of_layouts().get(id, op);
  const Interned& e = *found;
  if (!e.coded) fail(op, "layout must have a spec", id);
  if (x.scalar_type() != e.dtype) fail(op, "tensor must have the layout's type", torch::headeronly::toString(x.scalar_type()));
  if (!equal(x.sizes(), e.shape)) fail(op, "tensor must have the layout's shape; another one's values", x.numel());
  check_seed(seed, x, op);
  return found;
}

bool is_as_given(const Tensor& x, const Interned& e) {
  return reinterpret_cast<uintptr_t>(x.data_ptr()) % kAlign == 0 && equal(x.strides(), e.given);
}

Tensor in_order(const Tensor& x, const Interned& e) {
  Tensor copy = empty_strided(x, e.shape, e.strides, e.dtype);
  torch::stable::copy_(copy, x);
  return copy;
}

Tensor pack_by_id(const Tensor& x, const Tensor& seed, int64_t id) {
  constexpr const char* op = "pack_by_id";
  const auto found = layout_for(x, seed, id, op);
  const Interned& e = *found;
  const Place place(x, op);
  const Tensor bytes = new_bytes(x, e.layout.at.total);
  zero_gaps(e.layout, bytes);
  if (e.values == 0) return bytes;
  if (is_as_given(x, e) && (e.gapless || e.rows.width > 0)) {
    encode(e.layout, x.const_data_ptr(), seed, bytes, place, e.rows);
  } else {
    encode(e.layout, in_order(x, e).const_data_ptr(), seed, bytes, place);
  }
  return bytes;
}

/// A code of exp(x), without a tensor that holds it.
Tensor pack_exp_by_id(const Tensor& x, const Tensor& seed, int64_t id) {
  constexpr const char* op = "pack_exp_by_id";
  const auto found = layout_for(x, seed, id, op);
  const Interned& e = *found;
  if (e.dtype != ScalarType::Float) fail(op, "tensor must be float32", torch::headeronly::toString(e.dtype));
  const Place place(x, op);
  const Tensor bytes = new_bytes(x, e.layout.at.total);
  zero_gaps(e.layout, bytes);
  if (e.values == 0) return bytes;
  const Tensor line = is_as_given(x, e) && e.gapless ? x : in_order(x, e);
  encode_exp(e.layout, static_cast<const float*>(line.const_data_ptr()), seed, bytes, place);
  return bytes;
}

template <class Decode>
Tensor unpack_with(const Tensor& given, int64_t id, const char* op, const Decode& run) {
  const auto found = table_of_layouts().get(id, op);
  const Interned& e = *found;
  if (!e.coded) fail(op, "layout must have a spec", id);
  check_bytes(given, e.layout.at.total, op);
  const Place place(given, op);
  const Tensor out = empty_strided(given, e.shape, e.strides, e.dtype);
  if (e.values > 0) run(e, aligned(given), out, place);
  return out;
}

Tensor unpack_by_id(const Tensor& given, int64_t id) {
  return unpack_with(given, id, "unpack_by_id", [](const Interned& e, const Tensor& bytes, const Tensor& out, const Place& place) {
    decode(e.layout, bytes, out.data_ptr(), place);
  });
}

/// log() of what unpack_by_id() gives.
Tensor unpack_log_by_id(const Tensor& given, int64_t id) {
  constexpr const char* op = "unpack_log_by_id";
  return unpack_with(given, id, op, [](const Interned& e, const Tensor& bytes, const Tensor& out, const Place& place) {
    if (e.dtype != ScalarType::Float) fail(op, "layout must be of float32", torch::headeronly::toString(e.dtype));
    decode_log(e.layout, bytes, static_cast<float*>(out.data_ptr()), place);
  });
}

Tensor unpack_table_by_id(const Tensor& given, const Tensor& table, int64_t id) {
  constexpr const char* op = "unpack_table_by_id";
  const auto found = table_of_layouts().get(id, op);
  const Interned& e = *found;
  const DType type = dtype_of(e.dtype, op);
  const int bits = table_bits(table, given, op);
  check_bytes(given, code_bytes(e.values, bits), op);
  const Place place(given, op);
  const Tensor out = empty_strided(given, e.shape, e.strides, e.dtype);
  decode_table(given, table, bits, e.values, out.data_ptr(), type, place);
  return out;
}

}  // namespace
}  // namespace satchel::stable

STABLE_TORCH_LIBRARY_FRAGMENT(satchel_stable, m) {
  m.def("layout_id(int[] shape, int[] given, int[] strides, ScalarType dtype, int[] spec) -> int");
  m.def("forget_layout(int layout) -> ()");
  m.def("pack_by_id(Tensor x, Tensor seed, int layout) -> Tensor");
  m.def("unpack_by_id(Tensor bytes, int layout) -> Tensor");
  m.def("pack_exp_by_id(Tensor x, Tensor seed, int layout) -> Tensor");
  m.def("unpack_log_by_id(Tensor bytes, int layout) -> Tensor");
  m.def("unpack_table_by_id(Tensor bytes, Tensor table, int layout) -> Tensor");
}

#define SATCHEL_IMPLEMENT_BY_ID(m)                                           \
  m.impl("pack_by_id", TORCH_BOX(&satchel::stable::pack_by_id));             \
  m.impl("unpack_by_id", TORCH_BOX(&satchel::stable::unpack_by_id));         \
  m.impl("pack_exp_by_id", TORCH_BOX(&satchel::stable::pack_exp_by_id));     \
  m.impl("unpack_log_by_id", TORCH_BOX(&satchel::stable::unpack_log_by_id)); \
  m.impl("unpack_table_by_id", TORCH_BOX(&satchel::stable::unpack_table_by_id));

STABLE_TORCH_LIBRARY_IMPL(satchel_stable, CPU, m){SATCHEL_IMPLEMENT_BY_ID(m)} STABLE_TORCH_LIBRARY_IMPL(satchel_stable, CUDA, m){
    SATCHEL_IMPLEMENT_BY_ID(m)} STABLE_TORCH_LIBRARY_IMPL(satchel_stable, CompositeExplicitAutograd, m) {
  m.impl("layout_id", TORCH_BOX(&satchel::stable::layout_id));
  m.impl("forget_layout", TORCH_BOX(&satchel::stable::forget_layout));
}
