// Collectives of plain tensors on the CPU, straight to the library of a communicator: without the
// GIL, and with the headers that the same calls have in Python (list_collectives.py).
#pragma once

#include <communicator.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "borrowed_comm.h"
#include "call_queue.h"

class NativeCalls : public std::enable_shared_from_this<NativeCalls> {
  public:
    // comm: a communicator._native.Comm. With the GIL.
    explicit NativeCalls(const py::object& comm)
        : comm_(share(comm)),
          borrowed_(*static_cast<const BorrowedComm*>(
              PyCapsule_GetPointer(py::object(comm.attr("borrow")()).ptr(), borrowed_comm_name))) {}

    // Each an empty Call if the tensors need Python: it converts them, or says what is wrong.

    Call allreduce(const at::Tensor& tensor, const c10d::ReduceOp& op) const {
        comm_op native_op;
        if (!is_plain(tensor) || !find_op(op, tensor.scalar_type(), &native_op)) return {};
        return call([=, this](comm_t comm) {
            const int64_t shape[] = {tensor.numel()};
            tell_shape(comm, shape);
            void* data = tensor.data_ptr();
            return borrowed_.table->allreduce(comm, data, data, count_of(tensor), dtype_of(tensor),
                                              native_op, nullptr);
        });
    }

    // Of tensors of one dtype, none of which lies in another. compare: before the first, if any.
    Call allreduce_all(const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op,
                       Call compare) const {
        std::vector<Call> calls;
        if (compare) calls.push_back(std::move(compare));
        std::vector<std::pair<const char*, const char*>> spans;
        for (const at::Tensor& tensor : tensors) {
            if (!are_plain(tensor, tensors[0])) return {};
            auto begin = static_cast<const char*>(tensor.data_ptr());
            spans.emplace_back(begin, begin + tensor.nbytes());
            calls.push_back(allreduce(tensor, op));
            if (!calls.back()) return {};
        }
        std::sort(spans.begin(), spans.end());
        for (size_t i = 1; i < spans.size(); ++i)
            if (spans[i].first < spans[i - 1].second) return {};
        if (calls.empty()) return {};
        return [calls = std::move(calls)]() -> ErrorPointer {
            for (const Call& call : calls)
                if (ErrorPointer error = call()) return error;
            return nullptr;
        };
    }

    Call broadcast(const at::Tensor& tensor, int64_t src) const {
        if (!COMM_HAS(borrowed_.table, broadcast) || !is_plain(tensor) || src < 0 ||
            src >= borrowed_.nranks)
            return {};
        return call([=, this](comm_t comm) {
            const int64_t shape[] = {tensor.numel()};
            tell_shape(comm, shape);
            return borrowed_.table->broadcast(comm, tensor.data_ptr(), count_of(tensor),
                                              dtype_of(tensor), static_cast<int32_t>(src), nullptr);
        });
    }

    Call allgather(const at::Tensor& out, const at::Tensor& tensor) const {
        if (!COMM_HAS(borrowed_.table, allgather) || !are_plain(out, tensor) ||
            !is_one_part_per_rank(out, tensor) ||
            !are_apart(out, tensor, borrowed_.rank * nbytes_of(tensor)))
            return {};
        return call([=, this](comm_t comm) {
            const int64_t shape[] = {tensor.numel()};
            tell_shape(comm, shape);
            return borrowed_.table->allgather(comm, tensor.data_ptr(), out.data_ptr(),
                                              count_of(tensor), dtype_of(tensor), nullptr);
        });
    }

    // outs: one for each rank.
    Call allgather_list(const std::vector<at::Tensor>& outs, const at::Tensor& tensor) const {
        bool fits = static_cast<int64_t>(outs.size()) == borrowed_.nranks;
        for (const at::Tensor& out : outs)
            fits = fits && are_plain(out, tensor) && out.sizes() == tensor.sizes();
        if (!fits) return {};
        std::vector<int64_t> shape = tensor.sizes().vec();
        shape.insert(shape.begin(), borrowed_.nranks);
        at::Tensor rows = at::empty(shape, tensor.options());
        Call gather = allgather(rows, tensor);
        if (!gather) return {};
        return [=, gather = std::move(gather)]() -> ErrorPointer {
            if (ErrorPointer error = gather()) return error;
            auto row = static_cast<const char*>(rows.data_ptr());
            for (const at::Tensor& out : outs) {
                std::memcpy(out.data_ptr(), row, out.nbytes());
                row += out.nbytes();
            }
            return nullptr;
        };
    }

    Call reduce_scatter(const at::Tensor& out, const at::Tensor& tensor,
                        const c10d::ReduceOp& op) const {
        comm_op native_op;
        if (!COMM_HAS(borrowed_.table, reduce_scatter) || !are_plain(out, tensor) ||
            !is_one_part_per_rank(tensor, out) || !find_op(op, tensor.scalar_type(), &native_op) ||
            !are_apart(tensor, out, borrowed_.rank * nbytes_of(out)))
            return {};
        return call([=, this](comm_t comm) {
            const int64_t shape[] = {borrowed_.nranks, out.numel()};
            tell_shape(comm, shape);
            return borrowed_.table->reduce_scatter(comm, tensor.data_ptr(), out.data_ptr(),
                                                   count_of(out), dtype_of(out), native_op,
                                                   nullptr);
        });
    }

