// Side codes for the tests: every form, and channels of every kind.
#pragma once

#include <cmath>

#include "satchel/core/levels.h"
#include "tests/kernels/common.h"

namespace satchel::test {

struct SideForm {
  int bits;
  Side side;
};

constexpr SideForm kForms[] = {{2, Side::one_sided}, {3, Side::one_sided}, {2, Side::relu}, {3, Side::relu},
                               {2, Side::both},      {3, Side::both},      {4, Side::both}};

inline SideCode side_code(SideForm form, int64_t values, int64_t block, int64_t channels, int64_t inner, Random& random) {
  return {grid_of(values, block, values > 300 && random.one_in(3) ? 300 : 0),
          random.one_in(2) ? HeaderType::bf16 : HeaderType::f32,
          random.one_in(4) ? Rounding::nearest : Rounding::stochastic,
          side_table(form.bits, form.side, random.one_in(4) ? Levels::even : Levels::optimal, block),
          channels,
          inner};
}

inline Channel channel_of(float gamma, float beta, float off_mean) { return {-beta / gamma, gamma, beta, off_mean}; }

/// Rising and falling channels; a few that are flat, not a number, or have their threshold far outside.
inline std::vector<Channel> channels_of(int64_t count, Random& random) {
  std::vector<Channel> channels;
  for (int64_t c = 0; c < count; ++c) {
    const float gamma = random.normal() + (random.one_in(2) ? 1.0f : -1.0f), beta = random.normal() * 0.5f;
    const int64_t kind = random.below(12);
    channels.push_back(channel_of(kind == 0   ? 0.0f
                                  : kind == 1 ? -0.0f
                                  : kind == 2 ? NAN
                                              : gamma,
                                  kind == 3   ? 1e6f * beta
                                  : kind == 4 ? 0.0f
                                  : kind == 5 ? NAN
                                              : beta,
                                  random.normal()));
  }
  return channels;
}

inline std::string describe(const SideCode& code, DType type) {
  std::ostringstream text;
  text << code.grid.values << " values, block " << code.grid.block << ", span " << code.grid.span << ", " << code.table.bits << " bits, "
       << code.table.off << " off + " << code.table.on << " on, " << code.channels << " channels, inner " << code.inner
       << (code.rounding == Rounding::nearest ? ", nearest" : "") << (code.header == HeaderType::f32 ? ", f32 headers, " : ", ")
       << name_of(type);
  return text.str();
}

}  // namespace satchel::test
