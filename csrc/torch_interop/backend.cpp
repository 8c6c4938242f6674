// A c10d::Backend, the kind of object that torch registers for a device. Its calls are those of a
// DrumlineProcessGroup, written in Python.
//
// Compiled on the user's machine for the torch that is installed there: communicator/torch_interop/
// native_backend.py.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "call_queue.h"
#include "native_calls.h"

namespace {

using c10d::OpType;
using TensorLists = std::vector<Tensors>;

// A Work whose methods are written in Python, which must live as long as C++ holds it.
class PythonWork : public c10d::Work {
  public:
    PythonWork(const py::object& work, const CallTitle& title)
        : Work(-1, title.type, title.text, title.inputs()),
          work_(work.cast<c10::intrusive_ptr<c10d::Work>>()),
          object_(share(work)) {}

    bool wait(std::chrono::milliseconds timeout) override {
        bool is_done = work_->wait(timeout);
        finish();  // for the profiler
        return is_done;
    }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return work_->getFuture(); }
    bool isCompleted() override { return call<bool>("is_completed"); }
    bool isSuccess() const override { return call<bool>("is_success"); }
    std::exception_ptr exception() const override {
        py::gil_scoped_acquire gil;
        py::object error = object_->attr("exception")();
        return error.is_none() ? nullptr : PythonError(error).as_exception();
    }
    int sourceRank() const override { return call<int>("_source_rank"); }
    void synchronize() override { wait(kNoTimeout); }
    Tensors result() override { return call<Tensors>("result"); }

  private:
    template <class Result>
    Result call(const char* method) const {
        py::gil_scoped_acquire gil;
        return object_->attr(method)().template cast<Result>();
    }

    c10::intrusive_ptr<c10d::Work> work_;
    std::shared_ptr<py::object> object_;
};

c10::intrusive_ptr<c10d::Work> as_work(const py::object& work, const CallTitle& title) {
    auto native = work.cast<c10::intrusive_ptr<c10d::Work>>();
    if (dynamic_cast<QueuedWork*>(native.get()) != nullptr) return native;
    return c10::make_intrusive<PythonWork>(work, title);
}

// For as long as it lives, calls that this thread submits have this title.
class TitleScope {
  public:
    explicit TitleScope(const CallTitle& title) : before_(CallQueue::title()) {
        CallQueue::title() = title;
    }
    ~TitleScope() { CallQueue::title() = before_; }

  private:
    CallTitle before_;
};

// A function of Python, for a thread without the GIL.
Call as_call(py::function function) {
    return [shared = share(std::move(function))] {
        return run_python([&] { check_returned(PyObject_CallObject(shared->ptr(), nullptr)); });
    };
}

class DrumlineBackend : public c10d::Backend {
  public:
    // group: a DrumlineProcessGroup, with the GIL.
    DrumlineBackend(const py::object& group, std::shared_ptr<CallQueue> queue, int rank, int size,
                    c10::intrusive_ptr<Options> options)
        : Backend(rank, size),
          group_(share(group)),
          queue_(std::move(queue)),
          options_(std::move(options)) {}

    py::object group() const { return *group_; }
    const std::string getBackendName() const override { return "drumline"; }
    c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
    bool supportsSplitting() const override { return true; }
    void setSequenceNumberForGroup() override {}  // it counts from 0 on every rank
    uint64_t getSequenceNumberForGroup() override { return sequence_number_; }
    // Not marked as override, for a torch that has no such method yet.
    void setTimeout(std::chrono::milliseconds timeout) {
        options_->timeout = timeout;
        call_python("set_timeout", timeout);
    }
    void shutdown() override { call_python("shutdown"); }
    void abort() override { call_python("abort"); }

