// Collectives over connections as steps of an engine: copies, transfers by rounds, reductions.
//
// Pure functions of the rank, the number of ranks and the size, so that all ranks agree without a
// message. A sum is never taken on the way: every rank that adds has all parts, and adds them in
// order of rank, so the bits depend neither on the schedule nor on who adds.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "tcp/engine.h"

namespace tcp {

// The buffers of a program: the call's tensor, its result, and room for rows of the ranks.
enum Buffer : int32_t { tensor_buffer, out_buffer, scratch_buffer };

// Elements begin to end of a flat tensor; none, and no message, if begin is behind end.
struct Slice {
    int64_t begin, end;
    int64_t numel() const { return end - begin; }
};

struct StepProgram {
    std::vector<Step> steps;
    uint64_t scratch_nbytes = 0;
};

// Some ranks, of which the program is for one. peers: what the engine calls each of them.
struct ProgramRanks {
    int rank, size;
    const int32_t* peers;
    int64_t itemsize;  // of the elements that are moved
};

// A collective by its name, on tensors of `numel` elements. root: src or dst. False for another
// name.
bool collective(std::string_view name, const ProgramRanks& ranks, int64_t numel, int root,
                StepProgram* program);
// Sends source[sends[r]] to each other rank r, and receives target[recvs[r]] from it.
StepProgram exchange(const ProgramRanks& ranks, const Slice* sends, const Slice* recvs,
                     int32_t source, int32_t target);

}  // namespace tcp
