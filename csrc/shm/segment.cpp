#include "shm/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <utility>
#include <vector>

#include "system/proc_file.h"
#include "system/memory_limit.h"

namespace shm {

void Bootstrap::allgather(const void* mine, void* everyones, size_t bytes_per_rank) const {
    comm_result code = callbacks_->allgather(callbacks_->ctx, mine, everyones, bytes_per_rank);
    if (code != COMM_OK)
        throw Failure{code,
                      "rank " + std::to_string(rank) +
                          ": exchanging the setup of shared memory with the other ranks failed, so "
                          "none can join. Look at what those printed, and start again"};
}

namespace {

std::string read_link(const char* path) {
    char target[256];
    ssize_t length = readlink(path, target, sizeof target);
    return length > 0 ? std::string(target, length) : std::string();
}

struct ProcessStatus {
    char state = 0;  // 0 if there is no such process
    uint64_t start_time = 0;
};

// Fields 3 and 22 of /proc/PID/stat, proc_pid_stat(5); field 2 is a name that may hold anything.
ProcessStatus status_of(int32_t pid) {
    std::string text = read_file("/proc/" + std::to_string(pid) + "/stat");
    size_t position = text.rfind(')');
    if (position == std::string::npos || position + 2 >= text.size()) return {};
    ProcessStatus status;
    status.state = text[position + 2];
    for (int field = 2; field < 22 && position != std::string::npos; ++field)
        position = text.find(' ', position + 1);
    if (position != std::string::npos)
        status.start_time = strtoull(text.c_str() + position, nullptr, 10);
    return status;
}

uint64_t pid_namespace() {
    struct stat status;
    return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

// Random, so that no two segments are ever taken for each other.
struct Nonce {
    uint64_t words[2];
};

// What rank 0 offers; the others attach to it.
struct Offer {
    Nonce nonce;
    char boot_id[40];
    uint64_t pid_namespace;
    int32_t pid;
    int32_t fd;
    int32_t error;
    char lack[160];  // the error in words
};

std::string memory_name(const Nonce& nonce) {
    char name[64];
    snprintf(name, sizeof name, "drumline-%016llx%016llx",
             static_cast<unsigned long long>(nonce.words[0]),
             static_cast<unsigned long long>(nonce.words[1]));
    return name;
}

void fill_identity(Offer& offer) {
    snprintf(offer.boot_id, sizeof offer.boot_id, "%s",
             read_file("/proc/sys/kernel/random/boot_id").c_str());
    offer.pid_namespace = pid_namespace();
    offer.pid = getpid();
}

int make_memory(Offer& offer, size_t nbytes, Room* room) {
    if (getrandom(&offer.nonce, sizeof offer.nonce, 0) != sizeof offer.nonce) return errno;
    offer.fd = memfd_create(memory_name(offer.nonce).c_str(), MFD_CLOEXEC);
    if (offer.fd < 0) return errno;
    return take_memory(offer.fd, nbytes, room);
}

Offer make_offer(const Bootstrap& bootstrap, size_t nbytes) {
    Offer offer = {};
    offer.fd = -1;
    fill_identity(offer);
    if (bootstrap.rank != 0) return offer;
    Room room = {0, nullptr};
    offer.error = make_memory(offer, nbytes, &room);
    snprintf(offer.lack, sizeof offer.lack, "%s", describe_lack(offer.error, room).c_str());
    return offer;
}

// Opened through the maker's descriptor, so there is no name that could leak. The link is read
// first: on another host the same path may be any file at all.
int open_offer(const Offer& offer, const Offer& mine) {
    if (std::strcmp(offer.boot_id, mine.boot_id) != 0 || offer.pid_namespace != mine.pid_namespace)
        return -EXDEV;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", offer.pid, offer.fd);
    if (read_link(path).find(memory_name(offer.nonce)) == std::string::npos) return -EXDEV;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    return fd < 0 ? -errno : fd;
}

char* map_memory(int fd, size_t nbytes, int32_t& error) {
    void* base = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (base != MAP_FAILED) return static_cast<char*>(base);
    error = errno;
    return nullptr;
}

char* attach(const Offer& offer, const Offer& mine, size_t nbytes, int32_t& error) {
    int fd = open_offer(offer, mine);
    if (fd < 0) {
        error = -fd;
        return nullptr;
    }
    char* base = map_memory(fd, nbytes, error);
    close(fd);
    return base;
}

Failure no_memory(int rank, const Offer& offer, size_t nbytes) {
    return {
        COMM_SYSTEM_ERROR,
        "rank " + std::to_string(rank) + ": rank 0 could not get " + std::to_string(nbytes) +
            " bytes of shared memory (" + offer.lack +
            "). The shared-memory communicator exchanges tensors through them. Free memory, raise "
            "the memory limit of the container, or use backend=\"gloo\""};
}

Failure not_attached(int rank, int who, int32_t error) {
    bool elsewhere = error == EXDEV;
    return {
        elsewhere ? COMM_UNSUPPORTED : COMM_SYSTEM_ERROR,
        "rank " + std::to_string(rank) + ": rank " + std::to_string(who) +
            " cannot attach to the memory of rank 0 (" +
            (elsewhere ? "it runs on another host or in another container" : std::strerror(error)) +
            "). Shared memory needs all ranks on one node, as one user. Use backend=\"gloo\" for "
            "this group, or split it by node"};
}

// After this exchange rank 0 may close its descriptor: everybody has, or everybody fails.
void agree(const Bootstrap& bootstrap, int32_t mine) {
    std::vector<int32_t> errors(bootstrap.nranks);
    bootstrap.allgather(&mine, errors.data(), sizeof mine);
    for (int rank = 0; rank < bootstrap.nranks; ++rank)
        if (errors[rank] != 0) throw not_attached(bootstrap.rank, rank, errors[rank]);
}

// Closes rank 0's descriptor however the exchange ends.
struct Descriptor {
    int fd;
    ~Descriptor() {
        if (fd >= 0) close(fd);
    }
};

}  // namespace

Segment::Segment(const Bootstrap& bootstrap, const Layout& layout) : layout_(layout) {
    Offer mine = make_offer(bootstrap, layout.total());
    Descriptor descriptor{mine.fd};
    std::vector<Offer> offers(bootstrap.nranks);
    bootstrap.allgather(&mine, offers.data(), sizeof mine);
    if (offers[0].error != 0) throw no_memory(bootstrap.rank, offers[0], layout.total());
    int32_t error = 0;
    base_ = attach(offers[0], mine, layout.total(), error);
    if (base_ != nullptr) introduce(block(bootstrap.rank).identity);
    try {
        agree(bootstrap, error);
    } catch (...) {
        if (base_ != nullptr) munmap(base_, layout_.total());
        throw;
    }
}

Segment::~Segment() {
    if (base_ != nullptr) munmap(base_, layout_.total());
}

Segment::Segment(Segment&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), layout_(other.layout_) {}

Segment& Segment::operator=(Segment&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(layout_, other.layout_);
    return *this;
}

RankBlock& Segment::block(int rank) const {
    return reinterpret_cast<RankBlock*>(base_ + layout_.blocks())[rank];
}

Lane& Segment::lane(int src, int dst) const {
    return reinterpret_cast<Lane*>(base_ + layout_.lanes())[src * layout_.nranks + dst];
}

char* Segment::slot(int writer, unsigned parity) const {
    size_t slot = 2 * static_cast<size_t>(writer) + parity;
    return base_ + layout_.slots() + slot * layout_.slot_bytes;
}

char* Segment::letter(int src, int dst, uint32_t index) const {
    size_t lane = static_cast<size_t>(src) * layout_.nranks + dst;
    return base_ + layout_.letters() +
           (lane * lane_depth + index % lane_depth) * layout_.letter_stride();
}

void introduce(Identity& mine) {
    mine.pid = getpid();
    mine.start_time = status_of(mine.pid).start_time;
    mine.pid_namespace = pid_namespace();
    mine.state.store(present, std::memory_order_release);
}

bool has_died(const Identity& peer, const Identity& mine) {
    if (peer.pid == mine.pid || peer.pid_namespace != mine.pid_namespace) return false;
    ProcessStatus status = status_of(peer.pid);
    return status.state == 0 || status.state == 'Z' || status.state == 'X' ||
           status.start_time != peer.start_time;
}

bool are_oversubscribed(const Bootstrap& bootstrap) {
    cpu_set_t mine, all;
    CPU_ZERO(&mine);
    CPU_ZERO(&all);
    sched_getaffinity(0, sizeof mine, &mine);
    std::vector<cpu_set_t> everyones(bootstrap.nranks);
    bootstrap.allgather(&mine, everyones.data(), sizeof mine);
    for (const cpu_set_t& one : everyones) CPU_OR(&all, &all, &one);
    return CPU_COUNT(&all) < bootstrap.nranks;
}

}  // namespace shm
