// Every graph layer as a user runs it: train, resume, predict, plan and bench.
#include "satchel/core/graph_layer.h"
#include "tests/tools/train_command.h"

namespace satchel::train_command {
namespace {

class GraphLayersCommand : public TrainCommand {};

TEST_F(GraphLayersCommand, TrainResumePredictPlanAndBench) {
  for (const GraphLayer& layer : graph_layers()) {
    const std::string name(layer.name);
    SCOPED_TRACE(name);
    const std::vector<std::string> run_of{"--model", name, "--checkpoint", "a.st", "--quiet", "--overwrite"};
    const auto with = [&](std::vector<std::string> more) {
      more.insert(more.begin(), run_of.begin(), run_of.end());
      return more;
    };
    const json whole = trained(with({"--epochs", "4"}), "a.json")["runs"][0];
    EXPECT_EQ(whole["options"]["model"], name);
    trained(with({"--epochs", "2"}), "a.json");
    const json resumed = trained({"--model", name, "--checkpoint", "a.st", "--quiet", "--epochs", "4", "--resume"}, "a.json")["runs"][0];
    EXPECT_EQ(resumed["loss"], whole["loss"]);
    EXPECT_EQ(resumed["test"], whole["test"]);
    const Outcome predicted = run({"predict", "--checkpoint", "a.st", "--data", kData, "-o", "y.npy"});
    EXPECT_EQ(predicted.code, 0) << predicted.err;

    const std::vector<std::string> sizes{"plan", "--model", name, "--nodes", "600", "--features", "16", "--hidden", "16", "--classes", "4"};
    std::vector<std::string> as_json = sizes;
    as_json.insert(as_json.end(), {"--json", "-"});
    const json plan = json::parse(run(as_json).out, nullptr, false);
    EXPECT_EQ(plan["model"]["conv"], name);
    EXPECT_EQ(plan["methods"][0]["saved_bytes"], whole["saved_bytes"]);
    EXPECT_EQ(run(sizes).out.rfind(std::string(layer.title) + " of 3 layers", 0), 0u);

    const Outcome bench =
        run({"bench", "graph", "--data", kData, "--model", name, "--hidden", "16", "--steps", "1", "--methods", "satchel"});
    EXPECT_EQ(bench.code, 0) << bench.err;
    for (const char* part : {"gradients at 32 bits are torch's within", "\ntorch ", "\nsatchel "})
      EXPECT_NE(bench.out.find(part), std::string::npos) << part << '\n' << bench.out;
    EXPECT_NE(run({"train", "--help"}).out.find(name), std::string::npos);
  }
}

}  // namespace
}  // namespace satchel::train_command
