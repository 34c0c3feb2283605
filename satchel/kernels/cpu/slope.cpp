// Codes of slopes on the CPU; the reference of the CUDA kernels.
#include "satchel/kernels/slope.h"

#include "satchel/core/layout.h"
#include "satchel/kernels/dispatch.h"

namespace satchel {
namespace {

template <SlopeOf kind>
void encode_kind(const void* x, DType type, const float* levels, int bits, uint64_t seed, uint8_t* codes, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; i += kGroup) {
    const Words words = noise_group(seed, Stream::rounding, static_cast<uint64_t>(i / kGroup));
    const int count = static_cast<int>(last - i < kGroup ? last - i : kGroup);
    uint64_t eight = 0;
    for (int j = 0; j < count; ++j) {
      const float d = slope<kind>(load(x, type, i + j));
      eight |= static_cast<uint64_t>(level_code(d, levels, bits, noise_of(words, j))) << (j * bits);
    }
    const int64_t bytes = code_bytes(count, bits);
    for (int64_t k = 0; k < bytes; ++k) codes[i / kGroup * bits + k] = static_cast<uint8_t>(eight >> (8 * k));
  }
}

}  // namespace

void slope_encode(SlopeOf kind, const void* x, DType type, const float* levels, int bits, uint64_t seed, uint8_t* codes, int64_t first,
                  int64_t last) {
  switch (kind) {
    case SlopeOf::gelu: return encode_kind<SlopeOf::gelu>(x, type, levels, bits, seed, codes, first, last);
    case SlopeOf::gelu_tanh: return encode_kind<SlopeOf::gelu_tanh>(x, type, levels, bits, seed, codes, first, last);
    case SlopeOf::silu: return encode_kind<SlopeOf::silu>(x, type, levels, bits, seed, codes, first, last);
    case SlopeOf::mish: return encode_kind<SlopeOf::mish>(x, type, levels, bits, seed, codes, first, last);
  }
}

void table_decode(const uint8_t* codes, int bits, const float* table, void* x, DType type, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) store(x, type, i, table[get_code(codes, bits, i)]);
}

}  // namespace satchel
