#include "satchel/train/box_score.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "satchel/core/error.h"

namespace satchel {
namespace {

constexpr size_t kOverlaps = 10, kRecalls = 101;
constexpr std::array<size_t, 3> kMost = {1, 10, 100};  // boxes of an image and class
constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

struct AreaRange {
  double least, most;
};
constexpr double kAnyArea = 1e10;
constexpr std::array<AreaRange, 4> kAreas = {{{0, kAnyArea}, {0, 32.0 * 32}, {32.0 * 32, 96.0 * 96}, {96.0 * 96, kAnyArea}}};

/// Both rounded as numpy's linspace does: COCO's own program compares with those.
double threshold(size_t i) { return i + 1 == kOverlaps ? 0.95 : static_cast<double>(i) * ((0.95 - 0.5) / (kOverlaps - 1)) + 0.5; }
double recall_at(size_t i) { return i + 1 == kRecalls ? 1 : static_cast<double>(i) * 0.01; }

template <class Corners>
double area_of(const Corners& b) {
  return (static_cast<double>(b.right) - b.left) * (static_cast<double>(b.bottom) - b.top);
}
double own_area(const ObjectBox& b) { return b.area > 0 ? b.area : area_of(b); }
bool is_outside(double area, const AreaRange& range) { return area < range.least || area > range.most; }

/// By the union or, of a crowd, which a box need not cover, by the found box's own area.
double overlap_of(const FoundBox& found, const ObjectBox& object) {
  const double width = std::min<double>(found.right, object.right) - std::max<double>(found.left, object.left);
  const double height = std::min<double>(found.bottom, object.bottom) - std::max<double>(found.top, object.top);
  if (width <= 0 || height <= 0) return 0;
  const double both = width * height, own = area_of(found);
  return both / (object.crowd ? own : own + area_of(object) - both);
}

/// What a found box is at one overlap and area.
struct Judged {
  double score;
  bool right, passed_over;
};

/// Of one class, area and overlap, over all images; boxes best first.
struct Tally {
  std::vector<Judged> boxes;
  int64_t objects = 0;  // that count
};

}  // namespace

BoxScorer::BoxScorer(int64_t classes) : classes_(static_cast<size_t>(classes)) {
  if (classes < 1) fail("score", "classes must be at least 1", classes);
}

void BoxScorer::add(std::span<const ObjectBox> objects, std::span<const FoundBox> found) {
  const auto check = [&](int32_t label) {
    if (label < 0 || static_cast<size_t>(label) >= classes_.size())
      fail("score", "labels must be 0 to " + std::to_string(classes_.size() - 1), label);
  };
  for (const ObjectBox& o : objects) check(o.label);
  for (const FoundBox& f : found) check(f.label);
  for (size_t c = 0; c < classes_.size(); ++c) {
    const auto is_own = [&](const auto& box) { return box.label == static_cast<int32_t>(c); };
    Image image;
    std::ranges::copy_if(objects, std::back_inserter(image.objects), is_own);
    std::ranges::copy_if(found, std::back_inserter(image.found), is_own);
    if (image.objects.empty() && image.found.empty()) continue;
    std::ranges::stable_sort(image.found, std::ranges::greater(), &FoundBox::score);
    image.found.resize(std::min(image.found.size(), kMost.back()));
    for (const FoundBox& f : image.found) {
      for (const ObjectBox& o : image.objects) image.overlap.push_back(overlap_of(f, o));
    }
    classes_[c].push_back(std::move(image));
  }
}

namespace {

/// Each found box takes, best first, the object that it overlaps most of those left, if by enough; objects that count go before those that
/// are passed over (crowds, other areas), and a crowd may be taken by many.
template <class Image>
void judge(const Image& image, const AreaRange& range, double least, Tally& tally) {
  const size_t count = image.objects.size();
  std::vector<bool> passed_over(count), taken(count);
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  for (size_t g = 0; g < count; ++g) {
    passed_over[g] = image.objects[g].crowd || is_outside(own_area(image.objects[g]), range);
    tally.objects += passed_over[g] ? 0 : 1;
  }
  std::ranges::stable_sort(order, {}, [&](size_t g) { return static_cast<bool>(passed_over[g]); });
  for (size_t d = 0; d < image.found.size(); ++d) {
    double best = std::min(least, 1 - 1e-10);
    size_t match = count;
    for (const size_t g : order) {
      if (taken[g] && !image.objects[g].crowd) continue;
      if (match < count && !passed_over[match] && passed_over[g]) break;
      if (image.overlap[d * count + g] < best) continue;
      best = image.overlap[d * count + g];
      match = g;
    }
    if (match < count) taken[match] = true;
    const bool apart = match < count ? static_cast<bool>(passed_over[match]) : is_outside(area_of(image.found[d]), range);
    tally.boxes.push_back({image.found[d].score, match < count, apart});
  }
}

struct Curve {
  double precision, recall;  // the mean over the recalls; the last recall
};

/// Of boxes that were judged image by image; NaN where no object counts.
Curve curve_of(Tally tally) {
  if (tally.objects == 0) return {kNone, kNone};
  std::ranges::stable_sort(tally.boxes, std::ranges::greater(), &Judged::score);
  std::vector<double> precision, recall;
  double right = 0, wrong = 0;
  for (const Judged& b : tally.boxes) {
    if (!b.passed_over) (b.right ? right : wrong) += 1;
    recall.push_back(right / static_cast<double>(tally.objects));
    precision.push_back(right / (right + wrong + std::numeric_limits<double>::epsilon()));
  }
  for (size_t i = precision.size(); i-- > 1;) precision[i - 1] = std::max(precision[i - 1], precision[i]);
  double sum = 0;
  for (size_t r = 0; r < kRecalls; ++r) {
    const auto at = std::ranges::lower_bound(recall, recall_at(r));
    if (at != recall.end()) sum += precision[static_cast<size_t>(at - recall.begin())];
  }
  return {sum / static_cast<double>(kRecalls), recall.empty() ? 0 : recall.back()};
}

/// Means that leave out NaN.
class Mean {
 public:
  void add(double value) {
    if (std::isnan(value)) return;
    sum_ += value;
    ++count_;
  }
  double value() const { return count_ > 0 ? sum_ / static_cast<double>(count_) : kNone; }

