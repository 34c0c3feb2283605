// The fused loss: what doubles give, within fp32 rounding, in the logits' own memory and nowhere else.
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <limits>

#include "cuda_fixture.h"
#include "satchel/autograd/loss.h"
#include "satchel/tensor/epilogue.h"
#include "satchel/tensor/loss.h"

namespace satchel {
namespace {

using reference::normal;
using reference::same;

constexpr double kUnit = 0x1p-24;  // half an ulp of 1: what one fp32 operation may be off by, relatively
constexpr int64_t kGuard = 64;     // values around the logits that must stay

/// Logits on the device, `shift` values past an aligned address, with guards before and after.
struct Guarded {
  at::Tensor line, logits;

  Guarded(const at::Tensor& values, int64_t shift)
      : line(at::full({values.numel() + 2 * kGuard + shift}, 7, values.options().device(at::kCUDA))),
        logits(line.narrow(0, kGuard + shift, values.numel()).view(values.sizes()).copy_(values)) {}

  bool intact() const {
    const int64_t before = logits.storage_offset(), after = before + logits.numel();
    return line.narrow(0, 0, before).eq(7).all().item<bool>() && line.narrow(0, after, line.numel() - after).eq(7).all().item<bool>();
  }
};

at::Tensor labels_for(int64_t rows, int64_t classes, int64_t count_one_of) {
  at::manual_seed(static_cast<uint64_t>(rows * 1000 + classes));
  const at::Tensor labels = at::randint(0, classes, {rows}, at::kLong);
  return labels.masked_fill(at::arange(rows).remainder(count_one_of).ne(0), kIgnored).cuda();
}

/// Mean loss and gradient in double, and the bounds of what fp32 may be off by.
struct Expected {
  double loss = 0, loss_bound = 0;
  at::Tensor gradient, bound;

  Expected(const at::Tensor& logits, const at::Tensor& labels) {
    const double classes = static_cast<double>(logits.size(1));
    const at::Tensor x = logits.cuda().to(at::kDouble), counts = labels.ne(kIgnored);
    const double share = 1 / static_cast<double>(counts.sum().item<int64_t>());
    const at::Tensor log = at::log_softmax(x, 1), picked = labels.clamp_min(0).unsqueeze(1), p = log.exp();
    const at::Tensor rows = log.gather(1, picked).neg().squeeze(1).masked_fill(counts.logical_not(), 0);
    loss = rows.sum().item<double>() * share;
    gradient = p.scatter_add(1, picked, at::full_like(picked, -1, at::kDouble)) * share;
    gradient.masked_fill_(counts.logical_not().unsqueeze(1), 0);
    // d = x − max is rounded, so e^d is off by |d| and expf's own 2 units; a sum of them by the most of that and one a term a thread
    // adds (6 and 1, or a 32nd of the classes) and the tree of 5; share, its quotient by the sum, the product: 1 each and 1 for 2nd order.
    const at::Tensor depth = std::get<0>(x.max(1, true)) - std::get<0>(x.min(1, true));
    const double terms = 8 + classes / 32 + 5;
    bound = (p * (depth * 2 + terms + 8) + 2) * (share * kUnit);
    // The logarithm takes over the sum's relative error and has 2 units of its own; d and the difference are rounded.
    const double deepest = depth.max().item<double>();
    loss_bound = (3 * deepest + 3 * std::log(classes) + terms + 6) * kUnit;
  }
};

/// What one rounding to the type adds.
at::Tensor rounding_of(const at::Tensor& exact, at::ScalarType type) {
  if (type == at::kFloat) return at::zeros_like(exact);
  return exact.abs() * (type == at::kHalf ? 0x1.01p-11 : 0x1.01p-8) + (type == at::kHalf ? 0x1p-25 : 0.0);
}

void expect_loss(int64_t rows, int64_t classes, int64_t count_one_of, at::ScalarType type, int64_t shift) {
  SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(classes) + ", one row of " + std::to_string(count_one_of) + " counts, " +
               c10::toString(type) + ", shift " + std::to_string(shift));
  const at::Tensor values = (normal({rows, classes}, 91) * 3 + 5).to(type), labels = labels_for(rows, classes, count_one_of);
  const int64_t counted = labels.ne(kIgnored).sum().item<int64_t>();
  const Expected expected(values, labels);
  const Guarded own(values, shift), again(values, shift), kept(values, shift);
  const at::Tensor loss = cross_entropy_rows_(own.logits, labels, counted, true);
  EXPECT_NEAR(loss.item<double>(), expected.loss, expected.loss_bound);
  const at::Tensor off = (own.logits.to(at::kDouble) - expected.gradient).abs(),
                   most = expected.bound + rounding_of(expected.gradient, type);
  EXPECT_TRUE((off <= most).all().item<bool>()) << (off / most).max().item<double>() << " of the bound";
  EXPECT_TRUE(own.logits.masked_select(labels.eq(kIgnored).unsqueeze(1)).eq(0).all().item<bool>());
  EXPECT_TRUE(own.intact());
  EXPECT_TRUE(same(cross_entropy_rows_(again.logits, labels, counted, true), loss)) << "a second time";
  EXPECT_TRUE(same(again.logits.contiguous(), own.logits.contiguous())) << "a second time";
  EXPECT_TRUE(same(cross_entropy_rows_(kept.logits, labels, counted, false), loss)) << "without a gradient";
  EXPECT_TRUE(same(kept.logits.cpu().contiguous(), values)) << "without a gradient";
}

TEST_F(Cuda, LossEqualsDoubles) {
  // Teams of 1, 2, 4 … 32 threads, full and not; more classes than registers hold; part and all of a thread block's rows.
  for (const int64_t classes : {1, 2, 7, 8, 9, 40, 47, 64, 65, 128, 172, 256, 257, 1000, 4099}) {
    for (const int64_t rows : {1, 2, 31, 32, 33, 513}) expect_loss(rows, classes, rows > 2 ? 3 : 1, at::kFloat, (rows + classes) % 4);
  }
}

TEST_F(Cuda, LossOfManyRowsEqualsDoubles) {
  for (const int64_t classes : {3, 40, 300}) expect_loss(100003, classes, 2, at::kFloat, 0);  // several rounds of 1056 thread blocks
}

TEST_F(Cuda, LossOfHalfWidthLogits) {
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    for (const int64_t classes : {5, 40, 300}) expect_loss(333, classes, 2, type, classes % 2);
  }
}

