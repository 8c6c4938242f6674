// One communicator: a rank's view of the group, its calls and steps, and its messages.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "abi/communicator.h"
#include "reduce/reduce.h"
#include "shm/layout.h"
#include "shm/segment.h"
#include "shm/tensor_memory.h"
#include "system/fork_guard.h"
#include "system/spin.h"

namespace shm {

enum class Collective : uint8_t {
    none,
    barrier,
    allreduce,
    broadcast,
    reduce,
    allgather,
    reduce_scatter,
    alltoall,
    gather,
    scatter,
    allgatherv,
    reduce_scatterv,
    declined
};

// What must be the same on all ranks, besides the shape.
struct CallSignature {
    Collective collective = Collective::none;
    uint64_t count = 0;
    comm_dtype dtype = COMM_UINT8;
    comm_op op = 0;
    int32_t root = 0;
};

// A send or a receive in progress.
struct P2pTransfer {
    bool is_send;
    int32_t peer;
    char* data;
    uint64_t count;
    comm_dtype dtype;
    Shape shape;
    uint64_t nbytes;        // of this rank's buffer
    uint64_t message = 0;   // its number between the two ranks
    uint64_t done = 0;      // bytes moved
    uint64_t expected = 0;  // bytes of the message, by its header
    bool started = false;
    bool finished = false;
    std::string mismatch;  // the error, if the sender sent another dtype, count or shape
};

// Which code adds, and with which stores a slot is filled. The results have the same bits with any.
enum class Stores { measured, ordinary, streaming };

struct Options {
    Instructions instructions = Instructions::plain;
    Stores stores = Stores::measured;
    std::chrono::milliseconds stack_patience{1200};  // longer than stack_s of the Coordinator
};

class ShmCommunicator {
  public:
    ShmCommunicator(const comm_init_args& args);
    ~ShmCommunicator();
    ShmCommunicator(const ShmCommunicator&) = delete;
    ShmCommunicator& operator=(const ShmCommunicator&) = delete;

    // ---- entries of the table ----
    static int32_t probe() { return 100; }
    static std::shared_ptr<ShmCommunicator> init(const comm_init_args& args) {
        return std::make_shared<ShmCommunicator>(args);
    }
    // A shape is that of one call.
    struct CallScope {
        ShmCommunicator& communicator;
        ~CallScope() { communicator.shape_.ndim = -1; }
    };
    // collectives.cpp
    void allreduce(const void* send, void* recv, uint64_t count, comm_dtype dtype, comm_op op,
                   comm_stream);
    void broadcast(void* buffer, uint64_t count, comm_dtype dtype, int32_t src, comm_stream);
    void reduce(const void* send, void* recv, uint64_t count, comm_dtype dtype, comm_op op,
                int32_t dst, comm_stream);
    void allgather(const void* send, void* recv, uint64_t count, comm_dtype dtype, comm_stream);
    void reduce_scatter(const void* send, void* recv, uint64_t count, comm_dtype dtype, comm_op op,
                        comm_stream);
    void alltoall(const void* send, void* recv, uint64_t count, comm_dtype dtype, comm_stream);
    void gather(const void* send, void* recv, uint64_t count, comm_dtype dtype, int32_t dst,
                comm_stream);
    void scatter(const void* send, void* recv, uint64_t count, comm_dtype dtype, int32_t src,
                 comm_stream);
    void allgatherv(const void* send, void* recv, const uint64_t* counts, comm_dtype dtype,
                    comm_stream);
    void reduce_scatterv(const void* send, void* recv, const uint64_t* counts, comm_dtype dtype,
                         comm_op op, comm_stream);
    void barrier(comm_stream);
    // p2p.cpp
    void send(const void* buffer, uint64_t count, comm_dtype dtype, int32_t dst, comm_stream);
    void recv(void* buffer, uint64_t count, comm_dtype dtype, int32_t src, comm_stream);
    void group_start() { ++group_depth_; }
    void group_end();
    // streams.cpp; during any other call
    uint64_t stream_write(int peer, std::pair<const void*, uint64_t> prefix, const void* data,
                          uint64_t nbytes);
    uint64_t stream_read(int peer, void* data, uint64_t nbytes);
    int stream_wait(const uint8_t* interest, int64_t timeout_ns);
    void stream_sleep(int64_t timeout_ns);
    void stream_notify(int what);
    void stream_check(int peer);
    // shm_communicator.cpp
    void mem_alloc(size_t nbytes, void** pointer);
    void mem_free(void* pointer);
    void set_shape(int32_t ndim, const int64_t* sizes) { shape_.set(ndim, sizes); }
    void decline(const char* why);
    void abort();  // from any thread, as set_timeout
    void set_timeout(int64_t timeout_ns) { timeout_ns_ = timeout_ns; }
    // Keeps the text for last_error(), and refuses later calls if the ranks lost step.
    comm_result fail(const PluginError& failure);
    const char* last_error() const { return last_error_.c_str(); }

