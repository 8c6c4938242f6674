// The board: memory that the ranks of one node share, where each writes what it is doing and hands
// bytes to the others.
//
//   Head | Place[n] | chunks: n ranks x 2
//
// Every call is a number of rounds, and every rank takes part in each. In a round a rank puts down
// what it has, arrives, and once all have arrived reads what it wants. Everything that is put down
// exists twice, for even and odd rounds: a rank that arrives in a round has read the one before, so
// the ranks are never more than one apart.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "shm/spin.h"

namespace board {

constexpr size_t line = 128;
constexpr size_t inline_bytes = 4096;
constexpr size_t chunk_bytes = 1 << 20;
constexpr size_t verdict_bytes = 16 << 10;

// One call of one rank. All ranks must make the same: name, number and tag are compared.
struct Call {
    uint64_t number;
    uint64_t tag;
    uint64_t nbytes;
    int64_t entered_ns;
    char name[32];
    char site[96];
};
constexpr size_t call_words = sizeof(Call) / sizeof(uint64_t);
static_assert(sizeof(Call) % sizeof(uint64_t) == 0, "a row is whole words");

// Words, so that who looks at a straggler's row while it changes reads something, not nothing.
struct Row {
    std::atomic<uint64_t> words[call_words];
};

struct alignas(line) Place {
    std::atomic<uint32_t> arrived;             // the last round this rank arrived in
    std::atomic<uint32_t> calls;               // how many it has begun
    std::atomic<uint32_t> status;              // whatever Python says; 0 while it takes part
    std::atomic<int64_t> seen_ns;              // when it last entered or left a call
    alignas(line) Row rows[2];                 // by call
    alignas(line) char data[2][inline_bytes];  // by round
};

struct alignas(line) Head {
    std::atomic<uint32_t> count;  // ranks that have arrived in the round that is not complete
    alignas(line) std::atomic<uint32_t> round;  // the last one that is; slept on
    std::atomic<uint32_t> sleepers;
    alignas(line) std::atomic<uint32_t> verdict_state;
    uint32_t verdict_size;
    char verdict[verdict_bytes];  // why this group is broken, by the rank that found out first
};

// What one rank looks like to another.
struct Glimpse {
    uint32_t status;
    bool has_arrived;  // in the round that the looker is in
    uint32_t calls;
    int64_t seen_ns;
    Call call;
};

// The part of a rank's bytes that this rank wants.
struct Range {
    uint64_t begin = 0, end = 0;
};

// How the ranks of a node stand to their memory. One thread at a time; the waiting functions do
// not touch Python.
class Board {
  public:
    // The descriptor of fresh memory for nranks, or -errno.
    static int create(int nranks);

    Board(int nranks, int rank, bool may_spin);
    ~Board();
    Board(const Board&) = delete;
    Board& operator=(const Board&) = delete;
    // 0, or errno. The descriptor may be closed afterwards.
    int map(int fd);

    // Puts down the first of the bytes, and arrives. `data` must live until the call has ended.
    void begin(const Call& call, const char* data);
    // Whether all have arrived, waiting until then or until the time given.
    bool wait(int64_t deadline_ns);
    // After the first round: the call of each rank, and whether it is the same as this rank's.
    Call call_of(int rank) const;
    bool is_same_call(int rank) const;
    // What this rank gets of a rank's bytes if it is scattered: a table of nranks + 1 offsets, and
    // then the parts.
    Range part_of(int rank) const;
    // Copies what this round brought of rank's bytes, within range, to where they belong.
    void read(int rank, const Range& range, char* target) const;
    // Goes into the next round, if there is one.
    bool next();
    void end();

    Glimpse glimpse(int rank) const;
    void set_status(uint32_t status);
    // Breaks the group. False if somebody has already.
    bool give_verdict(const char* text, size_t nbytes);
    bool has_verdict() const;
    const Head& head() const { return *head_; }

    const int nranks;
    const int rank;

  private:
    Place& place(int rank) const { return places_[rank]; }
    char* chunk(int rank) const;
    bool is_complete() const;
    void put_down();
    void arrive();

    shm::SpinPolicy spin_policy_;
    char* base_ = nullptr;
    Head* head_ = nullptr;
    Place* places_ = nullptr;
    Call mine_ = {};
    const char* data_ = nullptr;
    uint32_t calls_ = 0;
    uint32_t round_ = 0;  // of this board
    uint64_t step_ = 0;   // of this call
    uint64_t num_steps_ = 0;
};

}  // namespace board
