// The product of a few rows with a few tiles whose high bits lie apart, or whose scales are bytes of a super-block.
//
// Bits are put together and scales multiplied out in registers, once for all rows of a pass.
#pragma once

#include "products.h"

namespace outpace {

// Quads `quad` and `quad` + 1 of a block of 32 inputs: their bytes, unsigned.
template <class S>
INLINE void two_quads(const uint8_t* block, int quad, vu& first, vu& second) {
    constexpr uint32_t FOUR = 0x0f0f0f0fu;
    vu raw = load_as<vu>(block + quad * 32);
    first = raw & FOUR;
    second = (raw >> 4) & FOUR;
    if constexpr (S::high > 0) {
        constexpr int EACH = 8 / S::high;  // quads whose high bits share a register
        constexpr uint32_t BITS = S::high == 1 ? 0x10101010u : 0x30303030u;
        vu high = load_as<vu>(block + 256 + quad / EACH * 64);
        const int at = quad % EACH * S::high, next = at + S::high;
        first |= (at <= 4 ? high << (4 - at) : high >> (at - 4)) & BITS;
        second |= (next <= 4 ? high << (4 - next) : high >> (next - 4)) & BITS;
    }
}

template <Format F, int M, int N>
void product_superblocks(const Linear& w, const Inputs& x, const Outputs& out, const Ahead& ahead, int tile, int row) {
    using S = Quantised<F>;
    constexpr int QUADS = BLOCK / 4 / S::parts;
    const int count = w.depth / S::inputs, stride = x.depth / BLOCK;
    vf acc[N][M] = {};
    const uint8_t* body[N];
    for (int j = 0; j < N; ++j) body[j] = w.tile(tile + j);
    const int8_t* values = &x.q[size_t(row) * x.depth];
    const float* steps = &x.scale[size_t(row) * stride];
    const float* scaled_sums = &x.scaled_sum[size_t(row) * stride];
    const int32_t* sums = &x.sum16[size_t(row) * stride * 2];
    for (int s = 0; s < count; ++s) {
        ahead.fetch(s * S::body, S::head);
        TileScales<F> scales[N];
        for (int j = 0; j < N; ++j) scales[j] = {body[j], w.depth / BLOCK, s};
        for (int in = 0; in < S::inputs / BLOCK; ++in) {
            const int b = s * (S::inputs / BLOCK) + in;
            const size_t at = s * S::body + S::head + in * S::block;
            ahead.fetch(at, S::block);
            for (int part = 0; part < S::parts; ++part) {
                Dots<S::bits> whole[N][M];
                UNROLLED
                for (int i = 0; i < M; ++i) {
                    int32_t sum = 0;
                    if constexpr (!S::minimum) {
                        const int32_t* both = sums + (size_t(i) * stride + b) * 2;
                        sum = S::parts == 2 ? both[part] : both[0] + both[1];
                    }
                    for (int j = 0; j < N; ++j) begin(whole[j][i], sum, S::minimum ? 0 : S::zero);
                }
                const int8_t* bytes = values + b * BLOCK + part * QUADS * 4;
#pragma GCC unroll 4
                for (int quad = 0; quad < QUADS; quad += 2) {
                    vu first[N], second[N];
                    for (int j = 0; j < N; ++j) two_quads<S>(body[j] + at, part * QUADS + quad, first[j], second[j]);
                    UNROLLED
                    for (int i = 0; i < M; ++i) {
                        int32_t x0, x1;
                        std::memcpy(&x0, bytes + size_t(i) * x.depth + quad * 4, 4);
                        std::memcpy(&x1, bytes + size_t(i) * x.depth + quad * 4 + 4, 4);
                        for (int j = 0; j < N; ++j) add(whole[j][i], first[j], x0, quad);
                        for (int j = 0; j < N; ++j) add(whole[j][i], second[j], x1, quad + 1);
                    }
                }
                for (int j = 0; j < N; ++j)
                    scales[j].template add<M>(in, part, whole[j], steps + b, scaled_sums + b, stride, acc[j]);
            }
        }
    }
    finish<M, N>(w, out, tile, row, acc);
}

}  // namespace outpace
