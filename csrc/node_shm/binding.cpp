// coordinator._node_shm: NodeSegment for Python. Converts arguments, releases the interpreter lock,
// calls. Uses the limited API, so data are bytes objects only.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <vector>

#include "node_shm/node_shm.h"
#include "python/convert/python_object.h"

namespace {

using node_shm::CallRecord;
using node_shm::NodeSegment;
using node_shm::Range;

PyObject* mismatch_error;

// A call that has begun and not ended: exchange() and resume() return to Python now and then.
struct Pending {
    PyObject* data = nullptr;     // this rank's bytes
    PyObject* results = nullptr;  // list of bytes by rank, once sizes are known
    std::vector<Range> ranges;    // the part of each rank's bytes that is read
    std::vector<char*> targets;
    bool reads = false;
    bool is_scattered = false;
};

struct Object {
    PyObject_HEAD NodeSegment* segment;
    Pending* pending;
};

Object* self_of(PyObject* object) { return reinterpret_cast<Object*>(object); }

void forget(Pending* pending) {
    PyObject *data = pending->data, *results = pending->results;
    *pending = Pending{};
    Py_XDECREF(data);
    Py_XDECREF(results);
}

int64_t deadline_of(double timeout_s) {
    return shm::now_ns() + static_cast<int64_t>(timeout_s * 1e9);
}

// Into a target of zeros, cut to fit with its final zero.
bool copy_text(PyObject* text, char* target, size_t target_nbytes) {
    Py_ssize_t nbytes;
    const char* utf8 = PyUnicode_AsUTF8AndSize(text, &nbytes);
    if (utf8 == nullptr) return false;
    std::memcpy(target, utf8, std::min(static_cast<size_t>(nbytes), target_nbytes - 1));
    return true;
}

// A text that was cut, or read while it changed, may have half a character.
PyObject* read_text(const char* text) {
    return PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(std::strlen(text)), "replace");
}

// The part of a rank's bytes that this rank reads.
Range range_to_read(const Object* self, int rank) {
    const Pending* pending = self->pending;
    if (!pending->reads) return {};
    if (pending->is_scattered) return self->segment->part_of(rank);
    return {0, self->segment->nbytes_of(rank)};
}

