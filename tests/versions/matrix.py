"""Each promised version of what drumline stands on: what touches it is run, and a table written.

    python -m tests.versions.matrix [--resume] [--uses] [ROW...]    (`make versions`)

A row fails if one of its tests does, if a use of tests/drumline/test_uses.py is slow, or if what
was installed is not what it asks for. Rows that are not run stay in the table as they were.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.versions import environments

ROOT = environments.ROOT
PAGE = ROOT / "docs" / "versions.md"
FOLDER = ROOT / "build" / "versions"
USES = "tests/drumline/test_uses.py"
CONTACT_TESTS = "tests/versions/contact_tests.txt"
MARKS = "<!-- versions: written by `make versions` -->", "<!-- versions end -->"
HEADER = "| asked for | Python | torch | transformers | contact tests | uses | on |\n" + "|---" * 7
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class Row:
    """What is asked for; the newest that pyproject.toml allows of all that is not."""

    name: str
    versions: dict[str, str]
    python: str = HERE

    def requirements(self) -> list[str]:
        return [f"{name}=={version}" for name, version in self.versions.items()]

    @property
    def folder(self) -> Path:
        """Of its environment, which rows that ask for the same share."""
        asked = "-".join(f"{name}{version}" for name, version in self.versions.items())
        return FOLDER / f"python{self.python}-{asked}"


TORCH, TRANSFORMERS = "2.13.0", "5.24.0"
ROWS = [
    *(
        Row(f"torch-{version}", {"torch": version, "transformers": TRANSFORMERS})
        for version in ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
    ),
    *(
        Row(f"transformers-{version}", {"torch": TORCH, "transformers": version})
        for version in ("5.21.0", "5.22.2", "5.23.0", "5.24.0")
    ),
    *(
        Row(f"python-{version}", {"torch": TORCH, "transformers": TRANSFORMERS}, version)
        for version in ("3.11", "3.12", "3.13")
    ),
]


NOT_RUN = "not run"


def run(row: Row, only_uses: bool = False) -> tuple[list[str], bool]:
    """The row's cells, and whether all of it holds. only_uses: without the contact tests."""
    python = environments.build(row.folder, row.python, row.requirements())
    versions = installed(python, *row.versions)
    wanted = {"Python": row.python, **row.versions}
    right = all(f"{versions[name]}.".startswith(f"{wanted[name]}.") for name in wanted)
    uses = counts(python, USES)
    holds, tests = right and uses.hold, NOT_RUN
    if not only_uses:
        compile_backend(python)
        contact = counts(python, f"@{CONTACT_TESTS}")
        holds, tests = holds and contact.hold, contact.text()
    day = datetime.date.today().isoformat()
    return [row.name, *versions.values(), tests, uses.text(), day], holds


def compile_backend(python: Path) -> None:
    """The torch backend, with the product's flags: the first test would do it in its time limit."""
    load = "from communicator.torch_interop import native_backend; native_backend.load()"
    environments.run(python, "-W", "error::RuntimeWarning", "-c", load)


def installed(python: Path, *names: str) -> dict[str, str]:
    ask = (
        "import platform, sys\nfrom importlib.metadata import version\n"
        "print(platform.python_version(), *map(version, sys.argv[1:]))"
    )
    found = environments.run(python, "-c", ask, *names).split()
    return dict(zip(("Python", *names), found, strict=True))


@dataclass(frozen=True)
class Counts:
    passed: int
    failed: int
    hold: bool

    def text(self) -> str:
        return f"{self.passed} passed" + (f", **{self.failed} failed**" if self.failed else "")


def counts(python: Path, *tests: str) -> Counts:
    """Run tests in two processes side by side; their output passes by."""
    patient = ("--timeout", "600")  # on a machine that does other things, too
    command = [python, "-m", "tests.programs.side_by_side", "2", "-q", *patient, *tests]
    with subprocess.Popen(
        list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    text = "".join(lines)
    passed, failed = (
        sum(map(int, re.findall(rf"(\d+) {kind}", text))) for kind in ("passed", "(?:failed|error)")
    )
    return Counts(passed, failed, process.returncode == 0 and passed > 0 and not failed)


def write(rows: dict[str, list[str]]) -> None:
    """Put the rows into the page's table, in the order of ROWS."""
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    kept = table() | rows
    lines = [f"| {' | '.join(kept[row.name])} |" for row in ROWS if row.name in kept]
    PAGE.write_text("\n".join([before + MARKS[0], HEADER + "|", *lines, MARKS[1] + after]))


def table() -> dict[str, list[str]]:
    """The cells of the page's table, by row."""
    _, _, rest = PAGE.read_text().partition(MARKS[0])
    lines = rest.partition(MARKS[1])[0].splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {row[0]: row for row in cells if row}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help="such as torch-2.15.0; all")
    parser.add_argument("--resume", action="store_true", help="without rows that ran today")
    parser.add_argument("--uses", action="store_true", help="and no contact tests: a minute a row")
    options = parser.parse_args()
    names = options.rows or [row.name for row in ROWS]
    if options.resume:
        day = datetime.date.today().isoformat()
        done = [row[0] for row in table().values() if row[-1] == day and NOT_RUN not in row]
        names = [name for name in names if name not in done]
    broken, found = [], {}
    for row in ROWS:
        if row.name in names:
            print(f"== {row.name}", flush=True)
            if row.folder not in found:
                found[row.folder] = run(row, options.uses)
            cells, holds = found[row.folder]
            cells = [row.name, *cells[1:]]
            write({row.name: cells})
            broken += [] if holds else [row.name]
            print(f"== {' | '.join(cells)}", flush=True)
    if broken:
        print(f"These do not hold: {', '.join(broken)}.", file=sys.stderr)
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
