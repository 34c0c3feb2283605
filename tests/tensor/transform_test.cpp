// Projections and the low-pass: what they compute, and the product that never leaves the reduced space.
#include <ATen/Parallel.h>

#include "reference.h"
#include "satchel/tensor/project.h"

namespace satchel {
namespace {

using reference::normal;

/// P of every matrix, count × columns × width: undoing unit vectors gives Pᵀ.
at::Tensor matrices(int64_t count, int64_t columns, RandomProjection t, const at::Tensor& seed) {
  const int64_t width = ceil_div(columns, t.ratio);
  t.rows = width;  // as many rows as unit vectors
  const at::Tensor units = at::eye(width).repeat({count, 1});
  return undo_projection(units, columns, t, seed).view({count, width, columns}).transpose(1, 2);
}

TEST(Projection, EntriesAreTheCountersSigns) {
  const at::Tensor seed = seed_tensor(123456789012345, at::kCPU);
  for (const bool hadamard : {false, true}) {
    const at::Tensor p = matrices(3, 20, {.ratio = 4, .hadamard = hadamard}, seed);
    const Projection shape{15, 20, 5, 5, hadamard};
    for (int64_t m = 0; m < 3; ++m) {
      for (int d = 0; d < 20; ++d) {
        for (int r = 0; r < 5; ++r) {
          const float sign = is_negative(shape, 123456789012345, m, d, r) ? -1.0f : 1.0f;
          ASSERT_EQ(p[m][d][r].item<float>(), sign / std::sqrt(5.0f)) << m << " " << d << " " << r;
        }
      }
    }
  }
}

struct Sizes {
  int64_t rows, columns;
  int ratio;
  int64_t per_matrix;
};
constexpr Sizes kSizes[] = {{1, 1, 8, 0},   {5, 7, 8, 0},      {100, 128, 8, 0},  {100, 128, 8, 64}, {130, 24, 3, 64},   {37, 16, 1, 5},
                            {9, 100, 7, 1}, {64, 64, 4, 1000}, {50000, 33, 8, 0}, {3000, 256, 8, 7}, {2000, 700, 2, 999}};

TEST(Projection, ApplyAndUndoAreTheMatrixProducts) {
  const at::Tensor seed = seed_tensor(5, at::kCPU);
  for (const Sizes& s : kSizes) {
    for (const bool hadamard : {false, true}) {
      const RandomProjection t{s.ratio, s.per_matrix, hadamard};
      const Projection shape = projection_of(s.rows, s.columns, t);
      const at::Tensor p = matrices(shape.matrices(), s.columns, t, seed).to(at::kDouble), h = normal({s.rows, s.columns}, 6);
      const at::Tensor z = apply_projection(h, t, seed), back = undo_projection(z, s.columns, t, seed);
      const int64_t per = shape.per_matrix;
      for (int64_t m = 0; m < std::min<int64_t>(shape.matrices(), 40); ++m) {
        const at::Tensor rows = h.slice(0, m * per, (m + 1) * per).to(at::kDouble);
        const at::Tensor zm = z.slice(0, m * per, (m + 1) * per), bm = back.slice(0, m * per, (m + 1) * per);
        // A sum of n products in fp32 is off by at most n·2^−24 of the sum of their sizes (and one rounding of 1/√R).
        const double e = 0x1p-24;
        const at::Tensor zb = rows.abs().mm(p[m].abs()) * (double(s.columns) + 1) * e;
        EXPECT_TRUE(((zm - rows.mm(p[m])).abs() <= zb).all().item<bool>()) << s.rows << " " << s.columns;
        const at::Tensor zd = zm.to(at::kDouble);
        const at::Tensor bb = zd.abs().mm(p[m].abs().t()) * (double(shape.width) + 1) * e;
        EXPECT_TRUE(((bm - zd.mm(p[m].t())).abs() <= bb).all().item<bool>()) << s.rows << " " << s.columns;
      }
    }
  }
}

TEST(Projection, PackCodesZ) {
  const at::Tensor seed = seed_tensor(7, at::kCPU);
  for (const at::ScalarType type : {at::kFloat, at::kHalf, at::kBFloat16}) {
    const at::Tensor h = normal({3, 40, 64}, 8, type);
    for (const char* text :
         {"exact", "blockwise", "exact,rows=16", "exact,hadamard=yes,block=100", "exact,block=map", "exact,sample=yes,block=100"}) {
      SCOPED_TRACE(text);
      const CodecSpec spec = parse_spec(text);
      const at::Tensor z = apply_projection(h, std::get<RandomProjection>(spec.transform), seed);
      ASSERT_EQ(z.sizes(), at::IntArrayRef({3, 40, 8}));
      const int64_t span = spec.per_sample ? 320 : 960;
      const int64_t block = spec.block == kMap ? 8 : std::min(span, spec.block < 0 ? -spec.block * 8 : spec.block);
      const Packed packed = pack(h, spec, seed);
      reference::expect_bytes(packed.bytes, reference::block_bytes(z.view({-1}), block, span, spec, 7));
      // Without quantisation Z is kept in fp32.
      CodecSpec keep = spec;
      keep.bits = kKeep;
      EXPECT_EQ(reference::bytes_of(pack(h, keep, seed).bytes), reference::bytes_of(z));
      const at::Tensor undone = undo_projection(z, 64, std::get<RandomProjection>(spec.transform), seed).to(type);
      EXPECT_TRUE(reference::same(unpack(pack(h, keep, seed)), undone));
    }
  }
}

/// Groups of matrices start at rows whose codes start inside a byte: 12 rows of 351 values.
TEST(Projection, StretchesOfCodedRowsMayStartAnywhere) {
  const at::Tensor h = normal({50, 701}, 8), seed = seed_tensor(9, at::kCPU);
  const CodecSpec spec = parse_spec("exact,project=2,rows=3,bits=3,block=100");
  CodecSpec plain = spec;
  plain.transform = Identity{};
  const auto& transform = std::get<RandomProjection>(spec.transform);
  const at::Tensor z = unpack(pack(apply_projection(h, transform, seed), plain, seed));
  EXPECT_TRUE(reference::same(unpack(pack(h, spec, seed)), undo_projection(z, 701, transform, seed)));
}

TEST(Projection, HalfPrecisionSaturates) {
  const at::Tensor h = at::full({4, 16}, 60000, at::kHalf);
  const at::Tensor back = unpack(pack(h, parse_spec("exact,bits=32"), 3));
  EXPECT_TRUE(back.isfinite().all().item<bool>());
  EXPECT_EQ(back.abs().max().item<float>(), 65504.0f);
}

TEST(TransposedProduct, EqualsTheDecodedProduct) {
  const at::Tensor seed = seed_tensor(9, at::kCPU);
  for (const char* text : {"exact", "exact,bits=32", "blockwise,rows=64", "exact,rows=3,project=1", "exact,hadamard=yes,rows=10", "bits=2",
                           "bits=32", "bits=3,block=row", "bits=2,block=4097", "actnn", "division", "side=one", "division,block=100"}) {
    for (const auto& shape : std::vector<std::vector<int64_t>>{{200, 24}, {1, 1}, {7, 5, 24}, {3000, 130}, {9}, {0, 4}, {4, 0}}) {
      SCOPED_TRACE(std::string(text) + " " + c10::str(at::IntArrayRef(shape)));
      const at::Tensor h = normal(shape, 10);
      auto g_shape = shape;
      g_shape.back() = 11;
      const at::Tensor g = normal(g_shape, 11);
      const Packed packed = pack(h, parse_spec(text), seed);
      const at::Tensor got = transposed_product(packed, g), full = unpack(packed);
      const int64_t rows = g.numel() / 11, columns = shape.back();
      const at::Tensor expected = full.to(at::kDouble).reshape({rows, columns}).t().mm(g.to(at::kDouble).reshape({rows, 11}));
      ASSERT_EQ(got.sizes(), expected.sizes());
      if (h.numel() == 0) continue;
      // Sums of `rows` and of R ≤ columns products, of |Ĥ| ≤ √R·max|Z| and |Z| ≤ ‖h‖·√(columns/R)·2 (quantised: at most doubled):
      // each is off by its length times 2^−24 of the sum of sizes. Without a projection sizes are |Ĥ| itself: smaller still.
      const double size =
          2 * std::sqrt(double(columns)) * h.reshape({rows, columns}).norm(2, {1}).max().item<double>() + full.abs().max().item<double>();
      const double bound = double(rows + columns) * 0x1p-24 * size * g.reshape({rows, 11}).abs().sum(0).max().item<double>();
      EXPECT_LE((got - expected).abs().max().item<double>(), bound);
      EXPECT_LE(bound, 2e-3 * double(rows) * std::max(1.0, double(columns)));  // the bound itself says something
    }
  }
}

TEST(TransposedProduct, TakesHalfPrecisionAndAnyStrides) {
  const at::Tensor h = normal({64, 32}, 12, at::kBFloat16), g = normal({16, 64}, 13, at::kHalf).t();
  for (const char* text : {"exact", "bits=4", "exact,rows=16"}) {
    const Packed packed = pack(h, parse_spec(text), 1);
    const at::Tensor got = transposed_product(packed, g);
    EXPECT_EQ(got.scalar_type(), at::kFloat);
    // unpack rounds to bf16 (2^−8 of each value), the product does not.
    const at::Tensor full = unpack(packed).to(at::kFloat), bound = full.abs().t().mm(g.to(at::kFloat).abs()) * 0x1p-7;
    EXPECT_TRUE(((got - full.t().mm(g.to(at::kFloat))).abs() <= bound).all().item<bool>()) << text;
  }
  const at::Tensor columns = normal({32, 64}, 14).t();  // packed as it lies in memory
  const Packed packed = pack(columns, parse_spec("bits=4,block=50"), 1);
  const at::Tensor g32 = g.to(at::kFloat);
  EXPECT_TRUE(at::allclose(transposed_product(packed, g32), unpack(packed).t().mm(g32), 1e-5, 1e-4));
}

/// Means and rest by torch's own pooling; the rest's code by the reference.
void check_low_pass(const at::Tensor& x, const at::Tensor& pooled, const at::Tensor& up_of_ones, int64_t block, const CodecSpec& spec,
                    const std::function<at::Tensor(const at::Tensor&)>& upsample) {
  const Packed packed = pack(x, spec, 21);
  const int64_t count = pooled.numel();
  const at::Tensor means = packed.bytes.narrow(0, packed.bytes.numel() - 2 * count, 2 * count).clone().view(at::kBFloat16);
  // The fixed tree of sums and torch's order differ by fp32 rounding, which may cross one bf16 rounding: 2^−8 of the mean, and
  // 2^−20 of the window's size where it cancels.
  const at::Tensor off = (means.to(at::kFloat) - pooled.reshape({-1})).abs();
  EXPECT_TRUE((off <= pooled.reshape({-1}).abs() * 0x1.01p-8 + x.abs().max() * 0x1p-20).all().item<bool>());
  const at::Tensor up = upsample(means.to(at::kFloat).view(pooled.sizes()));
  ASSERT_EQ(up.sizes(), up_of_ones.sizes());
  const at::Tensor rest = (x.to(at::kFloat).view(up.sizes()) - up).reshape({-1});
  reference::expect_starts_with(packed.bytes, reference::block_bytes(rest, block, rest.numel(), spec, 21));
  // Decoding adds the very means again: at full bits the error is the rest's alone.
  const at::Tensor back = unpack(packed);
  EXPECT_EQ(back.sizes(), x.sizes());
  EXPECT_LE((back - x).abs().max().item<float>(), rest.max().item<float>() - rest.min().item<float>());
}

at::Tensor grow(at::Tensor means, at::IntArrayRef sizes, int64_t window, int64_t first) {
  for (int64_t d = first; d < means.dim(); ++d) {
    means = means.repeat_interleave(window, d).narrow(d, 0, sizes[static_cast<size_t>(d)]);
  }
  return means;
}

TEST(LowPass, BytesAreThePooledMeansAndTheRestsCode) {
  for (const char* text : {"division", "division,lowpass=3", "division,lowpass=64", "division,block=100,bits=4"}) {
    SCOPED_TRACE(text);
    const CodecSpec spec = parse_spec(text);
    const int64_t b = std::get<LowPass>(spec.transform).size;
    const auto window = [&](int64_t n) { return std::min(b, n); };
    const at::Tensor x4 = normal({2, 3, 17, 20}, 22) + 2;
    const at::Tensor p4 = at::avg_pool2d(x4, {window(17), window(20)}, {}, 0, true, false);
    check_low_pass(x4, p4, x4, spec.block == kMap ? 340 : 100, spec, [&](const at::Tensor& m) { return grow(m, x4.sizes(), b, 2); });
    const at::Tensor x5 = normal({1, 3, 5, 9, 6}, 23);
    const at::Tensor p5 = at::avg_pool3d(x5, {window(5), window(9), window(6)}, {}, 0, true, false);
    check_low_pass(x5, p5, x5, spec.block == kMap ? 270 : 100, spec, [&](const at::Tensor& m) { return grow(m, x5.sizes(), b, 2); });
    for (const auto& shape : std::vector<std::vector<int64_t>>{{2, 3, 50}, {6, 50}, {300}}) {
      const at::Tensor x = normal(shape, 24) - 1;
      const at::Tensor lines = x.reshape({1, -1, shape.back()});
      const at::Tensor p = at::avg_pool2d(lines, {1, window(shape.back())}, {}, 0, true, false);
      check_low_pass(x, p, lines, spec.block == kMap ? shape.back() : 100, spec,
                     [&](const at::Tensor& m) { return grow(m, lines.sizes(), b, 2); });
    }
  }
}

TEST(LowPass, OneValueMapsPassThrough) {
  for (const at::ScalarType type : {at::kFloat, at::kHalf}) {
    for (const auto& shape : std::vector<std::vector<int64_t>>{{}, {1}, {7, 1}, {2, 3, 1}, {4, 5, 1, 1}, {2, 2, 1, 1, 1}}) {
      const at::Tensor x = normal(shape, 25, type);
      EXPECT_TRUE(reference::same(unpack(pack(x, parse_spec("division"), 1)), x));
    }
  }
}

TEST(LowPass, MapsAndBlocksThatSeldomMeet) {
  // 1031² values a map and blocks of 1000: 8·1031²·125 values until both start together.
  const at::Tensor x = normal({2, 1, 1031, 1031}, 26);
  const CodecSpec spec = parse_spec("division,block=1000");
  const at::Tensor pooled = at::avg_pool2d(x, {8, 8}, {}, 0, true, false);
  check_low_pass(x, pooled, x, 1000, spec, [&](const at::Tensor& m) { return grow(m, x.sizes(), 8, 2); });
}

}  // namespace
}  // namespace satchel
