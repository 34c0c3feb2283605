// Runs the tool as a user does: arguments in; stdout, stderr and exit code out.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numbers>

#include "satchel/core/noise.h"
#include "satchel/core/spec.h"
#include "satchel/data/npy.h"
#include "tests/support.h"

namespace satchel {
namespace {

using test::slurp;
using test::spill;

using nlohmann::json;

struct Outcome {
  int code;
  std::string out, err;
};

class Tool : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return scratch_.path(name); }

  Outcome run(const std::string& arguments, const std::string& environment = "") const {
    const std::string command = "cd " + scratch_.folder() + " && " + environment + " '" SATCHEL_TOOL "' " + arguments + " 2>stderr";
    FILE* pipe = popen(command.c_str(), "r");
    Outcome result{-1, "", ""};
    char buffer[4096];
    for (size_t n; (n = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) result.out.append(buffer, n);
    const int status = pclose(pipe);
    result.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    result.err = slurp(path("stderr"));
    return result;
  }

  /// Exit code and the line that an error is: `satchel: [op] rule, got value`.
  void expect_error(const std::string& arguments, int code, const std::string& part) const {
    const Outcome r = run(arguments);
    EXPECT_EQ(r.code, code) << arguments << '\n' << r.err;
    EXPECT_EQ(r.err.rfind("satchel: [", 0), 0u) << arguments << '\n' << r.err;
    EXPECT_EQ(r.err.find('\n'), r.err.size() - 1) << "one line: " << r.err;
    EXPECT_NE(r.err.find(part), std::string::npos) << arguments << '\n' << r.err;
    EXPECT_EQ(r.out, "") << arguments;
  }

  /// Standard normal values.
  std::vector<float> write_normal(const std::string& name, std::vector<int64_t> shape) const {
    NpyHeader sizes;
    sizes.shape = shape;
    std::vector<float> x(static_cast<size_t>(sizes.values()));
    for (size_t i = 0; i < x.size(); ++i) {
      const Words w = noise_group(5, Stream::seeds, i);
      x[i] = static_cast<float>(std::sqrt(-2 * std::log((w.w[0] + .5) * 0x1p-32)) * std::cos(2 * std::numbers::pi * w.w[1] * 0x1p-32));
    }
    write_npy(path(name), "<f4", shape, x.data());
    return x;
  }

  const test::Scratch scratch_;
};

TEST_F(Tool, HelpAndVersion) {
  const Outcome alone = run("");
  EXPECT_EQ(alone.code, 0);
  for (const char* command : {"info", "presets", "pack", "unpack", "inspect", "demo", "bench"})
    EXPECT_NE(alone.out.find(command), std::string::npos);
  for (const char* command : {"inspect", "bench codec"}) {
    const Outcome help = run(std::string(command) + " --help");
    EXPECT_EQ(help.code, 0);
    EXPECT_NE(help.out.find("Example"), std::string::npos) << command;
  }
  const Outcome version = run("--version");
  EXPECT_EQ(version.code, 0);
  EXPECT_EQ(version.out.rfind("satchel ", 0), 0u);
}

TEST_F(Tool, StdoutThatTakesNothingIsAFailure) {
  for (const char* arguments : {"--version", "pack --help", "presets --json"}) {
    EXPECT_EQ(run(std::string(arguments) + " >/dev/full").code, 1) << arguments;
  }
}

TEST_F(Tool, WrongUseIsTwo) {
  write_normal("x.npy", {4, 8});
  expect_error("fly", 2, "[usage]");
  expect_error("pack x.npy", 2, "--output");
  for (const char* seed : {"-1", "18446744073709551616", "1.5"}) {
    expect_error(std::string("pack x.npy -o y --seed ") + seed, 2, "--seed: must be a whole number from 0 to 2^64 - 1, got '");
  }
  expect_error("pack x.npy --device tpu -o y", 2, "device");
  expect_error("bench", 2, "[usage]");
  expect_error("bench fly", 2, "got fly");
  expect_error("bench codec --rows 1 --columns 1048576", 2, "fewer columns");
  expect_error("bench codec --bits 9", 2, "bits");
  expect_error("bench codec --kernel mmx --quick", 2, "scalar");
  expect_error("bench codec --bits 4 --op side_encode --rows 8", 2, "2 or 3");
  for (const char* spec : {"bits=9", "block=0", "unknown", "''"}) {
    expect_error(std::string("inspect x.npy --spec ") + spec, 2, "[");
  }
  EXPECT_FALSE(std::filesystem::exists(path("y")));
}

TEST_F(Tool, InfoNamesTheChosenKernel) {
  const Outcome plain = run("info");
  EXPECT_EQ(plain.code, 0);
  EXPECT_NE(plain.out.find("chosen"), std::string::npos);
  const json info = json::parse(run("info --json", "SATCHEL_KERNEL=scalar").out);
  for (const char* key : {"version", "kernels", "cuda_compiled", "gpu", "torch", "threads"}) EXPECT_TRUE(info.contains(key)) << key;
  for (const json& k : info["kernels"]) EXPECT_EQ(k["chosen"], k["name"] == "scalar");
  const Outcome wrong = run("info", "SATCHEL_KERNEL=mmx");
  EXPECT_EQ(wrong.code, 1);
  EXPECT_NE(wrong.err.find("scalar"), std::string::npos) << wrong.err;
}

TEST_F(Tool, PresetsAreSixAndParse) {
  const json list = json::parse(run("presets --json").out);
  ASSERT_EQ(list.size(), 6u);
  for (const json& p : list) EXPECT_EQ(parse_spec(p["name"].get<std::string>()), parse_spec(p["spec"].get<std::string>())) << p;
}

TEST_F(Tool, PackAndUnpack) {
  const std::vector<float> x = write_normal("x.npy", {33, 5, 7});
  const Outcome pack = run("pack x.npy --spec bits=8,levels=even,block=64 -o x.satchel");
  EXPECT_EQ(pack.code, 0) << pack.err;
  EXPECT_NE(pack.out.find("times smaller"), std::string::npos);
  EXPECT_EQ(run("unpack x.satchel -o back.npy").code, 0);
  const NpyArray back = read_npy(path("back.npy"));
  EXPECT_EQ(back.shape, (std::vector<int64_t>{33, 5, 7}));
  EXPECT_EQ(back.descr, "<f4");
  for (size_t i = 0; i < x.size(); ++i) {
    float y;
    std::memcpy(&y, back.data.data() + 4 * i, 4);
    EXPECT_NEAR(y, x[i], 0.04);  // a step: the range of 64 normal values, below 9, over 255
  }
  run("pack x.npy --seed 1 -o same.satchel --spec bits=8,levels=even,block=64");
  run("pack x.npy --seed 2 -o other.satchel --spec bits=8,levels=even,block=64");
  EXPECT_EQ(slurp(path("x.satchel")), slurp(path("same.satchel")));
  EXPECT_NE(slurp(path("x.satchel")), slurp(path("other.satchel")));
}

TEST_F(Tool, HalvesAndFortranOrder) {
  const uint16_t halves[] = {0x3c00, 0x4000, 0x4200, 0x4400, 0x4500, 0x4600};  // 1 2 3 4 5 6
  write_npy(path("c.npy"), "<f2", std::vector<int64_t>{2, 3}, halves);
  std::string bytes = slurp(path("c.npy"));
  const uint16_t columns[] = {0x3c00, 0x4400, 0x4000, 0x4500, 0x4200, 0x4600};  // the same matrix, column by column
  bytes.replace(bytes.find("False"), 5, "True ");
  std::memcpy(bytes.data() + bytes.size() - sizeof columns, columns, sizeof columns);
  spill(path("f.npy"), bytes);
  for (const char* name : {"c", "f"}) {
    ASSERT_EQ(run(std::string("pack ") + name + ".npy --spec bits=32 -o " + name).code, 0);
    ASSERT_EQ(run("unpack " + std::string(name) + " -o " + name + "2.npy").code, 0);
    const NpyArray back = read_npy(path(std::string(name) + "2.npy"));
    EXPECT_EQ(back.descr, "<f2");
    ASSERT_EQ(back.data.size(), sizeof halves);
    EXPECT_EQ(std::memcmp(back.data.data(), halves, sizeof halves), 0) << name;
  }
  EXPECT_EQ(slurp(path("c")), slurp(path("f")));
}

TEST_F(Tool, FailuresAreOne) {
  write_normal("x.npy", {64, 8});
  const int64_t integers[] = {1, 2, 3};
  const double doubles[] = {1, 2, 3};
  write_npy(path("i.npy"), "<i8", std::vector<int64_t>{3}, integers);
  write_npy(path("d.npy"), "<f8", std::vector<int64_t>{3}, doubles);
  spill(path("text.npy"), "hello");
  expect_error("pack i.npy -o y", 1, "[pack] i.npy: values must be float32 or float16");
  expect_error("inspect d.npy", 1, "'<f8'");
  expect_error("pack text.npy -o y", 1, "magic");
  expect_error("pack missing.npy -o y", 1, "missing.npy");
  expect_error("pack . -o y", 1, "must be a file");
  expect_error("pack x.npy -o nowhere/y", 1, "existing folder");
  std::filesystem::create_directory(path("folder"));
  expect_error("pack x.npy -o folder", 1, "plain file");
  std::filesystem::create_symlink(path("elsewhere"), path("link"));
  for (const char* command : {"pack x.npy -o link", "bench codec --quick --json link", "pack x.npy -o /dev/null"}) {
    expect_error(command, 1, "plain file");
  }
  EXPECT_TRUE(std::filesystem::is_symlink(path("link")));
  expect_error("pack 'two\nlines' -o y", 1, "two");
  expect_error("unpack folder -o y.npy", 1, "must be a file");
  expect_error("unpack x.npy -o y.npy", 1, "x.npy");
  expect_error("unpack missing -o y.npy", 1, "missing");
  EXPECT_FALSE(std::filesystem::exists(path("y")));
  EXPECT_FALSE(std::filesystem::exists(path("y.npy")));
}

TEST_F(Tool, AlteredFilesAreRefused) {
  write_normal("x.npy", {16, 8});
  ASSERT_EQ(run("pack x.npy --spec bits=2,block=8 -o whole").code, 0);
  const std::string whole = slurp(path("whole"));
  for (const double part : {0.1, 0.6, 0.99}) {
    spill(path("cut"), whole.substr(0, static_cast<size_t>(part * static_cast<double>(whole.size()))));
    expect_error("unpack cut -o y.npy", 1, "cut");
    std::string changed = whole;
    changed[static_cast<size_t>(part * static_cast<double>(whole.size()))] ^= 0x10;
    spill(path("changed"), changed);
    expect_error("unpack changed -o y.npy", 1, "changed");
  }
}

TEST_F(Tool, InspectSaysWhatASpecDoes) {
  write_normal("x.npy", {64, 256});
  const Outcome text = run("inspect x.npy --spec bits=2,block=256");
  EXPECT_EQ(text.code, 0) << text.err;
  for (const char* part : {"bytes", "bits a value", "error", "bias", "codes", "█"})
    EXPECT_NE(text.out.find(part), std::string::npos) << part;
  const json j = json::parse(run("inspect x.npy --spec bits=2,block=256 --json").out);
  EXPECT_EQ(j["bytes"], 64 * (64 + 4));
  EXPECT_DOUBLE_EQ(j["bits_per_value"], 2.125);
  EXPECT_EQ(j["codes"].size(), 4u);
  EXPECT_EQ(j["codes"][0].get<int>() + j["codes"][1].get<int>() + j["codes"][2].get<int>() + j["codes"][3].get<int>(), 64 * 256);
  EXPECT_EQ(j["non_finite_blocks"], 0);
  // theory.md 2: at D = 256, σ is .5639 steps and the variance .145 steps²: √.145/.5639 = .675 of σ, give or take the blocks' own ranges.
  EXPECT_NEAR(j["relative_error"].get<double>(), 0.675, 0.1);
  EXPECT_LT(std::abs(j["bias"].get<double>()), 6 * j["bias_spread"].get<double>());
}

TEST_F(Tool, InspectTakesOddInput) {
  std::vector<float> x(1024, 1.0f);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 7);
  x[300] = NAN;
  x[301] = INFINITY;
  write_npy(path("nan.npy"), "<f4", std::vector<int64_t>{1024}, x.data());
  const json j = json::parse(run("inspect nan.npy --spec bits=2,block=256 --json").out);
  EXPECT_EQ(j["non_finite_values"], 2);
  EXPECT_EQ(j["non_finite_blocks"], 1);
  EXPECT_NE(run("inspect nan.npy --spec bits=2,block=256").out.find("1 of 4 blocks"), std::string::npos);
  write_npy(path("all.npy"), "<f4", std::vector<int64_t>{1}, &x[300]);
  write_npy(path("empty.npy"), "<f4", std::vector<int64_t>{0, 3}, x.data());
  write_npy(path("number.npy"), "<f4", {}, x.data());
  for (const char* arguments : {"nan.npy --spec satchel", "nan.npy --spec bits=32", "all.npy --spec actnn", "empty.npy --spec exact",
                                "empty.npy --spec satchel", "number.npy --spec division", "number.npy --spec blockwise"}) {
    const Outcome r = run(std::string("inspect --json ") + arguments);
    EXPECT_EQ(r.code, 0) << arguments << '\n' << r.err;
    EXPECT_TRUE(json::accept(r.out)) << arguments << '\n' << r.out;
  }
  EXPECT_EQ(run("inspect empty.npy").code, 0);
}

