/* communicator.h: the whole contract between drumline and a vendor's communication library.
 *
 * A vendor compiles one shared library that exports one function, comm_plugin_entry_v1, which
 * returns a table of functions. drumline's own shared-memory and NCCL backends come through this
 * same door. This header stands alone: it compiles as C11 and as C++17 and includes nothing of
 * torch or CUDA.
 *
 * Rules, for every function unless its comment says otherwise
 *   - Nothing throws, exits or aborts the process. Errors are result codes, and their
 *     text is last_error().
 *   - Buffers stay the caller's. Device backends enqueue on `stream` and return; host backends
 *     (device_type COMM_CPU) have finished when they return, and `stream` is NULL.
 *   - One thread at a time per communicator: the caller sees to that. The caller does not hold
 *     Python's interpreter lock, so any function may block, but never past args.timeout_ms.
 *   - Collectives are called by every rank, in the same order, with the same count, dtype and op.
 *   - Strings returned stay valid until the next call on the same communicator by the same thread.
 *   - The host never unloads the library.
 *
 * Growing: fields are only appended, and struct_size says how many a side knows (COMM_HAS). A
 * larger abi_minor is compatible; a different abi_major is refused. Shape after the PJRT C API and
 * NCCL's net plugins: sizes first, optional entries NULL.
 */
#ifndef DRUMLINE_COMMUNICATOR_H
#define DRUMLINE_COMMUNICATOR_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define COMM_ABI_MAJOR 1u
#define COMM_ABI_MINOR 2u
#define COMM_UNIQUE_ID_MAX 4096u

/* Results. 0 to 8 have the numbers of ncclResult_t. */
typedef int32_t comm_result;
enum {
    COMM_OK = 0,
    COMM_DEVICE_ERROR = 1,
    COMM_SYSTEM_ERROR = 2,
    COMM_INTERNAL_ERROR = 3,
    COMM_INVALID_ARGUMENT = 4,
    COMM_INVALID_USAGE = 5,
    COMM_REMOTE_ERROR = 6, /* a peer died or went away */
    COMM_IN_PROGRESS = 7,
    COMM_TIMEOUT = 8,
    COMM_UNSUPPORTED = 1000
};

/* Element types. 0 to 11 have the numbers of ncclDataType_t. A bool is a COMM_BOOL. */
typedef int32_t comm_dtype;
enum {
    COMM_INT8 = 0,
    COMM_UINT8 = 1,
    COMM_INT32 = 2,
    COMM_UINT32 = 3,
    COMM_INT64 = 4,
    COMM_UINT64 = 5,
    COMM_FLOAT16 = 6,
    COMM_FLOAT32 = 7,
    COMM_FLOAT64 = 8,
    COMM_BFLOAT16 = 9,
    COMM_FLOAT8_E4M3 = 10,
    COMM_FLOAT8_E5M2 = 11,
    COMM_BOOL = 100,
    COMM_INT16 = 101
};

/* Reductions. 0 to 4 have the numbers of ncclRedOp_t; larger ones come from premul_sum_create. */
typedef int32_t comm_op;
enum { COMM_SUM = 0, COMM_PROD = 1, COMM_MAX = 2, COMM_MIN = 3, COMM_AVG = 4 };

/* Where tensors live. The numbers of DLDeviceType. */
enum { COMM_CPU = 1, COMM_CUDA = 2, COMM_ROCM = 10 };

/* What a backend can do beyond the minimum (comm_plugin.caps). */
enum {
    COMM_CAP_GRAPH_CAPTURE = 1 << 0, /* calls may be captured in a CUDA graph */
    COMM_CAP_ONE_NODE = 1 << 1,      /* works only if every rank shares one node */
    COMM_CAP_THREADS = 1 << 2,       /* ranks may be threads of one process */
    COMM_CAP_EMPTY = 1 << 3          /* wants calls of 0 elements too, which are else left out */
};

typedef struct comm_s* comm_t;
typedef void* comm_stream; /* cudaStream_t, hipStream_t, ... or NULL */

/* The Coordinator, lent for the time of init: a vendor needs no rendezvous of its own. Both calls
 * are collective over the ranks of the communicator and may be called from the thread that called
 * init. */
typedef struct comm_bootstrap {
    size_t struct_size;
    void* ctx;
    /* recv has room for nranks * bytes_per_rank and is filled in order of rank. */
    comm_result (*allgather)(void* ctx, const void* send, void* recv, size_t bytes_per_rank);
    comm_result (*barrier)(void* ctx);
} comm_bootstrap;

typedef struct comm_init_args {
    size_t struct_size;
    int32_t rank;
    int32_t nranks;
    int32_t device;     /* ordinal, -1 for the CPU */
    int32_t timeout_ms; /* bound on init and on every later blocking call */
    const char* name;   /* unique among the live communicators of the launch; for names of files */
    /* unique_id_bytes of them, the same on every rank; NULL if the plugin wants none */
    const void* unique_id;
    size_t unique_id_bytes;
    const comm_bootstrap* bootstrap;
    /* "key=value" strings, NULL at the end; refuse keys you do not know */
    const char* const* options;
} comm_init_args;

