// Nothing is written over by accident: inputs, data sets and checkpoints stay as they are unless the command says otherwise.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "satchel/data/npy.h"
#include "tests/support.h"
#include "tests/tools/run_tool.h"

namespace satchel::test {
namespace {

constexpr const char* kGraph = "synthetic:nodes=60,edges=120,features=4,classes=2";

class Overwrite : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return scratch_.path(name); }

  void write_array(const std::string& name) const {
    const float values[] = {1, -2, 3, -4, 5, -6};
    write_npy(path(name), "<f4", std::vector<int64_t>{2, 3}, values);
  }

  static void expect_refused(const std::string& arguments, const std::string& part) {
    const Outcome r = run_tool(arguments);
    EXPECT_EQ(r.code, 2) << arguments << '\n' << r.out;
    EXPECT_NE(r.out.find(part), std::string::npos) << arguments << '\n' << r.out;
  }
  static void expect_done(const std::string& arguments) {
    const Outcome r = run_tool(arguments);
    EXPECT_EQ(r.code, 0) << arguments << '\n' << r.out;
  }

  const Scratch scratch_;
};

TEST_F(Overwrite, PackAndUnpackLeaveTheirInputAlone) {
  write_array("x.npy");
  expect_done("pack " + path("x.npy") + " -o " + path("x.satchel"));
  ASSERT_EQ(::link(path("x.npy").c_str(), path("hard.npy").c_str()), 0);
  ASSERT_EQ(::symlink("x.npy", path("soft.npy").c_str()), 0);
  ASSERT_EQ(::symlink(".", path("here").c_str()), 0);
  const std::string array = slurp(path("x.npy")), packed = slurp(path("x.satchel"));
  const std::string rule = "[pack] --output must be another file than FILE, got ";
  expect_refused("pack " + path("x.npy") + " -o " + path("x.npy"), rule + path("x.npy"));
  expect_refused("pack " + path("x.npy") + " -o " + path("./here/x.npy"), rule);
  expect_refused("pack " + path("x.npy") + " -o " + path("hard.npy"), rule);
  expect_refused("pack " + path("soft.npy") + " -o " + path("x.npy"), rule);
  expect_refused("unpack " + path("x.satchel") + " -o " + path("here/x.satchel"), "[unpack] --output must be another file than FILE, got ");
  EXPECT_EQ(slurp(path("x.npy")), array);
  EXPECT_EQ(slurp(path("x.satchel")), packed);
  expect_done("pack " + path("x.npy") + " -o " + path("x.satchel"));  // another file than its input may be replaced
}

TEST_F(Overwrite, OutputsStayOutOfTheDataFolder) {
  expect_done(std::string("data --data ") + kGraph + " --out " + path("set"));
  ASSERT_EQ(::symlink("set", path("other_name").c_str()), 0);
  ASSERT_EQ(::mkdir(path("set/below").c_str(), 0700), 0);
  const std::string roles = slurp(path("set/role.json")), train = "train --epochs 1 --hidden 4 --quiet --data " + path("set");
  expect_refused(train + " --json " + path("set/role.json"), "[train] --json must lie outside the folder of --data, got ");
  expect_refused(train + " --json " + path("other_name/role.json"), "[train] --json must lie outside the folder of --data, got ");
  expect_refused(train + " --checkpoint " + path("set/below/../run.st"),
                 "[train] --checkpoint must lie outside the folder of --data, got ");
  expect_refused(train + " --checkpoint " + path("set/below/run.st"), "[train] --checkpoint must lie outside the folder of --data, got ");
  expect_refused("bench graph --data " + path("set") + " --json " + path("set/role.json"), "[bench] --json must lie outside");
  expect_done(train + " --checkpoint " + path("run.st"));  // beside it
  const std::string predict = "predict --checkpoint " + path("run.st") + " --data " + path("set");
  expect_refused(predict + " -o " + path("set/feats.npy"), "[predict] --output must lie outside the folder of --data, got ");
  expect_refused(predict + " -o " + path("y.npy") + " --scores " + path("set/p.npy"), "[predict] --scores must lie outside");
  EXPECT_EQ(slurp(path("set/role.json")), roles);
  EXPECT_NE(::access(path("set/run.st").c_str(), F_OK), 0);
  EXPECT_NE(::access(path("y.npy").c_str(), F_OK), 0);
}

TEST_F(Overwrite, DataAsksBeforeItReplaces) {
  expect_done(std::string("data --data ") + kGraph + " --out " + path("set"));
  const std::string features = slurp(path("set/feats.npy")), again = std::string("data --data ") + kGraph + ",seed=3 --out " + path("set");
  expect_refused(again, "[data] --out must be a folder without a data set, unless --overwrite replaces it, got ");
  EXPECT_EQ(slurp(path("set/feats.npy")), features);
  ASSERT_EQ(::mkdir(path("mine").c_str(), 0700), 0);
  std::ofstream(path("mine/feats.npy")) << "mine";
  expect_refused(std::string("data --data ") + kGraph + " --out " + path("mine"), path("mine/feats.npy"));
  EXPECT_EQ(slurp(path("mine/feats.npy")), "mine");
  expect_done(again + " --overwrite");
  EXPECT_NE(slurp(path("set/feats.npy")), features);
}

TEST_F(Overwrite, CheckpointsAskBeforeTheyAreReplaced) {
  const std::string graph = std::string("train --hidden 4 --quiet --data ") + kGraph + " --checkpoint " + path("run.st");
  expect_done(graph + " --epochs 5");
  const std::string kept = slurp(path("run.st"));
  expect_refused(graph + " --epochs 1",
                 "[train] --checkpoint must be a new file, unless --resume goes on from it or --overwrite replaces it, got " +
                     path("run.st") + ", which holds 5 epochs");
  expect_refused(
      std::string("train --model resnet18 --quiet --data synthetic-images:classes=2,size=8,count=16,test=4 --checkpoint ") + path("run.st"),
      "which holds 5 epochs");
  expect_refused(graph + " --epochs 9 --resume --overwrite", " excludes ");
  EXPECT_EQ(slurp(path("run.st")), kept);
  std::ofstream(path("notes.txt")) << "mine";
  expect_refused("train --quiet --epochs 1 --hidden 4 --data " + std::string(kGraph) + " --checkpoint " + path("notes.txt"),
                 "got " + path("notes.txt"));
  EXPECT_EQ(slurp(path("notes.txt")), "mine");
  expect_done(graph + " --epochs 6 --resume");
  expect_done(graph + " --epochs 1 --overwrite");
  expect_refused(graph + " --epochs 1", "which holds 1 epoch\n");
}

}  // namespace
}  // namespace satchel::test
