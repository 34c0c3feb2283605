// `satchel plan` as a user runs it.
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "satchel/plan/graph_plan.h"
#include "tests/tools/run_tool.h"

namespace satchel {
namespace {

using nlohmann::json;
using test::Outcome;

Outcome plan(const std::string& arguments) { return test::run_tool("plan " + arguments); }

constexpr const char* kArxiv = "--nodes 169343 --features 128 --classes 40 --train-nodes 90941 ";

TEST(PlanCommand, JsonIsThePlan) {
  const Outcome r = plan(std::string(kArxiv) + "--method fp32,blockwise,block=16rows --method satchel --json -");
  ASSERT_EQ(r.code, 0) << r.out;
  const json out = json::parse(r.out);
  const PublishedModel model = published_model("arxiv");
  ASSERT_EQ(out["methods"].size(), 3u);
  for (const json& m : out["methods"]) {
    const Method method = parse_method(m["method"].get<std::string>());
    const std::vector<SavedTensor> lines = plan_graph(model.shape, model.nodes, method);
    EXPECT_EQ(m["saved_bytes"], total_bytes(lines));
    EXPECT_EQ(m["loss_bytes"], total_bytes(plan_loss(model.shape, model.nodes, model.training_nodes, method)));
    ASSERT_EQ(m["tensors"].size(), lines.size());
    for (size_t i = 0; i < lines.size(); ++i) {
      EXPECT_EQ(m["tensors"][i]["name"], lines[i].name);
      EXPECT_EQ(m["tensors"][i]["kind"], lines[i].kind);
      EXPECT_EQ(m["tensors"][i]["bytes"], lines[i].bytes);
    }
  }
  EXPECT_EQ(out["methods"][1]["method"], "blockwise,block=16rows");
  EXPECT_EQ(out["methods"][0]["times_smaller"], 1.0);
  EXPECT_NEAR(out["methods"][2]["times_smaller"].get<double>(), 823686400 / 12197872.0, 1e-9);  // GraphPlan.ArxivInWholeModels
}

TEST(PlanCommand, TablesSayTheSame) {
  const Outcome one = plan(kArxiv);
  EXPECT_EQ(one.code, 0);
  EXPECT_NE(one.out.find("6,098,416"), std::string::npos) << one.out;
  EXPECT_NE(one.out.find("67.5x smaller than fp32's 785.53 MiB"), std::string::npos) << one.out;
  EXPECT_EQ(one.out.find("saved MiB"), std::string::npos) << "one method is compared with nothing: " << one.out;
  EXPECT_NE(plan(std::string(kArxiv) + "--method 'fp32;satchel'").out.find("saved MiB"), std::string::npos);
}

TEST(PlanCommand, EveryOptionReachesThePlan) {
  const Outcome r = plan(
      "--model gcn --nodes 100 --features 10 --hidden 12 --classes 3 --layers 4 --norm layer --activation elu --dropout 0 --sparse "
      "--method exact --json -");
  ASSERT_EQ(r.code, 0) << r.out;
  const json out = json::parse(r.out);
  GraphShape shape{"gcn", 4, 10, 12, 3, Norm::layer, Activation::elu};
  shape.dropout = 0;
  EXPECT_EQ(out["methods"][0]["saved_bytes"], total_bytes(plan_graph(shape, 100, parse_method("exact"), true)));
  EXPECT_EQ(out["model"]["norm"], "layer");
  EXPECT_EQ(out["model"]["activation"], "elu");
  EXPECT_EQ(out["model"]["training_nodes"], 100);
}

TEST(PlanCommand, NothingSavedIsNoRatio) {
  const Outcome r = plan("--nodes 10 --features 4 --classes 2 --layers 1 --json -");
  ASSERT_EQ(r.code, 0) << r.out;
  EXPECT_EQ(json::parse(r.out)["methods"][0]["saved_bytes"], 0);
  EXPECT_TRUE(json::parse(r.out)["methods"][0]["times_smaller"].is_null());
  EXPECT_EQ(plan("--nodes 10 --features 4 --classes 2 --layers 1").code, 0);
}

TEST(PlanCommand, PublishedTables) {
  for (const char* figure : {"786.22", "30.47", "30.46", "25.56", "25.51", "29.72", "11.63"}) {
    EXPECT_NE(plan("--table arxiv").out.find(figure), std::string::npos) << figure;
  }
  const json out = json::parse(plan("--table products --method satchel,gact --json -").out);
  ASSERT_EQ(out["rows"].size(), 3u);
  for (const json& row : out["rows"]) {
    int64_t sum = 0;
    for (const auto& part : row["parts"].items()) sum += part.value().get<int64_t>();
    EXPECT_EQ(sum, row["model_bytes"].get<int64_t>()) << "every part has a column";
  }
  EXPECT_EQ(out["methods"][1]["method"], "gact");
}

TEST(PlanCommand, JsonToAFile) {
  const std::string path = testing::TempDir() + "satchel_plan.json";
  const Outcome r = plan(std::string(kArxiv) + "--json " + path);
  EXPECT_EQ(r.code, 0) << r.out;
  EXPECT_NE(r.out.find("norms.0"), std::string::npos) << "the tables are printed too";
  std::ifstream file(path);
  EXPECT_EQ(json::parse(file)["methods"][0]["method"], "satchel");
  std::remove(path.c_str());
}

TEST(PlanCommand, WrongUse) {
  const auto expect_error = [](const std::string& arguments, const std::string& part) {
    const Outcome r = plan(arguments);
    EXPECT_EQ(r.code, 2) << arguments << '\n' << r.out;
    EXPECT_EQ(r.out.rfind("satchel: [", 0), 0u) << r.out;
    EXPECT_NE(r.out.find(part), std::string::npos) << arguments << '\n' << r.out;
  };
  const std::string sizes = "--nodes 100 --features 10 --classes 3 ";
  expect_error(
      "",
      "[plan] --nodes, --features, --classes must be given for a graph model (or --table, or --model with an image model), got nothing");
  expect_error("--nodes 100 --features 10", "[plan] --classes must be given for a graph model");
  expect_error("--nodes 0 --features 10 --classes 3", "[plan] nodes must be 1 to 2^40, got 0");
  expect_error("--nodes 99999999999999999999 --features 10 --classes 3", "must be a whole number");
  expect_error(sizes + "--layers 1001", "[plan] layers must be 1 to 1000, got 1001");
  expect_error(sizes + "--train-nodes 0", "[plan] training nodes must be 1 to the number of nodes, got 0");
  expect_error(sizes + "--dropout 1", "[plan] dropout must be at least 0 and less than 1, got 1");
  expect_error(sizes + "--dropout nan", "[plan] dropout must be");
  expect_error(sizes + "--norm instance", "[plan] --norm must be batch|layer|none, got 'instance'");
  expect_error(sizes + "--method nonsense", "[method] a method must be one of fp32, exact");
  expect_error(sizes + "--method satchel,bits=9", "[method] bits must be 1 to 8 or 32, got 'satchel,bits=9'");
  expect_error(sizes + "--method ''", "[method] a method must be one of");
  expect_error(sizes + "--table arxiv", "[plan] --table has its own sizes, got --nodes");
  expect_error("--table arxiv --fit 16GB", "[plan] --table has its own sizes, got --fit");
  expect_error("--table cora", "--table");
  expect_error("--nodes 1099511627776 --features 10 --hidden 2147483648 --classes 3", "[plan] a tensor may have at most 2^56 values");
}

}  // namespace
}  // namespace satchel
