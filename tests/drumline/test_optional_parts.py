"""The core needs none of its optional parts: it works in a tree from which they were deleted."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs.syntax_trees import LAYERS, ROOT, nodes, trees

OPTIONAL = (
    "communicator/backends/nccl/cupy.py",
    "communicator/torch_interop",
    "drumline/compile_once",
    "drumline/engines",
    "drumline/serving",
    "drumline/weight_formats",
    "launcher/backends/ray",
)

OPENERS = {
    "communicator/torch_interop": {
        "communicator/compile.py",
        "communicator/torch_backend.py",
    },
}
"""Modules that lead to an optional part, when a name of it is asked for."""

JOB = """
import sys, torch, drumline
from communicator import Communicator
from coordinator import Coordinator
path, prompt = sys.argv[1], torch.tensor([[5, 6]])
with Coordinator() as coor, Communicator(coor) as comm:
    assert comm.allreduce(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
with drumline.load(path, tp=2) as model:
    print("tokens", model.generate(prompt, max_new_tokens=4, do_sample=False).tolist())
with drumline.load(path, device_map="auto") as model:  # rank 1 serves in here, and leaves
    print("tokens", model.generate(prompt, max_new_tokens=4, do_sample=False).tolist())
"""


def _imported(path: Path) -> set[str]:
    """The modules that a file imports anywhere, type checkers' imports included."""
    names: set[str] = set()
    for node in nodes(trees()[path]):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("part", OPTIONAL)
def test_nothing_of_the_core_imports_an_optional_part(part):
    module = part.removesuffix(".py").replace("/", ".")
    importers = {
        str(path)
        for path in trees()
        if not str(path).startswith(part)
        if any(f"{name}.".startswith(f"{module}.") for name in _imported(path))
    }
    assert importers == OPENERS.get(part, set())


def _copy_without(parts: tuple[str, ...], folder: Path) -> None:
    """The product in another folder, but for these parts."""
    for layer in LAYERS:
        shutil.copytree(ROOT / layer, folder / layer)
    for part in parts:
        assert (folder / part).exists()
        if (folder / part).is_dir():
            shutil.rmtree(folder / part)
        else:
            (folder / part).unlink()


def _run_job(folder: Path, checkpoint: Path) -> str:
    script = folder / "job.py"
    script.write_text(JOB)
    launch = [sys.executable, "-m", "launcher", "run", "-n", "2"]
    ended = subprocess.run(
        [*launch, str(script), str(checkpoint)],
        cwd=folder,
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def test_the_main_job_runs_without_any_optional_part(tmp_path, checkpoints):
    _, path = checkpoints.llama()
    _copy_without(OPTIONAL, tmp_path)
    assert _run_job(tmp_path, path).count("tokens") == 3  # both ranks of tp, one master


@pytest.mark.soak
@pytest.mark.parametrize("part", OPTIONAL)
def test_the_main_job_runs_without_one_optional_part(tmp_path, checkpoints, part):
    _, path = checkpoints.llama()
    _copy_without((part,), tmp_path)
    assert _run_job(tmp_path, path).count("tokens") == 3
