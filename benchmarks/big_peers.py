"""A model on a host of benchmarks.big: of a rank of drumline, and of peers alone."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import drumline
from coordinator import Coordinator
from drumline.cli.bench import measure
from tests.network_hosts import INTERFACE

REPEATS = 3
OFFLOADED = 0.65  # of a host's memory for weights: the rest is what Accelerate needs to load


def be_rank(folder: str, options: Namespace) -> dict[str, Any]:
    """Load as a rank; the first one measures."""
    with Coordinator(timeout_s=300) as coor:
        places = [(rank, "cpu") for rank in range(coor.world_size)]
        speeds = [drumline.measure_speeds(coor, places, options.dtype)]
        pids = coor.allgather_object(os.getpid())
        memory = [options.limit] * coor.world_size
        sent = sent_nbytes(pids[:1])
        begun = time.perf_counter()
        try:
            model = drumline.load(folder, "balanced", coor, max_memory=memory)
        except drumline.WorkerExit:
            model = contextlib.nullcontext()
        row: dict[str, Any] = {}
        with model:
            if coor.is_master():
                sent = sent_nbytes(pids[:1]) - sent
                row = {**measured(model, options, begun, pids), "sent_s": sent / options.rate}
        speeds += [drumline.measure_speeds(coor, places, options.dtype)]
    by_place = [[each.places[place] for each in speeds] for place in places]
    row["bandwidth"] = [mean(speed.nbytes for speed in of_place) for of_place in by_place]
    row["flops"] = max(mean(speed.flops for speed in of_place) for of_place in by_place)
    row["calls"] = max(mean(speed.calls for speed in of_place) for of_place in by_place)
    row["hop_s"] = mean(max(link.latency_s for link in each.links.values()) for each in speeds)
    return row


def be_alone(folder: str, options: Namespace, **away: Any) -> dict[str, Any]:
    """Load as transformers does, from pages of the files."""
    begun = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, **away).eval()
    return measured(model, options, begun, [os.getpid()], repeats=1)


def be_offloaded(folder: str, options: Namespace) -> dict[str, Any]:
    """Load as Accelerate does, with the rest on the disk."""
    memory = {"cpu": int(OFFLOADED * options.limit)}
    with tempfile.TemporaryDirectory() as disk:
        return be_alone(folder, options, device_map="auto", max_memory=memory, offload_folder=disk)


@torch.inference_mode()
def measured(
    model: Any, options: Namespace, begun: float, pids: Sequence[int], repeats: int = REPEATS
) -> dict[str, Any]:
    """Seconds to load, of the first token the first time and later, and of each other token.

    pids: of a process of each host.
    """
    load_s = time.perf_counter() - begun
    torch.manual_seed(0)
    prompt = torch.randint(1, model.config.vocab_size, (1, options.prompt))
    coldest = measure(model, prompt, 2)
    sent = [sent_nbytes(pids)]
    measure(model, prompt, 2)  # two prompts and a token: the rest of what is sent below is tokens
    sent += [sent_nbytes(pids)]
    timings = [measure(model, prompt, options.new) for _ in range(repeats)]
    sent += [sent_nbytes(pids)]
    of_tokens = (sent[2] - sent[1]) / repeats - (sent[1] - sent[0])
    return {
        "load_s": load_s,
        "coldest_s": coldest.first_token_s,
        "first_s": sorted(timing.first_token_s for timing in timings)[repeats // 2],
        "token_s": sorted(timing.decode_s for timing in timings)[repeats // 2] / (options.new - 1),
        "nbytes_a_token": of_tokens / (options.new - 2),
        "tokens": model.generate(prompt, max_new_tokens=options.new, do_sample=False).tolist(),
    }


def sent_nbytes(pids: Sequence[int]) -> int:
    """The bytes that the hosts of these processes have sent so far, by proc(5)."""
    sent = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
            name, _, fields = line.partition(":")
            sent += int(fields.split()[8]) if name.strip() == INTERFACE else 0
    return sent
