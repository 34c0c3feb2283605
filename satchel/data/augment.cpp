#include "satchel/data/augment.h"

#include <algorithm>
#include <cmath>

#include "satchel/core/error.h"
#include "satchel/data/image_layouts.h"

namespace satchel {
namespace {

constexpr int kPrecision = 22;  // bits of a filter's weight, as in Pillow: 255·2^22·(1 + rounding) stays below 2^31
constexpr uint32_t kDraws = 10;

/// The inputs of one output and what they weigh.
struct Taps {
  int64_t first = 0;
  std::vector<int32_t> weight;
};

/// Outputs first … first + count − 1 of a line of `from` values resized to `to`.
std::vector<Taps> taps_of(int64_t from, int64_t to, int64_t first, int64_t count) {
  const double scale = static_cast<double>(from) / static_cast<double>(to), support = std::max(scale, 1.0);
  std::vector<Taps> out(static_cast<size_t>(count));
  std::vector<double> weight;
  for (int64_t i = 0; i < count; ++i) {
    const double centre = (static_cast<double>(first + i) + 0.5) * scale;
    const int64_t begin = std::max<int64_t>(static_cast<int64_t>(centre - support + 0.5), 0);
    const int64_t end = std::min<int64_t>(static_cast<int64_t>(centre + support + 0.5), from);
    weight.clear();
    double sum = 0;
    for (int64_t k = begin; k < end; ++k) {
      weight.push_back(std::max(0.0, 1 - std::abs((static_cast<double>(k) - centre + 0.5) / support)));
      sum += weight.back();
    }
    Taps& taps = out[static_cast<size_t>(i)];
    taps.first = begin;
    for (const double w : weight) taps.weight.push_back(static_cast<int32_t>(0.5 + w / sum * (1 << kPrecision)));
  }
  return out;
}

/// Σ weight·value of values `stride` apart.
uint8_t blend(const Taps& taps, const uint8_t* values, int64_t stride) {
  int32_t sum = 1 << (kPrecision - 1);
  for (size_t k = 0; k < taps.weight.size(); ++k) sum += taps.weight[k] * values[static_cast<int64_t>(k) * stride];
  return static_cast<uint8_t>(std::clamp(sum >> kPrecision, 0, 255));
}

/// (4/3)^u for u of −1 to 1 by its series: error below 2e-5, and the same on every machine.
double power_of_ratio(double u) {
  const double x = u * 0.28768207245178085;  // ln 4/3
  return 1 + x * (1 + x * (1.0 / 2 + x * (1.0 / 6 + x / 24)));
}

Box middle(int64_t height, int64_t width, int64_t rows, int64_t columns) {
  return {(height - rows) / 2, (width - columns) / 2, rows, columns};
}

void check(const ImageData& data, const ImageLoaderOptions& o) {
  check_images(data, "loader");
  const bool resizes = o.crop == Crop::centre || o.crop == Crop::area;
  if (data.in_files() && !resizes) fail("loader", "images of different sizes need Crop::centre or Crop::area", "another crop");
  if (resizes && (o.size < 1 || o.size > kMaxSide)) fail("loader", "size must be 1 to " + std::to_string(kMaxSide), o.size);
  if (o.crop == Crop::centre && (o.resize < o.size || o.resize > kMaxSide)) {
    fail("loader", "resize must be size to " + std::to_string(kMaxSide), o.resize);
  }
  if (o.crop == Crop::padded && (o.padding < 0 || o.padding > kMaxSide)) {
    fail("loader", "padding must be 0 to " + std::to_string(kMaxSide), o.padding);
  }
  for (const auto* numbers : {&o.mean, &o.deviation}) {
    if (!numbers->empty() && static_cast<int64_t>(numbers->size()) != data.channels) {
      fail("loader", "mean and deviation must have one number a channel, " + std::to_string(data.channels), numbers->size());
    }
    for (const float number : *numbers) {
      if (!std::isfinite(number)) fail("loader", "mean and deviation must be finite", number);
    }
  }
  for (const float number : o.deviation) {
    if (!(number > 0)) fail("loader", "deviation must be above 0", number);
  }
}

}  // namespace

Image resized(const Image& image, const Box& from, int64_t height, int64_t width, const Box& part) {
  const std::vector<Taps> across = taps_of(from.width, width, part.left, part.width);
  const std::vector<Taps> down = taps_of(from.height, height, part.top, part.height);
  const int64_t first = down.front().first, last = down.back().first + static_cast<int64_t>(down.back().weight.size());
  std::vector<uint8_t> rows(static_cast<size_t>((last - first) * part.width));  // of one channel, resized across
  Image out{image.channels, part.height, part.width, std::vector<uint8_t>(static_cast<size_t>(image.channels * part.height * part.width))};
  uint8_t* to = out.pixels.data();
  for (int64_t c = 0; c < image.channels; ++c) {
    const uint8_t* map = image.pixels.data() + c * image.height * image.width + from.top * image.width + from.left;
    for (int64_t y = first; y < last; ++y) {
      for (int64_t x = 0; x < part.width; ++x) {
        const Taps& taps = across[static_cast<size_t>(x)];
        rows[static_cast<size_t>((y - first) * part.width + x)] = blend(taps, map + y * image.width + taps.first, 1);
      }
    }
    for (int64_t y = 0; y < part.height; ++y) {
      const Taps& taps = down[static_cast<size_t>(y)];
      for (int64_t x = 0; x < part.width; ++x) *to++ = blend(taps, rows.data() + (taps.first - first) * part.width + x, part.width);
    }
  }
  return out;
}

Box draw_area(int64_t height, int64_t width, const Dice& dice, uint32_t sample) {
  const double area = static_cast<double>(height) * static_cast<double>(width);
  for (uint32_t k = 0; k < kDraws; ++k) {
    const Words w = dice(sample, k);
    const double target = area * (0.08 + 0.92 * (w.w[0] * 0x1p-32)), ratio = power_of_ratio(w.w[1] * 0x1p-31 - 1);
    const auto columns = static_cast<int64_t>(std::sqrt(target * ratio) + 0.5),
               rows = static_cast<int64_t>(std::sqrt(target / ratio) + 0.5);
    if (rows < 1 || columns < 1 || rows > height || columns > width) continue;
    const uint32_t top = below(static_cast<uint32_t>(height - rows + 1), w.w[2]),
                   left = below(static_cast<uint32_t>(width - columns + 1), w.w[3]);
    return {top, left, rows, columns};
  }
  if (width * 4 < height * 3) return middle(height, width, std::max<int64_t>(width * 4 / 3, 1), width);
  if (width * 3 > height * 4) return middle(height, width, height, std::max<int64_t>(height * 4 / 3, 1));
  return {0, 0, height, width};
}

uint64_t epoch_seed(uint64_t seed, int64_t epoch) {
  constexpr uint32_t kImages = 0x696d6167u;  // "imag": no save has this number
  return derive_seed(seed, static_cast<uint64_t>(epoch), 0, kImages);
}

Augment::Augment(const ImageData& data, const ImageLoaderOptions& options)
    : data_(data),
      crop_(options.crop),
      flip_(options.flip),
      padding_(options.padding),
      resize_(options.resize),
      height_(options.crop == Crop::centre || options.crop == Crop::area ? options.size : data.height),
      width_(options.crop == Crop::centre || options.crop == Crop::area ? options.size : data.width) {
  check(data, options);
  for (size_t c = 0; c < static_cast<size_t>(data.channels); ++c) {
    const float mean = options.mean.empty() ? 0 : options.mean[c], deviation = options.deviation.empty() ? 1 : options.deviation[c];
    for (int v = 0; v < 256; ++v) table_.push_back((static_cast<float>(v) / 255 - mean) / deviation);
  }
}

void Augment::place(const uint8_t* pixels, int64_t height, int64_t width, int64_t top, int64_t left, bool flip, float* out) const {
  // Columns first … last of the output lie in the image; the rest is black.
  const int64_t first = std::clamp<int64_t>(-left, 0, width_), last = std::clamp<int64_t>(width - left, first, width_);
  std::vector<float> line(static_cast<size_t>(width_));
  for (int64_t c = 0; c < data_.channels; ++c) {
    const float* table = table_.data() + c * 256;
    for (int64_t y = 0; y < height_; ++y, out += width_) {
      const bool inside = y + top >= 0 && y + top < height;
      const uint8_t* row = inside ? pixels + (c * height + y + top) * width : nullptr;
      std::fill(line.begin(), line.end(), table[0]);
      for (int64_t x = first; inside && x < last; ++x) line[static_cast<size_t>(x)] = table[row[x + left]];
      if (flip) {
        std::reverse_copy(line.begin(), line.end(), out);
      } else {
        std::copy(line.begin(), line.end(), out);
      }
    }
  }
}

void Augment::operator()(int64_t index, uint64_t epoch_seed, float* out) const {
  const auto sample = static_cast<uint32_t>(index);
  const bool flip = flip_ && (Dice(epoch_seed, kImageFlip)(sample).w[0] & 1) != 0;
  const Dice dice(epoch_seed, kImageCrop);
  if (crop_ == Crop::whole || crop_ == Crop::padded) {
    const uint8_t* pixels = data_.pixels.data() + index * data_.channels * data_.height * data_.width;
    const Words w = dice(sample);
    const auto places = static_cast<uint32_t>(crop_ == Crop::padded ? 2 * padding_ + 1 : 1);
    const int64_t top = int64_t{below(places, w.w[0])} - places / 2, left = int64_t{below(places, w.w[1])} - places / 2;
    return place(pixels, data_.height, data_.width, top, left, flip, out);
  }
  const Image image = image_of(data_, index);
  Box from{0, 0, image.height, image.width}, part{0, 0, height_, width_};
  int64_t height = height_, width = width_;
  if (crop_ == Crop::area) {
    from = draw_area(image.height, image.width, dice, sample);
  } else {
    const int64_t shorter = std::min(image.height, image.width);
    height = image.height * resize_ / shorter;
    width = image.width * resize_ / shorter;
    part = middle(height, width, height_, width_);
  }
  const Image small = resized(image, from, height, width, part);
  place(small.pixels.data(), height_, width_, 0, 0, flip, out);
}

}  // namespace satchel
