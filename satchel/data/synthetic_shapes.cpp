#include "satchel/data/synthetic_shapes.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>
#include <string>

#include "satchel/data/augment.h"
#include "satchel/data/image_layouts.h"
#include "satchel/data/named_numbers.h"

namespace satchel {
namespace {

constexpr const char* kScheme = "synthetic-shapes";
constexpr std::array<const char*, 8> kKinds = {"disc", "square", "triangle", "ring", "cross", "diamond", "frame", "bar"};
constexpr int64_t kMostShapes = 64;
constexpr uint32_t kTries = 8;  // at a place for an object

using Colour = std::array<int32_t, 3>;
constexpr std::array<Colour, kKinds.size()> kColours = {
    {{220, 60, 60}, {60, 200, 80}, {70, 90, 230}, {230, 200, 60}, {200, 70, 210}, {60, 210, 210}, {240, 140, 50}, {150, 110, 90}}};

/// Whole numbers only, so that no machine rounds them differently.
struct Shape {
  int32_t kind, x, y, radius;
  Colour colour;

  bool covers(int32_t column, int32_t row) const {
    const int32_t dx = std::abs(column - x), dy = std::abs(row - y), r = radius;
    const int32_t far = std::max(dx, dy), near = std::min(dx, dy), square = dx * dx + dy * dy;
    switch (kind) {
      case 0: return square <= r * r;
      case 1: return 5 * far <= 4 * r;
      case 2: return dy <= r && 2 * dx <= row - y + r;
      case 3: return square <= r * r && 4 * square >= r * r;
      case 4: return far <= r && 3 * near <= r;
      case 5: return dx + dy <= r;
      case 6: return 5 * far <= 4 * r && 2 * far >= r;
      default: return dx <= r && 5 * dy <= 2 * r;
    }
  }
};

void check(const SyntheticShapeOptions& o) {
  check_named(kScheme, "count", o.count, 1, kMaxImages / 2);
  check_named(kScheme, "test", o.test, 0, kMaxImages / 2);
  check_named(kScheme, "size", o.size, 32, 4096);
  check_named(kScheme, "shapes", o.shapes, 1, kMostShapes);
  check_named(kScheme, "classes", o.classes, 1, static_cast<int64_t>(kKinds.size()));
}

int32_t byte_of(int32_t value) { return std::clamp(value, 0, 255); }

/// Mean 0, deviation 16.
int32_t noise(uint32_t word) {
  return static_cast<int32_t>((word & 63) + (word >> 8 & 63)) / 2 + static_cast<int32_t>(word >> 16 & 31) - 47;
}

class Drawing {
 public:
  Drawing(const SceneData::Drawn& drawn, int64_t index)
      : drawn_(drawn),
        id_(static_cast<uint32_t>(drawn.first + index)),
        side_(static_cast<int32_t>(drawn.side)),
        colours_(static_cast<size_t>(drawn.side * drawn.side)),
        owners_(colours_.size(), -1) {
    lay_ground();
    add_strokes();
    for (const Shape& shape : placed()) add(shape);
  }

  Scene scene() const {
    Scene scene;
    const auto values = colours_.size();
    scene.image = {3, side_, side_, std::vector<uint8_t>(3 * values)};
    scene.mask = {side_, side_, std::vector<uint8_t>(values, 0)};
    const Dice dice(drawn_.seed, kSceneNoise);
    for (size_t i = 0; i < values; ++i) {
      const Words words = dice(id_, static_cast<uint32_t>(i));
      for (size_t c = 0; c < 3; ++c) scene.image.pixels[c * values + i] = static_cast<uint8_t>(byte_of(colours_[i][c] + noise(words.w[c])));
      if (owners_[i] >= 0) scene.mask.classes[i] = static_cast<uint8_t>(1 + shapes_[static_cast<size_t>(owners_[i])].kind);
    }
    scene.objects = boxes();
    return scene;
  }

 private:
  /// Light that changes from corner to corner.
  void lay_ground() {
    const Dice dice(drawn_.seed, kSceneClutter);
    std::array<Colour, 4> corners;
    for (uint32_t k = 0; k < 4; ++k) corners[k] = colour_of(dice(id_, k), 60, 140);
    for (int32_t y = 0; y < side_; ++y) {
      for (int32_t x = 0; x < side_; ++x) {
        for (size_t c = 0; c < 3; ++c) {
          const int32_t top = corners[0][c] * (side_ - x) + corners[1][c] * x, bottom = corners[2][c] * (side_ - x) + corners[3][c] * x;
          pixel(x, y)[c] = (top / side_ * (side_ - y) + bottom / side_ * y) / side_;
        }
      }
    }
  }

  /// Thin lines in any colour, which are ground.
  void add_strokes() {
    const Dice dice(drawn_.seed, kSceneClutter);
    const auto side = static_cast<uint32_t>(side_);
    for (uint32_t k = 0; k < side / 8; ++k) {
      const Words a = dice(id_, 16 + 2 * k), b = dice(id_, 17 + 2 * k);
      const Colour colour = colour_of(b, 0, 256);
      const auto length = static_cast<int32_t>(3 + below(side / 6, a.w[2]));
      const auto dx = static_cast<int32_t>(below(3, a.w[3])) - 1, dy = static_cast<int32_t>(below(3, a.w[3] << 8)) - 1;
      auto x = static_cast<int32_t>(below(side, a.w[0])), y = static_cast<int32_t>(below(side, a.w[1]));
      for (int32_t step = 0; step < length && x >= 0 && y >= 0 && x < side_ && y < side_; ++step, x += dx, y += dy) pixel(x, y) = colour;
    }
  }

