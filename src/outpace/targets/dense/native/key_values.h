// How keys and values lie in memory, for each type that they are kept in.
//
// A row is one head's key or value of one token, padded to whole registers. Rows of a tree lie one by one. The store
// of committed tokens is in blocks of sixteen, so that products read whole registers: keys transposed, a register
// holding the same dimension of sixteen keys; values with a register holding sixteen dimensions of one token. Types
// whose products take PAIR = 2 numbers at a time have two neighbouring dimensions (or tokens) in each 32-bit lane.
// A block takes as many bytes as sixteen rows. A register takes part in WORDS products, each with a word of what it meets
// (a query, weights): two bf16, or one float.
//
// Rows of 8 bits have a scale and numbers of a sign and seven bits of magnitude. These are widened to bf16, which holds
// them exactly, on their way into a product; scores and weights take the scales. Some models' keys have a few dimensions
// that are far larger than the rest, and a common scale would leave the rest no bits: keys (and the queries that meet them)
// are turned by a Hadamard matrix first, which spreads every dimension over all and keeps their products.
#pragma once

#include <cmath>

#include "simd.h"

namespace outpace {

inline int round_up(int n, int to) { return (n + to - 1) / to * to; }

struct q8 { uint8_t bits; };

template <class T>
struct Kept;

template <>
struct Kept<float> {
    using Product = float;
    static constexpr int PAIR = 1, WORDS = 1;
    static constexpr bool quantised = false;

    static size_t row_bytes(int width) { return sizeof(float) * width; }
    static void write(uint8_t* row, const float* x, int width) { std::memcpy(row, x, row_bytes(width)); }
    static void write_key(uint8_t* row, float* x, int width) { write(row, x, width); }
    static void write_value(uint8_t* row, const float* x, int width) { write(row, x, width); }

    static void place_key(uint8_t* blocks, int at, const uint8_t* row, int width) {
        float* to = (float*)blocks + size_t(at / LANES) * width * LANES + at % LANES;
        for (int d = 0; d < width; ++d) to[size_t(d) * LANES] = ((const float*)row)[d];
    }
    static void place_value(uint8_t* blocks, int at, const uint8_t* row, int width) {
        std::memcpy(blocks + at * row_bytes(width), row, row_bytes(width));
    }
    static void take_key(const uint8_t* blocks, int at, uint8_t* row, int width) {
        const float* from = (const float*)blocks + size_t(at / LANES) * width * LANES + at % LANES;
        for (int d = 0; d < width; ++d) ((float*)row)[d] = from[size_t(d) * LANES];
    }
    static void take_value(const uint8_t* blocks, int at, uint8_t* row, int width) {
        std::memcpy(row, blocks + at * row_bytes(width), row_bytes(width));
    }
    static void read_key(const uint8_t* row, float* to, int width) { std::memcpy(to, row, row_bytes(width)); }
    // Sixteen numbers of a value's row from `d` on, as they enter a product.
    static INLINE vu product_input(const uint8_t* row, int d) { return load_as<vu>((const float*)row + d); }
};

template <>
struct Kept<bf16> {
    using Product = bf16;
    static constexpr int PAIR = 2, WORDS = HALVES;
    static constexpr bool quantised = false;

    static size_t row_bytes(int width) { return sizeof(bf16) * width; }
    static void write(uint8_t* row, const float* x, int width) {
        for (int d = 0; d < width; d += LANES) store((bf16*)row + d, load(x + d));
    }
    static void write_key(uint8_t* row, float* x, int width) { write(row, x, width); }
    static void write_value(uint8_t* row, const float* x, int width) { write(row, x, width); }

