// The Coordinator, lent to a library for the time of its init.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "abi/communicator.h"

struct Lent {
    PyObject* bootstrap;
    int nranks;
    bool failed;  // a Python error is set aside until init returns
    PyObject *type, *value, *traceback;
};

// The callbacks for a library; ctx is a Lent. Called without the interpreter's lock.
comm_result lent_allgather(void* ctx, const void* send, void* recv, size_t bytes_per_rank);
comm_result lent_barrier(void* ctx);
