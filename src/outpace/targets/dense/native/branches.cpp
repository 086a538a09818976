// Rows that grow from one another, level by level, for drafts: one call runs a level of all sequences and reads its logits, or
// all levels of trees that are chosen here (draft_tree.h).

#include <cstring>
#include <string>

#include "attention_pass.h"
#include "calls.h"
#include "draft_tree.h"
#include "forward.h"
#include "top.h"

namespace outpace {
namespace {

// A row that others may follow. `index`: among those of its sequence's tree, -1 for the root, which is committed.
struct Row {
    int sequence, parent, index, position;
};

// A sequence that rows grow from: `side` holds the K/V of `rows` of them, and has room for `room`.
struct Grown {
    void* store = nullptr;
    int capacity = 0, committed = 0, rows = 0, room = 0;
    std::vector<uint8_t> side;
    std::vector<int32_t> positions;
};

constexpr int FIRST_ROOM = 32;

}  // namespace

class Branches {
   public:
    Branches(const outpace_model& model, const outpace_model* words, int entering, bool normed)
        : m(model), words(words), entering(entering), normed(normed), row_bytes(kv_row_bytes(model)) {
        if (entering == OUTPACE_EMBEDDING_AND_STATE && (!words || m.entry.inputs != words->hidden + m.hidden))
            throw std::invalid_argument("the entry does not take an embedding and a state side by side");
        if (entering == OUTPACE_NORMED_STATE && m.entered_norm.empty()) throw std::invalid_argument("the entry has no norm behind it");
    }

    void begin(const outpace_root* roots, int count, const int32_t* tokens, const outpace_reading& reading) {
        const bool enters = m.entry.data != nullptr;
        const size_t width = enters ? m.entry.inputs : m.hidden;
        rows.clear(), parts.clear();
        if (int(sequences.size()) < count) sequences.resize(count);
        int total = 0;
        for (int i = 0; i < count; ++i) total += roots[i].rows;
        grow(before, total * width);
        for (int i = 0, first = 0; i < count; first += roots[i++].rows) {
            const outpace_root& root = roots[i];
            if (root.rows < 1 || root.committed + root.rows > root.capacity) throw std::invalid_argument("a root needs rows, and room for them");
            Grown& one = sequences[i];
            one.store = root.store, one.capacity = root.capacity, one.committed = root.committed + root.rows, one.rows = 0;
            one.positions.resize(root.rows);
            for (int at = 0; at < root.rows; ++at) one.positions[at] = root.position + at;
            std::memcpy(&before[first * width], root.entering, sizeof(float) * root.rows * width);
            outpace_part part{};
            part.first = first, part.rows = root.rows, part.committed = root.committed, part.capacity = root.capacity, part.causal = 1;
            part.store = root.store, part.positions = one.positions.data();
            parts.push_back(part);
            rows.push_back({i, -1, -1, root.position + root.rows - 1});
        }
        outpace_forward job = forward(total, tokens);
        (enters ? job.before : job.states) = before.data();
        grow(states, size_t(count) * m.hidden);
        if (total == count) {
            run(job, 0, reading);
        } else {  // of most rows nobody wants logits: the LM head runs over the last ones alone
            grow(streams, size_t(total) * m.hidden);
            float* tap = streams.data();
            const int32_t layer = m.layers;
            job.taps = 1, job.tap_layers = &layer, job.tap_rows = &tap;
            run_forward(m, job);
            for (int i = 0, end = 0; i < count; ++i)
                end += roots[i].rows, std::memcpy(&streams[size_t(i) * m.hidden], &streams[size_t(end - 1) * m.hidden], sizeof(float) * m.hidden);
            parts.clear();
            job = forward(count, nullptr);
            job.start = m.layers, job.states = streams.data();
            run(job, 0, reading);
        }
        for (int i = 0; i < count; ++i) sequences[i].positions.clear();
    }

