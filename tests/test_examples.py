"""Every example and recipe runs as it stands, under our launcher and under torchrun."""

import functools
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = (ROOT / "examples" / "recipes", ROOT / "examples")  # whose last is of another launcher
EXAMPLES = sorted(FOLDERS[1].glob("[0-9]*.py"))
SCRIPTS = [path for folder in FOLDERS for path in folder.glob("*.py") if path.name != "model.py"]
SCREEN = 60
EVERY = (ROOT / "tests" / "programs" / "every_script.py", *FOLDERS)


@pytest.fixture
def torchrun(warm, commands):
    """Runs a script on two ranks of torchrun."""
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return functools.partial(warm.run, *start, env=commands, timeout=150)


def _have_all_ended(done: subprocess.CompletedProcess[str], ranks: int) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    for path in SCRIPTS:
        assert done.stdout.count(f"ended: {path.stem}\n") == ranks, done.stdout


@pytest.mark.timeout(160)
def test_every_example_and_recipe_runs_under_our_launcher(warm):
    _have_all_ended(warm.run("-m", "launcher", "run", "-n", "4", *EVERY, timeout=150), 4)


@pytest.mark.timeout(160)
def test_every_example_and_recipe_runs_under_torchrun(torchrun):
    _have_all_ended(torchrun(*EVERY), 2)


@pytest.mark.timeout(160)
def test_trainers_of_others_run_on_our_backend_under_torchrun(torchrun):
    done = torchrun(EVERY[0], ROOT / "examples" / "trainers")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks agree" in done.stdout and "2 ranks: the loss fell" in done.stdout


def test_an_executor_answers_and_tells_of_a_worker_that_is_killed(warm):
    done = warm.run(ROOT / "examples" / "executor" / "executor.py")
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("equal: True", "lost: rank 1", "raised: rank 1"):
        assert line in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_fits_a_screen_and_says_how_to_run_it(path):
    text = path.read_text()
    assert len(text.splitlines()) <= SCREEN
    assert f"examples/{path.name}" in text.split('"""')[1]


def test_the_snippet_of_the_readme_runs(warm, tmp_path):
    readme = (ROOT / "README.md").read_text()
    snippet = readme.split("```python\n# hello.py\n")[1].split("```")[0]
    script = tmp_path / "snippet.py"
    script.write_text(snippet)
    done = warm.run("-m", "launcher", "run", "-n", "2", script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[2.0, 2.0, 2.0, 2.0]" in done.stdout
