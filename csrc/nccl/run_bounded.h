// Runs something that may never return, and waits for it only so long.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

using Clock = std::chrono::steady_clock;

// Runs `body` on a thread of its own, which is left running if it has not returned by the
// deadline; so body must own what it uses and must not throw. True if it returned in time.
template <class Body>
bool run_bounded(Clock::time_point deadline, Body body) {
    struct Completion {
        std::mutex mutex;
        std::condition_variable changed;
        bool done = false;
    };
    auto completion = std::make_shared<Completion>();
    auto run = [completion, body = std::move(body)]() mutable {
        body();
        std::lock_guard<std::mutex> lock(completion->mutex);
        completion->done = true;
        completion->changed.notify_all();
    };
    try {
        std::thread(std::move(run)).detach();
    } catch (const std::system_error&) {  // no thread could be created, so nothing was run
        return false;
    }
    std::unique_lock<std::mutex> lock(completion->mutex);
    return completion->changed.wait_until(lock, deadline, [&] { return completion->done; });
}
