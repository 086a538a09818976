// Top-k, top-p and min-p: the list of tokens that they leave of a row.

#include "weights.h"

using namespace outpace;
using namespace outpace::sampling;

namespace {

constexpr int64_t PIECE = 64;  // whose largest logit is kept while a row is truncated

struct Kept {
    float logit, weight;
    int32_t token;
};

bool before(const Kept& one, const Kept& other) {
    return one.logit > other.logit || (one.logit == other.logit && one.token < other.token);
}

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

    // Keeps the tokens whose logits are at least `least`, and that are not banned; returns the sum of their weights.
    double gather(float least) {
        kept.clear();
        least = std::max(least, std::numeric_limits<float>::lowest());
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
#elif defined(__AVX__)
                const vi above = x >= least;
                in = _mm256_movemask_ps((__m256)above.a) | _mm256_movemask_ps((__m256)above.b) << 8;
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
        if (static_cast<int64_t>(kept.size()) <= k) return;  // no more are left where others are banned
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

void Distribution::truncate(const outpace_truncation& wanted) {
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
    source.own.reset();
    relist(std::move(list));
}
