"""The commands of `drumline`, as their user runs them."""

from __future__ import annotations

import contextlib
import gc
import http.client
import importlib
import io
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma4ForConditionalGeneration,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    Trainer,
    TrainingArguments,
    XLNetConfig,
)

import drumline
import launcher
from drumline.cli import DELEGATED, cache, command_options, main, parser
from drumline.cli.plan_pictures import write_html
from drumline.cli.run_script import (
    devices_by_module,
    load_over_all_ranks,
    models_over_all_ranks,
)
from drumline.core.device_map import DeviceMap
from drumline.errors import CheckpointError, DrumlineError
from drumline.strategies.with_model import num_positions
from tests.drumline.conftest import LLAMA
from tests.drumline.tiny_configs import tiny_config
from tests.drumline.weight_formats.test_lora_adapter import LINEAR, make_adapter

ROOT = Path(__file__).parents[3]
LONG = 300 * "n"  # more than a name may have in any file system


def _import_serving() -> None:
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        pytest.importorskip(package, reason="runs after `pip install 'drumline[serve]'`")


def test_a_config_may_have_no_limit_of_positions():
    """XLNet's says -1, and whatever was asked for was more than that."""
    assert num_positions(LlamaConfig(max_position_embeddings=16)) == 16
    assert num_positions(XLNetConfig()) == num_positions(MambaConfig()) == sys.maxsize


def test_plan_prints_the_device_map_and_the_hops(checkpoints, capsys):
    path = str(checkpoints.llama()[1])
    assert main(["plan", "--model", path, "--memory", "160KiB", "--ranks", "2"]) == 0
    out = capsys.readouterr().out
    assert "rank 0 cpu" in out and "rank 1 cpu" in out and "2 hops a token" in out


def test_plan_draws_a_picture_and_a_page_of_its_own(checkpoints, capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="runs after `pip install matplotlib`")
    files = ["--html", str(tmp_path / "map.html"), "--png", str(tmp_path / "map.png")]
    command = ["plan", "--model", str(checkpoints.llama()[1]), "--memory", "160KiB", "1MiB", *files]
    assert main(command) == 0
    page = (tmp_path / "map.html").read_text()
    places = re.findall(r'class="name">(.*?)<', page)
    assert places == ["rank 0 cpu", "rank 1 cpu"] and "layers.0" in page
    assert "hops a token" in page and not re.search(r"(src|href)=|https?:", page)
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(command) == 1 and "drumline[plot]" in capsys.readouterr().err


def test_a_page_shows_a_place_of_no_bytes(tmp_path):
    device_map = DeviceMap({"a": (0, "cpu")}, {"a": 0}, {})
    write_html(device_map, "", tmp_path / "map.html")
    assert "rank 0 cpu" in (tmp_path / "map.html").read_text()


@pytest.mark.parametrize("place", ["missing/map.html", "."])
def test_plan_says_that_a_page_cannot_be_written(checkpoints, capsys, tmp_path, place):
    command = ["plan", "--model", str(checkpoints.llama()[1]), "--memory", "1MiB"]
    assert main([*command, "--html", str(tmp_path / place)]) == 1
    assert "the picture was not written" in capsys.readouterr().err


def test_plan_takes_no_number_of_tokens_that_torch_could_not_reckon_with(checkpoints, capsys):
    command = ["plan", "--model", str(checkpoints.llama()[1]), "--memory", "1MiB"]
    with pytest.raises(SystemExit):
        main([*command, "--length", "9" * 24])
    assert "is not below" in capsys.readouterr().err


def test_plan_counts_hops_of_every_rank_and_of_a_head_on_another_rank(checkpoints, capsys):
    path = str(checkpoints.llama()[1])
    for sizes, hops in [(["1MiB"] * 5, 5), (["40KiB", "40KiB", "180KiB"], 6), (["1MiB"], 0)]:
        assert main(["plan", "--model", path, "--memory", *sizes]) == 0
        assert f"{hops} hops a token" in capsys.readouterr().out


