// What the kernels do with sixteen lanes: sums, half precision, the products that decide the speed, elementary functions.
//
// One source serves AVX-512, AVX2, NEON and plain C; the few operations that decide the speed name their instruction where
// there is one. Nothing here reorders a sum.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "registers.h"

namespace outpace {

typedef uint16_t vh __attribute__((vector_size(32)));

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return {_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b)};
#elif defined(__ARM_FEATURE_FMA)
    const auto quarter = [](auto a, auto b, auto c) { return (decltype(c))vfmaq_f32(c, a, b); };
    return {{quarter(a.a.a, b.a.a, c.a.a), quarter(a.a.b, b.a.b, c.a.b)}, {quarter(a.b.a, b.b.a, c.b.a), quarter(a.b.b, b.b.b, c.b.b)}};
#else
    return a * b + c;  // contraction is off: the same two roundings everywhere
#endif
}

INLINE float fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

#if !defined(__AVX512F__)
// All lanes joined to one, half with half: what is left of them lies in the first lanes.
template <class V, class Join>
INLINE float joined(V v, Join join) {
    if constexpr (HALVED<V>) {
        return joined(join(v.a, v.b), join);
    } else {
#if defined(__AVX__)
        const __m128 two = join(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
        const __m128 one = join(two, _mm_movehl_ps(two, two));
        return join(one, _mm_shuffle_ps(one, one, 1))[0];
#else
        typedef float pair __attribute__((vector_size(8)));
        const pair two = join(pair{v[0], v[1]}, pair{v[2], v[3]});
        return join(pair{two[0], 0.f}, pair{two[1], 0.f})[0];
#endif
    }
}
#endif

// By halves: the same sum however the lanes are rotated, which attention relies on (a window that begins elsewhere
// puts the same weights on other lanes).
INLINE float sum(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    return joined(v, [](auto a, auto b) { return a + b; });
#endif
}

INLINE float highest(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    return joined(v, [](auto a, auto b) { return select(a > b, a, b); });
#endif
}

// Bring a cache line near: it will be read soon, after what is being computed.
INLINE void fetch(const void* line) { __builtin_prefetch(line, 0, 2); }
INLINE void fetch_close(const void* line) { __builtin_prefetch(line, 0, 3); }  // into the first cache

// --- half precision -------------------------------------------------------------------------------------------

INLINE float widen(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

INLINE bf16 narrow_bf16(float x) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return {uint16_t((bits >> 16) | 0x40)};  // NaN stays NaN
    return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

INLINE float widen(fp16 x) {
#if defined(__F16C__)
    return _cvtsh_ss(x.bits);
#else
    uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff, bits;
    if (rest >= 0x7c00) bits = sign | 0x7f800000 | ((rest & 0x3ff) << 13);
    else if (rest >= 0x400) bits = sign | ((rest + (112u << 10)) << 13);
    else {  // zero and subnormals: rest * 2^-24
        float f = float(rest) * 5.9604644775390625e-8f;
        std::memcpy(&bits, &f, 4);
        bits |= sign;
    }
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
#endif
}

INLINE fp16 narrow_fp16(float x) {  // to nearest, ties to even; beyond the range to the largest finite number
    x = x > 65504.f ? 65504.f : x < -65504.f ? -65504.f : x;
#if defined(__F16C__)
    return {uint16_t(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))};
#else
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return {uint16_t(sign | 0x7e00)};
    if (rest < 0x38800000) {  // a subnormal half: units of 2^-24, rounded by the addition
        float f;
        std::memcpy(&f, &rest, 4);
        f += 0.5f;  // the unit of the last place of floats in [0.5, 1) is 2^-24
        std::memcpy(&rest, &f, 4);
        return {uint16_t(sign | (rest - 0x3f000000))};
    }
    rest += 0xfff + ((rest >> 13) & 1);
    return {uint16_t(sign | ((rest - 0x38000000) >> 13))};
#endif
}

INLINE float widen(float x) { return x; }
template <class T> INLINE T narrow(float x);
template <> INLINE float narrow<float>(float x) { return x; }
template <> INLINE bf16 narrow<bf16>(float x) { return narrow_bf16(x); }
template <> INLINE fp16 narrow<fp16>(float x) { return narrow_fp16(x); }

INLINE vf load(const bf16* at) {
#if defined(__AVX512F__)
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at));
    return (vf)_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
#else
    return (vf)(load_converted<vu>((const uint16_t*)at) << 16);
#endif
}

INLINE vf load(const fp16* at) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at));
#elif defined(__F16C__)
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at + 1))};
#else
    float v[LANES];
    for (int i = 0; i < LANES; ++i) v[i] = widen(at[i]);
    return load(v);
#endif
}

