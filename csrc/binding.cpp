// communicator._native: opens libraries that speak communicator.h and calls them with torch
// tensors.
//
// Every method does the same: read the arguments, release the interpreter, call, report. Python
// decides everything else. Limited API only, and no header of torch or CUDA.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <initializer_list>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "binding_tensor.h"
#include "communicator.h"

namespace {

PyTypeObject* plugin_type;
PyTypeObject* comm_type;

struct Errors {
    PyObject *base, *timeout, *peer_lost, *unsupported;
} errors;

// ---- results to exceptions ----

PyObject* exception_for(comm_result code) {
    switch (code) {
        case COMM_TIMEOUT:
            return errors.timeout;
        case COMM_REMOTE_ERROR:
            return errors.peer_lost;
        case COMM_UNSUPPORTED:
            return errors.unsupported;
        case COMM_INVALID_ARGUMENT:
            return PyExc_ValueError;
        default:
            return errors.base;
    }
}

const char* name_of_result(comm_result code) {
    static const char* const names[] = {"ok",
                                        "device error",
                                        "system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "a peer is gone",
                                        "in progress",
                                        "timeout"};
    if (code >= COMM_OK && code <= COMM_TIMEOUT) return names[code];
    return code == COMM_UNSUPPORTED ? "unsupported"
                                    : "a result that communicator.h does not define";
}

PyObject* raise_result(const comm_plugin* table, comm_result code, const char* text) {
    bool has_text = text != nullptr && text[0] != '\0';
    PyErr_Format(exception_for(code), "%s%s%s, result %d: %s]", has_text ? text : "",
                 has_text ? " [" : "[", table->name, static_cast<int>(code), name_of_result(code));
    return nullptr;
}

// ---- arguments ----

// Fills `values` from positional and keyword arguments; what is not given stays NULL.
bool parse(const char* call, PyObject* const* args, Py_ssize_t nargs, PyObject* keywords,
           const char* const* names, PyObject** values, int required) {
    int known = 0;
    while (names[known] != nullptr) values[known++] = nullptr;
    if (nargs > known) {
        PyErr_Format(PyExc_TypeError, "%s() takes %d arguments but %zd were given", call, known,
                     nargs);
        return false;
    }
    for (Py_ssize_t i = 0; i < nargs; ++i) values[i] = args[i];
    Py_ssize_t num_keywords = keywords == nullptr ? 0 : PyTuple_Size(keywords);
    for (Py_ssize_t i = 0; i < num_keywords; ++i) {
        PyObject* keyword = PyTuple_GetItem(keywords, i);
        int index = 0;
        while (index < known && PyUnicode_CompareWithASCIIString(keyword, names[index]) != 0)
            ++index;
        if (index == known || values[index] != nullptr) {
            PyErr_Format(PyExc_TypeError, "%s() got an unexpected or repeated argument '%U'", call,
                         keyword);
            return false;
        }
        values[index] = args[nargs + i];
    }
    for (int i = 0; i < required; ++i) {
        if (values[i] != nullptr) continue;
        PyErr_Format(PyExc_TypeError, "%s() needs '%s'", call, names[i]);
        return false;
    }
    for (int i = 0; i < known; ++i)
        if (values[i] == Py_None) values[i] = nullptr;
    return true;
}

#define FASTCALL_ARGUMENTS \
    PyObject *object, PyObject *const *args, Py_ssize_t nargs, PyObject *keywords

// ---- Comm ----

struct Comm {
    PyObject_HEAD PyObject* plugin;
    const comm_plugin* table;
    comm_t handle;       // NULL once closed; read and written under `turn`
    std::mutex* turn;    // one call at a time
    std::mutex* ending;  // abort() may come in the middle of a call, but not of close()
    PyObject* kept;      // tensors of sends and receives of an open group
    int group_depth;
    CallSite site;
};

Comm* comm_of(PyObject* object) { return reinterpret_cast<Comm*>(object); }

CallSite site_of(const Comm* self, const char* call) {
    CallSite site = self->site;
    site.call = call;
    return site;
}

PyObject* raise_closed(const CallSite& site) {
    PyErr_Format(errors.base,
                 "rank %d: %s on a closed Communicator. Make a new one, or close later", site.rank,
                 site.call);
    return nullptr;
}

PyObject* raise_not_offered(const CallSite& site, const comm_plugin* table) {
    PyErr_Format(errors.unsupported, "rank %d: the backend %s does not offer %s", site.rank,
                 table->name, site.call);
    return nullptr;
}

// Calls the library without the interpreter's lock, so that any call may wait for other ranks.
// Libraries are not bothered with calls that move nothing.
template <class Body>
bool call_library(Comm* self, const CallSite& site, Body body, bool moves_something = true) {
    comm_result code = COMM_OK;
    bool open;
    std::string text;
    PyThreadState* state = PyEval_SaveThread();
    {
        std::lock_guard<std::mutex> turn(*self->turn);
        open = self->handle != nullptr;
        if (open && moves_something) code = body(self->handle);
        if (code != COMM_OK) {
            const char* error = self->table->last_error(self->handle);
            text = error != nullptr ? error : "";
        }
    }
    PyEval_RestoreThread(state);
    if (!open) return raise_closed(site) != nullptr;
    if (code != COMM_OK) return raise_result(self->table, code, text.c_str()) != nullptr;
    return true;
}

PyObject* returned(PyObject* tensor) {
    Py_INCREF(tensor);
    return tensor;
}

PyObject* comm_allreduce(FASTCALL_ARGUMENTS) {
    static const char* const names[] = {"tensor", "op", "out", nullptr};
    PyObject* values[3];
    if (!parse("allreduce", args, nargs, keywords, names, values, 1)) return nullptr;
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "allreduce");
    TensorView from, to;
    comm_op op;
    comm_stream stream;
    if (read_tensor(site, values[0], &from) < 0 || read_op(site, values[1], from.dtype, &op) < 0)
        return nullptr;
    to = from;
    if (values[2] != nullptr &&
        (read_tensor(site, values[2], &to) < 0 || check_shape(site, to, from, 0, 0) < 0 ||
         check_overlap(site, from, to, true) < 0))
        return nullptr;
    if (current_stream(site, &stream) < 0) return nullptr;
    if (!call_library(
            self, site,
            [&](comm_t comm) {
                return self->table->allreduce(comm, from.data, to.data, from.numel, from.dtype, op,
                                              stream);
            },
            from.numel != 0))
        return nullptr;
    return returned(values[2] != nullptr ? values[2] : values[0]);
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
    if (!call_library(
            self, site,
            [&](comm_t comm) {
                return self->table->broadcast(comm, view.data, view.numel, view.dtype, src, stream);
            },
            view.numel != 0))
        return nullptr;
    return returned(values[0]);
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
        read_op(site, values[2], view.dtype, &op) < 0 || current_stream(site, &stream) < 0)
        return nullptr;
    void* to = dst == site.rank ? view.data : nullptr;
    if (!call_library(
            self, site,
            [&](comm_t comm) {
                return self->table->reduce(comm, view.data, to, view.numel, view.dtype, op, dst,
                                           stream);
            },
            view.numel != 0))
        return nullptr;
    return returned(values[0]);
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
    if (!call_library(
            self, site,
            [&](comm_t comm) {
                return self->table->allgather(comm, from.data, to.data, from.numel, from.dtype,
                                              stream);
            },
            from.numel != 0))
        return nullptr;
    return returned(values[1]);
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
    if (read_tensor(site, values[0], &from) < 0 || read_op(site, values[1], from.dtype, &op) < 0 ||
        check_rows(site, from) < 0 || read_tensor(site, values[2], &to) < 0 ||
        check_shape(site, to, from, 0, 1) < 0 || current_stream(site, &stream) < 0)
        return nullptr;
    bool in_place = to.data == from.data + site.rank * to.nbytes();
    if (!in_place && check_overlap(site, from, to, false) < 0) return nullptr;
    if (!call_library(
            self, site,
            [&](comm_t comm) {
                return self->table->reduce_scatter(comm, from.data, to.data, to.numel, to.dtype, op,
                                                   stream);
            },
            to.numel != 0))
        return nullptr;
    return returned(values[2]);
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
    if (!call_library(
            self, site,
            [&](comm_t comm) {
                return self->table->alltoall(comm, from.data, to.data, count, from.dtype, stream);
            },
            from.numel != 0))
        return nullptr;
    return returned(values[1]);
}

