// launcher._encryption: EncryptedStream for Python, and X25519. Converts arguments, releases the
// interpreter lock, calls. Uses the limited API, so data are bytes objects only.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "encryption/encrypted_stream.h"
#include "encryption/libcrypto.h"
#include "python/convert/python_object.h"

namespace {

using encryption::EncryptedStream;
using encryption::key_nbytes;
using encryption::LibCrypto;

constexpr size_t max_received_nbytes = 4 * encryption::max_record_nbytes;

struct Object {
    PyObject_HEAD EncryptedStream* stream;
};

EncryptedStream* stream_of(PyObject* object) { return reinterpret_cast<Object*>(object)->stream; }

// BlockingIOError where nothing can be moved now.
PyObject* raise_error(int error) {
    if (error == EINTR) error = EAGAIN;
    if (error != EBADMSG) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    PyObject* arguments = Py_BuildValue("is", error, encryption::altered);
    if (arguments != nullptr) PyErr_SetObject(PyExc_OSError, arguments);
    Py_XDECREF(arguments);
    return nullptr;
}

PyObject* stream_send(PyObject* object, PyObject* argument) {
    char* data;
    Py_ssize_t nbytes;
    if (PyBytes_AsStringAndSize(argument, &data, &nbytes) != 0) return nullptr;
    iovec part = {data, static_cast<size_t>(nbytes)};
    ssize_t count;
    int error;
    Py_BEGIN_ALLOW_THREADS;
    count = stream_of(object)->send(&part, 1);
    error = errno;
    Py_END_ALLOW_THREADS;
    return count < 0 ? raise_error(error) : PyLong_FromSsize_t(count);
}

PyObject* stream_recv(PyObject* object, PyObject* argument) {
    size_t nbytes = std::min(PyLong_AsSize_t(argument), max_received_nbytes);
    if (PyErr_Occurred()) return nullptr;
    std::string data(nbytes, 0);
    ssize_t count;
    int error;
    Py_BEGIN_ALLOW_THREADS;
    count = stream_of(object)->recv(&data[0], nbytes);
    error = errno;
    Py_END_ALLOW_THREADS;
    return count < 0 ? raise_error(error) : PyBytes_FromStringAndSize(data.data(), count);
}

PyObject* stream_pending(PyObject* object, PyObject*) {
    return PyLong_FromSize_t(stream_of(object)->pending());
}

void stream_dealloc(PyObject* object) {
    delete stream_of(object);
    free_object(object);
}

const LibCrypto* require_libcrypto() {
    const LibCrypto* library = LibCrypto::find();
    if (library == nullptr)
        PyErr_SetString(PyExc_OSError, "no libcrypto (OpenSSL 3 or 1.1.1) with all that is needed");
    return library;
}

PyObject* stream_new(PyTypeObject* type, PyObject* args, PyObject*) {
    int fd;
    const unsigned char* keys;
    Py_ssize_t nbytes;
    unsigned long long num_per_key = encryption::records_per_key;
    if (!PyArg_ParseTuple(args, "iy#|K", &fd, &keys, &nbytes, &num_per_key) ||
        require_libcrypto() == nullptr)
        return nullptr;
    if (nbytes != static_cast<Py_ssize_t>(2 * key_nbytes) || num_per_key == 0) {
        PyErr_SetString(PyExc_ValueError, "two keys of 32 bytes");
        return nullptr;
    }
    PyObject* object = PyType_GenericAlloc(type, 0);
    if (object == nullptr) return nullptr;
    reinterpret_cast<Object*>(object)->stream = new EncryptedStream(fd, keys, num_per_key);
    return object;
}

// The public key of a private one; both are any 32 bytes.
PyObject* public_key(PyObject*, PyObject* argument) {
    const LibCrypto* crypto = require_libcrypto();
    char* key;
    Py_ssize_t nbytes;
    if (crypto == nullptr || PyBytes_AsStringAndSize(argument, &key, &nbytes) != 0) return nullptr;
    unsigned char result[key_nbytes];
    size_t size = sizeof result;
    void* own = crypto->EVP_PKEY_new_raw_private_key(encryption::x25519, nullptr,
                                                     reinterpret_cast<unsigned char*>(key), nbytes);
    bool is_good = own != nullptr && crypto->EVP_PKEY_get_raw_public_key(own, result, &size) == 1;
    crypto->EVP_PKEY_free(own);
    if (is_good) return PyBytes_FromStringAndSize(reinterpret_cast<char*>(result), size);
    PyErr_SetString(PyExc_ValueError, "libcrypto makes no X25519 key of this");
    return nullptr;
}

PyObject* shared_secret(PyObject*, PyObject* args) {
    const LibCrypto* crypto = require_libcrypto();
    const unsigned char *key, *peer_key;
    Py_ssize_t nbytes, peer_nbytes;
    if (crypto == nullptr ||
        !PyArg_ParseTuple(args, "y#y#", &key, &nbytes, &peer_key, &peer_nbytes))
        return nullptr;
    void* own = crypto->EVP_PKEY_new_raw_private_key(encryption::x25519, nullptr, key, nbytes);
    void* peer =
        crypto->EVP_PKEY_new_raw_public_key(encryption::x25519, nullptr, peer_key, peer_nbytes);
    void* context = own != nullptr ? crypto->EVP_PKEY_CTX_new(own, nullptr) : nullptr;
    unsigned char result[key_nbytes];
    size_t size = sizeof result;
    bool is_good = context != nullptr && peer != nullptr &&
                   crypto->EVP_PKEY_derive_init(context) == 1 &&
                   crypto->EVP_PKEY_derive_set_peer(context, peer) == 1 &&
                   crypto->EVP_PKEY_derive(context, result, &size) == 1;
    crypto->EVP_PKEY_CTX_free(context);
    crypto->EVP_PKEY_free(own);
    crypto->EVP_PKEY_free(peer);
    if (is_good) return PyBytes_FromStringAndSize(reinterpret_cast<char*>(result), size);
    PyErr_SetString(PyExc_ValueError, "no X25519 key");
    return nullptr;
}

PyMethodDef stream_methods[] = {
    {"send", stream_send, METH_O,
     "send(bytes) -> how many were taken. After BlockingIOError the same must come first again."},
    {"recv", stream_recv, METH_O,
     "recv(nbytes) -> bytes, none at the end. Raises BlockingIOError, and OSError (EBADMSG) if\n"
     "what arrived was altered."},
    {"pending", stream_pending, METH_NOARGS,
     "pending() -> how many bytes are here already, which poll() does not know of"},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot stream_slots[] = {{Py_tp_new, reinterpret_cast<void*>(stream_new)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(stream_dealloc)},
                              {Py_tp_methods, stream_methods},
                              {0, nullptr}};
PyType_Spec stream_spec = {"launcher._encryption.Stream", sizeof(Object), 0, Py_TPFLAGS_DEFAULT,
                           stream_slots};

PyMethodDef module_methods[] = {
    {"public_key", public_key, METH_O, "public_key(private_key) -> 32 bytes (X25519)"},
    {"shared_secret", shared_secret, METH_VARARGS,
     "shared_secret(private_key, public_key_of_peer) -> 32 bytes (X25519)"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module_definition = {PyModuleDef_HEAD_INIT,
                                 "launcher._encryption",
                                 "Encrypted connections.",
                                 -1,
                                 module_methods,
                                 nullptr,
                                 nullptr,
                                 nullptr,
                                 nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__encryption(void) {
    PyObject* module = PyModule_Create(&module_definition);
    if (module == nullptr) return nullptr;
    PyObject* type = PyType_FromSpec(&stream_spec);
    if (type == nullptr) return nullptr;
    PyModule_AddObject(module, "Stream", type);
    return module;
}
