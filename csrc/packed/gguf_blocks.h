// Blocks of GGUF as numbers: the layouts of ggml
// (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h), with the steps in the order in
// which the library gguf takes them, so that the numbers are the same to the bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "reduce/codec.h"

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace packed {

ALWAYS_INLINE float half_at(const uint8_t* bytes) {
    uint16_t bits;
    std::memcpy(&bits, bytes, sizeof bits);
    return shm::Float16::widen(bits);
}

// The 6-bit scales of the eight sub-blocks of a block, times d, and what is subtracted.
struct ScalesAndLows {
    float scales[8], lows[8];

    ALWAYS_INLINE ScalesAndLows(float d, float dmin, const uint8_t* bytes) {
        for (int i = 0; i < 4; i++) {
            const uint8_t rest = bytes[i + 8];
            scales[i] = d * static_cast<float>(bytes[i] & 63);
            lows[i] = dmin * static_cast<float>(bytes[i + 4] & 63);
            scales[i + 4] = d * static_cast<float>((rest & 15) | (bytes[i] >> 2 & 48));
            lows[i + 4] = dmin * static_cast<float>((rest >> 4) | (bytes[i + 4] >> 2 & 48));
        }
    }
};

struct Q4_0 {
    static constexpr size_t num_elements = 32, nbytes = 18;
    ALWAYS_INLINE static void unpack(const uint8_t* block, float* out) {
        const float d = half_at(block);
        for (int i = 0; i < 16; i++) out[i] = d * static_cast<float>((block[2 + i] & 15) - 8);
        for (int i = 0; i < 16; i++) out[16 + i] = d * static_cast<float>((block[2 + i] >> 4) - 8);
    }
};

struct Q8_0 {
    static constexpr size_t num_elements = 32, nbytes = 34;
    ALWAYS_INLINE static void unpack(const uint8_t* block, float* out) {
        const float d = half_at(block);
        for (int i = 0; i < 32; i++)
            out[i] = static_cast<float>(static_cast<int8_t>(block[2 + i])) * d;
    }
};

struct Q2_K {
    static constexpr size_t num_elements = 256, nbytes = 84;
    ALWAYS_INLINE static void unpack(const uint8_t* block, float* out) {
        const float d = half_at(block + 80), dmin = half_at(block + 82);
        for (int i = 0; i < 16; i++) {  // 16 elements each
            const uint8_t* bytes = block + 16 + i / 8 * 32 + i % 2 * 16;
            const int shift = i % 8 / 2 * 2;
            const float scale = d * static_cast<float>(block[i] & 15);
            const float low = dmin * static_cast<float>(block[i] >> 4);
            for (int j = 0; j < 16; j++)
                out[16 * i + j] = static_cast<float>(bytes[j] >> shift & 3) * scale - low;
        }
    }
};

struct Q3_K {
    static constexpr size_t num_elements = 256, nbytes = 110;
    ALWAYS_INLINE static void unpack(const uint8_t* block, float* out) {
        const uint8_t* packed = block + 96;
        const float d = half_at(block + 108);
        for (int i = 0; i < 16; i++) {
            const int low = packed[i % 8] >> i / 8 * 4 & 15;
            const int high = packed[8 + i % 4] >> i / 4 * 2 & 3;
            const float scale = d * static_cast<float>((low | high << 4) - 32);
            const uint8_t* bytes = block + 32 + i / 8 * 32 + i % 2 * 16;
            const uint8_t* masks = block + i % 2 * 16;
            const int shift = i % 8 / 2 * 2;
            for (int j = 0; j < 16; j++) {
                const int value = (bytes[j] >> shift & 3) | (masks[j] >> i / 2 & 1) << 2;
                out[16 * i + j] = static_cast<float>(value - 4) * scale;
            }
        }
    }
};

struct Q4_K {
    static constexpr size_t num_elements = 256, nbytes = 144;
    ALWAYS_INLINE static void unpack(const uint8_t* block, float* out) {
        const ScalesAndLows of(half_at(block), half_at(block + 2), block + 4);
        for (int i = 0; i < 8; i++) {
            const uint8_t* bytes = block + 16 + i / 2 * 32;
            const int shift = i % 2 * 4;
            for (int j = 0; j < 32; j++)
                out[32 * i + j] =
                    static_cast<float>(bytes[j] >> shift & 15) * of.scales[i] - of.lows[i];
        }
    }
};

struct Q5_K {
    static constexpr size_t num_elements = 256, nbytes = 176;
    ALWAYS_INLINE static void unpack(const uint8_t* block, float* out) {
        const ScalesAndLows of(half_at(block), half_at(block + 2), block + 4);
        const uint8_t* masks = block + 16;
        for (int i = 0; i < 8; i++) {
            const uint8_t* bytes = block + 48 + i / 2 * 32;
            const int shift = i % 2 * 4;
            for (int j = 0; j < 32; j++) {
                const int value = (bytes[j] >> shift & 15) | (masks[j] >> i & 1) << 4;
                out[32 * i + j] = static_cast<float>(value) * of.scales[i] - of.lows[i];
            }
        }
    }
};

struct Q6_K {
    static constexpr size_t num_elements = 256, nbytes = 210;
    ALWAYS_INLINE static void unpack(const uint8_t* block, float* out) {
        const uint8_t* scales = block + 192;
        const float d = half_at(block + 208);
        for (int i = 0; i < 16; i++) {
            const uint8_t* low = block + i / 8 * 64 + i % 4 * 16;
            const uint8_t* high = block + 128 + i / 8 * 32 + i % 2 * 16;
            const float scale = d * static_cast<float>(static_cast<int8_t>(scales[i]));
            const int shift = i % 8 / 4 * 4, high_shift = i % 8 / 2 * 2;
            for (int j = 0; j < 16; j++) {
                const int value = (low[j] >> shift & 15) | (high[j] >> high_shift & 3) << 4;
                out[16 * i + j] = static_cast<float>(value - 32) * scale;
            }
        }
    }
};

}  // namespace packed
