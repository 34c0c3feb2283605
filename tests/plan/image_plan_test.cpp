#include "satchel/plan/image_plan.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "satchel/core/error.h"
#include "satchel/plan/published_images.h"

namespace satchel {
namespace {

constexpr double kGiB = 1 << 30;

template <class Work>
std::string error_of(const Work& work) {
  try {
    work();
    return "no error";
  } catch (const Error& e) {
    return e.what();
  }
}

ImageShape shape_named(const std::string& name, int64_t classes = 1000) {
  ImageShape shape;
  shape.name = name;
  shape.classes = classes;
  return shape;
}

using Lines = std::vector<SavedTensor>;

std::map<std::string, int64_t> by_kind(const Lines& lines) {
  std::map<std::string, int64_t> bytes;
  for (const SavedTensor& s : lines) bytes[s.kind] += s.bytes;
  return bytes;
}

Lines lines_of(const Lines& lines, const std::string& name) {
  Lines found;
  for (const SavedTensor& s : lines) {
    if (s.name == name) found.push_back(s);
  }
  return found;
}

TEST(ImageShape, ParametersAreTorchvisions) {
  const std::vector<std::pair<std::string, int64_t>> counts = {{"resnet18", 11689512},  {"resnet34", 21797672}, {"resnet50", 25557032},
                                                               {"resnet152", 60192808}, {"vgg16", 138357544},   {"vgg16_bn", 138365992},
                                                               {"densenet121", 7978856}};
  ASSERT_EQ(counts.size(), image_model_names().size());
  for (const auto& [name, count] : counts) {
    int64_t parameters = 0;
    for (const ImageLayer& layer : layers_of(shape_named(name), 224, 224).layers) parameters += layer.parameters;
    EXPECT_EQ(parameters, count) << name;
  }
}

TEST(ImageShape, LayersReadMapsThatStandBeforeThem) {
  for (const std::string_view name : image_model_names()) {
    for (const bool small : {false, true}) {
      ImageShape shape = shape_named(std::string(name), 10);
      shape.small_stem = small;
      shape.dropout = 0.5;
      const ImageLayers model = layers_of(shape, 33, 47);
      for (const ImageLayer& layer : model.layers) {
        for (const int map : layer.inputs) EXPECT_LT(map, layer.output) << layer.name;
      }
      EXPECT_EQ(model.layers.back().output + 1, static_cast<int>(model.maps.size()));
      EXPECT_EQ(model.maps.back().channels, 10);
    }
  }
}

// Of the DIVISION paper: 20.48 in GiB, to the last digit it has.
TEST(PublishedImages, PlainIsExact) {
  const PublishedImageRow fp32 = published_images()[0];
  EXPECT_EQ(std::round(100 * static_cast<double>(total_bytes(fp32.parts)) / kGiB) / 100, fp32.published_gib);
  // Values of a batch of 256, from a list of ResNet-50's convolutions by hand: 53 norms, 49 inputs that differ.
  std::map<std::string, int64_t> parts = by_kind(fp32.parts);
  EXPECT_EQ(parts["norm"], int64_t{4} * 2845179904);
  EXPECT_EQ(parts["input"], int64_t{4} * 2318532608);
  EXPECT_EQ(parts["indices"], int64_t{8} * 256 * 64 * 56 * 56);
  EXPECT_EQ(parts["activation"], int64_t{4} * 256 * (64 * 112 * 112 + 2048 * 7 * 7));
  EXPECT_EQ(total_bytes(fp32.parts), int64_t{4} * (2845179904 + 2318532608) + parts["indices"] + parts["activation"]);
}

TEST(PublishedImages, TheOthersAreWithinFivePercent) {
  const std::vector<PublishedImageRow> rows = published_images();
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[1].published_gib, 1.94);
  EXPECT_EQ(rows[2].published_gib, 1.97);
  for (const PublishedImageRow& row : {rows[1], rows[2]}) {
    EXPECT_NEAR(static_cast<double>(total_bytes(row.parts)) / kGiB / row.published_gib, 1, 0.05) << row.name;
    std::map<std::string, int64_t> parts = by_kind(row.parts);
    // A quarter of a byte a value of every norm's input; a bit a ReLU; int8 indices; the batch.
    EXPECT_EQ(parts["norm"], 2845179904 / 4);
    EXPECT_EQ(parts["mask"], 2459828224 / 8);
    EXPECT_EQ(parts["indices"], 256 * 64 * 56 * 56);
    EXPECT_EQ(parts["images"], 4 * 256 * 3 * 224 * 224);
  }
}

TEST(PublishedImages, OurOwnIsBelow) {
  const ImageShape shape = published_image_model();
  const double fp32 = static_cast<double>(total_bytes(plan_image(shape, {}, parse_method("fp32"))));
  for (const PublishedImageRow& row : published_images()) {
    // fp32 has statistics (two numbers for each of 26,560 channels) and the classifier's input besides; the others share what two read.
    const double own = static_cast<double>(total_bytes(plan_image(shape, {}, parse_method(row.method))));
    EXPECT_LE(own, static_cast<double>(total_bytes(row.parts)) + 8 * 26560 + 4 * 256 * 2048) << row.name;
  }
  EXPECT_GT(fp32 / static_cast<double>(total_bytes(plan_image(shape, {}, parse_method("actnn")))), 10);
  EXPECT_GT(fp32 / static_cast<double>(total_bytes(plan_image(shape, {}, parse_method("division")))), 10);
  EXPECT_GT(fp32 / static_cast<double>(total_bytes(plan_image(shape, {}, parse_method("satchel")))), 15);
}

// A first block of resnet18, small: 2 images of 3×8×8, width 4. 2·4·8·8 = 512 values a map: 128 bytes of 2 bits and 2 headers of 4.
TEST(ImagePlan, ABlockLineByLine) {
  ImageShape shape = shape_named("resnet18", 5);
  shape.small_stem = true;
  shape.width = 4;
  const BatchShape batch = {2, 8, 8};
  const std::vector<int64_t> map = {2, 4, 8, 8}, rows = {128, 4};
  const Lines ours = plan_image(shape, batch, parse_method("satchel"));
  // 384 values: 96 bytes, 2 headers.
  EXPECT_EQ(ours[0], (SavedTensor{"conv1", "input", {2, 3, 8, 8}, 2, 96 + 8, 1536}));
  // 136 bytes, aligned to 144; four channels of 16.
  EXPECT_EQ(lines_of(ours, "layer1.0.bn1"),
            (Lines{{"layer1.0.bn1", "shared", rows, 2, 144 + 64, 2048}, {"layer1.0.bn1", "statistics", {4}, 32, 16, 16}}));
  EXPECT_EQ(lines_of(ours, "layer1.0.bn2"), (Lines{{"layer1.0.bn2", "norm", rows, 2, 136, 2048},
                                                   {"layer1.0.bn2", "statistics", {4}, 32, 16, 16},
                                                   {"layer1.0.bn2", "shared", rows, 2, 136, 2048}}));
  EXPECT_TRUE(lines_of(ours, "layer1.0.conv1").empty());
  const Lines one = plan_image(shape, batch, parse_method("satchel,residual=1"));
  EXPECT_EQ(lines_of(one, "layer1.0.bn2")[0], (SavedTensor{"layer1.0.bn2", "norm", rows, 1, 64 + 8, 2048}));
  // Blocks of a sample's 256 values; shared out by sample: 32 bytes a bit of a sample, a header and a share of 4 each.
  const Lines actnn = plan_image(shape, batch, parse_method("actnn"));
  EXPECT_EQ(lines_of(actnn, "layer1.0.conv2"), (Lines{{"layer1.0.conv2", "input", map, 2, 4 * 32 + 2 * 4 + 2 * 4, 2048}}));
  EXPECT_EQ(lines_of(actnn, "layer1.0.bn2"), (Lines{{"layer1.0.bn2", "norm", map, 2, 144, 2048},
                                                    {"layer1.0.bn2", "statistics", {2, 4}, 32, 32, 32},
                                                    {"layer1.0.bn2", "mask", map, 1, 64, 512}}));
  // A map of 64: 8 averages of 2 bytes after 8 headers of 4, which end at a multiple of 16.
  const Lines division = plan_image(shape, batch, parse_method("division"));
  EXPECT_EQ(lines_of(division, "layer1.0.conv2"), (Lines{{"layer1.0.conv2", "input", map, 2, 128 + 32 + 16, 2048}}));
}

TEST(ImagePlan, OneInputOfTwoConvolutionsIsKeptOnce) {
  const Lines lines = plan_image(shape_named("resnet50"), {4, 64, 64}, parse_method("division"));
  EXPECT_EQ(lines_of(lines, "layer2.0.downsample.0").size() + lines_of(lines, "layer2.0.conv1").size(), 1u);
}

TEST(ImagePlan, PoolsKeepOffsetsOfTheirWindow) {
  const Lines resnet = plan_image(shape_named("resnet18"), {2, 64, 64}, parse_method("satchel"));
  // 3×3: nine places in 4 bits.
  EXPECT_EQ(lines_of(resnet, "maxpool")[0], (SavedTensor{"maxpool", "offsets", {2, 64, 16, 16}, 4, 16384, 8 * 32768}));
  EXPECT_EQ(lines_of(resnet, "maxpool")[1].kind, "shared");
  const Lines vgg = plan_image(shape_named("vgg16"), {2, 64, 64}, parse_method("division"));
  EXPECT_EQ(lines_of(vgg, "features.4"), (Lines{{"features.4", "offsets", {2, 64, 32, 32}, 2, 32768, 8 * 131072}}));
  EXPECT_TRUE(lines_of(vgg, "avgpool").empty());
}

TEST(ImagePlan, MemoryGrowsWithTheBatch) {
  const ImageShape shape = shape_named("resnet50");
  for (const char* name : {"fp32", "actnn", "division", "satchel"}) {
    const Method method = parse_method(name);
    const ImageMemory one = memory_of(shape, {1, 64, 64}, method), many = memory_of(shape, {64, 64, 64}, method);
    EXPECT_EQ(one.parameters, 12 * 25557032) << name;
    EXPECT_EQ(one.saved, total_bytes(plan_image(shape, {1, 64, 64}, method)));
    EXPECT_EQ(one.images, method.plain ? 0 : 4 * 3 * 64 * 64) << name;
    EXPECT_GE(one.fullest, one.saved);
    EXPECT_GT(many.total(), one.total());
    const int64_t budget = many.total();
    EXPECT_EQ(largest_batch(shape, 64, 64, method, budget), 64) << name;
    EXPECT_EQ(largest_batch(shape, 64, 64, method, budget - 1), 63) << name;
    EXPECT_EQ(largest_batch(shape, 64, 64, method, one.total()), 1) << name;
    EXPECT_EQ(largest_batch(shape, 64, 64, method, one.total() - 1), 0) << name;
  }
}

TEST(ImagePlan, BadSizes) {
  const auto error = [](const auto& change, BatchShape batch = {2, 32, 32}) {
    ImageShape shape = shape_named("resnet18", 10);
    change(shape);
    return error_of([&] { plan_image(shape, batch, parse_method("satchel")); });
  };
  const auto same = [](ImageShape&) {};
  EXPECT_EQ(error(same), "no error");
  EXPECT_EQ(error([](ImageShape& s) { s.name = "resnet19"; }),
            "[plan] an image model must be one of resnet18, resnet34, resnet50, resnet152, vgg16, vgg16_bn, densenet121, got 'resnet19'");
  EXPECT_EQ(error([](ImageShape& s) { s.classes = 0; }), "[plan] classes must be 1 to 2^24, got 0");
  EXPECT_EQ(error([](ImageShape& s) { s.channels = -1; }), "[plan] channels must be 1 to 4096, got -1");
  EXPECT_EQ(error([](ImageShape& s) { s.width = 0; }), "[plan] width must be 1 to 4096, got 0");
  EXPECT_EQ(error([](ImageShape& s) { s.dropout = 1; }), "[plan] dropout must be at least 0 and less than 1, got 1");
  EXPECT_EQ(error([](ImageShape& s) { s.dropout = NAN; }).rfind("[plan] dropout must be", 0), 0u);
  EXPECT_EQ(error(same, {0, 32, 32}), "[plan] images must be 1 to 2^20, got 0");
  EXPECT_EQ(error(same, {(1 << 20) + 1, 32, 32}), "[plan] images must be 1 to 2^20, got 1048577");
  EXPECT_EQ(error(same, {2, 0, 32}), "[plan] the image's height must be 1 to 2^16, got 0");
  EXPECT_EQ(error([](ImageShape& s) { s.name = "vgg16"; }, {2, 31, 32}),
            "[plan] an image must be so large that every layer has a map of 1×1 or more, got none at features.30");
  EXPECT_EQ(error([](ImageShape& s) {
              s.name = "densenet121";
              s.width = 33;
            }),
            "[plan] width must be even for densenet121, got 33");
  EXPECT_EQ(error([](ImageShape& s) { s.width = 4096; }, {1 << 20, 1 << 16, 1 << 16}).rfind("[plan] ", 0), 0u);
  EXPECT_EQ(error_of([] { largest_batch(shape_named("resnet18"), 32, 32, parse_method("fp32"), 0); }),
            "[plan] a budget must be 1 byte or more, got 0");
}

}  // namespace
}  // namespace satchel
