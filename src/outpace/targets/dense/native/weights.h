// What a distribution is made of: where the weights of a row come from, what is subtracted from them, and their sums.
//
// Weights are e^((logit - highest) / temperature): the most probable token has the weight 1. Sums are of doubles, in one
// order. Truncation (top-k, top-p, min-p) leaves a list of tokens.
#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "sampling.h"
#include "simd.h"

namespace outpace::sampling {

constexpr int64_t SPAN = 512;  // tokens whose weights are summed together
constexpr float INFINITE = std::numeric_limits<float>::infinity();

inline int64_t whole(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

INLINE vf load_padded(const float* row, int64_t at, int64_t size, float padding) {
    if (at + LANES <= size) return load(row + at);
    float padded[LANES];
    for (int lane = 0; lane < LANES; ++lane) padded[lane] = at + lane < size ? row[at + lane] : padding;
    return load(padded);
}

inline std::shared_ptr<float> new_row(int64_t size) { return {new float[size](), std::default_delete<float[]>()}; }

struct Entry {
    int32_t token;
    float weight;
};
// Where the weights of one row come from.
struct Source {
    enum Kind { LOGITS, WEIGHTS, LIST };
    Kind kind = LOGITS;
    int64_t size = 0;
    const float* row = nullptr;               // of logits or weights
    float highest = 0.f, rate = 0.f;          // of logits
    bool topped = false;                      // the largest weight is 1
    std::shared_ptr<float> own;               // the row, where nobody else has it
    std::shared_ptr<std::vector<Entry>> list; // by token
    std::vector<int32_t> zeros;               // ascending: tokens that have no weight any more

    INLINE vf weight(vf logits) const { return exp2((logits - highest) * rate); }

    // Weights of tokens [begin, end), whole numbers of lanes.
    void weights(int64_t begin, int64_t end, float* out) const {
        const int64_t plain = std::min(end, size / LANES * LANES);
        int64_t at = begin;
        if (kind == LOGITS) {
            for (; at < plain; at += LANES) store(out + at - begin, weight(load(row + at)));
            for (; at < end; at += LANES) store(out + at - begin, weight(load_padded(row, at, size, -INFINITE)));
        } else if (kind == WEIGHTS) {
            for (; at < plain; at += LANES) store(out + at - begin, load(row + at));
            for (; at < end; at += LANES) store(out + at - begin, load_padded(row, at, size, 0.f));
        } else {
            std::memset(out, 0, (end - begin) * sizeof *out);
            for (auto one = from(begin); one != list->end() && one->token < end; ++one) out[one->token - begin] = one->weight;
        }
        if (zeros.empty()) return;
        for (auto zero = std::lower_bound(zeros.begin(), zeros.end(), begin); zero != zeros.end() && *zero < end; ++zero)
            out[*zero - begin] = 0.f;
    }

    std::vector<Entry>::const_iterator from(int64_t token) const {
        return std::lower_bound(list->begin(), list->end(), token,
                                [](const Entry& one, int64_t sought) { return one.token < sought; });
    }

    float weight_of(int64_t token) const {
        if (kind == LIST) {
            auto one = from(token);
            if (one == list->end() || one->token != token) return 0.f;
            return std::binary_search(zeros.begin(), zeros.end(), int32_t(token)) ? 0.f : one->weight;
        }
        float found[LANES];
        const int64_t begin = token / LANES * LANES;
        weights(begin, begin + LANES, found);
        return found[token - begin];
    }

    void keep(std::shared_ptr<float> weights, int64_t count) {
        kind = WEIGHTS;
        own = std::move(weights);
        row = own.get();
        size = count;
    }

    // As `weights`, where they lie if they lie somewhere, else in `room`.
    const float* read(int64_t begin, int64_t end, float* room) const {
        if (kind == WEIGHTS && zeros.empty() && end <= size) return row + begin;
        weights(begin, end, room);
        return room;
    }

    void leave_out(const int32_t* tokens, int count) {
        zeros.insert(zeros.end(), tokens, tokens + count);
        std::sort(zeros.begin(), zeros.end());
        zeros.erase(std::unique(zeros.begin(), zeros.end()), zeros.end());
    }
};

struct Term {  // weights become max(0, scale * weights - share * those of q)
    float scale, share;
    Source q;

    INLINE vf left(vf weights, vf subtracted) const { return max(weights * scale - subtracted * share, vf{}); }
};

// Adds lanes up in doubles, which sums of floats hardly ever round.
struct Sum {
    vd8 low = {}, high = {};

    INLINE void add(vf x) {
#if defined(__AVX512F__)
        low += (vd8)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x));
        high += (vd8)_mm512_cvtps_pd((__m256)_mm512_extractf64x4_pd((__m512d)x, 1));
#else
        float lanes[LANES];
        store(lanes, x);
        add_stored(lanes);
#endif
    }

