from collections.abc import Callable, Sequence

class ConnectionEnded(Exception):
    """args: the peer, its notice or 0, an errno or 0, and a text."""

class Engine:
    def __init__(self, fds: Sequence[int], poll_s: float, /) -> None: ...
    def run(
        self,
        steps: bytes,
        addresses: Sequence[int],
        texts: Sequence[bytes],
        scratch_nbytes: int,
        dtype: int,
        op: int,
        check: Callable[[Sequence[int], float], None],
        /,
    ) -> tuple[int, int, bytes] | None: ...
    def announce_end(self, notice: int, text: bytes, /) -> None: ...
    def shut_down(self) -> None: ...
    def close(self) -> None: ...
