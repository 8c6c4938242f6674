#include "python/convert/result.h"

ExceptionTypes errors;

namespace {

PyObject* exception_for(comm_result code) {
    switch (code) {
        case COMM_TIMEOUT:
            return errors.timeout;
        case COMM_REMOTE_ERROR:
            return errors.peer_lost;
        case COMM_UNSUPPORTED:
            return errors.unsupported;
        case COMM_INVALID_ARGUMENT:
            return PyExc_ValueError;
        default:
            return errors.base;
    }
}

const char* name_of_result(comm_result code) {
    static const char* const names[] = {"ok",
                                        "device error",
                                        "system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "a peer was lost",
                                        "in progress",
                                        "timeout"};
    if (code >= COMM_OK && code <= COMM_TIMEOUT) return names[code];
    return code == COMM_UNSUPPORTED ? "unsupported"
                                    : "a result that communicator.h does not define";
}

}  // namespace

PyObject* raise_result(const comm_plugin* table, comm_result code, const char* text) {
    bool has_text = text != nullptr && text[0] != '\0';
    PyErr_Format(exception_for(code), "%s%s%s, result %d: %s]", has_text ? text : "",
                 has_text ? " [" : "[", table->name, static_cast<int>(code), name_of_result(code));
    return nullptr;
}

bool find_exception_types() {
    PyObject* module = PyImport_ImportModule("communicator.errors");
    if (module == nullptr) return false;
    errors.base = PyObject_GetAttrString(module, "CommunicatorError");
    errors.timeout = PyObject_GetAttrString(module, "CommunicatorTimeout");
    errors.peer_lost = PyObject_GetAttrString(module, "PeerLost");
    errors.unsupported = PyObject_GetAttrString(module, "Unsupported");
    Py_DECREF(module);
    return !PyErr_Occurred();
}
