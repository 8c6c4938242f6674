/* allreduce over put() and get() of the file that includes this, for the examples beside: four
 * types and four operations. A library for real has vectors, and trees or rings. */
#ifndef ALLREDUCE_H
#define ALLREDUCE_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "communicator.h"

struct comm_base { /* the first member of a comm_s */
    int rank, nranks;
    char error[256];
};

static comm_result put(comm_t comm, int peer, const void* data, size_t nbytes);
static comm_result get(comm_t comm, int peer, void* data, size_t nbytes);

#define COMBINE(T)                                                                        \
    static inline void combine_##T(T* total, const T* part, uint64_t count, comm_op op) { \
        for (uint64_t i = 0; i < count; i++) {                                            \
            if (op == COMM_SUM) total[i] += part[i];                                      \
            if (op == COMM_PROD) total[i] *= part[i];                                     \
            if (op == COMM_MAX && part[i] > total[i]) total[i] = part[i];                 \
            if (op == COMM_MIN && part[i] < total[i]) total[i] = part[i];                 \
        }                                                                                 \
    }
COMBINE(float)
COMBINE(double)
COMBINE(int32_t)
COMBINE(int64_t)

static inline int combine(void* total, const void* part, uint64_t count, comm_dtype dtype,
                          comm_op op) {
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

static inline size_t size_of(comm_dtype dtype) {
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

/* Rank 0 combines in order of rank and hands the result on, so that all have the same bits. */
static comm_result reduce_on_root(comm_t comm, void* recv, void* part, uint64_t count,
                                  comm_dtype dtype, comm_op op) {
    int nranks = ((struct comm_base*)comm)->nranks;
    size_t nbytes = count * size_of(dtype);
    for (int peer = 1; peer < nranks; peer++) {
        comm_result code = get(comm, peer, part, nbytes);
        if (code != COMM_OK) return code;
        combine(recv, part, count, dtype, op);
    }
    for (int peer = 1; peer < nranks; peer++) {
        comm_result code = put(comm, peer, recv, nbytes);
        if (code != COMM_OK) return code;
    }
    return COMM_OK;
}

static comm_result allreduce(comm_t comm, const void* send, void* recv, uint64_t count,
                             comm_dtype dtype, comm_op op, comm_stream stream) {
    (void)stream;
    struct comm_base* base = (struct comm_base*)comm;
    if (!combine(NULL, NULL, 0, dtype, op)) {
        snprintf(base->error, sizeof base->error,
                 "rank %d: this example cannot reduce dtype %d with op %d", base->rank, dtype, op);
        return COMM_UNSUPPORTED;
    }
    size_t nbytes = count * size_of(dtype);
    if (send != recv) memcpy(recv, send, nbytes);
    if (base->rank != 0) {
        comm_result code = put(comm, 0, send, nbytes);
        return code == COMM_OK ? get(comm, 0, recv, nbytes) : code;
    }
    void* part = malloc(nbytes);
    comm_result code = reduce_on_root(comm, recv, part, count, dtype, op);
    free(part);
    return code;
}

#endif
