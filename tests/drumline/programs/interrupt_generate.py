"""CHECKPOINT: survive a short suspension, and interrupts between two frames of a message; prints
three results, then generates until it is interrupted."""

import os
import signal
import threading

from transformers import DynamicCache

import drumline
from tests.drumline.programs.common import PROMPT, load

coor, model = load()
comm, long_prompt = model._driver.ring.previous.comm, PROMPT.repeat(3, 12)
recv = comm.recv


def generate(prompt, num_tokens):
    return model.generate(prompt, max_new_tokens=num_tokens, do_sample=False)


def interrupted_recv(*args):
    del comm.recv
    recv(*args)
    signal.raise_signal(signal.SIGINT)  # as if it had come while this waited


before = generate(PROMPT, 8)
os.kill(coor.peers[1].pid, signal.SIGSTOP)
threading.Timer(0.3, os.kill, (coor.peers[1].pid, signal.SIGCONT)).start()
after = generate(PROMPT, 8)
expected = generate(long_prompt, 3)
for prompt in (long_prompt, PROMPT):
    comm.recv = interrupted_recv
    try:
        generate(prompt, 8)
    except KeyboardInterrupt:
        continue
again = generate(long_prompt, 3)
cache, comm.recv = DynamicCache(config=model.config), interrupted_recv
error_text = ""
for _ in range(2):
    try:
        model(PROMPT, past_key_values=cache)
    except KeyboardInterrupt:
        continue
    except drumline.DrumlineError as error:
        error_text = str(error)
print(
    before.tolist() == after.tolist(),
    expected.tolist() == again.tolist(),
    "empty cache" in error_text,
    flush=True,
)
model.generate(PROMPT, max_new_tokens=100000, do_sample=False, eos_token_id=None)
