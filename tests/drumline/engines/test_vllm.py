"""The adapter for vLLM beside a stand-in with the recorded signatures of the vLLM it is made for.

Beside vLLM itself: `make engines`.
"""

import importlib
import pkgutil
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore, ProcessGroup, irecv, isend

import launcher
from communicator import CommunicatorError, Unsupported
from coordinator import torch_private
from drumline.engines import parameters, record_of
from drumline.engines import vllm as entry
from tests.programs.recorded_interfaces import refusing, with_signature

# The adapter for CUDA is an example.
FOLDER = Path(__file__).parents[3] / "examples" / "vllm_cuda_plugin"
sys.path.insert(0, str(FOLDER))
cuda_entry = importlib.import_module("drumline_vllm_cuda")
sys.path.remove(str(FOLDER))

RECORD = {**record_of("vllm"), **record_of("vllm_cuda", cuda_entry.FOLDER)}
COMMUNICATORS = "vllm.distributed.device_communicators"
METHODS = {owner.rpartition(".")[2]: RECORD[owner] for owner in RECORD if owner != "version"}
# Of vLLM's base class, what does nothing there and nothing here.
LEFT = {"checkpoint_prepare", "checkpoint_restore", "suspend", "resume"}
# What works on top of the others, or has no shared memory to offer.
LEFT |= {"reduce_scatterv_into_output", "get_symmetric_memory_buffer"}
LEFT |= {"allocate_combine_input", "combine_into_output"}
# Of vLLM's communicator for CPUs: experts, over all_gatherv and reduce_scatterv.
EXPERTS = {"dispatch_router_logits", "dispatch", "combine"}
# Of vLLM's for CUDA, what stays its own, over its own NCCL.
CUDA_OWN = LEFT | EXPERTS | {"custom_all_gather", "custom_reduce_scatter"}
DEVICES = ["cpu", "cuda"]
OURS = ("drumline.", "drumline_vllm_cuda.")


def stand_in_class(name: str, *bases: type) -> type:
    """A class with the recorded methods, which all raise."""
    methods = {method: refusing(listed) for method, listed in METHODS[name].items()}
    kind = type(name, bases, methods)
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
    """Sets what the adapter uses."""
    self.cpu_group, self.use_all2all = cpu_group, use_all2all
    self.rank_in_group, self.world_size = cpu_group.rank(), cpu_group.size()
    self.ranks = [10 + rank for rank in range(self.world_size)]


@pytest.fixture
def vllm(monkeypatch):
    """The stand-in's modules; those of the adapter that import them are forgotten afterwards."""
    base = stand_in_class("DeviceCommunicatorBase")
    cpu, cuda = (stand_in_class(f"{name}Communicator", base) for name in ("Cpu", "Cuda"))
    recorded = METHODS["CudaCommunicator"]["__init__"]
    cuda.__init__ = with_signature(
        lambda self, *a, **options: base_init(self, *a, **options), recorded
    )
    cuda.destroy = lambda self: None
    platforms = {
        f"vllm.platforms.{kind}.Platform": type(
            "Platform",
            (),
            {
                "device_type": kind,
                "use_custom_allreduce": lambda: True,
                "check_and_update_config": classmethod(lambda cls, vllm_config: None),
            },
        )
        for kind in DEVICES
    }
    names = {
        "vllm": {"__version__": RECORD["version"]},
        "vllm.utils": {},
        "vllm.utils.import_utils": {
            "resolve_obj_by_qualname": lambda name: (
                platforms.get(name) or pkgutil.resolve_name(name)
            )
        },
        "vllm.platforms": {
            f"{kind}_platform_plugin": lambda kind=kind: f"vllm.platforms.{kind}.Platform"
            for kind in DEVICES
        },
        "vllm.distributed": {},
        COMMUNICATORS: {},
        f"{COMMUNICATORS}.base_device_communicator": {"DeviceCommunicatorBase": base},
        f"{COMMUNICATORS}.cpu_communicator": {"CpuCommunicator": cpu},
        f"{COMMUNICATORS}.cuda_communicator": {"CudaCommunicator": cuda},
    }
    for name, members in names.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["vllm"].platforms = sys.modules["vllm.platforms"]
    ours = [f"drumline.engines.vllm_{part}" for part in ("platform", "communicator")]
    ours += [f"drumline_vllm_cuda.{part}" for part in ("cuda_platform", "communicator")]
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield sys.modules["vllm"]
    for name in ours:
        sys.modules.pop(name, None)


