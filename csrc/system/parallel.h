// Loops that share their work among the threads that torch already has in this process.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>

namespace parallel {

// OpenMP as torch loaded it, by the entry points of GCC, which LLVM's library has too. Threads of
// our own would compete with those of torch, that spin for a while after each operation.
struct OpenMp {
    void (*run)(void (*)(void*), void*, unsigned, unsigned);
    int (*thread)();
    int (*num_threads)();

    OpenMp() {
        find(run, "GOMP_parallel");
        find(thread, "omp_get_thread_num");
        find(num_threads, "omp_get_num_threads");
    }
    bool is_loaded() const { return run && thread && num_threads; }

  private:
    template <class Function>
    static void find(Function& function, const char* name) {
        function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
    }
};

// work(first, end) for ranges that cover `count`, each a multiple of `step` but the last, at most
// `most` at once; in this thread alone where torch has no OpenMP. num_threads: of torch. All of
// them are called, as GCC's OpenMP ends threads that a call leaves out, and the next must start
// others.
template <class Work>
void for_ranges(size_t count, size_t step, size_t most, size_t num_threads, const Work& work) {
    static const OpenMp openmp;
    if (std::min(most, num_threads) <= 1 || !openmp.is_loaded()) return work(size_t{0}, count);
    struct Shared {
        size_t count, step, most;
        const Work& work;
    } shared{count, step, most, work};
    auto run = [](void* argument) {
        auto& all = *static_cast<Shared*>(argument);
        const size_t steps = (all.count + all.step - 1) / all.step;
        const size_t threads = std::min<size_t>(all.most, openmp.num_threads());
        const size_t share = (steps + threads - 1) / threads * all.step;
        const size_t first = std::min(all.count, openmp.thread() * share);
        const size_t end = std::min(all.count, first + share);
        if (first < end) all.work(first, end);
    };
    openmp.run(run, &shared, static_cast<unsigned>(num_threads), 0);
}

}  // namespace parallel
