// Edges with weights, in both directions.
#include <string>
#include <utility>

#include "satchel/core/error.h"
#include "satchel/core/number.h"
#include "satchel/graph/csr.h"
#include "satchel/graph/csr_build.h"

namespace satchel {
using namespace csr_parts;
namespace {

/// The sum of the entries from `e` on whose column is `to`; `e` ends behind them.
double sum_of(const Entries& in, int64_t& e, int64_t end, int32_t to) {
  double sum = 0;
  for (; e < end && in.column[e] == to; ++e) sum += in.at(e);
  return sum;
}

}  // namespace

Csr made_symmetric_weighted(const Csr& a) {
  const Csr given = unscaled(checked(a));
  check_square(given);
  const Csr back = flipped(given), forth = flipped(back);  // columns rise in both
  const Entries x(forth), y(back);
  Csr both = by_rows(a.rows, a.columns, true, [&](int64_t i, const auto& put) {
    int64_t e = x.start[i], f = y.start[i];
    const int64_t e_end = x.start[i + 1], f_end = y.start[i + 1];
    while (e < e_end || f < f_end) {
      const int32_t to = f == f_end || (e < e_end && x.column[e] < y.column[f]) ? x.column[e] : y.column[f];
      const bool there = e < e_end && x.column[e] == to, here = f < f_end && y.column[f] == to;
      const double sum = sum_of(x, e, e_end, to) + sum_of(y, f, f_end, to);
      put(to, static_cast<float>(there && here ? sum / 2 : sum));
    }
  });
  const float* value = both.value.const_data_ptr<float>();
  const int64_t bad = first_where(both.entries(), [&](int64_t e) { return !is_finite(value[e]); });
  if (bad < both.entries()) fail("csr", "weights of an edge must have a finite sum in float32", value[bad]);
  return to_device(finished(std::move(both)), a.device());
}

}  // namespace satchel
