// The table of functions of communicator.h, made from a C++ class.
//
// The class has static `probe()` and `init(args)`, a method for every entry, with the arguments of
// that entry, `fail(failure)`, which keeps the text of an error for `last_error()`, and a type
// `CallScope`, an object of which lives as long as a call. Methods report errors by throwing: no
// exception crosses the C boundary.
#pragma once

#include <exception>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "abi/communicator.h"
#include "plugin/failure.h"

namespace plugin {

// A comm_t points to a shared_ptr: background threads of a backend may outlive destroy().
template <class Backend>
comm_t to_handle(std::shared_ptr<Backend> communicator) {
    return reinterpret_cast<comm_t>(new std::shared_ptr<Backend>(std::move(communicator)));
}

template <class Backend>
std::shared_ptr<Backend>* from_handle(comm_t comm) {
    return reinterpret_cast<std::shared_ptr<Backend>*>(comm);
}

// The exception that is being handled, as a PluginError. Called in catch blocks only.
inline PluginError current_failure() {
    try {
        throw;
    } catch (const PluginError& failure) {
        return failure;
    } catch (const std::bad_alloc&) {
        return {COMM_SYSTEM_ERROR, "out of host memory"};
    } catch (const std::exception& error) {
        return {COMM_INTERNAL_ERROR, error.what()};
    }
}

// The table entry for one method.
template <auto method>
struct TableEntry;

template <class Backend, class... Args, void (Backend::*method)(Args...)>
struct TableEntry<method> {
    static comm_result call(comm_t comm, Args... args) {
        Backend& backend = **from_handle<Backend>(comm);
        [[maybe_unused]] typename Backend::CallScope scope{backend};
        try {
            (backend.*method)(args...);
            return COMM_OK;
        } catch (...) {
            return backend.fail(current_failure());
        }
    }
};

// The text of last_error(NULL).
inline thread_local std::string thread_error;

template <class Body>
comm_result without_communicator(Body body) {
    try {
        body();
        return COMM_OK;
    } catch (...) {
        PluginError failure = current_failure();
        thread_error = failure.text;
        return failure.code;
    }
}

template <class Backend>
comm_result probe(int32_t* score) {
    return without_communicator([&] { *score = Backend::probe(); });
}

template <class Backend>
comm_result init(comm_t* comm, const comm_init_args* args) {
    *comm = nullptr;
    return without_communicator([&] { *comm = to_handle<Backend>(Backend::init(*args)); });
}

template <class Backend>
comm_result destroy(comm_t comm) {
    delete from_handle<Backend>(comm);
    return COMM_OK;
}

template <class Backend>
const char* last_error(comm_t comm) {
    return comm == nullptr ? thread_error.c_str() : (*from_handle<Backend>(comm))->last_error();
}

// From any thread, so in the middle of a call: neither CallScope nor last_error may be touched.
template <class Backend>
comm_result abort(comm_t comm) {
    try {
        (*from_handle<Backend>(comm))->abort();
        return COMM_OK;
    } catch (...) {
        return current_failure().code;
    }
}

// What every backend of ours offers. The backend adds its name, device, capabilities and the rest.
template <class Backend>
comm_plugin make_plugin() {
    comm_plugin table = {};
    table.struct_size = sizeof table;
    table.abi_major = COMM_ABI_MAJOR;
    table.abi_minor = COMM_ABI_MINOR;
    table.version = "1";
    table.probe = probe<Backend>;
    table.init = init<Backend>;
    table.destroy = destroy<Backend>;
    table.last_error = last_error<Backend>;
    table.abort = abort<Backend>;
    table.allreduce = TableEntry<&Backend::allreduce>::call;
    table.broadcast = TableEntry<&Backend::broadcast>::call;
    table.reduce = TableEntry<&Backend::reduce>::call;
    table.allgather = TableEntry<&Backend::allgather>::call;
    table.reduce_scatter = TableEntry<&Backend::reduce_scatter>::call;
    table.alltoall = TableEntry<&Backend::alltoall>::call;
    table.send = TableEntry<&Backend::send>::call;
    table.recv = TableEntry<&Backend::recv>::call;
    table.barrier = TableEntry<&Backend::barrier>::call;
    table.group_start = TableEntry<&Backend::group_start>::call;
    table.group_end = TableEntry<&Backend::group_end>::call;
    table.mem_alloc = TableEntry<&Backend::mem_alloc>::call;
    table.mem_free = TableEntry<&Backend::mem_free>::call;
    return table;
}

}  // namespace plugin
