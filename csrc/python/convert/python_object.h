// What every extension type here needs, in the limited API.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

// A new reference.
inline PyObject* returned(PyObject* object) {
    Py_INCREF(object);
    return object;
}

// What a tp_dealloc ends with: the memory, and the type that kept it.
inline void free_object(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

// Functions of any calling convention, as a PyMethodDef wants them.
template <class Function>
PyCFunction as_method(Function* function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)(void)>(function));
}
