// drumline.weight_formats._packed: weights in few bits for Python. Memory is given by address, and
// Python has checked what is there. Limited API only, and no header of torch.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "packed/packed_weights.h"

namespace {

using Address = unsigned long long;

template <class T>
T* pointer(Address address) {
    return reinterpret_cast<T*>(address);
}

// (num_rows, num_columns, out, is_bfloat16, inputs, num_inputs)
struct ResultArguments {
    Address num_rows, num_columns, out, inputs, num_inputs;
    int is_bfloat16;

    packed::Result packed() const {
        return {pointer<const float>(inputs),
                num_inputs,
                pointer<void>(out),
                is_bfloat16 != 0,
                num_rows,
                num_columns};
    }
    bool is_possible() const {
        if (num_inputs <= packed::max_inputs) return true;
        PyErr_Format(PyExc_ValueError, "%llu inputs, and at most %zu are possible", num_inputs,
                     packed::max_inputs);
        return false;
    }
};

PyObject* unpack_rows(PyObject*, PyObject* arguments) {
    packed::BlockRows weight;
    Address blocks, row_nbytes, order, num_threads;
    ResultArguments result;
    if (!PyArg_ParseTuple(arguments, "(iKKK)(KKKpKK)K", &weight.kind, &blocks, &row_nbytes, &order,
                          &result.num_rows, &result.num_columns, &result.out, &result.is_bfloat16,
                          &result.inputs, &result.num_inputs, &num_threads) ||
        !result.is_possible())
        return nullptr;
    weight.blocks = pointer<const uint8_t>(blocks);
    weight.row_nbytes = row_nbytes;
    weight.order = pointer<const int64_t>(order);
    bool is_known;
    Py_BEGIN_ALLOW_THREADS;
    is_known = packed::unpack(weight, result.packed(), num_threads);
    Py_END_ALLOW_THREADS;
    if (is_known) Py_RETURN_NONE;
    return PyErr_Format(PyExc_ValueError, "%d is not a kind of block that is known", weight.kind);
}

PyObject* unpack_integers(PyObject*, PyObject* arguments) {
    packed::Integers weight;
    Address words, zeros, scales, groups, num_groups, num_threads;
    int is_packed_by_rows;
    const char* shifts;
    Py_ssize_t num_shifts;
    ResultArguments result;
    if (!PyArg_ParseTuple(arguments, "(KKKKKIpy#I)(KKKpKK)K", &words, &zeros, &scales, &groups,
                          &num_groups, &weight.num_bits, &is_packed_by_rows, &shifts, &num_shifts,
                          &weight.zero_shift, &result.num_rows, &result.num_columns, &result.out,
                          &result.is_bfloat16, &result.inputs, &result.num_inputs, &num_threads) ||
        !result.is_possible())
        return nullptr;
    if (weight.num_bits == 0 || num_shifts * weight.num_bits != 32)
        return PyErr_Format(PyExc_ValueError, "%zd shifts for integers of %u bits", num_shifts,
                            weight.num_bits);
    weight.words = pointer<const uint32_t>(words);
    weight.zeros = pointer<const uint32_t>(zeros);
    weight.scales = pointer<const float>(scales);
    weight.groups = pointer<const int64_t>(groups);
    weight.num_groups = num_groups;
    weight.is_packed_by_rows = is_packed_by_rows != 0;
    weight.shifts = reinterpret_cast<const uint8_t*>(shifts);
    Py_BEGIN_ALLOW_THREADS;
    packed::unpack(weight, result.packed(), num_threads);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"unpack_rows", unpack_rows, METH_VARARGS,
     "unpack_rows((kind, blocks, row_nbytes, order), result, num_threads), result: (num_rows, "
     "num_columns, out, is_bfloat16, inputs, num_inputs), as csrc/packed/packed_weights.h has it."},
    {"unpack_integers", unpack_integers, METH_VARARGS,
     "unpack_integers((words, zeros, scales, groups, num_groups, num_bits, is_packed_by_rows, "
     "shifts, zero_shift), result, num_threads)"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "drumline.weight_formats._packed",
                          "Weights that are kept in few bits: their numbers, and products.",
                          -1,
                          methods,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__packed(void) { return PyModule_Create(&definition); }
