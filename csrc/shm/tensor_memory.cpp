#include "shm/tensor_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "system/memory_limit.h"

namespace shm {
namespace {

constexpr int offset_bits = 44;  // 16 TiB; the rest is the place of the region, from 1 on
constexpr uint64_t offset_mask = (UINT64_C(1) << offset_bits) - 1;

PluginError no_memory(int rank, const char* action, size_t nbytes, const std::string& reason) {
    return {COMM_SYSTEM_ERROR, "rank " + std::to_string(rank) + ": " + action + " of " +
                                   std::to_string(nbytes) + " bytes of shared memory failed (" +
                                   reason +
                                   "). Free tensors made by empty(), or use ordinary ones"};
}

PluginError no_memory(int rank, const char* action, size_t nbytes, int error) {
    return no_memory(rank, action, nbytes, std::string(std::strerror(error)));
}

char* map(int fd, size_t nbytes) {
    void* base = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    return base == MAP_FAILED ? nullptr : static_cast<char*>(base);
}

}  // namespace

TensorMemory::~TensorMemory() {
    for (const auto& mappings : peer_mappings_)
        for (const Mapping& mapping : mappings)
            if (mapping.base != nullptr) munmap(mapping.base, mapping.nbytes);
    for (const Mapping& mapping : own_mappings_)
        close(segment_.block(rank_).regions[mapping.id % max_regions].fd);
}

void* TensorMemory::allocate(size_t nbytes) {
    if (segment_.layout().nranks == 1)
        throw PluginError{
            COMM_UNSUPPORTED,
            "rank 0: a communicator of one rank has no shared memory. Use ordinary tensors"};
    MemoryLimit limit = find_memory_limit();
    if (nbytes > limit.available_bytes)
        throw no_memory(rank_, "allocation", nbytes, describe_shortage(ENOMEM, limit));
    nbytes = round_up(nbytes > 0 ? nbytes : 1, page_bytes);
    if (own_mappings_.size() == max_regions)
        throw no_memory(rank_, "one more allocation", nbytes, ENOSPC);
    do ++last_id_;
    while (segment_.block(rank_).regions[last_id_ % max_regions].id.load() != 0);
    int fd = memfd_create("drumline-tensor", MFD_CLOEXEC);
    int error = fd < 0 ? errno : allocate_file_memory(fd, nbytes, &limit);
    char* base = error == 0 ? map(fd, nbytes) : nullptr;
    if (base == nullptr) {
        error = error == 0 ? errno : error;
        if (fd >= 0) close(fd);
        throw no_memory(rank_, "allocation", nbytes, describe_shortage(error, limit));
    }
    SharedMemory& region = segment_.block(rank_).regions[last_id_ % max_regions];
    region.fd = fd;
    region.nbytes = nbytes;
    region.id.store(last_id_, std::memory_order_release);
    own_mappings_.push_back({last_id_, base, nbytes});
    return base;
}

void TensorMemory::free(void* pointer) {
    for (size_t i = 0; i < own_mappings_.size(); ++i) {
        if (own_mappings_[i].base != pointer) continue;
        SharedMemory& region = segment_.block(rank_).regions[own_mappings_[i].id % max_regions];
        region.id.store(0, std::memory_order_release);
        // Mappings of peers would keep it, until they need their place.
        fallocate(region.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, region.nbytes);
        close(region.fd);
        munmap(own_mappings_[i].base, own_mappings_[i].nbytes);
        own_mappings_.erase(own_mappings_.begin() + static_cast<std::ptrdiff_t>(i));
        return;
    }
    throw PluginError{
        COMM_INVALID_ARGUMENT,
        "rank " + std::to_string(rank_) +
            ": this address was not allocated by this communicator. Free it where it was "
            "allocated"};
}

uint64_t TensorMemory::reference(const void* pointer, size_t nbytes) const {
    const char* first = static_cast<const char*>(pointer);
    for (const Mapping& mapping : own_mappings_)
        if (first >= mapping.base && first + nbytes <= mapping.base + mapping.nbytes)
            return (mapping.id % max_regions + 1) << offset_bits |
                   static_cast<uint64_t>(first - mapping.base);
    return 0;
}

char* TensorMemory::resolve(int rank, uint64_t reference) {
    return attach(rank, (reference >> offset_bits) - 1) + (reference & offset_mask);
}

char* TensorMemory::attach(int rank, uint64_t place) {
    const RankBlock& owner = segment_.block(rank);
    const SharedMemory& region = owner.regions[place];
    uint64_t id = region.id.load(std::memory_order_acquire);
    for (const Mapping& mapping : own_mappings_)
        if (rank == rank_ && mapping.id == id) return mapping.base;
    if (id == 0)  // its owner gave up the call
        throw no_memory(rank_, "attaching to a peer's freed tensor", region.nbytes, ENOENT);
    peer_mappings_.resize(segment_.layout().nranks, std::vector<Mapping>(max_regions));
    Mapping& mapping = peer_mappings_[rank][place];
    if (mapping.base != nullptr && mapping.id == id) return mapping.base;
    if (mapping.base != nullptr) munmap(mapping.base, mapping.nbytes);
    mapping = {};
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", owner.identity.pid, region.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    char* base = fd < 0 ? nullptr : map(fd, region.nbytes);
    int error = errno;
    if (fd >= 0) close(fd);
    if (base == nullptr)
        throw no_memory(rank_, "attaching to a peer's tensor", region.nbytes, error);
    mapping = {id, base, region.nbytes};
    return base;
}

}  // namespace shm
