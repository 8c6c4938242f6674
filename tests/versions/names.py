"""The names of libraries that the contact modules take: what each looks like in what is installed.

Nothing of drumline is imported, for a contact module may fail to import where a name is gone.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CONTACT = [ROOT / "coordinator/torch_private.py", *(ROOT / "drumline/contact").glob("*_api.py")]
LIBRARIES = ("torch", "transformers", "accelerate", "safetensors", "tokenizers", "uvicorn", "h11")
UNKNOWN = "(...)"
"""The signature of what is compiled."""
Name = dict[str, Any]


def look() -> dict[str, Any]:
    """The versions that are installed, and each name with the place that takes it."""
    return {
        "versions": {library: metadata.version(library) for library in LIBRARIES},
        "names": {name: {**_describe(_import(name)), "place": place} for name, place in taken()},
        "options of generate()": _options(),
    }


def taken() -> Iterator[tuple[str, str]]:
    """Each name and the place that takes it."""
    for path in sorted(CONTACT):
        for node in ast.walk(ast.parse(path.read_text())):
            place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
                yield from ((f"{node.module}.{alias.name}", place) for alias in node.names)
            elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
                name = ast.unparse(node)
                if "._" in name and re.fullmatch(r"[\w.]+", name):
                    yield name, place


def _import(name: str) -> Any:
    """What a full name is bound to; KeyError itself if to nothing."""
    first, *rest = name.split(".")
    found: Any = importlib.import_module(first)
    for index, part in enumerate(rest):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(".".join([first, *rest[: index + 1]]))
            except ImportError:
                return KeyError
    return found


def _describe(found: Any) -> Name:
    if found is KeyError:
        return {"gone": True}
    if inspect.isclass(found):
        own = {name: value for name, value in vars(found).items() if inspect.isroutine(value)}
        methods = {name: _signature(value) for name, value in sorted(own.items())}
        return {"methods": methods, "source": _digest(found)}
    if inspect.isroutine(found):
        return {"signature": _signature(found), "source": _digest(found)}
    return {"kind": type(found).__name__}


def _signature(found: Any) -> str:
    try:
        text = str(inspect.signature(getattr(found, "__func__", found)))
    except (TypeError, ValueError):
        return UNKNOWN
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _digest(found: Any) -> str:
    """Of the source without docstrings and comments; empty for what is compiled."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(found)))
    except (OSError, TypeError, SyntaxError):
        return ""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:12]


def _options() -> list[str]:
    config = importlib.import_module("transformers").GenerationConfig()
    return sorted(name for name in vars(config) if not name.startswith("_"))


if __name__ == "__main__":
    json.dump(look(), sys.stdout)