    Call alltoall(const at::Tensor& out, const at::Tensor& tensor) const {
        if (!COMM_HAS(borrowed_.table, alltoall) || !are_plain(out, tensor) ||
            out.numel() != tensor.numel() || tensor.dim() == 0 || out.dim() == 0 ||
            tensor.size(0) % borrowed_.nranks != 0 || out.size(0) % borrowed_.nranks != 0 ||
            !are_apart(out, tensor, -1))
            return {};
        return call([=, this](comm_t comm) {
            int64_t count = tensor.numel() / borrowed_.nranks;
            const int64_t shape[] = {borrowed_.nranks, count};
            tell_shape(comm, shape);
            return borrowed_.table->alltoall(comm, tensor.data_ptr(), out.data_ptr(),
                                             static_cast<uint64_t>(count), dtype_of(tensor),
                                             nullptr);
        });
    }

    Call barrier() const {
        if (!COMM_HAS(borrowed_.table, barrier)) return {};
        return call([this](comm_t comm) { return borrowed_.table->barrier(comm, nullptr); });
    }

  private:
    template <class Body>
    Call call(Body body) const {
        return [this, self = shared_from_this(), body = std::move(body)]() -> ErrorPointer {
            borrowed_.lock(borrowed_.mutex);
            comm_t comm = *borrowed_.handle;
            comm_result code = comm == nullptr ? static_cast<comm_result>(COMM_OK) : body(comm);
            std::string text = code == COMM_OK ? "" : borrowed_.table->last_error(comm);
            borrowed_.unlock(borrowed_.mutex);
            if (comm != nullptr && code == COMM_OK) return nullptr;
            return run_python([&] {
                PyObject* object = comm_->ptr();
                if (comm == nullptr)  // it raises that it is closed
                    check_returned(PyObject_CallMethod(object, "barrier", nullptr));
                else
                    check_returned(PyObject_CallMethod(  // the text may be cut amid a letter
                        object, "raise_result", "iN", code,
                        PyUnicode_DecodeUTF8(text.data(), text.size(), "replace")));
            });
        };
    }

    template <int32_t ndim>
    void tell_shape(comm_t comm, const int64_t (&shape)[ndim]) const {
        if (COMM_HAS(borrowed_.table, tell_shape)) borrowed_.table->tell_shape(comm, ndim, shape);
    }

    static bool is_plain(const at::Tensor& tensor) {
        return tensor.layout() == at::kStrided && tensor.is_cpu() && tensor.is_contiguous() &&
               tensor.numel() > 0 && !tensor.is_conj() && !tensor.is_neg() &&
               tensor.has_storage() && tensor.data_ptr() != nullptr && dtype_of(tensor) >= 0;
    }

    static bool are_plain(const at::Tensor& tensor, const at::Tensor& other) {
        return is_plain(tensor) && is_plain(other) && tensor.scalar_type() == other.scalar_type();
    }

    // The parts of all ranks, stacked or one after the other.
    bool is_one_part_per_rank(const at::Tensor& whole, const at::Tensor& part) const {
        std::vector<int64_t> stacked = part.sizes().vec();
        if (!stacked.empty()) {
            std::vector<int64_t> joined = stacked;
            joined[0] *= borrowed_.nranks;
            if (whole.sizes() == at::IntArrayRef(joined)) return true;
        }
        stacked.insert(stacked.begin(), borrowed_.nranks);
        return whole.sizes() == at::IntArrayRef(stacked);
    }

    // The smaller lies outside the larger, or where the call is in place; -1: nowhere in it.
    static bool are_apart(const at::Tensor& larger, const at::Tensor& smaller, int64_t in_place) {
        int64_t shift = static_cast<const char*>(smaller.data_ptr()) -
                        static_cast<const char*>(larger.data_ptr());
        return (in_place >= 0 && shift == in_place) ||
               shift >= static_cast<int64_t>(larger.nbytes()) ||
               -shift >= static_cast<int64_t>(smaller.nbytes());
    }

    static int64_t nbytes_of(const at::Tensor& tensor) {
        return static_cast<int64_t>(tensor.nbytes());
    }

    static uint64_t count_of(const at::Tensor& tensor) {
        return static_cast<uint64_t>(tensor.numel());
    }

    static comm_dtype dtype_of(const at::Tensor& tensor) {
        switch (tensor.scalar_type()) {
            case at::kFloat:
                return COMM_FLOAT32;
            case at::kBFloat16:
                return COMM_BFLOAT16;
            case at::kHalf:
                return COMM_FLOAT16;
            case at::kDouble:
                return COMM_FLOAT64;
            case at::kLong:
                return COMM_INT64;
            case at::kInt:
                return COMM_INT32;
            case at::kShort:
                return COMM_INT16;
            case at::kChar:
                return COMM_INT8;
            case at::kByte:
                return COMM_UINT8;
            case at::kBool:
                return COMM_BOOL;
            default:
                return -1;
        }
    }

    // As in list_collectives.py; what it refuses, or composes, is not for here.
    static bool find_op(const c10d::ReduceOp& op, at::ScalarType type, comm_op* native) {
        using c10d::ReduceOp;
        bool is_bool = type == at::kBool;
        switch (op.op_) {
            case ReduceOp::SUM:
                *native = is_bool ? COMM_MAX : COMM_SUM;
                return true;
            case ReduceOp::AVG:
                *native = COMM_AVG;
                return at::isFloatingType(type);
            case ReduceOp::PRODUCT:
                *native = is_bool ? COMM_MIN : COMM_PROD;
                return true;
            case ReduceOp::MIN:
                *native = COMM_MIN;
                return true;
            case ReduceOp::MAX:
                *native = COMM_MAX;
                return true;
            default:
                return false;
        }
    }

    std::shared_ptr<py::object> comm_;
    const BorrowedComm& borrowed_;
};
