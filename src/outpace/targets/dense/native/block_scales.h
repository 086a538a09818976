// The scales and the minimum of a quantised block, and how its sum of whole numbers enters a row's result.
//
// Every product of a quantised format ends its blocks here: whole numbers are exact in any order, and what follows is this
// one sequence, so few rows and many may take different products and get the same bits.
#pragma once

#include <utility>

#include "formats.h"

namespace outpace {

// run(0), ..., run(N - 1), each with its own number at compile time: only so does the compiler keep the sums in registers.
template <class Do, int... I>
INLINE void each_of(std::integer_sequence<int, I...>, Do&& run) { (run(std::integral_constant<int, I>{}), ...); }
template <int N, class Do>
INLINE void each(Do&& run) { each_of(std::make_integer_sequence<int, N>{}, run); }

// The blocks of a tile that a file keeps together: one block, or a super-block.
template <Format F>
struct TileScales {
    using S = Quantised<F>;
    static constexpr int EACH = S::inputs / BLOCK;  // how many blocks that is

    TileScales() = default;
    // `index`: which of them, in a tile of `blocks` blocks of 32 inputs.
    INLINE TileScales(const uint8_t* tile, int blocks, int index) : tile(tile), blocks(blocks), index(index) {
        if constexpr (S::bytes) {
            unit = first();
            if constexpr (S::minimum) least_unit = -second();  // a file keeps what is subtracted
        }
    }

    // Add what a part of block `in` of these sums up to, for each of M rows, and with a block's only part its minimum.
    // `steps`: the scale of the rows' inputs, `stride` apart; `scaled_sums`: that times their sum.
    template <int M, class Sums>
    INLINE void add(int in, int part, const Sums* whole, const float* steps, const float* scaled_sums, size_t stride, vf* acc) const {
        static_assert(!S::minimum || S::parts == 1);
        const vf factor = scale(in, part);
        each<M>([&](auto i) { acc[i] = fma(to_float(total(whole[i])), factor * steps[i * stride], acc[i]); });
        if constexpr (S::minimum) {
            const vf least = minimum(in);
            each<M>([&](auto i) { acc[i] = fma(least, splat(scaled_sums[i * stride]), acc[i]); });
        }
    }

   private:
    INLINE vf scale(int in, int part) const {
        if constexpr (!S::bytes) {
            return first();
        } else {
            const uint8_t* from = tile + index * S::body + S::ends + (in * S::parts + part) * LANES;
            if constexpr (S::signed_bytes) return unit * load((const int8_t*)from);
            else return unit * load(from);
        }
    }
    INLINE vf minimum(int in) const {
        if constexpr (S::bytes) return least_unit * load(tile + index * S::body + S::minima + in * LANES);
        else return second();
    }
    // The two fp16 of each lane.
    INLINE vf first() const {
        if constexpr (S::super) return load((const fp16*)(tile + index * S::body));
        else return load((const fp16*)(tile + blocks * S::payload + index * S::scales));
    }
    INLINE vf second() const {
        if constexpr (S::super) return load((const fp16*)(tile + index * S::body) + LANES);
        else return load((const fp16*)(tile + blocks * S::payload + (blocks + index) * S::scales));
    }

    const uint8_t* tile;
    int blocks, index;
    vf unit, least_unit;  // what the bytes of a super-block are multiplied with: once for all its blocks
};

}  // namespace outpace
