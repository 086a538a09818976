// The rows that products read, in each form that the weights multiply with.
#pragma once

#include <algorithm>
#include <new>
#include <vector>

#include "formats.h"
#include "tiles.h"

namespace outpace {

// What a format wants its inputs as.
enum Want : int { WANT_F32 = 1, WANT_BF16 = 2, WANT_Q = 4, WANT_TILES = 8 };
inline int want(Format format) {
    if (format == BF16) return tiles::usable() ? WANT_TILES : PAIRED ? WANT_BF16 : WANT_F32;
    return format == F32 ? WANT_F32 : WANT_Q;
}

// Memory that begins with a cache line: a row that tiles read then lies in as few lines as it can.
template <class T>
struct CacheLines {
    using value_type = T;
    CacheLines() = default;
    template <class U> CacheLines(const CacheLines<U>&) {}
    T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(64))); }
    void deallocate(T* at, size_t) { ::operator delete(at, std::align_val_t(64)); }
    template <class U> bool operator==(const CacheLines<U>&) const { return true; }
    template <class U> bool operator!=(const CacheLines<U>&) const { return false; }
};

struct Inputs {
    int depth = 0, inputs = 0, wanted = 0;
    std::vector<float> f32;
    std::vector<bf16, CacheLines<bf16>> half;
    std::vector<bf16, CacheLines<bf16>> tiled;  // (rows / 16, depth / 32, 16, 32): what a tile takes lies together
    std::vector<int8_t, CacheLines<int8_t>> q;  // (rows, depth)
    std::vector<float> scale;       // (rows, depth / 32)
    std::vector<float> scaled_sum;  // scale * sum of the block's q
    std::vector<int32_t> sum16;     // (rows, depth / 16)

    // Room for `rows`. What is there is of an earlier forward, maybe of a model of other sizes.
    void prepare(int wants, int rows, int inputs) {
        this->inputs = inputs;
        depth = (inputs + BLOCK - 1) / BLOCK * BLOCK;
        wanted = wants;
        size_t n = size_t(rows) * depth;
        if (wants & WANT_F32 && f32.size() < n) f32.resize(n);
        if (wants & WANT_BF16 && half.size() < n) half.resize(n);
        const size_t whole = size_t((rows + tiles::ROWS - 1) / tiles::ROWS) * tiles::ROWS * depth;
        if (wants & WANT_TILES && tiled.size() < whole) tiled.resize(whole);
        if (wants & WANT_Q && q.size() < n) {
            q.resize(n);
            scale.resize(n / BLOCK);
            scaled_sum.resize(n / BLOCK);
            sum16.resize(n / 16);
        }
    }

    // Where the tiles begin that `row` is in.
    size_t tile(int row) const { return size_t(row / tiles::ROWS) * tiles::ROWS * depth; }

    // Take inputs [from, to) of one row over; `from` is a multiple of 32. The last ones bring the padding with them:
    // zero times what an earlier forward left there is not zero where that was not finite.
    void take(int row, const float* values, int from, int to) {
        size_t base = size_t(row) * depth;
        if (to == inputs && to < depth) {
            if (wanted & WANT_F32) std::fill(f32.begin() + base + to, f32.begin() + base + depth, 0.f);
            if (wanted & WANT_BF16) std::fill(half.begin() + base + to, half.begin() + base + depth, bf16{0});
        }
        if (wanted & WANT_F32) std::memcpy(&f32[base + from], values + from, sizeof(float) * (to - from));
        if (wanted & WANT_BF16) narrow(values + from, to - from, &half[base + from]);
        if (wanted & WANT_TILES)
            for (int at = from; at < to; at += BLOCK) {
                bf16* block = &tiled[tile(row) + size_t(at) * tiles::ROWS + row % tiles::ROWS * BLOCK];
                const int count = std::min(BLOCK, to - at);
                narrow(values + at, count, block);
                std::fill(block + count, block + BLOCK, bf16{0});
            }
        if (wanted & WANT_Q) quantise(row, values, from, to);
    }

    // The same of rows [0, count), whose values lie `stride` apart: fewer than four blocks of each are as quick as four.
    void take_all(int count, const float* values, size_t stride, int from, int to) {
        if (wanted != WANT_Q || to - from >= 4 * BLOCK || to % BLOCK) {
            for (int row = 0; row < count; ++row) take(row, values + row * stride, from, to);
            return;
        }
        for (int at = from; at < to; at += BLOCK)
            for (int row = 0; row < count; row += 4) {
                const float* four[4];
                size_t blocks[4];
                for (int i = 0; i < 4; ++i) {
                    const int one = std::min(row + i, count - 1);
                    four[i] = values + one * stride + at;
                    blocks[i] = (size_t(one) * depth + at) / BLOCK;
                }
                quantise_four(four, blocks);
            }
    }

   private:
    static void narrow(const float* values, int count, bf16* to) {
        int i = 0;
        for (; i + LANES <= count; i += LANES) store(to + i, load(values + i));
        for (; i < count; ++i) to[i] = narrow_bf16(values[i]);
    }

