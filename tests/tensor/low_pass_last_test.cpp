// The low-pass of channels_last maps, its two parts alone, and decoding by samples.
#include <ATen/Parallel.h>

#include "reference.h"
#include "satchel/tensor/file.h"

namespace satchel {
namespace {

using reference::normal;
using reference::same;

/// The same values with channels as neighbours in memory: 3 to 5 dimensions.
at::Tensor channels_last(const at::Tensor& x) { return x.movedim(1, -1).contiguous().movedim(-1, 1); }

/// Channels in multiples of 8 and not, maps that are whole windows and not, one channel, one sample, nothing at all.
const std::vector<std::vector<int64_t>> kMaps = {{2, 8, 7, 7},   {3, 16, 14, 14}, {2, 24, 28, 28}, {1, 8, 56, 56},  {2, 3, 17, 20},
                                                 {4, 5, 3, 3},   {2, 40, 8, 16},  {3, 1, 9, 9},    {2, 7, 1, 1},    {0, 8, 7, 7},
                                                 {2, 0, 7, 7},   {2, 8, 300, 40}, {3, 12, 50},     {2, 6, 5, 9, 6}, {1, 33, 20, 20},
                                                 {5, 2, 100, 3}, {2, 70, 8, 8},   {2, 16, 9},      {1, 17, 2, 3, 4}};

TEST(LowPassLast, BytesAreThoseOfTheShapesOrder) {
  for (const auto& shape : kMaps) {
    for (const at::ScalarType type : {at::kFloat, at::kHalf, at::kBFloat16}) {
      const at::Tensor x = normal(shape, 31, type) * 2 + 1, last = channels_last(x);
      for (const char* text : {"division", "division,bits=3,header=f32", "division,lowpass=3", "division,block=100,bits=4",
                               "division,sample=yes", "division,part=low", "division,part=high", "division,bits=32"}) {
        SCOPED_TRACE(std::string(text) + " " + c10::str(x.sizes()) + " " + c10::toString(type));
        const CodecSpec spec = parse_spec(text);
        const Packed straight = pack(x, spec, 32), packed = pack(last, spec, 32);
        if (spec.bits != kKeep) {
          ASSERT_TRUE(same(packed.bytes, straight.bytes));
        }
        const at::Tensor back = unpack(packed);
        EXPECT_TRUE(same(back, unpack(straight)));
        if (x.numel() > 0) {
          EXPECT_EQ(back.strides(), last.strides());
        }
      }
    }
  }
}

TEST(LowPassLast, AnyNumberOfThreads) {
  const at::Tensor x = normal({3, 24, 28, 28}, 33), last = channels_last(x);
  const CodecSpec spec = parse_spec("division");
  const Packed expected = pack(x, spec, 34);
  const at::Tensor back = unpack(expected);
  const int before = at::get_num_threads();
  for (const int threads : {1, 2, 3, 7}) {
    at::set_num_threads(threads);
    const Packed packed = pack(last, spec, 34);
    EXPECT_TRUE(same(packed.bytes, expected.bytes)) << threads;
    EXPECT_TRUE(same(unpack(packed), back)) << threads;
  }
  at::set_num_threads(before);
}

TEST(LowPassLast, ANonFiniteValuePoisonsItsMapOnly) {
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    at::Tensor x = channels_last(normal({2, 8, 7, 7}, 35));
    x[1][3][6][2] = bad;
    const at::Tensor nan = unpack(pack(x, parse_spec("division"), 1)).isnan();
    EXPECT_EQ(nan.sum().item<int64_t>(), 49);
    EXPECT_TRUE(nan[1][3].all().item<bool>());
  }
}

/// Strides that pack() never gives a low-pass still mean the same tensor.
TEST(LowPassLast, UnpackTakesAnyDenseStrides) {
  const at::Tensor x = normal({4, 6, 5, 7}, 36);
  Packed packed = pack(x, parse_spec("division"), 37);
  const at::Tensor expected = unpack(packed);
  packed.strides = {1, 4, 24, 120};
  EXPECT_TRUE(same(unpack(packed), expected));
  EXPECT_EQ(unpack(packed).strides(), at::IntArrayRef(packed.strides));
  EXPECT_TRUE(same(unpack_samples(packed, 1, 3), expected.narrow(0, 1, 2)));
}

TEST(LowPassParts, AddUpToTheWhole) {
  using Case = std::pair<std::vector<int64_t>, int64_t>;  // a shape and its windows
  for (const auto& [shape, windows] : {Case{{2, 3, 17, 20}, 54}, Case{{6, 50}, 42}, Case{{2, 8, 7, 7}, 16}}) {
    const at::Tensor x = normal(shape, 38) + 1;
    const at::Tensor both = unpack(pack(x, parse_spec("division,bits=8"), 39)),
                     low = unpack(pack(x, parse_spec("division,bits=8,part=low"), 39)),
                     high = unpack(pack(x, parse_spec("division,bits=8,part=high"), 39));
    EXPECT_TRUE(same(both, low + high));
    EXPECT_LE(std::get<0>(at::_unique2(low)).numel(), windows);
    EXPECT_FALSE(same(low, both));
    EXPECT_FALSE(same(high, both));
  }
}

TEST(LowPassParts, KeepOnlyTheirBytes) {
  // 32 maps of 32 × 32: 16 windows each, 2 bits a value and one bf16 header a map.
  EXPECT_EQ(packed_bytes({4, 8, 32, 32}, at::kFloat, parse_spec("division,part=low")), 32 * 16 * 2);
  EXPECT_EQ(packed_bytes({4, 8, 32, 32}, at::kFloat, parse_spec("division,part=high")), 32 * 1024 / 4 + 32 * 4);
  const at::Tensor x = normal({4, 8, 32, 32}, 40);
  for (const char* text : {"division,part=low", "division,part=high"}) {
    const CodecSpec spec = parse_spec(text);
    EXPECT_EQ(pack(x, spec, 1).bytes.numel(), packed_bytes(x.sizes(), at::kFloat, spec)) << text;
  }
  // A map of one value passes through, whatever is kept of the others.
  const at::Tensor one = normal({4, 8, 1, 1}, 41);
  EXPECT_TRUE(same(unpack(pack(one, parse_spec("division,part=low"), 1)), one));
}

TEST(LowPassParts, TravelInFiles) {
  const std::string path = testing::TempDir() + "satchel_part.bin";
  const at::Tensor x = channels_last(normal({2, 8, 9, 9}, 42));
  for (const char* text : {"division", "division,part=low", "division,part=high"}) {
    const Packed packed = pack(x, parse_spec(text), 43);
    write_packed(packed, path);
    const Packed back = read_packed(path);
    EXPECT_EQ(back.spec, packed.spec) << text;
    EXPECT_TRUE(same(unpack(back), unpack(packed))) << text;
    EXPECT_EQ(unpack(back).strides(), x.strides()) << text;
  }
}

const char* const kSampleSpecs[] = {"bits=2",
                                    "bits=3,block=50",
                                    "actnn",
                                    "gact",
                                    "bits=2,block=map",
                                    "division",
                                    "division,block=100",
                                    "division,part=low",
                                    "division,part=high",
                                    "side=relu",
                                    "exact",
                                    "bits=2,block=row",
                                    "bits=32",
                                    "side=one"};

TEST(UnpackSamples, AreSlicesOfTheWhole) {
  for (const auto& shape :
       std::vector<std::vector<int64_t>>{{5, 6, 5, 7}, {5, 8, 7, 7}, {9, 33}, {7}, {3, 16, 14, 14}, {4, 3, 50}, {3, 0, 2}}) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
      const at::Tensor x = normal(shape, 44, type);
      for (const char* text : kSampleSpecs) {
        for (const at::Tensor& in : {x, x.dim() >= 3 ? channels_last(x) : x.t().contiguous().t()}) {
          const Packed packed = pack(in, parse_spec(text), 45);
          const at::Tensor whole = unpack(packed);
          for (const auto& [first, last] : std::vector<std::pair<int64_t, int64_t>>{{0, shape[0]}, {0, 1}, {1, 2}, {1, shape[0]}, {2, 2}}) {
            SCOPED_TRACE(std::string(text) + c10::str(in.sizes(), in.strides(), " ", first, " ", last));
            const at::Tensor some = unpack_samples(packed, first, last);
            EXPECT_TRUE(same(some, whole.narrow(0, first, last - first)));
            if (some.numel() > 0) {
              EXPECT_EQ(some.strides(), whole.strides());
            }
          }
        }
      }
    }
  }
}

