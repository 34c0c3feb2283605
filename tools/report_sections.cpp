#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>

#include "satchel/core/distribution.h"
#include "tools/report_charts.h"
#include "tools/report_page.h"

namespace satchel::tool {
namespace {

constexpr int kTorchColour = 0, kOwnColour = 1;
constexpr size_t kMostLayers = 40;      // bars of a chart
constexpr size_t kMostHistograms = 90;  // charts of a file

/// Colours by the order in which names come; torch's own saves are grey, and satchel has one of its own.
class Palette {
 public:
  int of(const std::string& name) {
    if (name == "fp32" || name == "torch") return kTorchColour;
    if (name == "satchel") return kOwnColour;
    const auto [found, fresh] = colours_.try_emplace(name, next_);
    if (fresh) next_ = next_ + 1 < kColours ? next_ + 1 : kOwnColour + 1;
    return found->second;
  }

 private:
  std::map<std::string, int> colours_;
  int next_ = kOwnColour + 1;
};

std::string heading(const JsonPlace& file, const std::string& what) {
  const std::string& path = file.file();
  return fmt::format("<section>\n<h2>{}</h2>\n<p class=\"note\">{}</p>\n", escaped(what), escaped(path.substr(path.rfind('/') + 1)));
}

double time_of(const JsonPlace& entry) {
  const char* key = entry.has("epoch_seconds") ? "epoch_seconds" : "step_seconds";
  return entry.has(key) ? entry.at(key).number() : std::nan("");
}

std::string bytes_of(const JsonPlace& entry, const char* key) {
  return entry.has(key) ? shown(entry.at(key).number_at_least(0), Unit::bytes) : "–";
}

// --- train ------------------------------------------------------------------------------------------------------------

struct Layer {
  std::string name;
  double bytes = 0, before = 0;
};

/// What a run keeps, layer by layer in the order of forward.
std::vector<Layer> layers_of(const JsonPlace& run) {
  std::vector<Layer> layers;
  for (const JsonPlace& line : run.at("tensors").items()) {
    const std::string name = line.at("name").text();
    auto found = std::ranges::find(layers, name, &Layer::name);
    if (found == layers.end()) found = layers.insert(layers.end(), Layer{name});
    found->bytes += line.at("bytes").number_at_least(0);
    found->before += line.at("fp32_bytes").number_at_least(0);
  }
  return layers;
}

/// What stands in memory while forward keeps and backward releases, save by save.
ChartSeries kept_over_step(const std::string& name, int colour, const std::vector<Layer>& layers, bool before) {
  ChartSeries s{name, colour, {{0, 0}}};
  const auto count = static_cast<double>(layers.size());
  double sum = 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    sum += before ? layers[i].before : layers[i].bytes;
    s.points.push_back({static_cast<double>(i + 1) / count, sum});
  }
  for (size_t i = layers.size(); i-- > 0;) {
    sum -= before ? layers[i].before : layers[i].bytes;
    s.points.push_back({1 + (count - static_cast<double>(i)) / count, sum});
  }
  s.dashed = before;
  return s;
}

/// The first run of each method, for what does not depend on the seed.
std::vector<JsonPlace> first_runs(const std::vector<JsonPlace>& runs) {
  std::vector<JsonPlace> firsts;
  for (const JsonPlace& run : runs) {
    const std::string method = run.at("method").text();
    if (std::ranges::none_of(firsts, [&](const JsonPlace& f) { return f.at("method").text() == method; })) firsts.push_back(run);
  }
  return firsts;
}

std::string curve_chart(const std::string& title, const std::vector<JsonPlace>& runs, const char* key, Unit unit, Palette& palette) {
  std::vector<ChartSeries> series;
  for (const JsonPlace& run : runs) {
    const std::string method = run.at("method").text();
    ChartSeries s{method, palette.of(method), {}};
    for (const JsonPlace& point : run.at("curve").items()) {
      if (point.has(key)) s.points.push_back({point.at("epoch").number(), point.at(key).number()});
    }
    s.dots = s.points.size() == 1;
    series.push_back(std::move(s));
  }
  return line_chart(title, {"epoch", Unit::number, false, false, /*whole=*/true}, {"", unit}, series);
}

/// Before: what the run with torch's own saves keeps in each layer, where there is one, else the same values in float32.
std::string layer_chart(const JsonPlace& run, const std::vector<Layer>& torchs, Palette& palette) {
  const std::string method = run.at("method").text();
  if (method == "fp32") return "";
  const std::vector<Layer> own = layers_of(run);
  std::vector<Layer> layers = torchs;
  for (Layer& l : layers) l.before = l.bytes, l.bytes = 0;
  for (const Layer& l : own) {
    auto found = std::ranges::find(layers, l.name, &Layer::name);
    if (found == layers.end()) found = layers.insert(layers.end(), Layer{l.name, 0, torchs.empty() ? l.before : 0});
    found->bytes = l.bytes;
  }
  const size_t all = layers.size();
  if (all > kMostLayers) {
    std::vector<double> sizes;
    for (const Layer& l : layers) sizes.push_back(l.before);
    std::ranges::nth_element(sizes, sizes.begin() + kMostLayers - 1, std::greater<>());
    const double least = sizes[kMostLayers - 1];
    std::erase_if(layers, [&](const Layer& l) { return l.before < least; });
    layers.resize(std::min(layers.size(), kMostLayers));
  }
  std::vector<BarGroup> groups;
  for (const Layer& l : layers) groups.push_back({l.name, {l.before, l.bytes}});
  const std::string title =
      all > layers.size() ? fmt::format("{}: the {} largest of {} layers", method, layers.size(), all) : method + ": bytes by layer";
  return bar_chart(title, Unit::bytes, {torchs.empty() ? "the same in float32" : "torch's saves", method},
                   {kTorchColour, palette.of(method)}, groups);
}

std::string peak_chart(const std::vector<JsonPlace>& entries, Palette& palette) {
  std::vector<ChartSeries> series;
  for (const JsonPlace& e : entries) {
    if (!e.has("peak_bytes")) continue;
    const std::string method = e.at("method").text();
    ChartSeries s{method, palette.of(method), {{time_of(e), e.at("peak_bytes").number_at_least(0), 0, method}}, false, true};
    series.push_back(std::move(s));
  }
  return line_chart("peak of a step against its time", {"time of a step", Unit::seconds, false, true}, {"", Unit::bytes, false, true},
                    series);
}

std::string saved_chart(const std::vector<JsonPlace>& entries) {
  std::vector<BarGroup> groups;
  for (const JsonPlace& e : entries) {
    if (!e.has("saved_bytes")) continue;
    groups.push_back({e.at("method").text(), {e.at("saved_bytes").number_at_least(0), e.at("peak_bytes").number_at_least(0)}});
  }
  return bar_chart("kept for backward, and peak of a step", Unit::bytes, {"kept", "peak"}, {kOwnColour, kTorchColour}, groups);
}

// --- analyse ----------------------------------------------------------------------------------------------------------

ChartSeries model_series(const std::string& name, int colour, const std::vector<double>& shares, bool dashed) {
  ChartSeries s{name, colour, {}};
  for (size_t i = 0; i < shares.size(); ++i)
    s.points.push_back({(static_cast<double>(i) + .5) / static_cast<double>(shares.size()), shares[i]});
  s.dashed = dashed;
  return s;
}

std::string save_name(const JsonPlace& save) {
  return save.at("name").text() + ", " + save.at("kind").text() + (save.at("projected").yes() ? ", projected" : "");
}

std::string block_chart(const JsonPlace& save, const JsonPlace& block) {
  std::vector<double> shares;
  for (const JsonPlace& share : block.at("histogram").items()) shares.push_back(share.number_at_least(0));
  if (shares.empty()) return "";
  const double values = block.at("values").number_at_least(1);
  const int bins = static_cast<int>(shares.size());
  std::vector<ChartSeries> models{model_series("uniform", 2, uniform_shares(bins), true)};
  if (values >= 3) models.push_back(model_series("clipped normal", 1, clipped_normal_shares(bins, values), false));
  return histogram_chart(save_name(save),
                         fmt::format("blocks of {} · JS uniform {:.4f}, clipped normal {:.4f}", values, block.at("js_uniform").number(),
                                     block.at("js_normal").number()),
                         shares, models);
}

std::string variance_table(const std::vector<JsonPlace>& saves) {
  std::vector<std::vector<std::string>> rows{{"layer", "block", "values", "bits", "JS uniform", "JS normal", "variance: uniform", "normal",
                                              "measured", "optimal levels: normal", "measured", "gain"}};
  for (const JsonPlace& save : saves) {
    for (const JsonPlace& block : save.at("blocks").items()) {
      for (const JsonPlace& v : block.at("variances").items()) {
        const auto four = [&](const char* key) { return v.has(key) ? fmt::format("{:.4f}", v.at(key).number()) : "–"; };
        rows.push_back({save_name(save), block.at("block").text(), shown(block.at("values").number(), Unit::number),
                        shown(v.at("bits").number(), Unit::number), fmt::format("{:.4f}", block.at("js_uniform").number()),
                        fmt::format("{:.4f}", block.at("js_normal").number()), four("uniform"), four("normal"), four("measured"),
                        four("optimal_normal"), four("optimal_measured"),
                        v.has("gain") ? fmt::format("{:.1f} %", 100 * v.at("gain").number()) : "–"});
      }
    }
  }
  return html_table(rows);
}

std::string gradient_part(const JsonPlace& gradients) {
  const std::vector<JsonPlace> weights = gradients.at("weights").items();
  Palette palette;
  std::vector<std::string> methods;
  std::vector<std::pair<std::string, int>> names;
  std::vector<BarGroup> against_batch, bias;
  std::vector<std::vector<std::string>> rows{{"weight", "method", "|g|", "bias", "variance", "of the batch's", "cosine"}};
  for (const JsonPlace& w : weights) {
    if (w.at("negligible").yes()) continue;  // nothing but rounding errors
    const double batch = w.at("batch_variance").number_at_least(0);
    BarGroup noise{w.at("name").text(), {}}, off{w.at("name").text(), {}};
    for (const JsonPlace& m : w.at("methods").items()) {
      const std::string method = m.at("method").text();
      if (std::ranges::find(methods, method) == methods.end()) {
        methods.push_back(method);
        names.emplace_back(method, palette.of(method));
      }
      const double variance = m.maybe_number("variance").value_or(std::nan("")), ratio = batch > 0 ? variance / batch : std::nan("");
      noise.values.push_back(ratio);
      off.values.push_back(100 * m.maybe_number("bias").value_or(std::nan("")));
      rows.push_back({w.at("name").text(), method, shown(w.at("gradient").number(), Unit::number), shown(off.values.back(), Unit::percent),
                      fmt::format("{:.2e}", variance), shown(ratio, Unit::number),
                      fmt::format("{:.4f}", m.maybe_number("cosine").value_or(std::nan("")))});
    }
    against_batch.push_back(std::move(noise));
    bias.push_back(std::move(off));
  }
  std::vector<int> colours;
  for (const std::string& m : methods) colours.push_back(palette.of(m));
  const std::string about = fmt::format(
      "{} passes of each method beside the exact gradient. The batch's own variance is over {} {}: below 1 the batch is the louder noise.",
      gradients.at("draws").number(), gradients.at("parts").number(), gradients.at("parts_are").text());
  return "<h3>Gradients of the weights</h3>\n<p>" + escaped(about) + "</p>\n" + legend(names) +
         html_charts({bar_chart("variance added / the batch's own", Unit::number, methods, colours, against_batch),
                      bar_chart("bias / norm of the gradient", Unit::percent, methods, colours, bias)}) +
         "<details><summary>All numbers</summary>\n" + html_table(rows) + "</details>\n";
}

// --- bench over an axis -----------------------------------------------------------------------------------------------

std::string axis_chart(const std::string& title, const std::vector<JsonPlace>& points, const ChartAxis& x, const char* key,
                       const char* spread, Unit unit, Palette& palette) {
  std::vector<ChartSeries> series;
  for (size_t i = 0; i < points.size(); ++i) {
    for (const JsonPlace& r : points[i].at("results").items()) {
      const std::string method = r.at("method").text();
      auto found = std::ranges::find(series, method, &ChartSeries::name);
      if (found == series.end()) found = series.insert(series.end(), ChartSeries{method, palette.of(method), {}, true, true});
      if (r.has(key)) found->points.push_back({x.ticks[i], r.at(key).number(), spread != nullptr ? r.maybe_number(spread).value_or(0) : 0});
    }
  }
  return line_chart(title, x, {"", unit, /*log=*/unit == Unit::bytes}, series);
}

}  // namespace

