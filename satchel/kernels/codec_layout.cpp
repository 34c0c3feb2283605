#include "satchel/kernels/codec_layout.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <tuple>
#include <variant>

#include "satchel/core/error.h"
#include "satchel/core/levels.h"

namespace satchel {
namespace {

constexpr int64_t kMaxValues = int64_t{1} << 56;  // sizes in bits still fit 64 bits
constexpr int64_t kMaxMatrix = int64_t{1} << 28;  // entries of one projection matrix: 1 GiB of fp32
constexpr int64_t kMaxColumns = int64_t{1} << kMaxProjectionLog;

/// Tables cost a search over levels each; shapes recur.
template <class Table, class Key, class Make>
Table remembered(const Key& key, const Make& make) {
  static std::map<Key, Table> made;
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = made.find(key); found != made.end()) return found->second;
  if (made.size() >= 1024) made.clear();
  return made.emplace(key, make()).first->second;
}

LevelTable levels_for(int bits, Levels levels, int64_t block) {
  return remembered<LevelTable>(std::tuple(bits, levels, block), [&] { return level_table(bits, levels, block); });
}

SideTable sides_for(int bits, Side side, Levels levels, int64_t block) {
  return remembered<SideTable>(std::tuple(bits, side, levels, block), [&] { return side_table(bits, side, levels, block); });
}

/// Values of one feature map: all dimensions after the first two, the last one `row` wide.
int64_t map_values(std::span<const int64_t> shape, int64_t row, int64_t values) {
  if (shape.size() < 2) return values;
  int64_t count = row;
  for (size_t d = 2; d + 1 < shape.size(); ++d) count *= shape[d];
  return count;
}

Grid make_grid(const CodecSpec& spec, std::span<const int64_t> shape, int64_t row, int64_t values) {
  Grid grid{values, 1, values};
  if (values == 0) return grid;
  if (spec.per_sample && !shape.empty()) grid.span = values / shape[0];
  int64_t block = spec.block;
  if (block == kMap) {
    block = map_values(shape, row, values);
  } else if (block < 0) {
    block = -block > grid.span / row ? grid.span : -block * row;
  }
  grid.block = std::clamp<int64_t>(block, 1, grid.span);
  return grid;
}

LowPassShape low_pass_shape(std::span<const int64_t> shape, int64_t values, int size, const char* op) {
  if (shape.size() > 5) fail(op, "low-pass takes tensors of at most 5 dimensions", shape.size());
  LowPassShape maps;
  maps.size = size;
  const size_t rank = shape.size(), first = rank <= 1 ? 0 : rank == 2 ? 1 : 2;  // first dimension of a map
  if (values == 0) return maps;  // there are none, and the product of their sizes might overflow
  if (rank > first) maps.width = shape[rank - 1];
  if (rank > first + 1) maps.height = shape[rank - 2];
  if (rank > first + 2) maps.depth = shape[rank - 3];
  maps.maps = values / maps.map_values();
  return maps;
}

void plan_projection(CodecLayout& layout, std::span<const int64_t> shape, const RandomProjection& transform, const char* op) {
  const int64_t columns = shape.empty() ? 1 : shape.back();
  if (columns > kMaxColumns) fail(op, "a projection takes rows of at most 2^20 values", columns);
  if (layout.values == 0) return;
  const int64_t width = ceil_div(columns, transform.ratio);
  if (columns * width > kMaxMatrix) fail(op, "a projection matrix may have at most 2^28 entries", columns * width);
  const int64_t rows = layout.values / columns;
  layout.projection.rows = rows;
  layout.projection.columns = static_cast<int>(columns);
  layout.projection.width = static_cast<int>(width);
  layout.projection.per_matrix = transform.rows == 0 ? rows : std::min(transform.rows, rows);
  layout.projection.hadamard = transform.hadamard;
  layout.projected = true;
  layout.type = DType::f32;
  layout.values = rows * width;
  layout.row = width;
}

void plan_keep(CodecLayout& layout) {
  const int64_t raw = layout.values * size_of(layout.type);
  layout.at.headers = layout.at.means = layout.at.channels = layout.channels > 0 ? align_up(raw) : raw;
  layout.at.plane = layout.at.total = layout.at.channels + layout.channels * static_cast<int64_t>(sizeof(Channel));
}

void plan_side(CodecLayout& layout, const CodecSpec& spec, const Grid& grid, int64_t inner) {
  layout.coding = Coding::side;
  layout.side = {grid, spec.header, spec.rounding, sides_for(spec.bits, spec.side, spec.levels, grid.block), 1, 1};
  if (layout.channels > 0) {
    layout.side.channels = layout.channels;
    layout.side.inner = layout.channels == 1 ? std::max<int64_t>(1, layout.values) : inner;  // a single channel is one long run
  }
  layout.off_plane = has_off_plane(spec);
  layout.at = layout_of(grid, spec.bits, spec.header, 0, layout.channels, layout.off_plane);
}

void plan_blocks(CodecLayout& layout, const CodecSpec& spec, const Grid& grid, bool low_pass) {
  layout.coding = low_pass ? Coding::low_pass : Coding::block;
  layout.block = {grid, spec.header, spec.rounding, levels_for(spec.bits, spec.levels, grid.block)};
  const int64_t windows = low_pass && layout.part != Part::high ? layout.maps.maps * layout.maps.windows() : 0;
  layout.at = layout_of(layout.part == Part::low ? Grid{} : grid, spec.bits, spec.header, windows);
}

void check_channels(const CodecSpec& spec, int64_t channels, int64_t inner, const char* op) {
  const bool threshold = spec.side == Side::one_sided || spec.side == Side::both;
  if (channels < 0) fail(op, "channels must not be negative", channels);
  if (inner < 1) fail(op, "inner must be 1 or more", inner);
  if (!threshold && channels > 0) fail(op, "channels need a side code with thresholds (one or both)", channels);
}

}  // namespace

