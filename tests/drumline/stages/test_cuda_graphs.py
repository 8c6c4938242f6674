"""Which calls of a stage become graphs, with a stand-in for them; tests/gpu holds the real ones."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
from transformers import CompileConfig, StaticCache

import drumline
import launcher
from drumline.stages import cuda_graphs
from drumline.strategies import pipeline_parallel
from tests.programs.operator_tape import OperatorTape


class Graph:
    """A stand-in for a CUDA graph, whose replay runs operators and no Python. Where a CUDA graph
    could not be captured, `broken` says why."""

    broken = ""

    def capture(self, work: Any) -> None:
        if self.broken:
            raise RuntimeError(f"{self.broken}\nand many lines more")
        self.tape = OperatorTape()
        with self.tape.recording():
            self.made = work()

    def replay(self) -> Any:
        self.tape.replay()
        return self.made


@pytest.fixture
def made(monkeypatch):
    """The Graphs of each rank beside the master, of stand-ins."""
    found: list[cuda_graphs.CudaGraphs] = []

    def make(rank: int, device: torch.device) -> cuda_graphs.CudaGraphs:
        found.append(cuda_graphs.CudaGraphs(rank, device, Graph))
        return found[-1]

    monkeypatch.setattr(pipeline_parallel, "CudaGraphs", make)
    monkeypatch.setattr(pipeline_parallel, "_check_graphs", lambda chosen: None)
    return found


def say(model: Any, **options: Any) -> list[list[int]]:
    ids = torch.arange(3, 21).view(2, 9)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, **options}
    return model.generate(ids, attention_mask=mask, **options).tolist()


def static(model: Any, **options: Any) -> list[list[int]]:
    return say(model, cache_implementation="static", **options)


def test_tokens_over_a_static_cache_are_replayed_and_are_the_same(checkpoints, on_master, made):
    plain, path = checkpoints.llama()

    def work(model: Any) -> Any:
        return static(model), static(model)

    assert on_master(path, 3, work, cuda_graphs=True) == work(plain)
    num_caches = 1 if hasattr(plain, "_cache") else 2  # transformers 5.5 keeps the first
    passes = 2 * 11 - num_caches * cuda_graphs.NUM_WARM_UPS  # the first token is that of the prompt
    assert [each.num_replays for each in made] == [passes, passes]
    assert all(not each.reasons for each in made)


def test_the_graphs_of_a_cache_that_is_gone_are_let_go(checkpoints, on_master, made):
    def work(model: Any) -> list[int]:
        counts = []
        for _ in range(3):
            static(model)
            counts.append(len(made[0]._captured))
        return counts

    assert on_master(checkpoints.llama()[1], 2, work, cuda_graphs=True) == [1, 1, 1]


def two_generations(model: Any) -> list[list[int]]:
    caches = [new_cache(model) for _ in range(2)]
    said: list[list[int]] = [[], []]
    token = torch.tensor([[7]])
    with torch.no_grad():
        for step in range(7):
            for which, cache in enumerate(caches):
                ids = torch.tensor([[5 + which, 9, 4]]) if step == 0 else token + which
                logits = model(ids, past_key_values=cache).logits
                said[which].append(logits[:, -1].argmax().item())
    return said


def new_cache(model: Any) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=16)


def test_two_caches_have_graphs_of_their_own(checkpoints, on_master, made):
    plain, path = checkpoints.llama()
    assert on_master(path, 2, two_generations, cuda_graphs=True) == two_generations(plain)
    assert made[0].num_replays > 0 and len(made[0]._captured) == 2


def test_a_cache_that_is_reset_is_replayed_from_its_beginning(checkpoints, on_master, made):
    plain, path = checkpoints.llama()

    def work(model: Any) -> list[int]:
        cache, said = new_cache(model), []
        with torch.no_grad():
            for _ in range(2):
                for token in range(
                    4, 12
                ):  # a prompt of one token, so that all passes have one form
                    logits = model(torch.tensor([[token]]), past_key_values=cache).logits
                    said.append(logits[:, -1].argmax().item())
                cache.reset()
        return said

    assert on_master(path, 2, work, cuda_graphs=True) == work(plain)
    assert (
        made[0].num_replays == 16 - cuda_graphs.NUM_WARM_UPS - 2
    )  # one to learn, one that takes the reset


UNFIT = {
    "another_cache": (say, "the DynamicLayer of their cache counts or grows in Python"),
    "beams": (lambda model: static(model, num_beams=3), None),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_cannot_be_replayed_runs_as_ever_and_says_why(checkpoints, on_master, made, case):
    work, reason = UNFIT[case]
    plain, path = checkpoints.llama()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert on_master(path, 2, work, cuda_graphs=True) == work(plain)
    if reason:
        assert reason in made[0].reasons
        lines = [str(each.message) for each in told if "CUDA graph" in str(each.message)]
        assert len(lines) == 1 and "model.layers.3 to model.layers.5" in lines[0]


def test_windows_are_counted_in_python_and_so_are_not_replayed(checkpoints, on_master, made):
    config = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 6}
    special = {"initializer_range": 0.4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    plain, path = checkpoints.make("mistral", "MistralForCausalLM", **config, **special)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert on_master(path, 2, static, cuda_graphs=True) == static(plain)
    assert any("StaticSlidingWindowLayer" in reason for reason in made[0].reasons)
    assert made[0].num_replays == 0


def test_a_capture_that_fails_is_told_once_and_costs_no_token(
    checkpoints, on_master, made, monkeypatch
):
    monkeypatch.setattr(Graph, "broken", "operation not permitted when stream is capturing")
    plain, path = checkpoints.llama()
    with pytest.warns(UserWarning, match="cannot be captured .operation not permitted"):
        assert on_master(path, 2, static, cuda_graphs=True) == static(plain)
    assert len(made[0].reasons) == 1 and made[0].num_replays == 0


def test_a_capture_that_fails_leaves_torchs_stream_and_generator_as_they_were(monkeypatch):
    now = {"stream": "default", "generator": "free"}

    @contextlib.contextmanager
    def stream(wanted):
        before = now["stream"]
        now["stream"] = wanted
        try:
            yield
        finally:
            now["stream"] = before

    @contextlib.contextmanager
    def graph(made, stream, capture_error_mode):  # as torch does, which undoes nothing at an error
        before = now["stream"]
        now.update(stream=stream, generator="captured")
        yield
        now.update(stream=before, generator="free")

    def read():
        raise RuntimeError("a value was read")

    for function in (stream, graph):
        monkeypatch.setattr(torch.cuda, function.__name__, function)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now["stream"])
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    with pytest.raises(RuntimeError, match="a value was read"):
        cuda_graphs.CudaGraph(torch.device("cpu"), "side").capture(read)
    assert now == {"stream": "default", "generator": "free"}


def test_graphs_of_ranks_without_a_gpu_are_refused_before_anything_is_loaded(checkpoints):
    path = checkpoints.llama()[1]

    def rank() -> None:
        with pytest.raises(drumline.PlanError, match=r"rank 1: cuda_graphs=True .* are on cpu"):
            drumline.load(path, max_memory=[1 << 17] * 2, cuda_graphs=True)
        with pytest.raises(drumline.PlanError, match="tp= and mesh= split them"):
            drumline.load(path, tp=2, cuda_graphs=True)

    launcher.launch(rank, nprocs=2, launcher="threads", timeout_s=60)


def test_transformers_compiles_nothing_that_waits_for_other_ranks(checkpoints, on_master):
    """On a GPU it compiles whatever decodes into a static cache; asked for here, it would too."""
    plain, path = checkpoints.llama()
    everywhere = CompileConfig(backend="eager")
    everywhere._compile_all_devices = True
    called = []

    def work(model: Any) -> Any:
        model.get_compiled_call = lambda config: called.append(model) or model.__call__
        return static(model, compile_config=everywhere)

    assert on_master(path, 2, work) == static(plain)
    assert not called
