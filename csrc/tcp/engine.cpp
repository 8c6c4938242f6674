#include "tcp/engine.h"

#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "system/spin.h"

namespace tcp {
namespace {

constexpr size_t max_kept_scratch = 16
                                    << 20;  // faulting in fresh pages costs as much as using them
constexpr uint64_t max_spun_nbytes = 16 << 10;  // of a call: more takes longer than a wake-up
constexpr int64_t spin_ns = 50000;              // about what two wake-ups take

}  // namespace

// One call. Transfers of one direction of a connection follow one another in order.
class Run {
  public:
    Run(Engine& engine, Call& call, const Look& look, Mismatch* mismatch)
        : engine_(engine),
          call_(call),
          look_(look),
          mismatch_(mismatch),
          last_(2 * engine.connections_.size()),
          started_ns_(shm::now_ns()) {
        transfers_.reserve(call.num_steps);  // their addresses stay
    }

    bool run() {
        for (const Step* step = call_.steps; step != call_.steps + call_.num_steps; ++step)
            if (!take(*step)) return false;
        return settle(0);
    }

  private:
    bool take(const Step& step);
    void add(const Step& step, bool is_send);
    void reduce(const Step& step);
    bool settle(size_t max_rounds);
    bool proceed() { return progress() || wait(); }
    bool progress();
    void advance(TcpMessage& transfer);
    bool spin();
    bool wait();
    bool look(bool is_idle);

