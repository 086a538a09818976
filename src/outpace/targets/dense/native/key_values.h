// How keys and values lie in memory, for each type that they are kept in.
//
// A row is one head's key or value of one token, padded to whole registers. Rows of a tree lie one by one. The store
// of committed tokens is in blocks of sixteen, so that products read whole registers: keys transposed, a register
// holding the same dimension of sixteen keys; values with a register holding sixteen dimensions of one token. Types
// whose products take PAIR = 2 numbers at a time have two neighbouring dimensions (or tokens) in each 32-bit lane.
// A block takes as many bytes as sixteen rows.
#pragma once

#include <cmath>

#include "simd.h"

namespace outpace {

inline int round_up(int n, int to) { return (n + to - 1) / to * to; }

template <class T>
struct Kept;

template <>
struct Kept<float> {
    static constexpr int PAIR = 1;
    static constexpr bool quantised = false;

    static size_t row_bytes(int width) { return sizeof(float) * width; }
    static void write(uint8_t* row, const float* x, int width) { std::memcpy(row, x, row_bytes(width)); }
    static void write_key(uint8_t* row, const float* x, int width) { write(row, x, width); }
    static void write_value(uint8_t* row, const float* x, int width) { write(row, x, width); }

    static void place_key(uint8_t* blocks, int at, const uint8_t* row, int width) {
        float* to = (float*)blocks + size_t(at / LANES) * width * LANES + at % LANES;
        for (int d = 0; d < width; ++d) to[size_t(d) * LANES] = ((const float*)row)[d];
    }
    static void place_value(uint8_t* blocks, int at, const uint8_t* row, int width) {
        std::memcpy(blocks + at * row_bytes(width), row, row_bytes(width));
    }
    static void take_key(const uint8_t* blocks, int at, uint8_t* row, int width) {
        const float* from = (const float*)blocks + size_t(at / LANES) * width * LANES + at % LANES;
        for (int d = 0; d < width; ++d) ((float*)row)[d] = from[size_t(d) * LANES];
    }
    static void take_value(const uint8_t* blocks, int at, uint8_t* row, int width) {
        std::memcpy(row, blocks + at * row_bytes(width), row_bytes(width));
    }
    static void read_key(const uint8_t* row, float* to, int width) { std::memcpy(to, row, row_bytes(width)); }
    // Sixteen numbers of a value's row from `d` on, as they enter a product.
    static INLINE vu product_input(const uint8_t* row, int d) { return load_as<vu>((const float*)row + d); }
};

template <>
struct Kept<bf16> {
    static constexpr int PAIR = 2;
    static constexpr bool quantised = false;

    static size_t row_bytes(int width) { return sizeof(bf16) * width; }
    static void write(uint8_t* row, const float* x, int width) {
        for (int d = 0; d < width; d += LANES) store((bf16*)row + d, load(x + d));
    }
    static void write_key(uint8_t* row, const float* x, int width) { write(row, x, width); }
    static void write_value(uint8_t* row, const float* x, int width) { write(row, x, width); }

    static void place_key(uint8_t* blocks, int at, const uint8_t* row, int width) {
        uint8_t* to = blocks + size_t(at / LANES) * LANES * row_bytes(width) + at % LANES * 4;
        for (int d = 0; d < width; d += 2) std::memcpy(to + size_t(d) * LANES * 2, row + d * 2, 4);
    }
    // Placing the first of two neighbours clears the second, which products read together with it (its weight is 0, but
    // 0 times what was never written may be NaN). So neighbours are placed in order, by one thread.
    static void place_value(uint8_t* blocks, int at, const uint8_t* row, int width) {
        uint8_t* to = blocks + size_t(at / 2) * 2 * row_bytes(width);
        for (int d = 0; d < width; d += LANES, to += sizeof(vu)) {
            vu mine = product_input(row, d);
            if (at % 2) mine = (mine << 16) | (load_as<vu>(to) & 0xffffu);
            std::memcpy(to, &mine, sizeof mine);
        }
    }
    static void take_key(const uint8_t* blocks, int at, uint8_t* row, int width) {
        const uint8_t* from = blocks + size_t(at / LANES) * LANES * row_bytes(width) + at % LANES * 4;
        for (int d = 0; d < width; d += 2) std::memcpy(row + d * 2, from + size_t(d) * LANES * 2, 4);
    }
    static void take_value(const uint8_t* blocks, int at, uint8_t* row, int width) {
        const uint16_t* from = (const uint16_t*)(blocks + size_t(at / 2) * 2 * row_bytes(width)) + at % 2;
        for (int d = 0; d < width; ++d) ((uint16_t*)row)[d] = from[d * 2];
    }
    static void read_key(const uint8_t* row, float* to, int width) {
        for (int d = 0; d < width; d += LANES) store(to + d, load((const bf16*)row + d));
    }
    static INLINE vu product_input(const uint8_t* row, int d) {
        return __builtin_convertvector(load_as<vh>((const uint16_t*)row + d), vu);
    }
};

}  // namespace outpace
