// Where commands write: what they refuse to write over, and "-" for stdout.
#pragma once

#include <cstdio>
#include <string>

namespace satchel::tool {

/// Throws unless `path` can become a file: its folder is there and can be written to, and what stands there already, if
/// anything, is a plain file and no link.
void check_output(const std::string& path, const char* op);

/// Throws UsageError where two names, however spelled and linked, are of one file, which may not be there yet.
void check_apart(const char* op, const char* name, const std::string& path, const char* other_name, const std::string& other);

/// Throws UsageError where an output is the file of --data or lies in its folder. "-" and '' are no files.
void check_not_data(const char* op, const char* name, const std::string& path, const std::string& data);

/// Throws UsageError where a checkpoint would replace a file that neither --resume nor --overwrite speaks of.
void check_new_checkpoint(const std::string& path, bool resume, bool overwrite);

/// A file that a command writes under its own name, or for "-" a temporary one, whose bytes finish() copies to stdout.
class OutputFile {
 public:
  /// Throws as check_output() does, and where "-" would send bytes to a terminal.
  OutputFile(const std::string& name, const char* op);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  /// What to write to.
  const std::string& path() const { return path_; }
  /// Where lines about the file go: not among its bytes.
  FILE* lines() const { return folder_.empty() ? stdout : stderr; }
  void finish();

 private:
  const char* op_;
  std::string folder_, path_;  // folder: of the temporary file, if any
};

}  // namespace satchel::tool
