// The Coordinator as the comm_bootstrap of a library: it may be called while init runs.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "abi/communicator.h"

struct BootstrapContext {
    PyObject* coordinator;
    int nranks;
    bool failed;  // a Python error is kept until init returns
    PyObject *type, *value, *traceback;
};

// The callbacks; ctx is a BootstrapContext. Called without the GIL, from the thread of init.
comm_result bootstrap_allgather(void* ctx, const void* send, void* recv, size_t bytes_per_rank);
comm_result bootstrap_barrier(void* ctx);
