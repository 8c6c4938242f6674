// Reading the small files in which the kernel says how things are.
#pragma once

#include <string>

namespace shm {

// All of it; empty if it cannot be read.
std::string read_file(const std::string& path);

}  // namespace shm
