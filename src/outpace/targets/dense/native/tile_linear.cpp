// Rows times a packed matrix by tiles: how rows and tiles are divided.

#include <vector>

#include "tile_products.h"

namespace outpace {

namespace {

// From here on tiles take less time for a quantised format than registers, whose time goes with the rows.
constexpr int FEWEST_ROWS = 8;

// What one call multiplies: as in `multiply`.
struct Piece {
    const Linear& w;
    const Inputs& x;
    const Outputs& out;
    int rows, first, last;
    const uint8_t* next;
    size_t next_bytes;

    // What a pass over n tiles fetches: its share of the tiles that stand in the same places of the next piece.
    Ahead ahead(int tile, int n, int pass, int passes) const {
        if (!next || rows == 1) return {};
        return {next + (tile - first) * next_bytes, next_bytes, n * pass / passes, n * (pass + 1) / passes};
    }

    int at_once(int tile, int most) const {
        const int left = last - tile;
        return left >= most ? most : left >= 2 ? 2 : 1;
    }
};

// Rows are divided evenly, all parts of one size; the last one begins where it ends with the last row, and what it has in
// common with the part before comes out the same twice.
void multiply_bf16(const Piece& p) {
    const bool pairs = p.rows > tiles::ROWS;
    const int passes = pairs ? (p.rows + 2 * tiles::ROWS - 1) / (2 * tiles::ROWS) : 1, parts = pairs ? 2 * passes : 1;
    const int rows = (p.rows + parts - 1) / parts;
    for (int pass = 0; pass < passes; ++pass) {
        const int row = std::min(pass * 2 * rows, p.rows - rows), other = std::min(row + rows, p.rows - rows);
        for (int tile = p.first, n; tile < p.last; tile += n) {
            n = p.at_once(tile, pairs ? 2 : 4);
            auto run = pairs    ? n == 2 ? tile_product_bf16<2, 2> : tile_product_bf16<2, 1>
                       : n == 4 ? tile_product_bf16<1, 4>
                       : n == 2 ? tile_product_bf16<1, 2>
                                : tile_product_bf16<1, 1>;
            run(p.w, p.x, p.out, p.ahead(tile, n, pass, passes), tile, row, other, rows);
        }
    }
}

using ColumnProduct = void (*)(const Linear&, const Inputs&, const Ahead&, const uint8_t* tile, const uint8_t* bytes, int row, vf* result);

template <Format F>
ColumnProduct column(int rows) {
    constexpr ColumnProduct table[] = {tile_column<F, 8>,  tile_column<F, 9>,  tile_column<F, 10>,
                                       tile_column<F, 11>, tile_column<F, 12>, tile_column<F, 13>,
                                       tile_column<F, 14>, tile_column<F, 15>, tile_column<F, 16>};
    return table[rows - FEWEST_ROWS];
}

template <Format F>
void multiply_quantised(const Piece& p) {
    const int passes = (p.rows + tiles::ROWS - 1) / tiles::ROWS, rows = (p.rows + passes - 1) / passes;
    const int blocks = p.w.depth / BLOCK;
    const ColumnProduct run = column<F>(rows);
    static thread_local std::vector<vu> room;  // the whole numbers of two tiles, as bytes
    const size_t size = size_t(p.w.depth) * LANES / sizeof(vu);
    if (room.size() < 2 * size) room.resize(2 * size);
    for (int tile = p.first, n; tile < p.last; tile += n) {
        n = p.at_once(tile, 2);
        const uint8_t* bytes[2];
        for (int j = 0; j < n; ++j) {
            bytes[j] = p.w.tile(tile + j);
            to_bytes<F>(bytes[j], blocks, (uint8_t*)&room[j * size]);
            bytes[j] = (const uint8_t*)&room[j * size];
        }
        for (int pass = 0; pass < passes; ++pass) {
            const int row = std::min(pass * rows, p.rows - rows);
            vf sums[2][tiles::ROWS];
            for (int j = 0; j < n; ++j)
                run(p.w, p.x, p.ahead(tile, n, pass * n + j, passes * n), p.w.tile(tile + j), bytes[j], row, sums[j]);
            if (n == 2) finish_rows<2>(p.w, p.out, tile, row, rows, sums);
            else finish_rows<1>(p.w, p.out, tile, row, rows, sums);
        }
    }
}

}  // namespace

bool takes_tiles(Format format, int rows) {
    switch (format) {
        case BF16: return tiles::usable();
        case Q8: case Q4: case Q4M: case Q5: case Q5M: case Q4K: case Q5K: case Q6K: return rows >= FEWEST_ROWS && tiles::usable();
        default: return false;
    }
}

void multiply_by_tiles(const Linear& w, const Inputs& x, const Outputs& out, int rows, int first, int last,
                       const uint8_t* next, size_t next_bytes) {
    const Piece piece{w, x, out, rows, first, last, next, next_bytes};
    switch (w.format) {
        case BF16: return multiply_bf16(piece);
        case Q8: return multiply_quantised<Q8>(piece);
        case Q4: return multiply_quantised<Q4>(piece);
        case Q4M: return multiply_quantised<Q4M>(piece);
        case Q5: return multiply_quantised<Q5>(piece);
        case Q5M: return multiply_quantised<Q5M>(piece);
        case Q4K: return multiply_quantised<Q4K>(piece);
        case Q5K: return multiply_quantised<Q5K>(piece);
        case Q6K: return multiply_quantised<Q6K>(piece);
        default: return;
    }
}

}  // namespace outpace
