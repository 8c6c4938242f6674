// The Work that torch.distributed returns for a call.
#pragma once

#include <ATen/record_function.h>

#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "python_objects.h"

using Tensors = std::vector<at::Tensor>;

// What a profiler shows: torch's type of the call, a title such as "drumline:all_reduce", and the
// shapes of the inputs, which the caller keeps.
class CallTitle {
  public:
    CallTitle() = default;
    CallTitle(c10d::OpType type, const char* text) : type(type), text(text) {}
    CallTitle(c10d::OpType type, const char* text, const at::Tensor& input)
        : type(type), text(text), first_(&input), count_(1) {}
    CallTitle(c10d::OpType type, const char* text, const Tensors& inputs)
        : type(type), text(text), first_(inputs.data()), count_(inputs.size()) {}
    CallTitle(c10d::OpType type, const char* text, const std::vector<Tensors>& rows)
        : CallTitle(type, text) {
        if (!rows.empty()) *this = CallTitle(type, text, rows[0]);
    }

    c10d::OpType type = c10d::OpType::UNKNOWN;
    const char* text = nullptr;

    // Nothing where no profiler runs: to copy them would take longer than to look.
    std::optional<Tensors> inputs() const {
        if (count_ == 0 || !at::hasCallbacks()) return std::nullopt;
        return Tensors(first_, first_ + count_);
    }

  private:
    const at::Tensor* first_ = nullptr;
    size_t count_ = 0;
};

class QueuedWork : public c10d::Work {
  public:
    QueuedWork(int rank, const CallTitle& title, Tensors result)
        : Work(rank, title.type, title.text, title.inputs()), result_(std::move(result)) {}

    // Called once, without the GIL: callbacks of the future run here.
    void end(ErrorPointer error) {
        error_ = std::move(error);
        finish(error_ ? error_->as_runtime_error() : nullptr);
        if (auto future = take_future_to_end()) end_future(*future);
    }

    bool wait(std::chrono::milliseconds timeout) override {
        if (!await(timeout)) raise_timeout(timeout);
        if (error_) error_->raise();
        return true;
    }

    // torch calls it with the GIL, which the call that is waited for may need.
    void synchronize() override {
        std::optional<py::gil_scoped_release> no_gil;
        if (PyGILState_Check()) no_gil.emplace();
        wait(kNoTimeout);
    }

    std::exception_ptr exception() const override {
        return error_ ? error_->as_exception() : nullptr;
    }

    std::vector<at::Tensor> result() override { return result_; }

    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            if (!future_) future_ = new_future();
        }
        if (auto future = take_future_to_end()) end_future(*future);
        return future_;
    }

  private:
    bool await(std::chrono::milliseconds timeout) {
        std::unique_lock<std::mutex> lock(mutex_);
        if (completed_) return true;
        if (timeout != kNoTimeout) return cv_.wait_for(lock, timeout, [&] { return completed_; });
        cv_.wait(lock, [&] { return completed_; });
        return true;
    }

    c10::intrusive_ptr<c10::ivalue::Future> new_future() const {
        std::vector<c10::Device> devices;
        if (!result_.empty() && !result_[0].is_cpu()) devices = {result_[0].device()};
        return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), devices);
    }

    // The future, if the call has ended and it has not; of two threads one gets it.
    c10::intrusive_ptr<c10::ivalue::Future> take_future_to_end() {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!completed_ || !future_ || future_has_ended_) return nullptr;
        future_has_ended_ = true;
        return future_;
    }

    void end_future(c10::ivalue::Future& future) const {
        if (error_)
            future.setError(error_->as_runtime_error());
        else
            future.markCompleted(c10::IValue(result_));
    }

    [[noreturn]] static void raise_timeout(std::chrono::milliseconds timeout) {
        py::gil_scoped_acquire gil;
        py::module_::import("communicator.calls.async_work")
            .attr("raise_timeout")(std::chrono::duration<double>(timeout).count());
        throw py::error_already_set();
    }

    std::vector<at::Tensor> result_;
    ErrorPointer error_;
    c10::intrusive_ptr<c10::ivalue::Future> future_;  // made on request
    bool future_has_ended_ = false;
};

using WorkPointer = c10::intrusive_ptr<QueuedWork>;
