// A weight matrix packed once, and products of rows with it.
//
// Sixteen outputs side by side are the lanes of one register ("a tile"); a product walks down the inputs in order.
// So each row's result is summed in one fixed order, whatever other rows are computed beside it: scoring a tree gives
// bit for bit what scoring its tokens one at a time gives.
#pragma once

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <vector>

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

// What a format wants its inputs as.
enum Want : int { WANT_F32 = 1, WANT_BF16 = 2, WANT_Q = 4 };
inline int want(Format format) { return format == F32 ? WANT_F32 : format == BF16 ? WANT_BF16 : WANT_Q; }

// The rows that products read, in each form that the weights multiply with.
struct Inputs {
    int depth = 0, inputs = 0, wanted = 0;
    std::vector<float> f32;
    std::vector<bf16> half;
    std::vector<int8_t> q;          // (rows, depth)
    std::vector<float> scale;       // (rows, depth / 32)
    std::vector<float> scaled_sum;  // scale * sum of the block's q
    std::vector<int32_t> sum16;     // (rows, depth / 16)

    // Room for `rows`. What is there is of an earlier forward, maybe of a model of other sizes.
    void prepare(int wants, int rows, int inputs) {
        this->inputs = inputs;
        depth = (inputs + BLOCK - 1) / BLOCK * BLOCK;
        wanted = wants;
        size_t n = size_t(rows) * depth;
        if (wants & WANT_F32 && f32.size() < n) f32.resize(n);
        if (wants & WANT_BF16 && half.size() < n) half.resize(n);
        if (wants & WANT_Q && q.size() < n) {
            q.resize(n);
            scale.resize(n / BLOCK);
            scaled_sum.resize(n / BLOCK);
            sum16.resize(n / 16);
        }
    }

    // Take inputs [from, to) of one row over; `from` is a multiple of 32. The last ones bring the padding with them:
    // zero times what an earlier forward left there is not zero where that was not finite.
    void take(int row, const float* values, int from, int to) {
        size_t base = size_t(row) * depth;
        if (to == inputs && to < depth) {
            if (wanted & WANT_F32) std::fill(f32.begin() + base + to, f32.begin() + base + depth, 0.f);
            if (wanted & WANT_BF16) std::fill(half.begin() + base + to, half.begin() + base + depth, bf16{0});
        }
        if (wanted & WANT_F32) std::memcpy(&f32[base + from], values + from, sizeof(float) * (to - from));
        if (wanted & WANT_BF16) {
            int i = from;
            for (; i + LANES <= to; i += LANES) store(&half[base + i], load(values + i));
            for (; i < to; ++i) half[base + i] = narrow_bf16(values[i]);
        }
        if (wanted & WANT_Q)
            for (int at = from; at < to; at += BLOCK) quantise(row, values + at, at, std::min(BLOCK, to - at));
    }

   private:
    void quantise(int row, const float* values, int at, int count) {
        float padded[BLOCK] = {};
        if (count < BLOCK) {
            std::memcpy(padded, values, sizeof(float) * count);
            values = padded;
        }
        vf low = load(values), high = load(values + LANES);
        float peak = highest(max(max(low, -low), max(high, -high)));
        float step = peak / 127.f, inverse = peak > 0.f ? 127.f / peak : 0.f;
        size_t base = size_t(row) * depth + at;
        int32_t sums[2] = {0, 0};
        vf halves[2] = {low * inverse, high * inverse};
        for (int h = 0; h < 2; ++h) {
#if defined(__AVX512F__)
            __m512i whole = _mm512_cvtps_epi32((__m512)halves[h]);
            _mm_storeu_si128((__m128i*)&q[base + h * LANES], _mm512_cvtepi32_epi8(whole));
            sums[h] = _mm512_reduce_add_epi32(whole);
#else
            for (int i = 0; i < LANES; ++i) {
                int32_t whole = int32_t(__builtin_rintf(halves[h][i]));
                q[base + h * LANES + i] = int8_t(whole);
                sums[h] += whole;
            }
#endif
        }
        size_t block = base / BLOCK;
        scale[block] = step;
        scaled_sum[block] = step * float(sums[0] + sums[1]);
        sum16[2 * block] = sums[0];
        sum16[2 * block + 1] = sums[1];
    }
};

// --- products -----------------------------------------------------------------------------------------------------

enum Activation : int32_t { NONE, SILU, GELU };

INLINE vf activated(Activation kind, vf gate) {
    if (kind == SILU) return gate * sigmoid(gate);
    // GELU by its usual approximation with tanh: 0.5 (1 + tanh z) = sigmoid(2z)
    vf z = 0.7978845608028654f * fma(0.044715f * gate * gate, gate, gate);
    return gate * sigmoid(2.f * z);
}

