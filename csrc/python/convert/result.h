// From what a library answers to what Python raises.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "abi/communicator.h"

struct Errors {
    PyObject *base, *timeout, *peer_lost, *unsupported;
};
extern Errors errors;

// False with a Python error set.
bool find_errors();
// Always NULL. `text` is what the library says about it; may be NULL.
PyObject* raise_result(const comm_plugin* table, comm_result code, const char* text);
