// communicator._native: opens libraries built for communicator.h and calls them with torch tensors.
//
// Every method reads its arguments, releases the GIL, calls the library and reports. Python decides
// everything else. Limited API only, and no header of torch or CUDA.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>

#include "python/comm.h"
#include "python/plugin.h"

namespace {

const char* missing_entry(const comm_plugin* table) {
#define REQUIRE(entry) \
    if (!COMM_HAS(table, entry)) return #entry
    REQUIRE(name);
    REQUIRE(version);
    REQUIRE(probe);
    REQUIRE(init);
    REQUIRE(destroy);
    REQUIRE(allreduce);
    REQUIRE(last_error);
#undef REQUIRE
    bool lacks_id = table->unique_id_bytes > 0 && !COMM_HAS(table, get_unique_id);
    return lacks_id ? "get_unique_id" : nullptr;
}

bool check_table(const char* path, const comm_plugin* table) {
    if (table == nullptr) {
        PyErr_Format(errors.unsupported,
                     "%s refuses to be used here: its comm_plugin_entry_v1 returned NULL. Ask its "
                     "vendor, or choose another backend",
                     path);
        return false;
    }
    if (table->struct_size < offsetof(comm_plugin, name) || table->abi_major != COMM_ABI_MAJOR) {
        PyErr_Format(
            errors.unsupported,
            "%s was built for version %u of communicator.h, and this is version %u. Build it "
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
        PyErr_Format(
            errors.unsupported,
            "%s needs a unique id of %u bytes, and at most %u are possible. Make it shorter", path,
            table->unique_id_bytes, COMM_UNIQUE_ID_MAX);
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
                            "the library does not load: %s. Check the path, and its dependencies "
                            "with ldd",
                            dlerror());
    auto entry =
        reinterpret_cast<const comm_plugin* (*)(void)>(dlsym(library, "comm_plugin_entry_v1"));
    if (entry == nullptr)
        return PyErr_Format(errors.unsupported,
                            "%s does not export comm_plugin_entry_v1, so it is not a library for "
                            "communicator.h (version %u). Export it, or choose another backend",
                            path, COMM_ABI_MAJOR);
    const comm_plugin* table = entry();
    if (!check_table(path, table)) return nullptr;
    return new_plugin(table);
}

PyMethodDef module_methods[] = {
    {"open", open_library, METH_O, "open(path) -> Plugin. Raises Unsupported if it is not one."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module_definition = {PyModuleDef_HEAD_INIT,
                                 "communicator._native",
                                 "Opens libraries built for communicator.h.",
                                 -1,
                                 module_methods,
                                 nullptr,
                                 nullptr,
                                 nullptr,
                                 nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native(void) {
    if (!find_exception_types() || load_torch_types() < 0 || !make_plugin_type() ||
        !make_comm_type())
        return nullptr;
    return PyModule_Create(&module_definition);
}
