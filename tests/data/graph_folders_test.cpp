// The layouts that are folders: GraphSAINT and OGB.
#include <cmath>

#include "files.h"
#include "satchel/data/graph_data.h"
#include "satchel/data/save_graph.h"

namespace satchel {
namespace {

using namespace testing_files;
using I32 = std::vector<int32_t>;
using I64 = std::vector<int64_t>;
using F32 = std::vector<float>;

class GraphFolder : public ::testing::Test {
 protected:
  std::string error() {
    return error_of([&] { load_graph(folder); }, scratch);
  }
  Scratch scratch;
  std::string folder = scratch.make_folder("g");
};

class GraphSaint : public GraphFolder {
 protected:
  const Arrays adjacency = {{"indptr", npy(I32{0, 1, 3, 3})},
                            {"indices", npy(I32{2, 0, 2})},
                            {"data", npy_text("|b1", "(3,)", "\1\1\1")},
                            {"shape", npy(I64{3, 3})},
                            {"format", npy_text("|S3", "()", "csr")}};
  const std::string classes = R"({"0": 1, "2": 0, "1": 1})", roles = R"({"tr": [2, 0], "va": [1], "te": []})";

  void SetUp() override {
    write_npz(folder + "/adj_full.npz", adjacency);
    spill(folder + "/feats.npy", npy(std::vector<double>{1, 2, 3, 4, 5, 6}, "(3, 2)"));
    spill(folder + "/class_map.json", classes);
    spill(folder + "/role.json", roles);
  }
  std::string error_with(const std::string& file, const std::string& bytes) {
    const std::string path = folder + "/" + file, before = slurp(path);
    spill(path, bytes);
    const std::string out = error();
    spill(path, before);
    return out;
  }
  std::string error_with_array(const std::string& name, const std::string& array) {
    Arrays arrays = adjacency;
    arrays[name] = array;
    if (array.empty()) arrays.erase(name);
    write_npz(folder + "/adj_full.npz", arrays);
    return error();
  }
};

TEST_F(GraphSaint, IsLoaded) {
  const GraphData data = load_graph(folder + "/");
  EXPECT_EQ(data.name, "g");
  EXPECT_EQ(data.nodes, 3);
  EXPECT_EQ(data.start, (I64{0, 1, 3, 3}));
  EXPECT_EQ(data.target, (I32{2, 0, 2}));
  EXPECT_EQ(data.features.columns, 2);
  EXPECT_EQ(data.features.dense, (F32{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(data.task, Task::single_label);
  EXPECT_EQ(data.classes, 2);
  EXPECT_EQ(data.labels, (I32{1, 1, 0}));
  ASSERT_EQ(data.splits.size(), 1u);
  EXPECT_EQ(data.splits[0].train, (I64{0, 2}));
  EXPECT_EQ(data.splits[0].valid, (I64{1}));
  EXPECT_TRUE(data.splits[0].test.empty());
}

TEST_F(GraphSaint, MultiLabel) {
  spill(folder + "/class_map.json", R"({"1": [0, 1, 1, 0], "0": [1, 0, 0, 0], "2": [0, 0, 0, 1.0]})");
  const GraphData data = load_graph(folder);
  EXPECT_EQ(data.task, Task::multi_label);
  EXPECT_EQ(data.classes, 4);
  EXPECT_TRUE(data.labels.empty());
  EXPECT_EQ(data.targets, (std::vector<uint8_t>{1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1}));
}

TEST_F(GraphSaint, NodesOfNoSplitNeedNoLabel) {
  spill(folder + "/class_map.json", R"({"0": 1, "2": 0})");
  EXPECT_EQ(error(), "[load] g/role.json: 'va' must have nodes with a label only, got 1 at position 0");
  spill(folder + "/role.json", R"({"tr": [2, 0], "va": [], "te": []})");
  EXPECT_EQ(load_graph(folder).labels, (I32{1, -1, 0}));
}

TEST_F(GraphSaint, LabelsMayBeMissingWithTheirSplit) {
  std::remove((folder + "/class_map.json").c_str());
  EXPECT_EQ(error(), "[load] file must exist, got g/class_map.json");
  std::remove((folder + "/role.json").c_str());
  const GraphData data = load_graph(folder);
  EXPECT_FALSE(data.has_labels());
  EXPECT_TRUE(data.splits.empty());
  EXPECT_EQ(data.features.dense, (F32{1, 2, 3, 4, 5, 6}));
}

TEST_F(GraphSaint, ValuesAreWeights) {
  EXPECT_TRUE(load_graph(folder).weight.empty());
  Arrays arrays = adjacency;
  arrays["data"] = npy(F32{2, 1, 0.25});
  write_npz(folder + "/adj_full.npz", arrays);
  const GraphData data = load_graph(folder);
  EXPECT_EQ(data.weight, (F32{2, 1, 0.25}));
  EXPECT_TRUE(load_graph(folder, EdgeWeights::ignore).weight.empty());
  // What is saved is what was read.
  save_graph(data, data.splits[0], scratch.path("h"));
  EXPECT_EQ(load_graph(scratch.path("h")).weight, data.weight);
  EXPECT_TRUE(holds(error_with_array("data", npy(F32{2, 1, -0.25})), "[load] g/adj_full.npz: data must be 0 or more"));
}

TEST_F(GraphSaint, AdjacencyAndFeaturesAreChecked) {
  EXPECT_EQ(error_with_array("indices", npy(I32{2, 0, 3})), "[load] g/adj_full.npz: indices must be 0 to 2, got 3 at position 2");
  EXPECT_EQ(error_with_array("format", npy_text("|S3", "()", "csc")), "[load] g/adj_full.npz: format must be csr, got 'csc'");
  for (const char* name : {"indptr", "indices", "data", "shape"}) {
    EXPECT_TRUE(holds(error_with_array(name, ""), "[load] g/adj_full.npz: " + std::string(name) + " must be there")) << name;
  }
  EXPECT_EQ(error_with_array("format", ""), "accepted");
  EXPECT_EQ(error_with("feats.npy", npy(F32{1, 2, 3, 4}, "(2, 2)")), "[load] g/feats.npy: shape must have shape (3, any), got (2, 2)");
  EXPECT_EQ(error_with("feats.npy", npy(F32{}, "(3, 0)")), "[load] g/feats.npy must have a column, got none");
  EXPECT_EQ(error_with("feats.npy", npy(F32{1, 2, 3, NAN, 5, 6}, "(3, 2)")),
            "[load] g/feats.npy: features must be finite numbers of 32 bits, got nan at row 1, column 1");
  EXPECT_TRUE(holds(error_with("feats.npy", "short"), "[load] g/feats.npy: magic (byte 0)"));
}

TEST_F(GraphSaint, ClassMapIsChecked) {
  const auto error_in = [&](const std::string& json) { return error_with("class_map.json", json); };
  const std::string at = "[load] g/class_map.json: ";
  EXPECT_EQ(error_in(R"({"0": 1, "x": 0})"), at + "key must be the number of a node, got 'x'");
  EXPECT_EQ(error_in(R"({"0": 1, "": 0})"), at + "key must be the number of a node, got ''");
  EXPECT_EQ(error_in(R"({"0": 1, "1.5": 0})"), at + "key must be the number of a node, got '1.5'");
  EXPECT_EQ(error_in(R"({"0": 1, "3": 0})"), at + "key must be 0 to 2, got 3");
  EXPECT_EQ(error_in(R"({"0": 1, "-1": 0})"), at + "key must be 0 to 2, got -1");
  EXPECT_EQ(error_in(R"({"0": 1, "0": 0})"), at + "'0' must stand once, got it twice");
  EXPECT_EQ(error_in(R"({"0": 3})"), at + "'0' must be 0 to 2, got 3");
  EXPECT_EQ(error_in(R"({"0": -1})"), at + "'0' must be 0 to 2, got -1");
  EXPECT_EQ(error_in(R"({"0": 18446744073709551615})"), at + "'0' must be a whole number or a list, got 18446744073709551615");
  EXPECT_EQ(error_in(R"({"0": 0.5})"), at + "'0' must be a whole number or a list, got 0.5");
  EXPECT_EQ(error_in(R"({"0": null})"), at + "'0' must be a whole number or a list, got null");
  EXPECT_EQ(error_in(R"({"0": true})"), at + "'0' must be a whole number or a list, got true");
  EXPECT_EQ(error_in(R"({"0": "1"})"), at + "'0' must be a whole number or a list, got the text '1'");
  EXPECT_EQ(error_in(R"({"0": {}})"), at + "'0' must be a whole number or a list, got an object");
  EXPECT_EQ(error_in(R"({"0": [0, [1]]})"), at + "'0' must be a list of whole numbers, got a list");
  EXPECT_EQ(error_in(R"({"0": [0, "a"]})"), at + "'0' must be a list of whole numbers, got the text 'a'");
  EXPECT_EQ(error_in(R"({"0": [0, 2]})"), at + "'0' must have labels 0 or 1, got 2 at position 1");
  EXPECT_EQ(error_in(R"({"0": []})"), at + "'0' must have a label, got an empty list");
  EXPECT_EQ(error_in(R"({"0": [0, 1], "1": [1]})"), at + "'1' must have 2 labels, as those before, got 1");
  EXPECT_EQ(error_in(R"({"0": [0, 1], "1": 1})"), at + "'1' must be a list, as those before, got 1");
  EXPECT_EQ(error_in(R"({"0": 1, "1": [1]})"), at + "'1' must be one class id, as those before, got a list");
  EXPECT_EQ(error_in("{}"), "[load] g/class_map.json must have labels, got none");
  EXPECT_EQ(error_in("[1, 2]"), "[load] g/class_map.json must be a JSON object, got a list");
  EXPECT_EQ(error_in("7"), "[load] g/class_map.json must be a JSON object, got 7");
  EXPECT_EQ(error_in(""), at + "byte 1 must be JSON, got the end");
  EXPECT_TRUE(holds(error_in(R"({"0": 1, "1": 1} x)"), at + "byte 18 must be JSON, got"));
  EXPECT_TRUE(holds(error_in(std::string(100000, '[')), "must be a JSON object, got a list"));
  for (size_t length = 0; length < classes.size(); ++length) EXPECT_NE(error_in(classes.substr(0, length)), "accepted") << length;
}

TEST_F(GraphSaint, RolesAreChecked) {
  const auto error_in = [&](const std::string& json) { return error_with("role.json", json); };
  const std::string at = "[load] g/role.json: ";
  EXPECT_EQ(error_in(R"({"tr": [0], "va": [1]})"), at + "'te' must be there, got nothing");
  EXPECT_EQ(error_in(R"({"tr": [0], "tr": [1], "va": [], "te": []})"), at + "'tr' must stand once, got it twice");
  EXPECT_EQ(error_in(R"({"train": [0]})"), at + "key must be tr, va or te, got 'train'");
  EXPECT_EQ(error_in(R"({"tr": 0})"), at + "'tr' must be a list, got 0");
  EXPECT_EQ(error_in(R"({"tr": [0], "va": [3], "te": []})"), at + "'va' must be 0 to 2, got 3 at position 0");
  EXPECT_EQ(error_in(R"({"tr": [0, 0], "va": [], "te": []})"), at + "'tr' must name a node once, got 0 at position 1");
  EXPECT_EQ(error_in(R"({"tr": [0, 1], "va": [1], "te": []})"), at + "'va' must have no node of g/role.json: 'tr', got 1 at position 0");
  EXPECT_EQ(error_in(R"({"tr": [], "va": [1], "te": []})"), at + "'tr' must have a node to train on, got none");
  EXPECT_EQ(error_in(R"({"tr": [0, 1, 2, 2], "va": [], "te": []})"), at + "'tr' must name a node once, got more than there are");
  EXPECT_EQ(error_in(R"({"tr": ["0"], "va": [], "te": []})"), at + "'tr' must be a list of whole numbers, got the text '0'");
  for (size_t length = 0; length < roles.size(); ++length) EXPECT_NE(error_in(roles.substr(0, length)), "accepted") << length;
}

TEST_F(GraphSaint, EveryFileIsNeeded) {
  for (const char* name : {"feats.npy", "class_map.json", "role.json"}) {
    SetUp();
    std::remove((folder + "/" + name).c_str());
    EXPECT_EQ(error(), "[load] file must exist, got g/" + std::string(name));
  }
  std::remove((folder + "/adj_full.npz").c_str());
  SetUp();
  std::remove((folder + "/adj_full.npz").c_str());
  const std::string unknown = error();
  EXPECT_TRUE(holds(unknown, "(GraphSAINT)") && holds(unknown, "(OGB)")) << unknown;
  EXPECT_TRUE(unknown.ends_with("got 'class_map.json', 'feats.npy', 'role.json'")) << unknown;
}

class Ogb : public GraphFolder {
 protected:
  void SetUp() override {
    for (const char* name : {"g/raw", "g/split", "g/split/time"}) scratch.make_folder(name);
    const std::map<std::string, std::string> files = {{"raw/num-node-list", "4\n"},
                                                      {"raw/num-edge-list", "3\n"},
                                                      {"raw/edge", "2,0\n0,3\n2,1\n"},
                                                      {"raw/node-feat", "0.5,-1\n1e-3,2\r\n3,4\n5,6.25"},
                                                      {"raw/node-label", "1\n0\n2.0\nnan\n"},
                                                      {"split/time/train", "2\n0\n"},
                                                      {"split/time/valid", "1\n"},
                                                      {"split/time/test", ""}};
    for (const auto& [name, text] : files) put(name, text);
  }
  void put(const std::string& name, const std::string& text) { write_gzip(folder + "/" + name + ".csv.gz", text); }
  std::string error_with(const std::string& name, const std::string& text) {
    const std::string path = folder + "/" + name + ".csv.gz", before = slurp(path);
    put(name, text);
    const std::string out = error();
    spill(path, before);
    return out;
  }
};

TEST_F(Ogb, IsLoaded) {
  const GraphData data = load_graph(folder);
  EXPECT_EQ(data.nodes, 4);
  EXPECT_EQ(data.start, (I64{0, 1, 1, 3, 3}));
  EXPECT_EQ(data.target, (I32{3, 0, 1}));
  EXPECT_EQ(data.features.columns, 2);
  EXPECT_EQ(data.features.dense, (F32{0.5f, -1, 1e-3f, 2, 3, 4, 5, 6.25f}));
  EXPECT_EQ(data.task, Task::single_label);
  EXPECT_EQ(data.classes, 3);
  EXPECT_EQ(data.labels, (I32{1, 0, 2, -1}));
  ASSERT_EQ(data.splits.size(), 1u);
  EXPECT_EQ(data.splits[0].train, (I64{0, 2}));
  EXPECT_EQ(data.splits[0].valid, (I64{1}));
  EXPECT_TRUE(data.splits[0].test.empty());
}

TEST_F(Ogb, ManyColumnsAreLabels) {
  put("raw/node-label", "1,0,1\n0,0,0\n0,1.0,0\n,nan,\"\"\n");
  const GraphData data = load_graph(folder);
  EXPECT_EQ(data.task, Task::multi_label);
  EXPECT_EQ(data.classes, 3);
  EXPECT_EQ(data.targets, (std::vector<uint8_t>{1, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0}));
  EXPECT_EQ(error_with("raw/node-label", "1,2\n0,0\n0,0\n0,0\n"),
            "[load] g/raw/node-label.csv.gz: line 1 must be 0 or 1 for each label, got 2");
  EXPECT_EQ(error_with("raw/node-label", "1,0\n0,2\n0,0\n0,0\n"),
            "[load] g/raw/node-label.csv.gz: line 2, column 2 must be 0 to 1, got '2'");
  EXPECT_EQ(error_with("raw/node-label", "1,0\n0\n0,0\n0,0\n"), "[load] g/raw/node-label.csv.gz: line 2 must have 2 columns, got 1");
}

TEST_F(Ogb, LabelsMayBeMissingWithTheirSplit) {
  for (const char* name : {"raw/node-label", "split/time/train", "split/time/valid", "split/time/test"}) {
    std::remove((folder + "/" + name + ".csv.gz").c_str());
  }
  EXPECT_EQ(error(), "[load] file must exist, got g/raw/node-label.csv.gz");
  ::rmdir((folder + "/split/time").c_str());
  ::rmdir((folder + "/split").c_str());
  const GraphData data = load_graph(folder);
  EXPECT_FALSE(data.has_labels());
  EXPECT_EQ(data.target, (I32{3, 0, 1}));
}

TEST_F(Ogb, WeightsOfEdgesAreUsedOrRefused) {
  // 2 → 0, 0 → 3, 2 → 1 are stored as 0 → 3, 2 → 0, 2 → 1.
  for (const char* name : {"raw/edge_weight", "raw/edge-feat"}) {
    put(name, "4\n0.5\n6\n");
    EXPECT_EQ(load_graph(folder).weight, (F32{0.5, 4, 6})) << name;
    EXPECT_TRUE(load_graph(folder, EdgeWeights::ignore).weight.empty());
    put(name, "1\n1.0\n1\n");
    EXPECT_TRUE(load_graph(folder).weight.empty());
    EXPECT_TRUE(holds(error_with(name, "1\n-1\n1\n"), "must be 0 or more, as weights of edges are"));
    EXPECT_TRUE(holds(error_with(name, "1\n1\n"), "must have 3 lines, one edge, got 2"));
    EXPECT_TRUE(holds(error_with(name, "1\nx\n1\n"), "line 2, column 1 must be a number, got 'x'"));
    EXPECT_EQ(error_with(name, "1,2\n1,2\n1,2\n"),
              "[load] g/" + std::string(name) +
                  ".csv.gz must have one column, the edge's weight (--unweighted takes edges without weights and features), got more");
    std::remove((folder + "/" + name + ".csv.gz").c_str());
  }
  put("raw/edge_weight", "1\n1\n1\n");
  put("raw/edge-feat", "1\n1\n1\n");
  EXPECT_EQ(error(), "[load] g/raw/edge-feat.csv.gz must not stand beside edge_weight.csv.gz, got both");
}

TEST_F(Ogb, CellsAreChecked) {
  const std::string edge = "[load] g/raw/edge.csv.gz", feat = "[load] g/raw/node-feat.csv.gz", label = "[load] g/raw/node-label.csv.gz";
  EXPECT_EQ(error_with("raw/edge", "2,0\n0,4\n2,1\n"), edge + ": line 2, column 2 must be 0 to 3, got '4'");
  EXPECT_EQ(error_with("raw/edge", "2,0\n0,3\n-2,1\n"), edge + ": line 3, column 1 must be 0 to 3, got '-2'");
  EXPECT_EQ(error_with("raw/edge", "2,0\n0,a\n2,1\n"), edge + ": line 2, column 2 must be a whole number, got 'a'");
  EXPECT_EQ(error_with("raw/edge", "2,0\n0,\n2,1\n"), edge + ": line 2, column 2 must be a whole number, got nothing");
  EXPECT_EQ(error_with("raw/edge", "2,0\n0\n2,1\n"), edge + ": line 2 must have 2 columns, got 1");
  EXPECT_EQ(error_with("raw/edge", "2,0\n0,3,1\n2,1\n"), edge + ": line 2 must have 2 columns, got more");
  EXPECT_EQ(error_with("raw/edge", "2,0\n0,3\n"), edge + " must have 3 lines, one edge, got 2");
  EXPECT_EQ(error_with("raw/edge", "2,0\n0,3\n2,1\n1,1\n"), edge + " must have 3 lines, one edge, got more");
  EXPECT_EQ(error_with("raw/edge", "2,0\n\n0,3\n2,1\n"), edge + ": line 3 must not stand after a blank line, got '0,3'");
  EXPECT_EQ(error_with("raw/edge", "2,0\n0,3\n2,1\n\n\n"), "accepted");
  EXPECT_EQ(error_with("raw/node-feat", "1,2\n3,nan\n5,6\n7,8\n"),
            feat + ": line 2, column 2 must be a finite number of 32 bits, got 'nan'");
  EXPECT_EQ(error_with("raw/node-feat", "1,2\n3,1e39\n5,6\n7,8\n"),
            feat + ": line 2, column 2 must be a finite number of 32 bits, got '1e39'");
  EXPECT_EQ(error_with("raw/node-feat", "1,2\n3,x\n5,6\n7,8\n"), feat + ": line 2, column 2 must be a number, got 'x'");
  EXPECT_EQ(error_with("raw/node-feat", "1,2\n3\n5,6\n7,8\n"), feat + ": line 2 must have 2 columns, got 1");
  EXPECT_EQ(error_with("raw/node-feat", "1,2\n3,4\n5,6\n"), feat + " must have 4 lines, one node, got 3");
  EXPECT_EQ(error_with("raw/node-label", "1\n0\n4\n0\n"), label + ": line 3, column 1 must be 0 to 3, got '4'");
  EXPECT_EQ(error_with("raw/node-label", "1\n0\n0.5\n0\n"), label + ": line 3, column 1 must be a whole number, got '0.5'");
  EXPECT_EQ(error_with("raw/node-label", "1\n0\nx\n0\n"), label + ": line 3, column 1 must be a class id, got 'x'");
  EXPECT_EQ(error_with("raw/node-label", "1\n0\nnan\n0\n"),
            "[load] g/split/time/train.csv.gz must have nodes with a label only, got 2 at position 0");
  EXPECT_EQ(error_with("raw/num-node-list", "0\n"), "[load] g/raw/num-node-list.csv.gz: line 1, column 1 must be at least 1, got '0'");
  EXPECT_EQ(error_with("raw/num-node-list", "4\n4\n"), "[load] g/raw/num-node-list.csv.gz must have 1 lines, one graph, got more");
  EXPECT_TRUE(holds(error_with("raw/num-node-list", "99999999999999999999\n"), "num-node-list.csv.gz: line 1, column 1 must be"));
  EXPECT_EQ(error_with("split/time/valid", "1\n4\n"), "[load] g/split/time/valid.csv.gz: line 2, column 1 must be 0 to 3, got '4'");
  EXPECT_EQ(error_with("split/time/valid", "2\n"),
            "[load] g/split/time/valid.csv.gz must have no node of g/split/time/train.csv.gz, got 2 at position 0");
  EXPECT_EQ(error_with("split/time/train", ""), "[load] g/split/time/train.csv.gz must have a node to train on, got none");
}

TEST_F(Ogb, GzipIsChecked) {
  const std::string path = folder + "/raw/edge.csv.gz", whole = slurp(path);
  const auto error_in = [&](const std::string& bytes) {
    spill(path, bytes);
    return error();
  };
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_TRUE(holds(error_in(whole.substr(0, length)),
                      "[load] g/raw/edge.csv.gz must be a whole gzip file, got its end after " + std::to_string(length)))
        << length;
  }
  EXPECT_TRUE(holds(error_in("2,0\n0,3\n2,1\n"),
                    "[load] g/raw/edge.csv.gz must be a gzip file, which begins with \\x1f\\x8b, got '2,0\\x0a0,3\\x0a2,1\\x0a'"));
  EXPECT_TRUE(holds(error_in(whole + "garbage"), "[load] g/raw/edge.csv.gz must be a whole gzip file"));
  std::string wrong = whole;
  wrong[wrong.size() - 8] ^= 1;  // the CRC
  EXPECT_TRUE(holds(error_in(wrong), "must be a whole gzip file, got damage at byte "));
  // Files may be joined.
  put("raw/edge", "2,0\n");
  const std::string first = slurp(path);
  put("raw/edge", "0,3\n2,1\n");
  EXPECT_EQ(error_in(first + slurp(path)), "accepted");
  // 64 MiB without an end of line, in 64 KiB.
  put("raw/edge", std::string(size_t{64} << 20, '1'));
  EXPECT_EQ(error(), "[load] g/raw/edge.csv.gz: line 1 must be at most 16 MiB, got more");
}

TEST_F(Ogb, EveryFileAndOneSplitAreNeeded) {
  for (const char* name : {"raw/num-node-list", "raw/num-edge-list", "raw/edge", "raw/node-feat", "raw/node-label", "split/time/train",
                           "split/time/valid", "split/time/test"}) {
    SetUp();
    std::remove((folder + "/" + name + ".csv.gz").c_str());
    EXPECT_EQ(error(), "[load] file must exist, got g/" + std::string(name) + ".csv.gz");
  }
  SetUp();
  scratch.make_folder("g/split/random");
  EXPECT_EQ(error(), "[load] g/split must hold one folder, got 'random', 'time'");
}

}  // namespace
}  // namespace satchel
