// oneCCL's allreduce for ctypes. Its static library for processors alone, which needs no SYCL, comes
// with references to a tracer and to functions of Intel's compiler; they are stood in for here.
//
// How it is built: oneccl.py.
#include <cstdio>
#include <cstring>
#include <memory>
#include <oneapi/ccl.hpp>

extern "C" {
// The tracer's hooks: null is "nobody traces".
void* __itt_event_end_ptr__3_0;
void* __itt_event_create_ptr__3_0;
void* __itt_event_start_ptr__3_0;
void* __itt_domain_create_ptr__3_0;
void* __itt_metadata_add_ptr__3_0;
void* __itt_string_handle_create_ptr__3_0;
void* __itt_task_begin_ptr__3_0;
void* __itt_task_end_ptr__3_0;
void* __itt_thread_set_name_ptr__3_0;
void* _intel_fast_memcpy(void* to, const void* from, size_t n) { return std::memmove(to, from, n); }
void* _intel_fast_memset(void* to, int byte, size_t n) { return std::memset(to, byte, n); }
}

namespace {

ccl::shared_ptr_class<ccl::kvs> meeting;  // kept: the communicator asks it later

}  // namespace

extern "C" {

size_t oneccl_address_bytes() { return ccl::kvs::address_max_size; }

// On rank 0, where the others find it.
void oneccl_address(char* to) {
    ccl::init();
    meeting = ccl::create_main_kvs();
    ccl::kvs::address_type address = meeting->get_address();
    std::memcpy(to, address.data(), address.size());
}

// Collective. nullptr, and why on stderr, if it cannot be had.
void* oneccl_open(int rank, int size, const char* from) {
    try {
        ccl::init();
        ccl::kvs::address_type address;
        std::memcpy(address.data(), from, address.size());
        if (rank != 0) meeting = ccl::create_kvs(address);
        return new ccl::communicator(ccl::create_communicator(size, rank, meeting));
    } catch (const std::exception& error) {
        std::fprintf(stderr, "oneCCL: %s\n", error.what());
        return nullptr;
    }
}

void oneccl_allreduce(void* comm, float* data, size_t count) {
    ccl::allreduce(data, data, count, ccl::datatype::float32, ccl::reduction::sum,
                   *static_cast<ccl::communicator*>(comm))
        .wait();
}
}
