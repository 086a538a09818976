// Attention of a forward's rows: their keys and values are placed head by head, as soon as the projection has made a head,
// then threads claim rows that read the same head.
#pragma once

#include <atomic>

#include "api.h"
#include "attention.h"
#include "inputs.h"
#include "model.h"

namespace outpace {

// RMSNorm of one row.
inline void normalise(const float* x, const float* weights, int count, float epsilon, float* to) {
    vf squares = {};
    float rest = 0.f;
    int i = 0;
    for (; i + LANES <= count; i += LANES) {
        vf v = load(x + i);
        squares = fma(v, v, squares);
    }
    for (; i < count; ++i) rest = fma(x[i], x[i], rest);
    float factor = 1.f / std::sqrt((sum(squares) + rest) / float(count) + epsilon);
    for (i = 0; i < count; ++i) to[i] = x[i] * factor * weights[i];
}

template <class T>
class AttentionPass {
   public:
    AttentionPass(const Model& model, const outpace_forward& job, int threads)
        : m(model), job(job), threads(threads), group(m.heads / m.kv_heads), tile_rows(std::max(1, 12 / group)), row_bytes(Kept<T>::row_bytes(m.width)) {
        size_t keys = 0, gathered = 0;
        int longest = 0;
        for (int p = 0; p < job.parts; ++p) {
            const outpace_part& part = job.part[p];
            const int rows = part.old + part.rows;
            keys_at.push_back(keys);
            subset_at.push_back(gathered);
            items_at.push_back(items);
            if (!part.causal) keys += m.kv_heads * round_up(rows, LANES) * row_bytes;
            if (part.subset) gathered += 2 * m.kv_heads * round_up(part.subset_count, LANES) * row_bytes;
            items += (part.rows + tile_rows - 1) / tile_rows * m.kv_heads;
            longest = std::max(longest, visible(part) + rows);
        }
        items_at.push_back(items);
        chunks = (longest + CHUNK - 1) / CHUNK;
        // Few rows after many tokens: several threads share the chunks of one item.
        pieces = threads > 1 && items > 0 && items < 4 * threads ? std::min(chunks, (4 * threads + items - 1) / items) : 1;
        auto& s = space();
        grow(s.q, size_t(job.rows) * m.heads * m.width);
        grow(s.keys, keys);
        grow(s.subset, gathered);
        if (pieces > 1) grow(s.parts, size_t(items) * chunks * part_size());
        left = std::vector<std::atomic<int>>(pieces > 1 ? items : 0);
        for (auto& one : left) one.store(pieces, std::memory_order_relaxed);
        if (int(s.threads.size()) < threads) s.threads.resize(threads);
        for (auto& one : s.threads) grow(one.room, m.width), grow(one.row, row_bytes);
    }

    // Lay out what this thread's share of earlier forwards' rows and of chosen committed tokens is; read after a barrier.
    void place_earlier(int thread, int index) {
        for (int p = 0; p < job.parts; ++p) {
            const outpace_part& part = job.part[p];
            for (int i = thread; i < part.old * m.kv_heads; i += threads)
                Kept<T>::place_key(tree_keys(p, i % m.kv_heads), i / m.kv_heads, side(part, index, 0, i % m.kv_heads, i / m.kv_heads), m.width);
            if (part.subset)
                for (int kv = 0; kv < m.kv_heads; ++kv) gather(thread, index, p, kv);
        }
    }

    // Rotate one head of the fused projection in all rows, or place it as K/V: heads of queries come first, then those of
    // keys, then those of values. Row 0's is at `from`, the others `stride` apart. Read after a barrier.
    void place_head(int thread, const Layer& l, int index, int head, const float* from, size_t stride) {
        for (int p = 0; p < job.parts; ++p)
            for (int local = 0; local < job.part[p].rows; ++local) {
                const float* one = from + (job.part[p].first + local) * stride;
                if (head < m.heads) place_query(l, index, p, local, head, one);
                else if (head < m.heads + m.kv_heads) place_key(thread, l, index, p, local, head - m.heads, one);
                else place_value(thread, index, p, local, head - m.heads - m.kv_heads, one);
            }
    }

