// `satchel train` of image models, `bench images` and `bench batch` as a user runs them.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "satchel/data/npy.h"
#include "satchel/train/safetensors.h"
#include "tests/data/image_files.h"
#include "tests/tools/run_tool.h"

namespace satchel::test {
namespace {

using nlohmann::json;

constexpr const char* kData = "synthetic-images:classes=4,size=16,count=96,test=48";

class TrainImages : public testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(::mkdir(folder_.c_str(), 0700), 0); }
  void TearDown() override {
    for (const char* name : {"a.json", "b.json", "a.st", "b.st", "y.npy", "p.npy"}) ::unlink(path(name).c_str());
    EXPECT_EQ(::rmdir(folder_.c_str()), 0) << "no other file may be left: " << folder_;
  }

  std::string path(const std::string& name) const { return folder_ + "/" + name; }

  /// A small run with `more` behind it.
  std::string training(const std::string& more) const {
    return std::string("train --data ") + kData + " --model resnet18 --width 4 --batch 32 --threads 1 " + more;
  }

  json trained(const std::string& more, const std::string& name) const {
    const Outcome r = run_tool(training(more + " --quiet --json " + path(name)));
    EXPECT_EQ(r.code, 0) << r.out;
    return read(name);
  }
  json read(const std::string& name) const {
    std::ifstream file(path(name));
    return json::parse(file, nullptr, false);
  }

  static void expect_refused(const std::string& arguments, int code, const std::string& part) {
    const Outcome r = run_tool(arguments);
    EXPECT_EQ(r.code, code) << arguments;
    EXPECT_NE(r.out.find(part), std::string::npos) << arguments << '\n' << r.out;
    EXPECT_EQ(r.out.find('\n'), r.out.size() - 1) << "one line: " << r.out;
  }

 private:
  std::string folder_ = testing::TempDir() + "satchel_train_images_" + std::to_string(getpid());
};

TEST_F(TrainImages, FourMethodsInOneTable) {
  const Outcome r = run_tool(training("--epochs 2 --method fp32,actnn,division,satchel --json " + path("a.json")));
  ASSERT_EQ(r.code, 0) << r.out;
  for (const char* part : {"96 images to train on, 48 to test on", "4 classes", "\nmethod ", "\nfp32 ", "\nactnn ", "\ndivision ",
                           "\nsatchel ", "test accuracy %", "- fp32", "saved", "peak", "step", "x less)", "images/s", "epoch   2/2"})
    EXPECT_NE(r.out.find(part), std::string::npos) << part << '\n' << r.out;
  const json all = read("a.json");
  ASSERT_EQ(all["runs"].size(), 4u);
  for (const json& run : all["runs"]) {
    for (const char* key :
         {"method",          "seed",   "device", "test",  "step_seconds", "images_per_second", "saved_bytes", "loss_bytes", "peak_bytes",
          "parameter_bytes", "loss",   "epochs", "model", "batch",        "schedule",          "amp",         "tf32",       "data",
          "metric",          "machine"})
      EXPECT_TRUE(run.contains(key)) << key;
    EXPECT_EQ(run["model"], "resnet18");
    EXPECT_EQ(run["epochs"], 2);
    int64_t sum = 0;
    for (const json& t : run["tensors"]) sum += t["bytes"].get<int64_t>();
    if (run["method"] != "fp32") {
      EXPECT_EQ(sum, run["saved_bytes"].get<int64_t>()) << run["method"];
    }
  }
  EXPECT_LT(all["runs"][3]["saved_bytes"].get<int64_t>(), all["runs"][1]["saved_bytes"].get<int64_t>());
}

TEST_F(TrainImages, ResumedIsOneRun) {
  const std::string rates = "--schedule step --milestones 1,2 --lr 0.05 --method satchel --checkpoint " + path("a.st");
  const json whole = trained(rates + " --epochs 3", "a.json");
  trained(rates + " --epochs 1 --overwrite", "b.json");
  const json resumed = trained(rates + " --epochs 3 --resume", "b.json");
  for (const char* key : {"test", "loss", "epochs", "saved_bytes"}) EXPECT_EQ(whole["runs"][0][key], resumed["runs"][0][key]) << key;
  expect_refused(training(rates + " --epochs 4 --resume --label-smoothing 0.1 --quiet"), 1,
                 "[resume] label_smoothing must be the checkpoint's, 0.0, got 0.1");
  expect_refused(
      "predict --checkpoint " + path("a.st") + " --data synthetic:nodes=600,edges=2400,features=4,classes=2 -o " + path("a.json"), 2,
      "[predict] data must be images for ");
}

