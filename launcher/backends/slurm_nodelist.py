"""SLURM's compressed lists: of nodes, and of tasks per node.

expand_nodes("n[1-3,7]")    # ["n1", "n2", "n3", "n7"]
expand_tasks("2(x3),1")     # [2, 2, 2, 1]
"""

from __future__ import annotations

import itertools
import math
import re

ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
TASKS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")
MAX_NODES = 1 << 16
"""More than SLURM's own MAX_NODE_COUNT of 65,533 at most."""
MAX_DIGITS = 9


def expand_nodes(text: str) -> list[str]:
    """The node names in text, in its order: the form of SLURM_STEP_NODELIST (scontrol(1)).

    Raises ValueError for text of any other form.
    """
    items = ITEM.findall(text)
    if ",".join(items) != text or not items:
        raise ValueError(f"{text!r:.99} is not a SLURM node list such as 'n[1-3,7],login'")
    nodes: list[str] = []
    for item in items:
        nodes += _expand_item(item)
        _check_count(len(nodes), text)
    return nodes


def _expand_item(item: str) -> list[str]:
    """The names in one item of text and bracketed ranges; the last range runs fastest."""
    choices = [
        _expand_ranges(match[1]) if match[1] is not None else [match[2]]
        for match in PIECE.finditer(item)
    ]
    _check_count(math.prod(map(len, choices)), item)
    return ["".join(pieces) for pieces in itertools.product(*choices)]


def _check_count(count: int, text: str) -> None:
    """Raise ValueError for more nodes than there are: a few letters can name any number of them."""
    if count > MAX_NODES:
        raise ValueError(f"{text!r:.99} in a list of SLURM is {count} nodes, more than {MAX_NODES}")


def _expand_ranges(text: str) -> list[str]:
    """The numbers of "08-10,3" as ["08", "09", "10", "3"]: zeros are kept."""
    expanded: list[str] = []
    for part in text.split(","):
        match = RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"[{text:.99}] in a SLURM node list is not a range such as [1-3,7]")
        first, last = match[1], match[2] or match[1]
        _check_digits(first, last)
        if int(first) > int(last):
            raise ValueError(f"[{text:.99}] in a SLURM node list is not a range such as [1-3,7]")
        _check_count(len(expanded) + int(last) - int(first) + 1, text)
        expanded += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return expanded


def _check_digits(*numbers: str) -> None:
    for number in numbers:
        if len(number) > MAX_DIGITS:
            raise ValueError(f"{number:.20} in a list of SLURM has {len(number)} digits")


def expand_tasks(text: str) -> list[int]:
    """The number of tasks on each node: the form of SLURM_STEP_TASKS_PER_NODE (srun(1)).

    Raises ValueError for text of any other form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = TASKS.fullmatch(part)
        if match is None:
            raise ValueError(
                f"{text!r:.99} is not a SLURM list of tasks per node such as '2(x3),1'"
            )
        _check_digits(match[1], match[2] or "1")
        _check_count(len(counts) + int(match[2] or 1), text)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