def test_plan_keeps_on_rank_0_what_load_keeps_there(tmp_path, capsys):
    """It showed the embedding on another rank, where load() refuses it."""
    kind = Gemma4ForConditionalGeneration
    kind(tiny_config(kind)).save_pretrained(tmp_path)
    assert main(["plan", "--model", str(tmp_path), "--memory", "8KiB", "1GiB"]) == 1
    missing = "are missing on rank 0 cpu for model.language_model.embed_tokens"
    assert missing in capsys.readouterr().err


def test_plan_counts_only_the_weights_that_a_token_reads(checkpoints, capsys):
    """ "At most" so many tokens a second was less than what experts and encoders leave possible."""
    half = {"d_ff": 64, "num_layers": 4, "num_decoder_layers": 4, "vocab_size": 9, "d_model": 32}
    mixture = {**LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2}
    for name, sizes in (("T5ForConditionalGeneration", half), ("MixtralForCausalLM", mixture)):
        model, path = checkpoints.make(f"{name} to plan", name, **sizes)
        line = ["plan", "--model", str(path), "--memory", "1GiB", "--bandwidth", "1GB"]
        assert main(line) == 0
        rate = float(capsys.readouterr().out.partition("at most ")[2].split()[0])
        assert rate > 1.5e9 / (4 * model.num_parameters())


def test_plan_says_where_the_time_of_a_token_and_of_a_prompt_goes(checkpoints, capsys):
    """A link had no bandwidth, and nothing was said of the first token."""
    path = str(checkpoints.llama()[1])
    line = ["plan", "--model", path, "--memory", "400KiB", "400KiB", "--length", "50"]
    assert main([*line, "--hop", "20000", "--link", "128kB"]) == 0
    out = capsys.readouterr().out
    parts = re.findall(r"([\d.]+) ms (of delay|of transfer|on rank \d)", out)
    spent = {name: float(ms) for ms, name in parts}
    assert (spent["of delay"], spent["of transfer"]) == (40, 2)
    assert all(0.2 < spent[f"on rank {rank}"] < 5 for rank in range(2))  # by calls, not by bytes
    assert re.search(rf"a token takes {sum(spent.values()):.3g}\d* ms at least: ", out)
    assert re.search(r"the first token of 50 takes 14\d ms at least, of which hops 140 ms", out)
    assert main([*line, "--flops", "1e6"]) == 0
    assert re.search(r"the first token of 50 takes 5\.\d+ s at least", capsys.readouterr().out)


def test_plan_counts_the_key_value_cache(checkpoints, capsys):
    path = str(checkpoints.llama()[1])
    arguments = ["plan", "--model", path, "--memory", "160KiB", "160KiB", "--batch", "64"]
    assert main([*arguments, "--length", "1000"]) == 1
    assert "bytes" in capsys.readouterr().err


def test_plan_shows_the_fastest_device_map_and_its_speed(checkpoints, capsys):
    """Of equal ranks with slow links one is the fastest, if the model fits there."""
    path = str(checkpoints.llama()[1])
    line = ["plan", "--model", path, "--memory", "1MiB", "--ranks", "2", "--hop", "1e6"]
    rates = []
    for device_map in ("auto", "fastest"):
        assert main([*line, "--device-map", device_map]) == 0
        rates.append(float(capsys.readouterr().out.partition("at most ")[2].split()[0]))
    assert rates[0] < 1 < rates[1]


def test_plan_names_the_missing_memory(checkpoints, capsys):
    assert main(["plan", "--model", str(checkpoints.llama()[1]), "--memory", "10KiB"]) == 1
    assert "are missing in all" in capsys.readouterr().err


def test_one_memory_size_is_that_of_every_rank_and_other_numbers_are_rejected(checkpoints, capsys):
    """Sizes that were too few once gave the other ranks nothing, without a word."""
    path = str(checkpoints.llama()[1])
    assert main(["plan", "--model", path, "--memory", "1MiB", "1MiB", "--ranks", "3"]) == 1
    assert "2 sizes for 3 ranks" in capsys.readouterr().err
    assert main(["bench", "--model", path, "-n", "2", "--memory", "1MiB", "1MiB", "1MiB"]) == 1
    assert "3 sizes for 2 ranks" in capsys.readouterr().err


