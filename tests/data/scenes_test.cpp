#include "satchel/data/scenes.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "satchel/data/png.h"
#include "satchel/data/synthetic_shapes.h"
#include "tests/data/image_files.h"
#include "tests/support.h"

namespace satchel {
namespace {

using test::error_of;
using test::holds;
using test::Scratch;
using testing_files::error_of;
using testing_files::flat_jpeg;

uint64_t hash_of(const std::vector<uint8_t>& bytes, uint64_t hash = 14695981039346656037u) {  // FNV-1a
  for (const uint8_t byte : bytes) hash = (hash ^ byte) * 1099511628211u;
  return hash;
}

TEST(SyntheticShapes, TheSameForTheSameOptions) {
  const SceneSets sets = load_scenes("synthetic-shapes:count=20,size=64,shapes=5,classes=4,seed=3", SceneTask::segmentation);
  EXPECT_EQ(sets.train.count * 100 + sets.test.count, 2004);
  EXPECT_EQ(sets.train.classes, 5);
  EXPECT_EQ(sets.train.class_names, (std::vector<std::string>{"ground", "disc", "square", "triangle", "ring"}));
  EXPECT_EQ(load_scenes("synthetic-shapes:classes=4", SceneTask::detection).train.classes, 4);
  const Scene a = scene_of(sets.train, 7), b = scene_of(sets.train, 7);
  EXPECT_EQ(a.image.pixels, b.image.pixels);
  EXPECT_EQ(a.objects, b.objects);
  // Test scenes go on where training scenes end.
  const SceneSets more = load_scenes("synthetic-shapes:count=24,size=64,shapes=5,classes=4,seed=3", SceneTask::segmentation);
  EXPECT_EQ(scene_of(sets.test, 3).image.pixels, scene_of(more.train, 23).image.pixels);
  EXPECT_NE(scene_of(sets.test, 0).image.pixels, scene_of(sets.train, 0).image.pixels);
  const SceneSets other = load_scenes("synthetic-shapes:count=20,size=64,shapes=5,classes=4,seed=4", SceneTask::segmentation);
  EXPECT_NE(scene_of(other.train, 7).image.pixels, a.image.pixels);
}

// Sums over whole numbers: another machine, compiler or library must give the same.
TEST(SyntheticShapes, BytesAreThoseOfEveryMachine) {
  const SceneSets sets = load_scenes("synthetic-shapes:count=2,size=48", SceneTask::segmentation);
  const Scene a = scene_of(sets.train, 0), b = scene_of(sets.train, 1);
  EXPECT_EQ(hash_of(b.mask.classes, hash_of(b.image.pixels, hash_of(a.mask.classes, hash_of(a.image.pixels)))), 1088121435103230024u);
}

/// Every pixel of an object is its kind's in the mask, every edge of a box touches one, and all pixels of the mask lie in boxes.
TEST(SyntheticShapes, BoxesAreTheBoundsOfWhatIsSeen) {
  const SceneSets sets = load_scenes("synthetic-shapes:count=60,size=96,shapes=8,classes=8", SceneTask::segmentation);
  std::set<int32_t> kinds;
  size_t most = 0;
  for (int64_t i = 0; i < sets.train.count; ++i) {
    const Scene scene = scene_of(sets.train, i);
    ASSERT_EQ(scene.mask.classes.size(), size_t{96} * 96);
    ASSERT_GE(scene.objects.size(), 1u);
    most = std::max(most, scene.objects.size());
    std::vector<bool> boxed(scene.mask.classes.size());
    for (const ObjectBox& box : scene.objects) {
      kinds.insert(box.label);
      ASSERT_TRUE(box.left >= 0 && box.top >= 0 && box.left < box.right && box.top < box.bottom && box.right <= 96 && box.bottom <= 96);
      const auto touches = [&](int64_t left, int64_t top, int64_t right, int64_t bottom) {
        for (int64_t y = top; y < bottom; ++y) {
          for (int64_t x = left; x < right; ++x) {
            if (scene.mask.classes[static_cast<size_t>(y * 96 + x)] == box.label + 1) return true;
          }
        }
        return false;
      };
      const auto l = static_cast<int64_t>(box.left), t = static_cast<int64_t>(box.top), r = static_cast<int64_t>(box.right),
                 b = static_cast<int64_t>(box.bottom);
      EXPECT_TRUE(touches(l, t, l + 1, b) && touches(r - 1, t, r, b) && touches(l, t, r, t + 1) && touches(l, b - 1, r, b)) << i;
      for (int64_t y = t; y < b; ++y) {
        for (int64_t x = l; x < r; ++x) boxed[static_cast<size_t>(y * 96 + x)] = true;
      }
    }
    for (size_t k = 0; k < boxed.size(); ++k) ASSERT_TRUE(boxed[k] || scene.mask.classes[k] == 0) << i;
  }
  EXPECT_EQ(kinds.size(), 8u);
  EXPECT_GE(most, 5u);
}

TEST(SyntheticShapes, BadOptions) {
  const auto error = [](const std::string& text) {
    return error_of([&] { load_scenes("synthetic-shapes:" + text, SceneTask::detection); });
  };
  EXPECT_EQ(error("size=31"), "[load] synthetic-shapes: size must be 32 to 4096, got 31");
  EXPECT_EQ(error("classes=9"), "[load] synthetic-shapes: classes must be 1 to 8, got 9");
  EXPECT_EQ(error("shapes"), "[load] synthetic-shapes: option must be name=value, got 'shapes'");
  EXPECT_EQ(error("shape=1"), "[load] synthetic-shapes: option must be count, size, shapes, classes, test or seed, got 'shape'");
  const SceneSets sets = load_scenes("synthetic-shapes:count=2", SceneTask::detection);
  EXPECT_EQ(error_of([&] { scene_of(sets.train, 2); }), "[load] scene must be 0 to 1, got 2");
}

/// A folder of scenes that goes away again. Images are 6 by 4.
class SceneFolders : public testing::Test {
 protected:
  static constexpr int64_t kHeight = 4, kWidth = 6;

