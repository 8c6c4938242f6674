"""SLURM's compressed lists: of nodes, and of tasks per node.

expand_nodes("n[1-3,7]")    # ["n1", "n2", "n3", "n7"]
expand_tasks("2(x3),1")     # [2, 2, 2, 1]
"""

from __future__ import annotations

import itertools
import re

ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
TASKS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def expand_nodes(text: str) -> list[str]:
    """The node names in text, in its order: the form of SLURM_STEP_NODELIST (scontrol(1)).

    Raises ValueError for text of any other form.
    """
    items = ITEM.findall(text)
    if ",".join(items) != text or not items:
        raise ValueError(f"{text!r} is not a SLURM node list such as 'n[1-3,7],login'")
    return [name for item in items for name in _expand_item(item)]


def _expand_item(item: str) -> list[str]:
    """The names in one item of text and bracketed ranges; the last range runs fastest."""
    choices = [
        _expand_ranges(match[1]) if match[1] is not None else [match[2]]
        for match in PIECE.finditer(item)
    ]
    return ["".join(pieces) for pieces in itertools.product(*choices)]


def _expand_ranges(text: str) -> list[str]:
    """The numbers of "08-10,3" as ["08", "09", "10", "3"]: zeros are kept."""
    expanded = []
    for part in text.split(","):
        match = RANGE.fullmatch(part)
        if match is None or (match[2] is not None and int(match[1]) > int(match[2])):
            raise ValueError(f"[{text}] in a SLURM node list is not a range such as [1-3,7]")
        first, last = match[1], match[2] or match[1]
        expanded += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return expanded


def expand_tasks(text: str) -> list[int]:
    """The number of tasks on each node: the form of SLURM_STEP_TASKS_PER_NODE (srun(1)).

    Raises ValueError for text of any other form.
    """
    counts = []
    for part in text.split(","):
        match = TASKS.fullmatch(part)
        if match is None:
            raise ValueError(f"{text!r} is not a SLURM list of tasks per node such as '2(x3),1'")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
