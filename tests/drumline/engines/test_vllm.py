"""The adapter for vLLM beside a stand-in with the recorded signatures of the vLLM it is made for.

Beside vLLM itself: `make engines`.
"""

import importlib
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore, ProcessGroup, irecv, isend

import launcher
from communicator import Unsupported
from communicator.torch_interop import store_coordinator
from drumline.engines import vllm as entry

RECORD = json.loads((Path(__file__).parent / "vllm_signatures.json").read_text())
COMMUNICATORS = "vllm.distributed.device_communicators"
# Of vLLM's base class, what does nothing there and nothing here.
LEFT = {"checkpoint_prepare", "checkpoint_restore", "suspend", "resume"}
# What works on top of the others, or has no shared memory to offer.
LEFT |= {"reduce_scatterv_into_output", "get_symmetric_memory_buffer"}
LEFT |= {"allocate_combine_input", "combine_into_output"}
# Of vLLM's communicator for CPUs: experts, over all_gatherv and reduce_scatterv.
EXPERTS = {"dispatch_router_logits", "dispatch", "combine"}


def stand_in_class(name: str, *bases: type) -> type:
    """A class with the recorded methods, which all raise."""

    def refuse(self, *args, **kwargs):
        raise NotImplementedError

    kind = type(name, bases, {method: refuse for method in RECORD[name]})
    if name == "DeviceCommunicatorBase":
        kind.__init__ = base_init
    return kind


def base_init(
    self,
    cpu_group,
    device=None,
    device_group=None,
    unique_name="",
    global_ranks=None,
    global_world_size=None,
    use_all2all=False,
):
    """The methods of vLLM's class that the adapter uses."""
    self.cpu_group, self.use_all2all = cpu_group, use_all2all
    self.rank_in_group, self.world_size = cpu_group.rank(), cpu_group.size()
    self.ranks = [10 + rank for rank in range(self.world_size)]


@pytest.fixture
def vllm(monkeypatch):
    """The stand-in's modules; those of the adapter that import them are forgotten afterwards."""
    base = stand_in_class("DeviceCommunicatorBase")
    cpu = stand_in_class("CpuCommunicator", base)
    platform = type("CpuPlatform", (), {"device_type": "cpu"})
    names = {
        "vllm": {"__version__": RECORD["version"]},
        "vllm.utils": {},
        "vllm.utils.import_utils": {"resolve_obj_by_qualname": lambda name: platform},
        "vllm.platforms": {"cpu_platform_plugin": lambda: "vllm.platforms.cpu.CpuPlatform"},
        "vllm.distributed": {},
        COMMUNICATORS: {},
        f"{COMMUNICATORS}.base_device_communicator": {"DeviceCommunicatorBase": base},
        f"{COMMUNICATORS}.cpu_communicator": {"CpuCommunicator": cpu},
    }
    for name, members in names.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["vllm"].platforms = sys.modules["vllm.platforms"]
    ours = [f"drumline.engines.vllm_{part}" for part in ("platform", "communicator")]
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield sys.modules["vllm"]
    for name in ours:
        sys.modules.pop(name, None)


@pytest.fixture
def groups(monkeypatch):
    """groups(rank, n): a process group that vLLM might pass, its store being that of all."""
    store = HashStore()
    monkeypatch.setattr(store_coordinator, "_get_process_group_store", lambda group: store)
    return ProcessGroup


@pytest.fixture
def on_ranks(ranks, vllm, groups):
    """on_ranks(body): body(communicator of vLLM's group) on three ranks."""
    kind = importlib.import_module("drumline.engines.vllm_communicator").VllmCommunicator

    def run(body):
        def rank(info):
            communicator = kind(groups(info.rank, 3), unique_name="tp:0")
            try:
                return body(communicator, info.rank)
            finally:
                communicator.destroy()

        return ranks(rank, 3)

    return run


def test_it_does_nothing_unless_it_was_asked_for(monkeypatch):
    for value in (None, "", "0"):
        if value is not None:
            monkeypatch.setenv("DRUMLINE_VLLM", value)
        assert entry.platform() is None
    monkeypatch.setenv("DRUMLINE_VLLM", "1")
    assert entry.platform() == "drumline.engines.vllm_platform.DrumlinePlatform"


def test_a_wrong_request_is_raised_where_vllm_does_not_swallow_it(monkeypatch, vllm):
    monkeypatch.setenv("DRUMLINE_VLLM", "yes")
    assert entry.platform() == entry.PLATFORM
    with pytest.raises(ValueError, match="DRUMLINE_VLLM='yes' is neither 1 nor 0"):
        importlib.import_module("drumline.engines.vllm_platform")
    monkeypatch.setenv("DRUMLINE_VLLM", "1")
    monkeypatch.setenv("DRUMLINE_VLLM_TIMEOUT_S", "soon")
    with pytest.raises(ValueError, match="'soon' is no number of seconds"):
        launcher.engine_request("vllm")


def test_the_deadline_of_calls_is_the_users(monkeypatch):
    monkeypatch.setenv("DRUMLINE_VLLM", "1")
    assert entry.timeout_s() == 300
    monkeypatch.setenv("DRUMLINE_VLLM_TIMEOUT_S", "2.5")
    assert entry.timeout_s() == 2.5


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0", "dev"])
def test_another_vllm_is_refused_with_what_to_do(vllm, version):
    vllm.__version__ = version
    with pytest.raises(Unsupported, match=rf"vllm {version}: .*vllm >= 0.32, < 0.33.*unset"):
        importlib.import_module("drumline.engines.vllm_platform")


