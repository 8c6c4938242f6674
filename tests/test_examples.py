"""Every example runs as its first lines say, under our launcher and under torchrun, unchanged."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
SCREEN = 60
OURS = ("-m", "launcher", "run", "-n", "4", "--preload", "inference")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
EVERY = ROOT / "tests" / "programs" / "every_script.py"


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=ROOT)


@pytest.mark.parametrize(("start", "ranks"), [(OURS, 4), (TORCHRUN, 2)], ids=["ours", "torchrun"])
def test_every_example_runs_under(start, ranks):
    done = _run(sys.executable, *start, str(EVERY), str(ROOT / "examples"))
    assert done.returncode == 0, done.stdout + done.stderr
    for path in EXAMPLES:
        assert done.stdout.count(f"ended: {path.stem}\n") == ranks, done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_fits_a_screen_and_says_how_to_run_it(path):
    text = path.read_text()
    assert len(text.splitlines()) <= SCREEN
    assert f"examples/{path.name}" in text.split('"""')[1]


def test_the_snippet_of_the_readme_runs(tmp_path):
    readme = (ROOT / "README.md").read_text()
    snippet = readme.split("```python\n")[1].split("```")[0]
    script = tmp_path / "snippet.py"
    script.write_text(snippet)
    done = _run(sys.executable, "-m", "launcher", "run", "-n", "2", str(script))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[2.0, 2.0, 2.0, 2.0]" in done.stdout
