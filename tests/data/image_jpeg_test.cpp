#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "satchel/data/jpeg.h"
#include "tests/data/image_files.h"
#include "tests/support.h"

namespace satchel {
namespace {

using namespace testing_files;

Image decode(const std::string& bytes) { return decode_jpeg({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}, "t.jpg"); }

std::string error_of(const std::string& bytes) {
  return test::error_of([&] { decode(bytes); });
}

/// Left half red, right half blue, with noise where asked: 24 by 32.
std::vector<uint8_t> two_colours(bool noisy) {
  std::mt19937 random(3);
  std::vector<uint8_t> mixed;
  for (int i = 0; i < 24 * 32; ++i) {
    const bool left = i % 32 < 16;
    const auto noise = static_cast<uint8_t>(noisy ? random() % 50 : 0);
    mixed.insert(mixed.end(), {static_cast<uint8_t>(left ? 200 : noise), noise, static_cast<uint8_t>(left ? noise : 180)});
  }
  return mixed;
}

TEST(Jpeg, PlanesOfRedGreenAndBlue) {
  const std::vector<uint8_t> mixed = two_colours(false);
  const Image image = decode(jpeg(mixed, 24, 32));
  ASSERT_EQ(image.channels * 10000 + image.height * 100 + image.width, 32432);
  ASSERT_EQ(image.pixels.size(), 3u * 24 * 32);
  // Blocks of one colour keep their mean: Y, Cb and Cr are each off by ½ at most, and R = Y + 1.402·Cr, B = Y + 1.772·Cb (G less), so
  // ½ + 0.886 + ½ of the last rounding.
  for (int c = 0; c < 3; ++c) {
    for (int i = 0; i < 24 * 32; ++i) {
      const int got = image.pixels[static_cast<size_t>(c * 24 * 32 + i)], was = mixed[static_cast<size_t>(3 * i + c)];
      ASSERT_LE(std::abs(got - was), 1) << c << " " << i;
    }
  }
}

TEST(Jpeg, GreyIsRepeatedAndInkMultipliedOut) {
  std::vector<uint8_t> grey(16 * 16, 77);
  const Image image = decode(jpeg(grey, 16, 16, TJPF_GRAY, TJSAMP_GRAY));
  EXPECT_EQ(image.channels, 3);
  EXPECT_EQ(image.pixels, std::vector<uint8_t>(3 * 16 * 16, 77));

  std::vector<uint8_t> ink;
  for (int i = 0; i < 256; ++i) ink.insert(ink.end(), {255, 100, 0, 128});
  const Image light = decode(jpeg(ink, 16, 16, TJPF_CMYK));
  ASSERT_EQ(light.pixels.size(), 768u);
  // Ink and black are off by 1 each at most (as above): a product of up to (1 + 1)·255/255, and its rounding.
  for (size_t i = 0; i < 256; ++i) {
    EXPECT_NEAR(light.pixels[i], 128, 2.5);
    EXPECT_NEAR(light.pixels[256 + i], 100 * 128 / 255.0, 2.5);
    EXPECT_NEAR(light.pixels[512 + i], 0, 2.5);
  }
}

TEST(Jpeg, EveryCutIsRefused) {
  for (const int flags : {0, TJFLAG_PROGRESSIVE}) {
    for (const int subsampling : {TJSAMP_444, TJSAMP_420}) {
      const std::string whole = jpeg(two_colours(true), 24, 32, TJPF_RGB, subsampling, flags);
      EXPECT_EQ(error_of(whole), "accepted");
      for (size_t length = 0; length < whole.size(); ++length) {
        const std::string text = error_of(whole.substr(0, length));
        ASSERT_TRUE(text.starts_with("[load] t.jpg must be")) << length << " of " << whole.size() << ": " << text;
      }
    }
  }
}

TEST(Jpeg, ErrorsNameTheFile) {
  EXPECT_EQ(error_of(""), "[load] t.jpg must begin with the bytes of a JPEG file, \\xff\\xd8, got ''");
  EXPECT_EQ(error_of("\x89PNG\r\n\x1a\n...."),
            "[load] t.jpg must begin with the bytes of a JPEG file, \\xff\\xd8, got '\\x89PNG\\x0d\\x0a\\x1a\\x0a'");
  const std::string cut = jpeg(two_colours(true), 24, 32);
  EXPECT_EQ(error_of(cut.substr(0, cut.size() / 2 + 400)), "[load] t.jpg must be a whole JPEG file, got Premature end of JPEG file");
}

TEST(Jpeg, HugeSizesAreRefusedBeforeMemoryIsTaken) {
  std::string bytes = jpeg(two_colours(true), 24, 32);
  const size_t frame = bytes.find("\xff\xc0");  // marker, length, precision, height, width
  ASSERT_NE(frame, std::string::npos);
  bytes.replace(frame + 5, 4, "\xff\xdc\xff\xdc");
  EXPECT_EQ(error_of(bytes), "[load] t.jpg must have at most 134217728 pixels, got 65500 by 65500");
}

TEST(Jpeg, ChangedBytesAreDecodedOrRefused) {
  std::mt19937 random(5);
  int refused = 0;
  for (const int flags : {0, TJFLAG_PROGRESSIVE}) {
    const std::string whole = jpeg(two_colours(true), 24, 32, TJPF_RGB, TJSAMP_420, flags);
    const size_t frame = whole.find(flags == 0 ? "\xff\xc0" : "\xff\xc2");
    for (int i = 0; i < 1500; ++i) {
      std::string bytes = whole;
      for (uint32_t k = 1 + random() % 4; k > 0; --k) {
        const size_t at = random() % bytes.size();
        if (at >= frame + 5 && at < frame + 9) continue;  // sizes: only slow
        bytes[at] = static_cast<char>(random());
      }
      const std::string text = error_of(bytes);
      ASSERT_TRUE(text == "accepted" || text.starts_with("[load] t.jpg must ")) << text;
      refused += text == "accepted" ? 0 : 1;
    }
  }
  EXPECT_GT(refused, 100);  // headers make up a fifth of such a file, and an error in one is found
}

}  // namespace
}  // namespace satchel
