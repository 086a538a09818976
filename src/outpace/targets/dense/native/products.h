// Products of a few rows with a few tiles, one for each kind of format.
//
// Each row's result is summed in one fixed order, whatever other rows are computed beside it: scoring a tree gives
// bit for bit what scoring its tokens one at a time gives.
#pragma once

#include "block_scales.h"
#include "inputs.h"

namespace outpace {

enum Activation : int32_t { NONE, SILU, GELU };

INLINE vf activated(Activation kind, vf gate) {
    if (kind == SILU) return gate / one_and_exp(gate);
    // GELU by its usual approximation with tanh: 0.5 (1 + tanh z) = sigmoid(2z)
    vf z = 0.7978845608028654f * fma(0.044715f * gate * gate, gate, gate);
    return gate / one_and_exp(2.f * z);
}

// Where results go. With an activation, tiles come in pairs (gate, up) and one result is written for each pair.
struct Outputs {
    float* rows;
    size_t stride;
    Activation activation = NONE;
};

// The tiles that this thread multiplies next: fetched from memory while it computes on those that are here.
struct Ahead {
    const uint8_t* from = nullptr;
    size_t tile_bytes = 0;
    int first = 0, last = 0;

    INLINE void fetch(size_t offset, size_t bytes) const {
        for (int j = first; j < last; ++j)
            for (size_t line = 0; line < bytes; line += 64) outpace::fetch(from + j * tile_bytes + offset + line);
    }
};

// The loops are unrolled by name: sums that a loop indexes lie in memory, and the product begins by zeroing that.
template <int M, int N>
INLINE void finish(const Linear& w, const Outputs& out, int tile, int row, vf (&acc)[N][M]) {
    if (w.bias) {
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j)
#pragma GCC unroll 6
            for (int i = 0; i < M; ++i) acc[j][i] += load(w.bias + (tile + j) * LANES);
    }
    float* to = out.rows + row * out.stride;
    if (out.activation == NONE) {
#pragma GCC unroll 6
        for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
            for (int j = 0; j < N; ++j) store(to + i * out.stride + (tile + j) * LANES, acc[j][i]);
    } else if constexpr (N % 2 == 0) {
#pragma GCC unroll 6
        for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
            for (int j = 0; j < N; j += 2)
                store(to + i * out.stride + (tile + j) / 2 * LANES, activated(out.activation, acc[j][i]) * acc[j + 1][i]);
    }
}

template <int M, int N>
void product_f32(const Linear& w, const Inputs& x, const Outputs& out, const Ahead& ahead, int tile, int row) {
    vf acc[N][M] = {};
    const float* weights[N];
    for (int j = 0; j < N; ++j) weights[j] = (const float*)w.tile(tile + j);
    const float* values = &x.f32[size_t(row) * x.depth];
    for (int k = 0; k < w.depth; ++k) {
        if (k % 8 == 0) ahead.fetch(size_t(k) * LANES * 4, 8 * LANES * 4);
        vf column[N];
        for (int j = 0; j < N; ++j) column[j] = load(weights[j] + k * LANES);
        for (int i = 0; i < M; ++i) {
            vf value = splat(values[size_t(i) * x.depth + k]);
            for (int j = 0; j < N; ++j) acc[j][i] = fma(column[j], value, acc[j][i]);
        }
    }
    finish<M, N>(w, out, tile, row, acc);
}

template <int M, int N>
void product_bf16(const Linear& w, const Inputs& x, const Outputs& out, const Ahead& ahead, int tile, int row) {
    vf acc[N][M] = {};
    const uint8_t* weights[N];
    for (int j = 0; j < N; ++j) weights[j] = w.tile(tile + j);
    const uint8_t* values = PAIRED ? (const uint8_t*)&x.half[size_t(row) * x.depth] : (const uint8_t*)&x.f32[size_t(row) * x.depth];
    for (int k = 0; k < w.depth; k += 2) {
        // A line at a time: what is read now waits behind many that are fetched at once.
        ahead.fetch(size_t(k) * LANES * 2, 2 * LANES * 2);
        for (int j = 0; j < N; ++j) fetch_close(weights[j] + (k + 16) * LANES * 2);
        for (int h = 0; h < HALVES; ++h) {
            vu column[N];
            for (int j = 0; j < N; ++j) column[j] = half(load_as<vu>(weights[j] + k * LANES * 2), h);
                for (int i = 0; i < M; ++i) {
                uint32_t word;
                std::memcpy(&word, values + (size_t(i) * x.depth + k) * 2 * HALVES + h * 4, 4);
                for (int j = 0; j < N; ++j) acc[j][i] = product<PAIRED>(acc[j][i], column[j], word);
            }
        }
    }
    finish<M, N>(w, out, tile, row, acc);
}

