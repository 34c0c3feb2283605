#include "satchel/core/method.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "satchel/core/error.h"
#include "satchel/core/keep.h"
#include "tests/support.h"

namespace satchel {
namespace {

using test::error_of;

std::string parse_error(std::string_view text) {
  return error_of([text] { parse_method(text); });
}

/// The flags that are set.
std::string flags_of(const Method& m) {
  std::string text;
  if (m.torch_baseline) text += " plain";
  if (m.shared) text += " shared";
  if (m.keeps_aggregate) text += " aggregate";
  if (m.packs_data) text += " data";
  if (m.keeps_dropout) text += " dropout";
  if (m.longest_block != 0) text += " " + std::to_string(m.longest_block);
  return text.substr(text.empty() ? 0 : 1);
}

void expect_method(std::string_view text, std::string_view input, std::string_view norm, std::string_view flags) {
  const Method m = parse_method(text);
  EXPECT_EQ(m.input, parse_spec(input)) << text << ": " << to_string(m.input);
  EXPECT_EQ(m.norm, parse_spec(norm)) << text << ": " << to_string(m.norm);
  EXPECT_EQ(flags_of(m), flags) << text;
}

/// Alike but for the name.
void expect_alike(std::string_view text, std::string_view other) {
  Method m = parse_method(text);
  m.name = other;
  EXPECT_EQ(m, parse_method(other)) << text;
}

class MethodPresets : public testing::TestWithParam<MethodPreset> {};

TEST_P(MethodPresets, AreValidAndParsedByTheirName) {
  const MethodPreset& p = GetParam();
  EXPECT_EQ(p.name, p.method.name);
  EXPECT_FALSE(p.summary.empty());
  EXPECT_NO_THROW(validate(p.method, "test"));
  EXPECT_EQ(parse_method(p.name), p.method);
}

INSTANTIATE_TEST_SUITE_P(, MethodPresets, testing::ValuesIn(method_presets().begin(), method_presets().end()), test::kCaseName);

TEST(Method, PresetsAreThePublishedMethods) {
  std::vector<std::string_view> names;
  for (const MethodPreset& p : method_presets()) names.push_back(p.name);
  EXPECT_EQ(names, (std::vector<std::string_view>{"fp32", "exact", "blockwise", "projection", "actnn", "division", "int8", "satchel"}));
  expect_method("fp32", "bits=32", "bits=32", "plain");
  expect_method("exact", "exact", "block=row,levels=even", "aggregate data dropout 1024");
  expect_method("blockwise", "blockwise", "block=64rows", "aggregate data dropout 1024");
  expect_method("projection", "bits=32,project=8,rows=64", "bits=32", "");
  expect_method("satchel", "bits=2", "satchel", "shared");
}

TEST(Method, TheNameIsTheTextGiven) {
  for (const char* text : {"satchel", "satchel,bits=3", "blockwise,levels=even,block=16rows", "gact", "bits=4,block=128,levels=even"}) {
    const Method m = parse_method(text);
    EXPECT_EQ(m.name, text);
    EXPECT_EQ(parse_method(m.name), m);
  }
  EXPECT_EQ(parse_method("  exact , bits=4 ").name, "exact , bits=4");
}

TEST(Method, OptionsGoToInputAndNormAlike) {
  expect_method("blockwise,levels=even,block=16rows", "exact,block=16rows", "block=16rows,levels=even", "aggregate data dropout 1024");
  expect_method("satchel,bits=3,block=128", "bits=3,block=128", "satchel,bits=3,block=128", "shared");
  expect_method("satchel,header=f32,round=nearest", "round=nearest,header=f32", "satchel,round=nearest,header=f32", "shared");
  expect_method("projection,bits=4,block=64", "bits=4,block=64,project=8,rows=64", "bits=4,block=64", "");
}

TEST(Method, ProjectionsAreOfInputsAndSidesOfNorms) {
  expect_method("exact,project=4,rows=64,hadamard=yes", "exact,project=4,hadamard=yes,rows=64", "block=row,levels=even",
                "aggregate data dropout 1024");
  expect_method("satchel,side=both", "bits=2", "side=both", "shared");
  expect_method("satchel,side=both,bits=4", "bits=4", "bits=4,side=both", "shared");
  expect_method("satchel,side=none", "bits=2", "bits=2", "shared");
  expect_alike("exact,side=none", "exact");
}

TEST(Method, AProjectionCannotBeShared) {
  expect_method("satchel,project=8", "project=8", "bits=2", "");
  expect_alike("satchel,project=none", "satchel");
  expect_method("bits=2,project=8", "project=8", "bits=2", "");
  EXPECT_EQ(parse_error("satchel,project=8,side=one"), "[method] side codes need shared saves, got 'satchel,project=8,side=one'");
}

TEST(Method, AProjectionCanBeTakenAway) {
  expect_method("exact,project=none", "block=row,levels=even", "block=row,levels=even", "aggregate data dropout 1024");
  expect_method("projection,project=none", "bits=32", "bits=32", "");
  EXPECT_EQ(parse_error("projection,project=none,rows=64"),
            "[method] rows needs a projection (project=RATIO), got 'projection,project=none,rows=64'");
}

TEST(Method, ThirtyTwoBitsHaveNoSide) {
  expect_method("satchel,bits=32", "bits=32", "bits=32", "shared");
  expect_alike("satchel,bits=32,side=none", "satchel,bits=32");
  EXPECT_EQ(parse_error("satchel,bits=32,side=one"), "[method] side=one takes 2 or 3 bits, got 'satchel,bits=32,side=one'");
}

TEST(Method, ASpecAloneIsShared) {
  expect_method("gact", "gact", "gact", "shared");
  expect_method("bits=4,block=128,levels=even", "gact,block=128", "gact,block=128", "shared");
  expect_method("bits=3,side=one", "bits=3", "satchel,bits=3", "shared");
}

TEST(Method, ImageMethodsKeepLayerByLayer) {
  const Method actnn = parse_method("actnn");
  EXPECT_EQ(actnn.input, parse_spec("actnn"));
  EXPECT_EQ(actnn.norm, parse_spec("actnn"));
  EXPECT_TRUE(actnn.adaptive && !actnn.shared && actnn.keeps_dropout && !actnn.swap);
  const Method division = parse_method("division,bits=4");
  EXPECT_EQ(division.input, parse_spec("division,bits=4"));
  EXPECT_EQ(division.norm, division.input);
  EXPECT_FALSE(division.adaptive || division.shared);
}

TEST(Method, Int8KeepsLayerByLayerInEightBits) {
  const Method int8 = parse_method("int8");
  EXPECT_EQ(int8.input, parse_spec("bits=8,block=256,levels=even"));
  EXPECT_EQ(int8.norm, int8.input);
  EXPECT_FALSE(int8.adaptive || int8.shared);
  EXPECT_EQ(parse_method("int8,block=128").input.block, 128);
}

TEST(Method, ActnnHasLevels) {
  EXPECT_TRUE(parse_method("actnn,level=0").torch_baseline);
  const Method l1 = parse_method("actnn,level=1"), l2 = parse_method("actnn,level=2"), l4 = parse_method("actnn,level=4");
  EXPECT_EQ(l1.input.bits, 4);
  EXPECT_EQ(l1.norm.bits, kKeep);
  EXPECT_FALSE(l1.adaptive);
  EXPECT_EQ(l2.norm.bits, 4);
  EXPECT_FALSE(l2.adaptive || l2.swap);
  EXPECT_TRUE(l4.adaptive && l4.swap);
  EXPECT_EQ(l4.input.bits, 2);
  EXPECT_FALSE(parse_method("actnn,adaptive=no").adaptive);
  EXPECT_EQ(parse_error("actnn,level=6"), "[method] level must be 0 to 5, got 'actnn,level=6'");
  EXPECT_EQ(parse_error("exact,level=1"), "[method] level is an option of actnn, got 'exact,level=1'");
  EXPECT_EQ(parse_error("actnn,level=1,level=2"), "[method] level is given twice, got 'actnn,level=1,level=2'");
  EXPECT_EQ(parse_error("actnn,level=0,bits=2"), "[method] level=0 takes no other options, got 'actnn,level=0,bits=2'");
  EXPECT_EQ(parse_error("actnn,level=4,adaptive=no"),
            "[method] swapping needs bits per sample (adaptive=yes), got 'actnn,level=4,adaptive=no'");
  EXPECT_EQ(parse_error("actnn,adaptive=maybe"), "[method] adaptive must be yes or no, got 'actnn,adaptive=maybe'");
}

TEST(Method, NormsThatNobodyReadsMayHaveTheirOwnBits) {
  const Method m = parse_method("satchel,bits=3,residual=1");
  EXPECT_EQ(norm_spec(m, 64, 100).bits, 1);  // as asked for, however few values the norm has
  EXPECT_EQ(shared_spec(m, Norm::batch, Activation::relu, 64, 10000).bits, 3);
  EXPECT_EQ(norm_spec(parse_method("satchel,bits=3"), 64, 10000).bits, 3);
  EXPECT_EQ(parse_method("satchel,bits=3,norm_bits=1").residual, 1) << "the name of today; residual is the former one";
  EXPECT_EQ(parse_method("satchel,mean_bits=2.25").mean, 2.25);
  EXPECT_EQ(parse_error("satchel,norm_bits=1,residual=1"),
            "[method] residual is the former name of norm_bits: give one, got 'satchel,norm_bits=1,residual=1'");
  EXPECT_EQ(parse_error("satchel,mean_bits=4"), "[method] mean_bits must be 2 to 3, got 'satchel,mean_bits=4'");
  EXPECT_EQ(parse_error("exact,residual=1"), "[method] residual is an option of shared methods, got 'exact,residual=1'");
}

/// Of 3 bits beside norms of 1 or 2, of 4 beside 3 or 4, and never of fewer than the norms: in even levels of plain blocks.
TEST(Method, DerivativesTakeABitMoreThanNormsOfFew) {
  const auto spec_of = [](const char* text) {
    const std::vector<Keep> keeps = keeps_of(parse_method(text), {Role::derivative});
    EXPECT_EQ(keeps.size(), 1u) << text;
    return keeps.front().spec;
  };
  for (const char* text :
       {"satchel", "satchel,norm_bits=1", "satchel,side=both", "actnn", "division", "exact", "blockwise", "bits=1,side=none"}) {
    const CodecSpec spec = spec_of(text);
    EXPECT_EQ(spec.bits, 3) << text;
    EXPECT_TRUE(spec.levels == Levels::even && spec.block == 256 && spec.side == Side::none) << text;
    EXPECT_TRUE(spec.rounding == Rounding::stochastic && std::holds_alternative<Identity>(spec.transform)) << text;
  }
  for (const char* text : {"satchel,bits=3", "gact", "actnn,level=2"}) EXPECT_EQ(spec_of(text).bits, 4) << text;
  EXPECT_EQ(spec_of("bits=5,side=none").bits, 5);
  EXPECT_EQ(spec_of("int8").bits, 8);
  for (const char* text : {"satchel,bits=32", "projection", "actnn,level=1"}) EXPECT_EQ(spec_of(text).bits, kKeep) << text;
  EXPECT_EQ(spec_of("satchel,derivative_bits=4").bits, 4);
  EXPECT_EQ(spec_of("int8,derivative_bits=2").bits, 2);
  EXPECT_EQ(norm_spec(parse_method("satchel,derivative_bits=4"), 64, 10000).bits, 2) << "the norm's own stay";
  EXPECT_EQ(parse_error("satchel,derivative_bits=9"), "[method] derivative_bits must be 1 to 8, got 'satchel,derivative_bits=9'");
  EXPECT_EQ(parse_error("actnn,level=0,derivative_bits=4"),
            "[method] derivative_bits is an option of methods that pack, got 'actnn,level=0,derivative_bits=4'");
  EXPECT_EQ(parse_error("satchel,derivative_bits=4,derivative_bits=3"),
            "[method] derivative_bits is given twice, got 'satchel,derivative_bits=4,derivative_bits=3'");
}

TEST(Method, SharedMapsMayHaveAMeanOrABudget) {
  EXPECT_EQ(parse_method("satchel").mean, 0);
  EXPECT_EQ(parse_method("satchel,mean=2.25").mean, 2.25);
  EXPECT_EQ(parse_method("satchel,mean=2.25,residual=1").residual, 1);
  EXPECT_EQ(parse_method("satchel,budget=1.5KiB").budget, 1536);
  EXPECT_EQ(parse_method("satchel,budget=2GB").budget, 2'000'000'000);
  EXPECT_EQ(parse_method("satchel,budget=7").budget, 7);
  EXPECT_EQ(parse_method("satchel,budget=1TiB").budget, int64_t{1} << 40);
  EXPECT_EQ(parse_method("satchel,budget=32768TiB").budget, int64_t{1} << 55);
  EXPECT_TRUE(allocates_bits(parse_method("satchel,mean=2")) && allocates_bits(parse_method("satchel,budget=1GB")));
  EXPECT_TRUE(allocates_bits(parse_method("actnn")) && !allocates_bits(parse_method("satchel")) &&
              !allocates_bits(parse_method("actnn,level=0")));
  for (const char* text :
       {"satchel,mean=1.9", "satchel,mean=3.5", "satchel,mean=two", "satchel,mean=2.5x", "satchel,mean=", "satchel,mean=nan"}) {
    EXPECT_EQ(parse_error(text), "[method] mean must be 2 to 3, got '" + std::string(text) + "'");
  }
  for (const char* text : {"satchel,budget=0", "satchel,budget=-1GB", "satchel,budget=1XB", "satchel,budget=1e30",
                           "satchel,budget=32769TiB", "satchel,budget=inf"}) {
    EXPECT_EQ(parse_error(text), "[method] budget must be 1 to 2^55 bytes, as in 1.2GiB, 900MB or 1000, got '" + std::string(text) + "'");
  }
  EXPECT_EQ(parse_error("satchel,mean=2,budget=1GB"), "[method] mean and budget exclude each other, got 'satchel,mean=2,budget=1GB'");
  Method both = parse_method("satchel,mean=2.25");
  both.budget = 1000;
  EXPECT_EQ(error_of([&] { validate(both, "train"); }), "[train] mean and budget exclude each other, got a budget of 1000 beside a mean");
  EXPECT_EQ(parse_error("satchel,mean=2,mean=3"), "[method] mean is given twice, got 'satchel,mean=2,mean=3'");
  EXPECT_EQ(parse_error("actnn,mean=2"), "[method] mean is an option of satchel, got 'actnn,mean=2'");
  for (const char* text : {"satchel,mean=2.5,bits=3", "satchel,budget=1GB,side=both", "satchel,mean=2.5,side=none"}) {
    EXPECT_EQ(parse_error(text),
              "[method] mean and budget need shared saves in one-sided codes of 2 bits, got '" + std::string(text) + "'");
  }
  EXPECT_THROW(validate_for_graph(parse_method("satchel,mean=2.5"), "method"), Error);
}

TEST(Method, GraphsHaveNoMapsToFilter) {
  for (const char* text : {"division", "satchel,lowpass=8"}) {
    try {
      validate_for_graph(parse_method(text), "method");
      ADD_FAILURE() << text;
    } catch (const Error& e) {
      EXPECT_EQ(std::string(e.what()), std::string("[method] a low-pass does not fit a graph layer, got '") + text + "'");
    }
  }
  EXPECT_NO_THROW(validate_for_graph(parse_method("actnn"), "method"));
  EXPECT_THROW(validate_for_graph(parse_method("actnn,level=4"), "method"), Error);
}

TEST(Method, ErrorsNameRuleAndText) {
  EXPECT_EQ(parse_error("nonsense"),
            "[method] a method must be one of fp32, exact, blockwise, projection, actnn, division, int8, satchel, gact, or options "
            "(key=value), got "
            "'nonsense'");
  EXPECT_EQ(parse_error(""), parse_error("nonsense").substr(0, parse_error("nonsense").size() - 10) + "''");
  EXPECT_EQ(parse_error("fp32,bits=4"), "[method] fp32 takes no options, got 'fp32,bits=4'");
  EXPECT_EQ(parse_error("satchel,bits=9"), "[method] bits must be 1 to 8 or 32, got 'satchel,bits=9'");
  EXPECT_EQ(parse_error("satchel,bits=4"), "[method] side=one takes 2 or 3 bits, got 'satchel,bits=4'");
  EXPECT_EQ(parse_error("satchel,bits=2,bits=3"), "[method] an option may be given once, got 'satchel,bits=2,bits=3'");
  EXPECT_EQ(parse_error("exact,satchel"), "[method] after a method's name come options (key=value), got 'exact,satchel'");
  EXPECT_EQ(parse_error("exact,"), "[method] after a method's name come options (key=value), got 'exact,'");
  EXPECT_EQ(parse_error("exact,side=one"), "[method] side codes need shared saves, got 'exact,side=one'");
  EXPECT_EQ(parse_error("satchel,rows=64"), "[method] rows needs a projection (project=RATIO), got 'satchel,rows=64'");
  EXPECT_EQ(parse_error("satchel,side=relu"),
            "[method] side must be none, one or both; relu comes by itself without a norm, got 'satchel,side=relu'");
  EXPECT_EQ(parse_error("satchel,colour=red").rfind("[method] option must be one of bits, ", 0), 0u);
}

TEST(Method, SeveralInOneText) {
  const auto names = [](std::string_view text) {
    std::vector<std::string> out;
    for (const Method& m : parse_methods(text)) out.push_back(m.name);
    return out;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(names("satchel"), Names{"satchel"});
  EXPECT_EQ(names("fp32,exact,blockwise,satchel"), (Names{"fp32", "exact", "blockwise", "satchel"}));
  EXPECT_EQ(names("fp32, blockwise,block=16rows,levels=even, satchel,bits=3"),
            (Names{"fp32", "blockwise,block=16rows,levels=even", "satchel,bits=3"}));
  EXPECT_EQ(names("bits=4,block=128;bits=2;gact"), (Names{"bits=4,block=128", "bits=2", "gact"}));
  EXPECT_EQ(names("bits=4,block=128,satchel"), (Names{"bits=4,block=128", "satchel"}));
  for (const char* text : {"", "fp32,,exact", "fp32;", ";fp32", "fp32,exact,"}) {
    EXPECT_NE(error_of([text] { parse_methods(text); }), "accepted") << text;
  }
}

TEST(Method, NormBlocksInRowsBecomeValues) {
  const auto block = [](const char* method, int64_t width) { return norm_spec(parse_method(method), width, 10000).block; };
  EXPECT_EQ(block("exact", 128), 128);
  EXPECT_EQ(block("exact", 4096), 1024);
  EXPECT_EQ(block("blockwise", 128), 1024);
  EXPECT_EQ(block("blockwise,block=4rows", 128), 512);
  EXPECT_EQ(block("blockwise,block=100000", 128), 100000);  // in values already
  EXPECT_EQ(block("satchel", 128), 256);
  EXPECT_EQ(block("bits=2,block=64rows", 128), 64 * 128);  // a spec alone is never cut
  EXPECT_EQ(block("bits=2,block=map", 128), kMap);
  EXPECT_EQ(block("bits=2,block=1099511627776rows", int64_t{1} << 31), int64_t{1} << 40);
  EXPECT_EQ(norm_spec(parse_method("satchel"), 128, 10000).side, Side::none);
  EXPECT_EQ(error_of([] { norm_spec(Method{}, 0, 1); }), "[method] a norm's rows must have 1 value or more, got 0");
}

TEST(Method, EveryLayerHasTheSideCodeThatFits) {
  const auto expect_spec = [](const char* method, Norm norm, Activation activation, const char* expected) {
    const CodecSpec made = shared_spec(parse_method(method), norm, activation, 128, 1 << 20);
    EXPECT_EQ(made, parse_spec(expected)) << method << ": " << to_string(made);
  };
  using enum Activation;
  expect_spec("satchel", Norm::batch, relu, "satchel");
  expect_spec("satchel", Norm::layer, relu, "satchel");
  expect_spec("satchel,bits=3", Norm::batch, relu, "satchel,bits=3");
  expect_spec("satchel,side=both", Norm::batch, relu, "side=both");
  expect_spec("satchel", Norm::none, relu, "side=relu");
  expect_spec("satchel,side=both,bits=4", Norm::none, relu, "bits=3,side=relu");
  expect_spec("satchel", Norm::batch, leaky_relu, "bits=3,side=both");
  expect_spec("satchel,bits=3", Norm::none, leaky_relu, "bits=4,side=both");
  expect_spec("satchel,side=both,bits=4", Norm::batch, leaky_relu, "bits=4,side=both");
  expect_spec("satchel", Norm::batch, elu, "bits=3,side=both");
  expect_spec("satchel", Norm::batch, none, "bits=2");
  for (const Activation activation : {none, relu, leaky_relu, elu}) {
    expect_spec("satchel,bits=32", Norm::batch, activation, "bits=32");
    expect_spec("gact", Norm::batch, activation, "gact");  // a mask stands beside it
  }
  expect_spec("exact", Norm::batch, elu, "bits=3,block=128,levels=even,side=both");
  expect_spec("exact", Norm::batch, relu, "block=128,levels=even");
  expect_spec("exact,bits=4", Norm::batch, elu, "bits=4,block=128,levels=even,side=both");
  expect_spec("exact,bits=8", Norm::batch, elu, "bits=8,block=128,levels=even");
  expect_spec("projection", Norm::batch, elu, "bits=32");
}

// The table of docs/theory.md 8: bits until variance / count ≤ 5e-4.
TEST(Method, NormsOfFewValuesTakeMoreBits) {
  const auto made = [](const char* method, Activation activation, int64_t count) {
    const CodecSpec spec = shared_spec(parse_method(method), Norm::batch, activation, 128, count);
    return to_string(spec);
  };
  using enum Activation;
  EXPECT_EQ(made("satchel", relu, 4096), "satchel");
  EXPECT_EQ(made("satchel", relu, 4095), "satchel,bits=3");
  EXPECT_EQ(made("satchel", relu, 100), "satchel,bits=3");
  EXPECT_EQ(made("satchel", relu, 64), "bits=4,side=both");
  EXPECT_EQ(made("satchel", relu, 32), "bits=5");
  EXPECT_EQ(made("satchel", relu, 6), "bits=6");
  EXPECT_EQ(made("satchel", relu, 1), "bits=7");
  EXPECT_EQ(made("satchel", none, 2000), "bits=2");
  EXPECT_EQ(made("satchel", none, 800), "bits=3");
  EXPECT_EQ(made("satchel", leaky_relu, 300), "bits=3,side=both");
  EXPECT_EQ(made("satchel", leaky_relu, 200), "bits=4,side=both");
  for (int64_t count = 1; count < 20000; count += 1 + count / 3) {
    for (const Activation activation : {none, relu, leaky_relu}) {
      EXPECT_LE(norm_bias(shared_spec(parse_method("satchel"), Norm::batch, activation, 128, count), count), 5e-4) << count;
    }
  }
  EXPECT_EQ(made("satchel,norm_bias=0", relu, 1), "satchel");
  EXPECT_EQ(made("satchel,norm_bias=0.1", relu, 5000), "satchel");
  // Where the gradient of x does not read the code it stays as small as it was; off=mean keeps the bytes of earlier versions.
  EXPECT_EQ(made("satchel", relu, 0), "satchel,off=mean");
  EXPECT_EQ(made("satchel,off=mean", relu, 10), "satchel,off=mean");
  EXPECT_EQ(made("exact", relu, 10), "gact,bits=2,block=128");  // as published
  EXPECT_EQ(parse_error("exact,norm_bias=0"), "[method] norm_bias is an option of shared methods, got 'exact,norm_bias=0'");
  EXPECT_EQ(parse_error("satchel,norm_bias=2"), "[method] norm_bias must be 0 to 1, got 'satchel,norm_bias=2'");
}

TEST(Method, FlagsMustFit) {
  const auto error = [](const char* text, const auto& change) {
    Method m = parse_method(text);
    change(m);
    return error_of([&m] { validate(m, "layer"); });
  };
  EXPECT_EQ(error("satchel", [](Method& m) { m.norm.bits = 9; }), "[layer] bits must be 1 to 8 or 32, got 9");
  EXPECT_EQ(error("satchel", [](Method& m) { m.input.side = Side::both; }), "[layer] inputs of layers take no side code, got side=both");
  EXPECT_EQ(error("exact", [](Method& m) { m.shared = true; }), "[layer] shared saves take no projection, got exact");
  EXPECT_EQ(error("exact", [](Method& m) { m.norm.transform = RandomProjection{}; }), "[layer] norms take no projection, got exact");
  EXPECT_EQ(error("satchel", [](Method& m) { m.keeps_aggregate = true; }), "[layer] shared saves keep no aggregate, got satchel");
  EXPECT_EQ(error("exact", [](Method& m) { m.longest_block = -1; }), "[layer] longest_block must be 1 to 2^40, or 0 for any, got -1");
  EXPECT_EQ(error("satchel", [](Method& m) { m.packs_data = m.keeps_dropout = true; }), "accepted");
}

}  // namespace
}  // namespace satchel
