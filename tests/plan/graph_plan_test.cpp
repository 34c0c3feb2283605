#include "satchel/plan/graph_plan.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "satchel/core/error.h"
#include "tests/support.h"

namespace satchel {
namespace {

using test::error_of;

constexpr double kMiB = 1 << 20;

/// Two layers: 10 features, 12 hidden, 3 classes. With 100 nodes every size has to be rounded up somewhere.
GraphShape small(Norm norm, Activation activation, double dropout = 0.5, const std::string& conv = "sage") {
  GraphShape shape;
  shape.conv = conv;
  shape.layers = 2;
  shape.features = 10;
  shape.hidden = 12;
  shape.classes = 3;
  shape.norm = norm;
  shape.activation = activation;
  shape.dropout = dropout;
  return shape;
}

std::vector<SavedTensor> plan(const GraphShape& shape, const char* method, bool sparse = false) {
  return plan_graph(shape, 100, parse_method(method), sparse);
}

using Lines = std::vector<SavedTensor>;

void expect_lines(const Lines& plan, const Lines& expected) {
  ASSERT_EQ(plan.size(), expected.size());
  for (size_t i = 0; i < plan.size(); ++i) {
    const SavedTensor &a = plan[i], &b = expected[i];
    EXPECT_EQ(a, b) << "line " << i << ": " << a.name << ' ' << a.kind << ' ' << a.bits << ' ' << a.bytes << ' ' << a.fp32_bytes << ", not "
                    << b.name << ' ' << b.kind << ' ' << b.bits << ' ' << b.bytes << ' ' << b.fp32_bytes;
  }
}

const SavedTensor kSeedOfNorm = {"norms.0", "seed", {1}, 64, 8, 8};
const SavedTensor kSeedOfData = {"convs.0", "seed", {1}, 64, 8, 8};
const SavedTensor kSeedOfConv = {"convs.1", "seed", {1}, 64, 8, 8};
// One bit for each of 1,200 values; torch keeps a byte.
const SavedTensor kMask = {"norms.0", "mask", {100, 12}, 1, 150, 1200};
const SavedTensor kAffine = {"norms.0", "affine", {2, 12}, 32, 96, 96};
const SavedTensor kBatch = {"norms.0", "statistics", {12}, 32, 48, 48}, kBatchPair = {"norms.0", "statistics", {2, 12}, 32, 96, 96};
const SavedTensor kLayer = {"norms.0", "statistics", {100}, 32, 400, 400}, kLayerPair = {"norms.0", "statistics", {2, 100}, 32, 800, 800};

// 1,200 values at b bits in blocks of 256: 150·b bytes, aligned to 16, then 5 headers of 4; with channels aligned again, 16 each.
constexpr int64_t kTwoBits = 304 + 20, kFourBits = 608 + 20;                                      // 300 → 304, 600 → 608
constexpr int64_t kTwoBitsChannels = 304 + 32 + 12 * 16;                                          // 324 → 336
constexpr int64_t kThreeBitsOneChannel = 464 + 32 + 16, kThreeBitsChannels = 464 + 32 + 12 * 16;  // 450 → 464, 484 → 496

SavedTensor shared(int bits, int64_t bytes) { return {"norms.0", "shared", {100, 12}, bits, bytes, 4800}; }

TEST(GraphPlan, SatchelKeepsOneThingALayer) {
  using enum Activation;
  expect_lines(plan(small(Norm::batch, relu), "satchel,off=mean"), {shared(2, kTwoBitsChannels), kBatch, kSeedOfNorm});
  expect_lines(plan(small(Norm::layer, relu), "satchel,off=mean"), {shared(2, kTwoBitsChannels), kLayer, kSeedOfNorm});
  expect_lines(plan(small(Norm::batch, relu, 0), "satchel,off=mean"), {shared(2, kTwoBitsChannels), kBatch});
  expect_lines(plan(small(Norm::none, relu), "satchel,off=mean"), {shared(2, kTwoBits), kSeedOfNorm});
  expect_lines(plan(small(Norm::batch, leaky_relu), "satchel,off=mean"), {shared(3, kThreeBitsChannels), kBatch, kSeedOfNorm});
  expect_lines(plan(small(Norm::none, leaky_relu), "satchel,off=mean"), {shared(3, kThreeBitsOneChannel), kSeedOfNorm});
  expect_lines(plan(small(Norm::batch, none), "satchel,off=mean"), {shared(2, kTwoBits), kAffine, kBatch, kSeedOfNorm});
  EXPECT_EQ(plan(small(Norm::batch, relu, .5, "gcn"), "satchel,off=mean"), plan(small(Norm::batch, relu), "satchel,off=mean"));
  EXPECT_EQ(plan(small(Norm::batch, relu), "satchel,off=mean", true), plan(small(Norm::batch, relu), "satchel,off=mean"));
}

TEST(GraphPlan, SharedElu) {
  const SavedTensor norm = {"norms.0", "norm", {100, 12}, 2, kTwoBits, 4800};
  expect_lines(plan(small(Norm::batch, Activation::elu), "satchel,off=mean"), {norm, kBatch, shared(3, kThreeBitsOneChannel), kSeedOfNorm});
  expect_lines(plan(small(Norm::none, Activation::elu), "satchel,off=mean"), {shared(3, kThreeBitsOneChannel), kSeedOfNorm});
  const SavedTensor kept = {"norms.0", "norm", {100, 12}, 32, 4800, 4800};
  expect_lines(plan(small(Norm::layer, Activation::elu), "satchel,bits=32"), {kept, kLayer, shared(32, 4800), kMask, kSeedOfNorm});
}

TEST(GraphPlan, SharedWithoutASideKeepsAMask) {
  using enum Activation;
  expect_lines(plan(small(Norm::batch, relu), "gact"), {shared(4, kFourBits), kMask, kAffine, kBatch, kSeedOfNorm});
  expect_lines(plan(small(Norm::none, leaky_relu), "gact"), {shared(4, kFourBits), kMask, kSeedOfNorm});
  expect_lines(plan(small(Norm::batch, relu), "satchel,bits=32"), {shared(32, 4800), kMask, kAffine, kBatch, kSeedOfNorm});
  // Blocks of one sample: a header for each of 100 rows.
  expect_lines(plan(small(Norm::none, relu), "bits=2,block=256,sample=yes,levels=even"), {shared(2, 304 + 400), kMask, kSeedOfNorm});
}

TEST(GraphPlan, NothingToShareIsTheNextInput) {
  const GraphShape shape = small(Norm::none, Activation::none);
  const SavedTensor input = {"convs.1", "input", {100, 12}, 2, kTwoBits, 4800};
  expect_lines(plan(shape, "satchel"), {kSeedOfNorm, input});
  expect_lines(plan(small(Norm::none, Activation::none, 0), "satchel"), {input});
  Method m = parse_method("satchel");
  m.packs_data = m.keeps_dropout = true;
  // 1,000 values: 250 → 256 bytes and 4 headers.
  const SavedTensor data = {"convs.0", "input", {100, 10}, 2, 256 + 16, 4000}, drop = {"norms.0", "dropout", {100, 12}, 1, 150, 1200};
  expect_lines(plan_graph(shape, 100, m), {data, drop, input});
  expect_lines(plan_graph(shape, 100, m, true), {drop, input});
}

TEST(GraphPlan, LayerByLayerKeepsEach) {
  using enum Activation;
  // ⌈10/8⌉ = ⌈12/8⌉ = 2 columns: 200 values are 50 → 64 bytes and 100 headers.
  const Lines data = {
      {"convs.0", "input", {100, 10}, 2, 64 + 400, 4000}, kSeedOfData, {"convs.0", "aggregate", {100, 10}, 2, 464, 4000}, kSeedOfData};
  const Lines conv = {
      {"convs.1", "input", {100, 12}, 2, 464, 4800}, kSeedOfConv, {"convs.1", "aggregate", {100, 12}, 2, 464, 4800}, kSeedOfConv};
  // Blocks of a row of 12: 100 headers.
  const SavedTensor norm = {"norms.0", "norm", {100, 12}, 2, 304 + 400, 4800}, drop = {"norms.0", "dropout", {100, 12}, 1, 150, 1200};
  const auto joined = [](Lines first, const Lines& middle, const Lines& last) {
    first.insert(first.end(), middle.begin(), middle.end());
    first.insert(first.end(), last.begin(), last.end());
    return first;
  };
  expect_lines(plan(small(Norm::batch, relu), "exact"), joined(data, {norm, kBatchPair, kMask, drop}, conv));
  expect_lines(plan(small(Norm::layer, leaky_relu), "exact"), joined(data, {norm, kLayerPair, kMask, drop}, conv));
  expect_lines(plan(small(Norm::none, relu, 0), "exact"), joined(data, {kMask}, conv));
  expect_lines(plan(small(Norm::batch, relu), "exact", true), joined({}, {norm, kBatchPair, kMask, drop}, conv));
  // Sign and value in 3 bits: 464 bytes, 100 headers (864, aligned) and a channel.
  const SavedTensor elu_output = {"norms.0", "activation", {100, 12}, 3, 464 + 400 + 16, 4800};
  expect_lines(plan(small(Norm::batch, elu), "exact"), joined(data, {norm, kBatchPair, elu_output, drop}, conv));
  expect_lines(plan(small(Norm::batch, relu, .5, "gcn"), "exact"), {data[0], data[1], norm, kBatchPair, kMask, drop, conv[0], conv[1]});
}

// Rows with bits of their own: 12 values are 16 bytes a bit, with a header and a share of 4 bytes each.
TEST(GraphPlan, ActnnGivesEachRowItsBits) {
  const SavedTensor input = {"convs.1", "input", {100, 12}, 2, 100 * (2 * 16 + 4 + 4), 4800};
  const auto inputs = [](const char* method) {
    Lines lines = plan(small(Norm::batch, Activation::relu), method);
    std::erase_if(lines, [](const SavedTensor& s) { return s.kind != "input"; });
    return lines;
  };
  expect_lines(inputs("actnn"), {input});
  // 150·2 → 304 bytes, a header a row.
  expect_lines(inputs("actnn,adaptive=no"), {{"convs.1", "input", {100, 12}, 2, 304 + 400, 4800}});
  EXPECT_EQ(
      error_of([] { plan(small(Norm::batch, Activation::relu), "actnn,levels=optimal"); }).rfind("[plan] bits by sample take even", 0), 0u);
  EXPECT_EQ(error_of([] { plan_graph(small(Norm::batch, Activation::relu), (1 << 25) + 1, parse_method("actnn")); }),
            "[plan] bits by sample take at most 2^25 samples (adaptive=no takes more), got 33554433");
}

TEST(GraphPlan, ProjectionKeepsInputsOnly) {
  const SavedTensor norm = {"norms.0", "norm", {100, 12}, 32, 4800, 4800}, input = {"convs.1", "input", {100, 12}, 32, 800, 4800};
  expect_lines(plan(small(Norm::batch, Activation::relu), "projection"), {norm, kBatchPair, kMask, kSeedOfNorm, input, kSeedOfConv});
  const SavedTensor elu_output = {"norms.0", "activation", {100, 12}, 32, 4800, 4800};
  expect_lines(plan(small(Norm::none, Activation::elu, 0), "projection"), {elu_output, kMask, input, kSeedOfConv});
}

TEST(GraphPlan, PlainIsWhatTorchKeeps) {
  using enum Activation;
  const SavedTensor data = {"convs.0", "aggregate", {100, 10}, 32, 4000, 4000}, input = {"convs.1", "input", {100, 12}, 32, 4800, 4800},
                    aggregate = {"convs.1", "aggregate", {100, 12}, 32, 4800, 4800}, norm = {"norms.0", "norm", {100, 12}, 32, 4800, 4800},
                    activation = {"norms.0", "activation", {100, 12}, 32, 4800, 4800},
                    drop = {"norms.0", "dropout", {100, 12}, 8, 1200, 1200};
  expect_lines(plan(small(Norm::batch, relu), "fp32"), {data, norm, kBatchPair, activation, drop, aggregate, input});
  expect_lines(plan(small(Norm::layer, relu, 0), "fp32"), {data, norm, kLayerPair, aggregate, input});
  expect_lines(plan(small(Norm::layer, elu, 0), "fp32"), {data, norm, kLayerPair, activation, aggregate, input});
  expect_lines(plan(small(Norm::none, leaky_relu, 0), "fp32"), {data, activation, aggregate, input});
  expect_lines(plan(small(Norm::none, none), "fp32"), {data, drop, aggregate, input});
  expect_lines(plan(small(Norm::batch, relu), "fp32", true), {norm, kBatchPair, activation, drop, aggregate, input});
  expect_lines(plan(small(Norm::batch, relu, .5, "gcn"), "fp32"), {norm, kBatchPair, activation, drop, input});
}

TEST(GraphPlan, NamesCountLayers) {
  GraphShape shape = small(Norm::batch, Activation::relu);
  shape.layers = 1;
  EXPECT_TRUE(plan(shape, "satchel").empty());
  EXPECT_EQ(plan(shape, "fp32").size(), 1u);
  shape.layers = 4;
  const Lines lines = plan(shape, "satchel");
  ASSERT_EQ(lines.size(), 9u);
  EXPECT_EQ(lines[0].name, "norms.0");
  EXPECT_EQ(lines[8].name, "norms.2");
}

TEST(GraphPlan, ArxivInWholeModels) {
  const PublishedModel m = published_model("arxiv");
  // Nine and a half float32 matrices of nodes × 128, and two numbers a channel of two norms.
  EXPECT_EQ(total_bytes(plan_graph(m.shape, m.nodes, parse_method("fp32"))), 19 * m.nodes * 128 * 2 + 2 * 2 * 128 * 4);
  // Two shared saves of 2 bits and 4 bytes a block of 256, which divides nodes × 128 up to a half: 84,672 headers. Codes end
  // on a multiple of 16, headers too; 128 channels of 16 bytes, a statistic of 4 a channel, a seed.
  const int64_t plain = m.nodes * 32 + 84672 * 4 + 128 * 16 + 128 * 4 + 8;
  EXPECT_EQ(total_bytes(plan_graph(m.shape, m.nodes, parse_method("satchel,off=mean"))), 2 * plain);
  // The sampled plane: a key of 16 bytes, and for every eighth block a bit a value.
  EXPECT_EQ(total_bytes(plan_graph(m.shape, m.nodes, parse_method("satchel"))), 2 * (plain + 16 + 84672 / 8 * 32));
  EXPECT_EQ((m.nodes * 128 + 255) / 256, 84672);
}

TEST(GraphPlan, Loss) {
  const GraphShape shape = small(Norm::batch, Activation::relu);
  EXPECT_EQ(plan_loss(shape, 100, 40, parse_method("satchel")), (Lines{{"loss", "loss", {100, 3}, 32, 1200, 1200}}));
  EXPECT_EQ(plan_loss(shape, 100, 40, parse_method("fp32")), (Lines{{"loss", "loss", {40, 3}, 32, 484, 484}}));
  for (const int64_t n : {0, 101}) {
    EXPECT_EQ(error_of([&] { plan_loss(shape, 100, n, Method{}); }),
              "[plan] training nodes must be 1 to the number of nodes, got " + std::to_string(n));
  }
}

TEST(GraphPlan, SizesOutOfRange) {
  const auto error = [](const auto& change, int64_t nodes = 100, const char* method = "satchel") {
    GraphShape shape = small(Norm::batch, Activation::relu);
    change(shape);
    return error_of([&] { plan_graph(shape, nodes, parse_method(method)); });
  };
  const auto same = [](GraphShape&) {};
  EXPECT_EQ(error(same, 0), "[plan] nodes must be 1 to 2^40, got 0");
  EXPECT_EQ(error(same, (int64_t{1} << 40) + 1), "[plan] nodes must be 1 to 2^40, got 1099511627777");
  EXPECT_EQ(error(same, int64_t{1} << 40), "accepted");
  EXPECT_EQ(error([](GraphShape& s) { s.conv = "SAGE"; }).rfind("[plan] model must be sage, gcn", 0), 0u);
  EXPECT_EQ(error([](GraphShape& s) { s.layers = 0; }), "[plan] layers must be 1 to 1000, got 0");
  EXPECT_EQ(error([](GraphShape& s) { s.layers = 1001; }), "[plan] layers must be 1 to 1000, got 1001");
  EXPECT_EQ(error([](GraphShape& s) { s.features = 0; }), "[plan] features must be 1 to 2^31, got 0");
  EXPECT_EQ(error([](GraphShape& s) { s.hidden = -5; }), "[plan] hidden must be 1 to 2^31, got -5");
  EXPECT_EQ(error([](GraphShape& s) { s.classes = (int64_t{1} << 31) + 1; }), "[plan] classes must be 1 to 2^31, got 2147483649");
  EXPECT_EQ(error([](GraphShape& s) { s.dropout = 1; }), "[plan] dropout must be at least 0 and less than 1, got 1");
  EXPECT_EQ(error([](GraphShape& s) { s.dropout = NAN; }).rfind("[plan] dropout must be", 0), 0u);
  EXPECT_EQ(error([](GraphShape& s) { s.norm = Norm(9); }), "[plan] norm must be none, batch or layer, got 9");
  const auto wide = [](GraphShape& s) { s.hidden = int64_t{1} << 31; };
  for (const char* method : {"satchel", "fp32", "blockwise", "bits=32"}) {
    EXPECT_EQ(error(wide, int64_t{1} << 40, method).rfind("[plan] ", 0), 0u) << method;
  }
  // 2^55 values a layer fit; 999 layers of 2^57 bytes do not.
  const auto long_and_wide = [](GraphShape& s) {
    s.layers = 1000;
    s.hidden = 1 << 15;
  };
  EXPECT_EQ(error(long_and_wide, int64_t{1} << 40, "fp32"), "[plan] a model may keep at most 2^62 bytes; too many layers, got 1000");
  Method wrong = parse_method("satchel");
  wrong.input.side = Side::both;
  EXPECT_EQ(error_of([&] { plan_graph(small(Norm::batch, Activation::relu), 100, wrong); }).rfind("[plan] inputs of layers", 0), 0u);
}

TEST(Published, ArxivIsTheByteModelOfTheory) {
  const std::vector<std::pair<std::string, double>> theory = {{"FP32", 786.22}, {"EXACT", 30.46},  {"G/R 2", 27.87},  {"G/R 4", 26.58},
                                                              {"G/R 8", 25.93}, {"G/R 16", 25.69}, {"G/R 32", 25.57}, {"G/R 64", 25.51}};
  const std::vector<double> printed = {786.22, 30.47, 27.89, 26.60, 25.95, 25.72, 25.60, 25.56};
  const std::vector<PublishedRow> rows = published_table("arxiv");
  ASSERT_EQ(rows.size(), theory.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i].name, theory[i].first);
    EXPECT_EQ(rows[i].published_mib, printed[i]);
    // Theory rounds to 0.01: half of it, and the rounding of parts to bytes.
    EXPECT_NEAR(static_cast<double>(total_bytes(rows[i].parts)) / kMiB, theory[i].second, 0.0051) << rows[i].name;
  }
}

