// The npz layouts: gnn-benchmark and heterophilous. Folders are in graph_folders_test.cpp.
#include <algorithm>
#include <cmath>

#include "files.h"
#include "satchel/data/graph_data.h"

namespace satchel {
namespace {

using namespace testing_files;
using I32 = std::vector<int32_t>;
using I64 = std::vector<int64_t>;
using F32 = std::vector<float>;

// Five nodes; 0 → 1, 2; 1 → 2; 3 → 4; 4 → 0, 3. 13 features with six entries: 6/65 are fewer than a quarter.
Arrays benchmark() {
  return {{"adj_data", npy(F32(6, 1))},
          {"adj_indices", npy(I32{1, 2, 2, 4, 0, 3})},
          {"adj_indptr", npy(I32{0, 2, 3, 3, 4, 6})},
          {"adj_shape", npy(I64{5, 5})},
          {"attr_data", npy(F32{1, 2, 3, 4, 5, 6})},
          {"attr_indices", npy(I32{12, 0, 3, 1, 2, 3})},  // row 0 is not in order
          {"attr_indptr", npy(I32{0, 2, 3, 3, 3, 6})},
          {"attr_shape", npy(I64{5, 13})},
          {"labels", npy(I64{0, 1, 2, 1, 0})}};
}

Arrays with_split() {
  Arrays out = benchmark();
  out["train_idx"] = npy(I64{4, 0});
  out["val_idx"] = npy(I64{1});
  out["test_idx"] = npy(I64{3, 2});
  return out;
}

// Four nodes, three edges one way, two splits.
Arrays heterophilous() {
  return {{"node_features", npy(F32{1, 2, 3, 4, 5, 6, 7, 8}, "(4, 2)")},
          {"node_labels", npy(I64{0, 1, 1, 0})},
          {"edges", npy(I64{2, 0, 0, 3, 2, 1}, "(3, 2)")},
          {"train_masks", npy_text("|b1", "(2, 4)", std::string("\1\0\0\0\0\1\1\0", 8))},
          {"val_masks", npy_text("|b1", "(2, 4)", std::string("\0\1\0\0\1\0\0\0", 8))},
          {"test_masks", npy_text("|b1", "(2, 4)", std::string("\0\0\1\1\0\0\0\1", 8))}};
}

class GraphNpz : public ::testing::Test {
 protected:
  GraphData load(const Arrays& arrays) {
    write_npz(path, arrays);
    return load_graph(path);
  }
  std::string error(const Arrays& arrays) {
    return error_of([&] { load(arrays); }, scratch);
  }
  /// The error when one array is another, or (empty) missing.
  std::string error(Arrays arrays, const std::string& name, const std::string& array) {
    arrays[name] = array;
    if (array.empty()) arrays.erase(name);
    return error(arrays);
  }

