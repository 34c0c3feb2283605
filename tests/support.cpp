#include "tests/support.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cctype>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <stdexcept>

namespace satchel::test {

Scratch::Scratch() : folder_(testing::TempDir() + "satchelXXXXXX") {
  if (::mkdtemp(folder_.data()) == nullptr) throw std::runtime_error("no temporary folder");
}

Scratch::~Scratch() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

std::string Scratch::make_folder(const std::string& name) const {
  std::filesystem::create_directory(path(name));
  return path(name);
}

std::string slurp(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void spill(const std::string& path, std::string_view bytes) {
  std::remove(path.c_str());  // ext4 waits for the disk when a file is written over
  std::ofstream(path, std::ios::binary | std::ios::trunc).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

bool holds(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

std::string case_name(std::string_view text) {
  std::string name;
  const auto is_word = [&](size_t i) { return i < text.size() && std::isalnum(static_cast<unsigned char>(text[i])) != 0; };
  for (size_t i = 0; i < text.size(); ++i) {
    if (is_word(i)) {
      name += text[i];
    } else if (text[i] == '+') {
      name += "with";
    } else if (text[i] == '-' && is_word(i + 1) && (i == 0 || !is_word(i - 1))) {
      name += "minus_";
    } else if (!name.empty() && name.back() != '_') {
      name += '_';
    }
  }
  return name.ends_with('_') ? name.substr(0, name.size() - 1) : name;
}

std::string text_of(const SavedTensor& line) {
  std::string text = line.name + ' ' + line.kind + ' ' + std::to_string(line.bits) + " bits " + std::to_string(line.bytes) + " bytes";
  for (const int64_t size : line.shape) text += ' ' + std::to_string(size);
  return text;
}

std::string text_of(const std::vector<SavedTensor>& lines) {
  std::string text;
  for (const SavedTensor& line : lines) text += "\n  " + text_of(line);
  return text;
}

}  // namespace satchel::test
