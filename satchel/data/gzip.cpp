#include "satchel/data/gzip.h"

#include <sys/stat.h>

#include <cstring>

#include "satchel/data/numbers.h"
#include "satchel/data/printable.h"

namespace satchel {
namespace {

constexpr size_t kChunk = size_t{256} * 1024;
constexpr size_t kMaxLine = size_t{16} * 1024 * 1024;  // a row of a million features
constexpr int kGzipOnly = 15 + 16;                     // zlib: largest window, gzip header and no other

}  // namespace

GzipLines::GzipLines(const std::string& path) : path_(path), packed_(kChunk), text_(kChunk) {
  struct stat about {};
  if (::stat(path.c_str(), &about) != 0) fail("load", "file must exist", path);
  if (!S_ISREG(about.st_mode)) fail("load", "path must be a file", path);
  file_.reset(std::fopen(path.c_str(), "rb"));
  if (!file_) fail("load", "file must be readable", path);
  if (inflateInit2(&stream_, kGzipOnly) != Z_OK) fail("load", path + " must be unpacked, which zlib refuses");
}

GzipLines::~GzipLines() { inflateEnd(&stream_); }

/// Appends at least one byte to text_, or sets done_.
void GzipLines::unpack_more() {
  if (end_ == text_.size()) {
    if (text_.size() >= kMaxLine) refuse(path_ + ": line " + std::to_string(number_ + 1), "must be at most 16 MiB", "more");
    text_.resize(text_.size() * 2);
  }
  const size_t had = end_;
  while (end_ == had) {
    if (stream_.avail_in == 0) {
      stream_.next_in = packed_.data();
      stream_.avail_in = static_cast<uInt>(std::fread(packed_.data(), 1, packed_.size(), file_.get()));
      const std::string_view front(reinterpret_cast<const char*>(packed_.data()), stream_.avail_in);
      if (taken_ == 0 && front.size() >= 2 && !front.starts_with("\x1f\x8b"))
        refuse(path_, "must be a gzip file, which begins with \\x1f\\x8b", printable(front));
      taken_ += stream_.avail_in;
    }
    if (stream_.avail_in == 0) {
      if (std::ferror(file_.get()) != 0) fail("load", "file must be readable to its end", path_);
      if (!member_done_) refuse(path_, "must be a whole gzip file", "its end after " + std::to_string(taken_) + " bytes");
      done_ = true;
      return;
    }
    if (member_done_) inflateReset(&stream_);  // gzip files may be joined
    stream_.next_out = reinterpret_cast<unsigned char*>(text_.data()) + end_;
    stream_.avail_out = static_cast<uInt>(text_.size() - end_);
    const int code = inflate(&stream_, Z_NO_FLUSH);
    end_ = text_.size() - stream_.avail_out;
    member_done_ = code == Z_STREAM_END;
    if (code != Z_OK && code != Z_STREAM_END && code != Z_BUF_ERROR) {
      refuse(path_, "must be a whole gzip file", "damage at byte " + std::to_string(taken_ - stream_.avail_in));
    }
  }
}

bool GzipLines::next(std::string_view& line) {
  size_t searched = 0;
  for (;;) {
    const size_t length = end_ - begin_ - searched;
    const void* found = length > 0 ? std::memchr(text_.data() + begin_ + searched, '\n', length) : nullptr;
    if (found != nullptr || done_) {
      const size_t stop = found != nullptr ? static_cast<size_t>(static_cast<const char*>(found) - text_.data()) : end_;
      if (found == nullptr && stop == begin_) return false;
      line = std::string_view(text_.data() + begin_, stop - begin_);
      if (line.ends_with('\r')) line.remove_suffix(1);
      begin_ = found != nullptr ? stop + 1 : end_;
      ++number_;
      return true;
    }
    searched = end_ - begin_;
    if (begin_ > 0) {
      std::memmove(text_.data(), text_.data() + begin_, searched);
      begin_ = 0;
      end_ = searched;
    }
    unpack_more();
  }
}

}  // namespace satchel
