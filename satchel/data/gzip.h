// Lines of a gzip file, unpacked as they are read. Untrusted: garbage, truncation and endless lines are refused. Private.
#pragma once

#include <zlib.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace satchel {

class GzipLines {
 public:
  explicit GzipLines(const std::string& path);
  ~GzipLines();
  GzipLines(const GzipLines&) = delete;
  GzipLines& operator=(const GzipLines&) = delete;

  /// The next line without its end, good until the next call; false after the last.
  bool next(std::string_view& line);
  /// `edge.csv.gz: line 17`, the line that came last.
  std::string field() const { return path_ + ": line " + std::to_string(number_); }
  int64_t number() const { return number_; }
  const std::string& path() const { return path_; }

 private:
  struct CloseFile {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };

  void unpack_more();

  std::string path_;
  std::unique_ptr<std::FILE, CloseFile> file_;
  z_stream stream_{};
  std::vector<unsigned char> packed_;
  std::vector<char> text_;  // unpacked and not yet handed out: begin_ … end_
  size_t begin_ = 0, end_ = 0;
  uint64_t taken_ = 0;  // packed bytes read from the file
  int64_t number_ = 0;
  bool member_done_ = false, done_ = false;
};

}  // namespace satchel
