// A graph data set on a device, as training reads it: adjacency, features, what is to be learned, and the split.
// Private to this room and tools.
#pragma once

#include <ATen/core/Tensor.h>

#include "satchel/autograd/loss.h"
#include "satchel/data/graph_data.h"
#include "satchel/models/graph_model.h"
#include "satchel/train/train.h"

namespace satchel {

struct GraphTask {
  Adjacency a;
  GraphInput input;
  Task kind = Task::single_label;
  at::Tensor labels;              // int64, one a node (single label); float32, nodes × outputs (multi-label and binary)
  at::Tensor train, valid, test;  // nodes: int64
  at::Tensor train_labels;        // those of `train`, for torch's own losses
  MaskedLabels masked;            // single label: those of `train`, the others hidden, for this library's loss
};

/// Throws `[data] rule, got value` unless sizes, labels and the split fit each other.
void validate(const GraphData& data, const Split& split);

/// GraphShape with features and classes of the data.
GraphShape shape_for(const GraphData& data, GraphShape shape);

/// What the options say of the model.
GraphModelOptions model_options(const TrainOptions& options);

/// Without A·X. With amp bf16, dense features are bfloat16.
GraphTask make_task(const GraphData& data, const TrainOptions& options);

/// Labels as the losses read them: of plain methods, or of this library's.
void add_loss_labels(GraphTask& task, bool plain);

GraphTask to_device(const GraphTask& task, at::Device device);

/// How many rows of A·X should be made once and kept? All, or as many as cache_bytes hold. None for torch's own functions, which
/// compute it in every step, where the method packs the data, where X is sparse, or where it would take more than a quarter of the
/// free memory.
int64_t cached_rows(const GraphTask& task, const TrainOptions& options);

/// The task's metric over nodes `index`, in percent.
double score_of(const GraphTask& task, const at::Tensor& logits, const at::Tensor& index);

/// The loss over training nodes, float32; add_loss_labels() comes first. Methods of this library use the logits' memory for their
/// gradient; plain ones torch's losses.
at::Tensor loss_of(const GraphTask& task, const at::Tensor& logits, bool plain);

}  // namespace satchel
