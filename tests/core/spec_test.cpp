#include "satchel/core/spec.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "satchel/core/error.h"
#include "tests/support.h"

namespace satchel {
namespace {

std::string error_of(std::string_view text) {
  return test::error_of([&] { parse_spec(text); });
}

std::string error_of(const CodecSpec& spec) {
  return test::error_of([&] { validate(spec, "pack"); });
}

const CodecSpec& preset(std::string_view name) {
  for (const Preset& p : presets()) {
    if (p.name == name) return p.spec;
  }
  throw Error("no such preset");
}

class SpecPresets : public testing::TestWithParam<Preset> {};

TEST_P(SpecPresets, AreValidAndHaveTheirNameAsText) {
  const Preset& p = GetParam();
  EXPECT_NO_THROW(validate(p.spec, "spec"));
  EXPECT_FALSE(p.summary.empty());
  EXPECT_EQ(parse_spec(p.name), p.spec);
  EXPECT_EQ(to_string(p.spec), p.name);
}

INSTANTIATE_TEST_SUITE_P(, SpecPresets, testing::ValuesIn(presets().begin(), presets().end()), test::kCaseName);

TEST(Spec, PresetsAreTheTableOfTheArchitecture) {
  std::vector<std::string_view> names;
  for (const Preset& p : presets()) names.push_back(p.name);
  EXPECT_EQ(names, (std::vector<std::string_view>{"exact", "blockwise", "actnn", "division", "gact", "satchel"}));
  EXPECT_EQ(preset("exact"), (CodecSpec{.bits = 2, .block = kRow, .levels = Levels::even, .transform = RandomProjection{8, 0, false}}));
  EXPECT_EQ(preset("blockwise"),
            (CodecSpec{.bits = 2, .block = -64, .levels = Levels::optimal, .transform = RandomProjection{8, 0, false}}));
  EXPECT_EQ(preset("actnn"), (CodecSpec{.bits = 2, .block = 256, .per_sample = true, .levels = Levels::even}));
  EXPECT_EQ(preset("division"), (CodecSpec{.bits = 2, .block = kMap, .levels = Levels::even, .transform = LowPass{8}}));
  EXPECT_EQ(preset("gact"), (CodecSpec{.bits = 4, .block = 256, .levels = Levels::even}));
  EXPECT_EQ(preset("satchel"), (CodecSpec{.bits = 2, .block = 256, .levels = Levels::optimal, .side = Side::one_sided}));
}

TEST(Spec, ParsesPresetsAndOptions) {
  EXPECT_EQ(parse_spec("bits=2"), CodecSpec{});
  CodecSpec want = preset("blockwise");
  want.bits = 3;
  want.block = 1024;
  want.transform = RandomProjection{4, 64, true};
  EXPECT_EQ(parse_spec("blockwise,bits=3,block=1024,project=4,rows=64,hadamard=yes"), want);
  EXPECT_EQ(parse_spec("blockwise,hadamard=yes,rows=64,block=1024,project=4,bits=3"), want);
  EXPECT_EQ(parse_spec("  blockwise , bits=3 ,\tblock=1024, hadamard=yes,rows=64 ,project=4 "), want);
  EXPECT_EQ(parse_spec("rows=32,project=8").transform, Transform(RandomProjection{8, 32, false}));
  EXPECT_EQ(parse_spec("block=1rows").block, kRow);
  EXPECT_EQ(parse_spec("block=map").block, kMap);
  EXPECT_EQ(parse_spec("block=7rows").block, -7);
  EXPECT_EQ(parse_spec("bits=8").levels, Levels::optimal);
}

TEST(Spec, TransformsReplaceEachOther) {
  EXPECT_EQ(parse_spec("division,project=8").transform, Transform(RandomProjection{}));
  EXPECT_EQ(parse_spec("exact,lowpass=4").transform, Transform(LowPass{4}));
  EXPECT_EQ(parse_spec("gact,project=16").transform, Transform(RandomProjection{16, 0, false}));
  EXPECT_EQ(parse_spec("exact,project=none").transform, Transform(Identity{}));
  EXPECT_EQ(parse_spec("exact,lowpass=none").transform, Transform(RandomProjection{}));
  EXPECT_EQ(parse_spec("division,project=none").transform, Transform(LowPass{}));
  EXPECT_EQ(parse_spec("lowpass=2,project=none").transform, Transform(LowPass{2}));
  EXPECT_EQ(parse_spec("lowpass=none,project=2").transform, Transform(RandomProjection{2, 0, false}));
  EXPECT_EQ(parse_spec("division,part=high").transform, Transform(LowPass{8, Part::high}));
  EXPECT_EQ(parse_spec("part=low,lowpass=4").transform, Transform(LowPass{4, Part::low}));
  EXPECT_EQ(parse_spec("division,part=both"), preset("division"));
}

TEST(Spec, PrintsTheShortestText) {
  EXPECT_EQ(to_string(CodecSpec{}), "bits=2");
  EXPECT_EQ(to_string(parse_spec("blockwise,project=8,block=1024,bits=2")), "blockwise,block=1024");
  EXPECT_EQ(to_string(parse_spec("block=row,levels=even,project=8")), "exact");
  EXPECT_EQ(to_string(parse_spec("division,project=8,block=row")), "exact");
  EXPECT_EQ(to_string(parse_spec("division,part=low,lowpass=8")), "division,part=low");
}

TEST(Spec, EveryValidSpecRoundTrips) {
  const std::vector<Transform> transforms = {Identity{},
                                             RandomProjection{},
                                             RandomProjection{3, 64, true},
                                             RandomProjection{1, 0, true},
                                             RandomProjection{8, int64_t{1} << 40, false},
                                             LowPass{},
                                             LowPass{1},
                                             LowPass{8, Part::low},
                                             LowPass{5, Part::high}};
  const std::vector<int64_t> blocks = {1, 255, 256, int64_t{1} << 40, kRow, -2, -64, -(int64_t{1} << 40), kMap};
  int valid = 0, all = 0;
  for (int bits : {1, 2, 3, 4, 5, 8, 32}) {
    for (int64_t block : blocks) {
      for (int choices = 0; choices < 64; ++choices) {
        for (const Transform& transform : transforms) {
          const CodecSpec spec{.bits = bits,
                               .block = block,
                               .per_sample = (choices & 1) != 0,
                               .levels = Levels(choices >> 1 & 1),
                               .rounding = Rounding(choices >> 2 & 1),
                               .header = HeaderType(choices >> 3 & 1),
                               .side = Side(choices >> 4),
                               .transform = transform};
          ++all;
          if (error_of(spec) != "accepted") continue;
          ++valid;
          ASSERT_EQ(parse_spec(to_string(spec)), spec) << to_string(spec);
        }
      }
    }
  }
  // Side codes take 2, 2 and 3 of the 7 bits with 1 of the 9 transforms; without a side all pairs are valid but 32 bits with a part.
  EXPECT_EQ(valid, 9 * 16 * (63 - 2 + 2 + 2 + 3));
  EXPECT_EQ(all, 7 * 9 * 64 * 9);
}

struct Bad {
  const char* text;
  const char* message;
};

TEST(Spec, ErrorsNameTheRuleAndTheValue) {
  const Bad cases[] = {
      {"foo", "[spec] preset must be one of exact, blockwise, actnn, division, gact, satchel, got foo"},
      {"Exact", "[spec] preset must be one of exact, blockwise, actnn, division, gact, satchel (did you mean exact?), got Exact"},
      {"", "[spec] preset must be one of exact, blockwise, actnn, division, gact, satchel, got nothing"},
      {" , bits=2", "[spec] preset must be one of exact, blockwise, actnn, division, gact, satchel, got nothing"},
      {"exact,colour=3",
       "[spec] option must be one of bits, block, sample, levels, round, header, side, off, project, lowpass, hadamard, rows, part, got "
       "colour"},
      {"=3", "got nothing"},
      {"exact,", "[spec] after the first item come options (key=value), got nothing"},
      {"exact,,bits=2", "[spec] after the first item come options (key=value), got nothing"},
      {"bits=2,exact", "[spec] after the first item come options (key=value), got exact"},
      {"bits=2,bits=3", "[spec] an option may be given once, got bits=3"},
      {"bits=0", "[spec] bits must be 1 to 8 or 32, got 0"},
      {"bits=9", "[spec] bits must be 1 to 8 or 32, got 9"},
      {"bits=31", "[spec] bits must be 1 to 8 or 32, got 31"},
      {"bits=", "[spec] bits must be 1 to 8 or 32, got nothing"},
      {"bits=2x", "got 2x"},
      {"bits= 2", "got  2"},
      {"bits=+2", "got +2"},
      {"bits=2.0", "got 2.0"},
      {"bits=99999999999999999999", "[spec] bits must be 1 to 8 or 32, got 99999999999999999999"},
      {"block=0", "[spec] block must be 1 to 2^40, row, Nrows or map, got 0"},
      {"block=-1", "got -1"},
      {"block=rows", "got rows"},
      {"block=0rows", "got 0rows"},
      {"block=99999999999999999999rows", "got 99999999999999999999rows"},
      {"block=1099511627777", "got 1099511627777"},
      {"levels=odd", "[spec] levels must be even, optimal or quantile, got odd"},
      {"levels=", "[spec] levels must be even, optimal or quantile, got nothing"},
      {"round=up", "[spec] round must be stochastic or nearest, got up"},
      {"header=f16", "[spec] header must be bf16 or f32, got f16"},
      {"side=one_sided", "[spec] side must be none, one, relu or both, got one_sided"},
      {"sample=1", "[spec] sample must be yes or no, got 1"},
      {"project=0", "[spec] project must be 1 to 2^20 or none, got 0"},
      {"project=4294967304", "got 4294967304"},
      {"part=low", "[spec] part needs a low-pass (lowpass=SIZE), got low"},
      {"division,part=middle", "[spec] part must be both, low or high, got middle"},
      {"division,part=", "[spec] part must be both, low or high, got nothing"},
      {"division,part=low,bits=32", "[spec] part=low and part=high take 1 to 8 bits, got 32"},
      {"lowpass=0", "[spec] lowpass must be 1 to 2^20 or none, got 0"},
      {"exact,rows=0", "[spec] rows must be 1 to 2^40 or all, got 0"},
      {"exact,hadamard=maybe", "[spec] hadamard must be yes or no, got maybe"},
      {"gact,rows=8", "[spec] rows needs a projection (project=RATIO), got 8"},
      {"gact,hadamard=no", "[spec] hadamard needs a projection (project=RATIO), got no"},
      {"exact,project=none,rows=8", "[spec] rows needs a projection (project=RATIO), got 8"},
      {"project=8,lowpass=8", "[spec] project and lowpass exclude each other, got project=8,lowpass=8"},
      {"satchel,bits=4", "[spec] side=one takes 2 or 3 bits, got 4"},
      {"satchel,bits=32", "[spec] side=one takes 2 or 3 bits, got 32"},
      {"side=relu,bits=1", "[spec] side=relu takes 2 or 3 bits, got 1"},
      {"side=both,bits=5", "[spec] side=both takes 2 to 4 bits, got 5"},
      {"satchel,project=8", "[spec] a side code takes no transform, got a projection"},
      {"division,side=one", "[spec] a side code takes no transform, got a low-pass"},
  };
  for (const Bad& bad : cases) {
    const std::string message = error_of(bad.text);
    EXPECT_NE(message.find(bad.message), std::string::npos) << '"' << bad.text << "\": " << message;
    EXPECT_EQ(message.find("[spec] "), 0u) << message;
    EXPECT_NE(message.find(", got "), std::string::npos) << message;
  }
}

TEST(Spec, ValidateNamesTheOperation) {
  EXPECT_EQ(error_of(CodecSpec{}), "accepted");
  EXPECT_EQ(error_of(CodecSpec{.bits = 9}), "[pack] bits must be 1 to 8 or 32, got 9");
  EXPECT_EQ(error_of(CodecSpec{.bits = -1}), "[pack] bits must be 1 to 8 or 32, got -1");
  EXPECT_EQ(error_of(CodecSpec{.block = 0}), "[pack] block must be 1 to 2^40, row, Nrows or map, got 0");
  EXPECT_NE(error_of(CodecSpec{.block = kMap + 1}), "accepted");
  EXPECT_NE(error_of(CodecSpec{.block = INT64_MIN}), "accepted");
  EXPECT_EQ(error_of(CodecSpec{.levels = Levels(7)}), "[pack] levels must be even, optimal or quantile, got 7");
  EXPECT_EQ(error_of(CodecSpec{.rounding = Rounding(2)}), "[pack] rounding must be stochastic or nearest, got 2");
  EXPECT_EQ(error_of(CodecSpec{.header = HeaderType(2)}), "[pack] header must be bf16 or f32, got 2");
  EXPECT_EQ(error_of(CodecSpec{.side = Side(4)}), "[pack] side must be none, one, relu or both, got 4");
  EXPECT_EQ(error_of(CodecSpec{.transform = RandomProjection{0, 0, false}}), "[pack] projection ratio must be 1 to 2^20, got 0");
  EXPECT_NE(error_of(CodecSpec{.transform = RandomProjection{8, -1, false}}), "accepted");
  EXPECT_EQ(error_of(CodecSpec{.transform = LowPass{8, Part(3)}}), "[pack] part must be both, low or high, got 3");
  EXPECT_EQ(error_of(CodecSpec{.transform = LowPass{-8}}), "[pack] low-pass window must be 1 to 2^20, got -8");
}

}  // namespace
}  // namespace satchel
