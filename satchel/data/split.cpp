#include <algorithm>
#include <numeric>

#include "satchel/core/error.h"
#include "satchel/data/dice.h"
#include "satchel/data/graph_data.h"

namespace satchel {
namespace {

/// 60/20/20 of `nodes` in random order, each share rounded; at least one to train on.
void share_out(std::span<int64_t> nodes, const Dice& dice, uint32_t which, Split& split) {
  shuffle(nodes, dice, which);
  const size_t n = nodes.size(), train = (n * 60 + 50) / 100, valid = std::min((n * 20 + 50) / 100, n - train);
  split.train.insert(split.train.end(), nodes.begin(), nodes.begin() + static_cast<int64_t>(train));
  split.valid.insert(split.valid.end(), nodes.begin() + static_cast<int64_t>(train), nodes.begin() + static_cast<int64_t>(train + valid));
  split.test.insert(split.test.end(), nodes.begin() + static_cast<int64_t>(train + valid), nodes.end());
}

}  // namespace

Split split_of(const GraphData& data, uint64_t seed, int64_t index) {
  if (index < 0) fail("load", "split must be 0 or more", index);
  if (!data.splits.empty()) return data.splits[static_cast<size_t>(index) % data.splits.size()];

  const Dice dice(seed, Purpose::split_class);
  Split split;
  if (data.task == Task::multi_label) {
    std::vector<int64_t> all(static_cast<size_t>(data.nodes));
    std::iota(all.begin(), all.end(), 0);
    share_out(all, dice, 0, split);
  } else {
    std::vector<std::vector<int64_t>> of_class;
    for (size_t i = 0; i < data.labels.size(); ++i) {
      if (data.labels[i] < 0) continue;
      const auto c = static_cast<size_t>(data.labels[i]);
      if (c >= of_class.size()) of_class.resize(c + 1);
      of_class[c].push_back(static_cast<int64_t>(i));
    }
    for (size_t c = 0; c < of_class.size(); ++c) share_out(of_class[c], dice, static_cast<uint32_t>(c), split);
  }
  if (split.train.empty())
    fail("load", (data.source.empty() ? data.name : data.source) + " must have labelled nodes to draw a split from", "none");
  for (auto* part : {&split.train, &split.valid, &split.test}) std::sort(part->begin(), part->end());
  return split;
}

}  // namespace satchel
