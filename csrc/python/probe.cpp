// Runs the probe of a library, first in a child process.
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <initializer_list>
#include <mutex>
#include <string>

#include "python/convert/python_object.h"
#include "python/convert/result.h"
#include "python/plugin.h"

namespace {

// A probe that crashes kills a child process, not this one. Only a crash counts: a child may fail
// where this process would not, since it cannot use a device that its parent uses. 0 if none.
int signal_that_kills_probe(const comm_plugin* table) {
    pid_t child = fork();
    if (child == 0) {
        int32_t score = 0;
        for (int end : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGALRM}) signal(end, SIG_DFL);
        sigset_t blocked;  // as the parent may have it
        sigemptyset(&blocked);
        sigaddset(&blocked, SIGALRM);
        sigprocmask(SIG_UNBLOCK, &blocked, nullptr);
        alarm(10);
        table->probe(&score);
        _exit(0);
    }
    int status = 0;
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
    return child > 0 && WIFSIGNALED(status) && WTERMSIG(status) != SIGALRM ? WTERMSIG(status) : 0;
}

}  // namespace

PyObject* plugin_try_probe(PyObject* object, PyObject*) {
    static std::mutex probe_mutex;  // a child must not inherit a lock that another probe holds
    int crash_signal;
    PyThreadState* state = PyEval_SaveThread();
    {
        std::lock_guard<std::mutex> lock(probe_mutex);
        crash_signal = signal_that_kills_probe(table_of(object));
    }
    PyEval_RestoreThread(state);
    if (crash_signal == 0) return new_reference(Py_None);
    PyErr_Format(
        errors.unsupported,
        "%s cannot be used here: its probe() died of signal %d (%s). Report that to its vendor",
        table_of(object)->name, crash_signal, strsignal(crash_signal));
    return nullptr;
}

PyObject* plugin_probe(PyObject* object, PyObject*) {
    const comm_plugin* table = table_of(object);
    int32_t score = 0;
    comm_result code;
    std::string text;
    PyThreadState* state = PyEval_SaveThread();
    code = table->probe(&score);
    if (code != COMM_OK) {
        const char* error = table->last_error(nullptr);
        text = error != nullptr ? error : "";
    }
    PyEval_RestoreThread(state);
    return code == COMM_OK ? PyLong_FromLong(score) : raise_result(table, code, text.c_str());
}