/// SIGTERM after the first checkpoint, a few steps into an epoch of 100.
TEST_F(TrainImages, ASignalStopsWithinAnEpoch) {
  const auto run = [&](const std::string& name) {
    return "train --data synthetic-images:classes=4,size=16,count=1600,test=48 --model resnet18 --width 4 --batch 16 --threads 1 --epochs "
           "1 "
           "--resume --method actnn --checkpoint " +
           path(name + ".st") + " --json " + path(name + ".json");
  };
  const std::string wait = "while [ ! -e '" + path("a.st") + "' ] && kill -0 $p; do sleep 0.02; done; kill -TERM $p; wait $p";
  const int status = std::system(("'" SATCHEL_TOOL "' " + run("a") + " --checkpoint-every 1e-9 >/dev/null 2>&1 & p=$!; " + wait).c_str());
  ASSERT_EQ(WEXITSTATUS(status), 143);
  const json part = read("a.json")["runs"][0], state = json::parse(read_safetensors(path("a.st")).metadata.at("state"));
  EXPECT_TRUE(part["interrupted"].get<bool>());
  EXPECT_EQ(part["epochs"], 0);
  EXPECT_GT(part["steps"].get<int>(), 0);
  EXPECT_LT(part["steps"].get<int>(), 100);
  EXPECT_EQ(part["steps"], state["step"]) << "the checkpoint is of the last step";
  ASSERT_EQ(run_tool(run("a")).code, 0);
  ASSERT_EQ(run_tool(run("b")).code, 0);
  for (const char* key : {"loss", "test", "curve"}) EXPECT_EQ(read("a.json")["runs"][0][key], read("b.json")["runs"][0][key]) << key;
  EXPECT_TRUE(read_safetensors(path("a.st")).tensors == read_safetensors(path("b.st")).tensors);
}

/// One class a row of `scores`: the largest, as the file of classes has it.
TEST_F(TrainImages, PredictsTheClassesOfImages) {
  const json run = trained("--method satchel --epochs 3 --checkpoint " + path("a.st"), "a.json")["runs"][0];
  const std::string predict = "predict --checkpoint " + path("a.st") + " --data ";
  const Outcome r = run_tool(predict + kData + " -o " + path("y.npy") + " --scores " + path("p.npy"));
  ASSERT_EQ(r.code, 0) << r.out;
  char printed[64];
  std::snprintf(printed, sizeof printed, "48 images, test %.2f %%\n", run["test"].get<double>());
  EXPECT_NE(r.out.find(printed), std::string::npos) << r.out;
  const NpyArray classes = read_npy(path("y.npy")), scores = read_npy(path("p.npy"));
  EXPECT_EQ(classes.shape, (std::vector<int64_t>{48}));
  ASSERT_EQ(scores.shape, (std::vector<int64_t>{48, 4}));
  const auto* c = reinterpret_cast<const int64_t*>(classes.data.data());
  const auto* p = reinterpret_cast<const float*>(scores.data.data());
  for (int64_t i = 0; i < 48; ++i) EXPECT_EQ(std::max_element(p + 4 * i, p + 4 * i + 4) - (p + 4 * i), c[i]) << i;
  expect_refused(predict + "synthetic-images:classes=4,size=32,count=96,test=48 -o " + path("y.npy"), 1,
                 "[predict] images must be of 16 × 16, as the checkpoint's, got 32 × 32");

  ASSERT_EQ(::mkdir(path("photos").c_str(), 0700), 0);
  testing_files::spill(path("photos/b.jpg"), testing_files::flat_jpeg(40, 30, 250, 10, 10));
  testing_files::spill(path("photos/a.JPG"), testing_files::flat_jpeg(20, 30, 10, 10, 250));
  const Outcome folder = run_tool(predict + path("photos") + " -o " + path("y.npy"));
  EXPECT_EQ(folder.code, 0) << folder.out;
  EXPECT_NE(folder.out.find("y.npy: 2 images, no labels to test on\n"), std::string::npos) << folder.out;
  EXPECT_EQ(read_npy(path("y.npy")).shape, (std::vector<int64_t>{2}));
  for (const char* name : {"photos/a.JPG", "photos/b.jpg"}) ::unlink(path(name).c_str());
  ::rmdir(path("photos").c_str());
}

