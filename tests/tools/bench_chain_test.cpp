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
  const Outcome r = chain("--channels 3072 --methods 'fp32;satchel;satchel,norm_bits=1' --json -");
  ASSERT_EQ(r.code, 0) << r.out;
  const json out = json::parse(r.out, nullptr, /*allow_exceptions=*/false);
  ASSERT_FALSE(out.is_discarded()) << r.out;
  ASSERT_EQ(out["results"].size(), 4u);
  const int64_t values = 64 * 3072, blocks = values / 256;
  const auto bytes = [&](int i) { return out["results"][i]["bytes"].get<int64_t>(); };
  // torch: x and y in bf16, mean and deviation of a row, which its CPU kernel keeps in x's type.
  EXPECT_EQ(out["results"][0]["method"], "torch");
  EXPECT_GE(bytes(0), 2 * values * 2);
  EXPECT_LE(bytes(0), 2 * values * 2 + 2 * 64 * 4);
  EXPECT_EQ(bytes(1), bytes(0));
  // x̂ in 2 bits and a derivative in 4, a header of 4 bytes each a block, and a deviation a row.
  EXPECT_EQ(bytes(2), values * 6 / 8 + 2 * blocks * 4 + 64 * 4);
  EXPECT_EQ(bytes(3), values * 5 / 8 + 2 * blocks * 4 + 64 * 4);
  EXPECT_GT(out["results"][3]["fewer"].get<double>(), 6);
  EXPECT_GT(out["results"][2]["error"].get<double>(), 0.01);  // the codes' noise is seen
}

TEST(BenchChain, TakesEveryNormAndActivation) {
  for (const char* norm : {"none", "layer", "rms"}) {
    for (const char* activation : {"none", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "relu", "leaky_relu", "elu"}) {
      const Outcome r = chain(std::string("--channels 256 --dtype f32 --norm ") + norm + " --activation " + activation);
      const bool neither = std::string(norm) + activation == "nonenone";
      EXPECT_EQ(r.code, neither ? 2 : 0) << norm << " " << activation << ": " << r.out;
    }
  }
}

}  // namespace
}  // namespace satchel
