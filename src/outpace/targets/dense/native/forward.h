// The forward of a dense decoder over flat rows: every thread walks through the layers, meeting at barriers.
#pragma once

#include <memory>

#include "attention.h"
#include "linear.h"
#include "model.h"
#include "pool.h"
#include "tiles.h"

namespace outpace {

extern std::unique_ptr<Pool> pool;  // one forward at a time: the threads are shared

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

// A token as the first layer sees it.
inline void embed(const Model& m, int32_t token, float* to) {
    unpack_row(m.embedding, token, to);
    if (m.embedding_scale != 1.f)
        for (int i = 0; i < m.hidden; ++i) to[i] *= m.embedding_scale;
}

template <class T>
class Forward {
   public:
    Forward(const Model& model, const outpace_forward& job) : m(model), job(job) {
        const int rows = job.rows, heads = m.heads * m.head_size;
        qkv_stride = 0;
        int wants[4] = {0, 0, 0, 0};
        for (int i = job.start; i < job.stop; ++i) {
            const Layer& l = m.layer[i];
            int outputs = 0;
            for (const Linear& w : l.qkv)
                if (w.data) wants[0] |= want(w.format), outputs += w.tiles * LANES;
            qkv_stride = std::max<size_t>(qkv_stride, outputs);
            wants[0] |= want(l.gate_up.format);
            wants[1] |= want(l.attention_out.format);
            wants[2] |= want(l.down.format);
        }
        if (job.logits) wants[3] = want(m.head.format);
        inner = m.layer.empty() ? 0 : m.layer[0].gate_up.tiles / 2 * LANES;
        delta_stride = round_up(m.hidden, LANES);
        auto& s = space();
        s.normed.prepare(wants[0], rows, second() ? 2 * m.hidden : m.hidden);
        s.attended.prepare(wants[1], rows, heads);
        s.inner.prepare(wants[2], rows, inner);
        s.last.prepare(wants[3], rows, m.hidden);
        if (job.before) s.entering.prepare(want(m.entry.format), rows, m.entry.inputs);
        grow(s.x, size_t(rows) * m.hidden);
        grow(s.delta, rows * delta_stride);
        grow(s.qkv, rows * qkv_stride);
        grow(s.q, size_t(rows) * m.heads * m.width);
        grow(s.mixed, size_t(rows) * heads);
        grow(s.hidden, size_t(rows) * inner);
        if (int(s.threads.size()) < pool->size) s.threads.resize(pool->size);
        lay_out_scratch();
        stages = std::vector<std::atomic<int>>(size_t(job.stop - job.start) * 7 + 2);
    }

    void run() {
        pool->run([this](int thread) {
            walk(thread);
            tiles::release();
        });
    }

   private:
    struct Space {
        Inputs entering, normed, attended, inner, last;
        std::vector<float> x, delta, qkv, q, mixed, hidden;
        std::vector<T> keys, subset;  // K of trees in blocks; gathered K/V
        struct PerThread { AttentionSpace attention; std::vector<float> row; std::vector<Query> queries; std::vector<int32_t> seen; };
        std::vector<PerThread> threads;
    };

    // Kept between forwards, under the lock that lets one run at a time.
    static Space& space() {
        static Space kept;
        return kept;
    }

    template <class V> static void grow(V& v, size_t n) { if (v.size() < n) v.resize(n); }

    void lay_out_scratch() {
        size_t keys = 0, gathered = 0, items = 0;
        row_part.resize(job.rows);
        const int group = m.heads / m.kv_heads;
        tile_rows = std::max(1, 12 / group);
        for (int p = 0; p < job.parts; ++p) {
            const outpace_part& part = job.part[p];
            for (int r = 0; r < part.rows; ++r) row_part[part.first + r] = p;
            keys_at.push_back(keys);
            subset_at.push_back(gathered);
            items_at.push_back(items);
            if (!part.causal) keys += size_t(m.kv_heads) * round_up(part.old + part.rows, LANES) * m.width;
            if (part.subset) gathered += size_t(2) * m.kv_heads * round_up(part.subset_count, LANES) * m.width;
            items += size_t((part.rows + tile_rows - 1) / tile_rows) * m.kv_heads;
        }
        items_at.push_back(items);
        grow(space().keys, keys);
        grow(space().subset, gathered);
    }

    int claim(int stage) { return stages[stage].fetch_add(1, std::memory_order_relaxed); }

