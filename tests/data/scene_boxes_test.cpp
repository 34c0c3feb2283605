// COCO's and Pascal VOC's boxes: what they load as, and what is refused with file and place.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <string>

#include "satchel/core/error.h"
#include "satchel/data/scenes.h"
#include "satchel/data/xml.h"
#include "tests/data/files.h"
#include "tests/data/image_files.h"

namespace satchel {
namespace {

using testing_files::flat_jpeg;
using testing_files::Scratch;
using testing_files::spill;

std::string load_error(const std::string& folder) {
  try {
    load_scenes(folder, SceneTask::detection);
  } catch (const Error& e) {
    return e.what();
  }
  return "none";
}

std::string scene_error(const SceneData& data, int64_t index) {
  try {
    scene_of(data, index);
  } catch (const Error& e) {
    return e.what();
  }
  return "none";
}

void make_folder(const std::string& path) { ASSERT_EQ(::mkdir(path.c_str(), 0700), 0) << path; }

/// A folder in COCO's layout; parts of its JSON as texts.
class Coco {
 public:
  Coco() {
    make_folder(folder() + "/annotations");
    make_folder(folder() + "/train2017");
    make_folder(folder() + "/val2017");
    for (const char* name : {"/train2017/a.jpg", "/train2017/b.jpg", "/val2017/c.jpg"}) spill(folder() + name, "no pixels");
    write("val", R"([{"id": 9, "file_name": "c.jpg", "width": 50, "height": 40}])",
          R"([{"image_id": 9, "category_id": 3, "bbox": [1, 2, 3, 4], "iscrowd": 1}])");
    train(R"([{"image_id": 7, "category_id": 18, "bbox": [10, 5, 20, 30.5], "area": 300, "iscrowd": 0, "segmentation": [[1, 2]]},
              {"image_id": 5, "category_id": 3, "bbox": [0, 0, 100.5, 80]},
              {"image_id": 5, "category_id": 3, "bbox": [4, 4, 0, 10]}])");
  }
  std::string folder() const { return scratch_.folder(); }
  void train(const std::string& annotations) { write("train", kImages, annotations); }
  void write(const std::string& part, const std::string& images, const std::string& annotations) {
    spill(folder() + "/annotations/instances_" + part + "2017.json",
          R"({"images": )" + images + R"(, "annotations": )" + annotations +
              R"(, "categories": [{"id": 3, "name": "car"}, {"id": 18, "name": "dog"}]})");
  }
  static constexpr const char* kImages =
      R"([{"id": 7, "file_name": "a.jpg", "width": 60, "height": 70}, {"id": 5, "file_name": "b.jpg", "width": 100, "height": 80}])";

