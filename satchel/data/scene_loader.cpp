#include "satchel/data/scene_loader.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <numeric>
#include <optional>
#include <utility>

#include "satchel/core/error.h"
#include "satchel/data/augment.h"
#include "satchel/data/batch_threads.h"
#include "satchel/data/image_layouts.h"
#include "satchel/data/numbers.h"

namespace satchel {
namespace {

constexpr int64_t kChannels = 3;

void check(const SceneData& data, const SceneLoaderOptions& o) {
  const auto within = [](const char* what, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high)
      fail("loader", std::string(what) + " must be " + std::to_string(low) + " to " + std::to_string(high), value);
  };
  within("batch", o.batch, 1, kMaxImages);
  within("ahead", o.ahead, 1, 1024);
  within("threads", o.threads, 0, kMaxLoaderThreads);
  within("size", o.size, 1, kMaxSide);
  within("longest", o.longest, 1, kMaxSide);
  within("multiple", o.multiple, 1, kMaxSide);
  if (o.sides.empty()) fail("loader", "sides must have a number", 0);
  for (const int64_t side : o.sides) within("sides", side, 1, kMaxSide);
  if (!(o.least_scale > 0 && o.least_scale <= o.most_scale && o.most_scale <= 16))
    fail("loader", "scales must be above 0, rise, and be at most 16",
         std::to_string(o.least_scale) + " to " + std::to_string(o.most_scale));
  if (o.drop_last && data.count < o.batch)
    fail("loader", "there must be a full batch of " + std::to_string(o.batch) + " where the last one is left out", data.count);
  for (const auto* numbers : {&o.mean, &o.deviation}) {
    if (!numbers->empty() && numbers->size() != kChannels) fail("loader", "mean and deviation must have 3 numbers", numbers->size());
    for (const float number : *numbers) {
      if (!std::isfinite(number) || (numbers == &o.deviation && number <= 0))
        fail("loader", "mean and deviation must be finite, and deviation above 0", number);
    }
  }
  if (o.view == SceneView::crop)
    check_memory(static_cast<uint64_t>(std::min(o.batch, data.count) * kChannels * o.size * o.size) * sizeof(float), "a batch of scenes");
}

/// `part` of a mask resized to height × width: the class at the middle of each place.
std::vector<uint8_t> nearest(const Mask& mask, int64_t height, int64_t width, const Box& part) {
  std::vector<uint8_t> out(static_cast<size_t>(part.height * part.width));
  uint8_t* to = out.data();
  for (int64_t y = part.top; y < part.top + part.height; ++y) {
    const uint8_t* row = mask.classes.data() + (2 * y + 1) * mask.height / (2 * height) * mask.width;
    for (int64_t x = part.left; x < part.left + part.width; ++x) *to++ = row[(2 * x + 1) * mask.width / (2 * width)];
  }
  return out;
}

/// Boxes of an image of one size in `part` of it at another; those that are left of nothing go.
std::vector<ObjectBox> placed(std::vector<ObjectBox> objects, const Image& from, int64_t height, int64_t width, const Box& part,
                              bool flip) {
  const float down = static_cast<float>(height) / static_cast<float>(from.height),
              across = static_cast<float>(width) / static_cast<float>(from.width);
  const auto w = static_cast<float>(part.width), h = static_cast<float>(part.height);
  for (ObjectBox& box : objects) {
    box.left = std::clamp(box.left * across - static_cast<float>(part.left), 0.0f, w);
    box.right = std::clamp(box.right * across - static_cast<float>(part.left), 0.0f, w);
    box.top = std::clamp(box.top * down - static_cast<float>(part.top), 0.0f, h);
    box.bottom = std::clamp(box.bottom * down - static_cast<float>(part.top), 0.0f, h);
    if (flip) box = {w - box.right, box.top, w - box.left, box.bottom, box.label, box.crowd};
  }
  std::erase_if(objects, [](const ObjectBox& box) { return !(box.right > box.left && box.bottom > box.top); });
  return objects;
}

}  // namespace

struct SceneLoader::State {
  /// A scene as a batch has it, before it is padded.
  struct Sample {
    Image image;
    std::vector<uint8_t> mask;  // image.height × image.width, or none
    std::vector<ObjectBox> objects;
    bool flip = false;
    int64_t own_height = 0, own_width = 0;
  };

