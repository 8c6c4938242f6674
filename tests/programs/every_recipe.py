"""Every recipe, one after the other, in one launch: torch is imported once and not nine times.

python -m launcher run -n 2 tests/programs/every_recipe.py

In a folder of its own: beside `tests/coordinator`, that would be imported for the package.
"""

import runpy
import sys
from pathlib import Path

import torch

FOLDER = Path(__file__).parents[2] / "examples" / "recipes"
RECIPES = sorted(path for path in FOLDER.glob("*.py") if path.name != "model.py")

if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER))  # as Python does for a script that lies there
    torch.set_num_threads(1)  # the ranks share the processor
    for recipe in RECIPES:
        runpy.run_path(str(recipe), run_name="__main__")
        sys.stdout.write(f"ended: {recipe.stem}\n")  # at once: the ranks share a pipe
        sys.stdout.flush()
