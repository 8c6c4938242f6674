"""Backends in the form of the release before: classes that derive from Communicator."""

import pytest
import torch

from communicator import Backend, Communicator, CommunicatorError, Unsupported, conformance
from communicator.backends.shm import Shm
from communicator.backends.tcp import Tcp
from coordinator import Coordinator
from launcher import LaunchInfo


def former():
    """A backend as the guide told vendors to write it."""
    with pytest.warns(DeprecationWarning, match="class Mailbox.* do_send to send"):

        class Mailbox(Communicator):
            name = "mailbox"

            @classmethod
            def probe(cls, coor):
                if coor.world_size > 3:
                    raise Unsupported("three ranks at most")
                return 1

            def do_open(self, prefix="mailbox"):
                self.store, self.counts = self.coor.store(prefix), {}
                self.sums, self.is_open = 0, True

            def do_close(self):
                self.is_open = False

            def _next(self, src, dst):
                self.counts[src, dst] = number = self.counts.get((src, dst), 0) + 1
                return f"{src}/{dst}/{number}"

            def do_send(self, tensor, dst):
                data = tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
                self.store.set(self._next(self.rank, dst), data)

            def do_recv(self, tensor, src):
                data = bytearray(self.store.get(self._next(src, self.rank)))
                tensor.view(-1).copy_(torch.frombuffer(data, dtype=tensor.dtype))

            do_broadcast = Communicator.do_broadcast

            def do_allreduce(self, out, tensor, op):
                self.sums += 1
                super().do_allreduce(out, tensor, op)

    return Mailbox


def test_a_class_that_derives_from_communicator_conforms_for_one_release(ranks):
    kind = former()
    assert issubclass(kind, Backend) and not issubclass(kind, Communicator)

    def body(info):
        with Coordinator(info, timeout_s=30) as coor:
            with Communicator(coor, kind, prefix="post") as comm:
                assert comm.backend == "mailbox" and repr(comm).startswith("Mailbox(rank=")
                total = comm.allreduce(torch.ones(2))
                report = conformance.check(comm, large=1009, only="movement")
            return total.tolist(), report.ok, comm.sums, comm.is_open

    assert ranks(body, 3) == [([3, 3], True, 1, False)] * 3


def test_a_former_class_that_overrides_a_call_of_users_is_refused():
    """Its allreduce(tensor) was called as a backend's: (out, tensor, op)."""
    with pytest.raises(TypeError, match=r"class Acme\(Communicator\) overrides allreduce"):

        class Acme(Communicator):
            def allreduce(self, tensor, op="sum"):
                return tensor

    with pytest.raises(TypeError, match=r"Post.* overrides send, and"):

        class Post(former()):
            def send(self, tensor, dst):
                self.do_send(tensor, dst)


@pytest.mark.parametrize("kind", [Backend, Tcp, Shm])
def test_a_former_name_in_a_class_derived_from_a_backend_is_refused(kind):
    """It had no effect, and nothing said so."""
    with pytest.raises(TypeError, match=r"class Logged: .* Rename do_allreduce to allreduce"):

        class Logged(kind):
            def do_allreduce(self, out, tensor, op):
                pass


def test_what_it_refuses_is_said_as_before(ranks_or_errors):
    kind = former()

    def body(info):
        with Coordinator(info, timeout_s=30) as coor:
            Communicator(coor, kind)

    for error in ranks_or_errors(body, 4):
        assert isinstance(error, Unsupported) and "three ranks at most" in str(error)


def test_a_communicator_has_what_its_backend_has_beyond_the_common_and_nothing_private():
    with (
        Coordinator(LaunchInfo("alone")) as coor,
        Communicator(coor, former()) as comm,
    ):
        assert comm.sums == 0 and callable(comm.split)
        for name in ("_next", "reduce_parts", "nothing"):
            with pytest.raises(AttributeError, match=name):
                getattr(comm, name)
    with pytest.raises(CommunicatorError, match="barrier on a closed Communicator"):
        comm.barrier()