 private:
  double sum_ = 0;
  int64_t count_ = 0;
};

}  // namespace

BoxScores BoxScorer::scores() const {
  std::array<Mean, kAreas.size()> precision, recall;
  std::array<Mean, kMost.size()> recalls;
  Mean at50, at75;
  BoxScores result;
  for (const std::vector<Image>& images : classes_) {
    Mean own;
    for (size_t t = 0; t < kOverlaps; ++t) {
      for (size_t a = 0; a < kAreas.size(); ++a) {
        Tally tally;
        std::array<Tally, kMost.size()> fewer;
        for (const Image& image : images) {
          const size_t first = tally.boxes.size();
          const int64_t objects = tally.objects;
          judge(image, kAreas[a], threshold(t), tally);
          if (a > 0) continue;
          for (size_t m = 0; m + 1 < kMost.size(); ++m) {  // the first ones are judged alike, however many follow
            const size_t last = std::min(tally.boxes.size(), first + kMost[m]);
            fewer[m].boxes.insert(fewer[m].boxes.end(), tally.boxes.begin() + static_cast<std::ptrdiff_t>(first),
                                  tally.boxes.begin() + static_cast<std::ptrdiff_t>(last));
            fewer[m].objects += tally.objects - objects;
          }
        }
        const Curve curve = curve_of(std::move(tally));
        precision[a].add(curve.precision);
        recall[a].add(curve.recall);
        if (a > 0) continue;
        own.add(curve.precision);
        if (t == 0) at50.add(curve.precision);
        if (t == 5) at75.add(curve.precision);
        recalls.back().add(curve.recall);
        for (size_t m = 0; m + 1 < kMost.size(); ++m) recalls[m].add(curve_of(std::move(fewer[m])).recall);
      }
    }
    result.class_ap.push_back(own.value());
  }
  result.ap = precision[0].value();
  result.ap50 = at50.value();
  result.ap75 = at75.value();
  result.ap_small = precision[1].value();
  result.ap_medium = precision[2].value();
  result.ap_large = precision[3].value();
  result.recall1 = recalls[0].value();
  result.recall10 = recalls[1].value();
  result.recall100 = recalls[2].value();
  result.recall_small = recall[1].value();
  result.recall_medium = recall[2].value();
  result.recall_large = recall[3].value();
  return result;
}

}  // namespace satchel
