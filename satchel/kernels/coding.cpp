#include "satchel/kernels/coding.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "satchel/kernels/chunks.h"
#include "satchel/kernels/cuda/low_pass_last.h"

namespace satchel {
namespace {

constexpr int64_t kLongestRest = int64_t{1} << 18;  // values of a low-pass's rest that one thread holds: 1 MiB of fp32

/// measure(blocks), or store(block, its range) where blocks are too long for one thread, and encode(values).
template <class Measure, class Store>
void encode_blocks(const Grid& grid, Source x, const Measure& measure, const Store& store, const RangeFunction& encode) {
  const bool is_long = has_long_blocks(grid);
  const auto headers = [&](int64_t first, int64_t last) {
    if (!is_long) return measure(first, last);
    for (int64_t b = first; b < last; ++b) store(b, measure_long_block(grid, x, b));
  };
  encode_in_chunks(grid, headers, encode);
}

// The block code.

void encode_rows(const BlockCode& code, Source x, RowsWithGaps rows, uint64_t seed, const Parts& to) {
  const int64_t size = size_of(x.type);
  encode_made(code, x.type, chunk_of(quantum_of(code.grid)), seed, to, [&](void* buffer, int64_t first, int64_t last) {
    for (int64_t i = first, count = 0; i < last; i += count) {
      const int64_t row = i / rows.width, column = i % rows.width;
      count = std::min(rows.width - column, last - i);
      const auto* from = static_cast<const uint8_t*>(x.data) + (row * rows.pitch + column) * size;
      std::memcpy(static_cast<uint8_t*>(buffer) + (i - first) * size, from, static_cast<size_t>(count * size));
    }
  });
}

void encode_block(const BlockCode& code, Source x, const uint64_t* seed, const Parts& to, const Device& device, RowsWithGaps rows = {}) {
  if (device.cuda) return cuda::encode(code, x.data, x.type, seed, to.codes, to.headers, device.stream, rows);
  if (rows.width > 0) return encode_rows(code, x, rows, *seed, to);
  const CpuKernels& kernels = best_cpu_kernel();
  const int top = (1 << code.levels.bits) - 1;
  encode_blocks(
      code.grid, x, [&](int64_t first, int64_t last) { kernels.measure(code, x, to.headers, first, last); },
      [&](int64_t b, Range r) { store_header(to.headers, code.header, b, make_header(r.low, r.high, !is_poisoned(r), top, code.header)); },
      [&](int64_t first, int64_t last) { kernels.encode(code, x, *seed, to.headers, to.codes, first, last); });
}

/// The code of values [first, last) alone.
BlockCode part_of(const BlockCode& code, int64_t first, int64_t last) {
  BlockCode part = code;
  part.grid = part_of(code.grid, first, last);
  return part;
}

void decode_block(const BlockCode& code, const Parts& from, Target x, int64_t first, int64_t last, const Device& device) {
  if (device.cuda) {
    return cuda::decode(part_of(code, first, last), codes_from(from.codes, code.levels.bits, first),
                        headers_from(code.grid, code.header, from.headers, first), x.data, x.type, device.stream);
  }
  const CpuKernels& kernels = best_cpu_kernel();
  for_chunks(last - first, kChunk,
             [&](int64_t begin, int64_t end) { kernels.decode(code, from.codes, from.headers, x, first + begin, first + end); });
}

// The side code.

/// Sums of every channel's off values, and their mean. The stretches that are summed depend on sizes, not on the number of threads.
class OffMeans {
 public:
  /// Stretches are whole chunks.
  OffMeans(const SideCode& code, int64_t chunk)
      : code_(code),
        stretch_(ceil_div(std::max({kLongestChunk, ceil_div(code.grid.values, 64), 4 * code.channels}), chunk) * chunk),
        width_(static_cast<size_t>(2 * code.channels)),
        sums_(static_cast<size_t>(ceil_div(code.grid.values, stretch_)) * width_) {}