TEST_F(Cuda, LossScalesItsGradientExactly) {
  for (const int64_t classes : {5, 40, 300}) {
    if (!mine()) continue;
    const at::Tensor values = normal({3001, classes}, 92), labels = labels_for(3001, classes, 2);
    const int64_t counted = labels.ne(kIgnored).sum().item<int64_t>();
    const at::Tensor plain = values.cuda(), scaled = values.cuda(), half = values.to(at::kHalf).cuda(), wide = half.to(at::kFloat);
    const at::Tensor loss = cross_entropy_rows_(plain, labels, counted, true);
    EXPECT_TRUE(same(cross_entropy_rows_(scaled, labels, counted, true, 1024), loss));
    EXPECT_TRUE(same(scaled, plain * 1024));
    // Of float16 logits: float32's gradient of the same numbers, rounded once.
    cross_entropy_rows_(half, labels, counted, true, 1024);
    cross_entropy_rows_(wide, labels, counted, true, 1024);
    EXPECT_TRUE(same(half, wide.to(at::kHalf)));
  }
}

TEST_F(Cuda, LossShowsWhatIsNotANumberWhereItCounts) {
  const at::Tensor labels = labels_for(100, 40, 2);  // even rows count
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    const at::Tensor values = normal({100, 40}, 92);
    values[8][39] = bad;
    const Guarded counted(values, 0);
    EXPECT_TRUE(cross_entropy_rows_(counted.logits, labels, 50, true).isnan().item<bool>());
    EXPECT_TRUE(at::equal(counted.logits.isnan().all(1), at::arange(100, labels.options()).eq(8)));
    EXPECT_TRUE(at::equal(counted.logits.isnan().any(1), at::arange(100, labels.options()).eq(8))) << "its row alone";
    values[8][39] = 0, values[9][39] = bad;
    const Guarded other(values, 0);
    EXPECT_TRUE(cross_entropy_rows_(other.logits, labels, 50, true).isfinite().item<bool>());
    EXPECT_TRUE(other.logits.isfinite().all().item<bool>());
  }
  at::Tensor low = normal({100, 40}, 92);
  low[8].fill_(-std::numeric_limits<float>::infinity());
  low[8][3] = 0;
  const at::Tensor sure = labels.clone();
  sure[8] = 3;
  const Guarded certain(low, 0);
  EXPECT_TRUE(cross_entropy_rows_(certain.logits, sure, 50, true).isfinite().item<bool>()) << "a class without a chance is none";
  EXPECT_TRUE(certain.logits[8].eq(0).all().item<bool>());
}

TEST_F(Cuda, LossOfALabelOutOfRangeIsNaNAndStaysInBounds) {
  for (const int64_t classes : {40, 300}) {
    for (const int64_t bad : {classes, int64_t{-1}, int64_t{-101}, int64_t{1} << 40, std::numeric_limits<int64_t>::min()}) {
      const at::Tensor labels = labels_for(66, classes, 2);
      labels[64] = bad;
      const Guarded own(normal({66, classes}, 93), 0);
      EXPECT_TRUE(cross_entropy_rows_(own.logits, labels, 33, true).isnan().item<bool>()) << bad;
      EXPECT_TRUE(at::equal(own.logits.isnan().all(1), at::arange(66, labels.options()).eq(64))) << bad;
      EXPECT_TRUE(own.logits.narrow(0, 0, 64).isfinite().all().item<bool>());
      EXPECT_TRUE(own.intact()) << bad;
    }
  }
}

