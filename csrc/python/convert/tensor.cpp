#include "python/convert/tensor.h"

#include <stdio.h>
#include <string.h>

#include <initializer_list>

namespace {

const DLPackExchangeAPI* exchange;
PyTypeObject* tensor_type;
PyTypeObject* parameter_type;
PyObject* torch_dispatch_of_tensor;
PyObject* requires_grad;  // the descriptor, and how it is read
descrgetfunc get_requires_grad;
PyObject* is_grad_enabled;
PyObject* op_names[5];

// Views whose numbers are changed only when they are read; a complex tensor may be either.
struct LazyView {
    const char *question, *answer;
    PyObject* ask;
    PyCFunction ask_fast;
} lazy_views[] = {{"is_neg", "resolve_neg", NULL, NULL}, {"is_conj", "resolve_conj", NULL, NULL}};

PyObject* import_attribute(const char* module, const char* first, const char* second) {
    PyObject* object = PyImport_ImportModule(module);
    for (const char* name : {first, second}) {
        if (object == NULL || name == NULL) continue;
        PyObject* next = PyObject_GetAttrString(object, name);
        Py_DECREF(object);
        object = next;
    }
    return object;
}

int load_exchange() {
    PyObject* capsule = import_attribute("torch", "Tensor", "__dlpack_c_exchange_api__");
    if (capsule == NULL) {
        PyErr_Clear();
        PyErr_SetString(
            PyExc_ImportError,
            "this torch has no DLPack C exchange table, through which tensors are read. "
            "Install torch 2.11 or newer");
        return -1;
    }
    exchange = static_cast<const DLPackExchangeAPI*>(
        PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));  // torch.Tensor keeps it alive
    Py_DECREF(capsule);
    if (exchange == NULL) return -1;
    if (exchange->header.version.major == 1 && exchange->dltensor_from_py_object_no_sync != NULL)
        return 0;
    PyErr_Format(PyExc_ImportError,
                 "torch offers DLPack %u.%u; version 1 with direct access to tensors is needed",
                 exchange->header.version.major, exchange->header.version.minor);
    return -1;
}

// A method without arguments as the C function that it is; NULL if it is something else. Calling it
// so takes half as long.
PyCFunction c_method(PyObject* object, const char* name) {
    PyObject* method = PyObject_GetAttrString(object, name);
    bool plain = method != NULL && PyCFunction_GetFlags(method) == METH_NOARGS;
    PyCFunction function = plain ? PyCFunction_GetFunction(method) : NULL;
    Py_XDECREF(method);
    PyErr_Clear();
    return function;
}

int load_flags() {
    requires_grad = import_attribute("torch", "Tensor", "requires_grad");
    is_grad_enabled = import_attribute("torch", "is_grad_enabled", NULL);
    PyObject* empty = import_attribute("torch", "empty", NULL);
    PyObject* tensor = empty == NULL ? NULL : PyObject_CallFunction(empty, "i", 0);
    Py_XDECREF(empty);
    if (tensor == NULL || PyErr_Occurred()) return -1;
    get_requires_grad =
        reinterpret_cast<descrgetfunc>(PyType_GetSlot(Py_TYPE(requires_grad), Py_tp_descr_get));
    for (LazyView& lazy : lazy_views) {
        lazy.ask = import_attribute("torch", "Tensor", lazy.question);
        lazy.ask_fast = c_method(tensor, lazy.question);
    }
    Py_DECREF(tensor);
    if (get_requires_grad != NULL) return 0;
    PyErr_SetString(PyExc_ImportError,
                    "torch.Tensor.requires_grad is not a property in this torch");
    return -1;
}

// A tensor subclass with a dispatcher of its own wraps something; its own memory is not the data.
bool is_wrapper(PyObject* object) {
    if (Py_TYPE(object) == tensor_type || Py_TYPE(object) == parameter_type) return false;
    PyObject* dispatch =
        PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)), "__torch_dispatch__");
    bool own = dispatch != torch_dispatch_of_tensor;
    Py_XDECREF(dispatch);
    if (PyErr_Occurred()) PyErr_Clear();
    return own;
}