  /// A batch in the making.
  struct Made {
    SceneBatch batch;
    std::vector<Sample> samples;
    std::atomic<int64_t> left{0};  // samples not yet made: the thread that makes the last one puts them together
  };

  State(const SceneData& scenes, SceneLoaderOptions wanted) : data(scenes), options(std::move(wanted)) {
    check(data, options);
    size = std::min(options.batch, std::max<int64_t>(data.count, 1));
    count = options.drop_last ? data.count / size * size : data.count;
    batches = (count + size - 1) / size;
    for (size_t c = 0; c < kChannels; ++c) {
      const float mean = options.mean.empty() ? 0 : options.mean[c], deviation = options.deviation.empty() ? 1 : options.deviation[c];
      for (int v = 0; v < 256; ++v) table[c * 256 + static_cast<size_t>(v)] = (static_cast<float>(v) / 255 - mean) / deviation;
    }
    made = std::vector<Made>(static_cast<size_t>(options.ahead));
    threads.emplace(options.threads, options.ahead, size,
                    BatchThreads::Work{[this](int64_t b, size_t slot) { prepare(b, made[slot]); },
                                       [this](int64_t b, int64_t piece, size_t slot) { make(b, piece, made[slot]); }});
  }

  void prepare(int64_t b, Made& m) const {
    m.batch.count = std::min(size, count - b * size);
    m.samples.clear();
    m.samples.resize(static_cast<size_t>(m.batch.count));
    m.left = m.batch.count;
  }

  void make(int64_t b, int64_t piece, Made& m) const {
    if (piece >= m.batch.count) return;  // of a last batch
    m.samples[static_cast<size_t>(piece)] = sample_of(order[static_cast<size_t>(b * size + piece)]);
    if (--m.left == 0) put_together(b, m);
  }

  /// Scale and crop are drawn from the epoch and the scene's place in the data.
  Sample sample_of(int64_t index) const {
    Scene scene = scene_of(data, index);
    const Image& image = scene.image;
    const Words words = Dice(epoch_noise, kSceneCrop)(static_cast<uint32_t>(index));
    int64_t height = image.height, width = image.width;
    Box part{0, 0, height, width};
    if (options.view == SceneView::crop) {
      const double scale = options.least_scale + (options.most_scale - options.least_scale) * (words.w[0] * 0x1p-32);
      height = scaled(height, scale);
      width = scaled(width, scale);
      part = {0, 0, std::min(height, options.size), std::min(width, options.size)};
      if (options.crop_anywhere) {
        part.top = below(static_cast<uint32_t>(height - part.height + 1), words.w[1]);
        part.left = below(static_cast<uint32_t>(width - part.width + 1), words.w[2]);
      }
    } else if (options.view == SceneView::resized) {
      const int64_t side = options.sides[below(static_cast<uint32_t>(options.sides.size()), words.w[0])];
      const auto shorter = static_cast<double>(std::min(height, width)), longer = static_cast<double>(std::max(height, width));
      const double scale = std::min(static_cast<double>(side) / shorter, static_cast<double>(options.longest) / longer);
      height = scaled(height, scale);
      width = scaled(width, scale);
      part = {0, 0, height, width};
    }
    Sample sample;
    sample.own_height = image.height;
    sample.own_width = image.width;
    sample.flip = options.flip && (words.w[3] & 1) != 0;
    const bool masks = options.masks && !scene.mask.classes.empty();
    if (masks) sample.mask = nearest(scene.mask, height, width, part);
    sample.objects = placed(std::move(scene.objects), image, height, width, part, sample.flip);
    const bool as_it_is = height == image.height && width == image.width && part == Box{0, 0, height, width};
    sample.image = as_it_is ? std::move(scene.image) : resized(image, {0, 0, image.height, image.width}, height, width, part);
    return sample;
  }

  static int64_t scaled(int64_t side, double scale) {
    return std::clamp<int64_t>(static_cast<int64_t>(static_cast<double>(side) * scale + 0.5), 1, kMaxSide);
  }

