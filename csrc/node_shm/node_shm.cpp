#include "node_shm/node_shm.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "system/memory_limit.h"

namespace node_shm {

namespace {

constexpr size_t page = 4096;
enum FailureState : uint32_t { none, writing, published };

size_t chunks_offset(int nranks) {
    size_t end = sizeof(Header) + static_cast<size_t>(nranks) * sizeof(RankSlot);
    return (end + page - 1) / page * page;
}

size_t total_bytes(int nranks) {
    return chunks_offset(nranks) + 2 * static_cast<size_t>(nranks) * chunk_bytes;
}

uint64_t num_steps(uint64_t nbytes) {
    return nbytes <= inline_bytes ? 1 : (nbytes + chunk_bytes - 1) / chunk_bytes;
}

void store(AtomicCallRecord& record, const CallRecord& call) {
    uint64_t words[call_words];
    std::memcpy(words, &call, sizeof call);
    for (size_t i = 0; i < call_words; ++i)
        record.words[i].store(words[i], std::memory_order_relaxed);
}

CallRecord load(const AtomicCallRecord& record) {
    uint64_t words[call_words];
    for (size_t i = 0; i < call_words; ++i)
        words[i] = record.words[i].load(std::memory_order_relaxed);
    CallRecord call;
    std::memcpy(&call, words, sizeof call);
    call.name[sizeof call.name - 1] = call.site[sizeof call.site - 1] = '\0';
    return call;
}

}  // namespace

// Sealed, so that no rank can shrink the memory under the others. The part that every rank writes
// is allocated here, so that too little memory is an error now rather than a SIGBUS later.
int NodeSegment::create(int nranks) {
    int fd = memfd_create("drumline-node-shm", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return -errno;
    int error = ftruncate(fd, static_cast<off_t>(total_bytes(nranks))) == 0 ? 0 : errno;
    if (error == 0) error = shm::allocate_part(fd, 0, chunks_offset(nranks));
    if (error == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        error = errno;
    if (error == 0) return fd;
    close(fd);
    return -error;
}

NodeSegment::NodeSegment(int nranks, int rank, bool may_spin)
    : nranks(nranks), rank(rank), spin_policy_(shm::measured_spin_policy(!may_spin)) {}

NodeSegment::~NodeSegment() {
    if (base_ != nullptr) munmap(base_, total_bytes(nranks));
}

int NodeSegment::map(int fd) {
    if (lseek(fd, 0, SEEK_END) != static_cast<off_t>(total_bytes(nranks))) return EINVAL;
    void* base = mmap(nullptr, total_bytes(nranks), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) return errno;
    base_ = static_cast<char*>(base);
    header_ = reinterpret_cast<Header*>(base_);
    slots_ = reinterpret_cast<RankSlot*>(base_ + sizeof(Header));
    slot(rank).seen_ns.store(shm::now_ns(), std::memory_order_relaxed);
    return 0;
}

char* NodeSegment::chunk(int rank) const {
    size_t index = 2 * static_cast<size_t>(rank) + (round_ & 1);
    return base_ + chunks_offset(nranks) + index * chunk_bytes;
}

void NodeSegment::begin(const CallRecord& call, const char* data) {
    call_ = call;
    call_.entered_ns = shm::now_ns();
    data_ = data;
    step_ = num_steps_ = 0;
    RankSlot& own = slot(rank);
    ++calls_;
    store(own.records[calls_ & 1], call_);
    own.seen_ns.store(call_.entered_ns, std::memory_order_relaxed);
    own.calls.store(calls_, std::memory_order_release);
    ++round_;
    publish();
    arrive();
}

void NodeSegment::publish() {
    if (call_.nbytes <= inline_bytes) {
        if (step_ == 0 && call_.nbytes > 0)
            std::memcpy(slot(rank).data[round_ & 1], data_, call_.nbytes);
        return;
    }
    uint64_t begin = step_ * chunk_bytes;
    if (begin < call_.nbytes)
        std::memcpy(chunk(rank), data_ + begin, std::min(call_.nbytes - begin, chunk_bytes + 0ul));
}

// The last rank to arrive resets the count before it completes the round: nobody enters the next
// one before. It alone wakes the sleepers.
void NodeSegment::arrive() {
    slot(rank).arrived.store(round_, std::memory_order_release);
    uint32_t before = header_->count.fetch_add(1, std::memory_order_acq_rel);
    if (before + 1 < static_cast<uint32_t>(nranks)) return;
    header_->count.store(0, std::memory_order_relaxed);
    header_->round.store(round_, std::memory_order_seq_cst);
    if (header_->sleepers.load(std::memory_order_seq_cst) > 0) shm::wake_all(&header_->round);
}

bool NodeSegment::is_complete() const {
    uint32_t completed = header_->round.load(std::memory_order_acquire);
    return static_cast<int32_t>(completed - round_) >= 0;
}

bool NodeSegment::wait(int64_t deadline_ns) {
    if (shm::spin_until(spin_policy_, [this] { return is_complete(); })) return true;
    int64_t left = deadline_ns - shm::now_ns();
    if (left <= 0) return false;
    // Counted before the round is read, and the round stored before the count is read (both
    // sequentially consistent): either the last rank sees a sleeper, or this one sees its round.
    header_->sleepers.fetch_add(1, std::memory_order_seq_cst);
    uint32_t seen = header_->round.load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(seen - round_) < 0) shm::sleep_on(&header_->round, seen, left);
    header_->sleepers.fetch_sub(1, std::memory_order_seq_cst);
    return is_complete();
}

uint64_t NodeSegment::nbytes_of(int rank) const {
    const AtomicCallRecord& record = slot(rank).records[calls_ & 1];
    return record.words[nbytes_word].load(std::memory_order_relaxed);
}

bool NodeSegment::has_one_round() {
    if (num_steps_ == 0)
        for (int other = 0; other < nranks; ++other)
            num_steps_ = std::max(num_steps_, num_steps(nbytes_of(other)));
    return num_steps_ == 1;
}

bool NodeSegment::is_same_call(int other_rank) const {
    if (other_rank == rank) return true;
    CallRecord other = load(slot(other_rank).records[calls_ & 1]);
    return other.number == call_.number && other.tag == call_.tag &&
           std::strncmp(other.name, call_.name, sizeof call_.name) == 0;
}

Range NodeSegment::part_of(int other) const {
    uint64_t nbytes = nbytes_of(other);
    size_t table = (static_cast<size_t>(nranks) + 1) * sizeof(uint64_t);
    if (nbytes < table) return {};
    const char* start = nbytes <= inline_bytes ? slot(other).data[round_ & 1] : chunk(other);
    uint64_t bounds[2];
    std::memcpy(bounds, start + static_cast<size_t>(rank) * sizeof(uint64_t), sizeof bounds);
    return {std::min(table + bounds[0], nbytes), std::min(table + bounds[1], nbytes)};
}

void NodeSegment::read(int other, const Range& range, char* target) const {
    uint64_t nbytes = nbytes_of(other);
    bool is_inline = nbytes <= inline_bytes;
    if (is_inline && step_ > 0) return;
    uint64_t first = step_ * chunk_bytes;
    uint64_t begin = std::max(range.begin, first);
    uint64_t end = std::min({range.end, nbytes, first + chunk_bytes});
    if (begin >= end) return;
    const char* source = is_inline ? slot(other).data[round_ & 1] : chunk(other);
    std::memcpy(target + (begin - range.begin), source + (begin - first), end - begin);
}

bool NodeSegment::next() {
    if (has_one_round() || ++step_ >= num_steps_) return false;
    ++round_;
    publish();
    arrive();
    return true;
}

void NodeSegment::end() {
    data_ = nullptr;
    slot(rank).seen_ns.store(shm::now_ns(), std::memory_order_relaxed);
}

PeerStatus NodeSegment::read_status(int other) const {
    const RankSlot& peer = slot(other);
    PeerStatus status;
    status.status = peer.status.load(std::memory_order_acquire);
    uint32_t arrived = peer.arrived.load(std::memory_order_acquire);
    status.has_arrived = static_cast<int32_t>(arrived - round_) >= 0;
    status.calls = peer.calls.load(std::memory_order_acquire);
    status.seen_ns = peer.seen_ns.load(std::memory_order_relaxed);
    status.call = load(peer.records[status.calls & 1]);
    return status;
}

void NodeSegment::set_status(uint32_t status) {
    slot(rank).status.store(status, std::memory_order_release);
    shm::wake_all(&header_->round);
}

bool NodeSegment::publish_failure(const char* text, size_t nbytes) {
    uint32_t expected = none;
    if (!header_->failure_state.compare_exchange_strong(expected, writing)) return false;
    header_->failure_size = static_cast<uint32_t>(std::min(nbytes, failure_bytes));
    std::memcpy(header_->failure, text, header_->failure_size);
    header_->failure_state.store(published, std::memory_order_release);
    shm::wake_all(&header_->round);
    return true;
}

bool NodeSegment::has_failed() const {
    return header_->failure_state.load(std::memory_order_acquire) == published;
}

}  // namespace node_shm