// What is wrong with a tensor is said by Python, which can examine it. Where it finds nothing,
// torch does not export the tensor.
int refuse_tensor(const CallSite& site, PyObject* object) {
    PyErr_Clear();
    char device[16] = "cpu";
    if (site.device_type != COMM_CPU)
        snprintf(device, sizeof device, "cuda:%d", site.device < 0 ? 0 : site.device);
    PyObject* check = import_attribute("communicator.calls.arguments", "check_tensor", NULL);
    PyObject* checked =
        check == NULL ? NULL
                      : PyObject_CallFunction(check, "ssOs", site.me, site.call, object, device);
    Py_XDECREF(check);
    if (checked == NULL) return -1;
    Py_DECREF(checked);
    PyErr_Format(PyExc_ValueError,
                 "%s, %s: the tensor is not plain memory that this communicator could read. Pass a "
                 "copy, tensor.clone()",
                 site.me, site.call);
    return -1;
}

// Whether autograd would miss what is written into the tensor; -1 with a Python error set.
int needs_grad(PyObject* object) {
    PyObject* flag = get_requires_grad(requires_grad, object, NULL);
    if (flag == NULL) return -1;
    Py_DECREF(flag);  // True and False live on
    if (flag == Py_False) return 0;
    PyObject* enabled = PyObject_CallObject(is_grad_enabled, NULL);
    if (enabled == NULL) return -1;
    Py_DECREF(enabled);
    return enabled == Py_True;
}

bool is_cached(const PlainTensorCache& cache, PyObject* object) {
    for (int i = 0; i < 2; ++i)
        if (object == cache.tensors[i] && PyWeakref_GetObject(cache.references[i]) == object)
            return true;
    return false;
}

constexpr unsigned MISSES_PER_ROUND = 8;  // of which two are cached

void add_to_cache(PlainTensorCache* cache, PyObject* object) {
    unsigned slot = cache->num_misses++ % MISSES_PER_ROUND;
    if (slot > 1) return;
    PyObject* reference = PyWeakref_NewRef(object, NULL);
    if (reference == NULL) return PyErr_Clear();
    PyObject* old = cache->references[slot];
    cache->tensors[slot] = object;
    cache->references[slot] = reference;
    Py_XDECREF(old);
}

// Whether it is a lazy view, such as x.conj() or its imaginary part: its memory has other signs. -1
// with a Python error set.
int is_lazy(const CallSite& site, PyObject* object, bool complex) {
    if (is_cached(*site.plain_tensors, object)) return 0;
    for (int i = 0; i <= complex; ++i) {
        const LazyView& lazy = lazy_views[i];
        PyObject* flag = lazy.ask_fast != NULL
                             ? lazy.ask_fast(object, NULL)
                             : PyObject_CallFunctionObjArgs(lazy.ask, object, NULL);
        if (flag == NULL) return -1;
        Py_DECREF(flag);
        if (flag == Py_True) return 1;
    }
    return add_to_cache(site.plain_tensors, object), 0;
}

struct DtypeRow {
    uint8_t code, bits;
    comm_dtype dtype;
};

const DtypeRow dtype_rows[] = {
    {DL_FLOAT, 32, COMM_FLOAT32},
    {DL_BFLOAT, 16, COMM_BFLOAT16},
    {DL_FLOAT, 16, COMM_FLOAT16},
    {DL_FLOAT, 64, COMM_FLOAT64},
    {DL_INT, 64, COMM_INT64},
    {DL_INT, 32, COMM_INT32},
    {DL_INT, 16, COMM_INT16},
    {DL_INT, 8, COMM_INT8},
    {DL_UINT, 8, COMM_UINT8},
    {DL_UINT, 32, COMM_UINT32},
    {DL_UINT, 64, COMM_UINT64},
    {DL_BOOL, 8, COMM_BOOL},
    {DL_FLOAT8_E4M3FN, 8, COMM_FLOAT8_E4M3},
    {DL_FLOAT8_E5M2, 8, COMM_FLOAT8_E5M2},
    {DL_UINT, 16, COMM_UINT16},
    {DL_COMPLEX, 64, COMM_COMPLEX64},
    {DL_COMPLEX, 128, COMM_COMPLEX128},
    {DL_FLOAT8_E4M3FNUZ, 8, COMM_FLOAT8_E4M3FNUZ},
    {DL_FLOAT8_E5M2FNUZ, 8, COMM_FLOAT8_E5M2FNUZ},
    {DL_FLOAT8_E8M0FNU, 8, COMM_FLOAT8_E8M0},
};

