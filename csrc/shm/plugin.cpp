// The shared-memory backend: ranks of one node, processes or threads. A plugin like any vendor's.
#include <string>

#include "plugin/make_plugin.h"
#include "shm/shm_communicator.h"

namespace shm {
namespace {

void tell_shape(comm_t comm, int32_t ndim, const int64_t* shape) {
    ShmCommunicator& communicator = **plugin::from_handle<ShmCommunicator>(comm);
    if (communicator.nranks > 1) communicator.set_shape(ndim, shape);
}

// The entries for streams come in the middle of other calls, whose last_error they leave alone.
template <class Body>
comm_result on_streams(comm_t comm, int32_t peer, Body body) {
    return plugin::without_communicator([&] {
        ShmCommunicator& communicator = **plugin::from_handle<ShmCommunicator>(comm);
        if (communicator.nranks == 1 || peer < 0 || peer >= communicator.nranks)
            throw PluginError{COMM_INVALID_ARGUMENT, "rank " + std::to_string(peer) +
                                                         " has no stream among these " +
                                                         std::to_string(communicator.nranks) +
                                                         " ranks. Name another rank of the group"};
        body(communicator);
    });
}

constexpr int64_t ns_per_ms = 1000000;

comm_result stream_write(comm_t comm, int32_t dst, const void* prefix, uint64_t prefix_nbytes,
                         const void* data, uint64_t nbytes, uint64_t* num_written) {
    return on_streams(comm, dst, [&](ShmCommunicator& communicator) {
        *num_written = communicator.stream_write(dst, {prefix, prefix_nbytes}, data, nbytes);
    });
}

comm_result stream_read(comm_t comm, int32_t src, void* data, uint64_t nbytes, uint64_t* num_read) {
    return on_streams(comm, src, [&](ShmCommunicator& communicator) {
        *num_read = communicator.stream_read(src, data, nbytes);
    });
}

comm_result stream_wait(comm_t comm, const uint8_t* interest, int32_t timeout_ms, int32_t* peer) {
    return on_streams(comm, 0, [&](ShmCommunicator& communicator) {
        *peer = communicator.stream_wait(interest, timeout_ms * ns_per_ms);
    });
}

comm_result stream_sleep(comm_t comm, int32_t timeout_ms) {
    return on_streams(comm, 0, [&](ShmCommunicator& communicator) {
        communicator.stream_sleep(timeout_ms * ns_per_ms);
    });
}

comm_result stream_notify(comm_t comm, int32_t what) {
    return on_streams(comm, 0,
                      [&](ShmCommunicator& communicator) { communicator.stream_notify(what); });
}

comm_result stream_check(comm_t comm, int32_t peer) {
    return on_streams(comm, peer,
                      [&](ShmCommunicator& communicator) { communicator.stream_check(peer); });
}

comm_result set_timeout(comm_t comm, int32_t timeout_ms) {
    (*plugin::from_handle<ShmCommunicator>(comm))->set_timeout(timeout_ms * ns_per_ms);
    return COMM_OK;
}

comm_plugin make_shm_plugin() {
    comm_plugin table = plugin::make_plugin<ShmCommunicator>();
    table.name = "shm";
    table.version = version;
    table.device_type = COMM_CPU;
    table.caps = COMM_CAP_ONE_NODE | COMM_CAP_THREADS | COMM_CAP_EMPTY;
    table.tell_shape = tell_shape;
    table.stream_write = stream_write;
    table.stream_read = stream_read;
    table.stream_wait = stream_wait;
    table.stream_sleep = stream_sleep;
    table.stream_notify = stream_notify;
    table.stream_check = stream_check;
    table.set_timeout = set_timeout;
    table.gather = plugin::TableEntry<&ShmCommunicator::gather>::call;
    table.scatter = plugin::TableEntry<&ShmCommunicator::scatter>::call;
    table.allgatherv = plugin::TableEntry<&ShmCommunicator::allgatherv>::call;
    table.reduce_scatterv = plugin::TableEntry<&ShmCommunicator::reduce_scatterv>::call;
    table.decline = plugin::TableEntry<&ShmCommunicator::decline>::call;
    return table;
}

}  // namespace
}  // namespace shm

extern "C" COMM_EXPORT const comm_plugin* comm_plugin_entry_v1(void) {
    static const comm_plugin table = shm::make_shm_plugin();
    return &table;
}
