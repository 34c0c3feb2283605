// What tests of `satchel train`, `predict` and `bench graph` share: the tool as a user runs it, in a folder of its own.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tests/support.h"

namespace satchel::train_command {

using nlohmann::json;
using test::slurp;

inline constexpr const char* kData = "synthetic:nodes=600,edges=2400,features=16,classes=4";

struct Outcome {
  int code;
  std::string out, err;
};

inline bool exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

class TrainCommand : public testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(::mkdir(folder_.c_str(), 0700), 0); }
  void TearDown() override {
    for (const char* name : {"out", "err", "out2", "err2", "a.json", "b.json", "a.st", "b.st", "damaged.st", "y.npy", "p.npy"})
      ::unlink(path(name).c_str());
    EXPECT_EQ(::rmdir(folder_.c_str()), 0) << "no other file may be left: " << folder_;
  }

  std::string path(const std::string& name) const { return folder_ + "/" + name; }

  /// Starts the tool in the folder, two threads, SIGINT as a terminal has it; no file that it writes has more than `limit` bytes.
  pid_t start(std::vector<std::string> arguments, const std::string& out = "out", const std::string& err = "err",
              rlim_t limit = RLIM_INFINITY) const {
    arguments.insert(arguments.begin(), SATCHEL_TOOL);
    std::vector<char*> argv;
    for (std::string& a : arguments) argv.push_back(a.data());
    argv.push_back(nullptr);
    const pid_t child = ::fork();
    if (child != 0) return child;
    std::signal(SIGINT, SIG_DFL);
    const rlimit sizes{limit, limit};
    if (limit != RLIM_INFINITY) ::setrlimit(RLIMIT_FSIZE, &sizes);
    ::setenv("OMP_NUM_THREADS", "2", 1);
    const bool ready = ::chdir(folder_.c_str()) == 0 && ::dup2(::open(out.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600), 1) == 1 &&
                       ::dup2(::open(err.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600), 2) == 2;
    if (ready) ::execv(SATCHEL_TOOL, argv.data());
    ::_exit(127);
  }

  Outcome finished(pid_t child, const std::string& out = "out", const std::string& err = "err") const {
    int status = 0;
    ::waitpid(child, &status, 0);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), slurp(path(out)), slurp(path(err))};
  }

  Outcome run(std::vector<std::string> arguments) const { return finished(start(std::move(arguments))); }

  /// A small run with `more` behind it.
  static std::vector<std::string> training(std::vector<std::string> more) {
    std::vector<std::string> all{"train", "--data", kData, "--hidden", "16"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }

  json trained(const std::vector<std::string>& more, const std::string& file) const {
    std::vector<std::string> all = training(more);
    all.insert(all.end(), {"--json", file});
    const Outcome r = run(all);
    EXPECT_EQ(r.code, 0) << r.err;
    EXPECT_EQ(r.err, "");
    return json::parse(slurp(path(file)), nullptr, false);
  }

  struct Refusal {
    std::vector<std::string> arguments;
    int code;
    std::string part;  // of the line that an error is: `satchel: [op] rule, got value`
  };

  static void expect_refused(const Refusal& wanted, const Outcome& r) {
    EXPECT_EQ(r.code, wanted.code) << wanted.part << '\n' << r.err;
    EXPECT_EQ(r.err.rfind("satchel: [", 0), 0u) << r.err;
    EXPECT_EQ(r.err.find('\n'), r.err.size() - 1) << "one line: " << r.err;
    EXPECT_NE(r.err.find(wanted.part), std::string::npos) << "wanted: " << wanted.part << "\ngot: " << r.err;
  }

  /// Two at once: a start, which loads torch, takes longer than to refuse.
  void expect_errors(const std::vector<Refusal>& all) const {
    for (size_t i = 0; i < all.size(); i += 2) {
      const bool pair = i + 1 < all.size();
      const pid_t first = start(all[i].arguments), second = pair ? start(all[i + 1].arguments, "out2", "err2") : -1;
      expect_refused(all[i], finished(first));
      if (pair) expect_refused(all[i + 1], finished(second, "out2", "err2"));
    }
  }

  std::string folder_ = testing::TempDir() + "satchel_train_" + std::to_string(::getpid());
};

}  // namespace satchel::train_command
