#include "satchel/data/png.h"

#include <png.h>

#include <algorithm>
#include <array>
#include <csetjmp>
#include <cstdio>
#include <cstring>

#include "satchel/data/image_layouts.h"
#include "satchel/data/numbers.h"
#include "satchel/data/printable.h"

namespace satchel {
namespace {

constexpr std::array<uint8_t, 8> kSignature = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'};
constexpr uint64_t kMaxDeflateRatio = 1032;  // 258 bytes from two bits: deflate can do no better

/// What libpng's callbacks see. An error leaves libpng by longjmp, which runs no destructors: whatever owns memory lives here, outside
/// the frames that are jumped over.
class Reader {
 public:
  explicit Reader(std::span<const uint8_t> bytes) : bytes_(bytes) {
    png_ = png_create_read_struct(PNG_LIBPNG_VER_STRING, this, on_error, on_warning);
    info_ = png_ != nullptr ? png_create_info_struct(png_) : nullptr;
  }
  ~Reader() { png_destroy_read_struct(&png_, &info_, nullptr); }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  bool made() const { return info_ != nullptr; }
  const char* why() const { return why_.data(); }

  /// Sizes, kind and transformations; false with why() where libpng refuses.
  bool read_header() {
    if (setjmp(png_jmpbuf(png_)) != 0) return false;
    png_set_read_fn(png_, this, on_read);
    png_set_user_limits(png_, kMaxPixels, kMaxPixels);
    // Only what pixels are made of is looked at: text, profiles and gamma are passed over.
    png_set_keep_unknown_chunks(png_, PNG_HANDLE_CHUNK_NEVER, nullptr, -1);
    png_read_info(png_, info_);
    height = png_get_image_height(png_, info_);
    width = png_get_image_width(png_, info_);
    packed_bytes = static_cast<uint64_t>(png_get_rowbytes(png_, info_)) * height;
    png_set_expand(png_);
    png_set_scale_16(png_);
    png_set_gray_to_rgb(png_);
    png_set_strip_alpha(png_);
    passes_ = png_set_interlace_handling(png_);
    png_read_update_info(png_, info_);
    row_bytes = png_get_rowbytes(png_, info_);
    return true;
  }

  /// Rows of `mixed`, which has room for height × row_bytes, and the end of the file.
  bool read_rows(uint8_t* mixed) {
    if (setjmp(png_jmpbuf(png_)) != 0) return false;
    for (int pass = 0; pass < passes_; ++pass) {
      for (size_t row = 0; row < height; ++row) png_read_row(png_, mixed + row * row_bytes, nullptr);
    }
    png_read_end(png_, nullptr);
    return true;
  }

  uint64_t height = 0, width = 0, packed_bytes = 0;  // packed: before transformations, as deflate gives them
  size_t row_bytes = 0;

 private:
  static void on_error(png_structp png, png_const_charp text) {
    auto* self = static_cast<Reader*>(png_get_error_ptr(png));
    std::snprintf(self->why_.data(), self->why_.size(), "%s", text);
    png_longjmp(png, 1);
  }
  static void on_warning(png_structp, png_const_charp) {}  // of chunks that are not needed
  static void on_read(png_structp png, png_bytep out, size_t count) {
    auto* self = static_cast<Reader*>(png_get_io_ptr(png));
    if (count > self->bytes_.size() - self->at_) png_error(png, "its end too early");
    std::memcpy(out, self->bytes_.data() + self->at_, count);
    self->at_ += count;
  }

  std::span<const uint8_t> bytes_;
  size_t at_ = 0;
  png_structp png_ = nullptr;
  png_infop info_ = nullptr;
  int passes_ = 1;
  std::array<char, 128> why_{};
};

[[noreturn]] void refuse_png(const std::string& name, const char* why) { refuse(name, "must be a whole PNG file", why); }

}  // namespace

bool is_png(std::span<const uint8_t> bytes) {
  return bytes.size() >= kSignature.size() && std::equal(kSignature.begin(), kSignature.end(), bytes.begin());
}

Image decode_png(std::span<const uint8_t> bytes, const std::string& name) {
  if (!is_png(bytes)) {
    refuse(name, "must begin with the bytes of a PNG file, \\x89PNG",
           printable({reinterpret_cast<const char*>(bytes.data()), std::min<size_t>(bytes.size(), 8)}));
  }
  Reader reader(bytes);
  if (!reader.made()) fail("load", name + " must be decoded, which libpng refuses");
  if (!reader.read_header()) refuse_png(name, reader.why());
  const uint64_t values = reader.height * reader.width;
  const std::string size = std::to_string(reader.width) + " by " + std::to_string(reader.height);
  if (values > static_cast<uint64_t>(kMaxPixels)) refuse(name, "must have at most " + std::to_string(kMaxPixels) + " pixels", size);
  if (reader.packed_bytes / kMaxDeflateRatio > bytes.size())
    refuse(name, "must have a size that its " + std::to_string(bytes.size()) + " bytes can give", size);
  if (reader.row_bytes != reader.width * 3) refuse_png(name, "rows that are not red, green and blue");

  std::vector<uint8_t> mixed(values * 3);
  if (!reader.read_rows(mixed.data())) refuse_png(name, reader.why());
  Image out{3, static_cast<int64_t>(reader.height), static_cast<int64_t>(reader.width), std::vector<uint8_t>(values * 3)};
  for (size_t i = 0; i < values; ++i) {
    for (size_t c = 0; c < 3; ++c) out.pixels[c * values + i] = mixed[i * 3 + c];
  }
  return out;
}

}  // namespace satchel