TEST_F(TrainImages, WrongUse) {
  const auto refused = [&](const std::string& more, const std::string& part) { expect_refused(training(more), 2, part); };
  refused("--hidden 16", "[train] --hidden is not for this model, got resnet18");
  refused("--cuda-graph", "[train] --cuda-graph is not for this model, got resnet18");
  refused("--schedule linear", "--schedule: linear not in {cosine,step,onecycle,poly,none}");
  refused("--milestones 2", "[train] milestones need schedule step, got cosine");
  refused("--schedule step --milestones 1,x", "--milestones: must be a number, got 'x'");
  refused("--gamma 0.5", "[train] --gamma needs --schedule step, got cosine");
  refused("--image 32 --quiet",
          "[train] --image is for folders of JPEG files: synthetic-images:classes=4,size=16,count=96,test=48 has images of "
          "16 × 16, got 32");
  refused("--label-smoothing 2", "[train] label smoothing must be at least 0 and below 1, got 2");
  expect_refused("train --data x --model resnet18 --batch 0", 2, "--batch: must be a whole number from 1 to 1048576, got '0'");
  refused("--small-stem --large-stem", "[train] the stem must be one");
  refused("--tf32", "[train] tf32 needs device cuda, got cpu");
  refused("--method satchel,satchel", "[method] every method must be named once");
  refused("--checkpoint a.st --seeds 2", "[train] --checkpoint takes a single run");
  expect_refused("train --data synthetic:nodes=10,edges=20,features=4,classes=2 --batch 8", 2,
                 "[train] --batch is not for this model, got sage");
  expect_refused("train --data x --model resnet19", 2, "--model: resnet19 not in {sage,gcn,");
  expect_refused("train --data /nonexistent --model resnet18", 1, "[load] ");
  expect_refused(training("--lr 1e30 --epochs 3 --quiet"), 1,
                 "[train] loss must be finite (satchel; a smaller lr or a warm-up may help), got nan at epoch 1, step ");
  expect_refused(std::string("train --model vgg16 --width 4 --batch 8 --quiet --data ") + kData, 1,
                 "[train] images must be at least 32 × 32 for vgg16, got 16 × 16");
  expect_refused(std::string("train --model resnet18 --batch 97 --quiet --data ") + kData, 1,
                 "[train] batch must be at most the 96 images there are, got 97");
}

TEST_F(TrainImages, GraphsAreRefusedByName) {
  for (const char* data : {"synthetic:arxiv", "cora.npz"}) {
    expect_refused(
        std::string("train --model resnet18 --data ") + data, 2,
        "[train] data must be images for resnet18 (a folder of CIFAR, IDX or JPEG files, or synthetic-images:…), got the graph " +
            std::string(data));
  }
}

TEST_F(TrainImages, WithoutTestImagesThereIsNoAccuracy) {
  const Outcome r = run_tool(
      "train --data synthetic-images:classes=4,size=16,count=32,test=0 --model resnet18 --width 4 --batch 16 --epochs 1 --seeds 2 "
      "--threads 1 --method fp32,satchel --json " +
      path("a.json"));
  ASSERT_EQ(r.code, 0) << r.out;
  EXPECT_EQ(r.out.find("nan"), std::string::npos) << r.out;
  EXPECT_NE(r.out.find("there are no images to test on"), std::string::npos) << r.out;
  for (const json& run : read("a.json")["runs"]) {
    for (const char* key : {"test", "best_test", "best_epoch"}) EXPECT_TRUE(run[key].is_null()) << key;
    EXPECT_GT(run["loss"].get<double>(), 0);
  }
}

TEST_F(TrainImages, HelpTellsGraphsFromImages) {
  const std::string help = run_tool("train --help").out;
  for (const char* part : {"--epochs INT=200 (images 30)", "--lr FLOAT=0.01 (images 0.1)", "--weight-decay FLOAT=0 (images 0.0005)",
                           "--dropout FLOAT=0.5 (images: vgg 0.5, else 0)", "Graph models:", "Image models:", "\n  gact  "})
    EXPECT_NE(help.find(part), std::string::npos) << part << '\n' << help;
  EXPECT_NE(run_tool("predict --help").out.find("Images: the weights of the last epoch"), std::string::npos);
}