CodecLayout plan_of(std::span<const int64_t> shape, DType type, const CodecSpec& spec, int64_t channels, int64_t inner, const char* op) {
  check_channels(spec, channels, inner, op);
  CodecLayout layout;
  layout.type = type;
  layout.values = count_of(shape, op);
  layout.row = shape.empty() ? 1 : shape.back();
  if (layout.values == 0 ? inner != 1 : inner > layout.values) fail(op, "inner must fit the shape", inner);
  if (channels > (layout.values > 0 ? layout.values / inner : kMaxValues)) fail(op, "channels must fit the shape", channels);
  layout.channels = channels == 0 && (spec.side == Side::one_sided || spec.side == Side::both) ? 1 : channels;
  if (const auto* p = std::get_if<RandomProjection>(&spec.transform)) plan_projection(layout, shape, *p, op);
  bool low_pass = false;
  if (const auto* p = std::get_if<LowPass>(&spec.transform)) {
    layout.maps = low_pass_shape(shape, layout.values, p->size, op);
    layout.part = p->part;
    low_pass = true;
  }
  if (spec.bits == kKeep || (low_pass && layout.maps.map_values() == 1)) {
    plan_keep(layout);
    return layout;
  }
  const Grid grid = make_grid(spec, shape, layout.row, layout.values);
  if (spec.side != Side::none) {
    plan_side(layout, spec, grid, inner);
  } else {
    plan_blocks(layout, spec, grid, low_pass);
  }
  return layout;
}

const Grid& grid_of(const CodecLayout& layout) { return layout.coding == Coding::side ? layout.side.grid : layout.block.grid; }

int64_t count_of(std::span<const int64_t> shape, const char* op) {
  int64_t count = 1;
  bool empty = false;
  for (const int64_t size : shape) {
    if (size < 0) fail(op, "sizes must not be negative", size);
    empty = empty || size == 0;
  }
  for (const int64_t size : shape) {
    if (!empty && size > kMaxValues / count) fail(op, "a tensor may have at most 2^56 values; too large", size);
    count *= empty ? 0 : size;
  }
  return empty ? 0 : count;
}

std::vector<int64_t> contiguous_strides(std::span<const int64_t> shape) {
  std::vector<int64_t> strides(shape.size());
  uint64_t step = 1;  // unsigned: an empty shape may have sizes whose product wraps around
  for (size_t d = shape.size(); d-- > 0;) {
    strides[d] = static_cast<int64_t>(step);
    step *= static_cast<uint64_t>(std::max<int64_t>(shape[d], 1));
  }
  return strides;
}