bool read_point(Comm* self, const CallSite& site, PyObject** values, const char* name,
                TensorView* view, int32_t* peer, comm_stream* stream) {
    if (read_tensor(site, values[0], view) < 0 || read_peer(site, values[1], name, peer) < 0 ||
        current_stream(site, stream) < 0)
        return false;
    if (*peer == site.rank) {
        PyErr_Format(PyExc_ValueError, "rank %d, %s: the peer is this rank itself. Copy the tensor",
                     site.rank, site.call);
        return false;
    }
    return self->group_depth == 0 || PyList_Append(self->kept, values[0]) == 0;
}

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
    if (!read_point(self, site, values, "dst", &view, &dst, &stream)) return nullptr;
    if (!call_library(
            self, site,
            [&](comm_t comm) {
                return self->table->send(comm, view.data, view.numel, view.dtype, dst, stream);
            },
            view.numel != 0))
        return nullptr;
    return returned(Py_None);
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
    if (!read_point(self, site, values, "src", &view, &src, &stream)) return nullptr;
    if (!call_library(
            self, site,
            [&](comm_t comm) {
                return self->table->recv(comm, view.data, view.numel, view.dtype, src, stream);
            },
            view.numel != 0))
        return nullptr;
    return returned(values[0]);
}

PyObject* comm_barrier(PyObject* object, PyObject*) {
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "barrier");
    if (!COMM_HAS(self->table, barrier)) return raise_not_offered(site, self->table);
    comm_stream stream;
    if (current_stream(site, &stream) < 0) return nullptr;
    if (!call_library(self, site, [&](comm_t comm) { return self->table->barrier(comm, stream); }))
        return nullptr;
    return returned(Py_None);
}