// Sixteen bytes as floats.
INLINE vf load(const uint8_t* at) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at)));
#else
    return to_float(load_converted<vi>(at));
#endif
}

INLINE vf load(const int8_t* at) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)));
#else
    return to_float(load_converted<vi>(at));
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Lanes below 65,536 as 16 bits.
INLINE void store_low_halves(uint16_t* at, vu v) {
    const __m256i packed = _mm256_packus_epi32((__m256i)v.a, (__m256i)v.b);
    _mm256_storeu_si256((__m256i*)at, _mm256_permute4x64_epi64(packed, 0xd8));
}
#endif

INLINE void store(bf16* at, vf v) {
#if defined(__AVX512BF16__)
    __m256bh half = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy(at, &half, sizeof half);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    // As narrow_bf16, in all lanes.
    const vu bits = (vu)v, rounded = (bits + (0x7fffu + ((bits >> 16) & 1u))) >> 16;
    const vu kept = select((vi)(bits & 0x7fffffffu) > splat(0x7f800000), (bits >> 16) | 0x40u, rounded);
    store_low_halves((uint16_t*)at, kept);
#else
    for (int i = 0; i < LANES; ++i) at[i] = narrow_bf16(v[i]);
#endif
}

// --- products that decide the speed -----------------------------------------------------------------------------

// Whether a product takes a register of bf16 in pairs as it is. Where the instruction is missing, or takes longer than the
// two of float32 that do the same (OUTPACE_WIDE_BF16, see kernel_build.py), the pairs are widened in registers, and the
// numbers that they meet are floats.
#if defined(__AVX512BF16__) && !defined(OUTPACE_WIDE_BF16)
constexpr bool PAIRED = true;
#else
constexpr bool PAIRED = false;
#endif
constexpr int HALVES = PAIRED ? 1 : 2;  // in how many products a register of pairs is taken

// What the h-th of these products takes of the register.
INLINE vu half(vu pairs, int h) { return PAIRED ? pairs : h == 0 ? pairs << 16 : pairs & 0xffff0000u; }

// acc[i] += w[i] * x, the float in `word`; of pairs acc[i] += w[2i] * x[0] + w[2i+1] * x[1], the two bf16 in `word`.
template <bool Pairs>
INLINE vf product(vf acc, vu w, uint32_t word) {
#if defined(__AVX512BF16__)
    if constexpr (Pairs) return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)(__m512i)w, (__m512bh)_mm512_set1_epi32(int(word)));
#endif
    static_assert(PAIRED || !Pairs);
    float x;
    std::memcpy(&x, &word, 4);
    return fma((vf)w, splat(x), acc);
}

// acc[i] += sum over j < 4 of w[4i+j] * x[j]: bytes of w unsigned, the four bytes of `quad` signed. Exact.
INLINE vi dot(vi acc, vu w, int32_t quad) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(quad));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    const __m256i x = _mm256_set1_epi32(quad);
    return {(vi::Half)_mm256_dpbusd_avx_epi32((__m256i)acc.a, (__m256i)w.a, x), (vi::Half)_mm256_dpbusd_avx_epi32((__m256i)acc.b, (__m256i)w.b, x)};
#else
    for (int j = 0; j < 4; ++j)
        acc += (vi)((w >> (8 * j)) & 0xffu) * int32_t(int8_t(uint32_t(quad) >> (8 * j)));
    return acc;
#endif
}

// A sum of many such products, of bytes of w below 2^Bits and bytes of x from -127 to 127, less `zero` times the sum of x:
//     begin(sum, sum of x, zero); add(sum, w, quad, index), index counting the quads of a block or of half a Q6_K block; total(sum)
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)

// Keeps the compiler from adding whole numbers in an order of its own, for which all of them would lie in memory first.
template <class V> INLINE void now(V& sum) { __asm__("" : "+x"(sum)); }

// Bytes are multiplied and added by pairs in 16 bits, which hold a few of these sums; then these are widened.
template <int Bits>
struct Dots {
    static constexpr int EACH = 32767 / (2 * 127 * ((1 << Bits) - 1)) & -2;  // products that 16 bits hold: 8, 4, 2
    typedef int16_t words __attribute__((vector_size(32)));
    vi sum;
    words a, b;

    friend INLINE void begin(Dots& to, int32_t x, int zero) { to.sum = splat(-zero * x), to.a = to.b = words{}; }
    friend INLINE void add(Dots& to, vu w, int32_t quad, int index) {
        const __m256i x = _mm256_set1_epi32(quad);
        to.a += (words)_mm256_maddubs_epi16((__m256i)w.a, x), to.b += (words)_mm256_maddubs_epi16((__m256i)w.b, x);
        now(to.a), now(to.b);
        if (index % EACH == EACH - 1) to.widen();
    }
    friend INLINE vi total(const Dots& of) { return of.sum; }

