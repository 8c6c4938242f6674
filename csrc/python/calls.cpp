// The calls that move tensors: each reads its arguments, calls the library and reports.
#include <vector>

#include "python/comm.h"

PyObject* comm_allreduce(FASTCALL_ARGUMENTS) {
    static const char* const names[] = {"tensor", "op", "out", nullptr};
    PyObject* values[3];
    if (!parse("allreduce", args, nargs, keywords, names, values, 1)) return nullptr;
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "allreduce");
    TensorView from, to;
    comm_op op;
    comm_stream stream;
    if (read_tensor(site, values[0], &from) < 0 ||
        read_op(site, values[1], values[0], from.dtype, &op) < 0)
        return nullptr;
    to = from;
    if (values[2] != nullptr &&
        (read_tensor(site, values[2], &to) < 0 || check_shape(site, to, from, 0, 0) < 0 ||
         check_overlap(site, from, to, true) < 0))
        return nullptr;
    if (current_stream(site, &stream) < 0) return nullptr;
    if (self->allreduce_note != nullptr) *self->allreduce_note = 1;
    bool is_done = call_with_tensor(self, site, from, [&](comm_t comm) {
        return self->table->allreduce(comm, from.data, to.data, from.numel, from.dtype, op, stream);
    });
    if (self->allreduce_note != nullptr) *self->allreduce_note = 0;
    if (!is_done) return nullptr;
    return new_reference(values[2] != nullptr ? values[2] : values[0]);
}

PyObject* comm_broadcast(FASTCALL_ARGUMENTS) {
    static const char* const names[] = {"tensor", "src", nullptr};
    PyObject* values[2];
    if (!parse("broadcast", args, nargs, keywords, names, values, 1)) return nullptr;
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "broadcast");
    if (!COMM_HAS(self->table, broadcast)) return raise_not_offered(site, self->table);
    TensorView view;
    int32_t src;
    comm_stream stream;
    if (read_tensor(site, values[0], &view) < 0 || read_peer(site, values[1], "src", &src) < 0 ||
        current_stream(site, &stream) < 0)
        return nullptr;
    if (!call_with_tensor(self, site, view, [&](comm_t comm) {
            return self->table->broadcast(comm, view.data, view.numel, view.dtype, src, stream);
        }))
        return nullptr;
    return new_reference(values[0]);
}

PyObject* comm_reduce(FASTCALL_ARGUMENTS) {
    static const char* const names[] = {"tensor", "dst", "op", nullptr};
    PyObject* values[3];
    if (!parse("reduce", args, nargs, keywords, names, values, 1)) return nullptr;
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "reduce");
    if (!COMM_HAS(self->table, reduce)) return raise_not_offered(site, self->table);
    TensorView view;
    int32_t dst;
    comm_op op;
    comm_stream stream;
    if (read_tensor(site, values[0], &view) < 0 || read_peer(site, values[1], "dst", &dst) < 0 ||
        read_op(site, values[2], values[0], view.dtype, &op) < 0 ||
        current_stream(site, &stream) < 0)
        return nullptr;
    void* to = dst == site.rank ? view.data : nullptr;
    if (!call_with_tensor(self, site, view, [&](comm_t comm) {
            return self->table->reduce(comm, view.data, to, view.numel, view.dtype, op, dst,
                                       stream);
        }))
        return nullptr;
    return new_reference(values[0]);
}

PyObject* comm_allgather(FASTCALL_ARGUMENTS) {
    static const char* const names[] = {"tensor", "out", nullptr};
    PyObject* values[2];
    if (!parse("allgather", args, nargs, keywords, names, values, 2)) return nullptr;
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "allgather");
    if (!COMM_HAS(self->table, allgather)) return raise_not_offered(site, self->table);
    TensorView from, to;
    comm_stream stream;
    if (read_tensor(site, values[0], &from) < 0 || read_tensor(site, values[1], &to) < 0 ||
        check_shape(site, to, from, site.nranks, 0) < 0 || current_stream(site, &stream) < 0)
        return nullptr;
    bool in_place = from.data == to.data + site.rank * from.nbytes();
    if (!in_place && check_overlap(site, from, to, false) < 0) return nullptr;
    if (!call_with_tensor(self, site, from, [&](comm_t comm) {
            return self->table->allgather(comm, from.data, to.data, from.numel, from.dtype, stream);
        }))
        return nullptr;
    return new_reference(values[1]);
}

