"""An engine's executor: workers that hold one model together, driven from an asyncio front end.

python examples/executor/executor.py

The front end writes a step to worker 0, which passes it on to the others; all compute their part of
the layers, and worker 0 answers. Then a worker is killed: the front end is called back at once, and
the step that was under way raises.
"""

import asyncio
import json
import os
import signal
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress

import torch

import drumline
from launcher import Failure, LaunchError

WIDTH = 64
STEP_S = 60.0  # the deadline of what the workers do together
IDLE_S = 7 * 86400.0  # a worker waits so long for the next step


class Executor:
    """The workers, as the front end sees them. Steps are executed one at a time."""

    def __init__(self, nprocs: int, on_failure: Callable[[Failure], object]) -> None:
        """on_failure: called on the event loop with the first worker that fails."""
        loop = asyncio.get_running_loop()
        self._folder = tempfile.TemporaryDirectory()  # nobody else may connect
        self._path = os.path.join(self._folder.name, "steps")
        self._worker = loop.create_future()
        self._turn = asyncio.Lock()
        self._nprocs = nprocs
        self._on_failure = lambda failure: loop.call_soon_threadsafe(on_failure, failure)

    async def __aenter__(self) -> "Executor":
        def connected(*streams: object) -> None:
            self._worker.set_result(streams)

        self._server = await asyncio.start_unix_server(connected, self._path, limit=1 << 24)
        self.launch = drumline.start(
            work, self._nprocs, args=(self._path,), on_failure=self._on_failure
        )
        ended = asyncio.ensure_future(self.launch)
        await asyncio.wait({self._worker, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not self._worker.done():
            await ended  # which raises: they ended before one connected
        self._ended, (self._reader, self._writer) = ended, await self._worker
        return self

    async def execute_model(self, rows: list[list[float]]) -> list[list[float]]:
        """The model's output for each row. Raises LaunchError once a worker has failed."""
        async with self._turn:
            with suppress(ConnectionError):  # of a worker that has ended; its answer is none
                self._writer.write(json.dumps(rows).encode() + b"\n")
            if answer := await self._reader.readline():
                return json.loads(answer)
            await self._ended
            raise RuntimeError("the workers have ended before they had answered")

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        self._writer.close()  # so the workers end by themselves
        self._server.close()
        if error is not None:
            self.launch.stop()
        with suppress(LaunchError):  # it was raised by the step, and told to on_failure
            await self._ended
        self._folder.cleanup()


class Mlp:
    """Two layers, the first cut by its outputs, the second by its inputs: they need one sum."""

    def __init__(self, comm: drumline.Communicator) -> None:
        torch.manual_seed(0)
        first, second = torch.randn(WIDTH, 4 * WIDTH), torch.randn(4 * WIDTH, WIDTH)
        self._first = first.chunk(comm.world_size, 1)[comm.rank]
        self._second = second.chunk(comm.world_size, 0)[comm.rank]
        self._comm = comm

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._comm.allreduce(torch.relu(rows @ self._first) @ self._second)


def work(path: str) -> None:
    """A worker. The first one speaks with the front end."""
    with (
        drumline.Coordinator(timeout_s=STEP_S) as coor,
        drumline.Communicator(coor, device_type="cpu", timeout_s=STEP_S) as comm,
        socket.socket(socket.AF_UNIX) as connection,
    ):
        model = Mlp(comm)
        if coor.rank == 0:
            connection.connect(path)
        stream = connection.makefile("rw")
        while True:
            line = stream.readline() if coor.rank == 0 else None
            line = coor.broadcast_object(line, timeout_s=IDLE_S)
            if not line:
                return
            output = model(torch.tensor(json.loads(line)))
            if coor.rank == 0:
                stream.write(json.dumps(output.tolist()) + "\n")
                stream.flush()


async def main() -> None:
    lost = asyncio.Event()

    def on_failure(failure: Failure) -> None:
        print("lost:", failure.summary())
        lost.set()

    async with Executor(2, on_failure) as executor:
        rows = torch.randn(3, WIDTH).tolist()
        steps = [executor.execute_model([row]) for row in rows]
        one_by_one = [output for step in await asyncio.gather(*steps) for output in step]
        together = await executor.execute_model(rows)
        apart = torch.tensor(one_by_one) - torch.tensor(together)
        print("equal:", bool(apart.abs().max() < 0.01))
        os.kill(executor.launch.pids[1], signal.SIGKILL)
        try:
            await executor.execute_model(rows)
        except LaunchError as error:
            print("raised:", error.failures[0].summary())
        await lost.wait()


if __name__ == "__main__":
    asyncio.run(main())
