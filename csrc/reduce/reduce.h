// Element-wise reduction of the operands of all ranks, in order of rank.
#pragma once

#include <cstddef>

#include "abi/communicator.h"

namespace shm {

// out[i] = sources[0][i] op sources[1][i] op ..., divided by `divisor`. `out` may be one of the
// sources.
using Reduce = void (*)(void* out, const void* const* sources, int num_sources, size_t count,
                        int divisor);

enum class Instructions { plain, avx2, avx512 };

// The widest that this processor supports.
Instructions best_instructions();
// By name. False if there are none of that name, or this processor does not support them.
bool find_instructions(const char* name, Instructions* instructions);

// nullptr where the operation is not defined for the type. The result has the same bits with any
// instructions, except those of a float16's NaN.
Reduce find_reduce(comm_dtype dtype, comm_op op, Instructions instructions);

// Bytes of an element; 0 for an unknown dtype.
size_t size_of(comm_dtype dtype);
const char* name_of_dtype(comm_dtype dtype);
const char* name_of_op(comm_op op);

// memcpy past the caches, for data that another core reads next and this one does not.
void copy_streaming(void* to, const void* from, size_t nbytes);

}  // namespace shm
