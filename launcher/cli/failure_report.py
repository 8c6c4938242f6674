"""The report of a failed launch on the command line: the cause in a box, then a line each."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.cli.fold_traceback import fold
from launcher.errors import LaunchError, LaunchInterrupted


def lines(error: LaunchError) -> Iterator[str]:
    """The cause first and in a box; the other failures in a line each."""
    failures = list(error.failures)
    is_cause = bool(failures) and error.exit_code == failures[0].exit_code
    if isinstance(error, LaunchInterrupted) or not is_cause:
        yield from box(f"the launch did not finish: {error}".splitlines())
    else:
        first = failures.pop(0)
        when = f"{max(0.0, first.time_s):.1f} s after the start"
        note = f"This came first, {when}; exit code {first.exit_code}."
        yield from box([*fold(f"{error}\n").rstrip().splitlines(), "", note])
    for failure in failures:
        yield f"  {failure.summary()}"


def box(content: list[str]) -> Iterator[str]:
    """Lines with a border on the left only, so that they can be copied."""
    yield "╭" + "─" * 60
    for line in content:
        yield f"│ {line}".rstrip()
    yield "╰" + "─" * 60
