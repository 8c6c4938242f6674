"""Every script of some folders, one after the other, in one launch: torch is imported once.

python -m launcher run -n 2 tests/programs/every_script.py examples/recipes

In a folder of its own: beside `tests/coordinator`, that would be imported for the package.
"""

import runpy
import sys
from pathlib import Path

import torch

HELPERS = ("model.py",)  # what scripts import

if __name__ == "__main__":
    folders = [Path(folder).resolve() for folder in sys.argv[1:]]
    del sys.argv[1:]
    sys.path[:0] = map(str, folders)  # as Python does for a script that lies there
    torch.set_num_threads(1)  # the ranks share the processor
    scripts = [path for folder in folders for path in sorted(folder.glob("*.py"))]
    for script in (path for path in scripts if path.name not in HELPERS):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:  # how a rank ends that has served a model
            assert not end.code, end
        sys.stdout.write(f"ended: {script.stem}\n")  # at once: the ranks share a pipe
        sys.stdout.flush()
