"""Checks of the backends on this machine, for `python -m launcher doctor`.

python -m communicator.backend_info                    # every backend, on two ranks
python -m communicator.backend_info --nccl             # which NCCL would be loaded
mpiexec -n 2 python -m communicator.backend_info --rank mpi    # one backend, under any launcher
"""

from __future__ import annotations

import argparse
import json

from communicator import conformance, selection, timings
from communicator.backends.nccl import nccl_library
from communicator.errors import DrumlineError, Unsupported
from launcher import LaunchError, current, launch

RANKS = 2
CONFORMS, FAILS, UNUSABLE = "conforms", "fails", "unusable"
BackendStatus = tuple[str, str]
"""CONFORMS, FAILS or UNUSABLE, and the report or reason."""


def check_in_processes(name: str) -> BackendStatus:
    """The status of one backend, on ranks that are processes."""
    timeout_s = timings.TIMINGS.doctor_launch_s
    try:
        results: list[BackendStatus] = launch(
            check_on_rank, RANKS, args=(name,), timeout_s=timeout_s
        )
    except LaunchError as error:  # a crash, or a hang
        return FAILS, str(error).splitlines()[0]
    return results[0]


def check_on_rank(name: str) -> BackendStatus:
    """The status of one backend. Collective."""
    try:
        report = conformance.check_backend(name)
    except Unsupported as reason:
        return UNUSABLE, "; ".join(dict.fromkeys(reason.reasons)) or str(reason)
    except DrumlineError as error:
        return FAILS, str(error)
    return CONFORMS if report.ok else FAILS, str(report).splitlines()[-1]


def nccl() -> dict[str, str]:
    try:
        library = nccl_library.find()
    except Unsupported as reason:
        return {"reason": str(reason)}
    return {"version": library.version_text, "path": library.path}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nccl", action="store_true", help="print only the NCCL library")
    parser.add_argument("--rank", metavar="BACKEND", help="be one rank of a check")
    options = parser.parse_args()
    if options.nccl:
        print(json.dumps(nccl()))
    elif options.rank:
        status = check_on_rank(options.rank)
        if current().rank == 0:
            print(json.dumps({options.rank: status}))
    else:
        names = selection.backend_names()
        print(json.dumps({"backends": {name: check_in_processes(name) for name in names}}))


if __name__ == "__main__":
    main()
