// Seeds of a step: the same numbers one by one or together, and what a bank does when it is empty.
#include "satchel/train/step.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "satchel/autograd/save_policy.h"
#include "satchel/core/error.h"

namespace satchel {
namespace {

std::vector<int64_t> numbers(int64_t count) {
  std::vector<int64_t> all;
  for (int64_t i = 0; i < count; ++i) all.push_back(fresh_seed(at::kCPU).item<int64_t>());
  return all;
}

TEST(Seeds, ABankGivesTheNumbersOfSingleDraws) {
  at::manual_seed(5);
  const std::vector<int64_t> expected = numbers(7);
  for (const int64_t size : {0, 1, 4, 7, 9}) {
    at::manual_seed(5);
    const SeedBank bank(draw_seeds(size, at::kCPU));
    EXPECT_EQ(numbers(7), expected) << size;  // those beyond the bank are the generator's next ones
    EXPECT_EQ(bank.asked(), 7);
  }
}

TEST(Seeds, ABanksSeedsAreViewsOfEightBytes) {
  at::manual_seed(6);
  const at::Tensor line = draw_seeds(3, at::kCPU);
  const SeedBank bank(line);
  fresh_seed(at::kCPU);
  const at::Tensor second = fresh_seed(at::kCPU);
  EXPECT_EQ(second.nbytes(), 8u);
  EXPECT_EQ(second.const_data_ptr<int64_t>(), line.const_data_ptr<int64_t>() + 1);
  redraw_seeds(line);  // as between two replays
  EXPECT_EQ(second.item<int64_t>(), line[1].item<int64_t>());
}

TEST(Seeds, RedrawnSeedsAreTheNextOnes) {
  at::manual_seed(7);
  const std::vector<int64_t> expected = numbers(4);
  at::manual_seed(7);
  const at::Tensor line = draw_seeds(2, at::kCPU);
  redraw_seeds(line);
  EXPECT_EQ(line[0].item<int64_t>(), expected[2]);
  EXPECT_EQ(line[1].item<int64_t>(), expected[3]);
}

TEST(Seeds, AClosedBankRefusesAndBanksNest) {
  at::manual_seed(8);
  const SeedBank outer(draw_seeds(2, at::kCPU));
  {
    const SeedBank inner(draw_seeds(1, at::kCPU), SeedBank::End::refuses);
    EXPECT_EQ(numbers(1).size(), 1u);
    try {
      fresh_seed(at::kCPU);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& e) {
      EXPECT_STREQ(e.what(), "[seeds] a step must ask for at most 1 seeds, got 2");
    }
  }
  EXPECT_EQ(outer.asked(), 0);
  numbers(1);
  EXPECT_EQ(outer.asked(), 1);
  std::thread([] { numbers(1); }).join();  // another thread has none
  EXPECT_EQ(outer.asked(), 1);
  EXPECT_THROW(SeedBank(at::empty({2}, at::kFloat)), Error);
  EXPECT_THROW(SeedBank(at::Tensor()), Error);
  EXPECT_EQ(numbers(1).size(), 1u);  // what was refused left the outer one in place
  EXPECT_EQ(outer.asked(), 2);
}

TEST(Seeds, ACudaGraphNeedsAGpu) {
  TrainOptions options;
  ParameterStep optimizer(options, {at::empty({1})});
  try {
    const TrainStep step({}, optimizer, at::kCPU, true);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "[train] cuda_graph needs device cuda, got cpu");
  }
}

}  // namespace
}  // namespace satchel
