// Waiting: look a while, give the core away a while, then sleep in the kernel.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace shm {

inline int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

inline void pause_core() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
}

// How long to look before sleeping. Where ranks outnumber cores, every pause is stolen from the
// peer that is waited for, so the core is given away at once.
struct Patience {
    int pauses = 0;
    int yields = 50;
};

// A pause takes from 10 to 150 cycles, by processor; what is wanted is a time.
inline Patience patience(bool oversubscribed) {
    if (oversubscribed) return Patience{};
    constexpr int64_t look_ns = 15000;
    constexpr int sample = 64;
    int64_t fastest = look_ns;
    for (int i = 0; i < 8; ++i) {
        int64_t start = now_ns();
        for (int j = 0; j < sample; ++j) pause_core();
        int64_t took = now_ns() - start;
        if (took < fastest) fastest = took;
    }
    return Patience{static_cast<int>(look_ns * sample / (fastest > 0 ? fastest : 1)), 50};
}

// Two ranks on one core wait for each other a whole time slice at a time, and the scheduler lets
// them: neither sleeps. Whatever wakes threads brings this about, so a rank that finds itself there
// goes elsewhere.
class Place {
  public:
    static uint32_t core() { return static_cast<uint32_t>(sched_getcpu()); }

    // To any allowed core but these; at most once per millisecond.
    void leave(const cpu_set_t& taken) {
        int64_t now = now_ns();
        if (now - last_move_ns_ < 1000000) return;
        last_move_ns_ = now;
        cpu_set_t allowed, wanted;
        if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
        CPU_XOR(&wanted, &allowed, &taken);
        CPU_AND(&wanted, &wanted, &allowed);
        if (CPU_COUNT(&wanted) == 0) return;
        sched_setaffinity(0, sizeof wanted, &wanted);
        sched_setaffinity(0, sizeof allowed, &allowed);
    }

  private:
    int64_t last_move_ns_ = 0;
};

// Who comes at about the same time is seen at once: a pause may take as long as such a wait.
template <class Ready>
bool look(const Patience& patience, Ready ready) {
    constexpr int eager = 64;
    for (int i = 0; i < patience.pauses; ++i) {
        if (ready()) return true;
        if (i >= eager) pause_core();
    }
    for (int i = 0; i < patience.yields; ++i) {
        if (ready()) return true;
        sched_yield();
    }
    return ready();
}

// To be woken takes 50 us, and to wake somebody as long. So a rank that waits for a letter looks
// for it longer, about when the last one came, but never longer than this in all.
constexpr int64_t watch_ns = 1000000;

// Looks until `until_ns`, but for no longer than nobody else wants the core: giving it away then
// takes a while.
template <class Ready>
bool watch(const Patience& patience, int64_t until_ns, Ready ready) {
    constexpr int64_t taken_ns = 20000;
    for (int64_t last = now_ns(); last < until_ns;) {
        for (int i = 0; i < patience.pauses; i += 16) {
            if (ready()) return true;
            for (int j = 0; j < 16; ++j) pause_core();
        }
        last = now_ns();
        sched_yield();
        if (now_ns() - last > taken_ns) break;
    }
    return ready();
}

// Returns when woken, when the word differs from `seen`, after `timeout_ns`, or for no reason at
// all. The word may be shared between processes.
inline void sleep_on(std::atomic<uint32_t>* word, uint32_t seen, int64_t timeout_ns) {
    timespec timeout{static_cast<time_t>(timeout_ns / 1000000000),
                     static_cast<long>(timeout_ns % 1000000000)};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

inline void wake_all(std::atomic<uint32_t>* word) {
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace shm
