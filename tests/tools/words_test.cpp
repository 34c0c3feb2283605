// What the tool says: help, hints for mistyped words, sizes and devices, and figures that are there or are not.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "satchel/core/spec.h"
#include "satchel/core/suggest.h"
#include "satchel/data/npy.h"
#include "tests/support.h"
#include "tests/tools/run_tool.h"

namespace satchel::test {
namespace {

using nlohmann::json;

constexpr const char* kGraph = "synthetic:nodes=60,edges=120,features=4,classes=2";

void expect_said(const std::string& arguments, int code, const std::string& part) {
  const Outcome r = run_tool(arguments);
  EXPECT_EQ(r.code, code) << arguments << '\n' << r.out;
  EXPECT_NE(r.out.find(part), std::string::npos) << arguments << "\nwanted: " << part << "\ngot: " << r.out;
}

class Words : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return scratch_.path(name); }

  /// Half of the values negative.
  void write_array(const std::string& name) const {
    std::vector<float> values(64 * 256);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>((i * 7919 + i / 256) % 512) / 256 - 1;
    write_npy(path(name), "<f4", std::vector<int64_t>{64, 256}, values.data());
  }
  std::vector<float> read_floats(const std::string& name) const {
    const NpyArray array = read_npy(path(name));
    std::vector<float> values(array.data.size() / sizeof(float));
    std::memcpy(values.data(), array.data.data(), array.data.size());
    return values;
  }

  const Scratch scratch_;
};

TEST(Suggest, TheNearestNameOrNone) {
  EXPECT_EQ(edit_distance("satchle", "satchel"), 1u);  // neighbours exchanged
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
  EXPECT_EQ(edit_distance("", "abc"), 3u);
  const std::vector<std::string_view> names{"satchel", "exact", "actnn"};
  EXPECT_EQ(did_you_mean("satchle", names), " (did you mean satchel?)");
  EXPECT_EQ(did_you_mean("exat", names), " (did you mean exact?)");
  EXPECT_EQ(did_you_mean("nonsense", names), "");
  EXPECT_EQ(did_you_mean("", names), "");
}

TEST_F(Words, MistypedWordsGetAHint) {
  expect_said("trian --data x", 2, "[usage] a command must be one of train, predict, analyse, report, plan, data,");
  expect_said("trian --data x", 2, "(did you mean train?), got trian");
  expect_said("bench grahp", 2, "(did you mean graph?), got grahp");
  expect_said(std::string("train --data ") + kGraph + " --epoch 5", 2,
              "[usage] an option must be one of `satchel train` (did you mean --epochs?), got --epoch");
  expect_said(std::string("train --data ") + kGraph + " --hiden=5", 2, "(did you mean --hidden?), got --hiden=5");
  expect_said(std::string("train --data ") + kGraph + " --method satchle", 2, "(did you mean satchel?), got 'satchle'");
  expect_said(std::string("train --data ") + kGraph + " --method satchel,meen=2.25", 2, "(did you mean mean?), got 'satchel,meen=2.25'");
  expect_said(std::string("train --data ") + kGraph + " --method satchel,blok=64", 2, "(did you mean block?), got 'satchel,blok=64'");
  expect_said("inspect x.npy --spec blockwize", 2, "(did you mean blockwise?), got blockwize");
  expect_said("inspect x.npy --spec bits=2,blok=64", 2, "(did you mean block?), got blok");
}

TEST_F(Words, HelpListsEveryOptionOfSpecsAndTheExitCodes) {
  const std::string presets = run_tool("presets --help").out;
  for (const std::string_view key : spec_option_names())
    EXPECT_NE(presets.find(std::string(key) + "="), std::string::npos) << key << '\n' << presets;
  const std::string train = run_tool("train --help").out;
  for (const char* key : {"level=", "adaptive=", "norm_bits=", "derivative_bits=", "mean_bits=", "budget="})
    EXPECT_NE(train.find(key), std::string::npos) << key;
  EXPECT_NE(train.find("as many threads as there are idle cores"), std::string::npos) << train;
  const std::string help = run_tool("--help").out;
  for (const char* line : {"Exit codes:\n", "\n    0  ", "\n    1  ", "\n    2  ", "\n  130  "})
    EXPECT_NE(help.find(line), std::string::npos) << line << '\n' << help;
}

TEST_F(Words, SmallSizesNeedAUnit) {
  for (const char* command : {"plan --model resnet50 --fit 16", "bench batch --memory-cap 16", "bench graph --cache 16"})
    expect_said(command, 2, "must have a unit below 1 MiB: write 16GB or 16GiB, or 16B for bytes, got '16'");
  expect_said("bench graph --memory-cap 12000000000", 2, "--memory-cap needs --device cuda");  // bytes, as documented
}

