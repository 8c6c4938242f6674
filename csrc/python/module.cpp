// communicator._native: opens libraries that speak communicator.h and calls them with torch
// tensors.
//
// Every method does the same: read the arguments, release the interpreter, call, report. Python
// decides everything else. Limited API only, and no header of torch or CUDA.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>

#include "python/comm.h"
#include "python/plugin.h"

namespace {

const char* missing_entry(const comm_plugin* table) {
#define NEEDED(entry) \
    if (!COMM_HAS(table, entry)) return #entry
    NEEDED(name);
    NEEDED(version);
    NEEDED(probe);
    NEEDED(init);
    NEEDED(destroy);
    NEEDED(allreduce);
    NEEDED(last_error);
#undef NEEDED
    bool no_id = table->unique_id_bytes > 0 && !COMM_HAS(table, get_unique_id);
    return no_id ? "get_unique_id" : nullptr;
}

bool check_table(const char* path, const comm_plugin* table) {
    if (table == nullptr) {
        PyErr_Format(errors.unsupported,
                     "%s refuses to be used: its comm_plugin_entry_v1 gave NULL, so there is "
                     "nothing to call. Ask its vendor, or choose another backend",
                     path);
        return false;
    }
    if (table->struct_size < offsetof(comm_plugin, name) || table->abi_major != COMM_ABI_MAJOR) {
        PyErr_Format(errors.unsupported,
                     "%s speaks version %u of communicator.h, version %u is spoken here. Build it "
                     "against this header",
                     path, table->abi_major, COMM_ABI_MAJOR);
        return false;
    }
    const char* missing = missing_entry(table);
    if (missing != nullptr) {
        PyErr_Format(
            errors.unsupported,
            "%s has no '%s', which communicator.h requires. Fill it in, or set struct_size to "
            "sizeof(comm_plugin)",
            path, missing);
        return false;
    }
    if (table->unique_id_bytes > COMM_UNIQUE_ID_MAX) {
        PyErr_Format(errors.unsupported,
                     "%s wants a unique id of %u bytes; at most %u are carried, so the ranks could "
                     "not meet. Make it shorter",
                     path, table->unique_id_bytes, COMM_UNIQUE_ID_MAX);
        return false;
    }
    return true;
}

PyObject* open_library(PyObject*, PyObject* argument) {
    const char* path = PyUnicode_AsUTF8AndSize(argument, nullptr);
    if (path == nullptr) return nullptr;
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
        return PyErr_Format(errors.unsupported,
                            "the library does not load: %s. No rank can use it then. Check the "
                            "path, and with ldd what it needs",
                            dlerror());
    auto entry =
        reinterpret_cast<const comm_plugin* (*)(void)>(dlsym(library, "comm_plugin_entry_v1"));
    if (entry == nullptr)
        return PyErr_Format(errors.unsupported,
                            "%s exports no comm_plugin_entry_v1, so it is no library for "
                            "communicator.h (version %u). Export it, or choose another backend",
                            path, COMM_ABI_MAJOR);
    const comm_plugin* table = entry();
    if (!check_table(path, table)) return nullptr;
    return new_plugin(table);
}

PyMethodDef module_methods[] = {
    {"open", open_library, METH_O, "open(path) -> Plugin. Raises Unsupported if it is none."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module_definition = {PyModuleDef_HEAD_INIT,
                                 "communicator._native",
                                 "Opens libraries that speak communicator.h.",
                                 -1,
                                 module_methods,
                                 nullptr,
                                 nullptr,
                                 nullptr,
                                 nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native(void) {
    if (!find_errors() || find_torch() < 0 || !make_plugin_type() || !make_comm_type())
        return nullptr;
    return PyModule_Create(&module_definition);
}
