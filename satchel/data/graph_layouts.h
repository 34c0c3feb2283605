// The layouts that load_graph knows, one file each, and what they share. Private.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "satchel/data/graph_data.h"
#include "satchel/data/npz.h"

namespace satchel {

GraphData load_graph_saint(const std::string& folder, EdgeWeights weights);
GraphData load_ogb(const std::string& folder, EdgeWeights weights);
GraphData load_gnn_benchmark(const Npz& file, EdgeWeights weights);
GraphData load_heterophilous(const Npz& file, EdgeWeights weights);

/// Is it there; is it a folder. A path that cannot be looked at is not.
bool exists(const std::string& path);
bool is_folder(const std::string& path);
/// Names in a folder, sorted, without those that begin with a dot.
std::vector<std::string> names_in(const std::string& folder);
/// `a, b, c`, at most 16.
std::string listed(const std::vector<std::string>& names);

constexpr int64_t kMaxNodes = INT32_MAX;  // a target has 32 bits

/// {prefix}shape, -indptr, -indices and -data of a scipy CSR matrix, checked; indices stay in the order stored.
struct SparseArrays {
  int64_t rows = 0, columns = 0;
  std::vector<int64_t> start;
  std::vector<int32_t> column;
  std::vector<float> value;
};
SparseArrays read_sparse(const Npz& file, const std::string& prefix);
/// A square one: nodes, start, target, and the values as weights.
void set_adjacency(GraphData& data, const Npz& file, const std::string& prefix, EdgeWeights weights);
/// Pairs (source, target) in any order, indices checked before, and a weight each or none: start, target and weight, those of a node
/// in the order given.
void set_edges(GraphData& data, std::span<const int32_t> pairs, std::vector<float> weight = {});
/// `weight` where it says something: empty where all are 1. Throws where one is negative; `field` names what they are.
std::vector<float> checked_weights(std::vector<float> weight, const std::string& field);
/// Throws where the file has one of these arrays: edges may have weights, but no features.
void refuse_edge_features(const Npz& file, std::initializer_list<const char*> names);

/// One part of a split as a file has it.
struct Part {
  std::string field;
  std::vector<int64_t> nodes;
};
/// train, valid, test: in range, none twice, each with a label (an empty `labelled`: all have one), train not empty.
Split checked_split(std::array<Part, 3> parts, int64_t nodes, std::span<const uint8_t> labelled = {});

/// Single-label: class ids, 0 to nodes − 1 (more classes than nodes are garbage), or −1 for none. Sets labels, classes and task, and
/// returns which nodes have one.
std::vector<uint8_t> set_labels(GraphData& data, std::span<const int64_t> labels, const std::string& field);

}  // namespace satchel
