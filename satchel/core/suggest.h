// The known word that a mistyped one was most likely meant to be. Private to this room and tools.
#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace satchel {

/// How many letters must be added, left out, changed, or exchanged with their neighbour to turn one word into the other.
inline size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<size_t>> cost(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        cost[i][j] = i + j;
        continue;
      }
      cost[i][j] = std::min({cost[i - 1][j] + 1, cost[i][j - 1] + 1, cost[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
    }
  }
  return cost[a.size()][b.size()];
}

/// " (did you mean satchel?)" with the nearest of the names; nothing where none differs in a third of the letters or less (a word of
/// two letters: in one).
inline std::string did_you_mean(std::string_view given, std::span<const std::string_view> names) {
  constexpr size_t kLongest = 64;  // no name is longer, and the work grows with the square
  if (given.size() < 2 || given.size() > kLongest) return "";
  std::string_view best;
  size_t least = std::max<size_t>(1, given.size() / 3) + 1;
  for (const std::string_view name : names) {
    const size_t distance = edit_distance(given, name);
    if (distance >= least) continue;
    least = distance;
    best = name;
  }
  return best.empty() ? "" : " (did you mean " + std::string(best) + "?)";
}

}  // namespace satchel
