// Products of bfloat16 by matrix tiles: up to 32 rows at a time.
//
// The instruction sums in an order of its own, so where tiles are used every number of rows uses them, and a row still
// gets one order. Quantised formats have none: a block's sum would have to leave the tiles through memory for its scale,
// which takes longer than the product by registers.
#pragma once

#include "linear.h"
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

// `rows` rows from `row` on, up to sixteen for each of A registers. N tiles of weights; two at most with two A.
template <int A, int N>
TILE_CODE void tile_product_bf16(const Linear& w, const Inputs& x, const Outputs& out, const Ahead& ahead, int tile,
                                 int row, int rows) {
    static_assert(A * N <= 4, "registers for sums");
    constexpr int A0 = tiles::INPUTS, A1 = A0 + 1, B0 = tiles::WEIGHTS, B1 = B0 + 1;
    const uint8_t* weights[N];
    for (int j = 0; j < N; ++j) weights[j] = w.tile(tile + j);
    const bf16 *values = &x.tiled[x.tile(row)], *second = values + size_t(tiles::ROWS) * x.depth;
    tiles::zero<0>();
    if constexpr (A * N > 1) tiles::zero<1>();
    if constexpr (A * N > 2) tiles::zero<2>(), tiles::zero<3>();
    for (int k = 0; k < w.depth; k += BLOCK) {
        constexpr size_t STEP = size_t(BLOCK) * LANES * sizeof(bf16);
        const size_t at = k / BLOCK * STEP;
        ahead.fetch(at, STEP);
        tiles::load<A0>(values + k * tiles::ROWS, tiles::ROW_BYTES);
        tiles::load<B0>(weights[0] + at, tiles::ROW_BYTES);
        tiles::dot_bf16<0, A0, B0>();
        if constexpr (N > 1) {
            tiles::load<B1>(weights[1] + at, tiles::ROW_BYTES);
            tiles::dot_bf16<1, A0, B1>();
        }
        if constexpr (A > 1) {
            tiles::load<A1>(second + k * tiles::ROWS, tiles::ROW_BYTES);
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
    finish_rows<N>(w, out, tile, row, std::min(rows, tiles::ROWS), sums);
    if constexpr (A > 1) finish_rows<N>(w, out, tile, row + tiles::ROWS, rows - tiles::ROWS, sums + N);
}

}  // namespace outpace
