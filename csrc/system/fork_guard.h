// Tells the process that made an object from one that was forked from it.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

namespace shm {

// A page that the kernel wipes in forked children (madvise(2), MADV_WIPEONFORK), so that a check
// costs one load; where the kernel cannot, the process id is compared.
class ForkGuard {
  public:
    ForkGuard() : pid_(getpid()) {
        void* page =
            mmap(nullptr, sizeof(long), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (page == MAP_FAILED) return;
        mark_ = static_cast<long*>(page);
        is_wiped_by_fork_ = madvise(page, sizeof(long), MADV_WIPEONFORK) == 0;
        *mark_ = 1;
    }
    ~ForkGuard() {
        if (mark_ != nullptr) munmap(mark_, sizeof(long));
    }
    ForkGuard(const ForkGuard&) = delete;
    ForkGuard& operator=(const ForkGuard&) = delete;

    bool is_original_process() const { return is_wiped_by_fork_ ? *mark_ != 0 : getpid() == pid_; }

  private:
    const pid_t pid_;
    long* mark_ = nullptr;
    bool is_wiped_by_fork_ = false;
};

}  // namespace shm
