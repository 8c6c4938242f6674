"""CHECKPOINT: the script of rank 0 ends without closing its model."""

from tests.drumline.programs.common import generate, load

coor, model = load()
print(generate(model, 2).shape)
