#include "satchel/data/image_loader.h"

#include <algorithm>
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

constexpr int64_t kPiece = 32;  // images that a thread makes at a time

void check(const ImageData& data, const ImageLoaderOptions& o, int64_t height, int64_t width) {
  if (o.batch < 1 || o.batch > kMaxImages) fail("loader", "batch must be 1 to " + std::to_string(kMaxImages), o.batch);
  if (o.ahead < 1 || o.ahead > 1024) fail("loader", "ahead must be 1 to 1024", o.ahead);
  if (o.threads < 0 || o.threads > kMaxLoaderThreads)
    fail("loader", "threads must be 0 to " + std::to_string(kMaxLoaderThreads), o.threads);
  if (o.drop_last && data.count() < o.batch) {
    fail("loader", "there must be a full batch of " + std::to_string(o.batch) + " where the last one is left out", data.count());
  }
  const int64_t values = data.channels * height * width;  // at most 2^42
  if (values > INT64_MAX / 4 / std::max<int64_t>(data.count(), 1)) fail("loader", "images must have fewer values", values);
  check_memory(static_cast<uint64_t>(std::min(o.batch, data.count()) * values) * sizeof(float), "a batch of images");
}

}  // namespace

struct ImageLoader::State {
  State(const ImageData& images, ImageLoaderOptions wanted) : data(images), options(std::move(wanted)), augment(data, options) {
    check(data, options, augment.height(), augment.width());
    size = std::min(options.batch, std::max<int64_t>(data.count(), 1));
    count = options.drop_last ? data.count() / size * size : data.count();
    batches = (count + size - 1) / size;
    made.resize(static_cast<size_t>(options.ahead));
    threads.emplace(options.threads, options.ahead, (size + kPiece - 1) / kPiece,
                    BatchThreads::Work{[this](int64_t b, size_t slot) { prepare(b, made[slot]); },
                                       [this](int64_t b, int64_t piece, size_t slot) { make(b, piece, made[slot]); }});
  }

  void prepare(int64_t b, ImageBatch& batch) const {
    const int64_t n = std::min(size, count - b * size);
    batch.count = n;
    batch.channels = data.channels;
    batch.height = augment.height();
    batch.width = augment.width();
    batch.images.resize(static_cast<size_t>(n * data.channels * augment.height() * augment.width()));
    batch.labels.resize(static_cast<size_t>(n));
    batch.indices.resize(static_cast<size_t>(n));
  }

  void make(int64_t b, int64_t piece, ImageBatch& batch) const {
    const int64_t values = batch.channels * batch.height * batch.width, last = std::min(batch.count, (piece + 1) * kPiece);
    for (int64_t i = piece * kPiece; i < last; ++i) {
      const int64_t index = order[static_cast<size_t>(b * size + i)];
      augment(index, epoch_noise, batch.images.data() + i * values);
      batch.labels[static_cast<size_t>(i)] = data.labels[static_cast<size_t>(index)];
      batch.indices[static_cast<size_t>(i)] = index;
    }
  }

  void start(int64_t epoch) {
    threads->start(batches, [&] {
      order.resize(static_cast<size_t>(data.count()));
      std::iota(order.begin(), order.end(), 0);
      epoch_noise = epoch_seed(options.seed, epoch);
      if (options.shuffle) shuffle(std::span(order), Dice(epoch_noise, kImageOrder));
    });
  }

  const ImageData& data;
  const ImageLoaderOptions options;
  const Augment augment;
  int64_t count = 0, batches = 0;  // of an epoch
  int64_t size = 0;                // images of a full batch
  std::vector<ImageBatch> made;    // by slot
  std::vector<int64_t> order;
  uint64_t epoch_noise = 0;
  std::optional<BatchThreads> threads;  // last: they read all of the above
};

ImageLoader::ImageLoader(const ImageData& data, ImageLoaderOptions options) : state_(std::make_unique<State>(data, std::move(options))) {}
ImageLoader::~ImageLoader() = default;

void ImageLoader::start(int64_t epoch) { state_->start(epoch); }
bool ImageLoader::next(ImageBatch& batch) {
  return state_->threads->next([&](size_t slot) { std::swap(batch, state_->made[slot]); });
}
int64_t ImageLoader::batches() const { return state_->batches; }
int64_t ImageLoader::images() const { return state_->count; }
int64_t ImageLoader::channels() const { return state_->data.channels; }
int64_t ImageLoader::height() const { return state_->augment.height(); }
int64_t ImageLoader::width() const { return state_->augment.width(); }

ImageLoaderOptions training_options(const ImageSets& sets, int64_t batch, uint64_t seed) {
  ImageLoaderOptions o;
  o.batch = batch;
  o.shuffle = true;
  o.drop_last = sets.train.count() >= batch;
  o.crop = sets.train.in_files() ? Crop::area : Crop::padded;
  o.flip = sets.train.channels == 3;  // digits do not stand mirrored
  o.mean = sets.mean;
  o.deviation = sets.deviation;
  o.seed = seed;
  return o;
}

ImageLoaderOptions testing_options(const ImageSets& sets, int64_t batch) {
  ImageLoaderOptions o;
  o.batch = batch;
  o.crop = sets.test.in_files() ? Crop::centre : Crop::whole;
  o.mean = sets.mean;
  o.deviation = sets.deviation;
  return o;
}

}  // namespace satchel
