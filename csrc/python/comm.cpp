// The methods of Comm that move no tensor: groups, memory, scaled sums, split and close.
#include "python/comm.h"

#include <string>

PyObject* raise_closed(const CallSite& site) {
    PyErr_Format(
        errors.base,
        "%s: %s on a closed Communicator. Make a new one, or close it later. A Communicator of "
        "which only methods are kept is closed, too",
        site.me, site.call);
    return nullptr;
}

namespace {

// A text that a method of the Coordinator makes, or nothing: other bootstraps have none. Ctrl-C, as
// all that is no Exception, stays set.
std::string describe(const Comm* self, const char* method, const char* before = "\n") {
    if (self->bootstrap == nullptr || PyErr_Occurred()) return "";
    PyObject* answer = PyObject_CallMethod(self->bootstrap, method, nullptr);
    const char* text = answer != nullptr ? PyUnicode_AsUTF8AndSize(answer, nullptr) : nullptr;
    std::string paragraph = text != nullptr && text[0] != '\0' ? std::string(before) + text : "";
    Py_XDECREF(answer);
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();
    return paragraph;
}

}  // namespace

void raise_call_error(const Comm* self, comm_result code, std::string text) {
    text = describe(self, "describe_numbering", "") + text;
    if (code == COMM_TIMEOUT) text += describe(self, "describe_late");
    if (code == COMM_REMOTE_ERROR) text += describe(self, "describe_failure");
    if (!PyErr_Occurred()) raise_result(self->table, code, text.c_str());
}

PyObject* raise_not_offered(const CallSite& site, const comm_plugin* table) {
    PyErr_Format(errors.unsupported,
                 "%s: the backend %s does not offer %s, and there is no fallback for it. Choose "
                 "another backend",
                 site.me, table->name, site.call);
    return nullptr;
}

namespace {

PyTypeObject* comm_type;

PyObject* comm_group_start(PyObject* object, PyObject*) {
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "group_start");
    if (!COMM_HAS(self->table, group_start)) return raise_not_offered(site, self->table);
    if (!call_library(self, site, [&](comm_t comm) { return self->table->group_start(comm); }))
        return nullptr;
    ++self->group_depth;
    return new_reference(Py_None);
}

PyObject* comm_group_end(PyObject* object, PyObject*) {
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "group_end");
    if (!COMM_HAS(self->table, group_end)) return raise_not_offered(site, self->table);
    bool done = call_library(self, site, [&](comm_t comm) { return self->table->group_end(comm); });
    if (self->group_depth > 0) --self->group_depth;
    if (self->group_depth == 0 &&
        PyList_SetSlice(self->group_tensors, 0, PyList_Size(self->group_tensors), nullptr) < 0)
        return nullptr;
    return done ? new_reference(Py_None) : nullptr;
}

PyObject* comm_abort(PyObject* object, PyObject*) {
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "abort");
    if (!COMM_HAS(self->table, abort)) return raise_not_offered(site, self->table);
    comm_result code = COMM_OK;
    PyThreadState* state = PyEval_SaveThread();
    {
        std::lock_guard<std::mutex> lock(*self->destroy_mutex);
        if (self->handle != nullptr) code = self->table->abort(self->handle);
    }
    PyEval_RestoreThread(state);
    return code == COMM_OK ? new_reference(Py_None) : raise_result(self->table, code, nullptr);
}

PyObject* comm_decline(PyObject* object, PyObject* text) {
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "decline");
    if (!COMM_HAS(self->table, decline)) return raise_not_offered(site, self->table);
    const char* why = PyUnicode_AsUTF8AndSize(text, nullptr);
    if (why == nullptr) return nullptr;
    bool done =
        call_library(self, site, [&](comm_t comm) { return self->table->decline(comm, why); });
    return done ? new_reference(Py_None) : nullptr;
}

PyObject* comm_set_timeout(PyObject* object, PyObject* timeout_ms) {
    Comm* self = comm_of(object);
    long milliseconds = PyLong_AsLong(timeout_ms);
    if (PyErr_Occurred()) return nullptr;
    if (!COMM_HAS(self->table, set_timeout))
        return raise_not_offered(site_of(self, "set_timeout"), self->table);
    PyThreadState* state = PyEval_SaveThread();
    {
        std::lock_guard<std::mutex> lock(*self->destroy_mutex);
        if (self->handle != nullptr)
            self->table->set_timeout(self->handle, static_cast<int32_t>(milliseconds));
    }
    PyEval_RestoreThread(state);
    return new_reference(Py_None);
}