TEST_F(Words, DevicesHaveNumbers) {
  write_array("x.npy");
  for (const std::string& command :
       {"pack " + path("x.npy") + " -o " + path("y"), std::string("demo"), std::string("bench spmm"), std::string("bench codec"),
        std::string("bench images"), std::string("bench graph"), std::string("predict --checkpoint a --data b -o ") + path("y")})
    expect_said(command + " --device cuda:1x", 2, "--device: must be cpu, cuda");
  for (const char* wrong : {"tpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0"})
    expect_said(std::string("train --data ") + kGraph + " --device " + wrong, 2,
                std::string("must be cpu, cuda or cuda:N, got '") + wrong + "'");
  if (!json::parse(run_tool("info --json").out)["gpu"].is_null()) GTEST_SKIP() << "a GPU is here";
  expect_said(std::string("train --data ") + kGraph + " --device cuda:1", 1,
              "[train] device cuda needs a GPU that torch can use, got none");
  expect_said("bench graph --tf32 --device cuda:1", 1, "[bench] device cuda needs a GPU that torch can use, got none");
}

TEST_F(Words, PackKeepsNegativeValuesUnlessTold) {
  write_array("x.npy");
  ASSERT_EQ(run_tool("pack " + path("x.npy") + " -o " + path("x.satchel")).code, 0);
  ASSERT_EQ(run_tool("unpack " + path("x.satchel") + " -o " + path("y.npy")).code, 0);
  const std::vector<float> x = read_floats("x.npy"), y = read_floats("y.npy");
  ASSERT_EQ(x.size(), y.size());
  // Of values from -1 to 1, 2 bits leave steps up to .8: each of n values is off by at most .4 in standard deviation, their mean by
  // .4/√n, and five times that is hardly ever passed.
  for (const auto& [least, most] : {std::pair{-1.0f, -0.8f}, {-0.6f, -0.4f}, {-0.2f, 0.0f}}) {
    double difference = 0, count = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      if (x[i] < least || x[i] >= most) continue;
      difference += y[i] - x[i];
      ++count;
    }
    ASSERT_GT(count, 1000);
    EXPECT_LT(std::abs(difference / count), 5 * 0.4 / std::sqrt(count)) << least;
  }
  const Outcome told = run_tool("pack " + path("x.npy") + " --spec satchel -o " + path("z"));
  EXPECT_EQ(told.code, 0);
  const auto negative = std::count_if(x.begin(), x.end(), [](float value) { return value < 0; });
  ASSERT_TRUE(negative > 1000 && negative < 10000) << negative;
  const std::string count = std::to_string(negative / 1000) + "," + std::to_string(negative % 1000 + 1000).substr(1);
  EXPECT_NE(told.out.find("note: " + count + " of 16,384 values are negative, and this code keeps little of them"), std::string::npos)
      << told.out;
}

TEST_F(Words, DashIsStdout) {
  write_array("x.npy");
  const auto shell = [&](const std::string& arguments) {
    return std::system(("'" SATCHEL_TOOL "' " + arguments + " 2>" + path("err")).c_str());
  };
  ASSERT_EQ(shell("pack " + path("x.npy") + " -o " + path("file.satchel") + " >" + path("said")), 0);
  ASSERT_EQ(shell("pack " + path("x.npy") + " -o - >" + path("piped.satchel")), 0);
  EXPECT_EQ(slurp(path("piped.satchel")), slurp(path("file.satchel")));
  EXPECT_NE(slurp(path("err")).find("times smaller"), std::string::npos) << "lines go to stderr";
  ASSERT_EQ(shell("unpack " + path("file.satchel") + " -o " + path("file.npy") + " >" + path("said")), 0);
  ASSERT_EQ(shell("unpack " + path("file.satchel") + " -o - >" + path("piped.npy")), 0);
  EXPECT_EQ(slurp(path("piped.npy")), slurp(path("file.npy")));
  const std::string train = std::string("train --quiet --epochs 2 --hidden 4 --data ") + kGraph + " --checkpoint " + path("run.st");
  ASSERT_EQ(shell(train + " >" + path("said")), 0) << slurp(path("err"));
  const std::string predict = "predict --checkpoint " + path("run.st") + " --data " + kGraph;
  ASSERT_EQ(shell(predict + " -o " + path("y.npy") + " --scores " + path("p.npy") + " >" + path("said")), 0);
  ASSERT_EQ(shell(predict + " -o - >" + path("piped.npy")), 0);
  EXPECT_EQ(slurp(path("piped.npy")), slurp(path("y.npy")));
  ASSERT_EQ(shell(predict + " --scores - -o " + path("z.npy") + " >" + path("piped.npy")), 0);
  EXPECT_EQ(slurp(path("piped.npy")), slurp(path("p.npy")));
  expect_said(predict + " -o - --scores -", 2, "[predict] one of --output and --scores may be -, got both");
  EXPECT_NE(shell("pack " + path("x.npy") + " -o - >/dev/full"), 0);
  EXPECT_NE(::access((path("-")).c_str(), F_OK), 0);
}

