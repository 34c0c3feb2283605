// `satchel`: the command line. Commands, options and exit codes stand here; what they do stands in *_commands.cpp and bench_*.cpp.
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <exception>
#include <iostream>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "satchel/core/suggest.h"
#include "tools/amx.h"
#include "tools/analyse.h"
#include "tools/arguments.h"
#include "tools/bench_batch.h"
#include "tools/bench_bias.h"
#include "tools/bench_chain.h"
#include "tools/bench_detect.h"
#include "tools/bench_graph.h"
#include "tools/bench_images.h"
#include "tools/bench_product.h"
#include "tools/bench_spmm.h"
#include "tools/data_commands.h"
#include "tools/plan_commands.h"
#include "tools/report.h"
#include "tools/tool.h"
#include "tools/train_commands.h"

namespace {

using satchel::tool::BenchOptions;
using satchel::tool::CodecOptions;

constexpr const char* kSpecHelp = "A preset and what differs from it, see `satchel presets`";
constexpr const char* kSpecFooter =
    "\nSpecs: PRESET[,OPTION=VALUE…], or options alone\n"
    "  presets   exact blockwise actnn division gact satchel\n"
    "  bits=1..8|32             bits a value; 32 keeps the transformed values\n"
    "  block=N|row|Nrows|map    values that share one header\n"
    "  sample=yes|no            blocks start anew with every sample (first dimension)\n"
    "  levels=even|optimal|quantile  distances between the values that codes stand for\n"
    "  round=stochastic|nearest right on average, or the nearest code\n"
    "  header=bf16|f32          type of a block's two numbers\n"
    "  side=none|one|relu|both  values that a ReLU follows: one and relu keep little or nothing of negative ones\n"
    "  off=mean|sampled         side=one, 2 bits: what stands for the values that the ReLU turns off\n"
    "  project=RATIO|none       random projection of rows, with rows=N|all that share a matrix and hadamard=yes|no\n"
    "  lowpass=SIZE|none        averages of windows kept in bf16, the rest in codes; part=both|low|high keeps one of the two\n";

/// CLI11's own conversion takes numbers beyond 64 bits and reads 010 as 8: it gets the digits of what was read here.
std::string read_seed(std::string& text) {
  uint64_t seed = 0;
  const char* end = text.data() + text.size();
  const auto [stop, code] = std::from_chars(text.data(), end, seed);
  if (!text.empty() && code == std::errc() && stop == end) {
    text = std::to_string(seed);
    return "";
  }
  return "must be a whole number from 0 to 2^64 - 1, got '" + text + "'";
}

void add_codec_options(CLI::App& command, CodecOptions& o) {
  command.add_option("FILE", o.input, "A float32 or float16 array, as numpy.save writes it")->required();
  command.add_option("--spec", o.spec, kSpecHelp)->capture_default_str();
  command.add_option("--seed", o.seed, "Seed of the noise: equal seeds give equal bytes")
      ->transform(CLI::Validator(read_seed, "", "seed"))
      ->capture_default_str();
  command.add_option("--device", o.device, "Where to pack")->check(satchel::tool::device_name())->capture_default_str();
}

void add_codec_commands(CLI::App& app, CodecOptions& o) {
  CLI::App* info = app.add_subcommand("info", "Version, kernels, CUDA and torch on this machine");
  info->add_flag("--json", o.json, "For programs");
  info->footer("\nExamples:\n  satchel info\n  SATCHEL_KERNEL=scalar satchel info     the environment variable forces a kernel");
  info->callback([&o] { satchel::tool::run_info(o.json); });

  CLI::App* presets = app.add_subcommand("presets", "The published methods, as specs");
  presets->add_flag("--json", o.json, "For programs");
  presets->footer(kSpecFooter +
                  std::string("\nExamples:\n  satchel presets\n  satchel inspect x.npy --spec blockwise,bits=3,block=16rows"));
  presets->callback([&o] { satchel::tool::run_presets(o.json); });

  CLI::App* pack = app.add_subcommand("pack", "Pack an array into a few bits a value");
  add_codec_options(*pack, o);
  pack->add_option("-o,--output", o.output, "The packed file; - writes it to stdout")->required();
  pack->footer(
      kSpecFooter +
      std::string("\nExamples:\n  satchel pack x.npy -o x.satchel\n  satchel pack x.npy --spec actnn,bits=4 --seed 7 -o x.satchel\n"
                  "  satchel pack x.npy -o - | ssh host 'cat > x.satchel'"));
  pack->callback([&o] { satchel::tool::run_pack(o); });

  CLI::App* unpack = app.add_subcommand("unpack", "Unpack what `satchel pack` wrote");
  unpack->add_option("FILE", o.input, "The packed file")->required();
  unpack->add_option("-o,--output", o.output, "The array, a .npy file; - writes it to stdout")->required();
  unpack->footer("\nExample:\n  satchel unpack x.satchel -o back.npy");
  unpack->callback([&o] { satchel::tool::run_unpack(o); });

  CLI::App* inspect = app.add_subcommand("inspect", "What a spec does to an array: bytes, error, codes");
  add_codec_options(*inspect, o);
  inspect->add_flag("--json", o.json, "For programs");
  inspect->footer(kSpecFooter + std::string("\nExamples:\n  satchel inspect x.npy\n  satchel inspect x.npy --spec exact --json"));
  inspect->callback([&o] { satchel::tool::run_inspect(o); });

  CLI::App* demo = app.add_subcommand("demo", "Pack a generated tensor with every preset, in one table");
  demo->add_option("--device", o.device, "Where to pack")->check(satchel::tool::device_name())->capture_default_str();
  demo->footer("\nExamples:\n  satchel demo\n  satchel demo --device cuda");
  demo->callback([&o] { satchel::tool::run_demo(o.device); });
}

void add_bench_commands(CLI::App& app, BenchOptions& o) {
  CLI::App* bench = app.add_subcommand("bench", "Benchmarks that check before they time");
  bench->require_subcommand(1);
  bench->footer("\nExamples:\n  satchel bench graph\n  satchel bench codec --quick");
  CLI::App* codec = bench->add_subcommand("codec", "Speed and error of the codec beside a plain copy");
  codec->add_option("--device", o.device, "Which kernels")->check(satchel::tool::device_name("all"))->capture_default_str();
  codec->add_option("--kernel", o.kernel, "CPU kernel: scalar, avx2, avx512, best or all")->capture_default_str();
  codec->add_option("--op", o.op, "One operation")
      ->check(
          CLI::IsMember({"all", "encode", "decode", "project_encode", "lowpass_encode", "lowpass_decode", "side_encode", "side_decode"}))
      ->capture_default_str();
  codec->add_option("--rows", o.rows, "Rows of the matrix")->check(CLI::Range(int64_t{1}, int64_t{1} << 31))->capture_default_str();
  codec->add_option("--columns", o.columns, "Columns of the matrix")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  codec->add_option("--bits", o.bits, "Bits a value (side codes: 2 to 3)")->check(CLI::Range(1, 8))->capture_default_str();
  codec->add_option("--block", o.block, "Values a block")->check(CLI::Range(int64_t{1}, int64_t{1} << 40))->capture_default_str();
  codec->add_option("--levels", o.levels, "Levels of the block code; above 4 bits they are even")
      ->check(CLI::IsMember(std::vector<std::string>(std::begin(satchel::kLevelNames), std::end(satchel::kLevelNames))))
      ->capture_default_str();
  codec->add_option("--dtype", o.dtype, "Type of the values")->check(CLI::IsMember({"f32", "f16", "bf16"}))->capture_default_str();
  codec->add_option("--images", o.images, "Images of 64 × 56 × 56 for the low-pass (default 64 on the CPU, 256 on CUDA)")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 16));
  codec->add_option("--repeat", o.repeat, "Timed runs of which the median counts (default 9 on the CPU, 50 on CUDA)")
      ->check(CLI::Range(1, 100000));
  codec->add_flag("--quick", o.quick, "A small matrix and few runs: a check rather than a measurement");
  codec->add_option("--json", o.json, "Write the results to this file too; - prints them instead of the table");
  codec->footer(
      "\nEach operation is checked first: bytes equal to the scalar kernel's and |error| within a step on the first and last\n"
      "values, mean square error as theory predicts. Data are standard normal.\n"
      "  share  time to copy the float32 values in the same run / own time: memcpy on one core, or a device copy.\n"
      "         The copy is of float32 for every --dtype.\n"
      "  GB/s   of the unpacked values in their own type\n"
      "  rmse   root mean square of unpacked − packed values, whose standard deviation is 1; project_encode: of the\n"
      "         projected values against their own root mean square; side codes: of the values that pass the ReLU\n"
      "\nExamples:\n  satchel bench codec --quick\n  satchel bench codec --kernel all --json codec.json\n  satchel bench codec --device "
      "cuda");
  codec->callback([&o] { satchel::tool::run_bench_codec(o); });
  satchel::tool::add_bench_graph(*bench);
  satchel::tool::add_bench_spmm(*bench);
  satchel::tool::add_bench_product(*bench);
  satchel::tool::add_bench_images(*bench);
  satchel::tool::add_bench_detection(*bench);
  satchel::tool::add_bench_batch(*bench);
  satchel::tool::add_bench_bias(*bench);
  satchel::tool::add_bench_chain(*bench);
}

