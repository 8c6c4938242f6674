/* A complete vendor library in two pages: tensors over local stream sockets, one for each pair of
 * ranks.
 *
 * It offers what communicator.h requires, and send and recv. drumline builds the rest from those
 * two. There is no state outside the communicator but the text of the last error, so ranks may be
 * threads.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "communicator.h"

struct comm_s {
    int rank, nranks;
    int* sockets; /* one for each peer; -1 for this rank */
    char error[256];
};

static _Thread_local char last_error_without_comm[256];

static comm_result fail(struct comm_s* comm, comm_result code, const char* doing, int peer) {
    char* text = comm != NULL ? comm->error : last_error_without_comm;
    snprintf(text, sizeof comm->error, "rank %d: %s rank %d failed: %s. Is that rank alive?",
             comm != NULL ? comm->rank : -1, doing, peer,
             code == COMM_REMOTE_ERROR ? "it is gone" : strerror(errno));
    return code;
}

static comm_result fail_system(struct comm_s* comm, const char* doing, int peer) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) return fail(comm, COMM_TIMEOUT, doing, peer);
    if (errno == EPIPE || errno == ECONNRESET) return fail(comm, COMM_REMOTE_ERROR, doing, peer);
    return fail(comm, COMM_SYSTEM_ERROR, doing, peer);
}

/* ---- bytes ---- */

static comm_result put(struct comm_s* comm, int peer, const void* data, size_t nbytes) {
    for (const char* next = data; nbytes > 0;) {
        ssize_t sent = send(comm->sockets[peer], next, nbytes, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0) return fail_system(comm, "sending to", peer);
        next += sent;
        nbytes -= (size_t)sent;
    }
    return COMM_OK;
}

static comm_result get(struct comm_s* comm, int peer, void* data, size_t nbytes) {
    for (char* next = data; nbytes > 0;) {
        ssize_t received = recv(comm->sockets[peer], next, nbytes, 0);
        if (received < 0 && errno == EINTR) continue;
        if (received < 0) return fail_system(comm, "receiving from", peer);
        if (received == 0) return fail(comm, COMM_REMOTE_ERROR, "receiving from", peer);
        next += received;
        nbytes -= (size_t)received;
    }
    return COMM_OK;
}

/* ---- arithmetic: four types, four operations ---- */

#define COMBINE(T)                                                                 \
    static void combine_##T(T* total, const T* part, uint64_t count, comm_op op) { \
        for (uint64_t i = 0; i < count; i++) {                                     \
            if (op == COMM_SUM) total[i] += part[i];                               \
            if (op == COMM_PROD) total[i] *= part[i];                              \
            if (op == COMM_MAX && part[i] > total[i]) total[i] = part[i];          \
            if (op == COMM_MIN && part[i] < total[i]) total[i] = part[i];          \
        }                                                                          \
    }
COMBINE(float)
COMBINE(double)
COMBINE(int32_t)
COMBINE(int64_t)

static int combine(void* total, const void* part, uint64_t count, comm_dtype dtype, comm_op op) {
    if (op < COMM_SUM || op > COMM_MIN) return 0;
    if (dtype == COMM_FLOAT32)
        combine_float(total, part, count, op);
    else if (dtype == COMM_FLOAT64)
        combine_double(total, part, count, op);
    else if (dtype == COMM_INT32)
        combine_int32_t(total, part, count, op);
    else if (dtype == COMM_INT64)
        combine_int64_t(total, part, count, op);
    else
        return 0;
    return 1;
}

static size_t size_of(comm_dtype dtype) {
    switch (dtype) {
        case COMM_COMPLEX128:
            return 16;
        case COMM_COMPLEX64:
        case COMM_FLOAT64:
        case COMM_INT64:
        case COMM_UINT64:
            return 8;
        case COMM_FLOAT32:
        case COMM_INT32:
        case COMM_UINT32:
            return 4;
        case COMM_FLOAT16:
        case COMM_BFLOAT16:
        case COMM_INT16:
        case COMM_UINT16:
            return 2;
        default:
            return 1;
    }
}

/* ---- bringing the ranks together ---- */

/* A name in the abstract namespace is not a file: it goes when its socket does. The kernel picks
 * it.
 */
static int listen_somewhere(struct sockaddr_un* address, socklen_t* length) {
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    *length = sizeof *address;
    if (bind(listener, (struct sockaddr*)address, sizeof(sa_family_t)) != 0 ||
        listen(listener, 128) != 0 ||
        getsockname(listener, (struct sockaddr*)address, length) != 0) {
        close(listener);
        return -1;
    }
    return listener;
}