BAD = [
    ("plan", "--memory 1.5.2MiB", "is not a size"),
    ("plan", "--memory 1MiB --ranks 0", "not a number from 1 on"),
    ("plan", "--memory 1MiB --batch -1", "not a number from 1 on"),
    ("plan", "--memory 1MiB --bandwidth 0", "must be greater than 0"),
    ("plan", "--memory 1MiB --link 0", "argument --link: must be greater than 0"),
    ("plan", "--memory 1MiB --hop nan", "not a number from 0 on"),
    ("generate", "--prompt 5 --seed 18446744073709551616", "64 bits"),
    ("generate", "--prompt 5 --max-new-tokens 0", "not a number from 1 on"),
    ("bench", "-n none", "invalid int value"),
    ("bench", "--new-tokens 1", "not a number from 2 on"),
    ("serve", "--port 99999", "not a port"),
]


@pytest.mark.parametrize(("name", "line", "message"), BAD)
def test_invalid_arguments_are_rejected_in_a_line(name, line, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--model", "somewhere", *line.split()])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_variables_that_no_launch_can_have_are_an_error_of_one_line(
    small_model, capsys, monkeypatch
):
    monkeypatch.setenv("DRUMLINE_RANK", "1")
    assert main(["serve", "--model", str(small_model)]) == 1
    assert capsys.readouterr().err.startswith("drumline: an incomplete LaunchInfo")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan --model {} --memory 1MiB --dtype float17", "dtype='float17' is not one"),
        ("plan --model {} --memory 1MiB --dtype float8_e4m3fn", "'float8_e4m3fn' is not one"),
        ("generate --model {} --prompt 5 --memory 1MiB", "no tokenizer"),
        ("generate --model {}/nowhere -n 2 --prompt 5", "no config.json"),
        ("auto -n 2 nowhere.py", f"{Path.cwd()}/nowhere.py does not exist: each machine needs one"),
        ("auto {}", "does not exist"),
        ("bench --model {} --prompt-tokens 9 --new-tokens 8", "has positions for 16"),
        ("auto -n 100000 {}/config.json", "open files in their launcher"),
        ("auto --nnodes 2 --master-addr 192.0.2.7 --insecure {}/config.json", "of this node"),
        (f"auto {LONG}.py", "does not exist"),
        (f"plan --memory 1MiB --model /{LONG}", "no config.json"),
        (
            f"bench --model {{}} --adapter /{LONG} --prompt-tokens 2 --new-tokens 2",
            "holds no adapter_config.json",
        ),
        (f"plan --memory 1MiB --model tests/{LONG}", "the Hub does not give"),
    ],
)
def test_an_impossible_command_is_an_error_of_one_line(small_model, capsys, line, message):
    assert main([word.format(small_model) for word in line.split()]) == 1
    _check_one_line(capsys.readouterr().err, message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--new-tokens 2 --prompt-tokens 2 --memory 1KiB", "are missing in all"),
        ("--prompt-tokens 9 --new-tokens 8", "has positions for 16"),
    ],
)
def test_an_error_that_all_ranks_find_is_told_in_one_line(small_model, warm, line, message):
    done = warm.run("-m", "drumline", "bench", "--model", small_model, "-n", "2", *line.split())
    assert done.returncode == 1
    _check_one_line(done.stderr, message)


@pytest.fixture
def small_model(checkpoints) -> Path:
    """A model of 16 positions, without a tokenizer."""
    small = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 1, "n_positions": 16}
    return checkpoints.make("without a tokenizer", "GPT2LMHeadModel", **small)[1]


def _check_one_line(error: str, message: str) -> None:
    assert message in error.strip().splitlines()[-1] and "drumline: " in error
    assert "Traceback" not in error


@pytest.mark.parametrize("prog", ["drumline", "python -m drumline"])
@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("run --nproc 2 script.py", "run"),
        ("doctor --slow", "doctor"),
        ("check --fast", "check"),
        ("auto --nproc 2 script.py", "auto"),
        ("plan --model DIR --memory 1GiB --lenght 9", "plan"),
    ],
)
def test_an_unknown_option_shows_the_usage_of_its_command(line, command, prog, capsys):
    with pytest.raises(SystemExit) as ended:
        main(line.split(), prog)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"usage: {prog} {command} ")
    assert f"{prog} {command}: error: unrecognized arguments: --" in error


