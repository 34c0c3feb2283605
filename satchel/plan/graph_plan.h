// What a graph model keeps for backward under a method, tensor by tensor, from sizes alone. No torch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "satchel/core/keep.h"
#include "satchel/core/layer.h"
#include "satchel/core/saved.h"

namespace satchel {

/// The sizes of a graph model.
struct GraphShape {
  std::string conv = "sage";  // a name of core/graph_layer.h
  int64_t layers = 3;
  int64_t features = 0, hidden = 128, classes = 0;
  Norm norm = Norm::batch;
  Activation activation = Activation::relu;
  double slope = 0.01;  // LeakyReLU's
  double alpha = 1;     // ELU's
  double dropout = 0.5;
};

/// Each line as the autograd room reports it when the model has run: same names, kinds and bytes, same order. Without the loss.
/// For fp32: what torch's functions keep. `sparse_data`: the features are a sparse matrix, which is never packed.
std::vector<SavedTensor> plan_graph(const GraphShape& shape, int64_t nodes, const Method& method, bool sparse_data = false);

/// What the loss keeps: the logits, which become their own gradient; for fp32 torch's log-probabilities of the training nodes.
std::vector<SavedTensor> plan_loss(const GraphShape& shape, int64_t nodes, int64_t training_nodes, const Method& method);

/// A row of a published table: docs/theory.md 11's byte model of the papers' own programs (projections stored; for arxiv int64 labels in).
struct PublishedRow {
  std::string name;  // "FP32", "EXACT", "G/R 2" …
  double published_mib = 0;
  std::vector<SavedTensor> parts;  // codes, their `metadata`, masks, `labels`, each stored `projection`
  std::string method;  // the same method here, as parse_method() reads it: what plan_graph() takes for it is Satchel's own layout
};
/// "arxiv" or "products".
std::vector<PublishedRow> published_table(const std::string& name);

/// The same byte model for any sizes: what the programs of EXACT (rows 1) and of the block-wise paper (blocks of so many rows, G/R) keep of
/// a SAGE model in 2 bits, projected 8:1; rows 0: torch's own saves. With labels of so many training nodes; 0: without.
std::vector<SavedTensor> paper_saves(const GraphShape& shape, int64_t nodes, int64_t training_nodes, int64_t rows);

/// The sizes that a published table is about.
struct PublishedModel {
  GraphShape shape;
  int64_t nodes = 0, training_nodes = 0;
};
PublishedModel published_model(const std::string& name);

}  // namespace satchel
