// The low-pass of channels_last maps on CUDA: the bytes of the CPU, without a copy in the shape's order.
#include "cuda_fixture.h"
#include "satchel/train/memory.h"

namespace satchel {
namespace {

using reference::normal;
using reference::same;

class LowPassLastCuda : public Cuda {};

at::Tensor channels_last(const at::Tensor& x) { return x.movedim(1, -1).contiguous().movedim(-1, 1); }

std::string trace(const std::string& text, const at::Tensor& x) {
  return text + " " + c10::str(x.sizes()) + " " + c10::toString(x.scalar_type());
}

/// Bytes as on the CPU in the shape's order; values and strides back, from either device's bytes.
void expect_same(const at::Tensor& x, const CodecSpec& spec) {
  const at::Tensor last = channels_last(x).cuda();
  const Packed cpu = pack(x, spec, 51), gpu = pack(last, spec, 51);
  if (spec.bits != kKeep) {
    ASSERT_TRUE(same(gpu.bytes.cpu(), cpu.bytes)) << "bytes differ in " << (gpu.bytes.cpu() != cpu.bytes).sum().item<int64_t>();
  }
  const at::Tensor expected = unpack(cpu), back = unpack(gpu);
  EXPECT_TRUE(same(back.cpu(), expected));
  if (x.numel() > 0) {
    EXPECT_EQ(back.strides(), last.strides());
  }
  Packed moved_bytes = moved(cpu, at::kCUDA);
  moved_bytes.strides = gpu.strides;
  if (spec.bits != kKeep) {
    EXPECT_TRUE(same(unpack(moved_bytes).cpu(), expected));
  }
}

/// The sizes of residual networks, sizes that are no multiple of a window, a quad or a group, and one too small, too large or too
/// narrow for the direct kernels.
const std::vector<std::vector<int64_t>> kMaps = {{3, 64, 7, 7},   {2, 2048, 7, 7},   {3, 96, 14, 14},  {2, 256, 14, 14}, {2, 128, 28, 28},
                                                 {2, 64, 56, 56}, {2, 64, 112, 112}, {2, 8, 112, 112}, {2, 24, 9, 16},   {1, 8, 17, 20},
                                                 {2, 40, 12, 6},  {2, 16, 3, 3},     {2, 16, 2, 2},    {2, 3, 224, 224}, {1, 8, 150, 150},
                                                 {2, 12, 7, 7},   {2, 8, 520, 520},  {3, 16, 50},      {3, 16, 64},      {2, 16, 5, 9, 6},
                                                 {0, 8, 7, 7},    {2, 8, 1, 1},      {1, 1, 8, 8},     {2, 64, 16, 18},  {1, 128, 31, 31}};

TEST_F(LowPassLastCuda, EveryMap) {
  for (const auto& shape : kMaps) {
    for (const at::ScalarType type : kTypes) {
      const at::Tensor x = normal(shape, 52, type) * 2 + 1;
      for (const char* text : {"division", "division,sample=yes,header=f32"}) {
        SCOPED_TRACE(trace(text, x));
        expect_same(x, parse_spec(text));
      }
    }
  }
}

TEST_F(LowPassLastCuda, EverySpec) {
  for (const auto& shape : std::vector<std::vector<int64_t>>{{2, 32, 7, 7}, {2, 32, 14, 14}, {2, 24, 28, 28}, {1, 8, 112, 112}}) {
    for (const at::ScalarType type : kTypes) {
      const at::Tensor x = normal(shape, 53, type);
      for (int bits = 1; bits <= 8; ++bits) {
        for (const char* rest :
             {"", ",header=f32,round=nearest", ",levels=optimal", ",lowpass=4", ",block=100", ",part=low", ",part=high"}) {
          if (!mine()) continue;
          const std::string text = "division,bits=" + std::to_string(bits) + rest;
          SCOPED_TRACE(trace(text, x));
          expect_same(x, parse_spec(text));
        }
      }
    }
  }
}

TEST_F(LowPassLastCuda, PartsInTheShapesOrder) {
  for (const auto& shape : std::vector<std::vector<int64_t>>{{2, 3, 17, 20}, {6, 50}, {2, 3, 5, 9, 6}, {300}}) {
    for (const char* text : {"division,part=low", "division,part=high", "division,part=low,lowpass=3"}) {
      const at::Tensor x = normal(shape, 54);
      SCOPED_TRACE(trace(text, x));
      const Packed cpu = pack(x, parse_spec(text), 55), gpu = pack(x.cuda(), parse_spec(text), 55);
      EXPECT_TRUE(same(gpu.bytes.cpu(), cpu.bytes));
      EXPECT_TRUE(same(unpack(gpu).cpu(), unpack(cpu)));
    }
  }
}

TEST_F(LowPassLastCuda, EdgeValues) {
  const float tiny = 1e-45f, small = 1.2e-38f, huge = 3.4e38f;
  for (const auto& shape : std::vector<std::vector<int64_t>>{{4, 32, 7, 7}, {2, 16, 28, 28}, {2, 8, 112, 112}}) {
    for (const float odd : {0.0f, -0.0f, tiny, -tiny, small, -small, huge, -huge, NAN, INFINITY, -INFINITY}) {
      for (const at::ScalarType type : kTypes) {
        at::Tensor x = normal(shape, 56) * (std::abs(odd) < 1 ? small : 1.0f);
        x.view({-1}).slice(0, 13, x.numel(), 997).fill_(odd);
        x[0][1].fill_(odd);
        SCOPED_TRACE(trace(std::to_string(odd), x));
        expect_same(x.to(type), parse_spec("division"));
      }
    }
  }
}

TEST_F(LowPassLastCuda, SamplesAreSlicesOfTheWhole) {
  for (const auto& shape :
       std::vector<std::vector<int64_t>>{{5, 64, 7, 7}, {5, 32, 14, 14}, {5, 16, 28, 28}, {5, 12, 7, 7}, {5, 3, 9, 9}, {9, 50}}) {
    for (const char* text :
         {"division", "actnn", "bits=2", "gact", "side=relu", "division,part=low", "division,block=100", "exact", "bits=32"}) {
      for (const at::ScalarType type : kTypes) {
        if (!mine()) continue;
        const at::Tensor x = normal(shape, 57, type);
        for (const at::Tensor& in : {x.cuda(), x.dim() > 2 ? channels_last(x).cuda() : x.cuda()}) {
          SCOPED_TRACE(trace(text, in));
          const Packed packed = pack(in, parse_spec(text), 58);
          const at::Tensor whole = unpack(packed);
          for (const auto& [first, last] : std::vector<std::pair<int64_t, int64_t>>{{0, 5}, {0, 1}, {1, 3}, {4, 5}, {2, 2}}) {
            const at::Tensor some = unpack_samples(packed, first, last);
            EXPECT_TRUE(same(some, whole.narrow(0, first, last - first))) << first << " " << last;
            if (some.numel() > 0) {
              EXPECT_EQ(some.strides(), whole.strides());
            }
          }
        }
      }
    }
  }
}

/// Packing takes the packed bytes, a seed and at most two numbers of fp32 a window of 64 values, unpacking the values: a block of torch's
/// allocator exceeds its tensor by at most 1 MiB, or 512 bytes where that is small. A copy would take 2 bytes a value or more.
TEST_F(LowPassLastCuda, ResNetsMapsNeedNoCopy) {
  for (const auto& shape : std::vector<std::vector<int64_t>>{
           {32, 64, 112, 112}, {32, 64, 56, 56}, {32, 256, 56, 56}, {32, 512, 28, 28}, {32, 1024, 14, 14}, {32, 2048, 7, 7}}) {
    for (const at::ScalarType type : kTypes) {
      for (const char* text : {"division", "actnn"}) {
        const at::Tensor x = channels_last(at::randn(shape, at::TensorOptions().device(at::kCUDA)).to(type));
        SCOPED_TRACE(trace(text, x));
        Packed packed;
        {
          const int64_t windows = ((shape[2] + 7) / 8) * ((shape[3] + 7) / 8);
          const MemoryMeter meter(at::kCUDA);
          packed = pack(x, parse_spec(text), 60);
          EXPECT_LE(meter.peak(), packed.bytes.numel() + shape[0] * shape[1] * windows * 8 + (1 << 20) + 512);
        }
        const MemoryMeter meter(at::kCUDA);
        const at::Tensor back = unpack(packed);
        EXPECT_LE(meter.peak(), static_cast<int64_t>(back.nbytes()) + (1 << 20));
        EXPECT_EQ(back.strides(), x.strides());
      }
    }
  }
}

}  // namespace
}  // namespace satchel
