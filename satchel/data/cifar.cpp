// CIFAR-10 and CIFAR-100, binary versions: rows of one size to the file's end.
//
//   CIFAR-10    | label | 1024 red | 1024 green | 1024 blue |               data_batch_1.bin …, test_batch.bin, batches.meta.txt
//   CIFAR-100   | coarse label | fine label | 3072 bytes as above |         train.bin, test.bin, fine_label_names.txt
#include <algorithm>
#include <utility>

#include "satchel/data/graph_layouts.h"
#include "satchel/data/image_layouts.h"
#include "satchel/data/numbers.h"
#include "satchel/data/printable.h"

namespace satchel {
namespace {

constexpr int64_t kChannels = 3, kSide = 32, kPixels = kChannels * kSide * kSide;
constexpr uint64_t kMaxFile = uint64_t{1} << 36, kMaxNames = uint64_t{1} << 16;

struct Format {
  std::vector<int64_t> classes;  // of each label byte; the last is the one to learn
  const char* names;             // file of the classes' names, which may be missing
};

Format cifar10() { return {{10}, "batches.meta.txt"}; }
Format cifar100() { return {{20, 100}, "fine_label_names.txt"}; }

void read_rows(ImageData& data, const std::string& path, const Format& format) {
  const std::vector<uint8_t> bytes = read_file(path, kMaxFile);
  const size_t labels = format.classes.size(), row = labels + static_cast<size_t>(kPixels);
  if (bytes.empty() || bytes.size() % row != 0) {
    refuse(path, "must be whole rows of " + std::to_string(row) + " bytes", std::to_string(bytes.size()) + " bytes");
  }
  for (size_t at = 0; at < bytes.size(); at += row) {
    for (size_t k = 0; k < labels; ++k) {
      if (bytes[at + k] < format.classes[k]) continue;
      refuse(path + ": label", "must be 0 to " + std::to_string(format.classes[k] - 1),
             std::to_string(bytes[at + k]) + " in image " + std::to_string(at / row) + " (byte " + std::to_string(at + k) + ")");
    }
    data.labels.push_back(bytes[at + labels - 1]);
    const auto first = bytes.begin() + static_cast<int64_t>(at + labels);
    data.pixels.insert(data.pixels.end(), first, first + kPixels);
  }
}

std::vector<std::string> read_names(const std::string& path, int64_t classes) {
  std::vector<std::string> names;
  if (!exists(path)) return names;
  const std::vector<uint8_t> bytes = read_file(path, kMaxNames);
  std::string line;
  const auto take = [&] {
    while (line.ends_with('\r') || line.ends_with(' ')) line.pop_back();
    if (!line.empty()) names.push_back(std::exchange(line, {}));
  };
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] != '\n') {
      if (bytes[i] != '\r' && (bytes[i] < 32 || bytes[i] == 127))
        refuse(path, "must be text", "byte " + std::to_string(bytes[i]) + " at " + std::to_string(i));
      line += static_cast<char>(bytes[i]);
    } else {
      take();
    }
  }
  take();
  if (static_cast<int64_t>(names.size()) != classes) {
    refuse(path, "must have " + std::to_string(classes) + " names", std::to_string(names.size()));
  }
  return names;
}

ImageData read_set(const std::string& folder, const std::vector<std::string>& files, const Format& format) {
  ImageData data;
  data.channels = kChannels;
  data.height = data.width = kSide;
  data.classes = format.classes.back();
  for (const std::string& file : files) read_rows(data, folder + "/" + file, format);
  data.class_names = read_names(folder + "/" + format.names, data.classes);
  return data;
}

ImageSets sets_of(ImageData train, ImageData test) {
  ImageSets sets{std::move(train), std::move(test), {}, {}};
  measure(sets);
  return sets;
}

bool is_batch(const std::string& name) { return name.starts_with("data_batch_") && name.ends_with(".bin"); }

bool has(const std::vector<std::string>& names, const char* name) { return std::find(names.begin(), names.end(), name) != names.end(); }

}  // namespace

bool is_cifar10(const std::vector<std::string>& names) {
  return has(names, "test_batch.bin") || std::any_of(names.begin(), names.end(), is_batch);
}
bool is_cifar100(const std::vector<std::string>& names) { return has(names, "train.bin") && has(names, "test.bin"); }

ImageSets load_cifar10(const std::string& folder) {
  std::vector<std::string> batches;
  for (const std::string& name : names_in(folder)) {
    if (is_batch(name)) batches.push_back(name);
  }
  if (batches.empty()) refuse(folder, "must hold data_batch_*.bin", listed(names_in(folder)));
  return sets_of(read_set(folder, batches, cifar10()), read_set(folder, {"test_batch.bin"}, cifar10()));
}

ImageSets load_cifar100(const std::string& folder) {
  return sets_of(read_set(folder, {"train.bin"}, cifar100()), read_set(folder, {"test.bin"}, cifar100()));
}

}  // namespace satchel
