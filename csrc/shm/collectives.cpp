// The collectives. A call goes in rounds of what fits a slot: a rank fills its own slot, takes a
// step, and reads the slots of its peers. Every element is reduced in order of rank, wherever it is
// reduced, so the result is bitwise the same on all ranks and in all runs.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "reduce/reduce.h"
#include "shm/plan.h"
#include "shm/shm_communicator.h"

namespace shm {

size_t checked_size(const ShmCommunicator& comm, comm_dtype dtype) {
    size_t size = size_of(dtype);
    if (size == 0)
        throw PluginError{COMM_UNSUPPORTED,
                          "rank " + std::to_string(comm.rank) +
                              ": the shared-memory backend does not know dtype "
                              "number " +
                              std::to_string(dtype) +
                              " and the size of its elements. Pass a view of bytes: "
                              "tensor.view(torch.uint8)"};
    return size;
}

namespace {

Reduce checked_reduce(const ShmCommunicator& comm, comm_dtype dtype, comm_op op) {
    checked_size(comm, dtype);
    Reduce reduce = find_reduce(dtype, op, comm.options.instructions);
    if (reduce == nullptr)
        throw PluginError{COMM_UNSUPPORTED,
                          "rank " + std::to_string(comm.rank) + ": " + name_of_op(op) +
                              " is not defined for " + name_of_dtype(dtype) +
                              ". Convert the tensor, or for bool use max (any) or min (all)"};
    return reduce;
}

void copy(void* to, const void* from, size_t nbytes) {
    if (to != from && nbytes != 0) std::memcpy(to, from, nbytes);
}

int divisor_for(const ShmCommunicator& comm, comm_op op) {
    return op == COMM_AVG ? comm.nranks : 1;
}

// One operand of a reduction for every rank, in order of rank.
class Operands {
  public:
    Operands(const ShmCommunicator& comm) : comm_(comm), pointers_(small_) {
        if (comm.nranks <= max_small) return;
        large_.resize(comm.nranks);
        pointers_ = large_.data();
    }
    // That of each rank where `place(rank)` says.
    template <class Place>
    const void* const* at(Place place) {
        for (int rank = 0; rank < comm_.nranks; ++rank) pointers_[rank] = place(rank);
        return pointers_;
    }
    // This rank's operand at `own`, the others' in their slots.
    const void* const* in_slots(const char* own, size_t offset) {
        return at([&](int rank) { return rank == comm_.rank ? own : comm_.slot(rank) + offset; });
    }
    const void* const* current() const { return pointers_; }
    void advance(size_t nbytes) {
        at([&](int rank) { return static_cast<const char*>(pointers_[rank]) + nbytes; });
    }

