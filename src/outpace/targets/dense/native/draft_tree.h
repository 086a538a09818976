// Deterministic draft trees by marginal cost, chosen as drafting/dynamic_tree.py chooses them, to the last bit.
//
// That file says what is chosen and why. Here and there the same doubles are computed in the same order.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "api.h"

namespace outpace {

class DraftTree {
   public:
    static constexpr int ROOT = -1;

    // `row`: the number of its root among the rows of all trees.
    DraftTree(const outpace_tree_plan& plan, int row) : plan(plan), root_row(row), running{ROOT} {
        if (plan.depth < 1 || plan.max_nodes < 1 || plan.topk < 1 || plan.expand < 1) throw std::invalid_argument("a draft needs room for a token");
        if (plan.kinds.rates && !plan.kinds.edges && plan.kinds.width < plan.topk) throw std::invalid_argument("a rank has no rate");
    }

    int ran() const { return int(running.size()); }

    // What was read of the rows that ran last, `k` largest logits of each; then `running` are those to run next.
    void take(const float* values, const int32_t* columns, const float* totals, int k) {
        for (size_t at = 0; at < running.size(); ++at) {
            nodes_run.push_back(running[at]), firsts.push_back(int(all.size()));
            add(running[at], values + at * k, columns + at * k, totals[at], k);
        }
        choose();
        if (running.empty()) firsts.push_back(int(all.size()));
        else ++levels;
    }

    // For each node to run: the row that it follows and its token. Its own row is `row` and counts on.
    template <class Want>
    void ask(int& row, Want want) {
        for (int node : running) {
            Candidate& one = all[node];
            want(one.parent == ROOT ? root_row : all[one.parent].row, one.token);
            one.row = row++;
        }
    }

    // The draft: how many nodes, candidates and rows; tokens, parents and depths of the nodes; tokens and kinds of the
    // candidates; which of them every row belongs to, and where its children begin, which end where the next one's do.
    void report(std::vector<int32_t>& numbers, std::vector<double>& probs) {
        const int size = best_size();
        for (size_t count : {size_t(size), all.size(), nodes_run.size()}) numbers.push_back(int32_t(count));
        for (int at = 0; at < size; ++at) all[best[at].second].place = at, numbers.push_back(all[best[at].second].token);
        for (int at = 0; at < size; ++at) {
            const int parent = all[best[at].second].parent;
            numbers.push_back(parent == ROOT ? ROOT : all[parent].place);
        }
        for (int at = 0; at < size; ++at) numbers.push_back(all[best[at].second].depth), probs.push_back(-best[at].first);
        for (const Candidate& one : all) numbers.push_back(one.token);
        for (const Candidate& one : all) numbers.push_back(one.kind);
        numbers.insert(numbers.end(), nodes_run.begin(), nodes_run.end());
        numbers.insert(numbers.end(), firsts.begin(), firsts.end());
    }

    const outpace_tree_plan& plan;

   private:
    struct Candidate {
        int32_t token, parent, depth, kind;
        double prob;
        bool open;
        int row, place;
    };

    // The likeliest tokens after a node become candidates.
    void add(int node, const float* values, const int32_t* columns, double total, int k) {
        constexpr double none = -std::numeric_limits<double>::infinity();
        const double scale = plan.inverse_temperature;
        if (values[0] == none) return;
        const int depth = node == ROOT ? 1 : 1 + all[node].depth;
        const double before = node == ROOT ? 1.0 : all[node].prob;
        if (plan.confidence > 0.0) {
            const double log = values[0] * scale - total;
            if (!(std::exp(log < 0.0 ? log : 0.0) >= plan.confidence)) return;
        }
        const bool calibrated = plan.kinds.rates, deeper = depth < plan.depth;
        const size_t most = plan.max_nodes;
        for (int rank = 0; rank < std::min(plan.topk, k); ++rank) {
            const double value = values[rank], log = value * scale - total;
            double prob = log < 0.0 ? std::exp(log) : 1.0;
            int kind = -1;
            if (calibrated) prob = rate(depth, rank, prob, kind);
            prob *= before;
            if (value == none || (calibrated && rank && prob < plan.kinds.floor)) continue;
            const int number = int(all.size());
            bool open = false;
            if (best.size() < most || -prob < best.back().first) {
                const std::pair<double, int> one(-prob, number);
                best.insert(std::upper_bound(best.begin(), best.end(), one), one);
                if (best.size() > most) best.pop_back();
                open = deeper;
            }
            all.push_back({plan.ids[columns[rank]], node, depth, kind, prob, open, 0, 0});
        }
    }

