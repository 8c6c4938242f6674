"""CHECKPOINT MOMENT SIGNAL: rank 3 is killed in a call, and rank 2 signals itself in the next load.

Prints a line of JSON for each of three calls: its tokens, or its error.
"""

import json
import os
import signal
import sys

import torch

import drumline
import launcher
from drumline.strategies import pipeline_parallel, replanning

PROMPT = torch.tensor([[5, 6, 7, 8]])
MOMENTS = {
    "meet": (replanning, "Coordinator"),
    "plan": (replanning.Replanner, "_options_now"),
    "build": (pipeline_parallel, "collect_plan_inputs"),
    "read": (pipeline_parallel, "fill"),
    "connect": (pipeline_parallel, "connect_stages"),
}


def signal_at(moment, number):
    """Have this rank signal itself at a moment of the second load."""
    owner, name = MOMENTS[moment]
    real, is_second = getattr(owner, name), []

    def call(*args, **kwargs):
        if is_second:
            os.kill(os.getpid(), number)
        is_second.append(True)
        return real(*args, **kwargs)

    setattr(owner, name, call)


def report(call):
    try:
        print(json.dumps(call().tolist()))
    except drumline.DrumlineError as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))


def generate():
    return model.generate(PROMPT, max_new_tokens=10, min_new_tokens=10, do_sample=False)


if launcher.current().rank == 2:
    signal_at(sys.argv[2], int(sys.argv[3]))
with drumline.load(sys.argv[1], on_failure="replan", max_memory=["1GB"] * 4) as model:
    os.kill(model._replanner.coor.peers[3].pid, signal.SIGKILL)
    for _ in range(3):
        report(generate)
