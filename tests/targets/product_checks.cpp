// Checks of the products of every format, compiled and run by test_dense_products.py for several processors: against sums in
// float64, where whole numbers are as large as they can be, and of many rows against one. Prints what differs.

#include <cmath>
#include <cstdio>
#include <random>
#include <string>

#include "linear.h"

using namespace outpace;

namespace {

std::mt19937 random_bits(1);
int failures = 0;

void expect(bool holds, const std::string& what) {
    if (holds) return;
    if (++failures <= 20) std::printf("wrong: %s\n", what.c_str());
}

struct Kind {
    Format format;
    const char* name;
    int bytes, inputs;  // of a block in a file
    int numbers;        // where its fp16 begin
    int count;
};
constexpr Kind KINDS[] = {{Q8, "Q8_0", 34, 32, 0, 1},   {Q4, "Q4_0", 18, 32, 0, 1},    {Q4M, "Q4_1", 20, 32, 0, 2},   {Q5, "Q5_0", 22, 32, 0, 1},
                          {Q5M, "Q5_1", 24, 32, 0, 2},  {Q4K, "Q4_K", 144, 256, 0, 2}, {Q5K, "Q5_K", 176, 256, 0, 2}, {Q6K, "Q6_K", 210, 256, 208, 1},
                          {BF16, "bfloat16", 0, 1, 0, 0}, {F32, "float32", 0, 1, 0, 0}};

struct Matrix {
    Linear w;
    std::vector<float> bias;

    // `fill`: the byte of every whole number, or -1 for random ones.
    Matrix(const Kind& kind, int outputs, int inputs, int fill) {
        w.format = kind.format, w.outputs = outputs, w.inputs = inputs;
        w.tiles = (outputs + LANES - 1) / LANES, w.depth = (inputs + BLOCK - 1) / BLOCK * BLOCK;
        const size_t size = packed_bytes(kind.format, outputs, inputs);
        w.tile_bytes = size / w.tiles;
        w.data = (uint8_t*)reserve(size);
        bias.assign(w.tiles * LANES, 0.25f);
        w.bias = bias.data();
        const auto byte = [&] { return uint8_t(fill < 0 ? random_bits() : fill); };
        if (kind.count == 0) {
            std::vector<float> rows(size_t(outputs) * inputs);
            for (float& one : rows) one = float(int8_t(byte())) / 64.f;
            pack_float(w, rows.data(), 0, w.tiles);
            return;
        }
        std::vector<uint8_t> raw(size_t(outputs) * inputs / kind.inputs * kind.bytes);
        for (uint8_t& one : raw) one = byte();
        for (size_t at = 0; at < raw.size(); at += kind.bytes)
            for (int i = 0; i < kind.count; ++i) {
                const fp16 scale = narrow_fp16(float(random_bits() % 64 + 1) / 1024.f);
                std::memcpy(&raw[at + kind.numbers + 2 * i], &scale, 2);
            }
        std::vector<const uint8_t*> blocks(w.tiles * LANES, nullptr);
        for (int n = 0; n < outputs; ++n) blocks[n] = &raw[size_t(n) * (inputs / kind.inputs) * kind.bytes];
        pack_blocks(w, blocks.data(), 0, w.tiles);
    }
    ~Matrix() { std::free(w.data); }
};

// What a row's products are taken of, as numbers.
std::vector<double> as_taken(const Linear& w, const Inputs& x, int row) {
    std::vector<double> values(w.inputs);
    for (int k = 0; k < w.inputs; ++k) {
        const size_t at = size_t(row) * x.depth + k;
        values[k] = quantised(w.format) ? double(x.q[at]) * x.scale[at / BLOCK]
                    : want(w.format) == WANT_BF16 ? double(widen(x.half[at])) : double(x.f32[at]);
    }
    return values;
}

void products(const Kind& kind, int outputs, int inputs, int fill, bool extreme, int most) {
    const Matrix matrix(kind, outputs, inputs, fill);
    const Linear& w = matrix.w;
    std::vector<float> values(size_t(most) * inputs);
    for (float& one : values) one = extreme ? (random_bits() % 8 ? 1.f : -1.f) : float(int(random_bits() % 2001) - 1000) / 500.f;
    const std::string of = std::string(kind.name) + ", " + std::to_string(outputs) + " outputs, bytes " + std::to_string(fill);
    for (Activation activation : {NONE, SILU, GELU}) {
        if (activation != NONE && w.tiles % 2) continue;
        const int width = w.tiles * LANES / (activation == NONE ? 1 : 2);
        std::vector<float> alone(size_t(most) * width);
        for (int rows = 1; rows <= most; ++rows) {
            Inputs x;
            x.prepare(want(kind.format), rows, inputs);
            for (int row = 0; row < rows; ++row) x.take(row, &values[size_t(row) * inputs], 0, inputs);
            std::vector<float> found(size_t(rows) * width);
            multiply(w, x, {found.data(), size_t(width), activation}, rows, 0, w.tiles, rows % 2 ? w.data : nullptr, w.tile_bytes);
            std::copy(found.end() - width, found.end(), alone.begin() + size_t(rows - 1) * width);
            for (int row = 0; row + 1 < rows; ++row)
                expect(!std::memcmp(&found[size_t(row) * width], &alone[size_t(row) * width], sizeof(float) * width),
                       of + ": row " + std::to_string(row) + " of " + std::to_string(rows) + " is not what it was alone or in fewer");
            if (rows < most) continue;
            std::vector<float> weights(inputs);
            for (int row = 0; row < rows; ++row) {
                const std::vector<double> taken = as_taken(w, x, row);
                std::vector<double> exact(outputs, 0.25), size(outputs, 0.25);
                for (int n = 0; n < outputs; ++n) {
                    unpack_row(w, n, weights.data());
                    for (int k = 0; k < inputs; ++k) exact[n] += weights[k] * taken[k], size[n] += std::fabs(weights[k] * taken[k]);
                }
                for (int n = 0; n < (activation == NONE ? outputs : width); ++n) {
                    const float one = found[size_t(row) * width + n];
                    if (activation == NONE) {
                        expect(std::fabs(one - exact[n]) <= 2e-5 * size[n], of + ", row " + std::to_string(row));
                        continue;
                    }
                    const int gate = n / LANES * 2 * LANES + n % LANES, up = gate + LANES;  // tiles come in pairs
                    const double g = exact[gate], z = 0.7978845608028654 * (g + 0.044715 * g * g * g);
                    const double made = g / (1.0 + std::exp(activation == SILU ? -g : -2.0 * z)) * exact[up];
                    expect(std::fabs(one - made) <= 1e-4 * (size[gate] * (1.0 + size[up])), of + ", activated, row " + std::to_string(row));
                }
            }
        }
    }
}

}  // namespace

int main() {
    for (const Kind& kind : KINDS)
        for (int fill : {-1, 0x00, 0x7f, 0x80, 0xff})
            for (bool extreme : {false, true}) {
                products(kind, 64, 512, fill, extreme, 13);
                products(kind, 40, 256, fill, extreme, 4);
            }
    std::printf("%d differences\n", failures);
    return failures > 0;
}
