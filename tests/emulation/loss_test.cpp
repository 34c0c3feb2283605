// The loss, and the last step of a norm's gradient, emulated on the CPU: plain loops in double, and float32 to the bit.
#include "satchel/kernels/cuda/loss.h"

#include "tests/emulation/common.h"

namespace satchel::test {
namespace {

TEST(EmulatedLoss, CrossEntropyIsTheFormula) {
  Random random(97);
  for (const int64_t classes : {1, 2, 7, 8, 9, 40, 100, 255, 256, 257, 1000}) {
    for (const int64_t rows : {1, 3, 33, 500}) {
      for (const DType type : kTypes) {
        SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(classes) + " " + name_of(type));
        Floats v;
        std::vector<int64_t> labels;
        cuda::LabelledRows r = {rows, classes, 0, random.one_in(2) ? 1.0 : 3.0};
        for (int64_t i = 0; i < rows * classes; ++i) v.push_back(random.normal() * 3);
        for (int64_t i = 0; i < rows; ++i) labels.push_back(i > 0 && random.one_in(5) ? cuda::kIgnored : random.below(classes));
        const int64_t wrong = random.one_in(5) ? random.below(rows) : -1;
        if (wrong >= 0) labels[static_cast<size_t>(wrong)] = random.one_in(2) ? classes : -1;
        for (const int64_t l : labels) r.counted += l != cuda::kIgnored ? 1 : 0;
        const Bytes x = stored(v, type);
        Placed logits(x, shift_of(type, random)), loss(4), scratch(cuda::cross_entropy_scratch_bytes());
        const bool write = !random.one_in(4);
        cuda::cross_entropy(r, logits.data(), type, labels.data(), write, loss.floats(), scratch.data(), nullptr);
        ASSERT_TRUE(logits.intact() && loss.intact() && scratch.intact());
        if (!write) {
          ASSERT_EQ(logits.bytes(), x);
        }
        const Bytes own = logits.bytes();
        // exp and log are within 2 ulp and read a difference that is off by kUnit of its size, up to 30; a thread adds up ⌈classes/32⌉
        // powers or 7, and a tree of 32 follows.
        const double relative = (30 + 4 + 13 + static_cast<double>(ceil_div(classes, 32))) * kUnit, n = static_cast<double>(r.counted);
        double sum = 0, sizes = 0;
        for (int64_t i = 0; i < rows; ++i) {
          const int64_t label = labels[static_cast<size_t>(i)];
          const auto at = [&](int64_t c) { return static_cast<double>(load(x.data(), type, i * classes + c)); };
          double most = at(0), total = 0;
          for (int64_t c = 1; c < classes; ++c) most = std::max(most, at(c));
          for (int64_t c = 0; c < classes; ++c) total += std::exp(at(c) - most);
          const bool counts = label != cuda::kIgnored, known = label >= 0 && label < classes;
          if (known) sum += std::log(total) - (at(label) - most), sizes += std::log(total) + (most - at(label)) + 1;
          if (counts && !known) sum = NAN;
          for (int64_t c = 0; write && c < classes; ++c) {
            const double p = std::exp(at(c) - most) / total, g = r.scale / n;
            const double truth = !counts ? 0 : known ? g * (p - (c == label ? 1 : 0)) : NAN;
            const float found = load(own.data(), type, i * classes + c);
            ASSERT_TRUE(is_near(found, truth, 2 * relative * g * p + 4 * kUnit * g, type))
                << "row " << i << ", class " << c << ": " << found << ", not " << truth;
          }
        }
        ASSERT_TRUE(is_near(*loss.floats(), sum / n, 2 * relative * sizes / n)) << *loss.floats() << ", not " << sum / n;
      }
    }
  }
}

TEST(EmulatedLoss, ColumnSums) {
  Random random(99);
  // One thread block and several, below one another and side by side; eight columns a thread and one; slots of every height.
  const int64_t shapes[][2] = {{1, 1},      {1, 8},     {7, 3},    {300, 40},   {3000, 47}, {1000, 8},
                               {2600, 128}, {40, 1032}, {9, 2000}, {150, 8200}, {33, 16400}};
  for (const auto& [rows, columns] : shapes) {
    for (const DType type : kTypes) {
      SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(columns) + " " + name_of(type));
      Floats v;
      for (int64_t i = 0; i < rows * columns; ++i) v.push_back(random.normal());
      const Bytes x = stored(v, type);
      Placed g(x, shift_of(type, random)), sums(columns * 4), again(columns * 4), whole(x),
          scratch(cuda::column_sums_scratch_bytes(rows, columns));
      cuda::column_sums(g.data(), type, rows, columns, sums.floats(), scratch.data(), nullptr);
      cuda::column_sums(whole.data(), type, rows, columns, again.floats(), scratch.data(), nullptr);
      ASSERT_TRUE(g.intact() && sums.intact() && scratch.intact());
      ASSERT_EQ(sums.bytes(), again.bytes()) << "at another address";
      for (int64_t c = 0; c < columns; ++c) {
        double sum = 0, sizes = 0;
        for (int64_t r = 0; r < rows; ++r) {
          const double own = static_cast<double>(load(x.data(), type, r * columns + c));
          sum += own, sizes += std::abs(own);
        }
        // Every addition of a sum is off by kUnit of what it has come to: at most one a row.
        ASSERT_TRUE(is_near(sums.floats()[c], sum, static_cast<double>(std::min<int64_t>(rows, 1000)) * kUnit * sizes)) << "column " << c;
      }
    }
  }
}

TEST(EmulatedLoss, ScaleAndNormRows) {
  Random random(98);
  const int64_t counts[] = {1, 3, 8, 24, 100};
  for (int trial = 0; trial < 120; ++trial) {
    const DType type = kTypes[trial % 3];
    const int64_t channels = random.pick(counts), rows = 1 + random.below(trial % 10 == 0 ? 400 : 40), n = rows * channels;
    SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(channels) + " " + name_of(type));
    const Bytes g = stored(mixed_values(n, random), type), x = stored(mixed_values(n, random), type);
    Floats scale, along, offset, scaled, line;
    for (int64_t c = 0; c < channels; ++c)
      scale.push_back(random.normal()), along.push_back(random.normal()), offset.push_back(random.normal());
    const float factor = random.one_in(4) ? 1.0f : random.normal();
    for (int64_t i = 0; i < n; ++i) {
      const size_t c = static_cast<size_t>(i % channels);
      scaled.push_back(load(g.data(), type, i) * factor);
      line.push_back(std::fma(scale[c], load(g.data(), type, i), std::fma(along[c], load(x.data(), type, i), offset[c])));
    }
    Placed values(g, shift_of(type, random));
    cuda::scale(values.data(), type, n, &factor, nullptr);
    ASSERT_TRUE(values.intact());
    ASSERT_TRUE(same(values.bytes(), factor == 1.0f ? g : stored(scaled, type), type));
    Placed to(g, shift_of(type, random)), beside(x, shift_of(type, random));
    Placed a(as_type(scale, DType::f32)), b(as_type(along, DType::f32), random.one_in(3) ? 4 : 0), c(as_type(offset, DType::f32));
    cuda::norm_rows_back(to.data(), beside.data(), type, rows, channels, {a.floats(), b.floats(), c.floats()}, nullptr);
    ASSERT_TRUE(to.intact() && beside.intact());
    ASSERT_TRUE(same(to.bytes(), stored(line, type), type));
  }
}

}  // namespace
}  // namespace satchel::test
