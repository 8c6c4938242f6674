// The part of DLPack 1.3 that this project reads: https://dmlc.github.io/dlpack/latest/c_api.html
// Declared here, field for field, so that a build needs neither torch nor DLPack.
#pragma once

#include <stdint.h>

typedef struct {
    uint32_t major;
    uint32_t minor;
} DLPackVersion;

enum { DL_CPU = 1, DL_CUDA = 2, DL_ROCM = 10 };

enum {
    DL_INT = 0,
    DL_UINT = 1,
    DL_FLOAT = 2,
    DL_BFLOAT = 4,
    DL_COMPLEX = 5,
    DL_BOOL = 6,
    DL_FLOAT8_E4M3FN = 10,
    DL_FLOAT8_E4M3FNUZ = 11,
    DL_FLOAT8_E5M2 = 12,
    DL_FLOAT8_E5M2FNUZ = 13,
    DL_FLOAT8_E8M0FNU = 14
};

typedef struct {
    int32_t device_type;
    int32_t device_id;
} DLDevice;

typedef struct {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} DLDataType;

typedef struct {
    void* data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t* shape;
    int64_t* strides;  // in elements; of a tensor without dimensions both may be NULL
    uint64_t byte_offset;
} DLTensor;

struct DLManagedTensorVersioned;

typedef struct DLPackExchangeAPIHeader {
    DLPackVersion version;
    struct DLPackExchangeAPIHeader* prev_api;  // an older table, for older hosts
} DLPackExchangeAPIHeader;

// What torch.Tensor.__dlpack_c_exchange_api__ points to. Functions return 0, or -1 with a Python
// error set. _no_sync: the caller orders the streams.
typedef struct {
    DLPackExchangeAPIHeader header;
    int (*managed_tensor_allocator)(DLTensor* prototype, struct DLManagedTensorVersioned** out,
                                    void* error_ctx,
                                    void (*set_error)(void*, const char* kind,
                                                      const char* message));
    int (*managed_tensor_from_py_object_no_sync)(void* object,
                                                 struct DLManagedTensorVersioned** out);
    int (*managed_tensor_to_py_object_no_sync)(struct DLManagedTensorVersioned* tensor,
                                               void** object);
    // May be NULL. What `out` points to is the tensor's: valid while the tensor is not changed.
    int (*dltensor_from_py_object_no_sync)(void* object, DLTensor* out);
    int (*current_work_stream)(int32_t device_type, int32_t device_id, void** stream);
} DLPackExchangeAPI;
