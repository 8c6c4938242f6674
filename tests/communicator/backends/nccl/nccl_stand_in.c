/* A stand-in for libnccl (and, with -DCUDA, for the few functions of libcuda and libcudart that are
 * used beside it). It moves nothing: it writes down what it is asked and answers as -D says, so
 * that tests see the calls and their order without a GPU. Of NCCL's behaviour it models that a
 * communicator ends once, is asked for nothing while a call is in progress, loses peers of its own,
 * and outlives the graphs that hold its calls unless it was aborted; of CUDA's, that each stream
 * has calls and captures of its own. */
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef VERSION
#define VERSION 22809
#endif
#ifndef REVOKE_ANSWERS
#define REVOKE_ANSWERS 7
#endif
#ifndef POLLS /* how often the state is "in progress" after a call that is put off */
#define POLLS 3
#endif

typedef struct {
    char bytes[128];
} Id;
typedef struct Comm {
    int rank, nranks, polls;
    int state; /* what polling ends with, if its own peers are dead */
    int is_revoked;
    int spins; /* a kernel of a replay that waits for a dead peer */
    const char* ended_by;
} Comm;

static char log_text[65536];
static size_t log_length;
static unsigned char config_bytes[256];
static int next_state; /* what polling ends with for all others */
static int num_polls = POLLS;
void stand_in_polls(int count) { num_polls = count; }
typedef struct {
    void* at;
    unsigned long long capture; /* 0: it is not being captured */
} Stream;
static Stream streams[16];
static struct {
    Comm* comm;
    void* stream;
    unsigned long long graph; /* 0: run at once */
} calls[4096];
static int num_calls;
static Comm* comms[64]; /* in the order in which they were made */
static int num_comms;

static pthread_mutex_t log_mutex = PTHREAD_MUTEX_INITIALIZER; /* ranks may be threads */
__attribute__((unused)) static void note(const char* format, ...) {
    va_list values;
    va_start(values, format);
    pthread_mutex_lock(&log_mutex);
    log_length += vsnprintf(log_text + log_length, sizeof log_text - log_length, format, values);
    va_end(values);
    log_length += snprintf(log_text + log_length, sizeof log_text - log_length, "\n");
    pthread_mutex_unlock(&log_mutex);
}

/* What was called with a communicator that had ended, or had not done the last call yet. */
static const char* misuse = "";
__attribute__((unused)) static void ask(Comm* comm, const char* function) {
    if (comm->ended_by != NULL) misuse = function;
}
static void use(Comm* comm, const char* function) {
    if (comm->ended_by != NULL || comm->polls > 0) misuse = function;
}
const char* stand_in_misuse(void) { return misuse; }
const char* stand_in_log(void) { return log_text; }
void stand_in_forget(void) {
    log_text[log_length = num_calls = num_comms = 0] = 0;
    misuse = "";
}
const unsigned char* stand_in_config(void) { return config_bytes; }
void stand_in_fail_with(int state) { next_state = state; }
int stand_in_num_comms(void) { return num_comms; }
void stand_in_lose_peers_of(int number, int state) { comms[number]->state = state; }
static int state_of(Comm* comm) { return comm->state != 0 ? comm->state : next_state; }
__attribute__((unused)) static Comm* make_comm(int rank, int nranks) {
    Comm* comm = calloc(1, sizeof *comm);
    comm->rank = rank;
    comm->nranks = nranks;
    if (num_comms < 64) comms[num_comms++] = comm;
    return comm;
}

static Stream* stream_at(void* at) {
    Stream* stream = streams;
    while (stream->at != at && stream->at != NULL && stream != streams + 15) stream++;
    stream->at = at;
    return stream;
}
void stand_in_capture_on(void* stream, unsigned long long id) { stream_at(stream)->capture = id; }
/* How many calls a stream, or a graph that was captured on it, has. */
int stand_in_calls(void* stream, unsigned long long graph) {
    int count = 0;
    for (int i = 0; i < num_calls; i++)
        count += calls[i].stream == stream && calls[i].graph == graph;
    return count;
}

