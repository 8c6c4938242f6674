"""Models by their id, from a server that speaks the endpoints of the Hub."""

from __future__ import annotations

import errno
import hashlib
import http.server
import json
import os
import re
import shutil
import threading
from pathlib import Path

import pytest
import torch
from huggingface_hub import hf_hub_download

import drumline
import launcher
from coordinator import Coordinator
from drumline.cli import main
from drumline.contact.loading.hub import is_hub_id, local_folder
from drumline.errors import CheckpointError
from drumline.planner.load_options import LoadOptions
from drumline.strategies import opening
from drumline.strategies.opening import open_checkpoint
from drumline.strategies.with_model import read_generator, with_model

COMMIT = "c0ffee" + 34 * "0"
OTHER_COPIES = ("pytorch_model.bin", "original/model.safetensors", "consolidated.safetensors")
"""The same weights, as transformers does not load them."""
ID = "tests/llama"


class Hub(http.server.ThreadingHTTPServer):
    """One model. `asked` holds the files that were fetched, `headers` those of which a part was,
    `tokens` what clients proved."""

    lookups = 0  # of which commit is meant

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), Answer)
        self.folder, self.asked, self.headers, self.tokens = folder, [], [], set()


class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.server.tokens.add(self.headers.get("Authorization"))
        path = self.path.partition("?")[0]
        if re.fullmatch(f"/api/models/{ID}(/revision/(main|v1|{COMMIT}))?", path):
            self.server.lookups += 1
            return self._send(json.dumps({"id": ID, "sha": COMMIT}).encode())
        if path == f"/api/models/{ID}/tree/{COMMIT}":
            sizes = {file.name: file.stat().st_size for file in self.server.folder.iterdir()}
            sizes |= dict.fromkeys(OTHER_COPIES, 1 << 30)
            files = [
                {"type": "file", "path": name, "size": size, "oid": hashlib.sha1(b"").hexdigest()}
                for name, size in sizes.items()
            ]
            return self._send(json.dumps(files).encode())
        found = re.fullmatch(f"/{ID}/resolve/{COMMIT}/(.+)", path)
        if not found or not (self.server.folder / found[1]).is_file():
            return self._send(b"{}", 404, **{"X-Error-Code": "RepoNotFound"})
        content = (self.server.folder / found[1]).read_bytes()
        etag = hashlib.sha256(content).hexdigest()
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if span:
            self.server.headers.append(found[1])
            return self._send(content[int(span[1]) : int(span[2]) + 1], 206)
        if self.command == "GET":
            self.server.asked.append(found[1])
        return self._send(content, **{"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'})

    def _send(self, content, status=200, **headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": len(content)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_):
        """Nothing: pytest shows what failed."""


@pytest.fixture
def hub(checkpoints, tmp_path, monkeypatch):
    """A server, and an empty cache. What huggingface_hub has read from the environment is set."""
    from huggingface_hub import constants

    _, path = checkpoints.llama()
    server = Hub(path)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.chdir(tmp_path)
    yield server
    server.shutdown()
    server.server_close()


def _generate(**options):
    def rank():
        with drumline.load(ID, max_memory=[1 << 30] * 2, **options) as model:
            return model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8).tolist()

    return launcher.launch(rank, nprocs=2, launcher="threads", timeout_s=60)[0]


def test_a_model_of_the_hub_is_fetched_once_and_generates_the_tokens_of_its_folder(
    checkpoints, hub, monkeypatch
):
    plain, _ = checkpoints.llama()
    tokens = plain.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8).tolist()
    assert _generate() == tokens
    assert "Bearer hf_secret" in hub.tokens
    fetched = sorted(hub.asked)
    assert "model.safetensors" in fetched and not {*OTHER_COPIES} & {*fetched}
    assert _generate(revision="v1") == tokens and sorted(hub.asked) == fetched
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert _generate(revision=COMMIT) == tokens and sorted(hub.asked) == fetched


def test_options_say_how_files_come_from_the_hub(hub, tmp_path):
    """They were taken without effect, as with a token that the environment does not have."""
    with pytest.raises(launcher.LaunchError, match="is not a folder here"):
        _generate(local_files_only=True)
    options = {"token": "hf_other", "cache_dir": tmp_path / "elsewhere"}
    _generate(**options)
    assert "Bearer hf_other" in hub.tokens and "Bearer hf_secret" not in hub.tokens
    assert not (tmp_path / "cache").exists()
    (once,) = [name for name in hub.asked if name.endswith(".safetensors")]
    _generate(**options, force_download=True)
    assert hub.asked.count(once) == 2


@pytest.mark.parametrize("command", ["plan", "generate"])
def test_a_model_of_pickles_alone_is_said_to_be_one(checkpoints, hub, capsys, tmp_path, command):
    """It said to check the path, that of the cache."""
    hub.folder = tmp_path / "files"
    shutil.copytree(checkpoints.llama()[1], hub.folder)
    (hub.folder / "model.safetensors").rename(hub.folder / "pytorch_model.bin")
    options = {"plan": ["--memory", "1GiB"], "generate": ["--prompt", "hello"]}[command]
    assert main([command, "--model", ID, *options]) == 1
    assert f"{ID} of the Hub has no .safetensors file" in capsys.readouterr().err


def test_an_id_that_the_hub_does_not_have_is_one_error_on_every_rank(hub, ranks_or_errors):
    def rank(info):
        with Coordinator(info) as coor:
            return drumline.load("nobody/nothing", coor=coor)

    for error in ranks_or_errors(rank, 2):
        assert isinstance(error, CheckpointError)
        assert "nobody/nothing is not a folder here, and the Hub does not give" in str(error)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_cache_that_cannot_be_written_is_named(hub, monkeypatch, number):
    """Its model was said not to be on the Hub."""

    def download(*arguments, **options):
        raise OSError(number, os.strerror(number), "/cache/blob")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(
        CheckpointError, match=r"cannot be kept in the cache .*/cache/blob.*HF_HOME"
    ):
        local_folder(ID)


def test_commands_take_an_id(hub, capsys):
    assert main(["plan", "--model", ID, "--memory", "1GiB", "1GiB", "--revision", "v1"]) == 0
    assert "of weights" in capsys.readouterr().out
    assert hub.lookups == 1


@pytest.mark.parametrize("size", ["10GB", "100KB"])
def test_a_plan_is_made_of_the_headers_of_files_that_are_not_here(
    checkpoints, hub, capsys, tmp_path, size
):
    """100KB: several files, and an index."""
    plain, whole = checkpoints.llama()
    hub.folder = tmp_path / "files"
    plain.save_pretrained(hub.folder, max_shard_size=size)
    words = ["plan", "--memory", "1GiB", "1GiB", "--model"]
    assert main([*words, str(whole)]) == 0
    expected = capsys.readouterr().out
    assert main([*words, ID]) == 0
    assert capsys.readouterr().out == expected
    files = {file.name for file in hub.folder.glob("*.safetensors")}
    assert (len(files) > 1) == (size == "100KB")
    assert {*hub.headers} == files and not files & {*hub.asked}
    assert "config.json" in hub.asked
    _generate()
    hub.headers.clear()
    assert main([*words, ID]) == 0
    assert capsys.readouterr().out == expected and not hub.headers  # the files are here now


def _planned(model, capsys):
    assert main(["plan", "--memory", "1GiB", "1GiB", "--model", str(model)]) == 0
    return capsys.readouterr().out


def test_a_plan_leaves_a_download_that_broke_off_as_it_is(checkpoints, hub, capsys, tmp_path):
    """The file that had come was overwritten with zeros, in the cache of huggingface_hub, and the
    model was loaded with them."""
    plain, whole = checkpoints.llama()
    hub.folder = tmp_path / "files"
    plain.save_pretrained(hub.folder, max_shard_size="100KB")
    first, *others = sorted(hub.folder.glob("*.safetensors"))
    here = Path(hf_hub_download(ID, first.name, revision=COMMIT))
    assert _planned(ID, capsys) == _planned(whole, capsys)
    assert {*hub.headers} == {file.name for file in others}
    is_whole = here.read_bytes() == first.read_bytes()
    assert is_whole
    assert _generate() == plain.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8).tolist()


