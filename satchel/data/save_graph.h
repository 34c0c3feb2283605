// A graph data set as a GraphSAINT folder, which load_graph() and other programs read. Torch-free.
//
//   adj_full.npz    scipy's CSR (scipy.sparse.load_npz): indptr int64[nodes + 1], indices int32[edges], data int8 ones
//                   or float32 weights, shape, format
//   feats.npy       float32[nodes, features]; sparse features are written dense
//   class_map.json  {"0": 3, …}: the class of every node that has one, or a list of 0 and 1 (multi-label)
//   role.json       {"tr": […], "va": […], "te": […]}: nodes of the split
#pragma once

#include <string>

#include "satchel/data/graph_data.h"

namespace satchel {

/// Makes the folder where it is missing and replaces the four files in it; adj_full.npz comes last, so that a folder cut short is no
/// data set. A binary task is written as two classes: the layout has no other name for it. Throws `[save] rule, got value`.
void save_graph(const GraphData& data, const Split& split, const std::string& folder);

}  // namespace satchel