    static void place_key(uint8_t* blocks, int at, const uint8_t* row, int width) {
        uint8_t* to = blocks + size_t(at / LANES) * LANES * row_bytes(width) + at % LANES * 4;
        for (int d = 0; d < width; d += 2) std::memcpy(to + size_t(d) * LANES * 2, row + d * 2, 4);
    }
    // Placing the first of two neighbours clears the second, which products read together with it (its weight is 0, but
    // 0 times what was never written may be NaN). So neighbours are placed in order, by one thread.
    static void place_value(uint8_t* blocks, int at, const uint8_t* row, int width) {
        uint8_t* to = blocks + size_t(at / 2) * 2 * row_bytes(width);
        for (int d = 0; d < width; d += LANES, to += sizeof(vu)) {
            vu mine = product_input(row, d);
            if (at % 2) mine = (mine << 16) | (load_as<vu>(to) & 0xffffu);
            store_as(to, mine);
        }
    }
    static void take_key(const uint8_t* blocks, int at, uint8_t* row, int width) {
        const uint8_t* from = blocks + size_t(at / LANES) * LANES * row_bytes(width) + at % LANES * 4;
        for (int d = 0; d < width; d += 2) std::memcpy(row + d * 2, from + size_t(d) * LANES * 2, 4);
    }
    static void take_value(const uint8_t* blocks, int at, uint8_t* row, int width) {
        const uint16_t* from = (const uint16_t*)(blocks + size_t(at / 2) * 2 * row_bytes(width)) + at % 2;
        for (int d = 0; d < width; ++d) ((uint16_t*)row)[d] = from[d * 2];
    }
    static void read_key(const uint8_t* row, float* to, int width) {
        for (int d = 0; d < width; d += LANES) store(to + d, load((const bf16*)row + d));
    }
    static INLINE vu product_input(const uint8_t* row, int d) {
        return load_converted<vu>((const uint16_t*)row + d);
    }
};

// bf16 of the magnitudes 0 to 127, as low and high bytes.
struct Magnitudes {
    alignas(64) uint8_t low[128] = {}, high[128] = {};
    constexpr Magnitudes() {
        for (int m = 1; m < 128; ++m) {
            int e = 0;
            while (m >> (e + 1)) ++e;
            const int bits = ((127 + e) << 7) | ((m << (7 - e)) & 0x7f);
            low[m] = uint8_t(bits), high[m] = uint8_t(bits >> 8);
        }
    }
};
inline constexpr Magnitudes MAGNITUDES;

// The two registers of pairs that lie interleaved, by eights, in 64 bytes.
INLINE void widen(const uint8_t* at, vu& first, vu& second) {
#if defined(__AVX512VBMI__)
    const __m512i x = _mm512_loadu_si512(at);
    const auto table = [](const uint8_t* t, __m512i i) { return _mm512_permutex2var_epi8(_mm512_load_si512(t), i, _mm512_load_si512(t + 64)); };
    const __m512i low = table(MAGNITUDES.low, x), magnitude = table(MAGNITUDES.high, x);
    const __m512i high = _mm512_ternarylogic_epi32(magnitude, x, _mm512_set1_epi8(char(0x80)), 0xf8);  // a | (b & c)
    first = (vu)_mm512_unpacklo_epi8(low, high), second = (vu)_mm512_unpackhi_epi8(low, high);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    // The float of a magnitude has no more bits than bf16.
    const auto pairs = [](__m256i bytes) __attribute__((always_inline)) {  // 16 bits each
        const auto number = [](__m256i x) __attribute__((always_inline)) {
            return _mm256_castps_si256(_mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(0x7f))));
        };
        const __m256i signs = _mm256_slli_epi32(_mm256_and_si256(bytes, _mm256_set1_epi32(0x00800080)), 8);
        const __m256i both = _mm256_or_si256(_mm256_srli_epi32(number(bytes), 16), number(_mm256_srli_epi32(bytes, 16)));
        return (vu::Half)_mm256_or_si256(both, signs);
    };
    const __m256i none = _mm256_setzero_si256(), a = _mm256_loadu_si256((const __m256i*)at), b = _mm256_loadu_si256((const __m256i*)at + 1);
    first = {pairs(_mm256_unpacklo_epi8(a, none)), pairs(_mm256_unpacklo_epi8(b, none))};
    second = {pairs(_mm256_unpackhi_epi8(a, none)), pairs(_mm256_unpackhi_epi8(b, none))};
#else
    const auto half = [](uint8_t b) { return uint32_t(MAGNITUDES.low[b & 127] | MAGNITUDES.high[b & 127] << 8 | (b & 128) << 8); };
    uint32_t both[2][LANES];
    for (int i = 0; i < LANES; ++i) {
        const uint8_t* pair = at + i / 4 * 16 + i % 4 * 2;
        both[0][i] = half(pair[0]) | half(pair[1]) << 16;
        both[1][i] = half(pair[8]) | half(pair[9]) << 16;
    }
    first = load_as<vu>(both[0]), second = load_as<vu>(both[1]);
