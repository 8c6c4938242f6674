"""The options of each command, and the function that runs it.

No heavy import happens here: a command imports its own modules when it runs, and with -n it runs
in the ranks alone, which fork from one process that has imported them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import launcher
from launcher.cli import PATIENCE_OPTION, TOKEN_OPTIONS, set_patience, with_token

CALL = f"{__name__}:call_by_name"
"""What the ranks of a command call."""

Option = tuple[tuple[str, ...], dict[str, Any]]
"""Names and settings of an argument of argparse."""


@dataclass(frozen=True)
class Command:
    """One command of the command line. run(options) blocks until it is done.

    packages: all of the extra `models` that it needs; all of them if it names none.
    """

    name: str
    help: str
    options: tuple[Option, ...]
    run: Callable[[argparse.Namespace], None]
    packages: tuple[str, ...] = ()


def _option(names: str, text: str, value: str | None = None, **settings: Any) -> Option:
    """An option whose help ends with its default, if it has one. value: stands for its value."""
    text += "; default: %(default)s" if "default" in settings else ""
    settings |= {} if value is None else {"metavar": value}
    return tuple(names.split()), {"help": text, **settings}


def at_least(low: int, high: float = math.inf, why: str = "", kind: type = int) -> Any:
    """The argparse type of numbers from `low` to below `high`; `why` is said of any other."""

    def number(text: str) -> Any:
        value = kind(text)
        if not low <= value < high:
            bound = f"below {high}" if value >= high < math.inf else f"a number from {low} on"
            why_not = why or f"is not {bound}"
            raise argparse.ArgumentTypeError(f"{text} {why_not}")
        return value

    number.__name__ = kind.__name__  # argparse names the type in its errors
    return number


def _size(text: str, low: int = 0) -> str:
    from drumline.errors import PlanError
    from drumline.planner.sizes import nbytes

    try:
        if nbytes(text) < low:
            raise PlanError(f"must be greater than 0, and is {text}")
    except PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _plan(options: argparse.Namespace) -> None:
    from drumline.cli.show_plan import show_plan
    from drumline.errors import DrumlineError
    from drumline.planner.memory import sizes_of_ranks

    num_ranks = options.ranks or len(options.memory)
    own = ("device_map", "dtype", "batch", "length", "hop_us", "link", "flops", "html", "png")
    settings = _settings(options, *own)
    settings["memory"] = sizes_of_ranks(options.memory, num_ranks)
    settings["bandwidth"] = sizes_of_ranks(options.bandwidth, num_ranks, "--bandwidth")
    try:
        show_plan(options.model, **settings)
    except ModuleNotFoundError as error:
        if options.png is None or not str(error.name).startswith("matplotlib"):
            raise
        needed = f"{options.png} needs matplotlib: pip install 'drumline[plot]'"
        raise DrumlineError(needed) from error


def _generate(options: argparse.Namespace) -> None:
    from drumline.errors import DrumlineError

    _check_model(options)
    module = "drumline.cli.generate"
    job = _job_of_nodes(options, CALL, module)
    prompt = options.prompt
    if prompt == "-" and launcher.current().rank == 0 and not options.node_rank:  # rank 0's alone
        try:
            prompt = sys.stdin.read().removesuffix("\n") if sys.stdin else ""
        except UnicodeError as error:
            raise DrumlineError(
                f"rank 0: the prompt is not valid text ({error}); write it in UTF-8."
            ) from error
    arguments = (options.model, prompt, options.max_new_tokens, options.seed)
    _on_ranks(options, job, module, "generate_text", arguments, _settings(options))


def _bench(options: argparse.Namespace) -> None:
    _check_model(options)
    arguments = (options.model, options.batch, options.prompt_tokens, options.new_tokens)
    _on_ranks(options, None, "drumline.cli.bench", "bench", arguments, _settings(options))


def _serve(options: argparse.Namespace) -> None:
    _check_model(options)
    names = (
        *("host", "port", "max_length", "max_running", "max_waiting", "prompt_lookup", "dtype"),
        *("device_map", "tp", "served_model_name", "chat_template", "log_requests"),
        "allowed_origins",
    )
    settings = _settings(options, *names)
    settings |= {"model_path": options.model, "key_file": options.api_key_file}
    worker = "drumline.serving.front.rank_worker"
    job = _job_of_nodes(options, f"{worker}:serve_front", worker, options.restarts)
    with _sigterm_ends_well():
        if job is None:
            _on_ranks(options, None, "drumline.serving.http_server", "serve", (), settings)
        elif job.node_rank:
            launch = importlib.import_module("drumline.serving.front.rank_launch")
            with _launch_errors():
                launch.follow_front(
                    dataclasses.replace(job, args=("", (), job.node_rank, settings))
                )
        else:
            front = importlib.import_module("drumline.serving.front.front_server")
            front.serve_with_restarts(options.restarts, job, **settings)


def _job_of_nodes(
    options: argparse.Namespace, function: str, preload: str, restarts: int = 0
) -> launcher.Job | None:
    """The ranks of this node, as one of several or to be started again; None if it is neither."""
    from drumline.errors import DrumlineError

    set_patience(options.patience)
    nnodes, command = options.nnodes or 1, f"`drumline {options.command.name} -n N`"
    if options.nnodes is None and (options.master_addr or options.master_port or options.node_rank):
        raise DrumlineError(
            "--master-addr, --master-port and --node-rank are for several nodes; add --nnodes N, "
            "or leave them out."
        )
    is_rank = launcher.current().world_size > 1
    if options.encrypt and is_rank and not launcher.is_encrypted():
        raise DrumlineError(
            f"--encrypt is for ranks that {command} starts itself, and another launcher has "
            "started these without it; give it to that one (`drumline run --encrypt`)."
        )
    if not (restarts or nnodes > 1 or options.node_rank):
        return None
    if is_rank:
        raise DrumlineError(
            f"--restarts and --nnodes are for ranks that {command} starts itself, and another "
            "launcher has started these; leave them out, and have that launcher start them again "
            "(`drumline run --max-restarts`), or give -n N without that launcher."
        )
    place = {} if options.master_addr is None else {"master_addr": options.master_addr}
    with _launch_errors():
        job = launcher.Job(
            launcher.Target("function", function),
            nprocs=options.ranks,
            nnodes=nnodes,
            node_rank=options.node_rank,
            master_port=options.master_port,
            encrypt=options.encrypt,
            preload=(preload,),
            **place,
        )
        return with_token(job, options) if nnodes > 1 else job


@contextlib.contextmanager
def _launch_errors() -> Iterator[None]:
    """Within, the reason for which no rank can be started is an error of one line."""
    from drumline.errors import DrumlineError

    try:
        yield
    except launcher.LaunchError:  # some are an OSError, and have an exit code of their own
        raise
    except (ValueError, OSError) as error:
        raise DrumlineError(str(error)) from error


@contextlib.contextmanager
def _sigterm_ends_well() -> Iterator[None]:
    """Within, SIGTERM to the command ends its ranks, and is success if all of them end well."""

    def on_sigterm(*_: object) -> None:
        raise SystemExit

    previous = signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    except SystemExit as stopped:
        launch_error, previous = stopped.__context__, signal.SIG_IGN  # of a second one, at the end
        if isinstance(launch_error, launcher.LaunchError) and launch_error.failures:
            raise launch_error from None
    finally:
        signal.signal(signal.SIGTERM, previous)


def _auto(options: argparse.Namespace) -> None:
    from drumline.errors import DrumlineError

    script, command = Path(options.script), Path(sys.executable).parent / options.script
    # Not Path's, which raise for a name that is too long, and for a folder that is closed to us.
    if not os.path.exists(script) and os.path.isfile(command):  # as transformers, for its server
        script = command
    if not os.path.exists(script / "__main__.py" if os.path.isdir(script) else script):
        raise DrumlineError(f"{script.absolute()} does not exist: each machine needs one there.")
    module = "drumline.cli.run_script"
    job = _job_of_nodes(options, CALL, module)
    _on_ranks(options, job, module, "run_script", (str(script), options.arguments), {})


def _top(options: argparse.Namespace) -> None:
    from drumline.cli.top import top

    top(options.launch)


def _settings(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The options of these names, with those that say how to read the checkpoint and for what."""
    of_load = ("memory", "adapter", "dequantize", "gguf_file", "trust_remote_code", "revision")
    return {name: getattr(options, name) for name in (*names, *of_load)}


