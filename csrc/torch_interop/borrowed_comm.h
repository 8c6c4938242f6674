// A communicator of the Python binding, called from other C++ without the GIL. Needs
// communicator.h.
#pragma once

// Valid as long as the Comm. `handle` is NULL once it is closed, and is read between lock() and
// unlock(), as is last_error; both are called without the GIL.
struct BorrowedComm {
    const comm_plugin* table;
    comm_t* handle;
    int32_t rank, nranks;
    void* mutex;
    void (*lock)(void* mutex);
    void (*unlock)(void* mutex);
};

constexpr const char* const borrowed_comm_name = "communicator._native.borrowed_comm";
