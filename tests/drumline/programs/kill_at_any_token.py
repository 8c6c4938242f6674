"""CHECKPOINT VICTIM BACKEND: kill a rank within generate(); exit 0 if PeerLost came in time."""

import os
import random
import signal
import sys
import threading
import time

import drumline
from tests.drumline.programs.common import generate, load

coor, model = load(backend=sys.argv[3])
generate(model, 2)
pid = coor.peers[int(sys.argv[2])].pid
wait_s = random.random() / 2
threading.Timer(wait_s, os.kill, (pid, signal.SIGKILL)).start()
killed_at = time.monotonic() + wait_s
try:
    for _ in range(10000):
        generate(model)
except drumline.PeerLost as lost:
    print(lost)
    sys.exit(0 if time.monotonic() - killed_at < 15 else 7)
