"""What the backends can do on this machine, for `python -m launcher doctor`.

python -m communicator.backend_info                    # every backend, on two ranks
python -m communicator.backend_info --nccl             # which NCCL would be loaded
mpiexec -n 2 python -m communicator.backend_info --rank mpi    # one backend, under any launcher
"""

from __future__ import annotations

import argparse
import json

from communicator import conformance, selection
from communicator.backends.nccl import nccl_library
from communicator.base import Communicator
from communicator.errors import DrumlineError, Unsupported
from coordinator import Coordinator
from launcher import LaunchError, current, launch

RANKS, WITHIN_S, CALL_S = 2, 120.0, 60.0
CONFORMS, FAILS, UNUSABLE = "conforms", "fails", "unusable"
Verdict = tuple[str, str]


def verdict(name: str) -> Verdict:
    """(conforms, fails or unusable; in words) of one backend, on ranks that are processes."""
    try:
        found: list[Verdict] = launch(checked, RANKS, args=(name,), timeout_s=WITHIN_S)
    except LaunchError as error:  # a crash, or a hang
        return FAILS, str(error).splitlines()[0]
    return found[0]


def checked(name: str) -> Verdict:
    """The same on a rank. Collective."""
    try:
        with Coordinator(timeout_s=CALL_S) as coor, Communicator(coor, name) as comm:
            report = conformance.check(comm)
            coor.barrier()  # nobody closes while others still compare
    except Unsupported as reason:
        return UNUSABLE, _reason(name, str(reason))
    except DrumlineError as error:
        return FAILS, str(error)
    return CONFORMS if report.ok else FAILS, str(report).splitlines()[-1]


def _reason(name: str, refusal: str) -> str:
    """Of all that a refusal says, what one rank gave as its reason."""
    _, _, told = refusal.partition(f" use {name}: ")
    return (told or refusal).split("; rank ")[0]


def nccl() -> dict[str, str]:
    try:
        library = nccl_library.find()
    except Unsupported as reason:
        return {"reason": str(reason)}
    return {"version": library.version_text, "path": library.path}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nccl", action="store_true", help="say only which NCCL there is")
    parser.add_argument("--rank", metavar="BACKEND", help="be one rank of a check")
    options = parser.parse_args()
    if options.nccl:
        print(json.dumps(nccl()))
    elif options.rank:
        found = checked(options.rank)
        if current().rank == 0:
            print(json.dumps({options.rank: found}))
    else:
        print(json.dumps({"backends": {name: verdict(name) for name in selection.backend_names()}}))


if __name__ == "__main__":
    main()
