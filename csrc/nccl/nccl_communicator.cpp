#include "nccl/nccl_communicator.h"

namespace nccl {

namespace {

constexpr int YIELDS = 2000;  // before a wait sleeps

void back_off(int attempt) {
    if (attempt < YIELDS)
        std::this_thread::yield();
    else
        std::this_thread::sleep_for(std::chrono::microseconds(100));
}

// An invalid argument is ours, not the caller's: the caller's were checked before.
comm_result to_comm_result(NcclResult code) {
    bool is_defined = code > COMM_OK && code <= COMM_TIMEOUT && code != COMM_IN_PROGRESS;
    if (!is_defined) return COMM_INTERNAL_ERROR;
    return code == COMM_INVALID_ARGUMENT ? COMM_INVALID_USAGE : code;
}

}  // namespace

comm_result NcclCommunicator::fail(const PluginError& failure) {
    error = failure.text;
    return failure.code;
}

PluginError NcclCommunicator::failure(comm_result code, const std::string& text) const {
    return {code, "rank " + std::to_string(rank) + ": " + text};
}

PluginError NcclCommunicator::aborted_failure() const {
    return failure(COMM_REMOTE_ERROR,
                   "this communicator was aborted: a peer was lost, or abort() was called. Close "
                   "it and make a new one");
}

PluginError NcclCommunicator::nccl_failure(const char* call, NcclResult code) const {
    const char* description = nccl.GetErrorString(code);
    const char* detail = nccl.GetLastError(comm);
    std::string text = std::string(call) + " failed in NCCL " + nccl_version_text(nccl.version) +
                       ": " + (description != nullptr ? description : "?");
    if (detail != nullptr && detail[0] != '\0') text += ". " + std::string(detail);
    return failure(to_comm_result(code), text);
}

void NcclCommunicator::check_device(const char* call, int code) const {
    if (code != 0)
        throw failure(COMM_DEVICE_ERROR, std::string(call) + " failed on device " +
                                             std::to_string(ordinal) + " with CUDA's error " +
                                             std::to_string(code) +
                                             ". Look for the first error of this rank");
}

// The state is asked for even after a success: registration answers so before it is done.
void NcclCommunicator::wait_for_nccl(const char* call, NcclResult code) {
    wait_for_nccl(call, code, comm);
}

void NcclCommunicator::wait_for_nccl(const char* call, NcclResult code, NcclComm reporter) {
    if (blocking) {
        if (code != COMM_OK) throw nccl_failure(call, code);
        return;
    }
    auto limit = timeout.load();
    auto deadline = Clock::now() + limit;
    for (int attempt = 0; code == COMM_OK || code == COMM_IN_PROGRESS; ++attempt) {
        NcclResult state = COMM_OK;
        code = nccl.CommGetAsyncError(reporter, &state);
        if (code == COMM_OK && state == COMM_OK) return;
        if (code == COMM_OK) code = state;
        if (code != COMM_IN_PROGRESS) break;
        if (aborting.load(std::memory_order_acquire)) throw aborted_failure();
        if (Clock::now() > deadline)
            throw failure(COMM_TIMEOUT,
                          std::string(call) + " did not complete within " +
                              std::to_string(limit.count()) +
                              " ms: a rank did not make the same call, or cannot be reached. Set "
                              "NCCL_DEBUG=INFO to see more, and NCCL_SOCKET_IFNAME to choose the "
                              "network");
        back_off(attempt);
    }
    throw nccl_failure(call, code);
}

void NcclCommunicator::revoke_in_background() {
    auto deadline = Clock::now() + ABORT_WAIT;
    auto answer = std::make_shared<std::atomic<NcclResult>>(COMM_IN_PROGRESS);
    NcclComm ending = comm;
    auto self = shared_from_this();
    run_bounded(deadline, [self, ending, answer, deadline] {
        NcclResult code = self->nccl.CommRevoke(ending, NCCL_REVOKE_DEFAULT);
        for (int attempt = 0; code == COMM_IN_PROGRESS && Clock::now() < deadline; ++attempt) {
            back_off(attempt);
            NcclResult state = COMM_OK;
            code = self->nccl.CommGetAsyncError(ending, &state);
            if (code == COMM_OK) code = state;
        }
        answer->store(code, std::memory_order_release);
    });
    NcclResult code = answer->load(std::memory_order_acquire);
    if (code != COMM_OK) abort_in_background();
    revoke_code.store(code == COMM_IN_PROGRESS ? COMM_TIMEOUT : code, std::memory_order_release);
}

void NcclCommunicator::check_revoked(const NcclCommunicator& child) {
    auto deadline = Clock::now() + 2 * ABORT_WAIT;
    NcclResult code = COMM_IN_PROGRESS;
    for (int attempt = 0; code == COMM_IN_PROGRESS && Clock::now() < deadline; ++attempt) {
        back_off(attempt);
        code = revokes ? revoke_code.load(std::memory_order_acquire) : COMM_INVALID_USAGE;
    }
    if (code != COMM_OK)
        throw child.failure(COMM_INVALID_USAGE,
                            "shrink_of= takes a communicator that was made with revoke=True and "
                            "has lost a peer. This one could not be revoked: " +
                                std::string(nccl.GetErrorString(code)) + ". Leave shrink_of= out");
}

void NcclCommunicator::abort_in_background() {
    NcclComm ending = comm;
    if (ending == nullptr) return;
    comm = nullptr;
    auto self = shared_from_this();
    run_bounded(Clock::now() + ABORT_WAIT, [self, ending] { self->nccl.CommAbort(ending); });
}

NcclConfig NcclCommunicator::config() const {
    NcclConfig config;
    config.blocking = blocking;
    config.max_ctas = max_ctas;
    return config;
}

}  // namespace nccl
