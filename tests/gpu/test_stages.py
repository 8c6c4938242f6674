"""Models over ranks that share a GPU. GPU_STAND_IN=cpu runs them without one (stand_in.py)."""

import json
import re
import subprocess
import sys
import urllib.request

import pytest
import torch

import launcher
from tests.gpu import between_gpus
from tests.gpu.one_gpu import (
    GPU,
    ROOT,
    needs_compiler,
    needs_gpu,
    needs_gpu_or_stand_in,
    needs_two_gpus,
    run,
)

pytest.importorskip("transformers", reason="needs transformers, 5 or newer")
from tests.gpu import decode

# isort: split
from drumline.stages.cuda_graphs import NUM_WARM_UPS, CudaGraph

# The workspace that torch gives cuBLAS on a GPU of Hopper.
CUBLAS_NBYTES = 33 << 20

pytestmark = [needs_gpu_or_stand_in, pytest.mark.timeout(250)]


def test_tokens_over_a_static_cache_are_replayed_and_are_those_of_one_process(tmp_path):
    (whole, said), (num_replays,) = run("stages_in_graphs", 2, str(tmp_path))
    assert said == whole
    most = decode.COUNT - 1 - NUM_WARM_UPS
    assert num_replays in (most - 1, most)  # the first token teaches, if it comes with a mask


@needs_gpu
def test_random_numbers_and_replays_go_on_after_a_capture_that_failed():
    ones, before, side = torch.ones(4, device=GPU), torch.cuda.current_stream(), torch.cuda.Stream()
    good, bad = CudaGraph(GPU, side), CudaGraph(GPU, side)
    good.capture(lambda: [ones * 2])
    with pytest.raises(RuntimeError, match="captur"):
        bad.capture(lambda: [ones * ones.sum().item()])
    assert torch.cuda.current_stream() == before
    assert 0 <= torch.rand(1, device=GPU).item() < 1
    assert good.replay()[0].tolist() == [2.0] * 4


def test_tokens_are_the_same_where_hidden_states_go_from_device_to_device(tmp_path):
    (whole, tokens, num_comms), _ = run("model_ranks.device_hops", 2, str(tmp_path))
    assert tokens == whole
    assert num_comms == 2


@needs_two_gpus
def test_hidden_states_go_between_gpus(tmp_path):
    tokens, _ = launcher.launch(between_gpus.tokens, 2, args=(str(tmp_path),))
    assert tokens == decode.whole_tokens(torch.device("cuda:0"))


def test_every_rank_of_a_tensor_parallel_model_generates_the_same(tmp_path):
    for whole, tokens in run("model_ranks.tensor_parallel", 2, str(tmp_path)):
        assert tokens == whole


def test_the_example_of_an_engine_decodes_by_cuda_graphs(tmp_path):
    for whole, tokens, num_graphs in run("nano_engine", 2, str(tmp_path)):
        assert tokens == whole and num_graphs == 1


def test_stages_of_several_ranks_say_the_same_tokens(tmp_path):
    (whole, tokens), *_ = run("model_ranks.tp_stages", 4, str(tmp_path))
    assert tokens == whole


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_weights_come_from_elsewhere_to_the_gpu_when_they_run(tmp_path, place):
    ((whole, tokens),) = run("model_ranks.offloaded", 1, str(tmp_path), place)
    assert tokens == whole


def test_requests_are_batched_over_stages_as_if_each_were_alone(tmp_path):
    (alone, batched), _ = run("model_ranks.batches", 2, str(tmp_path))
    assert batched == alone


@needs_gpu
def test_a_plan_keeps_to_the_memory_of_the_gpu(tmp_path):
    ((whole, tokens, most, held),) = run("model_ranks.planned", 1, str(tmp_path))
    assert tokens == whole
    assert most / 4 < held <= most + CUBLAS_NBYTES


def test_a_program_moves_from_the_cpu_to_the_gpu_and_back():
    ((there, back),) = run("model_ranks.hoisted", 1)
    assert there < 1e-4 and back < 1e-5


def test_the_server_answers_from_the_gpu(tmp_path):
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        pytest.importorskip(package, reason="needs pip install 'drumline[serve]'")
    ((whole,),) = run("model_ranks.save_with_tokenizer", 1, str(tmp_path))
    command = [sys.executable, "-m", "drumline", "serve", "--model", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        try:
            line = server.stdout.readline()
            name, address = re.search(r"serving (\S+) at (http://127\.0\.0\.1:\d+)", line).groups()
            request = {"model": name, "prompt": decode.PROMPT[0], "max_tokens": decode.COUNT}
            body = json.dumps(request | {"temperature": 0}).encode()
            kind = {"Content-Type": "application/json"}
            posted = urllib.request.Request(f"{address}/v1/completions", body, kind)
            with urllib.request.urlopen(posted, timeout=60) as answer:
                text = json.load(answer)["choices"][0]["text"]
        finally:
            server.kill()
    assert [int(word) for word in text.split()] == [token for token in whole if token]  # 0: unknown


@needs_compiler
def test_a_layer_is_compiled_by_one_rank_and_runs_on_all(tmp_path):
    found = run("model_ranks.precompiled", 2, str(tmp_path), timeout_s=200)
    assert all(error < 1e-4 for error, _ in found)
    assert sum(num_compiled for _, num_compiled in found) == 1
