// Norms by row and smooth activations, emulated on the CPU: statistics, the bytes of the scalar kernel's codes of x̂ and of slopes,
// gradients of plain loops over what the codes stand for.
#include "satchel/kernels/cuda/row_norm.h"

#include "tests/emulation/common.h"

namespace satchel::test {
namespace {

constexpr Smooth kSmooth[] = {Smooth::gelu, Smooth::gelu_tanh, Smooth::silu, Smooth::sigmoid, Smooth::tanh};

/// Codes of a tensor in guarded memory, as row_encode() takes and row_back() reads them. The gap before the headers is left as it was.
struct OwnCode {
  BlockCode code;
  Layout at;
  uint64_t seed;
  Placed bytes;

  OwnCode(int64_t values, int bits, Levels levels, Random& random)
      : code{grid_of(values, 256), HeaderType::bf16, random.one_in(3) ? Rounding::nearest : Rounding::stochastic,
             levels_of(bits, levels, 256)},
        at(layout_of(code.grid, bits, code.header)),
        seed(random.bits()),
        bytes(at.total) {}
  cuda::RowCode row() { return {code, {bytes.data() + at.codes, bytes.data() + at.headers}, &seed}; }
  Coded made() const {
    const Bytes all = bytes.bytes();
    return {Bytes(all.begin(), all.begin() + code_bytes(code.grid.values, code.levels.bits)), Bytes(all.begin() + at.headers, all.end())};
  }
  Coded truth(const Floats& v) const { return encode(kScalar, code, as_type(v, DType::f32), DType::f32, seed); }
  Floats values() const { return floats_of(decode(kScalar, code, made(), DType::f32), DType::f32); }
};

void expect_code(const OwnCode& own, const Floats& of) {
  ASSERT_TRUE(own.bytes.intact());
  const Coded truth = own.truth(of), made = own.made();
  ASSERT_EQ(made.headers, truth.headers);
  ASSERT_EQ(made.codes, truth.codes);
  const Bytes all = own.bytes.bytes();
  for (int64_t i = static_cast<int64_t>(truth.codes.size()); i < own.at.headers; ++i) ASSERT_EQ(all[static_cast<size_t>(i)], 0xa5) << "gap";
}

Floats normals(int64_t n, float scale, float offset, Random& random) {
  Floats v;
  for (int64_t i = 0; i < n; ++i) v.push_back(random.normal() * scale + offset);
  return v;
}

/// Rows of any kind: usual ones, constant ones, of any size, in every third tensor with what is no number.
Bytes rows_of(int64_t rows, int64_t width, DType type, Random& random) {
  Floats v = random.one_in(3) ? mixed_values(rows * width, random) : normals(rows * width, 1.5f, 0.3f, random);
  Bytes x = stored(v, type);
  if (random.one_in(3)) {
    for (const float bad : {NAN, INFINITY, -INFINITY}) put(x, type, random.below(rows * width), bad);
  }
  return x;
}

TEST(EmulatedRowNorm, StatisticsAndResult) {
  Random random(81);
  for (const int64_t width : {8, 16, 72, 248, 256, 264, 768, 1000, 3072, 3080, 8192}) {
    for (const DType type : kTypes) {
      for (const bool centred : {true, false}) {
        const int64_t rows = width < 300 ? 1 + random.below(90) : 1 + random.below(5);
        SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(width) + " " + name_of(type) + (centred ? "" : ", not centred"));
        const Bytes x = rows_of(rows, width, type, random);
        const Floats gamma = normals(width, 1, 0, random), beta = normals(width, 1, 0, random);
        Placed from(x), to(rows * width * size_of(type)), mean(rows * 4), rstd(rows * 4);
        const double eps = random.one_in(2) ? 1e-5 : 0.01;
        cuda::row_norm({rows, width}, {mean.floats(), rstd.floats(), gamma.data(), beta.data(), eps, centred}, from.data(), type, to.data(),
                       nullptr);
        ASSERT_TRUE(from.intact() && to.intact() && mean.intact() && rstd.intact());
        Floats y;
        for (int64_t r = 0; r < rows; ++r) {
          const float m = mean.floats()[r], s = rstd.floats()[r];
          double sum = 0, size = 0, squares = 0, off = 0;
          for (int64_t i = 0; i < width; ++i) {
            const double v = load(x.data(), type, r * width + i);
            sum += v, size += std::abs(v);
          }
          // Sums are of eight values, then over lanes and warps: 8 + 5 + 5 additions, and two products.
          const double n = static_cast<double>(width), truth = centred ? sum / n : 0, mean_bound = centred ? 20 * kUnit * size / n : 0;
          ASSERT_TRUE(is_near(m, truth, mean_bound)) << r;
          for (int64_t i = 0; i < width; ++i) {
            const float v = load(x.data(), type, r * width + i);
            const double d = v - truth, error = kUnit * std::abs(d) + mean_bound;
            squares += d * d, off += 2 * std::abs(d) * error + error * error;
            const float hat = centred ? (v - m) * s : v * s;
            y.push_back(std::fma(gamma[static_cast<size_t>(i)], hat, beta[static_cast<size_t>(i)]));
          }
          const double variance = squares / n, bound = off / n + 20 * kUnit * variance, least = std::max(variance - bound, 0.0) + eps;
          if (!std::isfinite(variance)) {
            ASSERT_TRUE(std::isnan(variance) ? s != s : s == 0.0f) << r;
            continue;
          }
          ASSERT_LE(s, (1 + 8 * kUnit) / std::sqrt(least)) << r;  // eps in float32, its sum, and the root
          ASSERT_GE(s, (1 - 8 * kUnit) / std::sqrt(variance + bound + eps)) << r;
        }
        ASSERT_TRUE(same(to.bytes(), stored(y, type), type));
      }
    }
  }
}

/// z = act(y) and act'(y) in double.
std::pair<double, double> truth_of(Smooth act, double y) {
  const double root = 0.7978845608028654, s = 1 / (1 + std::exp(-y));
  switch (act) {
    case Smooth::gelu: {
      const double phi = 0.5 * std::erfc(-y * std::sqrt(0.5));
      return {y * phi, phi + y * std::exp(-y * y / 2) / std::sqrt(2 * 3.141592653589793)};
    }
    case Smooth::gelu_tanh: {
      const double t = std::tanh(root * (y + 0.044715 * y * y * y));
      return {0.5 * y * (1 + t), 0.5 * (1 + t) + 0.5 * y * (1 - t * t) * root * (1 + 3 * 0.044715 * y * y)};
    }
    case Smooth::silu: return {y * s, s * (1 + y * (1 - s))};
    case Smooth::sigmoid: return {s, s * (1 - s)};
    default: return {std::tanh(y), 1 - std::tanh(y) * std::tanh(y)};
  }
}

/// What row_encode() makes of y as it stands in memory: smooth() has it to the bit.
struct Activated {
  Bytes z;
  Floats slope;
};
Activated activated(Smooth act, const Bytes& y, DType type) {
  const int64_t n = static_cast<int64_t>(y.size()) / size_of(type);
  Placed from(y, size_of(type)), z(n * size_of(type), size_of(type)), slope(n * 4, 4);
  cuda::smooth(act, from.data(), type, n, z.data(), slope.floats(), nullptr);
  EXPECT_TRUE(from.intact() && z.intact() && slope.intact());
  return {z.bytes(), floats_of(slope.bytes(), DType::f32)};
}

// Polynomials and instructions of 2 ulp each: values and slopes within 1e-6 of the function's, per unit of y. Fractions of y that the
// exponents lose (|y|·2^−24 each) are in that.
TEST(EmulatedRowNorm, SmoothValuesAreTheFunctions) {
  Random random(82);
  for (const Smooth act : kSmooth) {
    for (const DType type : kTypes) {
      const int64_t n = 4000 + random.below(9);
      const Bytes y = stored(normals(n, 3, 0, random), type);
      const Activated own = activated(act, y, type);
      for (int64_t i = 0; i < n; ++i) {
        const double v = load(y.data(), type, i);
        const auto [value, slope] = truth_of(act, v);
        const double bound = 1e-6 * (1 + std::abs(v));
        ASSERT_TRUE(is_near(load(own.z.data(), type, i), value, bound, type)) << static_cast<int>(act) << " of " << v;
        ASSERT_NEAR(own.slope[static_cast<size_t>(i)], slope, bound) << static_cast<int>(act) << " of " << v;
      }
    }
  }
}

TEST(EmulatedRowNorm, CodesAreTheScalarKernels) {
  Random random(83);
  const int64_t widths[] = {8, 16, 72, 248, 256, 264, 768, 1000, 3080};
  for (int trial = 0; trial < 240; ++trial) {
    const int64_t width = random.pick(widths), rows = 1 + random.below(width < 300 ? 60 : 6), n = rows * width;
    const DType type = kTypes[trial % 3];
    const int kind = trial % 4;  // x̂; slopes; both, twice
    const int bits = 1 + static_cast<int>(random.below(3));
    OwnCode hat(n, bits, bits == 3 || random.one_in(2) ? Levels::optimal : Levels::even, random),
        slope(n, random.one_in(2) ? 3 : 4, Levels::even, random);
    ASSERT_TRUE(cuda::row_norm_fits({rows, width}) && cuda::row_norm_code_fits(hat.code) && cuda::slope_code_fits(slope.code));
    const bool centred = !random.one_in(3);
    const Smooth act = random.pick(kSmooth);
    const Bytes x = rows_of(rows, width, type, random);
    Floats mean = normals(rows, 0.5f, 0, random), rstd = normals(rows, 0.3f, 1.5f, random);
    const Floats gamma = normals(width, 1, 0, random), beta = normals(width, 1, 0, random);
    SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(width) + ", kind " + std::to_string(kind) + ", " + describe(hat.code, type) +
                 "; slopes of " + std::to_string(slope.code.levels.bits) + " bits");
    Floats hats, y;
    for (int64_t i = 0; i < n; ++i) {
      const size_t r = static_cast<size_t>(i / width), c = static_cast<size_t>(i % width);
      const float v = load(x.data(), type, i);
      hats.push_back(centred ? (v - mean[r]) * rstd[r] : v * rstd[r]);
      y.push_back(std::fma(gamma[c], hats.back(), beta[c]));
    }
    Placed from(x), z(n * size_of(type));
    const cuda::RowNorm norm = {mean.data(), rstd.data(), gamma.data(), beta.data(), 1e-5, centred};
    cuda::row_encode({rows, width}, norm, kind == 1 ? cuda::RowCode() : hat.row(), kind == 0 ? cuda::RowCode() : slope.row(), act,
                     from.data(), type, z.data(), nullptr);
    ASSERT_TRUE(from.intact() && z.intact());
    if (kind != 1) {
      ASSERT_NO_FATAL_FAILURE(expect_code(hat, hats)) << "x̂";
    }
    if (kind == 0) continue;
    const Activated made = activated(act, kind == 1 ? x : stored(y, type), type);
    ASSERT_TRUE(same(z.bytes(), made.z, type)) << "z";
    ASSERT_NO_FATAL_FAILURE(expect_code(slope, made.slope)) << "slopes";
    if (kind != 1) continue;

    // An activation alone whose result is coded too, and its gradient.
    OwnCode output(n, 2, Levels::optimal, random), again(n, slope.code.levels.bits, Levels::even, random);
    ASSERT_TRUE(cuda::output_code_fits(output.code));
    Placed result(n * size_of(type));
    cuda::smooth_encode(again.row(), output.row(), act, from.data(), type, n, result.data(), nullptr);
    ASSERT_TRUE(result.intact());
    ASSERT_TRUE(same(result.bytes(), made.z, type)) << "z";
    ASSERT_NO_FATAL_FAILURE(expect_code(again, made.slope)) << "slopes beside the result's code";
    ASSERT_NO_FATAL_FAILURE(expect_code(output, floats_of(made.z, type))) << "the result's code";
    const Bytes g = stored(normals(n, 1, 0, random), type);
    Placed given(g), other(n * size_of(type));
    Placed& to = random.one_in(2) ? given : other;
    cuda::slope_back({rows, width}, slope.row(), given.data(), type, to.data(), nullptr);
    ASSERT_TRUE(given.intact() && other.intact());
    Floats truth = slope.values();
    for (int64_t i = 0; i < n; ++i) truth[static_cast<size_t>(i)] *= load(g.data(), type, i);
    ASSERT_TRUE(same(to.bytes(), stored(truth, type), type)) << "gradient";
  }
}