   private:
    INLINE void widen() {
        const __m256i ones = _mm256_set1_epi16(1);
        sum.a += (vi::Half)_mm256_madd_epi16((__m256i)a, ones), sum.b += (vi::Half)_mm256_madd_epi16((__m256i)b, ones);
        a = b = words{};
    }
};

// Of whole bytes 16 bits do not hold a single sum: these are taken around 128, and x has the sign that they have there.
template <>
struct Dots<8> {
    vi sum;

    friend INLINE void begin(Dots& to, int32_t x, int zero) { to.sum = splat((128 - zero) * x); }
    friend INLINE void add(Dots& to, vu w, int32_t quad, int) {
        const __m256i x = _mm256_set1_epi32(quad);
        const auto half = [&](__m256i w, vi::Half& sum) __attribute__((always_inline)) {
            const __m256i around = _mm256_xor_si256(w, _mm256_set1_epi8(char(0x80)));
            const __m256i both = _mm256_maddubs_epi16(_mm256_abs_epi8(around), _mm256_sign_epi8(x, around));
            sum += (vi::Half)_mm256_madd_epi16(both, _mm256_set1_epi16(1));
            now(sum);
        };
        half((__m256i)w.a, to.sum.a), half((__m256i)w.b, to.sum.b);
    }
    friend INLINE vi total(const Dots& of) { return of.sum; }
};

#elif defined(__ARM_FEATURE_DOTPROD)

// The instruction multiplies signed bytes: whole ones are taken around 128.
template <int Bits>
struct Dots {
    vi sum;

    friend INLINE void begin(Dots& to, int32_t x, int zero) { to.sum = splat(((Bits == 8 ? 128 : 0) - zero) * x); }
    friend INLINE void add(Dots& to, vu w, int32_t quad, int) {
        if constexpr (Bits == 8) w = w ^ 0x80808080u;
        const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(quad));
        const auto quarter = [&](auto& sum, auto w) { sum = (std::decay_t<decltype(sum)>)vdotq_s32((int32x4_t)sum, (int8x16_t)w, x); };
        quarter(to.sum.a.a, w.a.a), quarter(to.sum.a.b, w.a.b), quarter(to.sum.b.a, w.b.a), quarter(to.sum.b.b, w.b.b);
    }
    friend INLINE vi total(const Dots& of) { return of.sum; }
};

#else

template <int Bits> using Dots = vi;

INLINE void begin(vi& sum, int32_t x, int zero) { sum = splat(-zero * x); }
INLINE void add(vi& sum, vu w, int32_t quad, int) { sum = dot(sum, w, quad); }
INLINE vi total(vi sum) { return sum; }

#endif

// --- elementary functions ---------------------------------------------------------------------------------------

// e^x to about one unit in the last place; 0 below -87, finite above 88.
INLINE vf exp(vf x) {
    vf clamped = min(max(x, splat(-87.33f)), splat(88.37f));
    vf scaled = clamped * 1.44269504088896341f;
    vi whole = truncated(scaled + select(scaled < 0.f, splat(-0.5f), splat(0.5f)));
    vf n = to_float(whole);
    vf r = fma(n, splat(-0.693359375f), clamped);
    r = fma(n, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + 1.f;
    vf value = p * (vf)((whole + 127) << 23);
    return select(x < -87.33f, vf{}, value);
}

// 2^x of x <= 126 to about one unit in the last place; exactly 1 at 0, and 0 far below (of minus infinity too).
INLINE vf exp2(vf x) {
#if defined(__AVX512F__)
    x = max(x, splat(-200.f));
    vf n = (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    x = max(x, splat(-127.f));
    vi whole = truncated(x + select(x < 0.f, splat(-0.5f), splat(0.5f)));
    vf n = to_float(whole);
#endif
    vf r = x - n;
    vf p = splat(1.535336188319500e-4f);
    p = fma(p, r, splat(1.339887440266574e-3f));
    p = fma(p, r, splat(9.618437357674640e-3f));
    p = fma(p, r, splat(5.550332471162809e-2f));
    p = fma(p, r, splat(2.402264791363012e-1f));
    p = fma(p, r, splat(6.931472028550421e-1f));
    p = fma(p, r, splat(1.f));
#if defined(__AVX512F__)
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return p * (vf)((whole + 127) << 23);
#endif
}

// 1 + e^-x: x divided by it is x sigmoid(x). Finite where e^-x would not be.
INLINE vf one_and_exp(vf x) { return 1.f + exp2(min(x * -1.44269504088896341f, splat(126.f))); }
INLINE vf sigmoid(vf x) { return 1.f / one_and_exp(x); }
INLINE vf tanh(vf x) { return 2.f * sigmoid(2.f * x) - 1.f; }

}  // namespace outpace
