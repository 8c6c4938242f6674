// How each element type is widened for arithmetic and narrowed again, without branches, so that
// compilers vectorize the loops around it. Floats narrower than 32 bits are added in 32 bits and
// rounded once, to nearest even. The bf16 instructions of processors are not used: they flush
// denormals to zero, so the result would depend on the machine.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace shm {

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// Wraps like two's complement, without the undefined behaviour of signed overflow.
template <class T, bool integral = std::is_integral<T>::value>
struct Arithmetic {
    using type = T;
};
template <class T>
struct Arithmetic<T, true> {
    using type = typename std::conditional<(sizeof(T) < 4), uint32_t,
                                           typename std::make_unsigned<T>::type>::type;
};

template <class T>
struct Native {
    using Stored = T;
    using Wide = T;
    static Wide widen(Stored value) { return value; }
    static Stored narrow(Wide value) { return value; }
};

// The codec whose sums and products have the same bits.
template <class Codec>
struct Wrapping {
    using type = Codec;
};
template <>
struct Wrapping<Native<int8_t>> {
    using type = Native<uint8_t>;
};
template <>
struct Wrapping<Native<int16_t>> {
    using type = Native<uint16_t>;
};
template <>
struct Wrapping<Native<int32_t>> {
    using type = Native<uint32_t>;
};
template <>
struct Wrapping<Native<int64_t>> {
    using type = Native<uint64_t>;
};

struct Bfloat16 {
    using Stored = uint16_t;
    using Wide = float;
    static Wide widen(Stored value) { return float_of(static_cast<uint32_t>(value) << 16); }
    static Stored narrow(Wide value) { return static_cast<Stored>(rounded(value) >> 16); }
    // The upper half is the number.
    static uint32_t rounded(Wide value) {
        uint32_t bits = bits_of(value);
        return value != value ? 0x7fc00000u : bits + 0x7fffu + ((bits >> 16) & 1u);
    }
};

// Two of them where processors add 32 bits wide: neither moves to a wider lane and back.
struct Bfloat16Pair {
    using Stored = uint32_t __attribute__((aligned(2), may_alias));
    template <class Op>
    static uint32_t apply(uint32_t a, uint32_t b) {
        float low = Op::apply(float_of(a << 16), float_of(b << 16));
        float high = Op::apply(float_of(a & upper), float_of(b & upper));
        return Bfloat16::rounded(low) >> 16 | (Bfloat16::rounded(high) & upper);
    }
    static constexpr uint32_t upper = 0xffff0000u;
};

// Sign, `exponent_bits` and the rest mantissa, with a bias of half the exponent range. The float8
// called e4m3fn spends its top exponent on numbers and keeps one pattern for NaN (`has_infinity`
// false).
template <class Storage, int total_bits, int exponent_bits, bool has_infinity>
struct SmallFloat {
    using Stored = Storage;
    using Wide = float;
    static constexpr int mantissa_bits = total_bits - 1 - exponent_bits;
    static constexpr int shift = 23 - mantissa_bits;
    static constexpr int bias = (1 << (exponent_bits - 1)) - 1;
    static constexpr uint32_t magnitude_mask = (1u << (total_bits - 1)) - 1;
    static constexpr uint32_t top_exponent = ((1u << exponent_bits) - 1) << mantissa_bits;
    static constexpr uint32_t smallest_normal = 1u << mantissa_bits;
    static constexpr uint32_t rebias = static_cast<uint32_t>(127 - bias) << 23;
    static constexpr uint32_t not_a_number =
        has_infinity ? (top_exponent | (1u << (mantissa_bits - 1))) : magnitude_mask;
    static constexpr uint32_t overflow = has_infinity ? top_exponent : not_a_number - 1;

    static Wide widen(Stored value) {
        uint32_t magnitude = value & magnitude_mask;
        uint32_t sign = static_cast<uint32_t>(value >> (total_bits - 1)) << 31;
        uint32_t normal = (magnitude << shift) + rebias;
        uint32_t min_normal = rebias + (1u << 23);  // as a float
        uint32_t denormal =
            bits_of(float_of(min_normal | (magnitude << shift)) - float_of(min_normal));
        uint32_t special = 0x7f800000u | (magnitude << shift);
        bool is_special = has_infinity ? magnitude >= top_exponent : magnitude == magnitude_mask;
        uint32_t bits = magnitude < smallest_normal ? denormal : normal;
        return float_of(sign | (is_special ? special : bits));
    }

    static Stored narrow(Wide value) {
        uint32_t bits = bits_of(value);
        uint32_t sign = (bits >> 31) << (total_bits - 1);
        bits &= 0x7fffffffu;
        uint32_t normal =
            (bits - rebias + (1u << (shift - 1)) - 1 + ((bits >> shift) & 1u)) >> shift;
        // Adding this power of two moves a denormal's last bit to the float's last bit, so that the
        // addition rounds.
        constexpr uint32_t magic = rebias + (static_cast<uint32_t>(shift + 1) << 23);
        uint32_t denormal = bits_of(float_of(bits) + float_of(magic)) - magic;
        uint32_t finite = bits < rebias + (1u << 23) ? denormal : normal;
        constexpr uint32_t beyond = static_cast<uint32_t>(127 + bias + (has_infinity ? 1 : 2))
                                    << 23;
        uint32_t bounded = bits >= beyond || finite > overflow ? overflow : finite;
        return static_cast<Stored>(sign | (bits > 0x7f800000u ? not_a_number : bounded));
    }
};

using Float16 = SmallFloat<uint16_t, 16, 5, true>;
using Float8E5M2 = SmallFloat<uint8_t, 8, 5, true>;
using Float8E4M3 = SmallFloat<uint8_t, 8, 4, false>;

}  // namespace shm
