#include "satchel/data/synthetic.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "satchel/data/dice.h"
#include "satchel/data/numbers.h"

namespace satchel {
namespace {

constexpr int64_t kArxivNodes = 169343, kArxivTrain = 90941, kArxivValid = 29799;
constexpr uint32_t kTries = 32;  // draws of a new target before any free node will do

constexpr uint32_t kHalf = 0x80000000u;

/// `total` shared out by weight: exact, and each share within one of its due.
class Shares {
 public:
  Shares(uint64_t total, uint64_t weights) : total_(total), weights_(weights) {}
  int64_t next(uint64_t weight) {
    seen_ += weight;
    const auto due = static_cast<uint64_t>(static_cast<unsigned __int128>(total_) * seen_ / weights_);
    return static_cast<int64_t>(due - std::exchange(given_, due));
  }

 private:
  uint64_t total_, weights_, seen_ = 0, given_ = 0;
};

/// Who belongs where. A group's members stand together in `member`, first those that edges lead to: an edge to a node that drifts
/// past one half would tell its label.
struct Groups {
  int64_t count = 0;
  std::vector<int32_t> member;      // all nodes, by group
  std::vector<int64_t> first;       // of each group in `member`; count + 1
  std::vector<int64_t> targets;     // of each group: members that edges lead to, at least one
  std::vector<int32_t> own, rival;  // groups of a node; its label follows its own
  std::vector<uint32_t> drift;      // of its edges and features towards the rival, of 2^32
};

/// Sizes fall like 1/(count/4 + 1 + group): the first group has about five times the nodes of the last.
std::vector<int64_t> first_members(int64_t count, int64_t nodes) {
  const auto weight = [&](int64_t g) { return (uint64_t{1} << 40) / static_cast<uint64_t>(count / 4 + 1 + g); };
  uint64_t all = 0;
  for (int64_t g = 0; g < count; ++g) all += weight(g);
  Shares shares(static_cast<uint64_t>(nodes - count), all);
  std::vector<int64_t> first{0};
  for (int64_t g = 0; g < count; ++g) first.push_back(first.back() + 1 + shares.next(weight(g)));
  return first;
}

/// Drift is min(1, c·u²) of a uniform u, with the c whose mean is 1 − homophily: c/3 up to c = 1, then 1 − 2/(3·√c).
double drift_factor(double homophily) {
  const double factor = homophily > 2.0 / 3 ? 3 * (1 - homophily) : 4 / (9 * std::max(homophily * homophily, 1e-12));
  return homophily == 0 ? 0x1p62 : factor;
}

uint32_t drift_of(double factor, uint64_t u) {
  return static_cast<uint32_t>(std::min(factor * static_cast<double>(u * u >> 32), 0x1p32 - 1));
}

Groups draw_groups(const SyntheticOptions& o, int64_t count) {
  const auto nodes = static_cast<size_t>(o.nodes);
  const double factor = drift_factor(o.homophily);
  Groups out;
  out.count = count;
  out.first = first_members(count, o.nodes);
  out.member.resize(nodes);
  out.own.resize(nodes);
  out.rival.resize(nodes);
  out.drift.resize(nodes);
  std::iota(out.member.begin(), out.member.end(), 0);
  shuffle(std::span(out.member), Dice(o.seed, Purpose::groups));
  const Dice dice(o.seed, Purpose::drifts);
  const auto size = static_cast<uint32_t>(count);
  for (uint32_t g = 0; g < size; ++g) {
    const auto begin = out.member.begin() + out.first[g], end = out.member.begin() + out.first[g + 1];
    for (auto at = begin; at != end; ++at) {
      const auto node = static_cast<size_t>(*at);
      const Words w = dice(static_cast<uint32_t>(node));
      out.own[node] = static_cast<int32_t>(g);
      out.rival[node] = static_cast<int32_t>((g + 1 + below(size - 1, w.w[1])) % size);
      out.drift[node] = drift_of(factor, w.w[0]);
    }
    const auto last = std::stable_partition(begin, end, [&](int32_t node) { return out.drift[static_cast<size_t>(node)] < kHalf; });
    out.targets.push_back(last == begin ? end - begin : last - begin);
  }
  return out;
}

/// Out-degrees over a range of 1 : 17, even where a node of a small graph would get more than there are; targets as the header says.
class EdgeMaker {
 public:
  EdgeMaker(const SyntheticOptions& o, const Groups& groups)
      : o_(o), groups_(groups), dice_(o.seed, Purpose::edges), last_source_(static_cast<size_t>(o.nodes), -1) {}

