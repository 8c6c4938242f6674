// communicator.backends._tcp: Engine for Python. Converts arguments, releases the interpreter lock,
// calls.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <unistd.h>

#include <memory>
#include <new>
#include <numeric>

#include "python/convert/arguments.h"
#include "python/convert/python_object.h"
#include "python/convert/tensor.h"
#include "tcp/engine.h"
#include "tcp/programs.h"

namespace {

using tcp::Call;
using tcp::Engine;
using tcp::Mismatch;

PyObject* ended_error;

// The allreduce that was made last, as the next one often is of the same size.
struct LastProgram {
    uint64_t numel = 0;
    uint32_t itemsize = 0;
    std::shared_ptr<const tcp::StepProgram> program;
};

struct Object {
    PyObject_HEAD Engine* engine;
    std::vector<int>* fds;
    std::vector<int32_t>* ranks;  // all of them
    LastProgram* last;
    PlainTensorCache plain_tensors;
    CallSite site;
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
    Py_ssize_t nbytes = static_cast<Py_ssize_t>(ended.text.size());  // it may be cut amid a letter
    PyObject* arguments =
        Py_BuildValue("iKiN", ended.peer, static_cast<unsigned long long>(ended.notice),
                      ended.error, PyUnicode_DecodeUTF8(ended.text.data(), nbytes, "replace"));
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

// None, or what was dropped: (peer, buffer, text, is_whole).
PyObject* run_call(Object* self, Call& call, PyObject* check) {
    Mismatch mismatch;
    ++self->num_calls;
    bool is_done = run_unlocked(self->engine, call, check, &mismatch);
    if (--self->num_calls == 0 && self->is_closed) close_descriptors(self);
    if (!is_done) return nullptr;
    if (mismatch.peer < 0) return new_reference(Py_None);
    return Py_BuildValue("iiy#O", mismatch.peer, mismatch.buffer, mismatch.text.data(),
                         static_cast<Py_ssize_t>(mismatch.text.size()),
                         mismatch.is_whole ? Py_True : Py_False);
}

PyObject* engine_run(PyObject* object, PyObject* args) {
    PyObject *steps, *addresses, *texts, *check;
    unsigned long long scratch_nbytes;
    Call call = {};
    if (!PyArg_ParseTuple(args, "OOOKiiO", &steps, &addresses, &texts, &scratch_nbytes, &call.dtype,
                          &call.op, &check) ||
        !read_call(steps, addresses, texts, &call))
        return nullptr;
    if (self_of(object)->is_closed) {
        PyErr_SetString(PyExc_RuntimeError, "the connections are closed");
        return nullptr;
    }
    call.scratch_nbytes = scratch_nbytes;
    return run_call(self_of(object), call, check);
}

// ---- the calls whose latency matters: what cannot be done here is left to Python ----

PyObject* left_to_python() {
    PyErr_Clear();
    return new_reference(Py_NotImplemented);
}

// As call_check.describe_tensor: "(2, 3) float32".
std::string describe_tensor(const TensorView& view) {
    std::string text = "(";
    for (int32_t dim = 0; dim < view.ndim; ++dim)
        text += (dim > 0 ? ", " : "") + std::to_string(view.shape[dim]);
    return text + (view.ndim == 1 ? ",) " : ") ") + shm::name_of_dtype(view.dtype);
}

PyObject* engine_allreduce(PyObject* object, PyObject* const* args, Py_ssize_t) {
    Object* self = self_of(object);
    TensorView from, to;
    comm_op op;
    if (self->is_closed || read_tensor(self->site, args[0], &from) < 0 ||
        read_op(self->site, args[1], args[0], from.dtype, &op) < 0)
        return left_to_python();
    to = from;
    if (args[2] != Py_None &&
        (read_tensor(self->site, args[2], &to) < 0 || check_shape(self->site, to, from, 0, 0) < 0 ||
         check_overlap(self->site, from, to, true) < 0))
        return left_to_python();
    if (shm::find_reduce(from.dtype, op, shm::Instructions::plain) == nullptr)
        return left_to_python();
    // A copy of what is shared: another thread's call may put its own program there meanwhile.
    LastProgram last = *self->last;
    if (last.program == nullptr || last.numel != from.numel || last.itemsize != from.itemsize) {
        int size = static_cast<int>(self->ranks->size());
        auto made = std::make_shared<tcp::StepProgram>();
        tcp::collective("allreduce", {self->site.rank, size, self->ranks->data(), from.itemsize},
                        static_cast<int64_t>(from.numel), 0, made.get());
        *self->last = last = {from.numel, from.itemsize, made};
    }
    const tcp::StepProgram& program = *last.program;
    // As call_check.describe_call, whose text other ranks may send.
    std::string text = "allreduce of " + describe_tensor(from) + " " + shm::name_of_op(op);
    Call call = {program.steps.data(),
                 program.steps.size(),
                 {from.data, to.data},
                 {text},
                 program.scratch_nbytes,
                 from.dtype,
                 op};
    return run_call(self, call, args[3]);
}

PyObject* move_tensor(PyObject* object, PyObject* const* args, tcp::Kind kind) {
    Object* self = self_of(object);
    TensorView view;
    int32_t peer;
    if (self->is_closed || read_tensor(self->site, args[0], &view) < 0 ||
        read_peer(self->site, args[1], "", &peer) < 0 || peer == self->site.rank)
        return left_to_python();
    tcp::Step step = {kind, peer, 0, 0, 0, 0, view.nbytes()};
    std::string text = describe_tensor(view);
    Call call = {&step, 1, {view.data}, {text}, 0, 0, 0};
    return run_call(self, call, args[2]);
}

PyObject* engine_send(PyObject* object, PyObject* const* args, Py_ssize_t) {
    return move_tensor(object, args, tcp::Kind::send);
}

PyObject* engine_recv(PyObject* object, PyObject* const* args, Py_ssize_t) {
    return move_tensor(object, args, tcp::Kind::recv);
}

PyObject* engine_announce_end(PyObject* object, PyObject* args) {
    unsigned long long notice;
    const char* text;
    Py_ssize_t nbytes;
    if (!PyArg_ParseTuple(args, "Ky#", &notice, &text, &nbytes)) return nullptr;
    Object* self = self_of(object);
    if (!self->is_closed) self->engine->announce_end(notice, {text, static_cast<size_t>(nbytes)});
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
    for (PyObject* reference : self->plain_tensors.references) Py_XDECREF(reference);
    delete self->engine;
    delete self->fds;
    delete self->ranks;
    delete self->last;
    free_object(object);
}

PyObject* engine_new(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject *numbers, *secrets;
    int rank;
    double poll_s;
    std::vector<int> fds;
    std::vector<std::string> keys;
    if (!PyArg_ParseTuple(args, "iOOd", &rank, &numbers, &secrets, &poll_s) ||
        !read_items(
            numbers,
            [&](PyObject* item) { fds.push_back(static_cast<int>(PyLong_AsLong(item))); }) ||
        !read_items(secrets, [&](PyObject* item) {
            char* key;
            Py_ssize_t nbytes;
            if (PyBytes_AsStringAndSize(item, &key, &nbytes) == 0)
                keys.emplace_back(key, static_cast<size_t>(nbytes));
        }))
        return nullptr;
    PyObject* object = PyType_GenericAlloc(type, 0);
    if (object == nullptr) return nullptr;
    Object* self = self_of(object);
    self->engine = new Engine(fds, keys, static_cast<int64_t>(poll_s * 1e9));
    self->fds = new std::vector<int>(fds);
    self->ranks = new std::vector<int32_t>(fds.size());
    self->last = new LastProgram;
    std::iota(self->ranks->begin(), self->ranks->end(), 0);
    // Without names: Python, which checks what is wrong once more, raises the errors.
    self->site = {"",       "", rank,  static_cast<int32_t>(fds.size()),
                  COMM_CPU, -1, false, &self->plain_tensors};
    return object;
}

PyMethodDef engine_methods[] = {
    {"run", engine_run, METH_VARARGS,
     "run(steps, addresses, texts, scratch_nbytes, dtype, op, check)\n"
     "-> None, or the (peer, buffer, text, is_whole) of a message that was dropped; see engine.h.\n"
     "Raises ConnectionEnded, and what check(idle_peers, waited_s) raises."},
    {"allreduce", as_method(engine_allreduce), METH_FASTCALL,
     "allreduce(tensor, op, out, check) -> as run(), or NotImplemented, with nothing done, for\n"
     "what is wrong"},
    {"send", as_method(engine_send), METH_FASTCALL, "send(tensor, dst, check) -> as allreduce()"},
    {"recv", as_method(engine_recv), METH_FASTCALL, "recv(tensor, src, check) -> as allreduce()"},
    {"announce_end", engine_announce_end, METH_VARARGS,
     "announce_end(notice, text) ends calls here and on the peers, and tells those why; any\n"
     "thread"},
    {"close", engine_close, METH_NOARGS, "Close the connections, after the calls in progress."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot engine_slots[] = {{Py_tp_new, reinterpret_cast<void*>(engine_new)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(engine_dealloc)},
                              {Py_tp_methods, engine_methods},
                              {0, nullptr}};
PyType_Spec engine_spec = {"communicator.backends._tcp.Engine", sizeof(Object), 0,
                           Py_TPFLAGS_DEFAULT, engine_slots};

// ---- programs ----

PyObject* as_python(const tcp::StepProgram& program) {
    const char* none = "";  // of no step: with NULL it would be None
    return Py_BuildValue(
        "y#K", program.steps.empty() ? none : reinterpret_cast<const char*>(program.steps.data()),
        static_cast<Py_ssize_t>(program.steps.size() * sizeof(tcp::Step)),
        static_cast<unsigned long long>(program.scratch_nbytes));
}

PyObject* make_program(PyObject*, PyObject* args) {
    const char *name, *peers;
    Py_ssize_t nbytes;
    long long numel, itemsize;
    int rank, root;
    if (!PyArg_ParseTuple(args, "siy#LLi", &name, &rank, &peers, &nbytes, &numel, &itemsize, &root))
        return nullptr;
    int size = static_cast<int>(nbytes / static_cast<Py_ssize_t>(sizeof(int32_t)));
    tcp::StepProgram program;
    if (!tcp::collective(name, {rank, size, reinterpret_cast<const int32_t*>(peers), itemsize},
                         numel, root, &program)) {
        PyErr_SetString(PyExc_ValueError, name);
        return nullptr;
    }
    return as_python(program);
}

PyObject* make_exchange(PyObject*, PyObject* args) {
    const char *peers, *sends, *recvs;
    Py_ssize_t nbytes, send_nbytes, recv_nbytes;
    long long itemsize;
    int rank, source, target;
    if (!PyArg_ParseTuple(args, "iy#Ly#y#ii", &rank, &peers, &nbytes, &itemsize, &sends,
                          &send_nbytes, &recvs, &recv_nbytes, &source, &target))
        return nullptr;
    int size = static_cast<int>(nbytes / static_cast<Py_ssize_t>(sizeof(int32_t)));
    Py_ssize_t needed = size * static_cast<Py_ssize_t>(sizeof(tcp::Slice));
    if (send_nbytes != needed || recv_nbytes != needed) {
        PyErr_SetString(PyExc_ValueError, "exchange() needs a slice for each rank");
        return nullptr;
    }
    return as_python(tcp::exchange({rank, size, reinterpret_cast<const int32_t*>(peers), itemsize},
                                   reinterpret_cast<const tcp::Slice*>(sends),
                                   reinterpret_cast<const tcp::Slice*>(recvs), source, target));
}

PyMethodDef functions[] = {
    {"program", make_program, METH_VARARGS,
     "program(name, rank, peers, numel, itemsize, root) -> (steps, scratch_nbytes) of a\n"
     "collective; peers: int32, what the engine calls each rank"},
    {"exchange", make_exchange, METH_VARARGS,
     "exchange(rank, peers, itemsize, sends, recvs, source, target) -> (steps, scratch_nbytes);\n"
     "sends, recvs: two int64 for each rank, in elements; no message where begin is behind end"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module_definition = {PyModuleDef_HEAD_INIT,
                                 "communicator.backends._tcp",
                                 "Messages over connections.",
                                 -1,
                                 functions,
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
    if (ended_error == nullptr || type == nullptr || load_torch_types() < 0) return nullptr;
    Py_INCREF(ended_error);
    PyModule_AddObject(module, "ConnectionEnded", ended_error);
    PyModule_AddObject(module, "Engine", type);
    return module;
}
