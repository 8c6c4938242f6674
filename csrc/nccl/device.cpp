#include "nccl/device.h"

#include <dlfcn.h>

#include <initializer_list>

namespace {

constexpr int CAPTURE_ACTIVE = 1;           // CU_STREAM_CAPTURE_STATUS_ACTIVE
constexpr int CAPTURE_INVALIDATED = 2;      // CU_STREAM_CAPTURE_STATUS_INVALIDATED
constexpr int INVALIDATED = 901;            // CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
constexpr unsigned NO_DESTRUCTOR_SYNC = 1;  // CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
constexpr unsigned MOVE = 1;                // CU_GRAPH_USER_OBJECT_MOVE

using Names = std::initializer_list<const char*>;

// Searches only loaded libraries: opening CUDA is torch's business.
template <class Function>
void look_up(Names libraries, Names symbols, Function* function) {
    *function = nullptr;
    for (const char* symbol : symbols) {
        *function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, symbol));
        for (const char* name : libraries) {
            void* library =
                *function != nullptr ? nullptr : dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
            if (library != nullptr) *function = reinterpret_cast<Function>(dlsym(library, symbol));
        }
        if (*function != nullptr) return;
    }
}

const Names HIP = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"};
const Names RUNTIME = {"libcudart.so.13",  "libcudart.so.12",  "libcudart.so.11.0",
                       "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"};
const Names DRIVER = {"libcuda.so.1", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"};

// Rides on a CUDA graph; destroyed with it.
struct GraphReference {
    std::shared_ptr<std::atomic<int>> live;
};

void release_graph(void* payload) {
    GraphReference* reference = static_cast<GraphReference*>(payload);
    reference->live->fetch_sub(1, std::memory_order_acq_rel);
    delete reference;
}

}  // namespace

bool is_rocm_loaded() {
    for (const char* name : HIP)
        if (dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD) != nullptr) return true;
    return false;
}

DeviceLibrary find_device_library() {
    DeviceLibrary library;
    look_up(RUNTIME, {"cudaSetDevice", "hipSetDevice"}, &library.set_device);
    look_up(RUNTIME, {"cudaGetDevice", "hipGetDevice"}, &library.get_device);
    look_up(RUNTIME, {"cudaMalloc", "hipMalloc"}, &library.allocate);
    look_up(RUNTIME, {"cudaFree", "hipFree"}, &library.release);
    look_up(RUNTIME, {"cudaDeviceGetAttribute"}, &library.attribute);  // HIP numbers them otherwise
    int device;
    // The first call loads the driver. Where that fails, as for a CUDA build of torch on a machine
    // without a GPU, every other call would fail too: it is as if no runtime were loaded.
    if (library.get_device == nullptr || library.get_device(&device) != 0) return {};
    // Of the driver, for its symbols never change their arguments; the runtime's did in CUDA 13.
    look_up(DRIVER, {"cuDevicePrimaryCtxGetState", "hipDevicePrimaryCtxGetState"},
            &library.context_state);
    look_up(DRIVER, {"cuStreamGetCaptureInfo_v2", "hipStreamGetCaptureInfo_v2"},
            &library.capture_info);
    look_up(DRIVER, {"cuStreamGetCaptureInfo_v3"}, &library.capture_info_v3);
    look_up(DRIVER, {"cuUserObjectCreate", "hipUserObjectCreate"}, &library.create_object);
    look_up(DRIVER, {"cuUserObjectRelease", "hipUserObjectRelease"}, &library.release_object);
    look_up(DRIVER, {"cuGraphRetainUserObject", "hipGraphRetainUserObject"},
            &library.retain_object);
    return library;
}

CurrentDevice::CurrentDevice(const DeviceLibrary& library, int device) : library_(library) {
    if (library.set_device == nullptr || library.get_device == nullptr) return;
    if (library.get_device(&before_) != 0) before_ = -1;
    if (before_ == device)
        before_ = -1;
    else
        code_ = library.set_device(device);
}

CurrentDevice::~CurrentDevice() {
    unsigned flags = 0;
    int is_active = 1;
    if (before_ < 0) return;
    if (library_.context_state != nullptr) library_.context_state(before_, &flags, &is_active);
    if (is_active) library_.set_device(before_);
}

int GraphCount::note_capture(const DeviceLibrary& library, void* stream, bool* is_capturing) {
    int status = 0, code = 0;
    unsigned long long id = 0;
    void* graph = nullptr;
    if (library.capture_info != nullptr)
        code = library.capture_info(stream, &status, &id, &graph, nullptr, nullptr);
    else if (library.capture_info_v3 != nullptr)
        code = library.capture_info_v3(stream, &status, &id, &graph, nullptr, nullptr, nullptr);
    // NCCL would take the stream for one that is not captured, fail to launch, and be broken.
    if (code == 0 && status == CAPTURE_INVALIDATED) code = INVALIDATED;
    *is_capturing = code == 0 && status == CAPTURE_ACTIVE;
    if (!*is_capturing || id == last_capture_ || library.create_object == nullptr ||
        library.retain_object == nullptr || library.release_object == nullptr)
        return code;
    void* object = nullptr;
    GraphReference* reference = new GraphReference{live_};
    code = library.create_object(&object, reference, release_graph, 1, NO_DESTRUCTOR_SYNC);
    if (code != 0) {
        delete reference;
        return code;
    }
    live_->fetch_add(1, std::memory_order_acq_rel);
    code = library.retain_object(graph, object, 1, MOVE);
    if (code == 0)
        last_capture_ = id;
    else
        library.release_object(object, 1);  // which destroys the reference, and the count falls
    return code;
}
