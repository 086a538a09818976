// Attention of a few rows to K/V in place: no copy, no expanded heads, and each row summed in the order of its path.
//
// Keys lie in blocks of sixteen, transposed (a register holds one dimension of sixteen keys); values lie row by row.
// A row sees the first `limit` committed keys from `low` on, then its own ancestors among the rows of its tree. Its
// scores stand in the order of positions wherever the keys lie, so a token scored in a tree gets bit for bit what it
// gets when it is decoded alone.
#pragma once

#include <vector>

#include "simd.h"

namespace outpace {

// Keys and values that rows read: committed ones, or those of a tree's rows.
template <class T>
struct KeyValues {
    const T* keys;    // (blocks, width, 16)
    const T* values;  // (keys, width)
};

struct Query {
    const float* q;            // (width)
    float* out;                // (size)
    int low, limit;            // committed keys [low, limit) are seen
    const int32_t* seen;       // rows of the tree, in the order of the path
    int seen_count;
};

struct Shape {
    int size, width;  // of a head, and rounded up to 16
    float scale, softcap;
};

// Scores of M queries, q (width, M), with the keys of blocks [first, last): rows (M, stride).
template <class T, int M>
void scores(const T* keys, int first, int last, const float* q, const Shape& shape, float* rows, size_t stride) {
    for (int block = first; block < last; ++block) {
        vf acc[M] = {};
        const T* key = keys + size_t(block) * shape.width * LANES;
        for (int d = 0; d < shape.width; ++d) {
            vf column = load(key + size_t(d) * LANES);
            for (int i = 0; i < M; ++i) acc[i] = fma(column, splat(q[d * M + i]), acc[i]);
        }
        for (int i = 0; i < M; ++i) store(rows + i * stride + size_t(block - first) * LANES, acc[i] * shape.scale);
    }
}

// How many queries are taken together: q lies transposed in groups of these sizes.
INLINE int together(int left) { return left >= 12 ? 12 : left >= 6 ? 6 : left >= 3 ? 3 : 1; }

template <class T>
void all_scores(const T* keys, int first, int last, const float* q, int count, const Shape& shape, float* rows, size_t stride) {
    for (int m; count > 0; q += m * shape.width, rows += m * stride, count -= m) {
        m = together(count);
        auto run = m == 12 ? scores<T, 12> : m == 6 ? scores<T, 6> : m == 3 ? scores<T, 3> : scores<T, 1>;
        run(keys, first, last, q, shape, rows, stride);
    }
}

inline void transpose(const Query* queries, int count, int width, float* q) {
    for (int m; count > 0; q += m * width, queries += m, count -= m) {
        m = together(count);
        for (int i = 0; i < m; ++i)
            for (int d = 0; d < width; ++d) q[d * m + i] = queries[i].q[d];
    }
}

// rows[i] += sum over keys [first, last), in order, of weights[i][key] * values[key], over N * 16 dimensions.
template <class T, int M, int N>
void mix(const T* values, int width, int first, int last, const float* weights, size_t stride, float* rows, size_t step) {
    vf acc[M][N];
    for (int i = 0; i < M; ++i)
        for (int j = 0; j < N; ++j) acc[i][j] = load(rows + i * step + j * LANES);
    for (int key = first; key < last; ++key) {
        for (int j = 0; j < N; ++j) {
            vf value = load(values + size_t(key) * width + j * LANES);
            for (int i = 0; i < M; ++i) acc[i][j] = fma(value, splat(weights[i * stride + key]), acc[i][j]);
        }
    }
    for (int i = 0; i < M; ++i)
        for (int j = 0; j < N; ++j) store(rows + i * step + j * LANES, acc[i][j]);
}

template <class T, int N>
void mix_some(const T* values, int width, int first, int last, const float* weights, size_t stride, float* rows,
              size_t step, int count) {
    for (; count > 0;) {
        int m = count >= 6 ? 6 : count >= 3 ? 3 : 1;
        auto run = m == 6 ? mix<T, 6, N> : m == 3 ? mix<T, 3, N> : mix<T, 1, N>;
        run(values, width, first, last, weights, stride, rows, step);
        weights += m * stride, rows += m * step, count -= m;
    }
}

template <class T>
void mix_all(const T* values, int width, int first, int last, const float* weights, size_t stride, float* rows, int count) {
    int at = 0;
    for (; at + 4 * LANES <= width; at += 4 * LANES)
        mix_some<T, 4>(values + at, width, first, last, weights, stride, rows + at, width, count);
    for (; at < width; at += LANES)
        mix_some<T, 1>(values + at, width, first, last, weights, stride, rows + at, width, count);
}

// Weights, not yet divided by their sum, of scores [low, end) in place, zero elsewhere in their blocks; returns the sum.
INLINE float softmax(float* w, int low, int end, float softcap) {
    const float none = -__builtin_inff();
    const int first = low / LANES * LANES, last = (end + LANES - 1) / LANES * LANES;
    for (int j = 0; j < first; j += LANES) store(w + j, vf{});
    for (int j = first; j < low; ++j) w[j] = none;
    for (int j = end; j < last; ++j) w[j] = none;
    if (softcap > 0.f)
        for (int j = first; j < last; j += LANES) {
            vf s = load(w + j);
            store(w + j, s > none ? softcap * tanh(s * (1.f / softcap)) : s);
        }
    vf top = splat(none);
    for (int j = first; j < last; j += LANES) top = max(top, load(w + j));
    const float peak = highest(top);
    vf total = {};
    for (int j = first; j < last; j += LANES) {
        vf weight = exp(load(w + j) - peak);  // of minus infinity: 0
        store(w + j, weight);
        total += weight;
    }
    return sum(total);
}

struct AttentionSpace {
    std::vector<float> weights, tree, mixed, q;
};

// All `queries` read the same head of `committed` and of their tree's `rows` (count of them: `tree_rows`).
template <class T>
void attend(const KeyValues<T>& committed, const KeyValues<T>& rows, int tree_rows, const Query* queries, int count,
            const Shape& shape, AttentionSpace& space) {
    int low = queries[0].low, limit = queries[0].limit, deepest = queries[0].seen_count;
    for (int i = 1; i < count; ++i) {
        low = std::min(low, queries[i].low);
        limit = std::max(limit, queries[i].limit);
        deepest = std::max(deepest, queries[i].seen_count);
    }
    low = std::min(low, limit);
    const int first = low / LANES, last = (limit + LANES - 1) / LANES, origin = first * LANES;
    const int blocks = tree_rows > 0 ? (tree_rows + LANES - 1) / LANES : 0;
    const size_t stride = size_t((limit - origin + deepest + LANES - 1) / LANES + 1) * LANES, tree_stride = blocks * LANES;
    if (space.weights.size() < stride * count) space.weights.resize(stride * count);
    if (space.tree.size() < tree_stride * count) space.tree.resize(tree_stride * count);
    space.mixed.assign(size_t(count) * shape.width, 0.f);
    float *weights = space.weights.data(), *tree = space.tree.data(), *mixed = space.mixed.data();

    if (space.q.size() < size_t(count) * shape.width) space.q.resize(size_t(count) * shape.width);
    transpose(queries, count, shape.width, space.q.data());
    all_scores(committed.keys, first, last, space.q.data(), count, shape, weights, stride);
    if (deepest > 0) all_scores(rows.keys, 0, blocks, space.q.data(), count, shape, tree, tree_stride);

    for (int i = 0; i < count; ++i) {
        const Query& one = queries[i];
        float* w = weights + i * stride;
        int end = one.limit - origin;
        for (int j = 0; j < one.seen_count; ++j) w[end++] = tree[i * tree_stride + one.seen[j]];
        w[stride - 1] = softmax(w, std::min(one.low, one.limit) - origin, end, shape.softcap);
        // What other queries of this call read and this one does not see weighs nothing.
        for (int j = (end + LANES - 1) / LANES * LANES; j < limit - origin; j += LANES) store(w + j, vf{});
    }

    mix_all(committed.values, shape.width, low, limit, weights - origin, stride, mixed, count);
    for (int i = 0; i < count; ++i) {
        const Query& one = queries[i];
        float *w = weights + i * stride, *m = mixed + size_t(i) * shape.width;
        const float* own = w + one.limit - origin;
        for (int d = 0; d < shape.width; d += LANES) {
            vf acc = load(m + d);
            for (int j = 0; j < one.seen_count; ++j)
                acc = fma(load(rows.values + size_t(one.seen[j]) * shape.width + d), splat(own[j]), acc);
            store(m + d, acc);
        }
        float inverse = 1.f / w[stride - 1];
        for (int d = 0; d < shape.size; ++d) one.out[d] = m[d] * inverse;
    }
}

}  // namespace outpace
