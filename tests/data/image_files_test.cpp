// CIFAR, IDX and folders of JPEG files: whole, and damaged in every way.
#include "tests/data/image_files.h"

#include <gtest/gtest.h>

#include <random>

#include "satchel/data/image_data.h"
#include "tests/data/files.h"

namespace satchel {
namespace {

using namespace testing_files;

std::string error_of_load(const Scratch& scratch, const std::string& name) {
  return error_of([&] { load_images(scratch.path(name)); }, scratch);
}

// A row's pixels are (3·first + i) % 251: no two neighbours and no two rows are alike.
std::string cifar_row(const std::string& labels, int first) {
  std::string row = labels;
  for (int i = 0; i < 3072; ++i) row += static_cast<char>((3 * first + i) % 251);
  return row;
}

void write_cifar10(const Scratch& scratch) {
  const std::string folder = scratch.make_folder("c10") + "/";
  spill(folder + "data_batch_1.bin", cifar_row("\x03", 0) + cifar_row("\x09", 1));
  spill(folder + "data_batch_2.bin", cifar_row(std::string(1, '\0'), 2));
  spill(folder + "test_batch.bin", cifar_row("\x05", 3));
}

TEST(Cifar, RowsInOrder) {
  const Scratch scratch;
  write_cifar10(scratch);
  const ImageSets sets = load_images(scratch.path("c10"));
  EXPECT_EQ(sets.train.name, "c10");
  EXPECT_EQ(sets.train.labels, (std::vector<int32_t>{3, 9, 0}));
  EXPECT_EQ(sets.test.labels, (std::vector<int32_t>{5}));
  EXPECT_EQ(sets.train.classes, 10);
  EXPECT_EQ(sets.train.channels * 10000 + sets.train.height * 100 + sets.train.width, 33232);
  ASSERT_EQ(sets.train.pixels.size(), 3u * 3072);
  for (int n = 0; n < 3; ++n) {
    const Image image = image_of(sets.train, n);
    ASSERT_EQ(image.pixels.size(), 3072u);
    for (int i = 0; i < 3072; ++i) ASSERT_EQ(image.pixels[static_cast<size_t>(i)], (3 * n + i) % 251);
  }
  EXPECT_TRUE(sets.train.class_names.empty());
  EXPECT_EQ(error_of([&] { image_of(sets.train, 3); }, scratch), "[load] image must be 0 to 2, got 3");
}

TEST(Cifar, MeanAndDeviationAreThoseOfTheBytes) {
  const Scratch scratch;
  const std::string folder = scratch.make_folder("c10") + "/";
  // Red: 0 and 255 alike. Green: 51 everywhere. Blue: three of four 102, else 0: mean 76.5, deviation 102·√3/4.
  std::string row = "\x01";
  for (int i = 0; i < 1024; ++i) row += static_cast<char>(i % 2 == 0 ? 0 : 255);
  row += std::string(1024, 51);
  for (int i = 0; i < 1024; ++i) row += static_cast<char>(i % 4 == 0 ? 0 : 102);
  spill(folder + "data_batch_1.bin", row + row);
  spill(folder + "test_batch.bin", row);
  const ImageSets sets = load_images(folder);
  EXPECT_EQ(sets.mean, (std::vector<float>{0.5f, 0.2f, 0.3f}));
  EXPECT_EQ(sets.deviation, (std::vector<float>{0.5f, 1.0f, 0.4f * 0.4330127018922193f}));
}

TEST(Cifar, FineLabelsOfCifar100AndNames) {
  const Scratch scratch;
  const std::string folder = scratch.make_folder("archive/");
  const std::string inside = scratch.make_folder("archive/cifar-100-binary") + "/";
  spill(inside + "train.bin", cifar_row("\x13\x63", 0) + cifar_row("\x01\x02", 1));
  spill(inside + "test.bin", cifar_row("\x02\x07", 2));
  std::string names;
  for (int k = 0; k < 100; ++k) names += "class" + std::to_string(k) + "\r\n";
  spill(inside + "fine_label_names.txt", names + "\n\n");
  const ImageSets sets = load_images(folder);
  EXPECT_EQ(sets.train.labels, (std::vector<int32_t>{99, 2}));
  EXPECT_EQ(sets.train.classes, 100);
  EXPECT_EQ(sets.test.class_names[99], "class99");
  spill(inside + "train.bin", cifar_row("\x14\x63", 0));
  EXPECT_EQ(error_of_load(scratch, "archive"),
            "[load] archive/cifar-100-binary/train.bin: label must be 0 to 19, got 20 in image 0 (byte 0)");
  spill(inside + "train.bin", cifar_row("\x13\x63", 0) + cifar_row("\x01\x64", 1));
  EXPECT_EQ(error_of_load(scratch, "archive"),
            "[load] archive/cifar-100-binary/train.bin: label must be 0 to 99, got 100 in image 1 (byte 3075)");
}

TEST(Cifar, ErrorsNameFileAndPosition) {
  const Scratch scratch;
  write_cifar10(scratch);
  spill(scratch.path("c10/data_batch_2.bin"), cifar_row("\x01", 0) + cifar_row("\x0a", 1));
  EXPECT_EQ(error_of_load(scratch, "c10"), "[load] c10/data_batch_2.bin: label must be 0 to 9, got 10 in image 1 (byte 3073)");
  write_cifar10(scratch);
  spill(scratch.path("c10/batches.meta.txt"), "a\nb\n");
  EXPECT_EQ(error_of_load(scratch, "c10"), "[load] c10/batches.meta.txt must have 10 names, got 2");
  spill(scratch.path("c10/batches.meta.txt"), "a\nb\033[2J\n");
  EXPECT_EQ(error_of_load(scratch, "c10"), "[load] c10/batches.meta.txt must be text, got byte 27 at 3");
  std::remove(scratch.path("c10/batches.meta.txt").c_str());
  std::remove(scratch.path("c10/test_batch.bin").c_str());
  EXPECT_EQ(error_of_load(scratch, "c10"), "[load] file must exist, got c10/test_batch.bin");
  scratch.make_folder("c10/test_batch.bin");
  EXPECT_EQ(error_of_load(scratch, "c10"), "[load] path must be a file, got c10/test_batch.bin");
}

TEST(Cifar, EveryCutIsRefused) {
  const Scratch scratch;
  write_cifar10(scratch);
  const std::string whole = slurp(scratch.path("c10/data_batch_1.bin"));
  for (size_t length = 0; length < whole.size(); length += length % 3073 < 3 || length % 3073 > 3070 ? 1 : 61) {
    spill(scratch.path("c10/data_batch_1.bin"), whole.substr(0, length));
    const std::string text = error_of_load(scratch, "c10");
    const bool rows = length == 3073;
    EXPECT_EQ(text,
              rows ? "accepted" : "[load] c10/data_batch_1.bin must be whole rows of 3073 bytes, got " + std::to_string(length) + " bytes");
  }
}

// --- IDX ---

TEST(Idx, PlainAndGzip) {
  const Scratch scratch;
  for (const bool packed : {false, true}) {
    write_idx(scratch, "m", packed);
    const ImageSets sets = load_images(scratch.path("m"));
    EXPECT_EQ(sets.train.labels, (std::vector<int32_t>{2, 0, 1}));
    EXPECT_EQ(sets.test.labels, (std::vector<int32_t>{1}));
    EXPECT_EQ(sets.train.classes, 3);
    EXPECT_EQ(sets.test.classes, 3);
    EXPECT_EQ(sets.train.channels * 100 + sets.train.height * 10 + sets.train.width, 145);
    for (int i = 0; i < 60; ++i) EXPECT_EQ(sets.train.pixels[static_cast<size_t>(i)], i);
    EXPECT_TRUE(holds_images(scratch.path("m")));
    remove_idx(scratch, "m");
  }
}

TEST(Idx, ErrorsNameFileAndPosition) {
  const Scratch scratch;
  const auto with = [&](const std::string& file, const std::string& bytes) {
    write_idx(scratch, "m", false);
    spill(scratch.path("m/" + file), bytes);
    return error_of_load(scratch, "m");
  };
  const std::string images = "train-images-idx3-ubyte", labels = "train-labels-idx1-ubyte", in = "[load] m/";
  const std::string all(60, 'x');
  EXPECT_EQ(with(images, idx({3, 4, 5}, all, 13)), in + images + ": magic must be 0x00000803, got 0x00000d03 at byte 0");
  EXPECT_EQ(with(images, idx({60}, all)), in + images + ": magic must be 0x00000803, got 0x00000801 at byte 0");
  EXPECT_EQ(with(images, "\x89PNG\r\n\x1a\n01234567"), in + images + ": magic must be 0x00000803, got 0x89504e47 at byte 0");
  EXPECT_EQ(with(images, ""), in + images + " must have a header of 16 bytes, got 0");
  EXPECT_EQ(with(images, idx({3, 0, 5}, "")), in + images + ": size 1 must be 1 to 16384, got 0 at byte 8");
  EXPECT_EQ(with(images, idx({3, 4, 0xffffffff}, all)), in + images + ": size 2 must be 1 to 16384, got 4294967295 at byte 12");
  EXPECT_EQ(with(images, idx({0xffffffff, 4, 5}, all)), in + images + ": size 0 must be 1 to 2147483647, got 4294967295 at byte 4");
  EXPECT_EQ(with(images, idx({0x7fffffff, 16384, 16384}, all)), in + images + " must fit into memory, got 576460752034988032 bytes");
  EXPECT_EQ(with(images, idx({3, 4, 5}, all + "y")), in + images + " must end after 60 values, got more");
  EXPECT_EQ(with(labels, idx({4}, "abcd")), in + labels + " must have one label an image, 3, got 4");
  EXPECT_EQ(with("t10k-labels-idx1-ubyte", idx({1}, "\x03")), in + "t10k-labels-idx1-ubyte: label must be 0 to 2, got 3 at position 0");
  EXPECT_EQ(with("t10k-images-idx3-ubyte", idx({1, 5, 4}, std::string(20, 'x'))),
            in + "t10k-images-idx3-ubyte must have images of 4 by 5, got 5 by 4");
  std::remove(scratch.path("m/" + labels).c_str());
  EXPECT_EQ(error_of_load(scratch, "m"), "[load] file must exist, got m/" + labels);
  write_idx(scratch, "m", false);
  spill(scratch.path("m/other-train-images-idx3-ubyte"), "");
  EXPECT_EQ(error_of_load(scratch, "m"),
            "[load] m must hold one file of images to train on, got 'other-train-images-idx3-…', 'train-images-idx3-ubyte'");
}

TEST(Idx, EveryCutIsRefused) {
  const Scratch scratch;
  for (const bool packed : {false, true}) {
    write_idx(scratch, "m", packed);
    for (const std::string stem : {"train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"}) {
      const std::string path = scratch.path("m/" + stem + (packed ? ".gz" : "")), whole = slurp(path);
      for (size_t length = 0; length < whole.size(); ++length) {
        spill(path, whole.substr(0, length));
        EXPECT_TRUE(holds(error_of_load(scratch, "m"), "[load] m/" + stem)) << length << error_of_load(scratch, "m");
      }
      spill(path, whole);
    }
    EXPECT_EQ(error_of_load(scratch, "m"), "accepted");
    remove_idx(scratch, "m");
  }
}

TEST(Idx, ChangedBitsNeverGiveOtherValues) {
  const Scratch scratch;
  write_idx(scratch, "m", true);
  const std::string path = scratch.path("m/train-images-idx3-ubyte.gz"), whole = slurp(path);
  const std::vector<uint8_t> right = load_images(scratch.path("m")).train.pixels;
  std::mt19937 random(7);
  int refused = 0;
  for (int i = 0; i < 500; ++i) {
    std::string bytes = whole;
    bytes[10 + random() % (bytes.size() - 10)] ^= static_cast<char>(1u << random() % 8);
    spill(path, bytes);
    try {
      ASSERT_EQ(load_images(scratch.path("m")).train.pixels, right);
    } catch (const Error&) {
      ++refused;
    }
  }
  // Behind the 10 bytes of a gzip header check sums cover every bit but those that fill the last byte before them: 7 of some 500.
  EXPECT_GT(refused, 450);
}

// --- folders ---

TEST(ImageFolder, ClassesAreFoldersAndFilesAreDecodedWhenAsked) {
  const Scratch scratch;
  write_image_folder(scratch, "f");
  const ImageSets sets = load_images(scratch.path("f"));
  EXPECT_EQ(sets.train.class_names, (std::vector<std::string>{"ant", "bee"}));
  EXPECT_EQ(sets.train.labels, (std::vector<int32_t>{0, 0, 1}));
  EXPECT_EQ(sets.test.labels, (std::vector<int32_t>{1}));
  EXPECT_EQ(sets.train.height, 0);
  EXPECT_EQ(sets.mean.size(), 3u);
  const Image image = image_of(sets.train, 1);
  EXPECT_EQ(image.channels * 10000 + image.height * 100 + image.width, 32416);
  spill(scratch.path("f/train/ant/b.JPEG"), "GIF89a");
  EXPECT_EQ(error_of([&] { image_of(sets.train, 1); }, scratch),
            "[load] f/train/ant/b.JPEG must be a JPEG file, which begins with \\xff\\xd8, or a PNG file, which begins with \\x89PNG, got "
            "'GIF89a'");
  EXPECT_EQ(error_of_load(scratch, "f"), "accepted");
  std::remove(scratch.path("f/train/ant/b.JPEG").c_str());
  EXPECT_EQ(error_of([&] { image_of(sets.train, 1); }, scratch), "[load] file must exist, got f/train/ant/b.JPEG");
}

TEST(ImageFolder, BrokenImagesAreDropped) {
  const Scratch scratch;
  write_image_folder(scratch, "f");
  spill(scratch.path("f/train/ant/0.jpg"), "GIF89a");
  const std::string whole = slurp(scratch.path("f/train/ant/a.jpg"));
  spill(scratch.path("f/train/bee/b.jpg"), whole.substr(0, whole.size() / 2));
  for (const int threads : {1, 3, 0}) {
    ImageSets sets = load_images(scratch.path("f"));
    ASSERT_EQ(sets.train.count(), 5);
    const std::vector<std::string> why = drop_broken(sets, threads);
    ASSERT_EQ(why.size(), 2u);
    EXPECT_TRUE(holds(why[0], "/f/train/ant/0.jpg must be")) << why[0];
    EXPECT_TRUE(holds(why[1], "/f/train/bee/b.jpg must be a whole JPEG file")) << why[1];
    EXPECT_EQ(sets.train.labels, (std::vector<int32_t>{0, 0, 1}));
    EXPECT_TRUE(sets.train.paths[0].ends_with("ant/a.jpg") && sets.train.paths[2].ends_with("bee/a.jpeg"));
    for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(image_of(sets.train, i).channels, 3);
    EXPECT_EQ(sets.test.count(), 1);
    EXPECT_TRUE(drop_broken(sets, threads).empty());
  }
  ImageSets none = load_images(scratch.path("f"));
  spill(scratch.path("f/val/bee/a.jpg"), "x");
  const std::string error = error_of([&] { drop_broken(none); }, scratch);
  EXPECT_TRUE(
      error.starts_with("[load] f must have images to test on that can be read, got 3 broken ones, the first: [load] f/train/ant/0.jpg"))
      << error;
  ImageSets made = load_images("synthetic-images:classes=2,count=4,test=2,size=8");
  EXPECT_TRUE(drop_broken(made).empty());
  EXPECT_EQ(made.train.count(), 4);
}

TEST(ImageFolder, ErrorsNameTheFolder) {
  const Scratch scratch;
  const auto folder = [&](const std::string& name) { return scratch.make_folder(name); };
  write_image_folder(scratch, "f");
  folder("f/val/cow");
  EXPECT_EQ(error_of_load(scratch, "f"), "[load] f/val must hold classes of train only, got 'cow'");
  folder("f/train/cow");
  EXPECT_EQ(error_of_load(scratch, "f"), "[load] f/train/cow must hold an image, got none");
  spill(scratch.path("f/train/cow/x.gif"), "");
  EXPECT_EQ(error_of_load(scratch, "f"), "[load] f/train/cow must hold .jpg, .jpeg and .png files only, got 'x.gif'");
  spill(scratch.path("f/train/notes.txt"), "");
  std::remove(scratch.path("f/train/cow/x.gif").c_str());
  ::rmdir(scratch.path("f/train/cow").c_str());
  EXPECT_EQ(error_of_load(scratch, "f"), "[load] f/train must hold one folder a class, got 'notes.txt'");
  folder("g");
  folder("g/train");
  folder("g/test");
  EXPECT_EQ(error_of_load(scratch, "g"), "[load] g/train must hold one folder a class, got nothing");
}

TEST(LoadImages, WhatIsNoLayoutIsNamed) {
  const Scratch scratch;
  scratch.make_folder("e");
  spill(scratch.path("e/a.txt"), "");
  EXPECT_TRUE(holds(error_of_load(scratch, "e"), "[load] e must hold data_batch_*.bin and test_batch.bin (CIFAR-10)"));
  EXPECT_TRUE(holds(error_of_load(scratch, "e"), "got 'a.txt'"));
  EXPECT_EQ(error_of_load(scratch, "e/a.txt"), "[load] path must be a folder of images, got e/a.txt");
  EXPECT_EQ(error_of_load(scratch, "no"), "[load] folder must exist, got no");
  EXPECT_FALSE(holds_images(scratch.path("e")));
  EXPECT_FALSE(holds_images(scratch.path("no")));
  EXPECT_FALSE(holds_images(""));
  EXPECT_TRUE(holds_images("synthetic-images:"));
}

TEST(LoadImages, ImagesByHandAreChecked) {
  const Scratch scratch;
  ImageData data;
  data.channels = 1;
  data.height = data.width = 2;
  data.labels = {0, 0};
  data.pixels.resize(7);
  EXPECT_EQ(error_of([&] { image_of(data, 1); }, scratch), "[load] there must be 2 images, as there are labels, of the sizes given, got 1");
  data.pixels.resize(8);
  EXPECT_EQ(image_of(data, 1).pixels.size(), 4u);
  data.height = int64_t{1} << 62;
  EXPECT_TRUE(holds(error_of([&] { image_of(data, 1); }, scratch), "must be 1 to 16384"));
}

}  // namespace
}  // namespace satchel