#define put_off(comm) put_off_by(comm, __func__)
__attribute__((unused)) static int put_off_by(Comm* comm, const char* function) {
    use(comm, function);
    comm->polls = num_polls;
    return 7;
}
#define enqueue(comm, stream) enqueue_by(comm, stream, __func__)
__attribute__((unused)) static int enqueue_by(Comm* comm, void* stream, const char* function) {
    if (num_calls < 4096) {
        calls[num_calls].comm = comm;
        calls[num_calls].stream = stream;
        calls[num_calls++].graph = stream_at(stream)->capture;
    }
    return put_off_by(comm, function);
}
/* The calls of a graph run again, without the plugin. An aborted communicator lives on for its
 * graphs, and its kernels end at once; a destroyed one must not be replayed. */
void stand_in_replay(unsigned long long graph) {
    for (int i = 0; i < num_calls; i++) {
        Comm* comm = calls[i].comm;
        if (calls[i].graph != graph) continue;
        if (comm->ended_by == NULL)
            comm->spins = state_of(comm) != 0;
        else if (strcmp(comm->ended_by, "ncclCommAbort") != 0)
            misuse = __func__;
    }
}

int ncclGetVersion(int* version) {
    *version = VERSION;
    return 0;
}
#ifndef ONLY_VERSION
int ncclGetUniqueId(Id* id) {
    for (int i = 0; i < 128; i++) id->bytes[i] = (char)(255 - i);
    return 0;
}
const char* ncclGetErrorString(int code) { return code == 6 ? "remote error" : "stand-in error"; }
const char* ncclGetLastError(Comm* comm) {
    (void)comm;
    return "the stand-in was told to fail";
}
int ncclCommInitRankConfig(Comm** comm, int nranks, Id id, int rank, void* config) {
    size_t size = *(size_t*)config;
    memcpy(config_bytes, config, size < sizeof config_bytes ? size : sizeof config_bytes);
    for (int i = 0; i < 128; i++)
        if (id.bytes[i] != (char)(255 - i)) return 5;
    note("CommInitRankConfig nranks=%d rank=%d", nranks, rank);
    *comm = make_comm(rank, nranks);
    return put_off(*comm);
}
int ncclCommGetAsyncError(Comm* comm, int* state) {
    ask(comm, __func__);
#ifdef NEVER
    *state = 7;
    return 0;
#endif
    *state = comm->polls > 0 ? 7 : state_of(comm);
    if (comm->polls > 0) comm->polls--;
    return 0;
}
int ncclCommSplit(Comm* comm, int color, int key, Comm** child, void* config) {
    (void)config;
    note("CommSplit color=%d key=%d", color, key);
    if (color >= 0) *child = make_comm(key, 1);
    return put_off(comm);
}
#ifndef NO_REVOKE
int ncclCommRevoke(Comm* comm, int flags) {
    ask(comm, __func__);
#ifdef REVOKE_TAKES
    sleep(REVOKE_TAKES);
#endif
    note("CommRevoke flags=%d", flags);
    comm->polls = num_polls;
    comm->state = comm->spins = 0;
    comm->is_revoked = 1;
    return REVOKE_ANSWERS;
}
int ncclCommShrink(Comm* comm, int* excluded, int count, Comm** child, void* config, int flags) {
    (void)config;
    if (!comm->is_revoked) misuse = "ncclCommShrink of what was not revoked";
    note("CommShrink excluded=%d,%d count=%d flags=%d", excluded[0], excluded[count - 1], count,
         flags);
    *child = make_comm(comm->rank, comm->nranks - count);
    return put_off(comm);
}
#endif
int ncclCommCount(Comm* comm, int* count) {
    *count = comm->nranks;
    return 0;
}
int ncclCommUserRank(Comm* comm, int* rank) {
    *rank = comm->rank;
    return 0;
}
int ncclCommFinalize(Comm* comm) {
    note("CommFinalize");
    return put_off(comm);
}
int ncclCommDestroy(Comm* comm) {
    if (comm->spins || state_of(comm) != 0) misuse = "ncclCommDestroy, which waits for the dead";
    use(comm, __func__);
    comm->ended_by = __func__;
    note("CommDestroy");
    return 0;
}
int ncclCommAbort(Comm* comm) {
    ask(comm, __func__);
    comm->ended_by = __func__;
    note("CommAbort");
#ifdef ABORT_SPINS
    for (;;) sleep(1);
#endif
    return 0;
}
int ncclGroupStart(void) {
    note("GroupStart");
    return 0;
}
int ncclGroupEnd(void) {
    note("GroupEnd");
    return 0;
}
int ncclAllReduce(void* send, void* recv, size_t count, int dtype, int op, Comm* comm, void* on) {
    note("AllReduce in_place=%d count=%zu dtype=%d op=%d stream=%p", send == recv, count, dtype, op,
         on);
    return enqueue(comm, on);
}
int ncclBroadcast(void* send, void* recv, size_t count, int dtype, int root, Comm* comm, void* on) {
    note("Broadcast in_place=%d count=%zu dtype=%d root=%d", send == recv, count, dtype, root);
    return enqueue(comm, on);
}
int ncclReduce(void* send, void* recv, size_t count, int dtype, int op, int root, Comm* comm,
               void* on) {
    (void)send;
    note("Reduce recv=%d count=%zu dtype=%d op=%d root=%d", recv != NULL, count, dtype, op, root);
    return enqueue(comm, on);
}
int ncclAllGather(void* send, void* recv, size_t count, int dtype, Comm* comm, void* on) {
    (void)send, (void)recv;
    note("AllGather count=%zu dtype=%d", count, dtype);
    return enqueue(comm, on);
}
int ncclReduceScatter(void* send, void* recv, size_t count, int dtype, int op, Comm* comm,
                      void* on) {
    (void)send, (void)recv;
    note("ReduceScatter count=%zu dtype=%d op=%d", count, dtype, op);
    return enqueue(comm, on);
}
int ncclSend(char* buffer, size_t count, int dtype, int peer, Comm* comm, void* on) {
    (void)on, (void)comm;
    note("Send at=%zu count=%zu dtype=%d peer=%d", (size_t)buffer, count, dtype, peer);
    return 7;
}
int ncclRecv(char* buffer, size_t count, int dtype, int peer, Comm* comm, void* on) {
    (void)on, (void)comm;
    note("Recv at=%zu count=%zu dtype=%d peer=%d", (size_t)buffer, count, dtype, peer);
    return 7;
}
#ifndef NO_ALLTOALL
int ncclAlltoAll(void* send, void* recv, size_t count, int dtype, Comm* comm, void* on) {
    (void)send, (void)recv;
    note("AlltoAll count=%zu dtype=%d", count, dtype);
    return enqueue(comm, on);
}
#endif
int ncclRedOpCreatePreMulSum(int* op, void* scalar, int dtype, int residence, Comm* comm) {
    (void)comm;
    note("RedOpCreatePreMulSum scale=%g dtype=%d residence=%d", *(float*)scalar, dtype, residence);
    *op = 5;
    return 0;
}
int ncclRedOpDestroy(int op, Comm* comm) {
    use(comm, __func__);
    note("RedOpDestroy op=%d", op);
    return 0;
}
#ifndef NO_MEMORY
int ncclMemAlloc(void** pointer, size_t size) {
    note("MemAlloc %zu", size);
    if (size > 1ul << 40) return 1; /* no device has that */
    *pointer = malloc(size);
    return 0;
}
int ncclMemFree(void* pointer) {
    note("MemFree");
    free(pointer);
    return 0;
}
int ncclCommRegister(Comm* comm, void* pointer, size_t size, void** handle) {
    use(comm, __func__);
    note("CommRegister %zu", size);
    *handle = pointer;
    return 0;
}
int ncclCommDeregister(Comm* comm, void* handle) {
    (void)handle;
    use(comm, __func__);
    note("CommDeregister");
    return 0;
}
#endif
#ifndef NO_WINDOWS
/* As the library does: success first, and the window only once the state is no longer 7. */
int ncclCommWindowRegister(Comm* comm, void* pointer, size_t size, void** window, int flags) {
    note("CommWindowRegister %zu flags=%d", size, flags);
    *window = pointer;
    put_off(comm);
    return 0;
}
int ncclCommWindowDeregister(Comm* comm, void* window) {
    (void)window;
    use(comm, __func__);
    note("CommWindowDeregister");
    return 0;
}
#endif
#endif