TEST(UnpackSamples, RefusesWhatIsNotThere) {
  const Packed packed = pack(normal({4, 8}, 46), parse_spec("bits=2"), 1);
  const auto error = [](const Packed& p, int64_t first, int64_t last) {
    try {
      unpack_samples(p, first, last);
      return std::string("no error");
    } catch (const Error& e) {
      return std::string(e.what());
    }
  };
  EXPECT_EQ(error(packed, 0, 5), "[unpack_samples] samples must lie within 0 to 4, got 0 to 5");
  EXPECT_EQ(error(packed, -1, 2), "[unpack_samples] samples must lie within 0 to 4, got -1 to 2");
  EXPECT_EQ(error(packed, 3, 2), "[unpack_samples] samples must lie within 0 to 4, got 3 to 2");
  EXPECT_EQ(error(packed, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()),
            "[unpack_samples] samples must lie within 0 to 4, got -9223372036854775808 to 9223372036854775807");
  EXPECT_EQ(error(pack(normal({}, 47), parse_spec("bits=2"), 1), 0, 0),
            "[unpack_samples] packed tensor must have one dimension or more, got 0");
}

/// ActNN's blocks start anew with every sample and run over its memory, whose size is no multiple of a block.
TEST(MemoryOrder, SamplesOfChannelsLastMapsAreCodedAsTheyLie) {
  const CodecSpec spec = parse_spec("actnn");
  const at::Tensor last = channels_last(normal({3, 24, 14, 14}, 48));
  const Packed packed = pack(last, spec, 49);
  EXPECT_EQ(at::IntArrayRef(packed.strides), last.strides());
  reference::expect_bytes(packed.bytes, reference::block_bytes(last.permute({0, 2, 3, 1}).reshape({-1}), 256, 24 * 196, spec, 49));
  EXPECT_EQ(unpack(packed).strides(), last.strides());
}

}  // namespace
}  // namespace satchel