    Engine& engine_;
    Call& call_;
    const Look& look_;
    Mismatch* mismatch_;
    std::vector<TcpMessage> transfers_;
    std::vector<TcpMessage*> active_;  // the first unfinished one of each direction
    std::vector<TcpMessage*> last_;    // by direction and peer
    std::vector<int> unfinished_;      // transfers by round
    size_t first_round_ = 0;           // that is not finished
    uint64_t nbytes_ = 0;
    int64_t started_ns_, looked_ns_ = started_ns_, moved_ns_ = started_ns_;
    std::vector<pollfd> polls_;
};

bool Run::take(const Step& step) {
    switch (step.kind) {
        case Kind::round:
            if (!settle(static_cast<size_t>(step.peer) - 1)) return false;
            unfinished_.push_back(0);
            return true;
        case Kind::settle:
            return settle(static_cast<size_t>(step.peer));
        case Kind::send:
        case Kind::recv:
            add(step, step.kind == Kind::send);
            return true;
        case Kind::copy:
            std::memmove(call_.buffers[step.target] + step.to,
                         call_.buffers[step.source] + step.begin, step.nbytes);
            return true;
        case Kind::reduce:
            reduce(step);
            return true;
    }
    return true;
}

void Run::add(const Step& step, bool is_send) {
    int buffer = is_send ? step.source : step.target;
    TcpMessage transfer{is_send,
                        step.peer,
                        call_.buffers[buffer] + (is_send ? step.begin : step.to),
                        step.nbytes,
                        call_.texts[call_.texts.size() > 1 ? buffer : 0],
                        buffer};
    if (unfinished_.empty()) unfinished_.push_back(0);
    transfer.round = static_cast<int>(unfinished_.size()) - 1;
    ++unfinished_.back();
    nbytes_ += step.nbytes;
    transfers_.push_back(transfer);
    TcpMessage*& before = last_[2 * step.peer + is_send];
    if (before != nullptr)
        before->next = &transfers_.back();
    else
        active_.push_back(&transfers_.back());
    before = &transfers_.back();
}

void Run::reduce(const Step& step) {
    size_t size = shm::size_of(call_.dtype);
    shm::Reduce function = shm::find_reduce(call_.dtype, call_.op, engine_.instructions_);
    std::vector<const void*> rows;
    const char* first = call_.buffers.back() + step.begin;
    for (int rank = 0; rank < step.source; ++rank)
        rows.push_back(first + (step.peer + rank) % step.source * step.nbytes);
    function(call_.buffers[step.target] + step.to, rows.data(), step.source, step.nbytes / size,
             call_.op == COMM_AVG ? step.source : 1);
}

// Moves until at most so many rounds are under way.
bool Run::settle(size_t max_rounds) {
    while (true) {
        while (first_round_ < unfinished_.size() && unfinished_[first_round_] == 0) ++first_round_;
        if (unfinished_.size() - first_round_ <= max_rounds) return true;
        if (!proceed()) return false;
    }
}

// Whether anything moved, or no transfer need wait.
bool Run::progress() {
    bool has_moved = false;
    for (size_t i = 0; i < active_.size();) {
        TcpMessage& transfer = *active_[i];
        if (!transfer.must_wait) {
            uint64_t done = transfer.done;
            advance(transfer);
            has_moved |= !transfer.must_wait || transfer.done > done;
        }
        if (!transfer.is_finished) {
            ++i;
            continue;
        }
        --unfinished_[transfer.round];
        if (transfer.next == nullptr) last_[2 * transfer.peer + transfer.is_send] = nullptr;
        active_[i] = transfer.next != nullptr ? transfer.next : active_.back();
        if (transfer.next == nullptr) active_.pop_back();
    }
    if (has_moved) moved_ns_ = shm::now_ns();
    return has_moved;
}

void Run::advance(TcpMessage& transfer) {
    PeerLink& connection = *engine_.connections_[transfer.peer];
    if (transfer.is_send) return connection.send(transfer);
    std::string text;
    connection.receive(transfer, &text);
    if (transfer.is_mismatch && mismatch_->peer < 0)
        *mismatch_ = Mismatch{transfer.peer, transfer.buffer, text, false};
}

// Yields end at the first that another thread takes: who sleeps gets the core back earlier.
bool Run::spin() {
    int64_t start = shm::now_ns(), last = start;
    while (last - start < spin_ns) {
        for (TcpMessage* transfer : active_) transfer->must_wait = false;
        if (progress()) return true;
        sched_yield();
        int64_t now = shm::now_ns();
        if (now - last > shm::contended_yield_ns) break;
        last = now;
    }
    return false;
}

bool Run::wait() {
    if (nbytes_ <= max_spun_nbytes && spin()) return true;
    polls_.clear();
    for (const TcpMessage* transfer : active_)
        polls_.push_back({engine_.connections_[transfer->peer]->fd,
                          static_cast<short>(transfer->is_send ? POLLOUT | POLLRDHUP : POLLIN), 0});
    int count = poll(polls_.data(), polls_.size(), static_cast<int>(engine_.poll_ns_ / 1000000));
    int64_t now = shm::now_ns();
    bool is_due = now - looked_ns_ >= engine_.poll_ns_;
    // A signal that comes often ends each poll(2) before its time.
    if (count <= 0) return look(count == 0 || (is_due && now - moved_ns_ >= engine_.poll_ns_));
    for (size_t i = 0; i < polls_.size(); ++i) active_[i]->must_wait = polls_[i].revents == 0;
    return !is_due || look(false);
}

bool Run::look(bool is_idle) {
    std::vector<int> peers;
    int64_t now = shm::now_ns();
    // Where a signal ended poll(2) the next look is as near as before.
    if (is_idle || now - looked_ns_ >= engine_.poll_ns_) looked_ns_ = now;
    for (const TcpMessage* transfer : active_)
        if (is_idle && std::find(peers.begin(), peers.end(), transfer->peer) == peers.end())
            peers.push_back(transfer->peer);
    return look_(peers, static_cast<double>(now - started_ns_) / 1e9);
}

Engine::Engine(const std::vector<int>& fds, const std::vector<std::string>& keys, int64_t poll_ns)
    : poll_ns_(poll_ns) {
    for (size_t rank = 0; rank < fds.size(); ++rank)
        connections_.push_back(fds[rank] < 0 ? nullptr
                                             : std::make_unique<PeerLink>(static_cast<int>(rank),
                                                                          fds[rank], keys[rank]));
}

bool Engine::run(Call& call, const Look& look, Mismatch* mismatch) {
    for (std::string_view& text : call.texts) text = text.substr(0, longest_text);
    call.buffers.push_back(scratch(call.scratch_nbytes));
    bool is_done = false;
    try {
        is_done = Run(*this, call, look, mismatch).run();
    } catch (const Ended&) {
        if (mismatch->peer < 0) throw;  // else that is the reason
    }
    mismatch->is_whole = is_done;
    if (scratch_nbytes_ > max_kept_scratch) {
        scratch_.reset();
        scratch_nbytes_ = 0;
    }
    return is_done;
}

char* Engine::scratch(size_t nbytes) {
    if (nbytes > scratch_nbytes_) {
        scratch_.reset();  // first, not to need both
        scratch_.reset(new char[nbytes]);
        scratch_nbytes_ = nbytes;
    }
    return scratch_.get();
}

void Engine::announce_end(uint64_t notice, std::string_view text) {
    for (auto& connection : connections_)
        if (connection) connection->announce_end(notice, text);
}

}  // namespace tcp