/// `satchel: <what>` on stderr, in one line.
int report(std::string what, int code) {
  std::replace(what.begin(), what.end(), '\n', ' ');
  std::fflush(stdout);
  std::fprintf(stderr, "satchel: %s\n", what.c_str());
  return code;
}

/// 0 if stdout took everything.
int finish() {
  std::cout.flush();
  if (std::fflush(stdout) == 0 && std::cout.good()) return 0;
  return report("[output] stdout must take what is printed", 1);
}

/// torch's errors go on with a stack trace.
std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

/// What torch, nlohmann or the standard library threw and nobody below gave words of our own.
std::string in_our_words(const std::exception& e) {
  const std::string what = first_line(e.what());
  const auto said = [&](const char* word) { return what.find(word) != what.npos; };
  if (said("out of memory") || said("can't allocate memory")) return "[memory] there must be enough of it, got " + what;
  if (said("CUDA error") || said("CUDA driver")) return "[device] the GPU must do as it is told, got " + what;
  return "[internal] this must not happen: please report it with the command, got " + what;
}

/// The rule that a word which no command knows breaks, with the nearest that one does know.
std::string rule_of_words(const CLI::App& at, const std::string& command, const std::string& given) {
  std::vector<std::string> names;
  const bool option = given.starts_with('-');
  if (option) {
    for (const CLI::Option* o : at.get_options()) {
      for (const std::string& name : o->get_lnames()) names.push_back("--" + name);
      for (const std::string& name : o->get_snames()) names.push_back("-" + name);
    }
  } else {
    for (const CLI::App* sub : at.get_subcommands([](const CLI::App*) { return true; })) names.push_back(sub->get_name());
  }
  const std::vector<std::string_view> views(names.begin(), names.end());
  const std::string hint = satchel::did_you_mean(std::string_view(given).substr(0, given.find('=')), views);
  if (option) return "an option must be one of `" + command + "`" + hint;
  if (names.empty()) return "`" + command + "` takes options only";
  std::string all;
  for (const std::string& name : names) all += (all.empty() ? "" : ", ") + name;
  return "a command must be one of " + all + hint;
}

