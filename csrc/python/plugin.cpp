// The table of a library as a Python object, which makes communicators.
#include "python/plugin.h"

#include <string>
#include <vector>

#include "python/comm.h"
#include "python/coordinator_bootstrap.h"

namespace {

PyTypeObject* plugin_type;

PyObject* plugin_unique_id(PyObject* object, PyObject*) {
    const comm_plugin* table = table_of(object);
    std::string id(table->unique_id_bytes, '\0');
    if (id.empty()) return PyBytes_FromStringAndSize(nullptr, 0);
    PyThreadState* state = PyEval_SaveThread();
    comm_result code = table->get_unique_id(&id[0]);
    const char* error = code != COMM_OK ? table->last_error(nullptr) : nullptr;
    PyEval_RestoreThread(state);
    if (code != COMM_OK) return raise_result(table, code, error);
    return PyBytes_FromStringAndSize(id.data(), static_cast<Py_ssize_t>(id.size()));
}

bool read_options(PyObject* options, std::vector<std::string>* texts) {
    Py_ssize_t length = options == nullptr ? 0 : PySequence_Size(options);
    for (Py_ssize_t i = 0; i < length; ++i) {
        PyObject* item = PySequence_GetItem(options, i);
        const char* text = item == nullptr ? nullptr : PyUnicode_AsUTF8AndSize(item, nullptr);
        if (text != nullptr) texts->push_back(text);
        Py_XDECREF(item);
    }
    return !PyErr_Occurred();
}

comm_result call_init(Comm* self, const comm_init_args& args, std::string* text) {
    PyThreadState* state = PyEval_SaveThread();
    comm_result code = self->table->init(&self->handle, &args);
    if (code != COMM_OK) {
        self->handle = nullptr;
        const char* error = self->table->last_error(nullptr);
        *text = error != nullptr ? error : "";
    }
    PyEval_RestoreThread(state);
    return code;
}

// Of a Coordinator; other bootstraps have none.
int64_t* allreduce_note_of(PyObject* bootstrap) {
    PyObject* address = PyObject_GetAttrString(bootstrap, "allreduce_note");
    void* note = address != nullptr ? PyLong_AsVoidPtr(address) : nullptr;
    Py_XDECREF(address);
    PyErr_Clear();
    return static_cast<int64_t*>(note);
}

PyObject* start_comm(PyObject* plugin, comm_init_args args, PyObject* bootstrap) {
    BootstrapContext context = {bootstrap, args.nranks, false, nullptr, nullptr, nullptr};
    comm_bootstrap callbacks = {sizeof(comm_bootstrap), &context, bootstrap_allgather,
                                bootstrap_barrier};
    args.bootstrap = &callbacks;
    Comm* self = new_comm(plugin, table_of(plugin), args);
    if (self == nullptr) return nullptr;
    std::string text;
    comm_result code = call_init(self, args, &text);
    if (code == COMM_OK && !context.failed) {
        Py_INCREF(bootstrap);
        self->bootstrap = bootstrap;
        self->allreduce_note = allreduce_note_of(bootstrap);
        return reinterpret_cast<PyObject*>(self);
    }
    Py_DECREF(reinterpret_cast<PyObject*>(self));
    if (context.failed)
        PyErr_Restore(context.type, context.value, context.traceback);
    else
        raise_result(table_of(plugin), code, text.c_str());
    return nullptr;
}

PyObject* plugin_init(PyObject* object, PyObject* args, PyObject* keywords) {
    static const char* const names[] = {"rank", "nranks",    "bootstrap", "device", "timeout_ms",
                                        "name", "unique_id", "options",   nullptr};
    comm_init_args init = {};
    init.struct_size = sizeof init;
    init.device = -1;
    init.timeout_ms = 300000;
    init.name = "";
    PyObject *bootstrap, *options = nullptr;
    const char* id = "";
    Py_ssize_t id_bytes = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "iiO|iisy#O", const_cast<char**>(names),
                                     &init.rank, &init.nranks, &bootstrap, &init.device,
                                     &init.timeout_ms, &init.name, &id, &id_bytes, &options))
        return nullptr;
    std::vector<std::string> texts;
    if (!read_options(options, &texts)) return nullptr;
    std::vector<const char*> pointers;
    for (const std::string& text : texts) pointers.push_back(text.c_str());
    pointers.push_back(nullptr);
    init.options = pointers.data();
    init.unique_id = id_bytes > 0 ? id : nullptr;
    init.unique_id_bytes = static_cast<size_t>(id_bytes);
    return start_comm(object, init, bootstrap);
}