// Where results go. With an activation, tiles come in pairs (gate, up) and one result is written for each pair.
struct Outputs {
    float* rows;
    size_t stride;
    Activation activation = NONE;
};

// The tiles that this thread multiplies next: fetched from memory while it computes on those that are here.
struct Ahead {
    const uint8_t* from = nullptr;
    size_t tile_bytes = 0;
    int first = 0, last = 0;

    INLINE void fetch(size_t offset, size_t bytes) const {
        for (int j = first; j < last; ++j)
            for (size_t line = 0; line < bytes; line += 64) outpace::fetch(from + j * tile_bytes + offset + line);
    }
};

template <int M, int N>
INLINE void finish(const Linear& w, const Outputs& out, int tile, int row, vf (&acc)[N][M]) {
    if (w.bias)
        for (int j = 0; j < N; ++j)
            for (int i = 0; i < M; ++i) acc[j][i] += load(w.bias + (tile + j) * LANES);
    if (out.activation == NONE) {
        for (int j = 0; j < N; ++j)
            for (int i = 0; i < M; ++i) store(out.rows + (row + i) * out.stride + (tile + j) * LANES, acc[j][i]);
    } else if constexpr (N % 2 == 0) {
        for (int j = 0; j < N; j += 2)
            for (int i = 0; i < M; ++i)
                store(out.rows + (row + i) * out.stride + (tile + j) / 2 * LANES, activated(out.activation, acc[j][i]) * acc[j + 1][i]);
    }
}

template <int M, int N>
void product_f32(const Linear& w, const Inputs& x, const Outputs& out, const Ahead& ahead, int tile, int row) {
    vf acc[N][M] = {};
    const float* weights[N];
    for (int j = 0; j < N; ++j) weights[j] = (const float*)w.tile(tile + j);
    const float* values = &x.f32[size_t(row) * x.depth];
    for (int k = 0; k < w.depth; ++k) {
        if (k % 8 == 0) ahead.fetch(size_t(k) * LANES * 4, 8 * LANES * 4);
        vf column[N];
        for (int j = 0; j < N; ++j) column[j] = load(weights[j] + k * LANES);
        for (int i = 0; i < M; ++i) {
            vf value = splat(values[size_t(i) * x.depth + k]);
            for (int j = 0; j < N; ++j) acc[j][i] = fma(column[j], value, acc[j][i]);
        }
    }
    finish<M, N>(w, out, tile, row, acc);
}

template <int M, int N>
void product_bf16(const Linear& w, const Inputs& x, const Outputs& out, const Ahead& ahead, int tile, int row) {
    vf acc[N][M] = {};
    const uint8_t* weights[N];
    for (int j = 0; j < N; ++j) weights[j] = w.tile(tile + j);
    const bf16* values = &x.half[size_t(row) * x.depth];
    for (int k = 0; k < w.depth; k += 2) {
        if (k % 16 == 0) ahead.fetch(size_t(k) * LANES * 2, 16 * LANES * 2);
        vu column[N];
        for (int j = 0; j < N; ++j) column[j] = load_as<vu>(weights[j] + k * LANES * 2);
        for (int i = 0; i < M; ++i) {
            uint32_t pair;
            std::memcpy(&pair, values + size_t(i) * x.depth + k, 4);
            for (int j = 0; j < N; ++j) acc[j][i] = dot(acc[j][i], column[j], pair);
        }
    }
    finish<M, N>(w, out, tile, row, acc);
}

