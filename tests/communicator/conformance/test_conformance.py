"""conformance.check must catch a backend that lies. Each fault here is planted in a sound one."""

import pytest
import torch

from communicator import Backend, Communicator, Unsupported, conformance
from communicator.backends.gloo import Gloo
from communicator.backends.plugin import LibraryCalls
from communicator.backends.shm import Shm
from communicator.conformance.test_data import ReferenceData
from coordinator import Coordinator

LARGE = 5003
IN_PLACE = ("allreduce", "broadcast", "reduce", "recv")
TAKES_OP = ("allreduce", "reduce", "reduce_scatter")


# A fault is fault(comm, call, tensor, *others, **options): call is the sound method.


def forgets_the_tail(comm, call, tensor, *others, **options):
    before = tensor.clone()
    written = call(tensor, *others, **options)
    flat = written.view(-1)
    tail = flat.numel() // 8 * 8
    if written is tensor and not comm.pending:
        flat[tail:] = before.view(-1)[tail:]
    elif written is not None:
        flat[tail:] = 0
    return written


def forgets_the_end_of_large_ones(comm, call, tensor, *others, **options):
    written = call(tensor, *others, **options)
    if written.numel() > 4096:
        written.view(-1)[4096:] = 0
    return written


def works_on_a_copy(comm, call, tensor, *others, **options):
    call(tensor.clone(), *others, **options)
    return options.get("out", tensor)


def returns_a_copy(comm, call, tensor, *others, **options):
    return call(tensor, *others, **options).clone()


def swaps_ranks(comm, call, tensor, *others, **options):
    found = call(tensor, *others, **options)
    return found.copy_(found.flip(0))


def gives_the_row_of_another(comm, call, tensor, *others, **options):
    return call(tensor.roll(1, 0), *others, **options)


def ignores_the_op(comm, call, tensor, *others, out=None):
    others = ["sum" if isinstance(other, str) else other for other in others]
    return call(tensor, *others) if out is None else call(tensor, *others, out=out)


def ignores_the_root(comm, call, tensor, root=0, *others):
    return call(tensor, 0, *others)


def mistakes_the_peer(comm, call, tensor, peer):
    return call(tensor, peer if comm.rank or comm.pending is not None else 3 - peer)


def returns_too_early(comm, call, tensor, *others, **options):
    out = options.get("out")
    kept = (tensor if out is None else out).clone()
    written = call(tensor, *others, **options)
    if written.shape != kept.shape:
        kept = torch.zeros_like(written)
    return written.copy_(kept)  # and the result would come after everybody has looked


def drops_what_was_for_out(comm, call, tensor, *others, out=None):
    written = call(tensor, *others)
    return written if out is None else out


def changes_its_input(comm, call, tensor, *others, **options):
    written = call(tensor, *others, **options)
    if written is not tensor:
        tensor.zero_()
    return written


def rounds_through(dtype, of):
    def rounds(comm, call, tensor, *others, **options):
        written = call(tensor, *others, **options)
        return written.copy_(written.to(dtype)) if written.dtype == of else written

    return rounds


def clears_on_the_other_ranks(comm, call, tensor, dst=0, *others):
    call(tensor, dst, *others)
    return tensor if comm.rank == dst else tensor.zero_()


def begins_at_zero(comm, call, tensor, op="sum", **options):
    """As a maximum that starts from 0 does."""
    written = call(tensor, op, **options)
    return written.clamp_(min=0) if op == "max" and written.dtype.is_signed else written


def loses_nan(comm, call, tensor, *others, **options):
    written = call(tensor, *others, **options)
    return written.nan_to_num_() if written.dtype == torch.float32 else written


def takes_bytes_for_signed(comm, call, tensor, op="sum", **options):
    if tensor.dtype == torch.uint8 and op == "max":
        tensor.copy_(call(tensor.view(torch.int8).clone(), op).view(torch.uint8))
        return tensor
    return call(tensor, op, **options)


def adds_in_an_order(order):
    """order(comm): which rank comes first."""

    def adds(comm, call, tensor, op="sum", **options):
        rows = comm.allgather(tensor)
        call(tensor, op, **options)
        if op == "sum":
            total, begin = rows[order(comm)].clone(), order(comm)
            for step in range(1, comm.world_size):
                total += rows[(begin + step) % comm.world_size]
            tensor.copy_(total)
        return options.get("out", tensor)

    return adds


def its_own(comm):
    return comm.rank


def another_every_time(comm):
    comm.turn = getattr(comm, "turn", 0) + 1
    return comm.turn // 2 % comm.world_size


def writes_beside_the_tensor(comm, call, tensor, *others, **options):
    written = call(tensor, *others, **options)
    size = tensor.untyped_storage().nbytes() // tensor.itemsize
    if tensor.storage_offset() + tensor.numel() < size:
        whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        whole[tensor.storage_offset() + tensor.numel()] = 1
    return written


def takes_what_is_not_contiguous_and_loses_it(comm, call, tensor, *others, **options):
    call(tensor.contiguous(), *others, **options)
    return options.get("out", tensor)


