"""start(): ranks beside a program that goes on.

launch = launcher.start(work, nprocs=4, on_failure=print)
results = launch.wait()              # or: await launch
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any

from launcher import target
from launcher.errors import Failure, LaunchError
from launcher.job import Job
from launcher.local.launch_local import launch_local
from launcher.local.launch_watch import LaunchWatch


class Launch:
    """A launch in progress, which start() returns. Its methods may be called from any thread.

    Leaving a `with` of it stops what still runs. Its ranks end with the program in any case. Of a
    job of several nodes, it is the part of this one: see launcher/external/node_rendezvous.py.
    """

    def __init__(self, job: Job, on_failure: Callable[[Failure], object] | None = None) -> None:
        self._watch = LaunchWatch(on_failure)
        self._results: Future[list[Any]] = Future()
        self._results.set_running_or_notify_cancel()  # a task that stops awaiting cannot cancel it
        # The ranks end with the thread that starts them (prctl(2), PR_SET_PDEATHSIG).
        self._thread = threading.Thread(
            target=self._run, args=(job,), name=f"launch-{job.launch_id}", daemon=True
        )
        self._thread.start()

    def _run(self, job: Job) -> None:
        try:
            results = launch_local(job, watch=self._watch)
        except BaseException as error:
            self._results.set_exception(error)
        else:
            self._results.set_result(results)
        finally:
            self._watch.close()

    def wait(self, timeout_s: float | None = None) -> list[Any]:
        """Each rank's result, by rank. Raises LaunchError as launch() does.

        timeout_s: TimeoutError after so long, and the launch goes on.
        """
        if self.poll() is None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"the launch did not finish within {timeout_s:g} s")
        return self._results.result()

    def poll(self) -> int | None:
        """The exit code that `drumline run` would end with; None while the launch runs."""
        if not self._results.done():
            return None
        error = self._results.exception()
        return error.exit_code if isinstance(error, LaunchError) else int(error is not None)

    def stop(self) -> None:
        """Ask the ranks to end (SIGTERM), and kill what has not after a grace; again: kill now.

        Returns at once; wait() then raises LaunchInterrupted, if the launch had not ended before.
        """
        self._watch.request_stop(signal.SIGTERM)

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks, by rank; 0 for one that has not started, or none yet."""
        return self._watch.pids

    def __await__(self) -> Generator[Any, None, list[Any]]:
        import asyncio  # slow, and not needed by programs without it

        return asyncio.wrap_future(self._results).__await__()

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.stop()
        self._thread.join()


def start(
    work: Callable[..., Any] | str | os.PathLike[str],
    nprocs: int = 2,
    *,
    args: Sequence[Any] = (),
    timeout_s: float | None = None,
    log_dir: str | None = None,
    bind: bool = False,
    preload: Sequence[str] | None = None,
    share_devices: bool = False,
    on_failure: Callable[[Failure], object] | None = None,
) -> Launch:
    """Start ranks on this machine, as launch() does, and return while they run.

    They start in a fresh interpreter, which must be able to import work if it is a function.
    on_failure: called once, on a thread of the launch, with the Failure of the rank that fails
    first, before the others are ended; it must not wait for them.
    """
    job = Job(
        target.by_reference(target.of(work)),
        args=tuple(args),
        nprocs=nprocs,
        log_dir=log_dir,
        timeout_s=timeout_s,
        bind=bind,
        preload=tuple(preload) if isinstance(preload, list) else preload,  # type: ignore[arg-type]
        share_devices=share_devices,
    )
    target.check(job.target)
    return Launch(job, on_failure)