    // Claim items until none is left. What a thread has finished, it also lays out for the next product (`attended`) where
    // a group of heads fills whole blocks of it; the caller does so for all rows otherwise.
    void attend_rows(int thread, const Layer& l, int index, std::atomic<int>& claimed, float* mixed, Inputs* attended) {
        for (int i; (i = claimed.fetch_add(1, std::memory_order_relaxed)) < items * pieces;) {
            const int item = i / pieces;
            const int p = int(std::upper_bound(items_at.begin(), items_at.end(), item) - items_at.begin()) - 1;
            const outpace_part& part = job.part[p];
            const int kv = (item - items_at[p]) % m.kv_heads, first = (item - items_at[p]) / m.kv_heads * tile_rows;
            const int last = std::min(part.rows, first + tile_rows);
            if (!attend_item(space().threads[thread], l, index, p, kv, first, last, mixed, item, i % pieces) || !attended) continue;
            for (int row = part.first + first; row < part.first + last; ++row)
                attended->take(row, mixed + size_t(row) * m.heads * m.head_size, kv * group * m.head_size, (kv + 1) * group * m.head_size);
        }
    }

   private:
    struct PerThread {
        AttentionSpace attention;
        std::vector<float> room;
        std::vector<uint8_t> row;
        std::vector<Query> queries;
        std::vector<int32_t> seen;
    };

    struct Space {
        std::vector<float> q, parts;
        std::vector<uint8_t> keys, subset;  // K of trees in blocks; gathered K/V
        std::vector<PerThread> threads;
    };

    // Kept between forwards, under the lock that lets one run at a time.
    static Space& space() {
        static Space kept;
        return kept;
    }

    Shape shape() const { return {m.head_size, m.width, m.attention_scale, m.softcap}; }
    size_t part_size() const { return size_t(tile_rows) * group * part_stride(shape()); }

    // Whether a row's K/V goes to the store: of a tree the root's, while attention has that block at hand. No row counts
    // as committed by it, and nothing reads it there before it does.
    static bool stored(const outpace_part& part, int local) { return part.causal || (part.lays_root && local == 0); }

    static int visible(const outpace_part& part) { return part.subset ? part.subset_count : part.committed; }

    uint8_t* slab(const outpace_part& part, int index, int which, int kv) const {
        return (uint8_t*)part.store + ((size_t(index) * 2 + which) * m.kv_heads + kv) * part.capacity * row_bytes;
    }
    uint8_t* side(const outpace_part& part, int index, int which, int kv, int row) const {
        return (uint8_t*)part.side + (((size_t(index) * 2 + which) * m.kv_heads + kv) * part.side_rows + row) * row_bytes;
    }
    uint8_t* tree_keys(int p, int kv) const {
        return &space().keys[keys_at[p]] + kv * round_up(job.part[p].old + job.part[p].rows, LANES) * row_bytes;
    }
    uint8_t* gathered(int p, int which, int kv) const {
        return &space().subset[subset_at[p]] + (which * m.kv_heads + kv) * round_up(job.part[p].subset_count, LANES) * row_bytes;
    }
    const int32_t* chosen(const outpace_part& part, int index, int kv) const {
        return part.subset_by_head ? part.subset + (size_t(index) * m.kv_heads + kv) * part.subset_count : part.subset;
    }

