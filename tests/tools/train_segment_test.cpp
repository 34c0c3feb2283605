// `satchel train`, `predict`, `plan` and `bench images` of models of segmentation as a user runs them.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/support.h"
#include "tests/tools/run_tool.h"

namespace satchel::test {
namespace {

using nlohmann::json;

class TrainSegment : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return scratch_.path(name); }
  static std::string training(const std::string& more) {
    return "train --data synthetic-shapes:count=8,size=32,shapes=2,classes=2,test=3 --model fcn_resnet50 --width 8 --batch 4 --threads 1 "
           "--epochs 1 " +
           more;
  }
  json read(const std::string& name) const {
    std::ifstream file(path(name));
    return json::parse(file, nullptr, false);
  }
  static void expect_refused(const std::string& arguments, int code, const std::string& part) {
    const Outcome r = run_tool(arguments);
    EXPECT_EQ(r.code, code) << arguments;
    EXPECT_NE(r.out.find(part), std::string::npos) << arguments << '\n' << r.out;
    EXPECT_EQ(r.out.find('\n'), r.out.size() - 1) << "one line: " << r.out;
  }

  Scratch scratch_;
};

TEST_F(TrainSegment, TableJsonAndMasks) {
  const Outcome r = run_tool(training("--method fp32,satchel --json " + path("a.json")));
  ASSERT_EQ(r.code, 0) << r.out;
  for (const char* part : {"8 scenes to train on, 3 to test on, 32 × 32, 3 classes", "test mIoU %", "\nfp32 ", "\nsatchel ", "x less)",
                           "\nIoU % ", "\nground ", "\nsquare ", "schedule poly"})
    EXPECT_NE(r.out.find(part), std::string::npos) << part << '\n' << r.out;
  const json run = read("a.json")["runs"][1];
  EXPECT_EQ(run["metric"], "mIoU");
  EXPECT_EQ(run["class_iou"].size(), 3u);
  int64_t sum = 0;
  for (const json& t : run["tensors"]) sum += t["kind"] == "loss" ? 0 : t["bytes"].get<int64_t>();
  EXPECT_EQ(sum, run["saved_bytes"].get<int64_t>());

  ASSERT_EQ(run_tool(training("--method satchel --no-aux --quiet --checkpoint " + path("a.st"))).code, 0);
  const std::string predict = "predict --checkpoint " + path("a.st") + " --data synthetic-shapes:count=8,size=40,classes=2,test=3 --out ";
  const Outcome p = run_tool(predict + path("masks"));
  ASSERT_EQ(p.code, 0) << p.out;
  EXPECT_NE(p.out.find("3 masks, test mIoU"), std::string::npos) << p.out;
  for (const char* name : {"masks/000000.png", "masks/000001.png", "masks/000002.png"}) {
    EXPECT_EQ(slurp(path(name)).substr(0, 4), "\x89PNG") << name;
  }
  const Outcome again = run_tool("predict --checkpoint " + path("a.st") + " --data " + path("masks") + " --out " + path("more"));
  EXPECT_NE(again.out.find("3 masks, no masks to test on"), std::string::npos) << again.out;
  expect_refused(predict + "-", 2, "[predict] --out must be a folder for masks, got -");
  expect_refused(predict + path("a.st"), 2, "[predict] --out must be a folder for masks, got the file");
  expect_refused("predict --checkpoint " + path("a.st") + " --data synthetic-shapes:classes=3 --out " + path("no"), 1,
                 "[predict] masks must be of the 3 classes of the checkpoint, got 4");
}

TEST_F(TrainSegment, BadUse) {
  expect_refused(training("--hidden 8"), 2, "[train] --hidden is not for this model, got fcn_resnet50");
  expect_refused(training("--label-smoothing 0.1"), 2, "[train] segmentation takes no label smoothing, got 0.1");
  expect_refused(training("--class-weights 1,2 --quiet"), 1, "[train] class weights must be one a class, 3, got 2");
  expect_refused("train --data synthetic-images:count=40 --model resnet18 --no-aux", 2,
                 "[train] --no-aux is not for this model, got resnet18");
  expect_refused("train --data " + path("nowhere") + " --model fcn_resnet50", 1, "[load] folder must exist, got");
  expect_refused("train --data synthetic-shapes: --model sage", 2, "[train] data must be a graph here");
}

TEST_F(TrainSegment, PlanAndBench) {
  const Outcome plan = run_tool("plan --model fcn_resnet50 --batch 16 --image 512 --json " + path("p.json"));
  ASSERT_EQ(plan.code, 0) << plan.out;
  const json methods = read("p.json")["methods"];
  for (const json& m : methods) {  // what an H200 is asked for
    const double least = m["method"] == "actnn" ? 8 : m["method"] == "satchel" ? 12 : 0;
    EXPECT_GE(m["times_smaller"].get<double>(), least) << m["method"];
  }
  expect_refused("plan --model resnet50 --no-aux", 2, "[plan] --no-aux is for models of segmentation, got resnet50");
  const Outcome bench =
      run_tool("bench images --model fcn_resnet50 --width 8 --image 32 --batch 2 --steps 1 --methods fp32,satchel --threads 1 --json " +
               path("b.json"));
  ASSERT_EQ(bench.code, 0) << bench.out;
  EXPECT_EQ(read("b.json")["classes"], 21);
  EXPECT_LT(read("b.json")["results"][1]["saved_bytes"].get<int64_t>(), read("b.json")["results"][0]["saved_bytes"].get<int64_t>() / 5);
}

}  // namespace
}  // namespace satchel::test
