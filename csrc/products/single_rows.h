// Products of single rows of numbers with matrices, as fast as memory gives the matrices.
#pragma once

#include <cstddef>
#include <vector>

namespace products {

// out[i] = weight[numbers[i]] x[i] + bias, all float or, if is_bfloat16, bfloat16.
// weight: [any, num_rows, num_columns], num_columns a multiple of 32; x: [count, num_columns];
// bias: [num_rows] or nullptr; out: [count, num_rows]. Sums are in float, and do not depend on the
// number of threads.
struct SingleRows {
    bool is_bfloat16;
    const void *weight, *x, *bias;
    void* out;
    size_t num_rows, num_columns;
    std::vector<size_t> numbers;
};

void multiply(const SingleRows& product, size_t num_threads);

}  // namespace products
