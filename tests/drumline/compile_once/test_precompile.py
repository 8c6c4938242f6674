"""An artifact is built once, whoever fails and whatever happens to its file."""

import importlib
import inspect
import stat
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import filelock
import pytest
import torch
from torch import nn
from torch.nn import functional

from coordinator import Coordinator
from drumline import (
    BuildError,
    assert_identical_on_ranks,
    fingerprint,
    get_or_build,
    precompile_modules,
    timings,
)
from drumline.compile_once.artifact_cache import ArtifactCache
from drumline.compile_once.precompile import _compare_outputs, _texts, module_key

HERE = Path(__file__).parent
X = torch.ones(2, 3).t().contiguous()
precompile = importlib.import_module(
    "drumline.compile_once.precompile"
)  # the package has a function of it


class Builds:
    """A builder that counts; safe to call from several threads."""

    def __init__(self, data=b"compiled" * 1000):
        self.data, self.by = data, []

    def on(self, rank):
        def build():
            self.by.append(rank)
            return self.data

        return build


def fetch(builds, folders, keys=None):
    def rank(info):
        with Coordinator(info, timeout_s=20) as coor:
            key = keys[info.rank] if keys else "key"
            folder = folders[info.rank]
            return get_or_build(key, builds.on(info.rank), coor, folder=folder).read_bytes()

    return rank


def test_one_rank_builds_and_every_node_has_the_bytes(ranks, tmp_path):
    builds = Builds()
    folders = [tmp_path / name for name in ("a", "a", "b", "b")]
    assert ranks(fetch(builds, folders), 4, [2, 2]) == [builds.data] * 4
    assert builds.by == [0]
    assert ranks(fetch(builds, folders), 4, [2, 2]) == [builds.data] * 4
    assert builds.by == [0], "built again although every node had it"


def test_a_node_that_has_it_gives_it_to_one_that_has_not(ranks, tmp_path):
    builds = Builds()
    ArtifactCache(tmp_path / "b").store("key", b"from b")
    folders = [tmp_path / name for name in ("a", "b")]
    assert ranks(fetch(builds, folders), 2, [1, 1]) == [b"from b"] * 2
    assert not builds.by


def test_mixed_hardware_has_one_builder_for_each_key(ranks, tmp_path):
    builds = Builds()
    keys = ["new", "old", "new", "old"]
    ranks(fetch(builds, [tmp_path] * 4, keys), 4)
    assert sorted(builds.by) == [0, 1]


def test_a_builder_that_fails_reaches_every_rank_at_once(ranks_or_errors, tmp_path):
    def rank(info):
        def build():
            raise ValueError("no such instruction")

        with Coordinator(info, timeout_s=20) as coor:
            get_or_build("key", build, coor, folder=tmp_path)

    start = time.monotonic()
    for error in ranks_or_errors(rank, 4):
        assert isinstance(error, BuildError) and "no such instruction" in str(error)
    assert time.monotonic() - start < 10


def test_a_builder_may_take_longer_than_any_other_call(ranks, tmp_path, monkeypatch):
    """Compiling a large model takes longer than the Coordinator's deadline."""
    real, deadlines = Coordinator.allgather, []

    def allgather(self, data, *, timeout_s=None):
        deadlines.append(timeout_s)
        return real(self, data, timeout_s=timeout_s)

    monkeypatch.setattr(Coordinator, "allgather", allgather)
    ranks(fetch(Builds(), [tmp_path] * 2), 2)
    assert deadlines.count(timings.TIMINGS.load_s) == 2, (
        "one of each rank, while one of them builds"
    )


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: b"x" + d[1:], lambda d: b""])
def test_a_damaged_file_is_built_again(ranks, tmp_path, damage):
    builds = Builds()
    for _ in range(2):
        assert ranks(fetch(builds, [tmp_path] * 2), 2) == [builds.data] * 2
        path = ArtifactCache(tmp_path).path("key")
        path.write_bytes(damage(path.read_bytes()))
    assert builds.by == [0, 0]


@pytest.mark.parametrize("damage", [lambda d: b"\xff" + d[1:], lambda d: "é".encode() * 32])
def test_a_seal_that_is_no_text_is_a_damaged_one(tmp_path, damage):
    """Every launch failed from then on, until someone removed the file."""
    cache = ArtifactCache(tmp_path / "c")
    cache.store("key", b"data")
    seal = cache.folder / "key.seal"
    seal.write_bytes(damage(seal.read_bytes()))
    assert cache.load("key") is None


