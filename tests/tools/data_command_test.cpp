// `satchel data` as a user runs it: what it writes is what training would have taken.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>

#include "satchel/data/graph_data.h"
#include "satchel/data/save_graph.h"
#include "tests/tools/run_tool.h"

namespace satchel {
namespace {

using nlohmann::json;

constexpr const char* kFiles[] = {"adj_full.npz", "feats.npy", "class_map.json", "role.json"};

using test::Outcome;

Outcome tool(const std::string& arguments) { return test::run_tool(arguments); }

class DataCommand : public testing::Test {
 protected:
  void TearDown() override {
    for (const std::string& folder : {folder_, other_}) {
      for (const char* name : kFiles) ::unlink((folder + "/" + name).c_str());
      ::rmdir(folder.c_str());
      EXPECT_NE(::access(folder.c_str(), F_OK), 0) << "no other file may be left: " << folder;
    }
  }

  std::string folder_ = testing::TempDir() + "satchel_data_" + std::to_string(::getpid()), other_ = folder_ + "_again";
};

using Edges = std::set<std::pair<int64_t, int64_t>>;

Edges edges_of(const GraphData& data) {
  Edges edges;
  for (int64_t i = 0; i < data.nodes; ++i) {
    for (int64_t e = data.start[static_cast<size_t>(i)]; e < data.start[static_cast<size_t>(i) + 1]; ++e) {
      edges.insert({i, data.target[static_cast<size_t>(e)]});
    }
  }
  return edges;
}

/// Both directions, no self loops: by a loop, not by the library's own matrices.
Edges symmetric(const Edges& edges) {
  Edges both;
  for (const auto& [a, b] : edges) {
    if (a != b) both.insert({a, b}), both.insert({b, a});
  }
  return both;
}

void expect_same_split(const Split& a, const Split& b) {
  EXPECT_EQ(a.train, b.train);
  EXPECT_EQ(a.valid, b.valid);
  EXPECT_EQ(a.test, b.test);
}

TEST_F(DataCommand, WritesWhatTrainingReadsBack) {
  const std::string where = "synthetic:nodes=700,edges=3000,features=13,classes=5";
  const Outcome r = tool("data --data " + where + " --out '" + folder_ + "'");
  ASSERT_EQ(r.code, 0) << r.out;
  EXPECT_NE(r.out.find("700 nodes"), std::string::npos) << r.out;
  const GraphData made = load_graph(where), read = load_graph(folder_);
  EXPECT_EQ(read.nodes, made.nodes);
  EXPECT_EQ(edges_of(read), symmetric(edges_of(made)));
  EXPECT_EQ(edges_of(read).size(), read.target.size()) << "each edge once";
  EXPECT_EQ(read.features.dense, made.features.dense);
  EXPECT_EQ(read.labels, made.labels);
  EXPECT_EQ(read.classes, made.classes);
  EXPECT_EQ(read.task, Task::single_label);
  ASSERT_EQ(read.splits.size(), 1u);
  expect_same_split(read.splits[0], split_of(made, 0));

  ASSERT_EQ(tool("data --data '" + folder_ + "' --out '" + other_ + "'").code, 0);
  const GraphData again = load_graph(other_);
  EXPECT_EQ(again.start, read.start) << "a second time changes nothing";
  EXPECT_EQ(again.target, read.target);
  EXPECT_EQ(again.features.dense, read.features.dense);
}

TEST_F(DataCommand, TrainsAsTheOriginal) {
  const std::string where = "synthetic:nodes=300,edges=900,features=8,classes=3";
  ASSERT_EQ(tool("data --data " + where + " --out '" + folder_ + "'").code, 0);
  const auto losses = [](const std::string& data) {
    const Outcome r = tool("train --method fp32,satchel --hidden 8 --epochs 3 --threads 1 --json - --data '" + data + "'");
    EXPECT_EQ(r.code, 0) << r.out;
    std::vector<double> all;
    for (const json& run : json::parse(r.out)["runs"]) all.push_back(run["loss"]);
    return all;
  };
  EXPECT_EQ(losses(folder_), losses(where));
}

TEST_F(DataCommand, KeepsLabelsOfEveryKind) {
  GraphData data;
  data.nodes = 3;
  data.start = {0, 1, 2, 2};
  data.target = {1, 2};
  data.features.rows = 3;
  data.features.columns = 2;
  data.features.start = {0, 1, 1, 3};
  data.features.column = {1, 0, 1};
  data.features.value = {0.5f, -1.0f, 3.0f};
  data.classes = 2;
  data.labels = {1, -1, 0};
  const Split split{{0}, {2}, {}};
  save_graph(data, split, folder_);
  const GraphData read = load_graph(folder_);
  EXPECT_EQ(read.labels, data.labels) << "a node without a class stays so";
  EXPECT_EQ(read.features.dense, (std::vector<float>{0, 0.5f, 0, 0, -1, 3}));
  EXPECT_EQ(read.start, data.start);
  expect_same_split(read.splits.at(0), split);

  data.task = Task::multi_label;
  data.targets = {1, 0, 0, 0, 1, 1};
  save_graph(data, split, folder_);  // over what stands there
  const GraphData many = load_graph(folder_);
  EXPECT_EQ(many.task, Task::multi_label);
  EXPECT_EQ(many.targets, data.targets);
}

TEST_F(DataCommand, RefusesWhatItCannotWriteTo) {
  const std::string where = "data --data synthetic:nodes=50,edges=100,features=4,classes=2 ";
  EXPECT_EQ(tool(where).code, 2) << "--out is missing";
  EXPECT_EQ(tool(where + "--out ''").code, 2);
  EXPECT_EQ(tool(where + "--split 9 --out " + ::testing::TempDir() + "split9").code, 2);  // it has no splits of its own
  EXPECT_EQ(tool(where + "--out /nowhere/at/all").code, 1);
  EXPECT_EQ(tool(where + "--out '" SATCHEL_TOOL "'").code, 1) << "a file";
  EXPECT_EQ(tool(where + "--split -1 --out '" + folder_ + "'").code, 2);
  EXPECT_EQ(tool("data --data /nowhere.npz --out '" + folder_ + "'").code, 1);
  ASSERT_EQ(tool(where + "--out '" + folder_ + "'").code, 0);
  const Outcome own = tool("data --data '" + folder_ + "' --out '" + folder_ + "/'");
  EXPECT_EQ(own.code, 2) << own.out;
  EXPECT_EQ(load_graph(folder_).nodes, 50) << "what it would have written over is still there";
}

}  // namespace
}  // namespace satchel
