// Projected saves of usual width: codes made and multiplied in one pass, the bytes of two and products within fp32 rounding.
#include <cmath>
#include <initializer_list>
#include <string>

#include "cuda_fixture.h"
#include "satchel/kernels/cuda/project_product.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/project.h"

namespace satchel {
namespace {

using reference::normal;
using reference::same;

/// Z by itself and its block code: what pack() of a projection must keep.
struct Apart {
  at::Tensor z;
  Packed packed;

  Apart(const at::Tensor& h, const CodecSpec& spec, const at::Tensor& seed) {
    z = apply_projection(h, std::get<RandomProjection>(spec.transform), seed);
    CodecSpec plain = spec;
    plain.transform = Identity{};
    packed = pack(z, plain, seed);
  }
};

TEST_F(Cuda, ProjectionIsCodedWhereItIsMade) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const char* text : {"exact", "blockwise", "blockwise,levels=even", "blockwise,rows=64", "exact,block=16rows"}) {
      for (const int64_t columns : {128, 256}) {
        for (const int64_t rows : {1, 63, 64, 65, 1000, 20001}) {
          SCOPED_TRACE(std::string(text) + " " + std::to_string(rows) + " x " + std::to_string(columns));
          const at::Tensor h = normal({rows, columns}, 31, type).cuda(), seed = seed_tensor(32, at::kCUDA);
          const CodecSpec spec = parse_spec(text);
          EXPECT_TRUE(same(pack(h, spec, seed).bytes, Apart(h, spec, seed).packed.bytes));
        }
      }
    }
  }
}

void expect_products(std::initializer_list<int64_t> row_counts) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const char* text : {"exact", "blockwise", "exact,block=8"}) {
      for (const int64_t width : {16, 32}) {
        for (const int64_t columns : {4, 40, 100, 128, 256, 300}) {
          for (const int64_t rows : row_counts) {
            if (!mine()) continue;
            SCOPED_TRACE(std::string(text) + " " + std::to_string(rows) + " x " + std::to_string(columns) + " " + std::to_string(width));
            const at::Tensor h = normal({rows, 8 * width}, 33).cuda(), g = normal({rows, columns}, 34, type).cuda();
            const at::Tensor seed = seed_tensor(35, at::kCUDA);
            const CodecSpec spec = parse_spec(text);
            const Packed packed = pack(h, spec, seed);
            const CodecLayout plan = check_packed(packed, "test");
            // Blockwise of few rows: the only block has another number of values. Blocks of 8: a row has several headers.
            const bool straight = std::string(text) == "exact" || (text[0] == 'b' && (rows >= 64 || rows == 1));
            ASSERT_EQ(cuda::project_product_fits(plan.projection, plan.block, columns), straight);
            const at::Tensor z = unpack(Apart(h, spec, seed).packed).to(at::kDouble), wide = g.to(at::kDouble);
            const at::Tensor p = undo_projection(at::eye(width).cuda(), 8 * width, {8, 0, false}, seed).to(at::kDouble).t();
            const at::Tensor expected = p.mm(z.t().mm(wide)), got = transposed_product(packed, g);
            // Rows of a warp one after the other (8 warps of at least 52 thread blocks, or 8 rows), 32 sums of a thread block at most, one
            // rounding of the double sum, `width` additions and two products; torch's own products have shorter sums.
            const double each = std::max(8.0, std::ceil(static_cast<double>(rows) / (52 * 8)));
            const double terms = straight ? each + 32 + 1 + static_cast<double>(width) + 2 : static_cast<double>(rows + width) + 4;
            const at::Tensor bound = p.abs().mm(z.abs().t().mm(wide.abs())) * (terms * 0x1p-24);
            EXPECT_EQ(got.scalar_type(), at::kFloat);
            EXPECT_TRUE(((got - expected).abs() <= bound).all().item<bool>()) << ((got - expected).abs() / bound).max();
            if (repeats()) {
              EXPECT_TRUE(same(got, transposed_product(packed, g))) << "a second time";
            }
          }
        }
      }
    }
  }
}

TEST_F(Cuda, ProductFromTheCodes) { expect_products({1, 7, 500, 2001}); }

TEST_F(Cuda, ProductFromTheCodesOfManyRows) { expect_products({20001}); }

TEST_F(Cuda, ProductShowsWhatIsNotANumber) {
  at::Tensor h = normal({1000, 128}, 36);
  h[999][5] = std::numeric_limits<float>::quiet_NaN();
  const at::Tensor g = normal({1000, 128}, 37).cuda();
  for (const char* text : {"exact", "blockwise"}) {
    // A poisoned block holds all 16 columns of Z, and every column of P mixes them.
    EXPECT_TRUE(at::isnan(transposed_product(pack(h.cuda(), parse_spec(text), 38), g)).all().item<bool>()) << text;
  }
}

TEST_F(Cuda, ProductOfAnAddressThatDoesNotFit) {
  const at::Tensor h = normal({300, 128}, 39).cuda(), line = normal({300 * 40 + 1}, 40).cuda();
  const at::Tensor shifted = line.narrow(0, 1, 300 * 40).view({300, 40});  // contiguous, 4 bytes past an aligned address
  const Packed packed = pack(h, parse_spec("exact"), 41);
  const at::Tensor a = transposed_product(packed, shifted), b = transposed_product(packed, shifted.clone());
  const at::Tensor full = unpack(packed);
  // Sums of 300 rows and 16 columns, on both sides; Σ|Z||P| may exceed |Ĥ| by √16.
  const double bound = 2 * 320 * 0x1p-24 * 4 * full.abs().t().mm(shifted.abs()).max().item<double>();
  EXPECT_LE((a - b).abs().max().item<double>(), bound);
}

}  // namespace
}  // namespace satchel
