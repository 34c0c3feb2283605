// `satchel train` of graphs as a user runs it.
#include "tests/tools/train_command.h"

#include <chrono>
#include <csignal>
#include <set>
#include <thread>

#include "satchel/train/safetensors.h"

namespace satchel::train_command {
namespace {

std::set<std::string> keys_of(const json& object) {
  std::set<std::string> keys;
  for (const auto& item : object.items()) keys.insert(item.key());
  return keys;
}

TEST_F(TrainCommand, JsonHasTheKeysAndSumsAgree) {
  const json all = trained({"--epochs", "4", "--method", "fp32,exact,satchel"}, "a.json");
  ASSERT_EQ(all["runs"].size(), 3u);
  EXPECT_FALSE(all["interrupted"].get<bool>());
  for (const json& r : all["runs"]) {
    const std::set<std::string> keys = keys_of(r);
    for (const char* key :
         {"method", "seed", "device", "test", "valid", "epoch_seconds", "saved_bytes", "loss_bytes", "peak_bytes", "tensors"})
      EXPECT_TRUE(keys.contains(key)) << key;
    int64_t sum = 0;
    for (const json& t : r["tensors"]) {
      EXPECT_EQ(keys_of(t), (std::set<std::string>{"name", "kind", "shape", "bits", "bytes", "fp32_bytes"}));
      sum += t["bytes"].get<int64_t>();
    }
    EXPECT_EQ(sum, r["saved_bytes"].get<int64_t>()) << "what was measured is what is listed: " << r["method"];
    EXPECT_GT(r["loss_bytes"].get<int64_t>(), 0);
    EXPECT_GE(r["peak_bytes"].get<int64_t>(), r["saved_bytes"].get<int64_t>() + r["loss_bytes"].get<int64_t>());
    EXPECT_GT(r["epoch_seconds"].get<double>(), 0);
    EXPECT_EQ(r["epochs"], 4);
  }
  const auto saved = [&](size_t i) { return all["runs"][i]["saved_bytes"].get<int64_t>(); };
  EXPECT_LT(saved(2), saved(1));
  EXPECT_LT(saved(1), saved(0));
}

TEST_F(TrainCommand, TableOfTwoMethodsAndTwoSeeds) {
  const Outcome r = run(training({"--epochs", "10", "--method", "fp32,satchel", "--seeds", "2", "--seed", "5", "--json", "a.json"}));
  ASSERT_EQ(r.code, 0) << r.err;
  const json all = json::parse(slurp(path("a.json")));
  ASSERT_EQ(all["runs"].size(), 4u);
  std::vector<std::string> order;
  for (const json& run : all["runs"]) order.push_back(run["method"].get<std::string>() + std::to_string(run["seed"].get<int>()));
  EXPECT_EQ(order, (std::vector<std::string>{"fp325", "satchel5", "fp326", "satchel6"})) << "pairs stay together";
  EXPECT_NE(r.out.find("2 seeds"), std::string::npos) << r.out;
  for (const char* part : {"\nmethod ", "\nfp32 ", "\nsatchel ", "test accuracy %", "- fp32", "saved", "peak", "epoch", " ± ", "x less)"})
    EXPECT_NE(r.out.find(part), std::string::npos) << part << '\n' << r.out;
  EXPECT_EQ(r.out.find('\r'), std::string::npos) << "no bar where there is no terminal";
  // Ten lines a run: one a tenth of the epochs.
  size_t lines = 0;
  for (size_t at = 0; (at = r.out.find(" epochs/s", at)) != std::string::npos; ++at) ++lines;
  EXPECT_EQ(lines, 40u) << r.out;
}

TEST_F(TrainCommand, ResumedIsOneRun) {
  const json whole = trained({"--epochs", "8", "--checkpoint", "a.st"}, "a.json");
  trained({"--epochs", "3", "--checkpoint", "b.st"}, "b.json");
  const json resumed = trained({"--epochs", "8", "--checkpoint", "b.st", "--resume"}, "b.json");
  for (const char* key : {"test", "valid", "train", "loss", "epochs", "best_epoch", "saved_bytes"})
    EXPECT_EQ(whole["runs"][0][key], resumed["runs"][0][key]) << key;

  const TensorFile one = read_safetensors(path("a.st")), two = read_safetensors(path("b.st"));
  ASSERT_GT(one.tensors.size(), 0u);
  ASSERT_EQ(one.tensors.size(), two.tensors.size());
  for (size_t i = 0; i < one.tensors.size(); ++i) {
    EXPECT_EQ(one.tensors[i].name, two.tensors[i].name);
    EXPECT_TRUE(one.tensors[i].bytes == two.tensors[i].bytes) << one.tensors[i].name;
  }
  expect_errors(
      {{training({"--epochs", "9", "--checkpoint", "a.st", "--resume", "--lr", "0.5"}), 1,
        "[resume] lr must be the checkpoint's, 0.01, got 0.5"},
       {training({"--epochs", "9", "--checkpoint", "a.st", "--resume", "--method", "exact"}), 1,
        "[resume] method must be the checkpoint's, \"satchel\", got \"exact\""},
       {training({"--epochs", "2", "--checkpoint", "a.st", "--resume"}), 1, "[resume] epochs must be at least the 8 done, got 2"}});
  EXPECT_EQ(read_safetensors(path("a.st")).metadata, one.metadata) << "what was refused left the file alone";
}

TEST_F(TrainCommand, DamagedCheckpointsAreRefused) {
  trained({"--epochs", "2", "--checkpoint", "a.st"}, "a.json");
  const std::string good = slurp(path("a.st"));
  const auto refused = [&](const std::string& bytes, const std::string& part) {
    std::ofstream(path("damaged.st"), std::ios::binary) << bytes;
    expect_errors({{{"predict", "--checkpoint", "damaged.st", "--data", kData, "-o", "p.npy"}, 1, part}});
    EXPECT_FALSE(exists(path("p.npy")));
  };
  refused("", "[checkpoint] damaged.st");
  refused(good.substr(0, good.size() - 1), "[checkpoint] damaged.st");
  std::string flipped = good;
  flipped[flipped.size() - 9] = static_cast<char>(flipped[flipped.size() - 9] ^ 0x40);  // a value, which no header tells about
  refused(flipped, "must be undamaged");
}

TEST_F(TrainCommand, SignalsEndAfterTheEpochWithAllFiles) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const pid_t child = start(training({"--epochs", "1000000", "--checkpoint", "a.st", "--checkpoint-every", "1e-9", "--json", "a.json"}));
    for (int i = 0; i < 2000 && !exists(path("a.st")); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    ::kill(child, signal);
    if (signal == SIGHUP) ::kill(child, signal);  // a terminal that closes sends it twice
    const Outcome r = finished(child);
    EXPECT_EQ(r.code, 128 + signal) << r.err;
    EXPECT_EQ(r.err, "\nsatchel: stopping after this epoch, then checkpoint, table and JSON will be written (Ctrl-C kills at once)\n");
    const json all = json::parse(slurp(path("a.json")), nullptr, false);
    ASSERT_TRUE(all.is_object());
    EXPECT_TRUE(all["interrupted"].get<bool>());
    ASSERT_EQ(all["runs"].size(), 1u);
    const json& one = all["runs"][0];
    EXPECT_TRUE(one["interrupted"].get<bool>());
    EXPECT_GE(one["epochs"].get<int64_t>(), 1);
    EXPECT_EQ(one["curve"].size(), one["epochs"].get<size_t>());
    EXPECT_NE(r.out.find("interrupted"), std::string::npos) << r.out;
    const json state = json::parse(read_safetensors(path("a.st")).metadata.at("state"));
    EXPECT_EQ(state["epoch"], one["epochs"]) << "the checkpoint is of the last epoch";
    const Outcome predicted = run({"predict", "--checkpoint", "a.st", "--data", kData, "-o", "y.npy"});
    EXPECT_EQ(predicted.code, 0) << predicted.err;
    ::unlink(path("a.st").c_str());
  }
}

/// A file's size is limited to 200,000 bytes, which a checkpoint of 128 channels is beyond and the JSON is not: as a disk that is nearly
/// full.
TEST_F(TrainCommand, AFullDiskTakesNoResult) {
  const pid_t child = start({"train", "--data", kData, "--hidden", "128", "--epochs", "3", "--checkpoint", "a.st", "--checkpoint-every",
                             "1e-9", "--json", "a.json"},
                            "out", "err", 200000);
  const Outcome r = finished(child);
  EXPECT_EQ(r.code, 1) << r.err;
  EXPECT_NE(r.err.find("satchel: [checkpoint] a.st: output must be writable to its end (File too large), got 'a.st' (the run goes on, and "
                       "tries again when the next checkpoint is due)\n"),
            std::string::npos)
      << r.err;
  EXPECT_NE(r.out.find("\nsatchel "), std::string::npos) << "the table: " << r.out;
  const json all = json::parse(slurp(path("a.json")), nullptr, false);
  ASSERT_TRUE(all.is_object());
  EXPECT_EQ(all["runs"][0]["epochs"], 3);
  EXPECT_FALSE(exists(path("a.st")));
}

TEST_F(TrainCommand, JsonTellsHowARunWasMade) {
  const json all = trained({"--epochs", "4", "--eval-every", "2", "--lr", "0.02", "--checkpoint", "a.st", "--resume"}, "a.json");
  EXPECT_TRUE(all["version"].is_string());
  ASSERT_EQ(all["command"].size(), 17u);
  EXPECT_EQ(all["command"][1], "train");
  const json& one = all["runs"][0];
  EXPECT_EQ(one["options"]["lr"], 0.02);
  EXPECT_EQ(one["options"]["method"], "satchel");
  EXPECT_EQ(one["options"]["epochs"], 4);
  EXPECT_EQ(one["options"]["checkpoint_every"], 10.0);
  EXPECT_EQ(one["options"]["cuda_graph"], "auto");
  EXPECT_EQ(one["data_digest"].get<std::string>().size(), 16u);
  ASSERT_EQ(one["curve"].size(), 4u);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(one["curve"][i]["epoch"], i + 1);
    EXPECT_TRUE(one["curve"][i]["loss"].is_number());
    EXPECT_EQ(one["curve"][i].contains("valid"), i % 2 == 1);
  }
  const Outcome again = run(training({"--epochs", "4", "--eval-every", "2", "--lr", "0.02", "--checkpoint", "a.st", "--resume"}));
  EXPECT_NE(again.out.find("\ngoes on from a.st\n"), std::string::npos) << again.out;
  ::unlink(path("a.st").c_str());
  const Outcome anew = run(training({"--epochs", "4", "--checkpoint", "a.st", "--resume"}));
  EXPECT_EQ(anew.code, 0) << anew.err;
  EXPECT_NE(anew.out.find("\nstarts anew, there is no checkpoint yet: a.st\n"), std::string::npos) << anew.out;
}

