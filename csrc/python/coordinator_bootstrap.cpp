#include "python/coordinator_bootstrap.h"

#include <cstring>

namespace {

comm_result keep_error(BootstrapContext* context) {
    if (!context->failed) PyErr_Fetch(&context->type, &context->value, &context->traceback);
    PyErr_Clear();
    context->failed = true;
    return COMM_REMOTE_ERROR;
}

bool copy_parts(PyObject* parts, int nranks, char* recv, size_t bytes_per_rank) {
    if (!PyList_Check(parts) || PyList_Size(parts) != nranks) {
        PyErr_SetString(PyExc_TypeError,
                        "bootstrap.allgather must return a list with one bytes object per rank");
        return false;
    }
    for (int rank = 0; rank < nranks; ++rank) {
        char* bytes;
        Py_ssize_t length;
        if (PyBytes_AsStringAndSize(PyList_GetItem(parts, rank), &bytes, &length) < 0) return false;
        if (static_cast<size_t>(length) != bytes_per_rank) {
            PyErr_Format(PyExc_ValueError,
                         "rank %d sent %zd bytes of setup where %zu were expected", rank, length,
                         bytes_per_rank);
            return false;
        }
        std::memcpy(recv + rank * bytes_per_rank, bytes, bytes_per_rank);
    }
    return true;
}

}  // namespace

comm_result bootstrap_allgather(void* ctx, const void* send, void* recv, size_t bytes_per_rank) {
    BootstrapContext* context = static_cast<BootstrapContext*>(ctx);
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject* parts =
        PyObject_CallMethod(context->coordinator, "allgather", "y#", static_cast<const char*>(send),
                            static_cast<Py_ssize_t>(bytes_per_rank));
    bool done = parts != nullptr &&
                copy_parts(parts, context->nranks, static_cast<char*>(recv), bytes_per_rank);
    comm_result code = done ? COMM_OK : keep_error(context);
    Py_XDECREF(parts);
    PyGILState_Release(state);
    return code;
}

comm_result bootstrap_barrier(void* ctx) {
    BootstrapContext* context = static_cast<BootstrapContext*>(ctx);
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject* returned = PyObject_CallMethod(context->coordinator, "barrier", nullptr);
    comm_result code = returned != nullptr ? COMM_OK : keep_error(context);
    Py_XDECREF(returned);
    PyGILState_Release(state);
    return code;
}