comm_result destroy(Comm* self) {
    comm_result code = COMM_OK;
    self->call_mutex->lock();
    PyThreadState* state = PyEval_SaveThread();
    {
        std::lock_guard<std::mutex> lock(*self->destroy_mutex);
        std::unique_lock<std::shared_mutex> stream_lock(*self->stream_mutex);
        comm_t handle = self->handle;
        self->handle = nullptr;
        if (handle != nullptr) code = self->table->destroy(handle);
    }
    PyEval_RestoreThread(state);
    self->call_mutex->unlock();
    return code;
}

PyObject* comm_close(PyObject* object, PyObject*) {
    Comm* self = comm_of(object);
    comm_result code = destroy(self);
    return code == COMM_OK ? new_reference(Py_None) : raise_result(self->table, code, nullptr);
}

PyObject* comm_mem_alloc(PyObject* object, PyObject* argument) {
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "mem_alloc");
    if (!COMM_HAS(self->table, mem_alloc)) return raise_not_offered(site, self->table);
    size_t nbytes = PyLong_AsSize_t(argument);
    if (PyErr_Occurred()) return nullptr;
    void* pointer = nullptr;
    if (!call_library(self, site,
                      [&](comm_t comm) { return self->table->mem_alloc(comm, nbytes, &pointer); }))
        return nullptr;
    return PyLong_FromVoidPtr(pointer);
}

// False, and nothing is freed, if it is not to wait and another thread is in a call.
PyObject* comm_mem_free(PyObject* object, PyObject* args) {
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "mem_free");
    if (!COMM_HAS(self->table, mem_free)) return raise_not_offered(site, self->table);
    PyObject* address;
    int waits = 1;
    if (!PyArg_ParseTuple(args, "O|p", &address, &waits)) return nullptr;
    void* pointer = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred()) return nullptr;
    if (waits)
        self->call_mutex->lock();
    else if (!self->call_mutex->try_lock())
        return new_reference(Py_False);
    if (!call_locked(self, site, [&](comm_t comm) { return self->table->mem_free(comm, pointer); }))
        return nullptr;
    return new_reference(Py_True);
}

// Makes a reduction that multiplies by one number, of the dtype that will be reduced, and sums.
PyObject* comm_scaled_sum(PyObject* object, PyObject* argument) {
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "scaled_sum");
    if (!COMM_HAS(self->table, premul_sum_create)) return raise_not_offered(site, self->table);
    CallSite on_cpu = site;
    on_cpu.device_type = COMM_CPU;
    TensorView scale;
    if (read_tensor(on_cpu, argument, &scale) < 0) return nullptr;
    if (scale.numel != 1) {
        PyErr_Format(PyExc_ValueError, "%s, scaled_sum: needs one number, not %llu", site.me,
                     static_cast<unsigned long long>(scale.numel));
        return nullptr;
    }
    comm_op op = 0;
    if (!call_library(self, site, [&](comm_t comm) {
            return self->table->premul_sum_create(comm, scale.data, scale.dtype, &op);
        }))
        return nullptr;
    return PyLong_FromLong(op);
}

PyObject* comm_finalize(PyObject* object, PyObject*) {
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "finalize");
    if (!COMM_HAS(self->table, finalize)) return raise_not_offered(site, self->table);
    if (!call_library(self, site, [&](comm_t comm) { return self->table->finalize(comm); }))
        return nullptr;
    return new_reference(Py_None);
}

// From a watchdog thread. None while a call runs: that call reports its errors itself.
PyObject* comm_async_error(PyObject* object, PyObject*) {
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "async_error");
    if (!COMM_HAS(self->table, async_error)) return raise_not_offered(site, self->table);
    if (!self->call_mutex->try_lock()) return new_reference(Py_None);
    if (self->handle == nullptr) {
        self->call_mutex->unlock();
        return new_reference(Py_None);
    }
    bool is_sound =
        call_locked(self, site, [&](comm_t comm) { return self->table->async_error(comm); });
    return is_sound ? new_reference(Py_None) : nullptr;
}

