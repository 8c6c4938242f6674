#include "system/memory_limit.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "system/proc_file.h"

namespace shm {
namespace {

constexpr uint64_t no_limit = UINT64_MAX;

// The number after `key` at the start of a line, or `fallback`.
uint64_t number_in(const std::string& text, const std::string& key, uint64_t fallback) {
    for (size_t line = 0; line < text.size();) {
        if (text.compare(line, key.size(), key) == 0)
            return strtoull(text.c_str() + line + key.size(), nullptr, 10);
        size_t end = text.find('\n', line);
        line = end == std::string::npos ? text.size() : end + 1;
    }
    return fallback;
}

// What one control group leaves. Its cached files count as used, but the kernel drops them when
// memory is needed.
uint64_t left_in_group(const std::string& folder, const char* limit_name, const char* used_name) {
    std::string limit = read_file(folder + limit_name);
    if (limit.empty() || limit.compare(0, 3, "max") == 0) return no_limit;
    std::string stat = read_file(folder + "/memory.stat");
    uint64_t limit_bytes = strtoull(limit.c_str(), nullptr, 10);
    uint64_t used = strtoull(read_file(folder + used_name).c_str(), nullptr, 10);
    uint64_t cached = number_in(stat, "inactive_file ", 0) + number_in(stat, "active_file ", 0);
    used -= std::min(used, cached);
    return limit_bytes - std::min(limit_bytes, used);
}

// A group is limited by its parents, too.
uint64_t left_in_group_and_parents(const std::string& mount, std::string path,
                                   const char* limit_name, const char* used_name) {
    uint64_t left = no_limit;
    while (true) {
        left = std::min(left, left_in_group(mount + path, limit_name, used_name));
        if (path.empty()) return left;
        path.erase(path.rfind('/'));
    }
}

// Lines of "number:controllers:path", cgroups(7): version 2 has the number 0 and no controllers.
uint64_t left_in_groups(const std::string& root) {
    std::string text = read_file(root + "/proc/self/cgroup");
    uint64_t left = no_limit;
    for (size_t line = 0; line < text.size();) {
        size_t end = std::min(text.find('\n', line), text.size());
        size_t first = text.find(':', line), second = text.find(':', first + 1);
        if (first < end && second < end) {
            std::string names = "," + text.substr(first + 1, second - first - 1) + ",";
            std::string path = text.substr(second + 1, end - second - 1);
            if (path.empty() || path[0] != '/' || path == "/") path.clear();
            std::string mount = root + "/sys/fs/cgroup";
            if (names == ",,")
                left = std::min(
                    left, left_in_group_and_parents(mount, path, "/memory.max", "/memory.current"));
            else if (names.find(",memory,") != std::string::npos)
                left = std::min(left, left_in_group_and_parents(mount + "/memory", path,
                                                                "/memory.limit_in_bytes",
                                                                "/memory.usage_in_bytes"));
        }
        line = end + 1;
    }
    return left;
}

}  // namespace

MemoryLimit find_memory_limit(const std::string& root) {
    constexpr uint64_t unknown = no_limit >> 10;
    std::string machine = read_file(root + "/proc/meminfo");
    uint64_t available = 1024 * number_in(machine, "MemAvailable:", unknown);
    uint64_t left = left_in_groups(root);
    if (left < available) return {left, "left within the memory limit of this container"};
    return {available, "free on this machine"};
}

int allocate_file_memory(int fd, size_t nbytes, MemoryLimit* limit) {
    // Allocated in less time than the signals of a timer are apart: the kernel undoes a piece that
    // one interrupts.
    constexpr size_t piece_bytes = 8 << 20;
    for (size_t done = 0; done < nbytes;) {
        *limit = find_memory_limit();
        if (limit->available_bytes < nbytes - done) return ENOMEM;
        size_t part = std::min(piece_bytes, nbytes - done);
        int error = allocate_part(fd, done, part);
        if (error != 0) return error;
        done += part;
    }
    return 0;
}

int size_file_memory(int fd, size_t nbytes, MemoryLimit* limit, const std::string& root) {
    constexpr uint64_t ample = 16;
    *limit = find_memory_limit(root);
    if (limit->available_bytes / ample < nbytes) return allocate_file_memory(fd, nbytes, limit);
    return ftruncate(fd, static_cast<off_t>(nbytes)) == 0 ? 0 : errno;
}

std::string describe_shortage(int error, const MemoryLimit& limit) {
    std::string text = std::strerror(error);
    if (error != ENOMEM || limit.source == nullptr) return text;
    return text + ": " + std::to_string(limit.available_bytes) + " bytes are " + limit.source;
}

}  // namespace shm
