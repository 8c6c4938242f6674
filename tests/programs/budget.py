"""The size of each folder of the product beside its ceiling, for people and for CI.

python -m tests.programs.budget            # the table; 1 if a folder is over its ceiling
python -m tests.programs.budget --write    # the sizes become the ceilings

Comments, blank lines and text that begins a line, as docstrings do, do not count. Tokens do as well
as lines, so that density does not pass for smallness.
"""

from __future__ import annotations

import functools
import io
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / ".ci" / "budget.txt"
FOLDERS = ("launcher", "coordinator", "communicator", "drumline", "csrc")
NATIVE_SUFFIXES = (".cpp", ".h", ".cu", ".cuh")
LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)
# An f-string is one token before Python 3.12, and from there on one for each of its parts.
FSTRING_START, FSTRING_END = (getattr(tokenize, f"FSTRING_{end}", None) for end in ("START", "END"))
NATIVE_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
NATIVE_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|\w+|[^\w\s]')

Size = tuple[int, int]
"""Lines of code, and tokens."""


def python_size(text: str) -> Size:
    lines: set[int] = set()
    num_tokens, begins, depth, counts = 0, True, 0, True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in LAYOUT:
            begins = begins or token.type != tokenize.COMMENT
            continue
        depth -= token.type == FSTRING_END
        if depth == 0 and token.type != FSTRING_END:
            counts = not (begins and token.type in (tokenize.STRING, FSTRING_START))
            num_tokens += counts
        depth += token.type == FSTRING_START
        begins = False
        if counts:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines), num_tokens


def native_size(text: str) -> Size:
    code = NATIVE_COMMENT.sub("", text)
    return sum(1 for line in code.splitlines() if line.strip()), len(NATIVE_TOKEN.findall(code))


@functools.cache
def sizes() -> dict[str, Size]:
    """By folder, the size of the files that lie in it itself."""
    code: dict[str, Size] = {}
    for path in sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*")):
        if path.suffix == ".py":
            size = python_size(path.read_text())
        elif path.suffix in NATIVE_SUFFIXES:
            size = native_size(path.read_text())
        else:
            continue
        folder = str(path.parent.relative_to(ROOT))
        lines, tokens = code.get(folder, (0, 0))
        code[folder] = (lines + size[0], tokens + size[1])
    return code


def ceilings() -> dict[str, Size]:
    rows = [line.split() for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    return {folder: (int(lines), int(tokens)) for folder, lines, tokens in rows}


def over_budget() -> list[str]:
    """A line for each folder that is larger than its ceiling, or has none."""
    allowed = ceilings()
    return [
        f"{folder} has {lines} lines and {tokens} tokens of code, and may have "
        f"{allowed.get(folder, (0, 0))[0]} and {allowed.get(folder, (0, 0))[1]}"
        for folder, (lines, tokens) in sizes().items()
        if lines > allowed.get(folder, (0, 0))[0] or tokens > allowed.get(folder, (0, 0))[1]
    ]


def _totals(code: dict[str, Size]) -> dict[str, Size]:
    kinds = {"Python": lambda name: not name.startswith("csrc"), "C++": lambda name: True}
    totals, rest = {}, dict(code)
    for kind, belongs in kinds.items():
        own = [rest.pop(name) for name in list(rest) if belongs(name)]
        totals[kind] = (sum(size[0] for size in own), sum(size[1] for size in own))
    return totals


def main() -> int:
    code = sizes()
    if "--write" in sys.argv[1:]:
        rows = [f"{folder} {lines} {tokens}\n" for folder, (lines, tokens) in code.items()]
        header = "# folder, most lines of code in it, most tokens; see tests/programs/budget.py\n"
        TABLE.write_text(header + "".join(rows))
    allowed = ceilings()
    print(f"{'folder':40} {'lines':>7} {'most':>7} {'tokens':>8} {'most':>8}")
    for folder, (lines, tokens) in code.items():
        most = allowed.get(folder, (0, 0))
        print(f"{folder:40} {lines:7} {most[0]:7} {tokens:8} {most[1]:8}")
    for (kind, size), most in zip(_totals(code).items(), _totals(allowed).values(), strict=True):
        print(f"{kind:40} {size[0]:7} {most[0]:7} {size[1]:8} {most[1]:8}")
    problems = over_budget()
    print("\n".join(problems))
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
