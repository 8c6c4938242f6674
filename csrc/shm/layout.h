// What lies in the shared segment, and where.
//
//   RankBlock[n] | Lane[n][n] | slots: n ranks x 2 | letters: n x n lanes
//
// Everything that one rank writes while others look at it has cache lines of its own: pairs of
// them, because processors fetch lines in pairs.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "abi/communicator.h"
#include "shm/shape.h"

namespace shm {

constexpr size_t line = 128;
constexpr size_t page = 4096;

constexpr size_t round_up(size_t value, size_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

enum class Kind : uint8_t {
    none,
    barrier,
    allreduce,
    broadcast,
    reduce,
    allgather,
    reduce_scatter,
    alltoall
};

// What a rank asked for. Two of them, for even and odd calls: a rank can be one call ahead, never
// two.
struct Record {
    std::atomic<uint64_t> what;
    std::atomic<uint64_t> count;
    // The tensor itself, if it fits; else where it is, if that is in shared memory: see Memory.
    std::atomic<uint64_t> word;
};

// The record travels in the cache line of the step: checking it costs no transfer of its own.
struct alignas(line) Arrival {
    std::atomic<uint32_t> step;
    std::atomic<uint32_t> core;  // where the rank last ran
    std::atomic<uint64_t> call;
    Record records[2];
};
static_assert(offsetof(Arrival, records) + sizeof(Arrival::records) <= 64, "one cache line");

// A piece of shared memory that a rank made for its tensors, open in its process as `fd`.
constexpr uint32_t most_regions = 64;

struct Region {
    std::atomic<uint32_t> id;  // 0 if there is none
    int32_t fd;
    uint64_t nbytes;
};

struct alignas(line) Counter {
    std::atomic<uint32_t> value;
};

enum State : uint32_t { absent, present, closed, failed, aborted };

struct alignas(line) Identity {
    std::atomic<uint32_t> state;
    int32_t pid;
    uint64_t start_time;     // of the process, to tell it from a later one with its pid
    uint64_t pid_namespace;  // pids mean the same only within one
};

struct RankBlock {
    Arrival arrival;
    Counter sleepers;  // how many sleep on arrival.step
    Counter bell;      // what this rank sleeps on while it waits for letters
    Counter asleep;    // whether it does
    Identity identity;
    alignas(line) Shape shapes[2];  // beside the two records; read only for errors
    alignas(line) Region regions[most_regions];
};

// Letters from one rank to another: a ring of `lane_depth` envelopes.
constexpr uint32_t lane_depth = 4;

struct Lane {
    Counter posted;  // written by the sender
    Counter taken;   // written by the receiver
};

struct Envelope {  // opens each letter; its content follows
    uint32_t message;
    uint32_t dtype;
    uint64_t count;
    Shape shape;
};
constexpr size_t envelope_bytes = 64;
static_assert(sizeof(Envelope) <= envelope_bytes, "one cache line");

// Where things are: the same arithmetic on every rank.
struct Layout {
    int nranks = 1;
    size_t slot_bytes = 0;
    size_t letter_bytes = 0;  // without the envelope

    size_t blocks() const { return 0; }
    size_t lanes() const { return blocks() + nranks * sizeof(RankBlock); }
    size_t slots() const { return round_up(lanes() + lane_count() * sizeof(Lane), page); }
    size_t letters() const { return slots() + 2 * nranks * slot_bytes; }
    size_t total() const {
        return round_up(letters() + lane_count() * lane_depth * letter_stride(), page);
    }
    size_t lane_count() const { return static_cast<size_t>(nranks) * nranks; }
    size_t letter_stride() const { return envelope_bytes + letter_bytes; }
};

inline Layout layout_for(int nranks, bool oversubscribed) {
    Layout layout;
    layout.nranks = nranks;
    // Two slots of every rank should fit the caches; where a switch of ranks costs more than a
    // miss, or many ranks share the work, larger ones win.
    layout.slot_bytes = oversubscribed || nranks > 4 ? 1 << 20 : 128 << 10;
    size_t budget = (16u << 20) / layout.lane_count() / lane_depth;
    size_t letter = budget > (64u << 10) ? 64u << 10 : round_up(budget, page);
    layout.letter_bytes = letter - envelope_bytes;
    return layout;
}

}  // namespace shm
