// The forward of a dense decoder over flat rows: every thread walks through the layers, meeting at barriers.
#pragma once

#include <functional>
#include <memory>

#include "attention_pass.h"
#include "largest.h"
#include "linear.h"
#include "model.h"
#include "pool.h"
#include "tiles.h"

namespace outpace {

extern std::unique_ptr<Pool> pool;  // one forward at a time: the threads are shared

// A token as the first layer sees it.
inline void embed(const Model& m, int32_t token, float* to) {
    unpack_row(m.embedding, token, to);
    if (m.embedding_scale != 1.f)
        for (int i = 0; i < m.hidden; ++i) to[i] *= m.embedding_scale;
}

template <class T>
class Forward {
   public:
    Forward(const Model& model, const outpace_forward& job) : m(model), job(job), attention_pass(model, job, pool->choose()) {
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
        grow(s.mixed, size_t(rows) * heads);
        grow(s.hidden, size_t(rows) * inner);
        if (int(s.threads.size()) < pool->active) s.threads.resize(pool->active), s.largest.resize(pool->active);
        stages = std::vector<std::atomic<int>>(size_t(job.stop - job.start) * 7 + 2);
        group_tiles = 2;
        while (group_tiles * LANES % m.head_size) group_tiles += 2;
        groups_done = std::vector<std::atomic<int>>(qkv_stride / LANES + 3);
    }

    // `then`: run by every thread at the end, behind a barrier, with its number and how many there are; or empty.
    void run(const std::function<void(int, int)>& then) {
        pool->run([&](int thread) {
            walk(thread);
            if (then) {
                pool->barrier(thread);
                then(thread, pool->active);
            }
            tiles::release();
        });
    }

   private:
    struct Space {
        Inputs entering, normed, attended, inner, last;
        std::vector<float> x, delta, qkv, mixed, hidden;
        std::vector<std::vector<float>> threads;  // a row for each
        std::vector<std::vector<Largest>> largest;  // of each thread, what it has seen of all rows' logits
    };

