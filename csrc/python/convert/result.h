// From the result of a library to a Python exception.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "abi/communicator.h"

struct ExceptionTypes {
    PyObject *base, *timeout, *peer_lost, *unsupported;
};
extern ExceptionTypes errors;

// False with a Python error set.
bool find_exception_types();
// Always NULL. `text` is the library's last_error; may be NULL.
PyObject* raise_result(const comm_plugin* table, comm_result code, const char* text);
