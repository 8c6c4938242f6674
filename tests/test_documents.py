"""What the documents point at is there, and what they tell to type does what they say.

A block of commands has a comment above it that says how it is held to its word:

<!-- test: run -->                   typed here, in a folder with the page's files, and must succeed
<!-- test: run, needs mpiexec -->    the same, where that is installed
<!-- test: run, from source -->      the same, beside csrc/ and examples/
<!-- test: fails -->                 typed here, and must not succeed
<!-- tested by: FILE::TEST -->       more machines or engines than this: held by that test
<!-- shown -->                       above a block of text: its lines are what was printed
"""

import argparse
import ast
import contextlib
import fnmatch
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

import communicator.cli
import drumline.cli
import launcher.cli
from launcher.cli import run_options
from launcher.launch_info import CHOICE, LOG_LEVEL
from launcher.runtime import log_setup

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("docs/reference/*.md")])
DOCUMENTS = sorted([*ROOT.glob("*.md"), *PAGES, *ROOT.glob("examples/**/*.md")])
BLOCK = re.compile(r"(?:<!-- ([^\n]*?) -->\n)?```sh\n(.*?)```", re.DOTALL)
SHOWN = re.compile(r"\s*<!-- shown -->\n```text\n(.*?)```", re.DOTALL)
FILE = re.compile(r'```python title="(.*?)"\n(.*?)```', re.DOTALL)
LAYERS = ("launcher", "coordinator", "communicator", "drumline")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_map_names_functions_that_exist():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rows = re.findall(r"^\| .* \| (.*) \|$", text, re.MULTILINE)
    named = [pair for row in rows for pair in re.findall(r"`([\w/]+\.\w+)`, `(\w+)", row)]
    ways = re.findall(r"^.{12}([\w/]+\.\w+) +(\w+(?:, \w+)*)", text, re.MULTILINE)
    assert len(named) > 8 and len(ways) > 8
    named += [(path, name) for path, names in ways for name in names.split(", ")]
    for path, name in named:
        assert name in _definitions(ROOT / path), f"{path} defines no {name}"


