#include "reduce/reduce.h"

#include <algorithm>
#include <cstring>

#include "reduce/codec.h"
#include "reduce/half.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))

#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace shm {
namespace {

struct Sum {
    template <class T>
    static ALWAYS_INLINE T apply(T a, T b) {
        using W = typename Arithmetic<T>::type;
        return static_cast<T>(static_cast<W>(a) + static_cast<W>(b));
    }
};

struct Prod {
    template <class T>
    static ALWAYS_INLINE T apply(T a, T b) {
        using W = typename Arithmetic<T>::type;
        return static_cast<T>(static_cast<W>(a) * static_cast<W>(b));
    }
};

// NaN wins, as in torch.maximum and torch.minimum.
struct Max {
    template <class T>
    static ALWAYS_INLINE T apply(T a, T b) {
        return (a > b) | (a != a) ? a : b;
    }
};

struct Min {
    template <class T>
    static ALWAYS_INLINE T apply(T a, T b) {
        return (a < b) | (a != a) ? a : b;
    }
};

constexpr size_t block_elements = 512;  // whose accumulators fit the first-level cache

// Instruction sets that a function is compiled for. has_fast_path: whether the most frequent case
// has code of its own. converts_halves: whether there are instructions for Float16.
struct Plain {
    static constexpr bool has_fast_path = false, converts_halves = false;
};
#if defined(__x86_64__)
struct Avx2 {
    static constexpr bool has_fast_path = true, converts_halves = true;
    static constexpr auto widen_halves = widen_halves_avx2;
    static constexpr auto narrow_halves = narrow_halves_avx2;
};
struct Avx512 {
    static constexpr bool has_fast_path = true, converts_halves = true;
    static constexpr auto widen_halves = widen_halves_avx512;
    static constexpr auto narrow_halves = narrow_halves_avx512;
};
#endif

template <class Codec, class Set>
constexpr bool uses_half_instructions = Set::converts_halves && std::is_same<Codec, Float16>::value;

template <class Codec, class Set>
ALWAYS_INLINE void widen(typename Codec::Wide* to, const typename Codec::Stored* from,
                         size_t count) {
    if constexpr (uses_half_instructions<Codec, Set>)
        Set::widen_halves(to, from, count);
    else
        for (size_t i = 0; i < count; ++i) to[i] = Codec::widen(from[i]);
}

template <class Codec, class Set>
ALWAYS_INLINE void narrow(typename Codec::Stored* to, const typename Codec::Wide* from,
                          size_t count) {
    if constexpr (uses_half_instructions<Codec, Set>)
        Set::narrow_halves(to, from, count);
    else
        for (size_t i = 0; i < count; ++i) to[i] = Codec::narrow(from[i]);
}

template <class Codec, class Op, class Set>
ALWAYS_INLINE void accumulate(typename Codec::Wide* total, const typename Codec::Stored* next,
                              size_t count) {
    if constexpr (uses_half_instructions<Codec, Set>) {
        typename Codec::Wide wide[block_elements];
        Set::widen_halves(wide, next, count);
        for (size_t i = 0; i < count; ++i) total[i] = Op::apply(total[i], wide[i]);
    } else {
        for (size_t i = 0; i < count; ++i) total[i] = Op::apply(total[i], Codec::widen(next[i]));
    }
}

template <class Codec, class Op>
ALWAYS_INLINE void reduce_two(typename Codec::Stored* out, const typename Codec::Stored* a,
                              const typename Codec::Stored* b, size_t count) {
    size_t first = 0;
    if constexpr (std::is_same<Codec, Bfloat16>::value) {
        using Pair = Bfloat16Pair::Stored;
        auto* to = reinterpret_cast<Pair*>(out);
        auto *left = reinterpret_cast<const Pair*>(a), *right = reinterpret_cast<const Pair*>(b);
        INDEPENDENT
        for (size_t i = 0; i < count / 2; ++i) to[i] = Bfloat16Pair::apply<Op>(left[i], right[i]);
        first = count / 2 * 2;
    }
    INDEPENDENT
    for (size_t i = first; i < count; ++i)
        out[i] = Codec::narrow(Op::apply(Codec::widen(a[i]), Codec::widen(b[i])));
}

template <class Codec, class Op, class Set>
ALWAYS_INLINE void reduce_block(typename Codec::Stored* out, const void* const* sources,
                                int num_sources, size_t offset, size_t count, int divisor) {
    using Stored = typename Codec::Stored;
    using Wide = typename Codec::Wide;
    Wide total[block_elements];
    widen<Codec, Set>(total, static_cast<const Stored*>(sources[0]) + offset, count);
    for (int source = 1; source < num_sources; ++source)
        accumulate<Codec, Op, Set>(total, static_cast<const Stored*>(sources[source]) + offset,
                                   count);
    if constexpr (std::is_floating_point<Wide>::value)
        if (divisor > 1)
            for (size_t i = 0; i < count; ++i) total[i] = static_cast<Wide>(total[i] / divisor);
    narrow<Codec, Set>(out + offset, total, count);
}

// The most frequent case: two operands, without an accumulator in between.
template <class Codec, class Set>
constexpr bool has_reduce_two =
    Set::has_fast_path && (std::is_same<typename Codec::Stored, typename Codec::Wide>::value ||
                           std::is_same<Codec, Bfloat16>::value);

template <class Codec, class Op, class Set>
ALWAYS_INLINE void reduce(void* out, const void* const* sources, int num_sources, size_t count,
                          int divisor) {
    using Stored = typename Codec::Stored;
    Stored* to = static_cast<Stored*>(out);
    if constexpr (has_reduce_two<Codec, Set>)
        if (num_sources == 2 && divisor <= 1)
            return reduce_two<Codec, Op>(to, static_cast<const Stored*>(sources[0]),
                                         static_cast<const Stored*>(sources[1]), count);
    for (size_t i = 0; i < count; i += block_elements)
        reduce_block<Codec, Op, Set>(to, sources, num_sources, i,
                                     std::min(block_elements, count - i), divisor);
}

// The same source compiled for several instruction sets, of which one is chosen at run time.
#define FOR_INSTRUCTION_SET(name, Set, attribute)                                             \
    template <class Codec, class Op>                                                          \
    attribute void name(void* out, const void* const* sources, int num_sources, size_t count, \
                        int divisor) {                                                        \
        reduce<Codec, Op, Set>(out, sources, num_sources, count, divisor);                    \
    }

FOR_INSTRUCTION_SET(reduce_plain, Plain, )
#if defined(__x86_64__)
FOR_INSTRUCTION_SET(reduce_avx2, Avx2, __attribute__((target("avx2"))))
FOR_INSTRUCTION_SET(
    reduce_avx512, Avx512,
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))))
#endif

