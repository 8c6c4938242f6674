"""CHECKPOINT VICTIM: a rank of a tensor-parallel model suspends itself; the others exit 0 if
PeerLost came in time."""

import os
import signal
import sys
import time

import drumline
from coordinator import Coordinator
from tests.drumline.programs.common import generate

coor = Coordinator()
model = drumline.load(sys.argv[1], coor=coor, tp=2)
generate(model, 2)
if coor.rank == int(sys.argv[2]):
    os.kill(os.getpid(), signal.SIGSTOP)
began = time.monotonic()
try:
    generate(model)
except drumline.PeerLost as lost:
    print(lost)
    sys.exit(0 if time.monotonic() - began < 15 else 7)
