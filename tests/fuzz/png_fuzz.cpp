#include <png.h>
#include <zlib.h>

#include "satchel/data/png.h"
#include "tests/fuzz/fuzz.h"

namespace satchel::fuzz {
namespace {

uint32_t number(std::string_view at) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) value = value << 8 | static_cast<uint8_t>(at[i]);
  return value;
}

/// The chunks with right checksums: a fuzzer does not guess them. Every second input stays as it is.
std::string repaired(std::string_view input) {
  std::string out(input);
  if (input.empty() || (input.back() & 1) != 0) return out;
  for (size_t at = 8; at + 12 <= out.size();) {
    const size_t length = number(std::string_view(out).substr(at));
    if (length > out.size() - at - 12) break;
    const uint32_t crc =
        static_cast<uint32_t>(crc32(0, reinterpret_cast<const Bytef*>(out.data()) + at + 4, static_cast<uInt>(length + 4)));
    for (size_t i = 0; i < 4; ++i) out[at + 8 + length + i] = static_cast<char>(crc >> (24 - 8 * i));
    at += length + 12;
  }
  return out;
}

std::string png(int type, int depth, int interlace) {
  std::string out;
  png_structp png = png_create_write_struct(PNG_LIBPNG_VER_STRING, nullptr, nullptr, nullptr);
  png_infop info = png_create_info_struct(png);
  const auto write = [](png_structp p, png_bytep bytes, size_t count) {
    static_cast<std::string*>(png_get_io_ptr(p))->append(reinterpret_cast<const char*>(bytes), count);
  };
  png_set_write_fn(png, &out, write, nullptr);
  png_set_IHDR(png, info, 5, 4, depth, type, interlace, PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
  const png_color palette[2] = {{1, 2, 3}, {200, 100, 50}};
  const png_byte clear[2] = {0, 255};
  if (type == PNG_COLOR_TYPE_PALETTE) {
    png_set_PLTE(png, info, palette, 2);
    png_set_tRNS(png, info, clear, 2, nullptr);
  }
  png_write_info(png, info);
  std::string row(64, '\0');
  const int passes = png_set_interlace_handling(png);
  for (int i = 0; i < passes * 4; ++i) png_write_row(png, reinterpret_cast<png_const_bytep>(row.data()));
  png_write_end(png, info);
  png_destroy_write_struct(&png, &info);
  return out;
}

}  // namespace

void run(std::string_view input) {
  // Larger images are only slow: width and height are the first numbers of the first chunk.
  if (input.size() >= 24 && uint64_t{number(input.substr(16))} * number(input.substr(20)) > uint64_t{1} << 20) return;
  if (!input.empty() && (input.back() & 4) != 0) {  // as a mask
    const Mask mask = decode_png_mask(bytes_of(repaired(input)), "a.png");
    require(static_cast<int64_t>(mask.classes.size()) == mask.height * mask.width, "masks have their sizes");
    return;
  }
  const Image image = decode_png(bytes_of(repaired(input)), "a.png");
  require(image.channels == 3 && static_cast<int64_t>(image.pixels.size()) == 3 * image.height * image.width, "images have their sizes");
}

std::vector<std::string> seeds() {
  std::vector<std::string> out;
  for (const auto& [type, depth] : {std::pair{PNG_COLOR_TYPE_GRAY, 1},
                                    {PNG_COLOR_TYPE_GRAY, 8},
                                    {PNG_COLOR_TYPE_GRAY, 16},
                                    {PNG_COLOR_TYPE_GRAY_ALPHA, 8},
                                    {PNG_COLOR_TYPE_RGB, 8},
                                    {PNG_COLOR_TYPE_RGB, 16},
                                    {PNG_COLOR_TYPE_RGB_ALPHA, 8},
                                    {PNG_COLOR_TYPE_PALETTE, 1},
                                    {PNG_COLOR_TYPE_PALETTE, 8}}) {
    for (const int interlace : {PNG_INTERLACE_NONE, PNG_INTERLACE_ADAM7}) out.push_back(png(type, depth, interlace));
    out.push_back(out.back() + '\4');
  }
  return out;
}

}  // namespace satchel::fuzz
