"""Ranks behind a front without a model: the tokens of a sequence are 0, 1, 2 and so on.

They import no torch, so that tests can start them again and again.
"""

import os
import signal
import socket
from pathlib import Path

import launcher
from drumline.errors import PlanError
from drumline.serving.front.json_lines import messages, to_line


def count(address: str, _: object, num_tokens: int) -> None:
    """Send num_tokens tokens of each sequence, and then wait; rank 0 ends with its connection."""
    if launcher.current().rank:
        signal.pause()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{address}")
        ready = {"vocabulary": 64, "end_tokens": [], "device_map": None, "peers": []}
        ready["pid"] = os.getpid()
        connection.sendall(to_line(ready))
        for message in messages(connection):
            for sequence in message.get("start", ()):
                first = len(sequence["new_tokens"])
                for token in range(first, first + num_tokens):
                    answer = {
                        "id": sequence["id"],
                        "token": token,
                        "logprob": None,
                        "load": [1, 0.0, 1],
                    }
                    answer["prompt_logprobs"] = []
                    connection.sendall(to_line(answer))


def count_on_devices(address: str, _: object, num_tokens: int, file: str) -> None:
    """count() if there are devices for the ranks. file: their number, and that of ranks needed."""
    num_devices, num_needed = map(int, Path(file).read_text().split())
    world_size = launcher.current().world_size
    if world_size > num_devices:
        raise RuntimeError("a device is gone")
    if world_size < num_needed:
        raise PlanError("the model does not fit.")
    count(address, _, num_tokens)
