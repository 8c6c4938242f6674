#include "python/convert/arguments.h"

#include <cstring>

bool parse(const char* call, PyObject* const* args, Py_ssize_t nargs, PyObject* keywords,
           const char* const* names, PyObject** values, int required) {
    int num_names = 0;
    while (names[num_names] != nullptr) values[num_names++] = nullptr;
    if (nargs > num_names) {
        PyErr_Format(PyExc_TypeError, "%s() takes %d arguments but %zd were given", call, num_names,
                     nargs);
        return false;
    }
    for (Py_ssize_t i = 0; i < nargs; ++i) values[i] = args[i];
    Py_ssize_t num_keywords = keywords == nullptr ? 0 : PyTuple_Size(keywords);
    for (Py_ssize_t i = 0; i < num_keywords; ++i) {
        PyObject* keyword = PyTuple_GetItem(keywords, i);
        int index = 0;
        while (index < num_names && PyUnicode_CompareWithASCIIString(keyword, names[index]) != 0)
            ++index;
        if (index == num_names || values[index] != nullptr) {
            PyErr_Format(PyExc_TypeError, "%s() got an unexpected or repeated argument '%U'", call,
                         keyword);
            return false;
        }
        values[index] = args[nargs + i];
    }
    for (int i = 0; i < required; ++i) {
        if (values[i] != nullptr) continue;
        PyErr_Format(PyExc_TypeError, "%s() needs '%s'", call, names[i]);
        return false;
    }
    for (int i = 0; i < num_names; ++i)
        if (values[i] == Py_None && std::strcmp(names[i], "out") == 0) values[i] = nullptr;
    return true;
}
