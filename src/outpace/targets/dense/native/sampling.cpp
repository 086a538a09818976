// Distributions over the tokens that may come next; sampling.h says what they are.
//
// Weights are e^((logit - highest) / temperature): the most probable token has the weight 1. Sums are of doubles, in one
// order. Truncation (top-k, top-p, min-p) leaves a list of tokens.

#include "sampling.h"

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "simd.h"

using namespace outpace;

namespace {

constexpr int64_t BLOCK = 512;
constexpr int64_t PIECE = 64;  // whose largest logit is kept while a row is truncated
constexpr float INFINITE = std::numeric_limits<float>::infinity();

typedef float vf8 __attribute__((vector_size(32)));
typedef double vd8 __attribute__((vector_size(64)));

int64_t whole(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

INLINE vf load_padded(const float* row, int64_t at, int64_t size, float padding) {
    if (at + LANES <= size) return load(row + at);
    float padded[LANES];
    for (int lane = 0; lane < LANES; ++lane) padded[lane] = at + lane < size ? row[at + lane] : padding;
    return load(padded);
}

// Memory for weights that are read again soon. Few rows have it, so that a large batch does not fill the caches; the
// others compute their weights once more where they are read, which gives the same bits.
class Rooms {
   public:
    // Room for one row, or null where as many as may be are taken.
    std::shared_ptr<float> take(int64_t size) {
        std::lock_guard<std::mutex> lock(guard);
        Shelf& shelf = shelves[size];
        if (shelf.taken == MOST) return nullptr;
        ++shelf.taken;
        float* room = nullptr;
        if (shelf.free.empty()) room = new float[size];
        else room = shelf.free.back(), shelf.free.pop_back();
        return {room, [this, size](float* back) {
                    std::lock_guard<std::mutex> lock(guard);
                    --shelves[size].taken;
                    shelves[size].free.push_back(back);
                }};
    }

   private:
    static constexpr int MOST = 32;
    struct Shelf {
        int taken = 0;
        std::vector<float*> free;
    };
    std::mutex guard;
    std::map<int64_t, Shelf> shelves;
};

Rooms& rooms() {
    static Rooms* all = new Rooms;  // never deleted: distributions may be released as the process ends
    return *all;
}

std::shared_ptr<float> new_row(int64_t size) { return {new float[size](), std::default_delete<float[]>()}; }

struct Entry {
    int32_t token;
    float weight;
};

struct Kept {
    float logit, weight;
    int32_t token;
};

bool before(const Kept& one, const Kept& other) {
    return one.logit > other.logit || (one.logit == other.logit && one.token < other.token);
}

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
        vf8 halves[2];
        std::memcpy(halves, &x, sizeof x);
        low += __builtin_convertvector(halves[0], vd8);
        high += __builtin_convertvector(halves[1], vd8);
#endif
    }

    double value() const {
        const vd8 both = low + high;
        return ((both[0] + both[4]) + (both[1] + both[5])) + ((both[2] + both[6]) + (both[3] + both[7]));
    }
};

}  // namespace

struct outpace_distribution {
    Source source;
    std::vector<Term> terms;
    std::vector<double> sums;  // of every block; of a list, none
    double total = 0.0;

    int64_t size() const { return source.size; }
    bool listed() const { return source.kind == Source::LIST; }

    void weights(int64_t begin, int64_t end, float* out) const {
        source.weights(begin, end, out);
        float subtracted[BLOCK];
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
        const int64_t begin = block * BLOCK, end = std::min(begin + BLOCK, whole(size())), count = end - begin;
        float room[BLOCK], other[BLOCK];
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
        sums.resize((size() + BLOCK - 1) / BLOCK);
        for (size_t block = 0; block < sums.size(); ++block) sums[block] = sum_of(block);
        add_up();
    }

