// Objects of Python in threads without the GIL; exceptions that outlive the call that raised them.
#pragma once

#include <cxxabi.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>

// Then no thread may ask for the GIL: it would end there and then.
inline bool is_python_finalized() {
#if PY_VERSION_HEX >= 0x030D0000
    return !Py_IsInitialized() || Py_IsFinalizing();
#else
    return !Py_IsInitialized() || _Py_IsFinalizing();
#endif
}

// Runs a body with the GIL, in a thread that Python may not know. When the interpreter ends, Python
// before 3.14 ends such a thread where it next asks for the GIL; what would unwind needs the GIL,
// so the thread stays there, as with later Pythons.
template <class Body>
auto with_gil(Body body) {
    std::optional<py::gil_scoped_acquire> gil;
    try {
        gil.emplace();
        return body();
    } catch (const abi::__forced_unwind&) {
        for (;;) pause();
    }
}

// An object that may be let go of without the GIL.
inline std::shared_ptr<py::object> share(py::object object) {
    return {new py::object(std::move(object)), [](py::object* shared) {
                if (!is_python_finalized()) with_gil([shared] { delete shared; });
            }};
}

class PythonError {
  public:
    // Both with the GIL.
    explicit PythonError(const py::object& exception) : exception_(share(exception)) {
        std::string type = py::str(py::type::of(exception).attr("__name__"));
        text_ = type + ": " + std::string(py::str(exception));
    }
    explicit PythonError(const py::error_already_set& error)
        : PythonError(py::reinterpret_borrow<py::object>(error.value())) {}
    // With or without the GIL.
    [[noreturn]] void raise() const {
        py::gil_scoped_acquire gil;
        PyObject* exception = exception_->ptr();
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception)), exception);
        throw py::error_already_set();
    }
    std::exception_ptr as_exception() const {
        try {
            raise();
        } catch (...) {
            return std::current_exception();
        }
    }
    // For C++, which has only the text: "PeerLost: rank 0 ...".
    std::exception_ptr as_runtime_error() const {
        return std::make_exception_ptr(std::runtime_error(text_));
    }

  private:
    std::shared_ptr<py::object> exception_;
    std::string text_;
};

using ErrorPointer = std::shared_ptr<const PythonError>;

// What a function of the C API returned, in a body of Python. An object of pybind11 that stands
// there during the call would be let go of without the GIL where the interpreter ends the thread.
inline void check_returned(PyObject* result) {
    if (result == nullptr) throw py::error_already_set();
    Py_DECREF(result);
}

// Runs a body of Python with the GIL; the error it raised, or NULL.
template <class Body>
ErrorPointer run_python(Body body) {
    return with_gil([&body]() -> ErrorPointer {
        try {
            body();
            return nullptr;
        } catch (const py::error_already_set& error) {
            return std::make_shared<const PythonError>(error);
        } catch (const std::exception& error) {
            py::object type = py::reinterpret_borrow<py::object>(PyExc_RuntimeError);
            return std::make_shared<const PythonError>(type(error.what()));
        }
    });
}
