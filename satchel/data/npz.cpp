#include "satchel/data/npz.h"

#include <sys/stat.h>
#include <zip.h>

#include <algorithm>
#include <fstream>
#include <span>

#include "satchel/data/printable.h"

namespace satchel {
namespace {

constexpr std::string_view kSuffix = ".npy";
constexpr uint64_t kMaxFront = 12 + 64 * 1024;  // preamble and header of an .npy file
constexpr uint64_t kMaxDeflateRatio = 1032;     // 258 bytes from two bits: deflate can do no better
constexpr zip_int64_t kMaxEntries = 100000;

}  // namespace

void Npz::Close::operator()(zip* archive) const { zip_discard(archive); }

/// One entry being unpacked; libzip checks the CRC when the end is read.
class Npz::Stream {
 public:
  Stream(zip* archive, const Entry& entry, const std::string& field) : field_(field), file_(open(archive, entry, field)) {}

  void fill(std::span<std::byte> out) {
    while (!out.empty()) {
      const zip_int64_t got = zip_fread(file_.get(), out.data(), std::min<uint64_t>(out.size(), 1u << 30));
      if (got <= 0) damaged(got);
      out = out.subspan(static_cast<size_t>(got));
      read_ += static_cast<uint64_t>(got);
    }
  }
  void expect_end() {
    std::byte more{};
    const zip_int64_t got = zip_fread(file_.get(), &more, 1);
    if (got > 0) refuse(field_, "must unpack to " + std::to_string(read_) + " bytes, as declared", "more");
    if (got < 0) damaged(got);
  }

 private:
  struct CloseFile {
    void operator()(zip_file_t* file) const { zip_fclose(file); }
  };
  using File = std::unique_ptr<zip_file_t, CloseFile>;

  static File open(zip* archive, const Entry& entry, const std::string& field) {
    if (entry.encryption != ZIP_EM_NONE) refuse(field, "must not be encrypted", "zip encryption " + std::to_string(entry.encryption));
    if (entry.method != ZIP_CM_STORE && entry.method != ZIP_CM_DEFLATE) {
      refuse(field, "must be stored or deflated", "zip method " + std::to_string(entry.method));
    }
    const uint64_t ratio = entry.method == ZIP_CM_DEFLATE ? kMaxDeflateRatio : 1;
    if (entry.bytes / ratio > entry.packed_bytes) {
      refuse(field, "must have a size that its " + std::to_string(entry.packed_bytes) + " packed bytes can give",
             std::to_string(entry.bytes) + " bytes declared");
    }
    File file(zip_fopen_index(archive, entry.index, 0));
    if (!file) refuse(field, "must be where the archive's directory says", "damage");
    return file;
  }
  [[noreturn]] void damaged(zip_int64_t got) {
    refuse(field_, "must unpack to the size and checksum it declares",
           (got < 0 ? std::string("damage") : std::string("its end")) + " after " + std::to_string(read_) + " bytes");
  }

  const std::string& field_;
  File file_;
  uint64_t read_ = 0;
};

Npz::Npz(const std::string& path) : path_(path) {
  struct stat about {};
  if (::stat(path.c_str(), &about) != 0) fail("load", "file must exist", path);
  if (!S_ISREG(about.st_mode)) fail("load", "path must be a file", path);
  int code = 0;
  archive_.reset(zip_open(path.c_str(), ZIP_RDONLY | ZIP_CHECKCONS, &code));
  if (!archive_) {
    std::string front(8, '\0');
    std::ifstream file(path, std::ios::binary);
    file.read(front.data(), static_cast<std::streamsize>(front.size()));
    front.resize(static_cast<size_t>(file.gcount()));
    if (!front.starts_with("PK")) refuse(path, "must be an npz file, a zip archive, which begins with PK", printable(front));
    refuse(path, "must be a whole npz file (a zip archive)",
           code == ZIP_ER_NOZIP ? "no directory at its end" : "a directory that does not fit its entries");
  }
  const zip_int64_t count = zip_get_num_entries(archive_.get(), 0);
  if (count > kMaxEntries) refuse(path, "must have at most " + std::to_string(kMaxEntries) + " entries", std::to_string(count));
  for (zip_int64_t i = 0; i < count; ++i) {
    zip_stat_t about_entry;
    constexpr zip_uint64_t kNeeded = ZIP_STAT_NAME | ZIP_STAT_SIZE | ZIP_STAT_COMP_SIZE | ZIP_STAT_COMP_METHOD | ZIP_STAT_ENCRYPTION_METHOD;
    const auto index = static_cast<zip_uint64_t>(i);
    if (zip_stat_index(archive_.get(), index, 0, &about_entry) != 0 || (about_entry.valid & kNeeded) != kNeeded) {
      refuse(path, "must have a readable directory", "damage at entry " + std::to_string(i));
    }
    std::string name = about_entry.name;
    if (!name.ends_with(kSuffix)) continue;
    name.resize(name.size() - kSuffix.size());
    const Entry entry{index, about_entry.size, about_entry.comp_size, about_entry.comp_method, about_entry.encryption_method};
    if (!entries_.emplace(name, entry).second) refuse(path, "must have an array once", printable(name) + " twice");
  }
}

std::string Npz::names() const {
  std::string out;
  size_t listed = 0;
  for (const auto& [name, entry] : entries_) {
    if (++listed > 16) return out + ", … (" + std::to_string(entries_.size()) + " in all)";
    out += (out.empty() ? "" : ", ") + printable(name);
  }
  return out.empty() ? "no arrays" : out;
}

const Npz::Entry& Npz::entry(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) refuse(field(name), "must be there", names());
  return found->second;
}

NpyHeader Npz::header(const std::string& name) const {
  const Entry& of = entry(name);
  const std::string place = field(name);
  std::vector<std::byte> front(std::min(of.bytes, kMaxFront));
  Stream(archive_.get(), of, place).fill(front);
  return parse_npy_header(front, of.bytes, place, "load");
}

NpyArray Npz::array(const std::string& name, std::initializer_list<int64_t> shape) const {
  const Entry& of = entry(name);
  const std::string place = field(name);
  Stream stream(archive_.get(), of, place);
  std::vector<std::byte> front(std::min(of.bytes, kMaxFront));
  stream.fill(front);
  NpyArray array;
  static_cast<NpyHeader&>(array) = parse_npy_header(front, of.bytes, place, "load");
  check_shape(array, shape, place);
  check_memory(of.bytes, place);
  array.data.assign(front.begin() + array.data_offset, front.end());
  const size_t had = array.data.size();
  array.data.resize(of.bytes - static_cast<uint64_t>(array.data_offset));
  stream.fill(std::span(array.data).subspan(had));
  stream.expect_end();
  return array;
}

std::vector<int64_t> Npz::integers(const std::string& name, std::initializer_list<int64_t> shape) const {
  return integers_of(array(name, shape), field(name));
}

std::vector<float> Npz::floats(const std::string& name, std::initializer_list<int64_t> shape) const {
  return floats_of(array(name, shape), field(name));
}

std::string Npz::text(const std::string& name) const {
  const Entry& of = entry(name);
  const std::string place = field(name);
  if (of.bytes > kMaxFront) refuse(place, "must be a short text", std::to_string(of.bytes) + " bytes");
  std::vector<std::byte> bytes(of.bytes);
  Stream stream(archive_.get(), of, place);
  stream.fill(bytes);
  stream.expect_end();
  std::string all(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  all.erase(0, all.rfind('\n') + 1);  // the header ends its line; |S3 and <U3 then differ by NULs only
  std::erase(all, '\0');
  return all.substr(0, 64);
}

}  // namespace satchel
