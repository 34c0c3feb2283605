#include "satchel/data/image_data.h"

#include <sys/stat.h>

#include <cmath>
#include <cstdio>
#include <exception>
#include <memory>
#include <new>
#include <string_view>

#include "satchel/data/graph_layouts.h"
#include "satchel/data/image_layouts.h"
#include "satchel/data/numbers.h"
#include "satchel/data/synthetic_images.h"

namespace satchel {
namespace {

constexpr std::string_view kSynthetic = "synthetic-images:";
constexpr const char* kInside[] = {"", "/cifar-10-batches-bin", "/cifar-100-binary"};  // folders of the official archives

using Load = ImageSets (*)(const std::string&);

struct Layout {
  std::string folder;
  Load load = nullptr;  // none: no layout of images
};

Layout layout_of(const std::string& where) {
  for (const char* inside : kInside) {
    const std::string folder = where + inside;
    if (!is_folder(folder)) continue;
    const std::vector<std::string> names = names_in(folder);
    if (is_cifar10(names)) return {folder, load_cifar10};
    if (is_cifar100(names)) return {folder, load_cifar100};
    if (is_idx(names)) return {folder, load_idx};
    if (is_image_folder(folder, names)) return {folder, load_image_folder};
  }
  return {};
}

std::string name_of(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path.substr(path.rfind('/') + 1);
}

ImageSets load_layout(const std::string& where) {
  if (!exists(where)) fail("load", "folder must exist", where.empty() ? "''" : where);
  if (!is_folder(where)) fail("load", "path must be a folder of images", where);
  const Layout layout = layout_of(where);
  if (layout.load == nullptr) {
    refuse(where,
           "must hold data_batch_*.bin and test_batch.bin (CIFAR-10), train.bin and test.bin (CIFAR-100), *train-images-idx3-ubyte[.gz] "
           "… (IDX), or train/CLASS/*.jpg and val/CLASS/*.jpg (or .png)",
           listed(names_in(where)));
  }
  return layout.load(layout.folder);
}

}  // namespace

ImageSets load_images(const std::string& where) try {
  const bool made = where.starts_with(kSynthetic);
  ImageSets sets = made ? make_synthetic_images(parse_synthetic_images(where.substr(kSynthetic.size()))) : load_layout(where);
  sets.train.name = sets.test.name = made ? where : name_of(where);
  return sets;
} catch (const std::bad_alloc&) {
  fail("load", "data must fit into memory", where);
}

bool holds_images(const std::string& where) try {
  return where.starts_with(kSynthetic) || layout_of(where).load != nullptr;
} catch (const std::exception&) {  // a folder that cannot be read
  return false;
}

Image image_of(const ImageData& data, int64_t index) {
  if (index < 0 || index >= data.count()) fail("load", "image must be 0 to " + std::to_string(data.count() - 1), index);
  if (data.in_files()) return read_image(data.paths[static_cast<size_t>(index)]);
  check_images(data, "load");
  const int64_t bytes = data.channels * data.height * data.width;
  const auto first = data.pixels.begin() + index * bytes;
  return {data.channels, data.height, data.width, std::vector<uint8_t>(first, first + bytes)};
}

void check_images(const ImageData& data, const char* op) {
  const auto sizes = [&](size_t got) {
    fail(op, "there must be " + std::to_string(data.count()) + " images, as there are labels, of the sizes given", got);
  };
  if (data.in_files()) {
    if (data.paths.size() != data.labels.size()) sizes(data.paths.size());
    if (data.channels != 3) fail(op, "files must have 3 channels", data.channels);
    return;
  }
  for (const int64_t size : {data.channels, data.height, data.width}) {
    if (size < 1 || size > kMaxSide) fail(op, "channels, height and width must be 1 to " + std::to_string(kMaxSide), size);
  }
  const auto bytes = static_cast<size_t>(data.channels * data.height * data.width);  // at most 2^42
  if (data.pixels.size() / bytes != data.labels.size() || data.pixels.size() % bytes != 0) sizes(data.pixels.size() / bytes);
}

std::vector<uint8_t> read_file(const std::string& path, uint64_t most) {
  struct stat about {};
  if (::stat(path.c_str(), &about) != 0) fail("load", "file must exist", path);
  if (!S_ISREG(about.st_mode)) fail("load", "path must be a file", path);
  const auto bytes = static_cast<uint64_t>(about.st_size);
  if (bytes > most) refuse(path, "must have at most " + std::to_string(most) + " bytes", std::to_string(bytes));
  check_memory(bytes, path);
  const auto close = [](std::FILE* file) { std::fclose(file); };
  const std::unique_ptr<std::FILE, decltype(close)> file(std::fopen(path.c_str(), "rb"), close);
  if (!file) fail("load", "file must be readable", path);
  std::vector<uint8_t> out(bytes);
  if (std::fread(out.data(), 1, out.size(), file.get()) != out.size()) fail("load", "file must be readable to its end", path);
  return out;
}

void measure(ImageSets& sets) {
  const ImageData& data = sets.train;
  const int64_t values = data.height * data.width;
  for (int64_t c = 0; c < data.channels; ++c) {
    uint64_t sum = 0, squares = 0;  // whole numbers: below 2^63 for 2^47 values
    for (int64_t i = 0; i < data.count(); ++i) {
      const uint8_t* map = data.pixels.data() + (i * data.channels + c) * values;
      for (int64_t k = 0; k < values; ++k) {
        sum += map[k];
        squares += static_cast<uint64_t>(map[k]) * map[k];
      }
    }
    const auto n = static_cast<uint64_t>(values * data.count());
    const auto spread = static_cast<unsigned __int128>(n) * squares - static_cast<unsigned __int128>(sum) * sum;  // n²·variance, exactly
    const double mean = static_cast<double>(sum) / static_cast<double>(n);
    const double deviation = std::sqrt(static_cast<double>(spread)) / static_cast<double>(n);
    sets.mean.push_back(static_cast<float>(mean / 255));
    sets.deviation.push_back(spread == 0 ? 1.0f : static_cast<float>(deviation / 255));
  }
}

}  // namespace satchel