// A tile of a quantised matrix: the payloads of its blocks, then their scales, then their minima.
template <Format F, int M, int N>
void product_quantised(const Linear& w, const Inputs& x, const Outputs& out, const Ahead& ahead, int tile, int row) {
    using B = Quantised<F>;
    constexpr int QUADS = BLOCK / 4 / B::parts;
    const int blocks = w.depth / BLOCK, stride = x.depth / BLOCK;
    vf acc[N][M] = {};
    const uint8_t* payload[N];
    for (int j = 0; j < N; ++j) payload[j] = w.tile(tile + j);
    const int8_t* values = &x.q[size_t(row) * x.depth];
    const float* steps = &x.scale[size_t(row) * stride];
    const float* scaled_sums = &x.scaled_sum[size_t(row) * stride];
    const int32_t* sums = &x.sum16[size_t(row) * stride * 2];
    for (int b = 0; b < blocks; ++b) {
        ahead.fetch(b * B::block, B::block);
        for (int part = 0; part < B::parts; ++part) {
            Dots<B::bits> whole[N][M];
            UNROLLED
            for (int i = 0; i < M; ++i) {
                int32_t sum = 0;
                if constexpr (!B::minimum) {
                    const int32_t* both = sums + (size_t(i) * stride + b) * 2;
                    sum = B::parts == 2 ? both[part] : both[0] + both[1];
                }
                for (int j = 0; j < N; ++j) begin(whole[j][i], sum, B::minimum ? 0 : B::zero);
            }
            const int8_t* bytes = values + b * BLOCK + part * QUADS * 4;
            if constexpr (B::bits == 4) {
                UNROLLED
                for (int quad = 0; quad < QUADS; quad += 2) {  // two quads share a register: low and high nibbles
                    vu low[N], high[N];
                    for (int j = 0; j < N; ++j) {
                        vu raw = load_as<vu>(payload[j] + b * B::payload + quad * 32);
                        low[j] = raw & 0x0f0f0f0fu;
                        high[j] = (raw >> 4) & 0x0f0f0f0fu;
                    }
                    UNROLLED
                    for (int i = 0; i < M; ++i) {
                        int32_t x0, x1;
                        std::memcpy(&x0, bytes + size_t(i) * x.depth + quad * 4, 4);
                        std::memcpy(&x1, bytes + size_t(i) * x.depth + quad * 4 + 4, 4);
                        for (int j = 0; j < N; ++j) add(whole[j][i], low[j], x0, quad);
                        for (int j = 0; j < N; ++j) add(whole[j][i], high[j], x1, quad + 1);
                    }
                }
            } else {
                UNROLLED
                for (int quad = 0; quad < QUADS; ++quad) {
                    vu column[N];
                    for (int j = 0; j < N; ++j)
                        column[j] = load_as<vu>(payload[j] + b * B::payload + (part * QUADS + quad) * 64);
                    UNROLLED
                    for (int i = 0; i < M; ++i) {
                        int32_t x0;
                        std::memcpy(&x0, bytes + size_t(i) * x.depth + quad * 4, 4);
                        for (int j = 0; j < N; ++j) add(whole[j][i], column[j], x0, quad);
                    }
                }
            }
            for (int j = 0; j < N; ++j)
                TileScales<F>(payload[j], blocks, b)
                    .template add<M>(0, part, whole[j], steps + b, scaled_sums + b, stride, acc[j]);
        }
    }
    finish<M, N>(w, out, tile, row, acc);
}

}  // namespace outpace
