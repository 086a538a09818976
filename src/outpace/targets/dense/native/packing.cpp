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

template <class Do>
auto with_blocks(Format format, Do&& run) {
    switch (format) {
        case Q8: return run(Quantised<Q8>{});
        case Q4: return run(Quantised<Q4>{});
        case Q4M: return run(Quantised<Q4M>{});
        case Q4W: return run(Quantised<Q4W>{});
        case Q8W: return run(Quantised<Q8W>{});
        case Q8S: return run(Quantised<Q8S>{});
        default: throw std::invalid_argument("not a quantised format");
    }
}

}  // namespace

size_t packed_bytes(Format format, int outputs, int inputs) {
    size_t tiles = (outputs + LANES - 1) / LANES, depth = size_t(inputs + BLOCK - 1) / BLOCK * BLOCK;
    size_t tile = format == F32    ? depth * LANES * 4
                  : format == BF16 ? depth * LANES * 2
                                   : with_blocks(format, [&](auto b) { return depth / BLOCK * b.block; });
    return tiles * ((tile + 63) / 64 * 64);
}

void pack_float(Linear& w, const float* rows) {
    std::memset(w.data, 0, w.tiles * w.tile_bytes);
    for (int n = 0; n < w.outputs; ++n) {
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

// q: (outputs, depth) unsigned; scales and minima: (outputs, depth / 32 * parts). `depth` counts the padding.
void pack_blocks(Linear& w, const uint8_t* q, const float* scales, const float* minima) {
    with_blocks(w.format, [&](auto b) {
        using B = decltype(b);
        using S = typename B::scale;
        const int blocks = w.depth / BLOCK;
        std::memset(w.data, 0, w.tiles * w.tile_bytes);
        for (int n = 0; n < w.outputs; ++n) {
            uint8_t* tile = w.data + size_t(n / LANES) * w.tile_bytes;
            const int lane = n % LANES;
            const uint8_t* row = q + size_t(n) * w.depth;
            const int at_once = B::bits == 8 ? 4 : 8;  // inputs whose bytes lie side by side in a lane
            for (int k = 0; k < w.depth; k += at_once) {
                uint32_t word, upper;
                std::memcpy(&word, row + k, 4);
                if (B::bits != 8) {
                    std::memcpy(&upper, row + k + 4, 4);
                    word |= upper << 4;
                }
                std::memcpy(tile + k / BLOCK * B::payload + k % BLOCK / at_once * 64 + lane * 4, &word, 4);
            }
            S* at = (S*)(tile + blocks * B::payload);
            const size_t from = size_t(n) * blocks * B::parts;
            for (int i = 0; i < blocks * B::parts; ++i) {
                at[i * LANES + lane] = narrow<S>(scales[from + i]);
                if (B::minimum) at[(blocks * B::parts + i) * LANES + lane] = narrow<S>(minima[from + i]);
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
        using S = typename B::scale;
        const int blocks = w.depth / BLOCK;
        const S* at = (const S*)(tile + blocks * B::payload);
        for (int k = 0; k < w.inputs; ++k) {
            const int quad = k % BLOCK / 4, scale = k / (BLOCK / B::parts);
            const uint8_t* payload = tile + k / BLOCK * B::payload;
            int whole = B::bits == 8 ? payload[quad * 64 + lane * 4 + k % 4]
                                     : payload[quad / 2 * 64 + lane * 4 + k % 4] >> (quad % 2 ? 4 : 0) & 15;
            float step = widen(at[scale * LANES + lane]);
            values[k] = B::minimum ? step * float(whole) + widen(at[(blocks * B::parts + scale) * LANES + lane])
                                   : step * float(whole - B::zero);
        }
    });
}

}  // namespace outpace