TEST(EmulatedRowNorm, GradientsArePlainLoops) {
  Random random(84);
  struct Size {
    int64_t rows, width;
  };
  std::vector<Size> sizes = {{3300, 8}, {300, 3080}, {2, 8192}};  // thread blocks take turns at rows
  for (const int64_t width : {8, 16, 72, 248, 256, 264, 768, 1000, 3072, 3080}) {
    for (int k = 0; k < 6; ++k) sizes.push_back({1 + random.below(width < 300 ? 60 : 6), width});
  }
  int trial = 0;
  for (const auto& [rows, width] : sizes) {
    const int64_t n = rows * width;
    const DType type = kTypes[trial % 3];
    const bool slopes = trial++ % 2 == 0, centred = !random.one_in(3), corrects = random.one_in(2), wants_x = !random.one_in(5);
    const int bits = 1 + static_cast<int>(random.below(3));
    OwnCode hat(n, bits, bits == 3 || random.one_in(2) ? Levels::optimal : Levels::even, random),
        slope(n, random.one_in(2) ? 3 : 4, Levels::even, random);
    SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(width) + ", " + describe(hat.code, type) +
                 (slopes ? "; slopes of " : "; no slopes of ") + std::to_string(slope.code.levels.bits) + " bits" +
                 (corrects ? ", corrected" : ""));
    Floats kept = normals(n, 1, 0, random), kept_slopes = normals(n, 0.4f, 0.5f, random);
    if (random.one_in(4)) kept[static_cast<size_t>(random.below(n))] = NAN;
    const auto fill = [](OwnCode& to, const Floats& v) {
      const Coded c = to.truth(v);
      std::copy(c.codes.begin(), c.codes.end(), to.bytes.data());
      std::copy(c.headers.begin(), c.headers.end(), to.bytes.data() + to.at.headers);
    };
    fill(hat, kept);
    fill(slope, kept_slopes);
    const Floats hats = hat.values(), by = slope.values();
    Floats rstd = normals(rows, 0.3f, 1.5f, random);
    const Floats gamma = normals(width, 1, 0, random);
    const Bytes g = stored(normals(n, 1, 0, random), type);
    Placed given(g), other(n * size_of(type)), to_gamma(width * 4), to_beta(width * 4),
        scratch(cuda::row_back_scratch_bytes({rows, width}));
    Placed& to = random.one_in(2) ? given : other;
    const double eps = 1e-3;
    cuda::row_back(
        {rows, width}, {nullptr, rstd.data(), gamma.data(), nullptr, eps, centred}, hat.row(), slopes ? slope.row() : cuda::RowCode(),
        {given.data(), type, wants_x ? to.data() : nullptr, to_gamma.floats(), to_beta.floats(), corrects}, scratch.data(), nullptr);
    ASSERT_TRUE(given.intact() && other.intact() && to_gamma.intact() && to_beta.intact() && scratch.intact());
    const Bytes own = to.bytes();
    std::vector<double> sum(static_cast<size_t>(width)), along = sum, size = sum, along_size = sum;
    for (int64_t r = 0; r < rows; ++r) {
      double a = 0, b = 0, squares = 0, a_size = 0, b_size = 0;
      const double s = rstd[static_cast<size_t>(r)], share = 1 / static_cast<double>(width);
      const auto at = [&](int64_t i) {
        const size_t k = static_cast<size_t>(r * width + i);
        const float v = load(g.data(), type, static_cast<int64_t>(k));
        return std::pair<double, double>(slopes ? v * by[k] : v, hats[k]);
      };
      for (int64_t i = 0; i < width; ++i) {
        const size_t c = static_cast<size_t>(i);
        const auto [gz, x] = at(i);
        sum[c] += gz, along[c] += gz * x, size[c] += std::abs(gz), along_size[c] += std::abs(gz * x);
        const double p = gz * static_cast<double>(gamma[c]);
        a += p, b += p * x, squares += x * x, a_size += std::abs(p), b_size += std::abs(p * x);
      }
      const double more = corrects ? 1 + (squares * share - 1 + eps * s * s) * share : 1;
      for (int64_t i = 0; wants_x && i < width; ++i) {
        const auto [gz, x] = at(i);
        const double p = gz * static_cast<double>(gamma[static_cast<size_t>(i)]);
        const double truth = s * (more * p - (centred ? a * share : 0) - x * b * share);
        // Sums of 8 + 5 + 5 additions and a product before them; six operations after. The correction's own: 30 of a size that is 1 + x̂²/n.
        const double bound = 40 * kUnit * s * ((1 + squares * share * share) * std::abs(p) + a_size * share + std::abs(x) * b_size * share);
        const float found = load(own.data(), type, r * width + i);
        ASSERT_TRUE(is_near(found, truth, bound, type)) << "row " << r << ", value " << i << ": " << found << ", not " << truth;
      }
    }
    // A thread block adds up its rows, eight warps an eighth of the blocks each, then eight warps' sums.
    const int64_t parts = cuda::row_back_scratch_bytes({rows, width}) / (8 * width);
    const double depth = static_cast<double>(ceil_div(rows, parts) + ceil_div(parts, 8) + 10) * kUnit;
    for (size_t c = 0; c < sum.size(); ++c) {
      ASSERT_TRUE(is_near(to_beta.floats()[c], sum[c], depth * size[c])) << c;
      ASSERT_TRUE(is_near(to_gamma.floats()[c], along[c], depth * along_size[c])) << c;
    }
  }
}

}  // namespace
}  // namespace satchel::test
