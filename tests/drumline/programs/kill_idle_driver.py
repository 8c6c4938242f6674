"""CHECKPOINT: rank 0 is killed while nobody calls its model."""

import os
import signal
import time

from tests.drumline.programs.common import generate, load

coor, model = load()
generate(model, 2)
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