  private:
    static constexpr int max_small = 16;
    const ShmCommunicator& comm_;
    const void* small_[max_small];
    std::vector<const void*> large_;
    const void** pointers_;
};

// Calls `body(first_element, num_elements)` for every round of `count` elements, at least once, in
// a slot of its own.
template <class Body>
void in_rounds(ShmCommunicator& comm, const CallSignature& call, uint64_t count,
               size_t elements_per_round, Body body) {
    comm.begin(call);
    uint64_t first = 0;
    do {
        comm.next_round();
        uint64_t part = std::min<uint64_t>(elements_per_round, count - first);
        body(first, part);
        first += part;
    } while (first < count);
}

// Calls `body` with every peer, from the next rank on, so that not all ranks read the same slot.
template <class Body>
void for_each_peer(const ShmCommunicator& comm, Body body) {
    for (int i = 1; i < comm.nranks; ++i) body((comm.rank + i) % comm.nranks);
}

// ---- allreduce ----

// Every rank's tensor is in shared memory: each rank reduces its piece and writes it into all of
// them. The step at the end is needed, since the tensors have no second copy as slots have.
void allreduce_in_place(ShmCommunicator& comm, const CallSignature& call, size_t size,
                        Reduce reduce) {
    std::vector<char*> tensors;
    for (int rank = 0; rank < comm.nranks; ++rank) tensors.push_back(comm.shared_tensor(rank));
    Operands operands(comm);
    Piece own = Pieces(call.count, comm.nranks, size).of(comm.rank);
    constexpr size_t block_bytes = 32 << 10;  // still in the cache when it is copied
    for (uint64_t first = own.first; first < own.end(); first += block_bytes / size) {
        uint64_t part = std::min<uint64_t>(block_bytes / size, own.end() - first);
        char* reduced = tensors[comm.rank] + first * size;
        auto sources = operands.at([&](int rank) { return tensors[rank] + first * size; });
        reduce(reduced, sources, comm.nranks, part, divisor_for(comm, call.op));
        for_each_peer(comm, [&](int rank) {
            std::memcpy(tensors[rank] + first * size, reduced, part * size);
        });
    }
    comm.step();
}

// Opens a call and takes its first step; true if every rank's tensor is in shared memory. A rank
// whose tensor is (`reference` is not 0) stages nothing before the step. If only some are, those
// stage after it, and all ranks take one step more.
template <class Stage>
bool begin_in_place(ShmCommunicator& comm, const CallSignature& call, uint64_t reference,
                    Stage stage) {
    comm.begin(call, reference);
    comm.next_round();
    if (reference == 0) stage();
    comm.step();
    int num_shared = comm.num_shared_tensors();
    if (num_shared == comm.nranks) return true;
    if (reference != 0) stage();
    if (num_shared > 0) comm.step();
    return false;
}

// A tensor of at most 8 bytes travels in the header, and so in the cache line of the step.
void allreduce_inline(ShmCommunicator& comm, const char* send, char* recv,
                      const CallSignature& call, size_t size, Reduce reduce) {
    uint64_t own = 0;
    std::memcpy(&own, send, call.count * size);
    comm.begin(call, own);
    comm.step();
    Operands operands(comm);
    auto sources = operands.at([&](int rank) { return comm.inline_value(rank); });
    reduce(recv, sources, comm.nranks, call.count, divisor_for(comm, call.op));
}

// Reduces a whole round and prefetches `later`, which is staged after the next round: memory is
// idle while lines come from the peer. In strips, so that neither keeps the other waiting.
void reduce_with_prefetch(const ShmCommunicator& comm, Reduce reduce, char* out, Operands& operands,
                          size_t size, int divisor, const char* later, size_t later_bytes) {
    constexpr size_t strip_bytes = 1 << 10;
    for (size_t i = 0; i < comm.slot_bytes(); i += strip_bytes) {
        for (size_t j = i; j < std::min(i + strip_bytes, later_bytes); j += 64)
            __builtin_prefetch(later + j);
        reduce(out + i, operands.current(), comm.nranks, strip_bytes / size, divisor);
        operands.advance(strip_bytes);
    }
}

// Every rank reads everything: one step a round, most traffic. Two ranks stage the next round and
// arrive at its step before they reduce this one, so that neither waits for the other's reduction.
// That is safe for two only: a rank fills next the slot that it has read itself (see writer()).
void allreduce_one_shot(ShmCommunicator& comm, const char* send, char* recv,
                        const CallSignature& call, size_t size, Reduce reduce) {
    Operands operands(comm);
    uint64_t whole = comm.slot_bytes() / size;
    int divisor = divisor_for(comm, call.op);
    auto part = [&](uint64_t first) { return std::min(whole, call.count - first); };
    auto stage = [&](uint64_t first) {
        comm.put(comm.slot(comm.rank), send + first * size, part(first) * size);
    };
    bool tries_in_place = send == recv && call.count * size >= min_in_place_bytes;
    uint64_t reference = tries_in_place ? comm.memory().reference(recv, call.count * size) : 0;
    if (begin_in_place(comm, call, reference, [&] { stage(0); }))
        return allreduce_in_place(comm, call, size, reduce);
    bool prefetches = call.count * size >= min_prefetch_bytes;
    for (uint64_t first = 0, next = whole;; first = next, next += whole) {
        const void* const* sources = operands.in_slots(send + first * size, 0);
        bool has_next = next < call.count;
        if (has_next) {
            comm.next_round();
            stage(next);
            comm.arrive();
        }
        uint64_t later = next + whole;
        if (prefetches && later < call.count)
            reduce_with_prefetch(comm, reduce, recv + first * size, operands, size, divisor,
                                 send + later * size, part(later) * size);
        else
            reduce(recv + first * size, sources, comm.nranks, part(first), divisor);
        if (!has_next) return;
        comm.await();
    }
}

// One round: every rank reduces its piece and reads the other pieces. Two steps, least traffic.
class TwoShot {
  public:
    TwoShot(ShmCommunicator& comm, const CallSignature& call, size_t size, Reduce reduce)
        : comm_(comm), operands_(comm), call_(call), size_(size), reduce_(reduce) {}

