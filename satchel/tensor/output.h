// Where files are written. No torch and no std::filesystem: libtorch.so exports an older one. Private.
#pragma once

#include <sys/stat.h>

#include <string>

#include "satchel/core/error.h"

namespace satchel {

/// Throws unless `path` is free or a plain file. Outputs are renamed into place, which would replace a link (/dev/stdout is
/// one), a device or a pipe by a file.
inline void check_replaceable(const std::string& path, const char* op) {
  if (path.empty()) fail(op, "output must have a name", "''");
  struct stat about {};
  if (::lstat(path.c_str(), &about) == 0 && !S_ISREG(about.st_mode)) {
    fail(op, "output must be a plain file, where there is one already, and no link", "'" + path + "'");
  }
}

}  // namespace satchel
