#include "tcp/programs.h"

#include <algorithm>
#include <cmath>

namespace tcp {
namespace {

constexpr int64_t hop_nbytes = 1 << 13;     // that a link carries in one message latency
constexpr int64_t small_nbytes = 1 << 14;   // of a message that mostly waits
constexpr int64_t piece_nbytes = 60 << 10;  // of a message, sent in turn: it is with its headers
                                            // one of Linux' packets
constexpr int64_t flight_nbytes = 2 * piece_nbytes;  // that a rank has on its way at once
constexpr int64_t max_pieces = 1 << 10;              // of a message
constexpr int64_t max_additions = 1 << 6;   // by which a rank adds its part of a tensor, one while
                                            // the next is fetched
constexpr int64_t shared_nbytes = 1 << 20;  // from which on two ranks share an allreduce's sums
constexpr int max_direct = 8;  // ranks that gather small messages from each other, not in rounds
constexpr int64_t message_nbytes = 1 << 10;  // that a link carries while a message keeps a core

int64_t ceil_div(int64_t number, int64_t divisor) { return (number + divisor - 1) / divisor; }

int64_t bit_length(int64_t number) {
    int64_t bits = 0;
    for (; number > 0; number >>= 1) ++bits;
    return bits;
}

// To cut the bytes into; at most `most`, and then each piece is larger.
int64_t num_pieces(int64_t nbytes, int64_t most = max_pieces) {
    return std::max<int64_t>(1, std::min(ceil_div(nbytes, piece_nbytes), most));
}

// Piece k of `count` that differ by at most one element, in order.
Slice piece_of(Slice whole, int64_t k, int64_t count) {
    return {whole.begin + whole.numel() * k / count, whole.begin + whole.numel() * (k + 1) / count};
}

// Whether every rank gets all tensors of a reduction and adds them itself. Otherwise each adds a
// part of all tensors, which takes a message more, and fewer bytes.
bool is_gathered(int size, int64_t nbytes) {
    if (size == 2) return nbytes < shared_nbytes;
    double more_nbytes = static_cast<double>(nbytes) * (size - 1) * (size - 2) / size;
    return more_nbytes < hop_nbytes + 1;
}

// Whether an alltoall of `nbytes` a rank goes in log2 rounds, and not pairwise: fewer messages, and
// more bytes, as half of them move in each round.
bool is_rotated(int size, int64_t nbytes) {
    int64_t rotated_nbytes = bit_length(size - 1) * (hop_nbytes + nbytes / 2);
    return rotated_nbytes < (size - 1) * (message_nbytes + nbytes / size);
}

bool is_disseminated(int size, int64_t nbytes) {
    return size > max_direct && nbytes <= small_nbytes;
}

// Where elements lie.
struct Offset {
    int32_t buffer;
    int64_t at;
    Offset operator+(int64_t numel) const { return {buffer, at + numel}; }
};

class Builder {
  public:
    Builder(const ProgramRanks& members, StepProgram* program)
        : rank(members.rank),
          size(members.size),
          members_(members),
          steps_(program->steps),
          program_(program) {}

    const int rank, size;

    int64_t nbytes(int64_t numel) const { return numel * members_.itemsize; }
    Slice row(int64_t numel, int64_t rank, int64_t begin = 0) const {
        return {begin + numel * rank, begin + numel * (rank + 1)};
    }
    int behind(int64_t distance) const {
        return static_cast<int>((rank + size - distance % size) % size);
    }
    int ahead(int64_t distance) const { return static_cast<int>((rank + distance) % size); }

