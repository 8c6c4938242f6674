"""The syntax trees of the code, parsed once for all tests of names and layers."""

from __future__ import annotations

import ast
import functools
import gc
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAYERS = ("launcher", "coordinator", "communicator", "drumline")


def trees(folders: tuple[str, ...] = LAYERS) -> dict[Path, ast.Module]:
    """The tree of each Python file, by its path below the root."""
    return {path: tree for folder in folders for path, tree in _trees_below(folder).items()}


@functools.cache
def _trees_below(folder: str) -> dict[Path, ast.Module]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    gc.disable()  # it would look at every node again and again
    try:
        return {path.relative_to(ROOT): ast.parse(path.read_text()) for path in paths}
    finally:
        gc.enable()


@functools.cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """All nodes of a tree, as ast.walk."""
    return [*ast.walk(tree)]
