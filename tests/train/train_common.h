// A small graph to train on, options for it, and the file that a run may leave. Tests of images take expect_refused() alone.
#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <string>

#include "satchel/core/error.h"
#include "satchel/core/noise.h"
#include "satchel/train/train.h"

namespace satchel::train_test {

constexpr double kAlways = 1e-9;  // minutes between checkpoints: one whenever it can be
constexpr int64_t kNodes = 400, kFeatures = 16, kClasses = 4;

inline double uniform(uint64_t element) { return noise(77, Stream::seeds, element) * 0x1p-16; }

/// Communities: a node's class is node mod classes, four of five edges stay inside, features are noise and a bump at the class.
inline GraphData communities(Task task = Task::single_label) {
  GraphData data;
  data.name = "communities";
  data.nodes = kNodes;
  data.task = task;
  data.classes = task == Task::binary ? 1 : kClasses;
  data.features.rows = kNodes;
  data.features.columns = kFeatures;
  data.start.push_back(0);
  uint64_t draw = 0;
  for (int64_t node = 0; node < kNodes; ++node) {
    for (int edge = 0; edge < 4; ++edge) {
      const int64_t other = static_cast<int64_t>(uniform(draw++) * kNodes);
      const bool inside = uniform(draw++) < 0.8;
      data.target.push_back(static_cast<int32_t>(inside ? other - other % kClasses + node % kClasses : other));
    }
    data.start.push_back(static_cast<int64_t>(data.target.size()));
    for (int64_t f = 0; f < kFeatures; ++f) {
      data.features.dense.push_back(static_cast<float>(2 * uniform(draw++) - 1 + (f == node % kClasses ? 0.7 : 0.0)));
    }
    data.labels.push_back(static_cast<int32_t>(task == Task::binary ? node % 2 : node % kClasses));
    for (int64_t c = 0; c < kClasses; ++c) data.targets.push_back(c == node % kClasses || (c + 1) % kClasses == node % kClasses);
  }
  if (task == Task::multi_label)
    data.labels.clear();
  else
    data.targets.clear();
  Split split;
  for (int64_t node = 0; node < kNodes; ++node) (node % 5 == 0 ? split.valid : node % 5 == 1 ? split.test : split.train).push_back(node);
  data.splits = {split};
  return data;
}

inline TrainOptions small(const std::string& method, int64_t epochs) {
  TrainOptions o;
  o.shape.hidden = 32;
  o.method = parse_method(method);
  o.epochs = epochs;
  o.seed = 3;
  return o;
}

class Train : public testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
  void TearDown() override { std::remove(file_.c_str()); }
  std::string file_ = testing::TempDir() + "satchel_train_" + std::to_string(getpid()) + ".safetensors";
};

inline void expect_refused(const std::function<void()>& run, const std::string& part) {
  try {
    run();
    ADD_FAILURE() << "nothing was thrown, but " << part;
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
  }
}

}  // namespace satchel::train_test
