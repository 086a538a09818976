// Checks of the tile products, compiled and run by test_dense_tiles.py: with the model of the instructions on any
// processor, and with the instructions themselves where there are some. Prints what differs; ends with 0, 1, or 77
// where tiles cannot be used.

#include <cstdio>
#include <random>
#include <string>

#include "tile_products.h"

using namespace outpace;

namespace {

std::mt19937 random_bits(1);
int failures = 0;

void expect(bool holds, const std::string& what) {
    if (holds) return;
    if (++failures <= 20) std::printf("wrong: %s\n", what.c_str());
}

float uniform() { return float(random_bits() % 20001) / 10000.f - 1.f; }

uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

float from_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// --- one instruction at a time

struct Bytes { uint8_t at[tiles::ROWS][tiles::ROW_BYTES]; };

Bytes random_bf16() {
    Bytes made;
    for (auto& row : made.at)
        for (int i = 0; i < 32; ++i) ((bf16*)row)[i] = narrow_bf16(uniform());
    return made;
}

void bfloat16_numbers(int rows, int width) {
    const Bytes a = random_bf16(), b = random_bf16();
    alignas(64) float c[tiles::ROWS][LANES], found[tiles::ROWS][LANES];
    for (auto& row : c)
        for (int n = 0; n < LANES; ++n) row[n] = uniform();
    tiles::shape(rows, width);
    tiles::load<0>(c, tiles::ROW_BYTES);
    tiles::load<4>(&a, tiles::ROW_BYTES);
    tiles::load<6>(&b, tiles::ROW_BYTES);
    tiles::dot_bf16<0, 4, 6>();
    tiles::store<0>(found, tiles::ROW_BYTES);
    bool near = true, same = true;
    for (int m = 0; m < rows; ++m)
        for (int n = 0; n < LANES; ++n) {
            double exact = c[m][n], size = std::fabs(c[m][n]);
            float halves[2] = {0.f, 0.f};
            for (int k = 0; k < width / 2; ++k) {
                bf16 x, w;
                std::memcpy(&x, &a.at[m][2 * k], 2);
                std::memcpy(&w, &b.at[k / 2][4 * n + k % 2 * 2], 2);
                exact += double(widen(x)) * widen(w);
                size += std::fabs(double(widen(x)) * widen(w));
                halves[k % 2] = std::fmaf(widen(x), widen(w), halves[k % 2]);
            }
            near &= std::fabs(found[m][n] - exact) <= 1e-5 * size;
            same &= bits_of(found[m][n]) == bits_of(c[m][n] + (halves[0] + halves[1]));
        }
    const std::string of = std::to_string(rows) + " rows of " + std::to_string(width / 2);
    expect(near, "bfloat16 products against float64, " + of);
    expect(same, "the order of bfloat16's sums, " + of);
}

// One product x * w + c, all else zero.
float bfloat16_of(uint16_t x, uint16_t w, float c) {
    Bytes a = {}, b = {};
    std::memcpy(a.at[0], &x, 2);
    std::memcpy(b.at[0], &w, 2);
    alignas(64) float sums[tiles::ROWS][LANES] = {};
    sums[0][0] = c;
    tiles::shape(1, tiles::ROW_BYTES);
    tiles::load<0>(sums, tiles::ROW_BYTES);
    tiles::load<4>(&a, tiles::ROW_BYTES);
    tiles::load<6>(&b, tiles::ROW_BYTES);
    tiles::dot_bf16<0, 4, 6>();
    tiles::store<0>(sums, tiles::ROW_BYTES);
    return sums[0][0];
}

void instructions() {
    for (int rows = 1; rows <= tiles::ROWS; ++rows)
        for (int width : {4, 16, 32, 60, 64}) {
            bfloat16_numbers(rows, width);
        }
    const uint16_t one = 0x3f80, denormal = 0x0040, smallest = 0x0080, half = 0x3f00, large = 0x7f00;
    expect(bfloat16_of(one, one, 2.f) == 3.f, "1 * 1 + 2");
    expect(bfloat16_of(denormal, large, 0.f) == 0.f, "denormal operands are zero");
    expect(bfloat16_of(smallest, half, 0.f) == 0.f, "denormal results are zero");
    expect(bfloat16_of(one, one, from_bits(0x00400000)) == 1.f, "a denormal sum is zero");
    expect(bfloat16_of(one, one, 16777216.f) == 16777216.f, "a tie is rounded to the even number");
    expect(bfloat16_of(large, large, 0.f) == INFINITY, "what is too large is infinite");
    expect(std::isnan(bfloat16_of(0x7f80, 0, 0.f)), "infinity times zero");
}

// --- products

struct Matrix {
    Linear w;
    std::vector<vf> bytes;  // aligned
    std::vector<float> bias;

