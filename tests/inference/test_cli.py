"""The command line, as its user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from inference.cli import main

ROOT = Path(__file__).parents[2]


def test_plan_prints_the_map_the_room_and_the_hops(checkpoints, capsys):
    path = str(checkpoints.llama()[1])
    assert main(["plan", "--model", path, "--memory", "160KiB", "--ranks", "2"]) == 0
    out = capsys.readouterr().out
    assert "rank 0 cpu" in out and "rank 1 cpu" in out and "2 hops a token" in out


def test_plan_counts_the_cache_that_is_wanted(checkpoints, capsys):
    path = str(checkpoints.llama()[1])
    arguments = ["plan", "--model", path, "--memory", "160KiB", "160KiB", "--batch", "64"]
    assert main([*arguments, "--length", "1000"]) == 1
    assert "bytes" in capsys.readouterr().err


def test_plan_says_what_is_missing(checkpoints, capsys):
    assert main(["plan", "--model", str(checkpoints.llama()[1]), "--memory", "10KiB"]) == 1
    assert "are missing in all" in capsys.readouterr().err


@pytest.fixture
def with_tokenizer(checkpoints) -> Path:
    _, path = checkpoints.llama()
    words = Tokenizer(models.WordLevel({str(n): n for n in range(64)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0").save_pretrained(path)
    return path


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "inference", *map(str, arguments)]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=100)


def test_generate_streams_text_and_ends_with_a_summary(with_tokenizer):
    done = command("generate", "--model", with_tokenizer, "-n", 2, "--prompt", "5 6 7")
    assert done.returncode == 0, done.stderr
    assert "5 6 7" in done.stdout and "tokens/s" in done.stdout and "a hop" in done.stdout


def test_an_unmodified_script_runs_over_the_ranks(with_tokenizer, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], device_map='auto')\n"
        "print('ranks', getattr(model, 'device_map', None) and model.device_map.ranks)\n"
        "print(model.generate(torch.arange(3, 9)[None], max_new_tokens=5).shape)\n"
    )
    done = command("run", "-n", 2, script, with_tokenizer)
    assert done.returncode == 0, done.stderr
    assert "ranks [0, 1]" in done.stdout and done.stdout.count("torch.Size([1, 11])") == 1
