// Asking a library whether it can be used here.
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <initializer_list>
#include <mutex>
#include <string>

#include "python/plugin.h"
#include "python/convert/result.h"
#include "python/convert/python_object.h"

namespace {

// A probe that crashes should cost a child process, not this one. Only a crash counts: what a child
// may not do (touch a device that its parent uses) must not be held against the library.
int signal_that_kills_probe(const comm_plugin* table) {
    pid_t child = fork();
    if (child == 0) {
        int32_t score = 0;
        for (int crash : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT}) signal(crash, SIG_DFL);
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
    static std::mutex
        one_at_a_time;  // a child must not inherit a lock that another thread's probe holds
    int killer;
    PyThreadState* state = PyEval_SaveThread();
    {
        std::lock_guard<std::mutex> turn(one_at_a_time);
        killer = signal_that_kills_probe(table_of(object));
    }
    PyEval_RestoreThread(state);
    if (killer == 0) return returned(Py_None);
    PyErr_Format(
        errors.unsupported,
        "%s crashes when it is asked whether it can be used here: its probe() died of signal "
        "%d (%s). Report that to its vendor",
        table_of(object)->name, killer, strsignal(killer));
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
