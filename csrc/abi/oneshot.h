/* abi/oneshot.h: the C interface of _oneshot.so, allreduce of small tensors inside one node.
 *
 * Every rank has an arena: device memory that its peers have mapped. A call copies the tensor into
 * the rank's own arena, raises flags in the arenas of its peers, waits for theirs, and reads their
 * arenas. All state between calls lies in the arenas, so a call can be captured in a CUDA graph and
 * replayed. Results are the codes of cudaError_t, 0 for success. Every function but oneshot_launch
 * may wait for the device; a launch enqueues on its stream.
 */
#ifndef DRUMLINE_ONESHOT_H
#define DRUMLINE_ONESHOT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ONESHOT_ABI 1u
#define ONESHOT_MAX_RANKS 8
#define ONESHOT_MAX_BLOCKS 24
#define ONESHOT_MAX_BYTES (512u * 1024u)
#define ONESHOT_HANDLE_BYTES 64u

enum { ONESHOT_ONE = 1, ONESHOT_TWO = 2 };                               /* algorithm */
enum { ONESHOT_FLOAT16 = 6, ONESHOT_FLOAT32 = 7, ONESHOT_BFLOAT16 = 9 }; /* as COMM_... */

typedef struct oneshot_call {
    size_t struct_size;
    int32_t algorithm;
    int32_t dtype;
    int32_t world;
    int32_t first; /* the ranks [first, first + num_here) are in this launch */
    int32_t num_here;
    int32_t blocks;                    /* the same on every rank */
    uint64_t nbytes;                   /* a multiple of 16, at most ONESHOT_MAX_BYTES */
    uint64_t timeout_ns;               /* of each wait on the device */
    const void* in[ONESHOT_MAX_RANKS]; /* by rank; those of this launch. 16-byte aligned */
    void* out[ONESHOT_MAX_RANKS];      /* may be in */
    void* arena[ONESHOT_MAX_RANKS];    /* by rank; all of them */
    uint32_t* error;                   /* of error_create, as the device sees it */
    void* stream;
} oneshot_call;

uint32_t oneshot_abi(void);
const char* oneshot_error_text(int code);

/* Zeroed memory on the current device. */
int oneshot_create(void** arena);
int oneshot_destroy(void* arena);
/* Sets every counter and flag of an arena to a byte pattern: 0, or 0xff for the last generation
 * before the numbers wrap. Nothing may be running. */
int oneshot_reset(void* arena, int byte);
/* For a peer in another process: a CUDA IPC handle of ONESHOT_HANDLE_BYTES. */
int oneshot_export(void* arena, void* handle);
int oneshot_import(const void* handle, void** arena);
int oneshot_close(void* arena);
/* Lets the current device access the memory of `device`, for a peer in the same process. */
int oneshot_reach(int device);

/* A word of host memory that kernels write when a wait times out: 0, or
 * 1 + waiting rank + 16 * missing rank + 256 * stage. Later launches return at once. */
int oneshot_error_create(uint32_t** host, uint32_t** device);
int oneshot_error_destroy(uint32_t* host);

/* Enqueues; every rank of the call must be launched, here or by its own process. */
int oneshot_launch(const oneshot_call* call);

#ifdef __cplusplus
}
#endif

#endif
