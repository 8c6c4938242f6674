"""llama.cpp with the weights of a model here: its files, and a model over hosts by its RPC.

    cmake -B build -DGGML_RPC=ON -DLLAMA_CURL=OFF    # in the sources of llama.cpp
    cmake --build build --target ggml-rpc-server llama-bench llama-server

Files are written by the package gguf.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.big_peers import REPEATS, sent_nbytes
from tests.network_hosts import NetworkHosts

GGUF = "model.gguf"
LISTENING_S = 30
RPC_PORT = 50052
PROGRESS = ("warmup prompt run", f"prompt run 1/{REPEATS}")  # of llama-bench


def write_gguf(model: LlamaForCausalLM, path: str) -> None:
    """A Llama as llama.cpp takes it, without a vocabulary."""
    import gguf  # `pip install gguf`

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    heads, head = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        is_plain = tensor.dim() == 1 or tensor.dtype == torch.float32
        data = tensor.float() if is_plain else tensor.view(torch.uint8)
        kind = None if is_plain else gguf.GGMLQuantizationType.BF16
        stored = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(stored, data.numpy(), raw_dtype=kind)
    write(writer)


def write_float_gguf(source: Path, path: Path) -> None:
    """A file of llama.cpp with its weights as float32 and all else, such as its tokenizer, kept."""
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    others = {"general.architecture", "general.file_type", "general.quantization_version"}
    for name, kept in reader.fields.items():
        if name not in others and not name.startswith("GGUF."):
            writer.add_key_value(name, kept.contents(), kept.types[0], sub_type=kept.types[-1])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type))
    write(writer)


def write(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def bench_over_rpc(
    hosts: NetworkHosts, programs: Path, path: str, options: Namespace
) -> dict[str, Any]:
    """The measurements of llama-bench on the first host, which has its share of the layers.

    Raises OSError if a program does not do its work.
    """
    server = programs / "ggml-rpc-server"
    server = server if server.exists() else programs / "rpc-server"  # in older ones
    away, pids = hosts.addresses[1:], []
    for index, address in enumerate(away, 1):
        command = [str(server), "-H", address, "-p", str(RPC_PORT)]
        process = subprocess.Popen(hosts.command(index, command), stdout=subprocess.DEVNULL)
        wait_until_listening(process, f"{server.name} on {address}")
        pids.append(process.pid)
    rpc = ",".join(f"{address}:{RPC_PORT}" for address in away)
    on_others = options.layers * len(away) // len(hosts.names)
    sizes = ["-p", str(options.prompt), "-n", str(options.new), "-r", str(REPEATS), "-t", "1"]
    where = ["-m", path, "--rpc", rpc, "-ngl", str(on_others), "-o", "json", "--progress"]
    command = hosts.command(0, [str(programs / "llama-bench"), *where, *sizes])
    begun_s = time.perf_counter()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as bench:
        assert bench.stdout is not None and bench.stderr is not None
        marks = [(line, *seen) for line, *seen in _marks(bench.stderr, [bench.pid, *pids])]
        tests = bench.stdout.read()
    if bench.returncode:
        raise OSError(f"llama-bench ended with {bench.returncode}: {marks[-1][0][-60:]}")
    return read_marks(marks, begun_s, json.loads(tests), options.new)


def _marks(lines: Iterator[str], pids: Sequence[int]) -> Iterator[tuple[str, float, int]]:
    """What is printed, when, and the bytes that the hosts of these processes had sent by then."""
    for line in lines:
        yield line.strip(), time.perf_counter(), sent_nbytes(pids)


def read_marks(
    marks: Sequence[tuple[str, float, int]], begun_s: float, tests: Any, new: int
) -> dict[str, Any]:
    """The row from what llama-bench printed of its progress, and from its results."""
    at_s = {what: seconds for what in PROGRESS for line, seconds, _ in marks if what in line}
    sent = [nbytes for line, _, nbytes in marks if "generation run" in line]
    seconds = {test["n_gen"] > 0: test["avg_ns"] / 1e9 for test in tests}
    return {
        "load_s": at_s["warmup prompt run"] - begun_s,
        "coldest_s": at_s[f"prompt run 1/{REPEATS}"] - at_s["warmup prompt run"],
        "first_s": seconds[False],
        "token_s": seconds[True] / new,
        "nbytes_a_token": (sent[REPEATS] - sent[1]) / (REPEATS - 1) / new,
    }


def wait_until_listening(server: subprocess.Popen[bytes], name: str) -> None:
    """Wait for a server on another host, whose sockets are in proc(5)."""
    end, listening = time.monotonic() + LISTENING_S, f":{RPC_PORT:04X} 00000000:0000 0A"
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(OSError):  # it has just ended
            if listening in Path(f"/proc/{server.pid}/net/tcp").read_text():
                return
        time.sleep(0.05)
    raise OSError(f"{name} does not listen")