// A tile of a quantised matrix: the payloads of its blocks, then their scales, then their minima.
template <Format F, int M, int N>
void product_quantised(const Linear& w, const Inputs& x, const Outputs& out, const Ahead& ahead, int tile, int row) {
    using B = Quantised<F>;
    constexpr int QUADS = BLOCK / 4 / B::parts;
    const int blocks = w.depth / BLOCK, stride = x.depth / BLOCK;
    vf acc[N][M] = {};
    const uint8_t *payload[N], *scales[N];
    for (int j = 0; j < N; ++j) {
        payload[j] = w.tile(tile + j);
        scales[j] = payload[j] + blocks * B::payload;
    }
    const int8_t* values = &x.q[size_t(row) * x.depth];
    const float* steps = &x.scale[size_t(row) * stride];
    const float* scaled_sums = &x.scaled_sum[size_t(row) * stride];
    const int32_t* sums = &x.sum16[size_t(row) * stride * 2];
    for (int b = 0; b < blocks; ++b) {
        ahead.fetch(b * B::block, B::block);
        for (int part = 0; part < B::parts; ++part) {
            vi whole[N][M];
            for (int i = 0; i < M; ++i) {
                int32_t from = 0;
                if constexpr (!B::minimum) {
                    const int32_t* both = sums + (size_t(i) * stride + b) * 2;
                    from = -B::zero * (B::parts == 2 ? both[part] : both[0] + both[1]);
                }
                for (int j = 0; j < N; ++j) whole[j][i] = splat(from);
            }
            const int8_t* bytes = values + b * BLOCK + part * QUADS * 4;
            if constexpr (B::bits == 4) {
                for (int quad = 0; quad < QUADS; quad += 2) {  // two quads share a register: low and high nibbles
                    vu low[N], high[N];
                    for (int j = 0; j < N; ++j) {
                        vu raw = load_as<vu>(payload[j] + b * B::payload + quad * 32);
                        low[j] = raw & 0x0f0f0f0fu;
                        high[j] = (raw >> 4) & 0x0f0f0f0fu;
                    }
                    for (int i = 0; i < M; ++i) {
                        int32_t x0, x1;
                        std::memcpy(&x0, bytes + size_t(i) * x.depth + quad * 4, 4);
                        std::memcpy(&x1, bytes + size_t(i) * x.depth + quad * 4 + 4, 4);
                        for (int j = 0; j < N; ++j) whole[j][i] = dot(whole[j][i], low[j], x0);
                        for (int j = 0; j < N; ++j) whole[j][i] = dot(whole[j][i], high[j], x1);
                    }
                }
            } else {
                for (int quad = 0; quad < QUADS; ++quad) {
                    vu column[N];
                    for (int j = 0; j < N; ++j)
                        column[j] = load_as<vu>(payload[j] + b * B::payload + (part * QUADS + quad) * 64);
                    for (int i = 0; i < M; ++i) {
                        int32_t x0;
                        std::memcpy(&x0, bytes + size_t(i) * x.depth + quad * 4, 4);
                        for (int j = 0; j < N; ++j) whole[j][i] = dot(whole[j][i], column[j], x0);
                    }
                }
            }
            for (int j = 0; j < N; ++j) {
                using S = typename B::scale;
                vf scale = load((const S*)(scales[j] + b * B::scales) + part * LANES);
                for (int i = 0; i < M; ++i)
                    acc[j][i] = fma(to_float(whole[j][i]), scale * steps[size_t(i) * stride + b], acc[j][i]);
                if constexpr (B::minimum) {
                    vf least = load((const S*)(scales[j] + (blocks + b) * B::scales));
                    for (int i = 0; i < M; ++i)
                        acc[j][i] = fma(least, splat(scaled_sums[size_t(i) * stride + b]), acc[j][i]);
                }
            }
        }
    }
    finish<M, N>(w, out, tile, row, acc);
}

using Product = void (*)(const Linear&, const Inputs&, const Outputs&, const Ahead&, int tile, int row);

// The product for `format` over m <= MOST_ROWS rows and n tiles (1, 2 or 4).
constexpr int MOST_ROWS = 6;
Product product(Format format, int m, int n);

// Rows of `x` times tiles [first, last) of `w`; meanwhile as many tiles from `next` on are fetched, if it is not null.
inline void multiply(const Linear& w, const Inputs& x, const Outputs& out, int rows, int first, int last,
                     const uint8_t* next = nullptr, size_t next_bytes = 0) {
    // Wide formats keep more tiles going at a time than quantised ones, which need registers for the whole numbers too.
    const int widest = quantised(w.format) && rows > 1 ? 2 : 4;
    const int passes = (rows + MOST_ROWS - 1) / MOST_ROWS;
    for (int tile = first; tile < last;) {
        int n = std::min(widest, last - tile);
        if (n == 3) n = 2;
        // A single row waits for memory anyway, and the processor follows its streams by itself.
        if (rows == 1) next = nullptr;
        Ahead ahead{next ? next + (tile - first) * next_bytes : nullptr, next_bytes};
        for (int pass = 0; pass < passes; ++pass) {
            int from = rows * pass / passes, to = rows * (pass + 1) / passes;
            if (next) ahead.first = n * pass / passes, ahead.last = n * (pass + 1) / passes;
            product(w.format, to - from, n)(w, x, out, ahead, tile, from);
        }
        tile += n;
    }
}

// --- packing ------------------------------------------------------------------------------------------------------

size_t packed_bytes(Format format, int outputs, int inputs);
void pack_float(Linear& w, const float* rows);                                              // F32, BF16
void pack_blocks(Linear& w, const uint8_t* q, const float* scales, const float* minima);    // the others
void unpack_row(const Linear& w, int output, float* values);                                // one output's weights

}  // namespace outpace