    // Products of all rows with a matrix, in pieces that threads claim, each one ahead so that memory is never idle;
    // `then` is the matrix after it. `after` sees the columns that a piece has made.
    template <class After>
    void multiply_all(int thread, int stage, const Linear& w, const Inputs& x, const Outputs& out, int piece,
                      const Linear* then, After&& after) {
        const int pieces = (w.tiles + piece - 1) / piece;
        for (int i = claim(stage), next; i < pieces; i = next) {
            next = claim(stage);
            int first = i * piece, last = std::min(w.tiles, first + piece);
            const Linear* source = next < pieces ? &w : then;
            int from = next < pieces ? next * piece : thread * piece;
            bool there = source && source->data && from + last - first <= source->tiles;
            multiply(w, x, out, job.rows, first, last, there ? source->tile(from) : nullptr, source ? source->tile_bytes : 0);
            after(first, last);
        }
    }

    // Rows that a thread prepares: the same ones at every stage.
    template <class Do>
    void my_rows(int thread, Do&& run) {
        for (int row = thread; row < job.rows; row += pool->size) run(row);
    }

    float* x(int row) { return &space().x[size_t(row) * m.hidden]; }

    // Whether layer 0 runs, and reads a second row.
    bool second() const { return !m.second_norm.empty() && job.start == 0 && job.stop > 0; }

    // Add what the last sublayer made to the residual stream.
    void settle(int row, const std::vector<float>* post) {
        float *to = x(row), *delta = &space().delta[row * delta_stride];
        if (!post->empty()) normalise(delta, post->data(), m.hidden, m.epsilon, delta);
        for (int i = 0; i < m.hidden; ++i) to[i] += delta[i];
    }

    void walk(int thread) {
        auto& s = space();
        auto& mine = s.threads[thread];
        mine.row.resize(std::max({2 * m.hidden, m.heads * m.width, job.before ? m.entry.inputs : 0}));
        if (job.before) enter(thread);
        my_rows(thread, [&](int row) {
            if (job.before) {
                const float* made = &s.delta[row * delta_stride];
                if (m.entered_norm.empty()) std::memcpy(x(row), made, sizeof(float) * m.hidden);
                else normalise(made, m.entered_norm.data(), m.hidden, m.epsilon, x(row));
            } else if (job.states) {
                std::memcpy(x(row), job.states + size_t(row) * m.hidden, sizeof(float) * m.hidden);
            } else {
                embed(m, job.tokens[row], x(row));
            }
        });
        const std::vector<float>* pending = nullptr;  // the post-norm (or none) of what waits in delta
        int tap = 0, stage = 0;
        for (int index = job.start; index <= job.stop; ++index) {
            bool tapped = tap < job.taps && job.tap_layers[tap] == index, end = index == job.stop;
            const Layer* l = end ? nullptr : &m.layer[index];
            bool attends = l && !(job.skip_attention && job.skip_attention[index]);
            bool feeds = l && !(job.skip_mlp && job.skip_mlp[index]);
            if (attends || tapped || end) {
                my_rows(thread, [&](int row) {
                    if (pending) settle(row, pending);
                    if (tapped) take_tap(tap, end && job.tap_normed, row);
                    if (attends && index == 0 && second()) two_to(mine.row, s.normed, *l, row);
                    else if (attends) norm_to(mine.row, s.normed, l->norms[OUTPACE_NORM1], row);
                    if (end && job.logits) norm_to(mine.row, s.last, m.final_norm, row);
                });
                pending = nullptr;
            }
            if (tapped) ++tap;
            if (end) break;
            if (attends) {
                pool->barrier();
                attention(thread, *l, index, stage);
                pending = &l->norms[OUTPACE_POST1];
                pool->barrier();
            }
            if (feeds) {
                my_rows(thread, [&](int row) {
                    if (pending) settle(row, pending);
                    norm_to(mine.row, s.normed, l->norms[OUTPACE_NORM2], row);
                });
                pool->barrier();
                Outputs inner_rows{s.hidden.data(), size_t(inner), Activation(m.activation)};
                multiply_all(thread, stage + 5, l->gate_up, s.normed, inner_rows, 4, &l->down, [&](int first, int last) {
                    int from = first / 2 * LANES, to = std::min(last / 2 * LANES, inner);
                    for (int row = 0; row < job.rows; ++row) s.inner.take(row, &s.hidden[size_t(row) * inner], from, to);
                });
                pool->barrier();
                const Linear* then = index + 1 < job.stop ? &m.layer[index + 1].qkv[0] : job.logits ? &m.head : nullptr;
                multiply_all(thread, stage + 6, l->down, s.inner, {s.delta.data(), delta_stride}, 2, then, [](int, int) {});
                pending = &l->norms[OUTPACE_POST2];
                pool->barrier();
            }
            stage += 7;
        }
        if (job.logits) {
            pool->barrier();
            multiply_all(thread, stage, m.head, s.last, {job.logits, size_t(job.logit_stride)}, 8, nullptr, [](int, int) {});
        }
    }