    // Kept between forwards, under the lock that lets one run at a time.
    static Space& space() {
        static Space kept;
        return kept;
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
        for (int row = thread; row < job.rows; row += pool->active) run(row);
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
        mine.resize(std::max(2 * m.hidden, job.before ? m.entry.inputs : 0));
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
                    if (attends && index == 0 && second()) two_to(mine, s.normed, *l, row);
                    else if (attends) norm_to(mine, s.normed, l->norms[OUTPACE_NORM1], row);
                    if (end && job.logits) norm_to(mine, s.last, m.final_norm, row);
                });
                pending = nullptr;
            }
            if (tapped) ++tap;
            if (end) break;
            // Of a prompt's rows nobody reads what the last layer makes of its keys and values.
            const bool unread = index + 1 == job.stop && !job.logits && tap == job.taps;
            if (unread && !attends) break;
            if (attends) {
                pool->barrier(thread);
                project(thread, *l, index, stage);
                pool->barrier(thread);
                if (unread) break;
                attention(thread, *l, index, stage);
                pending = &l->norms[OUTPACE_POST1];
                pool->barrier(thread);
            }
            if (feeds) {
                my_rows(thread, [&](int row) {
                    if (pending) settle(row, pending);
                    norm_to(mine, s.normed, l->norms[OUTPACE_NORM2], row);
                });
                pool->barrier(thread);
                Outputs inner_rows{s.hidden.data(), size_t(inner), Activation(m.activation)};
                multiply_all(thread, stage + 5, l->gate_up, s.normed, inner_rows, 4, &l->down, [&](int first, int last) {
                    int from = first / 2 * LANES, to = std::min(last / 2 * LANES, inner);
                    s.inner.take_all(job.rows, s.hidden.data(), inner, from, to);
                });
                pool->barrier(thread);
                const Linear* then = index + 1 < job.stop ? &m.layer[index + 1].qkv[0] : job.logits ? &m.head : nullptr;
                multiply_all(thread, stage + 6, l->down, s.inner, {s.delta.data(), delta_stride}, 2, then, [](int, int) {});
                pending = &l->norms[OUTPACE_POST2];
                pool->barrier(thread);
            }
            stage += 7;
        }
        if (job.logits) {
            pool->barrier(thread);
            score(thread, stage);
        }
    }

    // All rows' logits, and where the largest of each is: looked up in every piece while the caches hold it.
    void score(int thread, int stage) {
        auto& s = space();
        auto& mine = s.largest[thread];
        mine.assign(job.best ? job.rows : 0, {});
        multiply_all(thread, stage, m.head, s.last, {job.logits, size_t(job.logit_stride)}, 8, nullptr, [&](int first, int last) {
            const int end = std::min(last * LANES, m.head.outputs);
            for (size_t row = 0; row < mine.size(); ++row) mine[row].look(job.logits + row * job.logit_stride, first * LANES, end);
        });
        if (!job.best) return;
        pool->barrier(thread);
        my_rows(thread, [&](int row) {
            Largest found = mine[row];
            for (int other = 0; other < pool->active; ++other) found.join(s.largest[other][row]);
            job.best[row] = found.at();
        });
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
                    normalise(from + i, m.entry_norms.data() + i, m.hidden, m.epsilon, mine.data() + i);
                from = mine.data();
            }
            s.entering.take(row, from, 0, inputs);
        });
        pool->barrier(thread);
        const Linear* then = job.start < job.stop ? &m.layer[job.start].qkv[0] : job.logits ? &m.head : nullptr;
        multiply_all(thread, int(stages.size()) - 1, m.entry, s.entering, {s.delta.data(), delta_stride}, 2, then, [](int, int) {});
        pool->barrier(thread);
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

    // Queries, keys and values of all rows.
    void project(int thread, const Layer& l, int index, int stage) {
        auto& s = space();
        attention_pass.place_earlier(thread, index);
        for (int slot = 0, base = 0, head = 0, group = 0; slot < 3 && l.qkv[slot].data; ++slot) {
            const Linear& w = l.qkv[slot];
            Outputs out{s.qkv.data() + base, qkv_stride};
            const Linear* then = slot < 2 && l.qkv[slot + 1].data ? &l.qkv[slot + 1] : &l.attention_out;
            multiply_all(thread, stage + slot, w, s.normed, out, 2, then, [&](int first, int) {
                const int mine = first / group_tiles, begin = mine * group_tiles, end = std::min(w.tiles, begin + group_tiles);
                std::atomic<int>& done = groups_done[group + mine];
                if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < (end - begin + 1) / 2) return;
                done.store(0, std::memory_order_relaxed);  // for the next layer, which begins behind a barrier
                for (int at = begin * LANES; at < std::min(end * LANES, w.outputs); at += m.head_size)
                    attention_pass.place_head(thread, l, index, head + at / m.head_size, out.rows + at, qkv_stride);
            });
            base += w.tiles * LANES;
            head += w.outputs / m.head_size;
            group += (w.tiles + group_tiles - 1) / group_tiles;
        }
    }

    void attention(int thread, const Layer& l, int index, int stage) {
        auto& s = space();
        const bool whole_blocks = m.head_size * (m.heads / m.kv_heads) % BLOCK == 0;
        attention_pass.attend_rows(thread, l, index, stages[stage + 3], s.mixed.data(), whole_blocks ? &s.attended : nullptr);
        pool->barrier(thread);
        if (!whole_blocks) {
            my_rows(thread, [&](int row) { s.attended.take(row, &s.mixed[size_t(row) * m.heads * m.head_size], 0, m.heads * m.head_size); });
            pool->barrier(thread);
        }
        multiply_all(thread, stage + 4, l.attention_out, s.attended, {s.delta.data(), delta_stride}, 2, &l.gate_up, [](int, int) {});
    }

    const Model& m;
    const outpace_forward& job;
    size_t qkv_stride, delta_stride;
    int inner;
    AttentionPass<T> attention_pass;
    std::vector<std::atomic<int>> stages;
    int group_tiles;  // of the fused projection: whole heads, in pieces of two tiles
    std::vector<std::atomic<int>> groups_done;  // pieces of each
};

}  // namespace outpace
