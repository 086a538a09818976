// A packed model: its layers, norms and rotation tables.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <vector>

#include "api.h"
#include "formats.h"
#include "key_values.h"

namespace outpace {

struct Layer {
    Linear qkv[3], attention_out, gate_up, down;
    std::vector<float> norms[OUTPACE_NORMS];
    int window = 0, rotation = 0;
};

struct Rotation {
    const float *cosines = nullptr, *sines = nullptr;  // (positions, half)
    int positions = 0, half = 0;
};

struct Model : outpace_shape {
    explicit Model(const outpace_shape& shape) : outpace_shape(shape), layer(shape.layers) {
        width = round_up(head_size, LANES);
        final_norm.assign(hidden, 1.f);
    }
    ~Model() {
        for (void* chunk : chunks) std::free(chunk);
    }

    int width;  // of a head's K/V row
    std::vector<Layer> layer;
    std::vector<float> final_norm;  // empty: none
    std::vector<float> second_norm; // layer 0 reads a second row beside the residual stream, under this norm; empty: none
    std::vector<float> entry_norms; // of the entry's inputs, `hidden` of them by themselves; empty: none
    std::vector<float> entered_norm; // of what the entry makes; empty: none
    Linear embedding, head, entry;
    Rotation rotations[2];

    // Packed weights lie one behind the other in few large pieces.
    std::vector<void*> chunks;
    std::vector<std::unique_ptr<std::vector<float>>> biases;
    size_t bytes = 0, room = 0;
    uint8_t* next = nullptr;

    uint8_t* allocate(size_t size) {
        bytes += size;
        if (size > room) {
            room = std::max(size, size_t(32) << 20);
            next = (uint8_t*)reserve(room);
            chunks.push_back(next);
        }
        uint8_t* at = next;
        next += size;
        room -= size;
        return at;
    }

    // `together` runs a function on all threads.
    template <class Run>
    Linear pack(const outpace_matrix& m, Run&& together) {
        if (m.format < 0 || m.format >= FORMATS) throw std::invalid_argument("unknown weight format");
        Linear w;
        w.format = Format(m.format);
        w.outputs = m.outputs, w.inputs = m.inputs;
        w.tiles = round_up(m.outputs, LANES) / LANES, w.depth = round_up(m.inputs, BLOCK);
        size_t size = packed_bytes(w.format, m.outputs, m.inputs);
        w.tile_bytes = size / w.tiles;
        w.data = allocate(size);
        std::atomic<int> next{0};
        std::atomic<bool> finite{true};
        const int piece = std::max(1, w.tiles / 64);
        together([&](int) {
            for (int at; finite && (at = next.fetch_add(piece)) < w.tiles;) {
                const int end = std::min(w.tiles, at + piece);
                try {
                    if (quantised(w.format)) pack_blocks(w, m.blocks, at, end);
                    else pack_float(w, m.rows, at, end);
                } catch (const NotFinite&) {
                    finite = false;
                }
            }
        });
        if (!finite) throw NotFinite{};
        if (m.bias) {
            biases.push_back(std::make_unique<std::vector<float>>(w.tiles * LANES, 0.f));
            std::copy(m.bias, m.bias + m.outputs, biases.back()->begin());
            w.bias = biases.back()->data();
        }
        return w;
    }

    Linear& matrix(int index, int slot) {
        if (index < 0) return slot == 0 ? embedding : slot == 1 ? head : entry;
        Layer& l = layer.at(index);
        return slot <= OUTPACE_QKV2 ? l.qkv[slot] : slot == OUTPACE_ATTENTION_OUT ? l.attention_out : slot == OUTPACE_GATE_UP ? l.gate_up : l.down;
    }
};

}  // namespace outpace

struct outpace_model : outpace::Model {
    using Model::Model;
};
