// Which algorithm, and which rank does what: pure functions of numbers that all ranks share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace shm {

enum class AllreduceAlgorithm { one_shot, two_shot };

// One shot reads (n - 1) S of the peers in one step, two shots about 2 S in two. For two ranks one
// shot is never more, and takes one step a round.
inline AllreduceAlgorithm choose_allreduce(uint64_t nbytes, int nranks, size_t slot_bytes) {
    if (nranks == 2) return AllreduceAlgorithm::one_shot;
    uint64_t limit = std::min<uint64_t>((128u << 10) / nranks, slot_bytes);
    return nbytes <= limit ? AllreduceAlgorithm::one_shot : AllreduceAlgorithm::two_shot;
}

// Below this, staging costs less than the second step that reducing in place takes.
constexpr size_t min_in_place_bytes = 16 << 10;

struct Piece {
    uint64_t first;
    uint64_t count;
    uint64_t end() const { return first + count; }
};

// `count` elements divided into one piece per rank, at the edges of cache lines; the last pieces
// may be empty.
class Pieces {
  public:
    Pieces(uint64_t count, int nranks, size_t size) : count_(count) {
        uint64_t line_elements = 64 / size;
        uint64_t even = (count + nranks - 1) / nranks;
        step_ = (even + line_elements - 1) / line_elements * line_elements;
    }
    Piece of(int rank) const {
        uint64_t first = std::min(rank * step_, count_);
        return {first, std::min(step_, count_ - first)};
    }

  private:
    uint64_t count_;
    uint64_t step_;
};

// The part of a slot for each rank, whole cache lines.
inline size_t piece_bytes(size_t slot_bytes, int nranks) { return slot_bytes / nranks / 64 * 64; }

}  // namespace shm
