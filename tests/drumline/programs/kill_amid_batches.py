"""CHECKPOINT VICTIM: kill a rank while requests are batched; exit 0 if PeerLost came in time.

Every way of waiting must get it: generate_batch(), and a manager's results, requests and stop().
"""

import os
import signal
import sys
import threading
import time

import drumline
from tests.drumline.programs.common import load

coor, model = load()
settings = model.generation_config
settings.do_sample, settings.max_new_tokens, settings.eos_token_id = False, 100000, -1
manager = model.init_continuous_batching()
manager.start()
manager.add_request([5, 6, 7], streaming=True)
assert manager.get_result(timeout=60).generated_tokens
threading.Timer(0.2, os.kill, (coor.peers[int(sys.argv[2])].pid, signal.SIGKILL)).start()
began = time.monotonic()


def lost(wait):
    """The error of a wait that must end with one."""
    try:
        while True:
            wait()
    except drumline.PeerLost as error:
        return error


errors = [
    lost(lambda: manager.get_result(timeout=1)),
    lost(lambda: manager.add_request([5])),
    lost(manager.stop),
    lost(lambda: model.generate_batch([[5, 6], [7]], max_new_tokens=9)),
]
print(errors[0])
assert len({str(error) for error in errors}) == 1, errors
assert not manager.is_running()
sys.exit(0 if time.monotonic() - began < 15 else 7)
