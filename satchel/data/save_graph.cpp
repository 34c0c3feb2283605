#include "satchel/data/save_graph.h"

#include <sys/stat.h>
#include <unistd.h>
#include <zip.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "satchel/core/error.h"
#include "satchel/data/npy.h"
#include "satchel/tensor/output.h"

namespace satchel {
namespace {

constexpr const char* kOp = "save";

/// A text file, whole or not at all.
class TextFile {
 public:
  explicit TextFile(const std::string& path) : path_(path), temporary_(path + ".part" + std::to_string(::getpid())) {
    check_replaceable(path, kOp);
    file_.open(temporary_, std::ios::binary | std::ios::trunc);
    if (!file_) fail(kOp, std::string("output must be writable (") + std::strerror(errno) + ")", path);
  }
  ~TextFile() { std::remove(temporary_.c_str()); }
  TextFile(const TextFile&) = delete;
  TextFile& operator=(const TextFile&) = delete;

  void text(std::string_view t) { file_.write(t.data(), static_cast<std::streamsize>(t.size())); }
  void number(int64_t n) {
    std::array<char, 24> digits{};
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), n).ptr;
    text({digits.data(), static_cast<size_t>(end - digits.data())});
  }
  /// [1, 2, 3].
  void list(const auto& values) {
    text("[");
    for (size_t i = 0; i < values.size(); ++i) {
      if (i > 0) text(", ");
      number(values[i]);
    }
    text("]");
  }
  void finish() {
    file_.close();
    if (!file_ || std::rename(temporary_.c_str(), path_.c_str()) != 0) {
      fail(kOp, std::string("output must be writable to its end (") + std::strerror(errno) + ")", path_);
    }
  }

 private:
  std::string path_, temporary_;
  std::ofstream file_;
};

/// An .npz file of arrays as they are; they must live until finish().
class ArchiveFile {
 public:
  explicit ArchiveFile(const std::string& path) : path_(path) {
    check_replaceable(path, kOp);
    int code = 0;
    archive_.reset(zip_open(path.c_str(), ZIP_CREATE | ZIP_TRUNCATE, &code));
    if (!archive_) fail(kOp, "output must be writable (libzip's error " + std::to_string(code) + ")", path);
  }

  /// `descr` and `shape` as an .npy header has them: "<i8", "(3,)".
  void add(const std::string& name, const std::string& descr, const std::string& shape, const void* data, size_t bytes) {
    std::string file = "\x93NUMPY\x01";
    file += '\0';
    std::string dict = "{'descr': '" + descr + "', 'fortran_order': False, 'shape': " + shape + ", }";
    dict.append(63 - (10 + dict.size()) % 64, ' ');
    dict += '\n';
    file += static_cast<char>(dict.size() & 0xff);
    file += static_cast<char>(dict.size() >> 8);
    file += dict;
    file.append(static_cast<const char*>(data), bytes);
    const std::string& kept = *kept_.emplace_back(std::make_unique<std::string>(std::move(file)));
    zip_source_t* source = zip_source_buffer(archive_.get(), kept.data(), kept.size(), 0);
    const zip_int64_t at = source == nullptr ? -1 : zip_file_add(archive_.get(), (name + ".npy").c_str(), source, 0);
    if (at < 0) {
      zip_source_free(source);
      refuse();
    }
    if (zip_set_file_compression(archive_.get(), static_cast<zip_uint64_t>(at), ZIP_CM_STORE, 0) != 0) refuse();
  }
  void finish() {
    if (zip_close(archive_.get()) != 0) refuse();  // writes to a temporary file, then renames
    [[maybe_unused]] zip_t* closed = archive_.release();
  }

 private:
  [[noreturn]] void refuse() { fail(kOp, std::string("output must be writable (") + zip_strerror(archive_.get()) + ")", path_); }
  struct Discard {
    void operator()(zip_t* archive) const { zip_discard(archive); }
  };

