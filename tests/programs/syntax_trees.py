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


LOADERS = {"import_module", "__import__", "resolve_name", "find_spec", "modules.get", "modules"}
"""What gives a module by its name, without an import that the syntax shows."""


@functools.cache
def loaded_by_name(tree: ast.Module) -> set[str]:
    """Full names of modules that code loads by text, as `import_module("transformers.utils")`."""
    imports = [node for node in nodes(tree) if isinstance(node, ast.ImportFrom)]
    aliases = {a.asname: a.name for node in imports for a in node.names if a.asname}
    texts: list[ast.AST] = []
    for node in nodes(tree):
        if isinstance(node, ast.Call) and _is_loader(node.func, aliases):
            texts += node.args
        elif isinstance(node, ast.Subscript) and _is_loader(node.value, aliases):
            texts.append(node.slice)
    constants = [text.value for text in texts if isinstance(text, ast.Constant)]
    return {value.replace(":", ".") for value in constants if isinstance(value, str)}


def _is_loader(function: ast.AST, aliases: dict[str, str]) -> bool:
    name = ast.unparse(function)
    name = aliases.get(name, name)
    return any(name == loader or name.endswith(f".{loader}") for loader in LOADERS)
