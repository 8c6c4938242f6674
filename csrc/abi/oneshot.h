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

#define ONESHOT_ABI 2u
#define ONESHOT_MAX_RANKS 8
#define ONESHOT_MAX_BLOCKS 24
#define ONESHOT_MAX_BYTES (512u * 1024u)
#define ONESHOT_HANDLE_BYTES 64u

#define ONESHOT_OVERLAP 2 /* stage of a problem: two launches of a rank ran at once */

enum { ONESHOT_ONE = 1, ONESHOT_TWO = 2 };                               /* algorithm */
enum { ONESHOT_FLOAT16 = 6, ONESHOT_FLOAT32 = 7, ONESHOT_BFLOAT16 = 9 }; /* as COMM_... */

/* Host memory that launches share with this process. */
typedef struct oneshot_state oneshot_state;

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
    oneshot_state* state;
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

int oneshot_state_create(oneshot_state** state);
/* No launch of it may run or be captured any longer. */
int oneshot_state_destroy(oneshot_state* state);
/* 0, or 1 + rank + 16 * missing rank + 256 * stage, of a rank that gave up waiting or whose
 * launches overlapped. Its later launches return at once. No CUDA call. */
uint32_t oneshot_state_problem(const oneshot_state* state);
/* Ends the waits of its launches, without a problem. From any thread; no CUDA call. */
void oneshot_state_abort(oneshot_state* state);
/* How many graphs are alive that captured a launch. CUDA reports the end of a graph late. */
int oneshot_state_graphs(const oneshot_state* state);

/* Loads the kernels of a number of ranks, which a capture might not survive. */
int oneshot_load(int world);
/* Enqueues; every rank of the call must be launched, here or by its own process. Launches of one
 * rank must not run at the same time: the one that finds another is a problem. */
int oneshot_launch(const oneshot_call* call);

#ifdef __cplusplus
}
#endif

#endif
