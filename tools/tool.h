// The commands of `satchel`, as plain functions of plain options. They print to stdout and throw; main.cpp turns what they
// throw into `satchel: [op] rule, got value` and an exit code.
#pragma once

#include <cstdint>
#include <string>

#include "satchel/core/error.h"
#include "satchel/core/spec.h"
#include "tools/outputs.h"

namespace satchel::tool {

/// Wrong use of the command line (exit code 2); any other exception is a failure (exit code 1).
struct UsageError : Error {
  using Error::Error;
};

struct CodecOptions {
  std::string input, output;
  std::string spec = "bits=2";  // a plain block code: it keeps values of every sign, which those for ReLUs do not
  std::string device = "cpu";
  uint64_t seed = 1;
  bool json = false;
};

void run_info(bool json);
void run_presets(bool json);
void run_pack(const CodecOptions& options);
void run_unpack(const CodecOptions& options);
void run_inspect(const CodecOptions& options);
void run_demo(const std::string& device);

struct BenchOptions {
  std::string device = "cpu";   // cpu, cuda, cuda:N, all
  std::string kernel = "best";  // a CPU kernel's name, best, all
  std::string op = "all";
  std::string levels = "optimal";
  std::string dtype = "f32";
  int64_t rows = 169343, columns = 256, block = 256;
  int64_t images = 0;  // of the low-pass ops; 0: 256 on CUDA, 64 on the CPU
  int bits = 2;
  int repeat = 0;  // 0: 50 on CUDA, 9 on the CPU
  bool quick = false;
  std::string json;  // a file, or - for stdout
};

void run_bench_codec(const BenchOptions& options);

/// parse_spec() and validate(), with UsageError for what they refuse.
CodecSpec spec_from(const std::string& text);

/// A spec spelled out, as parse_spec() reads it: "project=8,bits=2,block=row,levels=even".
std::string describe(const CodecSpec& spec);

/// 16,777,216.
std::string grouped(int64_t n);

/// Name of the GPU in use; empty where there is none or no CUDA was compiled in.
std::string gpu_name();

}  // namespace satchel::tool
