// What of an image run its checkpoint holds beside the weights. Private to this room.
#pragma once

#include <string>

#include "satchel/train/image_train.h"

namespace satchel {

/// All that defines a run, as flat JSON; left out are files, threads, and the number of epochs where no learning rate depends on it.
std::string describe_options(const ImageTrainOptions& options, const ImageShape& shape);
/// Names, sizes, labels and a digest of the content (of files: of their names).
std::string describe_data(const ImageSets& data);

}  // namespace satchel
