"""conformance.check must catch a backend that lies. Each fault here is planted in a true one."""

import threading

import pytest
import torch

from communicator import Communicator, Unsupported, conformance
from communicator.gloo import Gloo
from coordinator import Coordinator


class ForgetsTheTail(Gloo):
    def _allreduce(self, out, tensor, op):
        before = tensor.clone()
        super()._allreduce(out, tensor, op)
        whole = tensor.numel() // 8 * 8
        out.view(-1)[whole:] = before.view(-1)[whole:]


class IsNotInPlace(Gloo):
    def allreduce(self, tensor, op="sum", *, out=None):
        return super().allreduce(tensor.clone(), op, out=out)


class SwapsRanks(Gloo):
    def _allgather(self, out, tensor):
        super()._allgather(out, tensor)
        out.copy_(out.flip(0))


class IgnoresTheOp(Gloo):
    def _allreduce(self, out, tensor, op):
        super()._allreduce(out, tensor, "sum")


class ReturnsTooEarly(Gloo):
    def _allreduce(self, out, tensor, op):
        result = torch.empty_like(tensor)
        super()._allreduce(result, tensor, op)
        threading.Timer(0.01, out.copy_, [result]).start()


class AddsInItsOwnOrder(Gloo):
    def _allreduce(self, out, tensor, op):
        rows = torch.empty((self.world_size, *tensor.shape), dtype=tensor.dtype)
        self._allgather(rows, tensor)
        if op == "sum":
            total = rows[self.rank].clone()
            for step in range(1, self.world_size):
                total += rows[(self.rank + step) % self.world_size]
            out.copy_(total)
        else:
            super()._allreduce(out, tensor, op)


class WritesBesideTheTensor(Gloo):
    def _reduce(self, out, tensor, dst, op):
        scratch = torch.empty_like(tensor)
        super()._reduce(scratch if self.rank == dst else None, tensor, dst, op)
        tensor.zero_() if out is None else out.copy_(scratch)


class LosesMessages(Gloo):
    def _send(self, tensor, dst):
        super()._send(torch.zeros_like(tensor), dst)


FAULTS = {
    ForgetsTheTail: "allreduce",
    IsNotInPlace: "allreduce",
    SwapsRanks: "movement",
    IgnoresTheOp: "prod",
    ReturnsTooEarly: "allreduce",
    AddsInItsOwnOrder: "same bits",
    WritesBesideTheTensor: "reduce leaves",
    LosesMessages: "order",
}


@pytest.mark.parametrize("backend", FAULTS, ids=lambda backend: backend.__name__)
def test_a_planted_fault_is_caught_and_named(ranks, backend):
    def body(info):
        with Coordinator(info, timeout_s=30) as coor, Communicator(coor, backend) as comm:
            report = conformance.check(comm, large=1021)
            coor.barrier()
            return report

    reports = ranks(body, 3)
    assert reports[0] == reports[1] == reports[2]
    assert any(FAULTS[backend] in failed.case for failed in reports[0].having("FAILED"))
    assert "FAILED" in str(reports[0])
    with pytest.raises(RuntimeError, match="does not conform"):
        reports[0].raise_if_failed()


class OnlySendsAndReceives(Gloo):
    """What a vendor writes first: two methods, and everything else is inherited."""

    _barrier = Communicator._barrier
    _broadcast = Communicator._broadcast
    _allreduce = Communicator._allreduce
    _allgather = Communicator._allgather
    _exchange = Communicator._exchange


@pytest.mark.parametrize("world_size", [2, 5])
def test_send_and_recv_alone_make_a_whole_communicator(ranks, world_size):
    def body(info):
        with (
            Coordinator(info, timeout_s=60) as coor,
            Communicator(coor, OnlySendsAndReceives) as comm,
        ):
            report = conformance.check(comm, large=1021)
            return [str(case) for case in report.outcomes if case.status != conformance.PASSED]

    assert ranks(body, world_size) == [[]] * world_size


class CannotSum8Bits(Gloo):
    def _allreduce(self, out, tensor, op):
        if tensor.dtype.itemsize == 1:
            raise Unsupported("no reductions of 8-bit types")
        super()._allreduce(out, tensor, op)


def test_what_a_backend_refuses_is_unsupported_and_not_wrong(ranks):
    def body(info):
        with Coordinator(info) as coor, Communicator(coor, CannotSum8Bits) as comm:
            return conformance.check(comm, large=1021)

    report = ranks(body, 2)[0]
    assert report.ok and report.having("unsupported")
    assert "no reductions of 8-bit types" in str(report)
