#include "shm/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <utility>
#include <vector>

#include "system/memory_limit.h"
#include "system/proc_file.h"

namespace shm {

void Bootstrap::allgather(const void* send, void* recv, size_t bytes_per_rank) const {
    comm_result code = callbacks_->allgather(callbacks_->ctx, send, recv, bytes_per_rank);
    if (code != COMM_OK)
        throw PluginError{
            code,
            "rank " + std::to_string(rank) +
                ": the ranks could not exchange the setup of shared memory, so none can join. "
                "See what the other ranks printed, and start again"};
}

namespace {

std::string read_link(const char* path) {
    char target[256];
    ssize_t length = readlink(path, target, sizeof target);
    return length > 0 ? std::string(target, length) : std::string();
}

struct ProcessStatus {
    char state = 0;  // 0 if there is no such process, or no descriptor to read of it
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

// Random, so that one segment is never mistaken for another.
struct Nonce {
    uint64_t words[2];
};

// How the peers find the segment of rank 0. The other ranks fill in only where they run.
struct SegmentAddress {
    Nonce nonce;
    char boot_id[40];
    uint64_t pid_namespace;
    int32_t pid;
    int32_t fd;
    int32_t error;
    char shortage[160];  // the error in words
};

std::string memory_name(const Nonce& nonce) {
    char name[64];
    snprintf(name, sizeof name, "drumline-%016llx%016llx",
             static_cast<unsigned long long>(nonce.words[0]),
             static_cast<unsigned long long>(nonce.words[1]));
    return name;
}

void fill_location(SegmentAddress& address) {
    snprintf(address.boot_id, sizeof address.boot_id, "%s",
             read_file("/proc/sys/kernel/random/boot_id").c_str());
    address.pid_namespace = pid_namespace();
    address.pid = getpid();
}

// Large enough for any layout.
int create_memory(SegmentAddress& address, int nranks, MemoryLimit* limit) {
    if (getrandom(&address.nonce, sizeof address.nonce, 0) != sizeof address.nonce) return errno;
    address.fd = memfd_create(memory_name(address.nonce).c_str(), MFD_CLOEXEC);
    if (address.fd < 0) return errno;
    return size_file_memory(address.fd, layout_for(nranks, true).total(), limit);
}

SegmentAddress create_segment(const Bootstrap& bootstrap) {
    SegmentAddress address = {};
    address.fd = -1;
    fill_location(address);
    if (bootstrap.rank != 0) return address;
    MemoryLimit limit;
    address.error = create_memory(address, bootstrap.nranks, &limit);
    snprintf(address.shortage, sizeof address.shortage, "%s",
             describe_shortage(address.error, limit).c_str());
    return address;
}

// What every rank tells all others first. `note`: see the constructor of Segment.
struct Introduction {
    cpu_set_t cpus;
    char version[8];
    int32_t is_invalid;
    int32_t note;
    SegmentAddress address;
};

Introduction introduce(const Bootstrap& bootstrap, bool is_invalid, int32_t note) {
    Introduction own = {};
    sched_getaffinity(0, sizeof own.cpus, &own.cpus);
    snprintf(own.version, sizeof own.version, "%s", version);
    own.is_invalid = is_invalid;
    own.note = note;
    own.address = create_segment(bootstrap);
    return own;
}

// Opens the descriptor of rank 0 through /proc, so there is no name that could leak. The link is
// read first: on another host the same path may be any file at all. Returns -errno if it fails.
int open_segment(const SegmentAddress& address, const SegmentAddress& own) {
    if (std::strcmp(address.boot_id, own.boot_id) != 0 ||
        address.pid_namespace != own.pid_namespace)
        return -EXDEV;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", address.pid, address.fd);
    if (read_link(path).find(memory_name(address.nonce)) == std::string::npos) return -EXDEV;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    return fd < 0 ? -errno : fd;
}

char* map_memory(int fd, size_t nbytes, int32_t& error) {
    void* base = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base != MAP_FAILED) return static_cast<char*>(base);
    error = errno;
    return nullptr;
}

char* attach(const SegmentAddress& address, const SegmentAddress& own, size_t nbytes,
             int32_t& error) {
    int fd = open_segment(address, own);
    if (fd < 0) {
        error = -fd;
        return nullptr;
    }
    char* base = map_memory(fd, nbytes, error);
    close(fd);
    return base;
}

PluginError no_memory(int rank, const SegmentAddress& address, size_t nbytes) {
    return {
        COMM_SYSTEM_ERROR,
        "rank " + std::to_string(rank) + ": rank 0 could not allocate " + std::to_string(nbytes) +
            " bytes of shared memory (" + address.shortage +
            "), through which ranks exchange tensors. Free memory, raise the memory limit of the "
            "container, or use backend=\"gloo\""};
}

PluginError not_attached(int rank, int failed_rank, int32_t error) {
    bool is_elsewhere = error == EXDEV;
    return {
        is_elsewhere ? COMM_UNSUPPORTED : COMM_SYSTEM_ERROR,
        "rank " + std::to_string(rank) + ": rank " + std::to_string(failed_rank) +
            " cannot attach to the memory of rank 0 (" +
            (is_elsewhere ? "it runs on another host or in another container"
                          : std::strerror(error)) +
            "). Shared memory needs all ranks on one node, as one user. Use backend=\"gloo\" for "
            "this group, or split it by node"};
}

// Throws on every rank if one could not map the segment. Rank 0 may close its descriptor after it.
void check_all_attached(const Bootstrap& bootstrap, int32_t error) {
    std::vector<int32_t> errors(bootstrap.nranks);
    bootstrap.allgather(&error, errors.data(), sizeof error);
    for (int rank = 0; rank < bootstrap.nranks; ++rank)
        if (errors[rank] != 0) throw not_attached(bootstrap.rank, rank, errors[rank]);
}

void check_introduction(int rank, int peer, const char* peer_version, bool is_invalid) {
    std::string start = "rank " + std::to_string(rank) + ": ";
    std::string name = "rank " + std::to_string(peer);
    if (is_invalid)
        throw PluginError{COMM_SYSTEM_ERROR,
                          start + name +
                              " failed: it was given an option that it cannot use. See what "
                              "it printed"};
    if (std::strcmp(peer_version, version) != 0)
        throw PluginError{COMM_UNSUPPORTED, start + "this rank has shm " + version + ", " + name +
                                                " has shm " + peer_version +
                                                ". Their messages may differ; install the same "
                                                "version everywhere"};
}

// Closes rank 0's descriptor however the exchange ends.
struct Descriptor {
    int fd;
    ~Descriptor() {
        if (fd >= 0) close(fd);
    }
};

}  // namespace

Segment::Segment(const Bootstrap& bootstrap, const PluginError* invalid,
                 std::vector<int32_t>& notes) {
    Introduction own = introduce(bootstrap, invalid != nullptr, notes[bootstrap.rank]);
    Descriptor descriptor{own.address.fd};
    std::vector<Introduction> ranks(bootstrap.nranks);
    bootstrap.allgather(&own, ranks.data(), sizeof own);
    if (invalid != nullptr) throw *invalid;
    cpu_set_t all;
    CPU_ZERO(&all);
    for (int rank = 0; rank < bootstrap.nranks; ++rank) {
        check_introduction(bootstrap.rank, rank, ranks[rank].version, ranks[rank].is_invalid);
        CPU_OR(&all, &all, &ranks[rank].cpus);
        notes[rank] = ranks[rank].note;
    }
    oversubscribed_ = CPU_COUNT(&all) < bootstrap.nranks;
    layout_ = layout_for(bootstrap.nranks, oversubscribed_);
    const SegmentAddress& first = ranks[0].address;
    if (first.error != 0)
        throw no_memory(bootstrap.rank, first, layout_for(bootstrap.nranks, true).total());
    int32_t error = 0;
    base_ = attach(first, own.address, layout_.total(), error);
    if (base_ != nullptr) publish_identity(block(bootstrap.rank).identity);
    try {
        check_all_attached(bootstrap, error);
    } catch (...) {
        if (base_ != nullptr) munmap(base_, layout_.total());
        throw;
    }
}

Segment::~Segment() {
    if (base_ != nullptr) munmap(base_, layout_.total());
}

Segment& Segment::operator=(Segment&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(layout_, other.layout_);
    std::swap(oversubscribed_, other.oversubscribed_);
    return *this;
}

RankBlock& Segment::block(int rank) const {
    return reinterpret_cast<RankBlock*>(base_ + layout_.blocks())[rank];
}

Channel& Segment::channel(int src, int dst) const {
    return reinterpret_cast<Channel*>(base_ + layout_.channels())[src * layout_.nranks + dst];
}

char* Segment::slot(int writer, unsigned parity) const {
    size_t slot = 2 * static_cast<size_t>(writer) + parity;
    return base_ + layout_.slots() + slot * layout_.slot_bytes;
}

char* Segment::chunk(int src, int dst, uint32_t index) const {
    size_t channel = static_cast<size_t>(src) * layout_.nranks + dst;
    return base_ + layout_.chunks() +
           (channel * channel_depth + index % channel_depth) * layout_.chunk_stride();
}

Stream& Segment::stream(int src, int dst) const {
    return reinterpret_cast<Stream*>(base_ + layout_.streams())[src * layout_.nranks + dst];
}

char* Segment::stream_data(int src, int dst) const {
    size_t channel = static_cast<size_t>(src) * layout_.nranks + dst;
    return base_ + layout_.stream_data() + channel * layout_.stream_bytes;
}

void publish_identity(Identity& own) {
    own.pid = getpid();
    own.start_time = status_of(own.pid).start_time;
    own.pid_namespace = pid_namespace();
    own.state.store(present, std::memory_order_release);
}

bool has_died(const Identity& peer, const Identity& own) {
    if (peer.pid == own.pid || peer.pid_namespace != own.pid_namespace) return false;
    ProcessStatus status = status_of(peer.pid);
    if (status.state == 0) return kill(peer.pid, 0) != 0 && errno == ESRCH;
    return status.state == 'Z' || status.state == 'X' ||
           (peer.start_time != 0 && status.start_time != peer.start_time);
}

}  // namespace shm