  void make(GraphData& data) {
    const Dice degree(o_.seed, Purpose::degrees);
    std::vector<uint32_t> weight(static_cast<size_t>(o_.nodes));
    for (uint32_t i = 0; i < weight.size(); ++i) weight[i] = (1u << 20) / ((degree(i).w[0] >> 16) + 4096);
    uint64_t all = std::accumulate(weight.begin(), weight.end(), uint64_t{0});
    const uint64_t most = *std::max_element(weight.begin(), weight.end()) * static_cast<uint64_t>(o_.edges) / all + 1;
    if (most >= weight.size()) {
      weight.assign(weight.size(), 1);
      all = weight.size();
    }
    Shares shares(static_cast<uint64_t>(o_.edges), all);
    data.target.reserve(static_cast<size_t>(o_.edges));
    data.start.assign(1, 0);
    for (int64_t i = 0; i < o_.nodes; ++i) {
      const size_t before = data.target.size();
      for (int64_t left = shares.next(weight[static_cast<size_t>(i)]); left > 0; --left) {
        data.target.push_back(new_target(static_cast<int32_t>(i)));
      }
      tries_ = 0;
      std::sort(data.target.begin() + static_cast<int64_t>(before), data.target.end());
      data.start.push_back(static_cast<int64_t>(data.target.size()));
    }
  }

 private:
  int32_t new_target(int32_t source) {
    for (uint32_t k = 0; k < kTries; ++k) {
      const int32_t target = draw(source, dice_(static_cast<uint32_t>(source), tries_++));
      if (take(source, target)) return target;
    }
    auto target = static_cast<int32_t>(below(static_cast<uint32_t>(o_.nodes), dice_(static_cast<uint32_t>(source), tries_++).w[0]));
    while (!take(source, target)) target = static_cast<int32_t>((target + int64_t{1}) % o_.nodes);
    return target;
  }
  bool take(int32_t source, int32_t target) {
    int32_t& last = last_source_[static_cast<size_t>(target)];
    return target != source && std::exchange(last, source) != source;
  }
  int32_t draw(int32_t source, const Words& w) const {
    const auto node = static_cast<size_t>(source);
    const auto g = static_cast<size_t>(w.w[0] < groups_.drift[node] ? groups_.rival[node] : groups_.own[node]);
    const auto size = static_cast<uint64_t>(groups_.targets[g]);
    const uint64_t u = w.w[1], cube = ((u * u >> 32) * u) >> 32;  // density of u³: u^−2/3
    return groups_.member[static_cast<size_t>(groups_.first[g]) + (cube * size >> 32)];
  }

