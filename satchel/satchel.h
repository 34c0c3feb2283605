// All of Satchel's public functions, modules and values: `#include <satchel/satchel.h>` and link Satchel::satchel. What is installed is
// this header and what it includes; a program that includes the narrower headers itself compiles faster.
#pragma once

// Errors, methods and packing.
#include "satchel/core/error.h"
#include "satchel/core/method.h"
#include "satchel/tensor/file.h"
#include "satchel/tensor/pack.h"

// Functions with gradients, losses, the report of what a backward pass would read, and the guard that packs for any model of torch's.
#include "satchel/autograd/activation.h"
#include "satchel/autograd/conv.h"
#include "satchel/autograd/gate.h"
#include "satchel/autograd/linear.h"
#include "satchel/autograd/loss.h"
#include "satchel/autograd/norm.h"
#include "satchel/autograd/norm_act.h"
#include "satchel/autograd/packing.h"
#include "satchel/autograd/pixel_loss.h"
#include "satchel/autograd/pool.h"
#include "satchel/autograd/report.h"
#include "satchel/autograd/resample.h"
#include "satchel/autograd/save_policy.h"
#include "satchel/autograd/smooth.h"

// What a model keeps, from sizes alone.
#include "satchel/plan/bit_allocator.h"
#include "satchel/plan/graph_plan.h"
#include "satchel/plan/image_plan.h"

// Modules with torch's options.
#include "satchel/nn/activation.h"
#include "satchel/nn/conv.h"
#include "satchel/nn/convert.h"
#include "satchel/nn/dropout.h"
#include "satchel/nn/linear.h"
#include "satchel/nn/norm.h"
#include "satchel/nn/pool.h"
#include "satchel/nn/upsample.h"

// Graphs and their layers.
#include "satchel/graph/csr.h"
#include "satchel/graph/gcn.h"
#include "satchel/graph/input.h"
#include "satchel/graph/layer.h"
#include "satchel/graph/sage.h"
#include "satchel/graph/spmm.h"

// Ready models, data sets and training.
#include "satchel/data/graph_data.h"
#include "satchel/data/image_data.h"
#include "satchel/data/image_loader.h"
#include "satchel/data/save_graph.h"
#include "satchel/data/scene_loader.h"
#include "satchel/data/scenes.h"
#include "satchel/data/synthetic.h"
#include "satchel/data/synthetic_images.h"
#include "satchel/data/synthetic_shapes.h"
#include "satchel/models/graph_model.h"
#include "satchel/models/image_model.h"
#include "satchel/models/segmentation.h"
#include "satchel/train/checkpoint.h"
#include "satchel/train/image_train.h"
#include "satchel/train/memory.h"
#include "satchel/train/metrics.h"
#include "satchel/train/segment_train.h"
#include "satchel/train/train.h"

// Old names, for a release.
#include "satchel/autograd/saving.h"
#include "satchel/plan/share_out.h"
