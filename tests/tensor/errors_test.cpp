// Every rule that a public function checks, and how the error reads.
#include "reference.h"
#include "satchel/tensor/project.h"

namespace satchel {
namespace {

using reference::expect_error;
using reference::normal;

TEST(Pack, BadInputIsNamed) {
  const at::Tensor x = normal({4, 4}, 20);
  const CodecSpec spec;
  for (const at::ScalarType type : {at::kInt, at::kLong, at::kBool, at::kByte, at::kDouble, at::kComplexFloat}) {
    expect_error([&] { pack(x.to(type), spec, 1); },
                 std::string("[pack] tensor must be float32, float16 or bfloat16, got ") + c10::toString(type));
  }
  expect_error([&] { pack(at::Tensor(), spec, 1); }, "[pack] tensor must be defined");
  expect_error([&] { pack(x.to_sparse(), spec, 1); }, "[pack] tensor must be strided, got Sparse");
  expect_error([&] { pack(x.to(at::kMeta), spec, 1); }, "[pack] device must be cpu or cuda, got meta");
  const auto with = [&](auto change) {
    CodecSpec bad;
    change(bad);
    return [&x, bad] { pack(x, bad, 1); };
  };
  expect_error(with([](CodecSpec& s) { s.bits = 0; }), "[pack] bits must be 1 to 8");
  expect_error(with([](CodecSpec& s) { s.bits = 9; }), "got 9");
  expect_error(with([](CodecSpec& s) { s.block = 0; }), "got 0");
  expect_error(with([](CodecSpec& s) { s.transform = LowPass{0}; }), "[pack] low-pass window");
  expect_error(
      [&] {
        pack(normal({1, 1, 1, 1, 1, 2}, 1), parse_spec("division"), 1);
      },
      "[pack] low-pass takes tensors of at most 5 dimensions, got 6");
  expect_error([&] { pack(x, spec, at::Tensor()); }, "[pack] seed must be defined");
  expect_error([&] { pack(x, spec, at::zeros({1})); }, "[pack] seed must be int64, got Float");
  expect_error([&] { pack(x, spec, at::zeros({2}, at::kLong)); }, "[pack] seed must hold one value, got 2");
  expect_error([&] { pack(x, spec, at::zeros({1}, at::TensorOptions(at::kLong).device(at::kMeta))); },
               "[pack] seed must be on the tensor's device, got meta");
  expect_error([&] { pack(at::zeros({1, 1 << 21}), parse_spec("exact"), 1); }, "[pack] a projection takes rows of at most 2^20");
  expect_error([&] { pack(at::zeros({1, 1 << 20}), parse_spec("exact"), 1); }, "[pack] a projection matrix may have at most 2^28");
  expect_error([&] { packed_bytes({4}, at::kDouble, spec); }, "[packed_bytes] dtype must be");
  expect_error([&] { packed_bytes({4, -1}, at::kFloat, spec); }, "[packed_bytes] sizes must not be negative, got -1");
  expect_error([&] { packed_bytes({int64_t{1} << 40, int64_t{1} << 40}, at::kFloat, spec); }, "[packed_bytes] a tensor may have");
}

TEST(Unpack, BadPackedIsNamed) {
  const Packed good = pack(normal({4, 16}, 21), parse_spec("exact,project=2"), 1);
  const auto with = [&](auto change) {
    Packed bad = good;
    change(bad);
    return [bad] { unpack(bad); };
  };
  expect_error(with([](Packed& p) { p.bytes = at::Tensor(); }), "[unpack] tensor must be defined");
  expect_error(with([](Packed& p) { p.bytes = p.bytes.to(at::kFloat); }), "[unpack] bytes must be uint8, got Float");
  expect_error(with([](Packed& p) { p.bytes = p.bytes.narrow(0, 0, 3); }), "[unpack] bytes must be 32 for this shape and spec, got 3");
  expect_error(with([](Packed& p) { p.bytes = at::zeros({32, 2}, at::kByte).select(1, 0); }), "[unpack] bytes must be one contiguous");
  expect_error(with([](Packed& p) { p.seed = at::Tensor(); }), "[unpack] seed must be defined");
  expect_error(with([](Packed& p) { p.strides = {17, 1}; }), "[unpack] strides must fill memory without gap or overlap, got 17");
  expect_error(with([](Packed& p) { p.strides = {1}; }), "[unpack] strides must be as many as sizes, got 1");
  expect_error(with([](Packed& p) { p.dtype = at::kLong; }), "[unpack] dtype must be");
  expect_error(with([](Packed& p) { p.channels = 2; }), "[unpack] channels need a side code");
  expect_error(with([](Packed& p) { p.inner = 0; }), "[unpack] inner must be 1 or more, got 0");
}

TEST(AdvanceSeed, BadInputIsNamed) {
  expect_error([] { advance_seed(at::Tensor()); }, "[advance_seed] tensor must be defined");
  expect_error([] { advance_seed(at::zeros({1})); }, "[advance_seed] seed must be int64, got Float");
}

TEST(PackSide, BadInputIsNamed) {
  const at::Tensor x = normal({2, 3, 4}, 1), seed = seed_tensor(1, at::kCPU), one = at::ones({3});
  const CodecSpec spec = parse_spec("side=one");
  expect_error([&] { pack_side(x, CodecSpec{}, seed, one, one); }, "[pack_side] side must be one or both, got none");
  expect_error([&] { pack_side(x, parse_spec("side=relu"), seed, one, one); }, "[pack_side] side must be one or both, got relu");
  expect_error([&] { pack_side(x, spec, seed, one, one, 3); }, "[pack_side] dim must be one of the tensor's dimensions, got 3");
  expect_error([&] { pack_side(x, spec, seed, one, one, 2); }, "[pack_side] gamma must hold 4 values, one a channel, got [3]");
  expect_error([&] { pack_side(x, spec, seed, one, at::Tensor()); }, "[pack_side] beta must be defined");
  expect_error([&] { pack_side(x, spec, seed, one.to(at::kLong), one); }, "[pack_side] gamma must hold floats, got Long");
  expect_error([&] { pack_side(x, spec, seed, one, one.to(at::kMeta)); }, "[pack_side] beta must be on the tensor's device, got meta");
  expect_error([&] { pack_side(x.to(at::kInt), spec, seed, one, one); }, "[pack_side] tensor must be float32");
  expect_error([&] { pack_side(x, spec, at::zeros({3}, at::kLong), one, one); }, "[pack_side] seed must hold one value, got 3");
}

TEST(Project, BadInputIsNamed) {
  const at::Tensor h = normal({4, 16}, 1), seed = seed_tensor(1, at::kCPU);
  expect_error([&] { apply_projection(h.to(at::kInt), {}, seed); }, "[apply_projection] tensor must be float32");
  expect_error([&] { apply_projection(h, {.ratio = 0}, seed); }, "[apply_projection] projection ratio");
  expect_error([&] { apply_projection(h, {}, at::Tensor()); }, "[apply_projection] seed must be defined");
  expect_error([&] { undo_projection(h, 100, {}, seed); }, "[undo_projection] rows must be 13 wide, got 16");
  expect_error([&] { undo_projection(h, -1, {}, seed); }, "[undo_projection] columns must be those");
  const Packed packed = pack(h, parse_spec("exact"), 1);
  expect_error([&] { transposed_product(packed, normal({5, 2}, 1)); }, "[transposed_product] g must have the packed tensor's sizes");
  expect_error([&] { transposed_product(packed, at::zeros({4, 2}, at::kLong)); }, "[transposed_product] tensor must be float32");
  expect_error([&] { transposed_product(pack(normal({}, 1), CodecSpec{}, 1), normal({}, 1)); },
               "[transposed_product] packed tensor must have one dimension or more");
}

TEST(MaskAndNarrow, BadInputIsNamed) {
  expect_error([] { pack_mask(at::zeros({3}, at::kInt)); }, "[pack_mask] tensor must be float32");
  expect_error([] { pack_mask(at::Tensor()); }, "[pack_mask] tensor must be defined");
  expect_error([] { unpack_mask({at::zeros({2}, at::kByte), {17}}); }, "[unpack_mask] bits must be 3 contiguous bytes, got 2");
  expect_error([] { unpack_mask({at::zeros({2}), {16}}); }, "[unpack_mask] bits must be uint8, got Float");
  expect_error([] { unpack_mask({at::zeros({2}, at::kByte), {-16}}); }, "[unpack_mask] sizes must not be negative");
  expect_error([] { narrow(at::zeros({3})); }, "[narrow] tensor must be bool, uint8 or int8 to int64, got Float");
  expect_error([] { narrow(at::zeros({3}, at::kLong), 5, 4); }, "[narrow] least must not be above most, 4, got 5");
  Narrowed n = narrow(at::arange(9));
  n.bits = 65;
  expect_error([&] { widen(n); }, "[widen] bits must be 0 to 64, got 65");
  n.bits = 5;
  expect_error([&] { widen(n); }, "[widen] bytes must be 6 in one contiguous line, got 5");
  n.dtype = at::kFloat;
  expect_error([&] { widen(n); }, "[widen] dtype must be bool");
}

}  // namespace
}  // namespace satchel
