"""CHECKPOINT VICTIM: load, then stop VICTIM while rank 0 calls nothing; PeerLost ends the rest."""

import os
import signal
import sys
import time

from tests.drumline.programs.common import load

coor, model = load()
os.kill(coor.peers[int(sys.argv[2])].pid, signal.SIGSTOP)
while True:
    coor.check()
    time.sleep(0.05)