  const SyntheticOptions& o_;
  const Groups& groups_;
  Dice dice_;
  std::vector<int32_t> last_source_;  // that took this target
  uint32_t tries_ = 0;
};

/// ±mean for each group and feature: the distance of two groups does not depend on the number of features, and grows with the number
/// of groups to tell apart.
std::vector<float> draw_means(const SyntheticOptions& o, int64_t count) {
  const double distance = 0.1 + 0.25 * std::bit_width(static_cast<uint64_t>(count));
  const auto mean = static_cast<float>(distance / std::sqrt(static_cast<double>(o.features)));
  const Dice dice(o.seed, Purpose::means);
  std::vector<float> means(static_cast<size_t>(count * o.features));
  for (size_t i = 0; i < means.size(); ++i) {
    means[i] = (dice(static_cast<uint32_t>(i), static_cast<uint32_t>(i >> 32)).w[0] & 1) != 0 ? mean : -mean;
  }
  return means;
}

/// Sums of four 16-bit uniforms are nearly normal, and whole numbers: no machine rounds them differently.
void draw_features(const SyntheticOptions& o, const Groups& groups, Features& out) {
  const std::vector<float> means = draw_means(o, groups.count);
  constexpr float kUnit = 0x1.bb67aep-16f;  // √3/2^16: four uniforms of 2^16 steps have variance 4·2^32/12
  const Dice dice(o.seed, Purpose::features);
  out.rows = o.nodes;
  out.columns = o.features;
  out.dense.resize(static_cast<size_t>(o.nodes * o.features));
  for (int64_t i = 0; i < o.nodes; ++i) {
    const auto node = static_cast<size_t>(i);
    const float *own = means.data() + groups.own[node] * o.features, *rival = means.data() + groups.rival[node] * o.features;
    const float drift = static_cast<float>(groups.drift[node]) * 0x1p-32f;
    float* row = out.dense.data() + i * o.features;
    for (int64_t f = 0; f < o.features; f += 2) {
      const Words w = dice(static_cast<uint32_t>(i), static_cast<uint32_t>(f));
      const auto noise = [](uint32_t a, uint32_t b) {
        return kUnit * static_cast<float>(static_cast<int32_t>((a & 0xffff) + (a >> 16) + (b & 0xffff) + (b >> 16)) - 131070);
      };
      const auto mean = [&](int64_t at) { return own[at] + drift * (rival[at] - own[at]); };
      row[f] = mean(f) + noise(w.w[0], w.w[1]);
      if (f + 1 < o.features) row[f + 1] = mean(f + 1) + noise(w.w[2], w.w[3]);
    }
  }
}

/// Each group has one label of its own and a quarter of the others; nodes miss an eighth of theirs.
void draw_targets(const SyntheticOptions& o, const Groups& groups, GraphData& data) {
  const Dice dice(o.seed, Purpose::labels);
  data.targets.resize(static_cast<size_t>(o.nodes * o.classes));
  for (int64_t i = 0; i < o.nodes; ++i) {
    const auto own = static_cast<uint32_t>(groups.own[static_cast<size_t>(i)]);
    for (int64_t c = 0; c < o.classes; ++c) {
      const auto label = static_cast<uint32_t>(c);
      const bool group_has = own % static_cast<uint64_t>(o.classes) == label || dice(own, label).w[0] < kHalf / 2;
      const bool missed = dice(static_cast<uint32_t>(i), label).w[1] < kHalf / 4;
      data.targets[static_cast<size_t>(i * o.classes + c)] = group_has && !missed ? 1 : 0;
    }
  }
}

Split draw_split(const SyntheticOptions& o) {
  std::vector<int64_t> nodes(static_cast<size_t>(o.nodes));
  std::iota(nodes.begin(), nodes.end(), 0);
  shuffle(std::span(nodes), Dice(o.seed, Purpose::parts));
  const auto valid = nodes.begin() + std::max<int64_t>(o.nodes * kArxivTrain / kArxivNodes, 1);
  const auto test = valid + o.nodes * kArxivValid / kArxivNodes;
  std::sort(nodes.begin(), valid);
  std::sort(valid, test);
  std::sort(test, nodes.end());
  return {{nodes.begin(), valid}, {valid, test}, {test, nodes.end()}};
}

void check(const SyntheticOptions& o, int64_t groups) {
  const auto within = [](const char* name, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return;
    refuse(std::string("synthetic: ") + name, "must be " + std::to_string(low) + " to " + std::to_string(high), std::to_string(value));
  };
  within("nodes", o.nodes, 2, INT32_MAX);
  within("features", o.features, 1, 1 << 24);
  within("classes", o.classes, o.task == Task::multi_label ? 1 : 2, o.task == Task::binary ? 2 : 65536);
  within("nodes", o.nodes, groups, INT32_MAX);
  within("edges", o.edges, 0, o.nodes * (o.nodes - 1) / 8);
  if (!(o.homophily >= 0 && o.homophily <= 1)) refuse("synthetic: homophily", "must be 0 to 1", std::to_string(o.homophily));
  check_memory(static_cast<uint64_t>(o.nodes) * static_cast<uint64_t>(o.features) * sizeof(float), "synthetic: nodes × features");
  check_memory(static_cast<uint64_t>(o.edges) * sizeof(int32_t), "synthetic: edges");
  if (o.task == Task::multi_label) check_memory(static_cast<uint64_t>(o.nodes * o.classes), "synthetic: nodes × classes");
}

}  // namespace

GraphData make_synthetic(const SyntheticOptions& options) {
  const int64_t count = options.task == Task::multi_label ? std::max<int64_t>(options.classes, 8) : options.classes;
  check(options, count);
  const Groups groups = draw_groups(options, count);

  GraphData data;
  data.name = "synthetic";
  data.nodes = options.nodes;
  data.task = options.task;
  data.classes = options.task == Task::binary ? 1 : options.classes;
  EdgeMaker(options, groups).make(data);
  draw_features(options, groups, data.features);
  if (options.task == Task::multi_label) {
    draw_targets(options, groups, data);
  } else {
    data.labels = groups.own;
  }
  data.splits.push_back(draw_split(options));
  return data;
}

}  // namespace satchel
