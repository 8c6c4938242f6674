// How a communicator over NCCL starts: options, the library, and a meeting with a deadline.
#include <cstdlib>
#include <cstring>

#include "nccl/nccl_communicator.h"

namespace nccl {

namespace {

constexpr int CAPABILITY_MAJOR = 75;  // cudaDevAttrComputeCapabilityMajor

thread_local std::string setup_error;

comm_result refuse_setup(comm_result code, const comm_init_args* args, const std::string& text) {
    setup_error = "rank " + std::to_string(args->rank) + ": " + text;
    return code;
}

// Applies "key=value"; false if the key is not known.
bool apply_option(Group& group, const std::string& key, const char* value, std::string* path) {
    if (key == "library")
        *path = value;
    else if (key == "blocking")
        group.blocking = std::strcmp(value, "1") == 0;
    else if (key == "stream")
        group.stream = reinterpret_cast<NcclStream>(std::strtoull(value, nullptr, 0));
    else if (key == "max_ctas")
        group.max_ctas = std::atoi(value);
    else
        return false;
    return true;
}

comm_result apply_options(Group& group, const comm_init_args* args, std::string* path) {
    for (const char* const* option = args->options; option && *option; ++option) {
        const char* equals = std::strchr(*option, '=');
        std::string key = equals != nullptr ? std::string(*option, equals - *option) : *option;
        if (equals == nullptr || !apply_option(group, key, equals + 1, path))
            return refuse_setup(COMM_INVALID_ARGUMENT, args,
                                std::string(*option) +
                                    " is no option of nccl. There are: "
                                    "library, blocking, stream, max_ctas");
    }
    return COMM_OK;
}

void take_places(Group& group, const comm_init_args* args) {
    group.rank = args->rank;
    group.nranks = args->nranks;
    group.ordinal = args->device < 0 ? 0 : args->device;
    group.timeout = std::chrono::milliseconds(args->timeout_ms);
    group.device = find_device_library();
    if (group.device.attribute != nullptr)
        group.device.attribute(&group.chip, CAPABILITY_MAJOR, group.ordinal);
}

// Everything a rank can check alone.
comm_result prepare(Group& group, const comm_init_args* args) {
    std::string path, problem;
    comm_result code = apply_options(group, args, &path);
    if (code != COMM_OK) return code;
    if (args->unique_id == nullptr || args->unique_id_bytes != sizeof(NcclId))
        return refuse_setup(COMM_INVALID_ARGUMENT, args, "nccl needs a unique id of 128 bytes");
    if (open_nccl(path.empty() ? nullptr : path.c_str(), &group.nccl, &problem)) return COMM_OK;
    return refuse_setup(
        COMM_UNSUPPORTED, args,
        "NCCL cannot be used" + (path.empty() ? "" : " from " + path) + ": " + problem);
}

// Says through the Coordinator that this rank enters, or why not: it knows who never came, and who
// stays out keeps nobody waiting inside NCCL.
comm_result enter(const comm_init_args* args, comm_result mine) {
    if (args->bootstrap == nullptr || args->nranks == 1) return mine;
    std::vector<comm_result> everyones(args->nranks, COMM_OK);
    comm_result code =
        args->bootstrap->allgather(args->bootstrap->ctx, &mine, everyones.data(), sizeof mine);
    if (code != COMM_OK || mine != COMM_OK) return code != COMM_OK ? code : mine;
    for (int rank = 0; rank < args->nranks; ++rank)
        if (everyones[rank] != COMM_OK)
            return refuse_setup(
                COMM_REMOTE_ERROR, args,
                "rank " + std::to_string(rank) + " cannot start NCCL; its own error says why");
    return COMM_OK;
}

comm_result connect(const Shared& group, const comm_init_args* args) {
    NcclId id;
    std::memcpy(&id, args->unique_id, sizeof id);
    NcclConfig config = config_of(*group);
    CurrentDevice device(group->device, group->ordinal);
    comm_result code = settle(
        *group, "ncclCommInitRankConfig",
        group->nccl.CommInitRankConfig(&group->comm, group->nranks, id, group->rank, &config));
    if (code == COMM_OK && group->device.allocate != nullptr &&
        group->device.allocate(&group->word, sizeof(int32_t)) != 0)
        code = fail(*group, COMM_DEVICE_ERROR, "cudaMalloc of 4 bytes for the barrier failed");
    if (code == COMM_OK) return COMM_OK;
    setup_error = group->error;
    abort_aside(group);
    return code;
}

}  // namespace

comm_result do_init(comm_t* comm, const comm_init_args* args) {
    auto group = std::make_shared<Group>();
    comm_result code = enter(args, prepare(*group, args));
    if (code != COMM_OK) return code;
    take_places(*group, args);
    code = connect(group, args);
    if (code == COMM_OK) *comm = new comm_s{group};
    return code;
}

comm_result do_get_unique_id(void* id) {
    NcclLibrary library;
    if (!open_nccl(nullptr, &library, &setup_error)) return COMM_UNSUPPORTED;
    NcclResult code = library.GetUniqueId(static_cast<NcclId*>(id));
    if (code != COMM_OK) setup_error = library.GetLastError(nullptr);
    return code;
}

comm_result do_probe(int32_t* score) {
    NcclLibrary library;
    if (!open_nccl(nullptr, &library, &setup_error)) return COMM_UNSUPPORTED;
    *score = 200;
    return COMM_OK;
}

const char* do_last_error(comm_t comm) {
    return comm == nullptr ? setup_error.c_str() : comm->group->error.c_str();
}

}  // namespace nccl
