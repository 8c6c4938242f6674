"""The first screen of the README, as a stranger types it."""

import re
import secrets
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()


@pytest.fixture
def script(with_tokenizer, tmp_path):
    """The program of the first screen, with another model in place of the demo's, and its words."""
    text = README.split("```python\n")[1].split("```")[0].replace("The try statement", "5 6 7")
    (path,) = re.findall('path = "(.*?)"', text)
    file = tmp_path / "generate.py"
    file.write_text(text.replace(path, str(with_tokenizer)))
    return file


def _lines(script):
    """The commands below it, one for one machine and those of two."""
    lines = re.findall("^    (drumline (?:auto|run|join) .*?)  +#", README, re.MULTILINE)[:3]
    return [line.replace("generate.py", str(script)) for line in lines]


def test_the_program_of_the_first_screen_is_not_changed_and_has_the_tokens_of_one_process(
    warm, script
):
    alone = warm.run(script)
    program, *words = _lines(script)[0].split()
    assert program == "drumline"
    spread = warm.run("-m", "drumline", *words)
    assert spread.returncode == 0, spread.stderr
    assert spread.stdout.replace("[0] ", "") == alone.stdout and "5 6 7 55 54" in alone.stdout


def test_the_command_of_the_kubernetes_manifest_runs_that_program_on_two_machines(
    warm, hosts, commands, script
):
    alone = warm.run(script)
    manifest = (ROOT / "docs" / "kubernetes.yaml").read_text()
    (line,) = re.findall(r"exec (drumline auto .*?)\n +env:", manifest, re.DOTALL)
    line = " ".join(line.split()).replace("ranks-0.ranks", "10.77.0.1")
    environ = {**commands, "DRUMLINE_TOKEN": secrets.token_hex(32)}
    pods = [
        hosts.start(
            n, ["bash", "-c", f"cd {script.parent} && HOSTNAME=ranks-{n}; {line}"], **environ
        )
        for n in range(2)
    ]
    outputs = [pod.communicate(timeout=100)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    assert outputs[0].replace("[0] ", "") == alone.stdout


def test_two_machines_need_the_line_and_the_token_alone(warm, hosts, commands, script):
    alone = warm.run(script)
    environ = {**commands, "DRUMLINE_TOKEN": secrets.token_hex(32)}
    lines = [line.replace("10.0.0.1", "10.77.0.1") for line in _lines(script)[1:]]
    lines[0] = lines[0].replace("--nnodes 2", "--nnodes 2 --master-addr 10.77.0.1")
    agents = [hosts.start(n, ["bash", "-c", line], **environ) for n, line in enumerate(lines)]
    told = [agent.communicate(timeout=100)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], told
    assert told[0].replace("[0] ", "") == alone.stdout
