// What Python calls: checks, locks, errors.

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "api.h"
#include "calls.h"
#include "forward.h"

namespace outpace {
std::unique_ptr<Pool> pool;
}

using namespace outpace;

namespace {

constexpr int SLABS = 16;  // of K/V that a thread claims at once
thread_local std::string failure;
std::mutex running;  // one forward at a time

// A forked process has the pool's memory but none of its threads: it makes new ones with its first forward.
const int forks = pthread_atfork([] { running.lock(); }, [] { running.unlock(); }, [] {
    (void)pool.release();
    running.unlock();
});

// One layer's keys or values of one head. Neighbours in the store are placed by one thread.
template <class T>
void commit(const outpace_model& m, const outpace_commitment& one, int slab) {
    const size_t bytes = Kept<T>::row_bytes(m.width);
    uint8_t* to = (uint8_t*)one.store + size_t(slab) * one.capacity * bytes;
    const uint8_t* from = (const uint8_t*)one.side + size_t(slab) * one.side_rows * bytes;
    const auto place = slab / m.kv_heads % 2 == 0 ? Kept<T>::place_key : Kept<T>::place_value;
    for (int i = 0; i < one.rows; ++i) place(to, one.length + i, from + one.chosen[i] * bytes, m.width);
}

template <class T>
void read_keys(const outpace_model& m, const uint8_t* store, int capacity, int start, int stop, float* to) {
    const size_t bytes = Kept<T>::row_bytes(m.width);
    std::vector<uint8_t> row(bytes);
    for (int slab = 0; slab < m.layers * 2 * m.kv_heads; ++slab) {
        if (slab / m.kv_heads % 2) continue;
        for (int at = start; at < stop; ++at, to += m.width) {
            Kept<T>::take_key(store + size_t(slab) * capacity * bytes, at, row.data(), m.width);
            Kept<T>::read_key(row.data(), to, m.width);
        }
    }
}

// Run with the type that K/V is kept in.
template <class Do>
void with_kv(int format, Do&& run) {
    if (format == 0) run(float{});
    else if (format == 1) run(bf16{});
    else run(q8{});
}

}  // namespace

namespace outpace {

// Tokens come from anywhere, such as a draft model of another vocabulary.
void check_tokens(const Model& m, const int32_t* tokens, int count) {
    for (int i = 0; i < count; ++i)
        if (tokens[i] < 0 || tokens[i] >= m.embedding.outputs)
            throw std::out_of_range("token " + std::to_string(tokens[i]) + " is not in the vocabulary of " + std::to_string(m.embedding.outputs));
}

int guarded(const std::function<void()>& run) {
    try {
        std::lock_guard<std::mutex> lock(running);
        run();
        return 0;
    } catch (const std::exception& error) {
        failure = error.what();
        return 1;
    }
}

void run_forward(const outpace_model& model, const outpace_forward& job, const std::function<void(int, int)>& then) {
    if (job.before && (!model.entry.data || model.entry.outputs != model.hidden))
        throw std::invalid_argument("the model has no entry for such rows");
    if (!job.states && !job.before) check_tokens(model, job.tokens, job.rows);
    if (!model.second_norm.empty() && job.start == 0 && job.stop > 0) {
        if (!job.second || !job.words || job.words->hidden != model.hidden)
            throw std::invalid_argument("layer 0 reads a second input, and there is none");
        check_tokens(*job.words, job.second, job.rows);
    }
    for (int p = 0; p < job.parts; ++p)
        for (int at = 0; at < job.part[p].rows; ++at)
            for (const Rotation& r : model.rotations)
                if (r.cosines && job.part[p].positions && job.part[p].positions[job.part[p].old + at] >= r.positions)
                    throw std::out_of_range("a position is beyond the rotations");
    if (!pool) pool = std::make_unique<Pool>(1);
    with_kv(model.kv_format, [&](auto t) { Forward<decltype(t)>(model, job).run(then); });
}

size_t kv_row_bytes(const Model& m) {
    size_t bytes = 0;
    with_kv(m.kv_format, [&](auto t) { bytes = Kept<decltype(t)>::row_bytes(m.width); });
    return bytes;
}

}  // namespace outpace

