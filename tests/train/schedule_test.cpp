// Learning rates beside torch's own schedulers, stepped once a batch.
#include "satchel/train/schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>

#include "satchel/core/error.h"

namespace satchel {
namespace {

// Both sides take the same few operations in double, in another order: a handful of roundings of 2^−53.
constexpr double kRounding = 16 * 0x1p-53;

void expect_rates(const Schedule& schedule, const std::vector<std::pair<double, double>>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    const Rates r = rates_at(schedule, static_cast<int64_t>(i));
    EXPECT_NEAR(r.lr, expected[i].first, kRounding * schedule.lr) << "step " << i;
    EXPECT_NEAR(r.momentum, expected[i].second, kRounding) << "step " << i;
  }
}

Schedule of(Decay decay, int64_t steps) {
  Schedule s;
  s.decay = decay;
  s.lr = 0.5;
  s.steps = steps;
  return s;
}

TEST(Schedule, OneCycleIsTorchs) {
  // torch 2.11: OneCycleLR(SGD(lr=…), max_lr=0.5, total_steps=7), param_groups[0]'s lr and momentum before each step.
  expect_rates(of(Decay::onecycle, 7), {{0.020000000000000018, 0.94999999999999996},
                                        {0.49027831366747932, 0.85202535131927515},
                                        {0.45952218813485529, 0.85809559475540798},
                                        {0.33634191824027254, 0.88273174727893455},
                                        {0.17886938786982853, 0.9142263793315516},
                                        {0.049648395946632798, 0.94007068109339775},
                                        {1.9999999999999999e-06, 0.94999999999999996}});
  // total_steps=3: the top lies before the first step.
  expect_rates(of(Decay::onecycle, 3),
               {{0.49720771772545586, 0.85055845868874358}, {0.23131855133348753, 0.90373650467932121}, {1.9999999999999999e-06, 0.95}});
  EXPECT_NEAR(rates_at(of(Decay::onecycle, 20), 5).lr, 0.5, kRounding);  // 0.3·20 − 1 is the top
  EXPECT_NEAR(rates_at(of(Decay::onecycle, 1), 0).lr, 0.5 / 250000, kRounding);
}

TEST(Schedule, CosineIsTorchs) {
  // torch 2.11: CosineAnnealingLR(SGD(lr=0.5), T_max=8).
  std::vector<std::pair<double, double>> expected;
  for (const double lr : {0.5, 0.48096988312782168, 0.42677669529663687, 0.34567085809127246, 0.25, 0.15432914190872757,
                          0.073223304703363135, 0.019030116872178319})
    expected.emplace_back(lr, 0.9);
  expect_rates(of(Decay::cosine, 8), expected);
}

TEST(Schedule, StepsAreTorchs) {
  // torch 2.11: MultiStepLR(SGD(lr=0.5), [3, 5], gamma=0.2).
  Schedule s = of(Decay::step, 8);
  s.milestones = {3, 5};
  s.gamma = 0.2;
  expect_rates(s, {{0.5, 0.9}, {0.5, 0.9}, {0.5, 0.9}, {0.1, 0.9}, {0.1, 0.9}, {0.02, 0.9}, {0.02, 0.9}, {0.02, 0.9}});
}

// PolynomialLR(total_iters=4, power=0.9): 0.5·(1 − i/4)^0.9.
TEST(Schedule, PolyFallsToNothing) {
  expect_rates(of(Decay::poly, 4), {{0.5, 0.9}, {0.38594475336178524, 0.9}, {0.26794336563407328, 0.9}, {0.14358729437462936, 0.9}});
  EXPECT_GT(rates_at(of(Decay::poly, 1), 0).lr, 0);
}

TEST(Schedule, WarmUpRisesThenDecays) {
  Schedule s = of(Decay::cosine, 12);
  s.warmup = 4;
  expect_rates(s, {{0.125, 0.9}, {0.25, 0.9}, {0.375, 0.9}, {0.5, 0.9}, {0.5, 0.9}, {0.48096988312782168, 0.9}});
  s.decay = Decay::none;
  expect_rates(s, {{0.125, 0.9}, {0.25, 0.9}, {0.375, 0.9}, {0.5, 0.9}, {0.5, 0.9}});
  s.warmup = 12;  // all of it
  EXPECT_NEAR(rates_at(s, 11).lr, 0.5, kRounding);
}

TEST(Schedule, StepsBeyondTheEndsAreTheEnds) {
  for (const Decay decay : {Decay::none, Decay::cosine, Decay::step, Decay::onecycle, Decay::poly}) {
    const Schedule s = of(decay, 9);
    EXPECT_EQ(rates_at(s, -3).lr, rates_at(s, 0).lr);
    EXPECT_EQ(rates_at(s, 100).lr, rates_at(s, 8).lr);
    EXPECT_GT(rates_at(s, 100).lr, 0);
  }
}

TEST(Schedule, NamesWhatDoesNotFit) {
  const auto refused = [](const std::function<void(Schedule&)>& change, const std::string& text) {
    Schedule s = of(Decay::cosine, 10);
    change(s);
    try {
      validate(s);
      ADD_FAILURE() << "nothing was thrown, but " << text;
    } catch (const Error& e) {
      EXPECT_EQ(e.what(), text);
    }
  };
  EXPECT_NO_THROW(validate(of(Decay::onecycle, 1)));
  refused([](Schedule& s) { s.lr = 0; }, "[train] lr must be finite and above 0, got 0");
  refused([](Schedule& s) { s.lr = std::numeric_limits<double>::quiet_NaN(); }, "[train] lr must be finite and above 0, got nan");
  refused([](Schedule& s) { s.gamma = -1; }, "[train] gamma must be finite and above 0, got -1");
  refused([](Schedule& s) { s.momentum = 1; }, "[train] momentum must be at least 0 and below 1, got 1");
  refused([](Schedule& s) { s.steps = 0; }, "[train] a schedule must have steps, got 0");
  refused([](Schedule& s) { s.warmup = 11; }, "[train] warm-up must be 0 to 10 steps, got 11");
  refused(
      [](Schedule& s) {
        s.warmup = 1;
        s.decay = Decay::onecycle;
      },
      "[train] onecycle has a rise of its own: warm-up must be 0, got 1");
  refused([](Schedule& s) { s.milestones = {3, 3}; }, "[train] milestones must rise, got others");
  refused([](Schedule& s) { s.milestones = {0, 3}; }, "[train] milestones must be after the first step, got 0");
}

}  // namespace
}  // namespace satchel
