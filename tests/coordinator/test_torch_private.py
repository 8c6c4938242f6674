"""Private names of torch are in one module; a table says of each why it is taken."""

import ast
from pathlib import Path

import torch
from torch import fx, nn
from torch.distributed import Backend, ProcessGroup, ProcessGroupGloo, Work
from torch.distributed.tensor import DTensor
from torch.export import ExportedProgram

from coordinator import torch_private
from tests.programs.syntax_trees import loaded_by_name, nodes, trees
from tests.versions.taken_names import RELEASES, TORCH

CONTACT = Path("coordinator/torch_private.py")
OBJECTS = (
    *(
        torch.Tensor,
        torch.UntypedStorage,
        DTensor,
        nn.Module,
        nn.Module(),
        fx.Graph,
        fx.GraphModule,
    ),
    *(torch.ops.aten.add.Tensor, ExportedProgram, ProcessGroup, Backend, Work),
    *(ProcessGroupGloo, ProcessGroupGloo._Options, ProcessGroupGloo._Options()),
)
"""What torch gives to drumline, whose private attributes are not to be touched."""

ASKED_FOR = {"_initialize_hook", "_set_group_name", "_set_group_desc"}
"""Methods that torch calls or asks for, so that a class of ours which has one overrides it."""

NOT_ON_OBJECTS = {"_torchdynamo_orig_callable", "_enter_autocast", "_spec", *ASKED_FOR}
"""Private names of torch that the objects above do not have."""


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def own_names():
    """What classes of drumline have themselves: `self._store` is not torch's there."""
    names = set()
    for path, tree in trees().items():
        if path != CONTACT:
            for node in nodes(tree):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    names |= {node.attr} if ast.unparse(node.value) == "self" else set()
                elif isinstance(node, ast.ClassDef):
                    fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
                    names |= {ast.unparse(item.target) for item in fields}
                    names |= {item.name for item in methods(node)} - ASKED_FOR
    return names


def methods(node):
    """The functions in the body of a class; none of anything else."""
    body = node.body if isinstance(node, ast.ClassDef) else []
    return [item for item in body if isinstance(item, ast.FunctionDef)]


def torch_names(tree):
    """What a module calls torch, a module of it, or something out of one."""
    names = set()
    for node in nodes(tree):
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if isinstance(node, ast.Import):
            of_torch = [alias for alias in node.names if alias.name.split(".")[0] == "torch"]
            names |= {alias.asname or "torch" for alias in of_torch}
        elif module.split(".")[0] == "torch":
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def root(node):
    while isinstance(node, (ast.Attribute, ast.Call)):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id if isinstance(node, ast.Name) else ""


def private_names(tree, torchs):
    """Line and name of what a module takes of torch by private names, as code or as text."""
    roots = torch_names(tree)
    loaded = [name.split(".") for name in loaded_by_name(tree)]
    taken = [
        (0, part) for name in loaded if name[0] == "torch" for part in name if is_private(part)
    ]
    for node in nodes(tree):
        names = []
        if isinstance(node, ast.Attribute):
            is_torchs = node.attr in torchs or root(node) in roots
            names = [node.attr] if is_torchs else []
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [
                part for alias in node.names for part in f"{node.module}.{alias.name}".split(".")
            ]
        elif isinstance(node, ast.Import):
            of_torch = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
            names = [part for name in of_torch for part in name.split(".")]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            item, *rest = node.args
            texts = [text.value for text in rest if isinstance(text, ast.Constant)]
            names = [text for text in texts if isinstance(text, str) and root(item) in roots]
        elif isinstance(node, ast.Constant) and node.value in torchs:
            names = [node.value]
        elif isinstance(node, ast.ClassDef):
            names = [item.name for item in methods(node) if item.name in torchs]
        taken += [(getattr(node, "lineno", 0), name) for name in names if is_private(name)]
    return taken


def names_of_torch():
    names = {name for item in OBJECTS for name in dir(item)} | NOT_ON_OBJECTS
    return {name for name in names | set(vars(nn.Module())) if is_private(name)}


def test_one_module_touches_private_names_of_torch():
    """They were in 18 files, so a release of torch had to be read against all of them."""
    torchs = names_of_torch() - own_names()
    assert {"_parameters", "_cdata", "_nnz", "_schema", "_spec", "_get_backend"} <= torchs
    places = [
        f"{path}:{line}: {name}"
        for path, tree in trees().items()
        if path != CONTACT
        for line, name in private_names(tree, torchs)
    ]
    assert places == []


def test_private_names_are_seen_as_text_too():
    for code in ("import torch\nx = getattr(torch, '_C')", "x = import_module('torch._dynamo')"):
        assert private_names(ast.parse(code), set())


def test_each_private_name_has_a_reason_and_the_releases_that_were_read():
    tree = trees()[CONTACT]
    taken = {name for _, name in private_names(tree, names_of_torch())}
    assert taken - {"_names"} == set(TORCH)  # that one is its own
    for name, reason in TORCH.items():
        assert len(reason) > 10 or reason.startswith("as _"), name
    assert all(release.startswith("2.1") for release in RELEASES["torch"])


def test_what_every_token_calls_is_torchs_own_function():
    """A function of ours around it would be paid for with each tensor of each layer."""
    for name in ("plain_functions", "is_transformed", "make_wrapper", "tree_map", "is_fake"):
        assert getattr(torch_private, name).__module__ != torch_private.__name__