  std::string folder(const std::string& name) const { return scratch_.path(name); }
  void write(const std::string& name, const std::string& bytes) const {
    std::filesystem::create_directories(std::filesystem::path(scratch_.path(name)).parent_path());
    test::spill(scratch_.path(name), bytes);
  }
  static std::string image() { return flat_jpeg(static_cast<int>(kHeight), static_cast<int>(kWidth), 200, 100, 50); }
  static std::string mask(std::vector<uint8_t> classes, int64_t height = kHeight, int64_t width = kWidth) {
    classes.resize(static_cast<size_t>(height * width));
    const std::vector<uint8_t> bytes = encode_png_mask({height, width, classes});
    return {bytes.begin(), bytes.end()};
  }
  std::string error(const std::string& name) const {
    return error_of(
        [&] {
          const SceneSets sets = load_scenes(folder(name), SceneTask::segmentation);
          for (int64_t i = 0; i < sets.train.count; ++i) scene_of(sets.train, i);
        },
        scratch_);
  }
  void write_voc(const std::string& at) const {
    write(at + "/JPEGImages/a.jpg", image());
    write(at + "/JPEGImages/b.jpg", image());
    write(at + "/SegmentationClass/a.png", mask({0, 20, 255}));
    write(at + "/SegmentationClass/b.png", mask({15}));
    write(at + "/ImageSets/Segmentation/train.txt", "a\n\nb\n");
    write(at + "/ImageSets/Segmentation/val.txt", "b\r\n");
  }