@pytest.mark.parametrize(
    "line", ["--version", "run -n 2 --dry-run script.py", "doctor --help", "auto --help"]
)
def test_commands_that_need_no_model_start_without_torch(line):
    """`drumline run` is to start as fast as `python -m launcher run`."""
    body = (
        "import sys\nfrom drumline.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as ended:\n    assert not ended.code\n"
        "print([m for m in ('torch', 'transformers', 'coordinator') if m in sys.modules])"
    )
    command = [sys.executable, "-c", body, *line.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_run_is_the_launchers_own_under_the_name_of_the_command(capsys):
    assert main(["run", "-n", "2", "--nnodes", "0", "script.py"], "python -m drumline") == 2
    assert capsys.readouterr().err.startswith("python -m drumline: ")


@pytest.mark.parametrize("prog", ["launcher", "communicator", "drumline"])
def test_every_command_line_prints_the_version(prog, capsys):
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"{prog}.cli").main(["--version"])
    assert ended.value.code == 0 and drumline.__version__ in capsys.readouterr().out


def test_a_prompt_of_a_dash_is_read_from_the_standard_input(with_tokenizer, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("5 6 7\n"))
    options = ["--model", str(with_tokenizer), "--prompt", "-", "--max-new-tokens", "3"]
    assert main(["generate", *options]) == 0
    assert "5 6 7 55 54 10" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"), [(b"5 \xff", "not valid text"), (None, "no tokens")]
)
def test_a_standard_input_without_text_is_no_prompt(
    with_tokenizer, capsys, monkeypatch, content, message
):
    """It was a traceback. None is the content of one that is closed."""
    stdin = None if content is None else io.TextIOWrapper(io.BytesIO(content), "utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["generate", "--model", str(with_tokenizer), "--prompt", "-"]) == 1
    assert message in capsys.readouterr().err


def test_an_adapter_beside_the_model_is_merged_where_it_is_named(with_tokenizer, tmp_path, capsys):
    plain = LlamaForCausalLM.from_pretrained(with_tokenizer)
    make_adapter(tmp_path / "adapter", plain, LINEAR)
    line = ["generate", "--model", str(with_tokenizer), "--prompt", "5 6 7", "--max-new-tokens"]
    assert main([*line, "9", "--adapter", str(tmp_path / "adapter")]) == 0
    with drumline.load(with_tokenizer, adapter=tmp_path / "adapter") as model:
        tokens = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=9, do_sample=False)
    merged = " ".join(map(str, tokens[0].tolist()))
    assert merged in capsys.readouterr().out
    assert main([*line, "9"]) == 0
    assert merged not in capsys.readouterr().out


def test_generate_streams_text_and_ends_with_a_summary(warm, with_tokenizer):
    arguments = ["--model", with_tokenizer, "-n", 2, "--prompt", "5 6 7"]
    done = warm.run("-m", "drumline", "generate", *arguments)
    assert done.returncode == 0, done.stderr
    assert "5 6 7" in done.stdout and "tokens/s" in done.stdout and "per hop" in done.stdout
    assert re.search(r"loaded in [\d.]+ s", done.stdout), done.stdout
    assert re.search(r"rank 1: [\d.]+ KiB of model, [\d.]+ MiB of memory at most", done.stdout)


def test_generate_counts_the_new_tokens_of_an_encoder_decoder_whose_config_asks_for_beams(
    checkpoints, with_tokenizer, tmp_path, capsys
):
    """They were -9, and -18 a second; transformers has no streamer for beams."""
    small = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    small |= {"vocab_size": 64, "decoder_start_token_id": 0}
    _, path = checkpoints.make("t5 to generate", "T5ForConditionalGeneration", **small)
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    beams = GenerationConfig.from_pretrained(path, num_beams=2, num_return_sequences=2)
    beams.update(eos_token_id=None, pad_token_id=0)
    beams.save_pretrained(tmp_path)
    for file in with_tokenizer.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    words = ["--prompt", "5 6 7 8 9", "--max-new-tokens", "4"]
    assert main(["generate", "--model", str(tmp_path), *words]) == 0
    assert re.search(r"^4 tokens in .*; prompt of 5 and first", capsys.readouterr().out, re.M)


