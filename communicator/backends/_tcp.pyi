from collections.abc import Callable, Sequence
from types import NotImplementedType

import torch

Check = Callable[[Sequence[int], float], None]
Dropped = tuple[int, int, bytes, bool]

StepProgram = tuple[bytes, int]

def program(
    name: str, rank: int, peers: bytes, numel: int, itemsize: int, root: int, /
) -> StepProgram: ...
def exchange(
    rank: int,
    peers: bytes,
    itemsize: int,
    sends: bytes,
    recvs: bytes,
    source: int,
    target: int,
    /,
) -> StepProgram: ...

class ConnectionEnded(Exception):
    """args: the peer, its notice or 0, an errno or 0, and a text."""

class Engine:
    def __init__(
        self, rank: int, fds: Sequence[int], keys: Sequence[bytes], poll_s: float, /
    ) -> None: ...
    def run(
        self,
        steps: bytes,
        addresses: Sequence[int],
        texts: Sequence[bytes],
        scratch_nbytes: int,
        dtype: int,
        op: int,
        check: Check,
        /,
    ) -> Dropped | None: ...
    def allreduce(
        self, tensor: torch.Tensor, op: object, out: torch.Tensor | None, check: Check, /
    ) -> Dropped | NotImplementedType | None: ...
    def send(
        self, tensor: torch.Tensor, dst: int, check: Check, /
    ) -> Dropped | NotImplementedType | None: ...
    def recv(
        self, tensor: torch.Tensor, src: int, check: Check, /
    ) -> Dropped | NotImplementedType | None: ...
    def announce_end(self, notice: int, text: bytes, /) -> None: ...
    def close(self) -> None: ...
