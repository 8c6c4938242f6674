// What lies in the shared segment, and where.
//
//   RankBlock[n] | Channel[n][n] | Stream[n][n] | slots: n ranks x 2 |
//   message chunks: n x n channels x depth | bytes of the streams: n x n
//
// Everything that one rank writes while others read it has cache lines of its own: pairs of them,
// because processors fetch lines in pairs.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "abi/communicator.h"

namespace shm {

// Ranks share memory only with those of the same version.
constexpr const char* const version = "6";

constexpr size_t cache_line_bytes = 128;
constexpr size_t page_bytes = 4096;

constexpr size_t round_up(size_t value, size_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

// The shape of a tensor, as far as ranks compare it and errors name it.
struct Shape {
    static constexpr int32_t max_named_dims = 4;
    int32_t ndim = -1;  // -1: not known
    int64_t dims[max_named_dims] = {};
    uint64_t digest = 0;  // of all dims

    void set(int32_t count, const int64_t* sizes) {
        ndim = count;
        digest = static_cast<uint64_t>(count + 1) * multiplier;
        for (int32_t dim = 0; dim < count; ++dim)
            digest = (digest ^ static_cast<uint64_t>(sizes[dim])) * multiplier;
        std::copy(sizes, sizes + num_named_dims(), dims);
    }
    int32_t num_named_dims() const { return std::min(ndim, max_named_dims); }
    // 24 well mixed bits of the digest; 0 if the shape is not known.
    uint64_t short_digest() const { return ndim < 0 ? 0 : digest >> 40; }
    // As Python writes it; empty if not known.
    std::string text() const {
        if (ndim < 0) return "";
        std::string sizes;
        for (int32_t dim = 0; dim < num_named_dims(); ++dim)
            sizes += (dim > 0 ? ", " : "") + std::to_string(dims[dim]);
        return "(" + sizes + (ndim > max_named_dims ? ", ..." : ndim == 1 ? "," : "") + ")";
    }

  private:
    static constexpr uint64_t multiplier = UINT64_C(0x9e3779b97f4a7c15);
};

// What a rank calls, to be compared by its peers. Two of them, for even and odd calls: a rank is at
// most one call ahead (see ShmCommunicator::begin).
struct CallHeader {
    std::atomic<uint64_t> signature;  // pack() of a CallSignature and its shape
    std::atomic<uint64_t> count;
    // The tensor itself, if it fits; or its TensorMemory::reference; or 0.
    std::atomic<uint64_t> inline_value;
};

// The header travels in the cache line of the step: comparing it costs no transfer of its own.
struct alignas(cache_line_bytes) Progress {
    std::atomic<uint32_t> step;
    std::atomic<uint32_t> core;  // where the rank last ran
    std::atomic<uint64_t> call_number;
    CallHeader headers[2];
};
static_assert(offsetof(Progress, headers) + sizeof(Progress::headers) <= 64, "one cache line");

// Shared memory that a rank allocated for a tensor, open in its process as `fd`.
constexpr uint32_t max_regions = 64;

struct SharedMemory {
    std::atomic<uint64_t> id;  // 0 if there is none; never used again
    int32_t fd;
    uint64_t nbytes;
};

struct alignas(cache_line_bytes) Counter {
    std::atomic<uint32_t> value;
};

// From `failed` on: those that failed in a call; `left` has closed since then.
enum RankState : uint32_t { absent, present, closed, aborted, failed, timed_out, left };

struct alignas(cache_line_bytes) Identity {
    std::atomic<uint32_t> state;
    int32_t pid;
    uint64_t start_time;     // of the process, to tell it from a later one with its pid
    uint64_t pid_namespace;  // pids can be compared only within one
};

// Of the text of a rank that declines a call, with the 0 at its end.
constexpr size_t max_declined_bytes = 512;

struct RankBlock {
    Progress progress;
    Counter num_sleepers;     // peers that sleep until progress.step changes
    Counter doorbell;         // changes when this rank is to look at its channels
    Counter awaits_doorbell;  // 1 while it sleeps until the doorbell changes
    Counter stream_doorbell;  // changes when this rank is to look at its streams
    Counter stream_sleepers;  // bits of the threads of this rank that sleep until it changes
    Identity identity;
    alignas(cache_line_bytes) Shape shapes[2];  // of the two headers; read only for errors
    char declined[2][max_declined_bytes];       // why, where a header is a Collective::declined
    alignas(cache_line_bytes) SharedMemory regions[max_regions];
};

// Messages from one rank to another: a ring of `channel_depth` chunks.
constexpr uint32_t channel_depth = 4;

struct Channel {
    Counter num_written;  // chunks, by the sender
    Counter num_read;     // chunks, by the receiver
};

// Bytes from one rank to another: a ring of Layout::stream_bytes.
struct alignas(cache_line_bytes) Position {
    std::atomic<uint64_t> value;
};

struct Stream {
    Position num_written;  // bytes, by the sender
    Position num_read;     // bytes, by the receiver
};

struct MessageHeader {  // opens each chunk; a part of the tensor follows
    uint32_t dtype;
    uint64_t count;
    Shape shape;
};
constexpr size_t message_header_bytes = 64;
static_assert(sizeof(MessageHeader) <= message_header_bytes, "one cache line");

// Offsets from the start of the segment: every rank computes the same.
struct Layout {
    int nranks = 1;
    size_t slot_bytes = 0;
    size_t chunk_bytes = 0;  // without the header
    size_t stream_bytes = 0;

    size_t blocks() const { return 0; }
    size_t channels() const { return blocks() + nranks * sizeof(RankBlock); }
    size_t streams() const { return channels() + num_channels() * sizeof(Channel); }
    size_t slots() const {
        return round_up(streams() + num_channels() * sizeof(Stream), page_bytes);
    }
    size_t chunks() const { return slots() + 2 * nranks * slot_bytes; }
    size_t stream_data() const {
        return round_up(chunks() + num_channels() * channel_depth * chunk_stride(), page_bytes);
    }
    size_t total() const { return stream_data() + num_channels() * stream_bytes; }
    size_t num_channels() const { return static_cast<size_t>(nranks) * nranks; }
    size_t chunk_stride() const { return message_header_bytes + chunk_bytes; }
};

inline Layout layout_for(int nranks, bool oversubscribed) {
    Layout layout;
    layout.nranks = nranks;
    // Two slots of every rank should fit the caches. Where switching ranks on a core costs more
    // than a miss, or many ranks share the work, larger slots win.
    layout.slot_bytes = oversubscribed || nranks > 4 ? 1 << 20 : 128 << 10;
    size_t budget = (16u << 20) / layout.num_channels() / channel_depth;
    size_t stride = budget > (64u << 10) ? 64u << 10 : round_up(budget, page_bytes);
    layout.chunk_bytes = stride - message_header_bytes;
    size_t stream_budget = (8u << 20) / layout.num_channels();
    layout.stream_bytes =
        std::min<size_t>(1u << 20, std::max(stream_budget / page_bytes, size_t{1}) * page_bytes);
    return layout;
}

}  // namespace shm