    // As `add`, of lanes in memory.
    INLINE void add_stored(const float* x) {
#if defined(__AVX512F__)
        low += (vd8)_mm512_cvtps_pd(_mm256_loadu_ps(x));
        high += (vd8)_mm512_cvtps_pd(_mm256_loadu_ps(x + 8));
#else
        low += load_converted<vd8>(x), high += load_converted<vd8>(x + LANES / 2);
#endif
    }

    double value() const {
        const vd8 both = low + high;
        return ((both[0] + both[4]) + (both[1] + both[5])) + ((both[2] + both[6]) + (both[3] + both[7]));
    }
};

struct Distribution {
    Source source;
    std::vector<Term> terms;
    std::vector<double> sums;  // of every block; of a list, none
    double total = 0.0;

    int64_t size() const { return source.size; }
    bool listed() const { return source.kind == Source::LIST; }

    void weights(int64_t begin, int64_t end, float* out) const {
        source.weights(begin, end, out);
        float subtracted[SPAN];
        for (const Term& term : terms) {
            term.q.weights(begin, end, subtracted);
            for (int64_t at = 0; at < end - begin; at += LANES)
                store(out + at, term.left(load(out + at), load(subtracted + at)));
        }
    }

    float weight(int64_t token) const {
        float found = source.weight_of(token);
        for (const Term& term : terms) {
            const float scaled = found * term.scale, subtracted = term.q.weight_of(token) * term.share;
            found = scaled > subtracted ? scaled - subtracted : 0.f;
        }
        return found;
    }

    double sum_of(int64_t block) const {
        const int64_t begin = block * SPAN, end = std::min(begin + SPAN, whole(size())), count = end - begin;
        float room[SPAN], other[SPAN];
        const float* left = source.read(begin, end, room);
        Sum sum;
        if (terms.empty())
            for (int64_t at = 0; at < count; at += LANES) sum.add(load(left + at));
        for (const Term& term : terms) {
            const float* subtracted = term.q.read(begin, end, other);
            const bool last = &term == &terms.back();
            for (int64_t at = 0; at < count; at += LANES) {
                const vf rest = term.left(load(left + at), load(subtracted + at));
                if (last) sum.add(rest);
                else store(room + at, rest);
            }
            left = room;
        }
        return sum.value();
    }

    void add_up() {
        total = 0.0;
        for (double one : sums) total += one;
    }

    void sum_all() {
        sums.resize((size() + SPAN - 1) / SPAN);
        for (size_t block = 0; block < sums.size(); ++block) sums[block] = sum_of(block);
        add_up();
    }

    template <class F> void each_weight(F take) const {
        float found[SPAN];
        for (int64_t begin = 0; begin < size(); begin += SPAN) {
            const int64_t end = std::min(begin + SPAN, whole(size()));
            weights(begin, end, found);
            for (int64_t at = begin; at < std::min(end, size()); ++at) take(at, found[at - begin]);
        }
    }

    // What is subtracted to get this one's weights, written out where it is a residual itself.
    Source flat() const {
        if (terms.empty()) return source;
        auto own = new_row(size());
        each_weight([&](int64_t token, float weight) { own.get()[token] = weight; });
        Source written;
        written.keep(std::move(own), size());
        return written;
    }

    // Lists hold few tokens, so what is subtracted or left out is done at once.
    void relist(std::shared_ptr<std::vector<Entry>> list) {
        source.list = std::move(list);
        source.zeros.clear();
        terms.clear();
        total = 0.0;
        for (const Entry& one : *source.list) total += one.weight;
    }

    bool open(const float* row, int64_t size, const outpace_truncation& truncation, const outpace_changes* changes);
    void change(const outpace_changes& changes);
    bool find_highest();
    void write_down();
    void truncate(const outpace_truncation& truncation);
};

}  // namespace outpace::sampling

struct outpace_distribution : outpace::sampling::Distribution {};
