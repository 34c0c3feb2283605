// Options of `satchel train` that say what to do with odd data: --skip-broken, --unweighted.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "satchel/data/graph_data.h"
#include "tests/data/image_files.h"
#include "tests/tools/run_tool.h"

namespace satchel::test {
namespace {

using namespace testing_files;

TEST(DataOptions, BrokenImagesEndTheRunOrAreSkipped) {
  const Scratch scratch;
  write_image_folder(scratch, "f");
  spill(scratch.path("f/train/ant/broken.jpg"), "GIF89a");
  const std::string train =
      "train --model resnet18 --width 4 --image 32 --batch 2 --epochs 1 --threads 1 --method fp32 --data " + scratch.path("f");
  const Outcome stopped = run_tool(train);
  EXPECT_EQ(stopped.code, 1) << stopped.out;
  EXPECT_TRUE(holds(stopped.out, "f/train/ant/broken.jpg must be a JPEG file")) << stopped.out;
  const Outcome skipped = run_tool(train + " --skip-broken");
  EXPECT_EQ(skipped.code, 0) << skipped.out;
  EXPECT_TRUE(holds(skipped.out, "skipped 1 broken image:\n  [load] ") && holds(skipped.out, "ant/broken.jpg must be")) << skipped.out;
  EXPECT_TRUE(holds(skipped.out, "3 images to train on, 1 to test on")) << skipped.out;
  const Outcome wrong = run_tool("train --model resnet18 --skip-broken --data synthetic-images:classes=2,count=8,test=4,size=8");
  EXPECT_EQ(wrong.code, 2) << wrong.out;
  EXPECT_TRUE(holds(wrong.out, "--skip-broken is for folders of image files")) << wrong.out;
}

/// A ring of 40 nodes in two classes; every second edge weighs 3.
void write_ring(const std::string& path, float second) {
  constexpr int32_t kNodes = 40;
  std::vector<int32_t> start = {0}, target;
  std::vector<float> weight, features;
  std::vector<int64_t> labels;
  for (int32_t node = 0; node < kNodes; ++node) {
    target.push_back((node + 1) % kNodes);
    start.push_back(node + 1);
    weight.push_back(node % 2 == 0 ? second : 1);
    labels.push_back(node % 4 < 2 ? 0 : 1);
    features.push_back(static_cast<float>(node % 5));
  }
  write_npz(path, {{"adj_data", npy(weight)},
                   {"adj_indices", npy(target)},
                   {"adj_indptr", npy(start)},
                   {"adj_shape", npy(std::vector<int64_t>{kNodes, kNodes})},
                   {"attr_matrix", npy(features, "(40, 1)")},
                   {"labels", npy(labels)}});
}

TEST(DataOptions, WeightsOfEdgesAreUsedKeptAndLeftOut) {
  const Scratch scratch;
  const std::string ring = scratch.path("ring.npz"), file = scratch.path("run.st"), out = scratch.path("y.npy");
  write_ring(ring, 3);
  const std::string train = "train --epochs 2 --threads 1 --hidden 8 --method fp32 --overwrite --checkpoint " + file + " --data " + ring;
  const std::string predict = "predict --checkpoint " + file + " -o " + out + " --data " + ring;
  const Outcome weighted = run_tool(train);
  EXPECT_EQ(weighted.code, 0) << weighted.out;
  EXPECT_TRUE(holds(weighted.out, "40 edges as stored with weights")) << weighted.out;
  EXPECT_EQ(run_tool(predict).code, 0);
  EXPECT_TRUE(holds(run_tool(predict + " --unweighted").out, "edges must have weights, as those that the checkpoint was trained on"));
  const Outcome plain = run_tool(train + " --unweighted");
  EXPECT_EQ(plain.code, 0) << plain.out;
  EXPECT_FALSE(holds(plain.out, "with weights")) << plain.out;
  EXPECT_EQ(run_tool(predict + " --unweighted").code, 0);
  EXPECT_TRUE(holds(run_tool(predict).out, "(--unweighted leaves them out), got weights"));
  // `satchel data` writes them: both directions, none changed.
  EXPECT_EQ(run_tool("data --data " + ring + " --out " + scratch.path("saint")).code, 0);
  const GraphData saved = load_graph(scratch.path("saint"));
  ASSERT_EQ(saved.weight.size(), 80u);
  EXPECT_EQ(saved.target[0], 1);  // 0 – 1 weighs 3, 0 – 39 weighs 1
  EXPECT_EQ(saved.weight[0], 3);
  EXPECT_EQ(saved.weight[1], 1);
  // Negative ones have no meaning here.
  write_ring(ring, -3);
  const Outcome refused = run_tool(train);
  EXPECT_EQ(refused.code, 1);
  EXPECT_TRUE(holds(refused.out, "ring.npz: adj_data must be 0 or more") && holds(refused.out, "--unweighted")) << refused.out;
  EXPECT_EQ(run_tool(train + " --unweighted").code, 0);
}

}  // namespace
}  // namespace satchel::test
