// How much memory there is before the kernel ends processes for want of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace shm {

struct Room {
    uint64_t nbytes;
    const char* bound;  // what sets it, for errors
};

// The least of what the machine has free and of what the control groups of this process leave. The
// files of the kernel are looked for below `root`.
Room find_room(const std::string& root = "");

// Really takes memory for the file behind `fd`: posix_fallocate, because memory that is not there
// must be an error here and not a SIGBUS later. In pieces, and none that there is no room for: the
// kernel promises more than it has, and other ranks take theirs at the same time. 0 or an errno;
// `room` is what was found, if it was too little.
int take_memory(int fd, size_t nbytes, Room* room);

// "Cannot allocate memory: 123 bytes are free on this machine"
std::string describe_lack(int error, const Room& room);

}  // namespace shm