  int64_t stretch() const { return stretch_; }

  /// Values of one stretch, those before them first.
  void add(Source x, const Channel* channels, int64_t first, int64_t last) {
    best_cpu_kernel().off_sums(code_, x, channels, sums_.data() + static_cast<size_t>(first / stretch_) * width_, first, last);
  }

  void store(Channel* channels) const {
    for (size_t c = 0; c < width_; c += 2) {
      double sum = 0, count = 0;
      for (size_t s = c; s < sums_.size(); s += width_) {
        sum += sums_[s];
        count += sums_[s + 1];
      }
      channels[c / 2].off_mean = count == 0 ? 0.0f : static_cast<float>(sum / count);
    }
  }

 private:
  const SideCode& code_;
  int64_t stretch_;
  size_t width_;
  std::vector<double> sums_;
};

void encode_side(const SideCode& code, Source x, const uint64_t* seed, const Parts& to, const Device& device) {
  if (device.cuda) {
    void* scratch = device.scratch(cuda::side_scratch_bytes(code));
    return cuda::side_encode(code, x.data, x.type, to.channels, seed, to.codes, to.headers, scratch, device.stream);
  }
  const CpuKernels& kernels = best_cpu_kernel();
  if (to.plane != nullptr) {
    const OffKey key = off_key(*seed);
    std::memcpy(to.plane, &key, sizeof(key));
  }
  const auto measure = [&](int64_t first, int64_t last) { kernels.side_measure(code, x, to.headers, first, last); };
  const auto encode = [&](int64_t first, int64_t last) {
    kernels.side_encode(code, x, to.channels, *seed, to.headers, to.codes, first, last);
  };
  const auto store = [&](int64_t b, Range r) {
    store_range(to.headers, code.header, b, make_range(r.low, r.high, !is_poisoned(r), code.header));
  };
  if (to.channels == nullptr || code.table.off != 1) return encode_blocks(code.grid, x, measure, store, encode);
  // Where every value has a channel of its own, a channel's sum is one value after another: summed beside the coding, chunk by chunk, it
  // costs no read of its own.
  const int64_t quantum = quantum_of(code.grid);
  const bool beside = code.inner == 1 && std::min(quantum, code.grid.values) <= kLongestChunk;
  const int64_t chunk = beside ? chunk_of(quantum) : 1;
  OffMeans means(code, chunk);
  for_chunks(code.grid.values, means.stretch(), [&](int64_t first, int64_t last) {
    if (!beside) return means.add(x, to.channels, first, last);
    for (int64_t i = first, end = 0; i < last; i = end) {
      end = std::min(i + chunk, last);
      measure(code.grid.block_of(i), first_block_after(code.grid, end));
      encode(i, end);
      means.add(x, to.channels, i, end);
    }
  });
  means.store(to.channels);
  if (!beside) encode_blocks(code.grid, x, measure, store, encode);
}

void decode_side(const SideCode& code, const Parts& from, Target x, int64_t first, int64_t last, const Device& device) {
  if (device.cuda) {
    SideCode part = code;
    part.grid = part_of(code.grid, first, last);
    part.plane.first_block = code.grid.block_of(first);
    return cuda::side_decode(part, codes_from(from.codes, code.table.bits, first), from.channels,
                             headers_from(code.grid, code.header, from.headers, first), x.data, x.type, device.stream);
  }
  const CpuKernels& kernels = best_cpu_kernel();
  for_chunks(last - first, kChunk, [&](int64_t begin, int64_t end) {
    kernels.side_decode(code, from.codes, from.channels, from.headers, x, first + begin, first + end);
  });
}

// DIVISION's two frequencies (docs/theory.md 6): window means in bf16, the rest block-coded; or one of the two alone.

/// The low part alone.
void encode_means(const LowPassShape& maps, Source x, uint16_t* means, const Device& device) {
  if (device.cuda) return cuda::low_pass_means(maps, x.data, x.type, means, device.stream);
  const int64_t map = maps.map_values();
  for_chunks(maps.maps * map, chunk_of(map), [&](int64_t first, int64_t last) {
    const auto rest = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(last - first));
    best_cpu_kernel().low_pass_split(maps, x, means, rest.get(), first / map, last / map);
  });
}

/// Splits and encodes a few maps at a time; where blocks and maps meet too seldom the rest of all maps stands beside x.
void encode_low_pass(const LowPassShape& maps, const BlockCode& code, Source x, const uint64_t* seed, const Parts& to,
                     const Device& device) {
  if (device.cuda) {
    void* scratch = device.scratch(cuda::low_pass_scratch_bytes(maps, code, x.data));
    return cuda::low_pass_encode(maps, code, x.data, x.type, seed, to.codes, to.headers, to.means, scratch, device.stream);
  }
  const CpuKernels& kernels = best_cpu_kernel();
  const int64_t values = code.grid.values, map = maps.map_values(), quantum = common_multiple(quantum_of(code.grid), map);
  const auto split = [&](void* rest, int64_t first, int64_t last) {
    kernels.low_pass_split(maps, x, to.means, static_cast<float*>(rest), first / map, last / map);
  };
  if (std::min(quantum, values) <= kLongestRest) return encode_made(code, DType::f32, chunk_of(quantum), *seed, to, split);
  auto* rest = static_cast<float*>(device.scratch(values * size_of(DType::f32)));
  for_chunks(values, chunk_of(map), [&](int64_t first, int64_t last) { split(rest + first, first, last); });
  encode_block(code, {rest, DType::f32}, seed, to, device);
}

void decode_means(const LowPassShape& maps, const uint16_t* means, Target x, int64_t first, int64_t last, const Device& device) {
  const int64_t map = maps.map_values();
  if (device.cuda) {
    LowPassShape part = maps;
    part.maps = (last - first) / map;
    return cuda::low_pass_spread(part, means + first / map * maps.windows(), x.data, x.type, device.stream);
  }
  for_chunks(last - first, chunk_of(map), [&](int64_t begin, int64_t end) {
    const auto rest = std::make_unique<float[]>(static_cast<size_t>(end - begin));
    best_cpu_kernel().low_pass_join(maps, means, rest.get(), x, (first + begin) / map, (first + end) / map);
  });
}

void decode_low_pass(const LowPassShape& maps, const BlockCode& code, const Parts& from, Target x, int64_t first, int64_t last,
                     const Device& device) {
  const int64_t map = maps.map_values();
  if (device.cuda) {
    LowPassShape part = maps;
    part.maps = (last - first) / map;
    return cuda::low_pass_decode(part, part_of(code, first, last), codes_from(from.codes, code.levels.bits, first),
                                 headers_from(code.grid, code.header, from.headers, first), from.means + first / map * maps.windows(),
                                 x.data, x.type, device.stream);
  }
  const CpuKernels& kernels = best_cpu_kernel();
  for_chunks(last - first, chunk_of(common_multiple(map, kGroup)), [&](int64_t begin, int64_t end) {
    const auto rest = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(end - begin));
    const Target target{rest.get(), DType::f32, first + begin};
    kernels.decode(code, from.codes, from.headers, target, first + begin, first + end);
    kernels.low_pass_join(maps, from.means, rest.get(), x, (first + begin) / map, (first + end) / map);
  });
}

}  // namespace