// Ask for huge pages: otherwise page faults of fresh memory cost more than the copy. Errors are
// ignored, since it is only advice.
void advise_large_pages(char* start, size_t nbytes) {
    constexpr uintptr_t large = 2 << 20;
    if (nbytes < 2 * large) return;
    uintptr_t first = (reinterpret_cast<uintptr_t>(start) + large - 1) & ~(large - 1);
    uintptr_t last = (reinterpret_cast<uintptr_t>(start) + nbytes) & ~(large - 1);
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

// Allocate the results, now that the size of each rank's data is known.
bool allocate_results(Object* self) {
    Pending* pending = self->pending;
    int nranks = self->segment->nranks;
    pending->results = PyList_New(nranks);
    if (pending->results == nullptr) return false;
    pending->ranges.resize(nranks);
    pending->targets.assign(nranks, nullptr);
    for (int rank = 0; rank < nranks; ++rank) {
        bool is_own = rank == self->segment->rank && !pending->is_scattered;
        Range range = is_own ? Range{} : range_to_read(self, rank);
        PyObject* item = is_own ? pending->data : nullptr;
        if (is_own)
            Py_INCREF(item);
        else
            item = PyBytes_FromStringAndSize(nullptr, range.end - range.begin);
        if (item == nullptr) return false;
        pending->ranges[rank] = range;
        pending->targets[rank] = is_own ? nullptr : PyBytes_AsString(item);
        if (!is_own) advise_large_pages(PyBytes_AsString(item), range.end - range.begin);
        PyList_SetItem(pending->results, rank, item);
    }
    return true;
}

void read_round(const Object* self) {
    for (int rank = 0; rank < self->segment->nranks; ++rank)
        if (self->pending->targets[rank] != nullptr)
            self->segment->read(rank, self->pending->ranges[rank], self->pending->targets[rank]);
}

bool is_everyone_in_this_call(const NodeSegment* segment) {
    for (int rank = 0; rank < segment->nranks; ++rank)
        if (!segment->is_same_call(rank)) return false;
    return true;
}

// After the first round. False with an exception set.
bool check_calls_and_allocate(Object* self) {
    if (!is_everyone_in_this_call(self->segment)) {
        PyErr_SetString(mismatch_error, "the ranks are in different calls");
        return false;
    }
    return allocate_results(self);
}

// Run all further rounds; false if time ran out in one.
bool run_rounds(Object* self, int64_t deadline_ns) {
    NodeSegment* segment = self->segment;
    do {
        if (!segment->wait(deadline_ns)) return false;
        read_round(self);
    } while (segment->next());
    return true;
}

PyObject* finish(Object* self) {
    self->segment->end();
    PyObject* results = self->pending->results;
    Py_INCREF(results);
    forget(self->pending);
    return results;
}

PyObject* fail(Object* self) {
    self->segment->end();
    forget(self->pending);
    return nullptr;
}

// Begins `call`, or goes on with the one that has begun if that is null. The list of bytes if the
// call ends in time, else None: call again.
PyObject* proceed(Object* self, const CallRecord* call, double timeout_s) {
    NodeSegment* segment = self->segment;
    const char* data = PyBytes_AsString(self->pending->data);
    int64_t deadline_ns = deadline_of(timeout_s);
    bool is_complete;
    Py_BEGIN_ALLOW_THREADS;
    if (call != nullptr) segment->begin(*call, data);
    is_complete = segment->wait(deadline_ns);
    Py_END_ALLOW_THREADS;
    if (!is_complete) Py_RETURN_NONE;
    if (self->pending->results == nullptr && !check_calls_and_allocate(self)) return fail(self);
    if (segment->has_one_round()) {  // a few KB: to give the interpreter lock away costs more
        read_round(self);
        return finish(self);
    }
    Py_BEGIN_ALLOW_THREADS;
    is_complete = run_rounds(self, deadline_ns);
    Py_END_ALLOW_THREADS;
    if (!is_complete) Py_RETURN_NONE;
    return finish(self);
}

PyObject* segment_exchange(PyObject* object, PyObject* const* args, Py_ssize_t nargs) {
    Object* self = self_of(object);
    if (nargs != 8) {
        PyErr_SetString(PyExc_TypeError, "exchange() takes 8 arguments");
        return nullptr;
    }
    CallRecord call = {};
    char* data;
    Py_ssize_t nbytes;
    if (!copy_text(args[0], call.name, sizeof call.name) ||
        !copy_text(args[3], call.site, sizeof call.site) ||
        PyBytes_AsStringAndSize(args[4], &data, &nbytes) != 0)
        return nullptr;
    call.number = PyLong_AsUnsignedLongLong(args[1]);
    call.tag = PyLong_AsUnsignedLongLong(args[2]);
    call.nbytes = static_cast<uint64_t>(nbytes);
    double timeout_s = PyFloat_AsDouble(args[7]);
    bool reads = PyObject_IsTrue(args[5]) == 1, is_scattered = PyObject_IsTrue(args[6]) == 1;
    if (PyErr_Occurred()) return nullptr;
    forget(self->pending);
    if (self->segment->has_failed() && !self->segment->was_in(call.number)) Py_RETURN_NONE;
    Py_INCREF(args[4]);
    self->pending->data = args[4];
    self->pending->reads = reads;
    self->pending->is_scattered = is_scattered;
    return proceed(self, &call, timeout_s);
}

PyObject* segment_resume(PyObject* object, PyObject* argument) {
    Object* self = self_of(object);
    double timeout_s = PyFloat_AsDouble(argument);
    if (PyErr_Occurred()) return nullptr;
    if (self->pending->data == nullptr) Py_RETURN_NONE;  // exchange() found a failed group
    return proceed(self, nullptr, timeout_s);
}

PyObject* segment_read_status(PyObject* object, PyObject* argument) {
    NodeSegment* segment = self_of(object)->segment;
    long rank = PyLong_AsLong(argument);
    if (PyErr_Occurred()) return nullptr;
    if (rank < 0 || rank >= segment->nranks) {
        PyErr_SetString(PyExc_IndexError, "no such rank");
        return nullptr;
    }
    node_shm::PeerStatus peer = segment->read_status(static_cast<int>(rank));
    double ago_s = (shm::now_ns() - peer.seen_ns) / 1e9;
    return Py_BuildValue("IiINKNd", peer.status, static_cast<int>(peer.has_arrived), peer.calls,
                         read_text(peer.call.name),
                         static_cast<unsigned long long>(peer.call.number),
                         read_text(peer.call.site), ago_s);
}

PyObject* segment_set_status(PyObject* object, PyObject* argument) {
    unsigned long status = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred()) return nullptr;
    self_of(object)->segment->set_status(static_cast<uint32_t>(status));
    Py_RETURN_NONE;
}