    // Goes on once at most so many rounds are under way.
    void settle(int64_t under_way = 0) {
        if (under_way == 0 && is_settled_) return;
        push(Kind::settle, static_cast<int32_t>(under_way), 0, 0, 0, 0, 0);
        is_settled_ |= under_way == 0;
    }
    // Rounds before it may be under way where it touches none of their memory.
    void copy_now(Offset from, int64_t numel, Offset to) {
        reserve(from + numel);
        reserve(to + numel);
        if (numel > 0) push(Kind::copy, 0, from.buffer, to.buffer, from.at, to.at, numel);
    }
    void copy(Offset from, int64_t numel, Offset to) {
        settle();
        copy_now(from, numel, to);
    }
    // One row for each rank in scratch from `begin` on, reduced; row `first` is rank 0's.
    void reduce(int64_t begin, int64_t numel, Offset to, int first = 0, int64_t under_way = 0) {
        settle(under_way);
        reserve({scratch_buffer, begin + numel * size});
        reserve(to + numel);
        push(Kind::reduce, first, size, to.buffer, begin, to.at, numel);
    }
    void round(int64_t window = 1) {
        push(Kind::round, static_cast<int32_t>(window), 0, 0, 0, 0, 0);
        is_settled_ = false;
    }
    void send(int peer, int32_t buffer, Slice slice) {
        reserve({buffer, slice.end});
        push(Kind::send, members_.peers[peer], buffer, 0, slice.begin, 0, slice.numel());
    }
    void recv(int peer, int32_t buffer, Slice slice) {
        reserve({buffer, slice.end});
        push(Kind::recv, members_.peers[peer], 0, buffer, 0, slice.begin, slice.numel());
    }

    // Each rank sends to each other one, to its right neighbour first: no two to the same one.
    // Large messages go piece by piece in turn: each link has data for all ranks at any time, so
    // none is idle while one rank is late. Returns how many rounds it takes, the same on all ranks.
    template <class Sends, class Recvs>
    int64_t exchange(Sends sends, Recvs recvs, int32_t source, int32_t target) {
        std::vector<Slice> sent(size), received(size);  // by rank
        int64_t most = 0;
        for (int peer = 0; peer < size; ++peer) {
            sent[peer] = sends(peer);
            received[peer] = recvs(peer);
            most = std::max({most, sent[peer].numel(), received[peer].numel()});
        }
        int64_t count = num_pieces(nbytes(most)), rounds = 0;
        int64_t window =
            std::max<int64_t>(2, flight_nbytes / std::max<int64_t>(nbytes(most) / count, 1));
        for (int64_t k = 0; k < count; ++k)
            for (int distance = 1; distance < size; ++distance) {
                int dst = ahead(distance), src = behind(distance);
                bool is_sent = sent[dst].numel() >= 0, is_received = received[src].numel() >= 0;
                if (!is_sent && !is_received) continue;
                round(window);
                ++rounds;
                if (is_sent) send(dst, source, piece_of(sent[dst], k, count));
                if (is_received) recv(src, target, piece_of(received[src], k, count));
            }
        return rounds;
    }

    // Each rank's slice to dst; one round.
    template <class Rows>
    int64_t gather(int dst, Rows rows, int32_t source, int32_t target) {
        round();
        if (rank != dst)
            send(dst, source, rows(rank));
        else
            for (int src = 0; src < size; ++src)
                if (src != dst) recv(src, target, rows(src));
        return 1;
    }

    // An allgather in log2 rounds (Bruck's) of rows in scratch from `begin` on, this rank's own
    // first: row i becomes that of rank (rank + i) % size.
    void disseminate(int64_t begin, int64_t row) {
        for (int64_t distance = 1; distance < size; distance *= 2) {
            int64_t count = std::min(distance, size - distance);
            round();
            send(behind(distance), scratch_buffer, {begin, begin + count * row});
            recv(ahead(distance), scratch_buffer,
                 {begin + distance * row, begin + (distance + count) * row});
        }
    }

