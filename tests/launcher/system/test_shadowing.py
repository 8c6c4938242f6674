"""User files that would be imported in place of our packages."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import launcher
from launcher.external import backend_launcher
from launcher.job import Job, Target
from launcher.system import shadowing

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", shadowing.PACKAGES)
def test_a_module_beside_the_script_is_a_usage_error(command, usage_error, name):
    (command.folder / f"{name}.py").touch()
    text = usage_error("run", "-n", "2", command.script("print('ran')"))
    assert f"{command.folder}/{name}.py would be imported in place of {name!r}" in text


def test_a_package_beside_the_script_is_an_error_of_launch(tmp_path):
    (tmp_path / "coordinator").mkdir()
    (tmp_path / "coordinator" / "__init__.py").touch()
    (tmp_path / "script.py").touch()
    with pytest.raises(launcher.TargetError, match="coordinator would be imported"):
        launcher.launch(tmp_path / "script.py", 2)


def test_a_module_in_the_working_directory_is_an_error_for_a_module_target(
    command, usage_error, monkeypatch
):
    (command.folder / "communicator.py").touch()
    (command.folder / "program.py").touch()
    monkeypatch.syspath_prepend(command.folder)
    monkeypatch.chdir(command.folder)
    assert "communicator.py would be" in usage_error("run", "-n", "2", "-m", "program")


def test_a_module_in_the_working_directory_is_an_error_for_a_backend_launcher(
    tmp_path, monkeypatch
):
    (tmp_path / "launcher.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(launcher.TargetError, match=r"launcher\.py would be"):
        backend_launcher.run(None, Job(Target("script", "script.py")))


def test_folders_without_init_file_and_other_names_are_allowed(command):
    (command.folder / "coordinator").mkdir()
    (command.folder / "launchers.py").touch()
    ended = command.run(
        "run", "-n", "1", command.script("import coordinator as c; print(c.__file__)")
    )
    assert ended.lines(0) == [str(ROOT / "coordinator" / "__init__.py")]


def test_a_checkout_of_ours_is_allowed(tmp_path):
    shadowing.check([ROOT, ROOT / "examples"])
    for name in shadowing.PACKAGES:
        (tmp_path / name).mkdir()
        shutil.copy(ROOT / name / "__init__.py", tmp_path / name)
    shadowing.check([tmp_path])
