// `satchel bench graph` as a user runs it.
#include "tests/tools/train_command.h"

namespace satchel::train_command {
namespace {

class BenchGraphCommand : public TrainCommand {};

TEST_F(BenchGraphCommand, BenchGraphWithoutTorch) {
  const Outcome r = run({"bench", "graph", "--data", kData, "--hidden", "16", "--steps", "2", "--methods", "fp32,satchel", "--no-torch",
                         "--no-cache", "--amp", "bf16", "--json", "a.json"});
  ASSERT_EQ(r.code, 0) << r.err;
  const json all = json::parse(slurp(path("a.json")));
  ASSERT_EQ(all["results"].size(), 2u);
  EXPECT_EQ(all["amp"], "bf16");
  for (const json& e : all["results"]) {
    EXPECT_TRUE(e["ratio"].is_null());
    EXPECT_EQ(e["cached_bytes"], 0);
    EXPECT_GT(e["epoch_seconds"].get<double>(), 0);
  }
  for (const char* part : {"activations in bf16, A·X in every step", "\nfp32 ", "\nsatchel ", "  -  "})
    EXPECT_NE(r.out.find(part), std::string::npos) << part << '\n' << r.out;
  EXPECT_EQ(r.out.find("\ntorch "), std::string::npos) << r.out;
}

/// Bytes at each value are those of the plan; torch's own saves have no blocks.
TEST_F(BenchGraphCommand, OneSizeChanges) {
  const Outcome r =
      run({"bench",   "graph", "--axis",   "block", "--values", "row,8rows", "--data",    kData,        "--hidden", "16",
           "--steps", "1",     "--epochs", "2",     "--seeds",  "2",         "--methods", "fp32,exact", "--json",   "a.json"});
  ASSERT_EQ(r.code, 0) << r.err;
  const json all = json::parse(slurp(path("a.json")));
  EXPECT_EQ(all["axis"], "block");
  ASSERT_EQ(all["points"].size(), 2u);
  for (const json& point : all["points"]) {
    for (const json& e : point["results"]) {
      EXPECT_EQ(e["saved_bytes"], e["planned_bytes"]) << e;
      EXPECT_EQ(e["tests"].size(), 2u);
      EXPECT_GT(e["paper_bytes"].get<int64_t>(), 0);
      EXPECT_GT(e["epoch_seconds"].get<double>(), 0);
    }
  }
  const json &first = all["points"][0]["results"], &second = all["points"][1]["results"];
  EXPECT_EQ(first[0], second[0]);
  EXPECT_LT(second[1]["saved_bytes"].get<int64_t>(), first[1]["saved_bytes"].get<int64_t>());
  EXPECT_LT(second[1]["paper_bytes"].get<int64_t>(), first[1]["paper_bytes"].get<int64_t>());
  EXPECT_EQ(second[1]["spec"], "exact,block=8rows");
  expect_errors({{{"bench", "graph", "--axis", "hidden", "--values", "16,x"},
                  2,
                  "--values of --axis hidden must be whole numbers from 1 to 1048576, got 'x'"},
                 {{"bench", "graph", "--axis", "bits", "--values", "9", "--methods", "exact"}, 2, "got"},
                 {{"bench", "graph", "--axis", "nodes", "--data", kData}, 2, "[bench] --axis nodes needs --data synthetic:arxiv"},
                 {{"bench", "graph", "--values", "1"}, 2, "--axis"}});
}

TEST_F(BenchGraphCommand, BenchGraph) {
  const Outcome r =
      run({"bench", "graph", "--data", kData, "--hidden", "16", "--steps", "2", "--methods", "fp32,satchel", "--json", "a.json"});
  ASSERT_EQ(r.code, 0) << r.err;
  const json all = json::parse(slurp(path("a.json")));
  ASSERT_EQ(all["results"].size(), 3u);
  EXPECT_EQ(all["results"][0]["method"], "torch");
  EXPECT_EQ(all["results"][0]["ratio"], 1.0);
  EXPECT_LT(all["results"][2]["saved_bytes"].get<int64_t>(), all["results"][1]["saved_bytes"].get<int64_t>());
  for (const json& e : all["results"]) EXPECT_EQ(e["steps"], 2);
  for (const char* part : {"gradients at 32 bits are torch's within", "\ntorch ", "\nfp32 ", "\nsatchel ", "of torch", " ms"})
    EXPECT_NE(r.out.find(part), std::string::npos) << part << '\n' << r.out;
  EXPECT_EQ(all["nodes"], 600);
  EXPECT_GE(all["entries"].get<int64_t>(), 2400);  // every edge in both directions, some of them twice the same
  EXPECT_LE(all["entries"].get<int64_t>(), 2 * 2400);
  EXPECT_EQ(all["tf32"], false);
  EXPECT_EQ(all["amp"], "auto");
  for (const json& e : all["results"]) EXPECT_EQ(e["amp"], "none");  // without TF32 all in float32
  EXPECT_EQ(all["cuda_graph"], false);
  EXPECT_TRUE(all["cap"].is_null());
  for (const json& e : all["results"]) EXPECT_EQ(e["fits"], true);
  EXPECT_GT(all["results"][2]["cached_bytes"].get<int64_t>(), 0);
  expect_errors({{{"bench", "graph", "--steps", "0"}, 2, "--steps: must be a whole number from 1 to 1000000, got '0'"},
                 {{"bench", "graph", "--tf32"}, 2, "[train] tf32 needs device cuda, got cpu"},
                 {{"bench", "graph", "--cuda-graph"}, 2, "[train] cuda_graph needs device cuda, got cpu"},
                 {{"bench", "graph", "--amp", "half"}, 2, "--amp: half not in {auto,none,bf16,fp16}"},
                 {{"bench", "graph", "--memory-cap", "12GB"}, 2, "[bench] --memory-cap needs --device cuda, got cpu"},
                 {{"bench", "graph", "--memory-cap", "12 GB"},
                  2,
                  "--memory-cap: must be 1 to 2^62 bytes as in 12GB, 11.5GiB or 12000000000, got '12 GB'"},
                 {{"bench", "graph", "--memory-cap", "0.1B"}, 2, "got '0.1B'"},
                 {{"bench", "graph", "--memory-cap", "9000000TiB"}, 2, "got '9000000TiB'"},
                 {{"bench", "graph", "--methods", "division"}, 2, "[method] a low-pass does not fit a graph layer"}});
}

}  // namespace
}  // namespace satchel::train_command
