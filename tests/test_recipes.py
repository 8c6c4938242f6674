"""Every recipe proves on the CPU what it says, on one, two and four ranks, however started.

Here as threads; under torchrun and our own launcher with the examples: test_examples.py; under
MPICH, Open MPI, srun and Ray beside the other tests of these: tests/launcher/backends/test_mpi.py,
test_slurm.py and test_ray.py.
"""

import sys
import types
from pathlib import Path

import pytest
import torch

import launcher

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "recipes"
RECIPES = sorted(path for path in FOLDER.glob("*.py") if path.name != "model.py")
TWO_SCREENS = 120
OWN_PROCESSES = ("fsdp", "compile_once")
"""torch has one default process group per process, and loads one exported program at a time."""


@pytest.fixture
def shared(monkeypatch):
    """`from model import ...` finds the model of the recipes."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    sys.modules.pop("model", None)


def run_as_threads(path, nprocs):
    """The recipe as it stands, on ranks that are threads of this process."""
    code = compile(path.read_text(), str(path), "exec")

    def rank():
        torch.set_num_threads(1)
        name = f"recipe_{path.stem}"
        module = types.ModuleType(name)
        sys.modules[name] = module
        exec(code, module.__dict__)

    launcher.launch(rank, nprocs=nprocs, launcher="threads", timeout_s=60)


THREADED = [path for path in RECIPES if path.stem not in OWN_PROCESSES]


@pytest.mark.parametrize("nprocs", [1, 2, 4])
@pytest.mark.parametrize("path", THREADED, ids=lambda path: path.stem)
def test_a_recipe_proves_what_it_says(shared, capfd, path, nprocs):
    run_as_threads(path, nprocs)
    assert capfd.readouterr().out.strip(), "it proves nothing aloud"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_two_screens_says_how_to_run_it_and_is_in_the_readme(path):
    text = path.read_text()
    assert len(text.splitlines()) <= TWO_SCREENS
    assert f"examples/recipes/{path.name}" in text.split('"""')[1]
    assert f"`{path.name}`" in (FOLDER / "README.md").read_text()
