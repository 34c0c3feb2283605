#include <algorithm>
#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "satchel/core/error.h"
#include "satchel/train/safetensors.h"

namespace satchel {
namespace {

constexpr size_t kMaxDimensions = 64;  // as numpy 2
constexpr uint64_t kMost = std::numeric_limits<int64_t>::max();

struct TypeName {
  StoredType type;
  const char* name;
  int64_t bytes;
};
constexpr TypeName kTypes[] = {
    {StoredType::boolean, "BOOL", 1}, {StoredType::u8, "U8", 1},   {StoredType::i8, "I8", 1},     {StoredType::u16, "U16", 2},
    {StoredType::i16, "I16", 2},      {StoredType::u32, "U32", 4}, {StoredType::i32, "I32", 4},   {StoredType::u64, "U64", 8},
    {StoredType::i64, "I64", 8},      {StoredType::f16, "F16", 2}, {StoredType::bf16, "BF16", 2}, {StoredType::f32, "F32", 4},
    {StoredType::f64, "F64", 8},
};
static_assert(std::size(kTypes) == static_cast<size_t>(StoredType::f64) + 1);

/// Untrusted text made fit for a terminal: at most 48 bytes, odd ones as \xNN.
std::string printable(std::string_view text) {
  std::string out = "'";
  for (const char c : text.substr(0, 48)) {
    const auto byte = static_cast<unsigned char>(c);
    char hex[5];
    std::snprintf(hex, sizeof hex, "\\x%02x", byte);
    out += byte >= 32 && byte < 127 ? std::string(1, c) : std::string(hex);
  }
  return out + (text.size() > 48 ? "…'" : "'");
}

/// Takes the header piece by piece and refuses the first that does not belong: nothing is built that the layout does not have.
class HeaderReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderReader(const std::string& file) : file_(file) {}

  StoredHeader header;

  [[noreturn]] void stop(const std::string& rule, const std::string& got) const {
    const std::string where = in_ == In::tensor || in_ == In::shape || in_ == In::offsets ? "tensor " + printable(entry_.name) + ": " : "";
    fail("checkpoint", file_ + ": " + where + rule, got);
  }

