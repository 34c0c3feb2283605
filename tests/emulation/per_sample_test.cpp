// Bits per sample, emulated on the CPU: the bytes of the CPU's own functions.
#include "satchel/kernels/cpu/per_sample.h"

#include "satchel/kernels/cuda/per_sample.h"
#include "tests/emulation/common.h"

namespace satchel::test {
namespace {

TEST(EmulatedPerSample, BytesAreTheCpus) {
  Random random(95);
  const int64_t sizes[] = {1, 3, 7, 8, 12, 64, 100, 255, 256, 257, 264, 1000, 2048, 3000}, counts[] = {1, 2, 5, 33, 200},
                blocks[] = {64, 96, 256, 256, 512, 1024};
  for (int trial = 0; trial < 300; ++trial) {
    PerSampleCode code = {random.pick(counts),
                          random.pick(sizes),
                          random.pick(blocks),
                          0,
                          random.one_in(3) ? HeaderType::f32 : HeaderType::bf16,
                          random.one_in(3) ? Rounding::nearest : Rounding::stochastic};
    if (code.samples * code.values > 60000) code.samples = 5;
    code.budget = per_sample_budget(code.samples, 1 + random.uniform() * 7);
    const int64_t n = code.samples * code.values;
    const DType in = kTypes[trial % 3], out = random.pick(kTypes);
    SCOPED_TRACE(std::to_string(code.samples) + " x " + std::to_string(code.values) + ", block " + std::to_string(code.block) +
                 ", budget " + std::to_string(code.budget) + ", " + name_of(in) + " to " + name_of(out));
    Floats values = mixed_values(n, random), weights;
    if (random.one_in(4)) values[static_cast<size_t>(random.below(n))] = random.one_in(2) ? NAN : INFINITY;
    for (int64_t s = 0; s < code.samples; ++s) weights.push_back(random.one_in(9) ? 0.0f : std::exp(random.normal()));
    const Bytes x = stored(values, in);
    const bool weighted = random.one_in(2);
    const uint64_t seed = random.bits();

    std::vector<F32Header> ranges(static_cast<size_t>(code.samples * code.blocks()));
    std::vector<double> squares(static_cast<size_t>(code.samples));
    Bytes truth(static_cast<size_t>(code.total()));
    per_sample_measure(code, {x.data(), in}, ranges.data(), squares.data(), 0, code.samples);
    std::vector<uint32_t> entries(static_cast<size_t>(code.samples));
    per_sample_allocate(code, squares, weighted ? weights.data() : nullptr, entries.data());
    std::memcpy(truth.data() + code.entries_at(), entries.data(), 4 * entries.size());
    per_sample_encode(code, {x.data(), in}, seed, ranges.data(), truth.data(), 0, code.samples);

    Placed from(x, shift_of(in, random)), own_ranges(static_cast<int64_t>(ranges.size()) * 8), own_squares(8 * code.samples),
        bytes(code.total());
    auto* measured = reinterpret_cast<F32Header*>(own_ranges.data());
    auto* sums = reinterpret_cast<double*>(own_squares.data());
    cuda::per_sample_measure(code, from.data(), in, measured, sums, nullptr);
    ASSERT_TRUE(own_ranges.intact() && own_squares.intact());
    ASSERT_EQ(std::memcmp(own_ranges.data(), ranges.data(), ranges.size() * 8), 0) << "extremes";
    ASSERT_EQ(std::memcmp(own_squares.data(), squares.data(), squares.size() * 8), 0) << "squares";
    std::fill(sums, sums + code.samples, -1.0);
    cuda::per_sample_squares(code, measured, sums, nullptr);
    ASSERT_EQ(std::memcmp(own_squares.data(), squares.data(), squares.size() * 8), 0) << "squares of extremes";
    cuda::per_sample_allocate(code, sums, weighted ? weights.data() : nullptr, bytes.data(), nullptr);
    ASSERT_EQ(std::memcmp(bytes.data() + code.entries_at(), entries.data(), 4 * entries.size()), 0) << "entries";
    cuda::per_sample_encode(code, from.data(), in, &seed, measured, bytes.data(), nullptr);
    ASSERT_TRUE(bytes.intact());
    ASSERT_EQ(bytes.bytes(), truth);
    const int64_t first = random.below(code.samples), last = first + 1 + random.below(code.samples - first);
    Bytes decoded(static_cast<size_t>((last - first) * code.values * size_of(out)));
    per_sample_decode(code, truth.data(), decoded.data(), out, first, first, last);
    Placed to(static_cast<int64_t>(decoded.size()), shift_of(out, random));
    cuda::per_sample_decode(code, bytes.data(), to.data(), out, first, last, nullptr);
    ASSERT_TRUE(to.intact());
    ASSERT_TRUE(same(to.bytes(), decoded, out));
  }
}

}  // namespace
}  // namespace satchel::test
