// A program elsewhere that packs a tensor: what `find_package(Satchel)` must be enough for.
#include <ATen/ops/randn.h>
#include <satchel/tensor/pack.h>

#include <cstdio>

int main() {
  const at::Tensor x = at::randn({1024, 256});
  const satchel::Packed packed = satchel::pack(x, satchel::CodecSpec{}, /*seed=*/1);
  std::printf("%lld bytes instead of %lld\n", static_cast<long long>(satchel::saved_bytes(packed)), static_cast<long long>(x.nbytes()));
  return satchel::unpack(packed).sizes() == x.sizes() ? 0 : 1;
}
