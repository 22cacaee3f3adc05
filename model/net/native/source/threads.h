// The threads of a step: one goes through its phases, and all take pieces of a phase as they come.
//
// Nobody waits for a thread, only for pieces that are under way: the step goes on when they are done, whatever the others do then. Who waits
// spins for as long as a phase usually takes, then yields its core to whoever wants it, then sleeps, so that a thread which another process
// keeps from its core can take this one's. So a machine of one's own and a shared one need no different settings. Without yields 16 streams
// of M over HTTP were 0.84 as fast, on two cores that the client shared: threads that slept had to be woken phase by phase.
#pragma once
#include <linux/futex.h>
#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "numbers.h"

static const int SPINS = 1000, YIELDS = 300;

// Sleeps while `word` is `value`, until it is woken.
static void sleep_on(std::atomic<uint32_t>& word, uint32_t value) { syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0); }
static void wake_all(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }

// Calls ready() until it is true, for a while; returns whether it was. Between phases others may have the core meanwhile.
template <class Ready>
static bool spin_until(Ready ready, int yields) {
    for (int spins = 0; spins < SPINS + yields; spins++) {
        if (ready()) return true;
        if (spins < SPINS) spin();
        else sched_yield();
    }
    return false;
}

class Team {
  public:
    // `rest` is called by each thread before it sleeps. Throws bad_alloc where the system gives no such number of threads.
    Team(i64 threads, void (*rest)()) : rest_(rest), size_(threads) {
        try {
            for (i64 number = 1; number < threads; number++) workers_.emplace_back([this, number] { serve(number); });
        } catch (const std::system_error&) {
            stop();
            throw std::bad_alloc();
        }
    }
    Team(const Team&) = delete;
    ~Team() { stop(); }

    i64 size() const { return size_; }
    void begin() { works_.store(true, std::memory_order_relaxed); }  // of a step's phases
    void end() { works_.store(false, std::memory_order_relaxed); }

    // Calls work(begin, end) for pieces of 0 .. total - 1; returns when all are done. One piece takes no other thread.
    template <class Work>
    void share(i64 total, i64 grain, Work work) {
        uint32_t pieces = (uint32_t)ceiling(total, grain);
        phase_ = {[](void* work, i64 begin, i64 end) { (*(Work*)work)(begin, end); }, &work, total, grain, pieces};
        if (pieces < 2 || size_ < 2) {
            for (uint32_t piece = 0; piece < pieces; piece++) run(piece);
            return;
        }
        done_.store(0, std::memory_order_relaxed);
        left_.store(pieces);
        if (sleepers_.load()) wake_all(left_);
        while (take()) {
        }
        auto all_done = [&] { return done_.load(std::memory_order_acquire) == pieces; };
        if (spin_until(all_done, YIELDS)) return;
        waits_.store(true);
        for (uint32_t done; (done = done_.load()) < pieces;) sleep_on(done_, done);
        waits_.store(false, std::memory_order_relaxed);
    }

    static i64 number() { return number_; }  // of this thread in its team

  private:
    struct Phase {
        void (*run)(void* work, i64 begin, i64 end);
        void* work;
        i64 total, grain;
        uint32_t pieces;
    };

    void stop() {
        over_.store(true);
        left_.store(1), wake_all(left_);
        for (std::thread& worker : workers_) worker.join();
    }

    void run(uint32_t piece) { phase_.run(phase_.work, piece * phase_.grain, std::min((piece + 1) * phase_.grain, phase_.total)); }

    // Does the next piece of the phase, if any is left. The phase stays what it is until the piece is done.
    bool take() {
        uint32_t left = left_.load(std::memory_order_acquire);
        do
            if (!left || over_.load(std::memory_order_relaxed)) return false;
        while (!left_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel));
        uint32_t pieces = phase_.pieces;
        run(pieces - left);
        if (done_.fetch_add(1) + 1 == pieces && waits_.load()) wake_all(done_);
        return true;
    }

    void serve(i64 number) {
        pthread_setname_np(pthread_self(), "attend-step");
        number_ = number;
        while (!over_.load(std::memory_order_relaxed)) {
            int yields = works_.load(std::memory_order_relaxed) ? YIELDS : 0;
            if (take() || spin_until([&] { return left_.load(std::memory_order_relaxed) != 0; }, yields)) continue;
            if (rest_) rest_();
            sleepers_.fetch_add(1);
            sleep_on(left_, 0);
            sleepers_.fetch_sub(1);
        }
    }

    inline static thread_local i64 number_ = 0;
    Phase phase_ = {};
    alignas(64) std::atomic<uint32_t> left_{0};  // pieces that nobody has taken
    alignas(64) std::atomic<uint32_t> done_{0};
    alignas(64) std::atomic<uint32_t> sleepers_{0};
    std::atomic<bool> works_{false}, waits_{false}, over_{false};  // waits_: the thread of the phases sleeps until all is done
    void (*rest_)();
    std::vector<std::thread> workers_;
    i64 size_;
};
