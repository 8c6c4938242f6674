/* A library that does nothing, in as many ways as -D can say. */
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "communicator.h"

#ifndef NAME
#define NAME "nothing"
#endif
#ifndef MAJOR
#define MAJOR COMM_ABI_MAJOR
#endif
#ifndef MINOR
#define MINOR COMM_ABI_MINOR
#endif
#ifndef SIZE
#define SIZE sizeof(comm_plugin)
#endif
#ifndef CAPS
#define CAPS COMM_CAP_THREADS
#endif
#ifndef RESULT
#define RESULT COMM_OK
#endif
#ifndef DEVICE_TYPE
#define DEVICE_TYPE COMM_CPU
#endif
#ifndef ID_BYTES
#define ID_BYTES 0
#endif

static int handle;
static const char* text = "";

#ifdef WAITS_FOR_A_THREAD
atomic_int is_called;

void call_from_a_thread(void) { is_called = 1; }

static comm_result wait_for_a_thread(void) {
    time_t start = time(NULL);
    while (!is_called && time(NULL) - start < 3) continue;
    return is_called ? COMM_OK : COMM_TIMEOUT;
}

static comm_result abort_comm(comm_t comm) {
    (void)comm;
    return wait_for_a_thread();
}

static comm_result set_timeout(comm_t comm, int32_t timeout_ms) {
    (void)comm, (void)timeout_ms;
    return COMM_OK;
}
#endif

static comm_result probe(int32_t* score) {
    *score = 1;
#ifdef CRASHES
    raise(SIGSEGV);
#endif
#ifdef TAKES_TOO_LONG
    raise(SIGALRM);
    raise(SIGABRT);
#endif
#ifdef REFUSES_SOMETIMES
    static atomic_int calls;
    text = "no such device";
    if (atomic_fetch_add(&calls, 1) == 1) return COMM_UNSUPPORTED;
#endif
    return COMM_OK;
}

/* The id holds every byte there is, so that none is lost or taken for the end of a string. */
static comm_result get_unique_id(void* id) {
    for (int i = 0; i < ID_BYTES; i++) ((unsigned char*)id)[i] = (unsigned char)(i * 7);
#ifdef WAITS_FOR_A_THREAD
    return wait_for_a_thread();
#endif
    return COMM_OK;
}

static comm_result init(comm_t* comm, const comm_init_args* args) {
    unsigned char expected[COMM_UNIQUE_ID_MAX];
    get_unique_id(expected);
    text = "the id is not what get_unique_id made";
    if (args->unique_id_bytes != ID_BYTES) return COMM_INTERNAL_ERROR;
    if (ID_BYTES > 0 && memcmp(args->unique_id, expected, ID_BYTES) != 0)
        return COMM_INTERNAL_ERROR;
#ifdef FAILS_ON
    text = "out of patience";
    if (args->rank == FAILS_ON) return COMM_SYSTEM_ERROR;
#endif
    text = "";
    *comm = (comm_t)(void*)&handle;
    return COMM_OK;
}

static comm_result destroy(comm_t comm) {
    (void)comm;
    return COMM_OK;
}

static comm_result allreduce(comm_t comm, const void* send, void* recv, uint64_t count,
                             comm_dtype dtype, comm_op op, comm_stream stream) {
    (void)comm, (void)send, (void)recv, (void)count, (void)dtype, (void)op, (void)stream;
    text = "that went wrong";
    return RESULT;
}

#ifdef MEMORY
static comm_result mem_alloc(comm_t comm, size_t nbytes, void** pointer) {
    (void)comm, (void)nbytes;
    *pointer = &handle;
    return COMM_OK;
}
#endif

static const char* last_error(comm_t comm) {
    (void)comm;
    return text;
}

/* What a later header might append. */
static struct {
    comm_plugin known;
    void (*later)(void);
} table = {
    .known =
        {
            .struct_size = SIZE,
            .abi_major = MAJOR,
            .abi_minor = MINOR,
            .name = NAME,
            .version = "1.0",
            .device_type = DEVICE_TYPE,
            .unique_id_bytes = ID_BYTES,
            .caps = CAPS,
#ifndef LACKS_PROBE
            .probe = probe,
#endif
#ifndef LACKS_INIT
            .init = init,
#endif
#ifndef LACKS_DESTROY
            .destroy = destroy,
#endif
#ifndef LACKS_ALLREDUCE
            .allreduce = allreduce,
#endif
#ifndef LACKS_LAST_ERROR
            .last_error = last_error,
#endif
            .get_unique_id = get_unique_id,
#ifdef MEMORY
            .mem_alloc = mem_alloc,
#endif
#ifdef WAITS_FOR_A_THREAD
            .abort = abort_comm,
            .set_timeout = set_timeout,
#endif
#ifdef GARBAGE_BEYOND_ITS_END
            .broadcast = (void*)1,
            .barrier = (void*)1,
            .group_start = (void*)1,
#endif
        },
};

const comm_plugin* comm_plugin_entry_v1(void) {
#ifdef REFUSES
    return NULL;
#else
    return &table.known;
#endif
}
