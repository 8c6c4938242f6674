"""The conformance check of a communicator, for vendors, our tests and the doctor.

report = conformance.check(Communicator(coor, backend="acme"))
print(report)
report.raise_if_failed()
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial

import torch
from torch import Size

import launcher
from communicator import timings
from communicator.calls.dtypes import DTYPES, OPS, dtype_name
from communicator.communicator import Communicator
from communicator.conformance.call_tester import (
    CALLS,
    IN_PLACE,
    CallTester,
    differs,
    first,
    raw,
)
from communicator.conformance.test_data import Shape
from communicator.errors import CommunicatorError, DrumlineError, Unsupported
from coordinator import Coordinator, CoordinatorError

PASSED, UNSUPPORTED, FAILED = "passed", "unsupported", "FAILED"

# Zero, one, a prime, an odd tail after whole vectors, a page and a bit.
COUNTS = (0, 1, 7, 67, 1021)
CHECKED_DTYPES = tuple(
    info.torch for info in DTYPES if info.is_reduced and not info.torch.is_complex
)
REDUCTIONS = "allreduce, reduce, reduce_scatter"
SHAPES = ((), (1,), (3, 5), (2, 1, 7))
TURNS = 30


@dataclass(frozen=True)
class CaseOutcome:
    """The worst result of one case over all ranks, and its detail."""

    case: str
    status: str
    detail: str = ""
    is_fatal: bool = False  # a call failed, so the ranks may be desynchronised

    def __str__(self) -> str:
        return f"{self.status:>11}  {self.case}" + (f": {self.detail}" if self.detail else "")


@dataclass(frozen=True)
class Report:
    """The outcomes of all cases, the same on every rank."""

    backend: str
    world_size: int
    outcomes: tuple[CaseOutcome, ...]

    def having(self, status: str) -> list[CaseOutcome]:
        return [outcome for outcome in self.outcomes if outcome.status == status]

    @property
    def ok(self) -> bool:
        return not self.having(FAILED)

    def __str__(self) -> str:
        rest = self.having(FAILED) + self.having(UNSUPPORTED)
        return "\n".join([self.summary, *map(str, rest)])

    def table(self) -> str:
        """Markdown, for a page of results: dtypes, moved and reduced by each op; the rest."""
        status_by_case = {outcome.case: outcome.status for outcome in self.outcomes}
        lines = [f"| | moved | {' | '.join(OPS)} |", "| --- |" + " --- |" * (1 + len(OPS))]
        for dtype in map(dtype_name, CHECKED_DTYPES):
            cases = [f"movement {dtype}", *(f"{REDUCTIONS} {dtype} {op}" for op in OPS)]
            lines.append(f"| {dtype} | {' | '.join(status_by_case.pop(c, '') for c in cases)} |")
        rest = [
            f"{status}: {'; '.join(c for c, s in status_by_case.items() if s == status)}"
            for status in dict.fromkeys(status_by_case.values())
        ]
        title = f"drumline {launcher.__version__}, {self.summary}"
        return "\n\n".join([title, "\n".join(lines), *rest])

    @property
    def summary(self) -> str:
        return f"{self.backend}, {self.world_size} ranks: " + ", ".join(
            f"{len(self.having(status))} {status}" for status in (PASSED, UNSUPPORTED, FAILED)
        )

    def raise_if_failed(self) -> None:
        """Raise CommunicatorError with the failed cases, if there are any."""
        if not self.ok:
            raise CommunicatorError(f"the backend does not conform:\n{self}")


def check(comm: Communicator, large: int = 300_007, only: str = "") -> Report:
    """Run every case on a communicator; report which passed, failed, or are unsupported.

    Collective. large: the elements of the largest tensor. only: run the cases with this in their
    names; ValueError if there are none. A backend that hangs fails at its own deadline
    (coor.timeout_s).
    """
    outcomes = []
    for name, body in _cases(comm, large):
        if only not in name:
            continue
        outcomes.append(_run(comm, name, body))
        if outcomes[-1].is_fatal:
            break
    if not outcomes:
        raise ValueError(f"only={only!r}: no case of the check has this in its name")
    return Report(comm.backend, comm.world_size, tuple(outcomes))


def check_backend(backend: str | None) -> Report:
    """The report on a backend, or the best one, over ranks that open it. Collective.

    Raises Unsupported if it cannot be used here.
    """
    timeout_s = timings.TIMINGS.check_call_s
    with Coordinator(timeout_s=timeout_s) as coor, Communicator(coor, backend) as comm:
        report = check(comm)
        coor.barrier()  # nobody closes while others still compare
        return report


Body = Callable[[], str]  # returns what is wrong, or "" if nothing is


def _run(comm: Communicator, name: str, body: Body) -> CaseOutcome:
    """One case on every rank, and the worst outcome of all."""
    outcome = _try(name, body)
    try:
        outcomes = comm.coor.allgather_object(astuple(outcome))
    except CoordinatorError as error:
        raise CommunicatorError(
            f"rank {comm.rank}: the check cannot go on after {outcome}. The ranks are "
            "desynchronised, for not all made the same calls, or one exited. Fix this case first. "
            f"{error}"
        ) from error
    return _worst(name, [CaseOutcome(*fields) for fields in outcomes])


def _try(name: str, body: Body) -> CaseOutcome:
    """One case on this rank."""
    try:
        detail = body()
        return CaseOutcome(name, FAILED if detail else PASSED, detail)
    except Unsupported as reason:
        return CaseOutcome(name, UNSUPPORTED, str(reason))
    except DrumlineError as error:
        return CaseOutcome(name, FAILED, f"desynchronised: {error}", is_fatal=True)
    except Exception as error:
        return CaseOutcome(name, FAILED, f"{type(error).__name__}: {error}")


def _worst(name: str, outcomes: list[CaseOutcome]) -> CaseOutcome:
    """outcomes: of one case, by rank."""
    statuses = {outcome.status for outcome in outcomes}
    if statuses == {PASSED, UNSUPPORTED}:
        return CaseOutcome(name, FAILED, "unsupported on some ranks only, which strands the others")
    is_fatal = any(outcome.is_fatal for outcome in outcomes)
    for rank, outcome in enumerate(outcomes):
        if outcome.status == FAILED:
            return CaseOutcome(name, FAILED, f"rank {rank}: {outcome.detail}", is_fatal)
    return next((outcome for outcome in outcomes if outcome.status == UNSUPPORTED), outcomes[0])


def _cases(comm: Communicator, large: int) -> Iterator[tuple[str, Body]]:
    yield from _reductions(comm)
    for dtype in CHECKED_DTYPES:
        yield f"movement {dtype_name(dtype)}", partial(_movement, comm, dtype)
    yield from _every_operation(comm, "large", (large,), (-(-large // comm.world_size),))
    for shape in SHAPES:
        yield from _every_operation(comm, f"shape {shape}", shape, shape)
    lates = (0, comm.world_size - 1)
    yield from _every_operation(comm, "late ranks", (67,), (67,), lates)
    yield "reduce on every rank", lambda: _reduce_everywhere(comm)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        case = f"same bits on every rank, every time, {dtype_name(dtype)}"
        yield case, partial(_same_bits, comm, dtype, large)
    yield "max and min keep the NaN of every rank", lambda: _nan_kept(comm)
    yield "calls close together", lambda: _close_together(comm)
    for dtype in (torch.float32, torch.uint8):
        yield f"unaligned tensors, {dtype_name(dtype)}", partial(_unaligned, comm, dtype)
    yield "allgather and reduce_scatter in place", lambda: _in_place(comm)
    yield "tensors that are not contiguous", lambda: _not_contiguous(comm)
    yield "send and recv keep order", lambda: _ordered(comm)
    yield "recv takes from the rank it names", lambda: _by_source(comm)
    yield "large send and recv", lambda: _large_ring(comm, large)
    yield "group of both directions", lambda: _both_ways(comm)
    yield "gather and scatter", lambda: _gathered(comm)
    yield "allgather and reduce_scatter along a dim", lambda: _along_dims(comm)
    yield "dicts of tensors", lambda: _tensor_dicts(comm)
    yield "barrier", lambda: _barrier(comm)


def _reductions(comm: Communicator) -> Iterator[tuple[str, Body]]:
    for dtype in CHECKED_DTYPES:
        for op in OPS:
            if op == "avg" and not dtype.is_floating_point:
                continue
            if dtype == torch.bool and op == "sum":
                continue
            name = f"{REDUCTIONS} {dtype_name(dtype)} {op}"
            yield name, partial(_reduction, comm, dtype, op)


def _reduction(comm: Communicator, dtype: torch.dtype, op: str) -> str:
    tester = CallTester(comm, max(*COUNTS, comm.world_size * 67), dtype, op)
    problems = [tester.allreduce((count,)) for count in COUNTS]
    problems.append(tester.allreduce_out((67,)))
    problems.append(tester.reduce((67,), comm.world_size - 1))
    return first([*problems, tester.reduce_scatter((67,))])


def _movement(comm: Communicator, dtype: torch.dtype) -> str:
    tester, problems = CallTester(comm, comm.world_size * max(COUNTS), dtype), []
    for count in COUNTS:
        problems += [tester.broadcast((count,), src) for src in range(comm.world_size)]
        problems += [tester.allgather((count,)), tester.alltoall((count,))]
    return first([*problems, tester.ring((67,))])


def _every_operation(
    comm: Communicator, what: str, shape: Shape, rows: Shape, lates: Sequence[int] = (-1,)
) -> Iterator[tuple[str, Body]]:
    """rows: the shape of each row, for calls that take or give rows.
    lates: ranks that come late, in turn. What the others read at once must be there.
    """
    tester = CallTester(comm, max(Size(shape).numel(), comm.world_size * Size(rows).numel()))
    for name in ("allreduce", "allreduce_out", "broadcast", "reduce"):
        label = f"{name.replace('_out', ' out of place')}, {what}"
        yield label, partial(_tried, tester, name, shape, lates)
    for name in ("allgather", "reduce_scatter", "alltoall", "ring"):
        yield f"{name}, {what}", partial(_tried, tester, name, rows, lates)


def _tried(tester: CallTester, name: str, shape: Shape, lates: Sequence[int]) -> str:
    tester.prepare()
    problems = []
    for late in lates:
        if tester.comm.rank == late:
            time.sleep(timings.TIMINGS.conformance_pause_s)
        problems.append(getattr(tester, name)(shape))
    return first(problems)


def _reduce_everywhere(comm: Communicator) -> str:
    tester = CallTester(comm, 67)
    return first([tester.reduce((67,), dst) for dst in range(comm.world_size)])


def _same_bits(comm: Communicator, dtype: torch.dtype, large: int) -> str:
    """Values whose sum depends on the order of adding: every rank must still have the same bits,
    whoever comes first."""
    problems = []
    for count in (67, large):
        sums = {_bits_of_sum(comm, dtype, count, late) for late in range(comm.world_size)}
        all_sums = comm.coor.allgather_object(sorted(sums))
        what = f"allreduce of {count} {dtype_name(dtype)}"
        if len(sums) > 1:
            problems.append(f"{what} gave different bits when it was called again")
        elif any(other != all_sums[0] for other in all_sums):
            problems.append(f"{what} gave ranks different bits")
    return first(problems)


def _bits_of_sum(comm: Communicator, dtype: torch.dtype, count: int, late: int) -> int:
    generator = torch.Generator().manual_seed(comm.rank)
    tensor = (torch.randn(count, generator=generator) * 1000).to(dtype).to(comm.device)
    if comm.rank == late:
        time.sleep(timings.TIMINGS.conformance_pause_s)
    comm.allreduce(tensor)
    return zlib.crc32(raw(tensor).cpu().numpy().tobytes())


def _nan_kept(comm: Communicator) -> str:
    """As by torch.maximum. A library whose own max loses it, as NCCL's does, is told apart."""
    is_kept, problems, size = True, [], comm.world_size
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for op, plain in (("max", float(size > 1)), ("min", 0.0)):
            tensor = torch.full((size + 1,), comm.rank % 2, dtype=dtype, device=comm.device)
            tensor[comm.rank] = torch.nan
            *others, last = comm.allreduce(tensor, op).tolist()
            is_kept = is_kept and all(map(math.isnan, others))
            problems += [f"{op} of {dtype_name(dtype)} gave {last}"] * (last != plain)
    if not problems and not is_kept:
        raise Unsupported("max and min lose a NaN that some ranks have")
    return first(problems)


