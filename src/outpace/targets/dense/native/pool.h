// Threads that run one function together, with barriers inside it.
#pragma once

#include <atomic>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <time.h>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "thread_count.h"

namespace outpace {

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

inline double seconds(clockid_t clock) {
    timespec now;
    clock_gettime(clock, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

// A number that threads wait for.
class Signal {
   public:
    unsigned value() const { return number.load(std::memory_order_acquire); }

    void set(unsigned next) {
        number.store(next);
        wake();
    }
    void add(unsigned by) {
        number.fetch_add(by);
        wake();
    }
    // Returns the new value.
    unsigned subtract(unsigned by) {
        unsigned left = number.fetch_sub(by) - by;
        if (left == 0) wake();
        return left;
    }

    // Wait until `done(value)`; returns the processor time that this took, in seconds. Spinning is quickest while every
    // thread has a core. Where one has not, whoever waits must leave the core to it.
    template <class Done>
    double await(Done&& done, int spins) {
        for (int i = 0; i < FREE_SPINS; ++i) {
            if (done(value())) return 0;
            pause();
        }
        const double began = seconds(CLOCK_MONOTONIC);
        for (int i = FREE_SPINS; i < spins; ++i) {
            if (done(value())) return seconds(CLOCK_MONOTONIC) - began;
            pause();
        }
        const double spun = seconds(CLOCK_MONOTONIC) - began;
        sleepers.fetch_add(1);
        for (unsigned now; !done(now = number.load());) sleep(now);
        sleepers.fetch_sub(1);
        return spun;
    }

   private:
#if defined(__linux__)
    void sleep(unsigned current) {
        syscall(SYS_futex, reinterpret_cast<unsigned*>(&number), FUTEX_WAIT_PRIVATE, current, nullptr, nullptr, 0);
    }
    void wake() {
        if (sleepers.load() > 0) syscall(SYS_futex, reinterpret_cast<unsigned*>(&number), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }
#else
    static void sleep(unsigned) { std::this_thread::yield(); }
    static void wake() {}
#endif

    static constexpr int FREE_SPINS = 64;  // a wait as short as these is not worth two readings of a clock
    alignas(64) std::atomic<unsigned> number{0};
    std::atomic<int> sleepers{0};
};

class Pool {
   public:
    explicit Pool(int threads) : size(threads), active(threads), count(threads), workers(threads) {
        try {
            for (int id = 1; id < threads; ++id) started.emplace_back([this, id] { serve(id); });
        } catch (...) {  // the system gives no more threads: those that run must end before they can be forgotten
            close();
            throw;
        }
    }

    ~Pool() { close(); }

    // How many threads the next work runs on: `active` from now on.
    int choose() { return active = count.next(seconds(CLOCK_MONOTONIC)); }

    // Run `work(thread)` on the threads [0, active), the caller being thread 0; returns when all have finished.
    void run(const std::function<void(int)>& work) {
        const double began = seconds(CLOCK_MONOTONIC);
        job = &work;
        running.set(active - 1);
        for (int id = 1; id < active; ++id) workers[id].turn.add(1);
        share(0);
        running.await([](unsigned left) { return left == 0; }, SPINS);
        double worked = 0;
        for (int id = 0; id < active; ++id) worked += workers[id].worked;
        const double ended = seconds(CLOCK_MONOTONIC);
        count.record(active, ended - began, worked, ended);
    }

    // Every thread of the running work arrives here before any goes on.
    void barrier(int thread) {
        if (active == 1) return;
        unsigned turn = turns.value();
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == active - 1) {
            arrived.store(0, std::memory_order_relaxed);
            turns.set(turn + 1);
            return;
        }
        workers[thread].waited += turns.await([turn](unsigned now) { return now != turn; }, SPINS);
    }

    const int size;
    int active;  // how many threads run the present work; the others sleep

   private:
    struct alignas(64) Worker {
        Signal turn;
        double waited = 0, worked = 0;  // seconds of processor time in the last work
    };

    void close() {
        closing = true;
        for (size_t id = 1; id <= started.size(); ++id) workers[id].turn.add(1);
        for (auto& thread : started) thread.join();
    }

    void share(int id) {
        Worker& mine = workers[id];
        mine.waited = 0;
        const double began = active > 1 ? seconds(CLOCK_THREAD_CPUTIME_ID) : 0;
        try {
            (*job)(id);
        } catch (const std::exception& error) {
            if (active == 1) throw;
            // The others wait at a barrier for ever: there is no way on.
            std::fprintf(stderr, "outpace: a thread of a forward failed: %s\n", error.what());
            std::abort();
        }
        mine.worked = active > 1 ? seconds(CLOCK_THREAD_CPUTIME_ID) - began - mine.waited : 0;
    }

    void serve(int id) {
        for (unsigned seen = 0;; ++seen) {
            workers[id].turn.await([seen](unsigned now) { return now != seen; }, IDLE_SPINS);
            if (closing) return;
            share(id);
            running.subtract(1);
        }
    }

    static constexpr int SPINS = 3000;
    // Between two forwards of a round, the drafter's and the target's, Python runs for some tenths of a millisecond:
    // who sleeps meanwhile is woken late.
    static constexpr int IDLE_SPINS = 30000;
    ThreadCount count;
    std::vector<Worker> workers;
    std::vector<std::thread> started;
    const std::function<void(int)>* job = nullptr;
    Signal running, turns;
    alignas(64) std::atomic<int> arrived{0};
    std::atomic<bool> closing{false};
};

}  // namespace outpace