double mib_of(const PublishedRow& row, std::initializer_list<const char*> kinds) {
  double bytes = 0;
  for (const SavedTensor& s : row.parts) {
    for (const char* kind : kinds) bytes += s.kind == kind ? static_cast<double>(s.bytes) : 0;
  }
  return bytes / kMiB;
}

TEST(Published, PartsOfExactOnArxiv) {
  const PublishedRow exact = published_table("arxiv")[1];
  // Theory rounds to 0.1.
  EXPECT_NEAR(mib_of(exact, {"mask", "dropout"}), 10.3, 0.051);
  EXPECT_NEAR(mib_of(exact, {"norm"}), 10.3, 0.051);
  EXPECT_NEAR(mib_of(exact, {"metadata"}), 5.2, 0.051);
  EXPECT_NEAR(mib_of(exact, {"input", "aggregate"}), 3.9, 0.051);
  EXPECT_EQ(mib_of(exact, {"labels"}), 90941 * 8 / kMiB);
  EXPECT_EQ(mib_of(exact, {"projection"}), 6 * 128 * 16 * 4 / kMiB);
}

// docs/theory.md 11, the block-size study: to .02 MiB.
TEST(Published, BlockSizesOfArxiv) {
  const PublishedModel m = published_model("arxiv");
  const std::pair<int64_t, double> theory[] = {{0, 786.22}, {1, 30.46},  {2, 27.87},  {4, 26.58},
                                               {8, 25.93},  {16, 25.69}, {32, 25.57}, {64, 25.51}};
  for (const auto& [rows, mib] : theory) {
    EXPECT_NEAR(static_cast<double>(total_bytes(paper_saves(m.shape, m.nodes, m.training_nodes, rows))) / kMiB, mib, .02) << rows;
  }
}

