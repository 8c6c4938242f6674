"""What the adapter for SGLang relies on, read from the source in SGLang's wheel, not installed.

pip download --no-deps sglang==0.5.23
python record_sglang.py sglang-0.5.23-*.whl ../drumline/engines/sglang_signatures.json
"""

import ast
import json
import sys
import zipfile
from pathlib import Path

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


def described(item: ast.stmt) -> object:
    """A function's parameters, a class's bases, a constant's value, an attribute's type."""
    if isinstance(item, ast.FunctionDef):
        return [argument.arg for argument in (*item.args.args, *item.args.kwonlyargs)]
    if isinstance(item, ast.ClassDef):
        return [ast.unparse(base) for base in item.bases]
    if isinstance(item, ast.AnnAssign):
        return ast.unparse(item.annotation)
    return ast.literal_eval(item.value)


def recorded(wheel: Path) -> dict[str, object]:
    record: dict[str, object] = {"version": wheel.name.split("-")[1]}
    with zipfile.ZipFile(wheel) as archive:
        for file, *names in RELIED:
            item = ast.parse(archive.read(file))
            for name in filter(None, names):
                item = next(inner for inner in item.body if name_of(inner) == name)
            module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            record[".".join([module, *filter(None, names)])] = described(item)
    return record


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(recorded(Path(sys.argv[1])), indent=1) + "\n")
