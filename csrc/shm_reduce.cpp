#include "shm_reduce.h"

#include <algorithm>

#include "shm_codec.h"

#if defined(__x86_64__)
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

constexpr size_t block = 512;  // elements whose accumulators stay in the first-level cache

template <class Codec, class Op>
ALWAYS_INLINE void reduce_two(typename Codec::Stored* out, const typename Codec::Stored* a,
                              const typename Codec::Stored* b, size_t count) {
    INDEPENDENT
    for (size_t i = 0; i < count; ++i)
        out[i] = Codec::narrow(Op::apply(Codec::widen(a[i]), Codec::widen(b[i])));
}

template <class Codec, class Op>
ALWAYS_INLINE void reduce_block(typename Codec::Stored* out, const void* const* sources,
                                int num_sources, size_t offset, size_t count, int divisor) {
    using Stored = typename Codec::Stored;
    using Wide = typename Codec::Wide;
    Wide total[block];
    const Stored* first = static_cast<const Stored*>(sources[0]) + offset;
    for (size_t i = 0; i < count; ++i) total[i] = Codec::widen(first[i]);
    for (int source = 1; source < num_sources; ++source) {
        const Stored* next = static_cast<const Stored*>(sources[source]) + offset;
        for (size_t i = 0; i < count; ++i) total[i] = Op::apply(total[i], Codec::widen(next[i]));
    }
    if (divisor > 1)
        for (size_t i = 0; i < count; ++i) total[i] = static_cast<Wide>(total[i] / divisor);
    for (size_t i = 0; i < count; ++i) out[offset + i] = Codec::narrow(total[i]);
}

template <class Codec, class Op>
ALWAYS_INLINE void reduce(void* out, const void* const* sources, int num_sources, size_t count,
                          int divisor) {
    using Stored = typename Codec::Stored;
    Stored* to = static_cast<Stored*>(out);
    if (num_sources == 2 && divisor <= 1)
        return reduce_two<Codec, Op>(to, static_cast<const Stored*>(sources[0]),
                                     static_cast<const Stored*>(sources[1]), count);
    for (size_t i = 0; i < count; i += block)
        reduce_block<Codec, Op>(to, sources, num_sources, i, std::min(block, count - i), divisor);
}

// The same source compiled for several instruction sets; which one runs is decided at run time.
#define FOR_INSTRUCTION_SET(name, attribute)                                                  \
    template <class Codec, class Op>                                                          \
    attribute void name(void* out, const void* const* sources, int num_sources, size_t count, \
                        int divisor) {                                                        \
        reduce<Codec, Op>(out, sources, num_sources, count, divisor);                         \
    }

FOR_INSTRUCTION_SET(reduce_plain, )
#if defined(__x86_64__)
FOR_INSTRUCTION_SET(reduce_avx2, __attribute__((target("avx2"))))
FOR_INSTRUCTION_SET(
    reduce_avx512,
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))))
#endif

template <class Codec, class Op>
Reduce for_this_processor() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return reduce_avx512<Codec, Op>;
    if (__builtin_cpu_supports("avx2")) return reduce_avx2<Codec, Op>;
#endif
    return reduce_plain<Codec, Op>;
}

template <class Codec>
Reduce find_op(comm_op op) {
    switch (op) {
        case COMM_SUM:
        case COMM_AVG:
            return for_this_processor<Codec, Sum>();
        case COMM_PROD:
            return for_this_processor<Codec, Prod>();
        case COMM_MAX:
            return for_this_processor<Codec, Max>();
        case COMM_MIN:
            return for_this_processor<Codec, Min>();
        default:
            return nullptr;
    }
}

// true is the larger: max is "any", min and prod are "all". A sum of truths is not a truth.
Reduce find_bool_op(comm_op op) {
    if (op == COMM_PROD) op = COMM_MIN;
    return op == COMM_MAX || op == COMM_MIN ? find_op<Native<uint8_t>>(op) : nullptr;
}

struct Dtype {
    comm_dtype number;
    const char* name;
    size_t size;
    Reduce (*find)(comm_op);
};

const Dtype dtypes[] = {
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
    {COMM_UINT32, "uint32", 4, find_op<Native<uint32_t>>},
    {COMM_INT64, "int64", 8, find_op<Native<int64_t>>},
    {COMM_UINT64, "uint64", 8, find_op<Native<uint64_t>>},
    {COMM_BOOL, "bool", 1, find_bool_op},
};

const Dtype* find_dtype(comm_dtype number) {
    for (const Dtype& dtype : dtypes)
        if (dtype.number == number) return &dtype;
    return nullptr;
}

}  // namespace

Reduce find_reduce(comm_dtype number, comm_op op) {
    const Dtype* dtype = find_dtype(number);
    return dtype == nullptr ? nullptr : dtype->find(op);
}

size_t size_of(comm_dtype number) {
    const Dtype* dtype = find_dtype(number);
    return dtype == nullptr ? 0 : dtype->size;
}

const char* name_of_dtype(comm_dtype number) {
    const Dtype* dtype = find_dtype(number);
    return dtype == nullptr ? "a dtype unknown here" : dtype->name;
}

const char* name_of_op(comm_op op) {
    static const char* const names[] = {"sum", "prod", "max", "min", "avg"};
    return op >= COMM_SUM && op <= COMM_AVG ? names[op] : "an op unknown here";
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
