// From rows of floats, or blocks as GGUF files have them, to tiles.

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <stdexcept>

#include "formats.h"

namespace outpace {

void* reserve(size_t bytes) {
    constexpr size_t PAGE = size_t(2) << 20;
    bytes = (bytes + PAGE - 1) / PAGE * PAGE;
    void* memory = std::aligned_alloc(PAGE, bytes);
    if (!memory) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    return memory;
}

namespace {

template <Format F> struct Of : Quantised<F> { static constexpr Format format = F; };

template <class Do>
auto with_blocks(Format format, Do&& run) {
    switch (format) {
        case Q8: return run(Of<Q8>{});
        case Q4: return run(Of<Q4>{});
        case Q4M: return run(Of<Q4M>{});
        case Q5: return run(Of<Q5>{});
        case Q5M: return run(Of<Q5M>{});
        case Q4K: return run(Of<Q4K>{});
        case Q5K: return run(Of<Q5K>{});
        case Q6K: return run(Of<Q6K>{});
        default: throw std::invalid_argument("not a quantised format");
    }
}

// One block, or super-block, of one output, apart.
struct Block {
    uint8_t q[256];                 // unsigned
    uint8_t steps[16], least[8];    // of super-blocks
    fp16 scale, minimum;
};

fp16 half(const uint8_t* at) {
    fp16 x;
    std::memcpy(&x.bits, at, 2);
    if ((x.bits & 0x7c00) == 0x7c00) throw NotFinite{};
    return x;
}

// The low halves of `count` bytes, then the high ones.
void nibbles(const uint8_t* raw, int count, uint8_t* q) {
    for (int i = 0; i < count; ++i) q[i] = raw[i] & 15, q[i + count] = raw[i] >> 4;
}

// The fifth bits of a block of 32, each a bit of a word.
void fifths(const uint8_t* raw, uint8_t* q) {
    uint32_t bits;
    std::memcpy(&bits, raw, 4);
    for (int i = 0; i < 32; ++i) q[i] |= uint8_t(bits >> i & 1) << 4;
}

// Eight scales and eight minima of 6 bits each, in 12 bytes.
void six_bits(const uint8_t* raw, Block& to) {
    for (int i = 0; i < 4; ++i) {
        to.steps[i] = raw[i] & 63;
        to.least[i] = raw[i + 4] & 63;
        to.steps[i + 4] = (raw[i + 8] & 15) | (raw[i] >> 6) << 4;
        to.least[i + 4] = raw[i + 8] >> 4 | (raw[i + 4] >> 6) << 4;
    }
}

// Take one apart; the bytes that it has in a file.
template <Format F>
size_t take_apart(const uint8_t* raw, Block& to) {
    to.scale = half(raw + (F == Q6K ? 208 : 0));
    if constexpr (F == Q8) {
        for (int i = 0; i < 32; ++i) to.q[i] = raw[2 + i] ^ 0x80;
        return 34;
    } else if constexpr (F == Q4) {
        nibbles(raw + 2, 16, to.q);
        return 18;
    } else if constexpr (F == Q5) {
        nibbles(raw + 6, 16, to.q);
        fifths(raw + 2, to.q);
        return 22;
    } else if constexpr (F == Q6K) {
        for (int side = 0; side < 2; ++side) {
            uint8_t* q = to.q + side * 128;
            const uint8_t* high = raw + 128 + side * 32;
            nibbles(raw + side * 64, 64, q);
            for (int i = 0; i < 128; ++i) q[i] |= (high[i % 32] >> (i / 32 * 2) & 3) << 4;
        }
        std::memcpy(to.steps, raw + 192, 16);
        return 210;
    } else {
        to.minimum = half(raw + 2);
        if constexpr (F == Q4M) {
            nibbles(raw + 4, 16, to.q);
            return 20;
        } else if constexpr (F == Q5M) {
            nibbles(raw + 8, 16, to.q);
            fifths(raw + 4, to.q);
            return 24;
        } else {
            six_bits(raw + 4, to);
            const uint8_t* low = raw + (F == Q4K ? 16 : 48);
            for (int i = 0; i < 4; ++i) nibbles(low + i * 32, 32, to.q + i * 64);
            if constexpr (F == Q5K)
                for (int i = 0; i < 256; ++i) to.q[i] |= (raw[16 + i % 32] >> (i / 32) & 1) << 4;
            return F == Q4K ? 144 : 176;
        }
    }
}

uint32_t quad(const uint8_t* q) {
    uint32_t word;
    std::memcpy(&word, q, 4);
    return word;
}

// Put one lane of a word of each register of a block of 32 inputs to its place.
template <class B>
void put_bits(const uint8_t* q, uint8_t* to) {
    if constexpr (B::bits == 8) {
        for (int i = 0; i < 8; ++i) std::memcpy(to + i * 64, q + i * 4, 4);
    } else {
        uint32_t high[2] = {0, 0};
        for (int i = 0; i < 8; i += 2) {
            uint32_t first = quad(q + i * 4), second = quad(q + i * 4 + 4);
            uint32_t low = (first & 0x0f0f0f0fu) | (second & 0x0f0f0f0fu) << 4;
            std::memcpy(to + i * 32, &low, 4);
            if constexpr (B::super && B::bits == 5) {
                high[0] |= (first >> 4 & 0x01010101u) << i | (second >> 4 & 0x01010101u) << (i + 1);
            } else if constexpr (B::super && B::bits == 6) {
                high[i / 4] |= (first >> 4 & 0x03030303u) << i % 4 * 2 | (second >> 4 & 0x03030303u) << (i % 4 * 2 + 2);
            }
        }
        for (int r = 0; r < B::bits - 4; ++r) std::memcpy(to + 256 + r * 64, &high[r], 4);
    }
}

}  // namespace

size_t packed_bytes(Format format, int outputs, int inputs) {
    size_t tiles = (outputs + LANES - 1) / LANES, depth = size_t(inputs + BLOCK - 1) / BLOCK * BLOCK, tile;
    if (format == F32) tile = depth * LANES * 4;
    else if (format == BF16) tile = depth * LANES * 2;
    else
        tile = with_blocks(format, [&](auto b) -> size_t {
            using B = decltype(b);
            if (depth % B::inputs) throw std::invalid_argument("inputs are not in whole blocks");
            if constexpr (B::super) return depth / B::inputs * B::body;
            else return depth / BLOCK * B::block;
        });
    return tiles * ((tile + 63) / 64 * 64);
}

void pack_float(Linear& w, const float* rows, int first, int last) {
    std::memset(w.data + first * w.tile_bytes, 0, (last - first) * w.tile_bytes);
    for (int n = first * LANES; n < std::min(last * LANES, w.outputs); ++n) {
        const float* row = rows + size_t(n) * w.inputs;
        uint8_t* tile = w.data + size_t(n / LANES) * w.tile_bytes;
        const int lane = n % LANES;
        if (w.format == F32)
            for (int k = 0; k < w.inputs; ++k) ((float*)tile)[k * LANES + lane] = row[k];
        else
            for (int k = 0; k < w.inputs; ++k)
                ((bf16*)tile)[(k / 2 * LANES + lane) * 2 + k % 2] = narrow_bf16(row[k]);
    }
}

void pack_blocks(Linear& w, const uint8_t* const* blocks, int first, int last) {
    std::memset(w.data + first * w.tile_bytes, 0, (last - first) * w.tile_bytes);
    with_blocks(w.format, [&](auto b) {
        using B = decltype(b);
        const int count = w.depth / B::inputs;
        for (int index = first; index < last; ++index) {
            uint8_t* tile = w.data + index * w.tile_bytes;
            const int lanes = std::min(LANES, w.outputs - index * LANES);
            const uint8_t* from[LANES] = {};
            std::copy(blocks + index * LANES, blocks + index * LANES + lanes, from);
            for (int s = 0; s < count; ++s)
                for (int lane = 0; lane < lanes; ++lane) {
                    if (!from[lane]) continue;
                    Block one;
                    from[lane] += take_apart<B::format>(from[lane], one);
                    fp16* scales;  // of the sixteen outputs; their minima
                    fp16* minima;
                    if constexpr (B::super) {
                        uint8_t* body = tile + s * B::body;
                        for (int in = 0; in < B::inputs / BLOCK; ++in)
                            put_bits<B>(one.q + in * BLOCK, body + B::head + in * B::block + lane * 4);
                        if constexpr (B::bytes) {
                            for (int i = 0; i < B::inputs / BLOCK * B::parts; ++i) body[B::ends + i * LANES + lane] = one.steps[i];
                            if constexpr (B::minimum)
                                for (int i = 0; i < 8; ++i) body[B::minima + i * LANES + lane] = one.least[i];
                        }
                        scales = (fp16*)body;
                        minima = scales + LANES;
                    } else {
                        put_bits<B>(one.q, tile + s * B::payload + lane * 4);
                        scales = (fp16*)(tile + count * B::payload) + s * LANES;
                        minima = scales + count * LANES;
                    }
                    scales[lane] = one.scale;
                    if (B::minimum) minima[lane] = one.minimum;
                }
        }
    });
}

void unpack_row(const Linear& w, int output, float* values) {
    const uint8_t* tile = w.tile(output / LANES);
    const int lane = output % LANES;
    if (w.format == F32) {
        for (int k = 0; k < w.inputs; ++k) values[k] = ((const float*)tile)[k * LANES + lane];
        return;
    }
    if (w.format == BF16) {
        for (int k = 0; k < w.inputs; ++k) values[k] = widen(((const bf16*)tile)[(k / 2 * LANES + lane) * 2 + k % 2]);
        return;
    }
    with_blocks(w.format, [&](auto b) {
        using B = decltype(b);
        const int count = w.depth / B::inputs;
        for (int k = 0; k < w.inputs; ++k) {
            const int s = k / B::inputs, in = k % B::inputs, quad = k % BLOCK / 4;
            const uint8_t* payload;
            const fp16* scales;
            float step, least = 0.f;
            if constexpr (B::super) {
                const uint8_t* body = tile + s * B::body;
                payload = body + B::head + in / BLOCK * B::block;
                scales = (const fp16*)body + lane;
                step = widen(scales[0]);
                if (B::minimum) least = widen(scales[LANES]);
                if constexpr (B::bytes) {
                    const uint8_t byte = body[B::ends + in / (BLOCK / B::parts) * LANES + lane];
                    step *= B::signed_bytes ? float(int8_t(byte)) : float(byte);
                    if (B::minimum) least *= -float(body[B::minima + in / BLOCK * LANES + lane]);
                }
            } else {
                payload = tile + s * B::payload;
                scales = (const fp16*)(tile + count * B::payload) + s * LANES + lane;
                step = widen(scales[0]);
                if (B::minimum) least = widen(scales[count * LANES]);
            }
            int whole;
            if constexpr (B::bits == 8) {
                whole = payload[quad * 64 + lane * 4 + k % 4];
            } else {
                whole = payload[quad / 2 * 64 + lane * 4 + k % 4] >> (quad % 2 ? 4 : 0) & 15;
                if constexpr (B::super && B::bits > 4) {
                    const int each = 8 / B::high;
                    const uint8_t high = payload[256 + quad / each * 64 + lane * 4 + k % 4];
                    whole |= (high >> quad % each * B::high & ((1 << B::high) - 1)) << 4;
                }
            }
            values[k] = B::minimum ? step * float(whole) + least : step * float(whole - B::zero);
        }
    });
}

}  // namespace outpace
