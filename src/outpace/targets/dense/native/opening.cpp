// Distributions of rows of logits: their largest value, their weights, their sums.

#include <pthread.h>

#include <map>
#include <mutex>

#include "weights.h"

using namespace outpace;
using namespace outpace::sampling;

namespace {

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

    std::mutex guard;

   private:
    static constexpr int MOST = 32;
    struct Shelf {
        int taken = 0;
        std::vector<float*> free;
    };
    std::map<int64_t, Shelf> shelves;
};

Rooms& rooms() {
    static Rooms* all = new Rooms;  // never deleted: distributions may be released as the process ends
    return *all;
}

// A process may fork while another thread takes or gives a room.
const int forks = pthread_atfork([] { rooms().guard.lock(); }, [] { rooms().guard.unlock(); }, [] { rooms().guard.unlock(); });

// Bans the tokens whose bit is 0.
void ban(float* row, int64_t size, const uint32_t* allowed) {
    for (int64_t at = 0; at < size; at += 32) {
        const uint32_t banned = ~allowed[at / 32];
        if (!banned) continue;
        const int count = static_cast<int>(std::min<int64_t>(32, size - at));
#if defined(__AVX512F__)
        if (count == 32) {
            _mm512_mask_storeu_ps(row + at, __mmask16(banned), _mm512_set1_ps(-INFINITE));
            _mm512_mask_storeu_ps(row + at + 16, __mmask16(banned >> 16), _mm512_set1_ps(-INFINITE));
            continue;
        }
#endif
        for (int bit = 0; bit < count; ++bit)
            if (banned >> bit & 1) row[at + bit] = -INFINITE;
    }
}

}  // namespace

// False where the largest logit is not finite, or one is NaN.
bool Distribution::find_highest() {
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

// Changes a copy of the row, which only this distribution reads.
void Distribution::change(const outpace_changes& changes) {
    auto own = rooms().take(size());
    if (!own) own = new_row(size());
    float* row = own.get();
    std::memcpy(row, source.row, size() * sizeof *row);
    for (int64_t at = 0; at < changes.bias.count; ++at) row[changes.bias.ids[at]] += changes.bias.values[at];
    const float repetition = changes.repetition, presence = changes.presence, frequency = changes.frequency;
    const auto penalised = [&](int64_t token, float count) {
        float logit = row[token];
        if (repetition != 1.f) logit = logit < 0.f ? logit * repetition : logit / repetition;
        return logit - frequency * count - presence * float(count > 0.f);
    };
    const outpace_logits &history = changes.history, &path = changes.path;
    static thread_local std::vector<float> after;  // the path's logits, of the row without the history's penalties
    after.clear();
    for (int64_t at = 0; at < path.count; ++at) after.push_back(penalised(path.ids[at], path.values[at]));
    for (int64_t at = 0; at < history.count; ++at)
        row[history.ids[at]] = penalised(history.ids[at], history.values[at]);
    for (int64_t at = 0; at < path.count; ++at) row[path.ids[at]] = after[at];
    if (changes.allowed) ban(row, size(), changes.allowed);
    source.row = row;
    source.own = std::move(own);
}

bool Distribution::open(const float* row, int64_t size, const outpace_truncation& truncation,
                        const outpace_changes* changes) {
    source.row = row;
    source.size = size;
    if (changes) change(*changes);
    if (!find_highest()) return false;
    source.rate = static_cast<float>(1.4426950408889634 / std::max(truncation.temperature, 1e-30));
    const bool top_k = truncation.top_k > 0 && truncation.top_k < size;
    if (top_k || truncation.top_p < 1.0 || truncation.min_p > 0.0) truncate(truncation);
    else write_down();
    return true;
}

// Sums and, where there is room for them, keeps the weights: in place of a row of its own.
void Distribution::write_down() {
    source.topped = true;
    auto room = source.own ? std::move(source.own) : rooms().take(size());
    if (!room) return sum_all();
    sums.resize((size() + SPAN - 1) / SPAN);
    for (size_t block = 0; block < sums.size(); ++block) {
        const int64_t begin = block * SPAN, end = std::min(begin + SPAN, size());
        int64_t at = begin;
        for (; at + LANES <= end; at += LANES) store(room.get() + at, source.weight(load(source.row + at)));
        Sum sum;  // of what was just stored, which is quicker than halving the lanes in registers
        for (int64_t stored = begin; stored < at; stored += LANES) sum.add_stored(room.get() + stored);
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

extern "C" {

void outpace_distributions(const float* logits, int64_t stride, const int32_t* rows, int count, int64_t size,
                           const outpace_truncation* truncation, const outpace_changes* changes,
                           outpace_distribution** found) {
    for (int at = 0; at < count; ++at) {
        auto one = std::make_unique<outpace_distribution>();
        const bool alive = one->open(logits + rows[at] * stride, size, *truncation, changes ? changes + at : nullptr);
        found[at] = alive ? one.release() : nullptr;
    }
}

}
