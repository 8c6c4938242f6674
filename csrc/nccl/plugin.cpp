// NCCL (or RCCL) behind communicator.h, opened at run time and never linked.
//
// Options: library=PATH, blocking=0|1 (0), stream=ADDRESS (the caller's), max_ctas=N, revoke=0|1
// (0: abort), and parent=ADDRESS of a handle that was revoked, with excluded=RANK:RANK:... of those
// of its ranks that are gone.
//
// A communicator is non-blocking unless blocking=1: a call that NCCL puts off is waited for here,
// until the deadline or abort(). NCCL's own finalize spins forever while a CUDA graph that captured
// a call lives, so ours refuses then, and what may never return runs on a thread of its own.

#include "nccl/nccl_communicator.h"
#include "plugin/make_plugin.h"

namespace nccl {

namespace {

template <auto method>
constexpr auto entry = plugin::TableEntry<method>::call;

comm_result get_unique_id(void* id) {
    return plugin::without_communicator([&] { NcclCommunicator::get_unique_id(id); });
}

// From any thread, so in the middle of a call.
comm_result set_timeout(comm_t comm, int32_t timeout_ms) {
    (*plugin::from_handle<NcclCommunicator>(comm))->timeout = std::chrono::milliseconds(timeout_ms);
    return COMM_OK;
}

// The version of the table is ours; that of NCCL is compared by Python, which chooses the library.
comm_plugin make_nccl_plugin() {
    comm_plugin table = plugin::make_plugin<NcclCommunicator>();
    table.name = "nccl";
    table.device_type = is_rocm_loaded() ? COMM_ROCM : COMM_CUDA;
    table.unique_id_bytes = sizeof(NcclId);
    table.caps = COMM_CAP_GRAPH_CAPTURE | COMM_CAP_THREADS;
    table.get_unique_id = get_unique_id;
    table.async_error = entry<&NcclCommunicator::async_error>;
    table.premul_sum_create = entry<&NcclCommunicator::premul_sum_create>;
    table.op_destroy = entry<&NcclCommunicator::op_destroy>;
    table.split = entry<&NcclCommunicator::split>;
    table.finalize = entry<&NcclCommunicator::finalize>;
    table.set_timeout = set_timeout;
    return table;
}

}  // namespace

}  // namespace nccl

extern "C" COMM_EXPORT const comm_plugin* comm_plugin_entry_v1(void) {
    static const comm_plugin table = nccl::make_nccl_plugin();
    return &table;
}
