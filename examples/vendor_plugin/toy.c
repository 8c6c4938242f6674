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

#include "allreduce.h"
#include "communicator.h"

struct comm_s {
    struct comm_base base;
    int* sockets; /* one for each peer; -1 for this rank */
};

static _Thread_local char last_error_without_comm[256];

static comm_result fail(struct comm_s* comm, comm_result code, const char* doing, int peer) {
    char* text = comm != NULL ? comm->base.error : last_error_without_comm;
    snprintf(text, sizeof comm->base.error, "rank %d: %s rank %d failed: %s. Is that rank alive?",
             comm != NULL ? comm->base.rank : -1, doing, peer,
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
    for (int peer = 0; peer < comm->base.rank; peer++) {
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        set_timeout(fd, timeout_ms);
        comm->sockets[peer] = fd;
        if (connect(fd, (const struct sockaddr*)&cards[peer].address, cards[peer].length) != 0)
            return fail_system(comm, "connecting to", peer);
        comm_result code = put(comm, peer, &comm->base.rank, sizeof comm->base.rank);
        if (code != COMM_OK) return code;
    }
    set_timeout(listener, timeout_ms);
    for (int more = comm->base.nranks - 1 - comm->base.rank; more > 0; more--) {
        int peer, fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0) return fail_system(comm, "accepting a rank above", comm->base.rank);
        set_timeout(fd, timeout_ms);
        if (recv(fd, &peer, sizeof peer, MSG_WAITALL) != sizeof peer)
            return fail_system(comm, "greeting a rank above", comm->base.rank);
        if (peer <= comm->base.rank || peer >= comm->base.nranks || comm->sockets[peer] >= 0) {
            close(fd); /* of another program of this machine, and the ranks still come */
            more++;
            continue;
        }
        comm->sockets[peer] = fd;
    }
    return COMM_OK;
}

static comm_result toy_destroy(comm_t comm) {
    for (int peer = 0; peer < comm->base.nranks; peer++)
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
    comm->base.rank = args->rank;
    comm->base.nranks = args->nranks;
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
        memcpy(last_error_without_comm, comm->base.error, sizeof comm->base.error);
        toy_destroy(comm);
    }
    return code;
}

/* ---- the calls ---- */

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
    return comm != NULL ? comm->base.error : last_error_without_comm;
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
    .allreduce = allreduce,
    .last_error = toy_last_error,
    .send = toy_send,
    .recv = toy_recv,
};

const comm_plugin* comm_plugin_entry_v1(void) { return &table; }
