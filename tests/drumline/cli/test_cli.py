"""The command line, as its user runs it."""

from __future__ import annotations

import io
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    LlamaConfig,
    MambaConfig,
    PreTrainedTokenizerFast,
    XLNetConfig,
)

import launcher
from drumline.cli import main, parser
from drumline.cli.run_script import load_everywhere
from drumline.strategies.with_model import num_positions
from tests.drumline.conftest import LLAMA

ROOT = Path(__file__).parents[3]


def test_a_config_may_have_no_limit_of_positions():
    """XLNet's says -1, and whatever was asked for was more than that."""
    assert num_positions(LlamaConfig(max_position_embeddings=16)) == 16
    assert num_positions(XLNetConfig()) == num_positions(MambaConfig()) == sys.maxsize


def test_plan_prints_the_map_the_room_and_the_hops(checkpoints, capsys):
    path = str(checkpoints.llama()[1])
    assert main(["plan", "--model", path, "--memory", "160KiB", "--ranks", "2"]) == 0
    out = capsys.readouterr().out
    assert "rank 0 cpu" in out and "rank 1 cpu" in out and "2 hops a token" in out


def test_plan_counts_hops_of_every_rank_and_trips_to_a_head_that_is_elsewhere(checkpoints, capsys):
    path = str(checkpoints.llama()[1])
    for sizes, hops in [(["1MiB"] * 5, 5), (["40KiB", "40KiB", "180KiB"], 6), (["1MiB"], 0)]:
        assert main(["plan", "--model", path, "--memory", *sizes]) == 0
        assert f"{hops} hops a token" in capsys.readouterr().out


def test_plan_expects_that_only_what_a_token_passes_is_read(checkpoints, capsys):
    """ "At most" so many tokens a second was less than what experts and encoders leave possible."""
    half = {"d_ff": 64, "num_layers": 4, "num_decoder_layers": 4, "vocab_size": 9, "d_model": 32}
    mixture = {**LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2}
    for name, sizes in (("T5ForConditionalGeneration", half), ("MixtralForCausalLM", mixture)):
        model, path = checkpoints.make(f"{name} to plan", name, **sizes)
        line = ["plan", "--model", str(path), "--memory", "1GiB", "--bandwidth", "1GB"]
        assert main(line) == 0
        rate = float(capsys.readouterr().out.partition("at most ")[2].split()[0])
        assert rate > 1.5e9 / (4 * model.num_parameters())


def test_plan_counts_the_cache_that_is_wanted(checkpoints, capsys):
    path = str(checkpoints.llama()[1])
    arguments = ["plan", "--model", path, "--memory", "160KiB", "160KiB", "--batch", "64"]
    assert main([*arguments, "--length", "1000"]) == 1
    assert "bytes" in capsys.readouterr().err


def test_plan_shows_the_fastest_cut_and_how_fast_that_is(checkpoints, capsys):
    """Of equal ranks with slow links one is the fastest, if the model fits there."""
    path = str(checkpoints.llama()[1])
    line = ["plan", "--model", path, "--memory", "1MiB", "--ranks", "2", "--hop", "1e6"]
    rates = []
    for device_map in ("auto", "fastest"):
        assert main([*line, "--device-map", device_map]) == 0
        rates.append(float(capsys.readouterr().out.partition("at most ")[2].split()[0]))
    assert rates[0] < 1 < rates[1]


def test_plan_says_what_is_missing(checkpoints, capsys):
    assert main(["plan", "--model", str(checkpoints.llama()[1]), "--memory", "10KiB"]) == 1
    assert "are missing in all" in capsys.readouterr().err


def test_one_size_is_that_of_every_rank_and_other_numbers_are_refused(checkpoints, capsys):
    """Sizes that were too few once gave the other ranks nothing, without a word."""
    path = str(checkpoints.llama()[1])
    assert main(["plan", "--model", path, "--memory", "1MiB", "1MiB", "--ranks", "3"]) == 1
    assert "2 sizes for 3 ranks" in capsys.readouterr().err
    assert main(["bench", "--model", path, "-n", "2", "--memory", "1MiB", "1MiB", "1MiB"]) == 1
    assert "3 sizes for 2 ranks" in capsys.readouterr().err


