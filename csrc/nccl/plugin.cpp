// NCCL (or RCCL) behind communicator.h, opened at run time and never linked.
//
// Options: library=PATH, blocking=0|1 (0), stream=ADDRESS (the caller's), max_ctas=N.
//
// A communicator is non-blocking unless asked otherwise: a call that NCCL puts off is waited for
// here, against the deadline and against abort(). NCCL's own ends spin for ever while a CUDA graph
// that captured a call lives, so finalize refuses then, and whatever may not end runs aside.

#include "nccl/nccl_communicator.h"

namespace nccl {

namespace {

comm_plugin make_table() {
    comm_plugin table = {};
    table.struct_size = sizeof table;
    table.abi_major = COMM_ABI_MAJOR;
    table.abi_minor = COMM_ABI_MINOR;
    table.name = "nccl";
    table.version = "1";  // of this file; NCCL's own is compared by those who open it
    table.device_type = is_rocm_loaded() ? COMM_ROCM : COMM_CUDA;
    table.unique_id_bytes = sizeof(NcclId);
    table.caps = COMM_CAP_GRAPH_CAPTURE | COMM_CAP_THREADS;
    table.probe = do_probe;
    table.init = do_init;
    table.destroy = do_destroy;
    table.allreduce = do_allreduce;
    table.last_error = do_last_error;
    table.get_unique_id = do_get_unique_id;
    table.broadcast = do_broadcast;
    table.reduce = do_reduce;
    table.allgather = do_allgather;
    table.reduce_scatter = do_reduce_scatter;
    table.alltoall = do_alltoall;
    table.send = do_send;
    table.recv = do_recv;
    table.barrier = do_barrier;
    table.group_start = do_group_start;
    table.group_end = do_group_end;
    table.abort = do_abort;
    table.async_error = do_async_error;
    table.mem_alloc = do_mem_alloc;
    table.mem_free = do_mem_free;
    table.premul_sum_create = do_premul_sum_create;
    table.op_destroy = do_op_destroy;
    table.split = do_split;
    table.finalize = do_finalize;
    return table;
}

}  // namespace

}  // namespace nccl

extern "C" COMM_EXPORT const comm_plugin* comm_plugin_entry_v1(void) {
    static const comm_plugin table = nccl::make_table();
    return &table;
}
