"""What every communicator must do, as a function that a vendor, our tests and the doctor run.

report = conformance.check(Communicator(coor, backend="acme"))
print(report)
report.raise_if_failed()
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from communicator.base import Communicator
from communicator.errors import CommunicatorError, Unsupported

PASSED, UNSUPPORTED, FAILED = "passed", "unsupported", "FAILED"

# Zero, one, a prime, an odd tail after whole vectors, a page and a bit.
COUNTS = (0, 1, 7, 67, 1021)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
SMALL_FLOATS = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
OPS = ("sum", "prod", "max", "min", "avg")
LATE_S = 0.05


@dataclass(frozen=True)
class Outcome:
    """One case: its name, how it ended on the worst rank, and what that rank had to say."""

    case: str
    status: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.status:>11}  {self.case}" + (f": {self.detail}" if self.detail else "")


@dataclass(frozen=True)
class Report:
    """What a backend can do, the same on every rank."""

    backend: str
    world_size: int
    outcomes: tuple[Outcome, ...]

    def having(self, status: str) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.status == status]

    @property
    def ok(self) -> bool:
        return not self.having(FAILED)

    def __str__(self) -> str:
        head = f"{self.backend}, {self.world_size} ranks: " + ", ".join(
            f"{len(self.having(status))} {status}" for status in (PASSED, UNSUPPORTED, FAILED)
        )
        rest = self.having(FAILED) + self.having(UNSUPPORTED)
        return "\n".join([head, *map(str, rest)])

    def raise_if_failed(self) -> None:
        """Raise CommunicatorError with the failed cases, if there are any."""
        if not self.ok:
            raise CommunicatorError(f"the backend does not conform:\n{self}")


def check(comm: Communicator, large: int = 300_007) -> Report:
    """Run every case on a communicator and say what passed, what is unsupported, what is wrong.

    Collective. large: the elements of the largest tensor. A backend that hangs is told on by
    its own deadline (coor.timeout_s).
    """
    outcomes = []
    for name, body in _cases(comm, large):
        outcomes.append(_run(comm, name, body))
        if outcomes[-1].status == FAILED and "out of step" in outcomes[-1].detail:
            break
    return Report(comm.backend, comm.world_size, tuple(outcomes))


Body = Callable[[], str]  # returns what is wrong, or "" if nothing is


def _run(comm: Communicator, name: str, body: Body) -> Outcome:
    """One case on every rank, and the worst of what they say."""
    try:
        detail = body()
        mine = Outcome(name, FAILED if detail else PASSED, detail)
    except Unsupported as reason:
        mine = Outcome(name, UNSUPPORTED, str(reason))
    except CommunicatorError as error:
        mine = Outcome(name, FAILED, f"out of step: {error}")
    except Exception as error:
        mine = Outcome(name, FAILED, f"{type(error).__name__}: {error}")
    said = comm.coor.allgather(json.dumps([mine.status, mine.detail]).encode())
    return _worst(name, [tuple(json.loads(data)) for data in said])


def _worst(name: str, said: list[tuple[str, str]]) -> Outcome:
    statuses = {status for status, _ in said}
    if statuses == {PASSED, UNSUPPORTED}:
        return Outcome(name, FAILED, "unsupported on some ranks only, which strands the others")
    for wanted in (FAILED, UNSUPPORTED):
        for rank, (status, detail) in enumerate(said):
            if status == wanted:
                return Outcome(
                    name, status, f"rank {rank}: {detail}" if status == FAILED else detail
                )
    return Outcome(name, PASSED)


def _cases(comm: Communicator, large: int) -> Iterator[tuple[str, Body]]:
    yield from _reductions(comm)
    for dtype in DTYPES:
        yield f"movement {_name(dtype)}", partial(_movement, comm, dtype)
    yield "allreduce large", lambda: _allreduce(comm, torch.float32, "sum", (large,))
    yield "allreduce out of place", lambda: _out_of_place(comm)
    yield "reduce leaves the others alone", lambda: _reduce_elsewhere(comm)
    yield "same bits on every rank", lambda: _same_bits(comm)
    yield "a late rank is waited for", lambda: _late(comm)
    yield "unaligned tensors", lambda: _unaligned(comm)
    yield "send and recv keep order", lambda: _ordered(comm)
    yield "large send and recv", lambda: _ring(comm, large)
    yield "group of both directions", lambda: _both_ways(comm)
    yield "barrier", lambda: _barrier(comm)


def _reductions(comm: Communicator) -> Iterator[tuple[str, Body]]:
    for dtype in DTYPES:
        for op in OPS:
            if op == "avg" and not dtype.is_floating_point:
                continue
            if dtype == torch.bool and op == "sum":
                continue
            name = f"allreduce, reduce, reduce_scatter {_name(dtype)} {op}"
            yield name, partial(_reduction, comm, dtype, op)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _value(
    comm: Communicator, rank: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """What rank puts in: known to every rank, different on each, small enough not to overflow."""
    numel = torch.Size(shape).numel()
    steps = torch.arange(numel, dtype=torch.int64) * 7 + rank * 3
    if dtype == torch.bool:
        found = steps % 3 == 0
    elif dtype.is_floating_point:
        found = (steps % 5).to(torch.float32) / 4 + 0.5
    else:
        found = steps % 3 + 1
    return found.to(dtype).reshape(shape).to(comm._device())


def _expected(
    comm: Communicator, shape: tuple[int, ...], dtype: torch.dtype, op: str
) -> torch.Tensor:
    """The plain answer, in double precision or int64, from what every rank is known to put in."""
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    parts = torch.stack(
        [_value(comm, rank, shape, dtype).to(wide) for rank in range(comm.world_size)]
    )
    if op == "prod":
        return parts.prod(0)
    if op in ("max", "min"):
        return parts.amax(0) if op == "max" else parts.amin(0)
    return parts.sum(0) / (comm.world_size if op == "avg" else 1)


def _wrong(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, what: str) -> str:
    """In words, where found is not the expected answer rounded to dtype."""
    if not dtype.is_floating_point:
        close = found == expected.to(dtype)
    else:
        step = torch.finfo(dtype).eps
        exact = expected.to(torch.float64)
        close = (found.to(torch.float64) - exact).abs() <= 2 * step * exact.abs()
    if bool(close.all()):
        return ""
    bad = int((~close).reshape(-1).nonzero()[0])
    return (
        f"{what} of {tuple(found.shape)} {_name(dtype)}: element {bad} is "
        f"{found.reshape(-1)[bad].item()}, expected {expected.reshape(-1)[bad].item()}"
    )


def _reduction(comm: Communicator, dtype: torch.dtype, op: str) -> str:
    found = [_allreduce(comm, dtype, op, (count,)) for count in COUNTS]
    shape = (comm.world_size, 67)
    expected = _expected(comm, shape, dtype, op)
    dst = comm.world_size - 1
    reduced = comm.reduce(_value(comm, comm.rank, shape, dtype), dst, op)
    if comm.rank == dst:
        found.append(_wrong(reduced, expected, dtype, "reduce"))
    row = comm.reduce_scatter(_value(comm, comm.rank, shape, dtype), op)
    found.append(_wrong(row, expected[comm.rank], dtype, "reduce_scatter"))
    return _first(found)


def _first(found: list[str]) -> str:
    """The first problem of a list. The list is made whole before: a rank that stops at its first
    problem would leave the others alone in the next call."""
    return next((problem for problem in found if problem), "")


def _allreduce(comm: Communicator, dtype: torch.dtype, op: str, shape: tuple[int, ...]) -> str:
    tensor = _value(comm, comm.rank, shape, dtype)
    returned = comm.allreduce(tensor, op)
    if returned is not tensor:
        return "allreduce did not return the tensor it was given"
    return _wrong(tensor, _expected(comm, shape, dtype, op), dtype, f"allreduce {op}")


def _movement(comm: Communicator, dtype: torch.dtype) -> str:
    found = [_broadcasts(comm, dtype, count) for count in COUNTS]
    found += [_gathers(comm, dtype, count) for count in COUNTS]
    return _first([*found, _ring(comm, 67, dtype)])


def _broadcasts(comm: Communicator, dtype: torch.dtype, count: int) -> str:
    found = []
    for src in range(comm.world_size):
        tensor = _value(comm, comm.rank, (count,), dtype)
        comm.broadcast(tensor, src)
        expected = _value(comm, src, (count,), dtype)
        found.append(_differs(tensor, expected, f"broadcast of {count} from rank {src}"))
    return _first(found)


def _gathers(comm: Communicator, dtype: torch.dtype, count: int) -> str:
    world, rank = comm.world_size, comm.rank
    gathered = comm.allgather(_value(comm, rank, (count,), dtype))
    rows = torch.stack([_value(comm, src, (count,), dtype) for src in range(world)])
    swapped = comm.alltoall(_value(comm, rank, (world, count), dtype))
    crossed = torch.stack([_value(comm, src, (world, count), dtype)[rank] for src in range(world)])
    return _differs(gathered, rows, f"allgather of {count}") or _differs(
        swapped, crossed, f"alltoall of {count}"
    )


def _differs(found: torch.Tensor, expected: torch.Tensor, what: str) -> str:
    """Compared as bytes: nothing may change on the way."""
    same = found.shape == expected.shape and found.dtype == expected.dtype
    if same and torch.equal(_raw(found), _raw(expected)):
        return ""
    return f"{what}: {_raw(found)[:16].tolist()} arrived, expected {_raw(expected)[:16].tolist()}"


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _out_of_place(comm: Communicator) -> str:
    tensor = _value(comm, comm.rank, (67,), torch.float32)
    before, out = tensor.clone(), torch.zeros_like(tensor)
    if comm.allreduce(tensor, out=out) is not out:
        return "allreduce(out=) did not return out"
    expected = _expected(comm, (67,), torch.float32, "sum")
    return _differs(tensor, before, "the input of allreduce(out=)") or _wrong(
        out, expected, torch.float32, "allreduce(out=)"
    )


def _reduce_elsewhere(comm: Communicator) -> str:
    tensor = _value(comm, comm.rank, (67,), torch.float32)
    before = tensor.clone()
    comm.reduce(tensor, 0)
    return _differs(tensor, before, "reduce on another rank") if comm.rank else ""


def _same_bits(comm: Communicator) -> str:
    """Values whose sum depends on the order of adding: every rank must still have the same bits."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(comm.rank)
        tensor = (torch.randn(1021, generator=generator) * 1000).to(dtype).to(comm._device())
        comm.allreduce(tensor)
        same = [torch.equal(_raw(row), _raw(tensor)) for row in comm.allgather(tensor)]
        found.append("" if all(same) else f"allreduce of {_name(dtype)} gave ranks different bits")
    return _first(found)


