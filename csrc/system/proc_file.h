// Reads the small files of /proc and /sys.
#pragma once

#include <string>

namespace shm {

// All of it; empty if it cannot be read.
std::string read_file(const std::string& path);

}  // namespace shm
