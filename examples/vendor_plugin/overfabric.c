/* A vendor library over libfabric: whatever network it has a provider for (tcp, shared memory,
 * InfiniBand, EFA, Slingshot), by tagged messages of reliable datagrams.
 *
 * Communicator(coor, backend="./liboverfabric.so", provider="shm") names one; otherwise libfabric
 * chooses. A call polls until its message is complete, the deadline is over, or abort() is called.
 * Ranks may be threads: there is no state outside the communicator but the text of the last error.
 */
#define _GNU_SOURCE
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_tagged.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "allreduce.h"
#include "communicator.h"

#define ADDRESS_MAX 256
#define EAGER_POLLS 500 /* before a pause after each further one */
#define PAUSE_NS 20000

struct comm_s {
    struct comm_base base;
    atomic_int timeout_ms;
    atomic_bool aborted;
    size_t largest; /* message of the provider, in bytes */
    struct fi_info* info;
    struct fid_fabric* fabric;
    struct fid_domain* domain;
    struct fid_av* addresses;
    struct fid_cq* completions;
    struct fid_ep* endpoint;
    fi_addr_t* peers;
};

static _Thread_local char last_error_without_comm[256];

static comm_result fail(comm_t comm, comm_result code, const char* doing, int peer,
                        const char* why) {
    snprintf(comm->base.error, sizeof comm->base.error,
             "rank %d: %s rank %d failed: %s. Is that rank alive?", comm->base.rank, doing, peer,
             why);
    return code;
}

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* ---- messages ---- */

/* What may end a wait before the message does. */
static comm_result check(comm_t comm, int64_t deadline, const char* doing, int peer) {
    if (atomic_load(&comm->aborted))
        return fail(comm, COMM_REMOTE_ERROR, doing, peer, "the communicator was aborted");
    if (now_ms() > deadline) return fail(comm, COMM_TIMEOUT, doing, peer, "the deadline is over");
    return COMM_OK;
}

/* Take one completion: 1, 0 if there is none yet, or -1 with the text of what went wrong. */
static int poll_completion(comm_t comm, const char** why) {
    struct fi_cq_tagged_entry entry;
    ssize_t got = fi_cq_read(comm->completions, &entry, 1);
    if (got == 1) return 1;
    if (got == -FI_EAGAIN) return 0;
    struct fi_cq_err_entry error = {0};
    if (fi_cq_readerr(comm->completions, &error, 0) == 1 && error.err == FI_ECANCELED) return 1;
    *why = fi_strerror(error.err != 0 ? error.err : (int)-got);
    return -1;
}

/* Wait for the one message that is under way, or take it back. */
static comm_result await(comm_t comm, struct fi_context* context, int64_t deadline,
                         const char* doing, int peer) {
    const char* why = NULL;
    for (int polls = 0;; polls++) {
        int got = poll_completion(comm, &why);
        if (got == 1) return COMM_OK;
        if (got < 0) return fail(comm, COMM_REMOTE_ERROR, doing, peer, why);
        if (polls < EAGER_POLLS) continue;
        nanosleep(&(struct timespec){0, PAUSE_NS}, NULL);
        comm_result code = check(comm, deadline, doing, peer);
        if (code == COMM_OK) continue;
        fi_cancel(&comm->endpoint->fid, context);
        for (int more = 0; more < EAGER_POLLS && poll_completion(comm, &why) == 0;) more++;
        return code;
    }
}