PyObject* comm_group_start(PyObject* object, PyObject*) {
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "group_start");
    if (!COMM_HAS(self->table, group_start)) return raise_not_offered(site, self->table);
    if (!call_library(self, site, [&](comm_t comm) { return self->table->group_start(comm); }))
        return nullptr;
    ++self->group_depth;
    return returned(Py_None);
}

PyObject* comm_group_end(PyObject* object, PyObject*) {
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "group_end");
    if (!COMM_HAS(self->table, group_end)) return raise_not_offered(site, self->table);
    bool done = call_library(self, site, [&](comm_t comm) { return self->table->group_end(comm); });
    if (self->group_depth > 0) --self->group_depth;
    if (self->group_depth == 0 &&
        PyList_SetSlice(self->kept, 0, PyList_Size(self->kept), nullptr) < 0)
        return nullptr;
    return done ? returned(Py_None) : nullptr;
}

PyObject* comm_abort(PyObject* object, PyObject*) {
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "abort");
    if (!COMM_HAS(self->table, abort)) return raise_not_offered(site, self->table);
    comm_result code = COMM_OK;
    PyThreadState* state = PyEval_SaveThread();
    {
        std::lock_guard<std::mutex> ending(*self->ending);
        if (self->handle != nullptr) code = self->table->abort(self->handle);
    }
    PyEval_RestoreThread(state);
    return code == COMM_OK ? returned(Py_None) : raise_result(self->table, code, nullptr);
}

comm_result destroy(Comm* self) {
    std::lock_guard<std::mutex> turn(*self->turn);
    std::lock_guard<std::mutex> ending(*self->ending);
    comm_t handle = self->handle;
    self->handle = nullptr;
    return handle == nullptr ? COMM_OK : self->table->destroy(handle);
}

PyObject* comm_close(PyObject* object, PyObject*) {
    Comm* self = comm_of(object);
    PyThreadState* state = PyEval_SaveThread();
    comm_result code = destroy(self);
    PyEval_RestoreThread(state);
    return code == COMM_OK ? returned(Py_None) : raise_result(self->table, code, nullptr);
}

PyObject* comm_mem_alloc(PyObject* object, PyObject* argument) {
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "mem_alloc");
    if (!COMM_HAS(self->table, mem_alloc)) return raise_not_offered(site, self->table);
    size_t nbytes = PyLong_AsSize_t(argument);
    if (PyErr_Occurred()) return nullptr;
    void* pointer = nullptr;
    if (!call_library(self, site,
                      [&](comm_t comm) { return self->table->mem_alloc(comm, nbytes, &pointer); }))
        return nullptr;
    return PyLong_FromVoidPtr(pointer);
}

PyObject* comm_mem_free(PyObject* object, PyObject* argument) {
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "mem_free");
    if (!COMM_HAS(self->table, mem_free)) return raise_not_offered(site, self->table);
    void* pointer = PyLong_AsVoidPtr(argument);
    if (PyErr_Occurred()) return nullptr;
    if (!call_library(self, site,
                      [&](comm_t comm) { return self->table->mem_free(comm, pointer); }))
        return nullptr;
    return returned(Py_None);
}

