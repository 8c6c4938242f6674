// Tensors that live in shared memory from the start: each in a memory of its own, which its owner
// makes and the others attach to when they first meet it.
#pragma once

#include <cstdint>
#include <vector>

#include "shm/layout.h"
#include "shm/segment.h"

namespace shm {

class Memory {
  public:
    explicit Memory(const Segment& segment, int rank) : segment_(segment), rank_(rank) {}
    // Gives back what was attached. What was allocated and not freed stays: tensors may still use
    // it.
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    void* allocate(size_t nbytes);
    void free(void* pointer);
    // A number by which the other ranks find these bytes; 0 if they are not in shared memory.
    uint64_t where(const void* pointer, size_t nbytes) const;
    // The bytes that `where` of that rank means.
    char* at(int rank, uint64_t where);

  private:
    struct Mapping {
        uint32_t id;
        char* base;
        size_t nbytes;
    };
    char* attach(int rank, uint32_t id);

    const Segment& segment_;
    const int rank_;
    uint32_t last_id_ = 0;
    std::vector<Mapping> own_;
    std::vector<std::vector<Mapping>> theirs_;  // by rank and entry of its table
};

}  // namespace shm
