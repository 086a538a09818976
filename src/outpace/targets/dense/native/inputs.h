// The rows that products read, in each form that the weights multiply with.
#pragma once

#include <algorithm>
#include <new>
#include <vector>

#include "formats.h"

namespace outpace {

// What a format wants its inputs as.
enum Want : int { WANT_F32 = 1, WANT_BF16 = 2, WANT_Q = 4 };
inline int want(Format format) { return format == F32 ? WANT_F32 : format == BF16 ? WANT_BF16 : WANT_Q; }

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
        if (wants & WANT_Q && q.size() < n) {
            q.resize(n);
            scale.resize(n / BLOCK);
            scaled_sum.resize(n / BLOCK);
            sum16.resize(n / 16);
        }
    }

    // Take inputs [from, to) of one row over; `from` is a multiple of 32. The last ones bring the padding with them:
    // zero times what an earlier forward left there is not zero where that was not finite.
    void take(int row, const float* values, int from, int to) {
        size_t base = size_t(row) * depth;
        if (to == inputs && to < depth) {
            if (wanted & WANT_F32) std::fill(f32.begin() + base + to, f32.begin() + base + depth, 0.f);
            if (wanted & WANT_BF16) std::fill(half.begin() + base + to, half.begin() + base + depth, bf16{0});
        }
        if (wanted & WANT_F32) std::memcpy(&f32[base + from], values + from, sizeof(float) * (to - from));
        if (wanted & WANT_BF16) {
            int i = from;
            for (; i + LANES <= to; i += LANES) store(&half[base + i], load(values + i));
            for (; i < to; ++i) half[base + i] = narrow_bf16(values[i]);
        }
        if (wanted & WANT_Q)
            for (int at = from; at < to; at += BLOCK) quantise(row, values + at, at, std::min(BLOCK, to - at));
    }

   private:
    void quantise(int row, const float* values, int at, int count) {
        float padded[BLOCK];  // filled where it is needed: zeroing it each time takes as long as the rest
        if (count < BLOCK) {
            std::fill(std::copy(values, values + count, padded), padded + BLOCK, 0.f);
            values = padded;
        }
        vf low = load(values), high = load(values + LANES);
        float peak = highest(max(max(low, -low), max(high, -high)));
        float step = peak / 127.f, inverse = peak > 0.f ? 127.f / peak : 0.f;
        size_t base = size_t(row) * depth + at;
        int32_t sums[2] = {0, 0};
        vf halves[2] = {low * inverse, high * inverse};
        for (int h = 0; h < 2; ++h) {
#if defined(__AVX512F__)
            __m512i whole = _mm512_cvtps_epi32((__m512)halves[h]);
            _mm_storeu_si128((__m128i*)&q[base + h * LANES], _mm512_cvtepi32_epi8(whole));
            sums[h] = _mm512_reduce_add_epi32(whole);
#else
            for (int i = 0; i < LANES; ++i) {
                int32_t whole = int32_t(__builtin_rintf(halves[h][i]));
                q[base + h * LANES + i] = int8_t(whole);
                sums[h] += whole;
            }
#endif
        }
        size_t block = base / BLOCK;
        scale[block] = step;
        scaled_sum[block] = step * float(sums[0] + sums[1]);
        sum16[2 * block] = sums[0];
        sum16[2 * block + 1] = sums[1];
    }
};

}  // namespace outpace