def test_a_plan_finds_weights_by_another_name_and_without_the_hub(
    checkpoints, hub, capsys, monkeypatch, tmp_path
):
    """One that loads could not be planned, not even once it was here."""
    hub.folder = tmp_path / "files"
    expected = _planned(shutil.copytree(checkpoints.llama()[1], hub.folder), capsys)
    (hub.folder / "model.safetensors").rename(hub.folder / "weights.safetensors")
    assert _planned(ID, capsys) == expected and "weights.safetensors" not in hub.asked
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["plan", "--memory", "1GiB", "--model", ID]) == 1
    assert "see that HF_HUB_OFFLINE is not set" in capsys.readouterr().err
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    _generate()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert _planned(ID, capsys) == expected


def test_a_header_that_breaks_off_is_one_error(hub, capsys, monkeypatch):
    monkeypatch.setattr(Answer, "_send", _breaking(Answer._send))
    assert main(["plan", "--memory", "1GiB", "--model", ID]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{ID} is not a folder here, and the Hub does not give" in error


def _breaking(send):
    def half(self, content, status=200, **headers):
        return send(self, content[: 99 if status == 206 else None], status, **headers)

    return half


def test_a_command_looks_an_id_up_once(hub, checkpoints, tmp_path):
    """It was looked up four times, with a bar each: for the tokenizer, the config and the model."""
    folders: list[Path] = []

    def rank():
        with_model(ID, lambda model: model.config, [1 << 30] * 2, before=folders.append)

    launcher.launch(rank, nprocs=2, launcher="threads", timeout_s=60)
    assert hub.lookups == 1
    assert read_generator(folders[0], 8).vocab_size == 64 and hub.lookups == 1


def test_a_part_of_a_download_is_not_read(checkpoints, tmp_path):
    """A machine where a plan had been made had no weights, and its ranks did not get them from rank
    0: the model was not whole."""
    plain, _ = checkpoints.llama()
    folder = tmp_path / "models--tests--llama" / "snapshots" / COMMIT
    plain.save_pretrained(folder, max_shard_size="100KB")
    assert opening._has_files(folder, LoadOptions())
    next(folder.glob("*.safetensors")).unlink()
    assert not opening._has_files(folder, LoadOptions())
    folder = folder.rename(tmp_path / "copy")
    assert opening._has_files(folder, LoadOptions())  # a copy that is not whole is an error


def test_a_rank_that_is_given_a_part_of_a_download_is_sent_its_layers(
    checkpoints, on_master, tmp_path
):
    """As commands give it the folder of rank 0; it was taken for a copy that is not whole."""
    plain, _ = checkpoints.llama()
    here, part = (tmp_path / host / "models--a--b" / "snapshots" / COMMIT for host in "01")
    for folder in (here, part):
        plain.save_pretrained(folder, max_shard_size="100KB")
    next(part.glob("*.safetensors")).unlink()
    tokens = torch.tensor([[5, 6, 7]])
    logits = on_master(here, 2, lambda model: model(tokens).logits, part)
    assert torch.equal(logits, plain(tokens).logits)


def test_a_folder_is_opened_in_four_exchanges(checkpoints, monkeypatch):
    """It had become six: where the files are was shared twice, and the config as well."""
    shared: list[str] = []
    for name in ("run_on_all_ranks", "allgather_object"):
        method = getattr(Coordinator, name)

        def counting(coor, *args, name=name, method=method, **options):
            shared.append(name)
            return method(coor, *args, **options)

        monkeypatch.setattr(Coordinator, name, counting)
    with Coordinator() as coor:
        open_checkpoint(coor, checkpoints.llama()[1], LoadOptions())
    assert len(shared) == 4


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("org/name", True),
        ("Qwen/Qwen3-0.6B", True),
        ("/org/name", False),
        ("./org/name", False),
        ("gpt2", True),
        ("model.gguf", False),
        ("..", False),
        ("org/name/more", False),
        ("../name", False),
        (Path("org/name"), True),
    ],
)
def test_what_is_taken_for_an_id(tmp_path, monkeypatch, path, expected):
    monkeypatch.chdir(tmp_path)
    assert is_hub_id(path) == expected
    os.makedirs("org/name")
    assert not is_hub_id("org/name")
