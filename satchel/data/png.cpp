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
  enum class As { colours, numbers };  // numbers: palette indices and grey values as they are

  explicit Reader(std::span<const uint8_t> bytes, As as = As::colours) : bytes_(bytes), as_(as) {
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
    bits = png_get_bit_depth(png_, info_);
    colour_type = png_get_color_type(png_, info_);
    if (as_ == As::numbers) {
      png_set_packing(png_);
    } else {
      png_set_expand(png_);
      png_set_scale_16(png_);
      png_set_gray_to_rgb(png_);
      png_set_strip_alpha(png_);
    }
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
  int bits = 0, colour_type = 0;

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
  As as_;
  size_t at_ = 0;
  png_structp png_ = nullptr;
  png_infop info_ = nullptr;
  int passes_ = 1;
  std::array<char, 128> why_{};
};

[[noreturn]] void refuse_png(const std::string& name, const char* why) { refuse(name, "must be a whole PNG file", why); }

void check_signature(std::span<const uint8_t> bytes, const std::string& name) {
  if (is_png(bytes)) return;
  refuse(name, "must begin with the bytes of a PNG file, \\x89PNG",
         printable({reinterpret_cast<const char*>(bytes.data()), std::min<size_t>(bytes.size(), 8)}));
}

/// Reads the header and checks that a file of so many bytes can hold what it says.
void begin(Reader& reader, std::span<const uint8_t> bytes, const std::string& name) {
  if (!reader.made()) fail("load", name + " must be decoded, which libpng refuses");
  if (!reader.read_header()) refuse_png(name, reader.why());
  const std::string size = std::to_string(reader.width) + " by " + std::to_string(reader.height);
  if (reader.height * reader.width > static_cast<uint64_t>(kMaxPixels))
    refuse(name, "must have at most " + std::to_string(kMaxPixels) + " pixels", size);
  if (reader.packed_bytes / kMaxDeflateRatio > bytes.size())
    refuse(name, "must have a size that its " + std::to_string(bytes.size()) + " bytes can give", size);
}

/// libpng's writer, as Reader: what owns memory lives here, outside the frames that an error jumps over.
class Writer {
 public:
  Writer() {
    png_ = png_create_write_struct(PNG_LIBPNG_VER_STRING, nullptr, nullptr, nullptr);
    info_ = png_ != nullptr ? png_create_info_struct(png_) : nullptr;
  }
  ~Writer() { png_destroy_write_struct(&png_, &info_); }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  bool write(const Mask& mask, const std::array<png_color, 256>& palette) {
    if (info_ == nullptr || setjmp(png_jmpbuf(png_)) != 0) return false;
    png_set_write_fn(png_, this, on_write, nullptr);
    png_set_IHDR(png_, info_, static_cast<png_uint_32>(mask.width), static_cast<png_uint_32>(mask.height), 8, PNG_COLOR_TYPE_PALETTE,
                 PNG_INTERLACE_NONE, PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
    png_set_PLTE(png_, info_, palette.data(), static_cast<int>(palette.size()));
    png_write_info(png_, info_);
    for (int64_t y = 0; y < mask.height; ++y) png_write_row(png_, mask.classes.data() + y * mask.width);
    png_write_end(png_, nullptr);
    return !failed_;
  }

  std::vector<uint8_t> bytes;

 private:
  static void on_write(png_structp png, png_bytep data, size_t count) {
    auto* self = static_cast<Writer*>(png_get_io_ptr(png));
    try {
      self->bytes.insert(self->bytes.end(), data, data + count);
    } catch (...) {  // no memory: no exception may pass through libpng
      self->failed_ = true;
    }
  }

  png_structp png_ = nullptr;
  png_infop info_ = nullptr;
  bool failed_ = false;
};

/// Pascal VOC's: three bits of the number at a time, to red, green and blue from the highest bit down.
std::array<png_color, 256> voc_palette() {
  std::array<png_color, 256> palette{};
  for (unsigned number = 0; number < 256; ++number) {
    png_color& colour = palette[number];
    for (unsigned bit = 0; bit < 8; ++bit) {
      const unsigned three = number >> (3 * bit);
      const auto place = [&](unsigned of) { return static_cast<png_byte>((three >> of & 1) << (7 - bit)); };
      if (3 * bit >= 8) break;
      colour.red |= place(0);
      colour.green |= place(1);
      colour.blue |= place(2);
    }
  }
  return palette;
}

}  // namespace

bool is_png(std::span<const uint8_t> bytes) {
  return bytes.size() >= kSignature.size() && std::equal(kSignature.begin(), kSignature.end(), bytes.begin());
}

Image decode_png(std::span<const uint8_t> bytes, const std::string& name) {
  check_signature(bytes, name);
  Reader reader(bytes);
  begin(reader, bytes, name);
  const uint64_t values = reader.height * reader.width;
  if (reader.row_bytes != reader.width * 3) refuse_png(name, "rows that are not red, green and blue");

  std::vector<uint8_t> mixed(values * 3);
  if (!reader.read_rows(mixed.data())) refuse_png(name, reader.why());
  Image out{3, static_cast<int64_t>(reader.height), static_cast<int64_t>(reader.width), std::vector<uint8_t>(values * 3)};
  for (size_t i = 0; i < values; ++i) {
    for (size_t c = 0; c < 3; ++c) out.pixels[c * values + i] = mixed[i * 3 + c];
  }
  return out;
}

Mask decode_png_mask(std::span<const uint8_t> bytes, const std::string& name) {
  check_signature(bytes, name);
  Reader reader(bytes, Reader::As::numbers);
  begin(reader, bytes, name);
  const bool grey = reader.colour_type == PNG_COLOR_TYPE_GRAY, palette = reader.colour_type == PNG_COLOR_TYPE_PALETTE;
  if (!(grey || palette) || reader.bits > 8) {
    refuse(name, "must be a mask: a PNG file of palette indices or of grey values of at most 8 bits",
           grey ? std::to_string(reader.bits) + " bits" : "colours");
  }
  if (reader.row_bytes != reader.width) refuse_png(name, "rows that are not a byte a pixel");
  Mask mask{static_cast<int64_t>(reader.height), static_cast<int64_t>(reader.width), std::vector<uint8_t>(reader.height * reader.width)};
  if (!reader.read_rows(mask.classes.data())) refuse_png(name, reader.why());
  return mask;
}

std::vector<uint8_t> encode_png_mask(const Mask& mask) {
  if (mask.height < 1 || mask.width < 1 || mask.height * mask.width != static_cast<int64_t>(mask.classes.size()))
    fail("png", "a mask must have height × width numbers", mask.classes.size());
  Writer writer;
  if (!writer.write(mask, voc_palette())) fail("png", "a mask must be encoded, which libpng refuses");
  return std::move(writer.bytes);
}

}  // namespace satchel
