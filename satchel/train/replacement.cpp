#include "satchel/train/replacement.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "satchel/core/error.h"

namespace satchel {
namespace {

constexpr size_t kPiece = size_t{1} << 30;  // Linux moves less than 2^31 bytes at once
const time_t kBegan = ::time(nullptr);      // this process, or nearly

std::string reason() { return std::string(" (") + std::strerror(errno) + ")"; }

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash + 1);
}

std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "";
}

/// Takes ".N" off the end; none where there is no number.
std::optional<int64_t> last_number(std::string_view& text) {
  const size_t dot = text.rfind('.');
  if (dot == text.npos) return std::nullopt;
  int64_t number = 0;
  const char* end = text.data() + text.size();
  const auto [stop, code] = std::from_chars(text.data() + dot + 1, end, number);
  if (code != std::errc() || stop != end || dot + 1 == text.size()) return std::nullopt;
  text = text.substr(0, dot);
  return number;
}

/// Is it the temporary file of a process of this host that is no more? `prefix`: "FILE.tmp". In a container every process may have the same
/// number: a file from before this one began is not its own.
bool is_stale(int folder, const char* entry, const std::string& prefix, const std::string& host) {
  std::string_view name = entry;
  if (!name.starts_with(prefix + ".")) return false;
  const auto number = last_number(name), process = last_number(name);
  if (!number || !process || *process < 1 || *process > INT32_MAX) return false;
  if (name != prefix + "." + host && name != prefix) return false;  // without a host: as earlier versions name them
  struct stat about {};
  if (*process == ::getpid()) return ::fstatat(folder, entry, &about, AT_SYMLINK_NOFOLLOW) == 0 && about.st_mtime < kBegan;
  return ::kill(static_cast<pid_t>(*process), 0) != 0 && errno == ESRCH;
}

void remove_stale(const std::string& path) {
  const std::string folder = folder_of(path), prefix = path.substr(path.rfind('/') + 1) + ".tmp", host = host_name();
  const auto close = [](DIR* open) { ::closedir(open); };
  const std::unique_ptr<DIR, decltype(close)> open(::opendir(folder.c_str()), close);
  if (!open) return;
  while (const dirent* entry = ::readdir(open.get())) {
    if (is_stale(::dirfd(open.get()), entry->d_name, prefix, host)) ::unlinkat(::dirfd(open.get()), entry->d_name, 0);
  }
}

std::string free_name(const std::string& path) {
  const std::string start = path + ".tmp." + host_name() + "." + std::to_string(::getpid()) + ".";
  std::string name;
  struct stat about {};
  for (int i = 0; i < 1000; ++i) {
    name = start + std::to_string(i);
    if (::lstat(name.c_str(), &about) != 0) break;
  }
  return name;
}

}  // namespace

Descriptor::Descriptor(const std::string& path, int flags) : fd_(::open(path.c_str(), flags | O_CLOEXEC, 0666)) {}

bool Descriptor::close() { return fd_ < 0 || ::close(std::exchange(fd_, -1)) == 0; }

bool Descriptor::write(const void* data, size_t count) {
  const char* from = static_cast<const char*>(data);
  while (count > 0) {
    const ssize_t moved = ::write(fd_, from, std::min(count, kPiece));
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return false;
    from += moved;
    count -= static_cast<size_t>(moved);
  }
  return true;
}

bool Descriptor::read(void* data, size_t count, uint64_t place) {
  char* to = static_cast<char*>(data);
  while (count > 0) {
    const ssize_t moved = ::pread(fd_, to, std::min(count, kPiece), static_cast<off_t>(place));
    if (moved < 0 && errno == EINTR) continue;
    if (moved == 0) errno = ENODATA;  // the file became shorter
    if (moved <= 0) return false;
    to += moved;
    place += static_cast<uint64_t>(moved);
    count -= static_cast<size_t>(moved);
  }
  return true;
}

Replacement::Replacement(const std::string& path, const char* op)
    : op_(op), path_(path), temporary_((remove_stale(path), free_name(path))), out_(temporary_, O_WRONLY | O_CREAT | O_EXCL) {
  there_ = static_cast<bool>(out_);
  if (!there_) fail(op_, path_ + ": output must be writable" + reason(), "'" + path_ + "'");
}

Replacement::~Replacement() {
  if (there_) ::unlink(temporary_.c_str());
}

void Replacement::write(const void* data, size_t count) {
  if (!out_.write(data, count)) stop();
}

void Replacement::finish() {
  if (::fsync(out_.get()) != 0 || !out_.close() || std::rename(temporary_.c_str(), path_.c_str()) != 0) stop();
  there_ = false;
  // The new name reaches the disk too; some file systems cannot do that for a folder, and the file is whole either way.
  const Descriptor folder(folder_of(path_), O_RDONLY | O_DIRECTORY);
  if (folder) static_cast<void>(::fsync(folder.get()));
}

void Replacement::stop() const { fail(op_, path_ + ": output must be writable to its end" + reason(), "'" + path_ + "'"); }

}  // namespace satchel
