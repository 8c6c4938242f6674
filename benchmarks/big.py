"""A model that fits on none of the hosts: drumline, what its plan says, and what else there is.

    python -m benchmarks.big --llama-cpp llama.cpp/build/bin
    python -m benchmarks.big --layers 4 --hidden 256 --limit 0 --rates 1gbit

Hosts are network namespaces of this machine: memory is limited by cgroups, links by tc. Needs root
and iproute2. Of llama.cpp, built with GGML_RPC=ON, the programs ggml-rpc-server (rpc-server in
older ones) and llama-bench.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.big_peers import be_alone, be_offloaded, be_rank
from benchmarks.network import per_ms
from benchmarks.table import Table
from launcher import LaunchInfo
from tests.network_hosts import NetworkHosts

ALONE_S = 1500  # for a peer whose pages thrash
LISTENING_S = 30
RPC_PORT = 50052
OURS, ALONE, OFFLOAD = "drumline", "transformers, mapped", "Accelerate, disk offload"
RPC = "llama.cpp RPC"
SENT = f"{OURS}, files on one host"
AGAIN = f"{OURS}, files on one host, second start"
GROUPS = Path("/sys/fs/cgroup/memory")  # of cgroups(7), version 1; of version 2, its parent
COLUMNS = (
    *("over", "link", "right", "load (s)", "very first token (s)", "first token (s)", "tokens/s"),
    *("bytes a pass", "peak (MB)", "plan / first token", "plan / token", "ratio"),
)
NOTE = (
    "bfloat16, a thread a rank, batch 1, greedy; medians of 3. Alone a peer is on the first host. "
    "right: the tokens of transformers; or why nothing was measured. bytes a pass: what the first "
    "host sent, prompts included. "
    "peak: of the fullest host, pages of files included. plan: what `drumline plan` says for the "
    "rate of the links and for measured memory, processor and delay, over what was measured. "
    "ratio: tokens/s over those of llama.cpp RPC, or of transformers where that is not built."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--layers", type=int, default=26)
    parser.add_argument("--hidden", type=int, default=3072)
    parser.add_argument("--limit", type=float, default=2600, help="MB of a host; 0: no limit")
    parser.add_argument(
        "--rates", nargs="+", default=["1gbit"], help="of the links, as tc has them"
    )
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=8)
    parser.add_argument("--llama-cpp", type=Path, help="folder of its programs")
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("big", COLUMNS, NOTE, keep=options.save)
    with tempfile.TemporaryDirectory() as folder:
        nbytes = new_model(folder, options.layers, options.hidden)
        for rate in options.rates:
            with LimitedHosts(options, rate) as hosts:
                rows = dict(measured(hosts, options, folder, nbytes))
                add(table, rows, rate, planned(rows[OURS], options, folder, nbytes, rate))
    table.end()


def new_model(folder: str, layers: int, hidden: int) -> int:
    """Save a random Llama; the bytes of its weights."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 32 * 32,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="1GB")
    return sum(parameter.nbytes for parameter in model.parameters())


class LimitedHosts(NetworkHosts):
    """Hosts whose processes have so much memory, page cache included."""

    def __init__(self, options: Namespace, rate: str) -> None:
        super().__init__(options.hosts, rate, network="10.75.0")
        self.limit = int(options.limit * 1e6)
        parent = GROUPS if GROUPS.exists() else GROUPS.parent
        self.groups = [parent / name for name in self.names] if self.limit else []
        for group in self.groups:
            group.mkdir()
            self._stack.callback(group.rmdir)
            name = "memory.limit_in_bytes" if parent == GROUPS else "memory.max"
            (group / name).write_text(str(self.limit))

    def command(self, index: int, command: Sequence[str]) -> list[str]:
        inside = super().command(index, command)
        if not self.groups:
            return inside
        enter = 'echo $$ > "$0/cgroup.procs"; exec "$@"'
        return ["sh", "-c", enter, str(self.groups[index]), *inside]

    def peak_mb(self) -> float | str:
        """Of the fullest host since the last time; "" without a limit."""
        if not self.groups:
            return ""
        v1 = self.groups[0].parent == GROUPS
        files = [g / ("memory.max_usage_in_bytes" if v1 else "memory.peak") for g in self.groups]
        peak = max(int(file.read_text()) for file in files)
        for file in files:
            with contextlib.suppress(OSError):  # of version 2 before Linux 6.12
                file.write_text("0")
        return peak / 1e6


