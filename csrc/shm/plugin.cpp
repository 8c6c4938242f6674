// The shared-memory backend: ranks of one node, processes or threads. A plugin like any vendor's.
//
// A call goes in rounds of what fits a slot. In a round a rank writes its own slot, takes a step,
// and reads the slots of the others. Every element is reduced in order of rank, wherever it is
// reduced, so the result is bitwise the same on all ranks and in all runs.

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "abi/communicator.h"
#include "shm/shm_communicator.h"
#include "shm/plan.h"
#include "reduce/reduce.h"

struct comm_s : shm::Group {
    using shm::Group::Group;
};

namespace shm {
namespace {

thread_local std::string error_without_group;

comm_result fail(comm_t comm, const Failure& failure) {
    if (comm != nullptr) return comm->fail(failure);
    error_without_group = failure.text;
    return failure.code;
}

// A shape is told for one call.
struct Forgetting {
    comm_t comm;
    ~Forgetting() {
        if (comm != nullptr) comm->forget_shape();
    }
};

// No exception crosses the C boundary.
template <class Body>
comm_result guarded(comm_t comm, Body body) {
    Forgetting forgetting{comm};
    try {
        body();
        return COMM_OK;
    } catch (const Failure& failure) {
        return fail(comm, failure);
    } catch (const std::bad_alloc&) {
        return fail(comm, Failure{COMM_SYSTEM_ERROR, "out of memory in the shared-memory backend"});
    } catch (const std::exception& error) {
        return fail(comm, Failure{COMM_INTERNAL_ERROR, error.what()});
    }
}

size_t checked_size(const Group& group, comm_dtype dtype) {
    size_t size = size_of(dtype);
    if (size == 0)
        throw Failure{COMM_UNSUPPORTED, "rank " + std::to_string(group.rank) +
                                            ": the shared-memory backend has no dtype number " +
                                            std::to_string(dtype) +
                                            ", so it cannot tell how long the elements are. Pass a "
                                            "view of bytes: tensor.view(torch.uint8)"};
    return size;
}

Reduce checked_reduce(const Group& group, comm_dtype dtype, comm_op op) {
    checked_size(group, dtype);
    Reduce reduce = find_reduce(dtype, op, group.choices.instructions);
    if (reduce == nullptr)
        throw Failure{COMM_UNSUPPORTED,
                      "rank " + std::to_string(group.rank) + ": " + name_of_op(op) +
                          " means nothing for " + name_of_dtype(dtype) +
                          ". Convert the tensor, or for bool use max (any) or min (all)"};
    return reduce;
}

void copy(void* to, const void* from, size_t nbytes) {
    if (to != from && nbytes != 0) std::memcpy(to, from, nbytes);
}

// The operands of one round: this rank's where it is, the others' from their slots.
class Operands {
  public:
    Operands(const Group& group) : group_(group), pointers_(small_) {
        if (group.nranks <= most_small) return;
        large_.resize(group.nranks);
        pointers_ = large_.data();
    }
    const void* const* at(const char* mine, size_t offset) {
        for (int rank = 0; rank < group_.nranks; ++rank)
            pointers_[rank] = group_.slot(rank) + offset;
        pointers_[group_.rank] = mine;
        return pointers_;
    }
    const void* const* here() const { return pointers_; }
    void advance(size_t nbytes) {
        for (int rank = 0; rank < group_.nranks; ++rank)
            pointers_[rank] = static_cast<const char*>(pointers_[rank]) + nbytes;
    }
    // Of a call whose operands travel in its records.
    const void* const* words() {
        for (int rank = 0; rank < group_.nranks; ++rank) pointers_[rank] = group_.word(rank);
        return pointers_;
    }