// Flickr, SAGE 2 × 256 with 500 features, by hand from the formulas of docs/theory.md 11.
TEST(Published, BlockSizesOfFlickr) {
  GraphShape shape;
  shape.layers = 2;
  shape.features = 500;
  shape.hidden = 256;
  shape.classes = 7;
  constexpr double kNodes = 89250, kTraining = 44625;
  for (const int64_t rows : {1, 2, 4, 8, 16, 32, 64}) {
    const auto g = static_cast<double>(rows);
    double bytes = 8 * kTraining;
    for (const double width : {500.0, 256.0}) {
      const double projected = std::ceil(width / 8);
      bytes += 2 * (kNodes * projected / 4 + 4 * kNodes / g + 4 * width * projected);  // x and A·x, their headers and projections
    }
    bytes += kNodes * 256 / 4 + 4 * kNodes * 256 / std::min(256 * g, 1024.0) + 2 * kNodes * 256 / 8;  // norm, its headers, two masks
    EXPECT_NEAR(static_cast<double>(total_bytes(paper_saves(shape, 89250, 44625, rows))) / kMiB, bytes / kMiB, .001) << rows;
  }
  EXPECT_EQ(error_of([&] { paper_saves(shape, 10, 0, -1); }), "[plan] blocks must have 0 rows or more, got -1");
  shape.conv = "gcn";
  EXPECT_EQ(error_of([&] { paper_saves(shape, 10, 0, 1); }), "[plan] the papers' byte model must be of sage, got gcn");
}

