// Weights that are kept in few bits: their numbers, or their product with a few inputs.
//
// A weight has rows (outputs of a layer) and columns (inputs). Its numbers are made in pieces that
// stay in the nearest cache, so that a product reads the packed bytes and no others.
#pragma once

#include <cstddef>
#include <cstdint>

namespace packed {

constexpr size_t max_inputs = 8;

// What becomes of the numbers, which are rounded to bfloat16 if `is_bfloat16`.
// inputs == nullptr: they are written, [num_rows, num_columns], as bfloat16 or float.
// Otherwise inputs is [num_inputs, num_columns], at most max_inputs of them, and out is float,
// [num_inputs, num_rows].
struct Result {
    const float* inputs;
    size_t num_inputs;
    void* out;
    bool is_bfloat16;
    size_t num_rows, num_columns;
};

// kind: ggml's number of a type. order: for each row, its number in the file.
struct BlockRows {
    int kind;
    const uint8_t* blocks;
    size_t row_nbytes;
    const int64_t* order;
};

// Integers of GPTQ and AWQ, [columns, rows], packed into words along the columns or the rows, and
// zeros and scales, [num_groups, rows], of which the zeros are packed along the rows.
// shifts: of each integer in its word, in bits. groups: for each column. zero_shift: what is added
// to each word of zeros.
struct Integers {
    const uint32_t *words, *zeros;
    const float* scales;
    const int64_t* groups;
    size_t num_groups;
    unsigned num_bits;
    bool is_packed_by_rows;
    const uint8_t* shifts;
    unsigned zero_shift;
};

// False for a kind that is not known.
bool unpack(const BlockRows& weight, const Result& result, size_t num_threads);
void unpack(const Integers& weight, const Result& result, size_t num_threads);

}  // namespace packed
