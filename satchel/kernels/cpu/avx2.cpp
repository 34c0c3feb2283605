// AVX2 with FMA, F16C and BMI2: 8 lanes.
#include "satchel/kernels/cpu/vector.h"
#include "satchel/kernels/cpu/vector_chain.h"
#include "satchel/kernels/cpu/vector_low_pass.h"
#include "satchel/kernels/cpu/vector_side.h"
#include "satchel/kernels/cpu/vector_sparse.h"
#include "satchel/kernels/cpu/vector_sums.h"

namespace satchel {
namespace {

struct Avx2 {
  using F = __m256;
  using I = __m256i;
  using M = __m256;  // all ones or all zeros a lane
  struct Table {
    __m256 low, high;
  };
  struct Doubles {
    __m256d low, high;
  };
  static constexpr int kLanes = 8;

  static F set(float v) { return _mm256_set1_ps(v); }
  static F load_f32(const float* p) { return _mm256_loadu_ps(p); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F add_f(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }  // b where either is NaN
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F magnitude(F v) { return _mm256_andnot_ps(set(-0.0f), v); }
  static M gt(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
  static M not_gt(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_NGT_UQ); }
  static M eq(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
  static M exclusive(M a, M b) { return _mm256_xor_ps(a, b); }
  static M either(M a, M b) { return _mm256_or_ps(a, b); }
  static M both(M a, M b) { return _mm256_and_ps(a, b); }
  static M neither(M a, M b) { return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_castps_si256(either(a, b)), _mm256_setzero_si256())); }
  static uint32_t bits(M m) { return static_cast<uint32_t>(_mm256_movemask_ps(m)); }
  static M mask_of(uint32_t bits) {  // the low 8
    const I own = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(set_i(static_cast<int>(bits)), own), own));
  }
  static F select(M m, F yes, F no) { return _mm256_blendv_ps(no, yes, m); }
  static F select_negative(F sign, F yes, F no) { return _mm256_blendv_ps(no, yes, sign); }  // yes where sign's bit is set
  static I where(M m, I v) { return _mm256_and_si256(_mm256_castps_si256(m), v); }           // else 0
  static I select_i(M m, I yes, I no) { return _mm256_blendv_epi8(no, yes, _mm256_castps_si256(m)); }

  static F flush(F v) {
    const I bits = _mm256_castps_si256(v), exponent = _mm256_and_si256(bits, _mm256_set1_epi32(0x7f800000));
    return _mm256_castsi256_ps(_mm256_sign_epi32(bits, exponent));  // 0 where the exponent is 0; it is never negative
  }
  static F fma_flushed(F a, F b, F c) { return fma(flush(a), b, c); }
  static F distance_flushed(F a, F b) { return magnitude(sub(flush(a), b)); }