PyObject* comm_reduce_scatter(FASTCALL_ARGUMENTS) {
    static const char* const names[] = {"tensor", "op", "out", nullptr};
    PyObject* values[3];
    if (!parse("reduce_scatter", args, nargs, keywords, names, values, 3)) return nullptr;
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "reduce_scatter");
    if (!COMM_HAS(self->table, reduce_scatter)) return raise_not_offered(site, self->table);
    TensorView from, to;
    comm_op op;
    comm_stream stream;
    if (read_tensor(site, values[0], &from) < 0 ||
        read_op(site, values[1], values[0], from.dtype, &op) < 0 || check_rows(site, from) < 0 ||
        read_tensor(site, values[2], &to) < 0 || check_shape(site, to, from, 0, 1) < 0 ||
        current_stream(site, &stream) < 0)
        return nullptr;
    bool in_place = to.data == from.data + site.rank * to.nbytes();
    if (!in_place && check_overlap(site, from, to, false) < 0) return nullptr;
    if (!call_with_tensor(self, site, from, [&](comm_t comm) {
            return self->table->reduce_scatter(comm, from.data, to.data, to.numel, to.dtype, op,
                                               stream);
        }))
        return nullptr;
    return new_reference(values[2]);
}

PyObject* comm_alltoall(FASTCALL_ARGUMENTS) {
    static const char* const names[] = {"tensor", "out", nullptr};
    PyObject* values[2];
    if (!parse("alltoall", args, nargs, keywords, names, values, 2)) return nullptr;
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "alltoall");
    if (!COMM_HAS(self->table, alltoall)) return raise_not_offered(site, self->table);
    TensorView from, to;
    comm_stream stream;
    if (read_tensor(site, values[0], &from) < 0 || check_rows(site, from) < 0 ||
        read_tensor(site, values[1], &to) < 0 || check_shape(site, to, from, 0, 0) < 0 ||
        check_overlap(site, from, to, false) < 0 || current_stream(site, &stream) < 0)
        return nullptr;
    uint64_t count = from.numel / site.nranks;
    if (!call_with_tensor(self, site, from, [&](comm_t comm) {
            return self->table->alltoall(comm, from.data, to.data, count, from.dtype, stream);
        }))
        return nullptr;
    return new_reference(values[1]);
}

namespace {

// One rank's part, and the rows of all ranks, which the root alone has; None on the others.
bool read_part_and_rows(const CallSite& site, PyObject* const* values, const char* root_name,
                        TensorView* part, TensorView* rows, int32_t* root) {
    if (read_tensor(site, values[0], part) < 0 || read_peer(site, values[2], root_name, root) < 0)
        return false;
    rows->data = nullptr;
    if (*root != site.rank) return true;
    if (read_tensor(site, values[1], rows) < 0 ||
        check_shape(site, *rows, *part, site.nranks, 0) < 0)
        return false;
    bool in_place = part->data == rows->data + site.rank * part->nbytes();
    return in_place || check_overlap(site, *part, *rows, false) == 0;
}

}  // namespace

PyObject* comm_gather(FASTCALL_ARGUMENTS) {
    static const char* const names[] = {"tensor", "out", "dst", nullptr};
    PyObject* values[3];
    if (!parse("gather", args, nargs, keywords, names, values, 3)) return nullptr;
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "gather");
    if (!COMM_HAS(self->table, gather)) return raise_not_offered(site, self->table);
    TensorView from, to;
    int32_t dst;
    comm_stream stream;
    if (!read_part_and_rows(site, values, "dst", &from, &to, &dst) ||
        current_stream(site, &stream) < 0)
        return nullptr;
    if (!call_with_tensor(self, site, from, [&](comm_t comm) {
            return self->table->gather(comm, from.data, to.data, from.numel, from.dtype, dst,
                                       stream);
        }))
        return nullptr;
    Py_RETURN_NONE;
}

PyObject* comm_scatter(FASTCALL_ARGUMENTS) {
    static const char* const names[] = {"out", "rows", "src", nullptr};
    PyObject* values[3];
    if (!parse("scatter", args, nargs, keywords, names, values, 3)) return nullptr;
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "scatter");
    if (!COMM_HAS(self->table, scatter)) return raise_not_offered(site, self->table);
    TensorView from, to;
    int32_t src;
    comm_stream stream;
    if (!read_part_and_rows(site, values, "src", &to, &from, &src) ||
        current_stream(site, &stream) < 0)
        return nullptr;
    if (!call_with_tensor(self, site, to, [&](comm_t comm) {
            return self->table->scatter(comm, from.data, to.data, to.numel, to.dtype, src, stream);
        }))
        return nullptr;
    Py_RETURN_NONE;
}

namespace {

// How many elements each rank has, which together are `whole`, and this rank's are `part`.
bool read_counts(const CallSite& site, PyObject* object, const TensorView& whole,
                 const TensorView& part, std::vector<uint64_t>* counts) {
    uint64_t total = 0;
    for (Py_ssize_t i = 0; i < PyList_Size(object); ++i) {
        counts->push_back(PyLong_AsUnsignedLongLong(PyList_GetItem(object, i)));
        total += counts->back();
    }
    if (PyErr_Occurred()) return false;
    if (counts->size() == static_cast<size_t>(site.nranks) && whole.numel == total &&
        part.numel == (*counts)[site.rank] && whole.dtype == part.dtype)
        return check_overlap(site, part, whole, false) == 0;
    PyErr_Format(PyExc_ValueError, "%s, %s: the counts do not fit the tensors", site.me, site.call);
    return false;
}

}  // namespace