    // An alltoall in log2 rounds (Bruck's) of rows at `from`; they come to lie at `to`, in order of
    // rank. free: scratch from here on is used.
    void rotate(Offset from, int64_t row, Offset to, int64_t free) {
        Offset rows{scratch_buffer,
                    free};  // row i: for (rank + i) % size, at the end from rank - i
        Offset sent = rows + size * row, received = sent + size / 2 * row;
        copy(from + rank * row, (size - rank) * row, rows);
        copy(from, rank * row, rows + (size - rank) * row);
        for (int64_t distance = 1; distance < size; distance *= 2) {
            int64_t count = move_rows(rows, row, distance, sent, true);
            round();
            send(ahead(distance), scratch_buffer, {sent.at, sent.at + count * row});
            recv(behind(distance), scratch_buffer, {received.at, received.at + count * row});
            move_rows(rows, row, distance, received, false);
        }
        for (int src = 0; src < size; ++src) copy(rows + behind(src) * row, row, to + src * row);
    }

    // Every rank's row at `from`, in order of rank at `to`. free: scratch from here on is used.
    void allgather(Offset from, int64_t row, Offset to, int64_t free) {
        if (is_disseminated(size, nbytes(row))) {
            Offset rows{scratch_buffer, free};
            copy(from, row, rows);
            disseminate(free, row);
            copy(rows, (size - rank) * row, to + rank * row);
            copy(rows + (size - rank) * row, rank * row, to);
            return;
        }
        copy(from, row, to + rank * row);
        exchange([&](int) { return this->row(row, rank, to.at); },
                 [&](int peer) { return this->row(row, peer, to.at); }, to.buffer, to.buffer);
    }

    // All ranks' tensors as the rows of scratch. Returns the row of rank 0.
    int gather_rows(int64_t numel) {
        if (is_disseminated(size, nbytes(numel))) {
            copy({tensor_buffer, 0}, numel, {scratch_buffer, 0});
            disseminate(0, numel);
            return behind(2 * rank);
        }
        copy({tensor_buffer, 0}, numel, {scratch_buffer, rank * numel});
        exchange([&](int) { return Slice{0, numel}; }, [&](int peer) { return row(numel, peer); },
                 tensor_buffer, scratch_buffer);
        return 0;
    }

    // Every rank adds its part of all tensors into `to`, piece by piece: while one is fetched the
    // one before is added, and goes where share(k, pieces) says, which returns its rounds. Scratch
    // has room for num_kept elements, and after them for the rows of two pieces:
    //
    //   fetch 0 | fetch 1, add 0, share 0 | fetch 2, add 1, share 1 | ... | add last, share last
    template <class Share>
    void reduce_in_parts(int64_t numel, Offset to, int64_t num_kept, Share share) {
        int64_t most = ceil_div(numel, size);  // of a part
        int64_t count = num_pieces(nbytes(most), max_additions);
        int64_t width = size * ceil_div(most, count);
        auto piece = [&](int64_t k) {
            return [=](int peer) { return piece_of(piece_of({0, numel}, peer, size), k, count); };
        };
        auto room = [&](int64_t k) { return num_kept + k % 2 * width; };
        int64_t shared = 0;
        for (int64_t k = 0; k <= count; ++k) {
            int64_t fetched = 0;
            if (k < count) {
                auto part = piece(k);
                Slice own = part(rank);
                auto rows = [&](int peer) { return row(own.numel(), peer, room(k)); };
                copy_now({tensor_buffer, own.begin}, own.numel(),
                         {scratch_buffer, rows(rank).begin});
                fetched = exchange(part, rows, tensor_buffer, scratch_buffer);
            }
            if (k == 0) continue;
            auto part = piece(k - 1);
            Slice own = part(rank), whole = piece_of({0, numel}, rank, size);
            reduce(room(k - 1), own.numel(), to + (own.begin - whole.begin), 0, shared + fetched);
            shared = share(part);
        }
    }