TEST_F(Words, NoMetricBeforeAnEvaluation) {
  const Outcome graph = run_tool(std::string("train --epochs 20 --eval-every 100 --hidden 4 --data ") + kGraph);
  ASSERT_EQ(graph.code, 0) << graph.out;
  EXPECT_NE(graph.out.find("  valid      -  "), std::string::npos) << graph.out;
  EXPECT_EQ(graph.out.find("valid   0.00 %"), std::string::npos) << graph.out;
  for (const char* part : {"  loss bytes  ", "; loss bytes: logits", "beyond what stood\nbefore it (weights, gradients, optimizer state)"})
    EXPECT_NE(graph.out.find(part), std::string::npos) << part << '\n' << graph.out;
  const Outcome images = run_tool(
      "train --model resnet18 --width 4 --batch 16 --epochs 3 --eval-every 3 --threads 1 --data "
      "synthetic-images:classes=4,size=16,count=32,test=16");
  ASSERT_EQ(images.code, 0) << images.out;
  EXPECT_NE(images.out.find("  test      -  "), std::string::npos) << images.out;
  EXPECT_EQ(images.out.find("test   0.00 %"), std::string::npos) << images.out;
}

// A wide model on few nodes: its gradients outweigh all saves.
TEST_F(Words, APeakBelowTheSavesIsExplained) {
  const Outcome r = run_tool(std::string("train --epochs 4 --hidden 256 --method fp32 --threads 1 --data ") + kGraph);
  ASSERT_EQ(r.code, 0) << r.out;
  EXPECT_NE(r.out.find("peak is below saved where gradients outweigh saves"), std::string::npos) << r.out;
}

TEST_F(Words, NamesThatAreNoUtf8) {
  const std::string folder = path("set\xff"), all = "--epochs 2 --hidden 4 --quiet --data '" + folder + "' ";
  ASSERT_EQ(run_tool(std::string("data --data ") + kGraph + " --out '" + folder + "'").code, 0);
  const Outcome r = run_tool("train " + all + "--checkpoint " + path("run.st") + " --json " + path("a.json"));
  EXPECT_EQ(r.code, 0) << r.out;
  EXPECT_TRUE(json::accept(slurp(path("a.json"))));
}

// Lines that are drawn over are no wider than the terminal: a wrapped one would not be.
TEST_F(Words, ProgressFitsTheTerminal) {
  constexpr unsigned short kColumns = 44;
  const int terminal = ::posix_openpt(O_RDWR | O_NOCTTY);
  ASSERT_GE(terminal, 0);
  ASSERT_EQ(::grantpt(terminal), 0);
  ASSERT_EQ(::unlockpt(terminal), 0);
  const std::string name = ::ptsname(terminal);
  const winsize size{24, kColumns, 0, 0};
  const pid_t child = ::fork();
  if (child == 0) {
    const int line = ::open(name.c_str(), O_RDWR | O_NOCTTY);
    ::ioctl(line, TIOCSWINSZ, &size);
    ::dup2(line, 1);
    ::dup2(line, 2);
    ::execl(SATCHEL_TOOL, "satchel", "train", "--model", "resnet18", "--width", "4", "--batch", "16", "--epochs", "2", "--threads", "1",
            "--data", "synthetic-images:classes=4,size=16,count=32,test=16", nullptr);
    ::_exit(127);
  }
  std::string out;
  char buffer[4096];
  for (ssize_t n; (n = ::read(terminal, buffer, sizeof buffer)) > 0;) out.append(buffer, static_cast<size_t>(n));  // EIO at the end
  ::close(terminal);
  int status = 0;
  ::waitpid(child, &status, 0);
  ASSERT_EQ(status, 0) << out;
  size_t drawn = 0;
  const std::string clear = "\r\x1b[2K";
  for (size_t at = out.find(clear); at != out.npos; at = out.find(clear, at + 1)) {
    const size_t first = at + clear.size(), end = std::min(out.find_first_of("\r\n", first), out.size());
    const std::string line = out.substr(first, end - first);
    const auto columns = std::ranges::count_if(line, [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });  // of UTF-8
    EXPECT_LT(columns, kColumns) << line;
    EXPECT_NE(line.find("epoch"), std::string::npos) << line;
    ++drawn;
  }
  EXPECT_GE(drawn, 2u) << out;
}

}  // namespace
}  // namespace satchel::test