PyObject* comm_borrow(PyObject* object, PyObject*) {
    return PyCapsule_New(&comm_of(object)->borrowed, borrowed_comm_name, nullptr);
}

PyObject* comm_name_rank(PyObject* object, PyObject* name) {
    Comm* self = comm_of(object);
    const char* text = PyUnicode_AsUTF8AndSize(name, nullptr);
    if (text == nullptr) return nullptr;
    Py_XDECREF(self->rank_name);
    self->rank_name = new_reference(name);
    self->site.me = text;
    return new_reference(Py_None);
}

PyObject* comm_raise_result(PyObject* object, PyObject* args) {
    int code;
    const char* text;
    if (!PyArg_ParseTuple(args, "is", &code, &text)) return nullptr;
    raise_call_error(comm_of(object), static_cast<comm_result>(code), text);
    return nullptr;
}

PyObject* comm_handle(PyObject* object, PyObject*) {
    return PyLong_FromVoidPtr(comm_of(object)->handle);
}

PyObject* comm_split(PyObject* object, PyObject* args) {
    Comm* self = comm_of(object);
    CallSite site = site_of(self, "split");
    if (!COMM_HAS(self->table, split)) return raise_not_offered(site, self->table);
    comm_init_args child = {};
    child.device = site.device;
    int color, key;
    if (!PyArg_ParseTuple(args, "iiii", &color, &key, &child.rank, &child.nranks)) return nullptr;
    comm_t handle = nullptr;
    if (!call_library(self, site,
                      [&](comm_t comm) { return self->table->split(comm, color, key, &handle); }))
        return nullptr;
    if (handle == nullptr) return new_reference(Py_None);
    Comm* child_comm = new_comm(self->plugin, self->table, child);
    if (child_comm == nullptr)
        self->table->destroy(handle);
    else
        child_comm->handle = handle;
    return reinterpret_cast<PyObject*>(child_comm);
}

void comm_dealloc(PyObject* object) {
    Comm* self = comm_of(object);
    if (self->call_mutex != nullptr && self->stream_mutex != nullptr) destroy(self);
    delete self->call_mutex;
    delete self->destroy_mutex;
    delete self->stream_mutex;
    for (PyObject* reference : self->plain_tensors.references) Py_XDECREF(reference);
    Py_XDECREF(self->bootstrap);
    Py_XDECREF(self->rank_name);
    Py_XDECREF(self->group_tensors);
    Py_XDECREF(self->plugin);
    free_object(object);
}

void lock_without_gil(void* mutex) { static_cast<CallMutex*>(mutex)->lock_without_gil(); }
void unlock(void* mutex) { static_cast<CallMutex*>(mutex)->unlock(); }

constexpr int FAST = METH_FASTCALL | METH_KEYWORDS;

