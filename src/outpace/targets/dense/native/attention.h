// Attention of a few rows to K/V in place: no copy, no expanded heads, and each row summed in the order of its path.
//
// A row sees committed keys, then its own ancestors among the rows of its tree. Both are counted in one order: a key's
// place in it is its position in the sequence, wherever the key lies. Everything that rounds depends on places only:
// products take two keys at a time (places 2i and 2i + 1) where the type has pairs, weights are summed by place modulo
// sixteen, and softmax runs over chunks of fixed places that are folded in order. So a token scored in a tree gets bit
// for bit what it gets when it is decoded alone, on any number of threads.
#pragma once

#include <algorithm>
#include <vector>

#include "attention_products.h"

namespace outpace {

constexpr int CHUNK = 256;  // keys; the partial results of chunks may be made by different threads

// One head's K/V that rows read: committed ones, in blocks, and those of a tree's rows.
struct Head {
    const uint8_t *keys, *values;
    const uint8_t* tree_keys = nullptr;    // in blocks
    const uint8_t* tree_values = nullptr;  // row by row
};

struct Query {
    const float* q;       // (width)
    float* out;           // (size)
    int low, limit;       // committed keys [low, limit) are seen
    const int32_t* seen;  // rows of the tree, in the order of the path
    int seen_count;
    int path;             // the place of the first of them

