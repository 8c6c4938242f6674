"""Reading the variables by which an engine tells a process its rank: all of them, or none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from launcher.job import LOOPBACK, Job
from launcher.launch_info import LaunchInfo, LaunchInfoError, integer


def family(
    environ: Mapping[str, str], engine: str, marks: Iterable[str], names: Iterable[str]
) -> dict[str, str] | None:
    """The variables called names; None if none of marks, which only that engine sets, is there.

    Raises LaunchInfoError if some of them are there without the others.
    """
    if not any(mark in environ for mark in marks):
        return None
    wanted = list(names)
    found = {name: environ[name] for name in wanted if environ.get(name)}
    missing = [name for name in wanted if name not in found]
    if missing:
        raise LaunchInfoError(
            f"half of {engine}'s variables: {', '.join(missing)} not set beside {found}. This "
            f"process cannot tell which rank it is. {way_out(engine)}"
        )
    return found


def numbers(found: Mapping[str, str], table: Mapping[str, str]) -> dict[str, int]:
    """The fields of a LaunchInfo that table gives the variables of, from what was found."""
    return {field: integer(found[name], name) for field, name in table.items()}


def foreseen(engine: str, job: Job) -> dict[str, object]:
    """What a rank's LaunchInfo will have beside the job's own, if engine starts it."""
    known: dict[str, object] = {"extras": {"launcher": engine}}
    if job.nnodes > 1 and job.master_addr == LOOPBACK:
        known["master_addr"] = chosen_by(engine)
    return known


def chosen_by(engine: str) -> str:
    """What to show where only the start will tell."""
    return f"chosen by {engine}"


def build(engine: str, found: Mapping[str, str], **values: object) -> LaunchInfo:
    """A LaunchInfo of values; if they contradict each other, the error shows found, the source."""
    try:
        return LaunchInfo(**values)  # type: ignore[arg-type]
    except LaunchInfoError as error:
        raise contradiction(engine, found, str(error)) from error


def contradiction(engine: str, found: Mapping[str, str], problem: str) -> LaunchInfoError:
    """The error to raise where the variables in found cannot all be true."""
    return LaunchInfoError(
        f"{engine}'s variables contradict each other: {problem}; they are {dict(found)}. "
        f"{way_out(engine)}"
    )


def way_out(engine: str) -> str:
    return (
        f"Start the program through {engine}, or unset all of these, or name the launcher that is "
        "meant: `python -m launcher run --launcher NAME`."
    )
