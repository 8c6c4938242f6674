"""Tensors without one plain piece of memory: told on the rank that has them, and waited for by no
other, by every backend here and every call."""

import subprocess
import weakref
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from communicator import Communicator
from coordinator import Coordinator
from examples.vendor_plugin.python_backend.acme_communicator import Acme

CALLS = ("allreduce", "broadcast", "reduce", "allgather", "send", "recv")


with FakeTensorMode():  # by no rank's thread: CUDA builds of torch 2.11 would crash later
    FAKE = torch.ones(4)


def freed():
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def nested():
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


LIVING = torch.ones(4)
ODD = {
    "FakeTensor": lambda: FAKE,
    "TwoTensor is a wrapper": lambda: TwoTensor(torch.ones(4), torch.ones(4)),
    r"layout torch\._mkldnn": lambda: torch.ones(4).to_mkldnn(),
    r"layout torch\.sparse_csr": lambda: torch.ones(4, 4).to_sparse_csr(),
    "tensor is not one piece": nested,
    "quint8 means something": lambda: torch.quantize_per_tensor(
        torch.ones(4), 0.1, 0, torch.quint8
    ),
    "has no memory: it was freed": freed,
    "memory.* or never allocated": lambda: torch._efficientzerotensor(4),
    "on meta": lambda: torch.ones(4, device="meta"),
    "contiguous": lambda: torch.ones(1).expand(4),
    "needs a torch.Tensor, not ndarray": lambda: torch.ones(4).numpy(),
    r"needs a torch.Tensor, not \w*[Pp]roxy": lambda: weakref.proxy(LIVING),  # ended the process
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """The example of a vendor's library, built."""
    folder = tmp_path_factory.mktemp("toy")
    source = Path(__file__).parents[3] / "examples" / "vendor_plugin" / "toy.c"
    flags = ["-std=c11", "-O1", "-fPIC", "-shared", f"-I{source.parents[2] / 'csrc' / 'abi'}"]
    subprocess.run(["cc", *flags, source, "-o", folder / "libtoy.so"], check=True)
    return folder / "libtoy.so"


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of what it means to drop
@pytest.mark.parametrize("backend", ["shm", "tcp", "gloo", "toy", "acme"])
def test_odd_tensors_are_rejected_at_once_on_their_rank_alone(ranks, toy, backend):
    def body(info):
        given = {"toy": toy, "acme": Acme}.get(backend, backend)
        with Coordinator(info, timeout_s=20) as coor, Communicator(coor, given) as comm:
            for words, make in ODD.items() if comm.rank == 0 else ():
                for call in CALLS:
                    with pytest.raises((TypeError, ValueError), match=f"rank 0, {call}: .*{words}"):
                        getattr(comm, call)(make(), *([1] if call in ("send", "recv") else []))
                with pytest.raises((TypeError, ValueError), match=words):
                    comm.allreduce(torch.ones(4), out=make())
            if comm.rank == 0:
                with pytest.raises(TypeError, match=r"outside of torch\.func"):
                    torch.vmap(comm.allreduce)(torch.ones(3, 4))
            same = [torch.ones(4).flip(0), torch.ones(4).as_subclass(Plain), torch.ones(0)]
            return [comm.allreduce(tensor).tolist() for tensor in same]

    assert ranks(body, 2) == [[[2.0] * 4, [2.0] * 4, []]] * 2


class Plain(torch.Tensor):
    """A subclass without a dispatcher of its own is its memory, as any tensor."""