def test_a_vllm_for_another_device_is_refused(vllm):
    vllm.platforms.cpu_platform_plugin = lambda: None
    with pytest.raises(Unsupported, match="not built for CPUs"):
        importlib.import_module("drumline.engines.vllm_platform")


def test_the_platform_is_the_one_that_vllm_detects_with_our_communicator(vllm):
    platform = importlib.import_module("drumline.engines.vllm_platform").DrumlinePlatform
    assert platform.device_type == "cpu"
    module, _, name = platform.get_device_communicator_cls().rpartition(".")
    assert hasattr(importlib.import_module(module), name)


def test_every_method_of_vllms_base_class_is_here_with_its_arguments(vllm):
    kind = importlib.import_module("drumline.engines.vllm_communicator").VllmCommunicator
    required = {**RECORD["DeviceCommunicatorBase"], **RECORD["CpuCommunicator"]}
    own = {name for name in required if name in vars(kind)} - {"__init__"}
    private = {name for name in required if name.startswith("_")}
    assert own == set(required) - LEFT - EXPERTS - private
    for name in own:
        parameters = inspect.signature(vars(kind)[name]).parameters.values()
        listed = [
            item.name if item.default is item.empty else f"{item.name}={item.default!r}"
            for item in parameters
        ]
        assert listed == required[name], name
    taken = inspect.signature(kind.__init__).parameters
    passed = {"cpu_group", "device", "device_group", "unique_name", "use_all2all"}
    assert passed <= set(taken)


def test_collectives_give_what_vllm_documents(on_ranks):
    def body(communicator, rank):
        rows = torch.arange(12.0).reshape(2, 6) + rank
        part = torch.full((rank + 1, 2), float(rank))
        strided = rows.clone().t()
        communicator.all_reduce(strided)  # in place, whatever its memory
        both = communicator.all_gatherv([part, part * 2], 0, [1, 2, 3])
        gathered = communicator.gather(part[:1], 2, 0)
        assert (gathered is None) == (rank != 2)
        return [
            communicator.all_reduce(rows.clone()).tolist(),
            strided.t().tolist(),
            communicator.all_gather(rows[:, :1], -1).tolist(),
            both[0].tolist(),
            both[1].tolist(),
            communicator.reduce_scatter(rows, -1).tolist(),
            communicator.reduce_scatterv(rows, 1, [1, 2, 3]).tolist(),
            None if gathered is None else gathered.tolist(),
            communicator.broadcast(part[:1].clone(), 1).tolist(),
        ]

    total = torch.arange(12.0).reshape(2, 6) * 3 + 3
    joined = [[0.0] * 2] + [[1.0] * 2] * 2 + [[2.0] * 2] * 3
    uneven = total.split([1, 2, 3], 1)
    for rank, results in enumerate(on_ranks(body)):
        assert results == [
            total.tolist(),
            total.tolist(),
            [[0.0, 1.0, 2.0], [6.0, 7.0, 8.0]],
            joined,
            [[2 * value for value in row] for row in joined],
            total[:, 2 * rank : 2 * rank + 2].tolist(),
            uneven[rank].tolist(),
            [[0.0] * 2, [1.0] * 2, [2.0] * 2] if rank == 2 else None,
            [[1.0, 1.0]],
        ]


def test_messages_between_stages_arrive(on_ranks):
    def body(communicator, rank):
        before, after = (rank - 1) % 3, (rank + 1) % 3
        if rank == 0:
            communicator.send(torch.ones(3))
            communicator.send_tensor_dict({"hidden": torch.ones(2), "step": 7}, 1)
        if rank == 1:
            assert communicator.recv(torch.Size([3]), torch.float32).tolist() == [1.0] * 3
            received = communicator.recv_tensor_dict(0)
            assert received["hidden"].tolist() == [1.0, 1.0] and received["step"] == 7
        result = torch.zeros(1)
        own = torch.tensor([float(rank)])
        messages = [
            SimpleNamespace(op=isend, tensor=own, peer=communicator.ranks[after]),
            SimpleNamespace(op=irecv, tensor=result, peer=communicator.ranks[before]),
        ]
        communicator.batch_isend_irecv(messages)
        return int(result)

    assert on_ranks(body) == [2, 0, 1]


def test_a_compiled_model_has_its_collectives_in_one_graph(on_ranks):
    def body(communicator, rank):
        @torch.compile(fullgraph=True, backend="eager")
        def layer(x):
            total = communicator.all_reduce(x.t() * 1)  # a product that is not contiguous
            return total, communicator.all_gather(x), communicator.reduce_scatter(x)

        x = torch.arange(6.0).view(2, 3) + rank
        return [result.tolist() for result in layer(x)]

    x = torch.arange(6.0).view(2, 3)
    total = (3 * x + 3).t().tolist()
    joined = torch.cat([x, x + 1, x + 2], 1).tolist()
    for rank, results in enumerate(on_ranks(body)):
        assert results == [total, joined, [[total[rank][0]], [total[rank][1]]]]