  Scratch scratch_;
};

TEST_F(SceneFolders, PascalVoc) {
  write_voc("own");
  const SceneSets sets = load_scenes(folder("own"), SceneTask::segmentation);
  EXPECT_EQ(sets.train.count * 10 + sets.test.count, 21);
  EXPECT_EQ(sets.train.classes, 21);
  EXPECT_EQ(sets.train.class_names[20], "tvmonitor");
  const Scene scene = scene_of(sets.train, 0);
  EXPECT_EQ(scene.image.height * 100 + scene.image.width, 406);
  EXPECT_EQ((std::vector<uint8_t>(scene.mask.classes.begin(), scene.mask.classes.begin() + 4)), (std::vector<uint8_t>{0, 20, 255, 0}));
  write_voc("kit/VOCdevkit/VOC2012");
  EXPECT_EQ(load_scenes(folder("kit"), SceneTask::segmentation).train.count, 2);
  EXPECT_TRUE(holds_scenes(folder("kit")));
  EXPECT_FALSE(holds_scenes(folder("nothing")));
}

TEST_F(SceneFolders, Cityscapes) {
  for (const char* part : {"train", "val"}) {
    write(std::string("own/leftImg8bit/") + part + "/bonn/bonn_1_leftImg8bit.png", image());  // by its bytes, not by its name
    write(std::string("own/gtFine/") + part + "/bonn/bonn_1_gtFine_labelIds.png", mask({7, 33, 0, 26, 255, 29}));
  }
  const SceneSets sets = load_scenes(folder("own"), SceneTask::segmentation);
  EXPECT_EQ(sets.train.classes, 19);
  const Scene scene = scene_of(sets.test, 0);
  EXPECT_EQ((std::vector<uint8_t>(scene.mask.classes.begin(), scene.mask.classes.begin() + 6)),
            (std::vector<uint8_t>{0, 18, 255, 13, 255, 255}));
  write("own/gtFine/train/bonn/bonn_1_gtFine_labelIds.png", mask({7, 7, 34}));
  EXPECT_EQ(error("own"),
            "[load] own/gtFine/train/bonn/bonn_1_gtFine_labelIds.png must have classes of the data set only, got 34 at row 0, column 2");
  write("own/leftImg8bit/train/bonn/bonn_2_leftImg8bit.png", image());
  EXPECT_EQ(error("own"),
            "[load] own/leftImg8bit/train/bonn/bonn_2_leftImg8bit.png must have a mask, got none at "
            "own/gtFine/train/bonn/bonn_2_gtFine_labelIds.png");
}

TEST_F(SceneFolders, BadMasksNameFileAndPlace) {
  write_voc("v");
  const std::string mask_b = "v/SegmentationClass/b.png";
  write(mask_b, mask({0, 0, 0, 0, 0, 0, 0, 21}));
  EXPECT_EQ(error("v"), "[load] v/SegmentationClass/b.png must have classes of the data set only, got 21 at row 1, column 1");
  write(mask_b, mask({}, 6, 4));
  EXPECT_EQ(error("v"), "[load] v/SegmentationClass/b.png must be of its image's size, 6 by 4, got 4 by 6");
  const std::string whole = mask({15});
  write(mask_b, whole.substr(0, whole.size() - 20));
  EXPECT_EQ(error("v"), "[load] v/SegmentationClass/b.png must be a whole PNG file, got its end too early");
  write(mask_b, image());
  EXPECT_TRUE(holds(error("v"), "SegmentationClass/b.png must begin with the bytes of a PNG file")) << error("v");
  write("v/ImageSets/Segmentation/train.txt", "a\nmissing\n");
  EXPECT_EQ(error("v"), "[load] v/ImageSets/Segmentation/train.txt: line 2 must name an image that is there, got v/JPEGImages/missing.jpg");
  write("v/JPEGImages/missing.jpg", image());
  EXPECT_EQ(error("v"),
            "[load] v/ImageSets/Segmentation/train.txt: line 2 must name a mask that is there, got v/SegmentationClass/missing.png");
  write("v/ImageSets/Segmentation/train.txt", "../a\n");
  EXPECT_EQ(error("v"), "[load] v/ImageSets/Segmentation/train.txt: line 1 must be a name, got '../a'");
  write("v/ImageSets/Segmentation/train.txt", "\n");
  EXPECT_EQ(error("v"), "[load] v/ImageSets/Segmentation/train.txt must name an image, got none");
  write("other/readme", "x");
  EXPECT_TRUE(holds(error("other"), "must hold JPEGImages, SegmentationClass and ImageSets/Segmentation (Pascal VOC), or leftImg8bit"));
}

TEST(PngMask, NumbersComeBack) {
  Mask mask{3, 5, {}};
  for (int i = 0; i < 15; ++i) mask.classes.push_back(static_cast<uint8_t>(i * 17));
  const std::vector<uint8_t> bytes = encode_png_mask(mask);
  EXPECT_EQ(decode_png_mask(bytes, "m.png").classes, mask.classes);
  // As colours: Pascal VOC's, black, 17 = 0b10001 → green of bit 1 (64) and red of bit 0 (128), 255 → 224, 224, 192.
  const Image image = decode_png(bytes, "m.png");
  const auto colour = [&](size_t i) { return std::vector<int>{image.pixels[i], image.pixels[15 + i], image.pixels[30 + i]}; };
  EXPECT_EQ(colour(0), (std::vector<int>{0, 0, 0}));
  EXPECT_EQ(colour(1), (std::vector<int>{128, 64, 0}));
  EXPECT_EQ(error_of([] { encode_png_mask({2, 2, {1}}); }), "[png] a mask must have height × width numbers, got 1");
}

}  // namespace
}  // namespace satchel
