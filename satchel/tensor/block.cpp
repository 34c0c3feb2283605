// The plain block code of a whole tensor.
#include "satchel/tensor/chunks.h"
#include "satchel/tensor/coders.h"

namespace satchel {

void encode_block(const CodecLayout& layout, Source x, const at::Tensor& seed, const at::Tensor& bytes, const Place& place) {
  const BlockCode& code = layout.block;
  const Parts to = parts_of(layout, bytes);
  if (place.cuda()) {
    cuda::encode(code, x.data, x.type, seed_pointer(seed), to.codes, to.headers, place.stream());
    return;
  }
  const CpuKernels& kernels = best_cpu_kernel();
  const uint64_t number = seed_value(seed);
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
                   [&](int64_t first, int64_t last) { kernels.encode(code, x, number, to.headers, to.codes, first, last); });
}

void decode_block(const CodecLayout& layout, const Parts& from, Target x, int64_t first, int64_t last, const Place& place) {
  const BlockCode& code = layout.block;
  if (place.cuda()) {
    BlockCode part = code;
    part.grid = part_of(code.grid, first, last);
    cuda::decode(part, codes_from(from.codes, code.levels.bits, first), headers_from(code.grid, code.header, from.headers, first), x.data,
                 x.type, place.stream());
    return;
  }
  const CpuKernels& kernels = best_cpu_kernel();
  for_chunks(last - first, kChunk,
             [&](int64_t begin, int64_t end) { kernels.decode(code, from.codes, from.headers, x, first + begin, first + end); });
}

}  // namespace satchel
