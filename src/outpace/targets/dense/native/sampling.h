// Distributions over the tokens that may come next: what Python calls. Mirrored in native_distribution.py.
//
// A distribution keeps where its row lies; weights are computed where they are read, in blocks, always by the same
// instructions, or once, where there is room to keep them. So a probability that is tested, one that is drawn with and one
// that is written out have the same bits, whichever row stands beside it. Rows must stay where they are as long as a
// distribution that reads them.
#pragma once

#include <cstdint>

extern "C" {

struct outpace_distribution;

struct outpace_truncation {
    double temperature;  // above 0
    int64_t top_k;       // 0: off
    double top_p;        // 1: off
    double min_p;        // 0: off
};

struct outpace_logits {  // of different tokens
    int64_t count;
    const int64_t* ids;
    const float* values;
};

// What bias and penalties change of a row, before the temperature: `bias` is added; then the logits of the tokens of
// `history` and `path`, whose values are how often the answer holds each, are multiplied or divided by `repetition`,
// and `presence` and `frequency` times the count are taken off. Tokens of both count as in `path`. Last, tokens whose bit
// in `allowed` is 0 are banned (bit t % 32 of word t / 32 is token t's; null: none is).
struct outpace_changes {
    outpace_logits bias, history, path;
    double repetition, presence, frequency;
    const uint32_t* allowed;
};

// Distributions of `count` of the rows at `logits`, each `size` logits: `changes` (one for each, or null), temperature,
// top-k, top-p, min-p. Null where no token can follow: a row without a finite largest value, or with NaN.
void outpace_distributions(const float* logits, int64_t stride, const int32_t* rows, int count, int64_t size,
                           const outpace_truncation*, const outpace_changes* changes, outpace_distribution** found);
// Of non-negative weights; null where their sum is not positive and finite.
outpace_distribution* outpace_weighted(const float* weights, int64_t size);
// Over a vocabulary of `size` tokens, from one over a part of it, whose tokens have the different `ids` there.
outpace_distribution* outpace_widened(const outpace_distribution*, const int64_t* ids, int64_t size);
// max(0, prefix * p - q), and 0 at `tokens`, with its sum; q may be null. Null where the sum is 0.
outpace_distribution* outpace_residual(const outpace_distribution* p, const outpace_distribution* q, double prefix,
                                       const int32_t* tokens, int count, double* sum);
double outpace_probability(const outpace_distribution*, int64_t token);
// min(1, prefix * p / q) of a token; 0 where p is.
double outpace_acceptance(const outpace_distribution* p, const outpace_distribution* q, int64_t token, double prefix);
double outpace_highest(const outpace_distribution*);  // probability
// The token on which `number`, in [0, 1), falls when the probabilities are laid end to end.
int64_t outpace_drawn(const outpace_distribution*, double number);
void outpace_probabilities(const outpace_distribution*, float* out);
void outpace_release(outpace_distribution*);

}