    template <class F> void each_weight(F take) const {
        float found[BLOCK];
        for (int64_t begin = 0; begin < size(); begin += BLOCK) {
            const int64_t end = std::min(begin + BLOCK, whole(size()));
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

    bool open(const float* row, int64_t size, const outpace_truncation& truncation);
    bool find_highest();
    void write_down();
    void truncate(const outpace_truncation& truncation);
};

// False where the largest logit is not finite, or one is NaN.
bool outpace_distribution::find_highest() {
    vf tops[4] = {splat(-INFINITE), splat(-INFINITE), splat(-INFINITE), splat(-INFINITE)};
    vi wrong = {};
    int64_t at = 0;
    for (; at + 4 * LANES <= size(); at += 4 * LANES)
        for (int part = 0; part < 4; ++part) {
            vf x = load(source.row + at + part * LANES);
            wrong |= x != x;
            tops[part] = max(x, tops[part]);
        }
    for (; at < size(); at += LANES) {
        vf x = load_padded(source.row, at, size(), -INFINITE);
        wrong |= x != x;
        tops[0] = max(x, tops[0]);
    }
    for (int lane = 0; lane < LANES; ++lane)
        if (wrong[lane]) return false;
    source.highest = highest(max(max(tops[0], tops[1]), max(tops[2], tops[3])));
    return std::isfinite(source.highest);
}

bool outpace_distribution::open(const float* row, int64_t size, const outpace_truncation& truncation) {
    source.row = row;
    source.size = size;
    if (!find_highest()) return false;
    source.rate = static_cast<float>(1.4426950408889634 / std::max(truncation.temperature, 1e-30));
    const bool top_k = truncation.top_k > 0 && truncation.top_k < size;
    if (top_k || truncation.top_p < 1.0 || truncation.min_p > 0.0) truncate(truncation);
    else write_down();
    return true;
}

// Sums and, where there is room for them, keeps the weights.
void outpace_distribution::write_down() {
    source.topped = true;
    auto room = rooms().take(size());
    if (!room) return sum_all();
    sums.resize((size() + BLOCK - 1) / BLOCK);
    for (size_t block = 0; block < sums.size(); ++block) {
        const int64_t begin = block * BLOCK, end = std::min(begin + BLOCK, size());
        int64_t at = begin;
        Sum sum;
        for (; at + LANES <= end; at += LANES) {
            const vf weights = source.weight(load(source.row + at));
            store(room.get() + at, weights);
            sum.add(weights);
        }
        if (at < end) {
            const vf weights = source.weight(load_padded(source.row, at, size(), -INFINITE));
            for (int lane = 0; at + lane < end; ++lane) room.get()[at + lane] = weights[lane];
            sum.add(weights);
        }
        sums[block] = sum.value();
    }
    add_up();
    source.keep(std::move(room), size());
}

namespace {

// What truncation leaves of one row, while it is found.
struct Truncation {
    const Source& source;
    std::vector<float> tops;   // of every piece
    std::vector<Kept> kept;

    explicit Truncation(const Source& of) : source(of) {
        for (int64_t begin = 0; begin < of.size; begin += PIECE) {
            vf top = splat(-INFINITE);
            for (int64_t at = begin; at < std::min(begin + PIECE, of.size); at += LANES)
                top = max(load_padded(of.row, at, of.size, -INFINITE), top);
            tops.push_back(highest(top));
        }
    }

    // Keeps the tokens whose logits are at least `least`; returns the sum of their weights.
    double gather(float least) {
        kept.clear();
        double mass = 0.0;
        float weights[LANES], logits[LANES];
        for (size_t piece = 0; piece < tops.size(); ++piece) {
            if (!(tops[piece] >= least)) continue;
            const int64_t begin = piece * PIECE;
            for (int64_t at = begin; at < std::min(begin + PIECE, source.size); at += LANES) {
                vf x = load_padded(source.row, at, source.size, -INFINITE);
                uint32_t in = 0;
#if defined(__AVX512F__)
                in = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(least), _CMP_GE_OQ);
#else
                for (int lane = 0; lane < LANES; ++lane) in |= uint32_t(x[lane] >= least) << lane;
#endif
                if (at + LANES > source.size) in &= (1u << (source.size - at)) - 1;
                if (!in) continue;
                store(logits, x);
                store(weights, source.weight(x));
                for (; in; in &= in - 1) {
                    const int lane = __builtin_ctz(in);
                    kept.push_back({logits[lane], weights[lane], static_cast<int32_t>(at + lane)});
                    mass += weights[lane];
                }
            }
        }
        return mass;
    }

    // Ties of the k-th largest are all kept.
    void keep_top_k(int64_t k) {
        static thread_local std::vector<float> values;
        if (k <= static_cast<int64_t>(tops.size())) {  // as many values as pieces reach the k-th largest of the tops
            values = tops;
            std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<float>());
            gather(values[k - 1]);
            values.clear();
            for (const Kept& one : kept) values.push_back(one.logit);
        } else {
            gather(-INFINITE);
            values.assign(source.row, source.row + source.size);
        }
        std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<float>());
        const float smallest = values[k - 1];
        drop([&](const Kept& one) { return one.logit < smallest; });
    }

