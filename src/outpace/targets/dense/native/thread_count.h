// How many threads the next forward uses, where other programs keep some of the cores busy.
//
// Threads that meet at barriers are as fast as the slowest of them, and one that shares its core with a busy neighbour
// is stopped for milliseconds at a time. One thread fewer then finishes sooner. Which number is faster is read off each
// forward: the work that its threads did, divided among one fewer, against the time that it took.
#pragma once

namespace outpace {

class ThreadCount {
   public:
    explicit ThreadCount(int most) : most(most), steady(most) {}

    // For the forward that begins at `now` (seconds).
    int next(double now) {
        trying = steady < most && now >= retry_at;
        return trying ? steady + 1 : steady;
    }

    // What a forward with `threads` of them took: seconds from begin to end, and of all threads' work, waiting left out.
    void record(int threads, double seconds, double work, double now) {
        if (threads < 2) return;
        const double with_fewer = work / (threads - 1);
        if (trying) {
            if (with_fewer > seconds) settle_at(threads, now, FIRST_PAUSE);
            else settle_at(steady, now, pause * 2 < LONGEST_PAUSE ? pause * 2 : LONGEST_PAUSE);
        } else if (with_fewer >= WORTH * seconds) {
            slower = 0;
        } else if (++slower >= IN_A_ROW) {
            settle_at(threads - 1, now, FIRST_PAUSE);
        }
    }

   private:
    void settle_at(int threads, double now, double wait) {
        steady = threads;
        pause = wait;
        retry_at = now + wait;
        slower = 0;
        trying = false;
    }

    static constexpr double WORTH = 0.85;         // a neighbour that comes and goes changes nothing
    static constexpr int IN_A_ROW = 2;
    static constexpr double FIRST_PAUSE = 0.05;   // seconds until one thread more is tried again
    static constexpr double LONGEST_PAUSE = 0.25;
    const int most;
    int steady, slower = 0;
    bool trying = false;
    double pause = FIRST_PAUSE, retry_at = 0;
};

}  // namespace outpace
