// Every norm × activation × dropout × layout, followed by a layer with weights: gradients of torch at 32 bits, and what is kept is what is
// planned. One case: --gtest_filter='*layer_gelu_rows_satchel'.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "satchel/autograd/report.h"
#include "tests/autograd/pairs.h"

namespace satchel::test {
namespace {

struct PairMethod {
  Pair pair;
  std::string method;
};

std::string test_name(const testing::TestParamInfo<PairMethod>& info) {
  std::string name = name_of(info.param.pair) + "_" + info.param.method;
  std::ranges::replace_if(
      name, [](char c) { return c == ',' || c == '='; }, '_');
  return name;
}

std::vector<PairMethod> with_methods(const std::vector<std::string>& methods) {
  std::vector<PairMethod> all;
  for (const Pair& pair : all_pairs()) {
    for (const std::string& method : methods) all.push_back({pair, method});
  }
  return all;
}

std::string text_of_lines(const std::vector<SavedTensor>& lines) {
  std::string text;
  for (const SavedTensor& s : lines) {
    text += "\n  " + s.name + ' ' + s.kind + ' ' + std::to_string(s.bits) + " bits " + std::to_string(s.bytes) + " bytes";
    for (const int64_t size : s.shape) text += ' ' + std::to_string(size);
  }
  return text;
}

class PairsAt32Bits : public testing::TestWithParam<PairMethod> {};
class PairsKept : public testing::TestWithParam<PairMethod> {};

TEST_P(PairsAt32Bits, GradientsEqualTorch) { expect_exact(pair_case(GetParam().pair), GetParam().method); }

TEST_P(PairsKept, AsPlanned) {
  auto [pair, text] = GetParam();
  pair.fixed_masks = false;  // their seeds stand in a line of several
  const GradientCase c = pair_case(pair);
  const Inputs in = c.inputs();
  const Method method = parse_method(text);
  const at::Tensor out = c.ours(in, {method, "layer"});
  const std::vector<SavedTensor> kept = saved_tensors(out), plan = planned_lines(pair, in[0].sizes(), method);
  EXPECT_TRUE(kept == plan) << "kept" << text_of_lines(kept) << "\nplanned" << text_of_lines(plan);
  expect_bytes(c, text);
}

/// One that shares and two that keep each function's own: of x, and of x̂ where the norm is an image's.
INSTANTIATE_TEST_SUITE_P(, PairsAt32Bits,
                         testing::ValuesIn(with_methods({"satchel,bits=32", "exact,bits=32,project=none", "actnn,bits=32,adaptive=no"})),
                         test_name);
INSTANTIATE_TEST_SUITE_P(, PairsKept,
                         testing::ValuesIn(with_methods({"satchel", "exact", "blockwise", "projection", "actnn", "division", "gact"})),
                         test_name);

}  // namespace
}  // namespace satchel::test