    void follow(int count, const int32_t* after, const int32_t* tokens, const outpace_reading& reading) {
        const int known = int(rows.size());
        parts.clear(), seen.clear(), seen_start.clear();
        grow(states, size_t(known + count) * m.hidden);
        for (int i = 0; i < count; ++i) {
            if (after[i] < 0 || after[i] >= known) throw std::out_of_range("there is no row " + std::to_string(after[i]) + " to follow");
            const Row parent = rows[after[i]];
            Grown& one = sequences[parent.sequence];
            if (parts.empty() || now != parent.sequence) {
                for (int at = known; at < known + i; ++at)
                    if (rows[at].sequence == parent.sequence) throw std::invalid_argument("rows of one sequence stand beside one another");
                now = parent.sequence;
                outpace_part part{};
                part.first = i, part.old = one.rows, part.committed = one.committed, part.capacity = one.capacity, part.store = one.store;
                parts.push_back(part);
            }
            rows.push_back({now, after[i], one.rows++, parent.position + 1});
            one.positions.push_back(parent.position + 1);
            parts.back().rows++;
            see(known + i);
        }
        seen_start.push_back(int32_t(seen.size()));
        for (outpace_part& part : parts) {
            Grown& one = sequences[rows[known + part.first].sequence];
            make_room(one, part.old);
            part.side = one.side.data(), part.side_rows = one.room;
            part.positions = one.positions.data();
            part.seen_start = &seen_start[part.first], part.seen = seen.data();
        }
        outpace_forward job = forward(count, tokens);
        enter(count, after, tokens, job);
        run(job, known, reading);
    }

    outpace_drafts draft(const outpace_root* roots, int count, const int32_t* tokens, const outpace_tree_plan* plans) {
        std::vector<DraftTree> trees;
        for (int i = 0; i < count; ++i) {
            if (plans[i].id_count < m.vocabulary) throw std::invalid_argument("a column of the logits has no token");
            trees.emplace_back(plans[i], i);
        }
        numbers.clear(), probs.clear(), seconds.clear();
        grow_trees(trees, m.vocabulary, level, seconds, [&](DraftLevel& level) {
            const outpace_reading reading{level.k, level.warmth.data(), level.values.data(), level.columns.data(), level.totals.data(), nullptr, 0};
            if (level.after.empty()) begin(roots, count, tokens, reading);
            else follow(int(level.after.size()), level.after.data(), level.tokens.data(), reading);
        });
        for (DraftTree& tree : trees) tree.report(numbers, probs);
        return {numbers.data(), probs.data(), seconds.data(), int32_t(numbers.size()), int32_t(probs.size()), int32_t(seconds.size())};
    }

   private:
    // Which rows of its tree a row sees: those on the path to it, and itself.
    void see(int row) {
        const size_t start = seen.size();
        seen_start.push_back(int32_t(start));
        for (int at = row; rows[at].index >= 0; at = rows[at].parent) seen.push_back(rows[at].index);
        std::reverse(seen.begin() + start, seen.end());
    }

    // Room for all rows of a sequence, of which the first `old` are there.
    void make_room(Grown& one, int old) {
        if (one.rows <= one.room) return;
        const int room = std::max({one.rows, 2 * one.room, FIRST_ROOM}), slabs = m.layers * 2 * m.kv_heads;
        std::vector<uint8_t> larger(size_t(slabs) * room * row_bytes);
        for (int slab = 0; slab < slabs && old; ++slab)
            std::memcpy(&larger[slab * room * row_bytes], &one.side[slab * one.room * row_bytes], old * row_bytes);
        one.side.swap(larger);
        one.room = room;
    }

