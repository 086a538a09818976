// Rows times a packed matrix: which product runs over which rows and tiles.
#pragma once

#include "products.h"

namespace outpace {

using Product = void (*)(const Linear&, const Inputs&, const Outputs&, const Ahead&, int tile, int row);

// How many rows a product with N tiles takes at most: as many as the registers hold sums of.
constexpr int MOST_ROWS = 6;
constexpr int most_rows(Format format, int n) {
    if (REGISTER < 64) return n == 1 ? MOST_ROWS : n == 2 && !quantised(format) ? 2 : 1;
    return format == BF16 && n == 2 ? 2 * MOST_ROWS : quantised(format) && n == 4 ? 1 : MOST_ROWS;
}

template <class Of, int... M>
Product of_rows(int m, std::integer_sequence<int, M...>) {
    constexpr Product table[] = {Of::template rows<M + 1>()...};
    return table[m - 1];
}

// `Of<F, N>::rows<M>()` is the product of M rows with N tiles.
template <template <Format, int> class Of, Format F>
Product of_tiles(int m, int n) {
    if (n == 4) return of_rows<Of<F, 4>>(m, std::make_integer_sequence<int, most_rows(F, 4)>{});
    if (n == 2) return of_rows<Of<F, 2>>(m, std::make_integer_sequence<int, most_rows(F, 2)>{});
    return of_rows<Of<F, 1>>(m, std::make_integer_sequence<int, most_rows(F, 1)>{});
}

// The product for `format` over m <= most_rows(format, n) rows and n tiles (1, 2 or 4).
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
        // So that this row and tile come to lie at the beginning.
        const Outputs one{(float*)(uintptr_t(both[j]) - size_t(row + tile + j) * LANES * sizeof(float)), LANES};
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
    int narrow = 4;  // tiles at a time where registers are few
    while (narrow > 1 && rows > most_rows(w.format, narrow)) narrow /= 2;
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
