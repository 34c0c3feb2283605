// A program elsewhere: what `find_package(Satchel)` and one header must be enough for.
#include <ATen/ops/randn.h>
#include <satchel/satchel.h>

#include <cstdio>

int main() {
  const at::Tensor x = at::randn({1024, 256});
  const satchel::Packed packed = satchel::pack(x, satchel::CodecSpec{}, /*seed=*/1);
  if (satchel::unpack(packed).sizes() != x.sizes()) return 1;

  const satchel::SavePolicy saving{satchel::parse_method("satchel"), "layer"};
  satchel::nn::Linear layer(torch::nn::LinearOptions(256, 16), saving);
  const at::Tensor y = layer->forward(x);
  int64_t kept = 0;
  for (const satchel::SavedTensor& saved : satchel::saved_tensors(y)) kept += saved.bytes;
  y.sum().backward();
  std::printf("%lld and %lld bytes instead of %lld\n", static_cast<long long>(satchel::saved_bytes(packed)), static_cast<long long>(kept),
              static_cast<long long>(x.nbytes()));
  return layer->weight.grad().defined() && kept > 0 && kept < static_cast<int64_t>(x.nbytes()) ? 0 : 1;
}
