"""How the command line tells a launch that failed: the cause in a box, then a line each."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.errors import Failure, LaunchError, LaunchInterrupted


def lines(error: LaunchError) -> Iterator[str]:
    """The earliest failure boxed and first; the others in a line each."""
    failures = list(error.failures)
    is_cause = bool(failures) and error.exit_code == failures[0].exit_code
    if isinstance(error, LaunchInterrupted) or not is_cause:
        yield from box(f"the launch was not finished: {error}".splitlines())
    else:
        yield from box([*str(error).splitlines(), "", *_when(failures.pop(0))])
    for failure in failures:
        yield f"  {failure.summary()}"


def _when(first: Failure) -> list[str]:
    when = f"{max(0.0, first.time_s):.1f} s after the start"
    return [f"This came first, {when}; exit code {first.exit_code}."]


def box(content: list[str]) -> Iterator[str]:
    """Lines with a border on the left only, so that what is in them can be copied."""
    yield "╭" + "─" * 60
    for line in content:
        yield f"│ {line}".rstrip()
    yield "╰" + "─" * 60
