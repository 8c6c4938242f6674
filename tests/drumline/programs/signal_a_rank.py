"""CHECKPOINT VICTIM SIGNAL OPTIONS: signal a rank, then generate; exit 0 if PeerLost came in time.

OPTIONS: of load(), as JSON.
"""

import json
import os
import signal
import sys
import time

import drumline
from tests.drumline.programs.common import generate, load

coor, model = load(**json.loads(sys.argv[4]))
generate(model, 2)
os.kill(coor.peers[int(sys.argv[2])].pid, signal.Signals[sys.argv[3]])
began = time.monotonic()
try:
    generate(model)
except drumline.PeerLost as lost:
    print(lost)
    print("first failed:", lost.rank)
    sys.exit(0 if time.monotonic() - began < 15 else 7)
