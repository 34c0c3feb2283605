// The random projection and its code, emulated on the CPU: sums in double, and the scalar kernel's bytes of what was made.
#include "satchel/kernels/cuda/project_product.h"
#include "tests/emulation/common.h"

namespace satchel::test {
namespace {

TEST(EmulatedProject, ProductAndCode) {
  Random random(111);
  const int columns[] = {1, 7, 16, 100, 128, 256, 300, 384}, widths[] = {1, 5, 16, 16, 32, 32, 40};
  for (int trial = 0; trial < 90; ++trial) {
    Projection p;
    p.rows = 1 + random.below(trial % 9 == 0 ? 400 : 140), p.columns = random.pick(columns), p.width = random.pick(widths);
    p.per_matrix = random.one_in(2) ? p.rows : random.one_in(2) ? 64 : 1 + random.below(p.rows);
    p.hadamard = random.one_in(3) && p.width <= p.columns;
    const DType type = kTypes[trial % 3];
    const int64_t n = p.rows * p.width, size = static_cast<int64_t>(p.columns) * p.width;
    const uint64_t seed = random.bits();
    SCOPED_TRACE(std::to_string(p.rows) + " x " + std::to_string(p.columns) + " to " + std::to_string(p.width) + ", " +
                 std::to_string(p.per_matrix) + " rows a matrix, " + name_of(type) + (p.hadamard ? ", Hadamard" : ""));
    Floats truth(static_cast<size_t>(p.matrices() * size));
    draw_projection(p, seed, truth.data(), 0, p.matrices());
    Placed matrices(4 * size * p.matrices());
    cuda::draw_projection(p, &seed, matrices.floats(), 0, p.matrices(), nullptr);
    ASSERT_TRUE(matrices.intact());
    ASSERT_EQ(floats_of(matrices.bytes(), DType::f32), truth);

    Floats v;
    for (int64_t i = 0; i < p.rows * p.columns; ++i) v.push_back(random.normal());
    const Bytes h = stored(v, type);
    Placed from(h, shift_of(type, random)), z(4 * n);
    cuda::project(p, from.data(), type, &seed, z.floats(), nullptr);
    ASSERT_TRUE(z.intact());
    for (int64_t i = 0; i < n; ++i) {
      const int64_t row = i / p.width, r = i % p.width;
      double sum = 0, sizes = 0;
      for (int64_t d = 0; d < p.columns; ++d) {
        const double term = load(h.data(), type, row * p.columns + d) *
                            static_cast<double>(truth[static_cast<size_t>(row / p.per_matrix * size + d * p.width + r)]);
        sum += term, sizes += std::abs(term);
      }
      // Two numbers of bf16 are off by 2^−18 of a float32 at most; each of up to three has an addition, and the unit is a product.
      const double bound = (0x1p-18 + (3 * p.columns + 2) * kUnit) * sizes;
      ASSERT_TRUE(is_near(z.floats()[i], sum, bound)) << "row " << row << ", column " << r << ": " << z.floats()[i] << ", not " << sum;
    }

    // Codes of Z where it was made: blocks that a team of lanes has, a tile of 64 rows, or any.
    const int64_t blocks[] = {64, 128, 256, 64 * p.width, 100};
    const int bits = random.one_in(4) ? 4 : 2;
    const BlockCode code = {grid_of(n, random.pick(blocks)), random.one_in(2) ? HeaderType::f32 : HeaderType::bf16,
                            random.one_in(3) ? Rounding::nearest : Rounding::stochastic,
                            levels_of(bits, random.one_in(2) ? Levels::even : Levels::optimal, 256)};
    const Coded coded_z = encode(kScalar, code, z.bytes(), DType::f32, seed);
    const Layout at = layout_of(code.grid, bits, code.header);
    const bool fused = cuda::project_scratch_bytes(p, code) == 0;
    Placed bytes(at.total), scratch(cuda::project_scratch_bytes(p, code));
    cuda::project_encode(p, code, from.data(), type, &seed, bytes.data(), bytes.data() + at.headers, scratch.data(), nullptr);
    ASSERT_TRUE(bytes.intact() && scratch.intact());
    Bytes expected(static_cast<size_t>(at.total), fused ? 0 : 0xa5);  // the gap is written where Z is coded on the spot
    std::copy(coded_z.codes.begin(), coded_z.codes.end(), expected.begin());
    std::copy(coded_z.headers.begin(), coded_z.headers.end(), expected.begin() + at.headers);
    ASSERT_EQ(bytes.bytes(), expected) << describe(code, type) << (fused ? ", fused" : "");
  }
}

TEST(EmulatedProject, ProductFromTheCodes) {
  Random random(112);
  for (int trial = 0; trial < 60; ++trial) {
    const int64_t lengths[] = {1, 7, 64, 500, 2001}, counts[] = {4, 40, 100, 128, 300};
    Projection p;
    p.width = trial % 2 == 0 ? 16 : 32, p.rows = random.pick(lengths), p.columns = 8 * p.width + static_cast<int>(random.below(3)),
    p.per_matrix = p.rows;
    const int64_t n = p.rows * p.width, columns = random.pick(counts), blocks[] = {p.width, 64, 256, 1024};
    const DType type = kTypes[trial % 3];
    const BlockCode code = {grid_of(n, random.pick(blocks)), random.one_in(2) ? HeaderType::f32 : HeaderType::bf16, Rounding::stochastic,
                            levels_of(2, random.one_in(2) ? Levels::even : Levels::optimal, 256)};
    SCOPED_TRACE(describe(code, type) + ", " + std::to_string(p.width) + " wide, " + std::to_string(columns) + " columns");
    ASSERT_TRUE(cuda::project_product_fits(p, code, columns));
    Floats z, v, signs(static_cast<size_t>(p.columns) * static_cast<size_t>(p.width));
    for (int64_t i = 0; i < n; ++i) z.push_back(random.normal());
    const bool poisoned = random.one_in(5);
    if (poisoned) z[static_cast<size_t>(random.below(n))] = NAN;
    for (int64_t i = 0; i < p.rows * columns; ++i) v.push_back(random.normal());
    const Bytes g = stored(v, type);
    const uint64_t seed = random.bits();
    draw_projection(p, seed, signs.data(), 0, 1);
    const Coded coded_z = encode(kScalar, code, as_type(z, DType::f32), DType::f32, seed);
    const Floats decoded = floats_of(decode(kScalar, code, coded_z, DType::f32), DType::f32);
    Placed codes(coded_z.codes), headers(coded_z.headers), from(g), out(4 * p.columns * columns),
        scratch(cuda::project_product_scratch_bytes(p, columns));
    cuda::project_product(p, code, codes.data(), headers.data(), &seed, from.data(), type, columns, out.floats(), scratch.data(), nullptr);
    ASSERT_TRUE(out.intact() && scratch.intact());
    std::vector<double> inner(static_cast<size_t>(p.width * columns)), sizes = inner;
    for (int64_t r = 0; r < p.rows; ++r) {
      for (int64_t k = 0; k < p.width; ++k) {
        for (int64_t c = 0; c < columns; ++c) {
          const double term = static_cast<double>(decoded[static_cast<size_t>(r * p.width + k)]) * load(g.data(), type, r * columns + c);
          inner[static_cast<size_t>(k * columns + c)] += term, sizes[static_cast<size_t>(k * columns + c)] += std::abs(term);
        }
      }
    }
    // At worst all rows one after the other in float32, then the width, the parts and two products.
    const double depth = static_cast<double>(p.rows + p.width + 40);
    for (int64_t d = 0; d < p.columns; ++d) {
      for (int64_t c = 0; c < columns; ++c) {
        double sum = 0, size = 0;
        for (int64_t k = 0; k < p.width; ++k) {
          const double sign = signs[static_cast<size_t>(d * p.width + k)];
          sum += sign * inner[static_cast<size_t>(k * columns + c)], size += std::abs(sign) * sizes[static_cast<size_t>(k * columns + c)];
        }
        const float found = out.floats()[d * columns + c];
        ASSERT_TRUE(is_near(found, sum, depth * kUnit * size)) << d << ", " << c << ": " << found << ", not " << sum;
      }
    }
  }
}

}  // namespace
}  // namespace satchel::test
