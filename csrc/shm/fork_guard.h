// Whether this is the process that made something, or one forked from it.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

namespace shm {

// A word that the kernel wipes in forked children (madvise(2), MADV_WIPEONFORK), so that a look at
// it costs nothing; where it does not, the process id is asked for.
class Birthmark {
  public:
    Birthmark() : pid_(getpid()) {
        void* page =
            mmap(nullptr, sizeof(long), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (page == MAP_FAILED) return;
        mark_ = static_cast<long*>(page);
        wiped_ = madvise(page, sizeof(long), MADV_WIPEONFORK) == 0;
        *mark_ = 1;
    }
    ~Birthmark() {
        if (mark_ != nullptr) munmap(mark_, sizeof(long));
    }
    Birthmark(const Birthmark&) = delete;
    Birthmark& operator=(const Birthmark&) = delete;

    bool is_here() const { return wiped_ ? *mark_ != 0 : getpid() == pid_; }

  private:
    const pid_t pid_;
    long* mark_ = nullptr;
    bool wiped_ = false;
};

}  // namespace shm