std::string train_section(const JsonPlace& file) {
  const std::vector<JsonPlace> runs = file.at("runs").items();
  if (runs.empty()) return heading(file, "Training: no run ended") + "</section>\n";
  const std::string metric = runs.front().at("metric").text();
  const std::vector<JsonPlace> firsts = first_runs(runs);
  Palette palette;
  std::vector<std::pair<std::string, int>> names;
  std::vector<std::vector<std::string>> rows{{"method", "seed", "test " + metric + " %", "kept", "loss bytes", "peak", "step"}};
  for (const JsonPlace& run : runs) {
    rows.push_back({run.at("method").text(), shown(run.at("seed").number(), Unit::number),
                    run.has("test") ? fmt::format("{:.2f}", run.at("test").number()) : "–", bytes_of(run, "saved_bytes"),
                    bytes_of(run, "loss_bytes"), bytes_of(run, "peak_bytes"), shown(time_of(run), Unit::seconds)});
  }
  std::vector<ChartSeries> over_step, packed_over_step;
  std::vector<std::string> layers;
  const auto baseline = std::ranges::find_if(firsts, [](const JsonPlace& run) { return run.at("method").text() == "fp32"; });
  const std::vector<Layer> torchs = baseline == firsts.end() ? std::vector<Layer>() : layers_of(*baseline);
  for (const JsonPlace& run : firsts) {
    const std::string method = run.at("method").text();
    names.emplace_back(method, palette.of(method));
    over_step.push_back(kept_over_step(method, palette.of(method), layers_of(run), false));
    if (method != "fp32") packed_over_step.push_back(over_step.back());
    layers.push_back(layer_chart(run, torchs, palette));
  }
  if (torchs.empty()) {
    over_step.push_back(kept_over_step("the same in float32", kTorchColour, layers_of(firsts.front()), true));
  }
  ChartAxis step{"forward, then backward"};
  step.ticks = {0, 1, 2};
  step.tick_names = {"start", "loss", "end"};
  const std::string html =
      heading(file, fmt::format("Training: {} on {}", runs.front().at("model").text(), runs.front().at("data").text())) + legend(names) +
      html_charts({curve_chart("loss", runs, "loss", Unit::number, palette),
                   curve_chart("test " + metric + ", %", runs, "test", Unit::number, palette),
                   curve_chart("validation " + metric + ", %", runs, "valid", Unit::number, palette),
                   line_chart("kept over a step", step, {"", Unit::bytes, false, true}, over_step),
                   line_chart("kept over a step, packed", step, {"", Unit::bytes, false, true}, packed_over_step),
                   peak_chart(firsts, palette)}) +
      "<h3>Runs</h3>\n" + html_table(rows) + "<h3>Bytes by layer, before and after</h3>\n" + html_charts(layers);
  return html + "</section>\n";
}