    void take_tap(int tap, bool normed, int row) {
        float* to = job.tap_rows[tap] + size_t(row) * m.hidden;
        if (normed && !m.final_norm.empty()) normalise(x(row), m.final_norm.data(), m.hidden, m.epsilon, to);
        else std::memcpy(to, x(row), sizeof(float) * m.hidden);
    }

    // Make the rows' first states of what is before them, in the place of what sublayers add.
    void enter(int thread) {
        auto& s = space();
        auto& mine = s.threads[thread];
        const int inputs = m.entry.inputs;
        my_rows(thread, [&](int row) {
            const float* from = job.before + size_t(row) * inputs;
            if (!m.entry_norms.empty()) {
                for (int i = 0; i < inputs; i += m.hidden)
                    normalise(from + i, m.entry_norms.data() + i, m.hidden, m.epsilon, mine.row.data() + i);
                from = mine.row.data();
            }
            s.entering.take(row, from, 0, inputs);
        });
        pool->barrier();
        const Linear* then = job.start < job.stop ? &m.layer[job.start].qkv[0] : job.logits ? &m.head : nullptr;
        multiply_all(thread, int(stages.size()) - 1, m.entry, s.entering, {s.delta.data(), delta_stride}, 2, then, [](int, int) {});
        pool->barrier();
    }

    void norm_to(std::vector<float>& row_space, Inputs& to, const std::vector<float>& weights, int row) {
        if (weights.empty()) return to.take(row, x(row), 0, m.hidden);
        normalise(x(row), weights.data(), m.hidden, m.epsilon, row_space.data());
        to.take(row, row_space.data(), 0, m.hidden);
    }

    // The second token's embedding and the residual stream, each under its norm, one behind the other.
    void two_to(std::vector<float>& row_space, Inputs& to, const Layer& l, int row) {
        embed(*job.words, job.second[row], row_space.data());
        normalise(row_space.data(), m.second_norm.data(), m.hidden, m.epsilon, row_space.data());
        float* behind = row_space.data() + m.hidden;
        if (l.norms[OUTPACE_NORM1].empty()) std::memcpy(behind, x(row), sizeof(float) * m.hidden);
        else normalise(x(row), l.norms[OUTPACE_NORM1].data(), m.hidden, m.epsilon, behind);
        to.take(row, row_space.data(), 0, 2 * m.hidden);
    }

    void attention(int thread, const Layer& l, int index, int stage) {
        auto& s = space();
        auto& mine = s.threads[thread];
        for (int slot = 0, base = 0; slot < 3 && l.qkv[slot].data; ++slot) {
            Outputs out{s.qkv.data() + base, qkv_stride};
            const Linear* then = slot < 2 && l.qkv[slot + 1].data ? &l.qkv[slot + 1] : &l.attention_out;
            multiply_all(thread, stage + slot, l.qkv[slot], s.normed, out, 2, then, [](int, int) {});
            base += l.qkv[slot].tiles * LANES;
        }
        pool->barrier();
        my_rows(thread, [&](int row) { rotate_row(l, index, row, mine.row.data()); });
        for (int p = 0; p < job.parts; ++p) {
            if (job.part[p].old > 0) old_keys(thread, index, p);
            if (job.part[p].subset) gather(thread, index, p);
        }
        pool->barrier();
        const int group = m.heads / m.kv_heads, items = int(items_at.back());
        const bool whole_blocks = m.head_size * group % BLOCK == 0;
        for (int i; (i = claim(stage + 3)) < items;) {
            int p = int(std::upper_bound(items_at.begin(), items_at.end(), size_t(i)) - items_at.begin()) - 1;
            int item = i - int(items_at[p]), kv = item % m.kv_heads, first = item / m.kv_heads * tile_rows;
            int last = std::min(job.part[p].rows, first + tile_rows);
            attend_rows(mine, l, index, p, kv, first, last);
            if (whole_blocks)
                for (int row = job.part[p].first + first; row < job.part[p].first + last; ++row)
                    s.attended.take(row, mixed(row), kv * group * m.head_size, (kv + 1) * group * m.head_size);
        }
        pool->barrier();
        if (!whole_blocks) {
            my_rows(thread, [&](int row) { s.attended.take(row, mixed(row), 0, m.heads * m.head_size); });
            pool->barrier();
        }
        multiply_all(thread, stage + 4, l.attention_out, s.attended, {s.delta.data(), delta_stride}, 2, &l.gate_up, [](int, int) {});
    }