TEST(Published, ProductsInWholeMiB) {
  const std::vector<PublishedRow> rows = published_table("products");
  ASSERT_EQ(rows.size(), 3u);
  const double theory[] = {16480, 445, 390};
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i].published_mib, theory[i]);
    EXPECT_NEAR(static_cast<double>(total_bytes(rows[i].parts)) / kMiB, theory[i], 0.5) << rows[i].name;  // whole MiB
  }
  EXPECT_NEAR(mib_of(rows[2], {"mask", "dropout"}), 299, 0.5);
  EXPECT_EQ(mib_of(rows[1], {"norm", "labels"}), 0);
}

TEST(Published, OwnLayoutIsCloseToThePapers) {
  for (const char* name : {"arxiv", "products"}) {
    const PublishedModel model = published_model(name);
    for (const PublishedRow& row : published_table(name)) {
      const double own = static_cast<double>(total_bytes(plan_graph(model.shape, model.nodes, parse_method(row.method)))) / kMiB;
      double without = static_cast<double>(total_bytes(row.parts)) / kMiB;
      without -= mib_of(row, {"labels", "projection"});
      // Beside labels and projections the two differ by statistics (2 KiB), seeds, and padding of 32 bytes a tensor.
      EXPECT_NEAR(own, without, 0.01) << name << ' ' << row.name;
    }
  }
  EXPECT_EQ(error_of([] { published_table("cora"); }), "[plan] a published table must be arxiv or products, got 'cora'");
}

}  // namespace
}  // namespace satchel