def _definitions(path: Path) -> set[str]:
    """The names of the functions and classes that a file defines, not of those it only uses."""
    if path.suffix == ".py":
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        return {node.name for node in ast.walk(ast.parse(path.read_text())) if type(node) in kinds}
    # In C++ a body follows the parameters of what is defined.
    body = r"\b(\w+)\([^;{}]*\)[\w\s]*(?::[^;{}]*)?\{"
    return {*re.findall(body, path.read_text())} - {"if", "for", "while", "switch"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_parts_of_files_that_pages_include_are_there():
    """The site could not be built: a page included a table that was not measured yet. Another page
    showed the line instead of the file, once a formatter had taken it for Python."""
    for page in PAGES:
        for line in re.findall(r"^--\s*8.*$", page.read_text(), re.MULTILINE):
            include = re.fullmatch(r'--8<-- "([^":]+):?(.*)"', line)
            assert include and (ROOT / include[1]).is_file(), f"{page}: {line}"
            text = (ROOT / include[1]).read_text()
            assert not include[2] or f"[start:{include[2]}]" in text, f"{page}: {line}"


RUN = [page for page in PAGES if "<!-- test:" in page.read_text()]


@pytest.mark.timeout(300)  # of a page of ten commands
@pytest.mark.parametrize("page", RUN, ids=_name)
def test_the_commands_of_a_page_run_as_printed(page, tmp_path, commands):
    for name, text in FILE.findall(page.read_text()):
        (tmp_path / name).write_text(text)
    for block in BLOCK.finditer(page.read_text()):
        kind, _, condition = (block[1] or "").partition(", ")
        if not kind.startswith("test: ") or not _can_run(condition, tmp_path):
            continue
        done = _typed(block[2], tmp_path, commands)
        printed = done.stdout + done.stderr
        assert (done.returncode == 0) == (kind == "test: run"), printed
        shown = SHOWN.match(page.read_text(), block.end())
        for line in shown[1].splitlines() if shown else []:
            assert line in printed


def _can_run(condition: str, folder: Path) -> bool:
    word, _, name = condition.partition(" ")
    if word == "from":
        for part in ("csrc", "examples"):
            (folder / part).symlink_to(ROOT / part)
    return word != "needs" or shutil.which(name) is not None


def _typed(lines: str, folder: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """As a shell does that stops at the first failure."""
    own = {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    return subprocess.run(
        ["bash", "-e", "-c", lines],
        cwd=folder,
        env={**os.environ, **own, **environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )


RUNNING = ROOT / "docs" / "running.md"


@pytest.fixture
def who(tmp_path):
    (text,) = [text for name, text in FILE.findall(RUNNING.read_text()) if name == "who.py"]
    (tmp_path / "who.py").write_text(text)
    return tmp_path / "who.py"


def test_the_commands_for_two_machines_run_as_printed(hosts, commands, who):
    words = {"who.py": who, "--nproc-per-node 4": "--nproc-per-node 2"}
    output = "".join(hosts.typed(RUNNING, commands, **words))  # torchrun does not keep lines apart
    lines = [f"rank {n} of 4, local rank {n % 2}, hosts 2" for n in range(4)]
    assert sorted(re.findall("rank .*? hosts 2", output)) == lines, output


def test_our_commands_for_two_machines_run_as_printed_and_their_traces_are_joined(
    hosts, commands, who
):
    """With a rank on each, and --trace as well."""
    start = "drumline run --nnodes 2 --node-rank"
    traces = f"{who.parent}/$(hostname).json"
    words = {"-n 4": f"-n 1 --trace {traces}", "who.py": who}
    assert hosts.typed(RUNNING, commands, start, **words) == [
        f"[{n}] rank {n} of 2, local rank 0, hosts 2\n" for n in range(2)
    ]
    files = sorted(map(str, who.parent.glob("*.json")))
    joined = [sys.executable, "-m", "launcher", "trace", *files, "--into", who.parent / "both.json"]
    told = subprocess.run(joined, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"launcher|rank \d", told) == ["launcher", "launcher", "rank 0", "rank 1"]


@pytest.mark.soak
def test_the_tutorials_model_runs_on_two_machines(hosts, commands, tmp_path):
    page = ROOT / "docs" / "tutorial.md"
    for name, text in FILE.findall((ROOT / "docs" / "quickstart.md").read_text()):
        (tmp_path / name).write_text(text.replace('"tiny"', f'"{tmp_path}/tiny"'))
    _typed("python tiny.py", tmp_path, commands)
    start = "drumline run --nnodes 2"
    told = hosts.typed(page, commands, start, **{"generate.py": tmp_path / "generate.py"})
    (tokens,) = re.findall(r"\[1, 2, 3, 4, 5, .*\]", "".join(told))
    assert len(tokens.split(",")) == 13


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_job_that_is_stopped_saves_the_step_of_all_ranks(warm, tmp_path, number):
    (script,) = [text for _, text in FILE.findall((ROOT / "docs" / "training.md").read_text())]
    (tmp_path / "resume.py").write_text(
        script.replace('"checkpoint.pt", 300', '"checkpoint.pt", 10**9')
    )
    words = ["-m", "launcher", "run", "-n", "2", "resume.py"]
    job = warm.start(*words, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    assert job.stdout.readline().startswith("[0] step 100: loss")
    job.send_signal(number)
    output, _ = job.communicate(100)
    assert "saved step" in output and job.returncode == 128 + number
    assert (tmp_path / "checkpoint.pt").exists()


def test_the_recording_of_the_first_screen_runs_its_lines_and_is_that_of_the_file():
    page, (head, *events) = (ROOT / "README.md").read_text(), _json_lines("docs/two-machines.cast")
    lines = [text.removesuffix("\r\n") for _, _, text in events]
    shown = page.split("`make recording` -->\n```text\n")[1].split("```\n")[0].splitlines()
    assert head["version"] == 2 and [line[8:] for line in shown] == lines
    for typed in (line.split("$ ")[1] for line in lines if "$ " in line):
        assert re.search(rf"^    {re.escape(typed)} +#", page, re.MULTILINE), typed
    assert any("[0] The try statement" in line for line in lines)


def _json_lines(name: str) -> list[Any]:
    return [json.loads(line) for line in (ROOT / name).read_text().splitlines()]


def test_the_kubernetes_manifest_is_valid():
    validate = pytest.importorskip("kubernetes_validate")
    yaml = pytest.importorskip("yaml")
    documents = list(yaml.safe_load_all((ROOT / "docs" / "kubernetes.yaml").read_text()))
    for document in documents:
        validate.validate(document, validate.latest_version(), strict=True)
    (pods,) = [document["spec"] for document in documents if document["kind"] == "StatefulSet"]
    (container,) = pods["template"]["spec"]["containers"]
    words = container["args"][0].replace("${HOSTNAME##*-}", "0").split()
    job = _parser("drumline.cli").parse_args(words[words.index("drumline") + 1 :])
    assert job.nnodes == pods["replicas"]
    assert job.master_addr == f"{pods['serviceName']}-0.{pods['serviceName']}"
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    (folder,) = re.findall(r"^WORKDIR (/work)$", (ROOT / "docs" / "Dockerfile").read_text(), re.M)
    assert f"{folder}/{job.script}" in mounted


def test_a_container_is_built_without_what_git_ignores():
    names = (ROOT / ".dockerignore").read_text().split()
    for ignored in (ROOT / ".gitignore").read_text().split():
        path = ignored.strip("/") if ignored.startswith("/") else f"**/{ignored.strip('/')}"
        assert any(fnmatch.fnmatch(path, name) for name in names), ignored


def test_the_variables_and_exit_codes_of_the_page_are_those_of_the_code():
    page = (ROOT / "docs" / "settings.md").read_text()
    for level in log_setup.LEVELS[:-1]:
        assert f"`{level}`" in page
    assert f"`{LOG_LEVEL}`" in page
    assert f"`{CHOICE}`" in page
    for code in re.findall(r"^  ([\d-]+) ", run_options.EPILOG, re.MULTILINE):
        assert re.search(rf"^\| {code.replace('-', ' to ')}\b", page, re.MULTILINE), code


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_command_of_a_page_is_held_by_a_test(page):
    for how, commands in BLOCK.findall(page.read_text()):
        assert how.startswith(("test: run", "test: fails", "tested by: ")), f"untested: {commands}"
        if how.startswith("tested by: "):
            path, _, test = how.removeprefix("tested by: ").partition("::")
            assert f"def {test}(" in (ROOT / path).read_text(), how


def _parse_command(words: list[str]) -> None:
    """Parse a command of `drumline`, or the one of a lower layer that it stands for."""
    module, _ = drumline.cli.DELEGATED.get(words[0], ("drumline.cli", ""))
    parser = launcher.cli.parse if module == "launcher.cli" else _parser(module).parse_args
    parser(words)


def _parser(module: str) -> argparse.ArgumentParser:
    return importlib.import_module(module).parser()


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_test_and_path_that_a_page_names_exists(page):
    text = page.read_text()
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    names = re.findall(r"`(test_\w+)`", text)
    assert [name for name in names if f"def {name}(" not in tests] == []
    folders = "|".join((*LAYERS, "csrc", "docs", "tests", "benchmarks", "examples"))
    paths = re.findall(rf"`((?:{folders})/[\w/.]*)`", text)
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert set(missing) <= {"communicator/communicator.h"}  # of an installed drumline


COMMANDS = [
    *drumline.cli.DELEGATED,
    *(command.name for command in drumline.cli.command_options.COMMANDS),
]
PARSERS = {
    "python -m launcher": launcher.cli.parse,
    "python -m communicator": communicator.cli.parser().parse_args,
    "python -m drumline": _parse_command,
    "drumline": _parse_command,
    "torchrun": get_args_parser().parse_args,
}


def _lines(document: Path) -> list[list[str]]:
    """The commands of a document, in words: lines in fences, or set in by four."""
    fenced = re.findall(r"^```[^\n]*\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line.strip() for block in fenced for line in block.splitlines()]
    lines += [line.strip() for line in re.findall(r"^    .*", document.read_text(), re.MULTILINE)]
    starts = ("make ", *(f"{command} " for command in PARSERS if command != "drumline"))
    starts += tuple(f"drumline {name} " for name in COMMANDS)  # a sentence may begin with its name
    return [shlex.split(line, comments=True) for line in lines if line.startswith(starts)]


WITH_COMMANDS = [document for document in DOCUMENTS if _lines(document)]


@pytest.mark.parametrize("document", WITH_COMMANDS, ids=_name)
def test_every_command_of_a_document_has_options_that_are_known(document, capsys):
    """Also those that are too long, or need too many machines, to be run by a test."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in _lines(document):
        if words[0] == "make":
            assert "-C" in words or all(word in targets or "=" in word for word in words[1:])
            continue
        command = next(name for name in PARSERS if words[: len(name.split())] == name.split())
        with contextlib.suppress(SystemExit):
            PARSERS[command](words[len(command.split()) :])
        assert capsys.readouterr().err == "", words


def test_the_package_is_what_the_documents_install():
    _, _, rest = (ROOT / "pyproject.toml").read_text().partition("optional-dependencies]")
    offered = set(re.findall(r"^(\w+) = \[", rest.partition("\n[")[0], re.MULTILINE))
    text = "".join(document.read_text() for document in DOCUMENTS)
    extras = re.findall(r'(?:"\.|whl\)|drumline)\[([\w,]+)\]', text)
    named = {name for names in extras for name in names.split(",")}
    assert named and named <= offered


def _exceptions() -> set[str]:
    """Every public exception of the layers that derives from one that users know.

    Those that derive from Exception alone are caught by the layer that raises them.
    """
    bases = {}
    for layer in LAYERS:
        for path in (ROOT / layer).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    bases.setdefault(node.name, set()).update(map(ast.unparse, node.bases))
    found: set[str] = {"RuntimeError", "ValueError", "TypeError", "SystemExit", "OSError"}
    while more := {name for name in bases if bases[name] & found} - found:
        found |= more
    return found & bases.keys()


def test_the_page_of_errors_has_every_exception_and_no_other():
    table = (ROOT / "docs" / "errors.md").read_text()
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert named == _exceptions()


@pytest.mark.parametrize("layer", LAYERS)
def test_the_page_of_a_layer_is_in_the_navigation_with_its_reference(layer):
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert f"- {layer}.md" in navigation and f"- reference/{layer}.md" in navigation


def _source(name: str) -> str:
    """The text of a module, or of the __init__ of a package; nothing if it is neither."""
    path = ROOT.joinpath(*name.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    files = [file, file.with_suffix(".pyi")]
    return "".join(file.read_text() for file in files if file.exists())


def test_what_pages_name_in_full_is_there_and_in_the_reference():
    text = "".join(page.read_text() for page in PAGES)
    reference = "".join(page.read_text() for page in ROOT.glob("docs/reference/*.md"))
    shown = set(re.findall(r"^::: ([\w.]+)", reference, re.MULTILINE))
    named = set(re.findall(rf"`((?:{'|'.join(LAYERS)})\.[\w.]*\w)[`(]", text))
    for name in named - {"communicator.h", "communicator.backends"}:
        above, _, last = name.rpartition(".")
        assert _source(name) or re.search(rf"\b{last}\b", _source(above)), f"there is no {name}"
        assert {name, above} & shown, f"the reference leaves out {name}"


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert {page.relative_to(ROOT / "docs").as_posix() for page in PAGES} == set(
        re.findall(r"- ([\w/-]+\.md)", navigation)
    )


def test_the_site_names_the_version():
    (version,) = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert f"site_name: drumline {version}\n" in (ROOT / "mkdocs.yml").read_text()
