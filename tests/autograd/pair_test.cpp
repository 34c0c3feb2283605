// Every norm × activation × dropout × layout, followed by a layer with weights: gradients of torch at 32 bits, and what is kept is what is
// planned. One case: --gtest_filter='*layer_gelu_rows_satchel'.
#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "satchel/autograd/report.h"
#include "tests/autograd/pairs.h"
#include "tests/one_thread.h"
#include "tests/support.h"

namespace satchel::test {
namespace {

struct PairMethod {
  Pair pair;
  std::string method;
};

void PrintTo(const PairMethod& p, std::ostream* out) { *out << name_of(p.pair) << ' ' << p.method; }

std::string test_name(const testing::TestParamInfo<PairMethod>& info) {
  return case_name(name_of(info.param.pair) + "_" + info.param.method);
}

std::vector<PairMethod> with_methods(const std::vector<std::string>& methods) {
  std::vector<PairMethod> all;
  for (const Pair& pair : all_pairs()) {
    for (const std::string& method : methods) all.push_back({pair, method});
  }
  return all;
}

class Pairs : public testing::TestWithParam<PairMethod> {
  const OneThread one_thread_;
};
class PairsAt32Bits : public Pairs {};
class PairsKept : public Pairs {};

TEST_P(PairsAt32Bits, GradientsEqualTorch) { expect_exact(pair_case(GetParam().pair), GetParam().method); }

TEST_P(PairsKept, AsPlanned) {
  auto [pair, text] = GetParam();
  pair.fixed_masks = false;  // their seeds stand in a line of several
  const GradientCase c = pair_case(pair);
  const Inputs in = c.inputs();
  const Method method = parse_method(text);
  const at::Tensor out = c.ours(in, {method, "layer"});
  const std::vector<SavedTensor> kept = saved_tensors(out), plan = planned_lines(pair, in[0].sizes(), method);
  EXPECT_TRUE(kept == plan) << "kept" << text_of(kept) << "\nplanned" << text_of(plan);
  expect_bytes(c, text);
}

/// One that shares and two that keep each function's own: of x, and of x̂ where the norm is an image's.
INSTANTIATE_TEST_SUITE_P(, PairsAt32Bits,
                         testing::ValuesIn(with_methods({"satchel,bits=32", "exact,bits=32,project=none", "actnn,bits=32,adaptive=no"})),
                         test_name);
INSTANTIATE_TEST_SUITE_P(
    , PairsKept, testing::ValuesIn(with_methods({"satchel", "exact", "blockwise", "projection", "actnn", "division", "int8", "gact"})),
    test_name);

}  // namespace
}  // namespace satchel::test
