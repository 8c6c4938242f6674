// Waiting: spin for a while, then yield the core for a while, then sleep in the kernel.
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

// How long to spin before sleeping. Where ranks outnumber cores, every pause is taken from the peer
// that is waited for, so the core is yielded at once. Where they do not, yields go on for some
// hundred microseconds, for as much as a layer takes longer on one rank than on the other: a
// wake-up would add 50.
struct SpinPolicy {
    int pauses = 0;
    int yields = 50;
};

// A pause takes 10 to 150 cycles, depending on the processor, so it is timed.
inline SpinPolicy measured_spin_policy(bool oversubscribed) {
    if (oversubscribed) return SpinPolicy{};
    constexpr int64_t spin_ns = 15000;
    constexpr int sample = 64, yields = 1000;
    int64_t fastest = spin_ns;
    for (int i = 0; i < 8; ++i) {
        int64_t start = now_ns();
        for (int j = 0; j < sample; ++j) pause_core();
        int64_t elapsed = now_ns() - start;
        if (elapsed < fastest) fastest = elapsed;
    }
    return SpinPolicy{static_cast<int>(spin_ns * sample / (fastest > 0 ? fastest : 1)), yields};
}

// Two ranks on one core wait for each other a whole time slice at a time, and the scheduler leaves
// them there: neither sleeps. Any wake-up can put them there, so a rank that notices it migrates.
class CoreMigrator {
  public:
    static uint32_t current_core() { return static_cast<uint32_t>(sched_getcpu()); }

    // Moves this thread to an allowed core outside `busy`; at most once per millisecond.
    void migrate_from(const cpu_set_t& busy) {
        int64_t now = now_ns();
        if (now - last_migration_ns_ < 1000000) return;
        last_migration_ns_ = now;
        cpu_set_t allowed, free;
        if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
        CPU_XOR(&free, &allowed, &busy);
        CPU_AND(&free, &free, &allowed);
        if (CPU_COUNT(&free) == 0) return;
        sched_setaffinity(0, sizeof free, &free);
        sched_setaffinity(0, sizeof allowed, &allowed);
    }

  private:
    int64_t last_migration_ns_ = 0;
};

// A yield that takes longer gave the core to another thread that wants it for itself.
constexpr int64_t contended_yield_ns = 20000;

// The first checks come without a pause, which may take as long as the wait for a peer that is
// nearly there. Yields end at the first that another thread takes, which keeps the core for a time
// slice: who sleeps gets it back as soon as the peer has come.
template <class Ready>
bool spin_until(const SpinPolicy& policy, Ready ready) {
    constexpr int without_pause = 64;
    for (int i = 0; i < policy.pauses; ++i) {
        if (ready()) return true;
        if (i >= without_pause) pause_core();
    }
    int64_t last = now_ns();
    for (int i = 0; i < policy.yields; ++i) {
        if (ready()) return true;
        sched_yield();
        int64_t now = now_ns();
        if (now - last > contended_yield_ns) break;
        last = now;
    }
    return ready();
}

// A wake-up takes 50 us, and waking a peer as long. So a rank that waits for a message spins longer
// around the time when it is expected, but never longer than this.
constexpr int64_t expected_spin_ns = 1000000;

// Spins until `deadline_ns`; ends earlier when another thread wants the core: a yield takes long
// then.
template <class Ready>
bool spin_until_deadline(const SpinPolicy& policy, int64_t deadline_ns, Ready ready) {
    for (int64_t last = now_ns(); last < deadline_ns;) {
        for (int i = 0; i < policy.pauses; i += 16) {
            if (ready()) return true;
            for (int j = 0; j < 16; ++j) pause_core();
        }
        last = now_ns();
        sched_yield();
        if (now_ns() - last > contended_yield_ns) break;
    }
    return ready();
}

// A futex(2), which may be shared between processes, for threads of kinds: wake_kinds wakes those
// whose bits are in `kinds`. Returns when woken, when `value` differs from `expected`, after
// `timeout_ns`, or spuriously.
inline void sleep_as(uint32_t kind, std::atomic<uint32_t>* value, uint32_t expected,
                     int64_t timeout_ns) {
    int64_t end_ns = now_ns() + timeout_ns;  // FUTEX_WAIT_BITSET takes a time, not a duration
    timespec end{static_cast<time_t>(end_ns / 1000000000), static_cast<long>(end_ns % 1000000000)};
    syscall(SYS_futex, value, FUTEX_WAIT_BITSET, expected, &end, nullptr, kind);
}

inline void wake_kinds(uint32_t kinds, std::atomic<uint32_t>* value) {
    syscall(SYS_futex, value, FUTEX_WAKE_BITSET, INT_MAX, nullptr, nullptr, kinds);
}

inline void sleep_on(std::atomic<uint32_t>* value, uint32_t expected, int64_t timeout_ns) {
    sleep_as(FUTEX_BITSET_MATCH_ANY, value, expected, timeout_ns);
}

inline void wake_all(std::atomic<uint32_t>* value) { wake_kinds(FUTEX_BITSET_MATCH_ANY, value); }

}  // namespace shm