 private:
  Scratch scratch_;
};

TEST(CocoBoxes, LoadsImagesClassesAndBoxes) {
  const Coco coco;
  EXPECT_TRUE(holds_scenes(coco.folder()));
  const SceneSets sets = load_scenes(coco.folder(), SceneTask::detection);
  EXPECT_EQ(sets.train.count, 2);
  EXPECT_EQ(sets.train.class_names, (std::vector<std::string>{"car", "dog"}));
  EXPECT_EQ(sets.train.category_ids, (std::vector<int64_t>{3, 18}));
  EXPECT_EQ(sets.train.ids, (std::vector<int64_t>{7, 5}));
  EXPECT_TRUE(sets.train.paths[0].ends_with("/train2017/a.jpg"));
  ASSERT_EQ(sets.train.objects[0].size(), 1U);
  EXPECT_EQ(sets.train.objects[0][0], (ObjectBox{10, 5, 30, 35.5F, 1, false, 300}));
  ASSERT_EQ(sets.train.objects[1].size(), 1U);                                   // that of no area is left out
  EXPECT_EQ(sets.train.objects[1][0], (ObjectBox{0, 0, 100, 80, 0, false, 0}));  // cut by half a pixel
  EXPECT_EQ(sets.test.count, 1);
  EXPECT_TRUE(sets.test.objects[0][0].crowd);
  EXPECT_EQ(sets.mean.size(), 3U);
}

TEST(CocoBoxes, RefusesWithFileAndPlace) {
  Coco coco;
  const std::string at = "[load] " + coco.folder() + "/annotations/instances_train2017.json: ";
  const auto error = [&](const std::string& annotations) {
    coco.train(annotations);
    return load_error(coco.folder());
  };
  EXPECT_EQ(error(R"([{"image_id": 6, "category_id": 3, "bbox": [1, 2, 3, 4]}])"),
            at + "annotations[0] image_id must be an image's id, got 6");
  EXPECT_EQ(error(R"([{"image_id": 7, "category_id": 4, "bbox": [1, 2, 3, 4]}])"),
            at + "annotations[0] category_id must be a category of the training images, got 4");
  EXPECT_EQ(error(R"([{"image_id": 7, "category_id": 3, "bbox": [50, 2, 40, 4]}])"),
            at + "annotations[0] bbox must lie in its image: left, top, width, height, got 50, 2, 40, 4 in 60 × 70");
  EXPECT_EQ(error(R"([{"image_id": 7, "category_id": 3, "bbox": [5, 2, -4, 4]}])"),
            at + "annotations[0] bbox must lie in its image: left, top, width, height, got 5, 2, -4, 4 in 60 × 70");
  EXPECT_EQ(error(R"([{"image_id": 7, "category_id": 3, "bbox": [5, 2, 4]}])"),
            at + "annotations[0] bbox must be 4 numbers: left, top, width, height, got '[5,2,4]'");
  EXPECT_EQ(error(R"([{"image_id": "7", "category_id": 3, "bbox": [5, 2, 4, 4]}])"),
            at + "annotations[0] image_id must be a whole number, got '\"7\"'");
  EXPECT_EQ(error(R"([7])"), at + "annotations[0] must be an object, got number");
  EXPECT_EQ(error(R"([])"), "none");  // images without objects
  coco.write("train", R"([{"id": 1, "file_name": "z.jpg", "width": 6, "height": 7}])", "[]");
  EXPECT_EQ(load_error(coco.folder()), at + "images[0] file_name must name a file in " + coco.folder() + "/train2017, got 'z.jpg'");
  const std::string broken = coco.folder() + "/annotations/instances_train2017.json";
  spill(broken, R"({"images": [}])");
  EXPECT_EQ(load_error(coco.folder()), "[load] " + broken + ": byte 13 must be JSON, got '}]'");
  spill(broken, R"({"images": [{"id": 7, "file_na)");
  EXPECT_EQ(load_error(coco.folder()), "[load] " + broken + ": byte 31 must be JSON, got the file's end");
  std::string deep = R"({"categories": [{"id": )";  // lists in lists are not written out, however deep
  deep += std::string(100000, '[') + std::string(100000, ']') + "}]}";
  spill(broken, deep);
  EXPECT_EQ(load_error(coco.folder()), "[load] " + broken + ": categories[0] id must be a whole number, got lists in a list");
  spill(broken, R"({"categories": [{"id": 18446744073709551615, "name": "car"}]})");
  EXPECT_EQ(load_error(coco.folder()), "[load] " + broken + ": categories[0] id must be a whole number, got '18446744073709551615'");
  spill(broken, "");
  EXPECT_EQ(load_error(coco.folder()), "[load] " + broken + ": byte 1 must be JSON, got an empty file");
  spill(broken, "[1]");
  EXPECT_EQ(load_error(coco.folder()), "[load] " + broken + " must be an object, got array");
  spill(broken, "{}");
  EXPECT_EQ(load_error(coco.folder()), "[load] " + broken + " must have a list 'categories', got none");
}

/// Annotations of images that were resized, or of other ones.
TEST(CocoBoxes, ImagesAreOfTheSizeThatAnnotationsSay) {
  const Coco coco;
  const std::string image = coco.folder() + "/train2017/a.jpg";
  spill(image, flat_jpeg(35, 30, 200, 100, 50));
  const SceneSets sets = load_scenes(coco.folder(), SceneTask::detection);
  EXPECT_EQ(scene_error(sets.train, 0), "[load] " + image + " must be 60 by 70, as its annotations say, got 30 by 35");
  spill(image, flat_jpeg(70, 60, 200, 100, 50));
  EXPECT_EQ(scene_error(sets.train, 0), "none");
}

std::string voc_xml(const std::string& objects) {
  return "<annotation>\n<size><width>50</width><height>40</height><depth>3</depth></size>\n" + objects + "</annotation>\n";
}
std::string voc_object(const std::string& name, const std::string& box, const std::string& more = "") {
  return "<object>\n<name>" + name + "</name>" + more + "\n<bndbox>" + box + "</bndbox>\n</object>\n";
}
const std::string kBox = "<xmin>1</xmin><ymin>11</ymin><xmax>20</xmax><ymax>40</ymax>";

class Voc {
 public:
  Voc() {
    for (const char* name : {"/Annotations", "/JPEGImages", "/ImageSets", "/ImageSets/Main"}) make_folder(folder() + name);
    for (const char* name : {"a", "b"}) spill(folder() + "/JPEGImages/" + name + ".jpg", "no pixels");
    spill(folder() + "/ImageSets/Main/train.txt", "a\n");
    spill(folder() + "/ImageSets/Main/val.txt", "b  1\n\n");
    write("a", voc_xml(voc_object("dog", kBox) + voc_object("cat", kBox, "<difficult>1</difficult><part><name>head</name></part>")));
    write("b", voc_xml(""));
  }
  std::string folder() const { return scratch_.folder(); }
  void write(const std::string& name, const std::string& text) { spill(folder() + "/Annotations/" + name + ".xml", text); }

