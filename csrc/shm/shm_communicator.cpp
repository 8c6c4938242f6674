#include "shm/shm_communicator.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>

namespace shm {
namespace {

constexpr size_t min_streamed_bytes = 8 << 10;
const char* const died = "has died";
constexpr int32_t not_measured = 0;
std::atomic<int32_t> streaming_gain{not_measured};  // of this process: 1 or -1

bool has_reached(const std::atomic<uint32_t>& counter, uint32_t step) {
    return static_cast<int32_t>(counter.load(std::memory_order_acquire) - step) >= 0;
}

// collective, dtype, op: 8 bits each; digest of the shape: 24; root: 16.
uint64_t pack(const CallSignature& call, const Shape& shape) {
    return static_cast<uint64_t>(call.collective) | static_cast<uint64_t>(call.dtype & 0xff) << 8 |
           static_cast<uint64_t>(call.op & 0xff) << 16 | shape.short_digest() << 24 |
           static_cast<uint64_t>(call.root) << 48;
}

CallSignature unpack(uint64_t packed, uint64_t count) {
    CallSignature call;
    call.collective = static_cast<Collective>(packed & 0xff);
    call.dtype = static_cast<comm_dtype>(packed >> 8 & 0xff);
    call.op = static_cast<comm_op>(packed >> 16 & 0xff);
    call.root = static_cast<int32_t>(packed >> 48);
    call.count = count;
    return call;
}

const char* name_of(Collective collective) {
    static const char* const names[] = {
        "setup",      "barrier",         "allreduce",    "broadcast", "reduce",
        "allgather",  "reduce_scatter",  "alltoall",     "gather",    "scatter",
        "allgatherv", "reduce_scatterv", "no collective"};
    return names[static_cast<int>(collective)];
}

bool has_op(Collective collective) {
    return collective == Collective::allreduce || collective == Collective::reduce ||
           collective == Collective::reduce_scatter || collective == Collective::reduce_scatterv;
}

std::string describe(const CallSignature& call, const Shape& shape) {
    std::string text = name_of(call.collective);
    if (call.collective == Collective::barrier || call.collective == Collective::none ||
        call.collective == Collective::declined)
        return text;
    text += " of " + describe_tensor(call.count, call.dtype, shape);
    if (has_op(call.collective)) text += std::string(", ") + name_of_op(call.op);
    if (call.collective == Collective::broadcast || call.collective == Collective::scatter)
        text += ", from rank " + std::to_string(call.root);
    if (call.collective == Collective::reduce || call.collective == Collective::gather)
        text += ", to rank " + std::to_string(call.root);
    if (call.collective == Collective::allgatherv || call.collective == Collective::reduce_scatterv)
        text += ", in parts with the digest " + std::to_string(call.root);
    return text;
}

std::string seconds(int64_t ns) {
    std::string text = std::to_string(static_cast<double>(ns) / 1e9);
    return text.substr(0, text.size() - 4) + " s";
}

// Tests compare the options; the defaults are the fastest on this machine.
Options read_options(const comm_init_args& args, std::unique_ptr<PluginError>& invalid) {
    static const std::string instructions = "instructions=";
    Options options;
    options.instructions = best_instructions();
    for (auto option = args.options; option != nullptr && *option != nullptr; ++option) {
        std::string text = *option;
        if (text == "stores=ordinary")
            options.stores = Stores::ordinary;
        else if (text == "stores=streaming")
            options.stores = Stores::streaming;
        else if (text.compare(0, instructions.size(), instructions) != 0 ||
                 !find_instructions(text.c_str() + instructions.size(), &options.instructions))
            invalid = std::make_unique<PluginError>(PluginError{
                COMM_INVALID_ARGUMENT, "rank " + std::to_string(args.rank) +
                                           ": the shared-memory backend has no option \"" + text +
                                           "\" on this processor. Leave it out"});
    }
    return options;
}

}  // namespace

// A vector is named by its length, which is its shape.
std::string describe_tensor(uint64_t count, comm_dtype dtype, const Shape& shape) {
    bool is_vector =
        shape.ndim < 0 || (shape.ndim == 1 && shape.dims[0] == static_cast<int64_t>(count));
    return (is_vector ? std::to_string(count) : shape.text()) + " " + name_of_dtype(dtype);
}

ShmCommunicator::ShmCommunicator(const comm_init_args& args)
    : rank(args.rank),
      nranks(args.nranks),
      options(read_options(args, invalid_)),
      timeout_ns_(args.timeout_ms * INT64_C(1000000)),
      messages_sent_(nranks),
      messages_received_(nranks),
      chunks_written_(nranks),
      chunks_read_(nranks),
      message_wait_ns_(nranks) {
    if (nranks == 1 && invalid_) throw *invalid_;
    if (nranks == 1) return;
    Bootstrap bootstrap(args.bootstrap, rank, nranks);
    std::vector<int32_t> gains(nranks);
    gains[rank] = streaming_gain;
    segment_ = Segment(bootstrap, invalid_.get(), gains);
    oversubscribed_ = segment_.is_oversubscribed();
    spin_policy_ = measured_spin_policy(oversubscribed_);
    if (!oversubscribed_ && nranks > 2) streaming_ = prefers_streaming(bootstrap, gains);
    if (options.stores != Stores::measured) streaming_ = options.stores == Stores::streaming;
}

ShmCommunicator::~ShmCommunicator() {
    if (nranks == 1) return;
    RankBlock& own = segment_.block(rank);
    if (!fork_guard_.is_original_process()) return;  // the rank itself goes on
    uint32_t expected = present;
    if (!own.identity.state.compare_exchange_strong(expected, closed) && expected >= failed)
        own.identity.state.store(left, std::memory_order_release);
    wake_all(&own.progress.step);
    for (int peer = 0; peer < nranks; ++peer) {
        ring_doorbell(peer);
        ring_stream_doorbell(peer);
    }
}

void ShmCommunicator::throw_forked() const {
    throw PluginError{
        COMM_INVALID_USAGE,
        rank_prefix() + "process " + std::to_string(getpid()) +
            " was forked from the rank and cannot use its communicator: the peers would "
            "take it for the rank. Call from the rank itself, or start the process as "
            "a rank of its own"};
}

void ShmCommunicator::throw_aborted(const std::string& doing) const {
    throw PluginError{COMM_REMOTE_ERROR,
                      rank_prefix() + "this communicator was aborted" +
                          (doing.empty() ? "" : " in " + doing) +
                          ", and its ranks are desynchronised. Make a new communicator"};
}

// ---- calls and steps ----

// The protocol. Every rank counts steps in its own `progress.step` and takes the same steps in the
// same order. arrive() publishes everything that the rank wrote before (its slot, its header) by a
// sequentially consistent exchange of the counter; await() acquires the counters of all peers, so
// what they wrote before the same step can be read after it.
//
// Slots. In round r a rank fills its slot of parity r & 1, takes a step, and reads the slots of its
// peers. It fills that slot again in round r + 2, after the step of round r + 1, at which every
// peer arrives only once it has read round r. So two slots suffice, and no step is needed at the
// end of a round or of a call. Rounds go on counting from call to call.
//
// Headers. The first arrive() of call c publishes its header of parity c & 1, which all compare
// after the first await(). A rank may finish call c while a slower peer still compares, and then
// publish c + 1; it cannot publish c + 2, since the first await() of c + 1 waits for that peer to
// finish call c. So a rank is at most one call ahead, and two headers suffice.
void ShmCommunicator::begin(const CallSignature& call, uint64_t inline_value) {
    check_process();
    if (!broken_.empty()) throw PluginError{COMM_INVALID_USAGE, broken_};
    check_not_aborted();
    call_ = call;
    inline_value_ = inline_value;
    deadline_ns_ = 0;
    ++call_number_;
    headers_unchecked_ = true;
}

// The header is written at once with the step: each peer that polls their cache line takes it away.
// Either this rank sees that a peer sleeps, or that peer sees the new step before it sleeps: both
// sides store, then load, sequentially consistently.
void ShmCommunicator::arrive() {
    RankBlock& own = segment_.block(rank);
    uint32_t core = CoreMigrator::current_core();
    uint64_t signature = pack(call_, shape_);
    if (headers_unchecked_) {
        CallHeader& header = own.progress.headers[call_number_ & 1];
        own.shapes[call_number_ & 1] = shape_;
        own.progress.call_number.store(call_number_, std::memory_order_relaxed);
        header.signature.store(signature, std::memory_order_relaxed);
        header.count.store(call_.count, std::memory_order_relaxed);
        header.inline_value.store(inline_value_, std::memory_order_relaxed);
    }
    own.progress.core.store(core, std::memory_order_relaxed);
    own.progress.step.exchange(++step_, std::memory_order_seq_cst);
    if (own.num_sleepers.value.load(std::memory_order_seq_cst) != 0) wake_all(&own.progress.step);
}

void ShmCommunicator::await() {
    for (int peer = rank + 1; peer < nranks; ++peer) await_step(peer);
    for (int peer = 0; peer < rank; ++peer) await_step(peer);
    for (int peer = 0; peer < nranks; ++peer) check_not_given_up(peer);
    if (headers_unchecked_) check_headers();
}

// A peer may have arrived, and then given up at its deadline: the call failed there, so here too.
void ShmCommunicator::check_not_given_up(int peer) {
    const RankBlock& block = segment_.block(peer);
    uint32_t state = block.identity.state.load(std::memory_order_seq_cst);
    if (state >= failed &&
        block.progress.call_number.load(std::memory_order_relaxed) == call_number_)
        check_peer(peer, describe_current_call(), [] { return false; });
}

void ShmCommunicator::await_step(int peer) {
    std::atomic<uint32_t>& counter = segment_.block(peer).progress.step;
    if (has_reached(counter, step_)) return;
    if (!spin_until(spin_policy_for(peer), [&] { return has_reached(counter, step_); }))
        sleep_until_step(peer);
}

// A pause on the core that the peer needs is lost time: of two ranks on one core the higher one
// migrates, and the lower one yields.
SpinPolicy ShmCommunicator::spin_policy_for(int peer) {
    if (oversubscribed_ || segment_.block(peer).progress.core.load(std::memory_order_relaxed) !=
                               CoreMigrator::current_core())
        return spin_policy_;
    if (peer < rank) {
        cpu_set_t busy;
        CPU_ZERO(&busy);
        for (int other = 0; other < nranks; ++other)
            CPU_SET(
                segment_.block(other).progress.core.load(std::memory_order_relaxed) % CPU_SETSIZE,
                &busy);
        migrator_.migrate_from(busy);
    }
    return SpinPolicy{0, spin_policy_.yields};
}

void ShmCommunicator::sleep_until_step(int peer) {
    RankBlock& awaited = segment_.block(peer);
    start_deadline();
    while (!has_reached(awaited.progress.step, step_)) {
        awaited.num_sleepers.value.fetch_add(1, std::memory_order_seq_cst);
        uint32_t current = awaited.progress.step.load(std::memory_order_seq_cst);
        if (static_cast<int32_t>(current - step_) < 0)
            sleep_on(&awaited.progress.step, current,
                     std::min(liveness_poll_ns, timeout_ns_.load()));
        awaited.num_sleepers.value.fetch_sub(1, std::memory_order_seq_cst);
        std::string missing;
        for (int other = 0; other < nranks; ++other) {
            auto is_done = [&] { return has_reached(segment_.block(other).progress.step, step_); };
            if (is_done()) continue;
            check_peer(other, describe_current_call(), is_done);
            missing += (missing.empty() ? "" : ", ") + describe_peer(other);
        }
        if (!missing.empty()) check_deadline(describe_current_call(), missing);
    }
}

// All ranks compare after the same step, so on a mismatch all of them throw, and can go on. The
// rounds start again: calls that differ may have differed in how many they took.
void ShmCommunicator::check_headers() {
    headers_unchecked_ = false;
    uint64_t signature = pack(call_, shape_);
    for (int peer = 0; peer < nranks; ++peer) {
        const CallHeader& header = segment_.block(peer).progress.headers[call_number_ & 1];
        if (header.signature.load(std::memory_order_relaxed) != signature ||
            header.count.load(std::memory_order_relaxed) != call_.count) {
            round_ = 0;
            check_not_declined();
            throw_mismatch(peer, header);
        }
    }
}

// Throws on every rank if some rank declined this call, and not all.
void ShmCommunicator::check_not_declined() {
    for (int peer = 0; peer < nranks; ++peer) {
        const RankBlock& block = segment_.block(peer);
        const CallHeader& header = block.progress.headers[call_number_ & 1];
        if (unpack(header.signature.load(std::memory_order_relaxed), 0).collective ==
            Collective::declined)
            throw PluginError{
                COMM_INVALID_USAGE,
                rank_prefix() + "call " + std::to_string(call_number_) + " (" +
                    describe(call_, shape_) + ") was declined by rank " + std::to_string(peer) +
                    ", whose arguments are wrong: " + block.declined[call_number_ & 1] +
                    " Nothing was exchanged. Mend the call of that rank"};
    }
}

// The text is read by peers that compare this call, so the rules of headers hold for it.
void ShmCommunicator::decline(const char* why) {
    if (nranks == 1) return;
    begin(CallSignature{Collective::declined, 0, COMM_UINT8, 0, 0});
    char* text = segment_.block(rank).declined[call_number_ & 1];
    std::strncpy(text, why, max_declined_bytes - 1);
    text[max_declined_bytes - 1] = 0;
    step();
}

void ShmCommunicator::throw_mismatch(int peer, const CallHeader& header) {
    CallSignature peer_call = unpack(header.signature.load(std::memory_order_relaxed),
                                     header.count.load(std::memory_order_relaxed));
    const Shape& peer_shape = segment_.block(peer).shapes[call_number_ & 1];
    throw PluginError{COMM_INVALID_USAGE,
                      rank_prefix() + "mismatch in call " + std::to_string(call_number_) +
                          ": rank " + std::to_string(rank) + " called " + describe(call_, shape_) +
                          ", rank " + std::to_string(peer) + " called " +
                          describe(peer_call, peer_shape) +
                          ". Nothing was exchanged. Make the same calls in the same order on every "
                          "rank, with the same shape, dtype and op"};
}

int ShmCommunicator::num_shared_tensors() const {
    int count = 0;
    for (int peer = 0; peer < nranks; ++peer)
        count += segment_.block(peer).progress.headers[call_number_ & 1].inline_value.load(
                     std::memory_order_relaxed) != 0;
    return count;
}

char* ShmCommunicator::shared_tensor(int of_rank) {
    const CallHeader& header = segment_.block(of_rank).progress.headers[call_number_ & 1];
    return memory_.resolve(of_rank, header.inline_value.load(std::memory_order_relaxed));
}

void ShmCommunicator::put(char* slot, const char* from, size_t nbytes) const {
    if (streaming_ && nbytes >= min_streamed_bytes)
        copy_streaming(slot, from, nbytes);
    else
        std::memcpy(slot, from, nbytes);
}

// One rank's part of an exchange: fill the own slot, read the next rank's.
int64_t ShmCommunicator::time_exchange(std::vector<char>& scratch, bool streaming) {
    streaming_ = streaming;
    next_round();
    step();
    int64_t start = now_ns();
    put(slot(rank), scratch.data(), scratch.size());
    step();
    std::memcpy(scratch.data(), slot((rank + 1) % nranks), scratch.size());
    return now_ns() - start;
}

// Where cores are far apart, an ordinary store to a line that the peer has read waits for that
// line, and a streaming store does not; where cores share a cache, streaming costs a trip to
// memory. Either way by a factor of two, so it is measured, and the ranks agree on the sum of their
// times. Once a process: later groups vote by what their ranks measured. Not for two ranks, which
// write lines that they have read themselves: ordinary stores are the faster ones near and far.
bool ShmCommunicator::prefers_streaming(const Bootstrap& bootstrap,
                                        const std::vector<int32_t>& gains) {
    if (std::find(gains.begin(), gains.end(), not_measured) == gains.end())
        return std::accumulate(gains.begin(), gains.end(), 0) > 0;
    std::vector<char> scratch(std::min<size_t>(slot_bytes(), 64 << 10));
    int64_t fastest[2] = {INT64_MAX, INT64_MAX};
    for (int i = 0; i < 12; ++i)
        fastest[i % 2] = std::min(fastest[i % 2], time_exchange(scratch, i % 2 == 1));
    std::vector<int64_t> times(2 * nranks);
    bootstrap.allgather(fastest, times.data(), sizeof fastest);
    int64_t ordinary_ns = 0, streaming_ns = 0;
    for (int peer = 0; peer < nranks; ++peer) {
        ordinary_ns += times[2 * peer];
        streaming_ns += times[2 * peer + 1];
    }
    bool prefers = streaming_ns < ordinary_ns - ordinary_ns / 10;
    streaming_gain = prefers ? 1 : -1;
    return prefers;
}

// ---- memory for tensors: its errors concern this rank alone ----

void ShmCommunicator::mem_alloc(size_t nbytes, void** pointer) {
    try {
        check_process();
        *pointer = memory_.allocate(nbytes);
    } catch (PluginError& failure) {
        failure.is_local = true;
        throw;
    }
}

void ShmCommunicator::mem_free(void* pointer) {
    try {
        check_process();
        memory_.free(pointer);
    } catch (PluginError& failure) {
        failure.is_local = true;
        throw;
    }
}

// ---- what can go wrong while waiting ----

void ShmCommunicator::start_deadline() {
    if (deadline_ns_ == 0) deadline_ns_ = now_ns() + timeout_ns_;
}

std::string ShmCommunicator::describe_current_call() const {
    return "call " + std::to_string(call_number_) + " (" + describe(call_, shape_) + ")";
}

std::string ShmCommunicator::describe_peer(int peer) const {
    const RankBlock& block = segment_.block(peer);
    uint64_t call_number = block.progress.call_number.load(std::memory_order_relaxed);
    const CallHeader& last = block.progress.headers[call_number & 1];
    return "rank " + std::to_string(peer) + " (pid " + std::to_string(block.identity.pid) +
           ", last seen in call " + std::to_string(call_number) + ", " +
           describe(unpack(last.signature.load(), last.count.load()),
                    block.shapes[call_number & 1]) +
           ")";
}

const char* ShmCommunicator::describe_end(int peer) const {
    const Identity& identity = segment_.block(peer).identity;
    switch (identity.state.load(std::memory_order_acquire)) {
        case closed:
            return "has closed its communicator";
        case failed:
        case timed_out:
        case left:
            return "has stopped after an error of its own";
        case shm::aborted:
            return "has aborted its communicator";
        default:
            return has_died(identity, segment_.block(rank).identity) ? died : nullptr;
    }
}

// A peer that stopped may have done so because another died, which is then the first cause. Or it
// did its part and closed since the caller looked, so `is_done` looks again.
void ShmCommunicator::check_peer(int peer, const std::string& doing,
                                 const std::function<bool()>& is_done) {
    if (aborted_.load(std::memory_order_relaxed)) throw_aborted(doing);
    const char* end = describe_end(peer);
    if (end == nullptr || is_done()) return;
    std::string text = rank_prefix() + describe_peer(peer) + " " + end + " while rank " +
                       std::to_string(rank) + " waited for it in " + doing;
    for (int other = 0; other < nranks; ++other)
        if (other != peer && describe_end(other) == died)
            text += "; " + describe_peer(other) + " " + died;
    uint32_t state = segment_.block(peer).identity.state.load(std::memory_order_acquire);
    // A rank that timed out looks at the stacks of the others: they should still be in their calls.
    if (state == timed_out) std::this_thread::sleep_for(options.stack_patience);
    const char* advice = state == closed ? "It made fewer calls than this rank: let all ranks make "
                                           "the same calls before they close"
                                         : "See the first error of that rank, then start again";
    throw PluginError{COMM_REMOTE_ERROR,
                      text + ". This communicator cannot be used again. " + advice};
}

void ShmCommunicator::check_deadline(const std::string& doing, const std::string& missing) {
    if (now_ns() < deadline_ns_) return;
    throw PluginError{
        COMM_TIMEOUT,
        rank_prefix() + "timed out after " + seconds(timeout_ns_) + " in " + doing +
            ". Missing: " + missing +
            ". This communicator cannot be used again. Find out what the missing ranks "
            "do, or give them a longer timeout in Coordinator(timeout_s=...), or in "
            "torch's init_process_group(timeout=...)"};
}

// Ranks whose calls mismatched took the same steps and can go on. After other errors they are
// desynchronised; the peers learn it from the state of this rank, and need not wait for a timeout.
comm_result ShmCommunicator::fail(const PluginError& failure) {
    last_error_ = failure.text;
    bool is_recoverable = failure.is_local || failure.code == COMM_INVALID_USAGE ||
                          failure.code == COMM_INVALID_ARGUMENT || failure.code == COMM_UNSUPPORTED;
    if (is_recoverable || !broken_.empty() || nranks == 1) return failure.code;
    broken_ =
        rank_prefix() + "this communicator failed before (" + failure.text + "). Make a new one";
    uint32_t expected = present;
    RankBlock& own = segment_.block(rank);
    own.identity.state.compare_exchange_strong(expected,
                                               failure.code == COMM_TIMEOUT ? timed_out : failed);
    wake_all(&own.progress.step);
    for (int peer = 0; peer < nranks; ++peer) ring_doorbell(peer);
    return failure.code;
}

void ShmCommunicator::abort() {
    aborted_.store(true, std::memory_order_seq_cst);
    if (nranks == 1 || !fork_guard_.is_original_process()) return;
    segment_.block(rank).identity.state.store(shm::aborted, std::memory_order_release);
    for (int peer = 0; peer < nranks; ++peer) {
        wake_all(&segment_.block(peer).progress.step);
        wake_all(&segment_.block(peer).doorbell.value);
        ring_stream_doorbell(peer);
    }
}

}  // namespace shm