bool find_dtype(const DLDataType& type, comm_dtype* dtype) {
    for (const DtypeRow& row : dtype_rows) {
        if (row.code != type.code || row.bits != type.bits || type.lanes != 1) continue;
        *dtype = row.dtype;
        return true;
    }
    return false;
}

bool is_floating(comm_dtype dtype) {
    return dtype == COMM_FLOAT32 || dtype == COMM_BFLOAT16 || dtype == COMM_FLOAT16 ||
           dtype == COMM_FLOAT64 || dtype == COMM_FLOAT8_E4M3 || dtype == COMM_FLOAT8_E5M2;
}

bool is_complex(comm_dtype dtype) { return dtype == COMM_COMPLEX64 || dtype == COMM_COMPLEX128; }

bool is_contiguous(const DLTensor& tensor) {
    int64_t expected = 1;
    for (int32_t dim = tensor.ndim - 1; dim >= 0; --dim) {
        if (tensor.shape[dim] == 0) return true;
        if (tensor.shape[dim] != 1 && tensor.strides[dim] != expected) return false;
        expected *= tensor.shape[dim];
    }
    return true;
}

bool is_on_device(const CallSite& site, const DLDevice& device) {
    return device.device_type == site.device_type &&
           (site.device_type == COMM_CPU || device.device_id == site.device);
}

PyObject* shape_of(const TensorView& view) {
    PyObject* shape = PyTuple_New(view.ndim);
    for (int32_t dim = 0; shape != NULL && dim < view.ndim; ++dim)
        PyTuple_SetItem(shape, dim, PyLong_FromLongLong(view.shape[dim]));
    return shape;
}

int refuse_shape(const CallSite& site, const TensorView& view, const char* name,
                 const char* expected) {
    PyObject* shape = shape_of(view);
    if (shape == NULL) return -1;
    PyErr_Format(PyExc_ValueError, "%s, %s: %s is %S in a group of %d ranks, but must be %s",
                 site.me, site.call, name, shape, site.nranks, expected);
    Py_DECREF(shape);
    return -1;
}

int find_op(PyObject* object) {
    for (int op = 0; op < 5; ++op)
        if (object == op_names[op]) return op;
    for (int op = 0; op < 5 && PyUnicode_Check(object); ++op)
        if (PyUnicode_Compare(object, op_names[op]) == 0) return op;
    return -1;
}

// Made by premul_sum_create; the library knows which dtype it is for. -1 if it cannot be one.
int read_scaled_sum(PyObject* object) {
    long op = PyLong_AsLong(object);
    if (op > COMM_AVG && op <= INT32_MAX) return static_cast<int>(op);
    PyErr_Clear();
    return -1;
}

// As check_op of communicator/calls/arguments.py has it.
bool is_defined(const CallSite& site, comm_op op, comm_dtype dtype) {
    bool is_unsigned = dtype == COMM_UINT16 || dtype == COMM_UINT32 || dtype == COMM_UINT64;
    if ((site.device_type == COMM_CPU && is_unsigned) || dtype >= COMM_FLOAT8_E4M3FNUZ)
        return false;
    if (op == COMM_AVG) return is_floating(dtype);
    return op == COMM_SUM ? dtype != COMM_BOOL : !is_complex(dtype);
}

}  // namespace

int load_torch_types() {
    static const char* const names[] = {"sum", "prod", "max", "min", "avg"};
    for (int op = 0; op < 5; ++op) op_names[op] = PyUnicode_InternFromString(names[op]);
    if (load_exchange() < 0 || load_flags() < 0) return -1;
    tensor_type = reinterpret_cast<PyTypeObject*>(import_attribute("torch", "Tensor", NULL));
    parameter_type =
        reinterpret_cast<PyTypeObject*>(import_attribute("torch.nn", "Parameter", NULL));
    torch_dispatch_of_tensor = import_attribute("torch", "Tensor", "__torch_dispatch__");
    return PyErr_Occurred() ? -1 : 0;
}