// At such a rate the loss of the step after the first is not finite, whatever is kept.
TEST_F(TrainImages, ABenchmarkGoesOnAfterALossThatIsNotFinite) {
  const Outcome r = run_tool(
      "bench images --model resnet18 --image 16 --classes 10 --width 4 --batch 4 --steps 2 --threads 1 --lr 1e30 --methods fp32,satchel "
      "--json " +
      path("a.json"));
  EXPECT_EQ(r.code, 1) << "no method ran: " << r.out;
  for (const char* part :
       {"\nfp32     loss nan at step 2 ", "\nsatchel  loss nan at step 2 ", "[bench] a method must run to its end, got none"})
    EXPECT_NE(r.out.find(part), std::string::npos) << part << '\n' << r.out;
  const json all = read("a.json");
  ASSERT_EQ(all["results"].size(), 2u);
  for (const json& e : all["results"]) {
    EXPECT_EQ(e["error"], "loss nan at step 2");
    EXPECT_EQ(e["fits"], true);
    for (const char* key : {"step_seconds", "ratio", "images_per_second", "saved_bytes", "loss", "steps"})
      EXPECT_TRUE(e[key].is_null()) << key;
  }
}

TEST_F(TrainImages, BenchImages) {
  const Outcome r = run_tool(
      "bench images --model resnet18 --image 16 --classes 10 --width 4 --batch 4 --steps 2 --threads 1 --methods fp32,satchel --json " +
      path("a.json"));
  ASSERT_EQ(r.code, 0) << r.out;
  for (const char* part : {"gradients at 32 bits are fp32's within", "\nfp32 ", "\nsatchel ", "of fp32", "images/s", " ms"})
    EXPECT_NE(r.out.find(part), std::string::npos) << part << '\n' << r.out;
  const json all = read("a.json");
  ASSERT_EQ(all["results"].size(), 2u);
  EXPECT_EQ(all["results"][0]["ratio"], 1.0);
  EXPECT_EQ(all["results"][1]["steps"], 2);
  EXPECT_LT(all["results"][1]["saved_bytes"].get<int64_t>(), all["results"][0]["saved_bytes"].get<int64_t>());
  EXPECT_TRUE(all["cap"].is_null());
  expect_refused("bench images --memory-cap 1GB", 2, "[bench] --memory-cap needs --device cuda, got cpu");
  expect_refused("bench images --tf32", 2, "[train] tf32 needs device cuda, got cpu");
  expect_refused("bench images --methods satchle", 2, "got 'satchle'");
  expect_refused("bench images --no-tries", 2, "[bench] --no-tries needs --device cuda, got cpu");
  expect_refused("bench images --model vgg16 --image 7", 2, "[bench] images must be at least 32 × 32 for vgg16, got 7 × 7");
  EXPECT_TRUE(all["results"][0]["error"].is_null());
}

TEST_F(TrainImages, BenchBatchFindsMoreThanFp32) {
  const Outcome r = run_tool(
      "bench batch --model resnet18 --image 16 --classes 10 --width 4 --multiple 4 --steps 1 --threads 1 --memory-cap 6MB "
      "--methods fp32,satchel --json " +
      path("a.json"));
  ASSERT_EQ(r.code, 0) << r.out;
  const json all = read("a.json");
  ASSERT_EQ(all["results"].size(), 2u);
  for (const json& e : all["results"]) {
    EXPECT_GT(e["batch"].get<int64_t>(), 0);
    EXPECT_EQ(e["batch"].get<int64_t>() % 4, 0);
    EXPECT_LE(e["total_bytes"].get<int64_t>(), 6000000);
  }
  EXPECT_GT(all["results"][1]["ratio"].get<double>(), 1);
  const Outcome most = run_tool(
      "bench batch --model resnet18 --image 16 --classes 10 --width 4 --multiple 4 --steps 1 --threads 1 --memory-cap 1GB --most 9 "
      "--methods satchel --json " +
      path("b.json"));
  EXPECT_NE(most.out.find("\nsatchel     8+ "), std::string::npos) << most.out;
  EXPECT_NE(most.out.find("+  all that --most allows: more may fit"), std::string::npos) << most.out;
  EXPECT_EQ(read("b.json")["results"][0]["capped"], true);
  expect_refused("bench batch", 2, "--memory-cap is required");
  expect_refused("bench batch --memory-cap 1GB --multiple 8 --most 4", 2, "[bench] --multiple must be at most --most, 4, got 8");
}

}  // namespace
}  // namespace satchel::test