Parts parts_of(const CodecLayout& layout, void* bytes) {
  auto* base = static_cast<uint8_t*>(bytes);
  Channel* channels = layout.channels == 0 ? nullptr : reinterpret_cast<Channel*>(base + layout.at.channels);
  uint8_t* plane = layout.off_plane && layout.values > 0 ? base + layout.at.plane : nullptr;
  return {base, base + layout.at.headers, reinterpret_cast<uint16_t*>(base + layout.at.means), channels, plane};
}

Parts parts_to_write(const CodecLayout& layout, void* bytes, const Device& device) {
  Parts parts = parts_of(layout, bytes);
  if (layout.coding == Coding::low_pass && layout.part == Part::high)
    parts.means = static_cast<uint16_t*>(device.scratch(layout.maps.maps * layout.maps.windows() * 2));
  return parts;
}

SideCode side_code_of(const CodecLayout& layout, const Parts& parts) {
  SideCode code = layout.side;
  if (parts.plane != nullptr) code.plane = {parts.plane, code.grid.blocks(), off_slot_bytes(code.grid), 0};
  return code;
}

std::array<Interval, 3> gaps_of(const CodecLayout& layout) {
  if (layout.coding == Coding::keep) return {{{layout.values * size_of(layout.type), layout.at.channels}}};
  const bool side = layout.coding == Coding::side;
  const int bits = side ? layout.side.table.bits : layout.block.levels.bits;
  const HeaderType header = side ? layout.side.header : layout.block.header;
  const Interval plane{layout.at.plane, layout.off_plane ? layout.at.total : layout.at.plane};  // channels end at a multiple of 16
  return {{{code_bytes(layout.values, bits), layout.at.headers},
           {layout.at.headers + grid_of(layout).blocks() * header_bytes(header), layout.at.means},
           plane}};
}

