"""benchmarks/scale.md: what the measurements of scale.py say of thousands of ranks."""

from __future__ import annotations

from pathlib import Path

from benchmarks.table import RESULTS, Table

HERE = Path(__file__).parent
HEAD = """# Thousands of ranks, extrapolated

    python -m benchmarks.scale --save

forks as many ranks as one machine bears, measures the processor time of one rank for start-up, a
barrier, a broadcast and an allgather, fits how it grows and extrapolates. It writes this page.

The ranks share the cores of one machine, so the wall time is the sum of all ranks' work. On a
cluster they work in parallel, and the rank with the most work decides: rank 0, to which all ranks
connect. Where its work grows linearly, 10,000 ranks cost it ten times what 1,000 cost.
"""
CHANGED = """## What was changed because of it

- Between nodes every call carries the calls that the ranks are in, so that a mismatch is seen. Each
  node's record used to travel to all nodes, so a barrier cost each node linear work, and all nodes
  together quadratic work. Now equal records are merged on their way up the tree, and only those
  that differ go on: the messages of a barrier have one size, however many nodes there are.
- To send an allgather down the tree, a node compared each entry with the nodes below it, which was
  quadratic at rank 0. Now each entry says where it goes.
- Within a node nothing passes through rank 0: a call is a few words in memory that all ranks of the
  node read.

## What stays linear, and its limits

- Every rank holds one connection to rank 0 for keys and heartbeats, so rank 0 needs as many open
  files as there are ranks: `ulimit -n`. `drumline doctor` prints the limit.
- Every rank proves the launch secret to rank 0, and tells it who it is. Rank 0 answers with the
  ranks of the same machine alone; the list of all goes down the tree of nodes, from first rank to
  first rank, and through shared memory. So 10,000 ranks, 8 a node, meet with 26 MB and 1.2 s of
  processor time of rank 0's server, and 1,000 with a tenth of it
  (`tests/coordinator/control/test_scale.py`); when rank 0 told each of them, 4,000 took 444 MB.
- Of each node one rank sends rank 0 two heartbeats a second, with the calls of all ranks of the
  node; from 512 nodes on fewer, so that rank 0 never handles more than 1,024 a second. One of 8
  ranks takes it 41 us, so that is 4 % of a core. Between 10,000 ranks, 8 a node, one comes every
  1.2 s, and a host that falls silent is noticed after 6 s; a process that ends, at once.
- Near the deadline of a call all ranks ask who is late. Rank 0 packs one answer for all of them,
  with the first 64 ranks that are not in the call: where two of 4,000 are late, and all ask, it
  sends 0.5 MB (122 MB when it said all that it knew) and takes 0.12 s. The failure of a group goes
  to the nodes of its ranks alone.
- A barrier and a broadcast have a logarithm of messages of one size at each node
  (`tests/coordinator/transport/test_scale.py`); the times below are of up to 64 processes that
  share two cores and their caches. A look at the peers while a call waits, whose time grew with the
  square of the ranks of one node, grows in step with them.
- An allgather delivers every rank's data to every rank; that is its purpose.
"""


def write(table: Table, fitted: Table) -> Path:
    """The page, beside this file, or among the results if those are kept elsewhere."""
    folder = HERE if RESULTS.parent == HERE else RESULTS
    path = folder / ("scale.md" if folder == HERE else "scale-page.md")
    parts = [HEAD, describe_growth(fitted), CHANGED, fitted.markdown(), table.markdown()]
    path.write_text("\n".join(parts))
    return path


def describe_growth(fitted: Table) -> str:
    """The fits in words: a line for each kind of growth and rank."""
    lines = []
    for growth in ("quadratic", "linear", "logarithmic", "constant"):
        for rank in ("rank 0", "other rank"):
            calls = [
                f"{what} ({layout})"
                for what, layout, of_rank, _, grows, *_ in fitted.rows
                if (of_rank, grows) == (rank, growth)
            ]
            if calls:
                lines.append(f"- {growth}, {rank}: {', '.join(calls)}")
    heading = "## How the work of one rank grows"
    caution = (
        "The best fit is not always the true law: a rank that waits checks now and then that its "
        "peers are alive, and on an oversubscribed machine it waits long."
    )
    return "\n".join([heading, "", *lines, "", caution, ""])
