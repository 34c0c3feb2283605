// CUDA against the CPU: the same bytes for the same input, spec and seed; encode on one, decode on the other.
#include "cuda_fixture.h"
#include "satchel/core/levels.h"
#include "satchel/tensor/check.h"
#include "satchel/tensor/packed.h"

namespace satchel {
namespace {

using reference::normal;
using reference::same;

/// Same bytes, and the same values from either device's bytes on either device.
void expect_same(const at::Tensor& x, const CodecSpec& spec, uint64_t seed) {
  const Packed cpu = pack(x, spec, seed), gpu = pack(x.cuda(), spec, seed);
  ASSERT_TRUE(gpu.bytes.is_cuda());
  EXPECT_EQ(gpu.strides, cpu.strides);
  EXPECT_TRUE(same(gpu.bytes.cpu(), cpu.bytes)) << "bytes differ in " << (gpu.bytes.cpu() != cpu.bytes).sum().item<int64_t>();
  const at::Tensor expected = unpack(cpu);
  EXPECT_TRUE(same(unpack(gpu).cpu(), expected)) << "decoded on CUDA";
  EXPECT_TRUE(same(unpack(moved(cpu, at::kCUDA)).cpu(), expected)) << "CPU's bytes decoded on CUDA";
  EXPECT_TRUE(same(unpack(moved(gpu, at::kCPU)), expected)) << "CUDA's bytes decoded on the CPU";
}

std::string trace(const std::string& text, const at::Tensor& x) {
  return text + " " + c10::str(x.sizes()) + " " + c10::toString(x.scalar_type());
}

TEST_F(Cuda, EveryBitsBlockLevelsHeader) {
  for (const at::ScalarType type : kTypes) {
    const at::Tensor x = normal({70001}, 1, type) * 3 - 1;
    for (int bits = 1; bits <= 8; ++bits) {
      for (const char* block : {"1", "2", "7", "8", "64", "100", "256", "1000", "1024", "5000", "100000"}) {
        for (const char* rest : {"", ",header=f32,round=nearest", ",levels=even"}) {
          if (!mine()) continue;
          const std::string text = "bits=" + std::to_string(bits) + ",block=" + block + rest;
          SCOPED_TRACE(trace(text, x));
          expect_same(x, parse_spec(text), 2);
        }
      }
    }
  }
}

TEST_F(Cuda, EveryLength) {
  const at::Tensor x = normal({70001}, 3);
  for (const int64_t n : {0, 1, 2, 3, 7, 8, 9, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 4097, 65535, 65536, 65537}) {
    for (const char* text : {"bits=2", "bits=3,block=100", "bits=1,block=8", "bits=2,side=relu", "bits=32"}) {
      SCOPED_TRACE(trace(text, x.narrow(0, 0, n)));
      expect_same(x.narrow(0, 0, n), parse_spec(text), 4);
      if (n < 70000) expect_same(x.narrow(0, 1, n), parse_spec(text), 4);  // memory that is aligned to one value only
    }
  }
}

TEST_F(Cuda, EveryShapeAndStride) {
  for (const at::ScalarType type : kTypes) {
    for (const auto& shape : std::vector<std::vector<int64_t>>{{}, {0, 3}, {5, 9}, {3, 4, 33}, {2, 3, 17, 20}, {1, 2, 5, 9, 6}}) {
      for (const char* text : {"bits=2", "bits=2,block=row", "bits=3,block=3rows", "bits=2,block=map", "actnn", "gact",
                               "bits=4,block=10,sample=yes", "bits=2,side=relu,block=map", "bits=3,side=both,sample=yes", "division",
                               "division,lowpass=3,block=100", "division,lowpass=64,bits=4"}) {
        const at::Tensor x = normal(shape, 5, type);
        SCOPED_TRACE(trace(text, x));
        expect_same(x, parse_spec(text), 6);
        if (x.dim() == 4) expect_same(x.contiguous(at::MemoryFormat::ChannelsLast), parse_spec(text), 6);
        if (x.dim() == 2) expect_same(x.t(), parse_spec(text), 6);
        if (x.dim() == 3) expect_same(x.select(0, 1).expand({4, 4, 33}), parse_spec(text), 6);
      }
    }
  }
}

TEST_F(Cuda, EdgeValues) {
  const float tiny = 1e-45f, small = 1.2e-38f, huge = 3.4e38f;
  const at::Tensor x = at::tensor({0.0f, -0.0f, tiny,  -tiny,  small,  -small, huge,     -huge,    NAN,    INFINITY, 1.0f,
                                   1.0f, 1.0f,  1e30f, -1e30f, 100.0f, 100.1f, 65504.0f, 70000.0f, 1e-20f, 2e-20f})
                           .repeat({97});
  for (const at::ScalarType type : kTypes) {
    for (const char* text : {"bits=2,block=1", "bits=2,block=2", "bits=3,block=3", "bits=4,block=5,header=f32", "bits=2,block=21",
                             "bits=2,block=2,side=relu", "bits=3,block=3,side=both"}) {
      SCOPED_TRACE(text);
      const at::Tensor some = x.to(type);
      const Packed cpu = pack(some, parse_spec(text), 7), gpu = pack(some.cuda(), parse_spec(text), 7);
      // A single channel's off mean is a statistic; these specs have none.
      EXPECT_TRUE(same(gpu.bytes.cpu(), cpu.bytes));
      EXPECT_TRUE(same(unpack(gpu).cpu(), unpack(cpu)));
    }
  }
}

/// Blocks of 256, which kernels of their own decode: what is too large for a type stops at its largest number, and there is one NaN.
TEST_F(Cuda, SideCodesOfLargeAndBadValues) {
  for (const at::ScalarType type : kTypes) {
    const at::Tensor x = normal({9, 256}, 8) * 3;
    x[1] *= 20000;
    x[2] *= 1e30;
    x[3][7] = NAN;
    x[4][8] = -INFINITY;
    x[5] = x[5] * 100 - 9500;
    x[6][3] = 65504;
    x[7] *= 1e-41;
    const at::Tensor some = x.to(type), gamma = normal({256}, 9).abs() + 0.5, beta = normal({256}, 10);
    for (const char* text : {"side=relu", "side=relu,header=f32", "bits=3,side=relu"}) {
      SCOPED_TRACE(text);
      const Packed cpu = pack(at::relu(some), parse_spec(text), 7), gpu = pack(at::relu(some).cuda(), parse_spec(text), 7);
      EXPECT_TRUE(same(gpu.bytes.cpu(), cpu.bytes));
      EXPECT_TRUE(same(unpack(gpu).cpu(), unpack(cpu)));
    }
    for (const char* text : {"side=one", "side=one,header=f32", "side=one,off=mean"}) {
      SCOPED_TRACE(text);
      const Packed gpu = pack_side(some.cuda(), parse_spec(text), seed_tensor(11, at::kCUDA), gamma.cuda(), beta.cuda());
      EXPECT_TRUE(same(unpack(gpu).cpu(), unpack(moved(gpu, at::kCPU))));
    }
  }
}

TEST_F(Cuda, SideCodesWithChannels) {
  for (const at::ScalarType type : kTypes) {
    for (const char* text : {"side=one", "bits=3,side=one,block=100", "bits=3,side=both", "side=one,block=map"}) {
      for (const bool last : {false, true}) {
        SCOPED_TRACE(text);
        at::Tensor x = normal({4, 12, 9, 11}, 8, type), gamma = normal({12}, 9), beta = normal({12}, 10);
        gamma[3] = 0;
        if (last) x = x.contiguous(at::MemoryFormat::ChannelsLast);
        const CodecSpec spec = parse_spec(text);
        const Packed cpu = pack_side(x, spec, seed_tensor(11, at::kCPU), gamma, beta);
        const Packed gpu = pack_side(x.cuda(), spec, seed_tensor(11, at::kCUDA), gamma.cuda(), beta.cuda());
        // Codes and headers, the channels' table, the off plane: all but the table's last column is the same to the byte.
        const int64_t coded = check_packed(cpu, "test").at.channels, table = 12 * 16, rest = cpu.bytes.numel() - coded - table;
        EXPECT_TRUE(same(gpu.bytes.cpu().narrow(0, 0, coded), cpu.bytes.narrow(0, 0, coded)));
        EXPECT_TRUE(same(gpu.bytes.cpu().narrow(0, coded + table, rest), cpu.bytes.narrow(0, coded + table, rest)));
        const auto channels = [&](const Packed& p) { return p.bytes.cpu().narrow(0, coded, table).clone().view(at::kFloat).view({12, 4}); };
        EXPECT_TRUE(at::equal(channels(gpu).narrow(1, 0, 3), channels(cpu).narrow(1, 0, 3)));
        // Off means are sums of at most 396 values in another order, at least in fp32: 396·2^−24 of their mean size (below 3).
        EXPECT_LE((channels(gpu) - channels(cpu)).abs().max().item<float>(), 396 * 0x1p-24 * 3);
        EXPECT_TRUE(same(unpack(moved(gpu, at::kCPU)), unpack(gpu).cpu()));
        EXPECT_EQ(unpack(gpu).strides(), unpack(cpu).strides());
      }
    }
  }
}

TEST_F(Cuda, MasksAndNarrowedIntegers) {
  for (const int64_t n : {0, 1, 8, 9, 513, 100003}) {
    for (const at::ScalarType type : kTypes) {
      const at::Tensor x = normal({n}, 12, type);
      EXPECT_TRUE(same(pack_mask(x.cuda()).bits.cpu(), pack_mask(x).bits));
      EXPECT_TRUE(at::equal(unpack_mask(pack_mask(x.cuda())).cpu(), x > 0));
    }
    for (const int64_t most : {1, 5, 1000, 1 << 30}) {
      const at::Tensor ids = at::randint(most, {n}, at::kLong);
      const Narrowed gpu = narrow(ids.cuda(), -1, most);
      EXPECT_TRUE(same(gpu.bytes.cpu(), narrow(ids, -1, most).bytes));
      EXPECT_TRUE(at::equal(widen(gpu).cpu(), ids));
      EXPECT_TRUE(at::equal(widen(narrow(ids.to(at::kInt).cuda())).cpu(), ids.to(at::kInt)));
    }
  }
  const at::Tensor wide = at::tensor({std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max(), int64_t{0}});
  EXPECT_TRUE(at::equal(widen(narrow(wide.cuda())).cpu(), wide));
}

TEST_F(Cuda, SeedsAndDevicesAreChecked) {
  const at::Tensor x = normal({8}, 13).cuda();
  reference::expect_error([&] { pack(x, CodecSpec{}, seed_tensor(1, at::kCPU)); }, "[pack] seed must be on the tensor's device, got cpu");
  reference::expect_error([&] { pack(x.to(at::kDouble), CodecSpec{}, 1); }, "got Double");
}

/// More values than 32 bits count: the tail's codes come from their own 64-bit indices.
TEST_F(Cuda, MoreThanTwoToTheThirtyOneValues) {
  const int64_t n = (int64_t{1} << 31) + 3 * 256 + 77, tail = 256 + 77, first = n - tail;
  size_t free = 0;
  try {
    free = at::getDeviceAllocator(at::kCUDA)->getMemoryInfo(0).first;
  } catch (const std::exception&) {
  }
  if (free < (size_t{16} << 30)) GTEST_SKIP() << "needs 16 GiB of free GPU memory";
  at::Tensor x = at::zeros({n}, at::TensorOptions(at::kHalf).device(at::kCUDA));
  x.narrow(0, first, tail).copy_(normal({tail}, 14));
  const CodecSpec spec = parse_spec("bits=2");
  const Packed packed = pack(x, spec, 15);
  const at::Tensor values = x.narrow(0, first, tail).cpu().to(at::kFloat);
  const int64_t headers = align_up(code_bytes(n, 2));
  const auto codes = reference::bytes_of(packed.bytes.narrow(0, first / 4, ceil_div(tail, 4)));
  const auto heads = reference::bytes_of(packed.bytes.narrow(0, headers + first / 256 * 4, 8));
  const LevelTable table = level_table(2, spec.levels, 256);
  for (int64_t i = 0; i < tail; ++i) {
    const Header h = load_header(heads.data(), HeaderType::bf16, i / 256);
    const uint32_t u = noise(15, Stream::rounding, static_cast<uint64_t>(first + i));
    ASSERT_EQ(get_code(codes.data(), 2, i), code_of(position(values[i].item<float>(), make_ruler(h)), table, u)) << i;
  }
  const at::Tensor back = unpack(packed);
  EXPECT_EQ(back.narrow(0, 0, first).count_nonzero().item<int64_t>(), 0);
  EXPECT_LT((back.narrow(0, first, tail).cpu().to(at::kFloat) - values).abs().max().item<float>(), 4.0f);
}

}  // namespace
}  // namespace satchel