    // The most probable tokens, as few as reach p; of equal logits at the edge the first ones. `total`: of all weights
    // that are left; `all`: nothing was dropped, and `kept` is empty.
    void keep_top_p(double p, double total, bool all) {
        const double goal = p * total;
        if (all) {
            // What is less probable than (1 - p) / V has less than 1 - p together, so the others reach p. Mostly far
            // fewer tokens do.
            const double least = (1.0 - p) * total / static_cast<double>(source.size);
            bool enough = false;
            for (double factor : {2048.0, 256.0, 32.0, 4.0, 0.5}) {
                const double weight = std::min(1.0, least * factor);
                enough = gather(static_cast<float>(source.highest + std::log2(weight) / source.rate)) >= goal;
                if (enough) break;
            }
            if (!enough) gather(-INFINITE);  // rounding, or a p that is nearly 1
        }
        double mass = 0.0;
        auto first = kept.begin(), stop = kept.end();
        while (stop - first > 16) {  // halve the range that the last token is in
            auto middle = first + (stop - first) / 2;
            std::nth_element(first, middle, stop, before);
            double half = 0.0;
            for (auto one = first; one != middle; ++one) half += one->weight;
            if (mass + half >= goal) stop = middle;
            else mass += half, first = middle;
        }
        std::sort(first, stop, before);
        for (; first + 1 < stop; ++first) {
            mass += first->weight;
            if (mass >= goal) break;
        }
        kept.erase(first + 1, kept.end());
    }

    template <class F> void drop(F unwanted) { kept.erase(std::remove_if(kept.begin(), kept.end(), unwanted), kept.end()); }
};

}  // namespace

void outpace_distribution::truncate(const outpace_truncation& wanted) {
    Truncation truncation(source);
    bool all = true;
    double left = 0.0;
    if (wanted.top_k > 0 && wanted.top_k < size()) {
        truncation.keep_top_k(wanted.top_k);
        all = false;
        for (const Kept& one : truncation.kept) left += one.weight;
    }
    if (wanted.top_p < 1.0) {
        if (all) sum_all(), left = total, sums.clear();
        truncation.keep_top_p(wanted.top_p, left, all);
        all = false;
    }
    if (wanted.min_p > 0.0) {
        const float floor = static_cast<float>(wanted.min_p);  // the largest weight is 1
        // A little less, as the logarithm is rounded.
        if (all) truncation.gather(static_cast<float>(source.highest + std::log2(0.99 * floor) / source.rate));
        truncation.drop([&](const Kept& one) { return one.weight < floor; });
    }
    auto list = std::make_shared<std::vector<Entry>>();
    list->reserve(truncation.kept.size());
    for (const Kept& one : truncation.kept) list->push_back({one.token, one.weight});
    std::sort(list->begin(), list->end(), [](const Entry& one, const Entry& other) { return one.token < other.token; });
    source.kind = Source::LIST;
    source.row = nullptr;
    relist(std::move(list));
}