template <class Codec, class Op>
Reduce compiled_for(Instructions instructions) {
#if defined(__x86_64__)
    if (instructions == Instructions::avx512) return reduce_avx512<Codec, Op>;
    if (instructions == Instructions::avx2) return reduce_avx2<Codec, Op>;
#endif
    (void)instructions;
    return reduce_plain<Codec, Op>;
}

#if defined(__x86_64__)
// Asked of the processor: __builtin_cpu_supports() knows of no half precision where a library is
// linked with the libgcc of GCC 10 or earlier, or by clang, and then says no.
bool has_f16c() {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

bool is_supported(Instructions instructions) {
    switch (instructions) {
#if defined(__x86_64__)
        case Instructions::avx512:
            return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
        case Instructions::avx2:
            return __builtin_cpu_supports("avx2") && has_f16c();
#endif
        default:
            return instructions == Instructions::plain;
    }
}

// Signed integers wrap like unsigned ones, so they share the code. Integers have no average.
template <class Codec>
Reduce find_op(comm_op op, Instructions instructions) {
    using WrappingCodec = typename Wrapping<Codec>::type;
    switch (op) {
        case COMM_AVG:
            if (std::is_integral<typename Codec::Wide>::value) return nullptr;
            [[fallthrough]];
        case COMM_SUM:
            return compiled_for<WrappingCodec, Sum>(instructions);
        case COMM_PROD:
            return compiled_for<WrappingCodec, Prod>(instructions);
        case COMM_MAX:
            return compiled_for<Codec, Max>(instructions);
        case COMM_MIN:
            return compiled_for<Codec, Min>(instructions);
        default:
            return nullptr;
    }
}

// true is the larger: max is "any", min and prod are "all". There is no sum or average of bools.
Reduce find_bool_op(comm_op op, Instructions instructions) {
    if (op == COMM_PROD) op = COMM_MIN;
    bool is_defined = op == COMM_MAX || op == COMM_MIN;
    return is_defined ? find_op<Native<uint8_t>>(op, instructions) : nullptr;
}

// The sum of complex numbers is that of their parts; nothing else is defined for them.
template <class Part>
Reduce find_complex_op(comm_op op, Instructions) {
    if (op != COMM_SUM) return nullptr;
    return [](void* out, const void* const* sources, int num_sources, size_t count, int divisor) {
        reduce_plain<Native<Part>, Sum>(out, sources, num_sources, 2 * count, divisor);
    };
}

Reduce find_nothing(comm_op, Instructions) { return nullptr; }

struct DtypeInfo {
    comm_dtype number;
    const char* name;
    size_t size;
    Reduce (*find)(comm_op, Instructions);
};

const DtypeInfo dtypes[] = {
    {COMM_FLOAT64, "float64", 8, find_op<Native<double>>},
    {COMM_FLOAT32, "float32", 4, find_op<Native<float>>},
    {COMM_FLOAT16, "float16", 2, find_op<Float16>},
    {COMM_BFLOAT16, "bfloat16", 2, find_op<Bfloat16>},
    {COMM_FLOAT8_E4M3, "float8_e4m3fn", 1, find_op<Float8E4M3>},
    {COMM_FLOAT8_E5M2, "float8_e5m2", 1, find_op<Float8E5M2>},
    {COMM_INT8, "int8", 1, find_op<Native<int8_t>>},
    {COMM_UINT8, "uint8", 1, find_op<Native<uint8_t>>},
    {COMM_INT16, "int16", 2, find_op<Native<int16_t>>},
    {COMM_INT32, "int32", 4, find_op<Native<int32_t>>},
    {COMM_UINT32, "uint32", 4, find_nothing},
    {COMM_INT64, "int64", 8, find_op<Native<int64_t>>},
    {COMM_UINT64, "uint64", 8, find_nothing},
    {COMM_BOOL, "bool", 1, find_bool_op},
    {COMM_UINT16, "uint16", 2, find_nothing},
    {COMM_COMPLEX64, "complex64", 8, find_complex_op<float>},
    {COMM_COMPLEX128, "complex128", 16, find_complex_op<double>},
    {COMM_FLOAT8_E4M3FNUZ, "float8_e4m3fnuz", 1, find_nothing},
    {COMM_FLOAT8_E5M2FNUZ, "float8_e5m2fnuz", 1, find_nothing},
    {COMM_FLOAT8_E8M0, "float8_e8m0fnu", 1, find_nothing},
};

const DtypeInfo* find_dtype(comm_dtype number) {
    for (const DtypeInfo& dtype : dtypes)
        if (dtype.number == number) return &dtype;
    return nullptr;
}

}  // namespace