  private:
    // Rows whose number has this bit, one after another at `packed`, or back; how many they are.
    int64_t move_rows(Offset rows, int64_t row, int64_t bit, Offset packed, bool packs) {
        int64_t count = 0;
        for (int64_t first = bit; first < size; first += 2 * bit) {
            int64_t run = std::min(bit, size - first);
            Offset inside = rows + first * row, outside = packed + count * row;
            copy(packs ? inside : outside, run * row, packs ? outside : inside);
            count += run;
        }
        return count;
    }
    void reserve(Offset end) {
        if (end.buffer == scratch_buffer)
            program_->scratch_nbytes =
                std::max(program_->scratch_nbytes, static_cast<uint64_t>(nbytes(end.at)));
    }
    void push(Kind kind, int32_t peer, int32_t source, int32_t target, int64_t begin, int64_t to,
              int64_t numel) {
        auto bytes = [&](int64_t count) { return static_cast<uint64_t>(nbytes(count)); };
        steps_.push_back({kind, peer, source, target, bytes(begin), bytes(to), bytes(numel)});
    }

    const ProgramRanks& members_;
    std::vector<Step>& steps_;
    StepProgram* program_;
    bool is_settled_ = true;  // no round is under way
};

// Every rank adds a part, of the same size on all, and gets those of the others.
void allreduce_in_rotations(Builder& b, int64_t numel) {
    int64_t width = ceil_div(numel, b.size), all = b.size * width;
    Offset padded{scratch_buffer, 0}, rows{scratch_buffer, all}, sum{scratch_buffer, 2 * all};
    b.copy({tensor_buffer, 0}, numel, padded);
    for (int64_t filled = numel; filled < all;) {  // with anything: nobody reads its sums
        int64_t count = std::min(filled, all - filled);
        b.copy(padded, count, padded + filled);
        filled += count;
    }
    int64_t free = 2 * all + width;
    b.rotate(padded, width, rows, free);
    b.reduce(rows.at, width, sum);
    b.allgather(sum, width, padded, free);
    b.copy(padded, numel, {out_buffer, 0});
}

// Small: every rank gets all tensors. Large: every rank adds a part, and all get it.
void allreduce(Builder& b, int64_t numel) {
    if (is_gathered(b.size, b.nbytes(numel))) {
        int first = b.gather_rows(numel);
        b.reduce(0, numel, {out_buffer, 0}, first);
    } else if (is_rotated(b.size, b.nbytes(numel))) {
        allreduce_in_rotations(b, numel);
    } else {
        int64_t begin = piece_of({0, numel}, b.rank, b.size).begin;
        b.reduce_in_parts(numel, {out_buffer, begin}, 0, [&](auto part) {
            Slice own = part(b.rank);
            return b.exchange([&](int) { return own; }, part, out_buffer, out_buffer);
        });
    }
}

// Small: dst gets all tensors. Large: it gets from every rank the part that this adds.
void reduce(Builder& b, int64_t numel, int dst) {
    if (is_gathered(b.size, b.nbytes(numel))) {
        if (b.rank != dst) {
            b.gather(dst, [&](int) { return Slice{0, numel}; }, tensor_buffer, out_buffer);
            return;
        }
        b.copy({tensor_buffer, 0}, numel, {scratch_buffer, b.rank * numel});
        b.gather(dst, [&](int peer) { return b.row(numel, peer); }, scratch_buffer, scratch_buffer);
        b.reduce(0, numel, {out_buffer, 0});
        return;
    }
    Slice whole = piece_of({0, numel}, b.rank, b.size);
    bool is_dst = b.rank == dst;  // a rank without a result adds its part in scratch
    Offset to = is_dst ? Offset{out_buffer, whole.begin} : Offset{scratch_buffer, 0};
    b.reduce_in_parts(numel, to, is_dst ? 0 : whole.numel(), [&](auto part) {
        int64_t shift = to.at - whole.begin;
        auto slice = [&](int peer) {
            Slice own = part(peer);
            return is_dst ? own : Slice{own.begin + shift, own.end + shift};
        };
        return b.gather(dst, slice, to.buffer, to.buffer);
    });
}

void reduce_scatter(Builder& b, int64_t numel) {
    if (!is_rotated(b.size, b.nbytes(numel)))
        return b.reduce_in_parts(numel, {out_buffer, 0}, 0, [](const auto&) { return int64_t{0}; });
    b.rotate({tensor_buffer, 0}, numel / b.size, {scratch_buffer, 0}, numel);
    b.reduce(0, numel / b.size, {out_buffer, 0});
}

void alltoall(Builder& b, int64_t numel) {
    int64_t row = numel / b.size;
    if (is_rotated(b.size, b.nbytes(numel)))
        return b.rotate({tensor_buffer, 0}, row, {out_buffer, 0}, 0);
    b.copy({tensor_buffer, b.rank * row}, row, {out_buffer, b.rank * row});
    auto rows = [&](int peer) { return b.row(row, peer); };
    b.exchange(rows, rows, tensor_buffer, out_buffer);
}

// From src to its right neighbour and so on; a rank passes one piece on as the next arrives.
void chain(Builder& b, int64_t numel, int src, int64_t count) {
    int before = b.behind(1), after = b.ahead(1);
    bool sends = after != src, recvs = b.rank != src;
    for (int64_t k = 0; k <= count; ++k) {
        bool is_sent = sends && (recvs ? k > 0 : k < count), is_received = recvs && k < count;
        if (!is_sent && !is_received) continue;
        b.round();
        if (is_sent) b.send(after, tensor_buffer, piece_of({0, numel}, recvs ? k - 1 : k, count));
        if (is_received) b.recv(before, tensor_buffer, piece_of({0, numel}, k, count));
    }
}

// A binomial tree: in every round each rank that has the tensor sends it to one more.
void tree(Builder& b, int64_t numel, int src) {
    int64_t place = b.behind(src);
    for (int64_t distance = 1; distance < b.size; distance *= 2) {
        bool is_sent = place < distance && place + distance < b.size;
        bool is_received = distance <= place && place < 2 * distance;
        if (!is_sent && !is_received) continue;
        b.round();
        if (is_sent) b.send(b.ahead(distance), tensor_buffer, {0, numel});
        if (is_received) b.recv(b.behind(distance), tensor_buffer, {0, numel});
    }
}

// A chain of ranks that pass on piece after piece; or a tree, where it takes at most 3/4 of the
// time: its busiest link carries the tensor log2 times.
void broadcast(Builder& b, int64_t numel, int src) {
    double nbytes = static_cast<double>(b.nbytes(numel)), hops = std::max(b.size - 2, 0);
    double by_hops = std::nearbyint(std::sqrt(hops * nbytes / hop_nbytes));
    int64_t count = std::max(num_pieces(b.nbytes(numel)), static_cast<int64_t>(by_hops));
    double pieces = static_cast<double>(count);
    double chain_nbytes = (pieces + hops) * (nbytes / pieces + hop_nbytes);
    double tree_nbytes = static_cast<double>(bit_length(b.size - 1)) * (nbytes + hop_nbytes);
    if (chain_nbytes * 3 < tree_nbytes * 4)
        chain(b, numel, src, count);
    else
        tree(b, numel, src);
}

}  // namespace

bool collective(std::string_view name, const ProgramRanks& members, int64_t numel, int root,
                StepProgram* program) {
    Builder b(members, program);
    if (name == "allreduce")
        allreduce(b, numel);
    else if (name == "reduce")
        reduce(b, numel, root);
    else if (name == "reduce_scatter")
        reduce_scatter(b, numel);
    else if (name == "allgather")
        b.allgather({tensor_buffer, 0}, numel, {out_buffer, 0}, 0);
    else if (name == "alltoall")
        alltoall(b, numel);
    else if (name == "broadcast")
        broadcast(b, numel, root);
    else
        return false;
    return true;
}

StepProgram exchange(const ProgramRanks& members, const Slice* sends, const Slice* recvs,
                     int32_t source, int32_t target) {
    StepProgram program;
    Builder(members, &program)
        .exchange([&](int peer) { return sends[peer]; }, [&](int peer) { return recvs[peer]; },
                  source, target);
    return program;
}

}  // namespace tcp
