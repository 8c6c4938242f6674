// Streams of bytes: one ring from each rank to each other, beside all calls. Several threads of a
// rank may sleep until a stream changes, and the peer wakes those that say so.
#include <algorithm>
#include <cstring>

#include "shm/shm_communicator.h"

namespace shm {
namespace {

constexpr uint64_t part_bytes = 32u << 10;    // so much is published at once: both sides copy
constexpr uint32_t waiting = 1, serving = 2;  // kinds of sleepers

// Copies between a ring and plain memory, in at most two pieces.
template <class Copy>
void for_each_piece(uint64_t position, uint64_t nbytes, uint64_t ring_bytes, Copy copy) {
    uint64_t offset = position % ring_bytes, first = std::min(nbytes, ring_bytes - offset);
    copy(offset, uint64_t{0}, first);
    if (first < nbytes) copy(uint64_t{0}, first, nbytes - first);
}

}  // namespace

uint64_t ShmCommunicator::stream_write(int peer, std::pair<const void*, uint64_t> prefix,
                                       const void* data, uint64_t nbytes) {
    check_process();
    uint64_t room =
        segment_.layout().stream_bytes - (segment_.stream(rank, peer).num_written.value.load() -
                                          segment_.stream(rank, peer).num_read.value.load());
    if (room == 0) return 0;
    char joined[256];  // a prefix and a small tensor are published together
    if (prefix.second + nbytes <= sizeof joined) {
        std::memcpy(joined, prefix.first, prefix.second);
        std::memcpy(joined + prefix.second, data, nbytes);
        return write_part(peer, joined, prefix.second + nbytes);
    }
    uint64_t written = write_part(peer, static_cast<const char*>(prefix.first), prefix.second);
    if (written < prefix.second) return written;
    return written + write_part(peer, static_cast<const char*>(data), nbytes);
}

// The exchange of num_written publishes the bytes, and orders them before the look at who sleeps.
uint64_t ShmCommunicator::write_part(int peer, const char* data, uint64_t nbytes) {
    Stream& stream = segment_.stream(rank, peer);
    char* ring = segment_.stream_data(rank, peer);
    const uint64_t ring_bytes = segment_.layout().stream_bytes;
    uint64_t position = stream.num_written.value.load(std::memory_order_relaxed), done = 0;
    while (done < nbytes) {
        uint64_t room =
            ring_bytes - (position - stream.num_read.value.load(std::memory_order_acquire));
        uint64_t part = std::min({room, nbytes - done, part_bytes});
        if (part == 0) break;
        for_each_piece(position, part, ring_bytes, [&](uint64_t at, uint64_t from, uint64_t size) {
            std::memcpy(ring + at, data + done + from, size);
        });
        stream.num_written.value.exchange(position += part, std::memory_order_seq_cst);
        done += part;
        ring_stream_doorbell(peer);
    }
    return done;
}

// Only a peer that may have found the ring full needs to know of the room.
uint64_t ShmCommunicator::stream_read(int peer, void* data, uint64_t nbytes) {
    check_process();
    Stream& stream = segment_.stream(peer, rank);
    const char* ring = segment_.stream_data(peer, rank);
    const uint64_t ring_bytes = segment_.layout().stream_bytes;
    uint64_t position = stream.num_read.value.load(std::memory_order_relaxed), done = 0;
    while (done < nbytes) {
        uint64_t arrived = stream.num_written.value.load(std::memory_order_acquire) - position;
        uint64_t part = std::min({arrived, nbytes - done, part_bytes});
        if (part == 0) break;
        for_each_piece(position, part, ring_bytes, [&](uint64_t at, uint64_t to, uint64_t size) {
            std::memcpy(static_cast<char*>(data) + done + to, ring + at, size);
        });
        stream.num_read.value.exchange(position + part, std::memory_order_seq_cst);
        bool was_full =
            stream.num_written.value.load(std::memory_order_seq_cst) - position == ring_bytes;
        position += part;
        done += part;
        if (was_full) ring_stream_doorbell(peer);
    }
    return done;
}

bool ShmCommunicator::is_ready(int peer, uint8_t interest) {
    const uint64_t ring_bytes = segment_.layout().stream_bytes;
    Stream &in = segment_.stream(peer, rank), &out = segment_.stream(rank, peer);
    bool is_readable = in.num_written.value.load() != in.num_read.value.load();
    bool is_writable = out.num_written.value.load() - out.num_read.value.load() < ring_bytes;
    return ((interest & COMM_STREAM_READABLE) != 0 && is_readable) ||
           ((interest & COMM_STREAM_WRITABLE) != 0 && is_writable);
}

// In turns, so that no peer keeps the others waiting; -1 if none is ready.
int ShmCommunicator::find_ready(const uint8_t* interest) {
    for (int i = 1; i <= nranks; ++i) {
        int peer = (last_ready_ + i) % nranks;
        uint8_t wanted = __atomic_load_n(&interest[peer], __ATOMIC_RELAXED);
        if (wanted != 0 && is_ready(peer, wanted)) return last_ready_ = peer;
    }
    return -1;
}

int ShmCommunicator::stream_wait(const uint8_t* interest, int64_t timeout_ns) {
    check_process();
    int peer = find_ready(interest);
    if (peer >= 0 || timeout_ns == 0) return peer;
    // Without yields: one that another process takes costs a time slice, a sleep only the wake-up.
    if (spin_until(SpinPolicy{spin_policy_.pauses, 0},
                   [&] { return (peer = find_ready(interest)) >= 0; }))
        return peer;
    RankBlock& own = segment_.block(rank);
    own.stream_sleepers.value.fetch_or(waiting, std::memory_order_seq_cst);
    uint32_t rings = own.stream_doorbell.value.load(std::memory_order_seq_cst);
    peer = find_ready(interest);
    if (peer < 0 && !aborted_.load())
        sleep_as(waiting, &own.stream_doorbell.value, rings, timeout_ns);
    own.stream_sleepers.value.fetch_and(~waiting, std::memory_order_relaxed);
    return peer < 0 ? find_ready(interest) : peer;
}

void ShmCommunicator::stream_sleep(int64_t timeout_ns) {
    check_process();
    Counter& doorbell = segment_.block(rank).stream_doorbell;
    sleep_as(serving, &doorbell.value, stream_rings_, timeout_ns);
    stream_rings_ = doorbell.value.load(std::memory_order_seq_cst);
}

// A child that was forked from the rank has no part in its bells, and may still close.
void ShmCommunicator::stream_notify(int what) {
    if (!fork_guard_.is_original_process()) return;
    RankBlock& own = segment_.block(rank);
    if (what != COMM_STREAM_DISARM)
        own.stream_sleepers.value.fetch_or(serving, std::memory_order_seq_cst);
    else
        own.stream_sleepers.value.fetch_and(~serving, std::memory_order_seq_cst);
    if (what == COMM_STREAM_WAKE) ring_stream_doorbell(rank);
}

// A sleeper sets its bit and then looks at the streams; this rank has changed a stream and then
// looks at the bits. Both are sequentially consistent, so one sees the other.
void ShmCommunicator::ring_stream_doorbell(int peer) {
    RankBlock& block = segment_.block(peer);
    if (block.stream_sleepers.value.load(std::memory_order_seq_cst) == 0) return;
    uint32_t sleepers = block.stream_sleepers.value.exchange(0, std::memory_order_seq_cst);
    block.stream_doorbell.value.fetch_add(1, std::memory_order_seq_cst);
    wake_kinds(sleepers, &block.stream_doorbell.value);
}

// A peer that failed in a collective may still send: only its end or close ends its streams.
void ShmCommunicator::stream_check(int peer) {
    if (aborted_.load(std::memory_order_relaxed)) throw_aborted("");
    uint32_t state = segment_.block(peer).identity.state.load(std::memory_order_acquire);
    if ((state == failed || state == timed_out) &&
        !has_died(segment_.block(peer).identity, segment_.block(rank).identity))
        return;
    if (const char* end = describe_end(peer))
        throw PluginError{COMM_REMOTE_ERROR, describe_peer(peer) + " " + end};
}

}  // namespace shm
