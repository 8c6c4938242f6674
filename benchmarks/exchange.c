/* How fast this machine lets ranks tell and read: a floor for whoever moves tensors between them.
 *
 *     cc -O2 -shared -fPIC benchmarks/exchange.c -o exchange.so
 *
 * Opened by every rank (collectives.py), on memory that all have mapped. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { LINE = 128, PIECE = 64 << 10, PATIENCE = 4000 };

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* The memory: a word for each rank on lines of its own, then a piece for each rank. */
static atomic_uint* word(char* base, int rank) { return (atomic_uint*)(base + rank * LINE); }
static char* piece(char* base, int rank, int nranks) {
    return base + 4096 + (nranks * LINE / 4096) * 4096 + (size_t)rank * PIECE;
}

size_t exchange_bytes(int nranks) { return piece(0, nranks, nranks) - (char*)0; }

static void step(char* base, int rank, int nranks, unsigned* steps, int crowded) {
    atomic_store_explicit(word(base, rank), ++*steps, memory_order_release);
    for (int peer = 0; peer < nranks; peer++)
        for (int looks = 0;; looks++) {
            unsigned seen = atomic_load_explicit(word(base, peer), memory_order_acquire);
            if ((int)(seen - *steps) >= 0) break;
            if (crowded || looks > PATIENCE) sched_yield();
        }
}

/* Nanoseconds in which every rank says that its bytes are written and reads as many that the next
 * rank has just written. More than a piece goes piece by piece, as long as the caches hold it, and
 * only the reading is counted. */
int64_t exchange_ns(char* base, int rank, int nranks, unsigned* steps, int crowded, char* own,
                    size_t nbytes) {
    int64_t took = 0;
    size_t first = 0;
    do { /* once for nothing too, which is to tell and to hear */
        size_t part = nbytes - first < PIECE ? nbytes - first : PIECE;
        memcpy(piece(base, rank, nranks), own, part);
        step(base, rank, nranks, steps, crowded);
        step(base, rank, nranks, steps, crowded); /* a sleeper of the first is late */
        int64_t start = now_ns();
        if (first == 0) step(base, rank, nranks, steps, crowded);
        memcpy(own, piece(base, (rank + 1) % nranks, nranks), part);
        took += now_ns() - start;
        step(base, rank, nranks, steps, crowded);
        first += part;
    } while (first < nbytes);
    return took;
}
