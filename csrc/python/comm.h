// A communicator as a Python object, and how its library is called.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>

#include "abi/communicator.h"
#include "python/call_mutex.h"
#include "python/convert/arguments.h"
#include "python/convert/python_object.h"
#include "python/convert/result.h"
#include "python/convert/tensor.h"
#include "torch_interop/borrowed_comm.h"

struct Comm {
    PyObject_HEAD PyObject* plugin;
    const comm_plugin* table;
    comm_t handle;  // NULL once closed; read and written under call_mutex
    CallMutex* call_mutex;
    std::mutex* destroy_mutex;  // abort() may come in the middle of a call, but not of destroy()
    std::shared_mutex* stream_mutex;  // several threads use streams at once, but not in destroy()
    PyObject* bootstrap;              // a Coordinator has more to say for some errors; or NULL
    PyObject* rank_name;              // whose text is site.me
    PyObject* group_tensors;          // kept alive from group_start to group_end
    int64_t* allreduce_note;          // 1 during allreduce, for who looks for this rank; or NULL
    int group_depth;
    CallSite site;
    PlainTensorCache plain_tensors;
    BorrowedComm borrowed;
};

inline Comm* comm_of(PyObject* object) { return reinterpret_cast<Comm*>(object); }

inline CallSite site_of(const Comm* self, const char* call) {
    CallSite site = self->site;
    site.call = call;
    return site;
}

// Both always NULL, with a Python error set.
PyObject* raise_closed(const CallSite& site);
void raise_call_error(const Comm* self, comm_result code, std::string error);
PyObject* raise_not_offered(const CallSite& site, const comm_plugin* table);

// As call_library, where call_mutex is locked already; unlocks it.
template <class Body>
bool call_locked(Comm* self, const CallSite& site, Body body) {
    bool is_open = self->handle != nullptr;
    comm_result code = COMM_OK;
    if (is_open) {
        PyThreadState* state = PyEval_SaveThread();
        code = body(self->handle);
        PyEval_RestoreThread(state);
    }
    const char* text = code != COMM_OK ? self->table->last_error(self->handle) : nullptr;
    std::string error = text != nullptr ? text : "";
    self->call_mutex
        ->unlock();  // first: raising may collect garbage, and that may call the library
    if (code != COMM_OK) raise_call_error(self, code, std::move(error));
    if (!is_open) raise_closed(site);
    return is_open && code == COMM_OK;
}

// Calls the library without the GIL, so that any call may wait for other ranks.
template <class Body>
bool call_library(Comm* self, const CallSite& site, Body body) {
    self->call_mutex->lock();
    return call_locked(self, site, body);
}

// A call that moves this tensor. Calls of 0 elements go only to libraries with COMM_CAP_EMPTY.
template <class Body>
bool call_with_tensor(Comm* self, const CallSite& site, const TensorView& view, Body body) {
    bool is_needed = view.numel != 0 || (self->table->caps & COMM_CAP_EMPTY) != 0;
    return call_library(self, site, [&](comm_t comm) {
        if (!is_needed) return static_cast<comm_result>(COMM_OK);
        if (COMM_HAS(self->table, tell_shape)) self->table->tell_shape(comm, view.ndim, view.shape);
        return body(comm);
    });
}

// python/comm.cpp
bool make_comm_type();
// Without a handle yet; NULL with a Python error set.
Comm* new_comm(PyObject* plugin, const comm_plugin* table, const comm_init_args& args);

// The methods that move tensors; python/calls.cpp.
PyObject* comm_allreduce(FASTCALL_ARGUMENTS);
PyObject* comm_broadcast(FASTCALL_ARGUMENTS);
PyObject* comm_reduce(FASTCALL_ARGUMENTS);
PyObject* comm_allgather(FASTCALL_ARGUMENTS);
PyObject* comm_reduce_scatter(FASTCALL_ARGUMENTS);
PyObject* comm_alltoall(FASTCALL_ARGUMENTS);
PyObject* comm_gather(FASTCALL_ARGUMENTS);
PyObject* comm_scatter(FASTCALL_ARGUMENTS);
PyObject* comm_allgatherv(FASTCALL_ARGUMENTS);
PyObject* comm_reduce_scatterv(FASTCALL_ARGUMENTS);
PyObject* comm_send(FASTCALL_ARGUMENTS);
PyObject* comm_recv(FASTCALL_ARGUMENTS);
PyObject* comm_barrier(PyObject* object, PyObject*);

// Of its streams; python/streams.cpp.
PyObject* comm_stream_write(PyObject* object, PyObject* args);
PyObject* comm_stream_read(PyObject* object, PyObject* args);
PyObject* comm_stream_wait(PyObject* object, PyObject* args);
PyObject* comm_stream_sleep(PyObject* object, PyObject* timeout_ms);
PyObject* comm_stream_notify(PyObject* object, PyObject* what);
PyObject* comm_stream_check(PyObject* object, PyObject* peer);