def gives_the_result_of_the_call_before(comm, call, tensor, *others, **options):
    written = call(tensor, *others, **options)
    last = getattr(comm, "last", None)
    comm.last = written.clone()
    if last is not None and last.shape == written.shape and comm.rank == 1:
        written.copy_(last)
    return written


def mixes_up_messages(comm, call, calls):
    """Two to one peer arrive in the other order."""
    return call(list(reversed(calls)) if comm.rank == 0 else calls)


def loses_the_message(comm, call, tensor, dst):
    return call(torch.zeros_like(tensor), dst)


def does_not_wait(comm, call):
    return None


def does_nothing(comm, call, *others):
    return None


def gives_zeros(comm, call, out, *others):
    out.zero_()


def refuses_on_one_rank(comm, call, tensor, *others, **options):
    call(tensor, *others, **options)
    if comm.rank == 1:
        raise Unsupported("not here")
    return tensor


def cannot_have_no_dimensions(comm, call, tensor, *others, **options):
    return call(tensor, *others, **options) if len(tensor) else tensor


# Where each is planted, and a case that must notice: (fault, method, part of the case's name).
PLANTED = [
    *((forgets_the_tail, name, "float32 sum") for name in TAKES_OP),
    *((forgets_the_tail, name, "movement int8") for name in ("broadcast", "allgather", "alltoall")),
    (forgets_the_tail, "recv", "recv takes"),
    *((forgets_the_end_of_large_ones, name, f"{name}, large") for name in IN_PLACE[:3]),
    *(
        (forgets_the_end_of_large_ones, name, f"{name}, large")
        for name in ("allgather", "alltoall")
    ),
    *((works_on_a_copy, name, f"{name}, shape (3, 5)") for name in IN_PLACE[:3]),
    (works_on_a_copy, "recv", "recv takes"),
    *((returns_a_copy, name, f"{name}, shape (3, 5)") for name in IN_PLACE[:3]),
    *(
        (returns_a_copy, name, f"{name}, late")
        for name in ("allgather", "reduce_scatter", "alltoall")
    ),
    (returns_a_copy, "recv", "recv takes"),
    *((swaps_ranks, name, "movement float32") for name in ("allgather", "alltoall")),
    (gives_the_row_of_another, "reduce_scatter", "reduce_scatter, shape (3, 5)"),
    *((ignores_the_op, name, op) for name in TAKES_OP for op in ("float32 prod", "int64 max")),
    (ignores_the_root, "broadcast", "movement float32"),
    (ignores_the_root, "reduce", "reduce on every rank"),
    (mistakes_the_peer, "recv", "recv takes"),
    (mistakes_the_peer, "send", "keep order"),
    *((returns_too_early, name, f"{name}, late") for name in IN_PLACE[:3]),
    *((returns_too_early, name, f"{name}, late") for name in ("allgather", "reduce_scatter")),
    (returns_too_early, "alltoall", "alltoall, late"),
    (returns_too_early, "recv", "keep order"),
    (drops_what_was_for_out, "allreduce", "allreduce out of place, shape"),
    *((drops_what_was_for_out, name, f"{name}, shape") for name in ("allgather", "alltoall")),
    (drops_what_was_for_out, "reduce_scatter", "reduce_scatter, shape"),
    (changes_its_input, "allreduce", "allreduce out of place, shape"),
    *((changes_its_input, name, f"{name}, shape") for name in ("reduce_scatter", "alltoall")),
    *((rounds_through(torch.float16, torch.float32), name, "float32 sum") for name in TAKES_OP),
    (rounds_through(torch.float16, torch.float32), "broadcast", "movement float32"),
    (rounds_through(torch.float32, torch.float64), "allreduce", "float64 sum"),
    (rounds_through(torch.float64, torch.int64), "allreduce", "int64 max"),
    (clears_on_the_other_ranks, "reduce", "reduce on every rank"),
    (begins_at_zero, "allreduce", "float32 max"),
    (loses_nan, "allreduce", "float32 sum"),
    (takes_bytes_for_signed, "allreduce", "uint8 max"),
    (adds_in_an_order(its_own), "allreduce", "same bits"),
    (adds_in_an_order(another_every_time), "allreduce", "same bits"),
    (writes_beside_the_tensor, "allreduce", "unaligned"),
    (takes_what_is_not_contiguous_and_loses_it, "allreduce", "not contiguous"),
    (gives_the_result_of_the_call_before, "allreduce", "close together"),
    (mixes_up_messages, "group", "group of both"),
    (loses_the_message, "send", "keep order"),
    (does_not_wait, "barrier", "barrier"),
    *((does_nothing, name, "gather and scatter") for name in ("gather", "scatter")),
    *((gives_zeros, name, "along a dim") for name in ("allgatherv", "reduce_scatterv")),
    (works_on_a_copy, "recv", "dicts"),
    (refuses_on_one_rank, "broadcast", "broadcast, shape (3, 5)"),
    (cannot_have_no_dimensions, "allreduce", "allreduce, shape ()"),
]


