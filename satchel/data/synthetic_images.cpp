#include "satchel/data/synthetic_images.h"

#include <algorithm>
#include <array>
#include <set>
#include <string>

#include "satchel/data/augment.h"
#include "satchel/data/image_layouts.h"
#include "satchel/data/named_numbers.h"
#include "satchel/data/numbers.h"

namespace satchel {
namespace {

constexpr const char* kScheme = "synthetic-images";
constexpr int kWaves = 3;
constexpr uint32_t kTurn = 1u << 16;  // of a wave

void check(const SyntheticImageOptions& o) {
  check_named(kScheme, "classes", o.classes, 2, 65536);
  check_named(kScheme, "channels", o.channels, 1, 16);
  check_named(kScheme, "size", o.size, 4, 1024);
  check_named(kScheme, "count", o.count, o.classes, kMaxImages / 2);
  check_named(kScheme, "test", o.test, 0, kMaxImages / 2);
  const int64_t map = o.channels * o.size * o.size;  // at most 2^24
  check_memory(static_cast<uint64_t>((o.count + o.test) * map), "synthetic-images: count × channels × size²");
  check_memory(static_cast<uint64_t>(o.classes * map) * sizeof(int16_t), "synthetic-images: classes × channels × size²");
}

/// Two parabolas, −128 to 128, in place of a sine: whole numbers, so no machine rounds them differently.
int32_t wave(uint32_t place) {
  const auto at = static_cast<int32_t>(place % (kTurn / 2)), half = static_cast<int32_t>(kTurn / 2);
  const int32_t height = (at * (half - at)) >> 21;
  return place % kTurn < kTurn / 2 ? height : -height;
}

/// classes × channels × size × size. A wave turns a whole number of times over the image, so a pattern can be shifted around.
std::vector<int16_t> draw_patterns(const SyntheticImageOptions& o) {
  const Dice dice(o.seed, kImagePattern);
  const auto size = static_cast<uint32_t>(o.size);
  std::vector<int16_t> out(static_cast<size_t>(o.classes * o.channels * o.size * o.size), 0);
  int16_t* map = out.data();
  for (uint32_t k = 0; k < o.classes * o.channels; ++k, map += size_t{size} * size) {
    for (uint32_t w = 0; w < kWaves; ++w) {
      const Words words = dice(k, w);
      const uint32_t across = below(4, words.w[0]), down = across == 0 ? 1 + below(3, words.w[1]) : below(7, words.w[1]) + kTurn - 3;
      for (uint32_t y = 0; y < size; ++y) {
        for (uint32_t x = 0; x < size; ++x) {
          const uint32_t place = (words.w[2] & (kTurn - 1)) + across * (x * kTurn / size) + down * (y * kTurn / size);
          map[y * size + x] = static_cast<int16_t>(map[y * size + x] + wave(place));
        }
      }
    }
  }
  return out;
}

class Painter {
 public:
  explicit Painter(const SyntheticImageOptions& options)
      : o_(options), patterns_(draw_patterns(options)), shape_(options.seed, kImageShape), noise_(options.seed, kImageNoise) {}

  ImageData paint(int64_t first, int64_t count) const {
    const int64_t bytes = o_.channels * o_.size * o_.size;
    ImageData data;
    data.channels = o_.channels;
    data.height = data.width = o_.size;
    data.classes = o_.classes;
    data.pixels.resize(static_cast<size_t>(count * bytes));
    for (int64_t i = 0; i < count; ++i) {
      data.labels.push_back(static_cast<int32_t>((first + i) % o_.classes));
      paint_one(static_cast<uint32_t>(first + i), data.labels.back(), data.pixels.data() + i * bytes);
    }
    return data;
  }

 private:
  void paint_one(uint32_t id, int32_t label, uint8_t* out) const {
    const auto classes = static_cast<uint32_t>(o_.classes), size = static_cast<uint32_t>(o_.size), range = size / 4 + 1;
    const Words a = shape_(id, 0), b = shape_(id, 1);
    const uint32_t rival = (static_cast<uint32_t>(label) + 1 + below(classes - 1, a.w[0])) % classes;
    const uint32_t down = below(range, a.w[1]) + size - size / 8, across = below(range, a.w[2]) + size - size / 8;
    const uint64_t u = a.w[3] >> 16;
    const auto share = static_cast<int32_t>(((u * u) >> 16) * 6 / 10 >> 8);  // 0 … 153 of 256
    const auto contrast = static_cast<int32_t>(128 + below(257, b.w[0]));    // of 256
    const auto light = static_cast<int32_t>(below(65, b.w[1])) - 32 + 128;
    const size_t maps = static_cast<size_t>(o_.channels), values = size_t{size} * size;
    const int16_t *own = patterns_.data() + static_cast<size_t>(label) * maps * values, *other = patterns_.data() + rival * maps * values;
    Words words{};
    uint32_t i = 0;  // value of the image
    for (size_t map = 0; map < maps * values; map += values) {
      for (uint32_t y = 0; y < size; ++y) {
        const size_t row = map + (y + down) % size * size_t{size};
        for (uint32_t x = 0; x < size; ++x, ++i) {
          if (i % 4 == 0) words = noise_(id, i / 4);
          const size_t at = row + (x + across) % size;
          const int32_t mixed = (own[at] * (256 - share) + other[at] * share) / 256;
          out[i] = static_cast<uint8_t>(std::clamp(light + mixed * contrast / 1280 + noise(words.w[i % 4]), 0, 255));
        }
      }
    }
  }

  /// Sums of four bytes are nearly normal: deviation 147.8, times 7092/2^15 is 32.
  static int32_t noise(uint32_t word) {
    const auto sum = static_cast<int32_t>((word & 255) + (word >> 8 & 255) + (word >> 16 & 255) + (word >> 24)) - 510;
    return sum * 7092 / 32768;
  }

  const SyntheticImageOptions& o_;
  std::vector<int16_t> patterns_;
  Dice shape_, noise_;
};

}  // namespace

SyntheticImageOptions parse_synthetic_images(std::string_view text) {
  SyntheticImageOptions o;
  const std::array<NamedNumber, 5> numbers = {
      {{"classes", &o.classes}, {"channels", &o.channels}, {"size", &o.size}, {"count", &o.count}, {"test", &o.test}}};
  const std::set<std::string_view> seen = read_named_numbers(text, kScheme, numbers, o.seed);
  if (!seen.contains("test")) o.test = std::max<int64_t>(o.count / 5, 1);
  check(o);
  return o;
}

ImageSets make_synthetic_images(const SyntheticImageOptions& options) {
  check(options);
  const Painter painter(options);
  ImageSets sets;
  sets.train = painter.paint(0, options.count);
  sets.test = painter.paint(options.count, options.test);
  measure(sets);
  return sets;
}

}  // namespace satchel