def measured(
    hosts: LimitedHosts, options: Namespace, folder: str, nbytes: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each way, and what was measured of it."""
    limit = hosts.limit * 9 // 10 or nbytes * 2 // options.hosts
    sizes = Namespace(prompt=options.prompt, new=options.new, limit=limit)
    with tempfile.TemporaryDirectory() as cache:
        for name in (OURS, SENT, AGAIN):
            yield name, ranks(hosts, folder, folder if name == OURS else "nowhere", sizes, cache)
    for name, peer in ((ALONE, be_alone), (OFFLOAD, be_offloaded)):
        yield name, forked(hosts, [(peer, folder, {})], sizes)
    if options.llama_cpp:
        yield RPC, of_llama_cpp(hosts, options, folder)


def ranks(
    hosts: LimitedHosts, first: str, others: str, options: Namespace, cache: str
) -> dict[str, Any]:
    """The measurements of the first of our ranks, one on each host."""
    launch_id, count = uuid.uuid4().hex, len(hosts.names)
    variables = {"DRUMLINE_TOKEN": secrets.token_hex(32)}
    places = []
    for rank in range(count):
        info = LaunchInfo(launch_id, count, 1, rank, 0, hosts.addresses[0], 29_456)
        own = {**info.to_env(), **variables, "XDG_CACHE_HOME": f"{cache}/{rank}"}
        places.append((be_rank, others if rank else first, own))
    return forked(hosts, places, options)


def forked(hosts: LimitedHosts, places: Sequence[Any], options: Namespace) -> dict[str, Any]:
    """The row of the first of these processes, one a host, which have all imports already.

    places: a function of a folder and the options, the folder, and variables, for each host.
    """
    read_end, write_end = os.pipe()
    pids = []
    for index, (work, folder, variables) in enumerate(places):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.environ.update(variables)
            be_host(hosts, index, lambda: work(folder, options), write_end)  # noqa: B023
    os.close(write_end)
    row: dict[str, Any] = {"failed": f"not done in {ALONE_S} s"}
    with os.fdopen(read_end) as lines:
        if select.select([lines], [], [], ALONE_S)[0]:
            text = lines.readline()
            row = json.loads(text) if text else {"failed": "its process was killed"}
    for pid in pids:
        if "failed" in row:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return {**row, "peak_mb": hosts.peak_mb()}


def be_host(hosts: LimitedHosts, index: int, work: Callable[[], Any], write_end: int) -> None:
    """Do the work in this process, on a host, and end."""
    try:
        if hosts.groups:
            (hosts.groups[index] / "cgroup.procs").write_text(str(os.getpid()))
        hosts.enter(index)
        row = work()
    except BaseException as error:
        traceback.print_exc()
        row = failure(error)
    if index == 0:
        os.write(write_end, json.dumps(row).encode() + b"\n")
    os._exit("failed" in row)


def failure(error: BaseException) -> dict[str, Any]:
    """The row of what could not be measured, with the reason as a cell."""
    text = f"{type(error).__name__}: {error}"
    return {"failed": textwrap.shorten(text.replace("|", "/"), 100)}


def planned(
    row: dict[str, Any], options: Namespace, folder: str, nbytes: int, rate: str
) -> dict[str, float]:
    """The seconds of a first token and of the others that `drumline plan` says."""
    if "failed" in row:
        return {}
    size = int(options.limit * 1e6) * 9 // 10 or nbytes * 2 // options.hosts
    bandwidth = [str(int(speed)) for speed in row["bandwidth"]]
    words = ["--model", folder, "--memory", *[str(size)] * options.hosts]
    words += ["--device-map", "balanced", "--length", str(options.prompt)]
    words += ["--bandwidth", *bandwidth]
    words += ["--hop", str(row["hop_s"] * 1e6), "--link", str(int(per_ms(rate) * 1000))]
    words += ["--flops", str(row["flops"])]
    command = [sys.executable, "-m", "drumline", "plan", *words]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    texts = {
        "token_s": re.search(r"a token takes ([\d.e-]+) (m?s)", out),
        "first_s": re.search(r"the first token of \d+ takes ([\d.e-]+) (m?s)", out),
    }
    return {n: float(m[1]) / (1000 if m[2] == "ms" else 1) for n, m in texts.items() if m}


def of_llama_cpp(hosts: LimitedHosts, options: Namespace, folder: str) -> dict[str, Any]:
    """The measurements of llama-bench on the first host, with the layers on the others by RPC."""
    try:
        row = bench_llama_cpp(hosts, options, write_gguf(folder))
    except (OSError, ImportError, ValueError, subprocess.SubprocessError) as error:
        row = failure(error)
    finally:
        hosts.kill_processes()
    return {**row, "peak_mb": hosts.peak_mb()}


def bench_llama_cpp(hosts: LimitedHosts, options: Namespace, path: str) -> dict[str, Any]:
    programs = options.llama_cpp
    server = programs / "ggml-rpc-server"
    server = server if server.exists() else programs / "rpc-server"  # in older ones
    away = hosts.addresses[1:]
    for index, address in enumerate(away, 1):
        command = [str(server), "-H", address, "-p", str(RPC_PORT)]
        process = subprocess.Popen(hosts.command(index, command), stdout=subprocess.DEVNULL)
        wait_until_listening(process, f"{server.name} on {address}")
    sizes = ["-p", str(options.prompt), "-n", str(options.new), "-r", "3", "-t", "1"]
    on_others = options.layers * len(away) // options.hosts
    rpc = ",".join(f"{address}:{RPC_PORT}" for address in away)
    where = ["-m", path, "--rpc", rpc, "-ngl", str(on_others), "-o", "json"]
    command = hosts.command(0, [str(programs / "llama-bench"), *where, *sizes])
    done = subprocess.run(command, capture_output=True, text=True, timeout=ALONE_S)
    if done.returncode:
        raise OSError(f"llama-bench ended with {done.returncode}: {done.stderr.strip()[-60:]}")
    seconds = {test["n_gen"] > 0: test["avg_ns"] / 1e9 for test in json.loads(done.stdout)}
    return {"first_s": seconds[False], "token_s": seconds[True] / options.new}


def wait_until_listening(server: subprocess.Popen[bytes], name: str) -> None:
    """Wait for a server on another host, whose sockets are in proc(5)."""
    end, listening = time.monotonic() + LISTENING_S, f":{RPC_PORT:04X} 00000000:0000 0A"
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(OSError):  # it has just ended
            if listening in Path(f"/proc/{server.pid}/net/tcp").read_text():
                return
        time.sleep(0.05)
    raise OSError(f"{name} does not listen")


def write_gguf(folder: str) -> str:
    """The same model as llama.cpp takes it, without a vocabulary."""
    import gguf  # `pip install gguf`

    model = LlamaForCausalLM.from_pretrained(folder)
    config, path = model.config, f"{folder}/model.gguf"
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
        is_norm = tensor.dim() == 1
        data = tensor.float() if is_norm else tensor.view(torch.uint8)
        kind = None if is_norm else gguf.GGMLQuantizationType.BF16
        stored = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(stored, data.numpy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(table: Table, rows: dict[str, dict[str, Any]], rate: str, plan: dict[str, float]) -> None:
    """A row for each way, what could not be measured left empty."""
    base = rows.get(RPC, rows[ALONE]).get("token_s")
    for name, row in rows.items():
        tokens, right = row.get("tokens"), rows[ALONE].get("tokens")
        is_right = "" if not (tokens and right) else "yes" if tokens == right else "NO"
        is_right = row.get("failed", is_right)
        token_s = row.get("token_s")
        ours = plan if name == OURS else {}
        ratios = [ours[key] / row[key] if key in ours else "" for key in ("first_s", "token_s")]
        cells = [row.get(key, "") for key in ("load_s", "coldest_s", "first_s")]
        table.add(
            *(name, rate, is_right, *cells, 1 / token_s if token_s else ""),
            *(row.get("nbytes_a_pass", ""), row["peak_mb"], *ratios),
            base / token_s if base and token_s else "",
        )


if __name__ == "__main__":
    main()
