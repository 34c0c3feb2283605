#include "satchel/autograd/packing_meter.h"

#include <fnmatch.h>

#include <algorithm>
#include <cstdio>
#include <ostream>

namespace satchel {
namespace {

struct Group {
  std::string name;
  int64_t fields = 0, before = 0, after = 0;
};

std::string ratio_of(const Group& g) {
  if (g.after == 0) return g.before == 0 ? "" : "all";
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", static_cast<double>(g.before) / static_cast<double>(g.after));
  return text;
}

std::string row_of(const Group& g, size_t width) {
  char numbers[96];
  std::snprintf(numbers, sizeof numbers, "  %6lld  %11.1f  %10.1f  %6s\n", static_cast<long long>(g.fields),
                static_cast<double>(g.before) / 1024, static_cast<double>(g.after) / 1024, ratio_of(g).c_str());
  return g.name + std::string(width - g.name.size(), ' ') + numbers;
}

bool matches(const std::vector<std::string>& patterns, const std::string& node, const std::string& field) {
  return std::ranges::any_of(patterns, [&](const std::string& pattern) {
    return ::fnmatch(pattern.c_str(), node.c_str(), 0) == 0 || ::fnmatch(pattern.c_str(), field.c_str(), 0) == 0;
  });
}

}  // namespace

int64_t PackingReport::before() const {
  int64_t bytes = 0;
  for (const PackingLine& line : lines) bytes += line.before;
  return bytes;
}

int64_t PackingReport::after() const {
  int64_t bytes = 0;
  for (const PackingLine& line : lines) bytes += line.after;
  return bytes;
}

std::string PackingReport::text() const {
  std::map<std::string, Group> by_name;
  for (const PackingLine& line : lines) {
    const std::string name = line.node + (line.field.empty() ? "" : "." + line.field) + ": " + line.kept;
    Group& g = by_name[name];
    g.name = name;
    ++g.fields;
    g.before += line.before;
    g.after += line.after;
  }
  std::vector<Group> groups;
  for (const auto& [name, group] : by_name) groups.push_back(group);
  std::ranges::stable_sort(groups, std::greater<>(), &Group::before);
  groups.push_back({"in all", static_cast<int64_t>(lines.size()), before(), after()});
  size_t width = 0;
  for (const Group& g : groups) width = std::max(width, g.name.size());
  std::string out = "saved by" + std::string(width - std::min<size_t>(width, 8), ' ') + "  fields   before KiB   after KiB   ratio\n";
  for (const Group& g : groups) out += row_of(g, std::max<size_t>(width, 8));
  for (const auto& [name, count] : hidden) out += name + ": " + std::to_string(count) + " nodes, exact; they do not show what they save\n";
  return out;
}

std::ostream& operator<<(std::ostream& out, const PackingReport& report) { return out << report.text(); }

void PackingMeter::add(PackingReport& report, std::pair<std::string_view, std::string_view> node_field, const at::Tensor& t,
                       const std::string& kept, std::optional<int64_t> after) {
  auto found = counted_.find(memory_of(t));
  if (found == counted_.end()) found = counted_.emplace(memory_of(t), Counted{t.storage().getWeakStorageImpl()}).first;
  const auto once = [&](bool& counted) { return std::exchange(counted, true) ? 0 : static_cast<int64_t>(t.storage().nbytes()); };
  const int64_t before = once(found->second.before);
  report.lines.push_back({std::string(node_field.first), std::string(node_field.second), t.sizes().vec(), c10::toString(t.scalar_type()),
                          kept, before, after ? *after : once(found->second.after)});
}

FieldNames::FieldNames(std::vector<std::string> include, std::vector<std::string> exclude)
    : include_(std::move(include)), exclude_(std::move(exclude)) {}

bool FieldNames::want(std::string_view node, std::string_view field) {
  if (include_.empty() && exclude_.empty()) return true;
  const auto [found, is_new] = known_.try_emplace({node, field}, true);
  if (is_new) {
    const std::string name(node), full = name + "." + std::string(field);
    found->second = (include_.empty() || matches(include_, name, full)) && !matches(exclude_, name, full);
  }
  return found->second;
}

std::pair<KeptFormPtr, bool> SharedCodes::find_or_make(const at::Tensor& t, int bits, const std::function<KeptFormPtr()>& make) {
  const auto version = static_cast<int64_t>(t._version());
  Key key{memory_of(t), t.storage_offset(), t.sizes().vec(), t.strides().vec(), t.scalar_type(), version, bits};
  if (const auto found = codes_.find(key); found != codes_.end()) {
    if (KeptFormPtr form = found->second.form.lock()) return {form, false};
  }
  if (codes_.size() >= most_) {
    std::erase_if(codes_, [](const auto& entry) { return entry.second.form.expired(); });
    most_ = 2 * codes_.size() + 256;
  }
  KeptFormPtr form = make();
  codes_.insert_or_assign(std::move(key), Entry{t.storage().getWeakStorageImpl(), form});
  return {form, true};
}

}  // namespace satchel
