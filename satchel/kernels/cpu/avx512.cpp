// AVX-512 (F, BW, DQ, VL): 16 lanes.
#include "satchel/kernels/cpu/vector.h"
#include "satchel/kernels/cpu/vector_chain.h"
#include "satchel/kernels/cpu/vector_low_pass.h"
#include "satchel/kernels/cpu/vector_side.h"
#include "satchel/kernels/cpu/vector_sparse.h"
#include "satchel/kernels/cpu/vector_sums.h"

namespace satchel {
namespace {

struct Avx512 {
  using F = __m512;
  using I = __m512i;
  using M = __mmask16;
  using Table = __m512;
  struct Doubles {
    __m512d low, high;
  };
  static constexpr int kLanes = 16;

  static F set(float v) { return _mm512_set1_ps(v); }
  static F load_f32(const float* p) { return _mm512_loadu_ps(p); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F add_f(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }  // b where either is NaN
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F magnitude(F v) { return _mm512_abs_ps(v); }
  static M gt(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
  static M not_gt(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_NGT_UQ); }
  static M eq(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
  static M exclusive(M a, M b) { return _kxor_mask16(a, b); }
  static M either(M a, M b) { return _kor_mask16(a, b); }
  static M both(M a, M b) { return _kand_mask16(a, b); }
  static M neither(M a, M b) { return _knot_mask16(_kor_mask16(a, b)); }
  static uint32_t bits(M m) { return m; }
  static M mask_of(uint32_t bits) { return static_cast<M>(bits); }  // the low 16
  static F select(M m, F yes, F no) { return _mm512_mask_mov_ps(no, m, yes); }
  static F select_negative(F sign, F yes, F no) { return select(_mm512_movepi32_mask(_mm512_castps_si512(sign)), yes, no); }
  static I where(M m, I v) { return _mm512_maskz_mov_epi32(m, v); }  // else 0
  static I select_i(M m, I yes, I no) { return _mm512_mask_mov_epi32(no, m, yes); }

  static M normal(F v) { return _mm512_test_epi32_mask(_mm512_castps_si512(v), _mm512_set1_epi32(0x7f800000)); }
  static F flush(F v) { return _mm512_maskz_mov_ps(normal(v), v); }
  static F fma_flushed(F a, F b, F c) { return _mm512_mask3_fmadd_ps(a, b, c, normal(a)); }          // c where a is subnormal
  static F distance_flushed(F a, F b) { return magnitude(_mm512_mask_sub_ps(b, normal(a), a, b)); }  // |b| where a is subnormal

  static I set_i(int v) { return _mm512_set1_epi32(v); }
  static I rint(F v) { return _mm512_cvt_roundps_epi32(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F to_float(I v) { return _mm512_cvtepi32_ps(v); }
  static I add(I a, I b) { return _mm512_add_epi32(a, b); }
  static I sub_i(I a, I b) { return _mm512_sub_epi32(a, b); }
  static M gt_i(I a, I b) { return _mm512_cmpgt_epi32_mask(a, b); }
  static M any_of(I v, int mask) { return _mm512_test_epi32_mask(v, set_i(mask)); }
  static I count(I sum, M m) { return _mm512_mask_add_epi32(sum, m, sum, set_i(1)); }  // one more where m
  static void store_i(int32_t* p, I v) { _mm512_storeu_si512(p, v); }
  static I shift16(I v) { return _mm512_srli_epi32(v, 16); }
  static F as_float(I v) { return _mm512_castsi512_ps(v); }  // the same bits
  static void store_bytes(uint8_t* p, I v) { _mm_store_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v)); }
  static I widen_bytes(const uint64_t (&eight)[2]) {
    return _mm512_cvtepu8_epi32(_mm_set_epi64x(static_cast<long long>(eight[1]), static_cast<long long>(eight[0])));
  }
  /// Four vectors of 2-bit codes into 16 bytes: lanes to bytes, then pairs and fours by multiply-add.
  static void squeeze_two(const I (&c)[4], uint8_t* out) {
    const I bytes = _mm512_packus_epi16(_mm512_packus_epi32(c[0], c[1]), _mm512_packus_epi32(c[2], c[3]));
    const I fours = _mm512_madd_epi16(_mm512_maddubs_epi16(bytes, _mm512_set1_epi16(0x0401)), _mm512_set1_epi32(0x00100001));
    const __m128i transpose = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(fours), transpose));
  }
  /// Codes of 2 bits, each 0 or 1 more than the steps it has taken, second only where first: 32 of them are 8 bytes.
  struct Steps {
    M even[3];
    uint64_t word[2];
    void put(int v, M is_on, M one, M two) {
      if (v % 2 == 0) {
        even[0] = is_on;
        even[1] = one;
        even[2] = two;
        return;
      }
      const auto with_even = [&](int k, M odd) { return _cvtmask32_u32(_mm512_kunpackw(odd, even[k])); };
      const uint32_t on = with_even(0, is_on), first = with_even(1, one), second = with_even(2, two);
      word[v / 2] = _pdep_u64(on & ~(first ^ second), 0x5555555555555555) | _pdep_u64(on & first, 0xaaaaaaaaaaaaaaaa);
    }
    void write(uint8_t* out) const {
      std::memcpy(out, &word[0], 8);
      std::memcpy(out + 8, &word[1], 8);
    }
  };
  /// Vector v of a tile's 2-bit codes, with other codes' bits above them.
  static I two_bit_codes(const uint8_t* in, int v) {
    int word;
    std::memcpy(&word, in + 4 * v, 4);
    return _mm512_srlv_epi32(set_i(word), _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30));
  }
  static I set_words(int v) { return _mm512_set1_epi16(static_cast<int16_t>(v)); }
  static I load_words(const uint16_t* p) { return _mm512_load_si512(p); }
  static I unpack_low(I words, I upper) { return _mm512_unpacklo_epi16(words, upper); }
  static I unpack_high(I words, I upper) { return _mm512_unpackhi_epi16(words, upper); }

