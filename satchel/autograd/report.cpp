#include "satchel/autograd/report.h"

#include <algorithm>
#include <iterator>
#include <unordered_set>
#include <utility>

#include "satchel/autograd/node.h"
#include "satchel/autograd/torch_saves.h"

namespace satchel {
namespace {

struct Nodes {
  std::vector<SavingNode*> ours;  // both in the order of the forward pass
  std::vector<torch::autograd::Node*> torchs;
};

Nodes nodes_behind(const at::Tensor& root) {
  std::vector<torch::autograd::Node*> todo;
  std::unordered_set<torch::autograd::Node*> seen;
  const auto visit = [&](torch::autograd::Node* node) {
    if (node != nullptr && seen.insert(node).second) todo.push_back(node);
  };
  if (root.defined()) visit(root.grad_fn().get());
  if (const auto reader = root.defined() ? std::dynamic_pointer_cast<SavingNode>(root.grad_fn()) : nullptr) reader->pack_deferred();
  Nodes nodes;
  while (!todo.empty()) {
    torch::autograd::Node* node = todo.back();
    todo.pop_back();
    if (auto* ours = dynamic_cast<SavingNode*>(node)) {
      nodes.ours.push_back(ours);
    } else {
      nodes.torchs.push_back(node);
    }
    for (const torch::autograd::Edge& edge : node->next_edges()) visit(edge.function.get());
  }
  const auto earlier = [](const auto* a, const auto* b) { return a->sequence_nr() < b->sequence_nr(); };
  std::sort(nodes.ours.begin(), nodes.ours.end(), earlier);
  std::sort(nodes.torchs.begin(), nodes.torchs.end(), earlier);
  return nodes;
}

std::vector<SavedTensor> lines_of(const std::vector<SavingNode*>& nodes) {
  std::vector<SavedTensor> lines;
  for (SavingNode* node : nodes) std::ranges::move(node->saved(), std::back_inserter(lines));
  return lines;
}

}  // namespace

std::vector<SavedTensor> saved_tensors(const at::Tensor& root) {
  const Nodes nodes = nodes_behind(root);
  std::vector<SavedTensor> lines = lines_of(nodes.ours);
  std::ranges::move(torch_saves(nodes.torchs), std::back_inserter(lines));
  return lines;
}

std::vector<SavedTensor> packed_tensors(const at::Tensor& root) { return lines_of(nodes_behind(root).ours); }

}  // namespace satchel
