// One communicator: a rank's view of the group, its steps, its calls and its letters.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "abi/communicator.h"
#include "shm/fork_guard.h"
#include "shm/layout.h"
#include "shm/memory.h"
#include "reduce/reduce.h"
#include "shm/segment.h"
#include "shm/spin.h"

namespace shm {

// What all ranks must say alike.
struct Call {
    Kind kind = Kind::none;
    uint64_t count = 0;
    comm_dtype dtype = COMM_UINT8;
    comm_op op = 0;
    int32_t root = 0;
};

// A send or a receive under way.
struct Transfer {
    bool is_send;
    int32_t peer;
    char* data;
    uint64_t count;
    comm_dtype dtype;
    Shape shape;
    uint64_t nbytes;        // of this side's buffer
    uint64_t message = 0;   // its number between the two ranks
    uint64_t done = 0;      // bytes moved
    uint64_t expected = 0;  // bytes of the message as the sender says
    bool started = false;
    bool finished = false;
    std::string mismatch;  // what the sender sent, if it was something else
};

// Which code adds, and with which stores a slot is filled: the same bits, whatever it is.
enum class Stores { measured, ordinary, streaming };

struct Choices {
    Instructions instructions = Instructions::plain;
    Stores stores = Stores::measured;
};

class Group {
  public:
    Group(const comm_init_args& args);
    ~Group();
    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;

    // A call opens with its record and the first step; all ranks take the same steps. Between two
    // steps a rank may write its own slot() and, after step(), read everyone's. Slots alternate by
    // round, so nobody overwrites what a slower rank still reads and no step is needed for that
    // alone.
    // word: where the tensor is, if in shared memory; or the tensor itself, if that fits.
    void begin(const Call& call, uint64_t word = 0);
    // Before each use of the slots, and only then: writer() counts on rounds that follow each
    // other.
    void next_round() { ++round_; }
    void step() {
        arrive();
        await();
    }
    // The two halves of a step; between them is time for work that needs nobody.
    void arrive();
    void await();
    char* slot(int of_rank) const { return segment_.slot(writer(of_rank), round_ & 1); }
    // Copies into a slot, past the caches where that was measured to be faster for the readers.
    void put(char* slot, const char* from, size_t nbytes) const;
    // Once the first step is taken: how many ranks have their tensor in shared memory, and each
    // tensor.
    int num_shared_tensors() const;
    char* shared_tensor(int of_rank);
    // Once the first step is taken: the word that a rank gave to begin().
    const void* word(int of_rank) const {
        return &segment_.block(of_rank).arrival.records[call_number_ & 1].word;
    }
    Memory& memory() { return memory_; }
    size_t slot_bytes() const { return segment_.layout().slot_bytes; }

    // Throws in a child that was forked from the rank: its steps would pass for the rank's own.
    void check_process() const;

    // Of the tensor of the next call; forgotten when that has ended.
    void tell_shape(int32_t ndim, const int64_t* shape) { shape_.set(ndim, shape); }
    void forget_shape() { shape_.ndim = -1; }

    void transfer(Transfer transfer);
    void group_start() { ++group_depth_; }
    void group_end();

    // From any thread.
    void abort();
    // Keeps the failure for last_error.
    comm_result keep(const Failure& failure);
    // The same, and, where the ranks have lost step, for every later call.
    comm_result fail(const Failure& failure);
    const char* last_error() const { return last_error_.c_str(); }

    const int rank;
    const int nranks;
    const Choices choices;

  private:
    // Of two ranks, each writes where it has read two rounds before: those lines are in its own
    // cache, so they make one journey a round instead of two.
    int writer(int of_rank) const {
        return nranks == 2 ? of_rank ^ static_cast<int>(round_ >> 1 & 1) : of_rank;
    }
    void await_step(int peer);
    void sleep_until_step(int peer);
    Patience patience_with(int peer);
    void check_records();
    [[noreturn]] void throw_mismatch(int peer, const Record& theirs);

    int64_t time_exchange(std::vector<char>& scratch, bool streaming);
    bool prefers_streaming(const Bootstrap& bootstrap);

    bool progress(std::vector<Transfer>& transfers);
    bool advance(Transfer& transfer);
    bool advance_send(Transfer& transfer);
    bool advance_receive(Transfer& transfer);
    void open_letter(Transfer& transfer, const Envelope& envelope);
    void complete(std::vector<Transfer>& transfers);
    void wait_for_letters(std::vector<Transfer>& transfers);
    void sleep_until_bell(std::vector<Transfer>& transfers, int64_t longest_ns);
    void ring(int peer);

    void start_deadline();
    const char* how_it_ended(int peer) const;  // nullptr if it goes on
    void check_peer(int peer, const std::string& doing);
    void check_deadline(const std::string& doing, const std::string& missing);
    std::string describe_current() const;
    std::string describe_peer(int peer) const;
    std::string prefix() const { return "rank " + std::to_string(rank) + ": "; }

    Birthmark birthmark_;
    Segment segment_;
    Memory memory_{segment_, rank};
    Patience patience_;
    bool oversubscribed_ = false;
    bool streaming_ = false;
    Place place_;
    const int64_t timeout_ns_;
    uint32_t step_ = 0;
    unsigned round_ = 0;
    uint64_t call_number_ = 0;
    bool unchecked_ = false;  // the records of this call are still to be compared
    Call call_;
    uint64_t word_ = 0;
    Shape shape_;
    int64_t deadline_ns_ = 0;  // of this call; 0 until it has to sleep
    int group_depth_ = 0;
    std::vector<Transfer> queued_;
    std::vector<uint64_t> sent_, received_;  // messages by peer
    std::vector<uint32_t> posted_, taken_;   // letters by peer
    std::vector<int64_t> waited_ns_;         // for the last message of each peer
    std::string last_error_;
    std::string broken_;  // why no further call can work
    std::atomic<bool> aborted_{false};
};

std::string describe(const Call& call, const Shape& shape);

}  // namespace shm