// One element of a dtype, and the reduction that multiplies by it before it sums.
PyObject* comm_scaled_sum(PyObject* object, PyObject* argument) {
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "scaled_sum");
    if (!COMM_HAS(self->table, premul_sum_create)) return raise_not_offered(site, self->table);
    CallSite on_cpu = site;
    on_cpu.device_type = COMM_CPU;
    TensorView scale;
    if (read_tensor(on_cpu, argument, &scale) < 0) return nullptr;
    if (scale.numel != 1) {
        PyErr_Format(PyExc_ValueError, "rank %d, scaled_sum: needs one number, not %llu", site.rank,
                     static_cast<unsigned long long>(scale.numel));
        return nullptr;
    }
    comm_op op = 0;
    if (!call_library(self, site, [&](comm_t comm) {
            return self->table->premul_sum_create(comm, scale.data, scale.dtype, &op);
        }))
        return nullptr;
    return PyLong_FromLong(op);
}

PyObject* comm_free_op(PyObject* object, PyObject* argument) {
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "free_op");
    if (!COMM_HAS(self->table, op_destroy)) return raise_not_offered(site, self->table);
    long op = PyLong_AsLong(argument);
    if (PyErr_Occurred()) return nullptr;
    if (!call_library(self, site, [&](comm_t comm) {
            return self->table->op_destroy(comm, static_cast<comm_op>(op));
        }))
        return nullptr;
    return returned(Py_None);
}

PyObject* comm_finalize(PyObject* object, PyObject*) {
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "finalize");
    if (!COMM_HAS(self->table, finalize)) return raise_not_offered(site, self->table);
    if (!call_library(self, site, [&](comm_t comm) { return self->table->finalize(comm); }))
        return nullptr;
    return returned(Py_None);
}

// From a thread that watches: while a call is being made there is nothing to say yet.
PyObject* comm_async_error(PyObject* object, PyObject*) {
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "async_error");
    if (!COMM_HAS(self->table, async_error)) return raise_not_offered(site, self->table);
    comm_result code = COMM_OK;
    std::string text;
    PyThreadState* state = PyEval_SaveThread();
    {
        std::unique_lock<std::mutex> turn(*self->turn, std::try_to_lock);
        if (turn.owns_lock() && self->handle != nullptr) {
            code = self->table->async_error(self->handle);
            if (code != COMM_OK) text = self->table->last_error(self->handle);
        }
    }
    PyEval_RestoreThread(state);
    return code == COMM_OK ? returned(Py_None) : raise_result(self->table, code, text.c_str());
}

Comm* new_comm(PyObject* plugin, const comm_init_args& args);

PyObject* comm_split(PyObject* object, PyObject* args) {
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "split");
    if (!COMM_HAS(self->table, split)) return raise_not_offered(site, self->table);
    comm_init_args child = {};
    child.device = site.device;
    int color, key;
    if (!PyArg_ParseTuple(args, "iiii", &color, &key, &child.rank, &child.nranks)) return nullptr;
    comm_t handle = nullptr;
    if (!call_library(self, site,
                      [&](comm_t comm) { return self->table->split(comm, color, key, &handle); }))
        return nullptr;
    if (handle == nullptr) return returned(Py_None);
    Comm* made = new_comm(self->plugin, child);
    if (made == nullptr)
        self->table->destroy(handle);
    else
        made->handle = handle;
    return reinterpret_cast<PyObject*>(made);
}

void comm_dealloc(PyObject* object) {
    Comm* self = comm_of(object);
    PyTypeObject* type = Py_TYPE(object);
    if (self->turn != nullptr && self->ending != nullptr) {
        PyThreadState* state = PyEval_SaveThread();
        destroy(self);
        PyEval_RestoreThread(state);
    }
    delete self->turn;
    delete self->ending;
    Py_XDECREF(self->kept);
    Py_XDECREF(self->plugin);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

PyCFunction fast(PyObject* (*function)(FASTCALL_ARGUMENTS)) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)(void)>(function));
}

constexpr int FAST = METH_FASTCALL | METH_KEYWORDS;

