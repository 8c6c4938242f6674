// One call at a time on a communicator, for next to nothing where nobody else is calling.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include <condition_variable>
#include <mutex>

// Taken and given back by threads that hold the interpreter's lock, which guards what is here. It
// is held on while that lock is not; whoever comes then waits without it, too.
class Turn {
  public:
    bool try_take() {
        if (busy_) return false;
        return busy_ = true;
    }

    void take() {
        while (!try_take()) wait();
    }

    void give() {
        busy_ = false;
        if (waiting_ == 0) return;
        std::lock_guard<std::mutex> lock(door_);
        ++given_;
        changed_.notify_all();
    }

  private:
    void wait() {
        uint64_t seen = given_;
        ++waiting_;
        PyThreadState* state = PyEval_SaveThread();
        {
            std::unique_lock<std::mutex> lock(door_);
            changed_.wait(lock, [&] { return given_ != seen; });
        }
        PyEval_RestoreThread(state);
        --waiting_;
    }

    bool busy_ = false;
    int waiting_ = 0;
    uint64_t given_ = 0;  // changes under both locks
    std::mutex door_;
    std::condition_variable changed_;
};
