// The list of kernels, and the choice among them: SATCHEL_KERNEL is read once, so this program runs itself with it set.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>

#include "satchel/core/error.h"
#include "tests/kernels/common.h"

namespace satchel::test {
namespace {

/// Name of the kernel in use, or the error.
std::string best_name() {
  try {
    return best_cpu_kernel().name;
  } catch (const Error& e) {
    return e.what();
  }
}

TEST(Registry, TellsTheBest) { std::cout << "best=" << best_name() << std::endl; }

/// What Registry.TellsTheBest says in a process of its own with SATCHEL_KERNEL set.
std::string told_with(const std::string& name) {
  char self[4096];
  const ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
  if (length < 0) return "no /proc/self/exe";
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    setenv("SATCHEL_KERNEL", name.c_str(), 1);
    dup2(ends[1], STDOUT_FILENO);
    self[length] = '\0';
    execl(self, self, "--gtest_filter=Registry.TellsTheBest", static_cast<char*>(nullptr));
    _exit(127);
  }
  close(ends[1]);
  std::string text;
  char part[512];
  for (ssize_t n = 0; (n = read(ends[0], part, sizeof(part))) > 0;) text.append(part, static_cast<size_t>(n));
  close(ends[0]);
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child || status != 0) return "child failed: " + text;
  const size_t from = text.find("best=");
  return from == std::string::npos ? text : text.substr(from + 5, text.find('\n', from) - from - 5);
}

TEST(Registry, BestFirst) {
  std::string names;
  for (const CpuKernels* k : cpu_kernels()) names += std::string(k->name) + ' ';
#ifdef __x86_64__
  EXPECT_EQ(names, "avx512 avx2 scalar ");
#else
  EXPECT_EQ(names, "scalar ");
#endif
  EXPECT_EQ(told_with(""), supported_kernels().front()->name);
}

TEST(Registry, ByName) {
  EXPECT_EQ(&cpu_kernel("scalar"), &kScalar);
  for (const CpuKernels* k : cpu_kernels()) {
    if (k->supported()) {
      EXPECT_EQ(&cpu_kernel(k->name), k);
    } else {
      EXPECT_THROW(cpu_kernel(k->name), Error);
    }
  }
}

/// What an error about kernel names must say.
void expect_names(const std::string& text, const std::string& got) {
  EXPECT_EQ(text.rfind("[kernel] ", 0), 0u) << text;
  EXPECT_NE(text.find("got '" + got + "'"), std::string::npos) << text;
  for (const CpuKernels* k : cpu_kernels()) EXPECT_NE(text.find(k->name), std::string::npos) << text;
}

TEST(Registry, UnknownNameListsTheNames) {
  try {
    cpu_kernel("mmx");
    FAIL() << "no error";
  } catch (const Error& e) {
    expect_names(e.what(), "mmx");
  }
  EXPECT_THROW(cpu_kernel(""), Error);
  EXPECT_THROW(cpu_kernel("Scalar"), Error);
}

TEST(Registry, EnvironmentForcesOne) {
  for (const CpuKernels* k : supported_kernels()) EXPECT_EQ(told_with(k->name), k->name);
  expect_names(told_with("mmx"), "mmx");
}

}  // namespace
}  // namespace satchel::test