  /// One to `shapes` of them, each hiding at most a quarter of another's square.
  std::vector<Shape> placed() const {
    const Dice dice(drawn_.seed, kScenePlaces);
    const uint32_t wanted = 1 + below(static_cast<uint32_t>(drawn_.shapes), dice(id_, 0).w[0]);
    std::vector<Shape> shapes;
    for (uint32_t k = 0; k < wanted; ++k) {
      for (uint32_t t = 0; t < kTries; ++t) {
        const uint32_t number = 1 + 2 * (k * kTries + t);
        const Shape shape = drawn_shape(dice(id_, number), dice(id_, number + 1));
        if (std::ranges::any_of(shapes, [&](const Shape& other) { return hides(shape, other); })) continue;
        shapes.push_back(shape);
        break;
      }
    }
    return shapes;
  }

  Shape drawn_shape(const Words& a, const Words& b) const {
    const auto side = static_cast<uint32_t>(side_);
    const uint32_t least = std::max<uint32_t>(side / 14, 4),
                   radius = least + below(std::max<uint32_t>(side / 5, least + 1) - least, a.w[0]);
    const auto place = [&](uint32_t word) { return static_cast<int32_t>(radius / 2 + below(side - radius, word)); };
    const auto kind = static_cast<int32_t>(below(static_cast<uint32_t>(drawn_.kinds), a.w[1]));
    Colour colour = colour_of(b, 0, 256);
    for (size_t c = 0; c < 3; ++c) colour[c] = (colour[c] + kColours[static_cast<size_t>(kind)][c]) / 2;
    return {kind, place(a.w[2]), place(a.w[3]), static_cast<int32_t>(radius), colour};
  }

  static bool hides(const Shape& a, const Shape& b) {
    const auto overlap = [&](int32_t p, int32_t q) {
      return std::max(0, std::min(p + a.radius, q + b.radius) - std::max(p - a.radius, q - b.radius) + 1);
    };
    const int32_t least = 2 * std::min(a.radius, b.radius) + 1;
    return 4 * overlap(a.x, b.x) * overlap(a.y, b.y) > least * least;
  }

  void add(const Shape& shape) {
    const auto number = static_cast<int16_t>(shapes_.size());
    shapes_.push_back(shape);
    for (int32_t y = std::max(shape.y - shape.radius, 0); y <= std::min(shape.y + shape.radius, side_ - 1); ++y) {
      for (int32_t x = std::max(shape.x - shape.radius, 0); x <= std::min(shape.x + shape.radius, side_ - 1); ++x) {
        if (!shape.covers(x, y)) continue;
        pixel(x, y) = shape.colour;
        owners_[static_cast<size_t>(y * side_ + x)] = number;
      }
    }
  }

  std::vector<ObjectBox> boxes() const {
    std::vector<std::optional<ObjectBox>> seen(shapes_.size());
    for (int32_t y = 0; y < side_; ++y) {
      for (int32_t x = 0; x < side_; ++x) {
        const int16_t owner = owners_[static_cast<size_t>(y * side_ + x)];
        if (owner < 0) continue;
        std::optional<ObjectBox>& box = seen[static_cast<size_t>(owner)];
        const auto left = static_cast<float>(x), top = static_cast<float>(y);
        if (!box) box = ObjectBox{left, top, left + 1, top + 1, shapes_[static_cast<size_t>(owner)].kind, false};
        box->left = std::min(box->left, left);
        box->right = std::max(box->right, left + 1);
        box->bottom = top + 1;  // rows rise
      }
    }
    std::vector<ObjectBox> out;
    for (const std::optional<ObjectBox>& box : seen) {
      if (box) out.push_back(*box);
    }
    return out;
  }

  static Colour colour_of(const Words& words, int32_t low, uint32_t range) {
    Colour colour;
    for (size_t c = 0; c < 3; ++c) colour[c] = low + static_cast<int32_t>(below(range, words.w[c]));
    return colour;
  }

  Colour& pixel(int32_t x, int32_t y) { return colours_[static_cast<size_t>(y * side_ + x)]; }

  const SceneData::Drawn& drawn_;
  uint32_t id_;
  int32_t side_;
  std::vector<Colour> colours_;
  std::vector<int16_t> owners_;  // the shape that is seen at a pixel; −1: ground
  std::vector<Shape> shapes_;
};

}  // namespace

SyntheticShapeOptions parse_synthetic_shapes(std::string_view text) {
  SyntheticShapeOptions o;
  const std::array<NamedNumber, 5> numbers = {
      {{"count", &o.count}, {"size", &o.size}, {"shapes", &o.shapes}, {"classes", &o.classes}, {"test", &o.test}}};
  const auto seen = read_named_numbers(text, kScheme, numbers, o.seed);
  if (!seen.contains("test")) o.test = std::max<int64_t>(o.count / 5, 1);
  check(o);
  return o;
}

SceneSets make_synthetic_shapes(const SyntheticShapeOptions& o, SceneTask task) {
  check(o);
  SceneData data;
  const bool masks = task == SceneTask::segmentation;
  if (masks) data.class_names.emplace_back("ground");
  for (int64_t k = 0; k < o.classes; ++k) data.class_names.emplace_back(kKinds[static_cast<size_t>(k)]);
  data.classes = static_cast<int64_t>(data.class_names.size());
  data.drawn = {o.size, o.shapes, o.classes, o.seed, 0};
  SceneSets sets{data, data, {0.5f, 0.5f, 0.5f}, {0.25f, 0.25f, 0.25f}};
  sets.train.count = o.count;
  sets.test.count = o.test;
  sets.test.drawn.first = o.count;
  return sets;
}

Scene draw_scene(const SceneData::Drawn& drawn, int64_t index) { return Drawing(drawn, index).scene(); }

}  // namespace satchel
