// Drawn scenes that train like real ones, the same on every machine for the same options.
//
//   synthetic-shapes:                                     all defaults: 1,000 scenes of 128 × 128 and 200 to test
//   synthetic-shapes:count=1000,size=128,shapes=6,classes=5[,test=count/5][,seed=0]
//
// A scene has one to `shapes` objects of `classes` kinds (disc, square, triangle, ring, cross, diamond, frame, bar), which may hide a part
// of one another and hang over the edges, on a ground of changing light with strokes across it, all under noise. Half of an object's
// colour is its kind's, half its own. A mask's class is 0 for the ground and 1 + kind for what is seen of an object; a box is the exact
// bounds of what is seen.
#pragma once

#include <cstdint>
#include <string_view>

#include "satchel/data/scenes.h"

namespace satchel {

struct SyntheticShapeOptions {
  int64_t count = 1000, test = 200;  // scenes
  int64_t size = 128;                // height and width
  int64_t shapes = 6, classes = 5;   // most objects a scene; kinds of objects
  uint64_t seed = 0;
};

/// What stands after "synthetic-shapes:".
SyntheticShapeOptions parse_synthetic_shapes(std::string_view text);

/// Nothing is drawn before it is asked for.
SceneSets make_synthetic_shapes(const SyntheticShapeOptions& options, SceneTask task);

/// Image, mask and boxes of a drawn scene.
Scene draw_scene(const SceneData::Drawn& drawn, int64_t index);

}  // namespace satchel
