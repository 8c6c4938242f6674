#include "packed/packed_weights.h"

#include <algorithm>
#include <vector>

#include "packed/gguf_blocks.h"
#include "system/parallel.h"

// Products and sums are rounded one by one (-ffp-contract=off), so that the numbers are the same
// with any instructions.
#if defined(__x86_64__)
#define ANY_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define ANY_PROCESSOR
#endif

namespace packed {
namespace {

constexpr size_t piece = 1024;                     // numbers at a time
constexpr size_t tile = 64;                        // rows at a time, where integers lie across them
constexpr size_t min_elements_a_thread = 1 << 17;  // less takes no longer than waking a thread

typedef float Vector __attribute__((vector_size(32)));
typedef int32_t Words __attribute__((vector_size(32)));

struct Lanes {  // sums of every eighth product, in two vectors
    Vector even, odd;

    ALWAYS_INLINE void add(const float* values, const float* inputs, size_t count) {
        for (size_t i = 0; i < count; i += 16) {
            Vector a, b, x, y;
            std::memcpy(&a, values + i, sizeof a);
            std::memcpy(&x, inputs + i, sizeof x);
            std::memcpy(&b, values + i + 8, sizeof b);
            std::memcpy(&y, inputs + i + 8, sizeof y);
            even += a * x;
            odd += b * y;
        }
    }
    ALWAYS_INLINE float sum() const {
        float total = 0;
        for (int i = 0; i < 8; i++) total += even[i] + odd[i];
        return total;
    }
};

ALWAYS_INLINE void round_to_bfloat16(float* values, size_t count) {
    for (size_t i = 0; i < count; i++)
        values[i] = shm::float_of(shm::Bfloat16::rounded(values[i]) & 0xffff0000u);
}

ALWAYS_INLINE void write(const Result& result, size_t row, size_t column, const float* values,
                         size_t count) {
    const size_t at = row * result.num_columns + column;
    if (!result.is_bfloat16) {
        std::memcpy(static_cast<float*>(result.out) + at, values, count * sizeof *values);
        return;
    }
    auto out = static_cast<uint16_t*>(result.out) + at;
    for (size_t i = 0; i < count; i++) out[i] = shm::Bfloat16::narrow(values[i]);
}

template <class Block>
ALWAYS_INLINE void unpack_rows(const BlockRows& weight, const Result& result, size_t first,
                               size_t end) {
    alignas(64) float values[piece];
    for (size_t row = first; row < end; row++) {
        const uint8_t* block = weight.blocks + weight.order[row] * weight.row_nbytes;
        Lanes lanes[max_inputs] = {};
        for (size_t column = 0; column < result.num_columns; column += piece) {
            const size_t count = std::min(piece, result.num_columns - column);
            for (size_t i = 0; i < count; i += Block::num_elements, block += Block::nbytes)
                Block::unpack(block, values + i);
            if (result.inputs == nullptr) {
                write(result, row, column, values, count);
                continue;
            }
            if (result.is_bfloat16) round_to_bfloat16(values, count);
            for (size_t i = 0; i < result.num_inputs; i++)
                lanes[i].add(values, result.inputs + i * result.num_columns + column, count);
        }
        if (result.inputs == nullptr) continue;
        for (size_t i = 0; i < result.num_inputs; i++)
            static_cast<float*>(result.out)[i * result.num_rows + row] = lanes[i].sum();
    }
}

ANY_PROCESSOR void unpack_range(const BlockRows& weight, const Result& result, size_t first,
                                size_t end) {
    switch (weight.kind) {
        case 2:
            return unpack_rows<Q4_0>(weight, result, first, end);
        case 8:
            return unpack_rows<Q8_0>(weight, result, first, end);
        case 10:
            return unpack_rows<Q2_K>(weight, result, first, end);
        case 11:
            return unpack_rows<Q3_K>(weight, result, first, end);
        case 12:
            return unpack_rows<Q4_K>(weight, result, first, end);
        case 13:
            return unpack_rows<Q5_K>(weight, result, first, end);
        case 14:
            return unpack_rows<Q6_K>(weight, result, first, end);
    }
}

// The integers of some rows of one column, as floats.
ALWAYS_INLINE void unpack_column(const Integers& weight, size_t num_rows, size_t column,
                                 size_t first, size_t count, float* values) {
    const size_t per_word = 32 / weight.num_bits;
    const uint32_t mask = (1u << weight.num_bits) - 1;
    if (!weight.is_packed_by_rows) {
        const uint32_t* words = weight.words + column / per_word * num_rows + first;
        const unsigned shift = column % per_word * weight.num_bits;
        for (size_t i = 0; i < count; i++)
            values[i] = static_cast<float>(static_cast<int>(words[i] >> shift & mask));
        return;
    }
    const uint32_t* words = weight.words + (column * num_rows + first) / 8;  // 4 bits each
    Words shifts = {};
    for (int i = 0; i < 8; i++) shifts[i] = weight.shifts[i];
    for (size_t i = 0; i < count / 8; i++) {
        const Words word = Words{} + static_cast<int32_t>(words[i]);
        const Vector numbers = __builtin_convertvector(word >> shifts & 15, Vector);
        std::memcpy(values + 8 * i, &numbers, sizeof numbers);
    }
}

ANY_PROCESSOR void unpack_range(const Integers& weight, const Result& result, size_t first,
                                size_t end) {
    const size_t per_word = 32 / weight.num_bits, words_a_group = result.num_rows / per_word;
    const uint32_t mask = (1u << weight.num_bits) - 1;
    std::vector<float> zeros(weight.num_groups * tile);
    alignas(64) float values[tile][tile];  // by column
    for (size_t row = first; row < end; row += tile) {
        const size_t count = std::min(tile, end - row);
        for (size_t group = 0; group < weight.num_groups; group++)
            for (size_t i = 0; i < count; i++) {
                const size_t at = row + i;
                const uint32_t word = weight.zeros[group * words_a_group + at / per_word];
                const uint32_t zero = (word + weight.zero_shift) >> weight.shifts[at % per_word];
                zeros[group * tile + i] = static_cast<float>(zero & mask);
            }
        float sums[max_inputs][tile] = {};
        for (size_t column = 0; column < result.num_columns; column += tile) {
            const size_t width = std::min(tile, result.num_columns - column);
            for (size_t j = 0; j < width; j++) {
                float* numbers = values[j];
                const size_t group = weight.groups[column + j];
                const float* scales = weight.scales + group * result.num_rows + row;
                unpack_column(weight, result.num_rows, column + j, row, count, numbers);
                for (size_t i = 0; i < count; i++)
                    numbers[i] = (numbers[i] - zeros[group * tile + i]) * scales[i];
                if (result.inputs == nullptr) continue;
                if (result.is_bfloat16) round_to_bfloat16(numbers, count);
                for (size_t k = 0; k < result.num_inputs; k++) {
                    const float input = result.inputs[k * result.num_columns + column + j];
                    for (size_t i = 0; i < count; i++) sums[k][i] += numbers[i] * input;
                }
            }
            if (result.inputs != nullptr) continue;
            for (size_t i = 0; i < count; i++) {
                float across[tile];
                for (size_t j = 0; j < width; j++) across[j] = values[j][i];
                write(result, row + i, column, across, width);
            }
        }
        if (result.inputs == nullptr) continue;
        for (size_t k = 0; k < result.num_inputs; k++)
            std::copy_n(sums[k], count,
                        static_cast<float*>(result.out) + k * result.num_rows + row);
    }
}

template <class Weight>
void share_rows(const Weight& weight, const Result& result, size_t num_threads, size_t step) {
    const size_t most = result.num_rows * result.num_columns / min_elements_a_thread;
    auto work = [&](size_t first, size_t end) { unpack_range(weight, result, first, end); };
    parallel::for_ranges(result.num_rows, step, most, num_threads, work);
}

}  // namespace

bool unpack(const BlockRows& weight, const Result& result, size_t num_threads) {
    const int kinds[] = {2, 8, 10, 11, 12, 13, 14};
    if (std::find(std::begin(kinds), std::end(kinds), weight.kind) == std::end(kinds)) return false;
    share_rows(weight, result, num_threads, 1);
    return true;
}

void unpack(const Integers& weight, const Result& result, size_t num_threads) {
    share_rows(weight, result, num_threads, tile);
}

}  // namespace packed