PyMethodDef comm_methods[] = {
    {"allreduce", as_method(comm_allreduce), FAST,
     "allreduce(tensor, op='sum', out=None) -> out or tensor"},
    {"broadcast", as_method(comm_broadcast), FAST, "broadcast(tensor, src=0) -> tensor"},
    {"reduce", as_method(comm_reduce), FAST, "reduce(tensor, dst=0, op='sum') -> tensor"},
    {"allgather", as_method(comm_allgather), FAST, "allgather(tensor, out) -> out"},
    {"reduce_scatter", as_method(comm_reduce_scatter), FAST,
     "reduce_scatter(tensor, op, out) -> out"},
    {"alltoall", as_method(comm_alltoall), FAST, "alltoall(tensor, out) -> out"},
    {"gather", as_method(comm_gather), FAST, "gather(tensor, out, dst), out on dst only"},
    {"scatter", as_method(comm_scatter), FAST, "scatter(out, rows, src), rows on src only"},
    {"allgatherv", as_method(comm_allgatherv), FAST, "allgatherv(tensor, out, counts)"},
    {"reduce_scatterv", as_method(comm_reduce_scatterv), FAST,
     "reduce_scatterv(tensor, op, out, counts)"},
    {"send", as_method(comm_send), FAST, "send(tensor, dst)"},
    {"recv", as_method(comm_recv), FAST, "recv(tensor, src) -> tensor"},
    {"barrier", comm_barrier, METH_NOARGS, "barrier()"},
    {"decline", comm_decline, METH_O,
     "decline(why): in place of a call of all ranks, which raises on them"},
    {"group_start", comm_group_start, METH_NOARGS, "group_start()"},
    {"group_end", comm_group_end, METH_NOARGS, "group_end()"},
    {"abort", comm_abort, METH_NOARGS,
     "From any thread: end pending and later calls with PeerLost."},
    {"set_timeout", comm_set_timeout, METH_O,
     "set_timeout(timeout_ms): the deadline of later calls. From any thread."},
    {"close", comm_close, METH_NOARGS, "Free everything; harmless when repeated."},
    {"name_rank", comm_name_rank, METH_O,
     "name_rank(text) for errors, where this rank has another number than here"},
    {"mem_alloc", comm_mem_alloc, METH_O, "mem_alloc(nbytes) -> address"},
    {"mem_free", comm_mem_free, METH_VARARGS, "mem_free(address, waits=True) -> bool"},
    {"scaled_sum", comm_scaled_sum, METH_O, "scaled_sum(tensor of one number) -> op"},
    {"handle", comm_handle, METH_NOARGS,
     "handle() -> the address that the library gave, 0 once closed, for an option of the library"},
    {"split", comm_split, METH_VARARGS, "split(color, key, rank, nranks) -> Comm or None"},
    {"finalize", comm_finalize, METH_NOARGS,
     "Wait for enqueued work and end in order; close() comes after."},
    {"borrow", comm_borrow, METH_NOARGS,
     "borrow() -> capsule for other C++, valid as long as this object"},
    {"raise_result", comm_raise_result, METH_VARARGS,
     "raise_result(code, text) raises the error of a call through borrow()"},
    {"stream_write", comm_stream_write, METH_VARARGS,
     "stream_write(dst, prefix, address, nbytes) -> bytes written, the prefix's first"},
    {"stream_read", comm_stream_read, METH_VARARGS,
     "stream_read(src, address, nbytes) -> bytes read"},
    {"stream_wait", comm_stream_wait, METH_VARARGS,
     "stream_wait(interest, timeout_ms) -> rank that is ready, or -1"},
    {"stream_sleep", comm_stream_sleep, METH_O, "stream_sleep(timeout_ms)"},
    {"stream_notify", comm_stream_notify, METH_O, "stream_notify(what), for stream_sleep"},
    {"stream_check", comm_stream_check, METH_O,
     "stream_check(peer) raises PeerLost if its process or communicator has ended"},
    {"async_error", comm_async_error, METH_NOARGS,
     "From any thread: raise the error of an enqueued operation that failed."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot comm_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(comm_dealloc)},
                            {Py_tp_methods, comm_methods},
                            {0, nullptr}};
PyType_Spec comm_spec = {"communicator._native.Comm", sizeof(Comm), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, comm_slots};

}  // namespace

bool make_comm_type() {
    comm_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&comm_spec));
    return comm_type != nullptr;
}

Comm* new_comm(PyObject* plugin, const comm_plugin* table, const comm_init_args& args) {
    Comm* self = reinterpret_cast<Comm*>(PyType_GenericAlloc(comm_type, 0));
    if (self == nullptr) return nullptr;
    self->plugin = new_reference(plugin);
    self->table = table;
    self->call_mutex = new CallMutex;
    self->destroy_mutex = new std::mutex;
    self->stream_mutex = new std::shared_mutex;
    self->group_tensors = PyList_New(0);
    self->borrowed = BorrowedComm{self->table,      &self->handle,    args.rank, args.nranks,
                                  self->call_mutex, lock_without_gil, unlock};
    self->rank_name = PyUnicode_FromFormat("rank %d", args.rank);
    self->site = CallSite{"",
                          PyUnicode_AsUTF8AndSize(self->rank_name, nullptr),
                          args.rank,
                          args.nranks,
                          self->table->device_type,
                          args.device,
                          COMM_HAS(self->table, premul_sum_create),
                          &self->plain_tensors};
    return self;
}
