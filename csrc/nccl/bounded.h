// Runs something that may never end, and waits for it only so long.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

using Clock = std::chrono::steady_clock;

// On a thread of its own, which is left behind if `body` has not ended by the deadline; body must
// own what it uses. Did it end in time?
template <class Body>
bool run_bounded(Clock::time_point deadline, Body body) {
    struct End {
        std::mutex turn;
        std::condition_variable changed;
        bool reached = false;
    };
    auto end = std::make_shared<End>();
    auto run = [end, body = std::move(body)]() mutable {
        body();
        std::lock_guard<std::mutex> lock(end->turn);
        end->reached = true;
        end->changed.notify_all();
    };
    try {
        std::thread(std::move(run)).detach();
    } catch (const std::system_error&) {  // no thread to be had, so nothing was run
        return false;
    }
    std::unique_lock<std::mutex> lock(end->turn);
    return end->changed.wait_until(lock, deadline, [&] { return end->reached; });
}