  private:
    static constexpr int most_small = 16;
    const Group& group_;
    const void* small_[most_small];
    std::vector<const void*> large_;
    const void** pointers_;
};

int divisor_for(const Group& group, comm_op op) { return op == COMM_AVG ? group.nranks : 1; }

// Calls `body(first_element, num_elements)` for every round, at least once, in a slot of its own.
template <class Body>
void in_rounds(Group& group, const Call& call, size_t elements_per_round, Body body) {
    group.begin(call);
    uint64_t first = 0;
    do {
        group.next_round();
        uint64_t part = std::min<uint64_t>(elements_per_round, call.count - first);
        body(first, part);
        first += part;
    } while (first < call.count);
}

// Every rank's tensor is in shared memory: each reduces its piece and writes it into all of them.
void allreduce_in_place(Group& group, const Call& call, size_t size, Reduce reduce) {
    std::vector<char*> tensors;
    for (int rank = 0; rank < group.nranks; ++rank) tensors.push_back(group.shared_tensor(rank));
    std::vector<const void*> sources(group.nranks);
    Piece own = Pieces(call.count, group.nranks, size).of(group.rank);
    constexpr size_t cached_bytes = 32 << 10;  // so that a block is still near when it is copied
    for (uint64_t first = own.first; first < own.end(); first += cached_bytes / size) {
        uint64_t part = std::min<uint64_t>(cached_bytes / size, own.end() - first);
        for (int rank = 0; rank < group.nranks; ++rank)
            sources[rank] = tensors[rank] + first * size;
        char* mine = tensors[group.rank] + first * size;
        reduce(mine, sources.data(), group.nranks, part, divisor_for(group, call.op));
        for (int i = 1; i < group.nranks; ++i) {
            int rank = (group.rank + i) % group.nranks;
            std::memcpy(tensors[rank] + first * size, mine, part * size);
        }
    }
    group.step();
}

// Opens a call. A rank whose tensor is in shared memory hopes that all are, and stages nothing:
// then this says so. If only some are, the hopeful stage after all, and everyone takes one step
// more.
template <class Stage>
bool all_share(Group& group, const Call& call, uint64_t where, Stage stage) {
    group.begin(call, where);
    group.next_round();
    if (where == 0) stage();
    group.step();
    int shared = group.num_shared_tensors();
    if (shared == group.nranks) return true;
    if (where != 0) stage();
    if (shared > 0) group.step();
    return false;
}

// What fits a word travels in the record, and so in the cache line of the step.
void allreduce_word(Group& group, const char* send, char* recv, const Call& call, size_t size,
                    Reduce reduce) {
    uint64_t mine = 0;
    std::memcpy(&mine, send, call.count * size);
    group.begin(call, mine);
    group.step();
    Operands operands(group);
    reduce(recv, operands.words(), group.nranks, call.count, divisor_for(group, call.op));
}

// From so many bytes on, what a rank needs next lies in memory, and not in a cache.
constexpr size_t smallest_foreseen = 4 << 20;

// Reduces a whole round while memory, which idles when lines come from the peer, brings `later`:
// what is staged after the next round. In strips, so that neither keeps the other waiting.
void reduce_foreseeing(const Group& group, Reduce reduce, char* out, Operands& operands,
                       size_t size, int divisor, const char* later, size_t later_bytes) {
    constexpr size_t strip = 1 << 10;
    for (size_t i = 0; i < group.slot_bytes(); i += strip) {
        for (size_t j = i; j < std::min(i + strip, later_bytes); j += 64)
            __builtin_prefetch(later + j);
        reduce(out + i, operands.here(), group.nranks, strip / size, divisor);
        operands.advance(strip);
    }
}

// Everyone reads everything: one step a round, most traffic. The next round is staged before this
// one is reduced, so that the peers need not wait for it.
void allreduce_one_shot(Group& group, const char* send, char* recv, const Call& call, size_t size,
                        Reduce reduce) {
    Operands operands(group);
    uint64_t whole = group.slot_bytes() / size;
    int divisor = divisor_for(group, call.op);
    auto part = [&](uint64_t first) { return std::min(whole, call.count - first); };
    auto stage = [&](uint64_t first) {
        group.put(group.slot(group.rank), send + first * size, part(first) * size);
    };
    bool worthwhile = send == recv && call.count * size >= smallest_reduced_in_place;
    uint64_t where = worthwhile ? group.memory().where(recv, call.count * size) : 0;
    if (all_share(group, call, where, [&] { stage(0); }))
        return allreduce_in_place(group, call, size, reduce);
    bool foresees = call.count * size >= smallest_foreseen;
    for (uint64_t first = 0, next = whole;; first = next, next += whole) {
        const void* const* sources = operands.at(send + first * size, 0);
        bool more = next < call.count;
        if (more) {
            group.next_round();
            stage(next);
            group.arrive();
        }
        uint64_t later = next + whole;
        if (foresees && later < call.count)
            reduce_foreseeing(group, reduce, recv + first * size, operands, size, divisor,
                              send + later * size, part(later) * size);
        else
            reduce(recv + first * size, sources, group.nranks, part(first), divisor);
        if (!more) return;
        group.await();
    }
}

// One round: everyone reduces its piece and reads the other pieces. Two steps, least traffic.
class TwoShot {
  public:
    TwoShot(Group& group, const Call& call, size_t size, Reduce reduce)
        : group_(group), operands_(group), call_(call), size_(size), reduce_(reduce) {}

