// Tensors that live in shared memory from the start. Each has a region of its own, which its owner
// allocates and the peers map when they first need it.
#pragma once

#include <cstdint>
#include <vector>

#include "shm/layout.h"
#include "shm/segment.h"

namespace shm {

class TensorMemory {
  public:
    explicit TensorMemory(const Segment& segment, int rank) : segment_(segment), rank_(rank) {}
    // Unmaps the peers' regions. Own regions that were not freed stay: tensors may still use them.
    ~TensorMemory();
    TensorMemory(const TensorMemory&) = delete;
    TensorMemory& operator=(const TensorMemory&) = delete;

    void* allocate(size_t nbytes);
    void free(void* pointer);
    // A number by which peers find these bytes (place of the region and offset); 0 if they are not
    // in a region of this rank.
    uint64_t reference(const void* pointer, size_t nbytes) const;
    // The bytes that `reference` of that rank means. Maps its region at the first use.
    char* resolve(int rank, uint64_t reference);

  private:
    struct Mapping {
        uint64_t id;
        char* base;
        size_t nbytes;
    };
    char* attach(int rank, uint64_t place);

    const Segment& segment_;
    const int rank_;
    uint64_t last_id_ = 0;
    std::vector<Mapping> own_mappings_;
    std::vector<std::vector<Mapping>> peer_mappings_;  // by rank and index of its region
};

}  // namespace shm