typedef struct comm_plugin {
    size_t struct_size;
    uint32_t abi_major;
    uint32_t abi_minor;
    const char* name;         /* as in Communicator(coor, backend=name) */
    const char* version;      /* compared over all ranks before init */
    int32_t device_type;      /* COMM_CPU, COMM_CUDA, ... */
    uint32_t unique_id_bytes; /* 0, or at most COMM_UNIQUE_ID_MAX */
    uint64_t caps;

    /* Required. */
    /* May this process use the library? Cheap; no device context. The highest score wins. */
    comm_result (*probe)(int32_t* score);
    /* Collective. On failure *comm stays NULL and last_error(NULL) has the text. */
    comm_result (*init)(comm_t* comm, const comm_init_args* args);
    /* Not collective. Frees everything; the handle is gone whatever it returns. */
    comm_result (*destroy)(comm_t comm);
    /* send == recv means in place. */
    comm_result (*allreduce)(comm_t comm, const void* send, void* recv, uint64_t count,
                             comm_dtype dtype, comm_op op, comm_stream stream);
    /* Of comm, or with NULL of this thread's last failed call without one. Never NULL. */
    const char* (*last_error)(comm_t comm);

    /* Optional: NULL means "not offered", and drumline builds it from send and recv, or says so. */
    comm_result (*get_unique_id)(void* id);
    comm_result (*broadcast)(comm_t comm, void* buffer, uint64_t count, comm_dtype dtype,
                             int32_t src, comm_stream stream);
    /* recv is written on dst only, and may be NULL elsewhere. */
    comm_result (*reduce)(comm_t comm, const void* send, void* recv, uint64_t count,
                          comm_dtype dtype, comm_op op, int32_t dst, comm_stream stream);
    /* count elements from each rank; recv holds nranks * count.
     * In place: send == recv + rank * count. */
    comm_result (*allgather)(comm_t comm, const void* send, void* recv, uint64_t count,
                             comm_dtype dtype, comm_stream stream);
    /* count elements for each rank; send holds nranks * count.
     * In place: recv == send + rank * count. */
    comm_result (*reduce_scatter)(comm_t comm, const void* send, void* recv, uint64_t count,
                                  comm_dtype dtype, comm_op op, comm_stream stream);
    /* count elements from each rank to each rank; both hold nranks * count; never in place. */
    comm_result (*alltoall)(comm_t comm, const void* send, void* recv, uint64_t count,
                            comm_dtype dtype, comm_stream stream);
    comm_result (*send)(comm_t comm, const void* buffer, uint64_t count, comm_dtype dtype,
                        int32_t dst, comm_stream stream);
    comm_result (*recv)(comm_t comm, void* buffer, uint64_t count, comm_dtype dtype, int32_t src,
                        comm_stream stream);
    comm_result (*barrier)(comm_t comm, comm_stream stream);
    /* Between the two, calls may be put off until group_end: sends and receives cannot deadlock. */
    comm_result (*group_start)(comm_t comm);
    comm_result (*group_end)(comm_t comm);
    /* From any thread: make pending and later calls return COMM_REMOTE_ERROR. Bounded in time. */
    comm_result (*abort)(comm_t comm);
    /* COMM_OK, or the error an enqueued operation ended with. */
    comm_result (*async_error)(comm_t comm);
    /* Memory that the collectives use without a copy. */
    comm_result (*mem_alloc)(comm_t comm, size_t nbytes, void** pointer);
    comm_result (*mem_free)(comm_t comm, void* pointer);
    /* A reduction that multiplies by *scalar (one element of dtype, on the host) and then sums. */
    comm_result (*premul_sum_create)(comm_t comm, const void* scalar, comm_dtype dtype,
                                     comm_op* op);
    comm_result (*op_destroy)(comm_t comm, comm_op op);

    /* Since abi_minor 1. */
    /* Collective over comm: those who give the same color form a group, in order of key. *child is
     * NULL where color is negative. */
    comm_result (*split)(comm_t comm, int32_t color, int32_t key, comm_t* child);
    /* The orderly end that destroy is not: waits for what is enqueued. COMM_INVALID_USAGE if that
     * cannot be yet, and then the communicator stays as it was. destroy comes after, always. */
    comm_result (*finalize)(comm_t comm);

    /* Since abi_minor 2. */
    /* The shape of the tensor that the next call on comm will move: of a collective, the one that
     * this rank gives. It is there to be compared among the ranks and named in errors, and says
     * nothing that count does not. `shape` is valid until that call returns. Cannot fail. */
    void (*tell_shape)(comm_t comm, int32_t ndim, const int64_t* shape);
} comm_plugin;

/* Does the table p reach as far as field f, and is f offered? */
#define COMM_HAS(p, f) \
    ((p)->struct_size >= offsetof(comm_plugin, f) + sizeof((p)->f) && (p)->f != NULL)

#if defined(_WIN32)
#define COMM_EXPORT __declspec(dllexport)
#else
#define COMM_EXPORT __attribute__((visibility("default")))
#endif

/* The only exported symbol. Its table lives as long as the library; NULL refuses. */
COMM_EXPORT const comm_plugin* comm_plugin_entry_v1(void);

#ifdef __cplusplus
}
#endif

#endif