extern "C" {

void outpace_distributions(const float* logits, int64_t stride, const int32_t* rows, int count, int64_t size,
                           const outpace_truncation* truncation, outpace_distribution** found) {
    for (int at = 0; at < count; ++at) {
        auto one = std::make_unique<outpace_distribution>();
        found[at] = one->open(logits + rows[at] * stride, size, *truncation) ? one.release() : nullptr;
    }
}

outpace_distribution* outpace_weighted(const float* weights, int64_t size) {
    auto one = std::make_unique<outpace_distribution>();
    one->source.row = weights;
    one->source.size = size;
    one->source.kind = Source::WEIGHTS;
    one->sum_all();
    return one->total > 0.0 && std::isfinite(one->total) ? one.release() : nullptr;
}

outpace_distribution* outpace_widened(const outpace_distribution* narrow, const int64_t* ids, int64_t size) {
    auto one = std::make_unique<outpace_distribution>();
    one->source.size = size;
    if (narrow->listed()) {
        auto list = std::make_shared<std::vector<Entry>>(*narrow->source.list);
        for (Entry& entry : *list) entry.token = static_cast<int32_t>(ids[entry.token]);
        std::sort(list->begin(), list->end(), [](const Entry& a, const Entry& b) { return a.token < b.token; });
        one->source.kind = Source::LIST;
        one->relist(std::move(list));
        return one.release();
    }
    auto own = new_row(size);
    narrow->each_weight([&](int64_t token, float weight) { own.get()[ids[token]] = weight; });
    one->source.keep(std::move(own), size);
    one->sum_all();
    return one.release();
}

outpace_distribution* outpace_residual(const outpace_distribution* p, const outpace_distribution* q, double prefix,
                                       const int32_t* tokens, int count, double* sum) {
    auto one = std::make_unique<outpace_distribution>();
    one->source = p->source;
    const float scale = static_cast<float>(prefix / p->total), share = q ? static_cast<float>(1.0 / q->total) : 0.f;
    one->source.leave_out(tokens, count);
    one->terms = p->terms;
    if (q) one->terms.push_back({scale, share, q->flat()});
    if (p->listed()) {
        auto list = std::make_shared<std::vector<Entry>>();
        for (const Entry& entry : *p->source.list)
            if (const float weight = one->weight(entry.token); weight > 0.f) list->push_back({entry.token, weight});
        one->relist(std::move(list));
    } else if (q) {
        one->sum_all();
    } else {  // only blocks that hold one of the tokens change
        one->sums = p->sums;
        for (int at = 0; at < count; ++at) one->sums[tokens[at] / BLOCK] = one->sum_of(tokens[at] / BLOCK);
        one->add_up();
    }
    *sum = q ? one->total : prefix * (one->total / p->total);
    return *sum > 0.0 ? one.release() : nullptr;
}

double outpace_probability(const outpace_distribution* of, int64_t token) { return of->weight(token) / of->total; }

double outpace_highest(const outpace_distribution* of) {
    const Source& source = of->source;
    float best = 0.f;
    if (of->listed()) {
        for (const Entry& one : *source.list) best = std::max(best, one.weight);
        return best / of->total;
    }
    if (source.topped && of->terms.empty() && source.zeros.empty()) return 1.0 / of->total;
    of->each_weight([&](int64_t, float weight) { best = std::max(best, weight); });
    return best / of->total;
}

int64_t outpace_drawn(const outpace_distribution* of, double number) {
    const double point = number * of->total;
    double passed = 0.0;
    int64_t token = -1;
    if (of->listed()) {
        for (const Entry& one : *of->source.list) {
            if (!(one.weight > 0.f)) continue;
            token = one.token;
            passed += one.weight;
            if (passed > point) break;
        }
        return token;
    }
    size_t block = 0, last = 0;
    for (; block < of->sums.size(); ++block) {
        if (of->sums[block] > 0.0) last = block;
        if (passed + of->sums[block] > point) break;
        passed += of->sums[block];
    }
    if (block == of->sums.size()) block = last, passed = point;  // the product rounded up to the total
    float found[BLOCK];
    const int64_t begin = block * BLOCK, end = std::min<int64_t>(begin + BLOCK, whole(of->size()));
    of->weights(begin, end, found);
    for (int64_t at = 0; at < end - begin; ++at) {
        if (!(found[at] > 0.f)) continue;
        token = begin + at;
        passed += found[at];
        if (passed > point) break;
    }
    return token;
}

void outpace_probabilities(const outpace_distribution* of, float* out) {
    of->each_weight([&](int64_t token, float weight) { out[token] = static_cast<float>(weight / of->total); });
}

void outpace_release(outpace_distribution* of) { delete of; }

}