/* The tag of a message is its sender. Those of two ranks keep their order (FI_ORDER_SAS). */
static comm_result move(comm_t comm, int is_send, void* buffer, size_t nbytes, int peer) {
    const char* doing = is_send ? "sending to" : "receiving from";
    int64_t deadline = now_ms() + atomic_load(&comm->timeout_ms);
    for (char* next = buffer; nbytes > 0;) {
        struct fi_context context[2]; /* the provider's, until the message is complete */
        size_t part = nbytes < comm->largest ? nbytes : comm->largest;
        ssize_t code = -FI_EAGAIN;
        const char* why = NULL;
        while (code == -FI_EAGAIN) {
            code = is_send ? fi_tsend(comm->endpoint, next, part, NULL, comm->peers[peer],
                                      (uint64_t)comm->base.rank, context)
                           : fi_trecv(comm->endpoint, next, part, NULL, FI_ADDR_UNSPEC,
                                      (uint64_t)peer, 0, context);
            if (code != -FI_EAGAIN) break;
            if (poll_completion(comm, &why) < 0)
                return fail(comm, COMM_REMOTE_ERROR, doing, peer, why);
            comm_result stop = check(comm, deadline, doing, peer);
            if (stop != COMM_OK) return stop;
        }
        if (code != 0) return fail(comm, COMM_SYSTEM_ERROR, doing, peer, fi_strerror((int)-code));
        comm_result done = await(comm, context, deadline, doing, peer);
        if (done != COMM_OK) return done;
        next += part;
        nbytes -= part;
    }
    return COMM_OK;
}

static comm_result put(comm_t comm, int peer, const void* data, size_t nbytes) {
    return move(comm, 1, (void*)data, nbytes, peer);
}

static comm_result get(comm_t comm, int peer, void* data, size_t nbytes) {
    return move(comm, 0, data, nbytes, peer);
}

/* ---- bringing the ranks together ---- */

static void close_fid(struct fid* fid) {
    if (fid != NULL) fi_close(fid);
}

static comm_result fabric_destroy(comm_t comm) {
    if (comm->endpoint != NULL) close_fid(&comm->endpoint->fid);
    if (comm->completions != NULL) close_fid(&comm->completions->fid);
    if (comm->addresses != NULL) close_fid(&comm->addresses->fid);
    if (comm->domain != NULL) close_fid(&comm->domain->fid);
    if (comm->fabric != NULL) close_fid(&comm->fabric->fid);
    if (comm->info != NULL) fi_freeinfo(comm->info);
    free(comm->peers);
    free(comm);
    return COMM_OK;
}

/* Reliable datagrams with tags, to memory that need not be registered. */
static int find_provider(const char* provider, struct fi_info** info) {
    struct fi_info* hints = fi_allocinfo();
    hints->caps = FI_TAGGED;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->tx_attr->msg_order = hints->rx_attr->msg_order = FI_ORDER_SAS;
    hints->domain_attr->mr_mode = 0;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    if (provider != NULL) hints->fabric_attr->prov_name = strdup(provider);
    int code = fi_getinfo(FI_VERSION(1, 9), NULL, NULL, 0, hints, info);
    fi_freeinfo(hints);
    return code;
}

static int open_endpoint(comm_t comm, const char* provider) {
    struct fi_cq_attr queue = {.format = FI_CQ_FORMAT_TAGGED, .wait_obj = FI_WAIT_NONE};
    struct fi_av_attr table = {.type = FI_AV_TABLE, .count = (size_t)comm->base.nranks};
    int code = find_provider(provider, &comm->info);
    if (code == 0) code = fi_fabric(comm->info->fabric_attr, &comm->fabric, NULL);
    if (code == 0) code = fi_domain(comm->fabric, comm->info, &comm->domain, NULL);
    if (code == 0) code = fi_av_open(comm->domain, &table, &comm->addresses, NULL);
    if (code == 0) code = fi_cq_open(comm->domain, &queue, &comm->completions, NULL);
    if (code == 0) code = fi_endpoint(comm->domain, comm->info, &comm->endpoint, NULL);
    if (code == 0) code = fi_ep_bind(comm->endpoint, &comm->addresses->fid, 0);
    if (code == 0)
        code = fi_ep_bind(comm->endpoint, &comm->completions->fid, FI_TRANSMIT | FI_RECV);
    if (code == 0) code = fi_enable(comm->endpoint);
    if (code == 0) comm->largest = comm->info->ep_attr->max_msg_size;
    return code;
}

struct card { /* how a rank can be reached, and whether it can be */
    char address[ADDRESS_MAX];
    int32_t code;
};

