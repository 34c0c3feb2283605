// Packs a tensor into two bits a value, unpacks it, and prints what that saved and what it cost.
#include <ATen/ATen.h>

#include <cstdio>

#include "satchel/tensor/pack.h"

int main() {
  const at::Tensor x = at::randn({16384, 256});
  const satchel::CodecSpec spec = satchel::parse_spec("actnn,levels=optimal");  // 2 bits, blocks of 256 values

  const satchel::Packed packed = satchel::pack(x, spec, /*seed=*/1);
  const at::Tensor back = satchel::unpack(packed);  // same shape, dtype, strides and device as x

  const int64_t before = x.numel() * x.element_size(), after = satchel::saved_bytes(packed);
  const double error = ((back - x).norm() / x.norm()).item<double>(), bias = (back - x).mean().item<double>();
  std::printf("%lld bytes packed into %lld: %.1f times smaller\n", static_cast<long long>(before), static_cast<long long>(after),
              static_cast<double>(before) / static_cast<double>(after));
  std::printf("relative error %.3f, mean error %+.5f\n", error, bias);
  return error < 1 ? 0 : 1;
}
