#include <turbojpeg.h>

#include "satchel/data/jpeg.h"
#include "tests/fuzz/fuzz.h"

namespace satchel::fuzz {

namespace {

/// Larger ones are only slow.
bool is_small(std::string_view input) {
  tjhandle handle = tjInitDecompress();
  int width = 0, height = 0, subsampling = 0, colours = 0;
  const auto bytes = bytes_of(input);
  tjDecompressHeader3(handle, bytes.data(), bytes.size(), &width, &height, &subsampling, &colours);
  tjDestroy(handle);
  return int64_t{width} * height <= int64_t{1} << 20;
}

}  // namespace

void run(std::string_view input) {
  if (!is_small(input)) return;
  const Image image = decode_jpeg(bytes_of(input), "a.jpg");
  require(image.channels == 3 && static_cast<int64_t>(image.pixels.size()) == 3 * image.height * image.width, "images have their sizes");
}

std::vector<std::string> seeds() {
  std::vector<std::string> out;
  const std::vector<uint8_t> mixed(24 * 24 * 4, 100);
  for (const int flags : {0, TJFLAG_PROGRESSIVE}) {
    for (const auto& [format, sampling] :
         {std::pair{TJPF_RGB, TJSAMP_444}, {TJPF_RGB, TJSAMP_420}, {TJPF_GRAY, TJSAMP_GRAY}, {TJPF_CMYK, TJSAMP_444}}) {
      tjhandle handle = tjInitCompress();
      unsigned char* bytes = nullptr;
      unsigned long length = 0;
      tjCompress2(handle, mixed.data(), 24, 0, 24, format, &bytes, &length, sampling, 80, flags);
      out.emplace_back(reinterpret_cast<const char*>(bytes), length);
      tjFree(bytes);
      tjDestroy(handle);
    }
  }
  return out;
}

}  // namespace satchel::fuzz
