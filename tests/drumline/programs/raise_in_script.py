"""CHECKPOINT HOW: the script of rank 0 ends by an exception, or by exit code 7 within the model."""

import sys

from tests.drumline.programs.common import load

coor, model = load()
if sys.argv[2] == "exit":
    with model:
        sys.exit(7)
raise KeyError("in the script of rank 0")
