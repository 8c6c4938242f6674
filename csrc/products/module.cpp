// drumline.core.cpu._products: products on a CPU for Python. Memory is given by address, and Python
// has checked what is there. Limited API only, and no header of torch.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <vector>

#include "products/single_rows.h"

namespace {

using Address = unsigned long long;

// Returns false, with an error set, where they are not numbers.
bool read(PyObject* tuple, std::vector<size_t>& numbers) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); i++) {
        numbers.push_back(PyLong_AsSize_t(PyTuple_GetItem(tuple, i)));
        if (PyErr_Occurred()) return false;
    }
    return true;
}

PyObject* multiply_rows(PyObject*, PyObject* arguments) {
    int is_bfloat16;
    PyObject* numbers;
    Address weight, x, bias, out, num_rows, num_columns, num_threads;
    if (!PyArg_ParseTuple(arguments, "pKO!KKKKKK", &is_bfloat16, &weight, &PyTuple_Type, &numbers,
                          &x, &bias, &out, &num_rows, &num_columns, &num_threads))
        return nullptr;
    products::SingleRows product{is_bfloat16 != 0,
                                 reinterpret_cast<void*>(weight),
                                 reinterpret_cast<void*>(x),
                                 reinterpret_cast<void*>(bias),
                                 reinterpret_cast<void*>(out),
                                 num_rows,
                                 num_columns,
                                 {}};
    if (!read(numbers, product.numbers)) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    products::multiply(product, num_threads);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"multiply_rows", multiply_rows, METH_VARARGS,
     "multiply_rows(is_bfloat16, weight, numbers, x, bias, out, num_rows, num_columns, "
     "num_threads), as csrc/products/single_rows.h has it."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "drumline.core.cpu._products",
                          "Products on a CPU.",
                          -1,
                          methods,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__products(void) { return PyModule_Create(&definition); }
