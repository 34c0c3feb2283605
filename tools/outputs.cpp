#include "tools/outputs.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "satchel/tensor/output.h"
#include "satchel/train/safetensors.h"
#include "tools/tool.h"

namespace satchel::tool {
namespace {

/// What tells one file from another, whatever names lead to it.
struct FileId {
  dev_t device;
  ino_t inode;
  bool operator==(const FileId&) const = default;
};

std::optional<FileId> id_of(const std::string& path) {
  struct stat about {};
  if (::stat(path.c_str(), &about) != 0) return std::nullopt;
  return FileId{about.st_dev, about.st_ino};
}

bool is_folder(const std::string& path) {
  struct stat about {};
  return ::stat(path.c_str(), &about) == 0 && S_ISDIR(about.st_mode);
}

std::string folder_of(const std::string& path) { return path.find('/') == path.npos ? "." : path.substr(0, path.rfind('/') + 1); }
std::string name_in_folder(const std::string& path) { return path.substr(path.rfind('/') + 1); }

bool same_file(const std::string& a, const std::string& b) {
  const auto first = id_of(a), second = id_of(b);
  if (first || second) return first == second;
  const auto folder = id_of(folder_of(a));
  return folder && name_in_folder(a) == name_in_folder(b) && folder == id_of(folder_of(b));
}

/// Does a file, which may not be there yet, lie in the folder or below it?
bool lies_in(const std::string& path, const std::string& folder) {
  const auto wanted = id_of(folder);
  const std::unique_ptr<char, decltype(&std::free)> real(::realpath(folder_of(path).c_str(), nullptr), &std::free);
  if (!wanted || !is_folder(folder) || !real) return false;
  for (std::string at = real.get();; at.resize(at.rfind('/'))) {
    if (id_of(at.empty() ? "/" : at) == wanted) return true;
    if (at.empty() || at == "/") return false;
  }
}

/// ", which holds 200 epochs", where it is a checkpoint.
std::string content_of(const std::string& path) {
  try {
    const auto metadata = read_safetensors(path).metadata;
    const auto state = metadata.find("state");
    if (state == metadata.end()) return "";
    const auto parsed = nlohmann::json::parse(state->second, nullptr, false);
    if (!parsed.is_object() || !parsed.contains("epoch") || !parsed["epoch"].is_number_integer()) return "";
    const auto epochs = parsed["epoch"].get<int64_t>();
    return fmt::format(", which holds {} epoch{}", epochs, epochs == 1 ? "" : "s");
  } catch (const Error&) {  // another file: the more reason to keep it
    return "";
  }
}

}  // namespace

void check_output(const std::string& path, const char* op) {
  const std::string folder = folder_of(path);
  if (!path.empty() && !is_folder(folder)) fail(op, "output must lie in an existing folder", path);
  check_replaceable(path, op);
  if (::access(folder.c_str(), W_OK) != 0) fail(op, "output must lie in a folder that can be written to", path);
}

void check_apart(const char* op, const char* name, const std::string& path, const char* other_name, const std::string& other) {
  if (!path.empty() && !other.empty() && same_file(path, other))
    throw UsageError(fmt::format("[{}] {} must be another file than {}, got {}", op, name, other_name, path));
}

void check_not_data(const char* op, const char* name, const std::string& path, const std::string& data) {
  if (path.empty() || path == "-") return;
  check_apart(op, name, path, "--data", data);
  if (lies_in(path, data)) throw UsageError(fmt::format("[{}] {} must lie outside the folder of --data, got {}", op, name, path));
}

void check_new_checkpoint(const std::string& path, bool resume, bool overwrite) {
  if (path.empty() || resume || overwrite || ::access(path.c_str(), F_OK) != 0) return;
  throw UsageError(
      fmt::format("[train] --checkpoint must be a new file, unless --resume goes on from it or --overwrite replaces it, got {}{}", path,
                  content_of(path)));
}

OutputFile::OutputFile(const std::string& name, const char* op) : op_(op), path_(name) {
  if (name != "-") {
    check_output(name, op);
    return;
  }
  if (::isatty(STDOUT_FILENO) == 1) fail(op, "-o - needs stdout to be a file or a pipe", "a terminal");
  const char* where = std::getenv("TMPDIR");
  std::string folder = std::string(where == nullptr || *where == 0 ? "/tmp" : where) + "/satchel-XXXXXX";
  if (::mkdtemp(folder.data()) == nullptr)
    fail(op, std::string("-o - needs a folder for temporary files, TMPDIR (") + std::strerror(errno) + ")", folder);
  folder_ = folder;
  path_ = folder + "/out";
}

OutputFile::~OutputFile() {
  if (folder_.empty()) return;
  ::unlink(path_.c_str());
  ::rmdir(folder_.c_str());
}

void OutputFile::finish() {
  if (folder_.empty()) return;
  const std::unique_ptr<FILE, decltype(&std::fclose)> file(std::fopen(path_.c_str(), "rb"), &std::fclose);
  if (!file) fail(op_, "temporary file must be readable", path_);
  std::array<char, 1 << 16> buffer;
  for (size_t n; (n = std::fread(buffer.data(), 1, buffer.size(), file.get())) > 0;) {
    if (std::fwrite(buffer.data(), 1, n, stdout) != n) fail(op_, "stdout must take what is written", std::strerror(errno));
  }
  if (std::ferror(file.get()) != 0) fail(op_, "temporary file must be readable to its end", path_);
}

}  // namespace satchel::tool
