// The largest values of a row, for drafters that keep what the target ranked highest.

#include <algorithm>
#include <cstring>
#include <limits>

#include "api.h"
#include "simd.h"
#include "top.h"

namespace {

using namespace outpace;

// The log of the sum of exponentials of `warmth` times a row's values.
float log_total(const float* from, int64_t width, float warmth, float peak) {
    if (!std::isfinite(peak)) return peak;
    vf sums = {};
    int64_t at = 0;
    for (; at + LANES <= width; at += LANES) sums += exp(warmth * (load(from + at) - peak));
    float rest = 0.f;
    for (; at < width; ++at) rest += std::exp(warmth * (from[at] - peak));
    return std::log(sum(sums) + rest) + warmth * peak;
}

constexpr int PIECE = 64;

// Values in descending order with their places; of equal ones the earlier first.
struct Best {
    float* values;
    int32_t* ids;
    int k, held = 0;

    void offer(float value, int32_t id) {
        if (!(value == value)) value = -std::numeric_limits<float>::infinity();  // no number: nothing would ever be larger
        if (held == k && !(value > values[k - 1])) return;
        int at = held < k ? held++ : k - 1;
        for (; at > 0 && value > values[at - 1]; --at) values[at] = values[at - 1], ids[at] = ids[at - 1];
        values[at] = value, ids[at] = id;
    }
};

}  // namespace

namespace outpace {

void top_of_row(const float* from, int64_t width, int k, float* values, int32_t* ids, float warmth, float* total) {
    Best best{values, ids, k};
    for (int64_t start = 0; start < width; start += PIECE) {
        const int size = static_cast<int>(std::min<int64_t>(PIECE, width - start));
        // Most blocks hold nothing that large: their maximum is all that is looked at.
        float lanes[16];
        std::fill(lanes, lanes + 16, -std::numeric_limits<float>::infinity());
        int at = 0;
        for (; at + 16 <= size; at += 16)
            for (int lane = 0; lane < 16; ++lane) {
                const float value = from[start + at + lane];
                lanes[lane] = value > lanes[lane] ? value : lanes[lane];
            }
        float largest = *std::max_element(lanes, lanes + 16);
        for (; at < size; ++at) largest = std::max(largest, from[start + at]);
        if (best.held == k && !(largest > best.values[k - 1])) continue;
        for (at = 0; at < size; ++at) best.offer(from[start + at], static_cast<int32_t>(start + at));
    }
    if (total) *total = log_total(from, width, warmth, best.held ? best.values[0] : 0.f);
}

}  // namespace outpace

extern "C" void outpace_top(
    const float* rows, int64_t count, int64_t width, int64_t stride, int k, float* values, int32_t* ids,
    float warmth, float* totals) {
    for (int64_t row = 0; row < count; ++row)
        outpace::top_of_row(rows + row * stride, width, k, values + row * k, ids + row * k, warmth, totals ? totals + row : nullptr);
}
