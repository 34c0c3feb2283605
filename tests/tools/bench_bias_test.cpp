// `satchel bench bias` as a user runs it: gradients of the default method are right on average, and a biased code is found.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/tools/run_tool.h"

namespace satchel {
namespace {

using nlohmann::json;
using test::Outcome;

Outcome bias(const std::string& arguments) { return test::run_tool("bench bias " + arguments); }

// BatchNorm → ReLU with 4,096 rows and LayerNorm of 64 channels, each after a layer with weights. 40 seeds find a bias of 5 % of a
// gradient's norm where a single pass has 20 % of noise: z of T would be 5 or more.
constexpr const char* kQuick = "--nets batch,layer-64 --loss squares --seeds 40 --again 160 --json - ";

TEST(BenchBias, DefaultMethodIsRightOnAverage) {
  const Outcome r = bias(kQuick);
  EXPECT_EQ(r.code, 0) << r.out;
  const json out = json::parse(r.out, nullptr, /*allow_exceptions=*/false);
  ASSERT_FALSE(out.is_discarded()) << r.out;
  EXPECT_EQ(out["biased"], 0);
  ASSERT_EQ(out["results"].size(), 2u);
  // Before the norm, noise and all: a measurement that saw none of it would be no test.
  const json& tensors = out["results"][0]["tensors"];
  const auto found = std::find_if(tensors.begin(), tensors.end(), [](const json& t) { return t["name"] == "first"; });
  ASSERT_NE(found, tensors.end()) << r.out;
  const json& first = *found;
  EXPECT_GT(first["first"]["noise"].get<double>(), 0.01);
  EXPECT_LT(first["error_32_bits"].get<double>(), 1e-4);
}

/// Off values that decode to their channel's mean are wrong by the same amount in every pass.
TEST(BenchBias, FindsABiasedCode) {
  const Outcome r = bias("--nets batch --loss squares --seeds 40 --again 40 --method satchel,off=mean");
  EXPECT_EQ(r.code, 1) << r.out;
  EXPECT_NE(r.out.find("[bench] weight gradients must be right on average"), std::string::npos) << r.out;
  EXPECT_NE(r.out.find("1 of 5 biased"), std::string::npos) << r.out;
}

/// One of every norm with every activation; all of them take minutes (docs/results.md).
TEST(BenchBias, TakesANormWithAnActivation) {
  const Outcome r = bias("--nets layer_gelu_tanh_rows_dropout,rms_silu_images --loss squares --seeds 20 --again 160 --json -");
  EXPECT_EQ(r.code, 0) << r.out;
  const json out = json::parse(r.out, nullptr, /*allow_exceptions=*/false);
  ASSERT_FALSE(out.is_discarded()) << r.out;
  ASSERT_EQ(out["results"].size(), 2u);
  EXPECT_EQ(out["results"][0]["net"], "layer_gelu_tanh_rows_dropout");
  EXPECT_EQ(out["results"][0]["tensors"].size(), 5u);  // two weights, γ, β, the last bias
  EXPECT_EQ(out["results"][1]["tensors"].size(), 5u);  // three weights, γ, the last bias
  EXPECT_GT(out["results"][0]["tensors"][0]["first"]["noise"].get<double>(), 0.01);
  EXPECT_EQ(bias("--nets layer_gelu").code, 2);
}

TEST(BenchBias, RefusesWhatItDoesNotKnow) {
  EXPECT_EQ(bias("--nets batch,nothing").code, 2);
  EXPECT_NE(bias("--nets nothing").out.find("got 'nothing'"), std::string::npos);
  EXPECT_EQ(bias("--method fp32,satchel").code, 2);
  EXPECT_EQ(bias("--seeds 1").code, 2);
}

}  // namespace
}  // namespace satchel
