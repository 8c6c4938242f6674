#include "node_shm/node_shm.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace board {

namespace {

constexpr size_t page = 4096;
enum VerdictState : uint32_t { none, writing, given };

size_t chunks_offset(int nranks) {
    size_t end = sizeof(Head) + static_cast<size_t>(nranks) * sizeof(Place);
    return (end + page - 1) / page * page;
}

size_t total_bytes(int nranks) {
    return chunks_offset(nranks) + 2 * static_cast<size_t>(nranks) * chunk_bytes;
}

uint64_t num_steps(uint64_t nbytes) {
    return nbytes <= inline_bytes ? 1 : (nbytes + chunk_bytes - 1) / chunk_bytes;
}

void store(Row& row, const Call& call) {
    uint64_t words[call_words];
    std::memcpy(words, &call, sizeof call);
    for (size_t i = 0; i < call_words; ++i) row.words[i].store(words[i], std::memory_order_relaxed);
}

Call load(const Row& row) {
    uint64_t words[call_words];
    for (size_t i = 0; i < call_words; ++i) words[i] = row.words[i].load(std::memory_order_relaxed);
    Call call;
    std::memcpy(&call, words, sizeof call);
    call.name[sizeof call.name - 1] = call.site[sizeof call.site - 1] = '\0';
    return call;
}

}  // namespace

