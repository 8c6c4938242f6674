// How NCCL carries each element type of communicator.h.
#pragma once

#include <stdint.h>

#include "abi/communicator.h"
#include "nccl/library.h"

struct Carried {
    NcclDtype dtype;
    uint64_t count;
};

// To be moved as it is. What NCCL does not know travels as bytes, and so do the 8-bit floats, for
// which some libraries and chips lack kernels that copies do not need.
inline Carried as_moved(comm_dtype dtype, uint64_t count) {
    switch (dtype) {
        case COMM_BOOL:
        case COMM_FLOAT8_E4M3:
        case COMM_FLOAT8_E5M2:
            return {COMM_UINT8, count};
        case COMM_INT16:
            return {COMM_UINT8, 2 * count};
        default:
            return {dtype, count};
    }
}

inline uint32_t size_of(comm_dtype dtype) {
    static const uint8_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    if (dtype <= COMM_FLOAT8_E5M2) return sizes[dtype];
    return dtype == COMM_INT16 ? 2 : 1;
}

inline bool is_float8(comm_dtype dtype) {
    return dtype == COMM_FLOAT8_E4M3 || dtype == COMM_FLOAT8_E5M2;
}

// A bool is a byte of 0 or 1: max is "any", min and prod are "all".
inline NcclOp bool_op(comm_op op) { return op == COMM_PROD ? COMM_MIN : op; }
