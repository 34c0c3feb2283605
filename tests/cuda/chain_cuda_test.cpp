// Affine, activation and dropout on CUDA: the bits of the CPU.
#include "cuda_fixture.h"
#include "satchel/tensor/chain.h"

namespace satchel {
namespace {

using reference::normal;
using reference::same;

const at::Tensor kNone;

at::Tensor there(const at::Tensor& t) { return t.defined() ? t.cuda() : t; }

/// Forward, backward, in place, and the bits, on both devices.
void compare(const at::Tensor& x, const at::Tensor& gamma, const at::Tensor& beta, const at::Tensor& on, const ChainOptions& options,
             int64_t origin) {
  const at::Tensor seed = seed_tensor(51, at::kCPU), seed_there = seed_tensor(51, at::kCUDA);
  const at::Tensor gpu_x = x.cuda(), gpu_on = there(on);
  const at::Tensor z = apply_chain(x, gamma, beta, on, seed, options, origin), back = chain_gradient(x, on, seed, options, origin);
  EXPECT_TRUE(same(apply_chain(gpu_x, there(gamma), there(beta), gpu_on, seed_there, options, origin).cpu(), z));
  EXPECT_TRUE(same(chain_gradient(gpu_x, gpu_on, seed_there, options, origin).cpu(), back));
  EXPECT_TRUE(same(on_bits(gpu_x, there(gamma), there(beta)).cpu(), on_bits(x, gamma, beta)));
  chain_gradient_(gpu_x, gpu_on, seed_there, options, origin);
  EXPECT_TRUE(same(gpu_x.cpu(), back));
}

TEST_F(Cuda, ChainGivesTheBitsOfTheCpu) {
  for (const int64_t rows : {0, 1, 5, 63, 1000}) {
    for (const int64_t channels : {1, 3, 8, 40, 100, 128, 1000}) {
      for (const double dropout : {0.0, 0.25, 0.9}) {
        for (const double slope : {0.0, 0.1, 1.0}) {
          for (const bool affine : {false, true}) {
            for (const int64_t origin : {int64_t{0}, 8 * channels, int64_t{1} << 40}) {
              if (!mine()) continue;
              SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(channels) + ", origin " + std::to_string(origin));
              const at::Tensor x = normal({rows, channels}, 52);
              const at::Tensor gamma = affine ? normal({channels}, 53) : kNone, beta = affine ? normal({channels}, 54) : kNone;
              const at::Tensor on = slope > 0 ? on_bits(normal({rows, channels}, 55), kNone, kNone) : kNone;
              compare(x, gamma, beta, on, {dropout, slope}, origin);
            }
          }
        }
      }
    }
  }
}

TEST_F(Cuda, ChainOfMisalignedRows) {
  const at::Tensor line = normal({1 + 300 * 48}, 56), affine = normal({1 + 48}, 57);
  const auto rows = [](const at::Tensor& t) { return t.narrow(0, 1, 300 * 48).view({300, 48}); };
  const at::Tensor gamma = affine.narrow(0, 1, 48), gpu_gamma = affine.cuda().narrow(0, 1, 48);
  const at::Tensor seed = seed_tensor(58, at::kCPU), seed_there = seed_tensor(58, at::kCUDA);
  const at::Tensor cpu = apply_chain(rows(line), gamma, gamma, kNone, seed, {0.5, 0.2});
  EXPECT_TRUE(same(apply_chain(rows(line.cuda()), gpu_gamma, gpu_gamma, kNone, seed_there, {0.5, 0.2}).cpu(), cpu));
  EXPECT_TRUE(same(apply_chain(rows(line.cuda()).clone(), gpu_gamma, gpu_gamma, kNone, seed_there, {0.5, 0.2}).cpu(), cpu));
  EXPECT_TRUE(
      same(chain_gradient(rows(line.cuda()), kNone, seed_there, {0.5, 0}).cpu(), chain_gradient(rows(line), kNone, seed, {0.5, 0})));
  EXPECT_TRUE(same(on_bits(rows(line.cuda()), gpu_gamma, gpu_gamma).cpu(), on_bits(rows(line), gamma, gamma)));
}

TEST_F(Cuda, SideCodesRememberWhatWasOn) {
  for (const char* text : {"satchel", "side=one,bits=3", "side=both,bits=2", "side=both,bits=3", "side=both,bits=4"}) {
    for (const int64_t rows : {0, 1, 5, 64, 2001}) {
      const at::Tensor x = normal({rows, 50}, 59), gamma = normal({50}, 60), beta = normal({50}, 61);
      const Packed packed = pack_side(x.cuda(), parse_spec(text), seed_tensor(62, at::kCUDA), gamma.cuda(), beta.cuda());
      EXPECT_TRUE(same(on_bits(packed).cpu(), on_bits(x, gamma, beta))) << text << ", " << rows << " rows";
    }
  }
}

TEST_F(Cuda, ChainShowsWhatIsNotANumber) {
  at::Tensor x = normal({64, 64}, 63);
  x[3][4] = std::numeric_limits<float>::quiet_NaN();
  x[5][6] = std::numeric_limits<float>::infinity();
  const at::Tensor z = apply_chain(x.cuda(), kNone, kNone, kNone, seed_tensor(64, at::kCUDA), {0.9, 0}).cpu();
  EXPECT_EQ(at::isfinite(z).logical_not().sum().item<int64_t>(), 2);
}

}  // namespace
}  // namespace satchel
