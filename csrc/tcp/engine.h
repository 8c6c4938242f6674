// Runs the steps of a call over connections: transfers by rounds, copies and reductions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "reduce/reduce.h"
#include "tcp/connection.h"

namespace tcp {

enum class Kind : int32_t { copy, send, recv, round, reduce, settle };

// As programs.cpp makes it, and communicator/backends/scheduled_collectives.py reads it. Places and
// sizes are in bytes. `source` and `target` are numbers of buffers.
//   copy    nbytes of source from `begin` on into target from `to` on
//   send    nbytes of source from `begin` on to rank `peer`
//   recv    nbytes of target from `to` on from rank `peer`
//   round   begins a round once fewer than `peer` rounds are under way
//   reduce  `source` rows of nbytes in the last buffer from `begin` on, in order of rank, into
//   target
//           from `to` on; row `peer` is rank 0's
//   settle  goes on once at most `peer` rounds are under way
struct Step {
    Kind kind;
    int32_t peer;
    int32_t source;
    int32_t target;
    uint64_t begin;
    uint64_t to;
    uint64_t nbytes;
};

struct Call {
    const Step* steps;
    size_t num_steps;
    std::vector<char*> buffers;
    std::vector<std::string_view> texts;  // one for all messages, or one for each buffer
    size_t scratch_nbytes;                // of one more buffer
    comm_dtype dtype;
    comm_op op;
};

// A message that was not what was expected, and was dropped. is_whole: the call's messages have all
// moved; else the next ones would be read from the middle.
struct Mismatch {
    int peer = -1;
    int buffer = 0;
    std::string text;
    bool is_whole = false;
};

// Called every poll_ns of a call, with the ranks that it waits for if nothing moved meanwhile:
// whether the call goes on.
using Look = std::function<bool(const std::vector<int>& idle_peers, double waited_s)>;

// Two calls at the same time must not use the same direction of a connection, nor scratch.
class Engine {
  public:
    // fds: by rank, -1 for none. They stay the caller's. keys: by rank, of encrypted connections.
    Engine(const std::vector<int>& fds, const std::vector<std::string>& keys, int64_t poll_ns);

    // False if `look` ended the call. Throws Ended, unless there was a mismatch before.
    bool run(Call& call, const Look& look, Mismatch* mismatch);
    void announce_end(uint64_t notice, std::string_view text);

  private:
    friend class Run;
    char* scratch(size_t nbytes);

    std::vector<std::unique_ptr<PeerLink>> connections_;  // by rank
    const int64_t poll_ns_;
    const shm::Instructions instructions_ = shm::best_instructions();
    std::unique_ptr<char[]> scratch_;
    size_t scratch_nbytes_ = 0;
};

}  // namespace tcp
