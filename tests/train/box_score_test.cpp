// COCO's average precision: cases worked by hand, and pycocotools' numbers where that is installed.
#include "satchel/train/box_score.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "satchel/core/error.h"

namespace satchel {
namespace {

ObjectBox object(float left, float top, float side, int32_t label = 0, bool crowd = false) {
  return {left, top, left + side, top + side, label, crowd};
}
FoundBox found(float left, float top, float side, float score, int32_t label = 0) {
  return {left, top, left + side, top + side, label, score};
}

TEST(BoxScore, PerfectBoxesScoreOneAndNoneScoreNothing) {
  BoxScorer all(2), none(2);
  const std::vector<ObjectBox> objects = {object(0, 0, 40), object(50, 50, 20, 1)};
  all.add(objects, std::vector{found(0, 0, 40, .9F), found(50, 50, 20, .8F, 1)});
  none.add(objects, {});
  EXPECT_DOUBLE_EQ(all.scores().ap, 1);
  EXPECT_DOUBLE_EQ(all.scores().ap_small, 1);   // 20²
  EXPECT_DOUBLE_EQ(all.scores().ap_medium, 1);  // 40²
  EXPECT_TRUE(std::isnan(all.scores().ap_large));
  EXPECT_EQ(none.scores().ap, 0);
  EXPECT_EQ(none.scores().recall100, 0);
}

/// Of two objects the second best box finds one, the best box none: precision 1/2 at recall 1/2. Of 101 recalls 51 are at most .5.
TEST(BoxScore, PrecisionIsTheMeanOver101Recalls) {
  BoxScorer s(1);
  s.add(std::vector{object(0, 0, 40), object(100, 100, 40)}, std::vector{found(300, 300, 40, .9F), found(0, 0, 40, .5F)});
  EXPECT_NEAR(s.scores().ap, 51.0 / 101 / 2, 1e-12);
  EXPECT_NEAR(s.scores().recall1, 0, 1e-12);
  EXPECT_NEAR(s.scores().recall10, 0.5, 1e-12);
}

/// Boxes 40 high that overlap by 30 of 50 columns: .6, so they are right at .50, .55 and .60.
TEST(BoxScore, OverlapsFrom50To95Count) {
  BoxScorer s(1);
  s.add(std::vector{object(0, 0, 40)}, std::vector{found(10, 0, 40, .9F)});
  EXPECT_NEAR(s.scores().ap, 0.3, 1e-12);
  EXPECT_NEAR(s.scores().ap50, 1, 1e-12);
  EXPECT_NEAR(s.scores().ap75, 0, 1e-12);
}

/// An object is found once; a second box on it is wrong. A crowd takes any number of boxes, which count neither way.
TEST(BoxScore, ObjectsAreFoundOnceAndCrowdsArePassedOver) {
  BoxScorer twice(1), crowd(1);
  twice.add(std::vector{object(0, 0, 40), object(100, 0, 40)},
            std::vector{found(0, 0, 40, .9F), found(0, 0, 40, .8F), found(100, 0, 40, .7F)});
  // Precisions 1, 1/2, 2/3 at recalls 1/2, 1/2, 1: 51 recalls of 1 and 50 of 2/3.
  EXPECT_NEAR(twice.scores().ap, (51 + 50 * 2.0 / 3) / 101, 1e-12);
  crowd.add(std::vector{object(0, 0, 40), object(100, 0, 100, 0, true)},
            std::vector{found(110, 10, 20, .95F), found(130, 10, 20, .94F), found(0, 0, 40, .9F)});
  EXPECT_NEAR(crowd.scores().ap, 1, 1e-12);
}

/// Objects of other areas are passed over, with the boxes that find them; so are boxes of other areas that find nothing.
TEST(BoxScore, AreasPassOverOthers) {
  BoxScorer s(1);
  std::vector<ObjectBox> objects = {object(0, 0, 40), object(100, 0, 10)};
  s.add(objects, std::vector{found(200, 200, 120, .95F), found(0, 0, 40, .9F), found(100, 0, 10, .8F)});
  EXPECT_NEAR(s.scores().ap_small, 1, 1e-12);
  EXPECT_NEAR(s.scores().ap_medium, 1, 1e-12);
  EXPECT_LT(s.scores().ap, 1);
  objects[1].area = 50 * 50;  // the data say that it is of middle size
  BoxScorer told(1);
  told.add(objects, std::vector{found(0, 0, 40, .9F)});
  EXPECT_TRUE(std::isnan(told.scores().ap_small));
  EXPECT_NEAR(told.scores().recall_medium, .5, 1e-12);
}

TEST(BoxScore, AtMost100BoxesOfAnImageAndClassCount) {
  BoxScorer s(1);
  std::vector<FoundBox> boxes(100, found(500, 500, 40, .9F));
  boxes.push_back(found(0, 0, 40, .1F));
  s.add(std::vector{object(0, 0, 40)}, boxes);
  EXPECT_EQ(s.scores().recall100, 0);
}

TEST(BoxScore, RefusesLabelsThatAreNoClass) {
  BoxScorer s(2);
  EXPECT_THROW(s.add(std::vector{object(0, 0, 4, 2)}, {}), Error);
  EXPECT_THROW(s.add({}, std::vector{found(0, 0, 4, .5F, -1)}), Error);
}

using nlohmann::json;

/// Random scenes with crowds, areas of their own, equal scores and more than 100 boxes in an image.
TEST(BoxScore, AgreesWithPycocotools) {
  constexpr int kClasses = 4, kScenes = 30;
  std::mt19937 random(7);
  const auto uniform = [&](double low, double high) { return low + (high - low) * static_cast<double>(random()) / 4294967296.0; };
  const auto whole = [&](double x) { return static_cast<float>(std::floor(x)); };  // exact in JSON and in float32
  json truth = {{"info", json::object()}, {"images", json::array()}, {"annotations", json::array()}, {"categories", json::array()}};
  json results = json::array();
  for (int c = 0; c < kClasses; ++c) truth["categories"].push_back({{"id", c + 1}, {"name", std::to_string(c)}});
  BoxScorer scorer(kClasses);
  int id = 1;
  for (int n = 0; n < kScenes; ++n) {
    truth["images"].push_back({{"id", n + 1}, {"width", 400}, {"height", 400}});
    std::vector<ObjectBox> objects;
    std::vector<FoundBox> boxes;
    const int count = static_cast<int>(uniform(0, 12));
    for (int i = 0; i < count; ++i) {
      const float left = whole(uniform(0, 280)), top = whole(uniform(0, 280)), width = whole(uniform(4, 120)),
                  height = whole(uniform(4, 120));
      ObjectBox o{left, top, left + width, top + height, static_cast<int32_t>(uniform(0, kClasses - 1)), uniform(0, 1) < 0.15};
      o.area = uniform(0, 1) < 0.5 ? whole(width * height * 0.7) : width * height;
      objects.push_back(o);
      truth["annotations"].push_back({{"id", id++},
                                      {"image_id", n + 1},
                                      {"category_id", o.label + 1},
                                      {"bbox", {left, top, width, height}},
                                      {"area", o.area},
                                      {"iscrowd", o.crowd ? 1 : 0}});
    }
    const int more = n == 3 ? 300 : static_cast<int>(uniform(0, 30));
    for (int i = 0; i < more; ++i) {
      ObjectBox near =
          objects.empty() ? ObjectBox{10, 10, 60, 60} : objects[static_cast<size_t>(uniform(0, static_cast<double>(objects.size())))];
      const float left = near.left + whole(uniform(-8, 8)), top = near.top + whole(uniform(-8, 8));
      const float width = std::max(1.0F, near.right - near.left + whole(uniform(-8, 8))),
                  height = std::max(1.0F, near.bottom - near.top + whole(uniform(-8, 8)));
      const int32_t label = uniform(0, 1) < 0.8 ? near.label : static_cast<int32_t>(uniform(0, kClasses));
      const auto score = static_cast<float>(std::floor(uniform(0, 64)) / 64);
      boxes.push_back({left, top, left + width, top + height, label, score});
      results.push_back({{"image_id", n + 1}, {"category_id", label + 1}, {"bbox", {left, top, width, height}}, {"score", score}});
    }
    scorer.add(objects, boxes);
  }
  const BoxScores s = scorer.scores();
  const auto number = [](double x) { return std::isnan(x) ? json(nullptr) : json(x); };
  const json own = {{"ap", number(s.ap)},
                    {"ap50", number(s.ap50)},
                    {"ap75", number(s.ap75)},
                    {"ap_small", number(s.ap_small)},
                    {"ap_medium", number(s.ap_medium)},
                    {"ap_large", number(s.ap_large)},
                    {"recall1", number(s.recall1)},
                    {"recall10", number(s.recall10)},
                    {"recall100", number(s.recall100)},
                    {"recall_small", number(s.recall_small)},
                    {"recall_medium", number(s.recall_medium)},
                    {"recall_large", number(s.recall_large)}};
  EXPECT_GT(s.ap, 0.05);
  EXPECT_LT(s.ap, 0.95);
  const std::string at = testing::TempDir() + "satchel_coco_";
  const std::pair<const char*, const json*> files[] = {{"truth", &truth}, {"found", &results}, {"scores", &own}};
  const std::string here = __FILE__;
  std::string command = "python3 " + here.substr(0, here.rfind('/')) + "/coco_check.py";
  if (const char* python = std::getenv("SATCHEL_PYTHON")) command.replace(0, 7, python);
  for (const auto& [name, value] : files) {
    std::ofstream(at + name + ".json") << value->dump();
    command += " " + at + name + ".json";
  }
  const int code = WEXITSTATUS(std::system(command.c_str()));
  if (code == 77 || code == 127) GTEST_SKIP() << "pycocotools is not installed for python3 (or SATCHEL_PYTHON)";
  EXPECT_EQ(code, 0) << command;
}

}  // namespace
}  // namespace satchel