    // RMSNorm (where there is one) and rotation of one head.
    void rotate(const Layer& l, const float* from, const std::vector<float>& norm, int position, float* to) const {
        if (norm.empty()) std::memcpy(to, from, sizeof(float) * m.head_size);
        else normalise(from, norm.data(), m.head_size, m.epsilon, to);
        const Rotation& r = m.rotations[l.rotation];
        const float *cosines = r.cosines + size_t(position) * r.half, *sines = r.sines + size_t(position) * r.half;
        int i = 0;
        for (; i + LANES <= r.half; i += LANES) {
            const vf a = load(to + i), b = load(to + i + r.half), cosine = load(cosines + i), sine = load(sines + i);
            store(to + i, a * cosine - b * sine);
            store(to + i + r.half, b * cosine + a * sine);
        }
        for (; i < r.half; ++i) {
            float a = to[i], b = to[i + r.half];
            to[i] = a * cosines[i] - b * sines[i];
            to[i + r.half] = b * cosines[i] + a * sines[i];
        }
        for (i = m.head_size; i < m.width; ++i) to[i] = 0.f;
    }

    void place_query(const Layer& l, int index, int p, int local, int head, const float* from) {
        const outpace_part& part = job.part[p];
        const size_t at = (size_t(part.first + local) * m.heads + head) * m.width;
        float* to = &space().q[at];
        rotate(l, from, l.norms[OUTPACE_QUERY_NORM], part.positions[part.old + local], to);
        if (job.queries) std::memcpy(job.queries + size_t(index) * job.rows * m.heads * m.width + at, to, sizeof(float) * m.width);
    }

    void place_key(int thread, const Layer& l, int index, int p, int local, int kv, const float* from) {
        PerThread& mine = space().threads[thread];
        const outpace_part& part = job.part[p];
        uint8_t* at = part.causal ? mine.row.data() : side(part, index, 0, kv, part.old + local);
        rotate(l, from, l.norms[OUTPACE_KEY_NORM], part.positions[part.old + local], mine.room.data());
        Kept<T>::write_key(at, mine.room.data(), m.width);
        if (stored(part, local)) Kept<T>::place_key(slab(part, index, 0, kv), part.committed + local, at, m.width);
        if (!part.causal) Kept<T>::place_key(tree_keys(p, kv), part.old + local, at, m.width);
    }

    void place_value(int thread, int index, int p, int local, int kv, const float* from) {
        PerThread& mine = space().threads[thread];
        const outpace_part& part = job.part[p];
        uint8_t* at = part.causal ? mine.row.data() : side(part, index, 1, kv, part.old + local);
        float* room = mine.room.data();
        std::memcpy(room, from, sizeof(float) * m.head_size);
        for (int d = m.head_size; d < m.width; ++d) room[d] = 0.f;
        Kept<T>::write_value(at, room, m.width);
        if (stored(part, local)) Kept<T>::place_value(slab(part, index, 1, kv), part.committed + local, at, m.width);
    }

    // Lay the chosen committed K/V as if they were all there is.
    void gather(int thread, int index, int p, int kv) {
        const outpace_part& part = job.part[p];
        uint8_t* row = space().threads[thread].row.data();
        for (int to = 0; to < part.subset_count; ++to) {
            if (to / 2 % threads != thread) continue;
            const int from = chosen(part, index, kv)[to];
            Kept<T>::take_key(slab(part, index, 0, kv), from, row, m.width);
            Kept<T>::place_key(gathered(p, 0, kv), to, row, m.width);
            Kept<T>::take_value(slab(part, index, 1, kv), from, row, m.width);
            Kept<T>::place_value(gathered(p, 1, kv), to, row, m.width);
        }
    }

