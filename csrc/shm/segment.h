// The shared segment: made by rank 0, attached by all, gone by itself.
#pragma once

#include <cstdint>
#include <string>

#include "abi/communicator.h"
#include "shm/layout.h"

namespace shm {

struct Failure {
    comm_result code;
    std::string text;
};

// The Coordinator's callbacks, typed.
class Bootstrap {
  public:
    Bootstrap(const comm_bootstrap* callbacks, int rank, int nranks)
        : callbacks_(callbacks), rank(rank), nranks(nranks) {}
    void allgather(const void* mine, void* everyones, size_t bytes_per_rank) const;

  private:
    const comm_bootstrap* callbacks_;

  public:
    const int rank;
    const int nranks;
};

class Segment {
  public:
    Segment() = default;
    // Collective. Throws Failure on every rank if any rank cannot attach.
    Segment(const Bootstrap& bootstrap, const Layout& layout);
    ~Segment();
    Segment(Segment&& other) noexcept;
    Segment& operator=(Segment&& other) noexcept;

    RankBlock& block(int rank) const;
    Lane& lane(int src, int dst) const;
    char* slot(int writer, unsigned parity) const;
    char* letter(int src, int dst, uint32_t index) const;
    const Layout& layout() const { return layout_; }

  private:
    char* base_ = nullptr;
    Layout layout_;
};

// This process, as its peers will look for it.
void introduce(Identity& mine);
// Whether the process behind it has ended, as far as can be known from here.
bool has_died(const Identity& peer, const Identity& mine);
// Whether the cores that all ranks together may use are fewer than the ranks.
bool are_oversubscribed(const Bootstrap& bootstrap);

}  // namespace shm