static comm_result meet(comm_t comm, const comm_init_args* args, const char* provider) {
    struct card own = {0}, *cards = calloc((size_t)comm->base.nranks, sizeof *cards);
    size_t length = ADDRESS_MAX;
    own.code = open_endpoint(comm, provider);
    if (own.code == 0) own.code = fi_getname(&comm->endpoint->fid, own.address, &length);
    comm_result code = args->bootstrap->allgather(args->bootstrap->ctx, &own, cards, sizeof own);
    for (int peer = 0; code == COMM_OK && peer < comm->base.nranks; peer++) {
        if (cards[peer].code != 0)
            code = fail(comm, COMM_UNSUPPORTED, "opening the fabric on", peer,
                        fi_strerror(-cards[peer].code));
        else if (fi_av_insert(comm->addresses, cards[peer].address, 1, &comm->peers[peer], 0,
                              NULL) != 1)
            code = fail(comm, COMM_SYSTEM_ERROR, "looking up", peer, "the address is refused");
    }
    free(cards);
    return code;
}

static comm_result fabric_init(comm_t* out, const comm_init_args* args) {
    const char* provider = NULL;
    for (const char* const* option = args->options; option != NULL && *option != NULL; option++) {
        if (strncmp(*option, "provider=", 9) != 0) {
            snprintf(last_error_without_comm, sizeof last_error_without_comm,
                     "rank %d: fabric has no option %s, but provider=", args->rank, *option);
            return COMM_INVALID_ARGUMENT;
        }
        provider = *option + 9;
    }
    struct comm_s* comm = calloc(1, sizeof *comm);
    comm->base.rank = args->rank;
    comm->base.nranks = args->nranks;
    atomic_store(&comm->timeout_ms, args->timeout_ms);
    comm->peers = calloc((size_t)args->nranks, sizeof *comm->peers);
    comm_result code = meet(comm, args, provider);
    if (code == COMM_OK) {
        *out = comm;
    } else {
        memcpy(last_error_without_comm, comm->base.error, sizeof comm->base.error);
        fabric_destroy(comm);
    }
    return code;
}

/* ---- the calls ---- */

static comm_result fabric_send(comm_t comm, const void* buffer, uint64_t count, comm_dtype dtype,
                               int32_t dst, comm_stream stream) {
    (void)stream;
    return put(comm, dst, buffer, count * size_of(dtype));
}

static comm_result fabric_recv(comm_t comm, void* buffer, uint64_t count, comm_dtype dtype,
                               int32_t src, comm_stream stream) {
    (void)stream;
    return get(comm, src, buffer, count * size_of(dtype));
}

/* So that no rank closes its end while another still reads from it. */
static comm_result fabric_finalize(comm_t comm) {
    int32_t one = 1;
    return allreduce(comm, &one, &one, 1, COMM_INT32, COMM_SUM, NULL);
}

static comm_result fabric_abort(comm_t comm) {
    atomic_store(&comm->aborted, 1);
    return COMM_OK;
}

static comm_result fabric_set_timeout(comm_t comm, int32_t timeout_ms) {
    atomic_store(&comm->timeout_ms, timeout_ms);
    return COMM_OK;
}

static comm_result fabric_probe(int32_t* score) {
    *score = 1; /* used where it is named */
    return COMM_OK;
}

static const char* fabric_last_error(comm_t comm) {
    return comm != NULL ? comm->base.error : last_error_without_comm;
}

static const comm_plugin table = {
    .struct_size = sizeof(comm_plugin),
    .abi_major = COMM_ABI_MAJOR,
    .abi_minor = COMM_ABI_MINOR,
    .name = "fabric",
    .version = "1.0",
    .device_type = COMM_CPU,
    .caps = COMM_CAP_THREADS,
    .probe = fabric_probe,
    .init = fabric_init,
    .destroy = fabric_destroy,
    .allreduce = allreduce,
    .last_error = fabric_last_error,
    .send = fabric_send,
    .recv = fabric_recv,
    .abort = fabric_abort,
    .finalize = fabric_finalize,
    .set_timeout = fabric_set_timeout,
};

const comm_plugin* comm_plugin_entry_v1(void) { return &table; }