def _late(comm: Communicator) -> str:
    """Each rank late in turn: what the others read at once must be there."""
    found = []
    for late in range(comm.world_size):
        if comm.rank == late:
            time.sleep(LATE_S)
        found.append(_allreduce(comm, torch.float32, "sum", (1021,)))
    return _first(found)


def _unaligned(comm: Communicator) -> str:
    tensor = _value(comm, comm.rank, (1022,), torch.float32)
    comm.allreduce(tensor[1:])
    expected = _expected(comm, (1022,), torch.float32, "sum")[1:]
    first = _value(comm, comm.rank, (1022,), torch.float32)[:1]
    return _wrong(tensor[1:], expected, torch.float32, "allreduce") or _differs(
        tensor[:1], first, "the element before an allreduce"
    )


def _ordered(comm: Communicator) -> str:
    """Rank 0 sends each other rank ten tensors; they arrive in that order."""
    problems = []
    for number in range(10):
        for dst in range(1, comm.world_size):
            expected = torch.full((number + 1,), number + 100 * dst, device=comm._device())
            if comm.rank == 0:
                comm.send(expected, dst)
            elif comm.rank == dst:
                found = comm.recv(torch.zeros_like(expected), 0)
                problems.append(_differs(found, expected, f"message {number} to rank {dst}"))
    return _first(problems)


