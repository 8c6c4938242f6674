// The shape of a tensor, as far as it is compared among ranks and named in errors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

namespace shm {

struct Shape {
    static constexpr int32_t most_dims = 4;  // of those that are named
    int32_t ndim = -1;                       // nobody told
    int64_t dims[most_dims] = {};
    uint64_t digest = 0;  // of all dims

    void set(int32_t count, const int64_t* sizes) {
        ndim = count;
        digest = static_cast<uint64_t>(count + 1) * multiplier;
        for (int32_t dim = 0; dim < count; ++dim)
            digest = (digest ^ static_cast<uint64_t>(sizes[dim])) * multiplier;
        std::copy(sizes, sizes + named(), dims);
    }
    int32_t named() const { return ndim < most_dims ? ndim : most_dims; }
    // Well mixed bits of the digest.
    uint64_t mark() const { return digest >> 40; }
    // As Python writes it; empty if nobody told.
    std::string text() const {
        if (ndim < 0) return "";
        std::string words;
        for (int32_t dim = 0; dim < named(); ++dim)
            words += (dim > 0 ? ", " : "") + std::to_string(dims[dim]);
        return "(" + words + (ndim > most_dims ? ", ..." : ndim == 1 ? "," : "") + ")";
    }

  private:
    static constexpr uint64_t multiplier = UINT64_C(0x9e3779b97f4a7c15);
};
constexpr uint64_t mark_mask = (1 << 24) - 1;

}  // namespace shm
