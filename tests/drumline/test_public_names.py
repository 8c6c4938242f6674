"""`import drumline` is instant: each public name imports its module when it is first used."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import drumline
import launcher

ROOT = Path(__file__).parents[2]


def test_importing_drumline_imports_no_other_package():
    """Neither torch and transformers nor the layers below."""
    body = (
        "import sys\nbefore = set(sys.modules)\nimport drumline\n"
        "imported = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(imported - set(sys.stdlib_module_names)))"
    )
    command = [sys.executable, "-c", body]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "['drumline']"


def test_every_public_name_is_that_of_its_module():
    for name, module in launcher.public_names("drumline").items():
        assert getattr(drumline, name) is getattr(importlib.import_module(module), name)


def test_all_and_dir_have_the_names_of_the_stub():
    """A type checker sees the stub alone."""
    names = {"load", "dispatch", "plan", "Coordinator", "launch", "PlanError", "hoist"}
    assert names <= set(drumline.__all__) <= set(dir(drumline))
    scope: dict[str, object] = {}
    exec("from drumline import *", scope)
    assert set(drumline.__all__) <= set(scope)


def test_names_of_the_lower_layers_are_the_same_objects():
    from communicator import Communicator
    from coordinator import Coordinator
    from drumline import launch
    from launcher import launch as launcher_launch

    assert drumline.Coordinator is Coordinator and drumline.Communicator is Communicator
    assert launch is launcher_launch


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'laod'"):
        drumline.laod  # noqa: B018


@pytest.mark.parametrize("name", ["launcher", "coordinator", "communicator", "drumline"])
def test_every_package_has_the_same_version(name):
    assert importlib.import_module(name).__version__ == drumline.__version__ != ""
