// pack() and unpack(): bytes against the reference, shapes, strides, dtypes, threads.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>

#include <functional>

#include "reference.h"
#include "satchel/core/levels.h"
#include "satchel/tensor/packed.h"
#include "tests/support.h"

namespace satchel {
namespace {

using reference::normal;

struct Case {
  const char* spec;
  int64_t block, span;  // of a 6 × 5 × 7 × 9 tensor, by hand
};

// 6·5·7·9 = 1890 values; a sample has 315, a map 63, a row 9.
constexpr int64_t kAll = 1890;
constexpr Case kCases[] = {
    {"bits=2", 256, kAll},
    {"bits=1,levels=even,block=1", 1, kAll},
    {"bits=3,block=7,header=f32", 7, kAll},
    {"bits=4,block=64,round=nearest", 64, kAll},
    {"bits=5,block=100,levels=even", 100, kAll},
    {"bits=6,block=33,levels=even,header=f32", 33, kAll},
    {"bits=7,block=1000,levels=even", 1000, kAll},
    {"bits=8,block=100000,levels=even", kAll, kAll},
    {"bits=2,block=row", 9, kAll},
    {"bits=2,block=4rows", 36, kAll},
    {"bits=2,block=1000000rows", kAll, kAll},
    {"bits=2,block=map", 63, kAll},
    {"bits=2,sample=yes", 256, 315},
    {"bits=3,block=row,sample=yes", 9, 315},
    {"bits=2,block=37rows,sample=yes", 315, 315},
    {"bits=2,block=63,sample=yes", 63, 315},
};

TEST(Pack, BytesAreTheReferences) {
  for (const at::ScalarType type : {at::kFloat, at::kHalf, at::kBFloat16}) {
    const at::Tensor x = normal({6, 5, 7, 9}, 1, type) * 3 + 1;
    for (const Case& c : kCases) {
      SCOPED_TRACE(std::string(c.spec) + " " + c10::toString(type));
      const CodecSpec spec = parse_spec(c.spec);
      const Packed packed = pack(x, spec, 77);
      reference::expect_bytes(packed.bytes, reference::block_bytes(x.view({-1}), c.block, c.span, spec, 77));
      EXPECT_EQ(packed.bytes.numel(), packed_bytes(x.sizes(), type, spec));
      EXPECT_EQ(saved_bytes(packed), packed.bytes.numel());
      const at::Tensor back = unpack(packed);
      EXPECT_EQ(back.sizes(), x.sizes());
      EXPECT_EQ(back.strides(), x.strides());
      EXPECT_EQ(back.scalar_type(), type);
    }
  }
}

/// |x̂ − x| is below one gap between levels: the largest gap times the step, and the step is (most − low)/B rounded up.
TEST(Pack, ErrorIsBelowOneStep) {
  for (const int bits : {1, 2, 3, 4, 5, 6, 7, 8}) {
    for (const at::ScalarType type : {at::kFloat, at::kHalf, at::kBFloat16}) {
      CodecSpec spec;
      spec.bits = bits;
      const at::Tensor x = normal({64, 256}, 2, type), rows = x.to(at::kFloat);
      const at::Tensor error = (unpack(pack(x, spec, 3)).to(at::kFloat) - rows).abs();
      const LevelTable table = level_table(bits, spec.levels, 256);
      float gap = 1;
      for (int i = 0; !table.even && i + 1 < 1 << bits; ++i) gap = std::max(gap, table.at[i + 1] - table.at[i]);
      // Low is lowered by at most 2^−7 of itself and the step raised by 2^−7; the output rounds by half an ulp, 2^−11 or 2^−8.
      const at::Tensor most = rows.amax(1), least = rows.amin(1) - rows.amin(1).abs() * 0x1p-7;
      const at::Tensor bound =
          (most - least) / ((1 << bits) - 1) * (1 + 0x1p-7) * gap * (1 + 0x1p-14) + rows.abs().amax(1) * (type == at::kFloat  ? 0x1p-22
                                                                                                          : type == at::kHalf ? 0x1p-10
                                                                                                                              : 0x1p-7);
      EXPECT_TRUE((error.amax(1) <= bound).all().item<bool>()) << bits << c10::toString(type);
      EXPECT_GT(error.max().item<float>(), 0);
    }
  }
}

TEST(Pack, StorageIsAsTheoryThreeSays) {
  // b + 32/G bits a value: EXACT with rows of 16 stores 4 bits at 2 bits, 64 rows of 16 store 2.03.
  EXPECT_EQ(packed_bytes({4096, 16}, at::kFloat, parse_spec("block=row")) * 8, 4096 * 16 * 4);
  EXPECT_EQ(packed_bytes({4096, 16}, at::kFloat, parse_spec("block=64rows")) * 8, 4096 * 16 * 2 + 64 * 32);
  // DIVISION: Q + 16/B² + 32/(H·W) bits.
  EXPECT_EQ(packed_bytes({4, 8, 32, 32}, at::kFloat, parse_spec("division")) * 8, 32 * 1024 * 2 + 32 * 16 * 16 + 32 * 32);
  // EXACT projects 8:1 first: 2 bits and a header for every 16 of 128 values.
  EXPECT_EQ(packed_bytes({1000, 128}, at::kFloat, parse_spec("exact")), 1000 * 4 + 1000 * 4);
}

const std::vector<std::vector<int64_t>> kShapes = {{},     {0},    {1},       {7},       {8},          {3, 0},       {0, 5},
                                                   {1, 1}, {5, 9}, {2, 0, 3}, {2, 3, 4}, {1, 1, 1, 1}, {2, 3, 5, 7}, {2, 2, 3, 4, 5}};

class PackOf : public testing::TestWithParam<const char*> {};

TEST_P(PackOf, EveryShapeAndTypeRoundTrips) {
  const char* const text = GetParam();
  for (const auto& shape : kShapes) {
    for (const at::ScalarType type : {at::kFloat, at::kHalf, at::kBFloat16}) {
      SCOPED_TRACE(std::string(text) + " " + c10::str(at::IntArrayRef(shape)) + c10::toString(type));
      const CodecSpec spec = parse_spec(text);
      const at::Tensor x = normal(shape, 4, type);
      const Packed packed = pack(x, spec, 5);
      const at::Tensor back = unpack(packed);
      EXPECT_EQ(back.sizes(), x.sizes());
      EXPECT_EQ(back.strides(), x.strides());
      EXPECT_EQ(back.scalar_type(), type);
      EXPECT_EQ(packed.bytes.numel(), packed_bytes(shape, type, spec));
      EXPECT_TRUE(back.isfinite().all().item<bool>());
      EXPECT_TRUE(reference::same(pack(x, spec, 5).bytes, packed.bytes));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, PackOf,
                         testing::Values("bits=2", "bits=8,block=row", "bits=3,block=map", "bits=2,sample=yes", "bits=2,block=3rows",
                                         "bits=32", "exact", "exact,bits=32", "blockwise,rows=2,hadamard=yes", "division", "actnn",
                                         "division,lowpass=2,block=10,sample=yes", "gact", "satchel", "bits=2,side=relu",
                                         "bits=3,side=one,block=map", "bits=4,side=both,sample=yes", "division,bits=32"),
                         test::kCaseName);

TEST(Pack, ThirtyTwoBitsKeepTheTensor) {
  for (const at::ScalarType type : {at::kFloat, at::kHalf, at::kBFloat16}) {
    const at::Tensor x = normal({4, 3, 5, 6}, 6, type);
    EXPECT_TRUE(reference::same(unpack(pack(x, parse_spec("bits=32"), 1)), x));
    EXPECT_TRUE(reference::same(unpack(pack(x, parse_spec("division,bits=32"), 1)), x));
    const at::Tensor last = x.contiguous(at::MemoryFormat::ChannelsLast);
    const at::Tensor back = unpack(pack(last, parse_spec("bits=32,block=row"), 1));
    EXPECT_TRUE(at::equal(back, x));
    EXPECT_EQ(back.strides(), last.strides());
  }
}

TEST(Pack, MemoryOrderIsKeptWhereBlocksDoNotMind) {
  const CodecSpec plain = parse_spec("bits=3,block=50"), sample = parse_spec("bits=3,block=50,sample=yes");
  const at::Tensor x = normal({4, 6, 5, 7}, 7), last = x.contiguous(at::MemoryFormat::ChannelsLast);
  const at::Tensor line = last.permute({0, 2, 3, 1}).reshape({-1});  // as it lies in memory
  for (const auto& [spec, span] : {std::pair(plain, int64_t{840}), std::pair(sample, int64_t{210})}) {
    const Packed packed = pack(last, spec, 8);
    reference::expect_bytes(packed.bytes, reference::block_bytes(line, 50, span, spec, 8));
    EXPECT_EQ(unpack(packed).strides(), last.strides());
    EXPECT_TRUE(at::equal(unpack(packed), unpack(pack(line.view({4, 5, 7, 6}), spec, 8)).permute({0, 3, 1, 2})));
  }
  // A dense permutation whose first dimension is not the outermost keeps its order only without per_sample.
  const at::Tensor odd = x.permute({2, 0, 3, 1});
  EXPECT_EQ(unpack(pack(odd, plain, 8)).strides(), odd.strides());
  EXPECT_TRUE(unpack(pack(odd, sample, 8)).is_contiguous());
}

TEST(Pack, BlocksThatFollowTheShapeTakeTheShapesOrder) {
  const at::Tensor x = normal({4, 6, 5, 7}, 9), last = x.contiguous(at::MemoryFormat::ChannelsLast);
  for (const char* text : {"block=row", "block=2rows", "block=map", "division", "exact"}) {
    SCOPED_TRACE(text);
    EXPECT_TRUE(reference::same(pack(last, parse_spec(text), 8).bytes, pack(x, parse_spec(text), 8).bytes));
    EXPECT_TRUE(reference::same(unpack(pack(last, parse_spec(text), 8)), unpack(pack(x, parse_spec(text), 8))));
  }
}

TEST(Pack, OtherStridesAreCopied) {
  const CodecSpec spec = parse_spec("bits=4,block=16");
  const at::Tensor x = normal({20, 30}, 10);
  const std::vector<at::Tensor> views = {
      x.slice(1, 0, 30, 2),          x.slice(0, 1, 20, 3),        x.narrow(1, 3, 5), x.select(1, 4), normal({1, 30}, 11).expand({7, 30}),
      normal({}, 12).expand({3, 4}), x.as_strided({5, 4}, {2, 1})};
  for (const at::Tensor& view : views) {
    const Packed packed = pack(view, spec, 9);
    EXPECT_TRUE(reference::same(packed.bytes, pack(view.contiguous(), spec, 9).bytes));
    EXPECT_EQ(unpack(packed).sizes(), view.sizes());
  }
  const at::Tensor offset = x.view({-1}).narrow(0, 3, 500);  // dense, but not at the start of its storage
  EXPECT_TRUE(reference::same(pack(offset, spec, 9).bytes, pack(offset.clone(), spec, 9).bytes));
  // Lazily negated: the memory holds the values' negatives.
  const at::Tensor imag = at::imag(at::complex(x, x).conj());
  ASSERT_TRUE(imag.is_neg());
  EXPECT_TRUE(reference::same(pack(imag, spec, 9).bytes, pack(x.neg(), spec, 9).bytes));
}

TEST(Pack, GradModeIsLeftAlone) {
  const at::Tensor x = normal({8, 8}, 1).requires_grad_(true);
  EXPECT_FALSE(unpack(pack(x, parse_spec("exact"), 1)).requires_grad());
  EXPECT_FALSE(pack(x.t(), parse_spec("block=row"), 1).bytes.requires_grad());
}

TEST(Pack, NonFiniteValuesPoisonTheirBlockOnly) {
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    for (const char* text : {"block=16", "side=relu,block=16", "side=one,block=16", "division,block=map"}) {
      at::Tensor x = normal({4, 4, 4, 4}, 13).abs() + 1;
      x.view({-1})[37] = bad;
      const at::Tensor nan = unpack(pack(x, parse_spec(text), 1)).isnan().view({-1});
      EXPECT_EQ(nan.sum().item<int64_t>(), 16) << text;
      EXPECT_TRUE(nan.narrow(0, 32, 16).all().item<bool>()) << text;
    }
  }
}

TEST(Pack, SeedsDecide) {
  const at::Tensor x = normal({1000}, 14);
  for (const char* text : {"bits=2", "side=one"}) {
    const CodecSpec spec = parse_spec(text);
    EXPECT_FALSE(reference::same(pack(x, spec, 1).bytes, pack(x, spec, 2).bytes));
    EXPECT_TRUE(reference::same(pack(x, spec, ~uint64_t{0}).bytes, pack(x, spec, seed_tensor(~uint64_t{0}, at::kCPU)).bytes));
  }
}

TEST(Pack, AdvancingTheCallersSeedChangesNothing) {
  const at::Tensor x = normal({100, 32}, 15), seed = seed_tensor(5, at::kCPU);
  const Packed packed = pack(x, parse_spec("exact,bits=8"), seed);
  const at::Tensor before = unpack(packed);
  advance_seed(seed);
  EXPECT_NE(seed.item<int64_t>(), 5);
  EXPECT_TRUE(reference::same(unpack(packed), before));
  EXPECT_EQ(saved_bytes(packed), packed.bytes.numel() + 8);
  EXPECT_FALSE(pack(x, parse_spec("bits=2"), seed).seed.defined());
}

/// Runs with 1, 2, 3 and 7 threads.
void for_thread_counts(const std::function<void()>& run) {
  const int before = at::get_num_threads();
  for (const int threads : {1, 2, 3, 7}) {
    at::set_num_threads(threads);
    run();
  }
  at::set_num_threads(before);
}

TEST(Pack, BytesDoNotDependOnThreads) {
  const at::Tensor x = normal({7, 11, 61, 67}, 16);  // 314,699 values: odd everywhere
  for (const char* text : {"bits=2", "bits=3,block=1000", "bits=2,block=8191", "bits=5,block=100003,levels=even", "bits=2,block=map",
                           "actnn", "bits=2,sample=yes,block=1001", "exact", "blockwise,rows=5", "division", "division,block=1001",
                           "division,block=70001", "side=one", "side=relu,block=70001", "bits=3,side=both,sample=yes", "bits=32"}) {
    const CodecSpec spec = parse_spec(text);
    std::vector<Packed> made;
    for_thread_counts([&] {
      made.push_back(pack(x, spec, 17));
      EXPECT_TRUE(reference::same(made.back().bytes, made.front().bytes)) << text;
    });
    const at::Tensor first = unpack(made[0]);
    for_thread_counts([&] {
      if (!std::holds_alternative<RandomProjection>(spec.transform)) {
        EXPECT_TRUE(reference::same(unpack(made[0]), first)) << text;
      }
    });
  }
}

TEST(Pack, LongBlocksAreMeasuredInPartsAlike) {
  at::Tensor x = normal({2500003}, 18);
  for (const char* text : {"bits=2,block=map", "bits=3,block=1200001,header=f32", "side=relu,block=map"}) {
    const CodecSpec spec = parse_spec(text);
    const int64_t block = spec.block == kMap ? x.numel() : spec.block;
    const std::vector<uint8_t> expected =
        spec.side == Side::none ? reference::block_bytes(x, block, x.numel(), spec, 19)
                                : reference::side_bytes(x, block, x.numel(), spec, 19, [](int64_t) { return relu_channel(); });
    for_thread_counts([&] { reference::expect_bytes(pack(x, spec, 19).bytes, expected); });
  }
  x[2000000] = NAN;
  EXPECT_TRUE(unpack(pack(x, parse_spec("block=map"), 1)).isnan().all().item<bool>());
}

TEST(Unpack, BytesMayStartAnywhere) {
  for (const char* text : {"bits=2", "bits=32", "division", "side=one", "exact"}) {
    const Packed packed = pack(normal({2, 2, 9, 9}, 22), parse_spec(text), 1);
    Packed moved = packed;
    moved.bytes = at::cat({at::zeros({3}, at::kByte), packed.bytes}).narrow(0, 3, packed.bytes.numel());
    EXPECT_TRUE(reference::same(unpack(moved), unpack(packed))) << text;
  }
}

}  // namespace
}  // namespace satchel
