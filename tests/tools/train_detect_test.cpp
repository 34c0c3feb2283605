// `satchel train`, `predict`, `plan` and `bench detection` of detectors as a user runs them.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/support.h"
#include "tests/tools/run_tool.h"

namespace satchel::test {
namespace {

using nlohmann::json;

class TrainDetect : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return scratch_.path(name); }
  static std::string training(const std::string& more, const std::string& model = "retinanet_resnet50_fpn") {
    return "train --data synthetic-shapes:count=8,size=48,shapes=2,classes=2,test=3 --model " + model +
           " --width 4 --batch 4 --threads 1 --epochs 1 " + more;
  }
  json read(const std::string& name) const {
    std::ifstream file(path(name));
    return json::parse(file, nullptr, false);
  }
  static void expect_refused(const std::string& arguments, const std::string& part) {
    const Outcome r = run_tool(arguments);
    EXPECT_EQ(r.code, 2) << arguments;
    EXPECT_NE(r.out.find(part), std::string::npos) << arguments << '\n' << r.out;
  }

  Scratch scratch_;
};

TEST_F(TrainDetect, TableJsonAndCocoResults) {
  const Outcome r = run_tool(training("--method fp32,satchel --sides 40,48 --json " + path("a.json")));
  ASSERT_EQ(r.code, 0) << r.out;
  for (const char* part :
       {"8 scenes to train on, 3 to test on, 2 classes of objects", "test mAP %", "\nfp32 ", "\nsatchel ", "x less)", "AP50"})
    EXPECT_NE(r.out.find(part), std::string::npos) << part << '\n' << r.out;
  const json run = read("a.json")["runs"][1];
  EXPECT_EQ(run["metric"], "mAP");
  EXPECT_EQ(run["scores"].size(), 12U);
  EXPECT_EQ(run["options"]["sides"], json({40, 48}));

  for (const char* model : {"retinanet_resnet50_fpn", "fasterrcnn_resnet50_fpn"}) {
    const std::string file = path(std::string(model) + ".st"), found = path(std::string(model) + ".json");
    const Outcome trained = run_tool(training("--method satchel --quiet --checkpoint " + file, model));
    ASSERT_EQ(trained.code, 0) << trained.out;
    const Outcome p =
        run_tool("predict --checkpoint " + file + " --data synthetic-shapes:count=8,size=48,shapes=2,classes=2,test=3 -o " + found);
    ASSERT_EQ(p.code, 0) << p.out;
    EXPECT_NE(p.out.find("boxes in 3 scenes, test mAP"), std::string::npos) << p.out;
    const json results = read(std::string(model) + ".json");
    ASSERT_TRUE(results.is_array());
    for (const json& box : results) {
      EXPECT_TRUE(box["image_id"] >= 0 && box["image_id"] < 3);
      EXPECT_TRUE(box["category_id"] >= 0 && box["category_id"] < 2);
      EXPECT_EQ(box["bbox"].size(), 4U);
    }
  }
}

/// Boxes of the images of a folder, which has no annotations; a run that starts from another's weights.
TEST_F(TrainDetect, OtherImagesAndWeights) {
  const std::string file = path("a.st"), masks = path("masks"), found = path("b.json");
  ASSERT_EQ(run_tool(training("--method satchel --quiet --checkpoint " + file)).code, 0);
  // Masks of another run are PNG files.
  const std::string scenes = "synthetic-shapes:count=8,size=48,shapes=2,classes=2,test=3";
  ASSERT_EQ(run_tool("train --data " + scenes +
                     " --model fcn_resnet50 --width 4 --batch 4 --threads 1 --epochs 1 --quiet --method satchel "
                     "--checkpoint " +
                     path("s.st"))
                .code,
            0);
  ASSERT_EQ(run_tool("predict --checkpoint " + path("s.st") + " --data " + scenes + " --out " + masks).code, 0);
  const Outcome p = run_tool("predict --checkpoint " + file + " --data " + masks + " -o " + found);
  ASSERT_EQ(p.code, 0) << p.out;
  EXPECT_NE(p.out.find("boxes in 3 scenes, no objects to test on"), std::string::npos) << p.out;
  for (const json& box : read("b.json")) EXPECT_TRUE(box["file_name"].get<std::string>().ends_with(".png")) << box;
  const Outcome tuned = run_tool(
      "train --data synthetic-shapes:count=8,size=48,shapes=2,classes=3,test=3 --model retinanet_resnet50_fpn --width 4 "
      "--batch 4 --threads 1 --epochs 1 --method satchel --weights " +
      file);
  EXPECT_EQ(tuned.code, 0) << tuned.out;
  EXPECT_NE(tuned.out.find("head.classification_head.cls_logits of 2 classes is left out; that of the data's 3 starts anew"),
            std::string::npos)
      << tuned.out;
}

/// As the pages have their commands: without --width.
TEST_F(TrainDetect, FullWidthIsTheDefault) {
  const Outcome r = run_tool(
      "train --data synthetic-shapes:count=2,size=32,shapes=1,classes=1,test=0 --model retinanet_resnet50_fpn --batch 2 "
      "--epochs 1 --threads 1 --method satchel --json " +
      path("w.json"));
  ASSERT_EQ(r.code, 0) << r.out;
  EXPECT_EQ(read("w.json")["runs"][0]["options"]["width"], 64);
  const Outcome help = run_tool("bench detection --help");
  EXPECT_NE(help.out.find("--width INT=64"), std::string::npos) << help.out;
}

TEST_F(TrainDetect, PlansWhatIsKept) {
  const Outcome r = run_tool("plan --model retinanet_resnet50_fpn --batch 16 --image 640 --json " + path("p.json"));
  ASSERT_EQ(r.code, 0) << r.out;
  const json plan = read("p.json");
  EXPECT_EQ(plan["methods"].size(), 4U);
  for (const json& m : plan["methods"]) {
    int64_t sum = 0;
    for (const json& t : m["tensors"]) sum += t["bytes"].get<int64_t>();
    EXPECT_EQ(sum, m["saved_bytes"].get<int64_t>());
    const double least = m["method"] == "satchel" ? 12 : m["method"] == "fp32" ? 1 : 8;
    EXPECT_GE(m["times_smaller"].get<double>(), least) << m["method"];
  }
  const Outcome regions = run_tool("plan --model fasterrcnn_resnet50_fpn --frozen-norm --trainable 3 --boxes 100");
  EXPECT_EQ(regions.code, 0) << regions.out;
  EXPECT_NE(regions.out.find("of it boxes"), std::string::npos) << regions.out;
}

TEST_F(TrainDetect, RefusesWhatIsNotForIt) {
  expect_refused(training("--dropout 0.1"), "[train] --dropout is not for this model, got retinanet_resnet50_fpn");
  expect_refused(training("--freeze layer2"), "[train] --freeze is not for detectors (--trainable says how many stages learn), got retina");
  expect_refused(training("--layers 3"), "[train] --layers is not for this model, got retinanet_resnet50_fpn");
  expect_refused(training("--image 40 --sides 40"), "[train] one of --image and --sides must be given, got both");
  expect_refused("train --data synthetic-images: --model retinanet_resnet50_fpn", "[train] data must be scenes with boxes");
  expect_refused("train --data synthetic-images: --model resnet18 --sides 40", "[train] --sides is not for this model, got resnet18");
  expect_refused("plan --model retinanet_resnet50_fpn --fit 16GB", "[plan] --fit is not for detectors");
  expect_refused("plan --model resnet50 --frozen-norm", "[plan] resnet50 is no detector");
}

}  // namespace
}  // namespace satchel::test