std::string bench_section(const JsonPlace& file) {
  const std::vector<JsonPlace> results = file.at("results").items();
  Palette palette;
  std::vector<std::vector<std::string>> rows{{"method", "step", "of torch", "kept", "loss bytes", "peak"}};
  for (const JsonPlace& r : results) {
    const double seconds = time_of(r);
    rows.push_back({r.at("method").text(), std::isfinite(seconds) ? shown(seconds, Unit::seconds) : "does not fit",
                    r.has("ratio") ? fmt::format("{:.2f}", r.at("ratio").number()) : "–", bytes_of(r, "saved_bytes"),
                    bytes_of(r, "loss_bytes"), bytes_of(r, "peak_bytes")});
  }
  const std::string data = file.maybe_text("data");
  return heading(file, fmt::format("Benchmark: {}{}", file.at("model").text(), data.empty() ? "" : " on " + data)) +
         html_charts({peak_chart(results, palette), saved_chart(results)}) + html_table(rows) + "</section>\n";
}

std::string axis_section(const JsonPlace& file) {
  const std::vector<JsonPlace> points = file.at("points").items();
  const std::string axis = file.at("axis").text();
  Palette palette;
  ChartAxis x{axis};
  std::vector<std::vector<std::string>> rows{{axis, "method", "test %", "kept", "planned", "peak", "step"}};
  std::vector<std::pair<std::string, int>> names;
  for (size_t i = 0; i < points.size(); ++i) {
    const std::string value = points[i].at("value").text();
    x.ticks.push_back(static_cast<double>(i));
    x.tick_names.push_back(value);
    for (const JsonPlace& r : points[i].at("results").items()) {
      const std::string method = r.at("method").text();
      if (std::ranges::none_of(names, [&](const auto& n) { return n.first == method; })) names.emplace_back(method, palette.of(method));
      const double spread = r.maybe_number("test_deviation").value_or(0);
      rows.push_back(
          {value, method,
           r.has("test") ? fmt::format("{:.2f}{}", r.at("test").number(), spread > 0 ? fmt::format(" ± {:.2f}", spread) : "") : "–",
           bytes_of(r, "saved_bytes"), bytes_of(r, "planned_bytes"), bytes_of(r, "peak_bytes"), shown(time_of(r), Unit::seconds)});
    }
  }
  return heading(file, fmt::format("{} on {}, by {}", file.at("model").text(), file.at("data").text(), axis)) + legend(names) +
         html_charts({axis_chart("test metric, %", points, x, "test", "test_deviation", Unit::number, palette),
                      axis_chart("kept for backward", points, x, "saved_bytes", nullptr, Unit::bytes, palette),
                      axis_chart("peak of a step", points, x, "peak_bytes", nullptr, Unit::bytes, palette),
                      axis_chart("time of a step", points, x, "epoch_seconds", nullptr, Unit::seconds, palette)}) +
         html_table(rows) + "</section>\n";
}

