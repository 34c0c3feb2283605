#include "satchel/data/number_json.h"

#include <sys/stat.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "satchel/data/numbers.h"
#include "satchel/data/printable.h"

namespace satchel {
namespace {

class Reader : public nlohmann::json_sax<nlohmann::json> {
 public:
  Reader(const std::string& path, NumberSink& sink) : path_(path), sink_(sink) {}

  bool null() override { wrong("null"); }
  bool boolean(bool value) override { wrong(value ? "true" : "false"); }
  bool string(string_t& value) override { wrong("the text " + printable(value)); }
  bool binary(binary_t&) override { wrong("bytes"); }
  bool number_integer(number_integer_t value) override { return take(value); }
  bool number_unsigned(number_unsigned_t value) override {
    if (value > static_cast<uint64_t>(INT64_MAX)) wrong(std::to_string(value));
    return take(static_cast<int64_t>(value));
  }
  bool number_float(number_float_t value, const string_t& text) override {
    if (!(std::fabs(value) < 9e15) || value != std::floor(value)) wrong(text);
    return take(static_cast<int64_t>(value));
  }
  bool start_object(std::size_t) override {
    if (depth_ != 0) wrong("an object");
    ++depth_;
    return true;
  }
  bool key(string_t& name) override {
    key_ = name;
    sink_.key(name);
    return true;
  }
  bool end_object() override {
    --depth_;
    return true;
  }
  bool start_array(std::size_t) override {
    if (depth_ != 1) wrong("a list");
    ++depth_;
    sink_.open_list();
    return true;
  }
  bool end_array() override {
    --depth_;
    sink_.close_list();
    return true;
  }
  bool parse_error(std::size_t position, const std::string& last, const nlohmann::json::exception&) override {
    refuse(path_ + ": byte " + std::to_string(position), "must be JSON", last.empty() ? "the end" : printable(last));
  }

 private:
  bool take(int64_t value) {
    if (depth_ == 0) wrong(std::to_string(value));
    sink_.number(value);
    return true;
  }
  [[noreturn]] void wrong(const std::string& got) const {
    if (depth_ == 0) refuse(path_, "must be a JSON object", got);
    refuse(path_ + ": " + printable(key_), depth_ == 1 ? "must be a whole number or a list" : "must be a list of whole numbers", got);
  }

  const std::string& path_;
  NumberSink& sink_;
  std::string key_;
  int depth_ = 0;
};

}  // namespace

void read_number_json(const std::string& path, NumberSink& sink) {
  struct stat about {};
  if (::stat(path.c_str(), &about) != 0) fail("load", "file must exist", path);
  if (!S_ISREG(about.st_mode)) fail("load", "path must be a file", path);
  check_memory(static_cast<uint64_t>(about.st_size), path);
  std::vector<char> text(static_cast<size_t>(about.st_size));
  std::ifstream file(path, std::ios::binary);
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!file) fail("load", "file must be readable to its end", path);
  Reader reader(path, sink);
  nlohmann::json::sax_parse(text.data(), text.data() + text.size(), &reader);
}

}  // namespace satchel
