// A communicator as Python holds it, and how its library is called.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <mutex>

#include "python/convert/arguments.h"
#include "python/convert/result.h"
#include "python/convert/tensor.h"
#include "python/call_mutex.h"
#include "abi/communicator.h"
#include "python/convert/python_object.h"

struct Comm {
    PyObject_HEAD PyObject* plugin;
    const comm_plugin* table;
    comm_t handle;  // NULL once closed; read and written in one's turn
    Turn* turn;
    std::mutex* ending;  // abort() may come in the middle of a call, but not of close()
    PyObject* kept;      // tensors of sends and receives of an open group
    int group_depth;
    CallSite site;
    KnownPlain known_plain;
};

inline Comm* comm_of(PyObject* object) { return reinterpret_cast<Comm*>(object); }

inline CallSite site_of(const Comm* self, const char* call) {
    CallSite site = self->site;
    site.call = call;
    return site;
}

// Both always NULL, with a Python error set.
PyObject* raise_closed(const CallSite& site);
PyObject* raise_not_offered(const CallSite& site, const comm_plugin* table);

// Calls the library without the interpreter's lock, so that any call may wait for other ranks.
template <class Body>
bool call_library(Comm* self, const CallSite& site, Body body) {
    self->turn->take();
    bool open = self->handle != nullptr;
    comm_result code = COMM_OK;
    if (open) {
        PyThreadState* state = PyEval_SaveThread();
        code = body(self->handle);
        PyEval_RestoreThread(state);
    }
    if (code != COMM_OK) raise_result(self->table, code, self->table->last_error(self->handle));
    self->turn->give();
    if (!open) raise_closed(site);
    return open && code == COMM_OK;
}

// A call that moves this tensor. Most libraries are not bothered with what moves nothing.
template <class Body>
bool move(Comm* self, const CallSite& site, const TensorView& view, Body body) {
    bool wanted = view.numel != 0 || (self->table->caps & COMM_CAP_EMPTY) != 0;
    return call_library(self, site, [&](comm_t comm) {
        if (!wanted) return static_cast<comm_result>(COMM_OK);
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
PyObject* comm_send(FASTCALL_ARGUMENTS);
PyObject* comm_recv(FASTCALL_ARGUMENTS);
PyObject* comm_barrier(PyObject* object, PyObject*);