static void set_timeout(int fd, int timeout_ms) {
    struct timeval limit = {timeout_ms / 1000, timeout_ms % 1000 * 1000};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

struct card { /* how a rank can be reached */
    struct sockaddr_un address;
    socklen_t length;
};

/* Connect to the lower ranks, then let the higher ones connect: nobody waits in a circle. */
static comm_result connect_all(struct comm_s* comm, int listener, const struct card* cards,
                               int timeout_ms) {
    for (int peer = 0; peer < comm->rank; peer++) {
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        set_timeout(fd, timeout_ms);
        comm->sockets[peer] = fd;
        if (connect(fd, (const struct sockaddr*)&cards[peer].address, cards[peer].length) != 0)
            return fail_system(comm, "connecting to", peer);
        comm_result code = put(comm, peer, &comm->rank, sizeof comm->rank);
        if (code != COMM_OK) return code;
    }
    set_timeout(listener, timeout_ms);
    for (int more = comm->nranks - 1 - comm->rank; more > 0; more--) {
        int peer, fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0) return fail_system(comm, "accepting a rank above", comm->rank);
        set_timeout(fd, timeout_ms);
        if (recv(fd, &peer, sizeof peer, MSG_WAITALL) != sizeof peer)
            return fail_system(comm, "greeting a rank above", comm->rank);
        comm->sockets[peer] = fd;
    }
    return COMM_OK;
}

static comm_result toy_destroy(comm_t comm) {
    for (int peer = 0; peer < comm->nranks; peer++)
        if (comm->sockets[peer] >= 0) close(comm->sockets[peer]);
    free(comm->sockets);
    free(comm);
    return COMM_OK;
}

static comm_result toy_init(comm_t* out, const comm_init_args* args) {
    if (args->options != NULL && args->options[0] != NULL) {
        snprintf(last_error_without_comm, sizeof last_error_without_comm,
                 "rank %d: toy has no option %s", args->rank, args->options[0]);
        return COMM_INVALID_ARGUMENT;
    }
    struct comm_s* comm = calloc(1, sizeof *comm);
    struct card mine, *cards = calloc((size_t)args->nranks, sizeof *cards);
    comm->rank = args->rank;
    comm->nranks = args->nranks;
    comm->sockets = malloc(sizeof(int) * (size_t)args->nranks);
    for (int peer = 0; peer < args->nranks; peer++) comm->sockets[peer] = -1;
    int listener = listen_somewhere(&mine.address, &mine.length);
    comm_result code = args->bootstrap->allgather(args->bootstrap->ctx, &mine, cards, sizeof mine);
    if (code == COMM_OK) code = connect_all(comm, listener, cards, args->timeout_ms);
    if (listener >= 0) close(listener);
    free(cards);
    if (code == COMM_OK) {
        *out = comm;
    } else {
        memcpy(last_error_without_comm, comm->error, sizeof comm->error);
        toy_destroy(comm);
    }
    return code;
}

/* ---- the calls ---- */

/* Rank 0 combines in order of rank and hands the result on, so that all have the same bits. */
static comm_result reduce_on_root(comm_t comm, void* recv, void* part, uint64_t count,
                                  comm_dtype dtype, comm_op op) {
    size_t nbytes = count * size_of(dtype);
    for (int peer = 1; peer < comm->nranks; peer++) {
        comm_result code = get(comm, peer, part, nbytes);
        if (code != COMM_OK) return code;
        combine(recv, part, count, dtype, op);
    }
    for (int peer = 1; peer < comm->nranks; peer++) {
        comm_result code = put(comm, peer, recv, nbytes);
        if (code != COMM_OK) return code;
    }
    return COMM_OK;
}

static comm_result toy_allreduce(comm_t comm, const void* send, void* recv, uint64_t count,
                                 comm_dtype dtype, comm_op op, comm_stream stream) {
    (void)stream;
    if (!combine(NULL, NULL, 0, dtype, op)) {
        snprintf(comm->error, sizeof comm->error, "rank %d: toy cannot reduce dtype %d with op %d",
                 comm->rank, dtype, op);
        return COMM_UNSUPPORTED;
    }
    size_t nbytes = count * size_of(dtype);
    if (send != recv) memcpy(recv, send, nbytes);
    if (comm->rank != 0) {
        comm_result code = put(comm, 0, send, nbytes);
        return code == COMM_OK ? get(comm, 0, recv, nbytes) : code;
    }
    void* part = malloc(nbytes);
    comm_result code = reduce_on_root(comm, recv, part, count, dtype, op);
    free(part);
    return code;
}

static comm_result toy_send(comm_t comm, const void* buffer, uint64_t count, comm_dtype dtype,
                            int32_t dst, comm_stream stream) {
    (void)stream;
    return put(comm, dst, buffer, count * size_of(dtype));
}

static comm_result toy_recv(comm_t comm, void* buffer, uint64_t count, comm_dtype dtype,
                            int32_t src, comm_stream stream) {
    (void)stream;
    return get(comm, src, buffer, count * size_of(dtype));
}

static comm_result toy_probe(int32_t* score) {
    *score = 1; /* below everything that is fast */
    return COMM_OK;
}

static const char* toy_last_error(comm_t comm) {
    return comm != NULL ? comm->error : last_error_without_comm;
}

static const comm_plugin table = {
    .struct_size = sizeof(comm_plugin),
    .abi_major = COMM_ABI_MAJOR,
    .abi_minor = COMM_ABI_MINOR,
    .name = "toy",
    .version = "1.0",
    .device_type = COMM_CPU,
    .caps = COMM_CAP_ONE_NODE | COMM_CAP_THREADS,
    .probe = toy_probe,
    .init = toy_init,
    .destroy = toy_destroy,
    .allreduce = toy_allreduce,
    .last_error = toy_last_error,
    .send = toy_send,
    .recv = toy_recv,
};

const comm_plugin* comm_plugin_entry_v1(void) { return &table; }
