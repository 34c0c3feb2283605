// What of an image run its checkpoint holds beside the weights. Private to this room and tools.
#pragma once

#include <string>

#include "satchel/plan/bit_allocator.h"
#include "satchel/train/checkpoint.h"
#include "satchel/train/image_train.h"

namespace satchel {

/// All that defines a run, as flat JSON; left out are files, threads, and the number of epochs where no learning rate depends on it. The
/// method is its text.
std::string describe_options(const ImageTrainOptions& options, const ImageShape& shape);
/// … and back, with the model's shape, but for the number of epochs.
ImageTrainOptions parse_options(const std::string& json, ImageShape& shape);
/// A description of an earlier version, which knew no weights to start from and nothing frozen, as describe_options() would write it.
std::string with_later_options(const std::string& json);
/// Names, sizes, labels and a digest of the content (of files: of their names).
std::string describe_data(const ImageSets& data);

/// What a run's RunningBitAllocator knows, as "shares.…" among the optimizer's tensors.
void add_shares(const RunningBitAllocator& shares, TensorMap& optimizer);
/// … taken out of them again and put into one that has seen no step. Throws `[resume] …` where they do not fit.
void take_shares(TensorMap& optimizer, RunningBitAllocator& shares, at::Device device);

}  // namespace satchel
