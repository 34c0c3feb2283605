#include "satchel/train/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "satchel/core/error.h"
#include "satchel/data/printable.h"
#include "satchel/tensor/output.h"
#include "satchel/train/replacement.h"

namespace satchel {
namespace {

static_assert(std::endian::native == std::endian::little, "values and the header's length are copied as they are in memory");

constexpr const char* kOp = "checkpoint";
constexpr uint64_t kMaxHeader = 100'000'000;  // as Python's safetensors
constexpr size_t kFront = 16;                 // bytes that show what kind of file it is

std::string reason() { return std::string(" (") + std::strerror(errno) + ")"; }

/// Where each tensor's values begin: larger items first, else in order, so that each offset is a multiple of its item.
std::vector<const StoredTensor*> data_order(const TensorFile& file) {
  std::vector<const StoredTensor*> order;
  for (const StoredTensor& tensor : file.tensors) order.push_back(&tensor);
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) { return size_of(a->type) > size_of(b->type); });
  return order;
}

std::string header_of(const TensorFile& file, const std::string& path) {
  std::map<const StoredTensor*, uint64_t> begin;
  uint64_t at = 0;
  for (const StoredTensor* tensor : data_order(file)) {
    begin[tensor] = at;
    at += tensor->bytes.size();
  }
  const auto text = [&](const std::string& s) {
    try {
      return nlohmann::json(s).dump();
    } catch (const nlohmann::json::exception&) {
      fail(kOp, path + ": names and metadata must be UTF-8", std::to_string(s.size()) + " bytes that are not");
    }
  };
  std::string out = "{";
  if (!file.metadata.empty()) {
    out += "\"__metadata__\":{";
    for (const auto& [key, value] : file.metadata) out += text(key) + ":" + text(value) + ",";
    out.back() = '}';
    out += ',';
  }
  for (const StoredTensor& tensor : file.tensors) {
    if (tensor.name == "__metadata__") fail(kOp, path + ": a tensor must have another name", tensor.name);
    const nlohmann::json shape = tensor.shape, offsets = {begin[&tensor], begin[&tensor] + tensor.bytes.size()};
    out += text(tensor.name) + ":{\"dtype\":\"" + name_of(tensor.type) + "\",\"shape\":" + shape.dump() +
           ",\"data_offsets\":" + offsets.dump() + "},";
  }
  if (out.size() > 1) out.pop_back();
  out += '}';
  out.append((8 - out.size() % 8) % 8, ' ');
  if (out.size() > kMaxHeader) fail(kOp, path + ": header must be at most 100000000 bytes", out.size());
  parse_safetensors_header(out, at, path);  // what is written can be read
  return out;
}

/// Refuses a file of another kind by its first bytes, before they are taken for a length.
void check_kind(std::string_view front, const std::string& path) {
  if (front.size() > sizeof(uint64_t) && front[sizeof(uint64_t)] == '{') return;
  const auto begins = [&](std::string_view with) { return front.starts_with(with); };
  const char* kind = begins("PK\x03\x04")                       ? "a zip archive, as torch.save and numpy.savez write it"
                     : begins("\x80\x02") || begins("\x80\x04") ? "a pickle"
                     : begins("\x93NUMPY")                      ? "an .npy file"
                     : begins("SATCHELP")                       ? "a packed tensor of satchel pack"
                     : begins("\x89HDF")                        ? "an HDF5 file"
                     : begins("\x1f\x8b")                       ? "a gzip file"
                     : front.empty()                            ? "an empty file"
                                                                : nullptr;
  fail(kOp, path + ": file must be a safetensors file (the length of its header in 8 bytes, then the header, which begins with '{')",
       kind != nullptr ? std::string(kind) : "the bytes " + printable(front));
}

}  // namespace

const StoredTensor* TensorFile::find(std::string_view name) const {
  const auto it = std::find_if(tensors.begin(), tensors.end(), [&](const StoredTensor& t) { return t.name == name; });
  return it == tensors.end() ? nullptr : &*it;
}

void write_safetensors(const std::string& path, const TensorFile& file) {
  check_replaceable(path, kOp);
  const std::string header = header_of(file, path);
  const uint64_t length = header.size();
  Replacement out(path, kOp);
  out.write(&length, sizeof length);
  out.write(header.data(), header.size());
  for (const StoredTensor* tensor : data_order(file)) out.write(tensor->bytes.data(), tensor->bytes.size());
  out.finish();
}

TensorFile read_safetensors(const std::string& path) {
  struct stat about {};
  if (::stat(path.c_str(), &about) != 0) fail(kOp, path + ": file must exist" + reason(), "'" + path + "'");
  if (!S_ISREG(about.st_mode)) fail(kOp, path + ": path must be a file", "'" + path + "'");
  Descriptor in(path, O_RDONLY | O_NONBLOCK);
  if (!in || ::fstat(in.get(), &about) != 0 || !S_ISREG(about.st_mode))
    fail(kOp, path + ": file must be readable" + reason(), "'" + path + "'");
  const auto bytes = static_cast<uint64_t>(about.st_size);
  uint64_t length = 0;
  const auto read = [&](void* to, size_t count, uint64_t place) {
    if (!in.read(to, count, place)) fail(kOp, path + ": file must be readable to its end" + reason(), "'" + path + "'");
  };
  std::string front(std::min<uint64_t>(bytes, kFront), '\0');
  read(front.data(), front.size(), 0);
  check_kind(front, path);
  std::memcpy(&length, front.data(), sizeof length);
  if (length > kMaxHeader) fail(kOp, path + ": header must be at most 100000000 bytes", length);
  if (length > bytes - sizeof length) fail(kOp, path + ": header must lie within the file's " + std::to_string(bytes) + " bytes", length);
  std::string json(length, '\0');
  read(json.data(), json.size(), sizeof length);
  const uint64_t data = sizeof length + length;
  StoredHeader header = parse_safetensors_header(json, bytes - data, path);
  TensorFile out;
  out.metadata = std::move(header.metadata);
  for (StoredEntry& entry : header.entries) {
    StoredTensor& tensor = out.tensors.emplace_back();
    tensor.name = std::move(entry.name);
    tensor.type = entry.type;
    tensor.shape = std::move(entry.shape);
    tensor.bytes.resize(entry.end - entry.begin);
    read(tensor.bytes.data(), tensor.bytes.size(), data + entry.begin);
  }
  return out;
}

}  // namespace satchel
