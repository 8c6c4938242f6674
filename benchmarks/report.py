"""benchmarks/README.md, written from the tables and pictures of the last run.

python -m benchmarks.report      # writes it again, and the numbers of the README
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks import speed, steps
from benchmarks.table import RESULTS

HERE = Path(__file__).parent
LONG = 24  # rows: a longer table is folded


@dataclass(frozen=True)
class Section:
    """A part of the page. tables, pictures: names of files in results. steps: what makes them."""

    name: str
    title: str
    tables: tuple[str, ...]
    pictures: tuple[str, ...] = ()
    steps: str = ""
    more: str = ""


SECTIONS = (
    Section("startup", "Starting, and ending after a death", ("startup",), ("startup",), "startup"),
    Section(
        "coordinator",
        "Agreeing",
        ("coordinator-*",),
        ("coordinator-*",),
        "coordinator coordinator-peers",
    ),
    Section(
        "communicator",
        "Moving tensors",
        ("collectives-*", "shm-limits"),
        ("collectives-*-latency", "collectives-*-bandwidth"),
        "collectives collectives-4 shm-limits",
    ),
    Section("calls", "What a call costs", ("calls", "tracing"), (), "calls tracing"),
    Section(
        "inference", "One model over ranks", ("inference*", "model"), ("model",), "inference model"
    ),
    Section("loading", "Loading into shards", ("nd_loading",), (), "nd_loading"),
    Section("compiling", "Compiling once for all", ("compile_once-*",), (), "compile_once"),
    Section(
        "scale",
        "Growing",
        ("scale", "scale-fits"),
        ("scale",),
        "scale",
        "What this says of thousands of ranks: [scale.md](scale.md).\n\n",
    ),
    Section(
        "gpu", "On a GPU", ("gpu-calls", "gpu-oneshot", "gpu-sanitizer", "gpu-worlds", "gpu-lives")
    ),
)
HEAD = """# Benchmarks

    python -m benchmarks           # or: make bench

measures every layer beside what one would use instead, of what is installed, in the same run and
in turns, and writes this page, with a table, JSON lines and a picture of each. Nothing here comes
from elsewhere. Above each table stand machine, versions, commit and the command that makes it
again. Numbers are medians, with the middle half in brackets; `right` or `equal` says whether the
results were compared and were the same. On a machine with few cores believe the ratio, not the
time. How each is measured: [docs/benchmarks.md](../docs/benchmarks.md).
"""
MISSING = "Not measured yet.\n"
LAST = "## The steps of the last run\n\n"


def write(results: Path = RESULTS) -> Path:
    """Put together what is in results: beside this file, or in results if they are elsewhere."""
    page = HERE / "README.md" if results.parent == HERE else results / "README.md"
    parts = [shown(each, results, page.parent) for each in SECTIONS]
    told = steps.page(results)
    parts.append(LAST + told if told else "")
    page.write_text("\n".join([HEAD, *filter(None, parts)]))
    if page.parent == HERE:
        speed.write(HERE.parent / "README.md", results)
    return page


def shown(section: Section, results: Path, beside: Path) -> str:
    """Its heading, pictures and tables, or that there are none yet."""
    found = files(results, section.tables, ".md")
    again = f"python -m benchmarks {section.steps}" if section.steps else "make gpu"
    pictures = files(results, section.pictures, ".svg")
    links = [f"![{path.stem}]({path.relative_to(beside)})\n" for path in pictures]
    # The marks let the site show the tables, whose pictures lie elsewhere for it.
    tables = [
        f"<!-- --8<-- [start:{section.name}] -->\n",
        *(map(embedded, found) if found else [MISSING]),
    ]
    head = f"## {section.title}\n\n    {again}\n\n{section.more}"
    return head + "\n".join([*links, *tables, f"<!-- --8<-- [end:{section.name}] -->\n"])


def files(folder: Path, patterns: tuple[str, ...], ending: str) -> list[Path]:
    return [path for pattern in patterns for path in sorted(folder.glob(pattern + ending))]


def embedded(table: Path) -> str:
    """A table one heading deeper, folded if it is long."""
    text = table.read_text().replace("## ", "### ", 1)
    if text.count("\n|") < LONG:
        return text
    start, end = text.index("\n|"), text.rindex("|\n") + 1
    rows = text[start:end]
    summary = f"<summary>{rows.strip().count(chr(10)) - 1} rows</summary>"
    fold = f'<details markdown="1">{summary}\n{rows}\n\n</details>'
    return f"{text[:start]}\n{fold}{text[end:]}"


if __name__ == "__main__":
    print(write())
