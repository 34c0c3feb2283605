#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "satchel/data/augment.h"
#include "tests/data/files.h"

namespace satchel {
namespace {

using namespace testing_files;

Image random_image(int64_t channels, int64_t height, int64_t width) {
  std::mt19937 random(static_cast<uint32_t>(height * 1000 + width));
  Image image{channels, height, width, {}};
  for (int64_t i = 0; i < channels * height * width; ++i) image.pixels.push_back(static_cast<uint8_t>(random()));
  return image;
}

/// Output `at` of a line resized from `from` to `to` values, straight from the definition: a triangle as wide as the scale.
double line_at(const std::vector<double>& line, int64_t to, int64_t at) {
  const double scale = static_cast<double>(line.size()) / static_cast<double>(to), width = std::max(scale, 1.0);
  double sum = 0, weights = 0;
  for (size_t k = 0; k < line.size(); ++k) {
    const double away = (static_cast<double>(k) + 0.5 - (static_cast<double>(at) + 0.5) * scale) / width;
    const double weight = std::abs(away) < 1 ? 1 - std::abs(away) : 0;
    sum += weight * line[k];
    weights += weight;
  }
  return sum / weights;
}

double reference(const Image& image, int64_t c, const Box& from, int64_t height, int64_t width, int64_t y, int64_t x) {
  std::vector<double> column;
  for (int64_t r = 0; r < from.height; ++r) {
    std::vector<double> row;
    for (int64_t k = 0; k < from.width; ++k) {
      row.push_back(image.pixels[static_cast<size_t>((c * image.height + from.top + r) * image.width + from.left + k)]);
    }
    column.push_back(line_at(row, width, x));
  }
  return line_at(column, height, y);
}

TEST(Resized, IsTheTriangleFilter) {
  const Image image = random_image(2, 13, 17);
  for (const Box& from : {Box{0, 0, 13, 17}, Box{2, 3, 7, 9}, Box{12, 16, 1, 1}, Box{0, 5, 13, 1}}) {
    for (const auto& [height, width] : {std::pair<int64_t, int64_t>{5, 6}, {13, 17}, {30, 20}, {1, 1}, {7, 40}}) {
      const Box whole{0, 0, height, width}, part{height / 3, width / 4, height - height / 3, width - width / 4};
      const Image all = resized(image, from, height, width, whole), some = resized(image, from, height, width, part);
      ASSERT_EQ(all.height * 1000 + all.width, height * 1000 + width);
      for (int64_t c = 0; c < 2; ++c) {
        for (int64_t y = 0; y < height; ++y) {
          for (int64_t x = 0; x < width; ++x) {
            const int got = all.pixels[static_cast<size_t>((c * height + y) * width + x)];
            // Each of the two passes rounds to whole values, by ½ at most; weights of 22 bits add 35 taps·255·2^-23.
            ASSERT_NEAR(got, reference(image, c, from, height, width, y, x), 1.01);
            if (y < part.top || x < part.left) continue;
            const int64_t at = (c * part.height + y - part.top) * part.width + x - part.left;
            ASSERT_EQ(some.pixels[static_cast<size_t>(at)], got);
          }
        }
      }
    }
  }
}

TEST(Resized, SameSizeIsTheSameImage) {
  const Image image = random_image(3, 11, 8);
  EXPECT_EQ(resized(image, {0, 0, 11, 8}, 11, 8, {0, 0, 11, 8}).pixels, image.pixels);
}

TEST(DrawArea, BoxesLieInTheImageAndHaveTheSharesAskedFor) {
  const Dice dice(1, kImageCrop);
  double sum = 0;
  constexpr int kBoxes = 4000;
  for (uint32_t i = 0; i < kBoxes; ++i) {
    const Box box = draw_area(300, 400, dice, i);
    ASSERT_TRUE(box.top >= 0 && box.left >= 0 && box.top + box.height <= 300 && box.left + box.width <= 400);
    const double share = static_cast<double>(box.height * box.width) / (300 * 400),
                 ratio = static_cast<double>(box.width) / static_cast<double>(box.height);
    // Sides of at least 80 are rounded by ½: 1.3 % of a share or ratio.
    ASSERT_TRUE(share > 0.08 / 1.013 && share <= 1 && ratio > 0.75 / 1.013 && ratio < 1.013 * 4 / 3) << share << " " << ratio;
    sum += share;
  }
  // A share s fits this shape at ratios from 4·s/3 on: always up to 9/16, above that with chance −ln s/(2·ln 4/3). The mean of s is then
  // (0.1550 + 0.1389)/(0.4825 + 0.1979) = 0.4319, with a deviation of 0.23/√4,000 = 0.0037: five of them.
  EXPECT_NEAR(sum / kBoxes, 0.4319, 5 * 0.0037);
}

TEST(DrawArea, ShapesThatNoBoxFits) {
  const Dice dice(1, kImageCrop);
  EXPECT_EQ(draw_area(1, 1, dice, 0), (Box{0, 0, 1, 1}));
  for (uint32_t i = 0; i < 200; ++i) {
    const Box tall = draw_area(5000, 3, dice, i), wide = draw_area(3, 5000, dice, i);
    EXPECT_TRUE(tall.width <= 3 && tall.width >= 1 && tall.height <= 4 && tall.height >= 1);
    EXPECT_TRUE(wide.height <= 3 && wide.height >= 1 && wide.width <= 4 && wide.width >= 1);
  }
}

/// count images of 1×5×6; image i has the bytes 30·i + 1 …, none 0.
ImageData small(int64_t count) {
  ImageData data;
  data.channels = 1;
  data.height = 5;
  data.width = 6;
  data.classes = 2;
  for (int64_t i = 0; i < count; ++i) {
    data.labels.push_back(static_cast<int32_t>(i % 2));
    for (int k = 0; k < 30; ++k) data.pixels.push_back(static_cast<uint8_t>(1 + k));
  }
  return data;
}

TEST(Augment, PaddedCropsAreAllShiftsAndBothSides) {
  constexpr int kImages = 3000;
  const ImageData data = small(kImages);
  ImageLoaderOptions options;
  options.crop = Crop::padded;
  options.padding = 2;
  options.flip = true;
  const Augment augment(data, options);
  std::vector<int> seen(50);
  for (int64_t i = 0; i < kImages; ++i) {
    float out[30];
    augment(i, 9, out);
    int matches = 0;
    for (int way = 0; way < 50; ++way) {
      const int top = way / 10 - 2, left = way / 2 % 5 - 2;
      bool same = true;
      for (int k = 0; k < 30; ++k) {
        const int y = k / 6 + top, x = (way % 2 == 0 ? k % 6 : 5 - k % 6) + left;
        const bool inside = y >= 0 && y < 5 && x >= 0 && x < 6;
        same = same && out[k] == (inside ? static_cast<float>(1 + y * 6 + x) / 255 : 0);
      }
      matches += same ? 1 : 0;
      seen[static_cast<size_t>(way)] += same ? 1 : 0;
    }
    ASSERT_EQ(matches, 1) << i;
  }
  // 60 of each are due, with a deviation of √(60·0.98) = 7.7: five of them.
  for (const int count : seen) EXPECT_NEAR(count, 60, 39);
}

TEST(Augment, CentreIsTheMiddleOfTheResizedImage) {
  ImageData data = small(1);
  ImageLoaderOptions options;
  options.crop = Crop::centre;
  options.size = 7;
  options.resize = 10;  // 5 by 6 becomes 10 by 12
  options.mean = {0.5f};
  options.deviation = {0.25f};
  std::vector<float> out(49);
  Augment(data, options)(0, 0, out.data());
  const Image image = image_of(data, 0), whole = resized(image, {0, 0, 5, 6}, 10, 12, {0, 0, 10, 12});
  for (size_t y = 0; y < 7; ++y) {
    for (size_t x = 0; x < 7; ++x) {
      EXPECT_EQ(out[y * 7 + x], (static_cast<float>(whole.pixels[(y + 1) * 12 + x + 2]) / 255 - 0.5f) / 0.25f);
    }
  }
}

TEST(Augment, OptionsAreChecked) {
  const Scratch scratch;
  const ImageData data = small(2);
  const auto error = [&](auto change) {
    ImageLoaderOptions options;
    change(options);
    return error_of([&] { Augment(data, options); }, scratch);
  };
  using O = ImageLoaderOptions;
  EXPECT_EQ(error([](O&) {}), "accepted");
  EXPECT_EQ(error([](O& o) { o.mean = {0, 0}; }), "[loader] mean and deviation must have one number a channel, 1, got 2");
  EXPECT_EQ(error([](O& o) { o.deviation = {0}; }), "[loader] deviation must be above 0, got 0");
  EXPECT_EQ(error([](O& o) { o.mean = {NAN}; }), "[loader] mean and deviation must be finite, got nan");
  EXPECT_EQ(error([](O& o) { o.crop = Crop::area, o.size = 0; }), "[loader] size must be 1 to 16384, got 0");
  EXPECT_EQ(error([](O& o) { o.crop = Crop::centre, o.resize = 100; }), "[loader] resize must be size to 16384, got 100");
  EXPECT_EQ(error([](O& o) { o.crop = Crop::padded, o.padding = -1; }), "[loader] padding must be 0 to 16384, got -1");
  ImageData files;
  files.channels = 3;
  files.paths = {"a"};
  files.labels = {0};
  EXPECT_EQ(error_of([&] { Augment(files, {}); }, scratch),
            "[loader] images of different sizes need Crop::centre or Crop::area, got another crop");
}

}  // namespace
}  // namespace satchel
