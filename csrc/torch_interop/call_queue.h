// Calls of one group, one after the other: on the caller's thread if none is before it, or on the
// queue's.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "queued_work.h"

using Call = std::function<ErrorPointer()>;

class CallQueue {
    struct Item {
        Call call;
        WorkPointer work;
    };
    struct State {
        std::mutex mutex;
        std::condition_variable changed;
        std::deque<Item> items;
        bool busy = false;    // a call runs
        bool served = false;  // a thread will look at the items
        bool stopping = false;
    };

  public:
    explicit CallQueue(int rank) : rank_(rank), state_(std::make_shared<State>()) {}
    ~CallQueue() {
        request_stop();
        if (thread_.joinable()) thread_.detach();  // it holds the state
    }

    // The title of the calls that this thread submits next.
    static CallTitle& title() {
        static thread_local CallTitle current;
        return current;
    }

    // Runs the call on this thread, whatever is before it.
    WorkPointer run(Call call, std::vector<at::Tensor> result) {
        auto work = new_work(std::move(result));
        work->end(call());
        return work;
    }

    // Runs the call after those before it. One that is submitted when another ends (Future.then)
    // runs here, and so comes next on all ranks if each asked for that end before it made any
    // further call.
    WorkPointer submit(Call call, std::vector<at::Tensor> result) {
        if (served() == state_.get()) {
            c10::InferenceMode guard;
            return run(std::move(call), std::move(result));
        }
        auto work = new_work(std::move(result));
        std::lock_guard<std::mutex> lock(state_->mutex);
        state_->items.push_back({std::move(call), work});
        state_->changed.notify_all();
        if (!state_->served) {  // or no longer, after close()
            if (thread_.joinable()) thread_.detach();
            thread_ = std::thread(serve, state_);
            state_->served = true;
        }
        return work;
    }

    // Runs the call on this thread if none is before it: no thread need wake. Or submits it.
    WorkPointer run_or_submit(Call call, std::vector<at::Tensor> result) {
        Turn turn(*this);
        return turn.taken() ? run(std::move(call), std::move(result))
                            : submit(std::move(call), std::move(result));
    }

    // The right to call on this thread, if no call is before it; given back at the end.
    class Turn {
      public:
        explicit Turn(CallQueue& queue) : state_(*queue.state_) {
            std::lock_guard<std::mutex> lock(state_.mutex);
            taken_ = !state_.busy && state_.items.empty();
            state_.busy = state_.busy || taken_;
        }
        ~Turn() {
            if (!taken_) return;
            std::lock_guard<std::mutex> lock(state_.mutex);
            state_.busy = false;
            if (!state_.items.empty() || state_.stopping) state_.changed.notify_all();
        }
        Turn(const Turn&) = delete;
        Turn& operator=(const Turn&) = delete;
        bool taken() const { return taken_; }

      private:
        State& state_;
        bool taken_;
    };

    // Returns when all calls have ended, or lets them: so always on the queue's thread. Without the
    // GIL.
    void close(bool is_waiting) {
        request_stop();
        std::thread ending;
        if (is_waiting && served() != state_.get()) {
            std::lock_guard<std::mutex> lock(state_->mutex);
            ending.swap(thread_);  // a call that is submitted meanwhile may need another one
        }
        if (ending.joinable()) ending.join();
    }

  private:
    // The state of the queue whose thread this is.
    static const State*& served() {
        static thread_local const State* current = nullptr;
        return current;
    }

    WorkPointer new_work(std::vector<at::Tensor> result) const {
        return c10::make_intrusive<QueuedWork>(rank_, title(), std::move(result));
    }

    void request_stop() {
        std::lock_guard<std::mutex> lock(state_->mutex);
        state_->stopping = true;
        state_->changed.notify_all();
    }

    static void serve(std::shared_ptr<State> state) {
        served() = state.get();
        std::unique_lock<std::mutex> lock(state->mutex);
        for (;;) {
            state->changed.wait(
                lock, [&] { return !state->busy && (state->stopping || !state->items.empty()); });
            if (state->items.empty()) {
                state->served = false;
                return;
            }
            Item item = std::move(state->items.front());
            state->items.pop_front();
            state->busy = true;
            lock.unlock();
            run_item(std::move(item));
            lock.lock();
            state->busy = false;
        }
    }

    static void run_item(Item item) {
        ErrorPointer error;
        {
            c10::InferenceMode guard;  // so that it may write to any tensor
            error = item.call();
        }
        item.call = nullptr;  // with the tensors that it holds
        item.work->end(std::move(error));
    }

    const int rank_;
    std::shared_ptr<State> state_;
    std::thread thread_;
};
