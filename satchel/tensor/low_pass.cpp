// DIVISION's two frequencies (theory.md 6): window means in bf16, the rest block-coded; or one of the two alone.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <memory>

#include "satchel/kernels/cuda/low_pass_last.h"
#include "satchel/tensor/chunks.h"
#include "satchel/tensor/coders.h"

namespace satchel {
namespace {

constexpr int64_t kLongestRest = int64_t{1} << 18;  // values of the rest that one thread holds: 1 MiB of fp32

/// Splits, measures and encodes a few maps at a time; the rest of a few maps is all that stands beside x.
void encode_by_maps(const CodecLayout& layout, Source x, uint64_t seed, const Parts& to, int64_t quantum) {
  const CpuKernels& kernels = best_cpu_kernel();
  const BlockCode& code = layout.block;
  const int64_t map = layout.maps.map_values();
  for_chunks(layout.values, chunk_of(quantum), [&](int64_t first, int64_t last) {
    const auto rest = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(last - first));
    kernels.low_pass_split(layout.maps, x, to.means, rest.get(), first / map, last / map);
    const Source source{rest.get(), DType::f32, first};
    const int64_t end = last == layout.values ? code.grid.blocks() : code.grid.block_of(last);
    kernels.measure(code, source, to.headers, code.grid.block_of(first), end);
    kernels.encode(code, source, seed, to.headers, to.codes, first, last);
  });
}

/// For blocks and maps that meet too seldom: the rest of all maps stands beside x, in fp32.
void encode_at_once(const CodecLayout& layout, Source x, const at::Tensor& seed, const at::Tensor& bytes, const Parts& to,
                    const Place& place) {
  const at::Tensor rest = at::empty({layout.values}, bytes.options().dtype(at::kFloat));
  const int64_t map = layout.maps.map_values();
  const CpuKernels& kernels = best_cpu_kernel();
  auto* out = rest.mutable_data_ptr<float>();
  for_chunks(layout.values, chunk_of(map),
             [&](int64_t first, int64_t last) { kernels.low_pass_split(layout.maps, x, to.means, out + first, first / map, last / map); });
  encode_block(layout, {out, DType::f32}, seed, bytes, place);
}

/// The low part alone.
void encode_means(const CodecLayout& layout, Source x, uint16_t* means, const Place& place) {
  if (place.cuda()) return cuda::low_pass_means(layout.maps, x.data, x.type, means, place.stream());
  const int64_t map = layout.maps.map_values();
  for_chunks(layout.values, chunk_of(map), [&](int64_t first, int64_t last) {
    const auto rest = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(last - first));
    best_cpu_kernel().low_pass_split(layout.maps, x, means, rest.get(), first / map, last / map);
  });
}

void decode_means(const CodecLayout& layout, const uint16_t* means, Target x, int64_t first, int64_t last, const Place& place) {
  const int64_t map = layout.maps.map_values();
  if (place.cuda()) {
    LowPassShape maps = layout.maps;
    maps.maps = (last - first) / map;
    return cuda::low_pass_spread(maps, means + first / map * maps.windows(), x.data, x.type, place.stream());
  }
  for_chunks(last - first, chunk_of(map), [&](int64_t begin, int64_t end) {
    const auto rest = std::make_unique<float[]>(static_cast<size_t>(end - begin));
    best_cpu_kernel().low_pass_join(layout.maps, means, rest.get(), x, (first + begin) / map, (first + end) / map);
  });
}

}  // namespace

Parts low_pass_parts(const CodecLayout& layout, const at::Tensor& bytes, at::Tensor& own) {
  Parts parts = parts_of(layout, bytes);
  if (layout.part != Part::high) return parts;
  own = at::empty({layout.maps.maps * layout.maps.windows() * 2}, bytes.options());
  parts.means = reinterpret_cast<uint16_t*>(own.data_ptr());
  return parts;
}

void encode_low_pass(const CodecLayout& layout, Source x, const at::Tensor& seed, const at::Tensor& bytes, const Place& place) {
  at::Tensor own;
  const Parts to = low_pass_parts(layout, bytes, own);
  if (layout.part == Part::low) return encode_means(layout, x, to.means, place);
  if (place.cuda()) {
    const at::Tensor scratch = at::empty({cuda::low_pass_scratch_bytes(layout.maps, layout.block, x.data)}, bytes.options());
    cuda::low_pass_encode(layout.maps, layout.block, x.data, x.type, seed_pointer(seed), to.codes, to.headers, to.means, scratch.data_ptr(),
                          place.stream());
    return;
  }
  const int64_t quantum = common_multiple(quantum_of(layout.block.grid), layout.maps.map_values());
  if (std::min(quantum, layout.values) <= kLongestRest) {
    encode_by_maps(layout, x, seed_value(seed), to, quantum);
  } else {
    encode_at_once(layout, x, seed, bytes, to, place);
  }
}

void decode_low_pass(const CodecLayout& layout, const Parts& from, Target x, int64_t first, int64_t last, const Place& place) {
  if (layout.part == Part::low) return decode_means(layout, from.means, x, first, last, place);
  if (layout.part == Part::high) return decode_block(layout, from, x, first, last, place);
  const BlockCode& code = layout.block;
  const int64_t map = layout.maps.map_values();
  if (place.cuda()) {
    LowPassShape maps = layout.maps;
    maps.maps = (last - first) / map;
    BlockCode part = code;
    part.grid = part_of(code.grid, first, last);
    cuda::low_pass_decode(maps, part, codes_from(from.codes, code.levels.bits, first),
                          headers_from(code.grid, code.header, from.headers, first), from.means + first / map * maps.windows(), x.data,
                          x.type, place.stream());
    return;
  }
  const CpuKernels& kernels = best_cpu_kernel();
  for_chunks(last - first, chunk_of(common_multiple(map, kGroup)), [&](int64_t begin, int64_t end) {
    const auto rest = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(end - begin));
    const Target target{rest.get(), DType::f32, first + begin};
    kernels.decode(code, from.codes, from.headers, target, first + begin, first + end);
    kernels.low_pass_join(layout.maps, from.means, rest.get(), x, (first + begin) / map, (first + end) / map);
  });
}

}  // namespace satchel
