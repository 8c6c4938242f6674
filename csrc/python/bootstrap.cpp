#include "python/bootstrap.h"

#include <cstring>

namespace {

comm_result keep_error(Lent* lent) {
    if (!lent->failed) PyErr_Fetch(&lent->type, &lent->value, &lent->traceback);
    PyErr_Clear();
    lent->failed = true;
    return COMM_REMOTE_ERROR;
}

bool copy_answers(PyObject* answers, int nranks, char* recv, size_t bytes_per_rank) {
    if (!PyList_Check(answers) || PyList_Size(answers) != nranks) {
        PyErr_SetString(PyExc_TypeError,
                        "bootstrap.allgather must return a list, one for each rank");
        return false;
    }
    for (int rank = 0; rank < nranks; ++rank) {
        char* bytes;
        Py_ssize_t length;
        if (PyBytes_AsStringAndSize(PyList_GetItem(answers, rank), &bytes, &length) < 0)
            return false;
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

comm_result lent_allgather(void* ctx, const void* send, void* recv, size_t bytes_per_rank) {
    Lent* lent = static_cast<Lent*>(ctx);
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject* answers =
        PyObject_CallMethod(lent->bootstrap, "allgather", "y#", static_cast<const char*>(send),
                            static_cast<Py_ssize_t>(bytes_per_rank));
    bool done = answers != nullptr &&
                copy_answers(answers, lent->nranks, static_cast<char*>(recv), bytes_per_rank);
    comm_result code = done ? COMM_OK : keep_error(lent);
    Py_XDECREF(answers);
    PyGILState_Release(state);
    return code;
}

comm_result lent_barrier(void* ctx) {
    Lent* lent = static_cast<Lent*>(ctx);
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject* answer = PyObject_CallMethod(lent->bootstrap, "barrier", nullptr);
    comm_result code = answer != nullptr ? COMM_OK : keep_error(lent);
    Py_XDECREF(answer);
    PyGILState_Release(state);
    return code;
}
