// Integers in the fewest bits, in the same little-endian bit stream as codes: 8 values are `bits` whole bytes.
#include <algorithm>
#include <cstring>

#include "satchel/kernels/cpu/cpu.h"

namespace satchel {

void narrow(const int64_t* x, int64_t least, int bits, uint8_t* codes, int64_t first, int64_t last) {
  uint8_t* out = codes + first / 8 * bits;
  unsigned __int128 pending = 0;  // up to 7 bits left over and one value
  int held = 0;
  for (int64_t i = first; i < last; ++i) {
    pending |= static_cast<unsigned __int128>(static_cast<uint64_t>(x[i]) - static_cast<uint64_t>(least)) << held;
    for (held += bits; held >= 8; held -= 8, pending >>= 8) *out++ = static_cast<uint8_t>(pending);
  }
  if (held > 0) *out = static_cast<uint8_t>(pending);
}

void widen(const uint8_t* codes, int64_t least, int bits, int64_t* x, int64_t first, int64_t last) {
  const uint8_t* in = codes + first / 8 * bits;
  const uint64_t mask = bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
  unsigned __int128 pending = 0;
  int held = 0;
  for (int64_t i = first; i < last; ++i) {
    for (; held < bits; held += 8) pending |= static_cast<unsigned __int128>(*in++) << held;
    x[i] = static_cast<int64_t>((static_cast<uint64_t>(pending) & mask) + static_cast<uint64_t>(least));
    pending >>= bits;
    held -= bits;
  }
}

}  // namespace satchel
