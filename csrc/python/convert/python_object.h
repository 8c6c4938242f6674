// Helpers of every extension type, in the limited API.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

// A new reference.
inline PyObject* new_reference(PyObject* object) {
    Py_INCREF(object);
    return object;
}

// Ends a tp_dealloc: frees the memory, and releases the type.
inline void free_object(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

// A function of any calling convention, for a PyMethodDef.
template <class Function>
PyCFunction as_method(Function* function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)(void)>(function));
}
