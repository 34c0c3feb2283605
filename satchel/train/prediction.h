// What a trained model says of a graph's nodes or of images.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

namespace satchel {

struct Prediction {
  int64_t count = 0, outputs = 0;  // nodes or images, and what a model gives for each
  bool multi_label = false;
  std::vector<float> scores;                               // count × outputs: softmax or sigmoid
  std::vector<int64_t> classes;                            // one each; multi-label: count × outputs of 0 and 1
  double test = std::numeric_limits<double>::quiet_NaN();  // percent; NaN where no label is there to test on
};

}  // namespace satchel