    c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                      const std::vector<int>& ranks,
                                      const c10::intrusive_ptr<Options>& options) override {
        py::gil_scoped_acquire gil;
        py::object backend = group_->attr("split")(store, ranks, options);
        return backend.is_none() ? nullptr : backend.cast<c10::intrusive_ptr<Backend>>();
    }

    using WorkBase = c10::intrusive_ptr<c10d::Work>;

    WorkBase allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
        const CallTitle title{OpType::ALLREDUCE, "drumline:all_reduce", tensors};
        return start(
            title, options.asyncOp, tensors,
            [&](const NativeCalls& native) {
                return tensors.size() == 1 ? native.allreduce(tensors[0], options.reduceOp)
                                           : Call();
            },
            [&] { return delegate(title, "allreduce", tensors, options); });
    }
    WorkBase allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override {
        return allreduce(tensors, options);
    }
    WorkBase allreduce_coalesced(Tensors& tensors,
                                 const c10d::AllreduceCoalescedOptions& options) override {
        const CallTitle title{OpType::ALLREDUCE_COALESCED, "drumline:all_reduce", tensors};
        return start(
            title, options.asyncOp, tensors,
            [&](const NativeCalls& native) {
                return native.allreduce_all(tensors, options.reduceOp, comparison_of(tensors));
            },
            [&] { return delegate(title, "allreduce_coalesced", tensors, options); });
    }
    WorkBase broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
        const CallTitle title{OpType::BROADCAST, "drumline:broadcast", tensors};
        return start(
            title, options.asyncOp, tensors,
            [&](const NativeCalls& native) {
                return tensors.size() == 1 && options.rootTensor == 0
                           ? native.broadcast(tensors[0], options.rootRank)
                           : Call();
            },
            [&] { return delegate(title, "broadcast", tensors, options); });
    }
    WorkBase reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
        return delegate({OpType::REDUCE, "drumline:reduce", tensors}, "reduce", tensors, options);
    }
    WorkBase allgather(TensorLists& outs, Tensors& tensors,
                       const c10d::AllgatherOptions& options) override {
        const CallTitle title{OpType::ALLGATHER, "drumline:all_gather", tensors};
        return start(
            title, options.asyncOp, outs.empty() ? Tensors() : outs[0],
            [&](const NativeCalls& native) {
                return outs.size() == 1 && tensors.size() == 1
                           ? native.allgather_list(outs[0], tensors[0])
                           : Call();
            },
            [&] { return delegate(title, "allgather", outs, tensors, options); });
    }
    WorkBase _allgather_base(at::Tensor& out, at::Tensor& tensor,
                             const c10d::AllgatherOptions& options) override {
        const CallTitle title{OpType::_ALLGATHER_BASE, "drumline:_all_gather_base", tensor};
        return start(
            title, options.asyncOp, {out},
            [&](const NativeCalls& native) { return native.allgather(out, tensor); },
            [&] { return delegate(title, "_allgather_base", out, tensor, options); });
    }
    WorkBase allgather_coalesced(TensorLists& outs, Tensors& tensors,
                                 const c10d::AllgatherOptions& options) override {
        return delegate({OpType::ALLGATHER_COALESCED, "drumline:all_gather", tensors},
                        "allgather_coalesced", outs, tensors, options);
    }
    WorkBase allgather_into_tensor_coalesced(Tensors& outs, Tensors& tensors,
                                             const c10d::AllgatherOptions& options) override {
        return delegate({OpType::ALLGATHER_COALESCED, "drumline:all_gather", tensors},
                        "allgather_into_tensor_coalesced", outs, tensors, options);
    }
    WorkBase gather(TensorLists& outs, Tensors& tensors,
                    const c10d::GatherOptions& options) override {
        return delegate({OpType::GATHER, "drumline:gather", tensors}, "gather", outs, tensors,
                        options);
    }
    WorkBase scatter(Tensors& outs, TensorLists& rows,
                     const c10d::ScatterOptions& options) override {
        return delegate({OpType::SCATTER, "drumline:scatter", rows}, "scatter", outs, rows,
                        options);
    }
    WorkBase reduce_scatter(Tensors& outs, TensorLists& rows,
                            const c10d::ReduceScatterOptions& options) override {
        return delegate({OpType::REDUCE_SCATTER, "drumline:reduce_scatter", rows}, "reduce_scatter",
                        outs, rows, options);
    }
    WorkBase _reduce_scatter_base(at::Tensor& out, at::Tensor& tensor,
                                  const c10d::ReduceScatterOptions& options) override {
        const CallTitle title{OpType::_REDUCE_SCATTER_BASE, "drumline:_reduce_scatter_base",
                              tensor};
        return start(
            title, options.asyncOp, {out},
            [&](const NativeCalls& native) {
                return native.reduce_scatter(out, tensor, options.reduceOp);
            },
            [&] { return delegate(title, "_reduce_scatter_base", out, tensor, options); });
    }
    WorkBase reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& tensors,
                                             const c10d::ReduceScatterOptions& options) override {
        return delegate({OpType::REDUCE_SCATTER, "drumline:reduce_scatter", tensors},
                        "reduce_scatter_tensor_coalesced", outs, tensors, options);
    }
    WorkBase alltoall_base(at::Tensor& out, at::Tensor& tensor, std::vector<int64_t>& out_sizes,
                           std::vector<int64_t>& sizes,
                           const c10d::AllToAllOptions& options) override {
        const CallTitle title{OpType::ALLTOALL_BASE, "drumline:all_to_all", tensor};
        return start(
            title, options.asyncOp, {out},
            [&](const NativeCalls& native) {
                return out_sizes.empty() && sizes.empty() ? native.alltoall(out, tensor) : Call();
            },
            [&] {
                return delegate(title, "alltoall_base", out, tensor, out_sizes, sizes, options);
            });
    }
    WorkBase alltoall(Tensors& outs, Tensors& tensors,
                      const c10d::AllToAllOptions& options) override {
        return delegate({OpType::ALLTOALL, "drumline:all_to_all", tensors}, "alltoall", outs,
                        tensors, options);
    }
    WorkBase barrier(const c10d::BarrierOptions& options) override {
        const CallTitle title{OpType::BARRIER, "drumline:barrier"};
        return start(
            title, options.asyncOp, Tensors(),
            [&](const NativeCalls& native) { return native.barrier(); },
            [&] { return delegate(title, "barrier", options); });
    }
    WorkBase send(Tensors& tensors, int dst, int tag) override {
        return message({OpType::SEND, "drumline:send", tensors}, "send", tensors, dst, tag);
    }
    WorkBase recv(Tensors& tensors, int src, int tag) override {
        return message({OpType::RECV, "drumline:recv", tensors}, "recv", tensors, src, tag);
    }
    WorkBase recvAnysource(Tensors& tensors, int tag) override {
        return delegate_uncounted({OpType::RECVANYSOURCE, "drumline:recvAnySource", tensors},
                                  "recv_anysource", tensors, tag);
    }
    void startCoalescing() override {}
    WorkBase endCoalescing() override {
        return delegate_uncounted({OpType::COALESCED, nullptr}, "_end_coalescing");
    }

  private:
    // Of the ranks' lists, if they have several tensors.
    Call comparison_of(const Tensors& tensors) const {
        if (tensors.size() < 2) return {};
        py::gil_scoped_acquire gil;
        return as_call(group_->attr("comparison_of")(tensors));
    }

    template <class... Arguments>
    WorkBase delegate(const CallTitle& title, const char* method, const Arguments&... arguments) {
        ++sequence_number_;
        return delegate_uncounted(title, method, arguments...);
    }

    // Messages are not calls of the whole group, which has the same number of them on every rank.
    template <class... Arguments>
    WorkBase delegate_uncounted(const CallTitle& title, const char* method,
                                const Arguments&... arguments) {
        TitleScope scope(title);
        py::gil_scoped_acquire gil;
        return as_work(group_->attr(method)(arguments...), title);
    }

    WorkBase message(const CallTitle& title, const char* method, const Tensors& tensors, int peer,
                     int tag) {
        WorkBase work = delegate_uncounted(title, method, tensors, peer, tag);
        if (!tensors[0].is_cpu()) is_deferred_.store(true);
        return work;
    }

    template <class... Arguments>
    void call_python(const char* method, const Arguments&... arguments) {
        py::gil_scoped_acquire gil;
        group_->attr(method)(arguments...);
    }

    // Whatever must be compared, converted, refused or started first is left to Python.
    template <class MakeCall, class Delegate>
    WorkBase start(const CallTitle& title, bool is_async, Tensors result, MakeCall make_call,
                   Delegate delegate_call) {
        const NativeCalls* native = is_deferred_.exchange(false) ? nullptr : native_calls();
        Call call = native != nullptr ? make_call(*native) : Call();
        if (!call) return delegate_call();
        ++sequence_number_;
        TitleScope scope(title);
        return is_async ? queue_->submit(std::move(call), std::move(result))
                        : queue_->run_or_submit(std::move(call), std::move(result));
    }

    // NULL until the group has opened a communicator that can be called without Python.
    const NativeCalls* native_calls() {
        if (const NativeCalls* native = native_.load(std::memory_order_acquire)) return native;
        py::gil_scoped_acquire gil;
        py::object comm = group_->attr("callable_from_cpp")();
        if (comm.is_none()) return nullptr;
        if (!shared_native_) shared_native_ = std::make_shared<NativeCalls>(comm);
        native_.store(shared_native_.get(), std::memory_order_release);
        return shared_native_.get();
    }

    std::shared_ptr<py::object> group_;
    std::shared_ptr<CallQueue> queue_;
    std::shared_ptr<NativeCalls> shared_native_;  // written with the GIL
    std::atomic<const NativeCalls*> native_{nullptr};
    std::atomic<bool> is_deferred_{false};  // a message that starts with the next collective
    c10::intrusive_ptr<Options> options_;
    std::atomic<uint64_t> sequence_number_{0};
};

