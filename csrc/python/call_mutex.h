// One call at a time on a communicator, for next to nothing when no other thread calls.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include <condition_variable>
#include <mutex>

// Locked and unlocked by threads that hold the GIL, which guards the fields. It stays locked while
// the GIL is released for the call; a thread that waits for it releases the GIL, too. A
// std::lock_guard fits.
class CallMutex {
  public:
    bool try_lock() {
        if (locked_) return false;
        return locked_ = true;
    }

    void lock() {
        while (!try_lock()) wait();
    }

    void unlock() {
        locked_ = false;
        if (num_waiting_ == 0) return;
        std::lock_guard<std::mutex> lock(wait_mutex_);
        ++num_unlocks_;
        unlocked_.notify_all();
    }

  private:
    // Another thread may take the mutex first, so the caller tries again.
    void wait() {
        uint64_t before = num_unlocks_;
        ++num_waiting_;
        PyThreadState* state = PyEval_SaveThread();
        {
            std::unique_lock<std::mutex> lock(wait_mutex_);
            unlocked_.wait(lock, [&] { return num_unlocks_ != before; });
        }
        PyEval_RestoreThread(state);
        --num_waiting_;
    }

    bool locked_ = false;
    int num_waiting_ = 0;
    uint64_t num_unlocks_ = 0;  // changes under the GIL and wait_mutex_
    std::mutex wait_mutex_;
    std::condition_variable unlocked_;
};
