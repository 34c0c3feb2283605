#include "satchel/data/image_loader.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <limits>
#include <mutex>
#include <numeric>
#include <system_error>
#include <thread>

#include "satchel/core/error.h"
#include "satchel/data/augment.h"
#include "satchel/data/image_layouts.h"
#include "satchel/data/numbers.h"

namespace satchel {
namespace {

constexpr int64_t kPiece = 32;  // images that a thread makes at a time
constexpr int kMaxThreads = 256;

/// A batch in the making. Batch b of an epoch is made in slot b % slots.
struct Slot {
  ImageBatch batch;
  int64_t left = 0;                                      // pieces not yet made
  int64_t failed = std::numeric_limits<int64_t>::max();  // the first piece that threw
  std::exception_ptr error;
};

void check(const ImageData& data, const ImageLoaderOptions& o, int64_t height, int64_t width) {
  if (o.batch < 1 || o.batch > kMaxImages) fail("loader", "batch must be 1 to " + std::to_string(kMaxImages), o.batch);
  if (o.ahead < 1 || o.ahead > 1024) fail("loader", "ahead must be 1 to 1024", o.ahead);
  if (o.threads < 0 || o.threads > kMaxThreads) fail("loader", "threads must be 0 to " + std::to_string(kMaxThreads), o.threads);
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
    pieces = (size + kPiece - 1) / kPiece;
    slots.resize(static_cast<size_t>(options.ahead));
  }

  ~State() {
    {
      const std::lock_guard lock(mutex);
      stop = true;
    }
    work.notify_all();
    for (std::thread& thread : threads) thread.join();
  }

  void start_threads() {
    const auto cores = static_cast<int>(std::thread::hardware_concurrency());
    const int wanted = options.threads > 0 ? options.threads : std::clamp(cores, 1, 16);
    try {
      for (int i = 0; i < wanted; ++i) threads.emplace_back([this] { run(); });
    } catch (const std::system_error&) {
      if (threads.empty()) fail("loader", "a thread must start", wanted);  // fewer will do
    }
  }

  Slot& slot_of(int64_t b) { return slots[static_cast<size_t>(b) % slots.size()]; }

  /// Makes a slot ready for batch b; no thread looks at it now.
  void prepare(int64_t b) {
    Slot& slot = slot_of(b);
    const int64_t n = std::min(size, count - b * size);
    slot.batch.count = n;
    slot.batch.channels = data.channels;
    slot.batch.height = augment.height();
    slot.batch.width = augment.width();
    slot.batch.images.resize(static_cast<size_t>(n * data.channels * augment.height() * augment.width()));
    slot.batch.labels.resize(static_cast<size_t>(n));
    slot.batch.indices.resize(static_cast<size_t>(n));
    slot.left = pieces;
    slot.failed = std::numeric_limits<int64_t>::max();
    slot.error = nullptr;
  }

  void make(int64_t b, int64_t piece) {
    ImageBatch& batch = slot_of(b).batch;
    const int64_t values = batch.channels * batch.height * batch.width, last = std::min(batch.count, (piece + 1) * kPiece);
    for (int64_t i = piece * kPiece; i < last; ++i) {
      const int64_t index = order[static_cast<size_t>(b * size + i)];
      augment(index, epoch_noise, batch.images.data() + i * values);
      batch.labels[static_cast<size_t>(i)] = data.labels[static_cast<size_t>(index)];
      batch.indices[static_cast<size_t>(i)] = index;
    }
  }

  /// A thread: takes pieces in order while their batch has a slot.
  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      work.wait(lock, [this] { return stop || may_take(); });
      if (stop) return;
      const int64_t b = taken / pieces, piece = taken % pieces;
      ++taken;
      ++active;
      lock.unlock();
      std::exception_ptr error;
      try {
        make(b, piece);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      --active;
      Slot& slot = slot_of(b);
      if (error && piece < slot.failed) {
        slot.failed = piece;
        slot.error = error;
      }
      if (--slot.left == 0 || active == 0) ready.notify_all();
    }
  }

  bool may_take() const { return taken < end && taken / pieces < given + static_cast<int64_t>(slots.size()); }

  void start(int64_t epoch) {
    std::unique_lock lock(mutex);
    end = 0;
    ready.wait(lock, [this] { return active == 0; });
    order.resize(static_cast<size_t>(data.count()));
    std::iota(order.begin(), order.end(), 0);
    epoch_noise = epoch_seed(options.seed, epoch);
    if (options.shuffle) shuffle(std::span(order), Dice(epoch_noise, kImageOrder));
    for (int64_t b = 0; b < std::min(batches, static_cast<int64_t>(slots.size())); ++b) prepare(b);
    taken = given = 0;
    end = batches * pieces;
    lock.unlock();
    work.notify_all();
  }

  bool next(ImageBatch& batch) {
    std::unique_lock lock(mutex);
    if (end == 0 || given == batches) return false;
    Slot& slot = slot_of(given);
    ready.wait(lock, [&] { return slot.left == 0; });
    if (slot.error) std::rethrow_exception(slot.error);
    lock.unlock();
    std::swap(batch, slot.batch);
    const int64_t later = given + static_cast<int64_t>(slots.size());
    try {
      if (later < batches) prepare(later);
    } catch (...) {  // no memory: this batch is lost, and next() says so again
      slot.error = std::current_exception();
      throw;
    }
    lock.lock();
    ++given;
    lock.unlock();
    work.notify_all();
    return true;
  }

  const ImageData& data;
  const ImageLoaderOptions options;
  const Augment augment;
  int64_t count = 0, batches = 0;  // of an epoch
  int64_t size = 0, pieces = 0;    // of a full batch: images, pieces

  std::mutex mutex;
  std::condition_variable work, ready;  // there is a piece to take; a batch is whole, or no thread is at work
  std::vector<Slot> slots;
  std::vector<int64_t> order;
  uint64_t epoch_noise = 0;
  int64_t taken = 0, end = 0;  // pieces of this epoch
  int64_t given = 0;           // batches handed out
  int64_t active = 0;          // threads at work
  bool stop = false;
  std::vector<std::thread> threads;
};

ImageLoader::ImageLoader(const ImageData& data, ImageLoaderOptions options) : state_(std::make_unique<State>(data, std::move(options))) {
  state_->start_threads();
}
ImageLoader::~ImageLoader() = default;

void ImageLoader::start(int64_t epoch) { state_->start(epoch); }
bool ImageLoader::next(ImageBatch& batch) { return state_->next(batch); }
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
