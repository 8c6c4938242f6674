"""torch finds the backend by itself, at the cost of two small modules."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIRST_GROUP = """
import sys
import torch.distributed as dist
print([name for name in sys.modules if name.split(".")[0] in ("drumline", "communicator")])
dist.init_process_group("drumline", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier()
print(dist.get_backend())
"""
IMPORTED = "['drumline', 'drumline.torch_autoload']"
FAILING = """
import torch.distributed as dist
from drumline.torch_autoload import register
del dist.Backend
register()
"""


@pytest.fixture
def python(tmp_path):
    """Runs a script where the entry points of pyproject.toml are installed."""
    text = (ROOT / "pyproject.toml").read_text()
    (line,) = re.findall(r'^\[project.entry-points."torch.backends"\].*\n(.*)$', text, re.MULTILINE)
    info = tmp_path / "drumline-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: drumline\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[torch.backends]\n{line.replace(chr(34), '')}\n")

    def run(script, **environ):
        path = os.pathsep.join(map(str, (tmp_path, ROOT)))
        return subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": path, **environ},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


def test_a_group_needs_no_import_and_import_torch_loads_no_communicator(python):
    done = python(FIRST_GROUP)
    assert done.stdout.splitlines() == [IMPORTED, "drumline"], done.stderr


@pytest.mark.soak  # what torch does with its own variable, in a second interpreter
def test_where_torch_is_told_to_load_no_backends_the_name_is_unknown(python):
    done = python(FIRST_GROUP, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout.splitlines() == ["[]"]
    assert "drumline" in done.stderr.splitlines()[-1]


def test_registering_raises_nothing_where_torch_has_no_backends(warm):
    done = warm.run("-c", FAILING)
    assert done.returncode == 0, done.stderr
