// The product of one row of numbers with a matrix, as fast as memory gives the matrix.
#pragma once

#include <cstddef>

namespace products {

enum class Element { float32, bfloat16 };

// out = weight x + bias. weight: [num_rows, num_columns], num_columns a multiple of 32; x:
// [num_columns]; bias: [num_rows] or nullptr. Sums are in float32, and do not depend on the number
// of threads.
struct OneRow {
    const void *weight, *x, *bias;
    void* out;
    size_t num_rows, num_columns;
};

void multiply(Element element, const OneRow& product, size_t num_threads);

}  // namespace products
