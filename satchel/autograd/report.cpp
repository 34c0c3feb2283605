#include "satchel/autograd/report.h"

#include <algorithm>
#include <unordered_set>

#include "satchel/autograd/node.h"

namespace satchel {

std::vector<SavedTensor> saved_tensors(const at::Tensor& root) {
  std::vector<torch::autograd::Node*> todo;
  std::unordered_set<torch::autograd::Node*> seen;
  const auto visit = [&](torch::autograd::Node* node) {
    if (node != nullptr && seen.insert(node).second) todo.push_back(node);
  };
  if (root.defined()) visit(root.grad_fn().get());
  std::vector<SavingNode*> nodes;
  while (!todo.empty()) {
    torch::autograd::Node* node = todo.back();
    todo.pop_back();
    if (auto* ours = dynamic_cast<SavingNode*>(node)) nodes.push_back(ours);
    for (const torch::autograd::Edge& edge : node->next_edges()) visit(edge.function.get());
  }
  std::sort(nodes.begin(), nodes.end(), [](const SavingNode* a, const SavingNode* b) { return a->sequence_nr() < b->sequence_nr(); });
  std::vector<SavedTensor> lines;
  for (SavingNode* node : nodes) {
    for (SavedTensor& line : node->saved()) lines.push_back(std::move(line));
  }
  return lines;
}

}  // namespace satchel
