#include "satchel/data/jpeg.h"

#include <turbojpeg.h>

#include <algorithm>
#include <memory>
#include <type_traits>

#include "satchel/data/image_layouts.h"
#include "satchel/data/numbers.h"
#include "satchel/data/printable.h"

namespace satchel {
namespace {

struct Destroy {
  void operator()(void* handle) const { tjDestroy(handle); }
};
using Handle = std::unique_ptr<std::remove_pointer_t<tjhandle>, Destroy>;

[[noreturn]] void refuse_jpeg(const std::string& name, const Handle& handle) {
  refuse(name, "must be a whole JPEG file", tjGetErrorStr2(handle.get()));
}

/// Interleaved values of the file's own kind to planes of red, green and blue.
void spread(const std::vector<uint8_t>& mixed, bool cmyk, Image& out) {
  const auto values = static_cast<size_t>(out.height * out.width);
  uint8_t *red = out.pixels.data(), *green = red + values, *blue = green + values;
  const auto product = [](uint32_t ink, uint32_t black) { return static_cast<uint8_t>((ink * black + 127) / 255); };
  for (size_t i = 0; i < values; ++i) {
    const uint8_t* p = mixed.data() + i * (cmyk ? 4 : 3);
    red[i] = cmyk ? product(p[0], p[3]) : p[0];
    green[i] = cmyk ? product(p[1], p[3]) : p[1];
    blue[i] = cmyk ? product(p[2], p[3]) : p[2];
  }
}

}  // namespace

Image decode_jpeg(std::span<const uint8_t> bytes, const std::string& name) {
  if (bytes.size() < 2 || bytes[0] != 0xff || bytes[1] != 0xd8) {
    refuse(name, "must begin with the bytes of a JPEG file, \\xff\\xd8",
           printable({reinterpret_cast<const char*>(bytes.data()), std::min<size_t>(bytes.size(), 8)}));
  }
  const Handle handle(tjInitDecompress());
  if (!handle) fail("load", name + " must be decoded, which libturbojpeg refuses");
  int width = 0, height = 0, subsampling = 0, colours = 0;
  if (tjDecompressHeader3(handle.get(), bytes.data(), bytes.size(), &width, &height, &subsampling, &colours) != 0)
    refuse_jpeg(name, handle);
  const std::string size = std::to_string(width) + " by " + std::to_string(height);
  if (width < 1 || height < 1) refuse(name, "must be a whole JPEG file", "no image");
  if (int64_t{width} * height > kMaxPixels) refuse(name, "must have at most " + std::to_string(kMaxPixels) + " pixels", size);
  const bool cmyk = colours == TJCS_CMYK || colours == TJCS_YCCK;
  const int64_t values = int64_t{width} * height;
  std::vector<uint8_t> mixed(static_cast<size_t>(values * (cmyk ? 4 : 3)));
  // Scans are limited too: thousands of empty ones make a small file take minutes.
  const int flags = TJFLAG_STOPONWARNING | TJFLAG_LIMITSCANS;
  if (tjDecompress2(handle.get(), bytes.data(), bytes.size(), mixed.data(), width, 0, height, cmyk ? TJPF_CMYK : TJPF_RGB, flags) != 0) {
    refuse_jpeg(name, handle);
  }
  Image out{3, height, width, std::vector<uint8_t>(static_cast<size_t>(values * 3))};
  spread(mixed, cmyk, out);
  return out;
}

}  // namespace satchel
