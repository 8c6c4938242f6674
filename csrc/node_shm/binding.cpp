// coordinator._node_shm: the board for Python. Reads arguments, releases the interpreter, calls. The
// limited API, so bytes are bytes objects and nothing else.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <new>
#include <vector>

#include "node_shm/node_shm.h"
#include "python/convert/python_object.h"

namespace {

using board::Board;
using board::Call;
using board::Range;

PyObject* mismatch_error;

// A call that has begun and not ended: waiting returns to Python now and then.
struct Pending {
    PyObject* data = nullptr;   // this rank's bytes
    PyObject* found = nullptr;  // list of bytes by rank, once sizes are known
    std::vector<Range> ranges;  // what is wanted of each rank's bytes
    std::vector<char*> targets;
    bool wants = false;
    bool is_scattered = false;
};

struct Object {
    PyObject_HEAD Board* board;
    Pending* pending;
};

Object* self_of(PyObject* object) { return reinterpret_cast<Object*>(object); }

void forget(Pending* pending) {
    PyObject *data = pending->data, *found = pending->found;
    *pending = Pending{};
    Py_XDECREF(data);
    Py_XDECREF(found);
}

int64_t deadline_of(double timeout_s) {
    return shm::now_ns() + static_cast<int64_t>(timeout_s * 1e9);
}

bool copy_text(PyObject* text, char* target, size_t nbytes) {
    const char* found = PyUnicode_AsUTF8AndSize(text, nullptr);
    if (found == nullptr) return false;
    snprintf(target, nbytes, "%s", found);
    return true;
}

Range wanted(const Object* self, int rank) {
    const Pending* pending = self->pending;
    if (!pending->wants) return {};
    if (pending->is_scattered) return self->board->part_of(rank);
    return {0, self->board->call_of(rank).nbytes};
}

// Large pages, where the system gives them to who asks: else filling fresh memory costs more than
// copying into it. It is advice, so its failure is none.
void advise_large_pages(char* start, size_t nbytes) {
    constexpr uintptr_t large = 2 << 20;
    if (nbytes < 2 * large) return;
    uintptr_t first = (reinterpret_cast<uintptr_t>(start) + large - 1) & ~(large - 1);
    uintptr_t last = (reinterpret_cast<uintptr_t>(start) + nbytes) & ~(large - 1);
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

// A place for what the ranks bring, now that it is known how much that is.
bool make_room(Object* self) {
    Pending* pending = self->pending;
    int nranks = self->board->nranks;
    pending->found = PyList_New(nranks);
    if (pending->found == nullptr) return false;
    pending->ranges.resize(nranks);
    pending->targets.assign(nranks, nullptr);
    for (int rank = 0; rank < nranks; ++rank) {
        bool is_mine = rank == self->board->rank && !pending->is_scattered;
        Range range = is_mine ? Range{} : wanted(self, rank);
        PyObject* item = is_mine ? pending->data : nullptr;
        if (is_mine)
            Py_INCREF(item);
        else
            item = PyBytes_FromStringAndSize(nullptr, range.end - range.begin);
        if (item == nullptr) return false;
        pending->ranges[rank] = range;
        pending->targets[rank] = is_mine ? nullptr : PyBytes_AsString(item);
        if (!is_mine) advise_large_pages(PyBytes_AsString(item), range.end - range.begin);
        PyList_SetItem(pending->found, rank, item);
    }
    return true;
}

void read_round(const Object* self) {
    for (int rank = 0; rank < self->board->nranks; ++rank)
        if (self->pending->targets[rank] != nullptr)
            self->board->read(rank, self->pending->ranges[rank], self->pending->targets[rank]);
}

bool is_everyone_in_this_call(const Board* board) {
    for (int rank = 0; rank < board->nranks; ++rank)
        if (!board->is_same_call(rank)) return false;
    return true;
}

// After the first round. False with an exception set.
bool take_stock(Object* self) {
    if (!is_everyone_in_this_call(self->board)) {
        PyErr_SetString(mismatch_error, "the ranks are in different calls");
        return false;
    }
    return make_room(self);
}

// Every further round; False if time ran out in one.
bool run_rounds(Object* self, int64_t deadline_ns) {
    Board* board = self->board;
    do {
        if (!board->wait(deadline_ns)) return false;
        read_round(self);
    } while (board->next());
    return true;
}

PyObject* finish(Object* self) {
    self->board->end();
    PyObject* found = self->pending->found;
    Py_INCREF(found);
    forget(self->pending);
    return found;
}

PyObject* fail(Object* self) {
    self->board->end();
    forget(self->pending);
    return nullptr;
}

// The list of bytes if the call ends in time, else None: call again.
PyObject* proceed(Object* self, double timeout_s) {
    int64_t deadline_ns = deadline_of(timeout_s);
    bool is_over = false;
    if (self->pending->found == nullptr) {
        bool is_complete;
        Py_BEGIN_ALLOW_THREADS;
        is_complete = self->board->wait(deadline_ns);
        Py_END_ALLOW_THREADS;
        if (!is_complete) Py_RETURN_NONE;
        if (!take_stock(self)) return fail(self);
    }
    Py_BEGIN_ALLOW_THREADS;
    is_over = run_rounds(self, deadline_ns);
    Py_END_ALLOW_THREADS;
    if (!is_over) Py_RETURN_NONE;
    return finish(self);
}

PyObject* board_exchange(PyObject* object, PyObject* const* args, Py_ssize_t nargs) {
    Object* self = self_of(object);
    if (nargs != 8) {
        PyErr_SetString(PyExc_TypeError, "exchange() takes 8 arguments");
        return nullptr;
    }
    Call call = {};
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
    bool wants = PyObject_IsTrue(args[5]) == 1, is_scattered = PyObject_IsTrue(args[6]) == 1;
    if (PyErr_Occurred()) return nullptr;
    forget(self->pending);
    Py_INCREF(args[4]);
    self->pending->data = args[4];
    self->pending->wants = wants;
    self->pending->is_scattered = is_scattered;
    Py_BEGIN_ALLOW_THREADS;
    self->board->begin(call, data);
    Py_END_ALLOW_THREADS;
    return proceed(self, timeout_s);
}

PyObject* board_resume(PyObject* object, PyObject* argument) {
    double timeout_s = PyFloat_AsDouble(argument);
    if (PyErr_Occurred()) return nullptr;
    if (self_of(object)->pending->data == nullptr) {
        PyErr_SetString(PyExc_RuntimeError, "resume() without a call that has begun");
        return nullptr;
    }
    return proceed(self_of(object), timeout_s);
}

PyObject* board_glimpse(PyObject* object, PyObject* argument) {
    Board* board = self_of(object)->board;
    long rank = PyLong_AsLong(argument);
    if (PyErr_Occurred()) return nullptr;
    if (rank < 0 || rank >= board->nranks) {
        PyErr_SetString(PyExc_IndexError, "no such rank");
        return nullptr;
    }
    board::Glimpse found = board->glimpse(static_cast<int>(rank));
    double ago_s = (shm::now_ns() - found.seen_ns) / 1e9;
    return Py_BuildValue("IiIsKsd", found.status, static_cast<int>(found.has_arrived), found.calls,
                         found.call.name, static_cast<unsigned long long>(found.call.number),
                         found.call.site, ago_s);
}

PyObject* board_set_status(PyObject* object, PyObject* argument) {
    unsigned long status = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred()) return nullptr;
    self_of(object)->board->set_status(static_cast<uint32_t>(status));
    Py_RETURN_NONE;
}

PyObject* board_give_verdict(PyObject* object, PyObject* argument) {
    char* text;
    Py_ssize_t nbytes;
    if (PyBytes_AsStringAndSize(argument, &text, &nbytes) != 0) return nullptr;
    return PyBool_FromLong(self_of(object)->board->give_verdict(text, static_cast<size_t>(nbytes)));
}

PyObject* board_verdict(PyObject* object, PyObject*) {
    Board* board = self_of(object)->board;
    if (!board->has_verdict()) Py_RETURN_NONE;
    return PyBytes_FromStringAndSize(board->head().verdict, board->head().verdict_size);
}

void board_dealloc(PyObject* object) {
    Object* self = self_of(object);
    if (self->pending != nullptr) forget(self->pending);
    delete self->pending;
    delete self->board;
    free_object(object);
}

PyObject* board_new(PyTypeObject* type, PyObject* args, PyObject*) {
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
    self->board = new Board(nranks, rank, may_spin != 0);
    int error = self->board->map(fd);
    if (error == 0) return object;
    Py_DECREF(object);
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

PyObject* create(PyObject*, PyObject* argument) {
    long nranks = PyLong_AsLong(argument);
    if (PyErr_Occurred()) return nullptr;
    int fd = Board::create(static_cast<int>(nranks));
    if (fd >= 0) return PyLong_FromLong(fd);
    errno = -fd;
    return PyErr_SetFromErrno(PyExc_OSError);
}

PyMethodDef board_methods[] = {
    {"exchange", as_method(board_exchange), METH_FASTCALL,
     "exchange(name, number, tag, site, data, wants, is_scattered, timeout_s)\n"
     "-> list of every rank's bytes, or None if not all came in time: then resume().\n"
     "Collective. Raises Mismatch if the ranks are in different calls."},
    {"resume", board_resume, METH_O, "resume(timeout_s) -> as exchange()"},
    {"glimpse", board_glimpse, METH_O,
     "glimpse(rank) -> (status, has_arrived, calls, name, number, site, seen_ago_s)"},
    {"set_status", board_set_status, METH_O, "set_status(number), for the others to see"},
    {"give_verdict", board_give_verdict, METH_O,
     "give_verdict(bytes) -> whether it is the first; wakes everybody"},
    {"verdict", board_verdict, METH_NOARGS, "verdict() -> bytes, or None"},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot board_slots[] = {{Py_tp_new, reinterpret_cast<void*>(board_new)},
                             {Py_tp_dealloc, reinterpret_cast<void*>(board_dealloc)},
                             {Py_tp_methods, board_methods},
                             {0, nullptr}};
PyType_Spec board_spec = {"coordinator._node_shm.Board", sizeof(Object), 0, Py_TPFLAGS_DEFAULT,
                          board_slots};

PyMethodDef module_methods[] = {
    {"create", create, METH_O, "create(nranks) -> descriptor of the memory of a board"},
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
    mismatch_error = PyErr_NewException("coordinator._node_shm.Mismatch", nullptr, nullptr);
    PyObject* type = PyType_FromSpec(&board_spec);
    if (mismatch_error == nullptr || type == nullptr) return nullptr;
    Py_INCREF(mismatch_error);
    PyModule_AddObject(module, "Mismatch", mismatch_error);
    PyModule_AddObject(module, "Board", type);
    return module;
}
