"""Modules of a rank run on their own devices, and offloaded ones have weights only while they run.

There is one kind of device here. Tensors of torch's fake mode claim to be on any, hold nothing, and
refuse to meet those of another device as real ones do.
"""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import drumline
from coordinator import Coordinator
from drumline import DeviceMap
from drumline.checkpoint.model_tensors import named_tensors, replace_tensors
from drumline.offload import placement as on_devices
from drumline.offload.placement import install_device_hooks, move_to_device
from drumline.offload.prefetcher import CpuWeights, WeightPrefetcher
from drumline.planner.model_profile import profile_model

IDS = torch.arange(3, 12)[None]


def greedy(model):
    return model.generate(IDS, max_new_tokens=6, do_sample=False).tolist()


class Block(nn.Module):
    """Adds what it is given beside the hidden state; takes no views, which fake devices lack."""

    def __init__(self, device):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 3, device=device))

    def forward(self, hidden, bias=None, sides=()):
        return hidden * self.weight + bias + sides[0]["side"]


class Tower(nn.Module):
    def __init__(self, devices):
        super().__init__()
        self.blocks = nn.ModuleList([Block(device) for device in devices])

    def forward(self, hidden):
        start = hidden
        for block in self.blocks:
            hidden = block(hidden, bias=start, sides=[{"side": start}])
        return {"last": hidden, "all": (hidden, start)}


def test_what_modules_share_follows_them_over_the_devices_of_a_rank():
    devices = ["cuda:0", "cuda:2", "cuda:1", "cuda:2"]
    places = {f"blocks.{n}": (0, device) for n, device in enumerate(devices)}
    chosen = DeviceMap(places, dict.fromkeys(places, 0), {})
    with FakeTensorMode(), torch.no_grad():
        model, hidden = Tower(devices), torch.empty(2, 3, device="cuda:0")
        with pytest.raises(RuntimeError, match=r"same device|two different devices"):
            model(hidden)
        install_device_hooks(model, chosen, 0, None)
        assert model.blocks[1](hidden, hidden, [{"side": hidden}]).device.index == 2
        output = model(hidden)
    found = [output["last"], *output["all"]]
    assert {tensor.device for tensor in found} == {torch.device("cuda:0")}


def test_the_layers_of_a_real_model_may_be_on_two_devices(checkpoints):
    """On the CPU, then on meta, from which nothing comes back: so the last of it stays there."""
    plain, path = checkpoints.llama()
    model = type(plain).from_pretrained(path).model
    names = [part.name for part in (*profile_model(plain).others, *profile_model(plain).layers)]
    inner = [name.removeprefix("model.") for name in names if name != "lm_head"]
    there = {name for name in inner if name in ("norm", "layers.4", "layers.5")}
    for name in there:
        model.get_submodule(name).to("meta")
    with torch.no_grad(), pytest.raises(RuntimeError):
        model(IDS)
    places = {name: (1, "meta" if name in there else "cpu") for name in inner}
    for name in inner:
        wrapped = on_devices._with_moved_arguments(
            model.get_submodule(name).forward, torch.device(places[name][1])
        )
        model.get_submodule(name).forward = wrapped
    with torch.no_grad():
        output = model(IDS)
    assert output.last_hidden_state.is_meta and output.last_hidden_state.shape == (1, 9, 32)
    assert [layer.keys.is_meta for layer in output.past_key_values.layers] == [False] * 4 + [
        True
    ] * 2


def test_what_is_no_tensor_stays_the_same_object():
    cache, hidden = object(), torch.zeros(2)
    moved = move_to_device({"a": [hidden, cache], "b": (None, 3)}, torch.device("meta"))
    assert moved["a"][0].is_meta and moved["a"][1] is cache and moved["b"] == (None, 3)
    assert move_to_device(hidden, torch.device("cpu")) is hidden


DEVICE_MAPS = {
    "every layer of one rank": {"": 0, "model.layers": (0, "disk")},
    "layers of two ranks": {"": 0, "model.layers": (1, "disk"), "model.layers.0": (0, "disk")},
    "the head too": {"": (0, "disk"), "model.layers.1": 1, "model.layers.2": (1, "disk")},
}


@pytest.mark.parametrize("case", DEVICE_MAPS)
@pytest.mark.parametrize("family", ["llama", "tied3", "mixtral3"])
def test_layers_on_disk_give_the_same_tokens(checkpoints, ranks, case, family):
    make = {"llama": type(checkpoints).llama, "tied3": tied, "mixtral3": mixtral}[family]
    plain, path = make(checkpoints)

    def rank(info):
        torch.set_num_threads(1)
        with Coordinator(info, timeout_s=20) as coor:
            max_memory = [1 << 30] * 2
            try:
                with drumline.load(path, DEVICE_MAPS[case], coor, max_memory=max_memory) as model:
                    assert any(tensor.is_meta for tensor in model.parameters())
                    return [greedy(model), greedy(model)]
            except drumline.WorkerExit:
                return None

    assert ranks(rank, 2)[0] == [greedy(plain)] * 2


def tied(checkpoints):
    return checkpoints.make("tied3", "LlamaForCausalLM", **LLAMA, tie_word_embeddings=True)


LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "initializer_range": 0.4,
}


def mixtral(checkpoints):
    config = {"num_hidden_layers": 3, "num_local_experts": 4, "hidden_size": 32, "vocab_size": 64}
    sizes = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return checkpoints.make("mixtral3", "MixtralForCausalLM", **config, **sizes)


