"""launch(): start ranks from a Python program.

results = launcher.launch(train, nprocs=4, args=(steps,))
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher import registry, target
from launcher.authentication import launch_token
from launcher.errors import LaunchInterrupted
from launcher.job import LOOPBACK, Job, new_launch_id

# Options that not every launcher supports, with the values that mean "not used".
OPTIONS: dict[str, object] = {
    "nnodes": 1,
    "bind": False,
    "preload": None,
    "share_devices": False,
    "log_dir": None,
    "trace": None,
    "encrypt": False,
}


def launch(
    work: Callable[..., Any] | str | os.PathLike[str],
    nprocs: int = 2,
    *,
    launcher: str = "multiprocessing",
    args: Sequence[Any] = (),
    timeout_s: float | None = None,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str = LOOPBACK,
    master_port: int = 0,
    launch_id: str | None = None,
    log_dir: str | None = None,
    bind: bool = False,
    preload: Sequence[str] | None = None,
    share_devices: bool = False,
    trace: str | os.PathLike[str] | None = None,
    encrypt: bool = False,
) -> list[Any]:
    """Each rank's result, by rank, of calling work with args; None if work is a script's path.

    Between processes, results are None, bool, int, float, str, bytes, and lists and dicts of those
    (tuples arrive as lists). The ranks are forked from this process if it has one thread and no
    accelerator open. Otherwise they start in a fresh interpreter, which must be able to import the
    function, and args must be values of the same kinds. With torchrun, mpi and slurm args are in
    the ranks' command lines, which every user of the machine can read, and at most 128 KiB in all.

    preload: modules to import once, before the ranks are forked. None: those of a script that are
    known to be safe. (): none.

    trace: a file for a timeline of what every rank did; see launcher/trace/recorder.py.

    encrypt: all Coordinators and Communicators of the ranks encrypt; see docs/security.md.

    nnodes: with multiprocessing and torchrun, each node calls this, and the variable
    DRUMLINE_TOKEN holds the same token on all of them, as docs/security.md says. Each call takes
    it out of the environment: set it before each.

    Raises LaunchError as soon as one rank fails, after ending the others. Processes that
    ranks leave running are ended with them.
    """
    job = Job(
        target.of(work),
        args=tuple(args),
        nprocs=nprocs,
        nnodes=nnodes,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        launch_id=new_launch_id() if launch_id is None else launch_id,
        log_dir=log_dir,
        timeout_s=timeout_s,
        bind=bind,
        preload=tuple(preload) if isinstance(preload, list) else preload,  # type: ignore[arg-type]
        share_devices=share_devices,
        encrypt=encrypt,
        token=launch_token.take(os.environ)
        if nnodes > 1 and needs_token(registry.find(launcher))
        else None,
    )
    try:
        return run_job(job, launcher, trace)
    except LaunchInterrupted as stopped:
        # So that the program handles Ctrl-C as it would without a launch.
        signal.raise_signal(stopped.exit_code - 128)
        raise


def run_job(
    job: Job,
    name: str = "multiprocessing",
    trace_file: str | os.PathLike[str] | None = None,
    **options: Any,
) -> list[Any]:
    """Run the job with the launcher of that name; with a trace_file, record a trace there."""
    return run_checked(job, checked_launcher(job, name, trace_file), trace_file, **options)


def needs_token(backend: Any) -> bool:
    """True if each of several nodes is started by a command of its own."""
    starts_all = getattr(backend, "STARTS_ALL_NODES", False)
    return not starts_all and "nnodes" in getattr(backend, "SUPPORTS", ())


def checked_launcher(job: Job, name: str, trace_file: str | os.PathLike[str] | None = None) -> Any:
    """The launcher of that name. Raises ValueError if it does not support an option of the job."""
    backend, values = registry.find(name), {**vars(job), "trace": trace_file}
    supported = getattr(backend, "SUPPORTS", OPTIONS)
    for option, default in OPTIONS.items():
        if values[option] not in (default, ()) and option not in supported:
            able = [name for name in registry.BUILT_IN if option in registry.find(name).SUPPORTS]
            raise ValueError(
                f"the launcher {name!r} does not support {option}={values[option]!r}, so nothing "
                f"was started. Leave it out, or choose one that does: {', '.join(able)}."
            )
    return backend


def run_checked(
    job: Job, backend: Any, trace_file: str | os.PathLike[str] | None, **options: Any
) -> list[Any]:
    """Run the job with this launcher, which supports its options; see run_job."""
    target.check(job.target)
    if trace_file is not None:
        from launcher.trace import merge_traces  # not needed by most launches

        with merge_traces.recordings_merged_into(Path(trace_file), job.nnodes) as folder:
            return run_checked(replace(job, trace=str(folder)), backend, None, **options)
    if hasattr(backend, "run"):
        return backend.run(job, **options)  # type: ignore[no-any-return]
    if hasattr(backend, "command"):
        from launcher.external import backend_launcher

        return backend_launcher.run(backend, job)
    raise ValueError(
        f"the launcher {backend.NAME!r} only detects ranks that were started elsewhere; it starts "
        "none"
    )
