// Probabilities, draws and residuals of distributions; sampling.h says what they are.

#include "weights.h"

using namespace outpace;
using namespace outpace::sampling;

namespace {

constexpr double FAINT = 1e-30;  // of smaller sums the reciprocal may be no float

// The same distribution with weights that sum to one.
std::unique_ptr<outpace_distribution> normalised(const outpace_distribution& of) {
    auto one = std::make_unique<outpace_distribution>();
    one->source.size = of.size();
    if (of.listed()) {
        auto list = std::make_shared<std::vector<Entry>>(*of.source.list);
        for (Entry& entry : *list) entry.weight = static_cast<float>(entry.weight / of.total);
        one->source.kind = Source::LIST;
        one->relist(std::move(list));
        return one;
    }
    auto own = new_row(of.size());
    of.each_weight([&](int64_t token, float weight) { own.get()[token] = static_cast<float>(weight / of.total); });
    one->source.keep(std::move(own), of.size());
    one->sum_all();
    return one;
}

}  // namespace

extern "C" {

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
    std::unique_ptr<outpace_distribution> scaled[2];
    if (p->total < FAINT) p = (scaled[0] = normalised(*p)).get();
    if (q && q->total < FAINT) q = (scaled[1] = normalised(*q)).get();
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
        for (int at = 0; at < count; ++at) one->sums[tokens[at] / SPAN] = one->sum_of(tokens[at] / SPAN);
        one->add_up();
    }
    *sum = q ? one->total : prefix * (one->total / p->total);
    return *sum > 0.0 ? one.release() : nullptr;
}

double outpace_probability(const outpace_distribution* of, int64_t token) { return of->weight(token) / of->total; }

double outpace_acceptance(const outpace_distribution* p, const outpace_distribution* q, int64_t token, double prefix) {
    if (token < 0 || token >= p->size()) return 0.0;
    const double wanted = prefix * outpace_probability(p, token);
    if (!(wanted > 0.0)) return 0.0;
    const double drafted = outpace_probability(q, token);
    return wanted >= drafted ? 1.0 : wanted / drafted;
}

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
    float found[SPAN];
    const int64_t begin = block * SPAN, end = std::min<int64_t>(begin + SPAN, whole(of->size()));
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