 private:
  Scratch scratch_;
};

TEST(VocBoxes, LoadsBoxesFromOneOn) {
  Voc voc;
  const SceneSets sets = load_scenes(voc.folder(), SceneTask::detection);
  EXPECT_EQ(sets.train.classes, 20);
  EXPECT_EQ(sets.train.class_names[11], "dog");
  ASSERT_EQ(sets.train.objects[0].size(), 2U);
  EXPECT_EQ(sets.train.objects[0][0], (ObjectBox{0, 10, 20, 40, 11, false, 0}));
  EXPECT_EQ(sets.train.objects[0][1], (ObjectBox{0, 10, 20, 40, 7, true, 0}));
  EXPECT_TRUE(sets.test.objects[0].empty());
  voc.write("a", voc_xml(voc_object("zebra", kBox) + voc_object("ant", kBox)));  // classes of their own
  EXPECT_EQ(load_scenes(voc.folder(), SceneTask::detection).train.class_names, (std::vector<std::string>{"ant", "zebra"}));
}

TEST(VocBoxes, ImagesAreAsLargeAsTheirBoxes) {
  const Voc voc;
  const std::string image = voc.folder() + "/JPEGImages/a.jpg";
  spill(image, flat_jpeg(20, 25, 200, 100, 50));
  const SceneSets sets = load_scenes(voc.folder(), SceneTask::detection);
  EXPECT_EQ(scene_error(sets.train, 0), "[load] " + image + " must be as large as its boxes, to 20, 40, got 25 by 20");
}

TEST(VocBoxes, RefusesWithFileAndLine) {
  Voc voc;
  const std::string a = "[load] " + voc.folder() + "/Annotations/a.xml: line ", b = "[load] " + voc.folder() + "/Annotations/b.xml: line ";
  const auto error = [&](const std::string& text) {
    voc.write("a", text);
    return load_error(voc.folder());
  };
  const auto boxed = [](const std::string& numbers) { return voc_xml(voc_object("dog", numbers)); };
  EXPECT_EQ(error(boxed("<xmin>30</xmin><ymin>1</ymin><xmax>20</xmax><ymax>4</ymax>")),
            a + "5 a box must have an area, got 30, 1 to 20, 4 in 50 × 40");
  EXPECT_EQ(error(boxed("<xmin>30</xmin><ymin>1</ymin><xmax>90</xmax><ymax>4</ymax>")),
            a + "5 a box must lie in its image, got 30, 1 to 90, 4 in 50 × 40");
  EXPECT_EQ(error(boxed("<xmin>x</xmin><ymin>1</ymin><xmax>90</xmax><ymax>4</ymax>")), a + "5 <xmin> must be a number, got 'x'");
  EXPECT_EQ(error(boxed("<xmin>1</xmin>")), a + "5 must have <ymin> in <bndbox>, got none");
  EXPECT_EQ(error("<annotation>\n<size>\n"), a + "3: <size> of line 2 must end, got the file's end");
  EXPECT_EQ(error("<annotation>\n</size>\n"), a + "2: </annotation> must end the element of line 1, got '</size'");
  EXPECT_EQ(error("<other/>"), a + "1 must have the root <annotation>, got <other>");
  EXPECT_EQ(error("<annotation/>"), a + "1 must have <size> in <annotation>, got none");
  EXPECT_EQ(error("<!DOCTYPE x><annotation/>"), a + "1: an element must begin with <name, got '<!DOCTYPE x><annotation/…'");
  voc.write("a", voc_xml(voc_object("zebra", kBox)));
  voc.write("b", voc_xml(voc_object("ant", kBox)));
  EXPECT_EQ(load_error(voc.folder()), b + "3 an object's class must be one of the training images', got 'ant'");
  spill(voc.folder() + "/ImageSets/Main/train.txt", "a\nq\n");
  EXPECT_EQ(load_error(voc.folder()),
            "[load] " + voc.folder() + "/ImageSets/Main/train.txt: line 2 must name an image in JPEGImages (.jpg or .png), got 'q'");
}

TEST(Xml, ReadsElementsTextAndEntities) {
  const XmlElement root = parse_xml("<?xml version=\"1.0\"?>\n<!-- x --><a k='1' >\n <b> 1 &lt; 2 </b><!-- > --><b/>\n</a> ", "f");
  EXPECT_EQ(root.name, "a");
  ASSERT_EQ(root.children.size(), 2U);
  EXPECT_EQ(root.children[0].text, "1 < 2");
  EXPECT_EQ(root.children[0].line, 3);
  EXPECT_EQ(root.child("c"), nullptr);
  for (const char* text : {"", "<a>", "<a></b>", "<a>&x;</a>", "<a", "<a b>", "<a b=1/>", "<a/><b/>", "text", "<a b='/>", "<!-- <a/>"})
    EXPECT_THROW(parse_xml(text, "f"), Error) << text;
  std::string deep;
  for (int i = 0; i < 100000; ++i) deep += "<a>";
  EXPECT_THROW(parse_xml(deep, "f"), Error);
}

}  // namespace
}  // namespace satchel