int read_tensor(const CallSite& site, PyObject* object, TensorView* view) {
    DLTensor tensor;
    if ((Py_TYPE(object) != tensor_type &&
         (!PyType_IsSubtype(Py_TYPE(object), tensor_type) || is_wrapper(object))) ||
        exchange->dltensor_from_py_object_no_sync(object, &tensor) != 0 ||
        !is_on_device(site, tensor.device) || !find_dtype(tensor.dtype, &view->dtype) ||
        !is_contiguous(tensor))
        return refuse_tensor(site, object);
    view->data = static_cast<char*>(tensor.data) + tensor.byte_offset;
    view->numel = 1;
    for (int32_t dim = 0; dim < tensor.ndim; ++dim) view->numel *= tensor.shape[dim];
    view->itemsize = tensor.dtype.bits / 8;
    view->ndim = tensor.ndim;
    view->shape = tensor.shape;
    if (tensor.data == NULL && view->numel != 0) return refuse_tensor(site, object);
    int problem = needs_grad(object);
    if (problem == 0) problem = is_lazy(site, object, is_complex(view->dtype));
    return problem > 0 ? refuse_tensor(site, object) : problem;
}

int current_stream(const CallSite& site, comm_stream* stream) {
    *stream = NULL;
    if (site.device_type == COMM_CPU) return 0;
    return exchange->current_work_stream(site.device_type, site.device, stream);
}

int check_shape(const CallSite& site, const TensorView& out, const TensorView& like, int64_t lead,
                int32_t skip) {
    int32_t leads = lead > 0;
    bool same = out.ndim == leads + like.ndim - skip && (leads == 0 || out.shape[0] == lead);
    for (int32_t dim = leads; same && dim < out.ndim; ++dim)
        same = out.shape[dim] == like.shape[dim - leads + skip];
    if (!same)
        return refuse_shape(site, out, "the shape of out",
                            lead > 0   ? "[world_size, *tensor.shape]"
                            : skip > 0 ? "tensor.shape[1:]"
                                       : "that of the tensor");
    if (out.dtype == like.dtype) return 0;
    PyErr_Format(PyExc_ValueError,
                 "%s, %s: the dtype of out is not that of the tensor. Make out like it", site.me,
                 site.call);
    return -1;
}

int check_rows(const CallSite& site, const TensorView& view) {
    if (view.ndim > 0 && view.shape[0] == site.nranks) return 0;
    return refuse_shape(site, view, "the shape of the tensor",
                        "one row for each rank, [world_size, ...]");
}

int check_overlap(const CallSite& site, const TensorView& from, const TensorView& to,
                  bool may_be_same) {
    if (may_be_same && from.data == to.data) return 0;
    if (from.nbytes() == 0 || to.nbytes() == 0) return 0;
    if (from.data + from.nbytes() <= to.data || to.data + to.nbytes() <= from.data) return 0;
    PyErr_Format(PyExc_ValueError,
                 "%s, %s: out shares memory with the tensor, so one would overwrite the other "
                 "while it is read. Pass an out of its own",
                 site.me, site.call);
    return -1;
}

int read_op(const CallSite& site, PyObject* object, PyObject* tensor, comm_dtype dtype,
            comm_op* op) {
    *op = COMM_SUM;
    if (object == NULL) object = op_names[COMM_SUM];
    *op = site.scaled_sums && PyLong_Check(object) ? read_scaled_sum(object) : find_op(object);
    if (*op > COMM_AVG || (*op >= 0 && is_defined(site, *op, dtype))) return 0;
    // Another spelling, such as torch.distributed.ReduceOp.SUM; or Python says what is wrong.
    PyObject* check = import_attribute("communicator.calls.arguments", "check_op", NULL);
    PyObject* name = check == NULL
                         ? NULL
                         : PyObject_CallFunction(check, "ssOO", site.me, site.call, object, tensor);
    *op = name == NULL ? -1 : find_op(name);
    Py_XDECREF(name);
    Py_XDECREF(check);
    return *op < 0 ? -1 : 0;
}

int read_peer(const CallSite& site, PyObject* object, const char* name, int32_t* peer) {
    *peer = 0;
    if (object == NULL) return 0;
    long value = PyLong_CheckExact(object) ? PyLong_AsLong(object) : -1;
    if (value >= 0 && value < site.nranks) {
        *peer = static_cast<int32_t>(value);
        return 0;
    }
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "%s, %s: %s=%R is not a rank of this communicator of %d ranks",
                 site.me, site.call, name, object, site.nranks);
    return -1;
}
