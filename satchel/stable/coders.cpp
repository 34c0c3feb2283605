#include "satchel/stable/coders.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "satchel/kernels/cuda/low_pass_last.h"
#include "satchel/kernels/slope.h"
#include "satchel/tensor/chunks.h"

namespace satchel::stable {
namespace {

constexpr int64_t kLongestRest = int64_t{1} << 18;  // values of a low-pass's rest that one thread holds: 1 MiB of fp32

struct Parts {
  uint8_t* codes;
  uint8_t* headers;
  uint16_t* means;
  Channel* channels;  // null where there are none
  uint8_t* plane;     // of off values; null where there is none
};

Parts parts_of(const CodecLayout& layout, const Tensor& bytes) {
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

Tensor scratch_of(const Tensor& like, int64_t bytes) {
  return torch::stable::new_empty(like, {bytes}, torch::headeronly::ScalarType::Byte);
}

const uint64_t* seed_pointer(const Tensor& seed) { return static_cast<const uint64_t*>(seed.const_data_ptr()); }

void encode_block(const BlockCode& code, Source x, uint64_t seed, const Parts& to) {
  const CpuKernels& kernels = best_cpu_kernel();
  const int top = (1 << code.levels.bits) - 1;
  const bool is_long = has_long_blocks(code.grid);
  const auto measure = [&](int64_t first, int64_t last) {
    if (!is_long) return kernels.measure(code, x, to.headers, first, last);
    for (int64_t b = first; b < last; ++b) {
      const Range r = measure_long_block(code.grid, x, b);
      store_header(to.headers, code.header, b, make_header(r.low, r.high, !is_poisoned(r), top, code.header));
    }
  };
  encode_in_chunks(code.grid, measure,
                   [&](int64_t first, int64_t last) { kernels.encode(code, x, seed, to.headers, to.codes, first, last); });
}

/// Values that make(buffer, first, last) puts into a buffer, a chunk at a time, which stays in the core's cache.
template <class Make>
void encode_made(const BlockCode& code, DType type, uint64_t seed, const Parts& to, const Make& make) {
  const CpuKernels& kernels = best_cpu_kernel();
  const int64_t values = code.grid.values;
  for_chunks(values, chunk_of(quantum_of(code.grid)), [&](int64_t first, int64_t last) {
    const auto buffer = std::make_unique_for_overwrite<uint8_t[]>(static_cast<size_t>((last - first) * size_of(type)));
    make(buffer.get(), first, last);
    const Source chunk{buffer.get(), type, first};
    kernels.measure(code, chunk, to.headers, code.grid.block_of(first), last == values ? code.grid.blocks() : code.grid.block_of(last));
    kernels.encode(code, chunk, seed, to.headers, to.codes, first, last);
  });
}

void encode_rows(const BlockCode& code, Source x, RowsWithGaps rows, uint64_t seed, const Parts& to) {
  const int64_t size = size_of(x.type);
  encode_made(code, x.type, seed, to, [&](uint8_t* buffer, int64_t first, int64_t last) {
    for (int64_t i = first, count = 0; i < last; i += count) {
      const int64_t row = i / rows.width, column = i % rows.width;
      count = std::min(rows.width - column, last - i);
      const auto* from = static_cast<const uint8_t*>(x.data) + (row * rows.pitch + column) * size;
      std::memcpy(buffer + (i - first) * size, from, static_cast<size_t>(count * size));
    }
  });
}

/// Mean of every channel's off values. The stretches that are summed depend on sizes, not on the number of threads.
void set_off_means(const SideCode& code, Source x, Channel* channels) {
  const CpuKernels& kernels = best_cpu_kernel();
  const int64_t values = code.grid.values;
  const int64_t stretch = std::max({kLongestChunk, ceil_div(values, 64), 4 * code.channels});
  const auto width = static_cast<size_t>(2 * code.channels);
  std::vector<double> sums(static_cast<size_t>(ceil_div(values, stretch)) * width);
  for_chunks(values, stretch, [&](int64_t first, int64_t last) {
    kernels.off_sums(code, x, channels, sums.data() + static_cast<size_t>(first / stretch) * width, first, last);
  });
  for (size_t c = 0; c < width; c += 2) {
    double sum = 0, count = 0;
    for (size_t s = c; s < sums.size(); s += width) {
      sum += sums[s];
      count += sums[s + 1];
    }
    channels[c / 2].off_mean = count == 0 ? 0.0f : static_cast<float>(sum / count);
  }
}

void encode_side(const SideCode& code, Source x, uint64_t seed, const Parts& to) {
  const CpuKernels& kernels = best_cpu_kernel();
  if (to.plane != nullptr) {
    const OffKey key = off_key(seed);
    std::memcpy(to.plane, &key, sizeof(key));
  }
  const bool is_long = has_long_blocks(code.grid);
  const auto measure = [&](int64_t first, int64_t last) {
    if (!is_long) return kernels.side_measure(code, x, to.headers, first, last);
    for (int64_t b = first; b < last; ++b) {
      const Range r = measure_long_block(code.grid, x, b);
      store_range(to.headers, code.header, b, make_range(r.low, r.high, !is_poisoned(r), code.header));
    }
  };
  if (to.channels != nullptr && code.table.off == 1) set_off_means(code, x, to.channels);
  encode_in_chunks(code.grid, measure, [&](int64_t first, int64_t last) {
    kernels.side_encode(code, x, to.channels, seed, to.headers, to.codes, first, last);
  });
}

/// Splits, measures and encodes a few maps at a time; where blocks and maps meet too seldom the rest of all maps stands beside x.
void encode_low_pass(const CodecLayout& layout, Source x, uint64_t seed, const Parts& to) {
  const CpuKernels& kernels = best_cpu_kernel();
  const BlockCode& code = layout.block;
  const int64_t map = layout.maps.map_values();
  const bool codes = layout.part != Part::low;
  const int64_t quantum = codes ? common_multiple(quantum_of(code.grid), map) : map;
  const bool at_once = std::min(quantum, layout.values) > kLongestRest;
  const auto all = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(at_once ? layout.values : 0));
  for_chunks(layout.values, chunk_of(at_once ? map : quantum), [&](int64_t first, int64_t last) {
    const auto own = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(at_once ? 0 : last - first));
    float* rest = at_once ? all.get() + first : own.get();
    kernels.low_pass_split(layout.maps, x, to.means, rest, first / map, last / map);
    if (at_once || !codes) return;
    const Source source{rest, DType::f32, first};
    const int64_t end = last == layout.values ? code.grid.blocks() : code.grid.block_of(last);
    kernels.measure(code, source, to.headers, code.grid.block_of(first), end);
    kernels.encode(code, source, seed, to.headers, to.codes, first, last);
  });
  if (at_once && codes) encode_block(code, {all.get(), DType::f32}, seed, to);
}

void decode_low_pass(const CodecLayout& layout, const Parts& from, Target x) {
  const CpuKernels& kernels = best_cpu_kernel();
  const int64_t map = layout.maps.map_values();
  for_chunks(layout.values, chunk_of(common_multiple(map, kGroup)), [&](int64_t first, int64_t last) {
    const auto rest = std::make_unique<float[]>(static_cast<size_t>(last - first));
    const Target target{rest.get(), DType::f32, first};
    if (layout.part == Part::both) kernels.decode(layout.block, from.codes, from.headers, target, first, last);
    kernels.low_pass_join(layout.maps, from.means, rest.get(), x, first / map, last / map);
  });
}

void encode_on_cuda(const CodecLayout& layout, const void* x, const Tensor& seed, const Parts& to, const Tensor& bytes, RowsWithGaps rows,
                    cuda::StreamHandle stream) {
  const uint64_t* number = seed_pointer(seed);
  if (layout.coding == Coding::block) {
    cuda::encode(layout.block, x, layout.type, number, to.codes, to.headers, stream, rows);
  } else if (layout.coding == Coding::side) {
    const SideCode code = side_code_of(layout, to);
    const Tensor scratch = scratch_of(bytes, cuda::side_scratch_bytes(code));
    cuda::side_encode(code, x, layout.type, to.channels, number, to.codes, to.headers, scratch.data_ptr(), stream);
  } else if (layout.part == Part::low) {
    cuda::low_pass_means(layout.maps, x, layout.type, to.means, stream);
  } else {
    const Tensor scratch = scratch_of(bytes, cuda::low_pass_scratch_bytes(layout.maps, layout.block, x));
    cuda::low_pass_encode(layout.maps, layout.block, x, layout.type, number, to.codes, to.headers, to.means, scratch.data_ptr(), stream);
  }
}

void decode_on_cuda(const CodecLayout& layout, const Parts& from, void* x, cuda::StreamHandle stream) {
  if (layout.coding == Coding::side) {
    cuda::side_decode(side_code_of(layout, from), from.codes, from.channels, from.headers, x, layout.type, stream);
  } else if (layout.coding == Coding::block || layout.part == Part::high) {
    cuda::decode(layout.block, from.codes, from.headers, x, layout.type, stream);
  } else if (layout.part == Part::low) {
    cuda::low_pass_spread(layout.maps, from.means, x, layout.type, stream);
  } else {
    cuda::low_pass_decode(layout.maps, layout.block, from.codes, from.headers, from.means, x, layout.type, stream);
  }
}

Target target_of(const CodecLayout& layout, void* x) {
  constexpr int64_t kCaches = int64_t{32} << 20;  // what is larger is written past the caches: nothing of it would still be there
  return {x, layout.type, 0, layout.values * size_of(layout.type) > kCaches};
}

void decode_blocks(const CodecLayout& layout, const Parts& from, void* x) {
  const Target target = target_of(layout, x);
  const CpuKernels& kernels = best_cpu_kernel();
  for_chunks(layout.values, kChunk,
             [&](int64_t first, int64_t last) { kernels.decode(layout.block, from.codes, from.headers, target, first, last); });
}

void zero(const Tensor& bytes, int64_t from, int64_t to) {
  if (from >= to) return;
  if (!bytes.is_cuda()) {
    std::memset(static_cast<uint8_t*>(bytes.data_ptr()) + from, 0, static_cast<size_t>(to - from));
    return;
  }
  Tensor part = torch::stable::narrow(const_cast<Tensor&>(bytes), 0, from, to - from);
  torch::stable::zero_(part);
}

}  // namespace

