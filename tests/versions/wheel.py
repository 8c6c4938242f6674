"""The wheel as somebody without a compiler installs it, on each Python.

    python -m tests.versions.wheel WHEEL FOLDER PYTHON...

In an empty environment, beside a transformers older than drumline.load() needs, as an engine has
it: ranks start and sum, over the Communicator and over torch.distributed, whose backend is Python
there.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.versions import environments

OLDER = "transformers==4.57.1"
PROCESS_GROUP = """
import sys, torch, torch.distributed as dist
dist.init_process_group("drumline")
total = torch.ones(3)
dist.all_reduce(total)
sys.stdout.write(f"sum {total.sum().item():g}\\n")
dist.destroy_process_group()
"""


def check(wheel: Path, folder: Path, version: str) -> None:
    """Raises AssertionError with what was printed, where something is not as it must be."""
    python = folder / "bin" / "python"
    interpreter = environments.interpreter(version)
    uv = environments.UV
    environments.run(uv, "venv", "--quiet", "--clear", "--python", interpreter, folder)
    environments.install(python, "--no-deps", "torch>=2.11,<2.16")
    environments.leave_out_cuda(python)
    environments.install(python, OLDER, wheel)
    (folder / "process_group.py").write_text(PROCESS_GROUP)
    sample = environments.ROOT / "examples" / "02_allreduce.py"
    (folder / sample.name).write_text(sample.read_text())
    for program, expected in ((sample.name, "rank 1"), ("process_group.py", "sum 6")):
        done = subprocess.run(
            [python.parent / "drumline", "run", "-n", "2", program],
            cwd=folder,
            env={"PATH": str(python.parent), "HOME": str(folder)},  # no compiler, no cache
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        print(done.stdout, end="", flush=True)
        assert done.returncode == 0 and expected in done.stdout, (version, program)
    assert done.stdout.count("no C++ compiler is found") == 2, "each rank is to say it once"


def main() -> None:
    wheel, folder = map(Path, sys.argv[1:3])
    for version in sys.argv[3:]:
        print(f"== checking the wheel on Python {version}, without a compiler", flush=True)
        check(wheel.absolute(), folder.absolute() / f"clean-{version}", version)


if __name__ == "__main__":
    main()