  static I set_i(int v) { return _mm256_set1_epi32(v); }
  static I rint(F v) { return _mm256_cvttps_epi32(_mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
  static F to_float(I v) { return _mm256_cvtepi32_ps(v); }
  static I add(I a, I b) { return _mm256_add_epi32(a, b); }
  static I sub_i(I a, I b) { return _mm256_sub_epi32(a, b); }
  static M gt_i(I a, I b) { return _mm256_castsi256_ps(_mm256_cmpgt_epi32(a, b)); }
  static M any_of(I v, int mask) { return gt_i(_mm256_and_si256(v, set_i(mask)), _mm256_setzero_si256()); }
  static I count(I sum, M m) { return _mm256_sub_epi32(sum, _mm256_castps_si256(m)); }  // one more where m
  static void store_i(int32_t* p, I v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
  static I shift16(I v) { return _mm256_srli_epi32(v, 16); }
  static F as_float(I v) { return _mm256_castsi256_ps(v); }  // the same bits
  /// The low byte of each lane.
  static void store_bytes(uint8_t* p, I v) {
    const I pick = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1,
                                    -1, -1, -1, -1, -1);
    const I b = _mm256_shuffle_epi8(v, pick);
    const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), both);
  }
  static I widen_bytes(const uint64_t (&eight)[1]) { return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(eight[0]))); }
  /// Eight vectors of 2-bit codes into 16 bytes: lanes to bytes, then pairs and fours by multiply-add.
  static void squeeze_two(const I (&c)[8], uint8_t* out) {
    const auto fours = [&](int v) {
      const I bytes = _mm256_packus_epi16(_mm256_packus_epi32(c[v], c[v + 1]), _mm256_packus_epi32(c[v + 2], c[v + 3]));
      return _mm256_madd_epi16(_mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x0401)), _mm256_set1_epi32(0x00100001));
    };
    const I b = _mm256_packus_epi16(_mm256_packus_epi32(fours(0), fours(4)), _mm256_setzero_si256());
    const __m128i straight = _mm_unpacklo_epi8(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), straight);
  }
  /// Codes of 2 bits, each 0 or 1 more than the steps it has taken, second only where first.
  struct Steps {
    I code[8];
    void put(int v, M is_on, M one, M two) { code[v] = where(is_on, count(count(set_i(1), one), two)); }
    void write(uint8_t* out) const { squeeze_two(code, out); }
  };
  /// Vector v of a tile's 2-bit codes, with other codes' bits above them.
  static I two_bit_codes(const uint8_t* in, int v) {
    uint16_t word;
    std::memcpy(&word, in + 2 * v, 2);
    return _mm256_srlv_epi32(set_words(word), _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
  }
  static I set_words(int v) { return _mm256_set1_epi16(static_cast<int16_t>(v)); }
  static I load_words(const uint16_t* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
  static I unpack_low(I words, I upper) { return _mm256_unpacklo_epi16(words, upper); }
  static I unpack_high(I words, I upper) { return _mm256_unpackhi_epi16(words, upper); }

  static Table load_table(const float* sixteen) { return {_mm256_loadu_ps(sixteen), _mm256_loadu_ps(sixteen + 8)}; }
  static Table value_table(Table positions, Header h) {
    return {flush(fma(positions.low, set(h.step), set(h.low))), flush(fma(positions.high, set(h.step), set(h.low)))};
  }
  static F lookup(Table t, I index) {
    const F low = _mm256_permutevar8x32_ps(t.low, index), high = _mm256_permutevar8x32_ps(t.high, index);
    return select(gt_i(index, set_i(7)), high, low);
  }
  static F lookup_two(Table t, I index) { return _mm256_permutevar_ps(t.low, index); }      // reads the low 2 bits only
  static F lookup_low(Table t, I index) { return _mm256_permutevar8x32_ps(t.low, index); }  // reads the low 3 bits only

  static Doubles load_doubles(const double* p) { return {_mm256_loadu_pd(p), _mm256_loadu_pd(p + 4)}; }
  static void store_doubles(double* p, Doubles d) {
    _mm256_storeu_pd(p, d.low);
    _mm256_storeu_pd(p + 4, d.high);
  }
  /// Adds v = x[i …], flushed, where m.
  template <DType>
  static Doubles add_flushed(Doubles d, M m, F v, const void* /*x*/, int64_t /*i*/) {
    const F kept = _mm256_and_ps(m, flush(v));
    return {_mm256_add_pd(d.low, _mm256_cvtps_pd(_mm256_castps256_ps128(kept))),
            _mm256_add_pd(d.high, _mm256_cvtps_pd(_mm256_extractf128_ps(kept, 1)))};
  }
  /// The sums of 8 pairs (sum, count).
  static Doubles load_sums(const double* pairs) {
    const auto four = [&](int at) {
      return _mm256_permute4x64_pd(_mm256_unpacklo_pd(_mm256_loadu_pd(pairs + at), _mm256_loadu_pd(pairs + at + 4)), 0xd8);
    };
    return {four(0), four(8)};
  }
  /// New sums for 8 pairs, and more to their counts.
  static void store_sums(double* pairs, Doubles sum, I more) {
    const auto put = [&](double* to, __m256d s, __m128i n) {
      const __m256d sums = _mm256_permute4x64_pd(s, 0xd8), counts = _mm256_permute4x64_pd(_mm256_cvtepi32_pd(n), 0xd8);
      const __m256d a = _mm256_add_pd(_mm256_loadu_pd(to), _mm256_unpacklo_pd(counts, counts));
      const __m256d b = _mm256_add_pd(_mm256_loadu_pd(to + 4), _mm256_unpackhi_pd(counts, counts));
      _mm256_storeu_pd(to, _mm256_shuffle_pd(sums, a, 0xa));
      _mm256_storeu_pd(to + 4, _mm256_blend_pd(_mm256_unpackhi_pd(sums, sums), b, 0xa));
    };
    put(pairs, sum.low, _mm256_castsi256_si128(more));
    put(pairs + 8, sum.high, _mm256_extracti128_si256(more, 1));
  }

  /// 8 channels, a vector a field.
  static simd::Fields<Avx2> load_fields(const Channel* c) {
    const auto pair = [&](int k) {
      return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(&c[k].threshold)), _mm_loadu_ps(&c[k + 4].threshold), 1);
    };
    const F a = pair(0), b = pair(1), d = pair(2), e = pair(3);
    const __m256d front = _mm256_castps_pd(_mm256_unpacklo_ps(a, b)), front2 = _mm256_castps_pd(_mm256_unpacklo_ps(d, e));
    const __m256d back = _mm256_castps_pd(_mm256_unpackhi_ps(a, b)), back2 = _mm256_castps_pd(_mm256_unpackhi_ps(d, e));
    return {_mm256_castpd_ps(_mm256_unpacklo_pd(front, front2)), _mm256_castpd_ps(_mm256_unpackhi_pd(front, front2)),
            _mm256_castpd_ps(_mm256_unpacklo_pd(back, back2)), _mm256_castpd_ps(_mm256_unpackhi_pd(back, back2))};
  }

  static float least(F v) {
    __m128 m = _mm_min_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_min_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_min_ss(m, _mm_shuffle_ps(m, m, 1)));
  }
  static float most(F v) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
  }
  static bool all_zero(F v) { return _mm256_movemask_ps(_mm256_cmp_ps(v, _mm256_setzero_ps(), _CMP_NEQ_UQ)) == 0; }

  template <DType type>
  static F load(const void* x, int64_t i) {
    if constexpr (type == DType::f32) return _mm256_loadu_ps(static_cast<const float*>(x) + i);
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(x) + i));
    if constexpr (type == DType::f16) return _mm256_cvtph_ps(h);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
  }

  template <DType type>
  static void store(void* x, int64_t i, F v) {
    if constexpr (type == DType::f32) {
      _mm256_storeu_ps(static_cast<float*>(x) + i, v);
    } else {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<uint16_t*>(x) + i), type == DType::f16 ? to_half(v) : to_brain(v));
    }
  }
  using Part = __m256i;  // the first lanes of a vector
  static Part part(int count) { return _mm256_cmpgt_epi32(set_i(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }
  static F load_part(const float* p, Part part) { return _mm256_maskload_ps(p, part); }
  static void store_part(float* p, Part part, F v) { _mm256_maskstore_ps(p, part, v); }
  static void stream(float* p, F v) { _mm256_stream_ps(p, v); }

  /// All but NaN saturate; NaN, as the second operand, passes through min and max.
  static F saturate(F v, float limit) { return _mm256_max_ps(set(-limit), _mm256_min_ps(set(limit), v)); }
  static __m128i to_half(F v) { return _mm256_cvtps_ph(saturate(v, 65504.0f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static __m128i to_brain(F v) {
    const I b = _mm256_castps_si256(saturate(v, float_of(0x7f7f0000u)));
    const I odd = _mm256_and_si256(_mm256_srli_epi32(b, 16), set_i(1));
    const I h = _mm256_srli_epi32(add(b, add(odd, set_i(0x7fff))), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  }

  // For Philox: one counter a 64-bit lane, of which products read the lower half.
  static I set_long(uint32_t v) { return _mm256_set1_epi64x(v); }
  static I count_up(uint64_t from) {
    return _mm256_add_epi64(_mm256_set1_epi64x(static_cast<long long>(from)), _mm256_setr_epi64x(0, 1, 2, 3));
  }
  static I upper(I v) { return _mm256_srli_epi64(v, 32); }
  static I product(I a, uint32_t b) { return _mm256_mul_epu32(a, set_long(b)); }
  static I exclusive_i(I a, I b, I c) {
    I late = _mm256_xor_si256(b, c);
    asm("" : "+x"(late));  // a is the one to wait for: no other order
    return _mm256_xor_si256(a, late);
  }
  /// a with its halves swapped, then the lower one ^ b ^ c.
  static I exclusive_swapped(I a, I b, I c) {
    return _mm256_xor_si256(_mm256_shuffle_epi32(a, 0xb1), _mm256_blend_epi32(_mm256_setzero_si256(), _mm256_xor_si256(b, c), 0x55));
  }
  static void store_noise(uint16_t* noise, I a, I b) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(noise), _mm256_permute2x128_si256(a, b, 0x20));
    _mm256_store_si256(reinterpret_cast<__m256i*>(noise + 16), _mm256_permute2x128_si256(a, b, 0x31));
  }
};

bool supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi2");
}

using Block = simd::Codec<Avx2>;
using Sides = simd::SideCodec<Avx2>;
using Sums = simd::OffSums<Avx2>;
using LowPasses = simd::LowPassCodec<Avx2>;
using Products = simd::SparseProduct<Avx2>;
using Chains = simd::ChainCodec<Avx2>;

}  // namespace

const CpuKernels kAvx2 = {"avx2",
                          supported,
                          Block::measure,
                          Block::encode,
                          Block::decode,
                          Block::side_measure,
                          Sides::side_encode,
                          Sides::side_decode,
                          Block::mask,
                          Sums::off_sums,
                          LowPasses::split,
                          LowPasses::join,
                          Products::multiply,
                          Chains::chain,
                          Chains::chain_back,
                          Chains::chain_on,
                          Chains::side_on};

}  // namespace satchel
