"""benchmarks/scale.md: what the measurements of scale.py say of thousands of ranks."""

from __future__ import annotations

from pathlib import Path

from benchmarks.table import RESULTS, Table

HERE = Path(__file__).parent
HEAD = """# Thousands of ranks, on paper

    python -m benchmarks.scale --save

forks as many ranks as one machine bears, measures what each of them works for starting up, a
barrier, a broadcast and an allgather, fits the growth and extrapolates it. It writes this page.

The ranks share the cores of one machine, so the time until the last is done is the sum of what all
work. On a cluster they work at once, and what counts is the one that works most: rank 0, to which
all come. Where it grows linearly, a launch of 10,000 costs it ten times what one of 1,000 does.
"""
CHANGED = """## What was changed because of it

- Between nodes every call carries what the ranks are in, so that a mismatch is seen. Each node's
  word used to travel to all nodes, so that the work of a barrier grew with the number of nodes at
  every node, and quadratically in sum. Now equal words become one on their way up the tree, and
  only what differs goes on: a barrier's messages have one size, however many nodes there are.
- To hand an allgather down the tree, a node asked of each entry whether any of the nodes below
  wants it, which made it quadratic at rank 0. Now an entry says where it goes.
- Within a node nothing passes through rank 0: a call is a few words in memory that all ranks of the
  node look at.

## What stays linear, and where it ends

- Every rank holds one connection to rank 0 for keys and news, so rank 0 needs as many open files as
  there are ranks: `ulimit -n`. `python -m launcher doctor` says how many there may be.
- Every rank proves the launch secret to rank 0, and learns who the others are: their number times
  what one of them weighs, to each of them. This is the start-up of rank 0 in the table.
- Every rank tells rank 0 twice a second that it lives, and hears of the others: less often from 256
  ranks on, so that rank 0 never takes more than 512 such messages a second in all.
- An allgather brings every rank what every other gave; that is what it is for.
"""


def write(table: Table, fitted: Table) -> Path:
    """The page, beside this file, or among the results if those are kept elsewhere."""
    folder = HERE if RESULTS.parent == HERE else RESULTS
    path = folder / ("scale.md" if folder == HERE else "scale-page.md")
    parts = [HEAD, said(fitted), CHANGED, fitted.markdown(), table.markdown()]
    path.write_text("\n".join(parts))
    return path


def said(fitted: Table) -> str:
    """Which grow how, in words, as the fits say it: a line for each growth and rank."""
    lines = []
    for growth in ("quadratic", "linear", "logarithmic", "constant"):
        for who in ("rank 0", "other rank"):
            found = [
                f"{what} ({layout})"
                for what, layout, whose, _, grows, *_ in fitted.rows
                if (whose, grows) == (who, growth)
            ]
            if found:
                lines.append(f"- {growth}, {who}: {', '.join(found)}")
    heading = "## How the work of one rank grows"
    caution = (
        "What fits best is not always what is so: a rank that waits looks now and then at whether "
        "the others live, and on a crowded machine it waits long."
    )
    return "\n".join([heading, "", *lines, "", caution, ""])
