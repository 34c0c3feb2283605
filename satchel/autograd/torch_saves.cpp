#include "satchel/autograd/torch_saves.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <exception>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "satchel/autograd/step.h"

namespace satchel {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

struct Counting {
  bool on = false;
};

const void* memory_of(const at::Tensor& t) { return t.storage().unsafeGetStorageImpl(); }

}  // namespace

bool is_counting_saves() { return step_context().part<Counting>().on; }

/// torch's nodes show what they hold to its compiler of backward passes, which is asked for nothing else.
NodeSaves saves_of(Node* node) {
  namespace compiler = torch::dynamo::autograd;
  NodeSaves saves{node, {}};
  compiler::AutogradCompilerCall call(compiler::SizeInput::STATIC);
  compiler::NodeCall node_call(0, node->shared_from_this());
  compiler::CompiledNodeArgs args(call, node_call);
  step_context().part<Counting>().on = true;
  try {
    node->compiled_args(args);
  } catch (const std::exception& e) {
    const bool released = std::string_view(e.what()).find("a second time") != std::string_view::npos;
    saves.tells = released;
  }
  step_context().part<Counting>().on = false;
  saves.tensors = std::move(call.tensor_args.inputs);
  return saves;
}

std::vector<SavedTensor> torch_saves(const std::vector<Node*>& nodes) {
  std::unordered_set<const void*> counted;  // parameters' from the start
  std::vector<NodeSaves> all;
  std::unordered_map<const void*, size_t> holders;  // nodes that hold a tensor
  for (Node* node : nodes) {
    if (const auto* leaf = dynamic_cast<const AccumulateGrad*>(node)) {
      if (leaf->variable.has_storage()) counted.insert(memory_of(leaf->variable));
      continue;
    }
    all.push_back(saves_of(node));
    for (const at::Tensor& t : all.back().tensors) ++holders[t.unsafeGetTensorImpl()];
  }
  std::vector<SavedTensor> lines;
  for (const NodeSaves& saves : all) {
    if (!saves.tells) lines.push_back({saves.node->name(), "not counted", {}, 0, 0, 0});
    for (const at::Tensor& t : saves.tensors) {
      // Each holder has it once, and so has each list here.
      const bool stands_anyway = t.is_leaf() && !t.requires_grad() && t.use_count() > 2 * holders[t.unsafeGetTensorImpl()];
      const bool is_number = t.unsafeGetTensorImpl()->is_wrapped_number();  // written in the program: x * 2
      if (!t.has_storage() || is_number || stands_anyway || !counted.insert(memory_of(t)).second) continue;
      const auto bytes = static_cast<int64_t>(t.storage().nbytes());
      if (bytes == 0) continue;
      const bool mask = t.scalar_type() == at::kBool;
      lines.push_back({saves.node->name(), "torch", t.sizes().vec(), static_cast<int>(8 * t.element_size()), bytes,
                       t.is_floating_point() ? 4 * t.numel()
                       : mask                ? t.numel()
                                             : bytes});
    }
  }
  return lines;
}

}  // namespace satchel
