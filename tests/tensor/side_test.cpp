// Side codes through pack() and pack_side(): bytes, thresholds, off means, memory formats.
#include "reference.h"
#include "satchel/tensor/check.h"

namespace satchel {
namespace {

using reference::normal;

std::vector<Channel> channels_of(const Packed& packed) {
  std::vector<Channel> out(static_cast<size_t>(packed.channels));
  const std::vector<uint8_t> bytes = reference::bytes_of(packed.bytes);
  std::memcpy(out.data(), bytes.data() + check_packed(packed, "test").at.channels, out.size() * sizeof(Channel));
  return out;
}

struct Affine {
  at::Tensor gamma, beta;
};

Affine affine(int64_t channels) {
  Affine a{normal({channels}, 31), normal({channels}, 32)};
  a.gamma[0] = 0;      // the whole range is one side
  a.beta[0] = 0.5;     // on
  if (channels > 2) {  // off altogether
    a.gamma[2] = 0;
    a.beta[2] = -1;
  }
  return a;
}

TEST(Side, ReluBytesAreTheReferences) {
  const at::Tensor x = normal({6, 5, 33}, 1).clamp_min(0);
  for (const char* text : {"side=relu", "bits=3,side=relu,block=row", "side=relu,sample=yes,block=50,header=f32",
                           "bits=3,side=relu,round=nearest,levels=even"}) {
    SCOPED_TRACE(text);
    const CodecSpec spec = parse_spec(text);
    const int64_t block = spec.block == kRow ? 33 : spec.block, span = spec.per_sample ? 165 : 990;
    const Packed packed = pack(x, spec, 2);
    const auto relu = [](int64_t) { return relu_channel(); };
    reference::expect_bytes(packed.bytes, reference::side_bytes(x.view({-1}), block, span, spec, 2, relu));
    EXPECT_EQ(packed.channels, 0);
    const at::Tensor back = unpack(packed);
    EXPECT_TRUE(back.masked_select(x == 0).eq(0).all().item<bool>());
    EXPECT_TRUE(back.ge(0).all().item<bool>());
  }
}

TEST(Side, NegativeValuesOfAReluCodeDecodeToZero) {
  const at::Tensor x = normal({1000}, 3);
  const at::Tensor back = unpack(pack(x, parse_spec("side=relu"), 4));
  EXPECT_TRUE(back.masked_select(x <= 0).eq(0).all().item<bool>());
}

TEST(Side, ThresholdZeroWithoutChannels) {
  const at::Tensor x = normal({3000}, 5);
  for (const char* text : {"side=one", "bits=3,side=one", "bits=3,side=both"}) {
    const CodecSpec spec = parse_spec(text);
    const Packed packed = pack(x, spec, 6);
    ASSERT_EQ(packed.channels, 1);
    const Channel c = channels_of(packed)[0];
    EXPECT_EQ(c.gamma, 1.0f);
    EXPECT_EQ(c.beta, 0.0f);
    EXPECT_EQ(c.threshold, 0.0f);
    reference::expect_starts_with(packed.bytes, reference::side_bytes(x, 256, 3000, spec, 6, [&](int64_t) { return c; }));
    EXPECT_TRUE(unpack(packed).masked_select(x > 0).ge(0).all().item<bool>());
  }
}

TEST(Side, ChannelsHoldWhatForwardSaw) {
  const at::Tensor x = normal({60, 7, 400}, 7);  // sums of several stretches
  Affine a = affine(7);
  const Packed packed = pack_side(x, parse_spec("side=one,off=mean"), seed_tensor(8, at::kCPU), a.gamma, a.beta);
  const at::Tensor off = (a.gamma.view({1, 7, 1}) * x + a.beta.view({1, 7, 1})) <= 0;
  const std::vector<Channel> channels = channels_of(packed);
  for (int64_t c = 0; c < 7; ++c) {
    const Channel& got = channels[static_cast<size_t>(c)];
    const float g = a.gamma[c].item<float>(), b = a.beta[c].item<float>();
    EXPECT_EQ(got.gamma, g);
    EXPECT_EQ(got.beta, b);
    EXPECT_EQ(got.threshold, g == 0 ? 0.0f : -b / g);
    const at::Tensor values = x.select(1, c).masked_select(off.select(1, c)).to(at::kDouble);
    // A sum in double of at most 24,000 values, rounded to fp32 once.
    const double mean = values.numel() == 0 ? 0 : values.mean().item<double>();
    EXPECT_NEAR(got.off_mean, mean, 0x1p-22 * (1 + std::abs(mean)));
  }
  const at::Tensor back = unpack(packed);
  a.gamma.fill_(9);  // an optimizer step before backward changes nothing
  EXPECT_TRUE(reference::same(unpack(packed), back));
  EXPECT_TRUE(back.select(1, 2).eq(channels[2].off_mean).all().item<bool>());
}

TEST(Side, BytesAreTheReferencesForEveryMemoryOrder) {
  const int64_t n = 3, c = 6, h = 5, w = 7;
  const at::Tensor x = normal({n, c, h, w}, 9);
  const Affine a = affine(c);
  for (const char* text : {"side=one", "bits=3,side=one,block=50", "bits=3,side=both,sample=yes,block=50"}) {
    SCOPED_TRACE(text);
    const CodecSpec spec = parse_spec(text);
    const int64_t span = spec.per_sample ? c * h * w : x.numel();
    const at::Tensor seed = seed_tensor(10, at::kCPU);
    const Packed plain = pack_side(x, spec, seed, a.gamma, a.beta);
    EXPECT_EQ(plain.inner, h * w);
    const std::vector<Channel> channels = channels_of(plain);
    const auto nchw = [&](int64_t i) { return channels[static_cast<size_t>(i / (h * w) % c)]; };
    reference::expect_starts_with(plain.bytes, reference::side_bytes(x.view({-1}), spec.block, span, spec, 10, nchw));

    const at::Tensor last = x.contiguous(at::MemoryFormat::ChannelsLast);
    const Packed packed = pack_side(last, spec, seed, a.gamma, a.beta);
    EXPECT_EQ(packed.inner, 1);
    const auto nhwc = [&](int64_t i) { return channels_of(packed)[static_cast<size_t>(i % c)]; };
    const at::Tensor line = last.permute({0, 2, 3, 1}).reshape({-1});
    reference::expect_starts_with(packed.bytes, reference::side_bytes(line, spec.block, span, spec, 10, nhwc));
    EXPECT_EQ(unpack(packed).strides(), last.strides());
  }
  // Any dense order: the channel of a value follows from its stride.
  const at::Tensor odd = x.permute({3, 1, 0, 2});
  const Packed packed = pack_side(odd, parse_spec("bits=4,side=both"), seed_tensor(10, at::kCPU), a.gamma, a.beta, 1);
  EXPECT_EQ(unpack(packed).strides(), odd.strides());
  const at::Tensor on = (a.gamma.view({1, c, 1, 1}) * odd + a.beta.view({1, c, 1, 1})) > 0;
  // A value stays on its side of t, and t is −β/γ rounded: γ·x̂ + β keeps its sign up to 3 roundings of |γ·x̂| + |β|.
  const at::Tensor y = a.gamma.view({1, c, 1, 1}) * unpack(packed) + a.beta.view({1, c, 1, 1});
  EXPECT_TRUE((at::where(on, y, -y) >= -3 * 0x1p-23 * (y.abs() + 2 * a.beta.abs().max())).all().item<bool>());
}

/// The off plane by its definition: key, then a bit a value of each group's drawn block.
std::vector<uint8_t> plane_of(const at::Tensor& x, const Packed& packed, uint64_t seed) {
  const CodecLayout plan = check_packed(packed, "test");
  const SideCode& code = plan.side;
  const std::vector<uint8_t> bytes = reference::bytes_of(packed.bytes);
  const std::vector<Channel> channels = channels_of(packed);
  const OffKey key = off_key(seed);
  std::vector<uint8_t> out(static_cast<size_t>(off_plane_bytes(code.grid)));
  std::memcpy(out.data(), &key, sizeof(key));
  for (int64_t b = 0; b < code.grid.blocks(); ++b) {
    if (off_weight(key, b, code.grid.blocks()) == 0) continue;
    const Range r = load_range(bytes.data() + plan.at.headers, code.header, b);
    uint8_t* slot = out.data() + 16 + b / 8 * off_slot_bytes(code.grid);
    for (int64_t i = code.grid.begin(b); i < code.grid.end(b); ++i) {
      const Channel& c = channels[static_cast<size_t>(i / packed.inner % packed.channels)];
      const uint32_t noise = reference::noise_at(packed.spec, seed, i);
      if (off_bit_of(x.const_data_ptr<float>()[i], c, r, noise)) slot[i / 8 - code.grid.begin(b) / 8] |= static_cast<uint8_t>(1 << i % 8);
    }
  }
  return out;
}

TEST(Side, TheOffPlaneIsTheReferences) {
  for (const auto& [rows, channels] : {std::pair<int64_t, int64_t>{700, 16}, {90, 33}, {3, 5}}) {
    for (const char* text : {"side=one", "side=one,block=50", "side=one,sample=yes,block=20", "side=one,round=nearest,header=f32"}) {
      SCOPED_TRACE(text);
      const at::Tensor x = normal({rows, channels}, 13);
      const Affine a = affine(channels);
      CodecSpec spec = parse_spec(text);
      const Packed packed = pack_side(x, spec, seed_tensor(14, at::kCPU), a.gamma, a.beta);
      const CodecLayout plan = check_packed(packed, "test");
      reference::expect_bytes(packed.bytes.slice(0, plan.at.plane), plane_of(x, packed, 14));
      // All before it is what off=mean keeps.
      spec.off = Off::mean;
      EXPECT_TRUE(
          reference::same(packed.bytes.slice(0, 0, plan.at.plane), pack_side(x, spec, seed_tensor(14, at::kCPU), a.gamma, a.beta).bytes));
      // Rows decode alone as they do together.
      const at::Tensor whole = unpack(packed);
      EXPECT_TRUE(reference::same(unpack_samples(packed, rows / 3, rows), whole.slice(0, rows / 3).contiguous()));
    }
  }
}

TEST(Side, BitsAValueWithTheOffPlane) {
  // 2 + 32/256 + 1/8 and the channels': 16,384 rows take at most 2.26 bits a value.
  for (const int64_t channels : {64, 128, 256}) {
    const auto bits = static_cast<double>(packed_bytes({16384, channels}, at::kFloat, parse_spec("satchel"), channels)) * 8;
    EXPECT_LE(bits / static_cast<double>(16384 * channels), 2.26);
  }
}

TEST(Side, ChannelsInAnyDimensionAndDtype) {
  for (const int64_t dim : {0, 1, 2, -1}) {
    const at::Tensor x = normal({5, 5, 5}, 11, at::kHalf);
    const Affine a = affine(5);
    const at::Tensor seed = seed_tensor(12, at::kCPU);
    const at::Tensor got = unpack(pack_side(x, parse_spec("side=one,block=row"), seed, a.gamma.to(at::kBFloat16), a.beta, dim));
    EXPECT_EQ(got.scalar_type(), at::kHalf);
    EXPECT_EQ(got.strides(), x.strides());
  }
}

TEST(Side, EmptyTensors) {
  const at::Tensor seed = seed_tensor(1, at::kCPU);
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{0, 3}, {3, 0}, {2, 3, 0}}) {
    const int64_t c = shape[1];
    const Packed packed = pack_side(at::empty(shape), parse_spec("side=one"), seed, at::ones({c}), at::ones({c}));
    EXPECT_EQ(unpack(packed).sizes(), at::IntArrayRef(shape));
    EXPECT_EQ(packed.bytes.numel(), packed_bytes(shape, at::kFloat, packed.spec, packed.channels));
  }
}

}  // namespace
}  // namespace satchel