    // What each head of rows [first, last) sees.
    void ask(PerThread& mine, const Layer& l, int index, int p, int kv, int first, int last, float* mixed) {
        const outpace_part& part = job.part[p];
        mine.queries.clear();
        mine.seen.clear();
        if (!part.causal) mine.seen.reserve(part.seen_start[last] - part.seen_start[first]);  // pointers into it must stay
        for (int local = first; local < last; ++local) {
            const int position = part.positions[part.old + local];
            Query one{};
            one.limit = part.causal ? part.committed + local + 1 : visible(part);
            one.path = one.limit;
            if (l.window > 0) {
                int oldest = position - l.window + 1;
                const int32_t* read = part.subset ? chosen(part, index, kv) : nullptr;
                if (read) one.low = int(std::lower_bound(read, read + one.limit, oldest) - read);
                else one.low = std::max(0, std::min(oldest, one.limit));
            }
            if (!part.causal) {
                one.seen = mine.seen.data() + mine.seen.size();
                const int all = part.seen_start[local + 1] - part.seen_start[local];
                const int32_t* seen = part.seen + part.seen_start[local];
                for (int i = 0; i < all; ++i)
                    if (l.window == 0 || position - part.positions[seen[i]] < l.window) mine.seen.push_back(seen[i]);
                one.seen_count = int(mine.seen.data() + mine.seen.size() - one.seen);
                // A window that has left all committed keys behind begins at a later place of the path.
                if (one.low >= one.limit) one.path += all - one.seen_count;
            }
            const int row = part.first + local;
            for (int h = kv * group; h < (kv + 1) * group; ++h) {
                one.q = &space().q[(size_t(row) * m.heads + h) * m.width];
                one.out = mixed + (size_t(row) * m.heads + h) * m.head_size;
                mine.queries.push_back(one);
            }
        }
    }

    // One piece of an item; whether the item is finished by it.
    bool attend_item(PerThread& mine, const Layer& l, int index, int p, int kv, int first, int last, float* mixed, int item, int piece) {
        const outpace_part& part = job.part[p];
        ask(mine, l, index, p, kv, first, last, mixed);
        Head head{slab(part, index, 0, kv), slab(part, index, 1, kv)};
        if (part.subset) head = {gathered(p, 0, kv), gathered(p, 1, kv)};
        if (!part.causal) head.tree_keys = tree_keys(p, kv), head.tree_values = side(part, index, 1, kv, 0);
        const Query* queries = mine.queries.data();
        const int count = int(mine.queries.size());
        const Extent all(queries, count);
        const int begin = all.first_chunk(), seen = all.last_chunk() - begin;
        const size_t size = part_size(), stride = part_stride(shape());
        AttentionSpace& s = mine.attention;
        grow(s.q, size_t(count) * m.width);
        transpose<T>(queries, count, m.width, s.q.data(), mine.room);
        const auto fold_all = [&](float* total, const float* next) {
            for (int i = 0; i < count; ++i) fold(total + i * stride, next + i * stride, m.width);
        };
        float* total;
        if (pieces == 1) {
            grow(s.parts, 2 * size);
            total = s.parts.data();
            for (int chunk = 0; chunk < seen; ++chunk) {
                float* next = chunk == 0 ? total : total + size;
                attend_chunk<T>(head, queries, count, shape(), all, begin + chunk, s, next);
                if (chunk > 0) fold_all(total, next);
            }
        } else {
            total = space().parts.data() + size_t(item) * chunks * size;
            for (int chunk = seen * piece / pieces; chunk < seen * (piece + 1) / pieces; ++chunk)
                attend_chunk<T>(head, queries, count, shape(), all, begin + chunk, s, total + chunk * size);
            if (left[item].fetch_sub(1, std::memory_order_acq_rel) > 1) return false;
            left[item].store(pieces, std::memory_order_relaxed);  // for the next layer, which begins behind a barrier
            for (int chunk = 1; chunk < seen; ++chunk) fold_all(total, total + chunk * size);
        }
        finish(queries, count, total, shape());
        return true;
    }

    const Model& m;
    const outpace_forward& job;
    const int threads, group, tile_rows;
    const size_t row_bytes;
    std::vector<size_t> keys_at, subset_at;
    std::vector<int> items_at;  // an item: a few rows of one part, and one head
    int items = 0, chunks = 0, pieces = 1;
    std::vector<std::atomic<int>> left;  // pieces of each item that are not done
};

}  // namespace outpace
