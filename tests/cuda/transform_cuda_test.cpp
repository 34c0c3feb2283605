// Projections on CUDA: the same signs as on the CPU, products equal within fp32 rounding.
#include <ATen/Context.h>

#include "cuda_fixture.h"
#include "satchel/tensor/project.h"

namespace satchel {
namespace {

using reference::normal;
using reference::same;

TEST_F(Cuda, ProjectionMatricesAreTheSame) {
  for (const bool hadamard : {false, true}) {
    for (const auto& [columns, ratio] : {std::pair(int64_t{1}, 8), std::pair(int64_t{24}, 3), std::pair(int64_t{700}, 8)}) {
      const int64_t width = ceil_div(columns, ratio);
      const RandomProjection t{ratio, width, hadamard};
      const at::Tensor units = at::eye(width).repeat({5, 1});  // a unit vector times Pᵀ is a row of Pᵀ, exactly
      const at::Tensor cpu = undo_projection(units, columns, t, seed_tensor(1, at::kCPU));
      EXPECT_TRUE(same(undo_projection(units.cuda(), columns, t, seed_tensor(1, at::kCUDA)).cpu(), cpu));
    }
  }
}

TEST_F(Cuda, ProjectedRowsAreEqualWithinRounding) {
  for (const at::ScalarType type : kTypes) {
    for (const auto& [rows, columns] : {std::pair(int64_t{1}, int64_t{1}), std::pair(int64_t{300}, int64_t{128}),
                                        std::pair(int64_t{1000}, int64_t{50}), std::pair(int64_t{77}, int64_t{1000})}) {
      for (const RandomProjection& t :
           {RandomProjection{8, 0, false}, RandomProjection{8, 64, false}, RandomProjection{3, 7, true}, RandomProjection{1, 0, true}}) {
        const at::Tensor h = normal({rows, columns}, 2, type);
        const at::Tensor cpu = apply_projection(h, t, seed_tensor(3, at::kCPU));
        const at::Tensor gpu = apply_projection(h.cuda(), t, seed_tensor(3, at::kCUDA)).cpu();
        ASSERT_EQ(gpu.sizes(), cpu.sizes());
        // Two sums of `columns` products in fp32, each off by columns·2^−24 of Σ|h|/√R.
        const at::Tensor bound =
            h.to(at::kFloat).abs().sum(1, true) / std::sqrt(double(cpu.size(1))) * (2.0 * double(columns + 1) * 0x1p-24);
        EXPECT_TRUE(((gpu - cpu).abs() <= bound).all().item<bool>()) << rows << "x" << columns;
      }
    }
  }
}

TEST_F(Cuda, MisalignedMaps) {
  const at::Tensor line = normal({1 + 4 * 3 * 16 * 16}, 12);
  const at::Tensor maps = line.narrow(0, 1, 4 * 3 * 16 * 16).view({4, 3, 16, 16});  // contiguous, 4 bytes past an aligned address
  const at::Tensor there = line.cuda().narrow(0, 1, 4 * 3 * 16 * 16).view({4, 3, 16, 16});
  for (const char* text : {"division", "division,bits=3", "satchel,block=100", "actnn"}) {
    SCOPED_TRACE(text);
    const Packed cpu = pack(maps, parse_spec(text), 5), gpu = pack(there, parse_spec(text), 5);
    const int64_t coded = cpu.bytes.numel() - cpu.channels * 16;  // off means are equal within rounding only
    EXPECT_TRUE(same(gpu.bytes.cpu().narrow(0, 0, coded), cpu.bytes.narrow(0, 0, coded)));
  }
}

TEST_F(Cuda, PackedProjectionsDecodeAlike) {
  for (const at::ScalarType type : kTypes) {
    for (const char* text : {"exact", "blockwise", "blockwise,rows=64", "exact,hadamard=yes,rows=16", "exact,bits=32", "exact,project=1"}) {
      SCOPED_TRACE(text);
      const at::Tensor h = normal({500, 96}, 4, type), g = normal({500, 10}, 5);
      const CodecSpec spec = parse_spec(text);
      const at::Tensor seed = seed_tensor(6, at::kCUDA);
      const Packed gpu = pack(h.cuda(), spec, seed);
      seed.add_(1);  // a copy was kept
      const at::Tensor there = unpack(gpu).cpu().to(at::kFloat), here = unpack(moved(gpu, at::kCPU)).to(at::kFloat);
      // Sums of R ≤ 96 products of |Z|·|P| ≤ max|Ĥ|-sized numbers, and the output type's rounding.
      const double ulp = type == at::kFloat ? 0x1p-22 : type == at::kHalf ? 0x1p-10 : 0x1p-7;
      EXPECT_LE((there - here).abs().max().item<double>(), (96 * 0x1p-22 + ulp) * here.abs().max().item<double>());
      const at::Tensor a = transposed_product(gpu, g.cuda()).cpu(), b = transposed_product(moved(gpu, at::kCPU), g);
      // Sums over 500 rows and 96 columns: 600·2^−24 of Σ|Ĥ||g| times √96, as Σ|Z||P| may exceed |Ĥ| by that much.
      const double size = here.abs().max().item<double>() * g.abs().sum(0).max().item<double>() * 10;
      EXPECT_LE((a - b).abs().max().item<double>(), 600 * 0x1p-24 * size);
    }
  }
}

TEST_F(Cuda, ProductOfUnprojectedCodes) {
  for (const char* text : {"bits=2", "bits=4,block=1000", "actnn", "division", "side=one,block=100", "bits=32"}) {
    SCOPED_TRACE(text);
    const at::Tensor h = normal({3000, 96}, 7), g = normal({3000, 10}, 8);
    const Packed gpu = pack(h.cuda(), parse_spec(text), 9);
    const at::Tensor expected = unpack(gpu).cpu().to(at::kDouble).t().mm(g.to(at::kDouble));
    const at::Tensor bound = unpack(gpu).cpu().to(at::kDouble).abs().t().mm(g.to(at::kDouble).abs()) * (3000 * 0x1p-24);
    EXPECT_TRUE(((transposed_product(gpu, g.cuda()).cpu() - expected).abs() <= bound).all().item<bool>());
  }
}

/// Long tensors are decoded in stretches: they must start where blocks, samples and channels start.
TEST_F(Cuda, ProductByStretchesOfRows) {
  const at::Tensor h = normal({300000, 130}, 10).cuda(), g = normal({300000, 3}, 11).cuda();
  for (const char* text : {"bits=2", "bits=2,block=1000", "bits=2,block=map", "actnn", "division,block=row", "side=one,block=13", "exact",
                           "blockwise,rows=64"}) {
    if (!mine()) continue;
    SCOPED_TRACE(text);
    const Packed packed = pack(h, parse_spec(text), 12);
    const at::Tensor full = unpack(packed), expected = full.t().mm(g);
    // Both sums run over 300,000 rows in fp32; blocked sums stay far below 2^−12 of Σ|Ĥ||g|.
    const at::Tensor bound = full.abs().t().mm(g.abs()) * 0x1p-12;
    EXPECT_TRUE(((transposed_product(packed, g) - expected).abs() <= bound).all().item<bool>());
  }
}

}  // namespace
}  // namespace satchel