def test_a_secret_that_was_cut_short_authenticates_nothing(tmp_path):
    cache = ArtifactCache(tmp_path / "c")
    cache.store("key", b"data")
    (cache.folder / "secret").write_bytes(b"")
    assert cache.load("key") is None
    cache.store("key", b"data")
    assert cache.load("key") == b"data" and (cache.folder / "secret").stat().st_size == 32


def test_a_secret_is_nobody_elses_to_read(tmp_path):
    """It was as the umask had it."""
    cache = ArtifactCache(tmp_path / "c")
    cache.store("key", b"data")
    assert {stat.S_IMODE(p.stat().st_mode) for p in cache.folder.glob("secret")} == {0o600}


def test_a_file_that_someone_else_made_is_not_believed(tmp_path):
    """A right digest does not prove who wrote the file; the secret of another cache is not ours."""
    mine, other = ArtifactCache(tmp_path / "mine"), ArtifactCache(tmp_path / "other")
    other.store("key", b"evil")
    for name in ("key.artifact", "key.seal"):
        (mine.folder / name).write_bytes((other.folder / name).read_bytes())
    assert mine.load("key") is None


def test_an_artifact_that_is_just_being_replaced_is_not_removed(tmp_path):
    """Who read between the artifact and its seal took it for damaged, and removed it."""
    cache = ArtifactCache(tmp_path / "c")
    cache.store("key", b"old")
    seal = (cache.folder / "key.seal").read_bytes()
    cache.store("key", b"new")
    sealed = (cache.folder / "key.seal").read_bytes()
    (cache.folder / "key.seal").write_bytes(seal)
    assert cache.load("key") is None
    (cache.folder / "key.seal").write_bytes(sealed)
    assert cache.load("key") == b"new"


@pytest.mark.parametrize("name", ["key.artifact", "key.seal", "secret", "secret~.lock"])
def test_what_lies_in_place_of_a_file_of_the_cache_is_named(tmp_path, name):
    """The error was an IsADirectoryError, of which nothing said what to do."""
    cache = ArtifactCache(tmp_path / "c")
    cache.store("key", b"data")
    (cache.folder / name).unlink()
    (cache.folder / name).mkdir()
    for use in (lambda: cache.load("key"), lambda: cache.store("key", b"data")):
        with pytest.raises(BuildError, match=f"{name}.* Delete what is there"):
            use()
    (cache.folder / "other.lock").mkdir()
    with pytest.raises(BuildError, match=r"other.lock.* Delete what"), cache.lock("other"):
        pass
    with pytest.raises(BuildError, match="Or give a folder of your own"):
        ArtifactCache(__file__)


