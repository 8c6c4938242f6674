// Float16 to float32 and back by instructions of the processor: the same bits as Float16 of
// reduce/codec.h, except those of a NaN, and faster.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shm {

#if defined(__x86_64__)
// Needs F16C, which every processor with AVX2 has.
void widen_halves_avx2(float* to, const uint16_t* from, size_t count);
void narrow_halves_avx2(uint16_t* to, const float* from, size_t count);
// Needs AVX-512F.
void widen_halves_avx512(float* to, const uint16_t* from, size_t count);
void narrow_halves_avx512(uint16_t* to, const float* from, size_t count);
#endif

}  // namespace shm
