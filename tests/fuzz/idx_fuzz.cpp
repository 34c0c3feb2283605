#include "satchel/data/image_data.h"
#include "tests/fuzz/files.h"
#include "tests/fuzz/fuzz.h"

namespace satchel::fuzz {
namespace {

const std::vector<std::string> kFiles = {"train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte",
                                         "t10k-labels-idx1-ubyte"};

std::string idx(const std::vector<uint8_t>& sizes, const std::string& values) {
  std::string out("\0\0\x08", 3);
  out += static_cast<char>(sizes.size());
  for (const uint8_t size : sizes) out += std::string(3, '\0') + static_cast<char>(size);
  return out + values;
}

}  // namespace

void run(std::string_view input) {
  Parts parts(input);
  spill_folder(parts, "g", kFiles);
  const ImageSets sets = load_images(scratch() + "/g");
  for (const ImageData* data : {&sets.train, &sets.test}) {
    require(static_cast<int64_t>(data->pixels.size()) == data->count() * data->height * data->width, "images have their sizes");
    for (const int32_t label : data->labels) require(label >= 0 && label < data->classes, "labels are classes");
  }
}

std::vector<std::string> seeds() {
  const std::vector<std::string> files = {idx({2, 2, 3}, "abcdefghijkl"), idx({2}, std::string("\1\0", 2)), idx({1, 2, 3}, "abcdef"),
                                          idx({1}, "\1")};
  std::vector<std::string> packed;
  for (const std::string& file : files) packed.push_back(gzip(file));
  return {joined(files), joined(packed)};
}

}  // namespace satchel::fuzz
