// How a communicator over NCCL starts: options, the library, and a rendezvous with a deadline.
#include <cstdlib>
#include <cstring>
#include <optional>

#include "nccl/nccl_communicator.h"
#include "plugin/make_plugin.h"

namespace nccl {

namespace {

constexpr int CAPABILITY_MAJOR = 75;  // cudaDevAttrComputeCapabilityMajor
constexpr int FIRST_REVOKE = 22807, FIRST_SHRINK = 22703;

// The ranks of "1:4:6".
std::vector<int> read_ranks(const char* text) {
    std::vector<int> ranks;
    for (char* end; *text != '\0'; text = *end == ':' ? end + 1 : end)
        ranks.push_back(static_cast<int>(std::strtol(text, &end, 10)));
    return ranks;
}

// The communicator of the handle at an address, which is 0 once it is closed.
std::shared_ptr<NcclCommunicator> revoked_parent(const NcclCommunicator& child, const char* text) {
    auto handle = reinterpret_cast<comm_t>(std::strtoull(text, nullptr, 0));
    auto* parent = plugin::from_handle<NcclCommunicator>(handle);
    if (parent == nullptr)
        throw child.failure(COMM_INVALID_USAGE,
                            "shrink_of= takes a communicator that has lost a peer, before it is "
                            "closed. Leave shrink_of= out");
    (*parent)->check_revoked(child);
    return *parent;
}

// Applies "key=value"; false if there is no such key.
bool apply_option(NcclCommunicator& communicator, const std::string& key, const char* value,
                  std::string* path) {
    if (key == "library")
        *path = value;
    else if (key == "blocking")
        communicator.blocking = std::strcmp(value, "1") == 0;
    else if (key == "stream")
        communicator.fixed_stream = reinterpret_cast<NcclStream>(std::strtoull(value, nullptr, 0));
    else if (key == "max_ctas")
        communicator.max_ctas = std::atoi(value);
    else if (key == "revoke")
        communicator.revokes = std::strcmp(value, "1") == 0;
    else if (key == "parent")
        communicator.parent = revoked_parent(communicator, value);
    else if (key == "excluded")
        communicator.excluded = read_ranks(value);
    else
        return false;
    return true;
}

// Exchanges through the Coordinator whether this rank can start. It knows who never came, and
// nobody waits inside NCCL for a rank that cannot.
void agree_to_start(const NcclCommunicator& communicator, const comm_init_args& args,
                    const std::optional<PluginError>& own_failure) {
    const comm_bootstrap* bootstrap = communicator.nranks > 1 ? args.bootstrap : nullptr;
    comm_result own = own_failure ? own_failure->code : comm_result{COMM_OK}, exchanged = COMM_OK;
    std::vector<comm_result> codes(communicator.nranks, COMM_OK);
    if (bootstrap != nullptr)
        exchanged = bootstrap->allgather(bootstrap->ctx, &own, codes.data(), sizeof own);
    if (own_failure) throw *own_failure;
    if (exchanged != COMM_OK)
        throw communicator.failure(
            exchanged, "the ranks could not agree to start NCCL: a peer was lost before");
    for (int rank = 0; rank < communicator.nranks; ++rank)
        if (codes[rank] != COMM_OK)
            throw communicator.failure(
                COMM_REMOTE_ERROR,
                "rank " + std::to_string(rank) + " cannot start NCCL. See the error of that rank");
}

// The NCCL of this process, for entries without a communicator.
NcclLibrary open_default_library() {
    NcclLibrary library;
    std::string problem;
    if (!open_nccl(nullptr, &library, &problem)) throw PluginError{COMM_UNSUPPORTED, problem};
    return library;
}

}  // namespace

void NcclCommunicator::apply_options(const comm_init_args& args, std::string* path) {
    for (const char* const* option = args.options; option && *option; ++option) {
        const char* equals = std::strchr(*option, '=');
        std::string key = equals != nullptr ? std::string(*option, equals - *option) : *option;
        if (equals == nullptr || !apply_option(*this, key, equals + 1, path))
            throw failure(COMM_INVALID_ARGUMENT,
                          std::string(*option) +
                              " is not an option of nccl. The options are library, blocking, "
                              "stream, max_ctas, revoke, parent and excluded");
    }
}

// Everything that a rank can check alone.
void NcclCommunicator::open_library(const comm_init_args& args) {
    std::string path, problem;
    apply_options(args, &path);
    if (args.unique_id == nullptr || args.unique_id_bytes != sizeof(NcclId))
        throw failure(COMM_INVALID_ARGUMENT, "nccl needs a unique id of 128 bytes");
    if (!open_nccl(path.empty() ? nullptr : path.c_str(), &nccl, &problem))
        throw failure(COMM_UNSUPPORTED, "NCCL cannot be used" +
                                            (path.empty() ? "" : " from " + path) + ": " + problem);
    if (revokes && nccl.CommRevoke == nullptr)
        throw failure(COMM_UNSUPPORTED, nccl_not_supported(nccl, "revoke", FIRST_REVOKE));
    if (parent != nullptr && nccl.CommShrink == nullptr)
        throw failure(COMM_UNSUPPORTED, nccl_not_supported(nccl, "shrink_of", FIRST_SHRINK));
}

void NcclCommunicator::find_device(const comm_init_args& args) {
    ordinal = args.device < 0 ? 0 : args.device;
    device = find_device_library();
    if (device.attribute != nullptr && device.attribute(&sm_major, CAPABILITY_MAJOR, ordinal) != 0)
        sm_major = 0;
}

void NcclCommunicator::shrink_parent(NcclConfig* config) {
    auto shrunk = std::make_unique<NcclComm>(nullptr);  // NCCL fills it in later
    std::lock_guard<std::timed_mutex> lock(parent->mutex);
    if (parent->comm == nullptr) throw aborted_failure();
    NcclResult code =
        nccl.CommShrink(parent->comm, excluded.data(), static_cast<int>(excluded.size()),
                        shrunk.get(), config, NCCL_SHRINK_DEFAULT);
    try {
        wait_for_nccl("ncclCommShrink", code, parent->comm);
    } catch (const PluginError&) {
        shrunk.release();  // leaked: NCCL may still write to it
        throw;
    }
    comm = *shrunk;
    parent.reset();
}

void NcclCommunicator::connect(const comm_init_args& args) {
    NcclId id;
    std::memcpy(&id, args.unique_id, sizeof id);
    NcclConfig init_config = config();
    CurrentDevice current(device, ordinal);
    try {
        check_device("cudaSetDevice", current.code());
        if (parent != nullptr)
            shrink_parent(&init_config);
        else
            wait_for_nccl("ncclCommInitRankConfig",
                          nccl.CommInitRankConfig(&comm, nranks, id, rank, &init_config));
        if (device.allocate != nullptr)
            check_device("cudaMalloc of 4 bytes for the barrier",
                         device.allocate(&barrier_word, sizeof(int32_t)));
    } catch (const PluginError&) {
        abort_in_background();
        throw;
    }
}

std::shared_ptr<NcclCommunicator> NcclCommunicator::init(const comm_init_args& args) {
    auto communicator = std::make_shared<NcclCommunicator>();
    communicator->rank = args.rank;
    communicator->nranks = args.nranks;
    communicator->timeout = std::chrono::milliseconds(args.timeout_ms);
    std::optional<PluginError> own_failure;
    try {
        communicator->open_library(args);
    } catch (const PluginError& failure) {
        own_failure = failure;
    }
    agree_to_start(*communicator, args, own_failure);
    communicator->find_device(args);
    communicator->connect(args);
    return communicator;
}

void NcclCommunicator::get_unique_id(void* id) {
    NcclLibrary library = open_default_library();
    NcclResult code = library.GetUniqueId(static_cast<NcclId*>(id));
    if (code != COMM_OK) throw PluginError{code, library.GetLastError(nullptr)};
}

int32_t NcclCommunicator::probe() {
    open_default_library();
    return 200;
}

}  // namespace nccl
