// Batches of scenes made ahead by background threads. Order and augmentation are a pure function of seed, epoch and sample: the number of
// threads changes nothing.
//
//   SceneLoader loader(sets.train, scene_training_options(sets, 16, 512, seed));
//   loader.start(epoch);
//   while (loader.next(batch)) …
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "satchel/data/scenes.h"

namespace satchel {

enum class SceneView : uint8_t {
  whole,    // the image as it is
  crop,     // scaled by least_scale to most_scale, then size × size of it anywhere, padded where it is smaller
  resized,  // its shorter side brought to one of `sides`, but the longer one to at most `longest`
};

struct SceneLoaderOptions {
  int64_t batch = 8;
  bool shuffle = false;
  bool drop_last = false;  // leave out a last batch that is not full
  SceneView view = SceneView::whole;
  int64_t size = 512;                            // crop
  double least_scale = 0.5, most_scale = 2;      // crop
  std::vector<int64_t> sides = {800};            // resized: one is drawn for each scene of an epoch
  int64_t longest = 1333;                        // resized
  bool crop_anywhere = true;                     // crop: at a place that is drawn; else the upper left corner
  int64_t multiple = 1;                          // height and width of a batch are padded to one
  bool flip = false;                             // left and right exchanged for half of the samples
  bool masks = true;                             // where the data have them
  std::vector<float> mean = {}, deviation = {};  // (value/255 − mean)/deviation; one a channel, or none: 0 and 1
  int threads = 0;                               // 0: one a core, at most 16
  int64_t ahead = 3;                             // batches made before they are asked for
  uint64_t seed = 0;
};

/// What masks are usually trained with: shuffled, drop_last, crops of size × size, flipped.
SceneLoaderOptions scene_training_options(const SceneSets& sets, int64_t batch, int64_t size, uint64_t seed);
/// … and tested with: whole.
SceneLoaderOptions scene_testing_options(const SceneSets& sets, int64_t batch);

/// All images stand in the upper left corner of the batch's height × width; what is past them is 0 (the mean) and, in masks, ignored.
struct SceneBatch {
  struct Size {
    int64_t height = 0, width = 0;          // of the image in the batch
    int64_t own_height = 0, own_width = 0;  // in the data
  };
  int64_t count = 0, channels = 3, height = 0, width = 0;
  std::vector<float> images;                    // count × channels × height × width
  std::vector<uint8_t> masks;                   // count × height × width, or none
  std::vector<std::vector<ObjectBox>> objects;  // count, in places of the batch; a crop has those of which something is left
  std::vector<Size> sizes;                      // count
  std::vector<int64_t> indices;                 // count: places in the data set
};

class SceneLoader {
 public:
  /// `data` must outlive the loader. Throws `[loader] rule, got value` for options that do not fit it.
  SceneLoader(const SceneData& data, SceneLoaderOptions options);
  ~SceneLoader();
  SceneLoader(const SceneLoader&) = delete;
  SceneLoader& operator=(const SceneLoader&) = delete;

  /// As ImageLoader's.
  void start(int64_t epoch);
  bool next(SceneBatch& batch);

  int64_t batches() const;  // of an epoch
  int64_t scenes() const;   // of an epoch: without those that drop_last leaves out

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace satchel
