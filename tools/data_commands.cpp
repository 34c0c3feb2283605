#include "tools/data_commands.h"

#include <ATen/ops/from_blob.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "satchel/data/graph_data.h"
#include "satchel/data/save_graph.h"
#include "satchel/graph/csr.h"
#include "tools/tool.h"
#include "tools/train_commands.h"

namespace satchel::tool {
namespace {

struct DataCommand {
  std::string data, out;
  bool overwrite = false, unweighted = false;
  uint64_t seed = 0;
  int64_t split = 0;
};

/// Edges as training takes them: both directions, once each, no self loops, targets rising.
void make_symmetric(GraphData& data) {
  const auto entries = static_cast<int64_t>(data.target.size());
  const at::Tensor start = at::from_blob(data.start.data(), {data.nodes + 1}, at::kLong);
  const at::Tensor target = at::from_blob(data.target.data(), {entries}, at::kInt);
  const bool weighted = !data.weight.empty();
  const Csr edges =
      csr_from_csr(start, target, data.nodes, weighted ? at::from_blob(data.weight.data(), {entries}, at::kFloat) : at::Tensor());
  const Csr graph = without_self_loops(weighted ? made_symmetric_weighted(edges) : made_symmetric(edges));
  const auto *first = graph.start.const_data_ptr<int64_t>(), *last = first + graph.start.numel();
  const auto* column = graph.column.const_data_ptr<int32_t>();
  data.start.assign(first, last);
  data.target.assign(column, column + graph.entries());
  if (!weighted) return;
  const auto* value = graph.value.const_data_ptr<float>();
  data.weight.assign(value, value + graph.entries());
}

/// The folder that data come from is not written over.
void check_apart(const DataCommand& c) {
  struct stat from {
  }, to{};
  const bool both = ::stat(c.data.c_str(), &from) == 0 && ::stat(c.out.c_str(), &to) == 0;
  if (both && from.st_dev == to.st_dev && from.st_ino == to.st_ino) {
    throw UsageError("[data] --out must be another folder than --data, got '" + c.out + "'");
  }
}

/// Neither is a data set that stands there already.
void check_new(const DataCommand& c) {
  for (const char* name : {"adj_full.npz", "feats.npy", "class_map.json", "role.json"}) {
    const std::string path = c.out + "/" + name;
    if (!c.overwrite && ::access(path.c_str(), F_OK) == 0)
      throw UsageError("[data] --out must be a folder without a data set, unless --overwrite replaces it, got " + path);
  }
}

void run_data(const DataCommand& c) {
  if (c.out.empty()) throw UsageError("[data] --out must name a folder, got ''");
  check_apart(c);
  check_new(c);
  GraphData data = load_graph(c.data, c.unweighted ? EdgeWeights::ignore : EdgeWeights::use);
  if (const auto splits = static_cast<int64_t>(data.splits.size()); c.split > 0 && c.split >= splits)
    throw UsageError(fmt::format("[data] --split must be 0 to {}, got {}", std::max<int64_t>(splits - 1, 0), c.split));
  const Split split = split_of(data, c.seed, c.split);
  make_symmetric(data);
  save_graph(data, split, c.out);
  fmt::print("{}: {} nodes, {} edges (both directions), {} features, {} {}; {} to train on, {} to validate, {} to test\n", c.out,
             grouped(data.nodes), grouped(static_cast<int64_t>(data.target.size())), grouped(data.features.columns),
             grouped(data.task == Task::binary ? 2 : data.classes), data.task == Task::multi_label ? "labels" : "classes",
             grouped(static_cast<int64_t>(split.train.size())), grouped(static_cast<int64_t>(split.valid.size())),
             grouped(static_cast<int64_t>(split.test.size())));
  if (data.task == Task::binary) fmt::print("a binary task became two classes: this layout has no other name for it\n");
}

}  // namespace

void add_data_command(CLI::App& app) {
  const auto command = std::make_shared<DataCommand>();
  CLI::App* data = app.add_subcommand("data", "Write a data set as files that other programs read");
  data->add_option("--data", command->data, "The graph, as for train")->required();
  data->add_option("-o,--out", command->out, "Folder, made where it is missing")->required();
  data->add_flag("--overwrite", command->overwrite, "Replace a data set that is in the folder");
  data->add_flag("--unweighted", command->unweighted, "Leave weights of edges out");
  data->add_option("--seed", command->seed, "Of a split that has to be drawn, as for train")
      ->transform(whole_number(0, UINT64_MAX))
      ->capture_default_str();
  data->add_option("--split", command->split, "Which of the data's splits")->transform(whole_number(0, INT64_MAX))->capture_default_str();
  data->footer(
      "\nThe folder is a GraphSAINT one, so `satchel train --data DIR` reads it too:\n"
      "  adj_full.npz    edges as training takes them, both directions and no self loops: indptr int64[nodes + 1],\n"
      "                  indices int32[edges], and what scipy.sparse.load_npz wants beside them\n"
      "  feats.npy       float32[nodes, features]\n"
      "  class_map.json  {\"0\": 3, …}: each node's class, or its list of 0 and 1 (multi-label)\n"
      "  role.json       {\"tr\": […], \"va\": […], \"te\": […]}: nodes to train on, to validate, to test\n"
      "\nExamples:\n  satchel data --data synthetic:arxiv --out arxiv/\n  satchel data --data cora.npz --seed 3 --out cora/");
  data->callback([command] { run_data(*command); });
}

}  // namespace satchel::tool