template <class Method>
auto as_method(Method method) {
    return [method](CallQueue& queue, py::function function, Tensors result) {
        Call call = as_call(std::move(function));
        py::gil_scoped_release no_gil;
        return c10::intrusive_ptr<c10d::Work>((queue.*method)(std::move(call), std::move(result)));
    };
}

// group: it calls its communicator in this queue alone.
c10::intrusive_ptr<DrumlineBackend> create(const py::object& group,
                                           std::shared_ptr<CallQueue> queue, int rank, int size,
                                           std::chrono::milliseconds timeout,
                                           const std::string& group_name,
                                           std::vector<uint64_t> global_ranks) {
    auto options = c10::make_intrusive<c10d::Backend::Options>("drumline", timeout);
    options->group_name = group_name;
    options->global_ranks_in_group = std::move(global_ranks);
    return c10::make_intrusive<DrumlineBackend>(group, std::move(queue), rank, size,
                                                std::move(options));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    py::object base = py::module_::import("torch.distributed").attr("_Backend");
    py::class_<DrumlineBackend, c10::intrusive_ptr<DrumlineBackend>>(module, "DrumlineBackend",
                                                                     base)
        .def_property_readonly("group", &DrumlineBackend::group)
        .def_property_readonly("options", &DrumlineBackend::getBackendOptions);
    module.def("create", create);
    py::class_<CallQueue, std::shared_ptr<CallQueue>>(module, "CallQueue", py::module_local())
        .def(py::init<int>())
        .def("run", as_method(&CallQueue::run))
        .def("submit", as_method(&CallQueue::submit))
        .def("run_or_submit", as_method(&CallQueue::run_or_submit))
        .def("close", &CallQueue::close, py::arg("is_waiting") = true,
             py::call_guard<py::gil_scoped_release>());
}