  static Table load_table(const float* sixteen) { return _mm512_loadu_ps(sixteen); }
  static Table value_table(Table positions, Header h) { return flush(fma(positions, set(h.step), set(h.low))); }
  static F lookup(Table t, I index) { return _mm512_permutexvar_ps(index, t); }
  static F lookup_two(Table t, I index) { return _mm512_permutevar_ps(t, index); }  // reads the low 2 bits only
  static F lookup_low(Table t, I index) { return lookup(t, index); }                // reads the low 4 bits only

  static Doubles load_doubles(const double* p) { return {_mm512_loadu_pd(p), _mm512_loadu_pd(p + 8)}; }
  static void store_doubles(double* p, Doubles d) {
    _mm512_storeu_pd(p, d.low);
    _mm512_storeu_pd(p + 8, d.high);
  }
  /// Adds v = x[i …], flushed, where m.
  template <DType type>
  static Doubles add_flushed(Doubles d, M m, F v, const void* x, int64_t i) {
    const auto half = [&](int h) {  // from memory, as is cheaper, where it is float32 there
      if constexpr (type == DType::f32) return _mm256_loadu_ps(static_cast<const float*>(x) + i + 8 * h);
      return h == 0 ? _mm512_castps512_ps256(v) : _mm512_extractf32x8_ps(v, 1);
    };
    m = both(m, normal(v));
    return {_mm512_mask_add_pd(d.low, static_cast<__mmask8>(m), d.low, _mm512_cvtps_pd(half(0))),
            _mm512_mask_add_pd(d.high, static_cast<__mmask8>(m >> 8), d.high, _mm512_cvtps_pd(half(1)))};
  }
  /// The sums of 16 pairs (sum, count).
  static Doubles load_sums(const double* pairs) {
    const auto eight = [&](int at) {
      return _mm512_permutex2var_pd(_mm512_loadu_pd(pairs + at), _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14),
                                    _mm512_loadu_pd(pairs + at + 8));
    };
    return {eight(0), eight(16)};
  }
  /// New sums for 16 pairs, and more to their counts.
  static void store_sums(double* pairs, Doubles sum, I more) {
    const auto put = [&](double* to, __m512d s, __m256i n) {
      const __m512d counts = _mm512_cvtepi32_pd(n);
      const __m512d a = _mm512_permutex2var_pd(s, _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), counts);
      const __m512d b = _mm512_permutex2var_pd(s, _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15), counts);
      _mm512_storeu_pd(to, _mm512_mask_add_pd(a, 0xaa, a, _mm512_loadu_pd(to)));
      _mm512_storeu_pd(to + 8, _mm512_mask_add_pd(b, 0xaa, b, _mm512_loadu_pd(to + 8)));
    };
    put(pairs, sum.low, _mm512_castsi512_si256(more));
    put(pairs + 16, sum.high, _mm512_extracti32x8_epi32(more, 1));
  }

  /// 16 channels, a vector a field.
  static simd::Fields<Avx512> load_fields(const Channel* c) {
    const float* p = &c->threshold;
    const I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const F a = load_f32(p), b = load_f32(p + 16), d = load_f32(p + 32), e = load_f32(p + 48);
    const __m512d front = _mm512_castps_pd(_mm512_unpacklo_ps(a, b)), front2 = _mm512_castps_pd(_mm512_unpacklo_ps(d, e));
    const __m512d back = _mm512_castps_pd(_mm512_unpackhi_ps(a, b)), back2 = _mm512_castps_pd(_mm512_unpackhi_ps(d, e));
    const auto sorted = [&](__m512d v) { return _mm512_permutexvar_ps(order, _mm512_castpd_ps(v)); };
    return {sorted(_mm512_unpacklo_pd(front, front2)), sorted(_mm512_unpackhi_pd(front, front2)), sorted(_mm512_unpacklo_pd(back, back2)),
            sorted(_mm512_unpackhi_pd(back, back2))};
  }

  static float least(F v) { return _mm512_reduce_min_ps(v); }
  static float most(F v) { return _mm512_reduce_max_ps(v); }
  static bool all_zero(F v) { return _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_NEQ_UQ) == 0; }

  template <DType type>
  static F load(const void* x, int64_t i) {
    if constexpr (type == DType::f32) return _mm512_loadu_ps(static_cast<const float*>(x) + i);
    const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(x) + i));
    if constexpr (type == DType::f16) return _mm512_cvtph_ps(h);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
  }

  template <DType type>
  static void store(void* x, int64_t i, F v) {
    if constexpr (type == DType::f32) {
      _mm512_storeu_ps(static_cast<float*>(x) + i, v);
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<uint16_t*>(x) + i), type == DType::f16 ? to_half(v) : to_brain(v));
    }
  }
  using Part = __mmask16;  // the first lanes of a vector
  static Part part(int count) { return static_cast<Part>((1u << count) - 1); }
  static F load_part(const float* p, Part part) { return _mm512_maskz_loadu_ps(part, p); }
  static void store_part(float* p, Part part, F v) { _mm512_mask_storeu_ps(p, part, v); }
  static void stream(float* p, F v) { _mm512_stream_ps(p, v); }

  /// All but NaN saturate; NaN, as the second operand, passes through min and max.
  static F saturate(F v, float limit) { return _mm512_max_ps(set(-limit), _mm512_min_ps(set(limit), v)); }
  static __m256i to_half(F v) { return _mm512_cvtps_ph(saturate(v, 65504.0f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static __m256i to_brain(F v) {
    const I b = _mm512_castps_si512(saturate(v, float_of(0x7f7f0000u)));
    const I odd = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(add(b, add(odd, _mm512_set1_epi32(0x7fff))), 16));
  }

  // For Philox: one counter a 64-bit lane, of which products read the lower half.
  static I set_long(uint32_t v) { return _mm512_set1_epi64(v); }
  static I count_up(uint64_t from) {
    return _mm512_add_epi64(_mm512_set1_epi64(static_cast<long long>(from)), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static I upper(I v) { return _mm512_srli_epi64(v, 32); }
  static I product(I a, uint32_t b) { return _mm512_mul_epu32(a, set_long(b)); }
  static I exclusive_i(I a, I b, I c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }  // a ^ b ^ c
  /// a with its halves swapped, then the lower one ^ b ^ c.
  static I exclusive_swapped(I a, I b, I c) { return _mm512_mask_ternarylogic_epi32(_mm512_rol_epi64(a, 32), 0x5555, b, c, 0x96); }
  static void store_noise(uint16_t* noise, I a, I b) {
    _mm512_store_si512(noise, _mm512_permutex2var_epi64(a, _mm512_setr_epi64(0, 2, 8, 10, 1, 3, 9, 11), b));
    _mm512_store_si512(noise + 32, _mm512_permutex2var_epi64(a, _mm512_setr_epi64(4, 6, 12, 14, 5, 7, 13, 15), b));
  }
};

bool supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

using Block = simd::Codec<Avx512>;
using Sides = simd::SideCodec<Avx512>;
using Sums = simd::OffSums<Avx512>;
using LowPasses = simd::LowPassCodec<Avx512>;
using Products = simd::SparseProduct<Avx512>;
using Chains = simd::ChainCodec<Avx512>;

}  // namespace

const CpuKernels kAvx512 = {
    "avx512",           supported,          Block::measure,     Block::encode,    Block::decode,    Block::side_measure,
    Sides::side_encode, Sides::side_decode, Block::mask,        Sums::off_sums,   LowPasses::split, LowPasses::join,
    Products::multiply, Chains::chain,      Chains::chain_back, Chains::chain_on, Chains::side_on};

}  // namespace satchel
