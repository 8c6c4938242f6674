// The shared segment: created by rank 0, mapped by all, without a name that could leak.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "abi/communicator.h"
#include "plugin/failure.h"
#include "shm/layout.h"

namespace shm {

using plugin::PluginError;

// The Coordinator's callbacks, typed.
class Bootstrap {
  public:
    Bootstrap(const comm_bootstrap* callbacks, int rank, int nranks)
        : callbacks_(callbacks), rank(rank), nranks(nranks) {}
    // Collective. Blocks until every rank has called it.
    void allgather(const void* send, void* recv, size_t bytes_per_rank) const;

  private:
    const comm_bootstrap* callbacks_;

  public:
    const int rank;
    const int nranks;
};

class Segment {
  public:
    Segment() = default;
    // Collective. Throws PluginError on every rank if any rank cannot map the segment, or has
    // another version. invalid: why this rank cannot go on, thrown here. notes: one of each rank,
    // the own filled in.
    Segment(const Bootstrap& bootstrap, const PluginError* invalid, std::vector<int32_t>& notes);
    ~Segment();
    Segment& operator=(Segment&& other) noexcept;

    RankBlock& block(int rank) const;
    Channel& channel(int src, int dst) const;
    char* slot(int writer, unsigned parity) const;
    char* chunk(int src, int dst, uint32_t index) const;
    Stream& stream(int src, int dst) const;
    char* stream_data(int src, int dst) const;
    const Layout& layout() const { return layout_; }
    // Whether all ranks together may use fewer cores than there are ranks.
    bool is_oversubscribed() const { return oversubscribed_; }

  private:
    char* base_ = nullptr;
    Layout layout_;
    bool oversubscribed_ = false;
};

// Fills in this process, as its peers will look for it.
void publish_identity(Identity& own);
// Whether the process behind `peer` has ended, as far as this process can see it.
bool has_died(const Identity& peer, const Identity& own);

}  // namespace shm
