"""CHECKPOINT MAX_MEMORY: kill the last rank while the model generates, then batch, and call twice.

A manager of batches from before goes on meanwhile.

Prints a line of JSON for each call: its tokens, or its error.
"""

import json
import os
import signal
import sys

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

import drumline

PROMPT = torch.tensor([[5, 6, 7, 8]])
SMALL = {"continuous_batching_config": ContinuousBatchingConfig(page_size=16)}
GREEDY = GenerationConfig(do_sample=False, max_new_tokens=9, eos_token_id=-1)


class Killer:
    """A streamer that kills a process at the third piece of text, and remembers how many came."""

    num_pieces = 0

    def put(self, _):
        self.num_pieces += 1
        if self.num_pieces == 3:
            os.kill(victim.pid, signal.SIGKILL)

    def end(self):
        pass


def report(call):
    try:
        print(json.dumps(call().tolist()))
    except drumline.DrumlineError as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))


def generate(**options):
    torch.manual_seed(3)
    return model.generate(PROMPT, max_new_tokens=30, min_new_tokens=30, do_sample=True, **options)


def batch():
    (output,) = model.generate_batch(PROMPT.tolist(), generation_config=GREEDY, **SMALL).values()
    return torch.tensor(output.generated_tokens)


def batch_by_old_manager():
    manager.add_request(PROMPT[0].tolist())
    output = manager.get_result()
    assert output.error is not None, output  # of the request; then the failure itself is raised
    manager.get_result()


memory = json.loads(sys.argv[2])
with drumline.load(sys.argv[1], on_failure="replan", max_memory=memory) as model:
    cache = model(PROMPT, use_cache=True).past_key_values
    manager = model.init_continuous_batching(GREEDY, **SMALL)
    manager.start()
    manager.add_request(PROMPT[0].tolist())
    assert manager.get_result(timeout=60).error is None
    victim = model._replanner.coor.peers[-1]
    report(lambda: generate(streamer=Killer()))
    report(batch)
    report(batch_by_old_manager)
    report(generate)
    report(lambda: model(PROMPT, past_key_values=cache).logits)
    report(generate)