    void stage(const char* from, uint64_t part) {
        Piece own = Pieces(part, comm_.nranks, size_).of(comm_.rank);
        char* slot = comm_.slot(comm_.rank);
        comm_.put(slot, from, own.first * size_);
        size_t end = own.end() * size_;
        comm_.put(slot + end, from + end, part * size_ - end);
    }

    void reduce_and_share(const char* from, char* to, uint64_t part) {
        Pieces pieces(part, comm_.nranks, size_);
        Piece own = pieces.of(comm_.rank);
        size_t offset = own.first * size_;
        char* reduced = comm_.slot(comm_.rank) + offset;
        reduce_(reduced, operands_.in_slots(from + offset, offset), comm_.nranks, own.count,
                divisor_for(comm_, call_.op));
        comm_.arrive();
        std::memcpy(to + offset, reduced, own.count * size_);
        comm_.await();
        for_each_peer(comm_, [&](int rank) {
            Piece piece = pieces.of(rank);
            std::memcpy(to + piece.first * size_, comm_.slot(rank) + piece.first * size_,
                        piece.count * size_);
        });
    }

  private:
    ShmCommunicator& comm_;
    Operands operands_;
    const CallSignature& call_;
    const size_t size_;
    const Reduce reduce_;
};

void allreduce_two_shot(ShmCommunicator& comm, const char* send, char* recv,
                        const CallSignature& call, size_t size, Reduce reduce) {
    TwoShot two_shot(comm, call, size, reduce);
    uint64_t whole = std::min<uint64_t>(comm.slot_bytes() / size, call.count);
    uint64_t reference = send == recv ? comm.memory().reference(recv, call.count * size) : 0;
    if (begin_in_place(comm, call, reference, [&] { two_shot.stage(send, whole); }))
        return allreduce_in_place(comm, call, size, reduce);
    two_shot.reduce_and_share(send, recv, whole);
    for (uint64_t first = whole; first < call.count; first += whole) {
        uint64_t part = std::min(whole, call.count - first);
        comm.next_round();
        two_shot.stage(send + first * size, part);
        comm.step();
        two_shot.reduce_and_share(send + first * size, recv + first * size, part);
    }
}

}  // namespace

void ShmCommunicator::allreduce(const void* send, void* recv, uint64_t count, comm_dtype dtype,
                                comm_op op, comm_stream) {
    Reduce reduce = checked_reduce(*this, dtype, op);
    size_t size = size_of(dtype);
    if (nranks == 1) return copy(recv, send, count * size);
    CallSignature call{Collective::allreduce, count, dtype, op, 0};
    const char* from = static_cast<const char*>(send);
    char* to = static_cast<char*>(recv);
    if (count <= sizeof(uint64_t) / size)
        return allreduce_inline(*this, from, to, call, size, reduce);
    if (choose_allreduce(count * size, nranks, slot_bytes()) == AllreduceAlgorithm::one_shot)
        allreduce_one_shot(*this, from, to, call, size, reduce);
    else
        allreduce_two_shot(*this, from, to, call, size, reduce);
}

// ---- the others ----

void ShmCommunicator::broadcast(void* buffer, uint64_t count, comm_dtype dtype, int32_t src,
                                comm_stream) {
    size_t size = checked_size(*this, dtype);
    if (nranks == 1) return;
    char* data = static_cast<char*>(buffer);
    CallSignature call{Collective::broadcast, count, dtype, 0, src};
    in_rounds(*this, call, count, slot_bytes() / size, [&](uint64_t first, uint64_t part) {
        if (rank == src) put(slot(src), data + first * size, part * size);
        step();
        if (rank != src) std::memcpy(data + first * size, slot(src), part * size);
    });
}

void ShmCommunicator::reduce(const void* send, void* recv, uint64_t count, comm_dtype dtype,
                             comm_op op, int32_t dst, comm_stream) {
    Reduce reduce = checked_reduce(*this, dtype, op);
    size_t size = size_of(dtype);
    if (nranks == 1) return copy(recv, send, count * size);
    Operands operands(*this);
    CallSignature call{Collective::reduce, count, dtype, op, dst};
    in_rounds(*this, call, count, slot_bytes() / size, [&](uint64_t first, uint64_t part) {
        const char* from = static_cast<const char*>(send) + first * size;
        if (rank != dst) put(slot(rank), from, part * size);
        step();
        if (rank == dst)
            reduce(static_cast<char*>(recv) + first * size, operands.in_slots(from, 0), nranks,
                   part, divisor_for(*this, op));
    });
}

namespace {

void allgather_parts(ShmCommunicator& comm, const CallSignature& call, const Parts& parts,
                     size_t size, const char* from, char* to) {
    uint64_t limit = comm.slot_bytes() / size;
    in_rounds(comm, call, parts.longest(), limit, [&](uint64_t first, uint64_t) {
        auto part = [&](int of_rank) { return parts.of(of_rank, first, limit); };
        Piece own = part(comm.rank);
        comm.put(comm.slot(comm.rank), from + first * size, own.count * size);
        comm.step_with([&] { copy(to + own.first * size, from + first * size, own.count * size); });
        for_each_peer(comm, [&](int peer) {
            Piece other = part(peer);
            std::memcpy(to + other.first * size, comm.slot(peer), other.count * size);
        });
    });
}

void reduce_scatter_parts(ShmCommunicator& comm, const CallSignature& call, const Parts& parts,
                          size_t size, Reduce reduce, const char* from, char* to) {
    Operands operands(comm);
    size_t stride = piece_bytes(comm.slot_bytes(), comm.nranks);
    in_rounds(comm, call, parts.longest(), stride / size, [&](uint64_t first, uint64_t) {
        auto part = [&](int of_rank) { return parts.of(of_rank, first, stride / size); };
        for (int peer = 0; peer < comm.nranks; ++peer) {
            if (peer == comm.rank) continue;
            Piece other = part(peer);
            comm.put(comm.slot(comm.rank) + peer * stride, from + other.first * size,
                     other.count * size);
        }
        comm.step();
        Piece own = part(comm.rank);
        reduce(to + first * size, operands.in_slots(from + own.first * size, comm.rank * stride),
               comm.nranks, own.count, divisor_for(comm, call.op));
    });
}

// Its count is the sum of the counts; what it has in place of a root tells these apart.
CallSignature uneven_call(Collective collective, const uint64_t* counts, int nranks,
                          comm_dtype dtype, comm_op op) {
    CallSignature call{collective, 0, dtype, op, 0};
    uint64_t digest = 0;
    for (int rank = 0; rank < nranks; ++rank) {
        call.count += counts[rank];
        digest = (digest ^ counts[rank]) * UINT64_C(0x9e3779b97f4a7c15);
    }
    call.root = static_cast<int32_t>(digest >> 48);
    return call;
}

}  // namespace

void ShmCommunicator::allgather(const void* send, void* recv, uint64_t count, comm_dtype dtype,
                                comm_stream) {
    size_t size = checked_size(*this, dtype);
    const char* from = static_cast<const char*>(send);
    char* to = static_cast<char*>(recv);
    if (nranks == 1) return copy(to, from, count * size);
    allgather_parts(*this, {Collective::allgather, count, dtype, 0, 0}, count, size, from, to);
}

void ShmCommunicator::allgatherv(const void* send, void* recv, const uint64_t* counts,
                                 comm_dtype dtype, comm_stream) {
    size_t size = checked_size(*this, dtype);
    const char* from = static_cast<const char*>(send);
    char* to = static_cast<char*>(recv);
    if (nranks == 1) return copy(to, from, counts[0] * size);
    allgather_parts(*this, uneven_call(Collective::allgatherv, counts, nranks, dtype, 0),
                    {counts, nranks}, size, from, to);
}

void ShmCommunicator::reduce_scatter(const void* send, void* recv, uint64_t count, comm_dtype dtype,
                                     comm_op op, comm_stream) {
    Reduce reduce = checked_reduce(*this, dtype, op);
    size_t size = size_of(dtype);
    const char* from = static_cast<const char*>(send);
    char* to = static_cast<char*>(recv);
    if (nranks == 1) return copy(to, from, count * size);
    reduce_scatter_parts(*this, {Collective::reduce_scatter, count, dtype, op, 0}, count, size,
                         reduce, from, to);
}

void ShmCommunicator::reduce_scatterv(const void* send, void* recv, const uint64_t* counts,
                                      comm_dtype dtype, comm_op op, comm_stream) {
    Reduce reduce = checked_reduce(*this, dtype, op);
    size_t size = size_of(dtype);
    const char* from = static_cast<const char*>(send);
    char* to = static_cast<char*>(recv);
    if (nranks == 1) return copy(to, from, counts[0] * size);
    reduce_scatter_parts(*this, uneven_call(Collective::reduce_scatterv, counts, nranks, dtype, op),
                         {counts, nranks}, size, reduce, from, to);
}

void ShmCommunicator::alltoall(const void* send, void* recv, uint64_t count, comm_dtype dtype,
                               comm_stream) {
    size_t size = checked_size(*this, dtype);
    const char* from = static_cast<const char*>(send);
    char* to = static_cast<char*>(recv);
    size_t own = rank * count * size;
    if (nranks == 1) return copy(to, from, count * size);
    size_t stride = piece_bytes(slot_bytes(), nranks);
    CallSignature call{Collective::alltoall, count, dtype, 0, 0};
    in_rounds(*this, call, count, stride / size, [&](uint64_t first, uint64_t part) {
        for (int peer = 0; peer < nranks; ++peer)
            if (peer != rank)
                put(slot(rank) + peer * stride, from + (peer * count + first) * size, part * size);
        step_with([&] { copy(to + own + first * size, from + own + first * size, part * size); });
        for_each_peer(*this, [&](int peer) {
            std::memcpy(to + (peer * count + first) * size, slot(peer) + rank * stride,
                        part * size);
        });
    });
}

void ShmCommunicator::gather(const void* send, void* recv, uint64_t count, comm_dtype dtype,
                             int32_t dst, comm_stream) {
    size_t size = checked_size(*this, dtype);
    const char* from = static_cast<const char*>(send);
    char* to = static_cast<char*>(recv);
    if (nranks == 1) return copy(to, from, count * size);
    CallSignature call{Collective::gather, count, dtype, 0, dst};
    in_rounds(*this, call, count, slot_bytes() / size, [&](uint64_t first, uint64_t part) {
        if (rank != dst) put(slot(rank), from + first * size, part * size);
        step();
        if (rank != dst) return;
        copy(to + (rank * count + first) * size, from + first * size, part * size);
        for_each_peer(*this, [&](int peer) {
            std::memcpy(to + (peer * count + first) * size, slot(peer), part * size);
        });
    });
}

void ShmCommunicator::scatter(const void* send, void* recv, uint64_t count, comm_dtype dtype,
                              int32_t src, comm_stream) {
    size_t size = checked_size(*this, dtype);
    const char* from = static_cast<const char*>(send);
    char* to = static_cast<char*>(recv);
    if (nranks == 1) return copy(to, from, count * size);
    size_t stride = piece_bytes(slot_bytes(), nranks);
    CallSignature call{Collective::scatter, count, dtype, 0, src};
    in_rounds(*this, call, count, stride / size, [&](uint64_t first, uint64_t part) {
        auto row = [&](int of_rank) { return from + (of_rank * count + first) * size; };
        if (rank == src)
            for_each_peer(
                *this, [&](int peer) { put(slot(rank) + peer * stride, row(peer), part * size); });
        step();
        const char* own = rank == src ? row(rank) : slot(src) + rank * stride;
        copy(to + first * size, own, part * size);
    });
}

void ShmCommunicator::barrier(comm_stream) {
    if (nranks == 1) return;
    begin(CallSignature{Collective::barrier, 0, COMM_UINT8, 0, 0});
    step();
}

}  // namespace shm