  Scratch scratch;
  std::string path = scratch.path("t.npz");
};

TEST_F(GraphNpz, BenchmarkIsLoaded) {
  const GraphData data = load(with_split());
  EXPECT_EQ(data.name, "t");
  EXPECT_EQ(data.nodes, 5);
  EXPECT_EQ(data.start, (I64{0, 2, 3, 3, 4, 6}));
  EXPECT_EQ(data.target, (I32{1, 2, 2, 4, 0, 3}));
  EXPECT_EQ(data.task, Task::single_label);
  EXPECT_EQ(data.classes, 3);
  EXPECT_EQ(data.labels, (I32{0, 1, 2, 1, 0}));
  ASSERT_TRUE(data.features.sparse());
  EXPECT_TRUE(data.features.dense.empty());
  EXPECT_EQ(data.features.rows, 5);
  EXPECT_EQ(data.features.columns, 13);
  EXPECT_EQ(data.features.start, (I64{0, 2, 3, 3, 3, 6}));
  EXPECT_EQ(data.features.column, (I32{0, 12, 3, 1, 2, 3}));  // sorted, values with them
  EXPECT_EQ(data.features.value, (F32{2, 1, 3, 4, 5, 6}));
  ASSERT_EQ(data.splits.size(), 1u);
  EXPECT_EQ(data.splits[0].train, (I64{0, 4}));
  EXPECT_EQ(data.splits[0].valid, (I64{1}));
  EXPECT_EQ(data.splits[0].test, (I64{2, 3}));
  EXPECT_TRUE(load(benchmark()).splits.empty());
}

TEST_F(GraphNpz, ManyEntriesBecomeDense) {
  Arrays arrays = benchmark();
  arrays["attr_shape"] = npy(I64{5, 4});  // 6 of 20
  arrays["attr_indices"] = npy(I32{3, 0, 3, 1, 2, 3});
  const GraphData data = load(arrays);
  EXPECT_FALSE(data.features.sparse());
  EXPECT_EQ(data.features.dense, (F32{2, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 5, 6}));
  for (const char* name : {"attr_data", "attr_indices", "attr_indptr", "attr_shape"}) arrays.erase(name);
  arrays["attr_matrix"] = npy(F32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, "(5, 2)");
  const GraphData matrix = load(arrays);
  EXPECT_EQ(matrix.features.columns, 2);
  EXPECT_EQ(matrix.features.dense[9], 10);
}

// What is not asked for may be anything: the published files have names as pickled objects.
TEST_F(GraphNpz, OtherArraysAreIgnored) {
  Arrays arrays = benchmark();
  arrays["class_names"] = npy_text("|O", "(3,)", "pickle");
  EXPECT_EQ(load(arrays).nodes, 5);
  EXPECT_EQ(error(benchmark(), "labels", npy_text("|O", "(5,)", "pickle")),
            "[load] t.npz: labels: descr (byte 10): must be numbers (pickled Python objects are never loaded), got '|O'");
}

TEST_F(GraphNpz, BenchmarkAdjacencyIsChecked) {
  EXPECT_EQ(error(benchmark(), "adj_indices", npy(I32{1, 2, 2, 9999, 0, 3})),
            "[load] t.npz: adj_indices must be 0 to 4, got 9999 at position 3");
  EXPECT_EQ(error(benchmark(), "adj_indices", npy(I32{1, 2, 2, 4, 0, -1})),
            "[load] t.npz: adj_indices must be 0 to 4, got -1 at position 5");
  EXPECT_EQ(error(benchmark(), "adj_indptr", npy(I32{1, 2, 3, 3, 4, 6})),
            "[load] t.npz: adj_indptr must start with 0, got 1 at position 0");
  EXPECT_EQ(error(benchmark(), "adj_indptr", npy(I32{0, 3, 2, 3, 4, 6})),
            "[load] t.npz: adj_indptr must not fall, got 2 after 3 at position 2");
  EXPECT_EQ(error(benchmark(), "adj_indptr", npy(I32{0, 2, 3, 3, 4, 5})),
            "[load] t.npz: adj_indptr must end with the number of indices, 6, got 5 at position 5");
  EXPECT_EQ(error(benchmark(), "adj_indptr", npy(I32{0, 2, 3, 3, 4})), "[load] t.npz: adj_indptr must have shape (6), got (5)");
  EXPECT_EQ(error(benchmark(), "adj_indptr", npy(F32{0, 2, 3, 3, 4, 6})), "[load] t.npz: adj_indptr must be whole numbers, got <f4");
  EXPECT_EQ(error(benchmark(), "adj_shape", npy(I64{5, 6})), "[load] t.npz: adj_shape must be square, got 5 by 6");
  EXPECT_EQ(error(benchmark(), "adj_shape", npy(I64{5, int64_t{1} << 62})),
            "[load] t.npz: adj_shape must be 1 to 2147483647, got 4611686018427387904 at position 1");
  EXPECT_EQ(error(benchmark(), "adj_shape", npy(I64{-5, 5})), "[load] t.npz: adj_shape must be 1 to 2147483647, got -5 at position 0");
  EXPECT_EQ(error(benchmark(), "adj_data", npy(F32(5, 1))), "[load] t.npz: adj_data must have shape (6), got (5)");
}

TEST_F(GraphNpz, EveryArrayIsNeeded) {
  for (const auto& [name, array] : with_split()) {
    EXPECT_TRUE(holds(error(with_split(), name, ""), "[load] t.npz: " + name + " must be there, got '")) << name;
  }
  for (const auto& [name, array] : heterophilous()) {
    EXPECT_TRUE(holds(error(heterophilous(), name, ""), "[load] t.npz: " + name + " must be there, got '")) << name;
  }
}

TEST_F(GraphNpz, BenchmarkFeaturesAndLabelsAreChecked) {
  EXPECT_EQ(error(benchmark(), "attr_data", npy(F32{1, 2, NAN, 4, 5, 6})),
            "[load] t.npz: attr_data must be finite numbers of 32 bits, got nan at position 2");
  EXPECT_EQ(error(benchmark(), "attr_indices", npy(I32{12, 0, 13, 1, 2, 3})),
            "[load] t.npz: attr_indices must be 0 to 12, got 13 at position 2");
  EXPECT_EQ(error(benchmark(), "attr_indices", npy(I32{12, 0, 3, 2, 1, 2})),
            "[load] t.npz: attr_indices must have a column once a row, got 2 twice in row 4");
  EXPECT_EQ(error(benchmark(), "attr_shape", npy(I64{6, 13})), "[load] t.npz: attr_indptr must have shape (7), got (6)");
  Arrays more = benchmark();
  more["attr_shape"] = npy(I64{6, 13});
  EXPECT_EQ(error(more, "attr_indptr", npy(I32{0, 2, 3, 3, 3, 6, 6})), "[load] t.npz: attr_shape must have 5 rows, one a node, got 6");
  EXPECT_EQ(error(benchmark(), "attr_matrix", npy(F32(8, 1), "(4, 2)")), "[load] t.npz: attr_matrix must have shape (5, any), got (4, 2)");
  EXPECT_EQ(error(benchmark(), "attr_matrix", npy(F32{}, "(5, 0)")), "[load] t.npz: attr_matrix must have a column, got none");
  EXPECT_EQ(error(benchmark(), "labels", npy(I64{0, 1, 2, 1, -2})), "[load] t.npz: labels must be -1 to 4, got -2 at position 4");
  EXPECT_EQ(error(benchmark(), "labels", npy(I64{0, 1, 2, 1000000, 1})), "[load] t.npz: labels must be -1 to 4, got 1000000 at position 3");
  EXPECT_EQ(error(benchmark(), "labels", npy(I64{0, 1, 2})), "[load] t.npz: labels must have shape (5), got (3)");
  EXPECT_EQ(error(benchmark(), "labels", npy(F32{0, 1, 2, 1, 0})), "[load] t.npz: labels must be whole numbers, got <f4");
}

TEST_F(GraphNpz, SplitsAreChecked) {
  EXPECT_EQ(error(with_split(), "val_idx", npy(I64{5})), "[load] t.npz: val_idx must be 0 to 4, got 5 at position 0");
  EXPECT_EQ(error(with_split(), "test_idx", npy(I64{3, 2, 3})), "[load] t.npz: test_idx must name a node once, got 3 at position 2");
  EXPECT_EQ(error(with_split(), "test_idx", npy(I64{3, 4})),
            "[load] t.npz: test_idx must have no node of t.npz: train_idx, got 4 at position 1");
  EXPECT_EQ(error(with_split(), "train_idx", npy(I64{})), "[load] t.npz: train_idx must have a node to train on, got none");
  EXPECT_EQ(error(with_split(), "train_idx", npy(I64{0, 4}, "(2, 1)")), "[load] t.npz: train_idx must have shape (any), got (2, 1)");
}

TEST_F(GraphNpz, HeterophilousIsLoaded) {
  const GraphData data = load(heterophilous());
  EXPECT_EQ(data.nodes, 4);
  EXPECT_EQ(data.start, (I64{0, 1, 1, 3, 3}));
  EXPECT_EQ(data.target, (I32{3, 0, 1}));
  EXPECT_EQ(data.task, Task::binary);
  EXPECT_EQ(data.classes, 1);
  EXPECT_EQ(data.labels, (I32{0, 1, 1, 0}));
  EXPECT_EQ(data.features.dense, (F32{1, 2, 3, 4, 5, 6, 7, 8}));
  ASSERT_EQ(data.splits.size(), 2u);
  EXPECT_EQ(data.splits[0].train, (I64{0}));
  EXPECT_EQ(data.splits[0].test, (I64{2, 3}));
  EXPECT_EQ(data.splits[1].train, (I64{1, 2}));
  EXPECT_EQ(data.splits[1].valid, (I64{0}));
  Arrays three = heterophilous();
  three["node_labels"] = npy(I64{0, 1, 2, 0});
  EXPECT_EQ(load(three).task, Task::single_label);
  EXPECT_EQ(load(three).classes, 3);
}

TEST_F(GraphNpz, HeterophilousIsChecked) {
  EXPECT_EQ(error(heterophilous(), "edges", npy(I64{2, 0, 0, 3, 2, 4}, "(3, 2)")),
            "[load] t.npz: edges must be 0 to 3, got 4 at position 5");
  EXPECT_EQ(error(heterophilous(), "edges", npy(I64{2, 0, 0, 3, 2, 1}, "(2, 3)")),
            "[load] t.npz: edges must have shape (any, 2), got (2, 3)");
  EXPECT_EQ(error(heterophilous(), "node_features", npy(F32{1, 2, 3, 4, 5, 6, INFINITY, 8}, "(4, 2)")),
            "[load] t.npz: node_features must be finite numbers of 32 bits, got inf at row 3, column 0");
  EXPECT_EQ(error(heterophilous(), "node_features", npy(F32{}, "(4, 0)")),
            "[load] t.npz: node_features sizes must be 1 to 2147483647, got 0 at position 1");
  EXPECT_EQ(error(heterophilous(), "node_features", npy(F32{1, 2, 3, 4})),
            "[load] t.npz: node_features must have shape (any, any), got (4)");
  EXPECT_EQ(error(heterophilous(), "node_labels", npy(I64{0, 1, 1, -2})),
            "[load] t.npz: node_labels must be -1 to 3, got -2 at position 3");
  EXPECT_EQ(error(heterophilous(), "val_masks", npy_text("|b1", "(2, 4)", std::string("\0\1\0\0\1\0\1\0", 8))),
            "[load] t.npz: val_masks row 1 must be false where train_masks is true, got true at position 2");
  EXPECT_EQ(error(heterophilous(), "val_masks", npy(std::vector<uint8_t>{0, 1, 0, 0, 2, 0, 0, 0}, "(2, 4)")),
            "[load] t.npz: val_masks must be 0 to 1, got 2 at position 4");
  EXPECT_EQ(error(heterophilous(), "test_masks", npy(std::vector<uint8_t>(4, 0), "(1, 4)")),
            "[load] t.npz: test_masks must have shape (2, 4), got (1, 4)");
  EXPECT_EQ(error(heterophilous(), "train_masks", npy(std::vector<uint8_t>{1, 0, 0, 0, 0, 0, 0, 0}, "(2, 4)")),
            "[load] t.npz: train_masks row 1 must have a node to train on, got none");
}

TEST_F(GraphNpz, NodesWithoutALabelAreInNoSplit) {
  Arrays arrays = benchmark();
  arrays["labels"] = npy(I64{0, -1, 2, -1, 0});
  const GraphData data = load(arrays);
  EXPECT_EQ(data.labels, (I32{0, -1, 2, -1, 0}));
  EXPECT_EQ(data.classes, 3);
  for (const uint64_t seed : {0, 1, 2}) {
    const Split drawn = split_of(data, seed);
    I64 all = drawn.train;
    for (const I64* part : {&drawn.valid, &drawn.test}) all.insert(all.end(), part->begin(), part->end());
    std::sort(all.begin(), all.end());
    EXPECT_EQ(all, (I64{0, 2, 4}));
  }
  arrays["labels"] = npy(I64(5, -1));
  EXPECT_EQ(error_of([&] { split_of(load(arrays), 0); }, scratch), "[load] t.npz must have labelled nodes to draw a split from, got none");
  // A split that names one is wrong, whichever part it is.
  const Arrays given = with_split();
  EXPECT_EQ(error(given, "labels", npy(I64{-1, 1, 2, 1, 0})),
            "[load] t.npz: train_idx must have nodes with a label only, got 0 at position 1");
  EXPECT_EQ(error(given, "labels", npy(I64{0, -1, 2, 1, 0})),
            "[load] t.npz: val_idx must have nodes with a label only, got 1 at position 0");
  EXPECT_EQ(error(given, "labels", npy(I64{0, 1, -1, 1, 0})),
            "[load] t.npz: test_idx must have nodes with a label only, got 2 at position 1");
  EXPECT_EQ(error(heterophilous(), "node_labels", npy(I64{0, 1, -1, 0})),
            "[load] t.npz: test_masks row 0 must have nodes with a label only, got 2 at position 0");
}

TEST_F(GraphNpz, LabelsMayBeMissing) {
  Arrays benchmarked = benchmark(), masked = heterophilous();
  benchmarked.erase("labels");
  for (const char* name : {"node_labels", "train_masks", "val_masks", "test_masks"}) masked.erase(name);
  for (const Arrays& arrays : {benchmarked, masked}) {
    const GraphData data = load(arrays);
    EXPECT_FALSE(data.has_labels());
    EXPECT_EQ(data.classes, 0);
    EXPECT_TRUE(data.splits.empty());
    EXPECT_FALSE(data.target.empty());
    EXPECT_EQ(error_of([&] { split_of(data, 0); }, scratch), "[load] t.npz must have labelled nodes to draw a split from, got none");
  }
  EXPECT_TRUE(load(benchmark()).has_labels());
  masked["node_labels"] = heterophilous()["node_labels"];
  EXPECT_TRUE(load(masked).splits.empty());  // to be drawn
}

TEST_F(GraphNpz, WeightsOfEdgesAreUsedOrRefused) {
  Arrays arrays = benchmark();
  EXPECT_TRUE(load(arrays).weight.empty());  // all ones
  arrays["adj_data"] = npy(F32{1, 0.5, 2, 1, 0, 3});
  EXPECT_EQ(load(arrays).weight, (F32{1, 0.5, 2, 1, 0, 3}));
  EXPECT_TRUE(load_graph(path, EdgeWeights::ignore).weight.empty());
  const std::string hint = " (--unweighted takes edges without their weights)";
  arrays["adj_data"] = npy(F32{1, 0.5, -2, 1, 0, 3});
  EXPECT_EQ(error(arrays), "[load] t.npz: adj_data must be 0 or more, as weights of edges are" + hint + ", got -2 at position 2");
  EXPECT_TRUE(load_graph(path, EdgeWeights::ignore).weight.empty());
  arrays["adj_data"] = npy(F32{1, 0.5, NAN, 1, 0, 3});
  EXPECT_EQ(error(arrays), "[load] t.npz: adj_data must be finite numbers of 32 bits, got nan at position 2");

  arrays = heterophilous();  // 2 → 0, 0 → 3, 2 → 1 are stored as 0 → 3, 2 → 0, 2 → 1
  arrays["edge_weight"] = npy(F32{4, 5, 6});
  EXPECT_EQ(load(arrays).weight, (F32{5, 4, 6}));
  EXPECT_TRUE(load_graph(path, EdgeWeights::ignore).weight.empty());
  arrays["edge_weight"] = npy(F32{4, 5});
  EXPECT_EQ(error(arrays), "[load] t.npz: edge_weight must have shape (3), got (2)");
  const std::string features = " must not be there: edges may have weights, no features (--unweighted takes edges without either), got it";
  EXPECT_EQ(error(heterophilous(), "edge_attr", npy(F32{1, 2, 3})), "[load] t.npz: edge_attr" + features);
  EXPECT_EQ(error(benchmark(), "edge_attr_matrix", npy(F32{1, 2, 3})), "[load] t.npz: edge_attr_matrix" + features);
  EXPECT_EQ(load_graph(path, EdgeWeights::ignore).nodes, 5);
}

TEST_F(GraphNpz, OtherFilesNameTheLayouts) {
  const std::string unknown = error({{"x", npy(F32{1})}, {"y", npy(F32{1})}});
  EXPECT_TRUE(holds(unknown, "(gnn-benchmark)") && holds(unknown, "(heterophilous)") && unknown.ends_with("got 'x', 'y'")) << unknown;
  spill(path, "not a zip");
  EXPECT_EQ(error_of([&] { load_graph(path); }, scratch),
            "[load] t.npz must be an npz file, a zip archive, which begins with PK, got 'not a zi'");
  EXPECT_EQ(error_of([&] { load_graph(scratch.path("none")); }, scratch), "[load] file or folder must exist, got none");
  EXPECT_EQ(error_of([&] { load_graph(""); }, scratch), "[load] file or folder must exist, got ''");
}

TEST_F(GraphNpz, NoPrefixIsLoaded) {
  for (const Arrays& arrays : {with_split(), heterophilous()}) {
    write_npz(path, arrays);
    const std::string whole = slurp(path);
    for (size_t length = 0; length < whole.size(); ++length) {
      spill(path, whole.substr(0, length));
      EXPECT_TRUE(error_of([&] { load_graph(path); }, scratch).starts_with("[load] t.npz")) << length;
    }
  }
}

}  // namespace
}  // namespace satchel
