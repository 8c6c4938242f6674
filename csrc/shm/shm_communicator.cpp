#include "shm/shm_communicator.h"

#include <algorithm>
#include <cstring>

namespace shm {
namespace {

constexpr size_t smallest_streamed = 8 << 10;
constexpr int64_t glance_ns = 100000000;  // between two looks at whether the peers live
constexpr int64_t shortest_sleep_ns = 100000;

const char* const died = "has died";

bool reached(const std::atomic<uint32_t>& word, uint32_t step) {
    return static_cast<int32_t>(word.load(std::memory_order_acquire) - step) >= 0;
}

// kind, dtype, op: 8 bits each; the mark of the shape: 24; root: 16.
uint64_t pack(const Call& call, const Shape& shape) {
    uint64_t mark = shape.ndim < 0 ? 0 : shape.mark();
    return static_cast<uint64_t>(call.kind) | static_cast<uint64_t>(call.dtype & 0xff) << 8 |
           static_cast<uint64_t>(call.op & 0xff) << 16 | mark << 24 |
           static_cast<uint64_t>(call.root) << 48;
}

Call unpack(uint64_t what, uint64_t count) {
    Call call;
    call.kind = static_cast<Kind>(what & 0xff);
    call.dtype = static_cast<comm_dtype>(what >> 8 & 0xff);
    call.op = static_cast<comm_op>(what >> 16 & 0xff);
    call.root = static_cast<int32_t>(what >> 48);
    call.count = count;
    return call;
}

const char* name_of(Kind kind) {
    static const char* const names[] = {"setup",  "barrier",   "allreduce",      "broadcast",
                                        "reduce", "allgather", "reduce_scatter", "alltoall"};
    return names[static_cast<int>(kind)];
}

bool has_op(Kind kind) {
    return kind == Kind::allreduce || kind == Kind::reduce || kind == Kind::reduce_scatter;
}

// A vector is named by its length, which is its shape.
std::string elements(uint64_t count, comm_dtype dtype, const Shape& shape) {
    bool is_vector =
        shape.ndim < 0 || (shape.ndim == 1 && shape.dims[0] == static_cast<int64_t>(count));
    return (is_vector ? std::to_string(count) : shape.text()) + " " + name_of_dtype(dtype);
}

std::string describe(const Transfer& transfer) {
    return (transfer.is_send ? "send to rank " : "recv from rank ") +
           std::to_string(transfer.peer) + " of " +
           elements(transfer.count, transfer.dtype, transfer.shape) + " (message " +
           std::to_string(transfer.message) + ")";
}

std::string seconds(int64_t ns) {
    std::string text = std::to_string(static_cast<double>(ns) / 1e9);
    return text.substr(0, text.size() - 4) + " s";
}

// What tests compare, and what is best by itself if nothing is said.
Choices choices_in(const comm_init_args& args) {
    static const std::string instructions = "instructions=";
    Choices choices;
    choices.instructions = best_instructions();
    for (auto option = args.options; option != nullptr && *option != nullptr; ++option) {
        std::string text = *option;
        if (text == "stores=ordinary")
            choices.stores = Stores::ordinary;
        else if (text == "stores=streaming")
            choices.stores = Stores::streaming;
        else if (text.compare(0, instructions.size(), instructions) != 0 ||
                 !find_instructions(text.c_str() + instructions.size(), &choices.instructions))
            throw Failure{COMM_INVALID_ARGUMENT,
                          "rank " + std::to_string(args.rank) +
                              ": the shared-memory backend has no option \"" + text +
                              "\" on this processor, so nothing would come of it. Leave it out"};
    }
    return choices;
}

}  // namespace

std::string describe(const Call& call, const Shape& shape) {
    std::string text = name_of(call.kind);
    if (call.kind == Kind::barrier || call.kind == Kind::none) return text;
    text += " of " + elements(call.count, call.dtype, shape);
    if (has_op(call.kind)) text += std::string(", ") + name_of_op(call.op);
    if (call.kind == Kind::broadcast) text += ", from rank " + std::to_string(call.root);
    if (call.kind == Kind::reduce) text += ", to rank " + std::to_string(call.root);
    return text;
}

Group::Group(const comm_init_args& args)
    : rank(args.rank),
      nranks(args.nranks),
      choices(choices_in(args)),
      timeout_ns_(args.timeout_ms * INT64_C(1000000)),
      sent_(nranks),
      received_(nranks),
      posted_(nranks),
      taken_(nranks),
      waited_ns_(nranks) {
    if (nranks == 1) return;
    Bootstrap bootstrap(args.bootstrap, rank, nranks);
    oversubscribed_ = are_oversubscribed(bootstrap);
    patience_ = patience(oversubscribed_);
    segment_ = Segment(bootstrap, layout_for(nranks, oversubscribed_));
    if (!oversubscribed_) streaming_ = prefers_streaming(bootstrap);
    if (choices.stores != Stores::measured) streaming_ = choices.stores == Stores::streaming;
}

Group::~Group() {
    if (nranks == 1) return;
    RankBlock& mine = segment_.block(rank);
    if (!birthmark_.is_here()) return;  // a forked child lets go of its copy; the rank goes on
    uint32_t expected = present;
    mine.identity.state.compare_exchange_strong(expected, closed);
    wake_all(&mine.arrival.step);
    for (int peer = 0; peer < nranks; ++peer) ring(peer);
}

void Group::check_process() const {
    if (birthmark_.is_here()) return;
    throw Failure{COMM_INVALID_USAGE,
                  prefix() + "process " + std::to_string(getpid()) +
                      " was forked from the rank and has no part in its communicator, where it "
                      "would pass for the rank. Call from the rank itself, or start the process as "
                      "a rank of its own"};
}

// ---- steps ----

void Group::begin(const Call& call, uint64_t word) {
    check_process();
    if (!broken_.empty()) throw Failure{COMM_INVALID_USAGE, broken_};
    if (aborted_.load(std::memory_order_relaxed))
        throw Failure{
            COMM_REMOTE_ERROR,
            prefix() +
                "this communicator was aborted, and its ranks are out of step. Make a new one"};
    call_ = call;
    word_ = word;
    deadline_ns_ = 0;
    ++call_number_;
    unchecked_ = true;
}

void Group::await() {
    for (int peer = rank + 1; peer < nranks; ++peer) await_step(peer);
    for (int peer = 0; peer < rank; ++peer) await_step(peer);
    if (unchecked_) check_records();
}

// The record is written in one go with the step: each peer that looks at their cache line takes it
// away. Either the sleeper's count is seen here, or the new step is seen there: both are
// sequentially consistent, so that nobody sleeps through it.
void Group::arrive() {
    RankBlock& mine = segment_.block(rank);
    uint32_t core = Place::core();
    uint64_t what = pack(call_, shape_);
    if (unchecked_) {
        Record& record = mine.arrival.records[call_number_ & 1];
        mine.shapes[call_number_ & 1] = shape_;
        mine.arrival.call.store(call_number_, std::memory_order_relaxed);
        record.what.store(what, std::memory_order_relaxed);
        record.count.store(call_.count, std::memory_order_relaxed);
        record.word.store(word_, std::memory_order_relaxed);
    }
    mine.arrival.core.store(core, std::memory_order_relaxed);
    mine.arrival.step.exchange(++step_, std::memory_order_seq_cst);
    if (mine.sleepers.value.load(std::memory_order_seq_cst) != 0) wake_all(&mine.arrival.step);
}

void Group::await_step(int peer) {
    std::atomic<uint32_t>& word = segment_.block(peer).arrival.step;
    if (reached(word, step_)) return;
    if (!look(patience_with(peer), [&] { return reached(word, step_); })) sleep_until_step(peer);
}

// A pause on the core that the peer needs is lost time: the higher rank moves, the lower gives way.
Patience Group::patience_with(int peer) {
    if (oversubscribed_ ||
        segment_.block(peer).arrival.core.load(std::memory_order_relaxed) != Place::core())
        return patience_;
    if (peer < rank) {
        cpu_set_t taken;
        CPU_ZERO(&taken);
        for (int other = 0; other < nranks; ++other)
            CPU_SET(
                segment_.block(other).arrival.core.load(std::memory_order_relaxed) % CPU_SETSIZE,
                &taken);
        place_.leave(taken);
    }
    return Patience{0, patience_.yields};
}

void Group::sleep_until_step(int peer) {
    RankBlock& theirs = segment_.block(peer);
    start_deadline();
    while (!reached(theirs.arrival.step, step_)) {
        theirs.sleepers.value.fetch_add(1, std::memory_order_seq_cst);
        uint32_t seen = theirs.arrival.step.load(std::memory_order_seq_cst);
        if (static_cast<int32_t>(seen - step_) < 0)
            sleep_on(&theirs.arrival.step, seen, std::min(glance_ns, timeout_ns_));
        theirs.sleepers.value.fetch_sub(1, std::memory_order_seq_cst);
        std::string missing;
        for (int other = 0; other < nranks; ++other) {
            if (reached(segment_.block(other).arrival.step, step_)) continue;
            check_peer(other, describe_current());
            missing += (missing.empty() ? "" : ", ") + describe_peer(other);
        }
        if (!missing.empty()) check_deadline(describe_current(), missing);
    }
}

void Group::check_records() {
    unchecked_ = false;
    uint64_t what = pack(call_, shape_);
    for (int peer = 0; peer < nranks; ++peer) {
        const Record& theirs = segment_.block(peer).arrival.records[call_number_ & 1];
        if (theirs.what.load(std::memory_order_relaxed) != what ||
            theirs.count.load(std::memory_order_relaxed) != call_.count) {
            round_ = 0;  // some had a round and some had none; all of them come by here
            throw_mismatch(peer, theirs);
        }
    }
}

void Group::throw_mismatch(int peer, const Record& theirs) {
    Call other = unpack(theirs.what.load(std::memory_order_relaxed),
                        theirs.count.load(std::memory_order_relaxed));
    const Shape& theirs_shape = segment_.block(peer).shapes[call_number_ & 1];
    throw Failure{
        COMM_INVALID_USAGE,
        prefix() + "the ranks disagree in call " + std::to_string(call_number_) + ": rank " +
            std::to_string(rank) + " asked for " + describe(call_, shape_) + ", rank " +
            std::to_string(peer) + " for " + describe(other, theirs_shape) +
            ". Nothing was exchanged. Let every rank make the same calls in the same order, "
            "with the same shape, dtype and op"};
}

int Group::num_shared_tensors() const {
    int found = 0;
    for (int peer = 0; peer < nranks; ++peer)
        found += segment_.block(peer).arrival.records[call_number_ & 1].word.load(
                     std::memory_order_relaxed) != 0;
    return found;
}

char* Group::shared_tensor(int of_rank) {
    const Record& record = segment_.block(of_rank).arrival.records[call_number_ & 1];
    return memory_.at(of_rank, record.word.load(std::memory_order_relaxed));
}

void Group::put(char* slot, const char* from, size_t nbytes) const {
    if (streaming_ && nbytes >= smallest_streamed)
        copy_streaming(slot, from, nbytes);
    else
        std::memcpy(slot, from, nbytes);
}

// One rank's part of an exchange: fill the own slot, read the next rank's.
int64_t Group::time_exchange(std::vector<char>& scratch, bool streaming) {
    streaming_ = streaming;
    next_round();
    step();
    int64_t start = now_ns();
    put(slot(rank), scratch.data(), scratch.size());
    step();
    std::memcpy(scratch.data(), slot((rank + 1) % nranks), scratch.size());
    return now_ns() - start;
}

// Where the cores are far apart, an ordinary store to a line that the peer has read costs a journey
// there, and a streaming one does not; where they share a cache, streaming costs a journey to
// memory. Either way by a factor of two, so it is measured, and the ranks agree on the sum of what
// they saw.
bool Group::prefers_streaming(const Bootstrap& bootstrap) {
    std::vector<char> scratch(std::min<size_t>(slot_bytes(), 64 << 10));
    int64_t fastest[2] = {INT64_MAX, INT64_MAX};
    for (int i = 0; i < 12; ++i)
        fastest[i % 2] = std::min(fastest[i % 2], time_exchange(scratch, i % 2 == 1));
    std::vector<int64_t> everyones(2 * nranks);
    bootstrap.allgather(fastest, everyones.data(), sizeof fastest);
    int64_t ordinary = 0, streaming = 0;
    for (int peer = 0; peer < nranks; ++peer) {
        ordinary += everyones[2 * peer];
        streaming += everyones[2 * peer + 1];
    }
    return streaming < ordinary - ordinary / 10;
}

// ---- letters ----

void Group::transfer(Transfer transfer) {
    check_process();
    if (!broken_.empty()) throw Failure{COMM_INVALID_USAGE, broken_};
    transfer.shape = shape_;
    transfer.message = transfer.is_send ? ++sent_[transfer.peer] : ++received_[transfer.peer];
    queued_.push_back(std::move(transfer));
    if (group_depth_ == 0) {
        std::vector<Transfer> transfers;
        transfers.swap(queued_);
        complete(transfers);
    }
}

void Group::group_end() {
    if (group_depth_ == 0)
        throw Failure{COMM_INVALID_USAGE, prefix() +
                                              "group_end without group_start, so nothing waits to "
                                              "be sent. Call group_start before"};
    if (--group_depth_ > 0) return;
    std::vector<Transfer> transfers;
    transfers.swap(queued_);
    if (!transfers.empty()) complete(transfers);
}

void Group::complete(std::vector<Transfer>& transfers) {
    deadline_ns_ = 0;
    auto all_done = [&] {
        return std::all_of(transfers.begin(), transfers.end(),
                           [](const Transfer& transfer) { return transfer.finished; });
    };
    while (!all_done()) {
        if (aborted_.load(std::memory_order_relaxed))
            throw Failure{
                COMM_REMOTE_ERROR,
                prefix() +
                    "this communicator was aborted, and its ranks are out of step. Make a new one"};
        Patience patience = transfers.size() == 1 ? patience_with(transfers[0].peer) : patience_;
        if (!look(patience, [&] { return progress(transfers); })) wait_for_letters(transfers);
    }
    for (const Transfer& transfer : transfers)
        if (!transfer.mismatch.empty()) throw Failure{COMM_INVALID_USAGE, transfer.mismatch};
}

// Moves what can be moved without waiting. Transfers of one direction with one peer keep their
// order.
bool Group::progress(std::vector<Transfer>& transfers) {
    bool moved = false;
    std::vector<bool> busy(transfers.size() > 1 ? 2 * nranks : 0);
    for (Transfer& transfer : transfers) {
        if (transfer.finished) continue;
        size_t direction = 2 * transfer.peer + transfer.is_send;
        if (!busy.empty() && busy[direction]) continue;
        moved |= advance(transfer);
        if (!busy.empty()) busy[direction] = !transfer.finished;
    }
    return moved;
}

bool Group::advance(Transfer& transfer) {
    bool moved = false;
    while (!transfer.finished &&
           (transfer.is_send ? advance_send(transfer) : advance_receive(transfer)))
        moved = true;
    if (moved) ring(transfer.peer);
    return moved;
}

bool Group::advance_send(Transfer& transfer) {
    Lane& lane = segment_.lane(rank, transfer.peer);
    uint32_t& posted = posted_[transfer.peer];
    if (posted - lane.taken.value.load(std::memory_order_acquire) == lane_depth) return false;
    char* letter = segment_.letter(rank, transfer.peer, posted);
    Envelope envelope{static_cast<uint32_t>(transfer.message),
                      static_cast<uint32_t>(transfer.dtype), transfer.count, transfer.shape};
    std::memcpy(letter, &envelope, sizeof envelope);
    uint64_t part =
        std::min<uint64_t>(transfer.nbytes - transfer.done, segment_.layout().letter_bytes);
    std::memcpy(letter + envelope_bytes, transfer.data + transfer.done, part);
    segment_.block(rank).arrival.core.store(Place::core(), std::memory_order_relaxed);
    lane.posted.value.exchange(++posted, std::memory_order_seq_cst);
    transfer.done += part;
    transfer.finished = transfer.done == transfer.nbytes;
    return true;
}

bool Group::advance_receive(Transfer& transfer) {
    Lane& lane = segment_.lane(transfer.peer, rank);
    uint32_t& taken = taken_[transfer.peer];
    if (lane.posted.value.load(std::memory_order_acquire) == taken) return false;
    const char* letter = segment_.letter(transfer.peer, rank, taken);
    Envelope envelope;
    std::memcpy(&envelope, letter, sizeof envelope);
    if (!transfer.started) open_letter(transfer, envelope);
    uint64_t part =
        std::min<uint64_t>(transfer.expected - transfer.done, segment_.layout().letter_bytes);
    if (transfer.mismatch.empty())
        std::memcpy(transfer.data + transfer.done, letter + envelope_bytes, part);
    lane.taken.value.exchange(++taken, std::memory_order_seq_cst);
    transfer.done += part;
    transfer.finished = transfer.done == transfer.expected;
    return true;
}

// A message that does not fit is taken off the lane all the same, so that the next one can be read.
void Group::open_letter(Transfer& transfer, const Envelope& envelope) {
    comm_dtype dtype = static_cast<comm_dtype>(envelope.dtype);
    transfer.started = true;
    transfer.expected = envelope.count * size_of(dtype);
    bool same_shape = envelope.shape.ndim < 0 || transfer.shape.ndim < 0 ||
                      envelope.shape.digest == transfer.shape.digest;
    if (envelope.count == transfer.count && dtype == transfer.dtype && same_shape) return;
    transfer.mismatch =
        prefix() + describe(transfer) + ", but rank " + std::to_string(transfer.peer) + " sent " +
        elements(envelope.count, dtype, envelope.shape) +
        ". The message was dropped and the tensor left as it was. Receive into a tensor "
        "of the shape and dtype that is sent";
}

void Group::ring(int peer) {
    RankBlock& theirs = segment_.block(peer);
    if (theirs.asleep.value.load(std::memory_order_seq_cst) == 0) return;
    theirs.bell.value.fetch_add(1, std::memory_order_seq_cst);
    wake_all(&theirs.bell.value);
}

// Messages of a conversation come at equal intervals: most of one is slept through, and the end of
// it is watched for.
void Group::wait_for_letters(std::vector<Transfer>& transfers) {
    const Transfer& first = transfers[0];
    if (oversubscribed_ || transfers.size() > 1 || first.is_send || first.started)
        return sleep_until_bell(transfers, glance_ns);
    int64_t& usual_ns = waited_ns_[first.peer];
    int64_t start = now_ns(), early_ns = usual_ns - watch_ns / 2;
    if (early_ns > shortest_sleep_ns) sleep_until_bell(transfers, std::min(early_ns, glance_ns));
    if (!first.started) watch(patience_, now_ns() + watch_ns, [&] { return progress(transfers); });
    while (!first.started) sleep_until_bell(transfers, glance_ns);
    usual_ns = now_ns() - start;
}

void Group::sleep_until_bell(std::vector<Transfer>& transfers, int64_t longest_ns) {
    RankBlock& mine = segment_.block(rank);
    start_deadline();
    mine.asleep.value.store(1, std::memory_order_seq_cst);
    uint32_t seen = mine.bell.value.load(std::memory_order_seq_cst);
    bool moved = progress(transfers);
    if (!moved) sleep_on(&mine.bell.value, seen, std::min(longest_ns, timeout_ns_));
    mine.asleep.value.store(0, std::memory_order_relaxed);
    if (moved || progress(transfers)) return;
    for (const Transfer& transfer : transfers) {
        if (transfer.finished) continue;
        check_peer(transfer.peer, describe(transfer));
        check_deadline(describe(transfer), describe_peer(transfer.peer));
    }
}

// ---- what can go wrong while waiting ----

void Group::start_deadline() {
    if (deadline_ns_ == 0) deadline_ns_ = now_ns() + timeout_ns_;
}

std::string Group::describe_current() const {
    return "call " + std::to_string(call_number_) + " (" + describe(call_, shape_) + ")";
}

std::string Group::describe_peer(int peer) const {
    const RankBlock& theirs = segment_.block(peer);
    uint64_t call = theirs.arrival.call.load(std::memory_order_relaxed);
    const Record& last = theirs.arrival.records[call & 1];
    return "rank " + std::to_string(peer) + " (pid " + std::to_string(theirs.identity.pid) +
           ", last seen in call " + std::to_string(call) + ", " +
           describe(unpack(last.what.load(), last.count.load()), theirs.shapes[call & 1]) + ")";
}

const char* Group::how_it_ended(int peer) const {
    const Identity& theirs = segment_.block(peer).identity;
    switch (theirs.state.load(std::memory_order_acquire)) {
        case closed:
            return "has closed its communicator";
        case failed:
            return "has given up after an error of its own";
        case shm::aborted:
            return "has aborted its communicator";
        default:
            return has_died(theirs, segment_.block(rank).identity) ? died : nullptr;
    }
}

void Group::check_peer(int peer, const std::string& doing) {
    if (aborted_.load(std::memory_order_relaxed))
        throw Failure{COMM_REMOTE_ERROR,
                      prefix() + "aborted in " + doing +
                          ", and the ranks are out of step. Make a new communicator"};
    const char* how = how_it_ended(peer);
    if (how == nullptr) return;
    std::string text = prefix() + describe_peer(peer) + " " + how + " while rank " +
                       std::to_string(rank) + " waited for it in " + doing;
    for (int other = 0; other < nranks; ++other)  // whoever gave up may have done so over a death
        if (other != peer && how_it_ended(other) == died)
            text += "; " + describe_peer(other) + " " + died;
    throw Failure{
        COMM_REMOTE_ERROR,
        text +
            ". This group cannot go on. Look for the first error of that rank, then start again"};
}

void Group::check_deadline(const std::string& doing, const std::string& missing) {
    if (now_ns() < deadline_ns_) return;
    throw Failure{
        COMM_TIMEOUT,
        prefix() + "waited " + seconds(timeout_ns_) + " in " + doing +
            ". Not there yet: " + missing +
            ". This group cannot go on. Find out what they are doing, or give it more time: "
            "Coordinator(timeout_s=...)"};
}

comm_result Group::keep(const Failure& failure) {
    last_error_ = failure.text;
    return failure.code;
}

// Ranks that disagreed took the same steps and can go on. After anything else they have lost step.
comm_result Group::fail(const Failure& failure) {
    keep(failure);
    bool recoverable = failure.code == COMM_INVALID_USAGE ||
                       failure.code == COMM_INVALID_ARGUMENT || failure.code == COMM_UNSUPPORTED;
    if (recoverable || !broken_.empty() || nranks == 1) return failure.code;
    broken_ = prefix() + "this communicator failed before (" + failure.text + "). Make a new one";
    uint32_t expected = present;
    RankBlock& mine = segment_.block(rank);
    mine.identity.state.compare_exchange_strong(expected, failed);
    wake_all(&mine.arrival.step);
    for (int peer = 0; peer < nranks; ++peer) ring(peer);
    return failure.code;
}

void Group::abort() {
    aborted_.store(true, std::memory_order_seq_cst);
    if (nranks == 1 || !birthmark_.is_here()) return;
    segment_.block(rank).identity.state.store(shm::aborted, std::memory_order_release);
    for (int peer = 0; peer < nranks; ++peer) {
        wake_all(&segment_.block(peer).arrival.step);
        wake_all(&segment_.block(peer).bell.value);
    }
}

}  // namespace shm