TEST_F(TrainCommand, EarlyStoppingSaysSo) {
  const Outcome r = run(training({"--epochs", "500", "--patience", "2", "--json", "a.json"}));
  ASSERT_EQ(r.code, 0) << r.err;
  const json one = json::parse(slurp(path("a.json")))["runs"][0];
  EXPECT_LT(one["epochs"].get<int>(), 500);
  EXPECT_EQ(one["epochs"].get<int>(), one["best_epoch"].get<int>() + 2);
  EXPECT_NE(
      r.out.find("stopped after epoch " + std::to_string(one["epochs"].get<int>()) + ": no better validation metric in 2 evaluations"),
      std::string::npos)
      << r.out;
}

TEST_F(TrainCommand, WrongUse) {
  std::vector<Refusal> all{{{"train"}, 2, "--data is required"}};
  const auto refused = [&](const std::vector<std::string>& more, const std::string& part) { all.push_back({training(more), 2, part}); };
  refused({"--epochs", "0"}, "--epochs: must be a whole number from 1 to 2^63 - 1, got '0'");
  refused({"--seed", "18446744073709551616"}, "--seed: must be a whole number from 0 to 2^64 - 1, got");
  refused({"--seed", "18446744073709551615", "--seeds", "2"}, "[train] --seed + --seeds must be at most 2^64");
  refused({"--threads", "-1"}, "--threads: must be a whole number from 1 to 4096, got '-1'");
  refused({"--lr", "nan"}, "[train] lr must be finite and above 0, got nan");
  refused({"--dropout", ""}, "--dropout: must be a number, got ''");
  refused({"--dropout", "1"}, "[train] dropout must be at least 0 and below 1, got 1");
  refused({"--dropout", "0.999999"}, "[train] dropout must leave something: 0.9999 at most, got 0.999999");
  refused({"--model", "sagee"}, "--model: sagee not in {sage,gcn,");
  refused({"--method", "satchle"}, "got 'satchle'");
  refused({"--method", "exact,side=one"}, "[method] side codes need shared saves, got 'exact,side=one'");
  refused({"--method", "division"}, "[method] a low-pass does not fit a graph layer, got 'division'");
  refused({"--method", "fp32,bits=2"}, "[method] fp32 takes no options, got 'fp32,bits=2'");
  refused({"--method", "satchel,satchel"}, "[method] every method must be named once, got satchel");
  refused({"--checkpoint", ""}, "--checkpoint: must name a file, got ''");
  refused({"--resume"}, "[train] --resume needs --checkpoint, got none");
  refused({"--checkpoint-every", "5"}, "[train] --checkpoint-every needs --checkpoint, got none");
  refused({"--checkpoint", "a.st", "--checkpoint-every", "-1"},
          "[train] minutes between checkpoints must be finite and at least 0, got -1");
  refused({"--checkpoint", "a.st", "--json", "./a.st"}, "[train] --json must be another file than --checkpoint");
  refused({"--checkpoint", "a.st", "--seeds", "2"}, "[train] --checkpoint takes a single run, of one method and one seed, got 2 runs");
  refused({"--tf32"}, "[train] tf32 needs device cuda, got cpu");
  refused({"--cuda-graph"}, "[train] cuda_graph needs device cuda, got cpu");
  refused({"--amp", "half"}, "--amp: half not in {auto,none,bf16,fp16}");
  refused({"--split", "1"}, "[train] --split must be 0 to 0, got 1");
  expect_errors(all);
  EXPECT_FALSE(exists(path("a.st")));
}