void zero_gaps(const CodecLayout& layout, const Tensor& bytes) {
  const bool side = layout.coding == Coding::side;
  const int bits = side ? layout.side.table.bits : layout.block.levels.bits;
  const HeaderType header = side ? layout.side.header : layout.block.header;
  zero(bytes, code_bytes(layout.values, bits), layout.at.headers);
  zero(bytes, layout.at.headers + grid_of(layout).blocks() * header_bytes(header), layout.at.means);
  if (layout.off_plane) zero(bytes, layout.at.plane, layout.at.total);
}

void encode(const CodecLayout& layout, const void* x, const Tensor& seed, const Tensor& bytes, const Place& place, RowsWithGaps rows) {
  Parts to = parts_of(layout, bytes);
  const bool own_means = layout.coding == Coding::low_pass && layout.part == Part::high;  // the means are made, but not kept
  const Tensor means = own_means ? scratch_of(bytes, layout.maps.maps * layout.maps.windows() * 2) : bytes;
  if (own_means) to.means = static_cast<uint16_t*>(means.data_ptr());
  if (place.cuda()) return encode_on_cuda(layout, x, seed, to, bytes, rows, place.stream());
  const Source source{x, layout.type};
  const uint64_t number = *seed_pointer(seed);
  switch (layout.coding) {
    case Coding::keep: break;
    case Coding::block:
      if (rows.width > 0) return encode_rows(layout.block, source, rows, number, to);
      return encode_block(layout.block, source, number, to);
    case Coding::side: return encode_side(side_code_of(layout, to), source, number, to);
    case Coding::low_pass: return encode_low_pass(layout, source, number, to);
  }
}

