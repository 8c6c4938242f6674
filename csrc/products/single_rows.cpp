#include "products/single_rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "reduce/codec.h"
#include "system/parallel.h"

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace products {
namespace {

constexpr size_t width = 16;                  // numbers of a vector
constexpr size_t pair = 2 * width;            // numbers that are loaded at a time
constexpr size_t nbytes_a_thread = 64 << 10;  // waking a thread takes as long as reading less

typedef float Vector __attribute__((vector_size(4 * width)));
typedef uint32_t Bits __attribute__((vector_size(4 * width)));

struct Pair {
    Vector first, second;

    ALWAYS_INLINE explicit Pair(const float* from) {
        std::memcpy(&first, from, sizeof first);
        std::memcpy(&second, from + width, sizeof second);
    }
    // Numbers at even places, and those at odd ones: both lie in words as the upper half of a float
    // does, or one shift away.
    ALWAYS_INLINE explicit Pair(const uint16_t* from) {
        Bits words;
        std::memcpy(&words, from, sizeof words);
        const Bits even = words << 16, odd = words & 0xffff0000u;
        std::memcpy(&first, &even, sizeof first);
        std::memcpy(&second, &odd, sizeof second);
    }
};

// An addition takes four cycles: one sum would wait for itself, where four do not.
struct Sums {
    Vector first = {}, second = {};

    ALWAYS_INLINE void add(const Pair& values, const Pair& x) {
        first += values.first * x.first;
        second += values.second * x.second;
    }
};

// x: in the order in which Pair has the numbers of a row.
template <class Stored>
ALWAYS_INLINE float sum_of_products(const Stored* row, const float* x, size_t count) {
    Sums even, odd;
    size_t i = 0;
    for (; i + 2 * pair <= count; i += 2 * pair) {
        even.add(Pair(row + i), Pair(x + i));
        odd.add(Pair(row + i + pair), Pair(x + i + pair));
    }
    if (i < count) even.add(Pair(row + i), Pair(x + i));
    const Vector all = (even.first + even.second) + (odd.first + odd.second);
    float parts[width];
    std::memcpy(parts, &all, sizeof parts);
    for (size_t half = width / 2; half > 0; half /= 2)
        for (size_t j = 0; j < half; j++) parts[j] += parts[j + half];
    return parts[0];
}

// Rows of all products, counted through: [first, end).
template <class Codec>
ALWAYS_INLINE void multiply_range(const SingleRows& product, const float* x, size_t first,
                                  size_t end) {
    using Stored = typename Codec::Stored;
    auto weight = static_cast<const Stored*>(product.weight);
    auto bias = static_cast<const Stored*>(product.bias);
    auto out = static_cast<Stored*>(product.out);
    const size_t count = product.num_columns, num_rows = product.num_rows;
    for (size_t i = first, which = first / num_rows; i < end; which++) {
        const Stored* matrix = weight + product.numbers[which] * num_rows * count;
        const float* input = x + which * count;
        size_t row = i - which * num_rows;
        for (; row < num_rows && i < end; row++, i++) {
            float sum = sum_of_products(matrix + row * count, input, count);
            if (bias) sum += Codec::widen(bias[row]);
            out[i] = Codec::narrow(sum);
        }
    }
}

ALWAYS_INLINE void multiply_any(const SingleRows& product, const float* x, size_t first,
                                size_t end) {
    if (product.is_bfloat16)
        multiply_range<shm::Bfloat16>(product, x, first, end);
    else
        multiply_range<shm::Native<float>>(product, x, first, end);
}

using Multiply = void (*)(const SingleRows&, const float*, size_t, size_t);

void multiply_plain(const SingleRows& product, const float* x, size_t first, size_t end) {
    multiply_any(product, x, first, end);
}

// Not by target_clones: those for FMA ask the compiler's library for what an old one does not know.
#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void multiply_avx2(const SingleRows& product, const float* x,
                                                       size_t first, size_t end) {
    multiply_any(product, x, first, end);
}

__attribute__((target("avx512f,fma,prefer-vector-width=512"))) void multiply_avx512(
    const SingleRows& product, const float* x, size_t first, size_t end) {
    multiply_any(product, x, first, end);
}
#endif

Multiply of_this_processor() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return multiply_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return multiply_avx2;
#endif
    return multiply_plain;
}

// In the order of Pair.
std::vector<float> widened(const uint16_t* x, size_t count) {
    std::vector<float> floats(count);
    for (size_t i = 0; i < count; i++)
        floats[i / pair * pair + i % 2 * width + i % pair / 2] = shm::Bfloat16::widen(x[i]);
    return floats;
}

}  // namespace

void multiply(const SingleRows& product, size_t num_threads) {
    std::vector<float> floats;
    auto x = static_cast<const float*>(product.x);
    const size_t count = product.numbers.size(), num_rows = count * product.num_rows;
    if (product.is_bfloat16) {
        floats = widened(static_cast<const uint16_t*>(product.x), count * product.num_columns);
        x = floats.data();
    }
    const size_t itemsize = product.is_bfloat16 ? sizeof(uint16_t) : sizeof(float);
    const size_t most = num_rows * product.num_columns * itemsize / nbytes_a_thread;
    static const Multiply multiply_rows = of_this_processor();
    auto work = [&](size_t first, size_t end) { multiply_rows(product, x, first, end); };
    parallel::for_ranges(num_rows, 1, most, num_threads, work);
}

}  // namespace products
