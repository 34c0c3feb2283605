#include "satchel/graph/check.h"

#include <ATen/core/grad_mode.h>

#include "satchel/autograd/node.h"
#include "satchel/core/error.h"

namespace satchel {
namespace {

std::string sizes_of(const at::Tensor& t) {
  if (!t.defined()) return "nothing";
  std::string text = std::string(c10::toString(t.scalar_type())) + " [";
  for (int64_t d = 0; d < t.dim(); ++d) text += (d ? ", " : "") + std::to_string(t.size(d));
  return text + "] on " + t.device().str();
}

/// `half`: 16 bits will do too.
void check_matrix(const at::Tensor& t, int64_t rows, int64_t columns, const Adjacency& a, const char* name, const char* op,
                  bool half = false) {
  const auto known = [&](at::ScalarType type) { return type == at::kFloat || (half && (type == at::kHalf || type == at::kBFloat16)); };
  const bool fits = t.defined() && t.dim() == 2 && (rows < 0 || t.size(0) == rows) && (columns < 0 || t.size(1) == columns) &&
                    known(t.scalar_type()) && t.device() == a.matrix.device();
  if (fits) return;
  const auto size = [](int64_t n) { return n < 0 ? std::string("any") : std::to_string(n); };
  fail(op,
       std::string(name) + " must be float32" + (half ? ", float16 or bfloat16 [" : " [") + size(rows) + ", " + size(columns) + "] on " +
           a.matrix.device().str(),
       sizes_of(t));
}

void check_bias(const at::Tensor& weight, const at::Tensor& bias, const char* op) {
  if (!bias.defined()) return;
  if (bias.dim() == 1 && bias.size(0) == weight.size(0) && bias.scalar_type() == at::kFloat && bias.device() == weight.device()) return;
  fail(op, "bias must be float32 [" + std::to_string(weight.size(0)) + "] on " + weight.device().str(), sizes_of(bias));
}

}  // namespace

void check_layer(const at::Tensor& x, const Adjacency& a, const at::Tensor& weight, const at::Tensor& bias, const char* op) {
  check_matrix(weight, -1, -1, a, "weight", op);
  check_matrix(x, a.nodes(), weight.size(1), a, "x", op, true);
  check_no_autocast(x, op);
  check_bias(weight, bias, op);
}

void check_layer(const GraphInput& input, const Adjacency& a, const at::Tensor& weight, const at::Tensor& bias, const char* op) {
  if (!input.is_sparse()) {
    if (input.x.requires_grad() && at::GradMode::is_enabled()) {
      fail(op, "a data set needs no gradient (pass x as a tensor where it does)", "features that require one");
    }
    if (input.aggregated.defined() && !input.aggregated_by.is_matrix(a.matrix)) {
      fail(op, "aggregated features must be made with this adjacency, unchanged since (with_aggregated)", "another's");
    }
    if (input.aggregated.defined() && !input.aggregated_by.is_features(input.x)) {
      fail(op, "aggregated features must be made of these features, unchanged since (with_aggregated)", "those of others");
    }
    check_layer(input.x, a, weight, bias, op);
    if (input.aggregated.defined()) {
      check_matrix(input.aggregated, -1, input.x.size(1), a, "aggregated x", op, true);
      if (input.aggregated.size(0) < 1 || input.aggregated.size(0) > a.nodes())
        fail(op, "aggregated features must be of 1 to " + std::to_string(a.nodes()) + " nodes", input.aggregated.size(0));
      if (input.aggregated.scalar_type() != input.x.scalar_type())
        fail(op, "aggregated features must have the features' type", c10::toString(input.aggregated.scalar_type()));
    }
    return;
  }
  if (input.sparse.matrix.rows != a.nodes()) fail(op, "x must have " + std::to_string(a.nodes()) + " rows", input.sparse.matrix.rows);
  check_matrix(weight, -1, -1, a, "weight", op);
  if (input.sparse.matrix.columns != weight.size(1))
    fail(op, "x must have " + std::to_string(weight.size(1)) + " columns", input.sparse.matrix.columns);
  check_bias(weight, bias, op);
}

}  // namespace satchel
