// The product of one row of numbers with a matrix, as fast as memory gives the matrix.
#pragma once

#include <cstddef>

namespace products {

// out = weight x + bias, all float or, if is_bfloat16, bfloat16. weight: [num_rows, num_columns],
// num_columns a multiple of 32; x: [num_columns]; bias: [num_rows] or nullptr. Sums are in float,
// and do not depend on the number of threads.
struct OneRow {
    bool is_bfloat16;
    const void *weight, *x, *bias;
    void* out;
    size_t num_rows, num_columns;
};

void multiply(const OneRow& product, size_t num_threads);

}  // namespace products
