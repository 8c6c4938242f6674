// How a communicator over NCCL is split, and how it ends.
#include "nccl/nccl_communicator.h"

namespace nccl {

namespace {

constexpr std::chrono::milliseconds LEAVE_WAIT(1000);  // for a call that is being made
constexpr std::chrono::milliseconds GRAPH_WAIT(1000);  // a graph's end is told late

comm_result take_child(Group& parent, NcclComm made, comm_t* child) {
    auto group = std::make_shared<Group>();
    group->nccl = parent.nccl;
    group->device = parent.device;
    group->comm = made;
    group->ordinal = parent.ordinal;
    group->chip = parent.chip;
    group->timeout = parent.timeout;
    group->blocking = parent.blocking;
    group->stream = parent.stream;
    group->max_ctas = parent.max_ctas;
    CurrentDevice device(group->device, group->ordinal);
    bool whole = group->nccl.CommCount(made, &group->nranks) == COMM_OK &&
                 group->nccl.CommUserRank(made, &group->rank) == COMM_OK;
    if (whole && group->device.allocate != nullptr)
        whole = group->device.allocate(&group->word, sizeof(int32_t)) == 0;
    if (!whole) {
        abort_aside(group);
        return fail(parent, COMM_DEVICE_ERROR, "the subgroup was made but cannot be used");
    }
    *child = new comm_s{group};
    return COMM_OK;
}

bool wait_for_graphs(Group& group) {
    auto deadline = Clock::now() + GRAPH_WAIT;
    while (group.graphs.live() > 0 && Clock::now() < deadline)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return group.graphs.live() == 0;
}

comm_result finalize_and_destroy(Group& group) {
    CurrentDevice device(group.device, group.ordinal);
    for (const Window& window : group.windows) deregister_window(group, window);
    group.windows.clear();  // the memory itself belongs to the tensors in it
    for (const ScaledSum& sum : group.scaled_sums) group.nccl.RedOpDestroy(sum.op, group.comm);
    group.scaled_sums.clear();
    comm_result code = settle(group, "ncclCommFinalize", group.nccl.CommFinalize(group.comm));
    if (code != COMM_OK) return code;
    if (group.word != nullptr) group.device.release(group.word);
    group.word = nullptr;
    NcclComm comm = group.comm;
    group.comm = nullptr;
    NcclResult result = group.nccl.CommDestroy(comm);
    return result == COMM_OK ? COMM_OK : fail_nccl(group, "ncclCommDestroy", result);
}

comm_result refuse_end(Group& group) {
    return fail(group, COMM_INVALID_USAGE,
                "close() while " + std::to_string(group.graphs.live()) +
                    " CUDA graph(s) that captured this communicator are alive: NCCL would wait for "
                    "them for ever. Delete or reset() the graphs first, or call abort()");
}

}  // namespace

comm_result do_split(comm_t comm, int32_t color, int32_t key, comm_t* child) {
    *child = nullptr;
    auto made = std::make_unique<NcclComm>(nullptr);  // NCCL fills it in later
    comm_result code = locked(comm, "ncclCommSplit", [&](Group& group) {
        NcclConfig config = config_of(group);
        return group.nccl.CommSplit(group.comm, color, key, made.get(), &config);
    });
    if (code != COMM_OK) made.release();
    if (code != COMM_OK || color < 0) return code;
    return take_child(*comm->group, *made, child);
}

comm_result do_finalize(comm_t comm) {
    Shared group = comm->group;
    std::lock_guard<std::timed_mutex> lock(group->inside);
    if (group->ended || group->aborting.load(std::memory_order_acquire)) return COMM_OK;
    if (!wait_for_graphs(*group)) return refuse_end(*group);
    group->ended = true;
    auto code = std::make_shared<comm_result>(COMM_OK);
    auto margin = group->timeout + std::chrono::milliseconds(500);
    bool done =
        run_bounded(Clock::now() + margin, [group, code] { *code = finalize_and_destroy(*group); });
    if (done && *code == COMM_OK) return COMM_OK;
    group->aborting.store(true, std::memory_order_release);
    if (done) {
        abort_aside(group);
        return *code;
    }
    return fail(*group, COMM_TIMEOUT,
                "NCCL did not end the communicator within its deadline. It is left as it is");
}

comm_result do_abort(comm_t comm) {
    Shared group = comm->group;
    if (group->aborting.exchange(true, std::memory_order_acq_rel)) return COMM_OK;
    // Calls that wait leave at once; one that NCCL keeps inside is ended by the abort itself.
    std::unique_lock<std::timed_mutex> lock(group->inside, std::defer_lock);
    lock.try_lock_for(LEAVE_WAIT);
    if (!group->ended) abort_aside(group);
    return COMM_OK;
}

// Not collective, so a communicator that was not finalized is left to the end of the process.
comm_result do_destroy(comm_t comm) {
    delete comm;
    return COMM_OK;
}

}  // namespace nccl