def _check_model(options: argparse.Namespace) -> None:
    """Raise for a folder without a model, or sizes of other ranks, before a rank starts."""
    from drumline.checkpoint.json_files import check_has_config
    from drumline.contact.loading.hub import is_hub_id
    from drumline.planner.memory import sizes_of_ranks

    world_size = launcher.current().world_size
    nnodes, node_rank = getattr(options, "nnodes", None) or 1, getattr(options, "node_rank", 0)
    is_gguf = options.gguf_file or Path(options.model).suffix == ".gguf"
    starts_ranks = world_size == 1 < options.ranks * nnodes
    is_folder = not is_gguf and not is_hub_id(options.model)
    if starts_ranks and node_rank == 0 and is_folder:  # or the files may be on another machine
        check_has_config(Path(options.model), options.adapter)
    if nnodes == 1:  # of several machines the ranks say how many they are
        sizes_of_ranks(options.memory, max(world_size, options.ranks))


def _on_ranks(
    options: argparse.Namespace,
    job: launcher.Job | None,
    module: str,
    function: str,
    arguments: tuple[Any, ...],
    settings: dict[str, Any],
) -> None:
    """Call the function on new ranks, those of the job if there is one; in this process if it is a
    rank, or is to be the only one."""
    call = (module, function, arguments, settings)
    if job is None and (launcher.current().world_size > 1 or options.ranks == 1):
        call_by_name(*call)
        return
    with _launch_errors():
        if job is not None:
            launcher.run_job(dataclasses.replace(job, args=call))
            return
        encrypt = getattr(options, "encrypt", False)
        launcher.launch(call_by_name, options.ranks, args=call, preload=[module], encrypt=encrypt)


