#include "shm/memory.h"

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

constexpr int offset_bits = 44;  // 16 TiB; the rest is the id
constexpr uint64_t offset_mask = (UINT64_C(1) << offset_bits) - 1;
constexpr uint32_t most_ids = UINT32_C(1) << (64 - offset_bits);

Failure cannot(int rank, const char* what, size_t nbytes, const std::string& why) {
    return {COMM_SYSTEM_ERROR, "rank " + std::to_string(rank) + ": " + what + " of " +
                                   std::to_string(nbytes) + " bytes of shared memory failed (" +
                                   why + "). Free tensors made by empty(), or use ordinary ones"};
}

Failure cannot(int rank, const char* what, size_t nbytes, int error) {
    return cannot(rank, what, nbytes, std::string(std::strerror(error)));
}

char* map(int fd, size_t nbytes) {
    void* base = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    return base == MAP_FAILED ? nullptr : static_cast<char*>(base);
}

}  // namespace

Memory::~Memory() {
    for (const auto& mappings : theirs_)
        for (const Mapping& mapping : mappings)
            if (mapping.base != nullptr) munmap(mapping.base, mapping.nbytes);
    for (const Mapping& mapping : own_)
        close(segment_.block(rank_).regions[mapping.id % most_regions].fd);
}

void* Memory::allocate(size_t nbytes) {
    if (segment_.layout().nranks == 1)
        throw Failure{COMM_UNSUPPORTED,
                      "rank 0: one rank alone shares no memory. Use ordinary tensors"};
    Room room = find_room();
    if (nbytes > room.nbytes)
        throw cannot(rank_, "allocation", nbytes, describe_lack(ENOMEM, room));
    nbytes = round_up(nbytes > 0 ? nbytes : 1, page);
    if (own_.size() == most_regions) throw cannot(rank_, "one more allocation", nbytes, ENOSPC);
    do ++last_id_;
    while (segment_.block(rank_).regions[last_id_ % most_regions].id.load() != 0);
    if (last_id_ >= most_ids) throw cannot(rank_, "numbering an allocation", nbytes, EOVERFLOW);
    int fd = memfd_create("drumline-tensor", MFD_CLOEXEC);
    int error = fd < 0 ? errno : take_memory(fd, nbytes, &room);
    char* base = error == 0 ? map(fd, nbytes) : nullptr;
    if (base == nullptr) {
        error = error == 0 ? errno : error;
        if (fd >= 0) close(fd);
        throw cannot(rank_, "allocation", nbytes, describe_lack(error, room));
    }
    Region& region = segment_.block(rank_).regions[last_id_ % most_regions];
    region.fd = fd;
    region.nbytes = nbytes;
    region.id.store(last_id_, std::memory_order_release);
    own_.push_back({last_id_, base, nbytes});
    return base;
}

void Memory::free(void* pointer) {
    for (size_t i = 0; i < own_.size(); ++i) {
        if (own_[i].base != pointer) continue;
        Region& region = segment_.block(rank_).regions[own_[i].id % most_regions];
        region.id.store(0, std::memory_order_release);
        close(region.fd);
        munmap(own_[i].base, own_[i].nbytes);
        own_.erase(own_.begin() + static_cast<std::ptrdiff_t>(i));
        return;
    }
    throw Failure{COMM_INVALID_ARGUMENT,
                  "rank " + std::to_string(rank_) +
                      ": this is no memory of this communicator, which cannot give back what it "
                      "did not give. Free it where it was allocated"};
}

uint64_t Memory::where(const void* pointer, size_t nbytes) const {
    const char* first = static_cast<const char*>(pointer);
    for (const Mapping& mapping : own_)
        if (first >= mapping.base && first + nbytes <= mapping.base + mapping.nbytes)
            return static_cast<uint64_t>(mapping.id) << offset_bits |
                   static_cast<uint64_t>(first - mapping.base);
    return 0;
}

char* Memory::at(int rank, uint64_t where) {
    uint32_t id = static_cast<uint32_t>(where >> offset_bits);
    return attach(rank, id) + (where & offset_mask);
}

char* Memory::attach(int rank, uint32_t id) {
    for (const Mapping& mapping : own_)
        if (rank == rank_ && mapping.id == id) return mapping.base;
    theirs_.resize(segment_.layout().nranks, std::vector<Mapping>(most_regions));
    Mapping& mapping = theirs_[rank][id % most_regions];
    if (mapping.base != nullptr && mapping.id == id) return mapping.base;
    if (mapping.base != nullptr) munmap(mapping.base, mapping.nbytes);
    mapping = {};
    const RankBlock& owner = segment_.block(rank);
    const Region& region = owner.regions[id % most_regions];
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", owner.identity.pid, region.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    char* base = fd < 0 ? nullptr : map(fd, region.nbytes);
    int error = errno;
    if (fd >= 0) close(fd);
    if (base == nullptr) throw cannot(rank_, "attaching to a peer's tensor", region.nbytes, error);
    mapping = {id, base, region.nbytes};
    return base;
}

}  // namespace shm
