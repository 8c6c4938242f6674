"""Counts how often the way of a call goes from one file of ours into another.

python -m tests.programs.file_changes    # `run` to a script's first line, an allreduce, a token

By sys.setprofile, on one thread. A call counts whose nearest caller of ours is in another file;
returns do not, nor bodies of modules and classes, nor what C does. Pairs are the different ones of
them, which is what a reader must follow once. A reader counts no calls of HELPERS, whose names say
all that matters on the way; the second number of a row leaves them out.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.programs.syntax_trees import LAYERS, ROOT

HELPERS = (
    "launcher/system/linux.py",
    "launcher/records/",
    "launcher/job.py",
    "launcher/launch_info.py",
    "drumline/contact/caches.py",
    "drumline/contact/passes.py",
    "drumline/contact/loading/configs.py",
    "drumline/kv_cache/placeholder.py",
    "drumline/stages/interrupt.py",
)
RANK_SCRIPT = """
import os, sys
way = sys.getprofile()
sys.setprofile(None)
if os.environ["RANK"] == "1":
    print(*way.row(), file=open(sys.argv[1], "w"))
"""
LAUNCHER = """
import sys
from tests.programs.file_changes import Way
from drumline import cli
sys.setprofile(Way())
cli.main(["run", "-n", "2", *sys.argv[1:]])
"""


class Way:
    """A profile function that notes calls from file to file. May be forked with its process."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, str]] = []
        self._callers: list[str] = []
        self._file_of: dict[CodeType, str] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            caller = self._callers[-1] if self._callers else ""
            file = self._file(frame.f_code) or caller
            if caller and file != caller:
                self.changes.append((caller, file))
            self._callers.append(file)
        elif event == "return" and self._callers:
            self._callers.pop()

    def _file(self, code: CodeType) -> str:
        """The file, if it is ours, and the code not the body of a module or class; else ""."""
        if code not in self._file_of:
            path = Path(code.co_filename)
            is_ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in LAYERS
            is_call = is_ours and bool(code.co_flags & inspect.CO_OPTIMIZED)
            self._file_of[code] = str(path.relative_to(ROOT)) if is_call else ""
        return self._file_of[code]

    def row(self) -> tuple[int, int, int, int]:
        """Changes of file, those that a reader counts, different pairs of files, and files."""
        pairs = {*self.changes}
        num_files = len({file for pair in pairs for file in pair})
        counted = [pair for pair in self.changes if not pair[1].startswith(HELPERS)]
        return len(self.changes), len(counted), len(pairs), num_files


@contextlib.contextmanager
def followed() -> Iterator[Way]:
    """The way of what this thread does in the block, without what garbage of others does."""
    way = Way()
    gc.disable()
    sys.setprofile(way)
    try:
        yield way
    finally:
        sys.setprofile(None)
        gc.enable()


def of_run() -> str:
    """From the command line to the first line of a script, through the processes in between."""
    with tempfile.TemporaryDirectory() as folder:
        script, out = Path(folder, "script.py"), Path(folder, "row")
        script.write_text(RANK_SCRIPT)
        command = [sys.executable, "-c", LAUNCHER, str(script), str(out)]
        subprocess.run(command, cwd=ROOT, check=True, timeout=60)
        return out.read_text().strip()


def allreduce(info: Any) -> Way:
    """An allreduce in shared memory, after the first ones."""
    import torch

    from communicator import Communicator
    from coordinator import Coordinator

    with Coordinator(info) as coor, Communicator(coor, backend="shm") as comm:
        tensor = torch.ones(1 << 18)
        for _ in range(40):  # those whose calls are compared
            comm.allreduce(tensor)
        with followed() as way:
            comm.allreduce(tensor)
        return way


ONE_REMOTE_LAYER = {"": 0, "model.layers.1": 1}
"""The device map of a Llama whose second layer, of two, is on another rank."""


def token(model: Any) -> Way:
    """One more token of generate(), of a model that other ranks hold layers of."""
    import torch
    from transformers import DynamicCache

    gc.collect()  # other ranks are told of caches that are gone, with the next token
    cache, ids = DynamicCache(), torch.tensor([[5]])
    with torch.no_grad():  # as generate() calls the model
        for _ in range(4):
            model(ids, past_key_values=cache).logits.sum()
        with followed() as way:
            model(ids, past_key_values=cache).logits.sum()
    return way


def _tokens(info: Any, folder: str) -> Way | None:
    import drumline
    from coordinator import Coordinator

    with (
        contextlib.suppress(drumline.WorkerExit),
        Coordinator(info) as coor,
        drumline.load(folder, ONE_REMOTE_LAYER, coor) as model,
    ):
        return token(model)
    return None


def main() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.conftest import run_threads

    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    print("way: changes of file, those without helpers, different ones, files")
    print("run:", of_run())
    print("allreduce:", *run_threads(allreduce, 2)[0].row())
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
        print("token:", *run_threads(lambda info: _tokens(info, folder), 2)[0].row())


if __name__ == "__main__":
    main()