def call_by_name(
    module: str, function: str, arguments: tuple[Any, ...], settings: dict[str, Any]
) -> None:
    """Import the function, and call it in a rank. memory, in settings: of each rank, or one size,
    as only ranks of several nodes know how many they are."""
    if "memory" in settings:
        from drumline.planner.memory import sizes_of_ranks

        sizes = sizes_of_ranks(settings["memory"], launcher.current().world_size)
        settings = {**settings, "memory": sizes}
    getattr(importlib.import_module(module), function)(*arguments, **settings)


MEMORY = "memory of each rank, such as 8GiB; a single size is that of every rank"
_SIZE: dict[str, Any] = {"type": _size, "metavar": "SIZE"}
_RATE = {**_SIZE, "type": functools.partial(_size, low=1)}
_SEED = at_least(-(1 << 63), 1 << 64, "does not fit into the 64 bits of a seed")  # torch's range
_PORT = at_least(0, 1 << 16, "is not a port: ports end at 65535")
_RANKS = _option("-n --ranks", "ranks to start on this machine", "N", type=at_least(1), default=1)
_MODEL = (
    _option(
        "--model",
        "folder of the checkpoint, GGUF file, or id on the Hub, such as Qwen/Qwen3-0.6B",
        "DIR",
        required=True,
    ),
    _option("--revision", "branch, tag or commit on the Hub; default: main", "NAME"),
    _option("--adapter", "folder of a LoRA adapter to merge; default: none", "DIR"),
    _option("--dequantize", "read quantized weights as plain ones", action="store_true"),
    _option("--gguf-file", "GGUF file in the folder to read; default: none", "NAME"),
    _option("--trust-remote-code", "run Python files of the checkpoint", action="store_true"),
)
_MODEL_OPTIONS = (
    *_MODEL,
    _RANKS,
    _option("--memory", f"{MEMORY}; default: the free memory", nargs="+", **_SIZE),
)


MAX_COUNT = 1 << 40  # of tokens and sequences; torch can reckon with sizes up to 2^63


def _count(names: str, text: str, default: int | None = None, low: int = 1) -> Option:
    settings = {} if default is None else {"default": default}
    return _option(names, text, "N", type=at_least(low, MAX_COUNT), **settings)