def test_a_write_that_fails_leaves_no_file(tmp_path, monkeypatch):
    cache = ArtifactCache(tmp_path / "c")
    cache.store("key", b"data")
    before = sorted(cache.folder.iterdir())

    def full(file):
        raise OSError("No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(BuildError, match="No space left"):
        cache.store("other", b"data")
    assert sorted(cache.folder.iterdir()) == before


def test_a_lock_that_is_never_free_ends_at_the_deadline(tmp_path, monkeypatch):
    """An artifact by the name of the secret waited for its own lock."""
    monkeypatch.setattr(timings, "TIMINGS", replace(timings.TIMINGS, load_s=0.2))
    cache = ArtifactCache(tmp_path / "c")
    with cache.lock("secret"):
        cache.store("secret", b"data")
        with pytest.raises(BuildError, match="cannot be used"), cache.lock("secret"):
            pass
    assert cache.load("secret") == b"data"


@pytest.mark.parametrize("key", ["../outside", "a/b", ""])
def test_a_key_that_would_lead_out_of_the_folder_is_refused(tmp_path, key):
    with pytest.raises(BuildError, match="not a file name"):
        ArtifactCache(tmp_path / "c").store(key, b"data")


def test_a_folder_that_others_can_enter_is_refused(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(BuildError, match="chmod 700"):
        ArtifactCache(folder)
    assert stat.S_IMODE(ArtifactCache(tmp_path / "new").folder.stat().st_mode) == 0o700


def test_an_artifact_that_arrives_is_stored_under_the_lock(ranks, tmp_path, monkeypatch):
    """The artifact of one launch could lie beside the seal of another."""
    plain = ArtifactCache.store

    def store(cache, key, data):
        with pytest.raises(filelock.Timeout):
            filelock.FileLock(cache.folder / f"{key}.lock", timeout=0).acquire()
        plain(cache, key, data)

    monkeypatch.setattr(ArtifactCache, "store", store)
    builds = Builds()
    folders = [tmp_path / name for name in ("a", "b")]
    assert ranks(fetch(builds, folders), 2, [1, 1]) == [builds.data] * 2


def test_racing_launches_build_once(ranks, tmp_path):
    builds, done = Builds(), []
    slow = Builds()
    slow.on = lambda rank: lambda: time.sleep(0.3) or builds.on(rank)()
    work = fetch(slow, [tmp_path] * 2)
    threads = [threading.Thread(target=lambda: done.append(ranks(work, 2))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [[builds.data] * 2] * 4
    assert len(builds.by) == 1


def test_a_builder_that_was_killed_leaves_no_lock(start, tmp_path):
    code = (
        "import sys, time; from drumline.compile_once.artifact_cache import ArtifactCache\n"
        "with ArtifactCache(sys.argv[1]).lock('key'): print('held', flush=True); time.sleep(60)"
    )
    (holder,) = start(code, 1, tmp_path / "c")
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    holder.wait()
    begun = time.monotonic()
    with ArtifactCache(tmp_path / "c").lock("key"):
        assert time.monotonic() - begun < 20


def one():
    return 1


def other():
    return 2


def test_a_key_says_everything_that_matters_and_nothing_else(monkeypatch, tmp_path):
    key = fingerprint(one, shape=[1, 2], mesh={"tp": 2})
    assert key == fingerprint(one, mesh={"tp": 2}, shape=[1, 2])
    monkeypatch.chdir(tmp_path)
    assert key == fingerprint(one, shape=[1, 2], mesh={"tp": 2})
    assert key != fingerprint(other, shape=[1, 2], mesh={"tp": 2})
    assert key != fingerprint(one, shape=[2, 2], mesh={"tp": 2})
    assert key != fingerprint(one, shape=[1, 2], mesh={"tp": 4})
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert key != fingerprint(one, shape=[1, 2], mesh={"tp": 2})


class Inner(nn.Module):
    def forward(self, x):
        return x


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.weight = Inner(), nn.Parameter(torch.ones(2))
        self.scale, self.name_or_path = 2.0, "here"

    def forward(self, x):
        return self.inner(x) * self.weight * self.scale


def set_to(name, value):
    return lambda model: setattr(model, name, value)


@pytest.mark.parametrize(
    "change",
    [
        *(set_to("scale", 3.0), set_to("training", False), set_to("sizes", (1, 2))),
        *(set_to("sizes", {"a": [1, None]}), set_to("act", functional.relu)),
        set_to("act", partial(functional.gelu, approximate="tanh")),
    ],
)
def test_the_key_of_a_model_knows_its_settings(change):
    """A model in training took what had been compiled for evaluation, and the canary stopped it."""
    first, second = Outer(), Outer()
    second.name_or_path = "elsewhere"
    with torch.no_grad():
        second.weight.mul_(2)
    first.act = second.act = functional.gelu
    assert module_key(first, (X,)) == module_key(second, (X,))
    change(second)
    assert module_key(first, (X,)) != module_key(second, (X,))


def test_the_key_of_a_model_takes_settings_of_every_kind_and_leaves_out_its_device():
    first, second = Outer(), Outer()
    for device, model in enumerate((first, second)):
        model.hf_device_map, model.act, model.tree = {"": device}, torch.Tensor.relu, "leaf"
        for _ in range(40):
            model.tree = {"in": model.tree}
    assert module_key(first, (X,)) == module_key(second, (X,))
    second.act = torch.Tensor.tanh
    assert module_key(first, (X,)) != module_key(second, (X,))


def test_the_key_of_a_model_knows_the_dtype_that_it_is_cast_to():
    keys = [module_key(Outer(), (X,))]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            keys.append(module_key(Outer(), (X,)))
    assert len({*keys}) == 3


def test_an_artifact_of_other_settings_is_named_with_what_to_do(ranks_or_errors, monkeypatch):
    """What no key says, such as a function that a module looks up, left an AssertionError."""
    monkeypatch.setattr(precompile, "get_or_build", lambda *_, **__: Path("key.artifact"))
    monkeypatch.setattr(precompile, "load_compiled", lambda *_: lambda x: 2 * x)

    def rank(info):
        with Coordinator(info, timeout_s=20) as coor:
            precompile_modules([Inner()], (X,), coor)

    for error in ranks_or_errors(rank, 2):
        assert isinstance(error, BuildError)
        assert "key.artifact computes other values" in str(error) and "facts=" in str(error)


def test_the_key_of_a_model_knows_the_text_of_the_modules_in_it(monkeypatch):
    before = module_key(Outer(), (X,))
    plain = inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda one: plain(one) + "# edited")
    assert module_key(Outer(), (X,)) != before
    assert _texts(nn.Sequential(nn.Linear(2, 2))) == []
    assert _texts(Outer()) == [sys.modules[__name__]]


def test_the_key_of_a_model_knows_its_inputs():
    model = Outer()
    inputs = [
        (X,),
        (X.t(),),
        (X.t().contiguous().t(),),
        (X.double(),),
        (X[:1],),
        (X, 1),
        (X, 2),
        (X, None),
        (X, {"mask": X}),
    ]
    assert len({module_key(model, one) for one in inputs}) == len(inputs)


def test_a_key_knows_the_instructions_of_the_processor(monkeypatch):
    """Inductor compiles for this very processor, and another with AVX-512 has other ones."""
    key = fingerprint(one)
    monkeypatch.setattr(precompile, "_cpu_flags", lambda: ["avx512f"])
    assert fingerprint(one) != key
    monkeypatch.undo()
    assert len(precompile._cpu_flags()) > 3 and fingerprint(one) == key


def test_a_canary_that_sings_differently_on_one_rank_stops_all(ranks_or_errors):
    def rank(info):
        with Coordinator(info, timeout_s=20) as coor:
            assert_identical_on_ranks(coor, torch.ones(3))
            assert_identical_on_ranks(coor, torch.ones(3) * (1 + (info.rank == 2)))

    for error in ranks_or_errors(rank, 3):
        assert isinstance(error, BuildError) and "[2]" in str(error)


def test_modules_that_differ_are_not_compiled_as_one(ranks_or_errors):
    def rank(info):
        modules = [nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2, bias=False)]
        with Coordinator(info, timeout_s=20) as coor:
            precompile_modules(modules, (torch.ones(1, 2),), coor)

    for error in ranks_or_errors(rank, 2):
        assert isinstance(error, BuildError) and "module 2 differs from the first" in str(error)


def test_a_module_whose_text_is_unknown_is_refused_on_every_rank(ranks_or_errors):
    """As of a cell of a notebook. The other ranks waited for one that had raised."""
    unknown = type("Unknown", (nn.Linear,), {"__module__": "cell"})

    def rank(info):
        modules = [(unknown if info.rank else nn.Linear)(2, 2)]
        with Coordinator(info, timeout_s=20) as coor:
            precompile_modules(modules, (torch.ones(1, 2),), coor)

    for error in ranks_or_errors(rank, 2):
        assert isinstance(error, BuildError) and "built-in class" in str(error)


def test_a_module_without_weights_is_where_its_inputs_are():
    assert module_key(Inner(), (X,)) != module_key(Inner(), (X.to("meta"),))


@pytest.mark.parametrize(
    ("dtype", "error", "is_close"),
    [(torch.bfloat16, 2, True), (torch.bfloat16, 9, False), (torch.float32, 2, False)],
)
def test_what_is_compiled_may_differ_by_roundings_of_its_dtype(dtype, error, is_close):
    """Of numbers up to 128, one that is small because large ones cancelled."""
    expected = torch.tensor([128, 0.5, -torch.inf], dtype=dtype)
    found = expected + torch.tensor([0, error, 0], dtype=dtype)

    def compare():
        _compare_outputs([lambda x: {"a": (found, 1)}], [lambda x: {"a": (expected, 1)}], (X,))

    if is_close:
        compare()
    else:
        with pytest.raises(AssertionError, match="not close"):
            compare()


def test_a_model_compiled_once_runs_everywhere_with_each_ranks_weights_and_no_compiler(
    warm, tmp_path
):
    script = HERE / "precompile_ranks.py"
    done = warm.run("-m", "launcher", "run", "-n", "2", script, tmp_path / "cache", timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("of its own weights") == 2
