"""Automatic preloading: libraries found in the script, and what makes the launcher not do it."""

from __future__ import annotations

import json
import sys

import pytest

from launcher.job import Job, Target
from launcher.local import auto_preload


def chosen(folder, script, kind="script", files=(), **options):
    for name, text in dict(files).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    path = folder / "train.py"
    path.write_text(script)
    name = str(path) if kind == "script" else "train"
    return auto_preload.choose(Job(Target(kind, name), **options))


def modules(*arguments, **options):
    return [module for module, _ in chosen(*arguments, **options).imports]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("import os, torch", ["torch"]),
        ("import torch.nn as nn, json", ["torch.nn"]),
        ("from torch import nn\nimport numpy as np", ["torch", "numpy"]),
        ("from torch.nn.functional import relu", ["torch.nn.functional"]),
        ("try:\n    import torch\nexcept ImportError:\n    torch = None", ["torch"]),
        ("if __name__ == '__main__':\n    import torch", ["torch"]),
        ("if input():\n    import torch", []),
        ("def main():\n    import torch", []),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", []),
        ("import json, no_such_library", []),
        ("import torch; (", []),
        ("x = '\0'", []),
        ("", []),
    ],
)
def test_imports_at_the_top_are_found(tmp_path, script, expected):
    assert modules(tmp_path, script) == expected


def test_names_are_those_that_the_script_imports_or_reads_of_a_lazy_library(tmp_path):
    script = "from torch import nn\nimport drumline\ndef f(): drumline.load(nn.Linear)\n"
    assert chosen(tmp_path, script).imports == [("torch", ("nn",)), ("drumline", ("load",))]


def test_warnings_of_what_is_read_are_left_to_the_ranks(tmp_path, recwarn):
    """Those of the launcher were of a file <unknown>."""
    assert modules(tmp_path, "import torch\nx = '\\d'\n") == ["torch"]
    assert not recwarn.list


def test_modules_of_the_user_are_read_and_not_imported(tmp_path):
    files = {
        "package/__init__.py": "from .inner import x\nraise SystemExit('was run')",
        "package/inner.py": "import torch\nfrom . import other\nif __name__ == '__main__':\n"
        "    import transformers",
        "package/other.py": "from .inner import x\nimport numpy",
    }
    before = set(sys.modules)
    assert modules(tmp_path, "import package.inner", files=files) == ["torch", "numpy"]
    assert not {"package", "package.inner"} & set(sys.modules) - before


@pytest.mark.parametrize(
    "line",
    [
        "os.environ['OMP_NUM_THREADS'] = '1'",
        "os.environ.setdefault('A', 'b')",
        "os.environ |= {'A': 'b'}",
        "del os.environ['A']",
        "os.putenv('A', 'b')",
        "environ.update(a='b')",
        "change(os.environ)",
        "if input():\n    os.environ['A'] = 'b'",
        "try:\n    x()\nexcept OSError:\n    os.environ['A'] = 'b'",
        "with patch.dict(os.environ): pass",
        "def f():\n    os.environ['A'] = 'b'\nf()",
        "sys.path.insert(0, 'elsewhere')",
        "sys.modules['torch'] = None",
        "import dotenv",
        "import changing",
    ],
)
def test_nothing_is_preloaded_after_a_change_of_the_environment(tmp_path, line):
    files = {"changing.py": "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'"}
    preload = chosen(tmp_path, f"import numpy\n{line}\nimport torch", files=files)
    assert preload.imports == [("numpy", ())]
    assert "changes the environment of later imports" in preload.note or "dotenv" in preload.note


@pytest.mark.parametrize(
    "line",
    [
        "rank = os.environ['RANK']",
        "x = os.environ.get('A', 'b')",
        "if 'A' in os.environ: pass",
        "this = sys.modules[__name__]",
        "def f():\n    os.environ['A'] = 'b'",
    ],
)
def test_reading_the_environment_changes_nothing(tmp_path, line):
    assert modules(tmp_path, f"{line}\nimport torch") == ["torch"]


def test_module_of_the_user_with_the_name_of_a_library_is_not_preloaded(tmp_path):
    files = {"torch.py": "raise SystemExit('was run')", "numpy/__init__.py": ""}
    assert modules(tmp_path, "import torch, numpy, safetensors", files=files) == ["safetensors"]