void encode(const CodecLayout& layout, Source x, const uint64_t* seed, const Parts& to, const Device& device, RowsWithGaps rows) {
  switch (layout.coding) {
    case Coding::keep: break;
    case Coding::block: encode_block(layout.block, x, seed, to, device, rows); break;
    case Coding::side: encode_side(side_code_of(layout, to), x, seed, to, device); break;
    case Coding::low_pass:
      if (layout.part == Part::low) return encode_means(layout.maps, x, to.means, device);
      encode_low_pass(layout.maps, layout.block, x, seed, to, device);
      break;
  }
}

void decode(const CodecLayout& layout, const Parts& from, Target x, int64_t first, int64_t last, const Device& device) {
  switch (layout.coding) {
    case Coding::keep: break;
    case Coding::block: decode_block(layout.block, from, x, first, last, device); break;
    case Coding::side: decode_side(side_code_of(layout, from), from, x, first, last, device); break;
    case Coding::low_pass:
      if (layout.part == Part::low) return decode_means(layout.maps, from.means, x, first, last, device);
      if (layout.part == Part::high) return decode_block(layout.block, from, x, first, last, device);
      decode_low_pass(layout.maps, layout.block, from, x, first, last, device);
      break;
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

Interval decode_stretch(const CodecLayout& layout, int64_t first, int64_t last, bool cuda) {
  const int64_t step = decode_step(layout, cuda);
  return {first / step * step, last > layout.values - step ? layout.values : ceil_div(last, step) * step};
}

void encode_made(const BlockCode& code, DType type, int64_t chunk, uint64_t seed, const Parts& to, const MakeValues& make) {
  const CpuKernels& kernels = best_cpu_kernel();
  for_chunks(code.grid.values, chunk, [&](int64_t first, int64_t last) {
    const auto buffer = std::make_unique_for_overwrite<uint8_t[]>(static_cast<size_t>((last - first) * size_of(type)));
    make(buffer.get(), first, last);
    const Source made{buffer.get(), type, first};
    kernels.measure(code, made, to.headers, code.grid.block_of(first), first_block_after(code.grid, last));
    kernels.encode(code, made, seed, to.headers, to.codes, first, last);
  });
}

Grid part_of(const Grid& grid, int64_t first, int64_t last) {
  return {last - first, grid.block, grid.span == grid.values ? last - first : grid.span};
}

const uint8_t* headers_from(const Grid& grid, HeaderType type, const uint8_t* headers, int64_t first) {
  return headers + grid.block_of(first) * header_bytes(type);
}

const uint8_t* codes_from(const uint8_t* codes, int bits, int64_t first) { return codes + code_bytes(first, bits); }

}  // namespace satchel