#endif
}

// Turn `count` numbers by the Hadamard matrix of their number's largest factor that is a power of two; its own inverse.
inline void turn(float* x, int count) {
    const int size = count & -count;
    for (int half = 1; half < size; half *= 2)
        for (int from = 0; from < count; from += 2 * half)
            for (int i = from; i < from + half; ++i) {
                const float a = x[i], b = x[i + half];
                x[i] = a + b, x[i + half] = a - b;
            }
    const float scale = 1.f / std::sqrt(float(size));
    for (int i = 0; i < count; ++i) x[i] *= scale;
}

template <>
struct Kept<q8> {
    using Product = bf16;
    static constexpr int PAIR = 2, WORDS = HALVES;
    static constexpr bool quantised = true;

    static size_t row_bytes(int width) { return width + sizeof(float); }

    static void write_value(uint8_t* row, const float* x, int width) {
        vf most = {};
        for (int d = 0; d < width; d += LANES) most = max(most, max(load(x + d), -load(x + d)));
        const float scale = highest(most) / 127.f;
        const bool finite = scale < __builtin_inff();  // else the scale alone is kept
        const float inverse = finite && scale > 1e-37f ? 1.f / scale : 0.f;
        for (int d = 0; d < width; d += LANES) {
            const vf v = finite ? load(x + d) * inverse : splat(1.f);
            store_bytes(row + d, (vu)truncated(min(max(v, -v) + 0.5f, splat(127.f))) | ((vu)v >> 24 & 128u));
        }
        std::memcpy(row + width, &scale, sizeof scale);
    }
    static void write_key(uint8_t* row, float* x, int width) {
        turn(x, width);
        write_value(row, x, width);
    }
    static float scale(const uint8_t* row, int width) {
        float found;
        std::memcpy(&found, row + width, sizeof found);
        return found;
    }
    // A block's scales, (16), behind its numbers.
    static vf scales(const uint8_t* block, int width) { return load((const float*)(block + size_t(width) * LANES)); }

    // Where the number of dimension d is in its block.
    static size_t key_place(int at, int d, int) { return size_t(d / 4) * 64 + at % LANES / 4 * 16 + d / 2 % 2 * 8 + at % 4 * 2 + d % 2; }
    static size_t value_place(int at, int d, int width) {
        const int number = d % LANES * 2 + at % 2;
        return size_t(at % LANES / 4) * 4 * width + d / LANES * 64 + number / 8 * 16 + at / 2 % 2 * 8 + number % 8;
    }
    template <class Place>
    static void put(uint8_t* blocks, int at, const uint8_t* row, int width, Place place) {
        uint8_t* block = blocks + at / LANES * LANES * row_bytes(width);
        for (int d = 0; d < width; ++d) block[place(at, d, width)] = row[d];
        std::memcpy(block + size_t(width) * LANES + at % LANES * sizeof(float), row + width, sizeof(float));
    }
    template <class Place>
    static void take(const uint8_t* blocks, int at, uint8_t* row, int width, Place place) {
        const uint8_t* block = blocks + at / LANES * LANES * row_bytes(width);
        for (int d = 0; d < width; ++d) row[d] = block[place(at, d, width)];
        std::memcpy(row + width, block + size_t(width) * LANES + at % LANES * sizeof(float), sizeof(float));
    }
    static void place_key(uint8_t* blocks, int at, const uint8_t* row, int width) { put(blocks, at, row, width, key_place); }
    static void place_value(uint8_t* blocks, int at, const uint8_t* row, int width) { put(blocks, at, row, width, value_place); }
    static void take_key(const uint8_t* blocks, int at, uint8_t* row, int width) { take(blocks, at, row, width, key_place); }
    static void take_value(const uint8_t* blocks, int at, uint8_t* row, int width) { take(blocks, at, row, width, value_place); }
    static void read_key(const uint8_t* row, float* to, int width) {
        for (int d = 0; d < width; ++d) to[d] = scale(row, width) * float(row[d] & 127) * (row[d] & 128 ? -1.f : 1.f);
        turn(to, width);
    }
    static INLINE vu product_input(const uint8_t* row, int d) {
        const vu x = load_converted<vu>(row + d);
        return (vu)to_float((vi)(x & 127u)) >> 16 | (x & 128u) << 8;
    }
};

}  // namespace outpace