  void put_together(int64_t b, Made& m) const {
    SceneBatch& batch = m.batch;
    const bool crop = options.view == SceneView::crop;
    batch.height = batch.width = crop ? options.size : 0;
    for (const Sample& s : m.samples) {
      batch.height = std::max(batch.height, s.image.height);
      batch.width = std::max(batch.width, s.image.width);
    }
    const auto up = [&](int64_t side) { return (side + options.multiple - 1) / options.multiple * options.multiple; };
    batch.height = up(batch.height);
    batch.width = up(batch.width);
    const bool masks = !m.samples.front().mask.empty();
    const auto places = static_cast<size_t>(batch.height * batch.width), n = static_cast<size_t>(batch.count);
    check_memory(n * places * kChannels * sizeof(float), "a batch of scenes");
    batch.images.assign(n * kChannels * places, 0.0f);
    batch.masks.assign(masks ? n * places : 0, Mask::ignored);
    batch.objects.clear();
    batch.sizes.clear();
    batch.indices.clear();
    for (size_t i = 0; i < n; ++i) {
      Sample& s = m.samples[i];
      for (size_t c = 0; c < kChannels; ++c) {
        const float* values = table.data() + 256 * c;
        lay(s.image.pixels.data() + c * static_cast<size_t>(s.image.height * s.image.width), s, batch.width,
            batch.images.data() + (i * kChannels + c) * places, [values](uint8_t v) { return values[v]; });
      }
      if (masks) lay(s.mask.data(), s, batch.width, batch.masks.data() + i * places, [](uint8_t v) { return v; });
      batch.objects.push_back(std::move(s.objects));
      batch.sizes.push_back({s.image.height, s.image.width, s.own_height, s.own_width});
      batch.indices.push_back(order[static_cast<size_t>(b * size) + i]);
    }
    m.samples.clear();
  }

  /// Rows of a sample into rows of `stride`, mirrored where it is flipped.
  template <class To, class Value>
  static void lay(const uint8_t* from, const Sample& s, int64_t stride, To* to, const Value& value) {
    const int64_t width = s.image.width;
    for (int64_t y = 0; y < s.image.height; ++y, from += width, to += stride) {
      for (int64_t x = 0; x < width; ++x) to[s.flip ? width - 1 - x : x] = value(from[x]);
    }
  }

  void start(int64_t epoch) {
    threads->start(batches, [&] {
      order.resize(static_cast<size_t>(data.count));
      std::iota(order.begin(), order.end(), 0);
      epoch_noise = epoch_seed(options.seed, epoch);
      if (options.shuffle) shuffle(std::span(order), Dice(epoch_noise, kSceneOrder));
    });
  }

  const SceneData& data;
  const SceneLoaderOptions options;
  std::array<float, 256 * kChannels> table{};  // what a byte becomes
  int64_t count = 0, batches = 0;              // of an epoch
  int64_t size = 0;                            // scenes of a full batch
  std::vector<Made> made;                      // by slot
  std::vector<int64_t> order;
  uint64_t epoch_noise = 0;
  std::optional<BatchThreads> threads;  // last: they read all of the above
};

SceneLoader::SceneLoader(const SceneData& data, SceneLoaderOptions options) : state_(std::make_unique<State>(data, std::move(options))) {}
SceneLoader::~SceneLoader() = default;

void SceneLoader::start(int64_t epoch) { state_->start(epoch); }
bool SceneLoader::next(SceneBatch& batch) {
  return state_->threads->next([&](size_t slot) { std::swap(batch, state_->made[slot].batch); });
}
int64_t SceneLoader::batches() const { return state_->batches; }
int64_t SceneLoader::scenes() const { return state_->count; }

SceneLoaderOptions scene_training_options(const SceneSets& sets, int64_t batch, int64_t size, uint64_t seed) {
  SceneLoaderOptions o = scene_testing_options(sets, batch);
  o.shuffle = true;
  o.drop_last = sets.train.count >= batch;
  o.view = SceneView::crop;
  o.size = size;
  o.flip = true;
  o.seed = seed;
  return o;
}

SceneLoaderOptions scene_testing_options(const SceneSets& sets, int64_t batch) {
  SceneLoaderOptions o;
  o.batch = batch;
  o.mean = sets.mean;
  o.deviation = sets.deviation;
  return o;
}

}  // namespace satchel