void decode(const CodecLayout& layout, const Tensor& bytes, void* x, const Place& place) {
  const Parts from = parts_of(layout, bytes);
  if (place.cuda()) return decode_on_cuda(layout, from, x, place.stream());
  const Target target = target_of(layout, x);
  const CpuKernels& kernels = best_cpu_kernel();
  if (layout.coding == Coding::side) {
    const SideCode code = side_code_of(layout, from);
    for_chunks(layout.values, kChunk, [&](int64_t first, int64_t last) {
      kernels.side_decode(code, from.codes, from.channels, from.headers, target, first, last);
    });
  } else if (layout.coding == Coding::low_pass && layout.part != Part::high) {
    decode_low_pass(layout, from, target);
  } else {
    decode_blocks(layout, from, x);
  }
}

void encode_exp(const CodecLayout& layout, const float* x, const Tensor& seed, const Tensor& bytes, const Place& place) {
  const Parts to = parts_of(layout, bytes);
  if (place.cuda()) return cuda::encode_exp(layout.block, x, seed_pointer(seed), to.codes, to.headers, place.stream());
  encode_made(layout.block, DType::f32, *seed_pointer(seed), to, [&](uint8_t* buffer, int64_t first, int64_t last) {
    std::transform(x + first, x + last, reinterpret_cast<float*>(buffer), [](float v) { return std::exp(v); });
  });
}

