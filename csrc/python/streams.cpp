// The streams of a communicator, which may be used during its calls. Memory is given by address.
#include <shared_mutex>

#include "python/comm.h"

namespace {

constexpr unsigned long long min_unlocked_bytes = 32 << 10;  // a smaller copy keeps the GIL

// Calls the library; destroy() waits for it. may_wait: without the GIL.
template <class Body>
bool call_streams(Comm* self, const char* call, bool may_wait, Body body) {
    CallSite site = site_of(self, call);
    if (!COMM_HAS(self->table, stream_check)) return raise_not_offered(site, self->table);
    PyThreadState* state = may_wait ? PyEval_SaveThread() : nullptr;
    comm_result code = COMM_OK;
    bool is_open;
    {
        std::shared_lock<std::shared_mutex> lock(*self->stream_mutex);
        is_open = self->handle != nullptr;
        if (is_open) code = body(self->handle);
    }
    if (state != nullptr) PyEval_RestoreThread(state);
    if (!is_open) return raise_closed(site);
    if (code != COMM_OK) raise_result(self->table, code, self->table->last_error(nullptr));
    return code == COMM_OK;
}

}  // namespace

PyObject* comm_stream_write(PyObject* object, PyObject* args) {
    Comm* self = comm_of(object);
    int dst;
    const char* prefix;
    Py_ssize_t prefix_nbytes;
    unsigned long long address, nbytes;
    if (!PyArg_ParseTuple(args, "iy#KK", &dst, &prefix, &prefix_nbytes, &address, &nbytes))
        return nullptr;
    uint64_t written = 0;
    if (!call_streams(self, "stream_write", nbytes >= min_unlocked_bytes, [&](comm_t comm) {
            return self->table->stream_write(comm, dst, prefix, prefix_nbytes,
                                             reinterpret_cast<const void*>(address), nbytes,
                                             &written);
        }))
        return nullptr;
    return PyLong_FromUnsignedLongLong(written);
}

PyObject* comm_stream_read(PyObject* object, PyObject* args) {
    Comm* self = comm_of(object);
    int src;
    unsigned long long address, nbytes;
    if (!PyArg_ParseTuple(args, "iKK", &src, &address, &nbytes)) return nullptr;
    uint64_t num_read = 0;
    if (!call_streams(self, "stream_read", nbytes >= min_unlocked_bytes, [&](comm_t comm) {
            return self->table->stream_read(comm, src, reinterpret_cast<void*>(address), nbytes,
                                            &num_read);
        }))
        return nullptr;
    return PyLong_FromUnsignedLongLong(num_read);
}

// interest: one byte for each rank, in a bytearray that keeps its size.
PyObject* comm_stream_wait(PyObject* object, PyObject* args) {
    Comm* self = comm_of(object);
    PyObject* interest;
    int timeout_ms;
    if (!PyArg_ParseTuple(args, "O!i", &PyByteArray_Type, &interest, &timeout_ms)) return nullptr;
    if (PyByteArray_Size(interest) != self->site.nranks) {
        PyErr_Format(PyExc_ValueError, "%s, stream_wait: interest needs %d bytes, one a rank",
                     self->site.me, self->site.nranks);
        return nullptr;
    }
    auto bits = reinterpret_cast<const uint8_t*>(PyByteArray_AsString(interest));
    int32_t peer = -1;
    if (!call_streams(self, "stream_wait", timeout_ms > 0, [&](comm_t comm) {
            return self->table->stream_wait(comm, bits, timeout_ms, &peer);
        }))
        return nullptr;
    return PyLong_FromLong(peer);
}

namespace {

using NumberEntry = comm_result (*)(comm_t, int32_t);

PyObject* call_with_number(PyObject* object, PyObject* argument, const char* call, bool may_wait,
                           NumberEntry comm_plugin::* entry) {
    Comm* self = comm_of(object);
    long number = PyLong_AsLong(argument);
    if (PyErr_Occurred()) return nullptr;
    auto body = [&](comm_t comm) {
        return (self->table->*entry)(comm, static_cast<int32_t>(number));
    };
    return call_streams(self, call, may_wait, body) ? new_reference(Py_None) : nullptr;
}

}  // namespace

PyObject* comm_stream_sleep(PyObject* object, PyObject* timeout_ms) {
    return call_with_number(object, timeout_ms, "stream_sleep", true, &comm_plugin::stream_sleep);
}

PyObject* comm_stream_notify(PyObject* object, PyObject* what) {
    return call_with_number(object, what, "stream_notify", false, &comm_plugin::stream_notify);
}

PyObject* comm_stream_check(PyObject* object, PyObject* peer) {
    return call_with_number(object, peer, "stream_check", true, &comm_plugin::stream_check);
}
