// The side code of a whole tensor.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "satchel/tensor/chunks.h"
#include "satchel/tensor/coders.h"

namespace satchel {
namespace {

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

}  // namespace

void encode_side(const CodecLayout& layout, Source x, const at::Tensor& seed, const at::Tensor& bytes, const Place& place) {
  const Parts to = parts_of(layout, bytes);
  const SideCode code = side_code_of(layout, to);
  if (place.cuda()) {
    const at::Tensor scratch = at::empty({cuda::side_scratch_bytes(code)}, bytes.options());
    cuda::side_encode(code, x.data, x.type, to.channels, seed_pointer(seed), to.codes, to.headers, scratch.data_ptr(), place.stream());
    return;
  }
  const CpuKernels& kernels = best_cpu_kernel();
  const uint64_t number = seed_value(seed);
  if (to.plane != nullptr) {
    const OffKey key = off_key(number);
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
    kernels.side_encode(code, x, to.channels, number, to.headers, to.codes, first, last);
  });
}

void decode_side(const CodecLayout& layout, const Parts& from, Target x, int64_t first, int64_t last, const Place& place) {
  const SideCode code = side_code_of(layout, from);
  if (place.cuda()) {
    SideCode part = code;
    part.grid = part_of(code.grid, first, last);
    part.plane.first_block = code.grid.block_of(first);
    cuda::side_decode(part, codes_from(from.codes, code.table.bits, first), from.channels,
                      headers_from(code.grid, code.header, from.headers, first), x.data, x.type, place.stream());
    return;
  }
  const CpuKernels& kernels = best_cpu_kernel();
  for_chunks(last - first, kChunk, [&](int64_t begin, int64_t end) {
    kernels.side_decode(code, from.codes, from.channels, from.headers, x, first + begin, first + end);
  });
}

}  // namespace satchel
