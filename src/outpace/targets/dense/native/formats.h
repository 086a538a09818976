// A weight matrix packed once: the formats, and where each weight lies.
//
// Sixteen outputs side by side are the lanes of one register ("a tile"); a product walks down the inputs in order.
#pragma once

#include <cstddef>

#include "simd.h"

namespace outpace {

enum Format : int32_t { F32, BF16, Q8, Q4, Q4M, Q5, Q5M, Q4K, Q5K, Q6K, FORMATS };
// F32, BF16: plain. The others are the blocks of GGUF files, exactly: Q8 (Q8_0), Q4 (Q4_0), Q4M (Q4_1), Q5 (Q5_0),
// Q5M (Q5_1): blocks of 32 with an fp16 scale, around zero or with an fp16 minimum (M).
// Q4K, Q5K, Q6K (Q4_K, Q5_K, Q6_K): super-blocks of 256 whose scales and minima are bytes times an fp16 scale.

constexpr int BLOCK = 32;  // inputs are padded with zeros to a multiple of this

// A tile: the payloads of its blocks, then their scales, then their minima.
template <int Bits, bool Minimum>
struct Blocks {
    static constexpr int bits = Bits, high = 0, parts = 1;  // high: bits apart; parts: scales in a block of 32 inputs
    static constexpr bool minimum = Minimum, super = false, bytes = false;
    static constexpr int inputs = BLOCK;                  // of what a file keeps together
    using scale = fp16;
    static constexpr size_t payload = size_t(LANES) * BLOCK * Bits / 8;
    static constexpr size_t scales = size_t(LANES) * sizeof(scale);
    static constexpr int zero = Bits == 8 ? 128 : 8;      // what stands for 0 where there is no minimum
    static constexpr size_t block = payload + scales * (Minimum ? 2 : 1);
};

// A tile: its super-blocks one behind the other, each read from its beginning to its end, for a product with one row is as
// quick as memory is read. In a super-block: the fp16 scales (and those of the minima), the byte of each scale, that of
// each minimum, then for each 32 inputs the low 4 bits as in `Blocks`, and the high bits: a register holds one bit of
// eight quads of inputs, or two bits of four. Q5 and Q5M are super-blocks of one block, without bytes.
template <int High, bool Minimum, int Inputs, int Part>
struct SuperBlocks {
    static constexpr int bits = 4 + High, high = High, inputs = Inputs, parts = BLOCK / Part;
    static constexpr bool minimum = Minimum, super = true;
    static constexpr bool bytes = Inputs > BLOCK;         // whether scales are bytes times the super-block's scale
    static constexpr bool signed_bytes = !Minimum;
    static constexpr size_t ends = size_t(LANES) * sizeof(fp16) * (Minimum || bytes ? 2 : 1);  // Q6K: padded to a line
    static constexpr size_t minima = ends + size_t(LANES) * (Inputs / Part);  // where their bytes lie
    static constexpr size_t head = bytes ? minima + (Minimum ? size_t(LANES) * (Inputs / Part) : 0) : ends;
    static constexpr size_t block = size_t(LANES) * BLOCK * bits / 8;
    static constexpr size_t body = head + Inputs / BLOCK * block;
    static constexpr int zero = 8 << High;
};

template <Format> struct Quantised;
template <> struct Quantised<Q8> : Blocks<8, false> {};
template <> struct Quantised<Q4> : Blocks<4, false> {};
template <> struct Quantised<Q4M> : Blocks<4, true> {};
template <> struct Quantised<Q5> : SuperBlocks<1, false, 32, 32> {};
template <> struct Quantised<Q5M> : SuperBlocks<1, true, 32, 32> {};
template <> struct Quantised<Q4K> : SuperBlocks<0, true, 256, 32> {};
template <> struct Quantised<Q5K> : SuperBlocks<1, true, 256, 32> {};
template <> struct Quantised<Q6K> : SuperBlocks<2, false, 256, 16> {};

constexpr bool quantised(Format format) { return format >= Q8; }

// Memory for weights: large pages where the system gives them, so that reading never waits for a page's address.
void* reserve(size_t bytes);

struct Linear {
    Format format = F32;
    int outputs = 0, inputs = 0;  // as the model has them
    int tiles = 0, depth = 0;     // outputs / 16 and inputs, both rounded up
    size_t tile_bytes = 0;
    uint8_t* data = nullptr;      // owned by the engine's arena
    const float* bias = nullptr;

    const uint8_t* tile(int index) const { return data + size_t(index) * tile_bytes; }
};

size_t packed_bytes(Format format, int outputs, int inputs);
// Tiles [first, last) of a matrix. `rows` in the order of the outputs; `blocks`: where each output's blocks lie as a file
// has them, null for zeros. Throws NotFinite for a scale that is not finite.
void pack_float(Linear& w, const float* rows, int first, int last);                         // F32, BF16
void pack_blocks(Linear& w, const uint8_t* const* blocks, int first, int last);             // the others
void unpack_row(const Linear& w, int output, float* values);                                // one output's weights

struct NotFinite {};

}  // namespace outpace