    // ---- what collectives are made of ----
    // Opens a call. `inline_value`: a TensorMemory::reference, or the tensor itself if it fits.
    void begin(const CallSignature& call, uint64_t inline_value = 0);
    // Before each use of the slots, and only then: writer() relies on consecutive rounds.
    void next_round() { ++round_; }
    void step() {
        arrive();
        await();
    }
    // A step with work that writes the result: before the wait, except in the first step of a call,
    // which may find that the calls differ.
    template <class Work>
    void step_with(Work work) {
        bool is_compared = !headers_unchecked_;
        arrive();
        if (is_compared) work();
        await();
        if (!is_compared) work();
    }
    // The two halves of a step; between them is time for work that needs no peer.
    void arrive();
    void await();
    char* slot(int of_rank) const { return segment_.slot(writer(of_rank), round_ & 1); }
    // Copies into a slot, past the caches where that was measured to be faster for the readers.
    void put(char* slot, const char* from, size_t nbytes) const;
    // After the first step: how many ranks have their tensor in shared memory, and each tensor.
    int num_shared_tensors() const;
    char* shared_tensor(int of_rank);
    // After the first step: the inline_value of a rank.
    const void* inline_value(int of_rank) const {
        return &segment_.block(of_rank).progress.headers[call_number_ & 1].inline_value;
    }
    TensorMemory& memory() { return memory_; }
    size_t slot_bytes() const { return segment_.layout().slot_bytes; }

    const int rank;
    const int nranks;

  private:
    std::unique_ptr<PluginError> invalid_;  // what is wrong with the options

  public:
    const Options options;

  private:
    // Of two ranks, each writes where it has read two rounds before: those lines are in its own
    // cache, so they cross between the cores once a round instead of twice.
    int writer(int of_rank) const {
        return nranks == 2 ? of_rank ^ static_cast<int>(round_ >> 1 & 1) : of_rank;
    }
    void await_step(int peer);
    void sleep_until_step(int peer);
    void check_not_given_up(int peer);
    SpinPolicy spin_policy_for(int peer);
    void check_headers();
    [[noreturn]] void throw_mismatch(int peer, const CallHeader& header);
    void check_not_declined();

    int64_t time_exchange(std::vector<char>& scratch, bool streaming);
    bool prefers_streaming(const Bootstrap& bootstrap, const std::vector<int32_t>& gains);

    void transfer(bool is_send, void* buffer, uint64_t count, comm_dtype dtype, int32_t peer);
    void complete_queued();
    bool progress(std::vector<P2pTransfer>& transfers);
    bool advance(P2pTransfer& transfer);
    bool advance_send(P2pTransfer& transfer);
    bool advance_receive(P2pTransfer& transfer);
    void start_receive(P2pTransfer& transfer, const MessageHeader& header);
    void wait_for_messages(std::vector<P2pTransfer>& transfers);
    void sleep_until_doorbell(std::vector<P2pTransfer>& transfers, int64_t max_ns);
    void ring_doorbell(int peer);

    uint64_t write_part(int peer, const char* data, uint64_t nbytes);
    bool is_ready(int peer, uint8_t interest);
    int find_ready(const uint8_t* interest);
    void ring_stream_doorbell(int peer);

    // Throws in a child that was forked from the rank: its steps would pass for the rank's own.
    void check_process() const {
        if (!fork_guard_.is_original_process()) throw_forked();
    }
    void check_not_aborted() const {
        if (aborted_.load(std::memory_order_relaxed)) throw_aborted("");
    }
    [[noreturn]] void throw_forked() const;
    [[noreturn]] void throw_aborted(const std::string& doing) const;
    void start_deadline();
    const char* describe_end(int peer) const;  // nullptr if it still takes part
    void check_peer(int peer, const std::string& doing, const std::function<bool()>& is_done);
    void check_deadline(const std::string& doing, const std::string& missing);
    std::string describe_current_call() const;
    std::string describe_peer(int peer) const;
    std::string rank_prefix() const { return "rank " + std::to_string(rank) + ": "; }

    ForkGuard fork_guard_;
    Segment segment_;
    TensorMemory memory_{segment_, rank};
    SpinPolicy spin_policy_;
    bool oversubscribed_ = false;
    bool streaming_ = false;
    CoreMigrator migrator_;
    std::atomic<int64_t> timeout_ns_;
    uint32_t step_ = 0;
    unsigned round_ = 0;
    uint64_t call_number_ = 0;
    bool headers_unchecked_ = false;  // until the first step of a call
    CallSignature call_;
    uint64_t inline_value_ = 0;
    Shape shape_;
    int64_t deadline_ns_ = 0;  // of this call; 0 until it has to sleep
    int group_depth_ = 0;
    std::vector<P2pTransfer> queued_;
    std::vector<uint64_t> messages_sent_, messages_received_;  // by peer
    std::vector<uint32_t> chunks_written_, chunks_read_;       // by peer
    std::vector<int64_t> message_wait_ns_;                     // of the last message, by peer
    std::string last_error_;
    std::string broken_;  // why no further call can work
    std::atomic<bool> aborted_{false};
    int last_ready_ = 0;         // where the next search for a ready stream begins
    uint32_t stream_rings_ = 0;  // of the doorbell, when stream_sleep returned
};

// Two polls of whether the peers are alive are so far apart.
constexpr int64_t liveness_poll_ns = 100000000;

// Bytes of an element. Throws if the backend does not have the dtype.
size_t checked_size(const ShmCommunicator& communicator, comm_dtype dtype);
// "4 float32", "(2, 3) float32"
std::string describe_tensor(uint64_t count, comm_dtype dtype, const Shape& shape);

}  // namespace shm
