/* Calls of one library through communicator.h, one after the other, without Python.
 *
 *     cc -O2 -Icsrc benchmarks/back_to_back.c -o back_to_back
 *     ./back_to_back communicator/_shm.abi3.so RANKS BYTES TIMES
 *
 * Prints the microseconds of an allreduce of float32, as rank 0 sees the mean of TIMES. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "communicator.h"

enum { ROOM = 1 << 20 };

/* The bootstrap: memory that all ranks have inherited. */
struct meeting {
    atomic_int come;
    atomic_int round;
    char bytes[ROOM];
};

struct rank {
    struct meeting* meeting;
    int rank, nranks;
};

static comm_result meet(void* ctx) {
    struct rank* self = ctx;
    int round = atomic_load(&self->meeting->round);
    if (atomic_fetch_add(&self->meeting->come, 1) + 1 == self->nranks) {
        atomic_store(&self->meeting->come, 0);
        atomic_fetch_add(&self->meeting->round, 1);
    }
    while (atomic_load(&self->meeting->round) == round) sched_yield();
    return COMM_OK;
}

static comm_result allgather(void* ctx, const void* send, void* recv, size_t nbytes) {
    struct rank* self = ctx;
    if (nbytes * self->nranks > ROOM) return COMM_INVALID_ARGUMENT;
    memcpy(self->meeting->bytes + self->rank * nbytes, send, nbytes);
    meet(self);
    memcpy(recv, self->meeting->bytes, self->nranks * nbytes);
    return meet(self);
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

static int fail(const comm_plugin* table, comm_t comm) {
    fprintf(stderr, "%s\n", table->last_error(comm));
    return 1;
}

static int be_rank(const comm_plugin* table, struct rank* self, size_t nbytes, int times) {
    comm_bootstrap bootstrap = {sizeof bootstrap, self, allgather, meet};
    comm_init_args args = {.struct_size = sizeof args,
                           .rank = self->rank,
                           .nranks = self->nranks,
                           .device = -1,
                           .timeout_ms = 60000,
                           .name = "back-to-back",
                           .bootstrap = &bootstrap};
    comm_t comm;
    if (table->init(&comm, &args) != COMM_OK) return fail(table, NULL);
    float* data = calloc(1, nbytes);
    double start = 0;
    for (int i = -times / 10; i < times; i++) {
        if (i == 0) start = seconds();
        if (table->allreduce(comm, data, data, nbytes / 4, COMM_FLOAT32, COMM_SUM, NULL) != COMM_OK)
            return fail(table, comm);
    }
    if (self->rank == 0) printf("%.3f\n", (seconds() - start) * 1e6 / times);
    fflush(stdout);
    meet(self);
    table->destroy(comm);
    return 0;
}

int main(int count, char** words) {
    if (count != 5) return fprintf(stderr, "back_to_back LIBRARY RANKS BYTES TIMES\n"), 2;
    void* library = dlopen(words[1], RTLD_NOW);
    if (library == NULL) return fprintf(stderr, "%s\n", dlerror()), 1;
    const comm_plugin* (*entry)(void) =
        (const comm_plugin* (*)(void))dlsym(library, "comm_plugin_entry_v1");
    struct meeting* meeting =
        mmap(NULL, sizeof *meeting, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int nranks = atoi(words[2]), status = 0, failed = 0;
    for (int rank = 0; rank < nranks; rank++) {
        struct rank self = {meeting, rank, nranks};
        if (fork() == 0)
            _exit(be_rank(entry(), &self, strtoul(words[3], NULL, 10), atoi(words[4])));
    }
    while (wait(&status) > 0) failed |= status;
    return failed != 0;
}
