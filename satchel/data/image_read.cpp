// Images in files: one of them, and all that cannot be read.
#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

#include "satchel/core/error.h"
#include "satchel/data/image_layouts.h"
#include "satchel/data/jpeg.h"
#include "satchel/data/numbers.h"
#include "satchel/data/png.h"
#include "satchel/data/printable.h"

namespace satchel {
namespace {

constexpr uint64_t kMaxFile = uint64_t{1} << 30;

/// Why each image cannot be read; empty where it can.
std::vector<std::string> reasons(const ImageData& data, int threads) {
  std::vector<std::string> why(data.paths.size());
  std::atomic<size_t> next{0};
  std::mutex mutex;
  std::exception_ptr failed;
  const auto work = [&] {
    for (size_t i = next++; i < why.size(); i = next++) {
      try {
        read_image(data.paths[i]);
      } catch (const Error& e) {
        why[i] = e.what();
      } catch (...) {  // no memory: nothing is said of the image
        const std::lock_guard lock(mutex);
        failed = std::current_exception();
        next = why.size();
        return;
      }
    }
  };
  {
    std::vector<std::jthread> others;
    try {
      for (int i = 1; i < threads; ++i) others.emplace_back(work);
    } catch (const std::system_error&) {  // fewer will do
    }
    work();
  }
  if (failed) std::rethrow_exception(failed);
  return why;
}

/// Appends the reasons to `all`.
void drop_broken(ImageData& data, int threads, std::vector<std::string>& all) {
  std::vector<std::string> why = reasons(data, threads);
  size_t kept = 0;
  for (size_t i = 0; i < why.size(); ++i) {
    if (!why[i].empty()) {
      all.push_back(std::move(why[i]));
      continue;
    }
    if (kept != i) data.paths[kept] = std::move(data.paths[i]);
    data.labels[kept++] = data.labels[i];
  }
  data.paths.resize(kept);
  data.labels.resize(kept);
}

}  // namespace

Image read_image(const std::string& path) {
  const std::vector<uint8_t> bytes = read_file(path, kMaxFile);
  if (is_png(bytes)) return decode_png(bytes, path);
  if (bytes.size() >= 2 && bytes[0] == 0xff && bytes[1] == 0xd8) return decode_jpeg(bytes, path);
  refuse(path, "must be a JPEG file, which begins with \\xff\\xd8, or a PNG file, which begins with \\x89PNG",
         printable({reinterpret_cast<const char*>(bytes.data()), std::min<size_t>(bytes.size(), 8)}));
}

std::vector<std::string> drop_broken(ImageSets& sets, int threads) {
  if (threads < 1) threads = std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, 16);
  std::vector<std::string> why;
  for (ImageData* data : {&sets.train, &sets.test}) {
    if (!data->in_files()) continue;
    check_images(*data, "load");
    drop_broken(*data, threads, why);
    if (data->labels.empty())
      fail("load", data->name + " must have images to " + (data == &sets.train ? "train" : "test") + " on that can be read",
           std::to_string(why.size()) + " broken ones, the first: " + why.front());
  }
  return why;
}

}  // namespace satchel
