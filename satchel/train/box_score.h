// Average precision of found boxes, as COCO defines it: overlaps .50 to .95 by .05, 101 recalls, areas, at most 100 boxes an image and
// class, crowds that count neither way. No torch.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "satchel/data/scenes.h"

namespace satchel {

/// A box that a detector found, in pixels of the image.
struct FoundBox {
  float left = 0, top = 0, right = 0, bottom = 0;
  int32_t label = 0;  // 0 … classes − 1
  float score = 0;
  bool operator==(const FoundBox&) const = default;
};

/// 0 to 1, means over the classes that have objects; NaN where there are none.
struct BoxScores {
  double ap = 0, ap50 = 0, ap75 = 0;                 // precision, over all overlaps and at .50 and .75
  double ap_small = 0, ap_medium = 0, ap_large = 0;  // of objects up to 32² and up to 96² pixels, and of larger ones
  double recall1 = 0, recall10 = 0, recall100 = 0;   // with so many boxes an image and class
  double recall_small = 0, recall_medium = 0, recall_large = 0;
  std::vector<double> class_ap;  // of each class
};

class BoxScorer {
 public:
  explicit BoxScorer(int64_t classes);
  /// One image: its objects, and what was found, in any order. Throws `[score] …` for a label that is no class.
  void add(std::span<const ObjectBox> objects, std::span<const FoundBox> found);
  BoxScores scores() const;

 private:
  struct Image {
    std::vector<ObjectBox> objects;
    std::vector<FoundBox> found;  // best first, at most 100
    std::vector<double> overlap;  // found × objects
  };
  std::vector<std::vector<Image>> classes_;  // images with objects or boxes of a class
};

}  // namespace satchel