    Matrix(int outputs, int inputs, bool biased) {
        w.format = BF16, w.outputs = outputs, w.inputs = inputs;
        w.tiles = (outputs + LANES - 1) / LANES, w.depth = (inputs + BLOCK - 1) / BLOCK * BLOCK;
        const size_t size = packed_bytes(BF16, outputs, inputs);
        w.tile_bytes = size / w.tiles;
        bytes.resize(size / sizeof(vf));
        w.data = (uint8_t*)bytes.data();
        if (biased) {
            for (int n = 0; n < w.tiles * LANES; ++n) bias.push_back(n < outputs ? uniform() : 0.f);
            w.bias = bias.data();
        }
        std::vector<float> rows(size_t(outputs) * inputs);
        for (float& one : rows) one = uniform();
        pack_float(w, rows.data(), 0, w.tiles);
    }
};

struct Rows {
    Inputs taken;
    std::vector<float> values;

    Rows(int count, int inputs) : values(size_t(count) * inputs) {
        for (float& one : values) one = widen(narrow_bf16(3.f * uniform()));
        // Registers read floats, or bf16 that lie in another order: the same numbers.
        taken.prepare(want(BF16) | WANT_BF16 | WANT_F32, count, inputs);
        for (int row = 0; row < count; ++row) taken.take(row, &values[size_t(row) * inputs], 0, inputs);
    }
};

constexpr float UNTOUCHED = -12345.f;

struct Results {
    int width;
    std::vector<float> rows;
    Outputs out;

    Results(const Linear& w, int count, Activation activation)
        : width(w.tiles * LANES / (activation == NONE ? 1 : 2) + 3), rows(size_t(count + 1) * width, UNTOUCHED),
          out{rows.data(), size_t(width), activation} {}
};

// As multiply divides it between registers, one row and the fewest tiles at a time.
void by_registers(const Linear& w, const Inputs& x, const Outputs& out, int rows) {
    const int n = out.activation == NONE ? 1 : 2;
    for (int tile = 0; tile < w.tiles; tile += n)
        for (int row = 0; row < rows; ++row) product(w.format, 1, n)(w, x, out, Ahead{}, tile, row);
}

void by_tiles(const Linear& w, const Inputs& x, const Outputs& out, int rows, int piece, bool ahead) {
    for (int first = 0; first < w.tiles; first += piece)
        multiply_by_tiles(w, x, out, rows, first, std::min(w.tiles, first + piece), ahead ? w.data : nullptr, w.tile_bytes);
}

void products(int outputs, int inputs, Activation activation, bool biased, int most, int piece) {
    const Matrix matrix(outputs, inputs, biased);
    const Linear& w = matrix.w;
    const Rows x(most, inputs);
    Results expected(w, most, activation), alone(w, most, activation);
    by_registers(w, x.taken, expected.out, most);
    for (int row = 0; row < most; ++row) {
        Inputs one;
        one.prepare(want(BF16), 1, inputs);
        one.take(0, &x.values[size_t(row) * inputs], 0, inputs);
        Outputs to = alone.out;
        to.rows += size_t(row) * alone.width;
        by_tiles(w, one, to, 1, piece, false);
    }
    // Another order than that of registers: near them, and the same for every number of rows.
    bool near = true;
    for (size_t i = 0; i < alone.rows.size(); ++i)
        near &= std::fabs(alone.rows[i] - expected.rows[i]) <= 1e-4f * (1.f + std::fabs(expected.rows[i]));
    expect(near, "products by tiles are near those by registers");
    for (int rows = 1; rows <= most; ++rows) {
        Results found(w, most, activation);
        by_tiles(w, x.taken, found.out, rows, piece, rows % 2);
        bool same = true;
        for (size_t i = 0; i < found.rows.size(); ++i) {
            const float wanted = i < size_t(rows) * found.width ? alone.rows[i] : UNTOUCHED;
            same &= bits_of(found.rows[i]) == bits_of(wanted);
        }
        expect(same, std::to_string(outputs) + " outputs of " + std::to_string(inputs) + " inputs, activation " +
                         std::to_string(activation) + ", " + std::to_string(rows) + " rows");
    }
}

}  // namespace

int main() {
    if (!tiles::usable()) return std::printf("tiles cannot be used here\n"), 77;
    instructions();
    products(80, 96, NONE, true, 70, 8);
    products(64, 32, SILU, false, 40, 4);
    products(96, 200, GELU, true, 40, 2);
    products(7, 33, NONE, false, 40, 2);
    products(50, 320, NONE, false, 40, 3);
    expect(want(BF16) == WANT_TILES, "tiles are taken");
    for (Format format : {F32, Q8, Q4, Q4M, Q6K}) expect(want(format) != WANT_TILES, "what has no tile products is left to registers");
    tiles::release();
    std::printf("%d differences\n", failures);
    return failures != 0;
}