  bool null() override { stop_at("null"); }
  bool boolean(bool value) override { stop_at(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override { stop_at(std::to_string(value)); }
  bool number_float(number_float_t, const string_t& text) override { stop_at(text.substr(0, 48)); }
  bool binary(binary_t&) override { stop_at("binary"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (in_ != In::shape && in_ != In::offsets) stop_at(std::to_string(value));
    if (value > kMost) stop("numbers must be below 2^63", std::to_string(value));
    if (in_ == In::shape) {
      if (entry_.shape.size() == kMaxDimensions) stop("shape must have at most 64 dimensions", "more");
      entry_.shape.push_back(static_cast<int64_t>(value));
    } else {
      if (offsets_ == 2) stop("data_offsets must hold two numbers", "more");
      (offsets_++ == 0 ? entry_.begin : entry_.end) = value;
    }
    return true;
  }

  bool string(string_t& value) override {
    if (in_ == In::metadata) {
      header.metadata[key_] = value;
      return true;
    }
    if (in_ != In::tensor || key_ != "dtype") stop_at(printable(value));
    const auto* known = std::find_if(std::begin(kTypes), std::end(kTypes), [&](const TypeName& t) { return value == t.name; });
    if (known == std::end(kTypes)) stop("dtype must be a known one", printable(value));
    entry_.type = known->type;
    return true;
  }

  bool start_object(size_t) override {
    if (in_ == In::file) {
      in_ = In::top;
    } else if (in_ == In::top) {
      in_ = key_ == "__metadata__" ? In::metadata : In::tensor;
      entry_ = {};
      entry_.name = key_;
      offsets_ = 0;
      fields_.clear();
    } else {
      stop_at("an object");
    }
    return true;
  }

  bool key(string_t& name) override {
    auto& seen = in_ == In::top ? names_ : fields_;
    if (!seen.insert(name).second) stop("names must stand once", printable(name));
    if (in_ == In::tensor && name != "dtype" && name != "shape" && name != "data_offsets") {
      stop("fields must be dtype, shape and data_offsets", printable(name));
    }
    key_ = name;
    return true;
  }

  bool end_object() override {
    if (in_ == In::tensor) {
      if (fields_.size() != 3) stop("dtype, shape and data_offsets must be there", std::to_string(fields_.size()) + " of them");
      header.entries.push_back(std::move(entry_));
    }
    in_ = in_ == In::top ? In::file : In::top;
    return true;
  }

  bool start_array(size_t) override {
    if (in_ != In::tensor || key_ == "dtype") stop_at("an array");
    in_ = key_ == "shape" ? In::shape : In::offsets;
    return true;
  }

  bool end_array() override {
    if (in_ == In::offsets && offsets_ != 2) stop("data_offsets must hold two numbers", std::to_string(offsets_));
    in_ = In::tensor;
    return true;
  }

  bool parse_error(size_t place, const std::string&, const nlohmann::detail::exception&) override {
    stop("header must be JSON", "an error at byte " + std::to_string(place) + " of it");
  }

 private:
  enum class In { file, top, metadata, tensor, shape, offsets };

  [[noreturn]] void stop_at(const std::string& got) const {
    switch (in_) {
      case In::file: stop("header must be an object", got);
      case In::top: stop("entry " + printable(key_) + " must be an object", got);
      case In::metadata: stop("metadata " + printable(key_) + " must be text", got);
      case In::shape: stop("shape must hold whole numbers from 0 on", got);
      case In::offsets: stop("data_offsets must hold whole numbers from 0 on", got);
      case In::tensor: stop(key_ == "dtype" ? "dtype must be text" : key_ + " must be an array", got);
    }
    stop("header must be an object", got);
  }

  const std::string& file_;
  In in_ = In::file;
  std::string key_;
  StoredEntry entry_;
  int offsets_ = 0;
  std::set<std::string, std::less<>> names_, fields_;
};

/// Bytes that type and shape ask for; refuses what overflows, even where a dimension is 0.
uint64_t bytes_asked(const StoredEntry& entry, const std::string& file) {
  uint64_t bytes = static_cast<uint64_t>(size_of(entry.type));
  bool empty = false;
  for (const int64_t size : entry.shape) {
    const auto n = static_cast<uint64_t>(size);
    empty |= n == 0;
    if (n > 1 && bytes > kMost / n) {
      fail("checkpoint", file + ": tensor " + printable(entry.name) + ": shape must give less than 2^63 bytes",
           std::to_string(n) + " in it");
    }
    bytes *= std::max<uint64_t>(n, 1);
  }
  return empty ? 0 : bytes;
}

void check_cover(const std::vector<StoredEntry>& entries, uint64_t data_bytes, const std::string& file) {
  std::vector<const StoredEntry*> order;
  for (const StoredEntry& entry : entries) order.push_back(&entry);
  std::sort(order.begin(), order.end(),
            [](const auto* a, const auto* b) { return std::pair(a->begin, a->end) < std::pair(b->begin, b->end); });
  uint64_t at = 0;
  for (const StoredEntry* entry : order) {
    if (entry->begin != at) {
      fail("checkpoint", file + ": tensor " + printable(entry->name) + ": values must begin where others end, at " + std::to_string(at),
           entry->begin);
    }
    at = entry->end;
  }
  if (at != data_bytes) fail("checkpoint", file + ": tensors must cover the " + std::to_string(data_bytes) + " bytes of values", at);
}

}  // namespace

const char* name_of(StoredType type) { return kTypes[static_cast<size_t>(type)].name; }

int64_t size_of(StoredType type) { return kTypes[static_cast<size_t>(type)].bytes; }

StoredHeader parse_safetensors_header(std::string_view json, uint64_t data_bytes, const std::string& file) {
  if (!json.starts_with('{')) fail("checkpoint", file + ": header must begin with '{'", printable(json.substr(0, 1)));
  HeaderReader reader(file);
  if (!nlohmann::json::sax_parse(json.begin(), json.end(), &reader)) reader.stop("header must be JSON", "none");
  for (const StoredEntry& entry : reader.header.entries) {
    const std::string where = file + ": tensor " + printable(entry.name) + ": ";
    if (entry.begin > entry.end || entry.end > data_bytes) {
      fail("checkpoint", where + "data_offsets must rise within the " + std::to_string(data_bytes) + " bytes of values",
           std::to_string(entry.begin) + " and " + std::to_string(entry.end));
    }
    if (const uint64_t asked = bytes_asked(entry, file); entry.end - entry.begin != asked) {
      fail("checkpoint", where + "data_offsets must hold " + std::to_string(asked) + " bytes, as dtype and shape say",
           entry.end - entry.begin);
    }
  }
  check_cover(reader.header.entries, data_bytes, file);
  return std::move(reader.header);
}

}  // namespace satchel