PyMethodDef comm_methods[] = {
    {"allreduce", fast(comm_allreduce), FAST,
     "allreduce(tensor, op='sum', out=None) -> out or tensor"},
    {"broadcast", fast(comm_broadcast), FAST, "broadcast(tensor, src=0) -> tensor"},
    {"reduce", fast(comm_reduce), FAST, "reduce(tensor, dst=0, op='sum') -> tensor"},
    {"allgather", fast(comm_allgather), FAST, "allgather(tensor, out) -> out"},
    {"reduce_scatter", fast(comm_reduce_scatter), FAST, "reduce_scatter(tensor, op, out) -> out"},
    {"alltoall", fast(comm_alltoall), FAST, "alltoall(tensor, out) -> out"},
    {"send", fast(comm_send), FAST, "send(tensor, dst)"},
    {"recv", fast(comm_recv), FAST, "recv(tensor, src) -> tensor"},
    {"barrier", comm_barrier, METH_NOARGS, "barrier()"},
    {"group_start", comm_group_start, METH_NOARGS, "group_start()"},
    {"group_end", comm_group_end, METH_NOARGS, "group_end()"},
    {"abort", comm_abort, METH_NOARGS,
     "From any thread: end pending and later calls with PeerLost."},
    {"close", comm_close, METH_NOARGS, "Free everything; harmless when repeated."},
    {"mem_alloc", comm_mem_alloc, METH_O, "mem_alloc(nbytes) -> address"},
    {"mem_free", comm_mem_free, METH_O, "mem_free(address)"},
    {"scaled_sum", comm_scaled_sum, METH_O, "scaled_sum(tensor of one number) -> op"},
    {"free_op", comm_free_op, METH_O, "free_op(op)"},
    {"split", comm_split, METH_VARARGS, "split(color, key, rank, nranks) -> Comm or None"},
    {"finalize", comm_finalize, METH_NOARGS, "The orderly end; close() comes after."},
    {"async_error", comm_async_error, METH_NOARGS,
     "From any thread: raise what an enqueued operation ended with, if it failed."},
    {nullptr, nullptr, 0, nullptr}};

// ---- the Coordinator, lent ----

struct Lent {
    PyObject* bootstrap;
    int nranks;
    bool failed;  // a Python error is set aside until init returns
    PyObject *type, *value, *traceback;
};

comm_result keep_error(Lent* lent) {
    if (!lent->failed) PyErr_Fetch(&lent->type, &lent->value, &lent->traceback);
    PyErr_Clear();
    lent->failed = true;
    return COMM_REMOTE_ERROR;
}

bool copy_answers(PyObject* answers, int nranks, char* recv, size_t bytes_per_rank) {
    if (!PyList_Check(answers) || PyList_Size(answers) != nranks) {
        PyErr_SetString(PyExc_TypeError,
                        "bootstrap.allgather must return a list, one for each rank");
        return false;
    }
    for (int rank = 0; rank < nranks; ++rank) {
        char* bytes;
        Py_ssize_t length;
        if (PyBytes_AsStringAndSize(PyList_GetItem(answers, rank), &bytes, &length) < 0)
            return false;
        if (static_cast<size_t>(length) != bytes_per_rank) {
            PyErr_Format(PyExc_ValueError,
                         "rank %d sent %zd bytes of setup where %zu were expected", rank, length,
                         bytes_per_rank);
            return false;
        }
        std::memcpy(recv + rank * bytes_per_rank, bytes, bytes_per_rank);
    }
    return true;
}

comm_result lent_allgather(void* ctx, const void* send, void* recv, size_t bytes_per_rank) {
    Lent* lent = static_cast<Lent*>(ctx);
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject* answers =
        PyObject_CallMethod(lent->bootstrap, "allgather", "y#", static_cast<const char*>(send),
                            static_cast<Py_ssize_t>(bytes_per_rank));
    bool done = answers != nullptr &&
                copy_answers(answers, lent->nranks, static_cast<char*>(recv), bytes_per_rank);
    comm_result code = done ? COMM_OK : keep_error(lent);
    Py_XDECREF(answers);
    PyGILState_Release(state);
    return code;
}

comm_result lent_barrier(void* ctx) {
    Lent* lent = static_cast<Lent*>(ctx);
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject* answer = PyObject_CallMethod(lent->bootstrap, "barrier", nullptr);
    comm_result code = answer != nullptr ? COMM_OK : keep_error(lent);
    Py_XDECREF(answer);
    PyGILState_Release(state);
    return code;
}

// ---- Plugin ----

struct Plugin {
    PyObject_HEAD const comm_plugin* table;
};

const comm_plugin* table_of(PyObject* object) { return reinterpret_cast<Plugin*>(object)->table; }