    // What the rows of a level begin with.
    void enter(int count, const int32_t* after, const int32_t* tokens, outpace_forward& job) {
        const bool joined = entering == OUTPACE_EMBEDDING_AND_STATE;
        const size_t width = joined ? m.entry.inputs : m.hidden;
        if (joined) check_tokens(*words, tokens, count);
        grow(before, count * width);
        for (int i = 0; i < count; ++i) {
            const float* from = &states[size_t(after[i]) * m.hidden];
            float* to = &before[i * width];
            if (joined) embed(*words, tokens[i], to), to += words->hidden;
            if (entering == OUTPACE_NORMED_STATE) normalise(from, m.entered_norm.data(), m.hidden, m.epsilon, to);
            else std::memcpy(to, from, sizeof(float) * m.hidden);
        }
        (joined ? job.before : job.states) = before.data();
    }

    outpace_forward forward(int count, const int32_t* tokens) const {
        outpace_forward job{};
        job.rows = count, job.parts = int(parts.size()), job.part = parts.data(), job.stop = m.layers;
        job.second = tokens, job.words = words;
        return job;
    }

    // A forward whose rows' states are kept from row `first` on, and what is read of their logits.
    void run(outpace_forward& job, int first, const outpace_reading& reading) {
        if (reading.k < 0 || reading.k > m.vocabulary) throw std::invalid_argument("a row has not that many logits");
        const int32_t layer = m.layers;
        float* tap = &states[size_t(first) * m.hidden];
        job.taps = 1, job.tap_layers = &layer, job.tap_rows = &tap, job.tap_normed = normed;
        job.logits = reading.logits, job.logit_stride = reading.logit_stride;
        if (!job.logits && reading.k) {
            job.logit_stride = round_up(m.vocabulary, LANES);
            grow(logits, size_t(job.rows) * job.logit_stride);
            job.logits = logits.data();
        }
        run_forward(m, job, [&](int thread, int threads) {
            for (int row = thread; row < job.rows && reading.k; row += threads)
                top_of_row(job.logits + row * job.logit_stride, m.vocabulary, reading.k, reading.values + size_t(row) * reading.k,
                           reading.ids + size_t(row) * reading.k, reading.warmth[row], reading.totals + row);
        });
    }

    const outpace_model& m;
    const outpace_model* words;
    const int entering;
    const bool normed;
    const size_t row_bytes;
    int now = -1;  // whose rows come
    std::vector<Row> rows;
    std::vector<Grown> sequences;
    std::vector<outpace_part> parts;
    std::vector<int32_t> seen, seen_start;
    std::vector<float> states;  // (rows, hidden)
    std::vector<float> before, streams, logits;
    DraftLevel level;
    std::vector<int32_t> numbers;  // what is told of drafts
    std::vector<double> probs, seconds;
};

}  // namespace outpace

struct outpace_branches : outpace::Branches {
    using Branches::Branches;
};

using namespace outpace;

extern "C" {

outpace_branches* outpace_branches_create(outpace_model* model, const outpace_model* words, int entering, int normed) {
    outpace_branches* made = nullptr;
    guarded([&] { made = new outpace_branches(*model, words, entering, normed); });
    return made;
}

void outpace_branches_destroy(outpace_branches* branches) { delete branches; }

int outpace_branches_begin(outpace_branches* branches, const outpace_root* roots, int count, const int32_t* tokens, const outpace_reading* reading) {
    return guarded([&] { branches->begin(roots, count, tokens, *reading); });
}

int outpace_branches_grow(outpace_branches* branches, int rows, const int32_t* after, const int32_t* tokens, const outpace_reading* reading) {
    return guarded([&] { branches->follow(rows, after, tokens, *reading); });
}

int outpace_branches_draft(outpace_branches* branches, const outpace_root* roots, int count, const int32_t* tokens, const outpace_tree_plan* plans, outpace_drafts* drafts) {
    return guarded([&] { *drafts = branches->draft(roots, count, tokens, plans); });
}

void outpace_copy_rows(const float* const* from, float* const* to, int count, int width) {
    for (int i = 0; i < count; ++i) std::memcpy(to[i], from[i], sizeof(float) * width);
}

}
