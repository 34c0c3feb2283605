// Images with what segmentation and detection learn from: a class a pixel, and boxes. Torch-free: parsers of untrusted files build and are
// tested without torch.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "satchel/data/image_data.h"

namespace satchel {

/// A class a pixel, height × width.
struct Mask {
  static constexpr uint8_t ignored = 255;  // pixels that neither loss nor score count
  int64_t height = 0, width = 0;
  std::vector<uint8_t> classes;
};

/// Corners in pixels of the image, right and bottom not included; areas above 0 and inside the image.
struct ObjectBox {
  float left = 0, top = 0, right = 0, bottom = 0;
  int32_t label = 0;   // 0 … classes − 1 of SceneData
  bool crowd = false;  // of several objects: scores pass over it, training leaves it out
  float area = 0;      // of the object itself, where the data say so; 0: the box's
  bool operator==(const ObjectBox&) const = default;
};

struct Scene {
  Image image;
  Mask mask;                       // empty where the data have none
  std::vector<ObjectBox> objects;  // none where the data have none
};

enum class SceneTask : uint8_t { segmentation, detection };

constexpr uint8_t kUnknownClass = 254;

/// Scenes in files that are decoded when they are asked for, or drawn from a seed.
struct SceneData {
  std::string name;
  int64_t count = 0;
  int64_t classes = 0;                          // segmentation: with the background, class 0; detection: of objects
  std::vector<std::string> class_names;         // classes of them, or none
  std::vector<std::string> paths, mask_paths;   // in files: one a scene, or no masks
  std::vector<uint8_t> class_of;                // in files: 256, the class that a mask's number is; kUnknownClass: none
  std::vector<std::vector<ObjectBox>> objects;  // in files: one list a scene
  std::vector<std::array<int64_t, 2>> sizes;    // in files: width and height that an image must have, as the data say it, or none
  std::vector<int64_t> ids;                     // detection: the data's own numbers of images, or none
  std::vector<int64_t> category_ids;            // detection: the data's own numbers of classes, or none
  struct Drawn {                                // drawn: side > 0 (synthetic_shapes.h)
    int64_t side = 0, shapes = 0, kinds = 0;    // pixels; most shapes a scene; kinds of them: an object's label, a mask's class less 1
    uint64_t seed = 0;
    int64_t first = 0;  // number of the first scene: training and test scenes are drawn apart
  } drawn;
};

/// Scene `index`; throws `[load] …` that names the file where it cannot be decoded, image and mask differ in size, or boxes
/// lie outside the image. Thread-safe.
Scene scene_of(const SceneData& data, int64_t index);

struct SceneSets {
  SceneData train, test;
  std::vector<float> mean, deviation;  // one a channel, of values 0 … 1
};

/// The layout is found from what is there, for the task:
///   JPEGImages, SegmentationClass, ImageSets/Segmentation/*.txt     Pascal VOC (or its VOCdevkit/VOC20xx parent), masks by palette
///   JPEGImages, Annotations, ImageSets/Main/*.txt                   Pascal VOC, boxes in XML
///   leftImg8bit/train|val/CITY, gtFine/train|val/CITY               Cityscapes, *_gtFine_labelIds.png brought to 19 classes
///   annotations/instances_train*.json, instances_val*.json, images  COCO (images in train2017, val2017 or as `file_name` says)
///   "synthetic-shapes:…"                                            drawn (synthetic_shapes.h)
/// Throws `[load] rule, got value` that names file and position.
SceneSets load_scenes(const std::string& where, SceneTask task);

/// Does `where` look like scenes (a layout above)? Looks at names only and never throws.
bool holds_scenes(const std::string& where);

}  // namespace satchel
