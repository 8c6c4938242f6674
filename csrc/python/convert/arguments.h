// The arguments of a method called by METH_FASTCALL | METH_KEYWORDS.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define FASTCALL_ARGUMENTS \
    PyObject *object, PyObject *const *args, Py_ssize_t nargs, PyObject *keywords

// Fills `values` from positional and keyword arguments; those that are left out stay NULL, as does
// out=None. `names` ends with NULL, and the first `required` are required. False with a Python
// error set.
bool parse(const char* call, PyObject* const* args, Py_ssize_t nargs, PyObject* keywords,
           const char* const* names, PyObject** values, int required);