@pytest.mark.parametrize(
    ("prompt", "message"), [("", "no tokens"), ("5 \udcff", "is not valid text")]
)
def test_an_empty_or_invalid_prompt_is_rejected_before_loading(
    with_tokenizer, capsys, prompt, message
):
    assert main(["generate", "--model", str(with_tokenizer), "--prompt", prompt]) == 1
    printed = capsys.readouterr()
    assert message in printed.err and not printed.out


def test_the_commands_for_two_machines_run_as_printed(checkpoints, hosts, warm, with_tokenizer):
    page = (ROOT / "docs" / "drumline.md").read_text()
    lines = re.findall(r"^drumline (?:generate .*--nnodes|join) .*", page, re.M)[:2]
    words = {"DIR": str(with_tokenizer), "Once upon": "5 6 7"}  # what its tokenizer knows
    token = secrets.token_hex(32)
    machines = []
    for index, line in enumerate(lines):
        for word, here in words.items():
            line = line.replace(word, here)
        machines.append(hosts.warm(warm, index, line, DRUMLINE_TOKEN=token))
    (first, error), (second, joined) = (machine.communicate(100) for machine in machines)
    assert [machine.returncode for machine in machines] == [0, 0], error + joined
    plain, prompt = checkpoints.llama()[0], torch.tensor([[5, 6, 7]])
    tokens = plain.generate(prompt, max_new_tokens=64, do_sample=False)[0].tolist()
    assert " ".join(map(str, tokens)) in first
    assert "rank 1 cpu" in first and "tokens/s" in first and not second
    assert "runs what host" in joined and token not in error + joined


def test_generate_over_machines_refuses_without_a_token(with_tokenizer, capsys, monkeypatch):
    monkeypatch.delenv("DRUMLINE_TOKEN", raising=False)
    place = ["--nnodes", "2", "--master-addr", "127.0.0.1"]
    assert main(["generate", "--model", str(with_tokenizer), "--prompt", "5", *place]) == 1
    assert "needs a token, or whoever reaches its port" in capsys.readouterr().err


@pytest.mark.parametrize(("sizes", "world_size"), [(["1GiB"], 3), (["1GiB", "2GiB", "1GiB"], 3)])
def test_sizes_of_memory_are_those_of_all_ranks_of_all_machines(monkeypatch, sizes, world_size):
    """Machines may have different numbers of ranks, which no command knows before they have met."""
    calls = []
    module = SimpleNamespace(work=lambda *_, memory: calls.append(memory))
    monkeypatch.setitem(sys.modules, "module_of_work", module)
    info = launcher.LaunchInfo("id", world_size, world_size, 0, 0, "127.0.0.1", 1, {})
    monkeypatch.setattr(launcher, "current", lambda: info)
    command_options.call_by_name("module_of_work", "work", (), {"memory": sizes})
    assert [len(memory) for memory in calls] == [world_size]


def test_bench_prints_prefill_and_decode_rates_memory_and_hops(checkpoints, capsys):
    sizes = ["--batch", "2", "--prompt-tokens", "16", "--new-tokens", "5"]
    assert main(["bench", "--model", str(checkpoints.llama()[1]), *sizes]) == 0
    head, _, row = capsys.readouterr().out.split("\n\n")[2].splitlines()
    named = dict(zip(head.split("|"), row.split("|"), strict=True))
    cells = {name.strip(): cell.split() for name, cell in named.items()}
    assert [cells[name] for name in ("batch", "prompt (tokens)", "new (tokens)")] == [
        ["2"], ["16"], ["5"]
    ]  # fmt: skip
    first_s, prefill, decode = (
        float(cells[name][0]) for name in cells if name.endswith("(ms)") or "/s" in name
    )
    assert prefill == pytest.approx(2 * 16 / first_s * 1e3, rel=0.5) and decode > 0


def test_serve_and_generate_encrypt_between_their_nodes(tmp_path):
    """The page on security had the option, and the command did not."""
    nodes = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--token-file", str(tmp_path / "token")]
    for command in (["serve"], ["generate", "--prompt", "x"]):
        options = parser().parse_args([*command, "--model", "m", *nodes, "--encrypt"])
        options.command_line = (*command,)
        assert command_options._job_of_nodes(options, "module:function", "module").encrypt


