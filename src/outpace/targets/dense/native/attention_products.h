// Products of a few queries with blocks of keys, and of their weights with values.
//
// Each query's result is summed in one fixed order, however many queries and blocks are computed beside it.
#pragma once

#include <algorithm>

#include "key_values.h"

namespace outpace {

// Whether a word that a register of this type meets holds two numbers.
template <class T>
constexpr bool PAIRS = Kept<T>::PAIR == 2 && PAIRED;

// What the h-th product with a register takes of it.
template <class T>
INLINE vu factors(vu column, int h) { return Kept<T>::PAIR == 2 ? half(column, h) : column; }

// Scores of M queries, q (width / PAIR * WORDS, M), with B blocks of keys: rows (M, stride).
template <class T, int M, int B>
void scores(const uint8_t* keys, const uint32_t* q, int width, float scale, float* rows, size_t stride) {
    constexpr int W = Kept<T>::WORDS;
    const int columns = width / Kept<T>::PAIR;
    const size_t block = LANES * Kept<T>::row_bytes(width);
    vf acc[M][B] = {};
    if constexpr (Kept<T>::quantised) {
        for (int c = 0; c < columns; c += 2)
            for (int b = 0; b < B; ++b) {
                vu even, odd;
                widen(keys + b * block + size_t(c) * sizeof(vu) / 2, even, odd);
                for (int h = 0; h < 2 * W; ++h) {
                    const vu column = factors<T>(h < W ? even : odd, h % W);
                    for (int i = 0; i < M; ++i) acc[i][b] = product<PAIRS<T>>(acc[i][b], column, q[(c * W + h) * M + i]);
                }
            }
        for (int b = 0; b < B; ++b)
            for (int i = 0; i < M; ++i) acc[i][b] = acc[i][b] * Kept<T>::scales(keys + b * block, width);
    } else {
        for (int c = 0; c < columns; ++c)
            for (int h = 0; h < W; ++h) {
                vu column[B];
                for (int b = 0; b < B; ++b) column[b] = factors<T>(load_as<vu>(keys + b * block + size_t(c) * sizeof(vu)), h);
                for (int i = 0; i < M; ++i)
                    for (int b = 0; b < B; ++b) acc[i][b] = product<PAIRS<T>>(acc[i][b], column[b], q[(c * W + h) * M + i]);
            }
    }
    for (int i = 0; i < M; ++i)
        for (int b = 0; b < B; ++b) store(rows + i * stride + b * LANES, acc[i][b] * scale);
}

// How many queries are taken together: q lies transposed in groups of these sizes. Their sums are to fit the registers.
constexpr bool MANY_REGISTERS = REGISTER == 64;
INLINE int together(int left) { return left >= 12 && MANY_REGISTERS ? 12 : left >= 6 ? 6 : left >= 3 ? 3 : 1; }

template <class T, int M, int B>
void block_scores(const uint8_t* keys, int blocks, const uint32_t* q, int width, float scale, float* rows, size_t stride) {
    const size_t block = LANES * Kept<T>::row_bytes(width);
    int b = 0;
    for (; b + B <= blocks; b += B) scores<T, M, B>(keys + b * block, q, width, scale, rows + b * LANES, stride);
    for (; b < blocks; ++b) scores<T, M, 1>(keys + b * block, q, width, scale, rows + b * LANES, stride);
}

template <class T>
void all_scores(const uint8_t* keys, int blocks, const uint32_t* q, int count, int width, float scale, float* rows, size_t stride) {
    for (int m; count > 0; q += m * width / Kept<T>::PAIR * Kept<T>::WORDS, rows += m * stride, count -= m) {
        m = together(count);
        constexpr int MORE = Kept<T>::quantised || !MANY_REGISTERS ? 1 : 2;  // blocks at once, as registers allow
        auto run = m == 12 ? block_scores<T, MANY_REGISTERS ? 12 : 1, MORE> : m == 6 ? block_scores<T, 6, MORE> : m == 3 ? block_scores<T, 3, 2 * MORE> : block_scores<T, 1, 4 * MORE>;
        run(keys, blocks, q, width, scale, rows, stride);
    }
}

// rows[i] += sum over steps [first, last), in order, of weights[i][step] * values[step], over N * 16 dimensions.
// A step is as many keys as a product takes.
template <class T, int M, int N>
void mix(const uint8_t* values, int width, int first, int last, const uint32_t* weights, size_t stride, float* rows, size_t step) {
    constexpr int W = Kept<T>::WORDS;
    vf acc[M][N];
    for (int i = 0; i < M; ++i)
        for (int j = 0; j < N; ++j) acc[i][j] = load(rows + i * step + j * LANES);
    if constexpr (Kept<T>::quantised) {
        // Four keys are widened together; of those at the ends, one step may weigh nothing here.
        const auto four = [&](int s, uint32_t even_counts, uint32_t odd_counts) __attribute__((always_inline)) {
            const uint8_t* at = values + size_t(s / 8) * LANES * Kept<T>::row_bytes(width) + s / 2 % 4 * 4 * width;
            for (int j = 0; j < N; ++j) {
                vu even, odd;
                widen(at + j * sizeof(vu), even, odd);
                for (int h = 0; h < 2 * W; ++h) {
                    const vu column = factors<T>(h < W ? even : odd, h % W);
                    const uint32_t counts = h < W ? even_counts : odd_counts;
                    for (int i = 0; i < M; ++i) acc[i][j] = product<PAIRS<T>>(acc[i][j], column, weights[i * stride + s * W + h] & counts);
                }
            }
        };
        int s = first;
        if (s % 2) four(s - 1, 0, ~0u), ++s;
        for (; s + 1 < last; s += 2) four(s, ~0u, ~0u);
        if (s < last) four(s, ~0u, 0);
    } else {
        const size_t bytes = Kept<T>::PAIR * Kept<T>::row_bytes(width);
        for (int s = first; s < last; ++s) {
            for (int h = 0; h < W; ++h) {
                vu column[N];
                for (int j = 0; j < N; ++j) column[j] = factors<T>(load_as<vu>(values + s * bytes + j * sizeof(vu)), h);
                for (int i = 0; i < M; ++i)
                    for (int j = 0; j < N; ++j) acc[i][j] = product<PAIRS<T>>(acc[i][j], column[j], weights[i * stride + s * W + h]);
            }
        }
    }
    for (int i = 0; i < M; ++i)
        for (int j = 0; j < N; ++j) store(rows + i * step + j * LANES, acc[i][j]);
}

template <class T, int N>
void mix_some(const uint8_t* values, int width, int first, int last, const uint32_t* weights, size_t stride, float* rows,
              size_t step, int count) {
    for (; count > 0;) {
        int m = count >= 6 && (N == 1 || MANY_REGISTERS) ? 6 : count >= 3 ? 3 : 1;
        auto run = m == 6 ? mix<T, N == 1 || MANY_REGISTERS ? 6 : 1, N> : m == 3 ? mix<T, 3, N> : mix<T, 1, N>;
        run(values, width, first, last, weights, stride, rows, step);
        weights += m * stride, rows += m * step, count -= m;
    }
}

template <class T>
void mix_all(const uint8_t* values, int width, int first, int last, const uint32_t* weights, size_t stride, float* rows,
             size_t step, int count) {
    if (first >= last) return;
    constexpr int MORE = MANY_REGISTERS ? 4 : 2;
    int at = 0;
    for (; at + MORE * LANES <= width; at += MORE * LANES)
        mix_some<T, MORE>(values + at / LANES * sizeof(vu), width, first, last, weights, stride, rows + at, step, count);
    for (; at < width; at += LANES)
        mix_some<T, 1>(values + at / LANES * sizeof(vu), width, first, last, weights, stride, rows + at, step, count);
}

}  // namespace outpace