  std::string path_;
  std::vector<std::unique_ptr<std::string>> kept_;  // read by zip_close
  std::unique_ptr<zip_t, Discard> archive_;
};

void save_edges(const GraphData& data, const std::string& path) {
  const auto line = [](size_t n) { return "(" + std::to_string(n) + ",)"; };
  const std::vector<int8_t> ones(data.weight.empty() ? data.target.size() : 0, 1);
  const std::array<int64_t, 2> shape{data.nodes, data.nodes};
  ArchiveFile file(path);
  file.add("indices", "<i4", line(data.target.size()), data.target.data(), data.target.size() * sizeof(int32_t));
  file.add("indptr", "<i8", line(data.start.size()), data.start.data(), data.start.size() * sizeof(int64_t));
  file.add("format", "|S3", "()", "csr", 3);
  file.add("shape", "<i8", "(2,)", shape.data(), sizeof shape);
  if (data.weight.empty()) {
    file.add("data", "|i1", line(ones.size()), ones.data(), ones.size());
  } else {
    file.add("data", "<f4", line(data.weight.size()), data.weight.data(), data.weight.size() * sizeof(float));
  }
  file.finish();
}

void save_features(const Features& x, const std::string& path) {
  const std::array<int64_t, 2> shape{x.rows, x.columns};
  if (!x.sparse()) return write_npy(path, "<f4", shape, x.dense.data());
  std::vector<float> dense(static_cast<size_t>(x.rows * x.columns), 0.0f);
  for (int64_t row = 0; row < x.rows; ++row) {
    for (int64_t i = x.start[static_cast<size_t>(row)]; i < x.start[static_cast<size_t>(row) + 1]; ++i) {
      dense[static_cast<size_t>(row * x.columns + x.column[static_cast<size_t>(i)])] = x.value[static_cast<size_t>(i)];
    }
  }
  write_npy(path, "<f4", shape, dense.data());
}

void save_classes(const GraphData& data, const std::string& path) {
  TextFile file(path);
  file.text("{");
  bool first = true;
  for (int64_t node = 0; node < data.nodes; ++node) {
    const auto at = static_cast<size_t>(node);
    if (data.task != Task::multi_label && data.labels[at] < 0) continue;
    file.text(first ? "\"" : ",\n\"");
    first = false;
    file.number(node);
    file.text("\": ");
    if (data.task == Task::multi_label) {
      const auto classes = static_cast<size_t>(data.classes);
      file.list(std::span(data.targets).subspan(at * classes, classes));
    } else {
      file.number(data.labels[at]);
    }
  }
  file.text("}\n");
  file.finish();
}

void save_roles(const Split& split, const std::string& path) {
  TextFile file(path);
  file.text("{\"tr\": ");
  file.list(split.train);
  file.text(",\n\"va\": ");
  file.list(split.valid);
  file.text(",\n\"te\": ");
  file.list(split.test);
  file.text("}\n");
  file.finish();
}

void make_folder(const std::string& folder) {
  if (folder.empty()) fail(kOp, "output must have a name", "''");
  if (::mkdir(folder.c_str(), 0777) == 0) return;
  const int why = errno;
  struct stat about {};
  if (::stat(folder.c_str(), &about) != 0) fail(kOp, std::string("folder must be writable (") + std::strerror(why) + ")", folder);
  if (!S_ISDIR(about.st_mode)) fail(kOp, "output must be a folder", folder);
}

}  // namespace

void save_graph(const GraphData& data, const Split& split, const std::string& folder) {
  make_folder(folder);
  const std::string edges = folder + "/adj_full.npz";
  check_replaceable(edges, kOp);
  std::remove(edges.c_str());
  save_features(data.features, folder + "/feats.npy");
  save_classes(data, folder + "/class_map.json");
  save_roles(split, folder + "/role.json");
  save_edges(data, edges);
}

}  // namespace satchel