    // Four blocks at a time; where fewer are left, the last one is done again.
    void quantise(int row, const float* values, int from, int to) {
        float padded[BLOCK];
        const int last = to / BLOCK * BLOCK;
        if (last < to) std::fill(std::copy(values + last, values + to, padded), padded + BLOCK, 0.f);
        for (int at = from; at < to; at += 4 * BLOCK) {
            const float* four[4];
            size_t blocks[4];
            for (int i = 0; i < 4; ++i) {
                const int one = std::min(at + i * BLOCK, (to - 1) / BLOCK * BLOCK);
                four[i] = one < last ? values + one : padded;
                blocks[i] = (size_t(row) * depth + one) / BLOCK;
            }
            quantise_four(four, blocks);
        }
    }

    void quantise_four(const float* const (&values)[4], const size_t (&blocks)[4]) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
        __m512 halves[8], peaks[4];
        for (int i = 0; i < 4; ++i) {
            halves[2 * i] = _mm512_loadu_ps(values[i]), halves[2 * i + 1] = _mm512_loadu_ps(values[i] + LANES);
            peaks[i] = _mm512_max_ps(_mm512_abs_ps(halves[2 * i]), _mm512_abs_ps(halves[2 * i + 1]));
        }
        // Each quarter of a register then has the four blocks' peaks.
        const auto pairs = [](__m512 a, __m512 b) { return _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); };
        const __m512d some = _mm512_castps_pd(pairs(peaks[0], peaks[1])), others = _mm512_castps_pd(pairs(peaks[2], peaks[3]));
        __m512 peak = _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(some, others)), _mm512_castpd_ps(_mm512_unpackhi_pd(some, others)));
        peak = _mm512_max_ps(peak, _mm512_shuffle_f32x4(peak, peak, 0x4e));
        peak = _mm512_max_ps(peak, _mm512_shuffle_f32x4(peak, peak, 0xb1));
        const __m512 most = _mm512_set1_ps(127.f);
        const __m128 steps = _mm_div_ps(_mm512_castps512_ps128(peak), _mm_set1_ps(127.f));
        const __m512 inverse = _mm512_maskz_div_ps(_mm512_cmp_ps_mask(peak, _mm512_setzero_ps(), _CMP_GT_OQ), most, peak);
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        float step[4];
        _mm_storeu_ps(step, steps);
        for (int two = 0; two < 4; two += 2) {
            __m512i whole[4];
            for (int h = 0; h < 4; ++h) {
                const __m512 factor = _mm512_permutexvar_ps(_mm512_set1_epi32(two + h / 2), inverse);
                whole[h] = _mm512_cvtps_epi32(_mm512_mul_ps(halves[2 * two + h], factor));
            }
            const __m512i bytes = _mm512_permutexvar_epi32(
                order, _mm512_packs_epi16(_mm512_packs_epi32(whole[0], whole[1]), _mm512_packs_epi32(whole[2], whole[3])));
            __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), bytes);
            sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_ENUM(0x4e)));
            sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_ENUM(0xb1)));
            int32_t sum[4];
            _mm_storeu_si128((__m128i*)sum, _mm512_castsi512_si128(_mm512_permutexvar_epi32(order, sums)));
            keep(blocks[two], _mm512_castsi512_si256(bytes), step[two], sum);
            keep(blocks[two + 1], _mm512_extracti64x4_epi64(bytes, 1), step[two + 1], sum + 2);
        }
#else
        for (int b = 0; b < 4; ++b) {
            const vf low = load(values[b]), high = load(values[b] + LANES);
            const float peak = highest(max(max(low, -low), max(high, -high)));
            const float inverse = peak > 0.f ? 127.f / peak : 0.f;
            const vf halves[2] = {low * inverse, high * inverse};
            int32_t sums[2] = {0, 0};
#if defined(__AVX2__) && !defined(__AVX512F__)
            const auto words = [](vf v) __attribute__((always_inline)) {
                return _mm256_packs_epi32(_mm256_cvtps_epi32((__m256)v.a), _mm256_cvtps_epi32((__m256)v.b));
            };
            const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            const __m256i whole = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words(halves[0]), words(halves[1])), order);
            const __m256i quads = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), whole), _mm256_set1_epi16(1));
            int32_t found[8];
            _mm256_storeu_si256((__m256i*)found, quads);
            for (int i = 0; i < 8; ++i) sums[i / 4] += found[i];
#else
            int8_t whole[BLOCK];
            for (int i = 0; i < BLOCK; ++i) {
                whole[i] = int8_t(__builtin_rintf(halves[i / LANES][i % LANES]));
                sums[i / LANES] += whole[i];
            }
#endif
            keep(blocks[b], whole, peak / 127.f, sums);
        }
#endif
    }

    template <class Bytes>
    INLINE void keep(size_t block, const Bytes& bytes, float step, const int32_t* sums) {
        static_assert(sizeof bytes == BLOCK);
        std::memcpy(&q[block * BLOCK], &bytes, BLOCK);
        scale[block] = step;
        scaled_sum[block] = step * float(sums[0] + sums[1]);
        sum16[2 * block] = sums[0];
        sum16[2 * block + 1] = sums[1];
    }
};

}  // namespace outpace