Instructions best_instructions() {
    for (Instructions instructions : {Instructions::avx512, Instructions::avx2})
        if (is_supported(instructions)) return instructions;
    return Instructions::plain;
}

bool find_instructions(const char* name, Instructions* instructions) {
    static const char* const names[] = {"plain", "avx2", "avx512"};
    for (Instructions candidate : {Instructions::plain, Instructions::avx2, Instructions::avx512}) {
        if (std::strcmp(name, names[static_cast<int>(candidate)]) != 0) continue;
        *instructions = candidate;
        return is_supported(candidate);
    }
    return false;
}

Reduce find_reduce(comm_dtype number, comm_op op, Instructions instructions) {
    const DtypeInfo* dtype = find_dtype(number);
    return dtype == nullptr ? nullptr : dtype->find(op, instructions);
}

size_t size_of(comm_dtype number) {
    const DtypeInfo* dtype = find_dtype(number);
    return dtype == nullptr ? 0 : dtype->size;
}

const char* name_of_dtype(comm_dtype number) {
    const DtypeInfo* dtype = find_dtype(number);
    return dtype == nullptr ? "unknown dtype" : dtype->name;
}

const char* name_of_op(comm_op op) {
    static const char* const names[] = {"sum", "prod", "max", "min", "avg"};
    return op >= COMM_SUM && op <= COMM_AVG ? names[op] : "unknown op";
}

#if defined(__x86_64__)
void copy_streaming(void* to, const void* from, size_t nbytes) {
    char* out = static_cast<char*>(to);
    const char* in = static_cast<const char*>(from);
    size_t head = std::min(nbytes, -reinterpret_cast<uintptr_t>(out) & 63);
    std::memcpy(out, in, head);
    size_t i = head;
    for (; i + 64 <= nbytes; i += 64) {
        for (size_t j = i; j < i + 64; j += 16)
            _mm_stream_si128(reinterpret_cast<__m128i*>(out + j),
                             _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + j)));
    }
    std::memcpy(out + i, in + i, nbytes - i);
    _mm_sfence();
}
#else
void copy_streaming(void* to, const void* from, size_t nbytes) { std::memcpy(to, from, nbytes); }
#endif

}  // namespace shm