// Sealed, so that nobody can take the memory from under the others; allocated where every rank
// writes, so that its lack is an error here.
int Board::create(int nranks) {
    int fd = memfd_create("drumline-board", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return -errno;
    int error = ftruncate(fd, static_cast<off_t>(total_bytes(nranks))) == 0 ? 0 : errno;
    if (error == 0) error = posix_fallocate(fd, 0, static_cast<off_t>(chunks_offset(nranks)));
    if (error == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        error = errno;
    if (error == 0) return fd;
    close(fd);
    return -error;
}

Board::Board(int nranks, int rank, bool may_spin)
    : nranks(nranks), rank(rank), spin_policy_(shm::measured_spin_policy(!may_spin)) {}

Board::~Board() {
    if (base_ != nullptr) munmap(base_, total_bytes(nranks));
}

int Board::map(int fd) {
    if (lseek(fd, 0, SEEK_END) != static_cast<off_t>(total_bytes(nranks))) return EINVAL;
    void* base = mmap(nullptr, total_bytes(nranks), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) return errno;
    base_ = static_cast<char*>(base);
    head_ = reinterpret_cast<Head*>(base_);
    places_ = reinterpret_cast<Place*>(base_ + sizeof(Head));
    place(rank).seen_ns.store(shm::now_ns(), std::memory_order_relaxed);
    return 0;
}

char* Board::chunk(int rank) const {
    size_t index = 2 * static_cast<size_t>(rank) + (round_ & 1);
    return base_ + chunks_offset(nranks) + index * chunk_bytes;
}

void Board::begin(const Call& call, const char* data) {
    mine_ = call;
    mine_.entered_ns = shm::now_ns();
    data_ = data;
    step_ = num_steps_ = 0;
    Place& here = place(rank);
    ++calls_;
    store(here.rows[calls_ & 1], mine_);
    here.seen_ns.store(mine_.entered_ns, std::memory_order_relaxed);
    here.calls.store(calls_, std::memory_order_release);
    ++round_;
    put_down();
    arrive();
}

void Board::put_down() {
    if (mine_.nbytes <= inline_bytes) {
        if (step_ == 0 && mine_.nbytes > 0)
            std::memcpy(place(rank).data[round_ & 1], data_, mine_.nbytes);
        return;
    }
    uint64_t begin = step_ * chunk_bytes;
    if (begin < mine_.nbytes)
        std::memcpy(chunk(rank), data_ + begin, std::min(mine_.nbytes - begin, chunk_bytes + 0ul));
}

// The last to arrive completes the round, and is the only one to wake anybody.
void Board::arrive() {
    place(rank).arrived.store(round_, std::memory_order_release);
    uint32_t before = head_->count.fetch_add(1, std::memory_order_acq_rel);
    if (before + 1 < static_cast<uint32_t>(nranks)) return;
    head_->count.store(0, std::memory_order_relaxed);
    head_->round.store(round_, std::memory_order_seq_cst);
    if (head_->sleepers.load(std::memory_order_seq_cst) > 0) shm::wake_all(&head_->round);
}

bool Board::is_complete() const {
    uint32_t completed = head_->round.load(std::memory_order_acquire);
    return static_cast<int32_t>(completed - round_) >= 0;
}

bool Board::wait(int64_t deadline_ns) {
    if (shm::spin_until(spin_policy_, [this] { return is_complete(); })) return true;
    int64_t left = deadline_ns - shm::now_ns();
    if (left <= 0 || has_verdict()) return false;
    // Counted before the word is read: either the last to arrive sees a sleeper, or we see it come.
    head_->sleepers.fetch_add(1, std::memory_order_seq_cst);
    uint32_t seen = head_->round.load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(seen - round_) < 0) shm::sleep_on(&head_->round, seen, left);
    head_->sleepers.fetch_sub(1, std::memory_order_seq_cst);
    return is_complete();
}

Call Board::call_of(int rank) const { return load(place(rank).rows[calls_ & 1]); }

bool Board::is_same_call(int rank) const {
    Call theirs = call_of(rank);
    return theirs.number == mine_.number && theirs.tag == mine_.tag &&
           std::strncmp(theirs.name, mine_.name, sizeof mine_.name) == 0;
}

Range Board::part_of(int other) const {
    uint64_t nbytes = call_of(other).nbytes;
    size_t table = (static_cast<size_t>(nranks) + 1) * sizeof(uint64_t);
    if (nbytes < table) return {};
    const char* start = nbytes <= inline_bytes ? place(other).data[round_ & 1] : chunk(other);
    uint64_t bounds[2];
    std::memcpy(bounds, start + static_cast<size_t>(rank) * sizeof(uint64_t), sizeof bounds);
    return {std::min(table + bounds[0], nbytes), std::min(table + bounds[1], nbytes)};
}

void Board::read(int other, const Range& range, char* target) const {
    uint64_t nbytes = call_of(other).nbytes;
    bool is_inline = nbytes <= inline_bytes;
    if (is_inline && step_ > 0) return;
    uint64_t first = step_ * chunk_bytes;
    uint64_t begin = std::max(range.begin, first);
    uint64_t end = std::min({range.end, nbytes, first + chunk_bytes});
    if (begin >= end) return;
    const char* source = is_inline ? place(other).data[round_ & 1] : chunk(other);
    std::memcpy(target + (begin - range.begin), source + (begin - first), end - begin);
}

bool Board::next() {
    if (num_steps_ == 0)
        for (int other = 0; other < nranks; ++other)
            num_steps_ = std::max(num_steps_, num_steps(call_of(other).nbytes));
    if (++step_ >= num_steps_) return false;
    ++round_;
    put_down();
    arrive();
    return true;
}

void Board::end() {
    data_ = nullptr;
    place(rank).seen_ns.store(shm::now_ns(), std::memory_order_relaxed);
}

Glimpse Board::glimpse(int other) const {
    const Place& there = place(other);
    Glimpse found;
    found.status = there.status.load(std::memory_order_acquire);
    uint32_t arrived = there.arrived.load(std::memory_order_acquire);
    found.has_arrived = static_cast<int32_t>(arrived - round_) >= 0;
    found.calls = there.calls.load(std::memory_order_acquire);
    found.seen_ns = there.seen_ns.load(std::memory_order_relaxed);
    found.call = load(there.rows[found.calls & 1]);
    return found;
}

void Board::set_status(uint32_t status) {
    place(rank).status.store(status, std::memory_order_release);
    shm::wake_all(&head_->round);
}

bool Board::give_verdict(const char* text, size_t nbytes) {
    uint32_t expected = none;
    if (!head_->verdict_state.compare_exchange_strong(expected, writing)) return false;
    head_->verdict_size = static_cast<uint32_t>(std::min(nbytes, verdict_bytes));
    std::memcpy(head_->verdict, text, head_->verdict_size);
    head_->verdict_state.store(given, std::memory_order_release);
    shm::wake_all(&head_->round);
    return true;
}

bool Board::has_verdict() const {
    return head_->verdict_state.load(std::memory_order_acquire) == given;
}

}  // namespace board
