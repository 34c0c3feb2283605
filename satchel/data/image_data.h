// An image data set as its files have it. Torch-free: parsers of untrusted files build and are tested without torch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace satchel {

/// One image, channels × height × width.
struct Image {
  int64_t channels = 0, height = 0, width = 0;
  std::vector<uint8_t> pixels;
};

/// Images in memory, all of one size, or in files that are decoded when they are asked for (a folder need not fit into memory).
struct ImageData {
  std::string name;
  int64_t channels = 0, height = 0, width = 0;  // height and width are 0 where each file has its own
  int64_t classes = 0;
  std::vector<uint8_t> pixels;           // in memory: count × channels × height × width
  std::vector<std::string> paths;        // in files: one an image
  std::vector<int32_t> labels;           // 0 … classes − 1, one an image
  std::vector<std::string> class_names;  // classes of them, or none

  int64_t count() const { return static_cast<int64_t>(labels.size()); }
  bool in_files() const { return !paths.empty(); }
};

/// Image `index`, copied or decoded to 3 channels; throws `[load] …` that names the file where it cannot be decoded. Thread-safe.
Image image_of(const ImageData& data, int64_t index);

struct ImageSets {
  ImageData train, test;               // test may be empty only where `where` says so (synthetic-images:…,test=0)
  std::vector<float> mean, deviation;  // one a channel, of values 0 … 1: those of train in memory, ImageNet's usual ones for files
};

/// The layout is found from what is there:
///   data_batch_*.bin, test_batch.bin                  CIFAR-10, binary version (or its parent folder)
///   train.bin, test.bin                               CIFAR-100, binary version; fine labels (or its parent folder)
///   *train-images-idx3-ubyte[.gz], *t10k-images-…     IDX: MNIST, Fashion-MNIST (/usr/share/datasets/fashion-mnist), EMNIST
///   train/CLASS/*.jpg, val/CLASS/*.jpg or test/…      folders of JPEG and PNG files
///   "synthetic-images:…"                              synthetic_images.h
/// Throws `[load] rule, got value` that names file and position.
ImageSets load_images(const std::string& where);

/// Decodes every image that is in a file and takes those out that cannot be read or decoded; returns why, one text an image, training
/// images first. Throws where no training image is left. 0 threads: one a core, at most 16.
std::vector<std::string> drop_broken(ImageSets& sets, int threads = 0);

/// Does `where` look like images (a layout above)? Looks at names only and never throws.
bool holds_images(const std::string& where);

}  // namespace satchel
