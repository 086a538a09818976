// Threads that run one function together, with barriers inside it.
#pragma once

#include <atomic>
#include <climits>
#include <functional>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace outpace {

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Pool {
   public:
    explicit Pool(int threads) : size(threads) {
        try {
            for (int id = 1; id < threads; ++id) workers.emplace_back([this, id] { serve(id); });
        } catch (...) {  // the system gives no more threads: those that run must end before they can be forgotten
            close();
            throw;
        }
    }

    ~Pool() { close(); }

    // Run `work(thread)` on all threads, the caller being thread 0; returns when all have finished.
    void run(const std::function<void(int)>& work) {
        job = &work;
        running.store(size - 1);
        epoch.fetch_add(1);
        notify(epoch);
        work(0);
        await(running, [](unsigned left) { return left == 0; });
    }

    // Every thread of the running work arrives here before any goes on.
    void barrier() {
        if (size == 1) return;
        unsigned turn = turns.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            arrived.store(0, std::memory_order_relaxed);
            turns.store(turn + 1);
            notify(turns);
            return;
        }
        await(turns, [turn](unsigned now) { return now != turn; });
    }

    const int size;

   private:
    void close() {
        closing = true;
        epoch.fetch_add(1);
        notify(epoch);
        for (auto& worker : workers) worker.join();
    }

    // Spinning is quickest while every thread has a core. Where one has not, whoever waits must leave the core to it.
    template <class Done>
    void await(std::atomic<unsigned>& word, Done&& done, int most = SPINS) {
        for (int spins = 0; spins < most; ++spins) {
            if (done(word.load(std::memory_order_acquire))) return;
            pause();
        }
        sleepers.fetch_add(1);
        for (unsigned now; !done(now = word.load());) sleep(word, now);
        sleepers.fetch_sub(1);
    }

    void notify(std::atomic<unsigned>& word) {
        if (sleepers.load() > 0) wake(word);
    }

#if defined(__linux__)
    static void sleep(std::atomic<unsigned>& word, unsigned value) {
        syscall(SYS_futex, reinterpret_cast<unsigned*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
    }
    static void wake(std::atomic<unsigned>& word) {
        syscall(SYS_futex, reinterpret_cast<unsigned*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }
#else
    static void sleep(std::atomic<unsigned>&, unsigned) { std::this_thread::yield(); }
    static void wake(std::atomic<unsigned>&) {}
#endif

    void serve(int id) {
        for (unsigned seen = 0;;) {
            await(epoch, [seen](unsigned now) { return now != seen; }, IDLE_SPINS);
            seen = epoch.load();
            if (closing) return;
            (*job)(id);
            if (running.fetch_sub(1) == 1) notify(running);
        }
    }

    static constexpr int SPINS = 3000;
    // Between two forwards of a round, the drafter's and the target's, Python runs for some tenths of a millisecond:
    // who sleeps meanwhile is woken late.
    static constexpr int IDLE_SPINS = 30000;
    std::vector<std::thread> workers;
    const std::function<void(int)>* job = nullptr;
    std::atomic<unsigned> epoch{0}, running{0};
    std::atomic<int> sleepers{0};
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<unsigned> turns{0};
    bool closing = false;
};

}  // namespace outpace
