#include <gtest/gtest.h>
#include <png.h>

#include <random>

#include "satchel/data/png.h"
#include "tests/data/image_files.h"
#include "tests/support.h"

namespace satchel {
namespace {

using namespace testing_files;

constexpr int kHeight = 5, kWidth = 7;

struct Kind {
  int type, depth, channels;  // channels: values a pixel has in the file
};
constexpr Kind kKinds[] = {{PNG_COLOR_TYPE_GRAY, 1, 1},        {PNG_COLOR_TYPE_GRAY, 2, 1},       {PNG_COLOR_TYPE_GRAY, 4, 1},
                           {PNG_COLOR_TYPE_GRAY, 8, 1},        {PNG_COLOR_TYPE_GRAY, 16, 1},      {PNG_COLOR_TYPE_GRAY_ALPHA, 8, 2},
                           {PNG_COLOR_TYPE_GRAY_ALPHA, 16, 2}, {PNG_COLOR_TYPE_RGB, 8, 3},        {PNG_COLOR_TYPE_RGB, 16, 3},
                           {PNG_COLOR_TYPE_RGB_ALPHA, 8, 4},   {PNG_COLOR_TYPE_RGB_ALPHA, 16, 4}, {PNG_COLOR_TYPE_PALETTE, 2, 1},
                           {PNG_COLOR_TYPE_PALETTE, 8, 1}};
const std::vector<png_color> kPalette = {{10, 20, 30}, {0, 255, 1}, {200, 100, 50}, {7, 7, 7}};

/// Value `c` of pixel i, before packing.
uint32_t value_of(const Kind& kind, int i, int c) {
  const uint32_t most = (1u << kind.depth) - 1;
  if (kind.type == PNG_COLOR_TYPE_PALETTE) return static_cast<uint32_t>(i) % 4;
  return (static_cast<uint32_t>(i) * 7919u + static_cast<uint32_t>(c) * 104729u) * 2654435761u >> 5 & most;
}

std::vector<uint8_t> row_of(const Kind& kind, int row) {
  std::vector<uint8_t> out(static_cast<size_t>(kWidth * kind.channels * kind.depth + 7) / 8);
  for (int x = 0; x < kWidth; ++x) {
    for (int c = 0; c < kind.channels; ++c) {
      const uint32_t value = value_of(kind, row * kWidth + x, c);
      const int at = x * kind.channels + c;
      if (kind.depth == 16) {
        out[static_cast<size_t>(2 * at)] = static_cast<uint8_t>(value >> 8);
        out[static_cast<size_t>(2 * at + 1)] = static_cast<uint8_t>(value);
      } else {
        const int bit = at * kind.depth;
        out[static_cast<size_t>(bit / 8)] |= static_cast<uint8_t>(value << (8 - kind.depth - bit % 8));
      }
    }
  }
  return out;
}

/// A file of that kind; gamma and a transparent colour are in it, which must change nothing.
std::string png(const Kind& kind, bool interlaced) {
  std::string out;
  png_structp png = png_create_write_struct(PNG_LIBPNG_VER_STRING, nullptr, nullptr, nullptr);
  png_infop info = png_create_info_struct(png);
  const auto write = [](png_structp p, png_bytep bytes, size_t count) {
    static_cast<std::string*>(png_get_io_ptr(p))->append(reinterpret_cast<const char*>(bytes), count);
  };
  png_set_write_fn(png, &out, write, nullptr);
  png_set_IHDR(png, info, kWidth, kHeight, kind.depth, kind.type, interlaced ? PNG_INTERLACE_ADAM7 : PNG_INTERLACE_NONE,
               PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
  png_set_gAMA(png, info, 0.2);
  const png_byte clear[2] = {0, 128};
  png_color_16 colour{};
  if (kind.type == PNG_COLOR_TYPE_PALETTE) {
    png_set_PLTE(png, info, kPalette.data(), static_cast<int>(kPalette.size()));
    png_set_tRNS(png, info, clear, 2, nullptr);
  } else if ((kind.type & PNG_COLOR_MASK_ALPHA) == 0) {
    png_set_tRNS(png, info, nullptr, 0, &colour);
  }
  png_write_info(png, info);
  std::vector<std::vector<uint8_t>> rows;
  for (int row = 0; row < kHeight; ++row) rows.push_back(row_of(kind, row));
  for (int pass = png_set_interlace_handling(png); pass > 0; --pass) {
    for (const std::vector<uint8_t>& row : rows) png_write_row(png, row.data());
  }
  png_write_end(png, info);
  png_destroy_write_struct(&png, &info);
  return out;
}

/// What channel c of pixel i must become: grey and opacity by the kind, 1 to 4 bits stretched to 0 … 255, 16 bits rounded.
int wanted(const Kind& kind, int i, int c) {
  if (kind.type == PNG_COLOR_TYPE_PALETTE) {
    const png_color& colour = kPalette[value_of(kind, i, 0)];
    return c == 0 ? colour.red : c == 1 ? colour.green : colour.blue;
  }
  const double most = (1u << kind.depth) - 1;
  const double value = value_of(kind, i, kind.channels >= 3 ? c : 0);
  return static_cast<int>(value / most * 255 + 0.5);
}

std::span<const uint8_t> bytes_of_text(const std::string& text) { return {reinterpret_cast<const uint8_t*>(text.data()), text.size()}; }

std::string error_of(const std::string& bytes) {
  return test::error_of([&] { decode_png(bytes_of_text(bytes), "t.png"); });
}

TEST(Png, EveryKindBecomesEightBitsOfRedGreenAndBlue) {
  for (const Kind& kind : kKinds) {
    for (const bool interlaced : {false, true}) {
      const std::string file = png(kind, interlaced);
      const Image image = decode_png(bytes_of_text(file), "t.png");
      ASSERT_EQ(image.channels * 10000 + image.height * 100 + image.width, 30000 + kHeight * 100 + kWidth);
      ASSERT_EQ(image.pixels.size(), 3u * kHeight * kWidth);
      for (int c = 0; c < 3; ++c) {
        for (int i = 0; i < kHeight * kWidth; ++i) {
          ASSERT_EQ(image.pixels[static_cast<size_t>(c * kHeight * kWidth + i)], wanted(kind, i, c))
              << "type " << kind.type << ", " << kind.depth << " bits, channel " << c << ", pixel " << i;
        }
      }
    }
  }
}

TEST(Png, EveryCutIsRefused) {
  for (const bool interlaced : {false, true}) {
    const std::string whole = png(kKinds[7], interlaced);
    EXPECT_EQ(error_of(whole), "accepted");
    for (size_t length = 0; length < whole.size(); ++length) {
      const std::string text = error_of(whole.substr(0, length));
      ASSERT_TRUE(text.starts_with("[load] t.png must be")) << length << ": " << text;
    }
  }
  EXPECT_EQ(error_of("GIF89a"), "[load] t.png must begin with the bytes of a PNG file, \\x89PNG, got 'GIF89a'");
  EXPECT_EQ(error_of(png(kKinds[7], false).substr(0, 60)), "[load] t.png must be a whole PNG file, got its end too early");
}

// A CRC covers every chunk: what is accepted has the right pixels.
TEST(Png, NoChangedByteGivesOtherPixels) {
  const std::string whole = png(kKinds[7], false);
  const Image right = decode_png(bytes_of_text(whole), "t.png");
  int refused = 0;
  for (size_t at = 0; at < whole.size(); ++at) {
    std::string bad = whole;
    bad[at] = static_cast<char>(bad[at] ^ 0x10);
    try {
      ASSERT_EQ(decode_png(bytes_of_text(bad), "t.png").pixels, right.pixels) << at;
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, static_cast<int>(whole.size()) / 2);  // gamma and the transparent colour may be anything
}

/// The width in the first chunk, and its checksum made right.
std::string with_width(std::string bytes, uint32_t width) {
  const auto put = [&](size_t at, uint32_t value) {
    for (size_t i = 0; i < 4; ++i) bytes[at + i] = static_cast<char>(value >> (24 - 8 * i));
  };
  put(16, width);
  put(29, static_cast<uint32_t>(crc32(0, reinterpret_cast<const Bytef*>(bytes.data()) + 12, 17)));
  return bytes;
}

TEST(Png, HugeSizesAreRefusedBeforeMemoryIsTaken) {
  const std::string whole = png(kKinds[7], false);
  EXPECT_EQ(error_of(with_width(whole, 30'000'000)), "[load] t.png must have at most 134217728 pixels, got 30000000 by 5");
  EXPECT_EQ(error_of(with_width(whole, 1'000'000)),
            "[load] t.png must have a size that its " + std::to_string(whole.size()) + " bytes can give, got 1000000 by 5");
  EXPECT_TRUE(error_of(with_width(whole, 2'000'000'000)).starts_with("[load] t.png must be a whole PNG file"));
  EXPECT_TRUE(error_of(with_width(whole, 0)).starts_with("[load] t.png must be a whole PNG file"));
}

TEST(Png, StandsBesideJpegWhateverItsNameSays) {
  const Scratch scratch;
  write_image_folder(scratch, "f");
  spill(scratch.path("f/train/bee/c.png"), png(kKinds[9], false));
  spill(scratch.path("f/train/ant/a.jpg"), png(kKinds[0], true));  // as ImageNet has one
  const ImageSets sets = load_images(scratch.path("f"));
  ASSERT_EQ(sets.train.count(), 4);
  EXPECT_TRUE(sets.train.paths[3].ends_with("c.png"));
  EXPECT_EQ(image_of(sets.train, 3).pixels[0], wanted(kKinds[9], 0, 0));
  EXPECT_EQ(image_of(sets.train, 0).pixels[1], wanted(kKinds[0], 1, 0));
  EXPECT_EQ(image_of(sets.train, 1).height, 24);
}

}  // namespace
}  // namespace satchel
