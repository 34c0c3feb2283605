#include "satchel/graph/spmm.h"

#include "satchel/autograd/node.h"

namespace satchel {
namespace {

class SpmmNode : public SavingNode {
 public:
  explicit SpmmNode(const std::string& layer) : SavingNode("spmm", layer) {}
  Csr transpose;

  std::vector<SavedTensor> lines() const override { return {}; }

 protected:
  variable_list back(at::Tensor g) override { return {multiply(transpose, g.contiguous())}; }
  void release() override {}
};

}  // namespace

at::Tensor spmm(const Adjacency& a, const at::Tensor& x) {
  if (!needs_grad(x)) return multiply(a.matrix, x.contiguous());
  const auto node = make_node<SpmmNode>("", x);
  node->transpose = a.transpose;
  return attach(multiply(a.matrix, x.detach().contiguous()), node);
}

}  // namespace satchel
