// Rows times a packed matrix: which product runs over which rows and tiles.
#pragma once

#include "products.h"

namespace outpace {

using Product = void (*)(const Linear&, const Inputs&, const Outputs&, const Ahead&, int tile, int row);

// The product for `format` over m <= most_rows(format, n) rows and n tiles (1, 2 or 4).
constexpr int MOST_ROWS = 6;
inline int most_rows(Format format, int n) { return format == BF16 && n == 2 ? 2 * MOST_ROWS : MOST_ROWS; }
Product product(Format format, int m, int n);
Product product_of_superblocks(Format format, int m, int n);

// Products by matrix tiles, where the processor has them (tile_linear.cpp): arguments as of `multiply`.
void multiply_by_tiles(const Linear& w, const Inputs& x, const Outputs& out, int rows, int first, int last,
                       const uint8_t* next, size_t next_bytes);

constexpr size_t LONG = size_t(32) << 10;  // bytes of a tile

// One pass over a pair of tiles (gate, up) that do not fit the registers together: one after the other, then joined.
inline void product_of_pair(const Linear& w, const Inputs& x, const Outputs& out, const Ahead& ahead, int tile, int row, int rows) {
    float both[2][MOST_ROWS * LANES];
    for (int j = 0; j < 2; ++j) {
        const Outputs one{both[j] - ptrdiff_t(row + tile + j) * LANES, LANES};
        product(w.format, rows, 1)(w, x, one, j == 0 ? ahead : Ahead{}, tile + j, row);
    }
    for (int i = 0; i < rows; ++i)
        store(out.rows + (row + i) * out.stride + tile / 2 * LANES,
              activated(out.activation, load(both[0] + i * LANES)) * load(both[1] + i * LANES));
}

// Rows of `x` times tiles [first, last) of `w`; meanwhile as many tiles from `next` on are fetched, if it is not null.
inline void multiply(const Linear& w, const Inputs& x, const Outputs& out, int rows, int first, int last,
                     const uint8_t* next = nullptr, size_t next_bytes = 0) {
    if (want(w.format) == WANT_TILES) return multiply_by_tiles(w, x, out, rows, first, last, next, next_bytes);
    // Wide formats keep more tiles going at a time than quantised ones, which need registers for the whole numbers too.
    // Of bf16 many rows share what two tiles take to widen.
    const bool two = quantised(w.format) ? rows > 1 : w.format == BF16 && !PAIRED && rows > MOST_ROWS;
    // Registers of 32 bytes are half as many, too: a tile's sums of six rows take twelve of sixteen.
    const int narrow = rows == 1 ? 4 : rows == 2 && !quantised(w.format) ? 2 : 1;
    const bool pairs = REGISTER < 64 && narrow == 1 && out.activation != NONE;
    for (int tile = first; tile < last;) {
        int n = std::min(REGISTER == 64 ? (two ? 2 : 4) : pairs ? 2 : narrow, last - tile);
        if (n == 3) n = 2;
        const int most = pairs ? MOST_ROWS : most_rows(w.format, n), passes = (rows + most - 1) / most;
        // Memory decides how fast a single row is. The processor follows streams by itself once they are long; a tile of
        // fewer inputs has ended by the time that it does.
        if (rows == 1 && w.tile_bytes > LONG) next = nullptr;
        Ahead ahead{next ? next + (tile - first) * next_bytes : nullptr, next_bytes};
        for (int pass = 0; pass < passes; ++pass) {
            int from = rows * pass / passes, to = rows * (pass + 1) / passes;
            if (next) ahead.first = n * pass / passes, ahead.last = n * (pass + 1) / passes;
            if (pairs) product_of_pair(w, x, out, ahead, tile, from, to - from);
            else product(w.format, to - from, n)(w, x, out, ahead, tile, from);
        }
        tile += n;
    }
}

}  // namespace outpace
