// Sends and receives. A message travels in chunks through a ring that the two ranks share; each
// side counts its chunks, and the header of each says what tensor it is a part of.
#include <algorithm>
#include <cstring>

#include "shm/shm_communicator.h"

namespace shm {
namespace {

constexpr int64_t min_sleep_ns = 100000;

std::string describe(const P2pTransfer& transfer) {
    return (transfer.is_send ? "send to rank " : "recv from rank ") +
           std::to_string(transfer.peer) + " of " +
           describe_tensor(transfer.count, transfer.dtype, transfer.shape) + " (message " +
           std::to_string(transfer.message) + ")";
}

bool is_same_shape(const Shape& a, const Shape& b) {
    return a.ndim < 0 || b.ndim < 0 || a.digest == b.digest;
}

}  // namespace

void ShmCommunicator::send(const void* buffer, uint64_t count, comm_dtype dtype, int32_t dst,
                           comm_stream) {
    transfer(true, const_cast<void*>(buffer), count, dtype, dst);
}

void ShmCommunicator::recv(void* buffer, uint64_t count, comm_dtype dtype, int32_t src,
                           comm_stream) {
    transfer(false, buffer, count, dtype, src);
}

void ShmCommunicator::transfer(bool is_send, void* buffer, uint64_t count, comm_dtype dtype,
                               int32_t peer) {
    size_t size = checked_size(*this, dtype);
    if (peer < 0 || peer >= nranks || peer == rank)
        throw PluginError{COMM_INVALID_ARGUMENT, rank_prefix() + "rank " + std::to_string(peer) +
                                                     " is not a peer in a group of " +
                                                     std::to_string(nranks) +
                                                     ". Name one of the other ranks"};
    check_process();
    if (!broken_.empty()) throw PluginError{COMM_INVALID_USAGE, broken_};
    P2pTransfer transfer{};
    transfer.is_send = is_send;
    transfer.peer = peer;
    transfer.data = static_cast<char*>(buffer);
    transfer.count = count;
    transfer.dtype = dtype;
    transfer.shape = shape_;
    transfer.nbytes = count * size;
    transfer.message = is_send ? ++messages_sent_[peer] : ++messages_received_[peer];
    queued_.push_back(std::move(transfer));
    if (group_depth_ == 0) complete_queued();
}

void ShmCommunicator::group_end() {
    if (group_depth_ == 0)
        throw PluginError{COMM_INVALID_USAGE,
                          rank_prefix() + "group_end without group_start. Call group_start before"};
    if (--group_depth_ == 0 && !queued_.empty()) complete_queued();
}

void ShmCommunicator::complete_queued() {
    std::vector<P2pTransfer> transfers;
    transfers.swap(queued_);
    deadline_ns_ = 0;
    auto all_done = [&] {
        return std::all_of(transfers.begin(), transfers.end(),
                           [](const P2pTransfer& transfer) { return transfer.finished; });
    };
    while (!all_done()) {
        check_not_aborted();
        SpinPolicy policy =
            transfers.size() == 1 ? spin_policy_for(transfers[0].peer) : spin_policy_;
        if (!spin_until(policy, [&] { return progress(transfers); })) wait_for_messages(transfers);
    }
    for (const P2pTransfer& transfer : transfers)
        if (!transfer.mismatch.empty()) throw PluginError{COMM_INVALID_USAGE, transfer.mismatch};
}

// Moves what can be moved without waiting. Transfers of one direction with one peer share a
// channel, so a later one waits until the earlier one has finished.
bool ShmCommunicator::progress(std::vector<P2pTransfer>& transfers) {
    bool moved = false;
    std::vector<bool> busy(transfers.size() > 1 ? 2 * nranks : 0);
    for (P2pTransfer& transfer : transfers) {
        if (transfer.finished) continue;
        size_t direction = 2 * transfer.peer + transfer.is_send;
        if (!busy.empty() && busy[direction]) continue;
        moved |= advance(transfer);
        if (!busy.empty()) busy[direction] = !transfer.finished;
    }
    return moved;
}

bool ShmCommunicator::advance(P2pTransfer& transfer) {
    bool moved = false;
    while (!transfer.finished &&
           (transfer.is_send ? advance_send(transfer) : advance_receive(transfer)))
        moved = true;
    if (moved) ring_doorbell(transfer.peer);
    return moved;
}

// The exchange of num_written publishes the chunk, and orders it before the look at whether the
// peer sleeps (ring_doorbell).
bool ShmCommunicator::advance_send(P2pTransfer& transfer) {
    Channel& channel = segment_.channel(rank, transfer.peer);
    uint32_t& num_written = chunks_written_[transfer.peer];
    if (num_written - channel.num_read.value.load(std::memory_order_acquire) == channel_depth)
        return false;
    char* chunk = segment_.chunk(rank, transfer.peer, num_written);
    MessageHeader header{static_cast<uint32_t>(transfer.dtype), transfer.count, transfer.shape};
    std::memcpy(chunk, &header, sizeof header);
    uint64_t part =
        std::min<uint64_t>(transfer.nbytes - transfer.done, segment_.layout().chunk_bytes);
    std::memcpy(chunk + message_header_bytes, transfer.data + transfer.done, part);
    segment_.block(rank).progress.core.store(CoreMigrator::current_core(),
                                             std::memory_order_relaxed);
    channel.num_written.value.exchange(++num_written, std::memory_order_seq_cst);
    transfer.done += part;
    transfer.finished = transfer.done == transfer.nbytes;
    return true;
}

// A message that does not fit is read to its end all the same, so that the next one can be read.
bool ShmCommunicator::advance_receive(P2pTransfer& transfer) {
    Channel& channel = segment_.channel(transfer.peer, rank);
    uint32_t& num_read = chunks_read_[transfer.peer];
    if (channel.num_written.value.load(std::memory_order_acquire) == num_read) return false;
    const char* chunk = segment_.chunk(transfer.peer, rank, num_read);
    MessageHeader header;
    std::memcpy(&header, chunk, sizeof header);
    if (!transfer.started) start_receive(transfer, header);
    uint64_t part =
        std::min<uint64_t>(transfer.expected - transfer.done, segment_.layout().chunk_bytes);
    if (transfer.mismatch.empty())
        std::memcpy(transfer.data + transfer.done, chunk + message_header_bytes, part);
    channel.num_read.value.exchange(++num_read, std::memory_order_seq_cst);
    transfer.done += part;
    transfer.finished = transfer.done == transfer.expected;
    return true;
}

void ShmCommunicator::start_receive(P2pTransfer& transfer, const MessageHeader& header) {
    comm_dtype dtype = static_cast<comm_dtype>(header.dtype);
    transfer.started = true;
    transfer.expected = header.count * size_of(dtype);
    if (header.count == transfer.count && dtype == transfer.dtype &&
        is_same_shape(header.shape, transfer.shape))
        return;
    transfer.mismatch = rank_prefix() + describe(transfer) + ", but rank " +
                        std::to_string(transfer.peer) + " sent " +
                        describe_tensor(header.count, dtype, header.shape) +
                        ". The message was dropped and the tensor is unchanged. Receive into a "
                        "tensor of the shape and dtype that is sent";
}

// The peer sets awaits_doorbell and then looks at its channels; this rank has changed a channel and
// then looks at awaits_doorbell. Both are sequentially consistent, so one sees the other.
void ShmCommunicator::ring_doorbell(int peer) {
    RankBlock& block = segment_.block(peer);
    if (block.awaits_doorbell.value.load(std::memory_order_seq_cst) == 0) return;
    block.doorbell.value.fetch_add(1, std::memory_order_seq_cst);
    wake_all(&block.doorbell.value);
}

// Messages of a loop come at equal intervals: this rank sleeps through most of one, and spins when
// the next message is due.
void ShmCommunicator::wait_for_messages(std::vector<P2pTransfer>& transfers) {
    const P2pTransfer& first = transfers[0];
    if (oversubscribed_ || transfers.size() > 1 || first.is_send || first.started)
        return sleep_until_doorbell(transfers, liveness_poll_ns);
    int64_t& interval_ns = message_wait_ns_[first.peer];
    int64_t start = now_ns(), early_ns = interval_ns - expected_spin_ns / 2;
    for (int64_t left_ns = early_ns; !first.started && left_ns > min_sleep_ns;
         left_ns = start + early_ns - now_ns())
        sleep_until_doorbell(transfers, std::min(left_ns, liveness_poll_ns));
    if (!first.started)
        spin_until_deadline(spin_policy_, now_ns() + expected_spin_ns,
                            [&] { return progress(transfers); });
    while (!first.started) sleep_until_doorbell(transfers, liveness_poll_ns);
    interval_ns = now_ns() - start;
}

void ShmCommunicator::sleep_until_doorbell(std::vector<P2pTransfer>& transfers, int64_t max_ns) {
    RankBlock& own = segment_.block(rank);
    start_deadline();
    own.awaits_doorbell.value.store(1, std::memory_order_seq_cst);
    uint32_t rings = own.doorbell.value.load(std::memory_order_seq_cst);
    bool moved = progress(transfers);
    if (!moved) sleep_on(&own.doorbell.value, rings, std::min(max_ns, timeout_ns_.load()));
    own.awaits_doorbell.value.store(0, std::memory_order_relaxed);
    if (moved || progress(transfers)) return;
    for (const P2pTransfer& transfer : transfers) {
        if (transfer.finished) continue;
        check_peer(transfer.peer, describe(transfer), [&] { return moved = progress(transfers); });
        if (moved) return;
        check_deadline(describe(transfer), describe_peer(transfer.peer));
    }
}

}  // namespace shm