MODEL = "--model --revision --adapter --dequantize --gguf-file --trust-remote-code"
OPTIONS = {
    "plan": f"{MODEL} --memory --ranks --device-map --dtype --batch --length --bandwidth --hop"
    " --link --flops --html --png",
    "generate": f"{MODEL} -n --ranks --memory --prompt --max-new-tokens --seed"
    " --nnodes --node-rank --master-addr --master-port --token-file --insecure --encrypt"
    " --patience",
    "bench": f"{MODEL} -n --ranks --memory --batch --prompt-tokens --new-tokens",
    "serve": f"{MODEL} -n --ranks --memory --host --port --api-key-file --dtype --device-map --tp"
    " --tensor-parallel-size --served-model-name --chat-template --log-requests"
    " --enable-log-requests --allowed-origins --max-length --max-model-len --nnodes --node-rank"
    " --master-addr --master-port --token-file --insecure --encrypt --restarts --max-running"
    " --max-waiting --prompt-lookup --patience",
    "top": "",
    "auto": "-n --ranks --nnodes --node-rank --master-addr --master-port --token-file --insecure"
    " --encrypt --patience",
}


def test_options_are_parsed_without_transformers():
    """`drumline plan --memory 1GiB` ended with a traceback in an engine's environment."""
    program = "import sys; sys.modules['transformers'] = None; from drumline.cli import parser; "
    words = ["plan", "--model", ".", "--memory", "1GiB", "--bandwidth", "20GB"]
    command = [sys.executable, "-c", f"{program} parser().parse_args({words!r})"]
    subprocess.run(command, check=True, timeout=60)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_options_are_few(name):
    (commands,) = (action for action in parser()._actions if action.choices)
    assert set(commands.choices) == {*OPTIONS, *DELEGATED}
    options = [name for action in commands.choices[name]._actions for name in action.option_strings]
    assert options == ["-h", "--help", *OPTIONS[name].split()]


def test_the_options_of_the_cache_are_few():
    (commands,) = (action for action in cache.parser()._actions if action.choices)
    (command,) = commands.choices.values()
    options = [name for action in command._actions for name in action.option_strings]
    assert options == ["-h", "--help", "--clear"]


def test_the_place_of_a_node_without_the_number_of_nodes_is_refused(checkpoints, capsys):
    """It was ignored, and the server of one node started."""
    place = ["--master-addr", "10.0.0.1"]
    for command in (["serve"], ["generate", "--prompt", "5"]):
        assert main([*command, "--model", str(checkpoints.llama()[1]), *place]) == 1
        assert "add --nnodes N" in capsys.readouterr().err


SCRIPT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
path = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(path, device_map="auto")
print("ranks", model.device_map.ranks, "named", model.name_or_path == path)
print("devices", sorted(set(model.hf_device_map.values())), next(iter(model.hf_device_map)))
print(model.generate(torch.arange(3, 9)[None], max_new_tokens=5).shape)
pipe = pipeline("text-generation", model=model, tokenizer=AutoTokenizer.from_pretrained(path))
print(pipe("5 6 7", max_new_tokens=3, do_sample=False)[0]["generated_text"])
try:
    AutoModelForCausalLM.from_pretrained(path, device_map="auto")
except RuntimeError as error:
    print(error)
