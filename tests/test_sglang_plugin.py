"""The adapter for SGLang beside a stand-in with the recorded interface of its SGLang.

SGLang itself was never run with it: it does not install without CUDA.
"""

import importlib
import pkgutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore, ProcessGroup

from communicator import Unsupported
from coordinator import torch_private
from drumline.engines import parameters, record_of
from tests.programs.recorded_interfaces import refusing, with_signature

FOLDER = Path(__file__).parent.parent / "examples" / "sglang_plugin"
sys.path.insert(0, str(FOLDER))
entry = importlib.import_module("drumline_sglang")
sys.path.remove(str(FOLDER))

RECORD = record_of("sglang", entry.FOLDER)
FACTS = RECORD["facts"]
BACKEND = "get_torch_distributed_backend_str"
REGISTER = RECORD["sglang.srt.plugins.hook_registry.HookRegistry"]["register"]


@pytest.fixture
def sglang(monkeypatch):
    """The stand-in's modules, with what the record has; SGLang's CPU engine is chosen."""
    mixin = type("CpuDeviceMixin", (), {BACKEND: with_signature(lambda self: "gloo", ["self"])})
    register = with_signature(lambda cls, *arguments: None, REGISTER)
    group = {method: refusing(listed) for method, listed in RECORD[entry.GROUP].items()}
    names = {
        "sglang": {},
        "sglang.version": {"__version__": RECORD["version"]},
        "sglang.srt": {},
        "sglang.srt.platforms": {"_is_cpu_available": lambda: True},
        "sglang.srt.platforms.cpu": {
            "CpuDeviceMixin": mixin,
            "CpuSRTPlatform": type("CpuSRTPlatform", (mixin,), {}),
        },
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {
            "HookType": SimpleNamespace(AROUND="around"),
            "HookRegistry": type("HookRegistry", (), {"register": classmethod(register)}),
        },
        "sglang.srt.distributed": {},
        "sglang.srt.distributed.parallel_state": {
            "GroupCoordinator": type("GroupCoordinator", (), group)
        },
    }
    for name, members in names.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    monkeypatch.delitem(sys.modules, "drumline_sglang.cpu_platform", raising=False)
    monkeypatch.setenv("DRUMLINE_SGLANG", "1")
    yield sys.modules["sglang"]
    sys.modules.pop("drumline_sglang.cpu_platform", None)


def imported_platform():
    module, _, name = entry.platform().rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_it_does_nothing_unless_it_was_asked_for(monkeypatch):
    monkeypatch.delenv("DRUMLINE_SGLANG", raising=False)
    assert entry.platform() is None and entry.hooks() is None


def test_the_entry_points_are_in_the_groups_where_sglang_looks():
    project = (FOLDER / "pyproject.toml").read_text()
    for group, name in (("PLATFORM_PLUGINS_GROUP", "platform"), ("GENERAL_PLUGINS_GROUP", "hooks")):
        table = project.partition(
            f'[project.entry-points."{FACTS[f"sglang.srt.plugins.{group}"]}"]'
        )
        assert table[2].partition("\n\n")[0].endswith(f'drumline = "{entry.__name__}:{name}"')
        assert callable(getattr(entry, name))


def test_the_platform_is_sglangs_for_cpus_with_our_backend(sglang):
    platform = imported_platform()
    assert platform.__mro__[1] is sys.modules["sglang.srt.platforms.cpu"].CpuSRTPlatform
    assert "CpuDeviceMixin" in FACTS["sglang.srt.platforms.cpu.CpuSRTPlatform"]
    recorded = RECORD["sglang.srt.platforms.cpu.CpuDeviceMixin"][BACKEND]
    assert parameters(getattr(platform, BACKEND)) == recorded
    assert getattr(platform(), BACKEND)() in torch.distributed.Backend.backend_list


@pytest.mark.parametrize(
    ("owner", "function"),
    [
        ("sglang.srt.platforms", "_is_cpu_available"),
        ("sglang.srt.platforms.cpu.CpuDeviceMixin", BACKEND),
        ("sglang.srt.plugins.hook_registry.HookRegistry", "register"),
        (entry.GROUP, "all_gather"),
    ],
)
def test_a_sglang_with_another_signature_is_refused_by_its_name(sglang, owner, function):
    """A release was refused by its number; now any is accepted that the record matches."""
    sglang.version.__version__ = "0.7.0"
    imported_platform()().get_torch_distributed_backend_str()
    sys.modules.pop("drumline_sglang.cpu_platform")
    setattr(pkgutil.resolve_name(owner), function, refusing(["self", "more"]))
    with pytest.raises(Unsupported, match=rf"sglang 0.7.0: {owner}.{function} .*self, more.*unset"):
        imported_platform()().get_torch_distributed_backend_str()


def test_sglang_for_another_device_is_refused(sglang):
    sglang.srt.platforms._is_cpu_available = lambda: False
    with pytest.raises(Unsupported, match="without SGLANG_USE_CPU_ENGINE=1"):
        imported_platform()


def test_a_wrong_request_is_raised_where_sglang_does_not_swallow_it(sglang, monkeypatch):
    monkeypatch.setenv("DRUMLINE_SGLANG", "yes")
    with pytest.raises(ValueError, match="DRUMLINE_SGLANG='yes' is neither 1 nor 0"):
        imported_platform()


def test_hooks_are_registered_around_the_calls_of_sglangs_groups(sglang):
    registered = []
    registry = sglang.srt.plugins.hook_registry.HookRegistry
    registry.register = lambda *arguments: registered.append(arguments)
    with pytest.warns(UserWarning, match="no model was ever run"):
        entry.hooks()
    assert [item.partition("=")[0] for item in REGISTER[1:4]] == ["target", "hook", "hook_type"]
    assert len(registered) == 3
    for target, hook, kind in registered:
        assert kind == "around" and target == f"{entry.GROUP}.{hook.__name__}"
        assert parameters(hook)[1:] == ["group", *RECORD[entry.GROUP][hook.__name__][1:]]


def test_the_calls_of_a_group_are_ours_and_of_one_rank_sglangs(ranks, sglang, monkeypatch):
    store = HashStore()
    monkeypatch.setattr(torch_private, "store_of", lambda group: store)

    def body(info):
        group = SimpleNamespace(world_size=3, cpu_group=ProcessGroup(info.rank, 3))
        sums = [entry.all_reduce(None, group, torch.ones(4)).tolist() for _ in range(2)]
        joined = entry.all_gather(None, group, torch.full((2, 1), float(info.rank)))
        part = entry.reduce_scatter_along_dim(None, group, torch.arange(6.0).view(2, 3))
        group.drumline_communicator.close()
        return sums, joined.tolist(), part.flatten().tolist()

    sums, joined = [[3.0] * 4] * 2, [[0.0, 1.0, 2.0]] * 2
    assert ranks(body, 3) == [(sums, joined, [3.0 * rank, 3.0 * rank + 9]) for rank in range(3)]
    alone = SimpleNamespace(world_size=1)
    for hook in (entry.all_reduce, entry.all_gather, entry.reduce_scatter_along_dim):
        assert hook(lambda *arguments: arguments, alone, torch.ones(1))[0] is alone
