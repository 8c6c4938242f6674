"""Tiny random models on disk, and one way to run a function on the master of several ranks."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import drumline
import launcher
from drumline.checkpoint.disk_cache import weight_cache
from launcher import ports
from tests.programs.warm import WarmParent, WarmProcess

ROOT = Path(__file__).parents[2]
Start = Callable[..., list[WarmProcess]]

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.5,
    **SPECIAL,
}
GPT2 = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 6,
    "n_head": 4,
    "n_positions": 128,
    "initializer_range": 0.3,
    **SPECIAL,
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread_and_quiet() -> Iterator[None]:
    """The same kernels on both sides, so that results can be compared bit by bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def _weights_from_other_nodes_are_kept_here(tmp_path_factory) -> Iterator[None]:
    """Not in the cache of whoever runs the tests."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_cache, "user_cache_folder", lambda: folder)
        yield


class Checkpoints:
    """Models made once, by name: the plain model and the directory it was saved to."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.made: dict[str, tuple[Any, Path]] = {}
        self.configs: dict[str, Any] = {}

    def make(self, name: str, kind: str, **config: Any) -> tuple[Any, Path]:
        assert self.configs.setdefault(name, (kind, config)) == (kind, config), name
        if name not in self.made:
            torch.manual_seed(0)
            cls = getattr(transformers, kind)
            cls(cls.config_class(**config)).save_pretrained(self.folder / name)
            # read back, so that the weights of both sides have one layout in memory
            self.made[name] = (cls.from_pretrained(self.folder / name), self.folder / name)
        return self.made[name]

    def llama(self) -> tuple[Any, Path]:
        return self.make("llama", "LlamaForCausalLM", **LLAMA)

    def gpt2(self) -> tuple[Any, Path]:
        return self.make("gpt2", "GPT2LMHeadModel", **GPT2)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def on_master() -> Callable[..., Any]:
    """What work(model) returns when the model is spread over ranks that are threads.

    elsewhere: the path on ranks but the master, where that is another.
    """

    def run(
        path: Path,
        nprocs: int,
        work: Callable[[Any], Any],
        elsewhere: Path | None = None,
        **options: Any,
    ) -> Any:
        options.setdefault("max_memory", [1 << 30] * nprocs)

        def rank() -> Any:
            torch.set_num_threads(1)  # OpenMP asks each thread anew
            own = elsewhere if elsewhere and launcher.current().rank else path
            with drumline.load(own, **options) as model:
                assert len(model.device_map.ranks) == nprocs
                return work(model)

        return launcher.launch(rank, nprocs=nprocs, launcher="threads", timeout_s=60)[0]

    return run


@pytest.fixture(scope="session")
def kept_port() -> Iterator[Callable[[], int]]:
    """Gives ports that no other test gets, and at which a rank 0 can listen."""
    with contextlib.ExitStack() as holders:

        def keep() -> int:
            holder = holders.enter_context(ports.reserve(ports.candidates(uuid.uuid4().hex)))
            return int(holder.getsockname()[1])

        yield keep


@pytest.fixture
def start(tmp_path: Path, warm: WarmParent, kept_port: Callable[[], int]) -> Iterator[Start]:
    """Every rank of a script as a process of its own that no launcher looks after."""
    processes: list[WarmProcess] = []

    def run(program: str | Path, nprocs: int, *args: object) -> list[WarmProcess]:
        script = program if isinstance(program, Path) else tmp_path / "script.py"
        if isinstance(program, str):
            script.write_text(program)
        launch_id, port = uuid.uuid4().hex, kept_port()
        for rank in range(nprocs):
            info = launcher.LaunchInfo(launch_id, nprocs, nprocs, rank, rank, "127.0.0.1", port)
            env = {**os.environ, **info.to_env(), "PYTHONPATH": str(ROOT)}
            processes.append(warm.start(script, *args, env=env))
        return processes

    yield run
    for process in processes:
        process.kill()
        process.communicate()