    int begin() const { return low < limit ? low : path; }
    int end() const { return seen_count > 0 ? path + seen_count : limit; }
};

struct Shape {
    int size, width;  // of a head, and rounded up to 16
    float scale, softcap;
};

struct AttentionSpace {
    std::vector<uint32_t> q, weights, gathered;
    std::vector<float> scores, tree, parts, scales;
    std::vector<uint8_t> row;
};

template <class V> void grow(V& v, size_t n) { if (v.size() < n) v.resize(n); }

// Queries as products read them: rounded, in pairs, transposed in groups of `together`.
template <class T>
void transpose(const Query* queries, int count, int width, uint32_t* q, std::vector<float>& room) {
    constexpr int NUMBERS = PAIRS<T> ? 2 : 1;  // in a word
    const int columns = width / NUMBERS;
    for (int m; count > 0; q += m * columns, queries += m, count -= m) {
        m = together(count);
        for (int i = 0; i < m; ++i) {
            uint32_t words[LANES];
            const float* one = queries[i].q;
            if constexpr (Kept<T>::quantised) {  // as keys are
                room.assign(one, one + width);
                turn(room.data(), width);
                one = room.data();
            }
            for (int d = 0, c = 0; d < width; d += LANES) {
                if constexpr (PAIRS<T>) store((bf16*)words, load(one + d));
                else std::memcpy(words, one + d, sizeof words);
                for (int j = 0; j < LANES / NUMBERS; ++j, ++c) q[c * m + i] = words[j];
            }
        }
    }
}

// Weights of scores [low, end), relative to the highest of them and in the precision of the products; zero in the rest
// of [first, last), which begins and ends with whole registers. `totals`: the highest score, and the sum of the weights
// as they are multiplied. Scores are in units of log 2, unless they are capped first. `scales`, of values in 8 bits,
// enter the weights before these are rounded, and the sum is of weights without them.
template <class T>
INLINE void softmax(float* s, uint32_t* weights, int low, int end, int first, int last, float softcap, const float* scales, float* totals) {
    const float none = -__builtin_inff();
    static constexpr int32_t NUMBERED[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vi lane = load_as<vi>(NUMBERED);
    const int from = low >= end ? last : low / LANES * LANES, to = low >= end ? last : round_up(end, LANES);
    vf top = splat(none);
    for (int j = from; j < to; j += LANES) {
        vf v = load(s + j);
        if (softcap > 0.f) v = softcap * tanh(v);
        if (j < low || j + LANES > end) v = select((lane >= low - j) & (lane < end - j), v, splat(none));
        store(s + j, v);
        top = max(top, v);
    }
    const float peak = highest(top);
    vf total = {};
    constexpr int NUMBERS = PAIRS<T> ? 2 : 1;  // in a word
    for (int j = first; j < last; j += LANES) {
        vf weight = {};
        if (j >= from && j < to) weight = exp2(load(s + j) - peak);
        vf factor = weight;
        if constexpr (Kept<T>::quantised) factor = select(weight > 0.f, weight * load(scales + j), vf{});
        if constexpr (PAIRS<T>) {
            store((bf16*)(weights + j / NUMBERS), factor);
            if constexpr (!Kept<T>::quantised) weight = load((const bf16*)(weights + j / NUMBERS));
        } else {
            store((float*)weights + j, factor);
        }
        total += weight;
    }
    totals[0] = peak, totals[1] = sum(total);
}

// Partial results of one chunk: a query's sum of weighted values (width), then its highest score and sum of weights.
INLINE size_t part_stride(const Shape& shape) { return shape.width + LANES; }

// Join the next chunk's partial result.
INLINE void fold(float* to, const float* part, int width) {
    if (part[width + 1] == 0.f) return;  // it saw nothing
    if (to[width + 1] == 0.f) return (void)std::memcpy(to, part, sizeof(float) * (width + 2));
    const float peak = std::max(to[width], part[width]);
    const float before = exp2(splat(to[width] - peak))[0], now = exp2(splat(part[width] - peak))[0];
    for (int d = 0; d < width; d += LANES) store(to + d, fma(load(part + d), splat(now), load(to + d) * before));
    to[width] = peak, to[width + 1] = fma(part[width + 1], now, to[width + 1] * before);
}

inline void finish(const Query* queries, int count, const float* parts, const Shape& shape) {
    for (int i = 0; i < count; ++i, parts += part_stride(shape)) {
        const float inverse = 1.f / parts[shape.width + 1];
        for (int d = 0; d < shape.size; ++d) queries[i].out[d] = parts[d] * inverse;
    }
}

// Which chunks the queries see, and which places of them.
struct Extent {
    int low, limit, end, rows;  // `rows` of the tree are among those that any query sees

    Extent(const Query* queries, int count) : low(queries[0].begin()), limit(queries[0].limit), end(queries[0].end()), rows(0) {
        for (int i = 0; i < count; ++i) {
            low = std::min(low, queries[i].begin());
            limit = std::max(limit, queries[i].limit);
            end = std::max(end, queries[i].end());
            for (int j = 0; j < queries[i].seen_count; ++j) rows = std::max(rows, queries[i].seen[j] + 1);
        }
    }
    int first_chunk() const { return low / CHUNK; }
    int last_chunk() const { return std::max(first_chunk() + 1, (end + CHUNK - 1) / CHUNK); }
};

// Values of one query's path, and of the committed key that shares a pair with its first, laid as committed ones are.
template <class T>
class PathValues {
   public:
    PathValues(const Head& head, int width, int chunk, AttentionSpace& space) : head(head), width(width), begin(chunk * CHUNK), space(space) {
        grow(space.row, Kept<T>::row_bytes(width));
        grow(space.gathered, size_t(CHUNK) / P * width);
    }

    // Places [from, to) of this chunk, both even where there are pairs, for mix.
    void lay(const Query& one) {
        int keep = 0;  // rows of the path that lie there already: trees share the beginnings of paths
        if (last && last->path == one.path && last->limit == one.limit)
            while (keep < std::min(one.seen_count, last->seen_count) && one.seen[keep] == last->seen[keep]) ++keep;
        from = std::max(begin, one.path / P * P);
        to = std::min(begin + CHUNK, round_up(one.end(), P));
        for (int at = std::max(from, (one.path + keep) / P * P); at < to; at += P) {
            uint32_t* place = space.gathered.data() + size_t(at - from) / P * width;
            for (int half = 0; half < P; ++half) {
                const uint8_t* row = source(one, at + half);
                for (int d = 0; d < width; d += LANES) {
                    vu mine = row ? Kept<T>::product_input(row, d) : vu{};
                    if (half == 1) mine = (mine << 16) | load_as<vu>(place + d);
                    store_as(place + d, mine);
                }
            }
        }
        last = &one;
    }

    int from = 0, to = 0;

   private:
    static constexpr int P = Kept<T>::PAIR;

    const uint8_t* source(const Query& one, int place) {
        if (place >= one.path) return place < one.path + one.seen_count ? head.tree_values + size_t(one.seen[place - one.path]) * Kept<T>::row_bytes(width) : nullptr;
        if (place >= one.limit) return nullptr;
        Kept<T>::take_value(head.values, place, space.row.data(), width);
        return space.row.data();
    }

    const Head& head;
    const int width, begin;
    AttentionSpace& space;
    const Query* last = nullptr;
};

// Partial results, (count, part_stride), of queries that read the same head, over one chunk. `space.q` holds them.
template <class T>
void attend_chunk(const Head& head, const Query* queries, int count, const Shape& shape, const Extent& all, int chunk,
                  AttentionSpace& space, float* parts) {
    constexpr int P = Kept<T>::PAIR;
    const int begin = chunk * CHUNK, stop = begin + CHUNK, width = shape.width;
    const int low = std::max(begin, all.low), limit = std::min(stop, all.limit), end = std::min(stop, all.end);
    const float scale = shape.softcap > 0.f ? shape.scale / shape.softcap : shape.scale * 1.44269504088896341f;
    const float cap = shape.softcap * 1.44269504088896341f;
    grow(space.scores, size_t(count) * CHUNK);
    constexpr int EACH = CHUNK / P * Kept<T>::WORDS;  // words of weights of one query
    grow(space.weights, size_t(count) * EACH);
    float* s = space.scores.data();
    uint32_t* weights = space.weights.data();
    if (low < limit) {
        const int first = low / LANES, last = (limit + LANES - 1) / LANES;
        all_scores<T>(head.keys + first * LANES * Kept<T>::row_bytes(width), last - first, space.q.data(), count, width, scale, s + first * LANES - begin, CHUNK);
    }
    const int blocks = stop > all.limit ? (all.rows + LANES - 1) / LANES : 0;
    const size_t tree_stride = size_t(blocks) * LANES;
    if (blocks > 0) {
        grow(space.tree, tree_stride * count);
        all_scores<T>(head.tree_keys, blocks, space.q.data(), count, width, scale, space.tree.data(), tree_stride);
    }
    const int first = (low - begin) / LANES * LANES, last = round_up(end - begin, LANES);
    if constexpr (Kept<T>::quantised) {
        grow(space.scales, CHUNK);
        for (int at = low / LANES * LANES; at < limit; at += LANES)
            store(&space.scales[at - begin], Kept<T>::scales(head.values + at * Kept<T>::row_bytes(width), width));
    }
    for (int i = 0; i < count; ++i) {
        const Query& one = queries[i];
        float *own = s + size_t(i) * CHUNK, *part = parts + i * part_stride(shape);
        for (int j = std::max(0, begin - one.path); j < std::min(one.seen_count, stop - one.path); ++j) {
            own[one.path + j - begin] = space.tree[i * tree_stride + one.seen[j]];
            if constexpr (Kept<T>::quantised)
                space.scales[one.path + j - begin] = Kept<T>::scale(head.tree_values + one.seen[j] * Kept<T>::row_bytes(width), width);
        }
        std::memset(part, 0, sizeof(float) * width);
        softmax<T>(own, weights + size_t(i) * EACH, std::max(one.begin(), begin) - begin, std::min(one.end(), stop) - begin, first, last, cap, space.scales.data(), part + width);
    }
    // A tree's own path shares a pair with the last committed key where their number is odd.
    const int whole = head.tree_keys ? limit / P : (limit + P - 1) / P;
    mix_all<T>(head.values, width, low / P, whole, weights - begin / P * Kept<T>::WORDS, EACH, parts, part_stride(shape), count);
    if (!head.tree_keys) return;
    PathValues<T> values(head, width, chunk, space);
    for (int i = 0, next; i < count; i = next) {
        const Query& one = queries[i];
        for (next = i + 1; next < count && queries[next].seen == one.seen; ++next) {}
        if (one.path / P * P >= stop || one.end() <= begin) continue;
        values.lay(one);
        mix_all<typename Kept<T>::Product>((const uint8_t*)space.gathered.data(), width, 0, (values.to - values.from) / P,
                   weights + size_t(i) * EACH + (values.from - begin) / P * Kept<T>::WORDS, EACH,
                   parts + i * part_stride(shape), part_stride(shape), next - i);
    }
}

}  // namespace outpace