int usage(const CLI::App& app, const CLI::ParseError& error) {
  std::string command = "satchel";
  const CLI::App* at = &app;
  while (!at->get_subcommands().empty()) {
    at = at->get_subcommands().front();
    command += ' ' + at->get_name();
  }
  std::string what = error.what();
  const std::vector<std::string> rest = app.remaining(true);
  const bool required = dynamic_cast<const CLI::RequiredError*>(&error) != nullptr,
             extra = dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr;
  if (!rest.empty() && (required || extra)) what = rule_of_words(*at, command, rest.front()) + ", got " + rest.front();
  return report("[usage] " + what + " (see `" + command + " --help`)", 2);
}

}  // namespace

int main(int argc, char** argv) {
  satchel::tool::avoid_broken_amx();
  CLI::App app("Packs what training saves for backward into one or two bits a value, and unpacks it on the way back.", "satchel");
  CodecOptions codec;
  BenchOptions bench;
  app.set_version_flag("--version", std::string("satchel " SATCHEL_VERSION));
  app.require_subcommand(0, 1);
  app.footer(
      "\nExamples:\n  satchel train --data synthetic:arxiv,scale=0.1 --method fp32,satchel\n  satchel plan --table arxiv\n"
      "  satchel inspect x.npy --spec blockwise\n  satchel pack x.npy -o x.satchel\n  satchel bench codec --quick\n"
      "\nExit codes:\n"
      "    0  done\n"
      "    1  failure: a file, the data, the device, memory, or a run that diverged\n"
      "    2  wrong use: the command line asks for what cannot be, or for what would replace a file\n"
      "  130  interrupted by Ctrl-C, with all files written; 143 by SIGTERM, 129 by SIGHUP\n"
      "Errors are one line on stderr: `satchel: [operation] rule, got value`.\n"
      "\n`satchel COMMAND --help` has more.");
  satchel::tool::add_train_commands(app);
  satchel::tool::add_analyse(app);
  satchel::tool::add_report(app);
  satchel::tool::add_plan_command(app);
  satchel::tool::add_data_command(app);
  add_codec_commands(app, codec);
  add_bench_commands(app, bench);
  try {
    app.parse(argc, argv);
    if (app.get_subcommands().empty()) std::printf("%s", app.help().c_str());
    return finish();
  } catch (const CLI::Success& e) {
    app.exit(e);
    return finish();
  } catch (const CLI::ParseError& e) {
    return usage(app, e);
  } catch (const satchel::tool::Interrupted& e) {
    return finish() == 0 ? 128 + e.signal : 1;
  } catch (const satchel::tool::UsageError& e) {
    return report(e.what(), 2);
  } catch (const satchel::Error& e) {
    return report(e.what(), 1);
  } catch (const std::bad_alloc&) {
    return report("[memory] there must be enough of it, got bad_alloc", 1);
  } catch (const std::exception& e) {
    return report(in_our_words(e), 1);
  }
}