PyObject* plugin_offers(PyObject* object, PyObject* argument) {
    const comm_plugin* table = table_of(object);
    const char* name = PyUnicode_AsUTF8AndSize(argument, nullptr);
    if (name == nullptr) return nullptr;
    std::string entry_name = name;
    bool offered = entry_name == "allreduce";
#define OFFERED(entry) offered = offered || (entry_name == #entry && COMM_HAS(table, entry))
    OFFERED(broadcast);
    OFFERED(reduce);
    OFFERED(allgather);
    OFFERED(reduce_scatter);
    OFFERED(alltoall);
    OFFERED(send);
    OFFERED(recv);
    OFFERED(barrier);
    OFFERED(group_start);
    OFFERED(group_end);
    OFFERED(abort);
    OFFERED(mem_alloc);
    OFFERED(mem_free);
    OFFERED(premul_sum_create);
    OFFERED(async_error);
    OFFERED(split);
    OFFERED(finalize);
    OFFERED(stream_check);
    OFFERED(set_timeout);
    OFFERED(gather);
    OFFERED(scatter);
    OFFERED(allgatherv);
    OFFERED(reduce_scatterv);
    OFFERED(decline);
#undef OFFERED
    return PyBool_FromLong(offered);
}

PyObject* plugin_name(PyObject* object, void*) {
    return PyUnicode_FromString(table_of(object)->name);
}

PyObject* plugin_version(PyObject* object, void*) {
    return PyUnicode_FromString(table_of(object)->version);
}

PyObject* plugin_device_type(PyObject* object, void*) {
    return PyLong_FromLong(table_of(object)->device_type);
}

PyObject* plugin_caps(PyObject* object, void*) {
    return PyLong_FromUnsignedLongLong(table_of(object)->caps);
}

void plugin_dealloc(PyObject* object) {  // the library stays loaded: its table may still be in use
    free_object(object);
}

PyMethodDef plugin_methods[] = {
    {"probe", plugin_probe, METH_NOARGS, "probe() -> score; raises if this process cannot use it"},
    {"try_probe", plugin_try_probe, METH_NOARGS,
     "try_probe() runs probe() in a child process, and raises if it crashes"},
    {"unique_id", plugin_unique_id, METH_NOARGS,
     "unique_id() -> bytes, which every rank passes to init()"},
    {"offers", plugin_offers, METH_O, "offers(entry) -> whether the table has this entry"},
    {"init", as_method(plugin_init), METH_VARARGS | METH_KEYWORDS,
     "init(rank, nranks, bootstrap, device=-1, timeout_ms=300000, name='', unique_id=b'', "
     "options=())\n"
     "-> Comm. Collective. bootstrap has allgather(bytes) -> list[bytes] and barrier()."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef plugin_attributes[] = {
    {"name", plugin_name, nullptr, nullptr, nullptr},
    {"version", plugin_version, nullptr, nullptr, nullptr},
    {"device_type", plugin_device_type, nullptr, "the number of a DLDeviceType", nullptr},
    {"caps", plugin_caps, nullptr, "bits of COMM_CAP_...", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot plugin_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(plugin_dealloc)},
                              {Py_tp_methods, plugin_methods},
                              {Py_tp_getset, plugin_attributes},
                              {0, nullptr}};
PyType_Spec plugin_spec = {"communicator._native.Plugin", sizeof(Plugin), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, plugin_slots};

}  // namespace

bool make_plugin_type() {
    plugin_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&plugin_spec));
    return plugin_type != nullptr;
}

PyObject* new_plugin(const comm_plugin* table) {
    PyObject* object = PyType_GenericAlloc(plugin_type, 0);
    if (object != nullptr) reinterpret_cast<Plugin*>(object)->table = table;
    return object;
}