void check_strides(std::span<const int64_t> shape, std::span<const int64_t> strides, const char* op) {
  if (shape.size() != strides.size()) fail(op, "strides must be as many as sizes", strides.size());
  std::vector<std::pair<int64_t, int64_t>> steps;  // (stride, size) of the dimensions that move
  for (size_t d = 0; d < shape.size(); ++d) {
    if (strides[d] < 0) fail(op, "strides must not be negative", strides[d]);
    if (shape[d] > 1) steps.emplace_back(strides[d], shape[d]);
  }
  if (std::ranges::find(shape, 0) != shape.end()) return;
  std::ranges::sort(steps);
  int64_t expected = 1;
  for (const auto& [stride, size] : steps) {
    if (stride != expected) fail(op, "strides must fill memory without gap or overlap", stride);
    expected *= size;
  }
}

bool is_in_shape_order(std::span<const int64_t> shape, std::span<const int64_t> strides) {
  const std::vector<int64_t> expected = contiguous_strides(shape);
  for (size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] > 1 && strides[d] != expected[d]) return false;
  }
  return true;
}

bool is_channels_last(std::span<const int64_t> shape, std::span<const int64_t> strides) {
  if (shape.size() < 3 || shape.size() > 5) return false;
  const auto channels_at_the_end = [](std::span<const int64_t> numbers) {
    std::vector<int64_t> moved(numbers.begin(), numbers.end());
    std::rotate(moved.begin() + 1, moved.begin() + 2, moved.end());
    return moved;
  };
  return is_in_shape_order(channels_at_the_end(shape), channels_at_the_end(strides));
}

bool any_order_serves(std::span<const int64_t> shape, std::span<const int64_t> strides, const CodecSpec& spec) {
  if (std::holds_alternative<RandomProjection>(spec.transform)) return false;
  if (spec.bits == kKeep) return true;
  if (std::holds_alternative<LowPass>(spec.transform))
    return is_channels_last(shape, strides);  // read as they lie, coded in the shape's order
  if (spec.block < 0) return false;
  // Samples are whole stretches of memory where the first dimension is the outermost.
  return !spec.per_sample || shape.empty() || shape[0] <= 1 || strides[0] == count_of(shape, "pack") / shape[0];
}

SpecNumbers numbers_of(const CodecSpec& spec) {
  const bool sampled = spec.side == Side::one_sided && spec.off == Off::sampled;
  SpecNumbers n{spec.bits,
                spec.block,
                spec.per_sample,
                static_cast<int64_t>(spec.levels),
                static_cast<int64_t>(spec.rounding),
                static_cast<int64_t>(spec.header),
                sampled ? kSampledSide : static_cast<int64_t>(spec.side),
                static_cast<int64_t>(spec.transform.index()),
                0,
                0,
                false};
  if (const auto* p = std::get_if<RandomProjection>(&spec.transform)) {
    n.p0 = p->ratio;
    n.p1 = p->rows;
    n.p2 = p->hadamard;
  } else if (const auto* l = std::get_if<LowPass>(&spec.transform)) {
    n.p0 = l->size;
    n.p1 = static_cast<int64_t>(l->part);
  }
  return n;
}

CodecSpec spec_of(const SpecNumbers& n, const char* op) {
  const auto within = [op](const char* name, int64_t value, int64_t least, int64_t most) {
    if (value < least || value > most) {
      fail(op, std::string(name) + " must be " + std::to_string(least) + " to " + std::to_string(most), value);
    }
    return value;
  };
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  CodecSpec spec;
  spec.bits = static_cast<int>(within("bits", n.bits, 1, kKeep));
  spec.block = n.block;
  spec.per_sample = n.per_sample;
  spec.levels = static_cast<Levels>(within("levels", n.levels, 0, std::size(kLevelNames) - 1));
  spec.rounding = static_cast<Rounding>(within("rounding", n.rounding, 0, 1));
  spec.header = static_cast<HeaderType>(within("header", n.header, 0, 1));
  const int64_t side = within("side", n.side, 0, kSampledSide);
  spec.side = side == kSampledSide ? Side::one_sided : static_cast<Side>(side);
  if (side == static_cast<int64_t>(Side::one_sided)) spec.off = Off::mean;
  const int64_t transform = within("transform", n.transform, 0, 2);
  if (transform == 1) spec.transform = RandomProjection{static_cast<int>(within("ratio", n.p0, 1, kMost)), n.p1, n.p2};
  if (transform == 2) {
    spec.transform = LowPass{static_cast<int>(within("size", n.p0, 1, kMost)), static_cast<Part>(within("part", n.p1, 0, 2))};
  }
  validate(spec, op);
  return spec;
}

}  // namespace satchel
