// The one exception of the native backends: a result code of communicator.h and its text.
#pragma once

#include <string>

#include "abi/communicator.h"

namespace plugin {

struct PluginError {
    comm_result code;
    std::string text;
    bool is_local = false;  // it concerns this rank alone: the communicator can go on
};

}  // namespace plugin
