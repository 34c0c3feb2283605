// IDX files (MNIST, Fashion-MNIST, EMNIST), plain or gzip. Numbers are big-endian.
//
//   | 0 | 0 | type: 8 = unsigned byte | dimensions: 3 images, 1 labels | size: u32, one a dimension | values |
#include <sys/stat.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <memory>

#include "satchel/data/graph_layouts.h"
#include "satchel/data/image_layouts.h"
#include "satchel/data/numbers.h"

namespace satchel {
namespace {

constexpr size_t kChunk = size_t{4} << 20;  // memory grows with what is there, not with what a header says

/// Bytes in order out of a plain or gzip file.
class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path) {
    struct stat about {};
    if (::stat(path.c_str(), &about) != 0) fail("load", "file must exist", path);
    if (!S_ISREG(about.st_mode)) fail("load", "path must be a file", path);
    file_.reset(gzopen(path.c_str(), "rb"));
    if (!file_) fail("load", "file must be readable", path);
  }

  /// Appends `count` bytes, or as many as there are.
  size_t read(std::vector<uint8_t>& out, size_t count) {
    const size_t had = out.size();
    while (out.size() - had < count) {
      const size_t before = out.size(), want = std::min(count - (before - had), kChunk);
      out.resize(before + want);
      const int got = gzread(file_.get(), out.data() + before, static_cast<unsigned>(want));
      out.resize(before + static_cast<size_t>(std::max(got, 0)));
      check(got);
      if (static_cast<size_t>(got) < want) break;
    }
    at_ += out.size() - had;
    return out.size() - had;
  }

 private:
  struct Close {
    void operator()(gzFile file) const { gzclose(file); }
  };

  /// zlib tells of a cut stream only after the last whole byte of it.
  void check(int got) {
    int code = Z_OK;
    gzerror(file_.get(), &code);
    if (got >= 0 && (code == Z_OK || code == Z_STREAM_END)) return;
    if (code == Z_ERRNO) fail("load", "file must be readable to its end", path_);
    refuse(path_, "must be a whole gzip file",
           (code == Z_BUF_ERROR ? "its end after " : "damage after ") + std::to_string(at_) + " unpacked bytes");
  }

  std::string path_;
  std::unique_ptr<gzFile_s, Close> file_;
  uint64_t at_ = 0;
};

struct Idx {
  std::vector<int64_t> shape;
  std::vector<uint8_t> values;
};

Idx read_idx(const std::string& path, size_t dimensions) {
  Reader reader(path);
  std::vector<uint8_t> head;
  const size_t length = 4 + 4 * dimensions;
  if (reader.read(head, length) < length) {
    refuse(path, "must have a header of " + std::to_string(length) + " bytes", std::to_string(head.size()));
  }
  if (head[0] != 0 || head[1] != 0 || head[2] != 8 || head[3] != dimensions) {
    char got[32];
    std::snprintf(got, sizeof got, "0x%02x%02x%02x%02x at byte 0", head[0], head[1], head[2], head[3]);
    refuse(path + ": magic", "must be 0x0000080" + std::to_string(dimensions), got);
  }
  Idx out;
  int64_t bytes = 1;  // below 2^31·2^28
  for (size_t d = 0; d < dimensions; ++d) {
    const uint8_t* p = head.data() + 4 + 4 * d;
    const int64_t size = int64_t{p[0]} << 24 | int64_t{p[1]} << 16 | int64_t{p[2]} << 8 | p[3], most = d == 0 ? kMaxImages : kMaxSide;
    if (size < 1 || size > most) {
      refuse(path + ": size " + std::to_string(d), "must be 1 to " + std::to_string(most),
             std::to_string(size) + " at byte " + std::to_string(4 + 4 * d));
    }
    out.shape.push_back(size);
    bytes *= size;
  }
  check_memory(static_cast<uint64_t>(bytes), path);
  const size_t got = reader.read(out.values, static_cast<size_t>(bytes));
  if (got < static_cast<size_t>(bytes)) {
    refuse(path, "must have " + std::to_string(bytes) + " values, as its sizes say", std::to_string(got));
  }
  if (reader.read(head, 1) > 0) refuse(path, "must end after " + std::to_string(bytes) + " values", "more");
  return out;
}

/// `a-images-idx3-ubyte.gz` or `a-images.idx3-ubyte`.
bool is_images(const std::string& name) {
  const std::string plain = name.ends_with(".gz") ? name.substr(0, name.size() - 3) : name;
  return plain.ends_with("images-idx3-ubyte") || plain.ends_with("images.idx3-ubyte");
}

bool is_train(const std::string& name) { return name.find("train") != std::string::npos; }
bool is_test(const std::string& name) { return name.find("t10k") != std::string::npos || name.find("test") != std::string::npos; }

std::string the_one(const std::string& folder, const char* what, bool (*wanted)(const std::string&)) {
  std::vector<std::string> found;
  for (const std::string& name : names_in(folder)) {
    if (is_images(name) && wanted(name)) found.push_back(name);
  }
  if (found.size() != 1) refuse(folder, std::string("must hold one file of images to ") + what, listed(found));
  return found.front();
}

/// The file of labels beside one of images.
std::string labels_of(std::string name) {
  const size_t at = name.rfind("images");
  name.replace(at, 6, "labels");
  name.replace(name.rfind("idx3"), 4, "idx1");
  return name;
}

ImageData read_set(const std::string& folder, const std::string& file, int64_t classes) {
  Idx images = read_idx(folder + "/" + file, 3);
  const std::string label_path = folder + "/" + labels_of(file);
  const Idx labels = read_idx(label_path, 1);
  if (labels.shape[0] != images.shape[0]) {
    refuse(label_path, "must have one label an image, " + std::to_string(images.shape[0]), std::to_string(labels.shape[0]));
  }
  ImageData data;
  data.channels = 1;
  data.height = images.shape[1];
  data.width = images.shape[2];
  data.pixels = std::move(images.values);
  data.labels.assign(labels.values.begin(), labels.values.end());
  data.classes = *std::max_element(data.labels.begin(), data.labels.end()) + 1;
  if (classes == 0) return data;
  const std::vector<int64_t> wide(data.labels.begin(), data.labels.end());
  check_range(wide, 0, classes - 1, label_path + ": label");
  data.classes = classes;
  return data;
}

}  // namespace

bool is_idx(const std::vector<std::string>& names) { return std::any_of(names.begin(), names.end(), is_images); }

ImageSets load_idx(const std::string& folder) {
  ImageSets sets;
  sets.train = read_set(folder, the_one(folder, "train on", is_train), 0);
  const std::string test = the_one(folder, "test with", is_test);
  sets.test = read_set(folder, test, sets.train.classes);
  if (sets.test.height != sets.train.height || sets.test.width != sets.train.width) {
    refuse(folder + "/" + test, "must have images of " + std::to_string(sets.train.height) + " by " + std::to_string(sets.train.width),
           std::to_string(sets.test.height) + " by " + std::to_string(sets.test.width));
  }
  measure(sets);
  return sets;
}

}  // namespace satchel
