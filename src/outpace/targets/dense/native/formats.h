// A weight matrix packed once: the formats, and where each weight lies.
//
// Sixteen outputs side by side are the lanes of one register ("a tile"); a product walks down the inputs in order.
#pragma once

#include <cstddef>

#include "simd.h"

namespace outpace {

enum Format : int32_t { F32, BF16, Q8, Q4, Q4M, Q4W, Q8W, Q8S, FORMATS };
// F32, BF16: plain.  Q8, Q4: blocks of 32 with an fp16 scale, around zero (GGUF Q8_0, Q4_0).
// Q4M: with an fp16 scale and minimum (Q4_1).  Q4W, Q8W: with float scale and minimum (Q4_K; Q5_0, Q5_1, Q5_K).
// Q8S: blocks of 16 with a float scale (Q6_K).

constexpr int BLOCK = 32;  // inputs are padded with zeros to a multiple of this

template <int Bits, bool Minimum, class Scale, int Parts>
struct Blocks {
    static constexpr int bits = Bits, parts = Parts;      // parts: scales in a block of 32 inputs
    static constexpr bool minimum = Minimum;
    using scale = Scale;
    static constexpr size_t payload = size_t(LANES) * BLOCK * Bits / 8;
    static constexpr size_t scales = size_t(LANES) * Parts * sizeof(Scale);
    static constexpr int zero = Bits == 8 ? 128 : 8;      // what stands for 0 where there is no minimum
    static constexpr size_t block = payload + scales * (Minimum ? 2 : 1);
};

template <Format> struct Quantised;
template <> struct Quantised<Q8> : Blocks<8, false, fp16, 1> {};
template <> struct Quantised<Q4> : Blocks<4, false, fp16, 1> {};
template <> struct Quantised<Q4M> : Blocks<4, true, fp16, 1> {};
template <> struct Quantised<Q4W> : Blocks<4, true, float, 1> {};
template <> struct Quantised<Q8W> : Blocks<8, true, float, 1> {};
template <> struct Quantised<Q8S> : Blocks<8, false, float, 2> {};

inline bool quantised(Format format) { return format >= Q8; }

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
void pack_float(Linear& w, const float* rows);                                              // F32, BF16
void pack_blocks(Linear& w, const uint8_t* q, const float* scales, const float* minima);    // the others
void unpack_row(const Linear& w, int output, float* values);                                // one output's weights

}  // namespace outpace
