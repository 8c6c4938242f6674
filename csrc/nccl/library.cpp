#include "nccl/library.h"

#include <dlfcn.h>

namespace {

const char* const SONAMES[] = {"libnccl.so.2", "librccl.so.1"};

// The library that is loaded already comes first: a second copy in one process would be a second
// set of proxies and of CUDA modules.
void* find_library(std::string* problem) {
    for (int mode : {RTLD_NOLOAD, 0})
        for (const char* name : SONAMES) {
            void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL | mode);
            if (handle != nullptr) return handle;
        }
    *problem =
        "neither libnccl.so.2 nor librccl.so.1 is loaded or found. Install nvidia-nccl, or "
        "give its path with library=";
    return nullptr;
}

void* open_path(const char* path, std::string* problem) {
    void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) *problem = std::string("it does not load: ") + dlerror();
    return handle;
}

std::string path_of(void* symbol) {
    Dl_info info;
    return dladdr(symbol, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "?";
}

template <class Function>
void look_up(void* handle, const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(handle, name));
}

// False if a function is missing that this version must have.
bool find_functions(NcclLibrary* library, void* handle, std::string* problem) {
    look_up(handle, "ncclGetVersion", &library->GetVersion);
    if (library->GetVersion == nullptr) {
        *problem = "it has no ncclGetVersion, so it is not NCCL. Give the path of libnccl.so.2";
        return false;
    }
    library->path = path_of(reinterpret_cast<void*>(library->GetVersion));
    if (library->GetVersion(&library->version) != 0 || library->version < NCCL_OLDEST) {
        *problem = "it is NCCL " + nccl_version_text(library->version) + "; needs NCCL " +
                   nccl_version_text(NCCL_OLDEST) + " or newer";
        return false;
    }
#define NCCL_LOOK_UP(name, since, result, arguments)                             \
    look_up(handle, "nccl" #name, &library->name);                               \
    if (library->name == nullptr && (since) <= NCCL_OLDEST) {                    \
        *problem = "it says NCCL " + nccl_version_text(library->version) +       \
                   " but has no nccl" #name ". It is broken, or something else"; \
        return false;                                                            \
    }
    NCCL_FUNCTIONS(NCCL_LOOK_UP)
#undef NCCL_LOOK_UP
    return true;
}

}  // namespace

std::string nccl_version_text(int version) {
    int major = version < 10000 ? version / 1000 : version / 10000;
    int rest = version < 10000 ? version % 1000 : version % 10000;
    return std::to_string(major) + "." + std::to_string(rest / 100) + "." +
           std::to_string(rest % 100);
}

bool open_nccl(const char* path, NcclLibrary* library, std::string* problem) {
    void* handle = path == nullptr ? find_library(problem) : open_path(path, problem);
    return handle != nullptr && find_functions(library, handle, problem);
}

std::string nccl_not_supported(const NcclLibrary& library, const char* feature, int since) {
    return std::string(feature) + " is not supported by NCCL " +
           nccl_version_text(library.version) + " (" + library.path + "); needs NCCL " +
           nccl_version_text(since) + " or newer";
}