TEST_F(TrainCommand, FailuresAreOne) {
  expect_errors({{{"train", "--data", "/nonexistent"}, 1, "[load] file or folder must exist, got /nonexistent"},
                 {{"train", "--data", SATCHEL_TOOL}, 1, "must be an npz file, a zip archive"},
                 {training({"--json", "/nonexistent/a.json"}), 1, "[train] output must lie in an existing folder"},
                 {training({"--json", folder_}), 1, "[train] output must be a plain file"},
                 {training({"--lr", "1e30", "--epochs", "5", "--checkpoint", "a.st"}), 1,
                  "[train] loss must be finite (satchel; a smaller lr may help), got nan at epoch"}});
  EXPECT_FALSE(exists(path("a.st"))) << "a run that diverged leaves no checkpoint";
}

TEST_F(TrainCommand, TypesAreInTheJson) {
  const json all = trained({"--epochs", "4", "--method", "fp32,satchel", "--amp", "bf16"}, "a.json");
  ASSERT_EQ(all["runs"].size(), 2u);
  for (const json& r : all["runs"]) {
    EXPECT_EQ(r["amp"], "bf16");
    EXPECT_EQ(r["tf32"], false);
    EXPECT_EQ(r["cuda_graph"], false);
  }
}

}  // namespace
}  // namespace satchel::train_command