    float* mixed(int row) { return &space().mixed[size_t(row) * m.heads * m.head_size]; }

    T* slab(const outpace_part& part, int index, int which, int kv) const {
        return (T*)part.store + ((size_t(index) * 2 + which) * m.kv_heads + kv) * part.capacity * m.width;
    }
    T* side(const outpace_part& part, int index, int which, int kv, int row) const {
        return (T*)part.side + (((size_t(index) * 2 + which) * m.kv_heads + kv) * (part.old + part.rows) + row) * m.width;
    }
    T* tree_keys(int p, int kv) {
        const outpace_part& part = job.part[p];
        return &space().keys[keys_at[p] + size_t(kv) * round_up(part.old + part.rows, LANES) * m.width];
    }
    // The committed positions that a head may read.
    const int32_t* chosen(const outpace_part& part, int index, int kv) const {
        return part.subset + (part.subset_by_head ? (size_t(index) * m.kv_heads + kv) * part.subset_count : 0);
    }
    T* gathered(int p, int which, int kv) {
        size_t one = size_t(round_up(job.part[p].subset_count, LANES)) * m.width;
        return &space().subset[subset_at[p] + (size_t(which) * m.kv_heads + kv) * one];
    }
    // Put a key at its place among transposed blocks of sixteen.
    void place(T* blocks, int at, const T* key) const {
        T* to = blocks + size_t(at / LANES) * m.width * LANES + at % LANES;
        for (int d = 0; d < m.width; ++d) to[size_t(d) * LANES] = key[d];
    }

    void rotate(const Layer& l, const float* from, const std::vector<float>& norm, int position, float* to) const {
        if (norm.empty()) std::memcpy(to, from, sizeof(float) * m.head_size);
        else normalise(from, norm.data(), m.head_size, m.epsilon, to);
        const Rotation& r = m.rotations[l.rotation];
        const float *cosines = r.cosines + size_t(position) * r.half, *sines = r.sines + size_t(position) * r.half;
        for (int i = 0; i < r.half; ++i) {
            float a = to[i], b = to[i + r.half];
            to[i] = a * cosines[i] - b * sines[i];
            to[i + r.half] = b * cosines[i] + a * sines[i];
        }
        for (int i = m.head_size; i < m.width; ++i) to[i] = 0.f;
    }

    void rotate_row(const Layer& l, int index, int row, float* room) {
        auto& s = space();
        const int p = row_part[row];
        const outpace_part& part = job.part[p];
        const int local = row - part.first, position = part.positions[part.old + local];
        const float* from = &s.qkv[row * qkv_stride];
        for (int h = 0; h < m.heads; ++h)
            rotate(l, from + projected(l, h * m.head_size), l.norms[OUTPACE_QUERY_NORM], position,
                   &s.q[(size_t(row) * m.heads + h) * m.width]);
        if (job.queries) {
            const size_t count = size_t(m.heads) * m.width;
            std::memcpy(job.queries + (size_t(index) * job.rows + row) * count, &s.q[row * count], sizeof(float) * count);
        }
        for (int kv = 0; kv < m.kv_heads; ++kv) {
            T *key, *value;
            if (part.causal) {  // the key goes to its place below; its row of values serves as room until then
                key = value = slab(part, index, 1, kv) + size_t(part.committed + local) * m.width;
            } else {
                key = side(part, index, 0, kv, part.old + local);
                value = side(part, index, 1, kv, part.old + local);
            }
            rotate(l, from + projected(l, (m.heads + kv) * m.head_size), l.norms[OUTPACE_KEY_NORM], position, room);
            for (int d = 0; d < m.width; d += LANES) store(key + d, load(room + d));
            if (part.causal) place(slab(part, index, 0, kv), part.committed + local, key);
            else place(tree_keys(p, kv), part.old + local, key);
            std::memcpy(room, from + projected(l, (m.heads + m.kv_heads + kv) * m.head_size), sizeof(float) * m.head_size);
            for (int d = m.head_size; d < m.width; ++d) room[d] = 0.f;
            for (int d = 0; d < m.width; d += LANES) store(value + d, load(room + d));
        }
    }