sys.exit(7)
"""
RUN = "import sys\nfrom drumline.cli import main\nsys.exit(main(['auto', *sys.argv[1:]]))"


def test_an_unmodified_script_runs_over_the_ranks_and_ends_them_with_its_code(
    with_tokenizer, tmp_path, start
):
    script = tmp_path / "unmodified.py"
    script.write_text(SCRIPT)
    master, server = start(RUN, 2, script, with_tokenizer)
    out, err = master.communicate(timeout=90)
    assert (
        "ranks [0, 1] named True" in out and "torch.Size([1, 11])" in out and "55 54 10" in out
    ), err
    assert "devices ['cpu', 'cpu:1'] model.embed_tokens" in out
    assert "other ranks serve its first model" in out
    assert master.returncode == 7 and server.wait(timeout=60) == 7 and not server.stdout.read()


def test_a_trainer_evaluates_a_model_whose_devices_a_script_was_told(
    checkpoints, on_master, tmp_path
):
    """torch's "Invalid device string" was all that it said."""
    plain, path = checkpoints.llama()
    tokens = torch.arange(3, 12)
    rows = [{"input_ids": tokens, "labels": tokens}] * 2

    def work(model):
        model.hf_device_map = devices_by_module(model.device_map)
        trainer = Trainer(model, TrainingArguments(str(tmp_path), report_to=[]))
        assert trainer.is_model_parallel
        with pytest.raises(DrumlineError, match="cannot be trained"):
            Trainer(model, trainer.args, train_dataset=rows).train()
        return trainer.evaluate(rows)["eval_loss"]

    loss = plain(tokens[None], labels=tokens[None]).loss
    assert on_master(path, 2, work) == pytest.approx(float(loss), rel=1e-4)


ACCELERATED = """
import sys
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

import launcher

accelerator = Accelerator(cpu=True)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], device_map="auto")
accelerator.wait_for_everyone()
print(accelerator.num_processes, "alone of", launcher.current().world_size)
"""


def test_libraries_of_a_script_take_rank_0_for_a_process_alone(checkpoints, tmp_path, warm):
    """Accelerate, and Trainer by it, waited without end for ranks that serve."""
    script = tmp_path / "accelerated.py"
    script.write_text(ACCELERATED)
    words = "-m", "drumline", "auto", "-n", "2", script, checkpoints.llama()[1]
    ended = warm.run(*words, timeout=90)
    assert ended.returncode == 0 and "1 alone of 2" in ended.stdout, ended.stderr


def test_a_script_that_loads_nothing_over_the_ranks_says_that_each_has_run_it(tmp_path, warm):
    """All was printed twice, and nothing said why."""
    script = tmp_path / "unsplit.py"
    script.write_text("print('whole')\nraise SystemExit(0)")
    ended = warm.run("-m", "drumline", "auto", "-n", "2", script, timeout=90)
    assert ended.returncode == 0 and ended.stdout.count("whole") == 2
    assert ended.stderr.count("each of 2 ranks has run the whole of it") == 1
    ended = warm.run("-m", "drumline", "auto", "-n", "1", script, timeout=90)
    assert ended.returncode == 0 and not ended.stderr


def test_a_script_of_one_rank_gets_each_model_that_it_loads_and_may_drop_it(checkpoints):
    """The second was the first, and none was ever freed."""
    paths = [make()[1] for make in (checkpoints.llama, checkpoints.gpt2)]
    with models_over_all_ranks():
        models = [
            AutoModelForCausalLM.from_pretrained(
                pretrained_model_name_or_path=path, device_map="auto"
            )
            for path in paths
        ]
        named = LlamaForCausalLM.from_pretrained(
            pretrained_model_name_or_path=paths[0], device_map="auto"
        )
        assert [model.config.model_type for model in (*models, named)] == ["llama", "gpt2", "llama"]
        reference = weakref.ref(models.pop())
        gc.collect()
        assert reference() is None


class WithSettings(LlamaForCausalLM):
    def __init__(self, config, first=0, second=0):
        super().__init__(config)
        self.settings = first, second


def test_what_a_script_gives_the_constructor_by_position_arrives_there(checkpoints):
    """It was dropped where there was a device_map."""
    with models_over_all_ranks():
        with pytest.raises(CheckpointError, match="no config"):
            WithSettings.from_pretrained(f"/{LONG}", device_map="auto")
        path = checkpoints.llama()[1]
        model = WithSettings.from_pretrained(path, 3, second=4, device_map="auto")
    assert model.settings == (3, 4)


@pytest.mark.parametrize("options", [[], ["--continuous-batching"]])
def test_the_server_of_transformers_runs_over_the_ranks(with_tokenizer, start, kept_port, options):
    """It answered /health, and failed at the first completion."""
    pytest.importorskip("openai", reason="transformers serve needs openai")
    port = kept_port()
    arguments = ["transformers", "serve", with_tokenizer, "--port", port, *options]
    master, _ = start(RUN, 2, *arguments)
    for _ in range(600):
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port)):
            break
        assert master.poll() is None, master.communicate()
        time.sleep(0.1)
    request = {"model": str(with_tokenizer), "prompt": "5 6 7", "max_tokens": 5}
    connection = http.client.HTTPConnection("localhost", port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(request), headers)
    reply = json.load(connection.getresponse())
    assert reply["choices"][0]["text"].startswith("55 54 10")