@pytest.fixture
def groups(monkeypatch):
    """groups(rank, n): a process group that vLLM might pass, its store being that of all."""
    store = HashStore()
    monkeypatch.setattr(torch_private, "store_of", lambda group: store)
    return ProcessGroup


def imported_platform(device):
    entry_point = cuda_entry if device == "cuda" else entry
    module, _, name = entry_point.PLATFORM.rpartition(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of CUDA, where it was never run
        return getattr(importlib.import_module(module), name)


def communicator_class(device):
    return pkgutil.resolve_name(imported_platform(device).get_device_communicator_cls())


@pytest.fixture
def on_ranks(ranks, vllm, groups):
    """on_ranks(body, device): body(communicator of vLLM's group) on three ranks.

    That for CUDA gets the CPU as its device: what it asks of a Communicator is the same.
    """

    def run(body, device="cpu"):
        kind = communicator_class(device)

        def rank(info):
            device = torch.device("cpu")
            communicator = kind(groups(info.rank, 3), device=device, unique_name="tp:0")
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
    with pytest.raises(ValueError, match="'soon' is not a number of seconds"):
        launcher.engine_request("vllm")


def test_the_deadline_of_calls_is_the_users(monkeypatch):
    monkeypatch.setenv("DRUMLINE_VLLM", "1")
    assert entry.timeout_s() == 300
    monkeypatch.setenv("DRUMLINE_VLLM_TIMEOUT_S", "2.5")
    assert entry.timeout_s() == 2.5


@pytest.mark.parametrize("device", DEVICES)
def test_a_vllm_with_the_recorded_signatures_is_accepted_whatever_its_version(vllm, device):
    """0.33 was refused by its number, with every signature of 0.32."""
    vllm.__version__ = "7.0.dev3"
    configured(vllm, device)
    assert communicator_class(device)


@pytest.mark.parametrize(
    ("device", "owner", "method"),
    [
        ("cpu", "base_device_communicator.DeviceCommunicatorBase", "all_gatherv"),
        ("cpu", "cpu_communicator.CpuCommunicator", "send_tensor_dict"),
        ("cuda", "base_device_communicator.DeviceCommunicatorBase", "__init__"),
        ("cuda", "cuda_communicator.CudaCommunicator", "destroy"),
    ],
)
def test_a_vllm_with_another_signature_is_refused_by_its_name_before_a_worker_starts(
    vllm, device, owner, method
):
    kind, recorded = pkgutil.resolve_name(f"{COMMUNICATORS}.{owner}"), METHODS[owner.split(".")[1]]
    setattr(kind, method, refusing([*recorded[method], "stream=None"]))
    vllm.__version__ = "0.34.0"
    with pytest.raises(Unsupported, match=rf"vllm 0.34.0: .*{owner}.{method} .*stream=None.*unset"):
        configured(vllm, device)
    delattr(kind, method)
    if owner.startswith("base"):
        message = "is not there" if method != "__init__" else "is called with"
        with pytest.raises(Unsupported, match=rf"{method} {message}"):
            configured(vllm, device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_vllm_whose_class_has_another_name_is_refused_by_its_name(vllm, device):
    """It was an ImportError, which says nothing of drumline."""
    name = f"{device.capitalize()}Communicator"
    delattr(sys.modules[f"{COMMUNICATORS}.{device}_communicator"], name)
    with pytest.raises(Unsupported, match=rf"{name}\.\w+ is not there.*unset"):
        configured(vllm, device)


def configured(vllm, device):
    """Import the platform and pass it a config, as vLLM does before it starts workers."""
    imported_platform(device).check_and_update_config(None)


@pytest.mark.parametrize("device", DEVICES)
def test_a_vllm_for_another_device_is_refused(vllm, device):
    vllm.platforms.cpu_platform_plugin = vllm.platforms.cuda_platform_plugin = lambda: None
    with pytest.raises(Unsupported, match=r"vLLM detects no (CPUs|CUDA) here"):
        imported_platform(device)


@pytest.mark.parametrize("device", DEVICES)
def test_the_platform_is_the_one_that_vllm_detects_with_our_communicator(vllm, device):
    platform = imported_platform(device)
    assert platform.device_type == device
    bases = [base.__name__ for base in communicator_class(device).__mro__]
    assert platform.get_device_communicator_cls().endswith(f".{bases[0]}")
    assert f"{device.capitalize()}Communicator" in bases  # vLLM asks for it before it captures


def test_on_cuda_it_is_asked_for_by_a_variable_of_its_own_and_says_that_it_never_ran(
    vllm, monkeypatch
):
    monkeypatch.setenv("DRUMLINE_VLLM", "1")
    assert cuda_entry.platform() is None
    monkeypatch.setenv("DRUMLINE_VLLM_CUDA", "1")
    module = cuda_entry.platform().rpartition(".")[0]
    with pytest.warns(RuntimeWarning, match="never run on a GPU"):
        platform = importlib.import_module(module).DrumlineCudaPlatform
    assert not platform.use_custom_allreduce()
    table = (FOLDER / "pyproject.toml").read_text().partition('"vllm.platform_plugins"]')[2]
    assert f'= "{cuda_entry.__name__}:platform"' in table.partition("\n\n")[0]


def test_on_cuda_every_method_is_ours_with_vllms_arguments_or_vllms_own(vllm):
    kind = communicator_class("cuda")
    required = {**METHODS["DeviceCommunicatorBase"], **METHODS["CudaCommunicator"]}
    own = {name for name in required if getattr(kind, name).__module__.startswith(OURS)}
    assert own - {"__init__"} == set(required) - CUDA_OWN - {"__init__"}
    for name in own - {"__init__"}:
        assert parameters(getattr(kind, name)) == required[name], name


def test_on_cuda_results_are_new_tensors_as_vllms_operators_promise(on_ranks):
    def body(communicator, rank):
        rows = torch.arange(12.0).reshape(2, 6) + rank
        results = [
            communicator.all_reduce(rows),
            communicator.all_reduce(rows.t()),
            communicator.all_gather(rows, 1),
            communicator.reduce_scatter(rows, 1),
        ]
        assert rows.equal(torch.arange(12.0).reshape(2, 6) + rank)
        assert all(result.is_contiguous() for result in results)
        return [result.tolist() for result in results]

    rows = torch.arange(12.0).reshape(2, 6)
    total, joined = 3 * rows + 3, torch.cat([rows, rows + 1, rows + 2], 1)
    for rank, results in enumerate(on_ranks(body, "cuda")):
        part = total[:, 2 * rank : 2 * rank + 2].tolist()
        assert results == [total.tolist(), total.t().tolist(), joined.tolist(), part]


def test_on_cuda_the_end_aborts_where_a_graph_keeps_the_communicator(vllm):
    """A communicator on NCCL refuses to close while a CUDA graph that captured it is alive."""
    kind = communicator_class("cuda")
    communicator, calls = kind.__new__(kind), []

    def close():
        calls.append("close")
        raise CommunicatorError("1 CUDA graph(s)")

    communicator.comm = SimpleNamespace(close=close, abort=lambda: calls.append("abort"))
    communicator.destroy()
    assert calls == ["close", "abort"]


def test_every_method_of_vllms_base_class_is_here_with_its_arguments(vllm):
    kind = communicator_class("cpu")
    required = {**METHODS["DeviceCommunicatorBase"], **METHODS["CpuCommunicator"]}
    own = {name for name in required if getattr(kind, name).__module__.startswith(OURS)} - {
        "__init__"
    }
    assert own == set(required) - LEFT - EXPERTS - {"__init__"}
    for name in own:
        assert parameters(getattr(kind, name)) == required[name], name
    taken = {name.partition("=")[0] for name in parameters(kind.__init__)}
    passed = {"cpu_group", "device", "device_group", "unique_name", "use_all2all"}
    assert passed <= taken


@pytest.mark.parametrize("device", DEVICES)
def test_collectives_give_what_vllm_documents(on_ranks, device):
    def body(communicator, rank):
        rows = torch.arange(12.0).reshape(2, 6) + rank
        part = torch.full((rank + 1, 2), float(rank))
        strided = rows.t().contiguous() if rank == 1 else rows.clone().t()  # beside one that is not
        result = communicator.all_reduce(strided)
        if device == "cuda":
            strided = result
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
    for rank, results in enumerate(on_ranks(body, device)):
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
