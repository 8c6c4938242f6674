// The functions of CUDA (or HIP), as torch has loaded it, that this backend calls, and the count of
// the graphs that captured a call.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <memory>

// Every function may be nullptr: without a loaded CUDA there is no device, and NCCL says so itself.
struct DeviceLibrary {
    int (*set_device)(int);
    int (*get_device)(int*);
    int (*allocate)(void**, size_t);
    int (*release)(void*);
    int (*attribute)(int*, int attribute, int device);
    int (*context_state)(int device, unsigned* flags, int* is_active);
    int (*capture_info)(void* stream, int* status, unsigned long long* id, void** graph,
                        const void*** dependencies, size_t* num_dependencies);
    int (*capture_info_v3)(void* stream, int* status, unsigned long long* id, void** graph,
                           const void*** dependencies, const void** edges,
                           size_t* num_dependencies);
    int (*create_object)(void** object, void* payload, void (*destroy)(void*), unsigned references,
                         unsigned flags);
    int (*release_object)(void* object, unsigned references);
    int (*retain_object)(void* graph, void* object, unsigned references, unsigned flags);
};

DeviceLibrary find_device_library();
bool is_rocm_loaded();

// Makes a device current for a scope: NCCL needs that while it connects. The device before it is
// not restored if this process has no context there, for that would make one.
class CurrentDevice {
  public:
    CurrentDevice(const DeviceLibrary& library, int device);
    ~CurrentDevice();
    CurrentDevice(const CurrentDevice&) = delete;
    CurrentDevice& operator=(const CurrentDevice&) = delete;
    int code() const { return code_; }  // of setting the device

  private:
    const DeviceLibrary& library_;
    int before_ = -1, code_ = 0;
};

// Counts the graphs that hold calls of a communicator. A graph, and what is instantiated from it,
// carries an object whose destruction decrements the count; that may come late, on a thread of the
// driver, even after the communicator is destroyed.
class GraphCount {
  public:
    // Counts the graph of a stream that is being captured, once. The driver's code if it refuses.
    int note_capture(const DeviceLibrary& library, void* stream, bool* is_capturing);
    int live() const { return live_->load(std::memory_order_acquire); }

  private:
    std::shared_ptr<std::atomic<int>> live_ = std::make_shared<std::atomic<int>>(0);
    unsigned long long last_capture_ = 0;  // its id
};
