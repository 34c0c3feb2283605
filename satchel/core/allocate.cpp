#include "satchel/core/allocate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <queue>

#include "satchel/core/error.h"

// Two sets of allocations, neither of which depends on the budget: the greedy path, and for unequal weights a table of
// dynamic programming over the whole range of budgets. The best that the budget pays for is taken, so more budget never
// predicts more error.

namespace satchel {
namespace {

constexpr int64_t kCells = int64_t{1} << 19;  // of the table, items × buckets: about 10 ms in all
constexpr int64_t kFewestBuckets = 256;       // below, items are so many that the greedy path is as good

using Sensitivity = std::span<const double>;
using Weights = std::span<const int64_t>;

double term(double sensitivity, int bits) {
  const double top = (1 << bits) - 1;
  return sensitivity / (top * top);
}

struct Problem {
  Sensitivity sensitivity;
  Weights weight;
  int least, most;
  int64_t floor;  // Σ w·least
  int64_t range;  // Σ w·(most − least)
};

void check(Sensitivity sensitivity, Weights weight, int least, int most) {
  if (sensitivity.size() != weight.size()) fail("allocate", "every sensitivity has a weight", weight.size());
  if (least < 1 || most > 8 || least > most) {
    fail("allocate", "bits must range within 1 to 8", std::to_string(least) + " to " + std::to_string(most));
  }
  for (const double c : sensitivity) {
    if (!std::isfinite(c) || c < 0) fail("allocate", "a sensitivity must be finite and not negative", c);
  }
  int64_t total = 0;
  for (const int64_t w : weight) {
    if (w <= 0) fail("allocate", "a weight must be positive", w);
    if (w >= (int64_t{1} << 60) - total) fail("allocate", "the weights must sum to less than 2^60", w);
    total += w;
  }
}

int64_t spent_on(const Problem& p, const std::vector<int>& bits) {
  return std::inner_product(bits.begin(), bits.end(), p.weight.begin(), int64_t{0});
}

/// From the most bits down, always the bit whose loss costs least per weight, until the budget pays.
std::vector<int> greedy(const Problem& p, int64_t budget) {
  std::vector<int> bits(p.weight.size(), p.most);
  int64_t spent = p.floor + p.range;
  const auto loss = [&](size_t i) {
    return (term(p.sensitivity[i], bits[i] - 1) - term(p.sensitivity[i], bits[i])) / static_cast<double>(p.weight[i]);
  };
  using Step = std::pair<double, size_t>;
  std::priority_queue<Step, std::vector<Step>, std::greater<>> steps;
  for (size_t i = 0; i < bits.size() && p.most > p.least; ++i) steps.emplace(loss(i), i);
  while (spent > budget) {
    const size_t i = steps.top().second;
    steps.pop();
    --bits[i];
    spent -= p.weight[i];
    if (bits[i] > p.least) steps.emplace(loss(i), i);
  }
  return bits;
}

/// Cell (i, k): of the allocations of the first i items whose extra weight Σ w·(b − least)/unit falls into bucket k, the
/// one of least cost. A bucket is 2^shift units wide, the unit is the weights' common divisor: exact where shift = 0.
class Table {
 public:
  Table(const Problem& p, int64_t unit, int shift)
      : p_(p), unit_(unit), shift_(shift), row_((p.range / unit >> shift) + 1), from_(p.weight.size() * row_.size()) {
    row_[0] = {0, 0};
    for (size_t i = 0; i < p.weight.size(); ++i) extend(i);
  }

  std::vector<int> best(int64_t budget) const {
    std::vector<int> bits(p_.weight.size(), p_.least);
    size_t at = row_.size();
    for (size_t k = 0; k < row_.size(); ++k) {
      const bool better = at == row_.size() || row_[k].cost < row_[at].cost;
      if (better && std::isfinite(row_[k].cost) && p_.floor + row_[k].extra * unit_ <= budget) at = k;
    }
    if (at == row_.size()) return bits;
    for (size_t i = bits.size(); i-- > 0;) {
      const uint32_t from = from_[i * row_.size() + at];
      bits[i] = p_.least + static_cast<int>(from & 7);
      at = from >> 3;
    }
    return bits;
  }