std::string analyse_section(const JsonPlace& file) {
  const std::vector<JsonPlace> saves = file.at("saves").items();
  std::vector<std::string> charts, more;  // more: of inputs that stand projected among the others
  const bool projects = std::ranges::any_of(saves, [](const JsonPlace& s) { return s.at("projected").yes(); });
  int64_t nearer = 0, first = 0, all = 0;  // first: of those that stand first
  for (const JsonPlace& save : saves) {
    const bool second = projects && !save.at("projected").yes() && save.at("kind").text() != "norm";
    for (const JsonPlace& block : save.at("blocks").items()) {
      const std::string chart = block_chart(save, block);
      if (chart.empty()) continue;
      ++all;
      first += second ? 0 : 1;
      nearer += !second && block.at("js_normal").number() < block.at("js_uniform").number() ? 1 : 0;
      if (charts.size() + more.size() < kMostHistograms) (second ? more : charts).push_back(chart);
    }
  }
  const double epochs = file.at("epochs").number_at_least(0);
  std::string html = heading(file, fmt::format("Activations: {} on {}", file.at("model").text(), file.at("data").text())) +
                     fmt::format(
                         "<p>{}. Values of each block between its minimum and maximum; the clipped normal is nearer than the uniform "
                         "distribution in {} of {} cases{}.</p>\n",
                         epochs == 0 ? "Not trained" : fmt::format("After {} epochs", epochs), nearer, first,
                         projects ? ", of inputs that are projected and of norms" : "") +
                     legend({{"clipped normal", 1}, {"uniform", 2}}) + html_charts(charts);
  const auto drawn = static_cast<int64_t>(charts.size() + more.size());
  if (!more.empty())
    html += "<details><summary>Histograms of inputs that are not projected</summary>\n" + html_charts(more) + "</details>\n";
  if (all > drawn) html += fmt::format("<p class=\"note\">The first {} of {} histograms.</p>\n", drawn, all);
  html += "<h3>Divergence and variance of rounding</h3>\n" + variance_table(saves);
  if (file.has("gradients")) html += gradient_part(file.at("gradients"));
  return html + "</section>\n";
}

std::string report_section(const JsonPlace& file) {
  if (file.has("saves")) return analyse_section(file);
  if (file.has("runs")) return train_section(file);
  if (file.has("points")) return axis_section(file);
  if (file.has("results")) {
    const std::vector<JsonPlace> results = file.at("results").items();
    if (!results.empty() && results.front().has("method") && (results.front().has("peak_bytes") || results.front().has("fits")))
      return bench_section(file);
  }
  file.refuse("what `satchel analyse`, `train`, `bench graph` or `bench images` write with --json");
}

}  // namespace satchel::tool
