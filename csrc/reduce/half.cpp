#include "reduce/half.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

namespace shm {
namespace {

constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
constexpr __mmask16 all_lanes = 0xffff;  // without a mask, GCC 12 warns in its own header

// Converts the last elements in a whole vector, so that a number becomes the same bits at any
// position.
template <size_t width, class To, class From, class Convert>
inline void convert_rest(To* to, const From* from, size_t count, Convert convert) {
    if (count == 0) return;
    From padded[width] = {};
    To converted[width];
    std::memcpy(padded, from, count * sizeof(From));
    convert(converted, padded, width);
    std::memcpy(to, converted, count * sizeof(To));
}

}  // namespace

__attribute__((target("avx2,f16c"))) void widen_halves_avx2(float* to, const uint16_t* from,
                                                            size_t count) {
    size_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(
            to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
    convert_rest<8>(to + i, from + i, count - i, widen_halves_avx2);
}

__attribute__((target("avx2,f16c"))) void narrow_halves_avx2(uint16_t* to, const float* from,
                                                             size_t count) {
    size_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(from + i), nearest));
    convert_rest<8>(to + i, from + i, count - i, narrow_halves_avx2);
}

__attribute__((target("avx512f"))) void widen_halves_avx512(float* to, const uint16_t* from,
                                                            size_t count) {
    size_t i = 0;
    for (; i + 16 <= count; i += 16)
        _mm512_storeu_ps(
            to + i, _mm512_maskz_cvtph_ps(
                        all_lanes, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i))));
    convert_rest<16>(to + i, from + i, count - i, widen_halves_avx512);
}

__attribute__((target("avx512f"))) void narrow_halves_avx512(uint16_t* to, const float* from,
                                                             size_t count) {
    size_t i = 0;
    for (; i + 16 <= count; i += 16)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i),
                            _mm512_maskz_cvtps_ph(all_lanes, _mm512_loadu_ps(from + i), nearest));
    convert_rest<16>(to + i, from + i, count - i, narrow_halves_avx512);
}

}  // namespace shm
#endif
