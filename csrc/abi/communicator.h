/* communicator.h: the whole contract between drumline and a vendor's communication library.
 *
 * A vendor compiles one shared library that exports one function, comm_plugin_entry_v1, which
 * returns a table of functions. drumline's own shared-memory and NCCL backends are loaded through
 * the same function. This header stands alone: it compiles as C11 and as C++17 and includes nothing
 * of torch or CUDA.
 *
 * Rules, for every function unless its comment says otherwise
 *   - Nothing throws, exits or aborts the process. Errors are result codes; last_error() has their
 *     text.
 *   - Buffers belong to the caller. Device backends (device_type COMM_CUDA, ...) enqueue on
 *     `stream` and return; host backends (COMM_CPU) have finished when they return, and `stream` is
 *     NULL.
 *   - The caller makes one call at a time per communicator, from any thread: the threads may
 *     change between calls. Different communicators may be used at the same time.
 *   - A function may block, but never longer than args.timeout_ms: the caller does not hold
 * Python's interpreter lock. The comments below say which functions wait for peers.
 *   - Collectives are called by every rank, in the same order, with the same count, dtype and op.
 *   - Returned strings stay valid until the next call on the same communicator by the same thread.
 *   - The library is never unloaded.
 *
 * Compatibility: fields are only appended, and struct_size says how many a side knows (COMM_HAS). A
 * larger abi_minor is compatible; a different abi_major is refused. The shape follows the PJRT C
 * API and NCCL's net plugins: sizes first, optional entries NULL.
 */
#ifndef DRUMLINE_COMMUNICATOR_H
#define DRUMLINE_COMMUNICATOR_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define COMM_ABI_MAJOR 1u
#define COMM_ABI_MINOR 8u
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
    COMM_REMOTE_ERROR = 6, /* a peer died, or closed or aborted its communicator */
    COMM_IN_PROGRESS = 7,
    COMM_TIMEOUT = 8,
    COMM_UNSUPPORTED = 1000
};

/* Element types. 0 to 11 have the numbers of ncclDataType_t. COMM_BOOL is one byte, 0 or 1. Those
 * from 102 on are since abi_minor 8. Complex numbers are summed, in pairs, and nothing else; on the
 * CPU unsigned integers of 16 bits and more, and 8-bit floats from 105 on, are only moved. */
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
    COMM_INT16 = 101,
    COMM_UINT16 = 102,
    COMM_COMPLEX64 = 103,
    COMM_COMPLEX128 = 104,
    COMM_FLOAT8_E4M3FNUZ = 105,
    COMM_FLOAT8_E5M2FNUZ = 106,
    COMM_FLOAT8_E8M0 = 107
};

/* Reductions. 0 to 4 have the numbers of ncclRedOp_t; premul_sum_create returns larger ones. */
typedef int32_t comm_op;
enum { COMM_SUM = 0, COMM_PROD = 1, COMM_MAX = 2, COMM_MIN = 3, COMM_AVG = 4 };

/* Where tensors live, by the numbers of DLDeviceType. */
enum { COMM_CPU = 1, COMM_CUDA = 2, COMM_ROCM = 10 };

/* What a backend can do beyond the minimum (comm_plugin.caps). */
enum {
    COMM_CAP_GRAPH_CAPTURE = 1 << 0, /* calls may be captured in a CUDA graph */
    COMM_CAP_ONE_NODE = 1 << 1,      /* works only if all ranks are on one node */
    COMM_CAP_THREADS = 1 << 2,       /* ranks may be threads of one process */
    COMM_CAP_EMPTY = 1 << 3          /* calls of 0 elements are passed on, not skipped */
};

enum { COMM_STREAM_READABLE = 1, COMM_STREAM_WRITABLE = 2 };
enum { COMM_STREAM_DISARM = 0, COMM_STREAM_ARM = 1, COMM_STREAM_WAKE = 2 };

typedef struct comm_s* comm_t;
typedef void* comm_stream; /* cudaStream_t, hipStream_t, ... or NULL */

/* The Coordinator, valid only during init: a vendor needs no rendezvous of its own. Both functions
 * are collective over the ranks of the communicator, block until every rank has called them, and
 * may be called only from the thread that called init. */
typedef struct comm_bootstrap {
    size_t struct_size;
    void* ctx;
    /* recv has nranks * bytes_per_rank bytes and is filled in order of rank. */
    comm_result (*allgather)(void* ctx, const void* send, void* recv, size_t bytes_per_rank);
    comm_result (*barrier)(void* ctx);
} comm_bootstrap;

