// One call at a time on a communicator, for next to nothing when no other thread calls.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <atomic>
#include <condition_variable>
#include <mutex>

// Threads with the GIL release it while they wait; it may be released during the call, too. A
// std::lock_guard fits.
class CallMutex {
  public:
    bool try_lock() {
        int expected = unlocked;
        return state_.compare_exchange_strong(expected, locked, std::memory_order_acquire);
    }

    void lock() {
        if (try_lock()) return;
        PyThreadState* state = PyEval_SaveThread();
        lock_without_gil();
        PyEval_RestoreThread(state);
    }

    // Whoever waits leaves the state at `awaited`, so that each unlock() looks for others.
    void lock_without_gil() {
        if (try_lock()) return;
        std::unique_lock<std::mutex> lock(wait_mutex_);
        while (state_.exchange(awaited, std::memory_order_acquire) != unlocked)
            unlocked_.wait(lock);
    }

    void unlock() {
        if (state_.exchange(unlocked, std::memory_order_release) != awaited) return;
        std::lock_guard<std::mutex> lock(wait_mutex_);
        unlocked_.notify_all();
    }

  private:
    enum { unlocked, locked, awaited };
    std::atomic<int> state_{unlocked};
    std::mutex wait_mutex_;
    std::condition_variable unlocked_;
};
