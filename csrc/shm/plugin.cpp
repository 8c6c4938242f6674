// The shared-memory backend: ranks of one node, processes or threads. A plugin like any vendor's.
#include "plugin/make_plugin.h"
#include "shm/shm_communicator.h"

namespace shm {
namespace {

void tell_shape(comm_t comm, int32_t ndim, const int64_t* shape) {
    ShmCommunicator& communicator = **plugin::from_handle<ShmCommunicator>(comm);
    if (communicator.nranks > 1) communicator.set_shape(ndim, shape);
}

comm_plugin make_shm_plugin() {
    comm_plugin table = plugin::make_plugin<ShmCommunicator>();
    table.name = "shm";
    table.device_type = COMM_CPU;
    table.caps = COMM_CAP_ONE_NODE | COMM_CAP_THREADS | COMM_CAP_EMPTY;
    table.tell_shape = tell_shape;
    return table;
}

}  // namespace
}  // namespace shm

extern "C" COMM_EXPORT const comm_plugin* comm_plugin_entry_v1(void) {
    static const comm_plugin table = shm::make_shm_plugin();
    return &table;
}