    // How likely a candidate is accepted after its parent, and its kind, where rates are learned.
    double rate(int depth, int rank, double p, int& kind) const {
        const outpace_tree_kinds& kinds = plan.kinds;
        const int row = (std::min(depth, kinds.depths) - 1) * kinds.width;
        if (!kinds.edges) return kinds.rates[kind = row + rank];
        const int bucket = int(std::upper_bound(kinds.edges, kinds.edges + kinds.width - 1, p) - kinds.edges);
        const double rate = p * kinds.rates[kind = row + bucket] / kinds.centres[bucket];
        return rate < kinds.ceiling ? rate : kinds.ceiling;
    }

    // The candidates to expand, likeliest first; none where no further level is worth it.
    void choose() {
        running.clear();
        for (const auto& [key, node] : best) {
            if (!all[node].open) continue;
            running.push_back(node);
            if (int(running.size()) == plan.expand) break;
        }
        if (plan.cost_count && !running.empty()) keep_worthwhile();
        for (int node : running) all[node].open = false;
    }

    // Those whose children are expected to outweigh their rows; none where they do not outweigh the level too.
    void keep_worthwhile() {
        const int count = best_size(), most = plan.cost_count - 1;
        double expected = plan.base_tokens;
        for (int at = 0; at < count; ++at) expected += -best[at].first;
        const double pace = expected / (plan.costs[count] + plan.level * levels);
        const int fewer = std::min(count, most - 1);
        const double row = pace * (plan.costs[std::min(count + 1, most)] - plan.costs[fewer < 0 ? most : fewer]);
        double sum = 0.0;
        size_t kept = 0;
        for (int node : running) {
            const double gain = plan.children_share * all[node].prob - row;
            if (gain > 0.0) sum += gain, ++kept;
        }
        running.resize(sum > pace * plan.level ? kept : 0);
    }

    // How many of the best give the most expected tokens per time, of equal rates the fewest.
    int best_size() const {
        const int size = std::min(plan.max_nodes, int(best.size()));
        if (!plan.cost_count) return size;
        double expected = plan.base_tokens, highest = expected / plan.costs[0];
        int found = 0;
        for (int number = 1; number <= std::min(size, plan.cost_count - 1); ++number) {
            expected += -best[number - 1].first;
            const double rate = expected / plan.costs[number];
            if (rate > highest) found = number, highest = rate;
        }
        return found;
    }

    int root_row, levels = 0;
    std::vector<int> running, nodes_run, firsts;
    std::vector<Candidate> all;                 // parents first
    std::vector<std::pair<double, int>> best;   // (-probability, number), ascending, no more than can be drafted
};

// A level of the rows of all trees, those of one tree beside one another, and what was read of them.
struct DraftLevel {
    int k = 0;
    std::vector<int32_t> after, tokens;         // none for the roots
    std::vector<float> warmth, values, totals;  // (rows, k) values
    std::vector<int32_t> columns;

    void make_room() {
        const size_t rows = warmth.size();
        if (values.size() < rows * k) values.resize(rows * k), columns.resize(rows * k);
        if (totals.size() < rows) totals.resize(rows);
    }
};

// Grow trees until all are complete. `run(level)` runs a level's rows and fills in what is read. `seconds`: of each level
// but the roots', with the choice of what it runs.
template <class Run>
void grow_trees(std::vector<DraftTree>& trees, int columns, DraftLevel& level, std::vector<double>& seconds, Run run) {
    using Clock = std::chrono::steady_clock;
    level.k = 0, level.after.clear(), level.tokens.clear(), level.warmth.clear();
    for (const DraftTree& tree : trees) {
        level.k = std::max(level.k, std::min(tree.plan.topk, columns));
        level.warmth.push_back(float(tree.plan.inverse_temperature));
    }
    level.make_room();
    run(level);
    for (int row = int(trees.size());;) {
        const auto began = Clock::now();
        level.after.clear(), level.tokens.clear(), level.warmth.clear();
        size_t at = 0;
        for (DraftTree& tree : trees) {
            const int ran = tree.ran();
            if (!ran) continue;
            tree.take(&level.values[at * level.k], &level.columns[at * level.k], &level.totals[at], level.k);
            at += ran;
            tree.ask(row, [&](int after, int32_t token) {
                level.after.push_back(after), level.tokens.push_back(token);
                level.warmth.push_back(float(tree.plan.inverse_temperature));
            });
        }
        if (level.after.empty()) return;
        level.make_room();
        run(level);
        seconds.push_back(std::chrono::duration<double>(Clock::now() - began).count());
    }
}

}  // namespace outpace
