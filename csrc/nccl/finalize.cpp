// How a communicator over NCCL is split, and how it ends.
#include <algorithm>
#include <optional>

#include "nccl/nccl_communicator.h"
#include "plugin/make_plugin.h"

namespace nccl {

namespace {

constexpr std::chrono::milliseconds CALL_EXIT_WAIT(1000);  // for a call in progress to return
constexpr std::chrono::milliseconds GRAPH_WAIT(1000);      // CUDA reports a graph's end late
constexpr std::chrono::milliseconds FINALIZE_MARGIN(500);  // beyond the timeout of the call itself

}  // namespace

std::shared_ptr<NcclCommunicator> NcclCommunicator::make_child(NcclComm child_comm) {
    auto child = std::make_shared<NcclCommunicator>();
    child->nccl = nccl;
    child->device = device;
    child->comm = child_comm;
    child->ordinal = ordinal;
    child->sm_major = sm_major;
    child->timeout = timeout.load();
    child->blocking = blocking;
    child->fixed_stream = fixed_stream;
    child->max_ctas = max_ctas;
    child->revokes = revokes;
    CurrentDevice current(device, ordinal);
    bool is_usable = nccl.CommCount(child_comm, &child->nranks) == COMM_OK &&
                     nccl.CommUserRank(child_comm, &child->rank) == COMM_OK;
    is_usable = is_usable && current.code() == 0;
    if (is_usable && device.allocate != nullptr)
        is_usable = device.allocate(&child->barrier_word, sizeof(int32_t)) == 0;
    if (is_usable) return child;
    child->abort_in_background();
    throw failure(COMM_DEVICE_ERROR,
                  "ncclCommSplit made a subgroup that cannot be used: its size, rank or four bytes "
                  "of device memory could not be had. Free device memory and split again");
}

void NcclCommunicator::split(int32_t color, int32_t key, comm_t* child) {
    *child = nullptr;
    auto child_comm = std::make_unique<NcclComm>(nullptr);  // NCCL fills it in later
    try {
        locked("ncclCommSplit", [&] {
            NcclConfig child_config = config();
            return nccl.CommSplit(comm, color, key, child_comm.get(), &child_config);
        });
    } catch (const PluginError&) {
        child_comm.release();  // leaked: NCCL may still write to it
        throw;
    }
    if (color >= 0) *child = plugin::to_handle(make_child(*child_comm));
}

bool NcclCommunicator::wait_for_graphs() {
    auto deadline = Clock::now() + std::min(GRAPH_WAIT, timeout.load());
    while (graphs.live() > 0 && Clock::now() < deadline)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return graphs.live() == 0;
}

void NcclCommunicator::finalize_and_destroy() {
    CurrentDevice current(device, ordinal);
    for (const RegisteredMemory& memory : registered) deregister(memory);
    registered.clear();  // the memory itself belongs to the tensors in it
    for (const ScaledSum& sum : scaled_sums) nccl.RedOpDestroy(sum.op, comm);
    scaled_sums.clear();
    wait_for_nccl("ncclCommFinalize", nccl.CommFinalize(comm));
    int released = barrier_word != nullptr ? device.release(barrier_word) : 0;
    barrier_word = nullptr;
    NcclComm ending = comm;
    comm = nullptr;
    NcclResult code = nccl.CommDestroy(ending);
    if (code != COMM_OK) throw nccl_failure("ncclCommDestroy", code);
    check_device("cudaFree of the barrier's word", released);
}

// NCCL's own end waits without a deadline, so it runs on a thread that can be left behind.
void NcclCommunicator::finalize() {
    std::lock_guard<std::timed_mutex> lock(mutex);
    if (finalized || aborting.load(std::memory_order_acquire)) return;
    if (!wait_for_graphs())
        throw failure(COMM_INVALID_USAGE,
                      "close() while " + std::to_string(graphs.live()) +
                          " CUDA graph(s) that captured this communicator are alive: NCCL would "
                          "wait for them forever. Delete or reset() the graphs first, or call "
                          "abort()");
    finalized = true;
    auto self = shared_from_this();
    auto error_of_thread = std::make_shared<std::optional<PluginError>>();
    auto deadline = Clock::now() + timeout.load() + FINALIZE_MARGIN;
    bool is_done = run_bounded(deadline, [self, error_of_thread] {
        try {
            self->finalize_and_destroy();
        } catch (const PluginError& failure) {
            *error_of_thread = failure;
        }
    });
    if (is_done && !error_of_thread->has_value()) return;
    aborting.store(true, std::memory_order_release);
    if (is_done) {
        abort_in_background();
        throw **error_of_thread;
    }
    throw failure(COMM_TIMEOUT,
                  "ncclCommFinalize did not return within its deadline. The communicator is "
                  "leaked until the process ends");
}

// From any thread. Calls that wait return at once; one that NCCL keeps inside is ended by the
// abort. The second time ends what the first has only revoked.
void NcclCommunicator::abort() {
    bool is_first = !aborting.exchange(true, std::memory_order_acq_rel);
    if (!is_first && !revokes) return;
    std::unique_lock<std::timed_mutex> lock(mutex, std::defer_lock);
    lock.try_lock_for(is_first ? CALL_EXIT_WAIT : CALL_EXIT_WAIT + ABORT_WAIT);
    if (finalized) return;
    if (is_first && revokes)
        revoke_in_background();
    else
        abort_in_background();
}

}  // namespace nccl