// A probe that crashes should cost a child process, not this one. Only a crash counts: what a child
// may not do (touch a device that its parent uses) must not be held against the library.
int signal_that_kills_probe(const comm_plugin* table) {
    pid_t child = fork();
    if (child == 0) {
        int32_t score = 0;
        for (int crash : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT}) signal(crash, SIG_DFL);
        alarm(10);
        table->probe(&score);
        _exit(0);
    }
    int status = 0;
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
    return child > 0 && WIFSIGNALED(status) && WTERMSIG(status) != SIGALRM ? WTERMSIG(status) : 0;
}

PyObject* plugin_try_probe(PyObject* object, PyObject*) {
    static std::mutex
        one_at_a_time;  // a child must not inherit a lock that another thread's probe holds
    int killer;
    PyThreadState* state = PyEval_SaveThread();
    {
        std::lock_guard<std::mutex> turn(one_at_a_time);
        killer = signal_that_kills_probe(table_of(object));
    }
    PyEval_RestoreThread(state);
    if (killer == 0) return returned(Py_None);
    PyErr_Format(
        errors.unsupported,
        "%s crashes when it is asked whether it can be used here: its probe() died of signal "
        "%d (%s). Report that to its vendor",
        table_of(object)->name, killer, strsignal(killer));
    return nullptr;
}

PyObject* plugin_probe(PyObject* object, PyObject*) {
    const comm_plugin* table = table_of(object);
    int32_t score = 0;
    comm_result code;
    std::string text;
    PyThreadState* state = PyEval_SaveThread();
    code = table->probe(&score);
    if (code != COMM_OK) {
        const char* error = table->last_error(nullptr);
        text = error != nullptr ? error : "";
    }
    PyEval_RestoreThread(state);
    return code == COMM_OK ? PyLong_FromLong(score) : raise_result(table, code, text.c_str());
}

PyObject* plugin_unique_id(PyObject* object, PyObject*) {
    const comm_plugin* table = table_of(object);
    std::string id(table->unique_id_bytes, '\0');
    if (id.empty()) return PyBytes_FromStringAndSize(nullptr, 0);
    comm_result code = table->get_unique_id(&id[0]);
    if (code != COMM_OK) return raise_result(table, code, table->last_error(nullptr));
    return PyBytes_FromStringAndSize(id.data(), static_cast<Py_ssize_t>(id.size()));
}

bool read_options(PyObject* options, std::vector<std::string>* texts) {
    Py_ssize_t length = options == nullptr ? 0 : PySequence_Size(options);
    for (Py_ssize_t i = 0; i < length; ++i) {
        PyObject* item = PySequence_GetItem(options, i);
        const char* text = item == nullptr ? nullptr : PyUnicode_AsUTF8AndSize(item, nullptr);
        if (text != nullptr) texts->push_back(text);
        Py_XDECREF(item);
    }
    return !PyErr_Occurred();
}

Comm* new_comm(PyObject* plugin, const comm_init_args& args) {
    Comm* self = reinterpret_cast<Comm*>(PyType_GenericAlloc(comm_type, 0));
    if (self == nullptr) return nullptr;
    self->plugin = returned(plugin);
    self->table = table_of(plugin);
    self->turn = new std::mutex;
    self->ending = new std::mutex;
    self->kept = PyList_New(0);
    self->site = CallSite{"",          args.rank,
                          args.nranks, self->table->device_type,
                          args.device, COMM_HAS(self->table, premul_sum_create)};
    return self;
}

comm_result call_init(Comm* self, const comm_init_args& args, std::string* text) {
    PyThreadState* state = PyEval_SaveThread();
    comm_result code = self->table->init(&self->handle, &args);
    if (code != COMM_OK) {
        self->handle = nullptr;
        const char* error = self->table->last_error(nullptr);
        *text = error != nullptr ? error : "";
    }
    PyEval_RestoreThread(state);
    return code;
}

PyObject* start_comm(PyObject* plugin, comm_init_args args, PyObject* bootstrap) {
    Lent lent = {bootstrap, args.nranks, false, nullptr, nullptr, nullptr};
    comm_bootstrap callbacks = {sizeof(comm_bootstrap), &lent, lent_allgather, lent_barrier};
    args.bootstrap = &callbacks;
    Comm* self = new_comm(plugin, args);
    if (self == nullptr) return nullptr;
    std::string text;
    comm_result code = call_init(self, args, &text);
    if (code == COMM_OK && !lent.failed) return reinterpret_cast<PyObject*>(self);
    Py_DECREF(reinterpret_cast<PyObject*>(self));
    if (lent.failed)
        PyErr_Restore(lent.type, lent.value, lent.traceback);
    else
        raise_result(table_of(plugin), code, text.c_str());
    return nullptr;
}

