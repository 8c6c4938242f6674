// communicator.backends._tcp: Engine for Python. Converts arguments, releases the interpreter lock,
// calls.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <unistd.h>

#include <new>

#include "python/convert/python_object.h"
#include "tcp/engine.h"

namespace {

using tcp::Call;
using tcp::Engine;
using tcp::Mismatch;

PyObject* ended_error;

struct Object {
    PyObject_HEAD Engine* engine;
    std::vector<int>* fds;
    int num_calls;  // in progress, on any thread
    bool is_closed;
};

Object* self_of(PyObject* object) { return reinterpret_cast<Object*>(object); }

void close_descriptors(Object* self) {
    for (int& fd : *self->fds) {
        if (fd >= 0) close(fd);
        fd = -1;
    }
}

// Calls read(item) for each item of a tuple or list; false with a Python error set.
template <class Read>
bool read_items(PyObject* sequence, Read read) {
    Py_ssize_t length = PySequence_Size(sequence);
    for (Py_ssize_t i = 0; i < length; ++i) {
        PyObject* item = PySequence_GetItem(sequence, i);  // which the sequence keeps alive
        if (item != nullptr) read(item);
        Py_XDECREF(item);
        if (PyErr_Occurred()) return false;
    }
    return length >= 0;
}

bool read_call(PyObject* steps, PyObject* addresses, PyObject* texts, Call* call) {
    char* packed;
    Py_ssize_t nbytes;
    if (PyBytes_AsStringAndSize(steps, &packed, &nbytes) != 0) return false;
    call->steps = reinterpret_cast<const tcp::Step*>(packed);
    call->num_steps = static_cast<size_t>(nbytes) / sizeof(tcp::Step);
    return read_items(addresses,
                      [&](PyObject* item) {
                          call->buffers.push_back(static_cast<char*>(PyLong_AsVoidPtr(item)));
                      }) &&
           read_items(texts, [&](PyObject* item) {
               char* text;
               Py_ssize_t size;
               if (PyBytes_AsStringAndSize(item, &text, &size) == 0)
                   call->texts.emplace_back(text, static_cast<size_t>(size));
           });
}

// Lets Python handle signals, and asks `check` whether to wait for idle peers.
bool look(PyObject* check, const std::vector<int>& idle_peers, double waited_s) {
    if (PyErr_CheckSignals() != 0) return false;
    if (idle_peers.empty()) return true;
    PyObject* peers = PyList_New(0);
    for (int peer : idle_peers) {
        PyObject* number = PyLong_FromLong(peer);
        PyList_Append(peers, number);
        Py_XDECREF(number);
    }
    PyObject* answer = PyObject_CallFunction(check, "Od", peers, waited_s);
    Py_DECREF(peers);
    Py_XDECREF(answer);
    return answer != nullptr;
}

void raise_ended(const tcp::Ended& ended) {
    PyObject* arguments = Py_BuildValue("iKis", ended.peer,
                                        static_cast<unsigned long long>(ended.notice), ended.error,
                                        ended.text.c_str());
    if (arguments != nullptr) PyErr_SetObject(ended_error, arguments);
    Py_XDECREF(arguments);
}

// Runs a call without the interpreter lock; false with a Python error set.
bool run_unlocked(Engine* engine, Call& call, PyObject* check, Mismatch* mismatch) {
    PyThreadState* state = PyEval_SaveThread();
    bool has_raised = false;
    tcp::Look look_at = [&](const std::vector<int>& peers, double waited_s) {
        PyEval_RestoreThread(state);
        has_raised = !look(check, peers, waited_s);
        state = PyEval_SaveThread();
        return !has_raised;
    };
    try {
        engine->run(call, look_at, mismatch);
        PyEval_RestoreThread(state);
    } catch (const tcp::Ended& ended) {
        PyEval_RestoreThread(state);
        raise_ended(ended);
        return false;
    } catch (const std::bad_alloc&) {
        PyEval_RestoreThread(state);
        PyErr_NoMemory();
        return false;
    }
    if (has_raised && mismatch->peer >= 0 && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear();  // the mismatch is the reason
        has_raised = false;
    }
    return !has_raised;
}

PyObject* engine_run(PyObject* object, PyObject* args) {
    Object* self = self_of(object);
    PyObject *steps, *addresses, *texts, *check;
    unsigned long long scratch_nbytes;
    Call call = {};
    if (!PyArg_ParseTuple(args, "OOOKiiO", &steps, &addresses, &texts, &scratch_nbytes, &call.dtype,
                          &call.op, &check) ||
        !read_call(steps, addresses, texts, &call))
        return nullptr;
    if (self->is_closed) {
        PyErr_SetString(PyExc_RuntimeError, "the connections are closed");
        return nullptr;
    }
    call.scratch_nbytes = scratch_nbytes;
    Mismatch mismatch;
    ++self->num_calls;
    bool is_done = run_unlocked(self->engine, call, check, &mismatch);
    if (--self->num_calls == 0 && self->is_closed) close_descriptors(self);
    if (!is_done) return nullptr;
    if (mismatch.peer < 0) return new_reference(Py_None);
    return Py_BuildValue("iiy#", mismatch.peer, mismatch.buffer, mismatch.text.data(),
                         static_cast<Py_ssize_t>(mismatch.text.size()));
}

PyObject* engine_announce_end(PyObject* object, PyObject* args) {
    unsigned long long notice;
    const char* text;
    Py_ssize_t nbytes;
    if (!PyArg_ParseTuple(args, "Ky#", &notice, &text, &nbytes)) return nullptr;
    Object* self = self_of(object);
    if (!self->is_closed)
        self->engine->announce_end(notice, {text, static_cast<size_t>(nbytes)});
    return new_reference(Py_None);
}

PyObject* engine_shut_down(PyObject* object, PyObject*) {
    if (!self_of(object)->is_closed) self_of(object)->engine->shut_down();
    return new_reference(Py_None);
}

PyObject* engine_close(PyObject* object, PyObject*) {
    Object* self = self_of(object);
    self->is_closed = true;
    if (self->num_calls == 0) close_descriptors(self);
    return new_reference(Py_None);
}

void engine_dealloc(PyObject* object) {
    Object* self = self_of(object);
    if (self->fds != nullptr) close_descriptors(self);
    delete self->engine;
    delete self->fds;
    free_object(object);
}

PyObject* engine_new(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject* numbers;
    double poll_s;
    std::vector<int> fds;
    if (!PyArg_ParseTuple(args, "Od", &numbers, &poll_s) ||
        !read_items(numbers,
                    [&](PyObject* item) { fds.push_back(static_cast<int>(PyLong_AsLong(item))); }))
        return nullptr;
    PyObject* object = PyType_GenericAlloc(type, 0);
    if (object == nullptr) return nullptr;
    self_of(object)->engine = new Engine(fds, static_cast<int64_t>(poll_s * 1e9));
    self_of(object)->fds = new std::vector<int>(fds);
    return object;
}

PyMethodDef engine_methods[] = {
    {"run", engine_run, METH_VARARGS,
     "run(steps, addresses, texts, scratch_nbytes, dtype, op, check)\n"
     "-> None, or the (peer, buffer, text) of a message that was dropped. Raises ConnectionEnded,\n"
     "and what check(idle_peers, waited_s) raises."},
    {"announce_end", engine_announce_end, METH_VARARGS,
     "announce_end(notice, text) tells the peers why nothing follows"},
    {"shut_down", engine_shut_down, METH_NOARGS, "End calls here and on the peers; any thread."},
    {"close", engine_close, METH_NOARGS, "Close the connections, after the calls in progress."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot engine_slots[] = {{Py_tp_new, reinterpret_cast<void*>(engine_new)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(engine_dealloc)},
                              {Py_tp_methods, engine_methods},
                              {0, nullptr}};
PyType_Spec engine_spec = {"communicator.backends._tcp.Engine", sizeof(Object), 0,
                           Py_TPFLAGS_DEFAULT, engine_slots};

PyModuleDef module_definition = {PyModuleDef_HEAD_INIT,
                                 "communicator.backends._tcp",
                                 "Messages over connections.",
                                 -1,
                                 nullptr,
                                 nullptr,
                                 nullptr,
                                 nullptr,
                                 nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__tcp(void) {
    PyObject* module = PyModule_Create(&module_definition);
    if (module == nullptr) return nullptr;
    ended_error =
        PyErr_NewException("communicator.backends._tcp.ConnectionEnded", nullptr, nullptr);
    PyObject* type = PyType_FromSpec(&engine_spec);
    if (ended_error == nullptr || type == nullptr) return nullptr;
    Py_INCREF(ended_error);
    PyModule_AddObject(module, "ConnectionEnded", ended_error);
    PyModule_AddObject(module, "Engine", type);
    return module;
}
