// The machine's limits, for judging the kernels: how fast memory is read, and how fast each product can be taken.

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "api.h"
#include "tiles.h"

using namespace outpace;

namespace {

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Seconds from when all threads are ready until the last has finished.
template <class Do>
double together(int threads, Do&& run) {
    std::atomic<int> waiting{threads};
    std::vector<double> began(threads), ended(threads);
    std::vector<std::thread> started;
    for (int id = 0; id < threads; ++id)
        started.emplace_back([&, id] {
            waiting.fetch_sub(1);
            while (waiting.load() > 0) {
            }
            began[id] = now();
            run(id);
            ended[id] = now();
        });
    for (auto& thread : started) thread.join();
    double first = began[0], last = ended[0];
    for (int id = 1; id < threads; ++id) first = std::min(first, began[id]), last = std::max(last, ended[id]);
    return last - first;
}

// A product that does not take its sum with it is computed once for all sums, unless the compiler cannot know its operand.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
INLINE void hide(vu&) {}
#elif defined(__AVX512F__)
INLINE void hide(vu& w) { __asm__ volatile("" : "+v"(w)); }
#else
template <class V>
INLINE void hide(V& w) {
    if constexpr (HALVED<V>) {
        hide(w.a), hide(w.b);
    } else {
#if defined(__x86_64__)
        __asm__ volatile("" : "+x"(w));
#elif defined(__aarch64__)
        __asm__ volatile("" : "+w"(w));
#endif
    }
}
#endif

constexpr int CHAINS = REGISTER == 64 ? 12 : 5;  // independent sums: in more registers than a product takes cycles

template <class V, class Start, class Step>
double rate(int threads, double work, Start&& start, Step&& step) {
    constexpr int64_t STEPS = 1500000;
    // What the compiler does not know, in each lane, so that it computes what it is told to.
    volatile uint32_t unknown[LANES] = {};
    uint32_t lanes[LANES];
    for (int i = 0; i < LANES; ++i) lanes[i] = unknown[i];
    const vu nothing = load_as<vu>(lanes);
    vu operands[2] = {nothing, nothing};
    double seconds = together(threads, [&](int) {
        V sums[CHAINS];
        for (int c = 0; c < CHAINS; ++c) sums[c] = start(nothing, c);
        for (int64_t i = 0; i < STEPS; i += 8)
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j) {
                const vu w = operands[j & 1];
#pragma GCC unroll 12
                for (int c = 0; c < CHAINS; ++c) step(sums[c], w, uint32_t(i), j);
            }
        volatile uint8_t kept[sizeof sums];
        uint8_t bytes[sizeof sums];
        std::memcpy(bytes, sums, sizeof sums);
        for (size_t i = 0; i < sizeof sums; ++i) kept[i] = bytes[i];
    });
    return work * CHAINS * double(STEPS) * threads / seconds;
}

// The same by tiles: four sums are more than enough, for a product of tiles takes as many cycles as it has rows.
TILE_CODE double tile_rate(int threads) {
#if defined(OUTPACE_EMULATED_TILES)
    constexpr int64_t STEPS = 100;
#else
    constexpr int64_t STEPS = 300000;
#endif
    constexpr int SUMS = 4;
    double seconds = together(threads, [](int) TILE_CODE {
        const uint8_t zeros[tiles::ROWS * tiles::ROW_BYTES] = {};
        tiles::shape(tiles::ROWS, tiles::ROW_BYTES);
        tiles::zero<0>(), tiles::zero<1>(), tiles::zero<2>(), tiles::zero<3>();
        tiles::load<4>(zeros, tiles::ROW_BYTES), tiles::load<6>(zeros, tiles::ROW_BYTES);
        for (int64_t i = 0; i < STEPS; ++i)
            tiles::dot_bf16<0, 4, 6>(), tiles::dot_bf16<1, 4, 6>(), tiles::dot_bf16<2, 4, 6>(), tiles::dot_bf16<3, 4, 6>();
        tiles::release();
    });
    const double work = 2.0 * tiles::ROWS * LANES * tiles::ROW_BYTES / sizeof(bf16);
    return work * SUMS * double(STEPS) * threads / seconds;
}

}  // namespace

extern "C" {

// Bytes a second of one pass over `bytes` of memory.
double outpace_read_rate(int threads, int64_t bytes) {
    std::unique_ptr<int32_t[]> memory(new int32_t[bytes / 4]());
    double best = 0;
    for (int repeat = 0; repeat < 4; ++repeat) {
        double seconds = together(threads, [&](int id) {
            const int64_t share = bytes / 4 / threads / 128 * 128;
            const int32_t* from = memory.get() + share * id;
            vi sums[4] = {};
            for (int64_t i = 0; i < share / 2; i += 64)  // two streams keep more reads in flight than one
                for (int c = 0; c < 4; ++c)
                    sums[c] |= load_as<vi>(from + i + c * LANES) | load_as<vi>(from + share / 2 + i + c * LANES);
            volatile int32_t kept = (sums[0] | sums[1] | sums[2] | sums[3])[0];
            (void)kept;
        });
        best = std::max(best, double(bytes) / seconds);
    }
    return best;
}

// Operations a second (two for each multiplication) of products in float32 (0), bfloat16 (1) or 8 bits (2), by the
// fastest instructions that the kernels use here.
double outpace_product_rate(int threads, int kind) {
    const auto floats = [](vu nothing, int c) { return (vf)(nothing + uint32_t(c)); };
    const auto bytes = [](vu nothing, int c) {
        Dots<4> sum;
        begin(sum, int32_t(c), 1);
        return sum;
    };
    double best = 0;
    for (int repeat = 0; repeat < 3; ++repeat)
        best = std::max(
            best, kind == 0   ? rate<vf>(threads, 32, floats, [](vf& a, vu w, uint32_t, int) { a = fma((vf)w, (vf)w, a); })
                  : kind == 1 ? rate<vf>(threads, 32 * (PAIRED + 1), floats, [](vf& a, vu w, uint32_t x, int) { a = product<PAIRED>(a, w, x); })
                              : rate<Dots<4>>(threads, 128, bytes, [](Dots<4>& a, vu w, uint32_t x, int j) { hide(w), add(a, w, int32_t(x), j); }));
    if (kind == 1 && tiles::usable())
        for (int repeat = 0; repeat < 3; ++repeat) best = std::max(best, tile_rate(threads));
    return best;
}

}
