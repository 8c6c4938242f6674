#include "system/proc_file.h"

#include <fcntl.h>
#include <unistd.h>

namespace shm {

std::string read_file(const std::string& path) {
    int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    std::string text;
    char part[4096];
    ssize_t length = 0;
    while (fd >= 0 && (length = read(fd, part, sizeof part)) > 0) text.append(part, length);
    if (fd >= 0) close(fd);
    return text;
}

}  // namespace shm
