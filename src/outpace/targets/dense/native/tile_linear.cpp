// Rows times a packed matrix of bfloat16 by tiles: how rows and tiles are divided.

#include "tile_products.h"

namespace outpace {

namespace {

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

void multiply_bf16(const Piece& p) {
    constexpr int MOST = 2 * tiles::ROWS;
    const int passes = (p.rows + MOST - 1) / MOST;
    // For all passes: the last may compute rows that nobody asked for, which takes no longer.
    tiles::shape(std::min(p.rows, tiles::ROWS), tiles::ROW_BYTES);
    for (int pass = 0; pass < passes; ++pass) {
        const int row = pass * MOST, rows = std::min(p.rows - row, MOST);
        const bool pair = rows > tiles::ROWS;
        for (int tile = p.first, n; tile < p.last; tile += n) {
            n = p.at_once(tile, pair ? 2 : 4);
            auto run = pair     ? n == 2 ? tile_product_bf16<2, 2> : tile_product_bf16<2, 1>
                       : n == 4 ? tile_product_bf16<1, 4>
                       : n == 2 ? tile_product_bf16<1, 2>
                                : tile_product_bf16<1, 1>;
            run(p.w, p.x, p.out, p.ahead(tile, n, pass, passes), tile, row, rows);
        }
    }
}

}  // namespace

void multiply_by_tiles(const Linear& w, const Inputs& x, const Outputs& out, int rows, int first, int last,
                       const uint8_t* next, size_t next_bytes) {
    multiply_bf16({w, x, out, rows, first, last, next, next_bytes});
}

}  // namespace outpace
