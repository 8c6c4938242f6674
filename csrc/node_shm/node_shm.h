// NodeSegment: memory that the ranks of one node share. Each writes the call it is in, and passes
// bytes to the others.
//
//   Header | RankSlot[n] | chunks: n ranks x 2
//
// Every call is a number of rounds, and every rank takes part in each. In a round a rank publishes
// its data (inline if small, else the next chunk), arrives, and once all have arrived reads what it
// needs. All data exist twice, for even and odd rounds: a rank that arrives in round r has read
// round r - 1, so no rank can be more than one round ahead of another, and nothing that is still
// read is overwritten.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "system/spin.h"

namespace node_shm {

constexpr size_t line = 128;
constexpr size_t inline_bytes = 4096;
constexpr size_t chunk_bytes = 1 << 20;
constexpr size_t failure_bytes = 16 << 10;

// One call of one rank. Name, number and tag must be the same on all ranks.
struct CallRecord {
    uint64_t number;
    uint64_t tag;
    uint64_t nbytes;
    int64_t entered_ns;
    char name[32];
    char site[96];
};
constexpr size_t call_words = sizeof(CallRecord) / sizeof(uint64_t);
constexpr size_t nbytes_word = offsetof(CallRecord, nbytes) / sizeof(uint64_t);
static_assert(sizeof(CallRecord) % sizeof(uint64_t) == 0, "a record is whole words");

// In atomic words: another rank may read the record while it changes, and then gets a mixture of
// two calls, which is good enough for a message.
struct AtomicCallRecord {
    std::atomic<uint64_t> words[call_words];
};

struct alignas(line) RankSlot {
    std::atomic<uint32_t> arrived;              // the last round this rank arrived in
    std::atomic<uint32_t> calls;                // how many it has begun
    std::atomic<uint32_t> status;               // set by Python; 0 while it takes part
    std::atomic<int64_t> seen_ns;               // when it last entered or left a call
    alignas(line) AtomicCallRecord records[2];  // by call
    alignas(line) char data[2][inline_bytes];   // by round
};

struct alignas(line) Header {
    std::atomic<uint32_t> count;  // ranks that have arrived in the round that is not complete
    alignas(line) std::atomic<uint32_t> round;  // the last one that is; slept on
    std::atomic<uint32_t> sleepers;
    alignas(line) std::atomic<uint32_t> failure_state;
    uint32_t failure_size;
    char failure[failure_bytes];  // why the group failed, from the rank that noticed first
};

// A rank as another one sees it.
struct PeerStatus {
    uint32_t status;
    bool has_arrived;  // in the round that the reading rank is in
    uint32_t calls;
    int64_t seen_ns;
    CallRecord call;
};

// The part of a rank's bytes that this rank reads.
struct Range {
    uint64_t begin = 0, end = 0;
};

// One rank's end of the segment. One thread at a time for calls; read_status(), set_status() and
// the failure may be used from any thread. The waiting functions do not touch Python.
class NodeSegment {
  public:
    // The descriptor of fresh memory for nranks, or -errno.
    static int create(int nranks);

    NodeSegment(int nranks, int rank, bool may_spin);
    ~NodeSegment();
    NodeSegment(const NodeSegment&) = delete;
    NodeSegment& operator=(const NodeSegment&) = delete;
    // 0, or errno. The descriptor may be closed afterwards.
    int map(int fd);

    // Publishes the first of the bytes, and arrives. `data` must live until the call has ended.
    void begin(const CallRecord& call, const char* data);
    // Whether the last exchange was of this call, so that all ranks have come to it: they may go
    // on, even if the group has failed since.
    bool was_in(uint64_t number) const { return call_.number == number; }
    // Waits for all ranks to arrive; false at the deadline, or earlier when the group fails.
    bool wait(int64_t deadline_ns);
    // After the first round: whether a rank is in the same call as this one, the size of its data,
    // and whether this round brought all that the ranks have.
    bool is_same_call(int rank) const;
    uint64_t nbytes_of(int rank) const;
    bool has_one_round();
    // This rank's part of a rank's scattered bytes: a table of nranks + 1 offsets, then the parts.
    Range part_of(int rank) const;
    // Copies the bytes of a rank that this round brought, within range, to their place in target.
    void read(int rank, const Range& range, char* target) const;
    // Enters the next round; false if the call has no more.
    bool next();
    void end();

    PeerStatus read_status(int rank) const;
    void set_status(uint32_t status);
    // Fails the group for all ranks. False if another rank has already.
    bool publish_failure(const char* text, size_t nbytes);
    bool has_failed() const;
    const Header& header() const { return *header_; }

    const int nranks;
    const int rank;

  private:
    RankSlot& slot(int rank) const { return slots_[rank]; }
    char* chunk(int rank) const;
    bool is_complete() const;
    void publish();
    void arrive();

    shm::SpinPolicy spin_policy_;
    char* base_ = nullptr;
    Header* header_ = nullptr;
    RankSlot* slots_ = nullptr;
    CallRecord call_ = {};
    const char* data_ = nullptr;
    uint32_t calls_ = 0;
    uint32_t round_ = 0;  // of this segment
    uint64_t step_ = 0;   // of this call
    uint64_t num_steps_ = 0;
};

}  // namespace node_shm