def _close_together(comm: Communicator) -> str:
    """Calls that follow each other at once, none of them looked at before the last: a fast rank
    must not write into what a slow one still reads, nor one call take the other's data."""
    testers = [CallTester(comm, comm.world_size * 1021, seed=seed) for seed in range(4)]
    for tester in testers:
        tester.prepare()
    checks = []
    for turn in range(TURNS):
        if turn % 8 == comm.rank:
            time.sleep(timings.TIMINGS.conformance_pause_s / 10)
        name = CALLS[turn % 5]
        shape = ((67,), (1021,), (1,))[turn // 10]
        checks.append(testers[turn % 4].begin(name, shape))
    return first([check() for check in checks])


def _unaligned(comm: Communicator, dtype: torch.dtype) -> str:
    """A tensor in the middle of another, at an odd address; what is beside it stays as it is."""
    tester = CallTester(comm, 1023, dtype)
    whole = tester.own_input(tester.numbers, (1023,))
    before, inside = whole.clone(), whole[1:-1]
    comm.allreduce(inside)
    problems = [tester.numbers.problem(inside, tester.numbers.total((1023,))[1:-1], "allreduce", 1)]
    for place in (0, 1022):
        what = f"element {place} beside an allreduce"
        problems.append(differs(whole[place], before[place], what))
    return first(problems)


def _in_place(comm: Communicator) -> str:
    """out is a row of the tensor, or the tensor a row of out: as torch's sharding calls them."""
    tester = CallTester(comm, comm.world_size * 67)
    rows = tester.own_input(tester.numbers, (comm.world_size, 67))
    comm.reduce_scatter(rows, out=rows[comm.rank])
    total = tester.numbers.total((comm.world_size, 67))[comm.rank]
    wrong = tester.numbers.problem(
        rows[comm.rank], total, "reduce_scatter in place", 67 * comm.rank
    )
    rows = tester.blank((comm.world_size, 67))
    rows[comm.rank] = tester.own_input(tester.bits, (67,))
    comm.allgather(rows[comm.rank], out=rows)
    return first([wrong, differs(rows, tester.all_inputs((67,)), "allgather in place")])


def _not_contiguous(comm: Communicator) -> str:
    """Rejected on every rank before anything moves, or done right; never lost in a copy."""
    tester, problems = CallTester(comm, comm.world_size * 12), []
    for name in CALLS:
        tensor = tester.input_of(name, (3, 4)).transpose(0, -1).contiguous().transpose(0, -1)
        try:
            result = tester.call(name, tensor)
        except ValueError:
            continue
        what = f"{name} of a tensor that is not contiguous"
        written = tensor if name in IN_PLACE else result
        problems.append(tester.wrong(name, (3, 4), written, what))
    return first(problems)


def _ordered(comm: Communicator) -> str:
    """Rank 0 sends each other rank ten tensors; they arrive in that order."""
    problems = []
    for number in range(10):
        for dst in range(1, comm.world_size):
            expected = torch.full((number % 3 + 1,), number + 100 * dst, device=comm.device)
            if comm.rank == 0:
                comm.send(expected, dst)
            elif comm.rank == dst:
                received = comm.recv(torch.zeros_like(expected), 0)
                problems.append(differs(received, expected, f"message {number} to rank {dst}"))
    return first(problems)


def _by_source(comm: Communicator) -> str:
    """Rank 0 asks the last rank first, when the others may have sent already."""
    if comm.rank:
        comm.send(torch.full((5,), float(comm.rank), device=comm.device), 0)
        return ""
    problems = []
    for src in reversed(range(1, comm.world_size)):
        expected = torch.full((5,), float(src), device=comm.device)
        tensor = torch.zeros_like(expected)
        if comm.recv(tensor, src) is not tensor:
            problems.append("recv did not return the tensor it was given")
        problems.append(differs(tensor, expected, f"recv from rank {src}"))
    return first(problems)


def _large_ring(comm: Communicator, large: int) -> str:
    return CallTester(comm, large).ring((large,))


def _both_ways(comm: Communicator) -> str:
    """Every pair exchanges in both directions in one group, two messages of one size each."""
    others = [rank for rank in range(comm.world_size) if rank != comm.rank]
    received = {rank: torch.zeros(2, 5, device=comm.device) for rank in others}
    with comm.group():
        for rank in others:
            for number in range(2):
                value = float(10 * comm.rank + number)
                comm.send(torch.full((5,), value, device=comm.device), rank)
                comm.recv(received[rank][number], rank)
    wrong = {
        rank: tensor.tolist()
        for rank, tensor in received.items()
        if tensor.tolist() != [[10.0 * rank] * 5, [10.0 * rank + 1] * 5]
    }
    return f"group: {wrong}" if wrong else ""


def _gathered(comm: Communicator) -> str:
    tester, problems = CallTester(comm, comm.world_size * 67), []
    for root in range(comm.world_size):
        for count in (0, 1, 67):
            problems += [tester.gather((count,), root), tester.scatter((count,), root)]
    return first(problems)


def _along_dims(comm: Communicator) -> str:
    """Of equal sizes and of others, one of them 0, in numbers whose sums are exact."""
    problems, world = [], range(comm.world_size)
    for sizes in ([2 for _ in world], [3 * rank % 4 for rank in world]):
        for dim in (0, 1, -1):
            shape = [3, 2, 5]
            shape[dim] = sum(sizes)
            whole = torch.arange(float(Size(shape).numel())).reshape(shape)
            part = torch.split(whole, sizes, dim)[comm.rank].contiguous()
            joined = comm.allgather(part.to(comm.device), dim=dim, sizes=sizes)
            total = comm.reduce_scatter(whole.to(comm.device), dim=dim, sizes=sizes)
            what = f"along dim {dim}, of sizes {sizes}"
            problems.append(differs(joined, whole, f"allgather {what}"))
            problems.append(differs(total, part * comm.world_size, f"reduce_scatter {what}"))
    return first(problems)


def _tensor_dicts(comm: Communicator) -> str:
    """Rank 0's dict by broadcast, and sent to each other rank."""
    tensors = {
        "rows": torch.arange(6).reshape(2, 3),
        "empty": torch.empty(0, 3),
        "half": torch.arange(5).to(torch.bfloat16),
        "flag": torch.tensor(True),
    }
    values = {**{name: item.to(comm.device) for name, item in tensors.items()}, "plain": [1, None]}
    received = [comm.broadcast_tensors(values if comm.rank == 0 else None)]
    for dst in range(1, comm.world_size):
        if comm.rank == 0:
            comm.send_tensors(values, dst)
        elif comm.rank == dst:
            received.append(comm.recv_tensors(0))
    problems = [
        differs(copy[name], item, f"{name!r} of a dict")
        for copy in received
        for name, item in tensors.items()
    ]
    is_plain = all(copy["plain"] == [1, None] for copy in received)
    return first([*problems, "" if is_plain else "a plain value of a dict has changed"])


def _barrier(comm: Communicator) -> str:
    """Nobody leaves before the last has come; clocks are compared on one node only."""
    if comm.rank == comm.world_size - 1:
        time.sleep(timings.TIMINGS.conformance_late_s)
    came = time.monotonic()
    comm.barrier()
    if comm.device_type == "cuda":
        torch.cuda.synchronize()
    left = time.monotonic()
    if comm.coor.local_world_size != comm.world_size:
        return ""
    times = comm.coor.allgather_object([came, left])
    early = min(left for _, left in times) < max(came for came, _ in times)
    return "a rank left the barrier before the last had come" if early else ""