def test_weights_that_do_not_fit_into_memory_stay_on_disk(checkpoints, on_master):
    """With memory for a third of the model: some layers in memory, the others on disk."""
    plain, path = checkpoints.llama()
    nbytes = sum(tensor.nbytes for tensor in plain.parameters())

    def work(model):
        places = [device for _, device in model.device_map.places.values()]
        assert "cpu" in places and "disk" in places
        return greedy(model)

    max_memory = {(0, "cpu"): nbytes * 2 // 3, (0, "disk"): nbytes}
    assert on_master(path, 1, work, max_memory=max_memory) == greedy(plain)


def test_several_threads_share_the_layers_on_disk(checkpoints, on_master):
    plain, path = checkpoints.llama()

    def work(model):
        found = [None] * 3

        def talk(number):
            found[number] = greedy(model)

        threads = [threading.Thread(target=talk, args=(number,)) for number in range(3)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        return found

    disk = {"": 0, "model.layers": (0, "disk")}
    assert on_master(path, 1, work, device_map=disk) == [greedy(plain)] * 3


def test_a_rank_without_files_cannot_leave_layers_on_disk(checkpoints, ranks_or_errors):
    path = checkpoints.llama()[1]

    def rank(info):
        with Coordinator(info, timeout_s=20) as coor:
            disk = {"": 0, "model.layers.5": (1, "disk")}
            mine = "nowhere" if info.rank == 1 else path
            drumline.load(mine, disk, coor, max_memory=[1 << 30] * 2)

    found = ranks_or_errors(rank, 2)
    assert all("model.layers.5" in str(e) and "rank 1" in str(e) for e in found), found


class Counted(CpuWeights):
    """Weights in memory that say when they are fetched."""

    def __init__(self, tensors, name, log):
        super().__init__(tensors)
        self.name, self.log = name, log

    def fetch(self, allocate, device):
        self.log.append(self.name)
        return super().fetch(allocate, device)


def stack(log):
    layers = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    weights = {str(n): dict(named_tensors(layer)) for n, layer in enumerate(layers)}
    expected = layers(torch.ones(3)).detach()
    prefetcher = WeightPrefetcher(
        layers, {n: Counted(w, n, log) for n, w in weights.items()}, torch.device("cpu")
    )
    for tensors in weights.values():
        for tensor in tensors.values():
            tensor.requires_grad_(False)
    for layer in layers:
        replace_tensors(layer, {id(p): nn.Parameter(p.to("meta")) for p in layer.parameters()})
    return layers, prefetcher, expected


def test_the_next_layer_is_fetched_while_one_runs():
    log = []
    layers, prefetcher, expected = stack(log)
    hidden = torch.ones(3)
    for n, layer in enumerate(layers):
        with prefetcher.loaded(str(n)):
            for fetch in prefetcher.fetches.values():
                fetch.result()
            assert log[-1] == str((n + 1) % 4), "the one after it is on its way"
            assert sum(not p.is_meta for p in layers.parameters()) == 2, "only it has weights"
            hidden = layer(hidden)
    assert torch.equal(hidden, expected)
    assert log == ["0", "1", "2", "3", "0"], "each was fetched once"


def test_copies_to_a_device_have_one_stream_for_torch_keeps_memory_for_each(monkeypatch):
    made = []

    def stream(device):
        made.append(device)
        return contextlib.nullcontext(device)

    monkeypatch.setattr(torch, "Stream", stream)
    monkeypatch.setattr(WeightPrefetcher, "_recycle", lambda self, tensors: None)
    weights = {name: CpuWeights({"weight": torch.ones(3, 3)}) for name in "01"}
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    prefetcher = WeightPrefetcher(layers, weights, torch.device("meta"))
    for name in "01" * 2:
        with prefetcher.loaded(name):
            pass
    assert made == [torch.device("meta")]


def test_memory_that_is_read_into_for_a_device_is_used_again(monkeypatch):
    """Each layer of each token was read into new memory."""
    monkeypatch.setattr(torch, "Stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    seen = []

    def fetch(allocate, device):
        seen.append(allocate(torch.Size([3, 3]), torch.float32))
        return {"weight": seen[-1].to(device)}

    away = {name: SimpleNamespace(fetch=fetch) for name in "01"}
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    prefetcher = WeightPrefetcher(layers, away, torch.device("meta"))
    for name in "01" * 2:
        with prefetcher.loaded(name):
            pass
    assert len(seen) >= 4 and len({id(tensor) for tensor in seen}) == 1


def test_a_layer_called_out_of_order_is_fetched_and_what_was_coming_let_go():
    log = []
    _, prefetcher, _ = stack(log)
    for name in ("0", "2", "1"):
        with prefetcher.loaded(name):
            pass
    assert len(prefetcher.fetches) == 1 and log[:5] == ["0", "1", "2", "3", "1"]


def test_an_error_while_a_layer_is_fetched_is_raised_where_it_is_needed():
    log = []
    _, prefetcher, _ = stack(log)

    def fail(allocate, device):
        raise OSError("the disk is gone")

    prefetcher.away["1"].fetch = fail
    with prefetcher.loaded("0"):
        pass
    with pytest.raises(OSError, match="disk is gone"), prefetcher.loaded("1"):
        pass


def test_an_error_while_a_layer_is_fetched_is_none_of_the_call_of_another_one():
    _, prefetcher, _ = stack([])

    def fail(allocate, device):
        raise OSError("the disk is gone")

    prefetcher.away["1"].fetch = fail
    for name in ("0", "2"):
        with prefetcher.loaded(name):
            pass
    assert list(prefetcher.fetches) == ["3"]