 private:
  struct Cell {
    double cost = std::numeric_limits<double>::infinity();
    int64_t extra = 0;
  };

  void extend(size_t item) {
    std::vector<Cell> next(row_.size());
    uint32_t* const from = &from_[item * row_.size()];
    const int64_t step = p_.weight[item] / unit_;
    const int64_t last = reach_ >> shift_;
    reach_ += step * (p_.most - p_.least);
    for (int more = 0; more <= p_.most - p_.least; ++more) {
      const double cost = term(p_.sensitivity[item], p_.least + more);
      for (int64_t k = 0; k <= last; ++k) {
        const Cell cell{row_[k].cost + cost, row_[k].extra + more * step};
        if (cell.cost == std::numeric_limits<double>::infinity()) continue;
        const int64_t to = cell.extra >> shift_;
        if (cell.cost < next[to].cost || (cell.cost == next[to].cost && cell.extra < next[to].extra)) {
          next[to] = cell;
          from[to] = static_cast<uint32_t>(k << 3) | static_cast<uint32_t>(more);
        }
      }
    }
    row_ = std::move(next);
  }

  const Problem& p_;
  int64_t unit_;
  int shift_;
  int64_t reach_ = 0;  // most extra weight of the items so far
  std::vector<Cell> row_;
  std::vector<uint32_t> from_;  // bucket of the items before << 3 | bits above the least
};

/// Items whose error does not count share what the others leave.
void spend_rest(const Problem& p, int64_t budget, std::vector<int>& bits) {
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = p.sensitivity[i] == 0 ? p.least : bits[i];
  int64_t rest = budget - spent_on(p, bits);
  for (int level = p.least; level < p.most; ++level) {
    for (size_t i = 0; i < bits.size(); ++i) {
      if (p.sensitivity[i] != 0 || bits[i] != level || p.weight[i] > rest) continue;
      ++bits[i];
      rest -= p.weight[i];
    }
  }
}

}  // namespace

double predicted_variance(Sensitivity sensitivity, std::span<const int> bits) {
  if (sensitivity.size() != bits.size()) fail("allocate", "every sensitivity has its bits", bits.size());
  double sum = 0;
  for (size_t i = 0; i < bits.size(); ++i) sum += term(sensitivity[i], bits[i]);
  return sum;
}

Allocation allocate_bits(Sensitivity sensitivity, Weights weight, int64_t budget, int least, int most) {
  check(sensitivity, weight, least, most);
  const int64_t total = std::accumulate(weight.begin(), weight.end(), int64_t{0});
  const Problem p{sensitivity, weight, least, most, total * least, total * (most - least)};
  if (budget < p.floor) fail("allocate", "the budget must pay for the least bits, " + std::to_string(p.floor), budget);
  std::vector<int> bits = greedy(p, budget);
  double predicted = predicted_variance(sensitivity, bits);

  const auto [narrow, wide] = std::minmax_element(weight.begin(), weight.end());
  if (p.range > 0 && *narrow != *wide) {
    const int64_t unit = std::accumulate(weight.begin(), weight.end(), int64_t{0}, std::gcd<int64_t, int64_t>);
    const int64_t most_buckets = kCells / static_cast<int64_t>(weight.size());
    int shift = 0;
    while ((p.range / unit >> shift) >= std::max<int64_t>(most_buckets, 1)) ++shift;
    if (shift == 0 || most_buckets >= kFewestBuckets) {
      std::vector<int> other = Table(p, unit, shift).best(budget);
      const double cost = predicted_variance(sensitivity, other);
      if (cost < predicted) {
        bits = std::move(other);
        predicted = cost;
      }
    }
  }
  spend_rest(p, budget, bits);
  return {bits, predicted, spent_on(p, bits)};
}

}  // namespace satchel
