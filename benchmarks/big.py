"""A model that fits on none of the hosts: drumline, what its plan says, and what else there is.

    python -m benchmarks.big --llama-cpp llama.cpp/build/bin
    python -m benchmarks.big --layers 4 --hidden 256 --limit 0 --delays 0

Hosts are network namespaces of this machine: memory is limited by cgroups, rates of links by tc,
and delays are those of a switch of our own. Needs root and iproute2. llama.cpp's programs are
those that benchmarks/llama_cpp.py names.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
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

from benchmarks import llama_cpp
from benchmarks.big_peers import be_alone, be_offloaded, be_rank
from benchmarks.network import per_ms
from benchmarks.table import Table
from drumline.cli.show_plan import show_plan
from launcher import LaunchInfo
from tests.network_hosts import NetworkHosts

ALONE_S = 1500  # for a peer whose pages thrash
GONE_S = 10  # for killed processes
OURS, ALONE, OFFLOAD = "drumline", "transformers, mapped", "Accelerate, disk offload"
RPC = "llama.cpp RPC"
SENT = f"{OURS}, files on one host"
AGAIN = f"{OURS}, files on one host, second start"
GROUPS = Path("/sys/fs/cgroup/memory")  # of cgroups(7), version 1; of version 2, its parent
COLUMNS = (
    *("over", "link, delay", "right", "commands", "load (s)", "of which the link needs (s)"),
    "very first token (s)",
    *("first token (s)", "of the plan (s)", "plan / seen"),
    *("tokens/s", "of the plan", "plan / seen, tokens/s"),
    *("bytes a token", "peaks (MB)", "this / peer"),
)
NOTE = (
    "A thread a rank, batch 1, greedy; medians of 3. Alone a peer is on the first host, once. "
    "delay: from host to host. right: the tokens of transformers; or why nothing was measured. "
    "commands: to type, one a host; llama.cpp's file was written before. of which the link needs: "
    "for the bytes that the first host sent meanwhile. very first token: after loading. of the "
    "plan: `drumline plan`, for the rate of the links and for memory, processor and delay, "
    "measured before and after. bytes a token: that all hosts sent, from the second token on. "
    "peaks: of memory on each host, pages of files included, and of drumline 128 MiB to measure "
    "with, each below its limit. this / peer: tokens/s over those of llama.cpp RPC, or of "
    "transformers where that is not given."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--limit", type=float, default=680, help="MB of a host; 0: no limit")
    parser.add_argument(
        "--rates", nargs="+", default=["1gbit"], help="of the links, as tc has them"
    )
    parser.add_argument(
        "--delays",
        type=float,
        nargs="+",
        default=[0, 20, 80],
        help="ms from host to host; with the first, all ways are measured",
    )
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=8)
    parser.add_argument("--llama-cpp", type=Path, help="folder of its programs")
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # hosts end with us
    torch.set_num_threads(1)
    name = "big" if options.dtype == "float32" else f"big-{options.dtype}"
    table = Table(name, COLUMNS, NOTE, keep=options.save)
    with tempfile.TemporaryDirectory() as folder:
        nbytes = new_model(folder, options)
        alone: dict[str, Any] = {}
        for rate, delay_ms in itertools.product(options.rates, options.delays):
            rows = {}
            with LimitedHosts(options, rate, delay_ms) as hosts:
                for name, row in measured(hosts, options, folder, nbytes, rate, not alone):
                    print(f"{name}: {row}", file=sys.stderr)
                    rows[name] = row
            alone = alone or rows[ALONE]
            plan = planned(rows[OURS], options, folder, nbytes, rate)
            add(table, rows, alone, f"{rate}, {delay_ms:g} ms", plan)
    table.end()


def new_model(folder: str, options: Namespace) -> int:
    """Save a random Llama, for llama.cpp too if that is measured; the bytes of its weights."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 8 // 3 // 32 * 32,
        num_hidden_layers=options.layers,
        num_attention_heads=max(options.hidden // 128, 2),
        num_key_value_heads=max(options.hidden // 128, 2),
        dtype=options.dtype,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(getattr(torch, options.dtype))
    model.save_pretrained(folder, max_shard_size="1GB")
    if options.llama_cpp:
        llama_cpp.write_gguf(model, f"{folder}/{llama_cpp.GGUF}")
    return sum(parameter.nbytes for parameter in model.parameters())


class LimitedHosts(NetworkHosts):
    """Hosts whose processes have so much memory, page cache included."""

    def __init__(self, options: Namespace, rate: str, delay_ms: float) -> None:
        super().__init__(options.hosts, rate, network="10.75.0", delay_ms=delay_ms)
        self.limit = int(options.limit * 1e6)
        parent = GROUPS if GROUPS.exists() else GROUPS.parent
        self.groups = [parent / name for name in self.names] if self.limit else []
        for group in self.groups:
            group.mkdir()
            self._stack.callback(remove, group)
            name = "memory.limit_in_bytes" if parent == GROUPS else "memory.max"
            (group / name).write_text(str(self.limit))

    def command(self, index: int, command: Sequence[str]) -> list[str]:
        inside = super().command(index, command)
        if not self.groups:
            return inside
        enter = 'echo $$ > "$0/cgroup.procs"; exec "$@"'
        return ["sh", "-c", enter, str(self.groups[index]), *inside]

    def peaks(self) -> str:
        """Of each host since the last time, in MB; "" without a limit."""
        v1 = self.groups and self.groups[0].parent == GROUPS
        files = [g / ("memory.max_usage_in_bytes" if v1 else "memory.peak") for g in self.groups]
        peaks = [int(file.read_text()) for file in files]
        for file in files:
            with contextlib.suppress(OSError):  # of version 2 before Linux 6.12
                file.write_text("0")
        return ", ".join(f"{peak / 1e6:.0f}" for peak in peaks)


def remove(group: Path) -> None:
    """Remove a cgroup, with the processes that are still in it."""
    deadline_s = time.monotonic() + GONE_S
    while True:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            return group.rmdir()
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


def measured(
    hosts: LimitedHosts, options: Namespace, folder: str, nbytes: int, rate: str, all_ways: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each way, and what was measured of it. all_ways: those too that a delay changes little."""
    limit = hosts.limit * 9 // 10 or nbytes * 2 // options.hosts
    dtype = getattr(torch, options.dtype)
    sizes = Namespace(prompt=options.prompt, new=options.new, limit=limit, dtype=dtype)
    sizes.rate = per_ms(rate) * 1000
    with tempfile.TemporaryDirectory() as cache:
        for name in (OURS, SENT, AGAIN) if all_ways else (OURS,):
            forget_pages(folder)
            yield name, ranks(hosts, folder, folder if name == OURS else "nowhere", sizes, cache)
    for name, peer in ((ALONE, be_alone), (OFFLOAD, be_offloaded)) if all_ways else ():
        forget_pages(folder)
        yield name, forked(hosts, [(peer, folder, {})], sizes)
    if options.llama_cpp:
        forget_pages(folder)
        yield RPC, of_llama_cpp(hosts, options, folder)


def forget_pages(folder: str) -> None:
    """Have the files read from the disk again, into the memory of who reads them.

    Pages that are there already count for the group whose process was the first to touch them, as
    the kernel's Documentation/admin-guide/cgroup-v1/memory.rst says.
    """
    for path in Path(folder).iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


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
    return {**row, "commands": len(places), "peaks": hosts.peaks()}


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
    settings = {"hop_us": row["hop_s"] * 1e6, "link": str(int(per_ms(rate) * 1000))}
    settings |= {name: row[name] for name in ("flops", "calls")}
    memory = [str(size)] * options.hosts
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        show_plan(folder, memory, "balanced", None, 1, options.prompt, bandwidth, **settings)
    out = shown.getvalue()
    texts = {
        "token_s": re.search(r"a token takes ([\d.e-]+) (m?s)", out),
        "first_s": re.search(r"the first token of \d+ takes ([\d.e-]+) (m?s)", out),
    }
    return {n: float(m[1]) / (1000 if m[2] == "ms" else 1) for n, m in texts.items() if m}


def of_llama_cpp(hosts: LimitedHosts, options: Namespace, folder: str) -> dict[str, Any]:
    """The measurements of llama.cpp with the layers on the others by RPC, or why there are none."""
    try:
        path = f"{folder}/{llama_cpp.GGUF}"
        row = llama_cpp.bench_over_rpc(hosts, options.llama_cpp, path, options)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        row = failure(error)
    finally:
        hosts.kill_processes()
    return {**row, "commands": len(hosts.names), "peaks": hosts.peaks()}


def add(
    table: Table,
    rows: dict[str, dict[str, Any]],
    alone: dict[str, Any],
    link: str,
    plan: dict[str, float],
) -> None:
    """A row for each way, what could not be measured left empty. alone: of transformers."""
    base = rows.get(RPC, alone).get("token_s")
    for name, row in rows.items():
        tokens, right = row.get("tokens"), alone.get("tokens")
        is_right = "" if not (tokens and right) else "yes" if tokens == right else "NO"
        is_right = row.get("failed", is_right)
        token_s = row.get("token_s")
        seen = (row.get("first_s", ""), 1 / token_s if token_s else "")
        expected = (plan["first_s"], 1 / plan["token_s"]) if name == OURS and plan else ("", "")
        compared = [
            (value, of_plan, of_plan / value if value and of_plan else "")
            for value, of_plan in zip(seen, expected, strict=True)
        ]
        table.add(
            *(name, link, is_right, row["commands"], row.get("load_s", "")),
            *(row.get("sent_s", ""), row.get("coldest_s", ""), *compared[0], *compared[1]),
            *(row.get("nbytes_a_token", ""), row["peaks"]),
            base / token_s if base and token_s else "",
        )


if __name__ == "__main__":
    main()