TEST_F(Cuda, ColumnSumsEqualDoubles) {
  // One thread block and all of them; eight columns a thread and one; more columns than a thread block has threads for.
  const int64_t shapes[][2] = {{1, 1}, {7, 40}, {100003, 40}, {100003, 47}, {30011, 128}, {513, 4096}, {64, 9000}, {40, 1031}};
  for (const auto& [rows, columns] : shapes) {
    for (const at::ScalarType type : kTypes) {
      if (!mine()) continue;
      SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(columns) + ", " + c10::toString(type));
      const Guarded own(normal({rows, columns}, 96).to(type), columns % 3);
      ASSERT_TRUE(sums_columns(own.logits));
      const at::Tensor sums = sum_columns(own.logits), wide = own.logits.to(at::kDouble);
      // A sum is off by kUnit of what it has come to at every addition: up to 40 of a thread's rows, 10 of its thread block's slots, 4 and
      // 31 of the parts.
      const at::Tensor off = (sums.to(at::kDouble) - wide.sum(0)).abs(), most = wide.abs().sum(0) * (85 * kUnit);
      EXPECT_TRUE((off <= most).all().item<bool>()) << (off / most).max().item<double>() << " of the bound";
      EXPECT_TRUE(same(sum_columns(own.logits), sums)) << "a second time";
      EXPECT_TRUE(same(sum_columns(own.logits.clone()), sums)) << "at another address";
    }
  }
  EXPECT_FALSE(sums_columns(at::ones({4, 4}, at::kCUDA).t().narrow(0, 0, 2))) << "with gaps";
}

TEST_F(Cuda, ScaleMultipliesAndSparesAFactorOfOne) {
  for (const at::ScalarType type : kTypes) {
    for (const int64_t values : {0, 1, 3, 4, 5, 1023, 1024, 1025, 3000001}) {
      for (const float factor : {1.0f, 2.0f, 0.0f, -0.3f, std::numeric_limits<float>::quiet_NaN()}) {
        const Guarded own(normal({values, 1}, 94).to(type), values % 3);
        const at::Tensor before = own.logits.clone(), number = at::full({}, factor, own.logits.options().dtype(at::kFloat));
        scale_(own.logits, number);
        const at::Tensor want = (before.to(at::kFloat) * number).to(type);
        EXPECT_TRUE(at::equal(at::nan_to_num(own.logits, 99), at::nan_to_num(want, 99))) << type << values << " times " << factor;
        EXPECT_TRUE(own.intact());
      }
    }
  }
  const at::Tensor whole = at::ones({4, 4}, at::kCUDA), factor = at::full({}, 3.0f, at::kCUDA);
  const auto version = whole._version();
  scale_(whole, factor);
  EXPECT_GT(whole._version(), version);
  scale_(whole.narrow(1, 0, 2), factor);  // not gapless
  EXPECT_EQ(whole.sum().item<double>(), 8 * 3 + 8 * 9);
}

TEST_F(Cuda, MaskedLossEqualsTorchThroughBackward) {
  at::manual_seed(5);
  const at::Tensor x = normal({5000, 40}, 95).cuda().requires_grad_();
  const MaskedLabels masked = masked_labels(at::randint(0, 40, {5000}, at::kLong).cuda(), at::randperm(5000).narrow(0, 0, 2700).cuda());
  EXPECT_EQ(masked.rows, 2700);
  const at::Tensor expected = at::cross_entropy_loss(x * 1, masked.labels), want = torch::autograd::grad({expected}, {x})[0];
  const at::Tensor logits = x * 1, loss = cross_entropy_(logits, masked);
  EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-6);
  EXPECT_TRUE(at::allclose(logits.detach(), want, 1e-5, 1e-9));
  const at::Tensor two = at::full({}, 2.0f, x.options().requires_grad(false));
  EXPECT_TRUE(at::allclose(torch::autograd::grad({loss}, {x}, {two}, /*retain_graph=*/true)[0], want * 2, 1e-5, 1e-9));
  EXPECT_TRUE(at::allclose(torch::autograd::grad({loss}, {x}, {two})[0], want * 2, 1e-5, 1e-9));
  const at::Tensor others = x * 1;
  cross_entropy_(others, masked).backward();
  EXPECT_TRUE(at::allclose(x.grad(), want, 1e-5, 1e-9));
  const at::Tensor twice = x * 1, both = cross_entropy_(twice, masked) + cross_entropy_(twice, masked);
  EXPECT_THROW(torch::autograd::grad({both}, {x}), Error);
  const at::Tensor columns = (x * 1).t().contiguous().t();
  EXPECT_TRUE(at::allclose(torch::autograd::grad({cross_entropy_(columns, masked)}, {x})[0], want, 1e-5, 1e-9)) << "other strides";
  EXPECT_THROW(cross_entropy_(x * 1, masked_labels(at::zeros({5000}, at::kLong))), Error) << "labels elsewhere";
}

}  // namespace
}  // namespace satchel
