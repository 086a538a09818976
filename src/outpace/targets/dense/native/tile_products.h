// Products by matrix tiles: up to 32 rows at a time.
//
// Bfloat16: the instruction sums in an order of its own, so where tiles are used every number of rows uses them, and a
// row still gets one order. Quantised formats: a block's sum of whole numbers is exact in any order (block_scales.h).
#pragma once

#include "linear.h"
#include "superblocks.h"
#include "tiles.h"

namespace outpace {

// Write one tile's rows, or a pair's, as the products by registers do. `sums`: 16 rows for each of N tiles.
template <int N>
INLINE void finish_rows(const Linear& w, const Outputs& out, int tile, int row, int rows, const vf (*sums)[tiles::ROWS]) {
    for (int i = 0; i < rows; ++i) {
        vf one[N][1];
        for (int j = 0; j < N; ++j) one[j][0] = sums[j][i];
        finish<1, N>(w, out, tile, row + i, one);
    }
}

// `row` and, in a pass of two, `other`: where sixteen or fewer rows begin. N tiles of weights; two at most with two A.
template <int A, int N>
TILE_CODE void tile_product_bf16(const Linear& w, const Inputs& x, const Outputs& out, const Ahead& ahead, int tile,
                                 int row, int other, int rows) {
    static_assert(A * N <= 4, "registers for sums");
    constexpr int A0 = tiles::INPUTS, A1 = A0 + 1, B0 = tiles::WEIGHTS, B1 = B0 + 1;
    const uint8_t* weights[N];
    for (int j = 0; j < N; ++j) weights[j] = w.tile(tile + j);
    const bf16 *values = &x.half[size_t(row) * x.depth], *second = &x.half[size_t(other) * x.depth];
    const size_t stride = size_t(x.depth) * sizeof(bf16);
    tiles::shape(rows, BLOCK * sizeof(bf16));
    tiles::zero<0>();
    if constexpr (A * N > 1) tiles::zero<1>();
    if constexpr (A * N > 2) tiles::zero<2>(), tiles::zero<3>();
    for (int k = 0; k < w.depth; k += BLOCK) {
        constexpr size_t STEP = size_t(BLOCK) * LANES * sizeof(bf16);
        const size_t at = k / BLOCK * STEP;
        ahead.fetch(at, STEP);
        tiles::load<A0>(values + k, stride);
        tiles::load<B0>(weights[0] + at, tiles::ROW_BYTES);
        tiles::dot_bf16<0, A0, B0>();
        if constexpr (N > 1) {
            tiles::load<B1>(weights[1] + at, tiles::ROW_BYTES);
            tiles::dot_bf16<1, A0, B1>();
        }
        if constexpr (A > 1) {
            tiles::load<A1>(second + k, stride);
            tiles::dot_bf16<N, A1, B0>();
            if constexpr (N > 1) tiles::dot_bf16<3, A1, B1>();
        } else if constexpr (N > 2) {
            tiles::load<B0>(weights[2] + at, tiles::ROW_BYTES);
            tiles::dot_bf16<2, A0, B0>();
            tiles::load<B1>(weights[3] + at, tiles::ROW_BYTES);
            tiles::dot_bf16<3, A0, B1>();
        }
    }
    vf sums[A * N][tiles::ROWS];
    tiles::store<0>(sums[0], tiles::ROW_BYTES);
    if constexpr (A * N > 1) tiles::store<1>(sums[1], tiles::ROW_BYTES);
    if constexpr (A * N > 2) tiles::store<2>(sums[2], tiles::ROW_BYTES), tiles::store<3>(sums[3], tiles::ROW_BYTES);
    finish_rows<N>(w, out, tile, row, rows, sums);
    if constexpr (A > 1) finish_rows<N>(w, out, tile, other, rows, sums + N);
}

// A quantised tile's whole numbers as B wants them: a byte for each, around zero where the format has no minimum.
template <Format F>
void to_bytes(const uint8_t* tile, int blocks, uint8_t* to) {
    using S = Quantised<F>;
    typedef uint8_t vb __attribute__((vector_size(64)));
    constexpr uint8_t from_zero = S::minimum ? 0 : S::zero;
    constexpr size_t QUAD = sizeof(vu);
    for (int b = 0; b < blocks; ++b, to += BLOCK / 4 * QUAD) {
        if constexpr (S::bits == 8) {
            for (size_t at = 0; at < S::payload; at += QUAD) {
                const vb whole = load_as<vb>(tile + b * S::payload + at) - from_zero;
                std::memcpy(to + at, &whole, sizeof whole);
            }
        } else {
            for (int quad = 0; quad < BLOCK / 4; quad += 2) {
                vu first, second;
                two_quads<S>(TileScales<F>::block(tile, b), quad, first, second);
                const vb low = (vb)first - from_zero, high = (vb)second - from_zero;
                std::memcpy(to + quad * QUAD, &low, sizeof low);
                std::memcpy(to + (quad + 1) * QUAD, &high, sizeof high);
            }
        }
    }
}

// One number of each of 16 rows. Four pointers reach them all; the compiler would keep sixteen.
struct Column {
    const float* rows[4];
    size_t stride;