TEST_F(Tool, DemoPrintsARowAPreset) {
  const Outcome r = run("demo");
  EXPECT_EQ(r.code, 0) << r.err;
  for (const char* name : {"\nexact", "\nblockwise", "\nactnn", "\ndivision", "\ngact", "\nsatchel"})
    EXPECT_NE(r.out.find(name), std::string::npos) << name;
}

TEST_F(Tool, BenchWritesItsResults) {
  const Outcome r = run("bench codec --rows 700 --images 1 --repeat 2 --kernel all --json out.json");
  ASSERT_EQ(r.code, 0) << r.err;
  const json j = json::parse(slurp(path("out.json")));
  EXPECT_GT(j["copy_seconds"].get<double>(), 0);
  std::map<std::string, int> ops;
  for (const json& result : j["results"]) {
    for (const char* key : {"kernel", "op", "bits", "block", "dtype", "values", "seconds", "share", "rmse"})
      EXPECT_TRUE(result.contains(key)) << key;
    EXPECT_NEAR(result["share"].get<double>(), result["copy_seconds"].get<double>() / result["seconds"].get<double>(), 1e-9);
    EXPECT_GT(result["rmse"].get<double>(), 0);
    ++ops[result["op"]];
  }
  EXPECT_EQ(ops.size(), 7u);
  EXPECT_NE(r.out.find("share"), std::string::npos);
  const Outcome screen = run("bench codec --rows 64 --op decode --dtype bf16 --bits 3 --block 100 --repeat 1 --json -");
  ASSERT_EQ(screen.code, 0) << screen.err;
  EXPECT_EQ(json::parse(screen.out)["results"].size(), 1u);
}

TEST_F(Tool, NoGpuIsSaid) {
  if (!json::parse(run("info --json").out)["gpu"].is_null()) GTEST_SKIP() << "a GPU is here";
  write_normal("x.npy", {4, 8});
  for (const char* arguments :
       {"pack x.npy --device cuda -o y", "demo --device cuda", "bench codec --device cuda", "bench codec --device all"}) {
    expect_error(arguments, 1, "--device cuda needs");
  }
}

}  // namespace
}  // namespace satchel
