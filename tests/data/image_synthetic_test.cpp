#include <gtest/gtest.h>

#include <cmath>

#include "satchel/data/image_layouts.h"
#include "satchel/data/synthetic_images.h"
#include "tests/data/files.h"

namespace satchel {
namespace {

using namespace testing_files;

TEST(SyntheticImages, TheSameForTheSameOptions) {
  const SyntheticImageOptions options{.classes = 4, .channels = 2, .size = 12, .count = 40, .test = 10, .seed = 5};
  const ImageSets a = make_synthetic_images(options), b = make_synthetic_images(options);
  EXPECT_EQ(a.train.pixels, b.train.pixels);
  EXPECT_EQ(a.train.count() * 100 + a.test.count(), 4010);
  EXPECT_EQ(a.train.pixels.size(), 40u * 2 * 144);
  for (int64_t i = 0; i < 40; ++i) EXPECT_EQ(a.train.labels[static_cast<size_t>(i)], i % 4);
  SyntheticImageOptions other = options;
  other.seed = 6;
  EXPECT_NE(make_synthetic_images(other).train.pixels, a.train.pixels);
  // More to test changes no image to train on.
  other = options;
  other.test = 0;
  EXPECT_EQ(make_synthetic_images(other).train.pixels, a.train.pixels);
  EXPECT_EQ(make_synthetic_images(other).test.count(), 0);
}

// A sum over whole numbers: another machine, compiler or library must give the same.
TEST(SyntheticImages, BytesAreThoseOfEveryMachine) {
  const ImageSets sets = load_images("synthetic-images:count=30,size=16");
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (const uint8_t byte : sets.train.pixels) hash = (hash ^ byte) * 1099511628211u;
  EXPECT_EQ(hash, 14365677407439972679u);
}

/// Share of test images whose nearest class mean is their own class's.
double nearest_mean(const ImageSets& sets) {
  const size_t values = static_cast<size_t>(sets.train.channels * sets.train.height * sets.train.width);
  std::vector<double> mean(values * static_cast<size_t>(sets.train.classes));
  const double each = static_cast<double>(sets.train.count()) / static_cast<double>(sets.train.classes);
  for (size_t i = 0; i < sets.train.labels.size(); ++i) {
    for (size_t k = 0; k < values; ++k)
      mean[static_cast<size_t>(sets.train.labels[i]) * values + k] += sets.train.pixels[i * values + k] / each;
  }
  int right = 0;
  for (size_t i = 0; i < sets.test.labels.size(); ++i) {
    int best = -1;
    double least = 1e300;
    for (int c = 0; c < sets.train.classes; ++c) {
      double away = 0;
      for (size_t k = 0; k < values; ++k) away += std::pow(sets.test.pixels[i * values + k] - mean[static_cast<size_t>(c) * values + k], 2);
      if (away < least) least = away, best = c;
    }
    right += best == sets.test.labels[i] ? 1 : 0;
  }
  return right / static_cast<double>(sets.test.count());
}

TEST(SyntheticImages, ClassesCanBeLearntAndAreNotForFree) {
  const ImageSets sets = load_images("synthetic-images:count=1000,test=500,size=16");
  const double share = nearest_mean(sets);
  // By chance 0.1, with a deviation of √(0.1·0.9/500) = 0.013: 30 of them. Images mixed by more than half, 1 − √(1/2 ∶ 0.6) = 0.087 of
  // all, look like their rival: 0.913, with a deviation of 0.0126.
  EXPECT_GT(share, 0.1 + 30 * 0.013);
  EXPECT_LT(share, 0.913 + 3 * 0.0126);
}

TEST(SyntheticImages, OptionsAreChecked) {
  const Scratch scratch;
  const auto error = [&](const std::string& text) { return error_of([&] { load_images("synthetic-images:" + text); }, scratch); };
  EXPECT_EQ(error("count=20,size=4,channels=1"), "accepted");
  EXPECT_EQ(error("count"), "[load] synthetic-images: option must be name=value, got 'count'");
  EXPECT_EQ(error("colour=3"), "[load] synthetic-images: option must be classes, channels, size, count, test or seed, got 'colour'");
  EXPECT_EQ(error("count=20,count=30"), "[load] synthetic-images: option must stand once, got 'count=30'");
  EXPECT_EQ(error("count=2e3"), "[load] synthetic-images: count must be a whole number, got '2e3'");
  EXPECT_EQ(error("count=99999999999999999999"), "[load] synthetic-images: count must be a whole number, got '99999999999999999999'");
  EXPECT_EQ(error("seed=-1"), "[load] synthetic-images: seed must be a whole number, got '-1'");
  EXPECT_EQ(error("classes=1"), "[load] synthetic-images: classes must be 2 to 65536, got 1");
  EXPECT_EQ(error("count=9"), "[load] synthetic-images: count must be 10 to 1073741823, got 9");
  EXPECT_EQ(error("size=1025"), "[load] synthetic-images: size must be 4 to 1024, got 1025");
  EXPECT_EQ(error("test=-1"), "[load] synthetic-images: test must be 0 to 1073741823, got -1");
  EXPECT_TRUE(holds(error("count=1000000000,size=1024"), "must fit into memory"));
}

TEST(SyntheticImages, AChannelOfOneValueHasDeviationOne) {
  ImageSets sets;
  sets.train.channels = 2;
  sets.train.height = 1;
  sets.train.width = 2;
  sets.train.labels = {0};
  sets.train.pixels = {51, 51, 0, 255};
  measure(sets);
  EXPECT_EQ(sets.mean, (std::vector<float>{0.2f, 0.5f}));
  EXPECT_EQ(sets.deviation, (std::vector<float>{1.0f, 0.5f}));
}

}  // namespace
}  // namespace satchel