@pytest.mark.parametrize("is_read_before", [True, False])
def test_from_pretrained_options_of_the_config_are_used(checkpoints, tmp_path, is_read_before):
    """AutoModel puts attn_implementation into a config, which was dropped: sdpa ran, silently."""
    plain, path = checkpoints.llama()
    shutil.copytree(path, tmp_path / "inner")
    settings = {"attn_implementation": "eager", "use_cache": False}
    options = {"subfolder": "inner", "revision": "main", "torch_dtype": "bfloat16"}
    options |= {"low_cpu_mem_usage": True, "offload_folder": str(tmp_path), "device_map": "auto"}
    options |= {"max_memory": {0: "1GiB", 1: "1GiB"}}
    if is_read_before:
        settings = {"config": AutoConfig.from_pretrained(path, **settings)}

    def rank():
        with load_over_all_ranks(type(plain), tmp_path, {**options, **settings}) as model:
            config = model.config
            logits = model(torch.tensor([[5, 6, 7]])).logits
            return config._attn_implementation, config.use_cache, logits.dtype, model.device_map

    *loaded, device_map = launcher.launch(rank, nprocs=2, launcher="threads", timeout_s=60)[0]
    assert loaded == ["eager", False, torch.bfloat16] and device_map.ranks == [0, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "there is no key"),
        (["--api-key-file", "two lines"], "characters that no header has"),
        (["--api-key-file", "euro"], "characters that no header has"),
        (["--api-key-file", "/dev/null"], "is empty"),
        (["--api-key-file", "/dev/null/key"], "cannot be read"),
        (["--api-key-file", "/dev/zero"], "File too large"),
        (["--api-key-file", "pipe"], "is empty"),
        (
            ["--max-length", "1000000"],
            "positions for 2048; give --max-length 2048 or less",
        ),
    ],
)
def test_serve_with_impossible_options_does_not_start(
    checkpoints, capsys, tmp_path, monkeypatch, options, message
):
    _import_serving()
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    for name, key in {"two lines": "5\n6", "euro": "5€"}.items():
        Path(name).write_text(key)
    assert main(["serve", "--model", str(checkpoints.llama()[1]), *options]) == 1
    assert message in capsys.readouterr().err


IN_THE_BACKGROUND = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
from drumline.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_server_in_the_background_of_a_script_is_ended_by(warm, with_tokenizer, number, code):
    """A shell starts such a job with SIGINT ignored, and the server could not be stopped by it."""
    _import_serving()
    command = ["serve", "--model", with_tokenizer, "-n", "2", "--port", "0"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    server = warm.start("-c", IN_THE_BACKGROUND, *command, env=environ, cwd=ROOT)
    try:
        assert "serving" in server.stdout.readline()
        server.send_signal(number)
        assert server.wait(timeout=30) == code
    finally:
        server.kill()
        server.communicate()


@pytest.mark.parametrize("line", ["serve", "bench -n 2"])
def test_a_model_that_generates_no_text_is_rejected(checkpoints, warm, line):
    _import_serving()
    _, path = checkpoints.make("bert to serve", "BertForMaskedLM", **LLAMA)
    done = warm.run("-m", "drumline", *line.split(), "--model", path)
    assert done.returncode == 1 and "does not generate text" in done.stderr


def test_an_encoder_decoder_is_not_served(checkpoints, capsys):
    _import_serving()
    small = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 9}
    _, path = checkpoints.make("t5 to serve", "T5ForConditionalGeneration", **small)
    assert main(["serve", "--model", str(path)]) == 1
    assert "serve a decoder" in capsys.readouterr().err


def test_a_launch_that_took_too_long_has_its_own_exit_code_also_where_no_rank_was_started():
    with pytest.raises(launcher.LaunchTimeout), command_options._launch_errors():
        raise launcher.LaunchTimeout("the other machine did not come")