typedef struct comm_init_args {
    size_t struct_size;
    int32_t rank;
    int32_t nranks;
    int32_t device;     /* ordinal, -1 for the CPU */
    int32_t timeout_ms; /* bound on init and on every later call that blocks */
    const char* name;   /* unique among the live communicators of the launch; for names of files */
    /* unique_id_bytes bytes, the same on every rank; NULL if the table says 0 */
    const void* unique_id;
    size_t unique_id_bytes;
    const comm_bootstrap* bootstrap;
    /* "key=value" strings, NULL at the end; refuse unknown keys with COMM_INVALID_ARGUMENT */
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
    /* Whether this process can use the library: COMM_OK and a score, of which the highest wins.
     * Does not block and makes no device context. Any thread; called first in a forked child. */
    comm_result (*probe)(int32_t* score);
    /* Collective; waits for all ranks. On failure *comm stays NULL and last_error(NULL) has the
     * text. */
    comm_result (*init)(comm_t* comm, const comm_init_args* args);
    /* Not collective; does not wait for peers. Frees everything: the handle is invalid afterwards,
     * whatever the result. Never during another call on comm, nor during abort. */
    comm_result (*destroy)(comm_t comm);
    /* Collective; a host backend waits for all ranks. send == recv means in place. */
    comm_result (*allreduce)(comm_t comm, const void* send, void* recv, uint64_t count,
                             comm_dtype dtype, comm_op op, comm_stream stream);
    /* The text of the last failed call on comm; with NULL, of this thread's last failed call
     * without a communicator. Never NULL. Does not block. */
    const char* (*last_error)(comm_t comm);

    /* Optional: NULL means "not offered", and drumline builds it from send and recv, or raises
     * Unsupported. */
    /* Writes unique_id_bytes bytes. Called on rank 0 only, before init, by any thread; does not
     * wait for peers. */
    comm_result (*get_unique_id)(void* id);
    /* The collectives: a host backend waits for the ranks whose data it needs. */
    comm_result (*broadcast)(comm_t comm, void* buffer, uint64_t count, comm_dtype dtype,
                             int32_t src, comm_stream stream);
    /* recv is written on dst only, and may be NULL on the other ranks. */
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
    /* Not collective; a host backend may wait for the peer. Messages between two ranks keep their
     * order. */
    comm_result (*send)(comm_t comm, const void* buffer, uint64_t count, comm_dtype dtype,
                        int32_t dst, comm_stream stream);
    comm_result (*recv)(comm_t comm, void* buffer, uint64_t count, comm_dtype dtype, int32_t src,
                        comm_stream stream);
    /* Collective; a host backend waits for all ranks. */
    comm_result (*barrier)(comm_t comm, comm_stream stream);
    /* Calls between the two may be deferred until group_end, so that sends and receives in any
     * order cannot deadlock. group_start does not block; group_end waits as the calls do. */
    comm_result (*group_start)(comm_t comm);
    comm_result (*group_end)(comm_t comm);
    /* From any thread, also during another call on comm: makes that call and later ones return
     * COMM_REMOTE_ERROR. Returns within seconds; does not wait for peers. */
    comm_result (*abort)(comm_t comm);
    /* COMM_OK, or the error of an enqueued operation that failed. Does not block. */
    comm_result (*async_error)(comm_t comm);
    /* Memory that the collectives use without a copy. mem_alloc is collective on a device backend,
     * and not on a host backend. mem_free comes after the work that uses the memory has ended. */
    comm_result (*mem_alloc)(comm_t comm, size_t nbytes, void** pointer);
    comm_result (*mem_free)(comm_t comm, void* pointer);
    /* A reduction that multiplies by *scalar (one element of dtype, in host memory) and then sums.
     * Not collective. */
    comm_result (*premul_sum_create)(comm_t comm, const void* scalar, comm_dtype dtype,
                                     comm_op* op);
    comm_result (*op_destroy)(comm_t comm, comm_op op);

    /* Since abi_minor 1. */
    /* Collective over comm; waits for all ranks. Ranks of the same color form a communicator, in
     * order of key. *child is NULL where color is negative. */
    comm_result (*split)(comm_t comm, int32_t color, int32_t key, comm_t* child);
    /* Collective. Waits for enqueued work and for all ranks, so that destroy can follow safely.
     * COMM_INVALID_USAGE if that is not possible yet; then the communicator is unchanged. The
     * caller calls destroy afterwards in every case. */
    comm_result (*finalize)(comm_t comm);

    /* Since abi_minor 2. */
    /* The shape of the tensor that this rank passes to the next call on comm, for comparisons among
     * the ranks and for errors; count alone decides how much is moved. `shape` is valid until that
     * call returns. Does not block and cannot fail. */
    void (*tell_shape)(comm_t comm, int32_t ndim, const int64_t* shape);

    /* Since abi_minor 3: all six, or none. */
    /* Streams of bytes, one from each rank to each other, of host memory. They are independent of
     * the calls above, may be used during one, and are not collective. One thread at a time writes
     * to a peer, one reads from it, one is in stream_wait and one in stream_sleep. They are not
     * used during destroy. The text of an error is last_error(NULL)'s. */
    /* Writes as much of prefix and then of data as there is room for. Does not block. */
    comm_result (*stream_write)(comm_t comm, int32_t dst, const void* prefix,
                                uint64_t prefix_nbytes, const void* data, uint64_t nbytes,
                                uint64_t* num_written);
    /* Reads as much as has arrived, at most nbytes. Does not block. */
    comm_result (*stream_read)(comm_t comm, int32_t src, void* data, uint64_t nbytes,
                               uint64_t* num_read);
    /* *peer is a rank whose stream is ready for what interest[peer] names (bits of
     * COMM_STREAM_...), or -1 after timeout_ms, or earlier; interest may change meanwhile. */
    comm_result (*stream_wait)(comm_t comm, const uint8_t* interest, int32_t timeout_ms,
                               int32_t* peer);
    /* For a thread that serves the streams while nobody waits: returns after timeout_ms, after
     * stream_notify(COMM_STREAM_WAKE), or once a stream has changed since COMM_STREAM_ARM. */
    comm_result (*stream_sleep)(comm_t comm, int32_t timeout_ms);
    /* From any thread: one of COMM_STREAM_ARM, _DISARM, _WAKE, for stream_sleep. */
    comm_result (*stream_notify)(comm_t comm, int32_t what);
    /* COMM_REMOTE_ERROR if the peer has ended, so that nothing more comes than can be read now. */
    comm_result (*stream_check)(comm_t comm, int32_t peer);

    /* Since abi_minor 4. */
    /* From any thread: the deadline of later calls, instead of the one given to init. Does not
     * block. */
    comm_result (*set_timeout)(comm_t comm, int32_t timeout_ms);

    /* Since abi_minor 5. */
    /* Collectives, as those above. count elements from each rank: recv holds nranks * count on dst,
     * and may be NULL on the other ranks. In place on dst: send == recv + dst * count. */
    comm_result (*gather)(comm_t comm, const void* send, void* recv, uint64_t count,
                          comm_dtype dtype, int32_t dst, comm_stream stream);
    /* count elements for each rank: send holds nranks * count on src, and may be NULL on the other
     * ranks. In place on src: recv == send + src * count. */
    comm_result (*scatter)(comm_t comm, const void* send, void* recv, uint64_t count,
                           comm_dtype dtype, int32_t src, comm_stream stream);

    /* Since abi_minor 6. */
    /* Collectives of parts whose sizes may differ. counts[nranks] are the same on all ranks, some
     * may be 0, and they are valid until the call returns. recv holds the parts of all ranks, one
     * after the other. Never in place. */
    comm_result (*allgatherv)(comm_t comm, const void* send, void* recv, const uint64_t* counts,
                              comm_dtype dtype, comm_stream stream);
    /* send holds a part for each rank, one after the other. Never in place. */
    comm_result (*reduce_scatterv)(comm_t comm, const void* send, void* recv,
                                   const uint64_t* counts, comm_dtype dtype, comm_op op,
                                   comm_stream stream);

    /* Since abi_minor 7. */
    /* Collective, in place of a call whose arguments are wrong on this rank, which knows that and
     * `why` before the call. That call returns COMM_INVALID_USAGE on every other rank before
     * anything moves, with `why` in its text, and all ranks can go on. Here the result is that,
     * too, or COMM_OK if every rank declines. */
    comm_result (*decline)(comm_t comm, const char* why);
} comm_plugin;

/* Whether the table p reaches as far as entry f, and offers it. */
#define COMM_HAS(p, f) \
    ((p)->struct_size >= offsetof(comm_plugin, f) + sizeof((p)->f) && (p)->f != NULL)

#if defined(_WIN32)
#define COMM_EXPORT __declspec(dllexport)
#else
#define COMM_EXPORT __attribute__((visibility("default")))
#endif

/* The only exported symbol. The table is valid as long as the process; NULL means that the library
 * cannot be used here. */
COMM_EXPORT const comm_plugin* comm_plugin_entry_v1(void);

#ifdef __cplusplus
}
#endif

#endif
