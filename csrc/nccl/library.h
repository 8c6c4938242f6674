// libnccl (or librccl), opened at run time: our own declarations of the functions that are called.
//
// Nothing is included of NCCL or CUDA. Names, numbers and layouts are those of nccl.h, which only
// ever appends; tests compare the layout of the configuration with the header of the real library.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <climits>
#include <string>

struct ncclComm;
using NcclComm = ncclComm*;
using NcclWindow = void*;
using NcclResult = int;  // 0 to 8 are those of communicator.h
using NcclDtype = int;
using NcclOp = int;
using NcclStream = void*;

struct NcclId {  // passed by value
    char bytes[128];
};

// The configuration as far as this code sets it. The library reads `size` bytes and takes its
// defaults for the rest; a longer struct would not fit RCCL, whose later fields differ.
struct NcclConfig {
    size_t size = sizeof(NcclConfig);
    uint32_t magic = 0xcafebeef;
    uint32_t version = 21800;  // of the layout
    int32_t blocking = INT_MIN;
    int32_t cga_cluster_size = INT_MIN;
    int32_t min_ctas = INT_MIN;
    int32_t max_ctas = INT_MIN;
    const char* net_name = nullptr;
    int32_t split_share = INT_MIN;
    int32_t traffic_class = INT_MIN;
};

constexpr int NCCL_OLDEST = 21800;  // first with everything that is marked with it below

// name, the version that first had it, result, arguments. What is newer than NCCL_OLDEST may be
// absent.
#define NCCL_FUNCTIONS(X)                                                                          \
    X(GetVersion, 21800, NcclResult, (int*))                                                       \
    X(GetUniqueId, 21800, NcclResult, (NcclId*))                                                   \
    X(GetErrorString, 21800, const char*, (NcclResult))                                            \
    X(GetLastError, 21800, const char*, (NcclComm))                                                \
    X(CommInitRankConfig, 21800, NcclResult, (NcclComm*, int, NcclId, int, NcclConfig*))           \
    X(CommSplit, 21800, NcclResult, (NcclComm, int, int, NcclComm*, NcclConfig*))                  \
    X(CommFinalize, 21800, NcclResult, (NcclComm))                                                 \
    X(CommDestroy, 21800, NcclResult, (NcclComm))                                                  \
    X(CommAbort, 21800, NcclResult, (NcclComm))                                                    \
    X(CommGetAsyncError, 21800, NcclResult, (NcclComm, NcclResult*))                               \
    X(CommCount, 21800, NcclResult, (NcclComm, int*))                                              \
    X(CommUserRank, 21800, NcclResult, (NcclComm, int*))                                           \
    X(GroupStart, 21800, NcclResult, ())                                                           \
    X(GroupEnd, 21800, NcclResult, ())                                                             \
    X(AllReduce, 21800, NcclResult,                                                                \
      (const void*, void*, size_t, NcclDtype, NcclOp, NcclComm, NcclStream))                       \
    X(Broadcast, 21800, NcclResult,                                                                \
      (const void*, void*, size_t, NcclDtype, int, NcclComm, NcclStream))                          \
    X(Reduce, 21800, NcclResult,                                                                   \
      (const void*, void*, size_t, NcclDtype, NcclOp, int, NcclComm, NcclStream))                  \
    X(AllGather, 21800, NcclResult, (const void*, void*, size_t, NcclDtype, NcclComm, NcclStream)) \
    X(ReduceScatter, 21800, NcclResult,                                                            \
      (const void*, void*, size_t, NcclDtype, NcclOp, NcclComm, NcclStream))                       \
    X(Send, 21800, NcclResult, (const void*, size_t, NcclDtype, int, NcclComm, NcclStream))        \
    X(Recv, 21800, NcclResult, (void*, size_t, NcclDtype, int, NcclComm, NcclStream))              \
    X(RedOpCreatePreMulSum, 21800, NcclResult, (NcclOp*, void*, NcclDtype, int, NcclComm))         \
    X(RedOpDestroy, 21800, NcclResult, (NcclOp, NcclComm))                                         \
    X(MemAlloc, 21901, NcclResult, (void**, size_t))                                               \
    X(MemFree, 21901, NcclResult, (void*))                                                         \
    X(CommRegister, 21901, NcclResult, (NcclComm, void*, size_t, void**))                          \
    X(CommDeregister, 21901, NcclResult, (NcclComm, void*))                                        \
    X(CommWindowRegister, 22703, NcclResult, (NcclComm, void*, size_t, NcclWindow*, int))          \
    X(CommWindowDeregister, 22703, NcclResult, (NcclComm, NcclWindow))                             \
    X(CommShrink, 22703, NcclResult, (NcclComm, int*, int, NcclComm*, NcclConfig*, int))           \
    X(CommRevoke, 22807, NcclResult, (NcclComm, int))                                              \
    X(AlltoAll, 22803, NcclResult, (const void*, void*, size_t, NcclDtype, NcclComm, NcclStream))

struct NcclLibrary {
    int version;
    std::string path;
#define NCCL_FIELD(name, since, result, arguments) result(*name) arguments;
    NCCL_FUNCTIONS(NCCL_FIELD)
#undef NCCL_FIELD
};

constexpr int NCCL_WINDOW_SYMMETRIC = 1;
constexpr int NCCL_SCALAR_ON_HOST = 1;  // ncclScalarHostImmediate
constexpr int NCCL_FIRST_FLOAT8 = 22403;
constexpr int NCCL_SHRINK_DEFAULT = 0;
constexpr int NCCL_REVOKE_DEFAULT = 0;

// "2.28.9" of 22809.
std::string nccl_version_text(int version);
// The library at `path`, or if that is nullptr the one already loaded, or the one the system finds.
// It is never unloaded. False, with the reason in *problem, if it cannot be used.
bool open_nccl(const char* path, NcclLibrary* library, std::string* problem);
// "not supported by NCCL 2.27.3 (path); needs NCCL 2.28.3 or newer" of a function that is absent.
std::string nccl_not_supported(const NcclLibrary& library, const char* feature, int since);