    void stage(const char* from, uint64_t part) {
        Piece own = Pieces(part, group_.nranks, size_).of(group_.rank);
        char* mine = group_.slot(group_.rank);
        group_.put(mine, from, own.first * size_);
        size_t end = own.end() * size_;
        group_.put(mine + end, from + end, part * size_ - end);
    }

    void reduce_and_share(const char* from, char* to, uint64_t part) {
        Pieces pieces(part, group_.nranks, size_);
        Piece own = pieces.of(group_.rank);
        size_t offset = own.first * size_;
        char* mine = group_.slot(group_.rank) + offset;
        reduce_(mine, operands_.at(from + offset, offset), group_.nranks, own.count,
                divisor_for(group_, call_.op));
        group_.arrive();
        std::memcpy(to + offset, mine, own.count * size_);
        group_.await();
        for (int i = 1; i < group_.nranks; ++i) {
            int rank = (group_.rank + i) % group_.nranks;
            Piece piece = pieces.of(rank);
            std::memcpy(to + piece.first * size_, group_.slot(rank) + piece.first * size_,
                        piece.count * size_);
        }
    }

  private:
    Group& group_;
    Operands operands_;
    const Call& call_;
    const size_t size_;
    const Reduce reduce_;
};

void allreduce_two_shot(Group& group, const char* send, char* recv, const Call& call, size_t size,
                        Reduce reduce) {
    TwoShot two_shot(group, call, size, reduce);
    uint64_t whole = std::min<uint64_t>(group.slot_bytes() / size, call.count);
    uint64_t where = send == recv ? group.memory().where(recv, call.count * size) : 0;
    if (all_share(group, call, where, [&] { two_shot.stage(send, whole); }))
        return allreduce_in_place(group, call, size, reduce);
    two_shot.reduce_and_share(send, recv, whole);
    for (uint64_t first = whole; first < call.count; first += whole) {
        uint64_t part = std::min(whole, call.count - first);
        group.next_round();
        two_shot.stage(send + first * size, part);
        group.step();
        two_shot.reduce_and_share(send + first * size, recv + first * size, part);
    }
}

void allreduce(Group& group, const char* send, char* recv, uint64_t count, comm_dtype dtype,
               comm_op op) {
    Reduce reduce = checked_reduce(group, dtype, op);
    size_t size = size_of(dtype);
    if (group.nranks == 1) return copy(recv, send, count * size);
    Call call{Kind::allreduce, count, dtype, op, 0};
    if (count <= sizeof(uint64_t) / size)
        return allreduce_word(group, send, recv, call, size, reduce);
    bool small = plan_allreduce(count * size, group.nranks, group.slot_bytes()) == Plan::one_shot;
    (small ? allreduce_one_shot : allreduce_two_shot)(group, send, recv, call, size, reduce);
}

void broadcast(Group& group, char* buffer, uint64_t count, comm_dtype dtype, int32_t src) {
    size_t size = checked_size(group, dtype);
    if (group.nranks == 1) return;
    Call call{Kind::broadcast, count, dtype, 0, src};
    in_rounds(group, call, group.slot_bytes() / size, [&](uint64_t first, uint64_t part) {
        if (group.rank == src) group.put(group.slot(src), buffer + first * size, part * size);
        group.step();
        if (group.rank != src) std::memcpy(buffer + first * size, group.slot(src), part * size);
    });
}

void reduce(Group& group, const char* send, char* recv, uint64_t count, comm_dtype dtype,
            comm_op op, int32_t dst) {
    Reduce reduce = checked_reduce(group, dtype, op);
    size_t size = size_of(dtype);
    if (group.nranks == 1) return copy(recv, send, count * size);
    Operands operands(group);
    Call call{Kind::reduce, count, dtype, op, dst};
    in_rounds(group, call, group.slot_bytes() / size, [&](uint64_t first, uint64_t part) {
        const char* from = send + first * size;
        if (group.rank != dst) group.put(group.slot(group.rank), from, part * size);
        group.step();
        if (group.rank == dst)
            reduce(recv + first * size, operands.at(from, 0), group.nranks, part,
                   divisor_for(group, op));
    });
}

void allgather(Group& group, const char* send, char* recv, uint64_t count, comm_dtype dtype) {
    size_t size = checked_size(group, dtype);
    char* own = recv + group.rank * count * size;
    if (group.nranks == 1) return copy(own, send, count * size);
    Call call{Kind::allgather, count, dtype, 0, 0};
    in_rounds(group, call, group.slot_bytes() / size, [&](uint64_t first, uint64_t part) {
        group.put(group.slot(group.rank), send + first * size, part * size);
        group.arrive();
        copy(own + first * size, send + first * size, part * size);
        group.await();
        for (int i = 1; i < group.nranks; ++i) {
            int rank = (group.rank + i) % group.nranks;
            std::memcpy(recv + (rank * count + first) * size, group.slot(rank), part * size);
        }
    });
}

void reduce_scatter(Group& group, const char* send, char* recv, uint64_t count, comm_dtype dtype,
                    comm_op op) {
    Reduce reduce = checked_reduce(group, dtype, op);
    size_t size = size_of(dtype);
    if (group.nranks == 1) return copy(recv, send, count * size);
    Operands operands(group);
    size_t stride = piece_bytes(group.slot_bytes(), group.nranks);
    Call call{Kind::reduce_scatter, count, dtype, op, 0};
    in_rounds(group, call, stride / size, [&](uint64_t first, uint64_t part) {
        for (int rank = 0; rank < group.nranks; ++rank)
            if (rank != group.rank)
                group.put(group.slot(group.rank) + rank * stride,
                          send + (rank * count + first) * size, part * size);
        group.step();
        const char* mine = send + (group.rank * count + first) * size;
        reduce(recv + first * size, operands.at(mine, group.rank * stride), group.nranks, part,
               divisor_for(group, op));
    });
}

void alltoall(Group& group, const char* send, char* recv, uint64_t count, comm_dtype dtype) {
    size_t size = checked_size(group, dtype);
    size_t own = group.rank * count * size;
    if (group.nranks == 1) return copy(recv, send, count * size);
    size_t stride = piece_bytes(group.slot_bytes(), group.nranks);
    Call call{Kind::alltoall, count, dtype, 0, 0};
    in_rounds(group, call, stride / size, [&](uint64_t first, uint64_t part) {
        for (int rank = 0; rank < group.nranks; ++rank)
            if (rank != group.rank)
                group.put(group.slot(group.rank) + rank * stride,
                          send + (rank * count + first) * size, part * size);
        group.arrive();
        copy(recv + own + first * size, send + own + first * size, part * size);
        group.await();
        for (int i = 1; i < group.nranks; ++i) {
            int rank = (group.rank + i) % group.nranks;
            std::memcpy(recv + (rank * count + first) * size,
                        group.slot(rank) + group.rank * stride, part * size);
        }
    });
}

void transfer(Group& group, bool is_send, char* buffer, uint64_t count, comm_dtype dtype,
              int32_t peer) {
    size_t size = checked_size(group, dtype);
    if (peer < 0 || peer >= group.nranks || peer == group.rank)
        throw Failure{COMM_INVALID_ARGUMENT,
                      "rank " + std::to_string(group.rank) + ": there is no peer with rank " +
                          std::to_string(peer) + " in a group of " + std::to_string(group.nranks) +
                          ", so nobody would answer. Name one of the other ranks"};
    Transfer transfer{};
    transfer.is_send = is_send;
    transfer.peer = peer;
    transfer.data = buffer;
    transfer.count = count;
    transfer.dtype = dtype;
    transfer.nbytes = count * size;
    group.transfer(std::move(transfer));
}

// ---- the table ----

comm_result do_probe(int32_t* score) {
    *score = 100;
    return COMM_OK;
}

comm_result do_init(comm_t* comm, const comm_init_args* args) {
    *comm = nullptr;
    return guarded(nullptr, [&] { *comm = new comm_s(*args); });
}

comm_result do_destroy(comm_t comm) {
    delete comm;
    return COMM_OK;
}

const char* do_last_error(comm_t comm) {
    return comm == nullptr ? error_without_group.c_str() : comm->last_error();
}

comm_result do_allreduce(comm_t comm, const void* send, void* recv, uint64_t count,
                         comm_dtype dtype, comm_op op, comm_stream) {
    return guarded(comm, [&] {
        allreduce(*comm, static_cast<const char*>(send), static_cast<char*>(recv), count, dtype,
                  op);
    });
}

comm_result do_broadcast(comm_t comm, void* buffer, uint64_t count, comm_dtype dtype, int32_t src,
                         comm_stream) {
    return guarded(comm, [&] { broadcast(*comm, static_cast<char*>(buffer), count, dtype, src); });
}

comm_result do_reduce(comm_t comm, const void* send, void* recv, uint64_t count, comm_dtype dtype,
                      comm_op op, int32_t dst, comm_stream) {
    return guarded(comm, [&] {
        reduce(*comm, static_cast<const char*>(send), static_cast<char*>(recv), count, dtype, op,
               dst);
    });
}

comm_result do_allgather(comm_t comm, const void* send, void* recv, uint64_t count,
                         comm_dtype dtype, comm_stream) {
    return guarded(comm, [&] {
        allgather(*comm, static_cast<const char*>(send), static_cast<char*>(recv), count, dtype);
    });
}

comm_result do_reduce_scatter(comm_t comm, const void* send, void* recv, uint64_t count,
                              comm_dtype dtype, comm_op op, comm_stream) {
    return guarded(comm, [&] {
        reduce_scatter(*comm, static_cast<const char*>(send), static_cast<char*>(recv), count,
                       dtype, op);
    });
}

comm_result do_alltoall(comm_t comm, const void* send, void* recv, uint64_t count, comm_dtype dtype,
                        comm_stream) {
    return guarded(comm, [&] {
        alltoall(*comm, static_cast<const char*>(send), static_cast<char*>(recv), count, dtype);
    });
}

comm_result do_send(comm_t comm, const void* buffer, uint64_t count, comm_dtype dtype, int32_t dst,
                    comm_stream) {
    return guarded(comm, [&] {
        char* data = static_cast<char*>(const_cast<void*>(buffer));
        transfer(*comm, true, data, count, dtype, dst);
    });
}

comm_result do_recv(comm_t comm, void* buffer, uint64_t count, comm_dtype dtype, int32_t src,
                    comm_stream) {
    return guarded(comm,
                   [&] { transfer(*comm, false, static_cast<char*>(buffer), count, dtype, src); });
}

comm_result do_barrier(comm_t comm, comm_stream) {
    return guarded(comm, [&] {
        if (comm->nranks == 1) return;
        comm->begin(Call{Kind::barrier, 0, COMM_UINT8, 0, 0});
        comm->step();
    });
}

comm_result do_group_start(comm_t comm) {
    comm->group_start();
    return COMM_OK;
}

comm_result do_group_end(comm_t comm) {
    return guarded(comm, [&] { comm->group_end(); });
}

comm_result do_abort(comm_t comm) {
    comm->abort();
    return COMM_OK;
}

// What goes wrong with memory concerns this rank alone: the group is still in step.
comm_result do_mem_alloc(comm_t comm, size_t nbytes, void** pointer) {
    try {
        comm->check_process();
        *pointer = comm->memory().allocate(nbytes);
        return COMM_OK;
    } catch (const Failure& failure) {
        return comm->keep(failure);
    }
}

comm_result do_mem_free(comm_t comm, void* pointer) {
    try {
        comm->check_process();
        comm->memory().free(pointer);
        return COMM_OK;
    } catch (const Failure& failure) {
        return comm->keep(failure);
    }
}

void do_tell_shape(comm_t comm, int32_t ndim, const int64_t* shape) {
    if (comm->nranks > 1) comm->tell_shape(ndim, shape);
}

comm_plugin make_table() {
    comm_plugin table = {};
    table.struct_size = sizeof table;
    table.abi_major = COMM_ABI_MAJOR;
    table.abi_minor = COMM_ABI_MINOR;
    table.name = "shm";
    table.version = "1";
    table.device_type = COMM_CPU;
    table.caps = COMM_CAP_ONE_NODE | COMM_CAP_THREADS | COMM_CAP_EMPTY;
    table.probe = do_probe;
    table.init = do_init;
    table.destroy = do_destroy;
    table.allreduce = do_allreduce;
    table.last_error = do_last_error;
    table.broadcast = do_broadcast;
    table.reduce = do_reduce;
    table.allgather = do_allgather;
    table.reduce_scatter = do_reduce_scatter;
    table.alltoall = do_alltoall;
    table.send = do_send;
    table.recv = do_recv;
    table.barrier = do_barrier;
    table.group_start = do_group_start;
    table.group_end = do_group_end;
    table.abort = do_abort;
    table.mem_alloc = do_mem_alloc;
    table.mem_free = do_mem_free;
    table.tell_shape = do_tell_shape;
    return table;
}

}  // namespace
}  // namespace shm

extern "C" const comm_plugin* comm_plugin_entry_v1(void) {
    static const comm_plugin table = shm::make_table();
    return &table;
}
