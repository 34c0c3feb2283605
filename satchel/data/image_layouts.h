// The layouts that load_images knows, one file each, and what they share. Private.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "satchel/data/image_data.h"

namespace satchel {

ImageSets load_cifar10(const std::string& folder);
ImageSets load_cifar100(const std::string& folder);
ImageSets load_idx(const std::string& folder);
ImageSets load_image_folder(const std::string& folder);

/// Does a folder with these names (names_in) hold the layout?
bool is_cifar10(const std::vector<std::string>& names);
bool is_cifar100(const std::vector<std::string>& names);
bool is_idx(const std::vector<std::string>& names);
bool is_image_folder(const std::string& folder, const std::vector<std::string>& names);

constexpr int64_t kMaxImages = INT32_MAX;         // an index has 32 bits where noise is drawn
constexpr int64_t kMaxSide = 16384;               // pixels; an image in memory
constexpr int64_t kMaxPixels = int64_t{1} << 27;  // of an image in a file: a bomb says 65,500 by 65,500 in 20 bytes

/// Throws `[op] …` unless the images are as many and as large as the fields say.
void check_images(const ImageData& data, const char* op);

/// A JPEG or PNG file, told apart by its first bytes; three channels.
Image read_image(const std::string& path);

/// A plain file, whole; refuses one of more than `most` bytes.
std::vector<uint8_t> read_file(const std::string& path, uint64_t most);

/// Mean and deviation of each channel of train, as values 0 … 1; a channel of one value only gets deviation 1.
void measure(ImageSets& sets);

}  // namespace satchel