    // Where an output of the fused projection lies when it is made of several matrices, each padded to whole tiles.
    static size_t projected(const Layer& l, int output) {
        size_t base = 0;
        for (const Linear* w = l.qkv; output >= w->outputs; ++w) output -= w->outputs, base += size_t(w->tiles) * LANES;
        return base + output;
    }

    void old_keys(int thread, int index, int p) {
        const outpace_part& part = job.part[p];
        for (int i = thread; i < part.old * m.kv_heads; i += pool->size)
            place(tree_keys(p, i % m.kv_heads), i / m.kv_heads, side(part, index, 0, i % m.kv_heads, i / m.kv_heads));
    }

    void gather(int thread, int index, int p) {
        const outpace_part& part = job.part[p];
        for (int i = thread; i < part.subset_count * m.kv_heads; i += pool->size) {
            const int kv = i % m.kv_heads, to = i / m.kv_heads, from = chosen(part, index, kv)[to];
            const T* key = slab(part, index, 0, kv) + size_t(from / LANES) * m.width * LANES + from % LANES;
            T* place_at = gathered(p, 0, kv) + size_t(to / LANES) * m.width * LANES + to % LANES;
            for (int d = 0; d < m.width; ++d) place_at[size_t(d) * LANES] = key[size_t(d) * LANES];
            std::memcpy(gathered(p, 1, kv) + size_t(to) * m.width, slab(part, index, 1, kv) + size_t(from) * m.width,
                        sizeof(T) * m.width);
        }
    }

    void attend_rows(typename Space::PerThread& mine, const Layer& l, int index, int p, int kv, int first, int last) {
        const outpace_part& part = job.part[p];
        const int group = m.heads / m.kv_heads, tree_rows = part.causal ? 0 : part.old + part.rows;
        const int visible = part.subset ? part.subset_count : part.committed;
        mine.queries.clear();
        mine.seen.clear();
        size_t room = 0;
        if (!part.causal) room = part.seen_start[last] - part.seen_start[first];
        mine.seen.reserve(room);  // pointers into it must stay
        for (int local = first; local < last; ++local) {
            const int position = part.positions[part.old + local];
            Query one{};
            one.limit = part.causal ? part.committed + local + 1 : visible;
            if (l.window > 0) {
                int oldest = position - l.window + 1;
                const int32_t* read = part.subset ? chosen(part, index, kv) : nullptr;
                if (read) one.low = int(std::lower_bound(read, read + visible, oldest) - read);
                else one.low = std::max(0, std::min(oldest, one.limit));
            }
            if (!part.causal) {
                one.seen = mine.seen.data() + mine.seen.size();
                for (int i = part.seen_start[local]; i < part.seen_start[local + 1]; ++i)
                    if (l.window == 0 || position - part.positions[part.seen[i]] < l.window) mine.seen.push_back(part.seen[i]);
                one.seen_count = int(mine.seen.data() + mine.seen.size() - one.seen);
            }
            const int row = part.first + local;
            for (int h = kv * group; h < (kv + 1) * group; ++h) {
                one.q = &space().q[(size_t(row) * m.heads + h) * m.width];
                one.out = mixed(row) + h * m.head_size;
                mine.queries.push_back(one);
            }
        }
        KeyValues<T> committed{slab(part, index, 0, kv), slab(part, index, 1, kv)}, rows{};
        if (part.subset) committed = {gathered(p, 0, kv), gathered(p, 1, kv)};
        if (!part.causal) rows = {tree_keys(p, kv), side(part, index, 1, kv, 0)};
        attend<T>(committed, rows, tree_rows, mine.queries.data(), int(mine.queries.size()),
                  {m.head_size, m.width, m.attention_scale, m.softcap}, mine.attention);
    }

    const Model& m;
    const outpace_forward& job;
    size_t qkv_stride, delta_stride;
    int inner, tile_rows;
    std::vector<int> row_part;
    std::vector<size_t> keys_at, subset_at, items_at;
    std::vector<std::atomic<int>> stages;
};

}  // namespace outpace
