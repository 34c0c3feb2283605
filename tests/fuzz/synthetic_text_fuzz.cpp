#include "satchel/data/synthetic.h"
#include "satchel/data/synthetic_images.h"
#include "satchel/data/synthetic_shapes.h"
#include "tests/fuzz/files.h"
#include "tests/fuzz/fuzz.h"

namespace satchel::fuzz {
namespace {

constexpr int64_t kSmall = 200;  // larger ones are only slow

void run_graph(std::string_view text) {
  const SyntheticOptions o = parse_synthetic(text);
  if (o.nodes <= kSmall && o.edges <= kSmall && o.features <= kSmall && o.classes <= kSmall) check_graph(make_synthetic(o));
}

void run_images(std::string_view text) {
  const SyntheticImageOptions o = parse_synthetic_images(text);
  if (o.classes > kSmall || o.channels > 4 || o.size > 16 || o.count > 20 || o.test > 20) return;
  const ImageSets sets = make_synthetic_images(o);
  require(sets.train.count() == o.count && sets.test.count() == o.test, "there are as many images as asked for");
}

void run_shapes(std::string_view text) {
  const SyntheticShapeOptions o = parse_synthetic_shapes(text);
  if (o.size > 48) return;
  const SceneSets sets = make_synthetic_shapes(o, SceneTask::segmentation);
  const Scene scene = draw_scene(sets.train.drawn, 0);
  require(static_cast<int64_t>(scene.mask.classes.size()) == o.size * o.size && !scene.objects.empty(),
          "scenes have their size and objects");
}

}  // namespace

void run(std::string_view input) {
  if (input.starts_with('i')) {
    run_images(input.substr(1));
  } else if (input.starts_with('p')) {
    run_shapes(input.substr(1));
  } else {
    run_graph(input);
  }
}

std::vector<std::string> seeds() {
  return {"arxiv",
          "arxiv,scale=0.001",
          "nodes=50,edges=90,features=4,classes=3,seed=7,homophily=0.5",
          "nodes=40,edges=40,features=4,classes=3,task=multi",
          "nodes=40,edges=40,features=4,classes=2,task=binary",
          "iclasses=2,size=8,count=6,test=2,channels=1,seed=3",
          "i",
          "pcount=3,size=32,shapes=64,classes=8,test=1,seed=9"};
}

}  // namespace satchel::fuzz