    INLINE Column(const float* from, size_t stride) : stride(stride) {
        for (int j = 0; j < 4; ++j) {
            rows[j] = from + 4 * j * stride;
            asm("" : "+r"(rows[j]));
        }
    }
    INLINE float operator[](int row) const { return rows[row / 4][row % 4 * stride]; }
};

// One tile of weights with M rows, into `result`. `bytes`: its whole numbers as to_bytes left them.
//
// The sums of a block leave the tiles through memory, which takes a while: LAG sums are under way at a time.
template <Format F, int M>
TILE_CODE void tile_column(const Linear& w, const Inputs& x, const Ahead& ahead, const uint8_t* tile, const uint8_t* bytes,
                           int row, vf* result) {
    using B = Quantised<F>;
    constexpr int WIDTH = BLOCK / B::parts, LAG = 3;
    const int blocks = w.depth / BLOCK, stride = x.depth / BLOCK, count = blocks * B::parts;
    const int8_t* values = &x.q[size_t(row) * x.depth];
    const float *steps = &x.scale[size_t(row) * stride], *scaled_sums = &x.scaled_sum[size_t(row) * stride];
    vi sums[LAG + 1][M];
    tiles::shape(M, WIDTH);
#define BEGIN(P)                                                                           \
    {                                                                                      \
        constexpr int A = tiles::INPUTS + P % 2, W = tiles::WEIGHTS + P % 2;               \
        tiles::zero<P>();                                                                  \
        tiles::load<A>(values + s * WIDTH, x.depth);                                       \
        tiles::load<W>(bytes + s * WIDTH * LANES, tiles::ROW_BYTES);                       \
        if constexpr (B::minimum) tiles::dot_s8u8<P, A, W>();                              \
        else tiles::dot_s8s8<P, A, W>();                                                   \
        tiles::store<P>(sums[P], tiles::ROW_BYTES);                                        \
    }
    vf acc[M] = {};
    for (int s = 0; s < count + LAG; ++s) {
        if (s < count) {
            switch (s % 4) {
                case 0: BEGIN(0) break;
                case 1: BEGIN(1) break;
                case 2: BEGIN(2) break;
                default: BEGIN(3)
            }
        }
        const int done = s - LAG, b = done / B::parts;
        if (done < 0) continue;
        if (done % B::parts == 0) ahead.fetch(w.tile_bytes / blocks * b, w.tile_bytes / blocks);
        const vi* whole = sums[done % 4];
        using Scales = TileScales<F>;
        Scales(tile, blocks, b / Scales::EACH)
            .template add<M, Column>(b % Scales::EACH, done % B::parts, whole, steps + b, scaled_sums + b, stride, acc);
    }
#undef BEGIN
    each<M>([&](auto i) { result[i] = acc[i]; });
}

}  // namespace outpace
