"""The environment variables of a backend launcher: read all of them, or none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from launcher.job import LOOPBACK, Job
from launcher.launch_info import LaunchInfo, LaunchInfoError, integer, shown

# The numbers of `env://`, which several launchers set: LaunchInfo field -> variable.
PLAIN_NUMBERS = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "master_port": "MASTER_PORT",
}
PLAIN = (*PLAIN_NUMBERS.values(), "MASTER_ADDR")


def read_variables(
    environ: Mapping[str, str], backend: str, marks: Iterable[str], names: Iterable[str]
) -> dict[str, str] | None:
    """The variables called names; None if none of marks, which only that backend sets, is there.

    Raises LaunchInfoError if some of them are set without the others.
    """
    if not any(mark in environ for mark in marks):
        return None
    variables = {name: environ.get(name, "") for name in names}
    missing = [name for name, value in variables.items() if not value]
    if missing:
        present = {name: value for name, value in shown(variables).items() if value}
        raise LaunchInfoError(
            f"only some of {backend}'s variables: {', '.join(missing)} not set, but {present}. "
            f"This process cannot tell which rank it is. {hint(backend)}"
        )
    return variables


def read_numbers(variables: Mapping[str, str], table: Mapping[str, str]) -> dict[str, int]:
    """The number of each LaunchInfo field; table: field -> variable."""
    return {field: integer(variables[name], name) for field, name in table.items()}


def expected_info(backend: str, job: Job) -> dict[str, object]:
    """The fields of a rank's LaunchInfo that differ from the job's, if backend starts it."""
    fields: dict[str, object] = {"extras": {"launcher": backend}}
    if job.nnodes > 1 and job.master_addr == LOOPBACK:
        fields["master_addr"] = chosen_by(backend)
    return fields


def chosen_by(backend: str) -> str:
    """The placeholder for a value that is known only after the start."""
    return f"chosen by {backend}"


def build(backend: str, variables: Mapping[str, str], **values: object) -> LaunchInfo:
    """A LaunchInfo of values; if they contradict each other, the error shows the variables."""
    try:
        return LaunchInfo(**values)  # type: ignore[arg-type]
    except LaunchInfoError as error:
        raise contradiction(backend, variables, str(error)) from error


def build_plain(
    backend: str, variables: Mapping[str, str], launch_id: str, **extras: str
) -> LaunchInfo:
    """A LaunchInfo of those of PLAIN among the variables; see build."""
    values = read_numbers(variables, PLAIN_NUMBERS)
    addr = variables["MASTER_ADDR"]
    return build(backend, variables, **values, launch_id=launch_id, master_addr=addr, extras=extras)


def contradiction(backend: str, variables: Mapping[str, str], problem: str) -> LaunchInfoError:
    """The error to raise where the variables cannot all be true."""
    return LaunchInfoError(
        f"{backend}'s variables contradict each other: {problem}; they are {shown(variables)}. "
        f"{hint(backend)}"
    )


def hint(backend: str) -> str:
    """The advice for variables that make no LaunchInfo."""
    return (
        f"Start the program through {backend}, or unset all of these, or name the launcher to "
        "detect: `python -m launcher run --launcher NAME`."
    )
