// Which algorithm, and which rank does what: pure functions of numbers that all ranks share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>

namespace shm {

enum class AllreduceAlgorithm { one_shot, two_shot };

// One shot reads (n - 1) S of the peers in one step, two shots about 2 S in two. For two ranks one
// shot is never more, and only it may be staged a round ahead: with more ranks, a slower one may
// still read the slot.
inline AllreduceAlgorithm choose_allreduce(uint64_t nbytes, int nranks, size_t slot_bytes) {
    if (nranks == 2) return AllreduceAlgorithm::one_shot;
    uint64_t limit = std::min<uint64_t>((128u << 10) / nranks, slot_bytes);
    return nbytes <= limit ? AllreduceAlgorithm::one_shot : AllreduceAlgorithm::two_shot;
}

// Below this, staging costs less than the second step that reducing in place takes.
constexpr size_t min_in_place_bytes = 16 << 10;

// From this on, what a rank needs next lies in memory, and not in a cache.
constexpr size_t min_prefetch_bytes = 4 << 20;

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

// What every rank contributes, one after the other: `counts` elements, or `even` if it is NULL.
class Parts {
  public:
    Parts(uint64_t even) : even_(even), longest_(even) {}
    Parts(const uint64_t* counts, int nranks) : counts_(counts) {
        for (int rank = 0; rank < nranks; ++rank) longest_ = std::max(longest_, counts[rank]);
    }
    uint64_t longest() const { return longest_; }
    // At most `limit` elements of a rank, from its `first` one on.
    Piece of(int rank, uint64_t first, uint64_t limit) const {
        uint64_t start = rank * even_, count = counts_ == nullptr ? even_ : counts_[rank];
        if (counts_ != nullptr) start = std::accumulate(counts_, counts_ + rank, start);
        first = std::min(first, count);
        return {start + first, std::min(limit, count - first)};
    }

  private:
    const uint64_t* counts_ = nullptr;
    uint64_t even_ = 0;
    uint64_t longest_ = 0;
};

// The part of a slot for each rank, whole cache lines.
inline size_t piece_bytes(size_t slot_bytes, int nranks) { return slot_bytes / nranks / 64 * 64; }

}  // namespace shm
