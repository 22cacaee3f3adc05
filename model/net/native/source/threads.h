// A step's threads: they take pieces of a phase as they come, and go on when all of it is done.
//
// Nobody waits for a thread, only for work that is under way: one that other processes keep from its core is not missed. Who
// waits spins for as long as a phase usually takes, then gives its core away. So a machine of one's own and a shared one
// need no different settings, and OMP_WAIT_POLICY matters only between steps.
#pragma once
#include <immintrin.h>
#include <omp.h>
#include <sched.h>

#include <atomic>
#include <vector>

#include "numbers.h"

static const int SPINS = 1000;

class Team {
  public:
    Team(i64 phases) : phases_(phases) {}

    struct Member {
        Team& team;
        size_t phase = 0;

        // Calls work(begin, end) for pieces of 0 .. total - 1 until none is left; returns when all are done.
        template <class Work>
        void share(i64 total, i64 grain, Work work) {
            Phase& now = team.phases_[phase++];
            for (i64 begin; (begin = now.taken.fetch_add(grain, std::memory_order_relaxed)) < total;) {
                i64 end = std::min(begin + grain, total);
                work(begin, end);
                now.done.fetch_add(end - begin, std::memory_order_release);
            }
            for (int spins = 0; now.done.load(std::memory_order_acquire) < total; spins++)
                if (spins < SPINS)
                    _mm_pause();
                else
                    sched_yield();
        }
    };

  private:
    struct alignas(64) Phase {
        std::atomic<i64> taken{0}, done{0};
    };
    std::vector<Phase> phases_;
};

// Runs work(member) in each thread; each must share the same phases.
template <class Work>
static void together(i64 phases, Work work) {
    Team team(phases);
#pragma omp parallel
    {
        Team::Member member = {team};
        work(member);
    }
}