_DEVICE_MAP = _option(
    "--device-map", "auto, balanced, sequential or fastest", "MAP", default="auto"
)
_DTYPE = _option(
    "--dtype", "dtype of the weights, such as bfloat16; default: that of the checkpoint", "NAME"
)
_PLAN_OPTIONS = (
    *_MODEL,
    _option("--memory", MEMORY, required=True, nargs="+", **_SIZE),
    _count("--ranks", "number of ranks; default: one per --memory size"),
    _DEVICE_MAP,
    _DTYPE,
    _count("--batch", "sequences", 1),
    _count("--length", "cached tokens of each sequence", 0, low=0),
    _option(
        "--bandwidth",
        "memory that each rank reads in a second, or one size for all; default: 20GB",
        nargs="+",
        **_RATE,
    ),
    _option(
        "--hop",
        "one-way latency between two ranks",
        "MICROSECONDS",
        type=at_least(0, kind=float),
        default=100,
        dest="hop_us",
    ),
    _option(
        "--link",
        "bytes that a link between two ranks takes in a second; default: no limit",
        **_RATE,
    ),
    _option(
        "--flops",
        "operations of a rank in a second, for the time to the first token; default: 2e11",
        "N",
        type=at_least(1, kind=float),
    ),
    _option("--html", "write the map as a page for a browser; default: none", "FILE", type=Path),
    _option("--png", "draw the map as a PNG or SVG; default: none", "FILE", type=Path),
)
_PATIENCE: Option = (("--patience",), PATIENCE_OPTION)
_NODES = (
    _count("--nnodes", "number of nodes, each with this command; default: 1"),
    _count("--node-rank", "the index of this node", 0, low=0),
    _option(
        "--master-addr", "address of the first node; default: that of its default route", "ADDRESS"
    ),
    _option(
        "--master-port",
        "port of the first node for the others; default: the same one always",
        "PORT",
        type=_PORT,
        default=0,
    ),
    *(((name,), settings) for name, settings in TOKEN_OPTIONS.items()),
    _option("--encrypt", "encrypt what passes between ranks of several nodes", action="store_true"),
)
_GENERATE_OPTIONS = (
    *_MODEL_OPTIONS,
    _option("--prompt", "text to continue; - reads it from standard input", "TEXT", required=True),
    _count("--max-new-tokens", "tokens to generate at most", 64),
    _option("--seed", "sample with this seed; default: greedy", "N", type=_SEED),
    *_NODES,
    _PATIENCE,
)
_BENCH_OPTIONS = (
    *_MODEL_OPTIONS,
    _count("--batch", "sequences", 1),
    _count("--prompt-tokens", "tokens of each prompt", 128),
    _count("--new-tokens", "generated tokens of each sequence", 64, low=2),
)
_SERVE_OPTIONS = (
    *_MODEL_OPTIONS,
    _option("--host", "address to listen on", "ADDRESS", default="127.0.0.1"),
    _option("--port", "port to listen on, 0 for a free one", "N", type=_PORT, default=8000),
    _option("--api-key-file", "file with the key that clients must send; default: none", "FILE"),
    _DTYPE,
    _DEVICE_MAP,
    _count("--tp --tensor-parallel-size", "ranks that share each layer; default: 1"),
    _option(
        "--served-model-name",
        "what requests call it; default: the folder's name",
        "NAME",
        nargs="+",
    ),
    _option("--chat-template", "file with a chat template; default: the tokenizer's", "FILE"),
    _option(
        "--log-requests --enable-log-requests", "log a line for each request", action="store_true"
    ),
    _option(
        "--allowed-origins",
        "origins of web pages that may read answers, such as http://localhost:3000, or *; "
        "default: none",
        "ORIGIN",
        nargs="+",
    ),
    _option(
        "--max-length --max-model-len",
        "tokens of prompt and completion; default: the model's, at most 4096",
        "TOKENS",
        type=at_least(2),
    ),
    *_NODES,
    _count("--restarts", "times that ranks are started again after one died", 0, low=0),
    _count("--max-running", "sequences generated at the same time", 16),
    _count("--max-waiting", "sequences that may wait for their turn", 64),
    _count(
        "--prompt-lookup",
        "tokens to try at a time, of what its text repeats, while a single request runs",
        0,
        low=0,
    ),
    _PATIENCE,
)
_TOP_OPTIONS = (
    _option(
        "launch",
        "its id, or the pid of its launcher or of a rank; default: the only launch here",
        "LAUNCH",
        nargs="?",
    ),
)
_AUTO_OPTIONS = (
    _RANKS,
    *_NODES,
    _PATIENCE,
    _option("script", "a script that calls from_pretrained(..., device_map='auto')"),
    _option("arguments", "arguments of the script", nargs=argparse.REMAINDER),
)

COMMANDS = (
    Command("plan", "show the device map; loads no weights", _PLAN_OPTIONS, _plan),
    Command("generate", "generate text with a model over ranks", _GENERATE_OPTIONS, _generate),
    Command("bench", "time a model over ranks", _BENCH_OPTIONS, _bench),
    Command("serve", "serve a model by OpenAI's API", _SERVE_OPTIONS, _serve),
    Command(
        "top",
        "show every rank of a launch, on all hosts, while it runs",
        _TOP_OPTIONS,
        _top,
        ("rich",),
    ),
    Command("auto", "run a transformers script over ranks", _AUTO_OPTIONS, _auto),
)
