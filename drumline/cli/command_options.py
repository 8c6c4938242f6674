"""The options of each command, and the function that runs it.

No heavy import happens here: a command imports its own modules when it runs, and with -n it runs
in the ranks alone, which fork from one process that has imported them.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import launcher

Parser = argparse.ArgumentParser
MAX_PORT = 65535


@dataclass(frozen=True)
class Command:
    """One command of the command line. run(options) blocks until it is done."""

    name: str
    help: str
    add_options: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], None]


def _plan_options(parser: Parser) -> None:
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="folder of the checkpoint"
    )
    _memory_option(parser, required=True)
    parser.add_argument(
        "--ranks",
        type=at_least(1),
        metavar="N",
        help="number of ranks; default: one per --memory size",
    )
    parser.add_argument(
        "--device-map",
        default="auto",
        metavar="MAP",
        help="auto, balanced, sequential or fastest; default: %(default)s",
    )
    parser.add_argument(
        "--dtype",
        metavar="NAME",
        help="dtype of the weights, such as bfloat16; default: that of the checkpoint",
    )
    parser.add_argument(
        "--batch", type=at_least(1), default=1, metavar="N", help="sequences; default: %(default)s"
    )
    parser.add_argument(
        "--length",
        type=at_least(0),
        default=0,
        metavar="TOKENS",
        help="cached tokens of each sequence; default: %(default)s",
    )
    parser.add_argument(
        "--bandwidth",
        type=_bandwidth,
        default="20GB",
        metavar="SIZE",
        help="memory that a rank reads in a second; default: %(default)s",
    )
    parser.add_argument(
        "--hop",
        type=at_least(0, float),
        default=100.0,
        metavar="MICROSECONDS",
        help="one-way latency between two ranks; default: %(default)g",
    )


def _generate_options(parser: Parser) -> None:
    _model_options(parser)
    parser.add_argument(
        "--prompt",
        required=True,
        metavar="TEXT",
        help="text to continue; - reads it from standard input",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=at_least(1),
        default=64,
        metavar="N",
        help="tokens to generate at most; default: %(default)s",
    )
    parser.add_argument(
        "--seed", type=_seed, metavar="N", help="sample with this seed; default: greedy"
    )


def _bench_options(parser: Parser) -> None:
    _model_options(parser)
    for name, least, default, text in (
        ("--batch", 1, 1, "sequences"),
        ("--prompt-tokens", 1, 128, "tokens of each prompt"),
        ("--new-tokens", 2, 64, "generated tokens of each sequence"),
    ):
        parser.add_argument(
            name,
            type=at_least(least),
            default=default,
            metavar="N",
            help=f"{text}; default: %(default)s",
        )


def _serve_options(parser: Parser) -> None:
    _model_options(parser)
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on; default: %(default)s",
    )
    parser.add_argument(
        "--port",
        type=_port,
        default=8000,
        metavar="N",
        help="port to listen on, 0 for a free one; default: %(default)s",
    )
    parser.add_argument(
        "--api-key-file", metavar="FILE", help="file with the key that clients must send"
    )
    parser.add_argument(
        "--max-length",
        type=at_least(2),
        metavar="TOKENS",
        help="tokens of prompt and completion; default: the model's, at most 4096",
    )
    for name, default, text in (
        ("running", 16, "sequences generated at the same time"),
        ("waiting", 64, "sequences that may wait for their turn"),
    ):
        parser.add_argument(
            f"--max-{name}",
            type=at_least(1),
            default=default,
            metavar="N",
            help=f"{text}; default: %(default)s",
        )


def _auto_options(parser: Parser) -> None:
    _ranks_option(parser)
    parser.add_argument(
        "script", help="a script that calls from_pretrained(..., device_map='auto')"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def _model_options(parser: Parser) -> None:
    parser.add_argument("--model", required=True, metavar="DIR", help="folder of the checkpoint")
    _ranks_option(parser)
    _memory_option(parser, required=False)


def _ranks_option(parser: Parser) -> None:
    parser.add_argument(
        "-n",
        "--ranks",
        type=at_least(1),
        default=1,
        metavar="N",
        help="ranks to start on this machine; default: %(default)s",
    )


def _memory_option(parser: Parser, required: bool) -> None:
    text = "memory of each rank, such as 8GiB; a single size is that of every rank"
    if not required:
        text += "; default: the free memory"
    parser.add_argument(
        "--memory", nargs="+", required=required, type=_size, metavar="SIZE", help=text
    )


def at_least(minimum: int, kind: type = int) -> Callable[[str], Any]:
    """The argparse type of finite numbers from `minimum` on."""

    def number(text: str) -> Any:
        value = kind(text)
        if not minimum <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a number from {minimum} on")
        return value

    number.__name__ = kind.__name__  # argparse names the type in its errors
    return number


def _nbytes(text: str) -> int:
    from drumline.planner.memory import nbytes

    return nbytes(text)


def _size(text: str) -> str:
    from drumline.errors import PlanError

    try:
        _nbytes(text)
    except PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _bandwidth(text: str) -> str:
    if _nbytes(_size(text)) < 1:
        raise argparse.ArgumentTypeError(f"at {text} per second nothing is ever read")
    return text


def _seed(text: str) -> int:
    if not -(1 << 63) <= int(text) < 1 << 64:  # the range of torch.manual_seed
        raise argparse.ArgumentTypeError(f"{text} does not fit into the 64 bits of a seed")
    return int(text)


def _port(text: str) -> int:
    if not 0 <= int(text) <= MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text} is not a port: ports end at {MAX_PORT}")
    return int(text)


def _plan(options: argparse.Namespace) -> None:
    from drumline.cli.show_plan import show_plan

    num_ranks = options.ranks or len(options.memory)
    memory = _memory_per_rank(options, num_ranks)
    assert memory is not None  # a required option
    show_plan(
        options.model,
        memory,
        options.device_map,
        options.dtype,
        options.batch,
        options.length,
        options.bandwidth,
        options.hop,
    )


def _generate(options: argparse.Namespace) -> None:
    memory = _check_model(options)
    prompt = options.prompt
    if prompt == "-" and launcher.current().rank == 0:  # the prompt of other ranks is not read
        prompt = sys.stdin.read().removesuffix("\n")
    arguments = (options.model, prompt, options.max_new_tokens, options.seed, memory)
    _on_ranks("drumline.cli.generate", "generate_text", options.ranks, arguments)


def _bench(options: argparse.Namespace) -> None:
    memory = _check_model(options)
    sizes = (options.batch, options.prompt_tokens, options.new_tokens)
    _on_ranks("drumline.cli.bench", "bench", options.ranks, (options.model, *sizes, memory))


def _serve(options: argparse.Namespace) -> None:
    memory = _check_model(options)
    endpoint = (options.host, options.port, options.api_key_file)
    limits = (options.max_length, options.max_running, options.max_waiting)
    arguments = (options.model, *endpoint, memory, *limits)
    _on_ranks("drumline.serving.http_server", "serve", options.ranks, arguments)


def _auto(options: argparse.Namespace) -> None:
    from drumline.errors import DrumlineError

    script = Path(options.script)
    if not (script / "__main__.py" if script.is_dir() else script).exists():
        raise DrumlineError(f"{options.script} does not exist, so nothing was started.")
    arguments = (options.script, options.arguments)
    _on_ranks("drumline.cli.run_script", "run_script", options.ranks, arguments)


def _check_model(options: argparse.Namespace) -> list[str] | None:
    """Raise for a folder without a model before a rank starts; return the memory of each rank."""
    from drumline.checkpoint.json_files import check_has_config

    world_size = launcher.current().world_size
    if world_size == 1 < options.ranks:  # otherwise the files may be on another machine
        check_has_config(Path(options.model))
    return _memory_per_rank(options, max(world_size, options.ranks))


def _memory_per_rank(options: argparse.Namespace, num_ranks: int) -> list[str] | None:
    from drumline.errors import PlanError

    sizes: list[str] | None = options.memory
    if sizes is None or len(sizes) == num_ranks:
        return sizes
    if len(sizes) == 1:
        return sizes * num_ranks
    raise PlanError(
        f"--memory has {len(sizes)} sizes for {num_ranks} ranks; give one size for each rank, or "
        "one for all."
    )


def _on_ranks(module: str, function: str, num_ranks: int, arguments: tuple[Any, ...]) -> None:
    """Call the function on new ranks; in this process if it is a rank, or is to be the only one."""
    if launcher.current().world_size > 1 or num_ranks == 1:
        call_by_name(module, function, *arguments)
    else:
        arguments = (module, function, *arguments)
        launcher.launch(call_by_name, nprocs=num_ranks, args=arguments, preload=[module])


def call_by_name(module: str, function: str, *arguments: Any) -> None:
    """Import the function, and call it."""
    getattr(importlib.import_module(module), function)(*arguments)


COMMANDS = (
    Command("plan", "show the device map; loads no weights", _plan_options, _plan),
    Command("generate", "generate text with a model over ranks", _generate_options, _generate),
    Command("bench", "time a model over ranks", _bench_options, _bench),
    Command("serve", "serve a model by OpenAI's API", _serve_options, _serve),
    Command("auto", "run a transformers script over ranks", _auto_options, _auto),
)
