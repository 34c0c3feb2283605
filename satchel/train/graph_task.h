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
  Adjacency last;                 // rows of `train` alone, for the last layer of a training step; empty: it gives every node's outputs
  at::Tensor train_labels;  // those of `train`, for torch's own losses; of several labels also where the last layer gives theirs alone
  MaskedLabels masked;      // single label: those of `train`, the others hidden, for this library's loss

  bool gives_training_rows() const { return last.targets.defined(); }
};

/// Throws `[data] rule, got value` unless edges and features fit each other.
void validate_inputs(const GraphData& data);

/// Throws `[data] rule, got value` unless sizes, labels and the split fit each other.
void validate(const GraphData& data, const Split& split);

/// GraphShape with features and classes of the data.
GraphShape shape_for(const GraphData& data, GraphShape shape);

/// What the options say of the model.
GraphModelOptions model_options(const TrainOptions& options);

/// The model of a run from its seed, on a device: equal weights on every device and for every method.
GraphModel make_graph_model(const TrainOptions& options, at::Device device);

/// What of the features decides the type that they are kept in.
struct FeatureRange {
  bool dense = false;
  float largest = 0;  // of the sizes of their values; NaN where one of them is
};
FeatureRange range_of(const Features& features);

/// The type of a run's features and activations. What was asked for, but for `automatic`: fp16 with tf32 on CUDA, where a method packs
/// (less than 32 bits), the layer averages (GraphLayer), a norm follows every hidden layer, and features are dense with the largest of
/// 2^−8 to 2^8; else none.
/// Throws `[op] …` where features do not fit into the float16 that was asked for.
///
/// TF32 products round their factors to 10 bits of mantissa, as many as float16 has; what float16 lacks is range, 2^−24 to 2^16. A mean
/// over neighbours is no larger than the largest feature, and 2·columns products with first weights up to 1/√columns are at most
/// 2·√columns·2^8: 2^15 for 2^12 columns. gcn's sums are up to √neighbours times the largest feature: 2^16 for 2^16 neighbours of one each.
/// Values below float16's normal ones are off by 2^−25, of 2^−8 no more than 2^−17. A norm gives the next layer rows of size 1 again.
Amp amp_for(const TrainOptions& options, const FeatureRange& features, const char* op);

/// What gradients of a loss are multiplied by on their way back: 1 but for fp16 (`amp` decided), else the largest power of two up to the
/// number of terms that the loss is a mean of.
///
/// So a logit's gradient is at most 1 in size where that of the mean is 1/terms, which float16 would keep as 0 from 2^25 terms on
/// and with less than its 11 bits from 2^14 on. Above there is room for 2^16, which nodes that pull the same way on a neighbour of
/// theirs have to add up to; below, a gradient keeps all its bits down to 2^−14 and is off by 2^−25 from there on. Gradients of
/// weights are sums over all rows and stand in float32; those of plain methods in float16, as torch's own, so their scale is 2^12 at most.
double gradient_scale(const GraphTask& task, const TrainOptions& options);

/// Dense features in the type of `amp`, which is decided.
void set_type(GraphTask& task, Amp amp);

/// Without A·X. Dense features are of the type of the options' amp, which is decided.
GraphTask make_task(const GraphData& data, const TrainOptions& options);

/// Adjacency and features alone: what predictions need.
GraphTask make_unlabelled_task(const GraphData& data, const TrainOptions& options);

/// Labels as the losses read them: of plain methods, or of this library's.
void add_loss_labels(GraphTask& task, bool plain);

/// Is the last layer of a training step to give the training nodes' outputs alone? Where the options say so and the layer keeps nothing
/// beside its input: not of methods that keep A·x, as published, nor of gin, a single layer or torch's own functions.
bool wants_training_rows(const TrainOptions& options);
/// Makes it so; labels are made anew.
void give_training_rows(GraphTask& task);
/// Bytes that stand for it: edges, and labels in the order of the training nodes.
int64_t last_layer_bytes(const GraphTask& task);
/// The logits that loss_of() takes.
at::Tensor training_logits(GraphModel& model, const GraphTask& task);

GraphTask to_device(const GraphTask& task, at::Device device);

/// How many rows of A·X should be made once and kept? All, or as many as cache_bytes hold. None for torch's own functions, which
/// compute it in every step, where the method packs the data, where X is sparse, or where it would take more than a quarter of the
/// free memory.
int64_t cached_rows(const GraphTask& task, const TrainOptions& options);

/// The metric of labelled data over some of their nodes, in percent; logits may be on any device.
double score_of(const GraphData& data, const at::Tensor& logits, const std::vector<int64_t>& nodes);
/// The task's metric over nodes `index`, in percent.
double score_of(const GraphTask& task, const at::Tensor& logits, const at::Tensor& index);

/// The loss over training nodes, float32; add_loss_labels() comes first. Methods of this library use the logits' memory for their
/// gradient; plain ones torch's losses. Gradients are `scale` times what they are.
at::Tensor loss_of(const GraphTask& task, const at::Tensor& logits, bool plain, double scale = 1);

}  // namespace satchel
