// Sixteen lanes of float or int32: one register of 64 bytes, or the narrower ones that a machine has.
//
// Compilers keep a vector that is wider than every register in memory, and take it lane by lane where they compare. So on
// AVX2, NEON and plain C sixteen lanes are two halves, and each half a register or two halves again.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace outpace {

constexpr int LANES = 16;

// Before loops over quantised inputs and rows, where there are 16 registers and not 32: sums that a loop indexes lie in memory.
#if defined(__AVX512F__)
#define UNROLLED
#else
#define UNROLLED _Pragma("GCC unroll 8")
#endif

#if defined(__AVX512F__)

constexpr int REGISTER = 64;  // bytes
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef double vd8 __attribute__((vector_size(64)));

template <class V, class T> INLINE V load_as(const T* at) { V v; std::memcpy(&v, at, sizeof v); return v; }
template <class T, class V> INLINE void store_as(T* at, V v) { std::memcpy(at, &v, sizeof v); }
template <class M, class V> INLINE V select(M mask, V yes, V no) { return mask ? yes : no; }
INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }
INLINE vi truncated(vf v) { return __builtin_convertvector(v, vi); }

// Lanes of narrower numbers in memory, converted; and lanes below 256, as bytes.
template <class To, class T>
INLINE To load_converted(const T* at) {
    typedef T narrow __attribute__((vector_size(sizeof(To) / sizeof(To{}[0]) * sizeof(T))));
    return __builtin_convertvector(load_as<narrow>(at), To);
}
INLINE void store_bytes(uint8_t* at, vu v) {
    typedef uint8_t bytes __attribute__((vector_size(LANES)));
    store_as(at, __builtin_convertvector(v, bytes));
}

#else

#if defined(__AVX__)
constexpr int REGISTER = 32;  // bytes
#else
constexpr int REGISTER = 16;
#endif

template <class T> struct Register { typedef T type __attribute__((vector_size(REGISTER))); };

template <class T, int N>
struct Halves {
    using Half = std::conditional_t<N / 2 * int(sizeof(T)) == REGISTER, typename Register<T>::type, Halves<T, N / 2>>;
    using Mask = Halves<int32_t, N>;
    Half a, b;

    Halves() = default;
    INLINE Halves(Half a, Half b) : a(a), b(b) {}
    INLINE Halves(T x) : a(x - Half{}), b(a) {}  // not 0 + x, which is another number for -0
    // The same bits as lanes of another type.
    template <class U> INLINE explicit Halves(Halves<U, N> other) : a((Half)other.a), b((Half)other.b) {}

    INLINE T operator[](int lane) const { return lane < N / 2 ? a[lane] : b[lane - N / 2]; }
    INLINE Halves operator-() const { return {-a, -b}; }

#define OUTPACE_OPERATOR(op)                                                                        \
    friend INLINE Halves operator op(Halves x, Halves y) { return {x.a op y.a, x.b op y.b}; }       \
    INLINE Halves& operator op##=(Halves y) { return *this = *this op y; }
#define OUTPACE_COMPARISON(op) \
    friend INLINE Mask operator op(Halves x, Halves y) { return {typename Mask::Half(x.a op y.a), typename Mask::Half(x.b op y.b)}; }
    OUTPACE_OPERATOR(+)
    OUTPACE_OPERATOR(-)
    OUTPACE_OPERATOR(*)
    OUTPACE_OPERATOR(/)
    OUTPACE_OPERATOR(&)
    OUTPACE_OPERATOR(|)
    OUTPACE_OPERATOR(^)
    OUTPACE_COMPARISON(<)
    OUTPACE_COMPARISON(>)
    OUTPACE_COMPARISON(==)
    OUTPACE_COMPARISON(!=)
    OUTPACE_COMPARISON(>=)
    OUTPACE_COMPARISON(<=)
#undef OUTPACE_OPERATOR
#undef OUTPACE_COMPARISON
    friend INLINE Halves operator<<(Halves x, int bits) { return {x.a << bits, x.b << bits}; }
    friend INLINE Halves operator>>(Halves x, int bits) { return {x.a >> bits, x.b >> bits}; }
};

typedef Halves<float, LANES> vf;
typedef Halves<int32_t, LANES> vi;
typedef Halves<uint32_t, LANES> vu;
typedef Halves<double, LANES / 2> vd8;

// Whether V is halves, and not a register.
template <class V> constexpr bool HALVED = false;
template <class T, int N> constexpr bool HALVED<Halves<T, N>> = true;

template <class V, class T>
INLINE V load_as(const T* at) {
    if constexpr (HALVED<V>) {
        using Half = typename V::Half;
        return V(load_as<Half>(at), load_as<Half>((const uint8_t*)at + sizeof(Half)));
    } else {
        V v;
        std::memcpy(&v, at, sizeof v);
        return v;
    }
}

template <class T, class V>
INLINE void store_as(T* at, V v) {
    if constexpr (HALVED<V>) store_as(at, v.a), store_as((uint8_t*)at + sizeof v.a, v.b);
    else std::memcpy(at, &v, sizeof v);
}

template <class M, class V>
INLINE V select(M mask, V yes, V no) {
    if constexpr (HALVED<V>) return V(select(mask.a, yes.a, no.a), select(mask.b, yes.b, no.b));
    else return mask ? yes : no;
}

// Lanes converted as C converts numbers.
template <class To, class From>
INLINE To converted(From v) {
    if constexpr (HALVED<To>) return To(converted<typename To::Half>(v.a), converted<typename To::Half>(v.b));
    else return __builtin_convertvector(v, To);
}
INLINE vf to_float(vi v) { return converted<vf>(v); }
INLINE vi truncated(vf v) { return converted<vi>(v); }

template <class To, class T>
INLINE To load_converted(const T* at) {
    if constexpr (HALVED<To>) {
        using Half = typename To::Half;
        constexpr int EACH = sizeof(Half) / sizeof(decltype(To{}[0]));
        return To(load_converted<Half>(at), load_converted<Half>(at + EACH));
#if defined(__AVX2__)
    } else if constexpr (sizeof(T) == 1) {  // which gcc takes out one by one
        const __m128i bytes = _mm_loadl_epi64((const __m128i*)at);
        return (To)(std::is_signed_v<T> ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#endif
    } else {
        typedef T narrow __attribute__((vector_size(sizeof(To) / sizeof(To{}[0]) * sizeof(T))));
        return __builtin_convertvector(load_as<narrow>(at), To);
    }
}

INLINE void store_bytes(uint8_t* at, vu v) {
    uint32_t lanes[LANES];
    store_as(lanes, v);
    for (int i = 0; i < LANES; ++i) at[i] = uint8_t(lanes[i]);
}

#endif

INLINE vf load(const float* at) { return load_as<vf>(at); }
INLINE void store(float* at, vf v) { store_as(at, v); }
INLINE vf splat(float x) { return x - vf{}; }  // not 0 + x, which is another number for -0
INLINE vi splat(int32_t x) { return vi{} + x; }
INLINE vf max(vf a, vf b) { return select(a > b, a, b); }
INLINE vf min(vf a, vf b) { return select(a < b, a, b); }

}  // namespace outpace