OPERATIONS = ("gather", "scatter", "allgatherv", "reduce_scatterv")


def with_fault(fault, method):
    """Shared memory with a fault in a call as users make it, or in an operation of the backend."""

    def faulty(self, *values, **options):
        return fault(self, getattr(super(kind, self), method), *values, **options)

    name = f"Shm that {fault.__name__}"
    if method in OPERATIONS:
        kind = type(name, (Shm,), {method: faulty})
        return kind
    kind = type(name, (LibraryCalls,), {method: faulty, "straight": lambda self: {}})
    return type(name, (Shm,), {"own_calls": lambda self: kind(self)})


@pytest.fixture
def checked(ranks):
    """checked(backend, n, only): the report, which must be the same on every rank."""

    def run(backend, world_size=3, only=""):
        def body(info):
            with Coordinator(info, timeout_s=30) as coor, Communicator(coor, backend) as comm:
                report = conformance.check(comm, LARGE, only)
                coor.barrier()
                return report

        reports = ranks(body, world_size)
        assert all(report == reports[0] for report in reports)
        return reports[0]

    return run


@pytest.mark.parametrize(
    ("fault", "method", "case"),
    PLANTED,
    ids=[f"{method} {fault.__name__}, {case}" for fault, method, case in PLANTED],
)
def test_a_planted_fault_is_caught_and_named(checked, fault, method, case):
    report = checked(with_fault(fault, method), only=case)
    assert report.having("FAILED"), report


def test_a_correct_backend_passes_every_case_and_a_fault_is_reported(checked):
    sound = checked(Shm)
    assert sound.ok and len(sound.outcomes) > 100 and not sound.having("unsupported")
    report = checked(with_fault(ignores_the_op, "allreduce"), only="prod")
    assert "FAILED" in str(report)
    with pytest.raises(RuntimeError, match="does not conform"):
        report.raise_if_failed()


def test_a_name_that_no_case_has_is_an_error_and_no_success(checked):
    with pytest.raises(ValueError, match="'alreduce'"):
        checked(Shm, 1, "alreduce")


class OnlySendsAndReceives(Gloo):
    """What a vendor writes first: two methods, and everything else is inherited."""

    barrier = Backend.barrier
    broadcast = Backend.broadcast
    allreduce = Backend.allreduce
    allgather = Backend.allgather
    group = Backend.group


def test_send_and_recv_alone_make_a_whole_communicator(checked):
    report = checked(OnlySendsAndReceives)
    assert report.ok and not report.having("unsupported")


class OnlySums(Gloo):
    barrier = Backend.barrier

    def allreduce(self, out, tensor, op):
        if op != "sum":
            raise Unsupported("sums alone")
        super().allreduce(out, tensor, op)


def test_a_backend_that_adds_and_nothing_else_has_barriers(checked):
    report = checked(OnlySums, 2, "barrier")
    assert report.ok and not report.having("unsupported")


class CannotSum8Bits(Shm):
    def allreduce(self, out, tensor, op):
        if tensor.dtype.itemsize == 1:
            raise Unsupported("no reductions of 8-bit types")
        super().allreduce(out, tensor, op)


def loses_nan_of_max(comm, call, tensor, op="sum", **options):
    if tensor.dtype.is_floating_point and op in ("max", "min"):
        tensor.masked_fill_(tensor.isnan(), -torch.inf if op == "max" else torch.inf)
    return call(tensor, op, **options)


def test_a_library_whose_max_loses_nan_is_told_apart(checked):
    """NCCL's kernels take fmaxf() and fminf(), which give the other number."""
    assert not checked(Shm, only="NaN").having("unsupported")
    (lost,) = checked(with_fault(loses_nan_of_max, "allreduce"), only="NaN").outcomes
    assert lost.status == "unsupported" and "lose a NaN" in lost.detail


def test_what_a_backend_refuses_is_unsupported_and_not_wrong(checked):
    report = checked(CannotSum8Bits, 2, "int8")
    assert report.ok and report.having("unsupported")
    assert "no reductions of 8-bit types" in str(report)


@pytest.mark.parametrize("world_size", [2, 127, 128, 300])
def test_sum_of_small_integers_of_many_ranks_is_in_their_range(world_size):
    data = ReferenceData(world_size, 67, torch.int8, "sum")
    assert data.parts.dtype == torch.int8 and int(data.total((67,)).abs().max()) <= 127


@pytest.mark.parametrize(
    ("dtype", "world_size"),
    [(torch.int8, 3), (torch.int64, 3), (torch.uint8, 7), (torch.int8, 15), (torch.uint8, 31)],
    ids=str,
)
def test_half_of_the_integers_to_be_added_are_odd(dtype, world_size):
    """None was, or all were 0: a library that loses the lowest bit passed."""
    parts = ReferenceData(world_size, 67, dtype, "sum").parts
    assert 0.4 < (parts & 1).double().mean() < 0.6
