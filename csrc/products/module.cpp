// drumline.core.cpu._products: products on a CPU for Python. Memory is given by address, and Python
// has checked what is there. Limited API only, and no header of torch.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "products/one_row.h"

namespace {

using Address = unsigned long long;

PyObject* multiply_row(PyObject*, PyObject* arguments) {
    int is_bfloat16;
    Address weight, x, bias, out, num_rows, num_columns, num_threads;
    if (!PyArg_ParseTuple(arguments, "pKKKKKKK", &is_bfloat16, &weight, &x, &bias, &out, &num_rows,
                          &num_columns, &num_threads))
        return nullptr;
    const products::OneRow product{is_bfloat16 != 0,
                                   reinterpret_cast<void*>(weight),
                                   reinterpret_cast<void*>(x),
                                   reinterpret_cast<void*>(bias),
                                   reinterpret_cast<void*>(out),
                                   num_rows,
                                   num_columns};
    Py_BEGIN_ALLOW_THREADS;
    products::multiply(product, num_threads);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"multiply_row", multiply_row, METH_VARARGS,
     "multiply_row(is_bfloat16, weight, x, bias, out, num_rows, num_columns, num_threads), as "
     "csrc/products/one_row.h has it."},
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
