#include "satchel/data/image_loader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "satchel/data/synthetic_images.h"
#include "tests/data/image_files.h"

namespace satchel {
namespace {

using namespace testing_files;

const ImageSets& sets() {
  static const ImageSets made = make_synthetic_images({.classes = 7, .channels = 3, .size = 8, .count = 501, .test = 70, .seed = 4});
  return made;
}

struct Epoch {
  std::vector<int64_t> counts, indices, labels;
  std::vector<float> images;
  bool operator==(const Epoch&) const = default;
};

Epoch epoch_of(ImageLoader& loader, int64_t epoch) {
  Epoch out;
  ImageBatch batch;
  loader.start(epoch);
  while (loader.next(batch)) {
    EXPECT_EQ(static_cast<int64_t>(batch.images.size()), batch.count * batch.channels * batch.height * batch.width);
    out.counts.push_back(batch.count);
    out.indices.insert(out.indices.end(), batch.indices.begin(), batch.indices.end());
    out.labels.insert(out.labels.end(), batch.labels.begin(), batch.labels.end());
    out.images.insert(out.images.end(), batch.images.begin(), batch.images.end());
  }
  EXPECT_FALSE(loader.next(batch));
  return out;
}

Epoch epoch_of(const ImageLoaderOptions& options, int64_t epoch) {
  ImageLoader loader(sets().train, options);
  return epoch_of(loader, epoch);
}

ImageLoaderOptions training(int threads, int64_t ahead = 3, uint64_t seed = 11) {
  ImageLoaderOptions options = training_options(sets(), 100, seed);
  options.threads = threads;
  options.ahead = ahead;
  return options;
}

TEST(ImageLoader, ThreadsAndSlotsChangeNothing) {
  const Epoch one = epoch_of(training(1), 5);
  for (const auto& [threads, ahead] : {std::pair<int, int64_t>{1, 1}, {2, 1}, {3, 2}, {7, 5}, {16, 1000}}) {
    EXPECT_TRUE(epoch_of(training(threads, ahead), 5) == one) << threads;
  }
}

TEST(ImageLoader, AnEpochIsAFunctionOfSeedAndNumber) {
  ImageLoader loader(sets().train, training(3));
  const Epoch first = epoch_of(loader, 0), second = epoch_of(loader, 1);
  EXPECT_TRUE(epoch_of(loader, 0) == first);
  EXPECT_NE(first.indices, second.indices);
  EXPECT_NE(epoch_of(training(3, 3, 12), 0).indices, first.indices);
  // Places that two orders of 500 images share by chance: one is due, and ten are one chance in 9 million.
  int same = 0;
  for (size_t i = 0; i < 500; ++i) same += first.indices[i] == second.indices[i] ? 1 : 0;
  EXPECT_LT(same, 10);
}

TEST(ImageLoader, EveryImageOnceWithItsLabel) {
  ImageLoaderOptions options = training(4);
  options.drop_last = false;
  ImageLoader loader(sets().train, options);
  EXPECT_EQ(loader.batches(), 6);
  EXPECT_EQ(loader.images(), 501);
  const Epoch epoch = epoch_of(loader, 0);
  EXPECT_EQ(epoch.counts, (std::vector<int64_t>{100, 100, 100, 100, 100, 1}));
  std::vector<int64_t> sorted = epoch.indices, all(501);
  std::sort(sorted.begin(), sorted.end());
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(sorted, all);
  EXPECT_NE(epoch.indices, all);
  for (size_t i = 0; i < 501; ++i) EXPECT_EQ(epoch.labels[i], sets().train.labels[static_cast<size_t>(epoch.indices[i])]);

  ImageLoader dropping(sets().train, training(4));
  EXPECT_EQ(dropping.batches(), 5);
  EXPECT_EQ(dropping.images(), 500);
  EXPECT_EQ(epoch_of(dropping, 0).counts, (std::vector<int64_t>(5, 100)));
}

TEST(ImageLoader, TestingGivesTheImagesAsTheyAre) {
  ImageLoader loader(sets().test, testing_options(sets(), 64));
  const Epoch epoch = epoch_of(loader, 0);
  EXPECT_EQ(epoch.counts, (std::vector<int64_t>{64, 6}));
  EXPECT_TRUE(std::is_sorted(epoch.indices.begin(), epoch.indices.end()));
  ASSERT_EQ(epoch.images.size(), sets().test.pixels.size());
  for (size_t i = 0; i < epoch.images.size(); ++i) {
    const size_t c = i / 64 % 3;
    ASSERT_EQ(epoch.images[i], (static_cast<float>(sets().test.pixels[i]) / 255 - sets().mean[c]) / sets().deviation[c]);
  }
}

TEST(ImageLoader, AnEpochMayBeLeft) {
  ImageLoader loader(sets().train, training(4, 2));
  const Epoch whole = epoch_of(loader, 1);
  ImageBatch batch;
  EXPECT_FALSE(loader.next(batch));
  for (int i = 0; i < 20; ++i) {
    loader.start(i);
    for (int k = 0; k < i % 4; ++k) ASSERT_TRUE(loader.next(batch));
  }
  EXPECT_TRUE(epoch_of(loader, 1) == whole);
  loader.start(0);  // and goes away in the middle
}

TEST(ImageLoader, NothingBeforeStartAndNothingInNothing) {
  ImageLoader loader(sets().train, training(2));
  ImageBatch batch;
  EXPECT_FALSE(loader.next(batch));
  ImageData none = sets().train;
  none.pixels.clear();
  none.labels.clear();
  ImageLoader empty(none, {});
  EXPECT_EQ(empty.batches(), 0);
  EXPECT_EQ(epoch_of(empty, 0).counts.size(), 0u);
}

TEST(ImageLoader, FilesOfAnySizeBecomeOneSize) {
  const Scratch scratch;
  write_image_folder(scratch, "f");
  const ImageSets folder = load_images(scratch.path("f"));
  ImageLoaderOptions options = training_options(folder, 3, 0);
  options.size = 12;
  ImageLoader loader(folder.train, options);
  const Epoch epoch = epoch_of(loader, 0);
  ASSERT_EQ(epoch.images.size(), 3u * 3 * 12 * 12);
  // Files of one grey: 200, 100 and 50, exactly.
  const float grey[] = {200, 100, 50};
  for (size_t i = 0; i < epoch.images.size(); ++i) {
    const size_t c = i / 144 % 3;
    const float was = grey[static_cast<size_t>(epoch.indices[i / 432])];
    ASSERT_EQ(epoch.images[i], (was / 255 - folder.mean[c]) / folder.deviation[c]);
  }
  ImageLoader centre(folder.test, testing_options(folder, 8));
  EXPECT_EQ(centre.height() * 1000 + centre.width(), 224224);
  EXPECT_EQ(epoch_of(centre, 0).counts, (std::vector<int64_t>{1}));
}

TEST(ImageLoader, WhatAThreadThrowsReachesTheCaller) {
  const Scratch scratch;
  write_image_folder(scratch, "f");
  for (int i = 0; i < 200; ++i) spill(scratch.path("f/train/bee/x" + std::to_string(1000 + i) + ".jpg"), flat_jpeg(8, 8, 9, 9, 9));
  const std::string path = "f/train/bee/x1100.jpg", whole = slurp(scratch.path(path));
  spill(scratch.path(path), whole.substr(0, whole.size() - 10));
  spill(scratch.path("f/train/bee/x1134.jpg"), "");
  const ImageSets folder = load_images(scratch.path("f"));
  ImageLoaderOptions options = testing_options(folder, 70);
  options.size = options.resize = 8;
  for (const int threads : {1, 5}) {
    options.threads = threads;
    ImageLoader loader(folder.train, options);
    ImageBatch batch;
    loader.start(0);
    ASSERT_TRUE(loader.next(batch));  // images 0 to 69
    const std::string expected = "[load] " + path + " must be a whole JPEG file, got Premature end of JPEG file";
    EXPECT_EQ(error_of([&] { loader.next(batch); }, scratch), expected);  // 70 to 139: 103 and, made in another piece, 137
    EXPECT_EQ(error_of([&] { loader.next(batch); }, scratch), expected);
  }
  spill(scratch.path(path), whole);
  spill(scratch.path("f/train/bee/x1134.jpg"), whole);
  ImageLoader mended(folder.train, options);
  EXPECT_EQ(epoch_of(mended, 0).counts, (std::vector<int64_t>{70, 70, 63}));
}

TEST(ImageLoader, OptionsAreChecked) {
  const Scratch scratch;
  const auto error = [&](auto change) {
    ImageLoaderOptions options;
    change(options);
    return error_of([&] { ImageLoader(sets().train, options); }, scratch);
  };
  using O = ImageLoaderOptions;
  EXPECT_EQ(error([](O& o) { o.batch = 2147483647; }), "accepted");
  EXPECT_EQ(error([](O& o) { o.batch = 0; }), "[loader] batch must be 1 to 2147483647, got 0");
  EXPECT_EQ(error([](O& o) { o.threads = -1; }), "[loader] threads must be 0 to 256, got -1");
  EXPECT_EQ(error([](O& o) { o.ahead = 0; }), "[loader] ahead must be 1 to 1024, got 0");
  EXPECT_EQ(error([](O& o) { o.batch = 502, o.drop_last = true; }),
            "[loader] there must be a full batch of 502 where the last one is left out, got 501");
  EXPECT_TRUE(holds(error([](O& o) { o.batch = 501, o.crop = Crop::area, o.size = 16384; }), "must fit into memory"));
}

}  // namespace
}  // namespace satchel