def test_a_package_below_one_without_init_is_read(tmp_path):
    """It ended the launch with a KeyError: such a package asks for its parent in sys.modules."""
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    files = {"outer/inner/deep.py": "import numpy"}
    assert modules(tmp_path, "from outer.inner import deep", files=files) == ["numpy"]


def test_module_of_the_user_is_found_as_python_m_finds_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    assert modules(tmp_path, "if __name__ == '__main__':\n    import torch", "module") == ["torch"]


@pytest.mark.parametrize(
    ("variables", "options", "note"),
    [
        ({"LD_PRELOAD": "libx.so"}, {}, "LD_PRELOAD"),
        ({"OMP_PROC_BIND": "true"}, {"bind": True}, "OMP_PROC_BIND"),
        ({}, {"nprocs": 1}, "one rank"),
    ],
)
def test_launches_for_which_nothing_is_preloaded(tmp_path, monkeypatch, variables, options, note):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    preload = chosen(tmp_path, "import torch", **options)
    assert preload.imports == [] and note in preload.note


# The launch itself. `safetensors` stands for every library: it is small.


def shown_modules(command, *options, script=None, env=None):
    """Of each rank: was safetensors imported before its first line."""
    script = script or command.script("import sys\nprint('safetensors' in sys.modules)\n" + IMPORT)
    ended = command.run("run", "-n", "2", *options, script, env=env or {})
    assert ended.code == 0, ended.err
    return ended.lines(0) + ended.lines(1)


IMPORT = "import safetensors\n"


def test_library_is_imported_before_the_fork_unless_it_is_switched_off(command):
    assert shown_modules(command) == ["True", "True"]
    assert shown_modules(command, "--preload", "") == ["False", "False"]


def test_dry_run_says_what_is_preloaded_and_why(command):
    script = command.script("import safetensors\nimport os\nos.environ['A'] = 'b'\nimport torch")
    lines = command.run("run", "-n", "2", "--dry-run", script).out.splitlines()
    assert "; imported once, before they are forked: safetensors (" in lines[0]
    assert f"{script}:3 changes the environment" in lines[0] and json.loads(lines[1])


@pytest.mark.parametrize(
    "trouble",
    [
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()",
        "from launcher.system import linux\nlinux.holds_accelerator = lambda: True",
        "raise ImportError('broken')",
        "raise SystemExit(3)",
    ],
    ids=["a thread", "an accelerator", "an error", "an exit"],
)
def test_where_a_library_cannot_be_preloaded_the_ranks_import_for_themselves(command, trouble):
    """The library misbehaves in the fork server alone."""
    package = command.folder / "elsewhere" / "safetensors"
    package.mkdir(parents=True)
    lines = "".join(f"    {line}\n" for line in trouble.splitlines())
    is_server = "open('/proc/self/comm').read() == 'launch-server\\n'"
    (package / "__init__.py").write_text(f"if {is_server}:\n{lines}")
    path = {"PYTHONPATH": f"{package.parent}:{auto_preload.__file__.rpartition('/launcher/')[0]}"}
    assert shown_modules(command, env=path) == ["False", "False"]


def test_ranks_do_not_share_the_random_numbers_of_a_preloaded_numpy(command):
    script = command.script("import numpy\nprint(numpy.random.random())")
    ended = command.run("run", "-n", "2", "--preload", "numpy.random", script)
    assert ended.lines(0) != ended.lines(1), ended.err


def test_preloaded_triton_is_freed_at_the_end_of_a_rank(command):
    """Its bindings print a page about leaked memory otherwise, at the end of the README's demo."""
    cycle = "class A:\n    def __del__(self):\n        print('freed', flush=True)\n"
    cycle += "\na = A()\na.itself = a\n"
    (command.folder / "triton.py").write_text(cycle)
    path = {"PYTHONPATH": f"{command.folder}:{auto_preload.__file__.rpartition('/launcher/')[0]}"}
    ended = command.run("run", "-n", "2", "--preload", "triton", command.script(""), env=path)
    assert ended.lines(0) == ended.lines(1) == ["freed"], ended.err
