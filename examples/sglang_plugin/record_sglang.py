"""What the adapter for SGLang relies on, read from the source in SGLang's wheel, not installed.

pip download --no-deps sglang==0.5.23
python record_sglang.py sglang-0.5.23-*.whl drumline_sglang/sglang_signatures.json
"""

import ast
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

STATE = "sglang/srt/distributed/parallel_state.py"
RELIED = (
    ("sglang/srt/platforms/__init__.py", "", "_is_cpu_available"),
    ("sglang/srt/platforms/cpu.py", "CpuSRTPlatform", ""),
    ("sglang/srt/platforms/cpu.py", "CpuDeviceMixin", "get_torch_distributed_backend_str"),
    ("sglang/srt/plugins/__init__.py", "", "PLATFORM_PLUGINS_GROUP"),
    ("sglang/srt/plugins/__init__.py", "", "GENERAL_PLUGINS_GROUP"),
    ("sglang/srt/plugins/hook_registry.py", "HookType", "AROUND"),
    ("sglang/srt/plugins/hook_registry.py", "HookRegistry", "register"),
    (STATE, "GroupCoordinator", "all_reduce"),
    (STATE, "GroupCoordinator", "all_gather"),
    (STATE, "GroupCoordinator", "reduce_scatter_along_dim"),
    (STATE, "GroupCoordinator", "world_size"),
    (STATE, "GroupCoordinator", "cpu_group"),
)


def name_of(item: ast.stmt) -> str:
    if isinstance(item, (ast.FunctionDef, ast.ClassDef)):
        return item.name
    if isinstance(item, ast.Assign):
        return ast.unparse(item.targets[0])
    return ast.unparse(item.target) if isinstance(item, ast.AnnAssign) else ""


def parameters(function: ast.FunctionDef) -> list[str]:
    """As drumline.engines.parameters has them of a function that is there."""
    arguments = function.args
    names = [item.arg for item in (*arguments.args, *arguments.kwonlyargs)]
    positional = [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults
    values = [*positional, *arguments.kw_defaults]
    return [
        name if value is None else f"{name}={plain(value)}"
        for name, value in zip(names, values, strict=True)
    ]


def plain(value: ast.expr) -> str:
    try:
        return repr(ast.literal_eval(value))
    except ValueError:
        return "..."


def fact(item: ast.stmt) -> object:
    """A class's bases, a constant's value, an attribute's type."""
    if isinstance(item, ast.ClassDef):
        return [ast.unparse(base) for base in item.bases]
    if isinstance(item, ast.AnnAssign):
        return ast.unparse(item.annotation)
    return ast.literal_eval(item.value)


def recorded(wheel: Path) -> dict[str, object]:
    """By class or module its functions; what else the adapter takes for granted is in "facts"."""
    record: dict[str, Any] = {"version": wheel.name.split("-")[1], "facts": {}}
    with zipfile.ZipFile(wheel) as archive:
        for file, *names in RELIED:
            item = ast.parse(archive.read(file))
            for name in filter(None, names):
                item = next(inner for inner in item.body if name_of(inner) == name)
            module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            *owner, name = [module, *filter(None, names)]
            if isinstance(item, ast.FunctionDef):
                record.setdefault(".".join(owner), {})[name] = parameters(item)
            else:
                record["facts"][".".join([*owner, name])] = fact(item)
    return record


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(recorded(Path(sys.argv[1])), indent=1) + "\n")
