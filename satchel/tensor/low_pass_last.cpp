// The low-pass of channels_last maps: coded in the shape's order, read and written as they lie.
#include "satchel/kernels/cuda/low_pass_last.h"

#include <algorithm>
#include <memory>

#include "satchel/kernels/chunks.h"
#include "satchel/kernels/dispatch.h"
#include "satchel/tensor/coders.h"
#include "satchel/tensor/order.h"

namespace satchel {
namespace {

constexpr int64_t kMapsAtOnce = 16;          // channels read together: a whole line of the cache, of fp32
constexpr int64_t kMost = int64_t{1} << 18;  // values that one thread holds: 1 MiB of fp32

/// Maps [first, last) of a channels_last tensor of `channels`, `map` values each, one after the other; copy(map's place, x's place).
template <class Copy>
void for_values(int64_t channels, int64_t map, int64_t first, int64_t last, const Copy& copy) {
  for (int64_t m = first; m < last;) {
    const int64_t channel = m % channels, run = std::min(channels - channel, last - m);
    for (int64_t p = 0; p < map; ++p) {
      const int64_t pixel = (m / channels * map + p) * channels + channel, place = (m - first) * map + p;
      for (int64_t k = 0; k < run; ++k) copy(place + k * map, pixel + k);
    }
    m += run;
  }
}

/// Values of a chunk: whole maps, blocks and bytes; 0 where these meet too seldom.
int64_t chunk_for(const CodecLayout& layout, int64_t unit) {
  const int64_t map = layout.maps.map_values(), quantum = common_multiple(unit, map);
  if (quantum > kMost) return 0;
  return quantum * std::max<int64_t>(1, std::min(kMapsAtOnce * map, kMost) / quantum);
}

void encode_on_cpu(const CodecLayout& layout, const at::Tensor& x, uint64_t seed, const Parts& to, int64_t chunk) {
  const CpuKernels& kernels = best_cpu_kernel();
  const int64_t map = layout.maps.map_values(), channels = x.size(1);
  with_type(layout.type, [&](auto type) {
    const void* data = x.const_data_ptr();
    encode_made(layout.block, DType::f32, chunk, seed, to, [&](void* rest, int64_t first, int64_t last) {
      const auto lines = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(last - first));
      for_values(channels, map, first / map, last / map, [&](int64_t to_, int64_t from) { lines[to_] = load(data, type(), from); });
      kernels.low_pass_split(layout.maps, {lines.get(), DType::f32, first}, to.means, static_cast<float*>(rest), first / map, last / map);
    });
  });
}

void decode_on_cpu(const CodecLayout& layout, const Parts& from, const at::Tensor& x, int64_t first_map, int64_t chunk) {
  const CpuKernels& kernels = best_cpu_kernel();
  const int64_t map = layout.maps.map_values(), channels = x.size(1), origin = first_map * map;
  with_type(layout.type, [&](auto type) {
    void* data = x.data_ptr();
    for_chunks(x.numel(), chunk, [&](int64_t begin, int64_t end) {
      const auto lines = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(end - begin));
      const auto rest = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(end - begin));
      const int64_t first = origin + begin, last = origin + end;
      kernels.decode(layout.block, from.codes, from.headers, {rest.get(), DType::f32, first}, first, last);
      kernels.low_pass_join(layout.maps, from.means, rest.get(), {lines.get(), DType::f32, first}, first / map, last / map);
      for_values(channels, map, begin / map, end / map, [&](int64_t from_, int64_t to) { store(data, type(), to, lines[from_]); });
    });
  });
}

/// Maps of x's samples alone, from `first` on.
LowPassShape maps_of(const CodecLayout& layout, const at::Tensor& x) {
  LowPassShape maps = layout.maps;
  maps.maps = x.numel() / maps.map_values();
  return maps;
}

bool decode_directly(const CodecLayout& layout, const Parts& from, const at::Tensor& x, int64_t first, const Place& place) {
  const int64_t map = layout.maps.map_values(), begin = first * map, end = begin + x.numel();
  if (layout.part != Part::both || !is_channels_last(x)) return false;
  if (!place.cuda()) {
    const int64_t chunk = chunk_for(layout, kGroup);
    if (begin % kGroup != 0 || chunk == 0) return false;
    decode_on_cpu(layout, from, x, first, chunk);
    return true;
  }
  const LowPassShape maps = maps_of(layout, x);
  if (begin % kGroup != 0 || layout.block.grid.block != map ||
      !cuda::low_pass_last_decodes(maps, layout.block, x.size(1), x.data_ptr(), layout.type)) {
    return false;
  }
  BlockCode part = layout.block;
  part.grid = part_of(part.grid, begin, end);
  cuda::low_pass_last_decode(maps, part, x.size(1), codes_from(from.codes, part.levels.bits, begin),
                             headers_from(layout.block.grid, part.header, from.headers, begin), from.means + first * maps.windows(),
                             x.data_ptr(), layout.type, place.stream());
  return true;
}

}  // namespace

void encode_low_pass_last(const CodecLayout& layout, const at::Tensor& x, const at::Tensor& seed, const at::Tensor& bytes,
                          const Place& place) {
  if (layout.part == Part::low || !is_channels_last(x)) return encode(layout, flat(x.contiguous()), seed, bytes, place);
  const void* data = x.const_data_ptr();
  const int64_t chunk = place.cuda() ? 0 : chunk_for(layout, quantum_of(layout.block.grid));
  const bool direct = place.cuda() ? cuda::low_pass_last_encodes(layout.maps, layout.block, x.size(1), data, layout.type) : chunk > 0;
  if (!direct) return encode(layout, flat(x.contiguous()), seed, bytes, place);
  zero_gaps(layout, bytes);
  Scratch scratch(bytes);
  const Parts to = parts_to_write(layout, bytes.data_ptr(), scratch.at(place));
  if (place.cuda()) {
    void* room = scratch(cuda::low_pass_last_scratch_bytes(layout.maps, x.size(1), layout.type));
    cuda::low_pass_last_encode(layout.maps, layout.block, x.size(1), data, layout.type, seed_pointer(seed), to.codes, to.headers, to.means,
                               room, place.stream());
  } else {
    encode_on_cpu(layout, x, seed_value(seed), to, chunk);
  }
}

void decode_low_pass_last(const CodecLayout& layout, const at::Tensor& bytes, const at::Tensor& x, int64_t first, const Place& place) {
  if (decode_directly(layout, parts_of(layout, bytes), x, first, place)) return;
  const int64_t begin = first * layout.maps.map_values();
  x.copy_(decoded(layout, bytes, x.scalar_type(), begin, begin + x.numel(), place).view(x.sizes()));
}

}  // namespace satchel
