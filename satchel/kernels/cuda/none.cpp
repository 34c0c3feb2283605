// Stands in for the CUDA kernels where CMake found no CUDA.
#include "satchel/core/error.h"
#include "satchel/kernels/cuda/cuda.h"
#include "satchel/kernels/cuda/epilogue.h"
#include "satchel/kernels/cuda/loss.h"
#include "satchel/kernels/cuda/low_pass_last.h"
#include "satchel/kernels/cuda/per_sample.h"
#include "satchel/kernels/cuda/pool.h"
#include "satchel/kernels/cuda/project_product.h"
#include "satchel/kernels/cuda/row_norm.h"
#include "satchel/kernels/cuda/split_product.h"

namespace satchel::cuda {
namespace {
[[noreturn]] void missing(const char* op) { fail(op, "built without CUDA"); }
}  // namespace

bool compiled() { return false; }

void encode(const BlockCode&, const void*, DType, const uint64_t*, uint8_t*, void*, StreamHandle, RowsWithGaps) { missing("encode"); }
void decode(const BlockCode&, const uint8_t*, const void*, void*, DType, StreamHandle) { missing("decode"); }
void encode_exp(const BlockCode&, const float*, const uint64_t*, uint8_t*, void*, StreamHandle) { missing("encode"); }
void decode_log(const BlockCode&, const uint8_t*, const void*, float*, StreamHandle) { missing("decode"); }
int64_t side_scratch_bytes(const SideCode&) { missing("side_encode"); }
void side_encode(const SideCode&, const void*, DType, Channel*, const uint64_t*, uint8_t*, void*, void*, StreamHandle) {
  missing("side_encode");
}
void side_decode(const SideCode&, const uint8_t*, const Channel*, const void*, void*, DType, StreamHandle) { missing("side_decode"); }
void side_decode_extra(const SideCode&, const ExtraBitView&, const uint8_t*, const void*, int64_t, int64_t, void*, DType, StreamHandle) {
  missing("side_decode");
}
void mask(const void*, DType, int64_t, uint8_t*, StreamHandle) { missing("mask"); }
void mask_flags(const uint8_t*, int64_t, uint8_t*, StreamHandle) { missing("mask"); }
void unmask(const uint8_t*, int64_t, uint8_t*, StreamHandle) { missing("unmask"); }
int64_t low_pass_scratch_bytes(const LowPassShape&, const BlockCode&, const void*) { missing("low_pass"); }
void low_pass_encode(const LowPassShape&, const BlockCode&, const void*, DType, const uint64_t*, uint8_t*, void*, uint16_t*, void*,
                     StreamHandle) {
  missing("low_pass");
}
void low_pass_decode(const LowPassShape&, const BlockCode&, const uint8_t*, const void*, const uint16_t*, void*, DType, StreamHandle) {
  missing("low_pass");
}
void project(const Projection&, const void*, DType, const uint64_t*, float*, StreamHandle) { missing("project"); }
int64_t project_scratch_bytes(const Projection&, const BlockCode&) { missing("project"); }
void project_encode(const Projection&, const BlockCode&, const void*, DType, const uint64_t*, uint8_t*, void*, void*, StreamHandle) {
  missing("project");
}
void draw_projection(const Projection&, const uint64_t*, float*, int64_t, int64_t, StreamHandle) { missing("project"); }
void narrow(const int64_t*, int64_t, int64_t, int, uint8_t*, StreamHandle) { missing("narrow"); }
void widen(const uint8_t*, int64_t, int64_t, int, int64_t*, StreamHandle) { missing("widen"); }
int64_t multiply_scratch_values(const Sparse&, int64_t) { missing("multiply"); }
void multiply(const Sparse&, const ProductSides&, float*, StreamHandle) { missing("multiply"); }
void chain(const Chain&, const void*, DType, const float*, const float*, const uint8_t*, const uint64_t*, void*, StreamHandle) {
  missing("chain");
}
void chain_back(const Chain&, const void*, DType, const uint8_t*, const uint64_t*, void*, StreamHandle) { missing("chain_back"); }
void chain_on(const Chain&, const void*, DType, const float*, const float*, uint8_t*, StreamHandle) { missing("chain_on"); }
void side_on(const SideCode&, const uint8_t*, uint8_t*, StreamHandle) { missing("side_on"); }
int64_t column_moments_scratch_bytes(int64_t) { missing("column_moments"); }
void column_moments(const void*, DType, int64_t, int64_t, const Moments&, void*, StreamHandle) { missing("column_moments"); }
int64_t column_sums_scratch_bytes(int64_t, int64_t) { missing("column_sums"); }
void column_sums(const void*, DType, int64_t, int64_t, float*, void*, StreamHandle) { missing("column_sums"); }
bool norm_act_fits(const SideCode&) { return false; }
bool norm_add_fits(const NormAddCode&) { return false; }
bool norm_block_fits(const BlockCode&, int64_t) { return false; }
bool norm_image_fits(const NormImageCode&) { return false; }
bool norm_low_pass_fits(const LowPassParts&, DType) { return false; }
int64_t norm_act_scratch_bytes() { missing("norm_act"); }
int64_t norm_scratch_bytes() { missing("norm"); }
int64_t norm_low_pass_scratch_bytes(const LowPassParts&) { missing("norm_low_pass"); }
void norm_encode(const NormActCode&, const NormPass&, void*, StreamHandle) { missing("norm_act"); }
void norm_encode(const NormAddCode&, const NormPass&, StreamHandle) { missing("norm_add"); }
void norm_encode(const NormBlockCode&, const NormPass&, StreamHandle) { missing("norm_block"); }
void norm_encode(const NormImageCode&, const NormPass&, const F32Header*, F32Header*, StreamHandle) { missing("norm_image"); }
void norm_encode(const NormLowPassCode&, const NormPass&, const uint64_t*, StreamHandle) { missing("norm_low_pass"); }
void norm_image_measure(const NormImageCode&, const NormPass&, F32Header*, StreamHandle) { missing("norm_image"); }
void norm_low_pass_measure(const LowPassParts&, const void*, DType, const Moments&, void*, StreamHandle) { missing("norm_low_pass"); }
void norm_sums(const NormActCode&, const NormSums&, StreamHandle) { missing("norm_act"); }
void norm_sums(const NormAddCode&, const NormSums&, StreamHandle) { missing("norm_add"); }
void norm_sums(const NormBlockCode&, const NormSums&, StreamHandle) { missing("norm_block"); }
void norm_sums(const NormImageCode&, const NormSums&, StreamHandle) { missing("norm_image"); }
void norm_sums(const NormLowPassCode&, const NormSums&, StreamHandle) { missing("norm_low_pass"); }
void norm_back(const NormActCode&, const NormBack&, StreamHandle) { missing("norm_act"); }
void norm_back(const NormAddCode&, const NormBack&, StreamHandle) { missing("norm_add"); }
void norm_back(const NormBlockCode&, const NormBack&, StreamHandle) { missing("norm_block"); }
void norm_back(const NormImageCode&, const NormBack&, StreamHandle) { missing("norm_image"); }
void norm_back(const NormLowPassCode&, const NormBack&, StreamHandle) { missing("norm_low_pass"); }
void norm_act_input(const NormActCode&, int64_t, int64_t, void*, DType, StreamHandle) { missing("norm_act"); }
int64_t cross_entropy_scratch_bytes() { missing("cross_entropy"); }
void cross_entropy(const LabelledRows&, void*, DType, const int64_t*, bool, float*, void*, StreamHandle) { missing("cross_entropy"); }
void scale(void*, DType, int64_t, const float*, StreamHandle) { missing("scale"); }
bool project_product_fits(const Projection&, const BlockCode&, int64_t) { return false; }
int64_t project_product_scratch_bytes(const Projection&, int64_t) { missing("project_product"); }
void project_product(const Projection&, const BlockCode&, const uint8_t*, const void*, const uint64_t*, const void*, DType, int64_t, float*,
                     void*, StreamHandle) {
  missing("project_product");
}
bool norm_act_product_fits(const SideCode&, const ProductGradients&) { return false; }
int64_t norm_act_product_scratch_bytes(const SideCode&, const ProductGradients&) { missing("norm_act_product"); }
void norm_act_product(const SideCode&, const Chain&, const uint8_t*, const uint64_t*, const ProductGradients&, void*, StreamHandle) {
  missing("norm_act_product");
}
void advance_seed(uint64_t*, StreamHandle) { missing("advance_seed"); }
bool low_pass_last_encodes(const LowPassShape&, const BlockCode&, int64_t, const void*, DType) { missing("low_pass"); }
int64_t low_pass_last_scratch_bytes(const LowPassShape&, int64_t, DType) { missing("low_pass"); }
void low_pass_last_encode(const LowPassShape&, const BlockCode&, int64_t, const void*, DType, const uint64_t*, uint8_t*, void*, uint16_t*,
                          void*, StreamHandle) {
  missing("low_pass");
}
bool low_pass_last_decodes(const LowPassShape&, const BlockCode&, int64_t, const void*, DType) { missing("low_pass"); }
void low_pass_last_decode(const LowPassShape&, const BlockCode&, int64_t, const uint8_t*, const void*, const uint16_t*, void*, DType,
                          StreamHandle) {
  missing("low_pass");
}
void low_pass_means(const LowPassShape&, const void*, DType, uint16_t*, StreamHandle) { missing("low_pass"); }
void low_pass_spread(const LowPassShape&, const uint16_t*, void*, DType, StreamHandle) { missing("low_pass"); }
void per_sample_measure(const PerSampleCode&, const void*, DType, F32Header*, double*, StreamHandle) { missing("pack_per_sample"); }
void per_sample_squares(const PerSampleCode&, const F32Header*, double*, StreamHandle) { missing("pack_per_sample"); }
void per_sample_allocate(const PerSampleCode&, const double*, const float*, uint8_t*, StreamHandle) { missing("pack_per_sample"); }
void per_sample_encode(const PerSampleCode&, const void*, DType, const uint64_t*, const F32Header*, uint8_t*, StreamHandle) {
  missing("pack_per_sample");
}
void per_sample_decode(const PerSampleCode&, const uint8_t*, void*, DType, int64_t, int64_t, StreamHandle) { missing("unpack_per_sample"); }
bool row_norm_fits(const RowShape&) { return false; }
bool row_norm_code_fits(const BlockCode&) { return false; }
bool slope_code_fits(const BlockCode&) { return false; }
bool output_code_fits(const BlockCode&) { return false; }
void row_norm(const RowShape&, const RowNorm&, const void*, DType, void*, StreamHandle) { missing("row_norm"); }
void row_encode(const RowShape&, const RowNorm&, const RowCode&, const RowCode&, Smooth, const void*, DType, void*, StreamHandle) {
  missing("row_norm");
}
int64_t row_back_scratch_bytes(const RowShape&) { missing("row_norm"); }
void row_back(const RowShape&, const RowNorm&, const RowCode&, const RowCode&, const RowGradients&, void*, StreamHandle) {
  missing("row_norm");
}
void smooth_encode(const RowCode&, const RowCode&, Smooth, const void*, DType, int64_t, void*, StreamHandle) { missing("smooth"); }
void slope_back(const RowShape&, const RowCode&, const void*, DType, void*, StreamHandle) { missing("smooth"); }
void smooth(Smooth, const void*, DType, int64_t, void*, float*, StreamHandle) { missing("smooth"); }
void norm_rows_back(void*, const void*, DType, int64_t, int64_t, const ChannelLine&, StreamHandle) { missing("norm"); }
bool max_pool_fits(const MaxPool&) { return false; }
void max_pool(const MaxPool&, const void*, DType, void*, uint8_t*, StreamHandle) { missing("max_pool"); }
void max_pool_back(const MaxPool&, const void*, DType, const uint8_t*, void*, StreamHandle) { missing("max_pool"); }

bool split_fits() { return false; }
int64_t split_factor_bytes(const SplitFactor&) { missing("split_product"); }
void split_factor(const SplitFactor&, void*, StreamHandle) { missing("split_product"); }
void split_product(const SplitRows&, const SplitFactor&, const void*, const float*, float*, int64_t, StreamHandle) {
  missing("split_product");
}
int64_t split_gradient_scratch_bytes(const TallPair&) { missing("split_gradient"); }
void split_gradient(const TallPair&, bool, float*, void*, StreamHandle) { missing("split_gradient"); }

}  // namespace satchel::cuda
