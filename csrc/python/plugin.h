// An opened library as a Python object.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "abi/communicator.h"

struct Plugin {
    PyObject_HEAD const comm_plugin* table;
};

inline const comm_plugin* table_of(PyObject* object) {
    return reinterpret_cast<Plugin*>(object)->table;
}

// python/plugin.cpp
bool make_plugin_type();
PyObject* new_plugin(const comm_plugin* table);

// python/probe.cpp
PyObject* plugin_try_probe(PyObject* object, PyObject*);
PyObject* plugin_probe(PyObject* object, PyObject*);
