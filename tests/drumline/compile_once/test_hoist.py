"""A program made for one device runs on another, wherever in it the device was written."""

import operator
import re
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import fx, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as control_map
from torch._higher_order_ops.scan import scan
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves

from drumline import (
    HoistError,
    HoistReport,
    UnmappedDevice,
    assert_device,
    check_devices,
    hoist,
    hoist_package,
)
from drumline.compile_once import device_mapping

HERE = Path(__file__).parent
CUDA = torch.device("cuda:0")
TO_CPU = {"cuda:0": "cpu"}
X = torch.arange(4.0)


def graph_of(build, root=None):
    """A GraphModule of one input, and what build(graph, x) makes of it."""
    graph = fx.Graph()
    graph.output(build(graph, graph.placeholder("x")))
    return fx.GraphModule(root or nn.Module(), graph)


class Where(NamedTuple):
    devices: list

    def __getitem__(self, name):
        return self.devices if name == "where" else tuple.__getitem__(self, name)


@torch.library.custom_op("hoist_test::filled", mutates_args=())
def filled(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.ones(4, device=device)


@filled.register_fake
def _(x, device):
    return torch.empty(4, device=device)


@torch.library.custom_op("hoist_test::named", mutates_args=())
def named(x: torch.Tensor, device: str) -> torch.Tensor:
    return torch.ones(4, device=device)


@named.register_fake
def _(x, device):
    return torch.empty(4, device=device)


def pick(devices, x):
    return x.to(devices["where"][0])


fx.wrap("pick")

PLACES = {
    "a device in a factory": lambda g, x: g.call_function(torch.ones, (4,), {"device": CUDA}),
    "a string in a factory": lambda g, x: g.call_function(torch.ones, (4,), {"device": "cuda:0"}),
    "no number": lambda g, x: g.call_function(torch.ones, (4,), {"device": "cuda"}),
    "an operator": lambda g, x: g.call_function(
        torch.ops.aten.arange.default, (4,), {"device": CUDA}
    ),
    "a position of an operator": lambda g, x: g.call_function(
        torch.ops.aten.to.device, (x, CUDA, torch.float32)
    ),
    "a string at a position": lambda g, x: g.call_method("to", (x, "cuda:0")),
    "a device at a position": lambda g, x: g.call_method("to", (x, CUDA)),
    "a string behind a dtype": lambda g, x: g.call_method("to", (x,), {"device": "cuda:0"}),
    "a method named after it": lambda g, x: g.call_method("cuda", (x,)),
    "a method with a number": lambda g, x: g.call_method("cuda", (x, 0)),
    "a method with a device by name": lambda g, x: g.call_method(
        "cuda", (x,), {"device": "cuda:0"}
    ),
    "a method of factories": lambda g, x: g.call_method("new_ones", (x, 4), {"device": CUDA}),
    "nested arguments": lambda g, x: g.call_function(pick, ({"where": [CUDA]}, x)),
    "a number at a position": lambda g, x: g.call_method("to", (x, 0)),
    "a method called as a function": lambda g, x: g.call_function(torch.Tensor.cuda, (x, 0)),
    "a number by name": lambda g, x: g.call_method("to", (x,), {"device": 0}),
    "a number in a factory": lambda g, x: g.call_function(torch.ones, (4,), {"device": 0}),
    "a string that an operator names a device": lambda g, x: g.call_function(
        torch.ops.hoist_test.named.default, (x, "cuda:0")
    ),
    "the only operator of its name": lambda g, x: g.call_function(
        torch.ops.hoist_test.filled, (x, "cuda:0")
    ),
    "a named tuple": lambda g, x: g.call_function(pick, (Where([CUDA]), x)),
    "a number of torch.device": lambda g, x: g.call_method(
        "to", (x, g.call_function(torch.device, (0,)))
    ),
    "a list": lambda g, x: g.call_function(pick, ({"where": [CUDA, CUDA]}, x)),
    "a call of torch.device": lambda g, x: g.call_method(
        "to", (x, g.call_function(torch.device, ("cuda", 0)))
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_device_is_found_in(place):
    module, report = graph_of(PLACES[place]), HoistReport()
    named = re.compile(r"[.'\"_]cuda|to\(0\)|device = 0|device\(0\)")
    assert named.search(module.code)
    hoist(module, TO_CPU, inputs=(X,), report=report)
    assert not named.search(module.code)
    assert sum(report.changed.values()) == (2 if place == "a list" else 1)
    assert module(X).device == torch.device("cpu")


@pytest.mark.parametrize("device", ["cpu", "meta", "cuda:1"])
def test_other_devices_stay(device):
    module = graph_of(
        lambda g, x: g.call_function(torch.ones, (4,), {"device": torch.device(device)})
    )
    before, report = module.code, HoistReport()
    hoist(module, {"cuda:0": "cuda:3"}, report=report)
    assert module.code == before and not report.changed
    assert list(report.kept.values()) == (["cuda:1"] if device == "cuda:1" else [])


def test_in_strict_mode_a_device_that_is_not_mapped_is_an_error_that_names_the_node():
    module = graph_of(lambda g, x: g.call_function(torch.ones, (4,), {"device": "cuda:1"}))
    with pytest.raises(UnmappedDevice, match=r"node ones.*cuda:1"):
        hoist(module, {"cuda:0": "cuda:3"}, strict=True)


def two_devices(graph, x):
    one = graph.call_function(torch.ones, (4,), {"device": torch.device("cuda:0")})
    two = graph.call_function(torch.ones, (4,), {"device": torch.device("cuda:1")})
    return one, two


def test_devices_are_swapped_at_once_and_not_one_after_the_other():
    module = graph_of(two_devices)
    hoist(module, {"cuda:0": "cuda:1", "cuda:1": "cuda:0"})
    found = [n.kwargs["device"].index for n in module.graph.nodes if n.op == "call_function"]
    assert found == [1, 0]


def test_hoisting_to_where_it_is_or_twice_changes_nothing():
    module = graph_of(two_devices)
    before, report = module.code, HoistReport()
    hoist(module, {"cuda:0": "cuda:0"}, report=report)
    assert module.code == before and not report.changed
    hoist(module, {"cuda:0": "cuda:3"})
    once = module.code
    hoist(module, {"cuda:0": "cuda:3"}, report=report)
    assert module.code == once and not report.changed


def test_a_device_without_number_is_left_to_mean_the_current_one_if_asked():
    module = graph_of(lambda g, x: g.call_function(torch.ones, (4,), {"device": "cuda"}))
    hoist(module, {"cuda:0": "cuda:3"}, indexless="keep")
    assert "'cuda'" in module.code


@torch.library.custom_op("hoist_test::label", mutates_args=())
def label(x: torch.Tensor, text: str) -> torch.Tensor:
    assert text == "cuda:0"
    return x.clone()


@label.register_fake
def _(x, text):
    return torch.empty_like(x)


def test_a_string_that_only_looks_like_a_device_is_left_alone():
    op = torch.ops.hoist_test.label.default
    module = graph_of(lambda g, x: g.call_function(op, (x, "cuda:0")))
    assert torch.equal(hoist(module, TO_CPU, inputs=(X,))(X), X)


def test_autocast_keeps_its_type_unless_the_type_changes():
    enter = torch.amp.autocast_mode._enter_autocast
    module = graph_of(
        lambda g, x: g.call_function(enter, ("cuda", torch.bfloat16, True, True)) and x
    )
    assert "'cuda'" in hoist(module, {"cuda:0": "cuda:3"}).code
    assert "'cpu'" in hoist(module, {"cuda:3": "cpu"}).code


def test_the_type_of_an_autocast_may_be_given_by_name():
    enter = torch.amp.autocast_mode._enter_autocast
    options = {"device_type": "cuda", "dtype": None, "enabled": True, "cache_enabled": True}
    module = graph_of(lambda g, x: g.call_function(enter, (), options) and x)
    assert "'cpu'" in hoist(module, TO_CPU).code


def test_the_current_device_is_set_to_the_new_one_or_refused():
    module = graph_of(lambda g, x: g.call_function(torch.cuda.set_device, (0,)) and x)
    assert "set_device(3)" in hoist(module, {"cuda:0": "cuda:3"}).code
    default = graph_of(lambda g, x: g.call_function(torch.set_default_device, ("cuda:0",)) and x)
    assert "'cuda:3'" in hoist(default, {"cuda:0": "cuda:3"}).code
    with pytest.raises(HoistError, match="set_device for cuda:3"):
        hoist(module, {"cuda:3": "cpu"})


@pytest.mark.parametrize("waits", [torch.cuda.synchronize, torch.accelerator.synchronize])
def test_to_wait_for_a_device_where_there_is_none_is_refused_before_it_runs(waits):
    """It named no device, so it went through, and raised on ranks without any when it ran."""
    module = graph_of(lambda g, x: g.call_function(waits) and x)
    assert "synchronize()" in hoist(module, {"cuda:0": "cuda:3"}).code
    with pytest.raises(
        HoistError, match=r"synchronize for the current device.*does not exist for cpu"
    ):
        hoist(module, {"cuda:0": "cpu"})


def test_the_number_of_an_accelerator_and_a_name_of_a_device_are_changed_too():
    number = torch.accelerator.set_device_index
    module = graph_of(lambda g, x: g.call_function(number, (0,)) and x)
    assert "set_device_index(3)" in hoist(module, {"cuda:0": "cuda:3"}).code
    named = graph_of(lambda g, x: g.call_function(torch.cuda.set_device, ("cuda:0",)) and x)
    assert "'cuda:3'" in hoist(named, {"cuda:0": "cuda:3"}).code


def test_a_type_of_tensors_that_means_the_current_device_is_reported():
    report = HoistReport()
    module = graph_of(lambda g, x: g.call_method("type", (x, "torch.cuda.FloatTensor")))
    hoist(module, {"cuda:0": "cpu"}, report=report)
    assert report.kept == {"node type_1": "cuda"}


def test_what_a_user_noted_of_a_node_moves_too():
    module = graph_of(lambda g, x: g.call_function(torch.relu, (x,)))
    for node in module.graph.nodes:
        node.meta["custom"] = {"where": [CUDA], "name": node.name}
    hoist(module, TO_CPU)
    noted = [node.meta["custom"] for node in module.graph.nodes]
    assert [one["where"] for one in noted] == [[torch.device("cpu")]] * 3
    assert noted[1]["name"] == "relu"


@dataclass(frozen=True, slots=True)
class Note:
    where: torch.device
    inside: list


def test_what_a_user_noted_in_dataclasses_moves_too_even_if_one_holds_itself():
    module = graph_of(lambda g, x: g.call_function(torch.relu, (x,)))
    note = Note(CUDA, [])
    note.inside.append(note)
    module.note = Note(CUDA, [Note(CUDA, [])])
    next(iter(module.graph.nodes)).meta["custom"] = note
    hoist(module, TO_CPU)
    cpu = torch.device("cpu")
    assert module.note == Note(cpu, [Note(cpu, [])])
    assert next(iter(module.graph.nodes)).meta["custom"].where == cpu


def test_a_string_that_is_the_default_of_an_input_is_reported():
    graph, report = fx.Graph(), HoistReport()
    x = graph.placeholder("x")
    graph.output(graph.call_method("to", (x, graph.placeholder("d", default_value="cuda:0"))))
    hoist(fx.GraphModule(nn.Module(), graph), TO_CPU, inputs=(X, "cpu"), report=report)
    assert report.kept == {"node d": "cuda:0"}


def test_a_string_deep_in_arguments_is_reported_and_refused_in_strict_mode():
    """It may be a device or a name: nothing says which."""

    def build():
        return graph_of(
            lambda g, x: g.call_function(dict, (), {"where": {"device": "cuda:0"}}) and x
        )

    report = HoistReport()
    hoist(build(), {"cuda:0": "cuda:3"}, report=report)
    assert report.kept == {"node dict_1": "cuda:0"}
    with pytest.raises(UnmappedDevice, match="dict_1"):
        hoist(build(), {"cuda:0": "cuda:3"}, strict=True)


def branches(x):
    return torch.cond(
        x.sum() > 0,
        lambda x: x + torch.ones(4, device=x.device),
        lambda x: x * torch.full((4,), 3.0, device=x.device),
        (x,),
    )


def repeated(x):
    def body(i, x):
        return i + 1, x + torch.ones(4, device=x.device)

    start = torch.zeros((), dtype=torch.int64)
    return torch._higher_order_ops.while_loop(lambda i, x: i < 3, body, (start, x))[1]


class Controlled(nn.Module):
    def forward(self, x):
        return branches(x) + repeated(x)


def test_graphs_inside_control_flow_are_moved_and_a_half_hoisted_one_is_refused():
    """Propagating the outer graph does not look into every branch."""
    program = hoist(torch.export.export(Controlled(), (X,)), {"cpu": "meta"}, strict=True)
    graphs = [m for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]
    assert len(graphs) == 5 and not any("cpu" in graph.code for graph in graphs)
    node = next(n for graph in graphs[1:] for n in graph.graph.nodes if "full" in n.name)
    node.update_kwarg("device", torch.device("cpu"))
    with pytest.raises(HoistError, match="full"):
        check_devices(program)


def ones_like(x):
    return torch.ones(x.shape[-1:], device=x.device)


def combined(x):
    def add(one, other):
        return one + other * torch.ones((), device=one.device)

    return associative_scan(add, x, 0, combine_mode="generic")


LOOPS = {
    "map": lambda x: control_map(lambda row: row + ones_like(row), x),
    "scan": lambda x: scan(lambda c, row: (c + row, c * ones_like(c)), torch.zeros(4), x)[1],
    "associative_scan": combined,
}


class Loops(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        return LOOPS[self.name](x)


@pytest.mark.parametrize("name", LOOPS)
def test_graphs_inside_loops_are_moved(name):
    """Those of associative_scan are traced under vmap, whose tensors cannot be moved as others."""
    rows = torch.arange(12.0).reshape(3, 4)
    program = hoist(torch.export.export(Loops(name), (rows,)), {"cpu": "meta"}, strict=True)
    graphs = [m for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]
    assert len(graphs) == 1 + (name != "associative_scan")  # which is written out
    assert not any("cpu" in graph.code for graph in graphs)
    known = [node.meta.get("val") for graph in graphs for node in graph.graph.nodes]
    tensors = [leaf for leaf in tree_leaves(known) if isinstance(leaf, torch.Tensor)]
    assert tensors and all(tensor.device.type == "meta" for tensor in tensors)
    assert program.module()(rows.to("meta")).shape == rows.shape


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids) + torch.ones(4))


IDS = torch.tensor([[1, 2, 3]])


def test_constants_and_attributes_of_a_graph_move_and_stay_shared():
    root = nn.Module()
    root.one = torch.ones(4)
    module = graph_of(lambda g, x: g.call_function(operator.add, (x, g.get_attr("one"))), root)
    module.same = [module.one, {"device": CUDA}]
    module.kinds = {"set": {CUDA}, "ordered": OrderedDict(one=CUDA), "tuple": Where([CUDA])}
    hooks = module._forward_hooks
    hoist(module, {"cpu": "meta", "cuda:0": "meta"})
    assert module.one.is_meta and module.same[0] is module.one
    meta = torch.device("meta")
    assert module.same[1] == {"device": meta}
    assert module.kinds == {"set": {meta}, "ordered": {"one": meta}, "tuple": ([meta],)}
    assert type(module.kinds["ordered"]) is OrderedDict and type(module.kinds["tuple"]) is Where
    assert module._forward_hooks is hooks, "handles of hooks know the dict they are in"


def test_tensors_over_the_same_memory_are_so_afterwards():
    root = nn.Module()
    root.one = nn.Parameter(torch.ones(4))
    root.two = nn.Parameter(root.one.detach(), requires_grad=False)
    module = fx.GraphModule(root, fx.Graph())
    module.one, module.two = root.one, root.two
    hoist(module, {"cpu": "meta"}, inputs=())
    same = [p.untyped_storage()._cdata for p in (module.one, module.two)]
    assert module.one.is_meta and same[0] == same[1]
    assert [p.requires_grad for p in (module.one, module.two)] == [True, False]


def test_views_of_a_tensor_are_so_afterwards():
    """Each had become a tensor of its own, so that a write to one was not seen in the other."""
    whole = torch.arange(12.0).view(3, 4)
    views = {
        "part": whole[1:, 1:3],
        "turned": nn.Parameter(whole.t()),
        "ints": whole.view(torch.int32),
    }
    module = fx.GraphModule(nn.Module(), fx.Graph())
    for name, view in {"whole": whole, **views}.items():
        setattr(module, name, view)
    hoist(module, {"cpu": "meta"}, inputs=())
    for name, view in views.items():
        moved = getattr(module, name)
        assert moved.untyped_storage()._cdata == module.whole.untyped_storage()._cdata
        assert (moved.dtype, moved.shape, moved.stride()) == (view.dtype, view.shape, view.stride())
        assert moved.is_meta and moved.storage_offset() == view.storage_offset()


def test_what_nobody_else_has_a_view_of_moves_without_the_rest_of_its_memory():
    """All of it moved."""
    module = fx.GraphModule(nn.Module(), fx.Graph())
    module.part = torch.arange(1000.0)[:10]
    turned = torch.ones(3, dtype=torch.complex64).conj()
    module.turned, module.again = turned, turned.detach()
    hoist(module, {"cpu": "meta"}, inputs=())
    assert module.part.untyped_storage().nbytes() == 40
    assert module.turned.untyped_storage()._cdata == module.again.untyped_storage()._cdata


def test_two_tensors_over_quantized_memory_are_so_afterwards():
    """They ended in an internal error of torch."""
    one = torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)
    devices = device_mapping.DeviceMapping({}, "explicit", False, HoistReport())
    moved = [devices._move(tensor, torch.device("cpu")) for tensor in (one, one.detach())]
    assert all(torch.equal(new.dequantize(), torch.ones(3)) for new in moved)
    assert moved[0].data_ptr() == moved[1].data_ptr()


def test_a_half_hoisted_graph_is_refused():
    """A literal that was overlooked, put back by hand."""

    def add(x):
        return x + torch.ones(4, device=x.device)

    class Add(nn.Module):
        def forward(self, x):
            return add(x)

    program = torch.export.export(Add(), (X,))
    ones = next(node for node in program.graph.nodes if "ones" in node.name)
    ones.update_kwarg("device", torch.device("meta"))
    with pytest.raises(HoistError, match="ones"):
        check_devices(program)
    for node in program.graph.nodes:  # as Dynamo notes what it saw
        node.meta["example_value"] = node.meta.pop("val", None)
    with pytest.raises(HoistError, match="ones"):
        check_devices(program.graph_module)


def test_what_is_no_graph_is_refused():
    with pytest.raises(HoistError, match="Linear"):
        hoist(nn.Linear(1, 1), TO_CPU)


def test_a_package_is_moved_as_a_file_and_computes_the_same(tmp_path):
    torch.manual_seed(0)
    model = Tied()
    torch.export.save(torch.export.export(model, (IDS,)), tmp_path / "0.pt2")
    for step, (old, new) in enumerate([("cpu", "cuda:0"), ("cuda:0", "cuda:3"), ("cuda:3", "cpu")]):
        report = hoist_package(
            tmp_path / f"{step}.pt2", tmp_path / f"{step + 1}.pt2", {old: new}, strict=step > 0
        )
        assert report.changed["literals"] > 5
    with zipfile.ZipFile(tmp_path / "2.pt2") as package:
        texts = [package.read(n).decode() for n in package.namelist() if n.endswith(".json")]
    assert any('"index": 3' in text for text in texts)
    assert not any('"type": "cpu"' in text for text in texts)
    program = torch.export.load(tmp_path / "3.pt2")
    assert torch.equal(program.module()(IDS), model(IDS))
    state = program.state_dict
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()


def test_a_package_is_moved_in_its_own_place_and_stays_where_that_fails(tmp_path):
    """The file was emptied before it was read, and removed when nothing was found in it."""
    path = tmp_path / "a.pt2"
    torch.export.save(torch.export.export(Tied(), (IDS,)), path)
    hoist_package(path, path, {"cpu": "cuda:0"})
    before = path.read_bytes()
    with pytest.raises(HoistError, match="program spans devices"):
        hoist_package(path, path, {"cuda:1": "cpu"}, strict=True)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    hoist_package(path, path, {"cuda:0": "cpu"})
    assert torch.export.load(path).module()(IDS).shape == (1, 3, 7)


def test_example_inputs_in_a_package_do_not_touch_the_device_it_was_made_on(tmp_path, monkeypatch):
    """torch.export.load puts them where they were: on GPU 0, on every rank."""
    program = torch.export.export(Tied(), (IDS,))
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.export.save(program, tmp_path / "0.pt2")
    report = hoist_package(tmp_path / "0.pt2", tmp_path / "1.pt2", TO_CPU)
    assert report.changed == {"example_inputs": 1}
    loaded = torch.export.load(tmp_path / "1.pt2")
    assert loaded.example_inputs is None
    with zipfile.ZipFile(tmp_path / "1.pt2") as package:
        assert not any(b"cuda:0" in package.read(name) for name in package.namelist())


def test_example_inputs_are_dropped_also_where_devices_are_swapped(tmp_path, monkeypatch):
    """They were kept, on the device of another rank."""
    program = torch.export.export(Tied(), (IDS,))
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.export.save(program, tmp_path / "0.pt2")
    swap = {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}
    report = hoist_package(tmp_path / "0.pt2", tmp_path / "1.pt2", swap)
    assert report.changed == {"example_inputs": 1}


def test_extra_files_of_a_package_stay_as_they_are(tmp_path):
    """What looked like a device in them was changed, and what is not quite a JSON was refused."""
    files = {"a.json": '{"type": "cpu", "index": null}', "b.json": "# none", "c": "d"}
    program = torch.export.export(Tied(), (IDS,))
    torch.export.save(program, tmp_path / "0.pt2", extra_files=files)
    hoist_package(tmp_path / "0.pt2", tmp_path / "1.pt2", {"cpu": "meta"})
    found = dict.fromkeys(files, "")
    torch.export.load(tmp_path / "1.pt2", extra_files=found)
    assert found == files


def test_example_inputs_on_the_cpu_are_dropped_where_the_mapping_names_it(tmp_path):
    """They stayed there, and the program did not."""
    torch.export.save(torch.export.export(Tied(), (IDS,)), tmp_path / "0.pt2")
    hoist_package(tmp_path / "0.pt2", tmp_path / "1.pt2", {"cpu": "meta"})
    assert torch.export.load(tmp_path / "1.pt2").example_inputs is None
    hoist_package(tmp_path / "0.pt2", tmp_path / "2.pt2", TO_CPU)
    assert torch.export.load(tmp_path / "2.pt2").example_inputs is not None


def test_a_pickled_weight_of_a_package_is_refused_where_its_device_moves(tmp_path):
    """It stayed where it was, and its description told of the new device."""

    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(TwoTensor(torch.ones(4), torch.ones(4)))

        def forward(self, x):
            return x * self.weight

    torch.export.save(torch.export.export(Doubled(), (X,)), tmp_path / "0.pt2")
    with pytest.raises(HoistError, match=r"weights_config\.json has a tensor of another class"):
        hoist_package(tmp_path / "0.pt2", tmp_path / "1.pt2", {"cpu": "meta"})
    assert not hoist_package(tmp_path / "0.pt2", tmp_path / "1.pt2", TO_CPU).changed


def test_a_device_that_the_mapping_of_a_package_lacks_has_its_own_error(tmp_path):
    """It was one of a file that is not a JSON."""
    archive(tmp_path / "a.pt2", device('{"type": "cuda", "index": 0}'))
    with pytest.raises(UnmappedDevice, match=r"model.json is on cuda:0"):
        hoist_package(tmp_path / "a.pt2", tmp_path / "b.pt2", {"cuda:1": "cpu"}, strict=True)


def test_autocast_in_a_package_has_the_new_type(tmp_path):
    """It had the type of the machine that exported, so nothing was cast on the other."""

    class Cast(nn.Module):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return x @ x

    torch.export.save(torch.export.export(Cast(), (X,)), tmp_path / "0.pt2")
    for step, kind in enumerate(("cuda", "cpu")):
        pair = ["cpu", "cuda:1"] if kind == "cuda" else ["cuda:1", "cpu"]
        hoist_package(tmp_path / f"{step}.pt2", tmp_path / f"{step + 1}.pt2", dict([pair]))
        with zipfile.ZipFile(tmp_path / f"{step + 1}.pt2") as package:
            names = [name for name in package.namelist() if name.endswith("model.json")]
            assert f'"as_string": "{kind}"' in package.read(names[0]).decode()
    assert torch.export.load(tmp_path / "2.pt2").module()(X).dtype == torch.bfloat16


def archive(path, entries, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as package:
        for name, data in entries:
            package.writestr(name, data)


def device(text):
    return [("a/models/model.json", f'{{"device": {text}}}')]


PACKAGES = {
    "is as it was": lambda path: path.write_bytes(b"PK\3\4 and no more"),
    "No such file": lambda path: None,
    "compressed or encrypted": lambda path: archive(
        path, [("a/weights", bytes(1 << 26))], zipfile.ZIP_DEFLATED
    ),
    "model.json is not a JSON": lambda path: archive(path, [("a/model.json", b"[" * 100_000)]),
    "model.json has the device": lambda path: archive(path, device('{"type": "x", "index": 0}')),
    "model.json is not a JSON of": lambda path: archive(
        path, [("a/model.json", b'{"target": "torch.autocast", "inputs": []}')]
    ),
    "which torch does not have": lambda path: archive(
        path, device('{"type": "cuda", "index": 1e400}')
    ),
}


@pytest.mark.parametrize("problem", PACKAGES)
def test_an_archive_that_nobody_saved_is_named_and_nothing_is_left(tmp_path, problem):
    """It was a BadZipFile, a RecursionError or torch's own, and half a file was left."""
    PACKAGES[problem](tmp_path / "a.pt2")
    with pytest.raises(HoistError, match=rf"a\.pt2.*{problem}"):
        hoist_package(tmp_path / "a.pt2", tmp_path / "b.pt2", {"cuda:0": "cuda:1"})
    assert not (tmp_path / "b.pt2").exists()


def test_a_compiled_package_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt2", "w") as package:
        package.writestr("a/data/aotinductor/model/x.so", b"")
    with pytest.raises(HoistError, match="device_index"):
        hoist_package(tmp_path / "a.pt2", tmp_path / "b.pt2", TO_CPU)


def test_the_first_tensor_of_a_step_on_another_device_is_named():
    with pytest.raises(HoistError, match="any of several"):
        assert_device("cuda")
    check = assert_device("cpu:0")
    assert check((X, [X])) == (X, [X])
    with pytest.raises(HoistError, match="tensor 1 of shape"):
        check((X, {"cache": torch.empty(2, 3, device="meta")}))


def test_a_llama_exported_for_one_accelerator_runs_on_another_and_on_the_cpu(warm):
    done = warm.run(HERE / "hoist_llama.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "half-hoisted refused" in done.stdout
    assert done.stdout.count("bitwise equal on the CPU") == 2
