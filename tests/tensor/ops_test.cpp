// The ops as torch's dispatcher calls them: CPU equals the C++ functions, Meta gives the sizes.
#include <ATen/core/dispatch/Dispatcher.h>

#include "reference.h"
#include "satchel/kernels/codec_layout.h"
#include "satchel/tensor/project.h"

namespace satchel {
namespace {

using reference::normal;
using Stack = std::vector<c10::IValue>;

c10::IValue call(const std::string& name, Stack stack) {
  c10::Dispatcher::singleton().findSchemaOrThrow(("satchel::" + name).c_str(), "").callBoxed(&stack);
  return stack.at(0);
}

void add_spec(Stack& stack, const CodecSpec& spec) {
  const SpecNumbers n = numbers_of(spec);
  for (const c10::IValue& v : Stack{n.bits, n.block, n.per_sample, n.levels, n.rounding, n.header, n.side, n.transform, n.p0, n.p1, n.p2}) {
    stack.push_back(v);
  }
}

Stack packed_arguments(const Packed& p, const at::Tensor& bytes, const c10::IValue& seed) {
  Stack stack{bytes, seed, p.shape, p.strides, p.dtype};
  add_spec(stack, p.spec);
  stack.insert(stack.end(), {p.channels, p.inner});
  return stack;
}

const char* const kSpecs[] = {"bits=2", "exact", "blockwise,rows=8,hadamard=yes", "actnn", "division", "bits=32", "side=relu"};

TEST(Ops, NumbersAreTheSpec) {
  for (const char* text : kSpecs) EXPECT_EQ(spec_of(numbers_of(parse_spec(text)), "test"), parse_spec(text));
}

TEST(Ops, PackAndUnpack) {
  const at::Tensor x = normal({2, 6, 8, 16}, 1).contiguous(at::MemoryFormat::ChannelsLast), seed = seed_tensor(2, at::kCPU);
  for (const char* text : kSpecs) {
    SCOPED_TRACE(text);
    const CodecSpec spec = parse_spec(text);
    const Packed packed = pack(x, spec, seed);
    Stack arguments{x, seed};
    add_spec(arguments, spec);
    EXPECT_TRUE(reference::same(call("pack", arguments).toTensor(), packed.bytes));
    const c10::IValue kept = packed.seed.defined() ? c10::IValue(packed.seed) : c10::IValue();
    EXPECT_TRUE(reference::same(call("unpack", packed_arguments(packed, packed.bytes, kept)).toTensor(), unpack(packed)));

    Stack ask{x};
    add_spec(ask, spec);
    EXPECT_EQ(call("packed_strides", ask).toIntVector(), packed.strides);
    ask[0] = x.to(at::kMeta);
    EXPECT_EQ(call("packed_strides", ask).toIntVector(), packed.strides);
    Stack sizes{packed.shape, packed.dtype, int64_t{0}};
    add_spec(sizes, spec);
    EXPECT_EQ(call("packed_bytes", sizes).toInt(), packed.bytes.numel());

    arguments[0] = x.to(at::kMeta);
    arguments[1] = seed.to(at::kMeta);
    const at::Tensor bytes = call("pack", arguments).toTensor();
    EXPECT_TRUE(bytes.is_meta());
    EXPECT_EQ(bytes.numel(), packed.bytes.numel());
    const at::Tensor back = call("unpack", packed_arguments(packed, bytes, arguments[1])).toTensor();
    EXPECT_TRUE(back.is_meta());
    EXPECT_EQ(back.sizes(), x.sizes());
    EXPECT_EQ(back.strides(), unpack(packed).strides());
  }
}

TEST(Ops, PackSide) {
  const at::Tensor x = normal({4, 5, 6}, 3), seed = seed_tensor(4, at::kCPU), gamma = normal({5}, 5), beta = normal({5}, 6);
  const CodecSpec spec = parse_spec("side=one");
  const Packed packed = pack_side(x, spec, seed, gamma, beta);
  Stack arguments{x, seed, gamma, beta, int64_t{1}};
  add_spec(arguments, spec);
  EXPECT_TRUE(reference::same(call("pack_side", arguments).toTensor(), packed.bytes));
  EXPECT_TRUE(reference::same(call("unpack", packed_arguments(packed, packed.bytes, {})).toTensor(), unpack(packed)));
  for (size_t i = 0; i < 4; ++i) arguments[i] = arguments[i].toTensor().to(at::kMeta);
  EXPECT_EQ(call("pack_side", arguments).toTensor().numel(), packed.bytes.numel());
}

TEST(Ops, TransposedProduct) {
  const at::Tensor h = normal({30, 16}, 7), g = normal({30, 4}, 8);
  const Packed packed = pack(h, parse_spec("exact"), 9);
  Stack arguments = packed_arguments(packed, packed.bytes, packed.seed);
  arguments.insert(arguments.begin() + 2, g);
  EXPECT_TRUE(reference::same(call("transposed_product", arguments).toTensor(), transposed_product(packed, g)));
  for (size_t i = 0; i < 3; ++i) arguments[i] = arguments[i].toTensor().to(at::kMeta);
  EXPECT_EQ(call("transposed_product", arguments).toTensor().sizes(), at::IntArrayRef({16, 4}));
}

TEST(Ops, MaskAndNarrow) {
  const at::Tensor x = normal({5, 7}, 10), ids = at::arange(35).view({5, 7});
  const at::Tensor bits = call("pack_mask", {x}).toTensor();
  const std::vector<int64_t> shape{5, 7};
  EXPECT_TRUE(at::equal(call("unpack_mask", {bits, shape}).toTensor(), x > 0));
  EXPECT_EQ(call("pack_mask", {x.to(at::kMeta)}).toTensor().numel(), 5);
  EXPECT_EQ(call("unpack_mask", {bits.to(at::kMeta), shape}).toTensor().scalar_type(), at::kBool);
  const at::Tensor bytes = call("narrow", {ids, int64_t{0}, int64_t{34}}).toTensor();
  EXPECT_TRUE(at::equal(call("widen", {bytes, shape, at::kLong, int64_t{0}, int64_t{6}}).toTensor(), ids));
  EXPECT_EQ(call("narrow", {ids.to(at::kMeta), int64_t{0}, int64_t{34}}).toTensor().numel(), bytes.numel());
  EXPECT_EQ(call("widen", {bytes.to(at::kMeta), shape, at::kInt, int64_t{0}, int64_t{6}}).toTensor().sizes(), ids.sizes());
}

TEST(Ops, ErrorsComeThrough) {
  Stack arguments{at::arange(4), seed_tensor(1, at::kCPU)};
  add_spec(arguments, CodecSpec{});
  reference::expect_error([&] { call("pack", arguments); }, "[pack] tensor must be float32, float16 or bfloat16, got Long");
  arguments[0] = at::ones({4});
  arguments[2] = int64_t{33};
  reference::expect_error([&] { call("pack", arguments); }, "[pack] bits must be 1 to 32, got 33");
}

}  // namespace
}  // namespace satchel
