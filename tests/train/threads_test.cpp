// Two trainers in two threads: each gives what it gives alone, bit for bit.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "satchel/data/synthetic_images.h"
#include "satchel/train/image_train.h"
#include "satchel/train/train.h"
#include "tests/train/train_common.h"

namespace satchel {
namespace {

using namespace train_test;

struct Outcome {
  double loss = 0, test = 0;
  bool operator==(const Outcome&) const = default;
};

/// Both runs, one after the other or at once, each in a thread of its own.
template <class Run>
std::vector<Outcome> both(const Run& run, bool at_once) {
  std::vector<Outcome> outcomes(2);
  const auto one = [&](size_t i) {
    at::set_num_threads(1);
    outcomes[i] = run(i);
  };
  std::thread first([&] { one(0); });
  if (!at_once) first.join();
  std::thread second([&] { one(1); });
  if (at_once) first.join();
  second.join();
  return outcomes;
}

TEST(Threads, TwoGraphTrainersDoNotDisturbEachOther) {
  const GraphData data = communities();
  for (const char* method : {"satchel", "exact", "fp32"}) {
    const auto run = [&](size_t i) {
      TrainOptions o = small(method, 12);
      o.seed = 5 + i;
      const RunResult r = train_graph(data, o);
      return Outcome{r.loss, r.test};
    };
    const auto alone = both(run, false), together = both(run, true);
    EXPECT_EQ(alone, together) << method;
    EXPECT_NE(alone[0], alone[1]) << method;
  }
}

TEST(Threads, TwoImageTrainersDoNotDisturbEachOther) {
  SyntheticImageOptions images;
  images.classes = 4;
  images.size = 16;
  images.count = 96;
  images.test = 32;
  const ImageSets sets = make_synthetic_images(images);
  const auto run = [&](size_t i) {
    ImageTrainOptions o;
    o.method = parse_method("satchel");
    o.width = 8;
    o.epochs = 2;
    o.batch = 32;
    o.seed = 5 + i;
    const auto r = train_images(sets, o);
    return Outcome{r.loss, r.test};
  };
  EXPECT_EQ(both(run, false), both(run, true));
}

}  // namespace
}  // namespace satchel