BAD = [
    ("plan", "--memory 1.5.2MiB", "no size"),
    ("plan", "--memory 1MiB --ranks 0", "not a number from 1 on"),
    ("plan", "--memory 1MiB --batch -1", "not a number from 1 on"),
    ("plan", "--memory 1MiB --bandwidth 0", "nothing is ever read"),
    ("plan", "--memory 1MiB --hop nan", "not a number from 0 on"),
    ("generate", "--prompt 5 --seed 18446744073709551616", "64 bits"),
    ("generate", "--prompt 5 --max-new-tokens 0", "not a number from 1 on"),
    ("bench", "-n none", "invalid int value"),
    ("bench", "--new-tokens 1", "not a number from 2 on"),
    ("serve", "--port 99999", "no port"),
]


@pytest.mark.parametrize(("name", "line", "said"), BAD)
def test_arguments_that_make_no_sense_are_refused_in_a_line(name, line, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--model", "somewhere", *line.split()])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("plan --model {} --memory 1MiB --dtype float17", "dtype='float17' is none"),
        ("plan --model {} --memory 1MiB --dtype float8_e4m3fn", "'float8_e4m3fn' is none"),
        ("generate --model {} --prompt 5 --memory 1MiB", "no tokenizer"),
        (
            "bench --model {} -n 2 --new-tokens 2 --prompt-tokens 2 --memory 1KiB",
            "are missing in all",
        ),
        ("generate --model {}/nowhere -n 2 --prompt 5", "no config.json"),
        ("run -n 2 {}/nowhere.py", "is not there"),
        ("run {}", "is not there"),
        ("bench --model {} --prompt-tokens 9 --new-tokens 8", "has positions for 16"),
        ("bench --model {} -n 2 --prompt-tokens 9 --new-tokens 8", "has positions for 16"),
    ],
)
def test_what_cannot_be_done_is_an_error_of_one_line(checkpoints, capsys, line, said):
    small = {"vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 1, "n_positions": 16}
    _, path = checkpoints.make("without a tokenizer", "GPT2LMHeadModel", **small)
    assert main([word.format(path) for word in line.split()]) == 1
    told = capsys.readouterr().err
    assert said in told.strip().splitlines()[-1] and "python -m drumline: " in told
    assert "Traceback" not in told


@pytest.fixture
def with_tokenizer(checkpoints) -> Path:
    _, path = checkpoints.llama()
    words = Tokenizer(models.WordLevel({str(n): n for n in range(64)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0").save_pretrained(path)
    return path


def test_a_prompt_of_a_dash_is_read_from_the_standard_input(with_tokenizer, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("5 6 7\n"))
    given = ["--model", str(with_tokenizer), "--prompt", "-", "--max-new-tokens", "3"]
    assert main(["generate", *given]) == 0
    assert "5 6 7 55 54 10" in capsys.readouterr().out


def test_generate_streams_text_and_ends_with_a_summary(warm, with_tokenizer):
    arguments = ["--model", with_tokenizer, "-n", 2, "--prompt", "5 6 7"]
    done = warm.run("-m", "drumline", "generate", *arguments)
    assert done.returncode == 0, done.stderr
    assert "5 6 7" in done.stdout and "tokens/s" in done.stdout and "a hop" in done.stdout
    assert re.search(r"rank 1: [\d.]+ KiB of model, [\d.]+ MiB of memory at most", done.stdout)


@pytest.mark.parametrize(("prompt", "said"), [("", "no tokens"), ("5 \udcff", "is no text")])
def test_a_prompt_that_is_none_is_refused_before_anything_is_loaded(
    with_tokenizer, capsys, prompt, said
):
    assert main(["generate", "--model", str(with_tokenizer), "--prompt", prompt]) == 1
    told = capsys.readouterr()
    assert said in told.err and not told.out


def test_the_commands_for_two_machines_run_as_printed(checkpoints, hosts, with_tokenizer):
    words = {"DIR": with_tokenizer, "Once upon": "5 6 7"}  # what its tokenizer knows
    first, second = hosts.typed(ROOT / "docs" / "drumline.md", **words)
    plain, prompt = checkpoints.llama()[0], torch.tensor([[5, 6, 7]])
    tokens = plain.generate(prompt, max_new_tokens=64, do_sample=False)[0].tolist()
    assert " ".join(map(str, tokens)) in first
    assert "rank 1 cpu" in first and "tokens/s" in first and not second


def test_bench_tells_prompt_and_tokens_a_second_memory_and_hops(checkpoints, capsys):
    sizes = ["--batch", "2", "--prompt-tokens", "16", "--new-tokens", "5"]
    assert main(["bench", "--model", str(checkpoints.llama()[1]), *sizes]) == 0
    head, _, row = capsys.readouterr().out.split("\n\n")[2].splitlines()
    named = dict(zip(head.split("|"), row.split("|"), strict=True))
    told = {name.strip(): cell.split() for name, cell in named.items()}
    assert [told[name] for name in ("batch", "prompt (tokens)", "new (tokens)")] == [
        ["2"], ["16"], ["5"]
    ]  # fmt: skip
    first_s, prefill, decode = (float(told[n][0]) for n in told if n.endswith("(ms)") or "/s" in n)
    assert prefill == pytest.approx(2 * 16 / first_s * 1e3, rel=0.5) and decode > 0


OPTIONS = {
    "plan": "--model --memory --ranks --device-map --dtype --batch --length --bandwidth --hop",
    "generate": "--model -n --ranks --memory --prompt --max-new-tokens --seed",
    "bench": "--model -n --ranks --memory --batch --prompt-tokens --new-tokens",
    "serve": "--model -n --ranks --memory --host --port --api-key-file --max-length --max-running"
    " --max-waiting",
    "run": "-n --ranks",
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_options_are_few(name):
    (commands,) = (action for action in parser()._actions if action.choices)
    assert set(commands.choices) == set(OPTIONS)
    known = [name for action in commands.choices[name]._actions for name in action.option_strings]
    assert known == ["-h", "--help", *OPTIONS[name].split()]


SCRIPT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
path = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(path, device_map="auto")
print("ranks", model.device_map.ranks)
print(model.generate(torch.arange(3, 9)[None], max_new_tokens=5).shape)
pipe = pipeline("text-generation", model=model, tokenizer=AutoTokenizer.from_pretrained(path))
print(pipe("5 6 7", max_new_tokens=3, do_sample=False)[0]["generated_text"])
try:
    AutoModelForCausalLM.from_pretrained(path, device_map="auto")
except RuntimeError as error:
    print(error)
sys.exit(7)
"""
RUN = "import sys\nfrom drumline.cli import main\nsys.exit(main(['run', *sys.argv[1:]]))"


def test_an_unmodified_script_runs_over_the_ranks_and_ends_them_with_its_code(
    with_tokenizer, tmp_path, start
):
    script = tmp_path / "unmodified.py"
    script.write_text(SCRIPT)
    master, server = start(RUN, 2, script, with_tokenizer)
    out, err = master.communicate(timeout=90)
    assert "ranks [0, 1]" in out and "torch.Size([1, 11])" in out and "55 54 10" in out, err
    assert "other ranks serve its first model" in out
    assert master.returncode == 7 and server.wait(timeout=10) == 7 and not server.stdout.read()


@pytest.mark.parametrize("is_read_before", [True, False])
def test_what_a_script_says_of_the_config_is_heard(checkpoints, tmp_path, is_read_before):
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
        with load_everywhere(type(plain), tmp_path, {**options, **settings}) as model:
            config = model.config
            logits = model(torch.tensor([[5, 6, 7]])).logits
            return config._attn_implementation, config.use_cache, logits.dtype, model.device_map

    found = launcher.launch(rank, nprocs=2, launcher="threads", timeout_s=60)[0]
    assert found[:3] == ("eager", False, torch.bfloat16) and found[3].ranks == [0, 1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "0.0.0.0"], "there is no key"),
        (["--api-key-file", "/dev/null"], "is empty"),
        (["--api-key-file", "/dev/null/key"], "cannot be read"),
        (["--max-length", "1000000"], "has positions for"),
    ],
)
def test_a_server_that_cannot_be_as_asked_does_not_start(checkpoints, capsys, options, said):
    pytest.importorskip("uvicorn", reason="runs after `pip install fastapi uvicorn`")
    assert main(["serve", "--model", str(checkpoints.llama()[1]), *options]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("line", ["serve", "bench -n 2"])
def test_a_model_that_makes_no_text_is_refused(checkpoints, warm, line):
    pytest.importorskip("uvicorn", reason="runs after `pip install fastapi uvicorn`")
    _, path = checkpoints.make("bert to serve", "BertForMaskedLM", **LLAMA)
    done = warm.run("-m", "drumline", *line.split(), "--model", path)
    assert done.returncode == 1 and "does not generate text" in done.stderr


def test_a_model_that_does_not_continue_text_is_not_served(checkpoints, capsys):
    pytest.importorskip("uvicorn", reason="runs after `pip install fastapi uvicorn`")
    small = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 9}
    _, path = checkpoints.make("t5 to serve", "T5ForConditionalGeneration", **small)
    assert main(["serve", "--model", str(path)]) == 1
    assert "serve a decoder" in capsys.readouterr().err
