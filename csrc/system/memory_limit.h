// How much memory there is before the kernel kills processes for lack of it.
#pragma once

#include <errno.h>
#include <fcntl.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace shm {

struct MemoryLimit {
    uint64_t available_bytes = 0;
    const char* source = nullptr;  // what sets the limit, for errors
};

// The smaller of what the machine has free and of what the control groups of this process leave.
// The kernel's files are read below `root`.
MemoryLimit find_memory_limit(const std::string& root = "");

// Allocates memory for a part of the file behind `fd`, so that too little memory is an error here
// and not a SIGBUS later: again where a signal interrupts it. Returns 0 or an errno.
inline int allocate_part(int fd, size_t offset, size_t nbytes) {
    int error;
    do error = posix_fallocate(fd, static_cast<off_t>(offset), static_cast<off_t>(nbytes));
    while (error == EINTR);
    return error;
}

// The same for a whole file. In pieces, each within the limit: the kernel promises more than it
// has, and other ranks allocate at the same time. Returns the limit as it was, too.
int allocate_file_memory(int fd, size_t nbytes, MemoryLimit* limit);
// The same, but where much more is available, pages are allocated when they are first written to:
// most of them never are.
int size_file_memory(int fd, size_t nbytes, MemoryLimit* limit, const std::string& root = "");

// "Cannot allocate memory: 123 bytes are free on this machine"
std::string describe_shortage(int error, const MemoryLimit& limit);

}  // namespace shm
