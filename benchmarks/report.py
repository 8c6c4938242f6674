"""benchmarks/README.md, from the tables and pictures of the last run.

python -m benchmarks.report      # writes it again, and the table of the README
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
    """A part of the page. tables, pictures: names of files in results. steps: what makes them.

    command: what else does.
    """

    name: str
    title: str
    tables: tuple[str, ...]
    pictures: tuple[str, ...] = ()
    steps: str = ""
    more: str = ""
    command: str = ""


SECTIONS = (
    Section(
        "startup", "Starting, and ending after a failure", ("startup",), ("startup",), "startup"
    ),
    Section(
        "coordinator",
        "Coordinator",
        ("coordinator-*",),
        ("coordinator-*",),
        "coordinator coordinator-peers",
    ),
    Section(
        "communicator",
        "Communicator",
        ("collectives-*", "shm-limits"),
        ("collectives-*-latency", "collectives-*-bandwidth"),
        "collectives collectives-4 shm-limits",
    ),
    Section(
        "network",
        "Between hosts",
        ("network", "encryption", "tls-records"),
        ("network",),
        "network encryption",
    ),
    Section("calls", "The cost of a call", ("calls", "tracing"), (), "calls tracing"),
    Section("torch", "Under torch.distributed", ("torch-backend",), (), "torch-backend"),
    Section("engines", "Under vLLM", ("engines-*",), command="make engines-bench RENEW=1"),
    Section(
        "inference",
        "One model over ranks",
        ("inference*", "model", "big*", "serve*"),
        ("model",),
        "inference nano-engine model big big-bfloat16 serve",
    ),
    Section("loading", "Loading sharded checkpoints", ("nd_loading",), (), "nd_loading"),
    Section("compiling", "Compiling once for all ranks", ("compile_once-*",), (), "compile_once"),
    Section(
        "scale",
        "Scaling",
        ("scale", "scale-fits"),
        ("scale",),
        "scale",
        "Extrapolated to thousands of ranks: [scale.md](scale.md).\n\n",
    ),
    Section(
        "gpu",
        "On a GPU",
        ("gpu-*",),
        command="make gpu",
    ),
)
HEAD = """# Benchmarks

    python -m benchmarks --renew   # or: make bench RENEW=1

measures every layer and the usual alternatives that are installed, in turns in the same run, and
writes this page with a table, JSON lines and a picture of each. No number comes from elsewhere.
Above each table are the machine, versions, commit and the command that makes it again.

- Numbers are medians; the middle half is in brackets, and shaded in the pictures.
- A `ratio` below 1 means that drumline is faster; another head says what is divided by what.
- `right` or `equal` says whether the results were compared with the expected ones and matched.
- On a machine with few cores trust the ratio, not the time.

[docs/benchmarks.md](../docs/benchmarks.md) says how each is measured.
"""
MISSING = "Not measured yet.\n"
LAST = "## The steps of the last run\n\n"


def write(results: Path = RESULTS) -> Path:
    """Write the page from the files in `results`; beside them, unless they are the kept ones."""
    page = HERE / "README.md" if results.parent == HERE else results / "README.md"
    parts = [section_text(section, results, page.parent) for section in SECTIONS]
    table = steps.page(results)
    parts.append(LAST + table if table else "")
    page.write_text("\n".join([HEAD, *filter(None, parts)]))
    if page.parent == HERE:
        speed.write(HERE.parent / "README.md", results)
    return page


def section_text(section: Section, results: Path, beside: Path) -> str:
    """The heading, pictures and tables of a section, or a note that none were measured."""
    tables = files(results, section.tables, ".md")
    command = section.command or f"python -m benchmarks {section.steps}"
    pictures = files(results, section.pictures, ".png")
    links = [f"![{path.stem}]({path.relative_to(beside)})\n" for path in pictures]
    # The documentation site includes what is between the marks: tables without pictures.
    body = [
        f"<!-- --8<-- [start:{section.name}] -->\n",
        *(map(embedded, tables) if tables else [MISSING]),
    ]
    head = f"## {section.title}\n\n    {command}\n\n{section.more}"
    return head + "\n".join([*links, *body, f"<!-- --8<-- [end:{section.name}] -->\n"])


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
