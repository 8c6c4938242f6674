// From a Python object to a checked pointer, in well under a microsecond.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include "abi/communicator.h"
#include "abi/dlpack.h"

// A cache of tensors that are not lazy negatives: asking torch costs a third of a call, and small
// tensors are often passed again. Not every miss is cached: where every call has a new tensor, that
// would cost as much again.
struct PlainTensorCache {
    PyObject* tensors[2];     // only compared, never dereferenced
    PyObject* references[2];  // weak references to them; NULL if there is none yet
    unsigned num_misses;
};

// The call, for errors, and what its tensors must satisfy.
struct CallSite {
    const char* call;
    const char* me;  // this rank in errors: numbered as in the launch
    int32_t rank;
    int32_t nranks;
    int32_t device_type;
    int32_t device;
    bool scaled_sums;  // whether the library has premul_sum_create
    PlainTensorCache* plain_tensors;
};

struct TensorView {
    char* data;
    uint64_t numel;
    comm_dtype dtype;
    uint32_t itemsize;
    int32_t ndim;
    const int64_t* shape;

    uint64_t nbytes() const { return numel * itemsize; }
};

// Loads torch's exchange table and types. Returns -1 with a Python error set.
int load_torch_types();
// Reads and checks a tensor. Returns -1 with a Python error set; the tensor is never changed.
int read_tensor(const CallSite& site, PyObject* object, TensorView* view);
// torch's current stream; NULL on the CPU.
int current_stream(const CallSite& site, comm_stream* stream);

// out has [lead, *like's dimensions from `skip` on] (no lead if 0), and its dtype.
int check_shape(const CallSite& site, const TensorView& out, const TensorView& like, int64_t lead,
                int32_t skip);
// The first dimension has one row for each rank.
int check_rows(const CallSite& site, const TensorView& view);
// Their memory does not overlap, or is the same where that is allowed.
int check_overlap(const CallSite& site, const TensorView& from, const TensorView& to,
                  bool may_be_same);

// Of a call with this tensor, which has this dtype.
int read_op(const CallSite& site, PyObject* object, PyObject* tensor, comm_dtype dtype,
            comm_op* op);
int read_peer(const CallSite& site, PyObject* object, const char* name, int32_t* peer);
