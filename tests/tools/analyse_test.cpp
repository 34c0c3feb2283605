// `satchel analyse` as a user runs it.
#include <cmath>
#include <numeric>

#include "tests/tools/train_command.h"

namespace satchel::train_command {
namespace {

class AnalyseCommand : public TrainCommand {};

constexpr const char* kGraph = "synthetic:nodes=2000,edges=8000,features=128,classes=4";

/// Of SAGE every layer shows its input, A·x (both also projected) and its norm's input; normalised values lie as theory says.
TEST_F(AnalyseCommand, SavesOfAGraph) {
  const Outcome r = run({"analyse", "--threads", "1", "--data", kGraph, "--layers", "2", "--hidden", "64", "--epochs", "2", "--blocks",
                         "row,8rows", "--bits", "1,2,5", "--json", "a.json"});
  ASSERT_EQ(r.code, 0) << r.err;
  for (const char* part : {"sage, 2 layers × 64 on synthetic:", "after 2 epochs", "JS uniform", "convs.1", "aggregate, projected"})
    EXPECT_NE(r.out.find(part), std::string::npos) << part << '\n' << r.out;
  const json all = json::parse(slurp(path("a.json")));
  EXPECT_EQ(all["kind"], "analyse");
  EXPECT_EQ(all["epochs"], 2);
  std::vector<std::string> names;
  for (const json& s : all["saves"])
    names.push_back(s["name"].get<std::string>() + " " + s["kind"].get<std::string>() + (s["projected"].get<bool>() ? " projected" : ""));
  const std::vector<std::string> wanted = {
      "convs.0 input", "convs.0 input projected", "convs.0 aggregate", "convs.0 aggregate projected", "norms.0 norm",
      "convs.1 input", "convs.1 input projected", "convs.1 aggregate", "convs.1 aggregate projected"};
  EXPECT_EQ(names, wanted);
  for (const json& s : all["saves"]) {
    ASSERT_EQ(s["blocks"].size(), 2u);
    for (const json& b : s["blocks"]) {
      const auto shares = b["histogram"].get<std::vector<double>>();
      EXPECT_EQ(shares.size(), 60u);
      EXPECT_NEAR(std::accumulate(shares.begin(), shares.end(), 0.0), 1, 1e-9);
      ASSERT_EQ(b["variances"].size(), 3u);
      EXPECT_FALSE(b["variances"][0].contains("gain"));  // 1 bit has two levels, and 5 bits even ones
      EXPECT_FALSE(b["variances"][2].contains("gain"));
      EXPECT_NEAR(b["variances"][1]["uniform"].get<double>(), 1.0 / 6, 1e-9);
      if (!s["projected"].get<bool>()) continue;
      EXPECT_LT(b["js_normal"].get<double>(), b["js_uniform"].get<double>()) << s["name"];
      // Projected rows are sums of many terms, so nearly normal: measured as predicted, in blocks of a row within 5 %.
      const json& v = b["variances"][1];
      if (b["block"] == "row") {
        EXPECT_NEAR(v["measured"].get<double>() / v["normal"].get<double>(), 1, .05) << s["name"];
      }
      EXPECT_GT(v["gain"].get<double>(), 0);
    }
  }
  EXPECT_EQ(all["saves"][1]["blocks"][0]["values"], 16);  // 128 / 8
  EXPECT_EQ(all["saves"][1]["blocks"][1]["values"], 128);

  const Outcome fresh =
      run({"analyse", "--threads", "1", "--data", kGraph, "--model", "gcn", "--layers", "2", "--hidden", "16", "--project", "none"});
  ASSERT_EQ(fresh.code, 0) << fresh.err;
  EXPECT_NE(fresh.out.find("gcn, 2 layers × 16 on " + std::string(kGraph) + ", not trained"), std::string::npos) << fresh.out;
  EXPECT_EQ(fresh.out.find("projected"), std::string::npos) << fresh.out;
}

/// A checkpoint's weights are those that are looked at: what training for as many epochs gives.
TEST_F(AnalyseCommand, CheckpointAndGradients) {
  const json run_json = trained({"--threads", "1", "--method", "fp32", "--epochs", "3", "--seed", "4", "--checkpoint", "a.st"}, "a.json");
  ASSERT_FALSE(run_json.is_discarded());
  const Outcome from = run({"analyse", "--threads", "1", "--data", kData, "--checkpoint", "a.st", "--gradients", "--draws", "6", "--parts",
                            "3", "--method", "satchel;int8", "--json", "a.json"});
  ASSERT_EQ(from.code, 0) << from.err;
  const json a = json::parse(slurp(path("a.json")));
  const Outcome fresh =
      run({"analyse", "--threads", "1", "--data", kData, "--hidden", "16", "--epochs", "3", "--seed", "4", "--json", "b.json"});
  ASSERT_EQ(fresh.code, 0) << fresh.err;
  EXPECT_TRUE(json::parse(slurp(path("b.json")))["saves"] == a["saves"]);

  ASSERT_TRUE(a.contains("gradients"));
  EXPECT_EQ(a["gradients"]["parts_are"], "random halves of the training nodes");
  int64_t compared = 0;
  for (const json& w : a["gradients"]["weights"]) {
    const json &two = w["methods"][0], &eight = w["methods"][1];
    EXPECT_EQ(w["negligible"].get<bool>(), w["name"] == "convs.0.lin_l.bias" || w["name"] == "convs.1.lin_l.bias") << w["name"];
    if (w["negligible"].get<bool>()) continue;  // a norm follows: no gradient
    EXPECT_GT(w["batch_variance"].get<double>(), 0) << w["name"];
    EXPECT_GT(eight["cosine"].get<double>(), .999) << w["name"];
    if (two["variance"].get<double>() == 0) continue;  // nothing packed is read on its way
    ++compared;
    EXPECT_LT(eight["variance"].get<double>(), .1 * two["variance"].get<double>()) << w["name"];
    EXPECT_GT(two["cosine"].get<double>(), .8) << w["name"];
  }
  EXPECT_GE(compared, 4);
  EXPECT_NE(from.out.find("of batch's"), std::string::npos) << from.out;
}

TEST_F(AnalyseCommand, Images) {
  const Outcome r = run({"analyse", "--threads", "1",       "--data",      "synthetic-images:classes=4,size=8,count=64",
                         "--model", "resnet18",  "--width", "8",           "--batch",
                         "16",      "--blocks",  "64,256",  "--gradients", "--draws",
                         "3",       "--parts",   "3",       "--method",    "actnn",
                         "--json",  "a.json"});
  ASSERT_EQ(r.code, 0) << r.err;
  const json a = json::parse(slurp(path("a.json")));
  EXPECT_EQ(a["saves"][0]["name"], "conv1");
  EXPECT_EQ(a["saves"][0]["kind"], "input");
  EXPECT_EQ(a["saves"][1]["kind"], "norm");
  EXPECT_EQ(a["saves"].back()["name"], "fc");
  for (const json& s : a["saves"]) EXPECT_EQ(s["projected"], false);
  EXPECT_EQ(a["gradients"]["parts_are"], "batches");
  double worst = 1;
  for (const json& w : a["gradients"]["weights"]) worst = std::min(worst, w["methods"][0]["cosine"].get<double>());
  EXPECT_GT(worst, 0);
  EXPECT_LT(worst, 1);
}

TEST_F(AnalyseCommand, Errors) {
  expect_errors(
      {{{"analyse", "--data", kData, "--blocks", "map"}, 2, "[analyse] --blocks must be row, Nrows or numbers of values, got 'map'"},
       {{"analyse", "--data", kData, "--bits", "2,9"}, 2, "[analyse] --bits must be numbers from 1 to 8, got '9'"},
       {{"analyse", "--data", kData, "--project", "x"}, 2, "[analyse] --project must be none or a ratio, as 8, got 'x'"},
       {{"analyse", "--data", "synthetic-images:classes=2,size=8,count=8"}, 2, "[analyse] data must be a graph here"},
       {{"analyse", "--data", kData, "--model", "resnet18"}, 2, "[analyse] data must be images for resnet18"},
       {{"analyse", "--data", "synthetic-images:classes=2,size=8,count=8", "--model", "resnet18", "--blocks", "row"},
        2,
        "[analyse] blocks of rows are for graphs; images have blocks of values, got 'row'"},
       {{"analyse", "--data", kData, "--checkpoint", "none.st"}, 1, "none.st"},
       {{"analyse", "--data", kData, "--checkpoint", "none.st", "--epochs", "3"}, 2, "[analyse] --epochs are of a fresh model"}});
}

}  // namespace
}  // namespace satchel::train_command
