// Features aggregated once: accepted for the adjacency and the features that they were made of, as they were then.
#include "satchel/graph/input.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>

#include "satchel/core/error.h"
#include "satchel/graph/gcn.h"
#include "satchel/graph/sage.h"

namespace satchel::test {
namespace {

constexpr int64_t kNodes = 40;

Csr random_graph(uint64_t seed) {
  at::manual_seed(seed);
  return made_symmetric(csr_from_coo(at::randint(kNodes, {200}), at::randint(kNodes, {200}), kNodes, kNodes));
}

std::string refusal_of(const GraphInput& input, const Adjacency& a) {
  const at::Tensor w = at::randn({5, 6}).requires_grad_();
  std::string text;
  for (const bool by_gcn : {true, false}) {
    try {
      by_gcn ? gcn(input, a, w, {}) : sage(input, a, {w, w, {}});
      text += "accepted ";
    } catch (const Error& e) {
      text += std::string(e.what()).find("must be made ") != std::string::npos ? "refused " : e.what();
    }
  }
  return text;
}

TEST(Aggregated, CountsForItsAdjacencyAlone) {
  const Csr graph = random_graph(1);
  const Adjacency mean = mean_adjacency(graph), plain = adjacency(graph);  // one structure, other numbers
  const GraphInput input = with_aggregated({at::randn({kNodes, 6})}, mean);
  EXPECT_EQ(refusal_of(input, mean), "accepted accepted ");
  EXPECT_EQ(refusal_of(input, plain), "refused refused ");
  EXPECT_EQ(refusal_of(input, mean_adjacency(random_graph(2))), "refused refused ");
  Adjacency changed = mean_adjacency(graph);
  const GraphInput other = with_aggregated({at::randn({kNodes, 6})}, changed);
  at::Tensor& numbers = changed.matrix.row_scale.defined() ? changed.matrix.row_scale : changed.matrix.value;
  numbers.mul_(2);
  EXPECT_EQ(refusal_of(other, changed), "refused refused ");
}

TEST(Aggregated, StandsBesideItsFeaturesInOneMatrixAlone) {
  const at::Tensor both = at::randn({kNodes, 12}), x = both.narrow(1, 0, 6), ax = both.narrow(1, 6, 6);
  const at::Tensor joined = side_by_side(x, ax);
  ASSERT_TRUE(joined.defined());
  EXPECT_TRUE(at::equal(joined, both));
  EXPECT_FALSE(side_by_side(ax, x).defined()) << "the other way round";
  EXPECT_FALSE(side_by_side(x, ax.clone()).defined()) << "memory of its own";
  EXPECT_FALSE(side_by_side(x, at::Tensor()).defined());
  EXPECT_FALSE(side_by_side(x, both.narrow(1, 5, 6)).defined()) << "overlaps";
  EXPECT_FALSE(side_by_side(x, ax.narrow(0, 0, 20)).defined()) << "some rows";
  const at::Tensor wide = at::randn({kNodes, 16});
  EXPECT_FALSE(side_by_side(wide.narrow(1, 0, 6), wide.narrow(1, 6, 6)).defined()) << "a gap behind rows";
}

TEST(Aggregated, CountsForItsFeaturesAlone) {
  const Adjacency a = mean_adjacency(random_graph(1));
  const GraphInput input = with_aggregated({at::randn({kNodes, 6})}, a);
  GraphInput same = input, other = input;
  same.x = input.x.detach();
  EXPECT_EQ(refusal_of(same, a), "accepted accepted ") << "another name of the same memory";
  other.x = at::randn({kNodes, 6});
  EXPECT_EQ(refusal_of(other, a), "refused refused ");
  input.x.add_(1);
  EXPECT_EQ(refusal_of(input, a), "refused refused ") << "features that have changed since";
}

TEST(GraphLayers, BlameTheInput) {
  const Adjacency a = mean_adjacency(random_graph(1));
  const at::Tensor x = at::randn({kNodes, 7}), w = at::randn({5, 6});
  for (const bool by_gcn : {true, false}) {
    try {
      by_gcn ? gcn(x, a, w, {}) : sage(x, a, {w, w, {}});
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& e) {
      const std::string op = by_gcn ? "[gcn]" : "[sage]";
      EXPECT_EQ(e.what(), op + " x must be float32, float16 or bfloat16 [40, 6] on cpu, got Float [40, 7] on cpu");
    }
  }
}

}  // namespace
}  // namespace satchel::test
