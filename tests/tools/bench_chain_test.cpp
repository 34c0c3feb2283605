// `satchel bench chain` as a user runs it, on the CPU.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "tests/tools/run_tool.h"

namespace satchel {
namespace {

using nlohmann::json;
using test::Outcome;

Outcome chain(const std::string& arguments) { return test::run_tool("bench chain --rows 64 --repeat 1 " + arguments); }

TEST(BenchChain, CountsBytesBesideTorch) {
  const Outcome r = chain("--channels 3072 --methods 'fp32;satchel;satchel,norm_bits=1;satchel,derivative_bits=4' --json -");
  ASSERT_EQ(r.code, 0) << r.out;
  const json out = json::parse(r.out, nullptr, /*allow_exceptions=*/false);
  ASSERT_FALSE(out.is_discarded()) << r.out;
  ASSERT_EQ(out["results"].size(), 5u);
  const int64_t values = 64 * 3072, blocks = values / 256;
  const auto bytes = [&](int i) { return out["results"][i]["bytes"].get<int64_t>(); };
  // torch: x and y in bf16, mean and deviation of a row, which its CPU kernel keeps in x's type.
  EXPECT_EQ(out["results"][0]["method"], "torch");
  EXPECT_GE(bytes(0), 2 * values * 2);
  EXPECT_LE(bytes(0), 2 * values * 2 + 2 * 64 * 4);
  EXPECT_EQ(bytes(1), bytes(0) + 2 * 3072 * 2);  // γ and β in x's type: torch was given them so
  // x̂ in 2 bits and a derivative in 3, a header of 4 bytes each a block, and a deviation a row.
  EXPECT_EQ(bytes(2), values * 5 / 8 + 2 * blocks * 4 + 64 * 4);
  EXPECT_EQ(bytes(3), values * 4 / 8 + 2 * blocks * 4 + 64 * 4);
  EXPECT_EQ(bytes(4), values * 6 / 8 + 2 * blocks * 4 + 64 * 4);
  EXPECT_GT(out["results"][2]["fewer"].get<double>(), 6);  // the goal of issue 15
  // The codes' noise is seen. A derivative's variance is .0048 of 3 bits, .0011 of 4, its mean square .456: x̂ adds little.
  const auto error = [&](int i) { return out["results"][i]["error"].get<double>(); };
  EXPECT_NEAR(error(2), 0.106, 0.01);
  EXPECT_NEAR(error(4), 0.054, 0.01);
}

TEST(BenchChain, TakesEveryNormAndActivation) {
  const auto code_of = [](const std::string& norm, const std::string& activation) {
    const Outcome r = chain("--channels 256 --dtype f32 --norm " + norm + " --activation " + activation);
    return r.code;
  };
  for (const char* activation : {"gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "relu", "leaky_relu", "elu"}) {
    EXPECT_EQ(code_of("layer", activation), 0) << activation;
  }
  for (const char* norm : {"none", "rms"}) EXPECT_EQ(code_of(norm, "gelu"), 0) << norm;
  EXPECT_EQ(code_of("layer", "none"), 0);
  EXPECT_EQ(code_of("none", "none"), 2) << "nothing to run";
}

}  // namespace
}  // namespace satchel