#ifdef CUDA
static struct {
    void* payload;
    void (*destroy)(void*);
    unsigned long long graph;
} objects[64];
static int num_objects, device, chip = 9;
static unsigned contexts = 1; /* a bit for each device that has one */
static const char* refused = "";

#define INVALIDATED 666 /* a capture that something has ended */
void stand_in_capture(unsigned long long id) { stand_in_capture_on((void*)0x5eed, id); }
void stand_in_contexts(unsigned bits) { contexts = bits; }
unsigned stand_in_has_contexts(void) { return contexts; }
void stand_in_refuse(const char* function) { refused = function; }
#define MAYBE_REFUSE() \
    if (strcmp(refused, __func__) == 0) return 999
void stand_in_chip(int major) { chip = major; }
/* A graph of one capture, or every graph for 0; returns how many objects it carried. */
int stand_in_end_graphs(unsigned long long id) {
    int kept = 0, before = num_objects;
    for (int i = 0; i < num_objects; i++) {
        if (id == 0 || objects[i].graph == id)
            objects[i].destroy(objects[i].payload);
        else
            objects[kept++] = objects[i];
    }
    num_objects = kept;
    return before - kept;
}

#ifdef CAPTURE_V3
int cuStreamGetCaptureInfo_v3(void* stream, int* status, unsigned long long* id, void** graph,
                              const void*** dependencies, void* edges, size_t* num_dependencies) {
    (void)edges;
#else
int cuStreamGetCaptureInfo_v2(void* stream, int* status, unsigned long long* id, void** graph,
                              const void*** dependencies, size_t* num_dependencies) {
#endif
    (void)dependencies, (void)num_dependencies;
    MAYBE_REFUSE();
    *id = stream_at(stream)->capture;
    *status = *id == INVALIDATED ? 2 : *id != 0;
    *graph = stream_at(stream);
    return 0;
}
int cuUserObjectCreate(void** object, void* payload, void (*destroy)(void*), unsigned references,
                       unsigned flags) {
    MAYBE_REFUSE();
    if (references != 1 || flags != 1) return 1;
    objects[num_objects].payload = payload;
    objects[num_objects].destroy = destroy;
    *object = &objects[num_objects++];
    return 0;
}
int cuUserObjectRelease(void* object, unsigned references) {
    if (references != 1 || object != &objects[num_objects - 1]) return 1;
    num_objects--;
    objects[num_objects].destroy(objects[num_objects].payload);
    return 0;
}
int cuGraphRetainUserObject(void* graph, void* object, unsigned references, unsigned flags) {
    MAYBE_REFUSE();
    if (object != &objects[num_objects - 1] || references != 1 || flags != 1) return 1;
    objects[num_objects - 1].graph = ((Stream*)graph)->capture;
    return objects[num_objects - 1].graph == 0;
}
int cudaGetDevice(int* ordinal) {
    *ordinal = device;
    return 0;
}
int cudaSetDevice(int ordinal) {
    MAYBE_REFUSE();
    device = ordinal;
    contexts |= 1u << ordinal;
    return 0;
}
int cuDevicePrimaryCtxGetState(int ordinal, unsigned* flags, int* active) {
    *flags = 0;
    *active = contexts >> ordinal & 1;
    return 0;
}
int cudaMalloc(void** pointer, size_t size) {
    *pointer = malloc(size);
    return 0;
}
int cudaFree(void* pointer) {
    free(pointer);
    return 0;
}
int cudaDeviceGetAttribute(int* value, int attribute, int ordinal) {
    (void)ordinal;
    *value = attribute == 75 ? chip : 0;
    return 0;
}
#endif
