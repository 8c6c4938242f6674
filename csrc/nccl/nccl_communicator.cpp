#include "nccl/nccl_communicator.h"

namespace nccl {

namespace {

constexpr std::chrono::milliseconds ABORT_WAIT(5000);  // then it goes on aside
constexpr int SPINS = 2000;                            // before a wait sleeps

std::string rank_of(const Group& group) { return "rank " + std::to_string(group.rank) + ": "; }

void pause(int turn) {
    if (turn < SPINS)
        std::this_thread::yield();
    else
        std::this_thread::sleep_for(std::chrono::microseconds(100));
}

}  // namespace

comm_result fail(Group& group, comm_result code, const std::string& text) {
    group.error = rank_of(group) + text;
    return code;
}

comm_result fail_aborted(Group& group) {
    return fail(group, COMM_REMOTE_ERROR,
                "this communicator was aborted, for a peer is gone or abort() was called. Close it "
                "and make a new one");
}

comm_result fail_nccl(Group& group, const char* call, NcclResult code) {
    const char* said = group.nccl.GetErrorString(code);
    const char* detail = group.nccl.GetLastError(group.comm);
    std::string text = std::string(call) + " failed in NCCL " +
                       nccl_version_text(group.nccl.version) + ": " + (said ? said : "?");
    if (detail != nullptr && detail[0] != '\0') text += ". " + std::string(detail);
    bool known = code > COMM_OK && code <= COMM_TIMEOUT && code != COMM_IN_PROGRESS;
    comm_result mapped = known ? code : COMM_INTERNAL_ERROR;
    if (mapped == COMM_INVALID_ARGUMENT) mapped = COMM_INVALID_USAGE;  // ours were checked before
    return fail(group, mapped, text);
}

comm_result settle(Group& group, const char* call, NcclResult code) {
    if (group.blocking) return code == COMM_OK ? COMM_OK : fail_nccl(group, call, code);
    auto deadline = Clock::now() + group.timeout;
    for (int turn = 0; code == COMM_OK || code == COMM_IN_PROGRESS; ++turn) {
        NcclResult state = COMM_OK;
        code = group.nccl.CommGetAsyncError(group.comm, &state);
        if (code == COMM_OK && state == COMM_OK) return COMM_OK;
        if (code == COMM_OK) code = state;
        if (code != COMM_IN_PROGRESS) break;
        if (group.aborting.load(std::memory_order_acquire)) return fail_aborted(group);
        if (Clock::now() > deadline)
            return fail(group, COMM_TIMEOUT,
                        std::string(call) + " was not done after " +
                            std::to_string(group.timeout.count()) +
                            " ms: some rank did not make the same call, or cannot be reached. "
                            "NCCL_DEBUG=INFO and NCCL_SOCKET_IFNAME may help");
        pause(turn);
    }
    return fail_nccl(group, call, code);
}

void abort_aside(const Shared& group) {
    NcclComm comm = group->comm;
    if (comm == nullptr) return;
    group->comm = nullptr;
    auto abort = [group, comm] { group->nccl.CommAbort(comm); };
    run_bounded(Clock::now() + ABORT_WAIT, abort);
}

NcclConfig config_of(const Group& group) {
    NcclConfig config;
    config.blocking = group.blocking;
    config.max_ctas = group.max_ctas;
    return config;
}

}  // namespace nccl
