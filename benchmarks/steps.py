"""How the steps of the last run ended, and how long each took: as long as the next one will take.

steps.note(folder, "startup", steps.WELL, 301.2)
print(steps.expected(["startup", "scale"], folder))
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.table import commit

WELL = "well"
COLUMNS = ("step", "ended", "seconds", "commit")


def note(folder: Path, name: str, how: str, seconds: float) -> None:
    """Keep how a step ended, in the place of its last time."""
    known = last(folder)
    known[name] = {"step": name, "ended": how, "seconds": round(seconds), "commit": commit()}
    folder.mkdir(parents=True, exist_ok=True)
    path(folder).write_text("".join(json.dumps(step) + "\n" for step in known.values()))


def last(folder: Path) -> dict[str, dict[str, Any]]:
    lines = path(folder).read_text().splitlines() if path(folder).exists() else []
    return {step["step"]: step for step in map(json.loads, lines)}


def path(folder: Path) -> Path:
    return folder / "steps.jsonl"


def expected(names: list[str], folder: Path) -> str:
    """How long these steps will take, as far as the last run tells."""
    known = last(folder)
    seconds = sum(known[name]["seconds"] for name in names if name in known)
    new = [name for name in names if name not in known]
    told = (
        f"this takes about {max(1, round(seconds / 60))} min, as the last time" if seconds else ""
    )
    unknown = f"how long {', '.join(new)} will take is not known: minutes each" if new else ""
    return "; ".join(filter(None, (told, unknown))) or "a trial: this takes a few minutes"


def page(folder: Path) -> str:
    """The table of them, and above it, in words, those that failed."""
    known = last(folder).values()
    if not known:
        return ""
    failed = [f"`{step['step']}` {step['ended']}" for step in known if step["ended"] != WELL]
    warning = f"**Not whole:** {', '.join(failed)}.\n\n" if failed else ""
    rows = ["| " + " | ".join(str(step[name]) for name in COLUMNS) + " |" for step in known]
    head = ["| " + " | ".join(COLUMNS) + " |", "|---|---|---:|---|"]
    return warning + "\n".join([*head, *rows, ""])