PyObject* plugin_init(PyObject* object, PyObject* args, PyObject* keywords) {
    static const char* const names[] = {"rank", "nranks",    "bootstrap", "device", "timeout_ms",
                                        "name", "unique_id", "options",   nullptr};
    comm_init_args init = {};
    init.struct_size = sizeof init;
    init.device = -1;
    init.timeout_ms = 300000;
    init.name = "";
    PyObject *bootstrap, *options = nullptr;
    const char* id = "";
    Py_ssize_t id_bytes = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "iiO|iisy#O", const_cast<char**>(names),
                                     &init.rank, &init.nranks, &bootstrap, &init.device,
                                     &init.timeout_ms, &init.name, &id, &id_bytes, &options))
        return nullptr;
    std::vector<std::string> texts;
    if (!read_options(options, &texts)) return nullptr;
    std::vector<const char*> pointers;
    for (const std::string& text : texts) pointers.push_back(text.c_str());
    pointers.push_back(nullptr);
    init.options = pointers.data();
    init.unique_id = id_bytes > 0 ? id : nullptr;
    init.unique_id_bytes = static_cast<size_t>(id_bytes);
    return start_comm(object, init, bootstrap);
}

PyObject* plugin_offers(PyObject* object, PyObject* argument) {
    const comm_plugin* table = table_of(object);
    const char* name = PyUnicode_AsUTF8AndSize(argument, nullptr);
    if (name == nullptr) return nullptr;
    std::string asked = name;
    bool offered = asked == "allreduce";
#define OFFERED(entry) offered = offered || (asked == #entry && COMM_HAS(table, entry))
    OFFERED(broadcast);
    OFFERED(reduce);
    OFFERED(allgather);
    OFFERED(reduce_scatter);
    OFFERED(alltoall);
    OFFERED(send);
    OFFERED(recv);
    OFFERED(barrier);
    OFFERED(group_start);
    OFFERED(group_end);
    OFFERED(abort);
    OFFERED(mem_alloc);
    OFFERED(mem_free);
    OFFERED(premul_sum_create);
    OFFERED(async_error);
    OFFERED(split);
    OFFERED(finalize);
#undef OFFERED
    return PyBool_FromLong(offered);
}

PyObject* plugin_name(PyObject* object, void*) {
    return PyUnicode_FromString(table_of(object)->name);
}

PyObject* plugin_version(PyObject* object, void*) {
    return PyUnicode_FromString(table_of(object)->version);
}

PyObject* plugin_device_type(PyObject* object, void*) {
    return PyLong_FromLong(table_of(object)->device_type);
}

PyObject* plugin_caps(PyObject* object, void*) {
    return PyLong_FromUnsignedLongLong(table_of(object)->caps);
}

PyObject* plugin_unique_id_bytes(PyObject* object, void*) {
    return PyLong_FromUnsignedLong(table_of(object)->unique_id_bytes);
}

