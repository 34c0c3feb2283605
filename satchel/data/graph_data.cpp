#include "satchel/data/graph_data.h"

#include <new>

#include "satchel/data/graph_layouts.h"
#include "satchel/data/printable.h"
#include "satchel/data/synthetic.h"

namespace satchel {
namespace {

constexpr std::string_view kSynthetic = "synthetic:";

std::string name_of(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  path.erase(0, path.rfind('/') + 1);
  if (path.ends_with(".npz")) path.resize(path.size() - 4);
  return path;
}

GraphData load_folder(const std::string& folder, EdgeWeights weights) {
  if (exists(folder + "/adj_full.npz")) return load_graph_saint(folder, weights);
  if (exists(folder + "/raw")) return load_ogb(folder, weights);
  refuse(folder, "must hold adj_full.npz, feats.npy, class_map.json and role.json (GraphSAINT), or raw/ and split/ (OGB)",
         listed(names_in(folder)));
}

GraphData load_npz(const std::string& path, EdgeWeights weights) {
  const Npz file(path);
  if (file.has("adj_indptr") || file.has("adj_indices") || file.has("adj_data")) return load_gnn_benchmark(file, weights);
  if (file.has("node_features") || file.has("node_labels")) return load_heterophilous(file, weights);
  refuse(path,
         "must hold adj_indptr, attr_indptr or attr_matrix, labels … (gnn-benchmark), or node_features, node_labels, edges … "
         "(heterophilous)",
         file.names());
}

}  // namespace

GraphData load_graph(const std::string& where, EdgeWeights weights) try {
  if (where.starts_with(kSynthetic)) {
    GraphData data = make_synthetic(parse_synthetic(where.substr(kSynthetic.size())));
    data.name = data.source = where;
    return data;
  }
  if (!exists(where)) fail("load", "file or folder must exist", where.empty() ? "''" : where);
  GraphData data = is_folder(where) ? load_folder(where, weights) : load_npz(where, weights);
  data.name = name_of(where);
  data.source = where;
  return data;
} catch (const std::bad_alloc&) {
  fail("load", "data must fit into memory", where);
}

}  // namespace satchel
