"""Tracebacks in which frames of libraries, and of drumline itself, are counted and not shown."""

from __future__ import annotations

import itertools
import re
import sysconfig

from launcher.system.shadowing import INSTALLED, PACKAGES

# A frame as traceback.format_exception prints it: its line, and the lines of code below.
FRAME = r' +File "[^"\n]+", line \d+, in .*\n(?:    .*\n|  \[Previous line .*\n)*'
FRAMES = re.compile(rf"(?m)(?:^{FRAME})+")
# A traceback that another one follows, for which it is the cause.
CAUSE = re.compile(
    rf"(?m)^Traceback \(most recent call last\):\n(?:{FRAME})+(?:.*\n)*?\n"
    r"(?:The above exception was the direct cause of the following exception"
    r"|During handling of the above exception, another exception occurred):\n\n"
)
PATH = re.compile(r' +File "([^"\n]+)"')
PACKAGE = re.compile(r"/(?:site|dist)-packages/([^/.]+)")
STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def fold(text: str) -> str:
    """The text with the frames of libraries in its tracebacks as "... 12 frames of torch".

    The last frame of a traceback, where the exception was raised, stays unless it is ours. Of the
    causes that went through our frames alone, and say what the last error says, the first stays.
    """
    return FRAMES.sub(lambda match: _fold_frames(match[0]), _without_later_causes(text))


def _without_later_causes(text: str) -> str:
    causes = [match[0] for match in CAUSE.finditer(text)]
    for cause in causes[1:]:
        owners = map(_owner, re.findall(f"(?m)^{FRAME}", cause))
        if {*owners} <= {"drumline", "python"}:
            text = text.replace(cause, "", 1)
    return text


def _fold_frames(block: str) -> str:
    frames = re.findall(f"(?m)^{FRAME}", block)
    owners = [_owner(frame) for frame in frames]
    if owners[-1] != "drumline":
        owners[-1] = ""
    folded: list[str] = []
    for owner, run in itertools.groupby(zip(owners, frames, strict=True), lambda pair: pair[0]):
        texts = [frame for _, frame in run]
        count = f"{len(texts)} frame{'s' * (len(texts) > 1)}"
        folded += [f"  ... {count} of {owner}\n"] if owner else texts
    return "".join(folded)


def _owner(frame: str) -> str:
    """The library that a frame belongs to; "" for the user's program."""
    match = PATH.match(frame)
    assert match is not None
    path = match[1]
    package = PACKAGE.search(path)
    if package is not None and package[1] not in PACKAGES:
        return package[1]
    if any(path.startswith(f"{INSTALLED}/{name}/") for name in PACKAGES):
        return "drumline"
    is_standard = path.startswith((f"{STANDARD_LIBRARY}/", "<frozen "))
    return "python" if is_standard else ""