void decode_log(const CodecLayout& layout, const Tensor& bytes, float* x, const Place& place) {
  const Parts from = parts_of(layout, bytes);
  if (place.cuda()) return cuda::decode_log(layout.block, from.codes, from.headers, x, place.stream());
  const CpuKernels& kernels = best_cpu_kernel();
  for_chunks(layout.values, kChunk, [&](int64_t first, int64_t last) {
    kernels.decode(layout.block, from.codes, from.headers, {x, DType::f32}, first, last);
    std::transform(x + first, x + last, x + first, [](float v) { return std::log(v); });
  });
}

void decode_table(const Tensor& codes, const Tensor& table, int bits, int64_t values, void* x, DType type, const Place& place) {
  if (values == 0) return;
  const auto* from = static_cast<const uint8_t*>(codes.const_data_ptr());
  const auto* numbers = static_cast<const float*>(table.const_data_ptr());
  if (place.cuda()) return cuda::table_decode(from, values, bits, numbers, x, type, place.stream());
  for_chunks(values, kChunk, [&](int64_t first, int64_t last) { table_decode(from, bits, numbers, x, type, first, last); });
}

SideCode bound_side_code(const CodecLayout& layout, const Tensor& bytes) { return side_code_of(layout, parts_of(layout, bytes)); }

int64_t part_step(const CodecLayout& layout, const Place& place) {
  if (!place.cuda()) return kGroup;
  const int64_t step = quantum_of(grid_of(layout));
  const bool channels = layout.coding == Coding::side && layout.side.channels > 1;
  return channels ? common_multiple(step, layout.side.channels * layout.side.inner) : step;
}

void decode_part(const CodecLayout& layout, const Tensor& bytes, void* x, DType type, int64_t first, int64_t last, const Place& place) {
  if (first >= last) return;
  const Parts from = parts_of(layout, bytes);
  const bool side = layout.coding == Coding::side;
  if (place.cuda()) {
    const Grid& grid = grid_of(layout);
    const Grid part{last - first, grid.block, grid.span == grid.values ? last - first : grid.span};
    const int bits = side ? layout.side.table.bits : layout.block.levels.bits;
    const uint8_t* codes = from.codes + code_bytes(first, bits);
    const uint8_t* headers = from.headers + grid.block_of(first) * header_bytes(side ? layout.side.header : layout.block.header);
    if (side) {
      SideCode code = side_code_of(layout, from);
      code.grid = part;
      code.plane.first_block = grid.block_of(first);
      return cuda::side_decode(code, codes, from.channels, headers, x, type, place.stream());
    }
    BlockCode code = layout.block;
    code.grid = part;
    return cuda::decode(code, codes, headers, x, type, place.stream());
  }
  const CpuKernels& kernels = best_cpu_kernel();
  const SideCode code = side ? side_code_of(layout, from) : SideCode{};
  const Target target{x, type, first};
  for_chunks(last - first, kChunk, [&](int64_t begin, int64_t end) {
    if (side) {
      kernels.side_decode(code, from.codes, from.channels, from.headers, target, first + begin, first + end);
    } else {
      kernels.decode(layout.block, from.codes, from.headers, target, first + begin, first + end);
    }
  });
}

}  // namespace satchel::stable
