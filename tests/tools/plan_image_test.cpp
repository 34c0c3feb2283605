// `satchel plan --model resnet50 …` as a user runs it.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "satchel/plan/image_plan.h"
#include "tests/tools/run_tool.h"

namespace satchel {
namespace {

using nlohmann::json;
using test::Outcome;

Outcome plan(const std::string& arguments) { return test::run_tool("plan " + arguments); }

ImageShape published() {
  ImageShape shape;
  shape.name = "resnet50";
  shape.classes = 1000;
  return shape;
}

TEST(PlanImage, PublishedFiguresStandBesideOurs) {
  const Outcome r = plan("--model resnet50 --batch 256");
  ASSERT_EQ(r.code, 0) << r.out;
  for (const char* figure : {"20.48   20.48   +0.0%", "1.94    1.86", "1.97    2.01", "fp32 ", "actnn ", "division ", "satchel "}) {
    EXPECT_NE(r.out.find(figure), std::string::npos) << figure << '\n' << r.out;
  }
  EXPECT_EQ(plan("--model resnet50 --batch 255").out.find("published"), std::string::npos);
  EXPECT_EQ(plan("--model resnet50 --freeze layer1").out.find("published"), std::string::npos);
  EXPECT_NE(plan("--model resnet50 --batch 512 --width 64").out.find("3.89"), std::string::npos);
}

TEST(PlanImage, TheWholePublishedTable) {
  const Outcome r = plan("--table division");
  ASSERT_EQ(r.code, 0) << r.out;
  for (const char* figure : {"5.14     5.12   -0.4%", "20.48    20.48   +0.0%", "26.75    26.75   +0.0%", "0.49", "1.94", "1.97", "3.89",
                             "3.94", "2.49", "2.52", "wide_resnet50_2"}) {
    EXPECT_NE(r.out.find(figure), std::string::npos) << figure << '\n' << r.out;
  }
  const json out = json::parse(plan("--table division --method satchel,actnn --json -").out);
  ASSERT_EQ(out["columns"].size(), 4u);
  EXPECT_TRUE(out["columns"][2]["rows"][0]["published_gib"].is_null());
  for (const json& column : out["columns"]) {
    ImageShape shape = published();
    shape.name = column["model"];
    ASSERT_EQ(column["methods"].size(), 2u);
    for (const json& m : column["methods"]) {
      EXPECT_EQ(m["own_bytes"],
                total_bytes(plan_image(shape, {column["batch"].get<int64_t>()}, parse_method(m["method"].get<std::string>()))));
    }
  }
}

TEST(PlanImage, EveryModelIsPlanned) {
  for (const std::string_view name : image_model_names()) {
    const json out = json::parse(plan("--model " + std::string(name) + " --image 32 --batch 8 --method fp32,satchel --json -").out);
    for (const json& m : out["methods"]) {
      int64_t parts = 0;
      for (const json& bytes : m["parts"]) parts += bytes.get<int64_t>();
      EXPECT_EQ(parts, m["saved_bytes"]) << name << ": a kind that stands in no part";
      EXPECT_GT(m["memory"]["step_bytes"].get<int64_t>(), m["saved_bytes"].get<int64_t>()) << name;
    }
    EXPECT_GT(out["methods"][1]["times_smaller"].get<double>(), 5) << name;
  }
}

TEST(PlanImage, FrozenStagesTakeNothing) {
  const json all = json::parse(plan("--model resnet50 --batch 64 --method satchel --json -").out)["methods"][0];
  const json frozen = json::parse(plan("--model resnet50 --batch 64 --freeze layer2 --method satchel --json -").out)["methods"][0];
  for (const json& t : frozen["tensors"]) {
    const std::string name = t["name"];
    EXPECT_TRUE(name.starts_with("layer3") || name.starts_with("layer4") || name == "fc") << name;
  }
  for (const char* key : {"step_bytes", "parameter_bytes"}) {
    EXPECT_LT(frozen["memory"][key].get<int64_t>(), all["memory"][key].get<int64_t>()) << key;
  }
  EXPECT_EQ(plan("--model resnet50 --freeze layer0").code, 2);
  EXPECT_NE(plan("--freeze layer1 --nodes 5 --features 4 --classes 2").out.find("takes no option of image models, got --freeze"),
            std::string::npos);
}

TEST(PlanImage, JsonIsThePlan) {
  const Outcome r = plan(
      "--model resnet18 --small-stem --image 32 --classes 10 --channels 1 --width 32 --dropout 0.1 --batch 100 --method "
      "fp32,actnn,satchel,bits=3,residual=1 --json -");
  ASSERT_EQ(r.code, 0) << r.out;
  const json out = json::parse(r.out);
  const ImageShape shape = {"resnet18", 10, 1, true, 32, 0.1};
  ASSERT_EQ(out["methods"].size(), 3u);
  EXPECT_EQ(out["methods"][2]["method"], "satchel,bits=3,residual=1");
  for (const json& m : out["methods"]) {
    const Method method = parse_method(m["method"].get<std::string>());
    const std::vector<SavedTensor> lines = plan_image(shape, {100, 32, 32}, method);
    EXPECT_EQ(m["saved_bytes"], total_bytes(lines));
    ASSERT_EQ(m["tensors"].size(), lines.size());
    EXPECT_EQ(m["tensors"].back()["name"], lines.back().name);
    EXPECT_EQ(m["memory"]["step_bytes"], memory_of(shape, {100, 32, 32}, method).peak);
    int64_t parts = 0;
    for (const json& bytes : m["parts"]) parts += bytes.get<int64_t>();
    EXPECT_EQ(parts, total_bytes(lines)) << "a kind that stands in no part";
  }
  EXPECT_FALSE(out.contains("published"));
}

TEST(PlanImage, FitIsTheLargestBatch) {
  const Outcome r = plan("--model resnet50 --fit 16GB --method fp32,satchel --json -");
  ASSERT_EQ(r.code, 0) << r.out;
  const json out = json::parse(r.out);
  EXPECT_EQ(out["budget_bytes"], 16000000000);
  const ImageShape shape = published();
  for (const json& m : out["methods"]) {
    const Method method = parse_method(m["method"].get<std::string>());
    const int64_t batch = m["largest_batch"];
    EXPECT_TRUE(memory_of(shape, {batch, 224, 224}, method, 16000000000).fits) << method.name;
    EXPECT_FALSE(memory_of(shape, {batch + 1, 224, 224}, method, 16000000000).fits) << method.name;
    EXPECT_LE(m["memory"]["reserved_bytes"].get<int64_t>(), 16000000000) << method.name;
    EXPECT_EQ(m["capped"], false);
    EXPECT_EQ(m["memory"]["host_bytes"], 0);
  }
  EXPECT_EQ(json::parse(plan("--model resnet50 --fit 1GiB --json -").out)["budget_bytes"], 1 << 30);
  const Outcome none = plan("--model resnet50 --fit 1MB");
  EXPECT_EQ(none.code, 0);
  EXPECT_NE(none.out.find("none fits"), std::string::npos) << none.out;
}

TEST(PlanImage, AutocastIsPlanned) {
  const json full = json::parse(plan("--model resnet50 --fit 16GB --method fp32,satchel --json -").out);
  const json half = json::parse(plan("--model resnet50 --fit 16GB --amp bf16 --method fp32,satchel --json -").out);
  EXPECT_EQ(half["model"]["amp"], "bf16");
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_GT(half["methods"][i]["largest_batch"].get<int64_t>(), full["methods"][i]["largest_batch"].get<int64_t>());
  }
  const json saved = json::parse(plan("--model resnet50 --amp bf16 --method fp32 --json -").out);
  EXPECT_EQ(saved["methods"][0]["saved_bytes"], total_bytes(plan_image(published(), {256, 224, 224, true}, parse_method("fp32"))));
  EXPECT_NE(plan("--model resnet50 --amp bf16").out.find("autocast to bf16"), std::string::npos);
}

TEST(PlanImage, ACappedBatchSaysSo) {
  const std::string arguments = "--model resnet18 --image 8 --fit 1000TB --method satchel";
  const Outcome r = plan(arguments);
  ASSERT_EQ(r.code, 0) << r.out;
  EXPECT_NE(r.out.find("1,048,576+"), std::string::npos) << r.out;
  EXPECT_NE(r.out.find("a plan ends at 1,048,576 images: more would fit"), std::string::npos) << r.out;
  EXPECT_EQ(json::parse(plan(arguments + " --json -").out)["methods"][0]["capped"], true);
}

TEST(PlanImage, SwappedBytesAreTheHosts) {
  const json out = json::parse(plan("--model resnet50 --fit 16GB --method actnn,actnn,level=5 --json -").out);
  EXPECT_EQ(out["methods"][0]["memory"]["host_bytes"], 0);
  EXPECT_GT(out["methods"][1]["memory"]["host_bytes"].get<int64_t>(), 0);
  EXPECT_GT(out["methods"][1]["largest_batch"].get<int64_t>(), out["methods"][0]["largest_batch"].get<int64_t>());
}

TEST(PlanImage, TheStemFollowsTheImagesAsInTraining) {
  const auto small = [](const std::string& more) {
    return json::parse(plan("--model resnet18 --batch 1 --json - --image " + more).out)["model"]["small_stem"].get<bool>();
  };
  EXPECT_TRUE(small("32"));
  EXPECT_TRUE(small("64"));
  EXPECT_FALSE(small("65"));
  EXPECT_FALSE(small("32 --large-stem"));
  EXPECT_TRUE(small("65 --small-stem"));
}

TEST(PlanImage, OneMethodIsListedLayerByLayer) {
  const Outcome r = plan("--model densenet121 --batch 8 --method satchel");
  ASSERT_EQ(r.code, 0) << r.out;
  EXPECT_NE(r.out.find("features.denseblock4.denselayer16.norm2"), std::string::npos) << r.out;
}

TEST(PlanImage, WrongUse) {
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"--model resnet51", "[plan] --model must be sage|gcn|"},
      {"--model resnet50 --batch 0", "[plan] a batch must have 1 to 2^20 images, got 0"},
      {"--model resnet50 --batch 99999999999999999999", "--batch: must be a whole number below 2^63, got '99999999999999999999'"},
      {"--model resnet50 --image 65537", "[plan] images must be at most 65536 × 65536, got 65537 × 65537"},
      {"--model resnet50 --fit 1000000TB", "[plan] a budget must be 1 to 2^55 bytes, got 1000000000000000000"},
      {"--model resnet50 --small-stem --large-stem", "--small-stem"},
      {"--model resnet50 --fit 16G", "[plan] size must be 1 to 2^62 bytes as in 12GB, 11.5GiB or 12000000000, got '16G'"},
      {"--model resnet50 --fit 16", "write 16GB or 16GiB"},
      {"--model resnet50 --amp bf17", "--amp"},
      {"--model resnet50 --fit -1GB", "[plan] size must be"},
      {"--model resnet50 --fit nan", "[plan] size must be"},
      {"--model resnet50 --nodes 5", "[plan] resnet50 is an image model and takes no option of graph models, got --nodes"},
      {"--model sage --batch 5", "[plan] sage is a graph model and takes no option of image models, got --batch"},
      {"--model sage --amp bf16", "[plan] sage is a graph model and takes no option of image models, got --amp"},
      {"--model vgg16 --image 16", "[plan] images must be at least 32 × 32 for vgg16, got 16 × 16"},
      {"--table arxiv --model resnet50", "[plan] --table has its own sizes, got --model"}};
  for (const auto& [arguments, message] : wrong) {
    const Outcome r = plan(arguments);
    EXPECT_EQ(r.code, 2) << arguments;
    EXPECT_NE(r.out.find(message), std::string::npos) << arguments << ": " << r.out;
  }
}

}  // namespace
}  // namespace satchel
