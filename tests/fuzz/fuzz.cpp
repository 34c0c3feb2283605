// libFuzzer's two entry points, and files for parsers that read files.
#include "tests/fuzz/fuzz.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "satchel/core/error.h"

namespace satchel::fuzz {
namespace {

constexpr uint16_t kAbsent = 0xffff;

struct Folder {
  Folder() {
    std::string pattern = (::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp") + std::string("/satchel_fuzz_XXXXXX");
    require(::mkdtemp(pattern.data()) != nullptr, "a temporary folder can be made");
    path = pattern;
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  std::string path;
};

/// An error is for people: `[op] …`, on one line, without control characters (as \xNN), no longer than its input makes it.
void check_text(std::string_view what, size_t input) {
  require(what.starts_with('[') && what.find("] ") != std::string_view::npos, "an error begins with its op");
  require(std::none_of(what.begin(), what.end(), [](char c) { return static_cast<unsigned char>(c) < 32 || c == 127; }),
          "an error has no control characters");
  require(what.size() < 4096 + 4 * input, "an error is short");
}

void write(const std::string& path, std::string_view content) {
  std::FILE* file = std::fopen(path.c_str(), "wb");
  require(file != nullptr && std::fwrite(content.data(), 1, content.size(), file) == content.size(), "files can be written");
  std::fclose(file);
}

}  // namespace

const std::string& scratch() {
  static const Folder folder;
  return folder.path;
}

std::string spill(const std::string& name, std::string_view content) {
  const std::string path = scratch() + "/" + name;
  write(path, content);
  return path;
}

void remove(const std::string& name) { ::unlink((scratch() + "/" + name).c_str()); }
void make_folder(const std::string& name) { ::mkdir((scratch() + "/" + name).c_str(), 0700); }

bool Parts::next(std::string_view& part) {
  uint16_t length = 0;
  if (rest.size() >= sizeof length) {
    std::memcpy(&length, rest.data(), sizeof length);
    rest.remove_prefix(sizeof length);
  } else {
    rest = {};
  }
  if (length == kAbsent) return false;
  part = rest.substr(0, length);
  rest.remove_prefix(part.size());
  return true;
}

void spill_folder(Parts& parts, const std::string& folder, const std::vector<std::string>& names) {
  make_folder(folder);
  for (const std::string& name : names) {
    std::string_view part;
    if (parts.next(part)) {
      spill(folder + "/" + name, part);
    } else {
      remove(folder + "/" + name);
    }
  }
}

std::string joined(const std::vector<std::string>& parts) {
  std::string out;
  for (const std::string& part : parts) {
    const auto length = static_cast<uint16_t>(std::min<size_t>(part.size(), kAbsent - 1));
    out.append(reinterpret_cast<const char*>(&length), sizeof length);
    out.append(part, 0, length);
  }
  return out;
}

}  // namespace satchel::fuzz

/// Puts the seeds into the corpus, the first argument that is a folder.
extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  for (int i = 1; i < *count; ++i) {
    std::error_code ignored;
    const std::string folder = (*arguments)[i];
    if (!std::filesystem::is_directory(folder, ignored)) continue;
    int number = 0;
    for (const std::string& seed : satchel::fuzz::seeds()) satchel::fuzz::write(folder + "/seed" + std::to_string(number++), seed);
    break;
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    satchel::fuzz::run({reinterpret_cast<const char*>(data), size});
  } catch (const satchel::Error& e) {
    satchel::fuzz::check_text(e.what(), size);
  }
  return 0;
}