PyObject* segment_publish_failure(PyObject* object, PyObject* argument) {
    char* text;
    Py_ssize_t nbytes;
    if (PyBytes_AsStringAndSize(argument, &text, &nbytes) != 0) return nullptr;
    NodeSegment* segment = self_of(object)->segment;
    return PyBool_FromLong(segment->publish_failure(text, static_cast<size_t>(nbytes)));
}

PyObject* segment_group_failure(PyObject* object, PyObject*) {
    NodeSegment* segment = self_of(object)->segment;
    if (!segment->has_failed()) Py_RETURN_NONE;
    return PyBytes_FromStringAndSize(segment->header().failure, segment->header().failure_size);
}

void segment_dealloc(PyObject* object) {
    Object* self = self_of(object);
    if (self->pending != nullptr) forget(self->pending);
    delete self->pending;
    delete self->segment;
    free_object(object);
}

PyObject* segment_new(PyTypeObject* type, PyObject* args, PyObject*) {
    int fd, nranks, rank, may_spin;
    if (!PyArg_ParseTuple(args, "iiip", &fd, &nranks, &rank, &may_spin)) return nullptr;
    if (rank < 0 || rank >= nranks) {
        PyErr_SetString(PyExc_ValueError, "no such rank");
        return nullptr;
    }
    PyObject* object = PyType_GenericAlloc(type, 0);
    if (object == nullptr) return nullptr;
    Object* self = self_of(object);
    self->pending = new Pending;
    self->segment = new NodeSegment(nranks, rank, may_spin != 0);
    int error = self->segment->map(fd);
    if (error == 0) return object;
    Py_DECREF(object);
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

PyObject* create(PyObject*, PyObject* argument) {
    long nranks = PyLong_AsLong(argument);
    if (PyErr_Occurred()) return nullptr;
    int fd = NodeSegment::create(static_cast<int>(nranks));
    if (fd >= 0) return PyLong_FromLong(fd);
    errno = -fd;
    return PyErr_SetFromErrno(PyExc_OSError);
}

PyMethodDef segment_methods[] = {
    {"exchange", as_method(segment_exchange), METH_FASTCALL,
     "exchange(name, number, tag, site, data, reads, is_scattered, timeout_s)\n"
     "-> list of every rank's bytes, or None if not all came in time: then resume(), or if the\n"
     "group has failed.\n"
     "Collective. Raises CallMismatch if the ranks are in different calls."},
    {"resume", segment_resume, METH_O, "resume(timeout_s) -> as exchange()"},
    {"read_status", segment_read_status, METH_O,
     "read_status(rank) -> (status, has_arrived, calls, name, number, site, seen_ago_s)"},
    {"set_status", segment_set_status, METH_O, "set_status(number), for the others to see"},
    {"publish_failure", segment_publish_failure, METH_O,
     "publish_failure(bytes) -> whether it is the first; wakes everybody"},
    {"group_failure", segment_group_failure, METH_NOARGS, "group_failure() -> bytes, or None"},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot segment_slots[] = {{Py_tp_new, reinterpret_cast<void*>(segment_new)},
                               {Py_tp_dealloc, reinterpret_cast<void*>(segment_dealloc)},
                               {Py_tp_methods, segment_methods},
                               {0, nullptr}};
PyType_Spec segment_spec = {"coordinator._node_shm.NodeSegment", sizeof(Object), 0,
                            Py_TPFLAGS_DEFAULT, segment_slots};

PyMethodDef module_methods[] = {
    {"create", create, METH_O, "create(nranks) -> descriptor of the memory of a segment"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module_definition = {PyModuleDef_HEAD_INIT,
                                 "coordinator._node_shm",
                                 "Memory that the ranks of a node share.",
                                 -1,
                                 module_methods,
                                 nullptr,
                                 nullptr,
                                 nullptr,
                                 nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__node_shm(void) {
    PyObject* module = PyModule_Create(&module_definition);
    if (module == nullptr) return nullptr;
    mismatch_error = PyErr_NewException("coordinator._node_shm.CallMismatch", nullptr, nullptr);
    PyObject* type = PyType_FromSpec(&segment_spec);
    if (mismatch_error == nullptr || type == nullptr) return nullptr;
    Py_INCREF(mismatch_error);
    PyModule_AddObject(module, "CallMismatch", mismatch_error);
    PyModule_AddObject(module, "NodeSegment", type);
    return module;
}