void plugin_dealloc(PyObject* object) {  // the library stays loaded: its table may still be in use
    PyTypeObject* type = Py_TYPE(object);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

PyMethodDef plugin_methods[] = {
    {"probe", plugin_probe, METH_NOARGS, "probe() -> score; raises if this process cannot use it"},
    {"try_probe", plugin_try_probe, METH_NOARGS,
     "try_probe() raises if probe() would crash: it is tried in a child process first"},
    {"unique_id", plugin_unique_id, METH_NOARGS, "unique_id() -> bytes, to be given to every rank"},
    {"offers", plugin_offers, METH_O, "offers(entry) -> whether the table has this entry"},
    {"init", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)(void)>(plugin_init)),
     METH_VARARGS | METH_KEYWORDS,
     "init(rank, nranks, bootstrap, device=-1, timeout_ms=300000, name='', unique_id=b'', "
     "options=())\n"
     "-> Comm. Collective. bootstrap has allgather(bytes) -> list[bytes] and barrier()."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef plugin_attributes[] = {
    {"name", plugin_name, nullptr, nullptr, nullptr},
    {"version", plugin_version, nullptr, nullptr, nullptr},
    {"device_type", plugin_device_type, nullptr, "the number of a DLDeviceType", nullptr},
    {"caps", plugin_caps, nullptr, "bits of COMM_CAP_...", nullptr},
    {"unique_id_bytes", plugin_unique_id_bytes, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

// ---- opening a library ----

const char* missing_entry(const comm_plugin* table) {
#define NEEDED(entry) \
    if (!COMM_HAS(table, entry)) return #entry
    NEEDED(name);
    NEEDED(version);
    NEEDED(probe);
    NEEDED(init);
    NEEDED(destroy);
    NEEDED(allreduce);
    NEEDED(last_error);
#undef NEEDED
    bool no_id = table->unique_id_bytes > 0 && !COMM_HAS(table, get_unique_id);
    return no_id ? "get_unique_id" : nullptr;
}

bool check_table(const char* path, const comm_plugin* table) {
    if (table == nullptr) {
        PyErr_Format(errors.unsupported,
                     "%s refuses to be used: its comm_plugin_entry_v1 gave NULL", path);
        return false;
    }
    if (table->struct_size < offsetof(comm_plugin, name) || table->abi_major != COMM_ABI_MAJOR) {
        PyErr_Format(errors.unsupported,
                     "%s speaks version %u of communicator.h, version %u is spoken here. Build it "
                     "against this header",
                     path, table->abi_major, COMM_ABI_MAJOR);
        return false;
    }
    const char* missing = missing_entry(table);
    if (missing != nullptr) {
        PyErr_Format(
            errors.unsupported,
            "%s has no '%s', which communicator.h requires. Fill it in, or set struct_size to "
            "sizeof(comm_plugin)",
            path, missing);
        return false;
    }
    if (table->unique_id_bytes > COMM_UNIQUE_ID_MAX) {
        PyErr_Format(errors.unsupported, "%s wants a unique id of %u bytes; at most %u are carried",
                     path, table->unique_id_bytes, COMM_UNIQUE_ID_MAX);
        return false;
    }
    return true;
}

PyObject* open_library(PyObject*, PyObject* argument) {
    const char* path = PyUnicode_AsUTF8AndSize(argument, nullptr);
    if (path == nullptr) return nullptr;
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
        return PyErr_Format(errors.unsupported, "the library does not load: %s", dlerror());
    auto entry =
        reinterpret_cast<const comm_plugin* (*)(void)>(dlsym(library, "comm_plugin_entry_v1"));
    if (entry == nullptr)
        return PyErr_Format(errors.unsupported,
                            "%s exports no comm_plugin_entry_v1, so it is no library for "
                            "communicator.h (version %u)",
                            path, COMM_ABI_MAJOR);
    const comm_plugin* table = entry();
    if (!check_table(path, table)) return nullptr;
    Plugin* self = reinterpret_cast<Plugin*>(PyType_GenericAlloc(plugin_type, 0));
    if (self != nullptr) self->table = table;
    return reinterpret_cast<PyObject*>(self);
}

PyMethodDef module_methods[] = {
    {"open", open_library, METH_O, "open(path) -> Plugin. Raises Unsupported if it is none."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module_definition = {PyModuleDef_HEAD_INIT,
                                 "communicator._native",
                                 "Opens libraries that speak communicator.h.",
                                 -1,
                                 module_methods,
                                 nullptr,
                                 nullptr,
                                 nullptr,
                                 nullptr};

PyTypeObject* make_type(const char* name, int size, destructor dealloc, PyMethodDef* methods,
                        PyGetSetDef* attributes) {
    PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
                           {Py_tp_methods, methods},
                           {attributes != nullptr ? Py_tp_getset : 0, attributes},
                           {0, nullptr}};
    PyType_Spec spec = {name, size, 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                        slots};
    return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

bool find_errors() {
    PyObject* module = PyImport_ImportModule("communicator.errors");
    if (module == nullptr) return false;
    errors.base = PyObject_GetAttrString(module, "CommunicatorError");
    errors.timeout = PyObject_GetAttrString(module, "CommunicatorTimeout");
    errors.peer_lost = PyObject_GetAttrString(module, "PeerLost");
    errors.unsupported = PyObject_GetAttrString(module, "Unsupported");
    Py_DECREF(module);
    return !PyErr_Occurred();
}

}  // namespace

PyMODINIT_FUNC PyInit__native(void) {
    if (!find_errors() || find_torch() < 0) return nullptr;
    plugin_type = make_type("communicator._native.Plugin", sizeof(Plugin), plugin_dealloc,
                            plugin_methods, plugin_attributes);
    comm_type =
        make_type("communicator._native.Comm", sizeof(Comm), comm_dealloc, comm_methods, nullptr);
    if (plugin_type == nullptr || comm_type == nullptr) return nullptr;
    return PyModule_Create(&module_definition);
}