extern "C" {

const char* outpace_error() { return failure.c_str(); }

outpace_model* outpace_create(const outpace_shape* shape) { return new outpace_model(*shape); }

void outpace_destroy(outpace_model* model) { delete model; }

int outpace_set_matrix(outpace_model* model, int layer, int slot, const outpace_matrix* matrix) {
    bool finite = true;
    const int status = guarded([&] {
        if (!pool) pool = std::make_unique<Pool>(1);
        try {
            model->matrix(layer, slot) =
                matrix ? model->pack(*matrix, [](const std::function<void(int)>& work) { pool->run(work); }) : model->embedding;
        } catch (const NotFinite&) {
            finite = false;
        }
    });
    return finite ? status : 2;
}

int outpace_set_norm(outpace_model* model, int layer, int slot, const float* weights, int count) {
    return guarded([&] {
        if (layer < 0 && slot == 1 && model->hidden % BLOCK) throw std::invalid_argument("two inputs need a hidden size in blocks of 32");
        std::vector<float>* own[] = {&model->final_norm, &model->second_norm, &model->entry_norms, &model->entered_norm};
        auto& to = layer >= 0 ? model->layer.at(layer).norms[slot] : *own[slot];
        to.assign(weights, weights + count);
    });
}

int outpace_set_layer(outpace_model* model, int layer, int window, int rotation) {
    return guarded([&] { model->layer.at(layer).window = window, model->layer.at(layer).rotation = rotation; });
}

int outpace_set_rotation(outpace_model* model, int index, const float* cosines, const float* sines, int positions, int size) {
    return guarded([&] { model->rotations[index] = {cosines, sines, positions, size / 2}; });
}

int outpace_set_threads(int threads) {
    return guarded([&] {
        if (!pool || pool->size != threads) {
            pool.reset();
            pool = std::make_unique<Pool>(threads);
        }
    });
}

int outpace_run(outpace_model* model, const outpace_forward* job) {
    return guarded([&] { run_forward(*model, *job); });
}

int outpace_embed(outpace_model* model, const int32_t* tokens, int count, float* rows) {
    return guarded([&] {
        check_tokens(*model, tokens, count);
        for (int i = 0; i < count; ++i) embed(*model, tokens[i], rows + size_t(i) * model->hidden);
    });
}

int outpace_commit(outpace_model* model, const outpace_commitment* commitments, int count) {
    return guarded([&] {
        const int slabs = model->layers * 2 * model->kv_heads, all = slabs * count;
        std::atomic<int> next{0};
        const auto place = [&](int) {
            for (int first; (first = next.fetch_add(SLABS)) < all;)
                for (int at = first; at < std::min(all, first + SLABS); ++at)
                    with_kv(model->kv_format, [&](auto t) { commit<decltype(t)>(*model, commitments[at / slabs], at % slabs); });
        };
        // A row's keys lie in as many cache lines as they have pairs of numbers: most of the time is waiting for memory.
        if (pool && all > 4 * SLABS) pool->run(place);
        else place(0);
    });
}

int outpace_read_keys(outpace_model* model, const void* store, int capacity, int start, int stop, float* rows) {
    return guarded([&] {
        with_kv(model->kv_format, [&](auto t) { read_keys<decltype(t)>(*model, (const uint8_t*)store, capacity, start, stop, rows); });
    });
}

int outpace_kv_row_bytes(const outpace_model* model) { return int(kv_row_bytes(*model)); }

int64_t outpace_bytes(const outpace_model* model) { return int64_t(model->bytes); }

const char* outpace_features() {
    static const std::string found = std::string(""
#if defined(__AVX512F__)
        "avx512 "
#elif defined(__AVX2__)
        "avx2 "
#elif defined(__aarch64__)
        "neon "
#endif
        ) + (PAIRED ? "bf16-dot " : "") +
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
        "int8-dot " +
#endif
        (tiles::usable() ? "tiles" : "");
    return found.c_str();
}

}