PyObject* comm_allgatherv(FASTCALL_ARGUMENTS) {
    static const char* const names[] = {"tensor", "out", "counts", nullptr};
    PyObject* values[3];
    if (!parse("allgatherv", args, nargs, keywords, names, values, 3)) return nullptr;
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "allgather");
    if (!COMM_HAS(self->table, allgatherv)) return raise_not_offered(site, self->table);
    TensorView from, to;
    comm_stream stream;
    std::vector<uint64_t> counts;
    if (read_tensor(site, values[0], &from) < 0 || read_tensor(site, values[1], &to) < 0 ||
        !read_counts(site, values[2], to, from, &counts) || current_stream(site, &stream) < 0)
        return nullptr;
    if (!call_with_tensor(self, site, to, [&](comm_t comm) {
            return self->table->allgatherv(comm, from.data, to.data, counts.data(), from.dtype,
                                           stream);
        }))
        return nullptr;
    Py_RETURN_NONE;
}

PyObject* comm_reduce_scatterv(FASTCALL_ARGUMENTS) {
    static const char* const names[] = {"tensor", "op", "out", "counts", nullptr};
    PyObject* values[4];
    if (!parse("reduce_scatterv", args, nargs, keywords, names, values, 4)) return nullptr;
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "reduce_scatter");
    if (!COMM_HAS(self->table, reduce_scatterv)) return raise_not_offered(site, self->table);
    TensorView from, to;
    comm_op op;
    comm_stream stream;
    std::vector<uint64_t> counts;
    if (read_tensor(site, values[0], &from) < 0 ||
        read_op(site, values[1], values[0], from.dtype, &op) < 0 ||
        read_tensor(site, values[2], &to) < 0 || !read_counts(site, values[3], from, to, &counts) ||
        current_stream(site, &stream) < 0)
        return nullptr;
    if (!call_with_tensor(self, site, from, [&](comm_t comm) {
            return self->table->reduce_scatterv(comm, from.data, to.data, counts.data(), to.dtype,
                                                op, stream);
        }))
        return nullptr;
    Py_RETURN_NONE;
}

namespace {

bool read_p2p_arguments(Comm* self, const CallSite& site, PyObject** values, const char* name,
                        TensorView* view, int32_t* peer, comm_stream* stream) {
    if (read_tensor(site, values[0], view) < 0 || read_peer(site, values[1], name, peer) < 0 ||
        current_stream(site, stream) < 0)
        return false;
    if (*peer == site.rank) {
        PyErr_Format(PyExc_ValueError,
                     "%s, %s: the peer is this rank itself. Copy the tensor instead", site.me,
                     site.call);
        return false;
    }
    return self->group_depth == 0 || PyList_Append(self->group_tensors, values[0]) == 0;
}

}  // namespace

PyObject* comm_send(FASTCALL_ARGUMENTS) {
    static const char* const names[] = {"tensor", "dst", nullptr};
    PyObject* values[2];
    if (!parse("send", args, nargs, keywords, names, values, 2)) return nullptr;
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "send");
    if (!COMM_HAS(self->table, send)) return raise_not_offered(site, self->table);
    TensorView view;
    int32_t dst;
    comm_stream stream;
    if (!read_p2p_arguments(self, site, values, "dst", &view, &dst, &stream)) return nullptr;
    if (!call_with_tensor(self, site, view, [&](comm_t comm) {
            return self->table->send(comm, view.data, view.numel, view.dtype, dst, stream);
        }))
        return nullptr;
    return new_reference(Py_None);
}

PyObject* comm_recv(FASTCALL_ARGUMENTS) {
    static const char* const names[] = {"tensor", "src", nullptr};
    PyObject* values[2];
    if (!parse("recv", args, nargs, keywords, names, values, 2)) return nullptr;
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "recv");
    if (!COMM_HAS(self->table, recv)) return raise_not_offered(site, self->table);
    TensorView view;
    int32_t src;
    comm_stream stream;
    if (!read_p2p_arguments(self, site, values, "src", &view, &src, &stream)) return nullptr;
    if (!call_with_tensor(self, site, view, [&](comm_t comm) {
            return self->table->recv(comm, view.data, view.numel, view.dtype, src, stream);
        }))
        return nullptr;
    return new_reference(values[0]);
}

PyObject* comm_barrier(PyObject* object, PyObject*) {
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "barrier");
    if (!COMM_HAS(self->table, barrier)) return raise_not_offered(site, self->table);
    comm_stream stream;
    if (current_stream(site, &stream) < 0) return nullptr;
    if (!call_library(self, site, [&](comm_t comm) { return self->table->barrier(comm, stream); }))
        return nullptr;
    return new_reference(Py_None);
}
