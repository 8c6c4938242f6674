"""Starting a launch from a Python program.

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
from launcher.errors import LaunchInterrupted
from launcher.job import LOOPBACK, Job, new_launch_id
from launcher.trace import merge

# What not every launcher honours, and what it is when nobody asks for it.
OPTIONS: dict[str, object] = {
    "nnodes": 1,
    "bind": False,
    "preload": (),
    "log_dir": None,
    "trace": None,
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
    preload: Sequence[str] = (),
    share_devices: bool = False,
    trace: str | os.PathLike[str] | None = None,
) -> list[Any]:
    """Each rank's result, by rank, of calling work with args; None if work is a script's path.

    Between processes, results are None, bool, int, float, str, bytes, and lists and dicts of those
    (tuples arrive as lists). The ranks are forked from this process if it has one thread and no
    accelerator open. Otherwise they start in a fresh interpreter, which must be able to import the
    function, and args must be values of the same kinds.

    trace: a file for what every rank did and when; see launcher/trace/recorder.py.

    Raises LaunchError as soon as one rank fails, after ending the others. What ranks leave running
    is ended with them.
    """
    job = Job(
        target.of(work),
        args=tuple(args),
        nprocs=nprocs,
        nnodes=nnodes,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        launch_id=own_launch_id(nnodes, launcher) if launch_id is None else launch_id,
        log_dir=log_dir,
        timeout_s=timeout_s,
        bind=bind,
        preload=(preload if isinstance(preload, str) else tuple(preload)),  # type: ignore[arg-type]
        share_devices=share_devices,
    )
    try:
        return start(job, launcher, trace)
    except LaunchInterrupted as stopped:
        # As if the program had been alone when it came.
        signal.raise_signal(stopped.exit_code - 128)
        raise


def start(
    job: Job, name: str, trace_file: str | os.PathLike[str] | None = None, **options: Any
) -> list[Any]:
    """Run the job with the launcher of that name; if there is a trace_file, trace it into that."""
    check(job, name, trace_file)
    if trace_file is None:
        return _start(job, name, **options)
    with merge.gathered(Path(trace_file), job.nnodes) as folder:
        return _start(replace(job, trace=str(folder)), name, **options)


def own_launch_id(nnodes: int, name: str) -> str:
    """A new one. Raises ValueError if each of several nodes would draw its own, and none meet."""
    chosen = registry.find(name)
    starts_one = not getattr(chosen, "STARTS_ALL_NODES", False)
    if nnodes > 1 and starts_one and "nnodes" in getattr(chosen, "HONOURS", ()):
        raise ValueError(
            f"each of {nnodes} nodes is started by a command of its own, and these must be told "
            "the same, so nothing was started. Give --master-addr ADDRESS, of the first, and "
            "--launch-id ID, any word, on each of them."
        )
    return new_launch_id()


def check(job: Job, name: str, trace_file: str | os.PathLike[str] | None = None) -> None:
    """Raise ValueError if the job asks for what the launcher of that name would ignore."""
    asked = {**vars(job), "trace": trace_file}
    honoured = getattr(registry.find(name), "HONOURS", OPTIONS)
    for option, default in OPTIONS.items():
        if asked[option] != default and option not in honoured:
            able = [one for one in registry.BUILT_IN if option in registry.find(one).HONOURS]
            raise ValueError(
                f"the launcher {name!r} does not honour {option}={asked[option]!r}, and nothing is "
                f"ignored silently, so nothing was started. Leave out --{option.replace('_', '-')},"
                f" or choose a --launcher that honours it: {', '.join(able)}."
            )


def _start(job: Job, name: str, **options: Any) -> list[Any]:
    chosen = registry.find(name)
    target.check(job.target)
    if hasattr(chosen, "run"):
        results: list[Any] = chosen.run(job, **options)
        return results
    if hasattr(chosen, "command"):
        from launcher.external import backend_launcher

        return backend_launcher.run(chosen, job)
    raise ValueError(
        f"the launcher {name!r} only recognises ranks that were started elsewhere; it starts none"
    )