def _ring(comm: Communicator, count: int, dtype: torch.dtype = torch.float32) -> str:
    """Everyone sends to the next and receives from the one before, at once."""
    if comm.world_size == 1:
        return ""
    after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    found = torch.empty_like(_value(comm, comm.rank, (count,), dtype))
    with comm.group():
        comm.send(_value(comm, comm.rank, (count,), dtype), after)
        comm.recv(found, before)
    return _differs(found, _value(comm, before, (count,), dtype), f"ring of {count}")


def _both_ways(comm: Communicator) -> str:
    """Every pair exchanges in both directions in one group."""
    others = [rank for rank in range(comm.world_size) if rank != comm.rank]
    found = {rank: torch.zeros(5, device=comm._device()) for rank in others}
    with comm.group():
        for rank in others:
            comm.send(torch.full((5,), float(comm.rank), device=comm._device()), rank)
            comm.recv(found[rank], rank)
    wrong = {rank: tensor.tolist() for rank, tensor in found.items() if tensor.sum() != 5 * rank}
    return f"group: {wrong}" if wrong else ""


def _barrier(comm: Communicator) -> str:
    """Nobody leaves before the last has come; clocks are compared on one node only."""
    if comm.rank == comm.world_size - 1:
        time.sleep(LATE_S)
    came = time.monotonic()
    comm.barrier()
    if comm.device_type == "cuda":
        torch.cuda.synchronize()
    left = time.monotonic()
    if comm.coor.local_world_size != comm.world_size:
        return ""
    times = [json.loads(data) for data in comm.coor.allgather(json.dumps([came, left]).encode())]
    early = min(left for _, left in times) < max(came for came, _ in times)
    return "a rank left the barrier before the last had come" if early else ""
