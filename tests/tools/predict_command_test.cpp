// `satchel predict` of graphs as a user runs it.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "satchel/data/graph_data.h"
#include "tests/tools/train_command.h"

namespace satchel::train_command {
namespace {

class PredictCommand : public TrainCommand {};

TEST_F(PredictCommand, PredictionsHaveThePrintedAccuracy) {
  const json all = trained({"--epochs", "20", "--checkpoint", "a.st"}, "a.json");
  const Outcome r = run({"predict", "--checkpoint", "a.st", "--data", kData, "-o", "y.npy", "--scores", "p.npy"});
  ASSERT_EQ(r.code, 0) << r.err;

  const GraphData data = load_graph(kData);
  const auto values_of = [&](const std::string& name, size_t bytes) {  // the values end the file
    const std::string file = slurp(path(name));
    EXPECT_GT(file.size(), bytes);
    return file.substr(file.size() - std::min(bytes, file.size()));
  };
  std::vector<int64_t> classes(600);
  std::memcpy(classes.data(), values_of("y.npy", 600 * sizeof(int64_t)).data(), 600 * sizeof(int64_t));
  std::vector<float> scores(600 * 4);
  std::memcpy(scores.data(), values_of("p.npy", scores.size() * sizeof(float)).data(), scores.size() * sizeof(float));

  const Split split = split_of(data, 0, 0);
  double right = 0;
  for (const int64_t node : split.test) right += classes[static_cast<size_t>(node)] == data.labels[static_cast<size_t>(node)] ? 1 : 0;
  const double accuracy = 100 * right / static_cast<double>(split.test.size());
  // One division in float or double apart: 100·2^−23.
  EXPECT_NEAR(accuracy, all["runs"][0]["test"].get<double>(), 100 * 0x1p-23);
  char printed[64];
  std::snprintf(printed, sizeof printed, "y.npy: 600 nodes, test %.2f %%\n", accuracy);
  EXPECT_EQ(r.out, printed);
  for (size_t node = 0; node < classes.size(); ++node) {
    const float* row = scores.data() + 4 * node;
    EXPECT_EQ(std::max_element(row, row + 4) - row, classes[node]);
    EXPECT_NEAR(row[0] + row[1] + row[2] + row[3], 1, 8 * 0x1p-24);  // four roundings to float, four additions
  }
}

TEST_F(PredictCommand, PredictNamesWhatDoesNotFit) {
  trained({"--epochs", "1", "--checkpoint", "a.st"}, "a.json");
  const auto with = [](const std::string& data) {
    return std::vector<std::string>{"predict", "--checkpoint", "a.st", "--data", data, "-o", "y.npy"};
  };
  expect_errors(
      {{with("synthetic:nodes=600,edges=2400,features=17,classes=4"), 1,
        "[predict] data must have the 16 features of the checkpoint, got 17"},
       {with("synthetic:nodes=600,edges=2400,features=16,classes=5"), 1, "[predict] data must have the 4 classes of the checkpoint, got 5"},
       {with(std::string(kData) + ",task=multi"), 1, "[predict] data must have the checkpoint's task"},
       {{"predict", "--checkpoint", "a.st", "--data", kData, "-o", "./a.st"}, 2, "--output must be another file than --checkpoint"},
       {{"predict", "--checkpoint", "a.st", "--data", kData, "-o", "y.npy", "--scores", "./y.npy"},
        2,
        "--scores must be another file than --output"}});
  EXPECT_FALSE(exists(path("y.npy")));
}

TEST_F(PredictCommand, PredictsNodesWithoutLabels) {
  ASSERT_EQ(run({"data", "--data", kData, "--out", "set"}).code, 0);
  const Outcome trained = run({"train", "--data", "set", "--hidden", "16", "--epochs", "5", "--quiet", "--checkpoint", "a.st"});
  ASSERT_EQ(trained.code, 0) << trained.err;
  ASSERT_EQ(run({"predict", "--checkpoint", "a.st", "--data", "set", "-o", "y.npy"}).code, 0);
  for (const char* name : {"set/class_map.json", "set/role.json"}) ASSERT_EQ(::unlink(path(name).c_str()), 0);
  const Outcome r = run({"predict", "--checkpoint", "a.st", "--data", "set", "-o", "p.npy"});
  EXPECT_EQ(r.code, 0) << r.err;
  EXPECT_EQ(r.out, "p.npy: 600 nodes, no labels to test on\n");
  EXPECT_EQ(slurp(path("p.npy")), slurp(path("y.npy"))) << "labels change no prediction";
  for (const char* name : {"set/adj_full.npz", "set/feats.npy"}) ::unlink(path(name).c_str());
  ::rmdir(path("set").c_str());
}

}  // namespace
}  // namespace satchel::train_command
