"""What a model over several ranks cannot do, it refuses with what to do instead."""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
from abc import ABC
from collections import UserDict, defaultdict
from enum import Flag, IntEnum, StrEnum
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import drumline
import launcher
from drumline import DrumlineError
from drumline.core.pytree import Leaves, Unflattener, flatten, unflatten
from drumline.pipeline.unsupported import UnsupportedMixin, make_read_only
from tests.drumline.conftest import LLAMA

REFUSED = {
    "half": (lambda model: model.half(), "dtype="),
    "to a dtype": (lambda model: model.to(torch.float16), "dtype="),
    "to a device": (lambda model: model.to("cuda:0"), "device_map="),
    "save": (lambda model: model.save_pretrained("x"), "copy the checkpoint"),
    "save the weights": (
        lambda model: torch.save(model.state_dict(), io.BytesIO()),
        "copy the checkpoint",
    ),
    "pickle a weight": (lambda model: pickle.dumps(query(model)), "copy the checkpoint"),
    "weights": (lambda model: model.load_state_dict({}), "save them as a checkpoint"),
    "adapter": (lambda model: model.load_adapter("x"), "merge_and_unload"),
    "new adapter": (lambda model: model.add_adapter({}), "merge_and_unload"),
    "train": (lambda model: model.train(), "inference"),
    "gradients": (lambda model: model.requires_grad_(), "inference"),
    "checkpointing": (lambda model: model.gradient_checkpointing_enable(), "inference"),
    "surgery": (lambda model: set_query(model, nn.Linear(32, 32)), "never be used"),
    "a part's forward": (lambda model: set_forward(model), "never be used"),
    "another number": (lambda model: set_scale(model), "never be used"),
    "a weight": (lambda model: set_weight(model), "never be used"),
    "a weight in place": (lambda model: query(model).data.mul_(2), "would change nothing there"),
    "rows of a weight": (lambda model: zero_rows(model), "would change nothing there"),
    "a weight's data": (lambda model: set_data(model), "would change nothing there"),
    "a weight anew": (lambda model: nn.init.normal_(query(model)), "would change nothing there"),
    "values of a weight": (lambda model: query(model).detach().numpy(), "a call of it works"),
    "a sum of a weight": (lambda model: float(query(model).sum()), "whose values are on rank 1"),
    "a norm as text": (lambda model: f"{query(model).norm():.3f}", "whose values are on rank 1"),
    "a maximum": (lambda model: query(model).max(0).values.tolist(), "values are on rank 1"),
    "a product": (lambda model: torch.ones(32) @ query(model), "would be arbitrary"),
    "a sum in place": (lambda model: query(model).sum().add_(1), "would change nothing there"),
    "a weight as a factor": (lambda model: scale_own(model), "would be arbitrary"),
    "backward": (lambda model: backward(model), "no gradient comes back"),
    "backward after a write": (lambda model: backward_changed(model), "no gradient comes back"),
    "hook inside": (lambda model: hook(model), "hook the whole layer"),
    "part of a layer": (lambda model: call_part(model), "whole layer"),
    "attention": (lambda model: model.set_attn_implementation("eager"), "attn_implementation="),
    "attention in the config": (lambda model: attend(model), "attn_implementation="),
    "compile": (lambda model: model.compile(), "leave its forward"),
    "torch.compile": (lambda model: torch.compile(model)(IDS), "leave its forward"),
    "compiled forward": (lambda model: compile_forward(model), "leave its forward"),
    "autocast": (lambda model: autocast(model), "dtype="),
    "copy": (lambda model: copy.deepcopy(model), "several threads"),
    "an input on meta": (lambda model: call_layer(model, META), "layers.5 was given tensor(...,"),
    "a weight as an input": (
        lambda model: call_layer(model, query(model)[None]),
        "layers.5 was given <model.layers.5.self_attn.q_proj.weight",
    ),
}
IDS = torch.arange(3, 12)[None]
META = torch.ones(1, 32, 32, device="meta")


def set_query(model, value):
    model.model.layers[-1].self_attn.q_proj = value


def set_weight(model):
    model.model.layers[-1].self_attn.q_proj.weight = nn.Parameter(torch.zeros(32, 32))


def set_forward(model):
    model.model.layers[-1].mlp.forward = lambda hidden: 0 * hidden


def set_scale(model):
    attention = model.model.layers[-1].self_attn
    attention.scaling = attention.scaling + 0  # as it is
    attention.of_the_script = 0.5
    attention.attention_dropout = 0.3
    attention.scaling = 0.9


def query(model):
    return model.model.layers[-1].self_attn.q_proj.weight


@torch.no_grad()
def zero_rows(model):
    query(model)[:3] = 0


@torch.no_grad()
def scale_own(model):
    model.model.embed_tokens.weight.mul_(query(model).sum())


def call_layer(model, hidden):
    """Without values the message was not sent whole, and with a weight all ranks were lost."""
    positions = model.model.rotary_emb(torch.ones(1, 32, 32), torch.arange(32)[None])
    model.model.layers[-1](hidden, position_embeddings=positions)


def set_data(model):
    query(model).data = torch.zeros(32, 32)


def hook(model):
    model.model.layers[-1].mlp.register_forward_hook(lambda *given: None)


def call_part(model):
    model.model.layers[-1].mlp(torch.ones(1, 2, 32))


def backward(model):
    model(IDS, labels=IDS).loss.backward()


def backward_changed(model):
    """The norm had a gradient, and the layers before it none."""
    hidden = model.model(IDS).last_hidden_state
    hidden[:, 0] = 0
    hidden.sum().backward()


@torch.no_grad()
def attend(model):
    """The other ranks went on with theirs, and took a mask that was not meant for it."""
    model.config._attn_implementation = "eager"
    try:
        model(IDS)
    finally:
        model.config._attn_implementation = "sdpa"


def compile_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")


def autocast(model):
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(IDS)


@pytest.fixture(scope="module")
def complaints(checkpoints, on_master):
    """What each attempt raises, all on one model, which works on afterwards."""
    plain, path = checkpoints.llama()

    def work(model):
        found = {}
        for name, (attempt, _) in REFUSED.items():
            try:
                attempt(model)
            except Exception as error:
                found[name] = error
        assert torch.equal(
            model.generate(IDS, max_new_tokens=4), plain.generate(IDS, max_new_tokens=4)
        )
        return found

    return on_master(path, 2, work)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_a_part_only_is_refused_with_what_to_do(complaints, name):
    assert isinstance(complaints.get(name), DrumlineError), complaints.get(name)
    assert str(complaints[name]).startswith("rank 0:") and REFUSED[name][1] in str(complaints[name])


def test_a_model_that_is_there_already_may_be_moved_there(checkpoints, on_master):
    def work(model):
        assert model.to("cpu") is model.cpu() is model
        assert model.to(model.device, torch.float32) is model
        assert model.eval() is model

    on_master(checkpoints.llama()[1], 2, work)


def test_a_part_of_the_model_can_be_copied_and_called(checkpoints, on_master):
    """Its hooks went with it, and what they belong to holds what no copy can be made of."""

    def work(model):
        trunks = model.model, copy.deepcopy(model.model)
        return torch.stack([trunk(IDS).last_hidden_state for trunk in trunks])

    one, other = on_master(checkpoints.llama()[1], 2, work)
    assert one.equal(other)


def test_a_model_that_has_changed_some_of_its_layers_by_itself_is_refused_from_then_on(
    checkpoints, on_master
):
    """BigBird did so for a short text, was refused, and failed over there the next time."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = {**sizes, "vocab_size": 64, "num_hidden_layers": 4, "block_size": 4}
    _, path = checkpoints.make("big_bird", "BigBirdModel", **config)

    def work(model):
        with pytest.raises(DrumlineError, match="have its config say beforehand"):
            model(IDS)
        for _ in range(2):
            with pytest.raises(DrumlineError, match="so load the model again"):
                model(IDS)

    on_master(path, 2, work)


def test_on_one_rank_all_of_it_works(checkpoints, on_master, tmp_path):
    plain, path = checkpoints.llama()

    def work(model):
        model.save_pretrained(tmp_path)
        set_query(model, copy.deepcopy(plain.model.layers[-1].self_attn.q_proj))
        model.train()(IDS, labels=IDS).loss.backward()
        model.load_state_dict(plain.state_dict())
        return model.half().dtype

    assert on_master(path, 1, work) == torch.float16
    again = type(plain).from_pretrained(tmp_path)
    assert all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), again.parameters(), strict=True)
    )


def test_what_layers_share_is_sealed_once_and_what_holds_nothing_not_at_all():
    shared, activation = nn.Linear(2, 2), nn.GELU()
    layers = [nn.Sequential(shared, activation) for _ in range(2)]
    for number, layer in enumerate(layers):
        make_read_only(layer, f"layers.{number}", 1)
    assert type(activation) is nn.GELU and isinstance(shared, nn.Linear)
    with pytest.raises(DrumlineError, match=r"layers\.0\.0\.weight runs on rank 1"):
        shared.weight = nn.Parameter(torch.zeros(2, 2))


def test_an_output_that_a_model_never_has_may_be_asked_for(checkpoints, on_master):
    """transformers ignores it, and it was refused here."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 4}
    mamba = checkpoints.make("mamba of attentions", "MambaForCausalLM", **sizes)
    for (plain, path), name in ((mamba, "attentions"), (checkpoints.llama(), "router_logits")):
        asked = torch.no_grad()(lambda model, o=f"output_{name}": model(IDS, **{o: True}).logits)
        torch.testing.assert_close(on_master(path, 2, asked), asked(plain))


def test_a_refused_use_is_told_without_what_transformers_was_doing(checkpoints, on_master):
    """There were 40 lines around the one that says what to do. A caller's own frames stay."""

    def num_frames(model, **options):
        with pytest.raises(DrumlineError, match="output_attentions=True") as error:
            model.generate(torch.arange(3, 9)[None], max_new_tokens=2, **options)
        return len(error.traceback)

    def work(model):
        def ask(tokens, scores):
            return model(tokens, output_attentions=True)

        return num_frames(model, output_attentions=True), num_frames(model, logits_processor=[ask])

    short, whole = on_master(checkpoints.llama()[1], 2, work)
    assert short == 2 and whole > 10


class Quantized(ABC, nn.Module):
    """As the layers of quanto are: another layout of the object than any other module's."""


class QuantizedLinear(Quantized, nn.Linear):
    pass


def test_a_layer_of_any_class_can_be_sealed():
    layer = nn.Sequential(QuantizedLinear(2, 2), nn.Module())
    layer[1].weight = nn.Parameter(torch.zeros(2))
    make_read_only(layer, "layers.0", 1)
    assert isinstance(layer[0], QuantizedLinear)
    for part in layer:
        with pytest.raises(DrumlineError, match="never be used"):
            part.weight = nn.Parameter(torch.zeros(2))


class Packed(torch.Tensor):
    """As the weights of quanto's qint4: it computes nothing in inference mode."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is not F.linear:
            return super().__torch_function__(function, types, args, kwargs)
        assert not torch.is_inference_mode_enabled()
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def test_a_layer_elsewhere_is_not_run_in_another_mode_than_rank_0_runs_it():
    def rank():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(False)
        model[1].weight = nn.Parameter(torch.eye(2).as_subclass(Packed), requires_grad=False)
        model[1].bias.zero_()
        with drumline.dispatch(model, {"0": 0, "1": 1}) as split, torch.no_grad():
            data = torch.ones(1, 2)
            return torch.equal(split(data), split[0](data))

    assert launcher.launch(rank, nprocs=2, launcher="threads", timeout_s=60)[0]


def test_the_weights_of_a_sealed_layer_can_be_looked_at_and_computed_with():
    with torch.device("meta"):
        layer = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    make_read_only(layer, "layers.0", 1)
    weight = layer[0].weight
    assert isinstance(weight, nn.Parameter) and weight.shape == (3, 2) and weight.is_meta
    shown = "<layers.0.0.weight of shape (3, 2), torch.float32, on rank 1>"
    assert [repr(weight), str(weight), f"{weight}"] == [shown] * 3
    layer.requires_grad_(False)
    assert not weight.requires_grad
    assert repr(weight + 1) == shown  # nor are its values here
    with pytest.raises(DrumlineError, match=r"zero_ on layers\.0\.1\.running_mean"):
        layer[1].running_mean.zero_()


LLAMA4 = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "intermediate_size_mlp": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 2,
}


def test_a_model_that_asks_its_embedding_for_a_device_runs_without_it_on_rank_0(checkpoints):
    """Llama 4 moves the tokens to where the weights are, which was "meta": a bare torch error."""
    plain, path = checkpoints.make("llama4", "Llama4ForCausalLM", **LLAMA4)
    tokens = torch.tensor([[5, 6, 7]])
    expected = plain.generate(tokens, max_new_tokens=6, do_sample=False)

    def rank():
        with drumline.load(path, max_memory=[1, 1 << 30]) as model:
            assert model.device_map.places["model.embed_tokens"] == (1, "cpu")
            weight = model.get_input_embeddings().weight
            with pytest.raises(DrumlineError, match=r"tokens\.weight.*rank 1.*device_map"):
                torch.where(torch.ones(2, 32) > 0, weight[0], torch.ones(2, 32))
            return model.generate(tokens, max_new_tokens=6, do_sample=False)

    found = launcher.launch(rank, nprocs=2, launcher="threads", timeout_s=60)[0]
    assert found.tolist() == expected.tolist()


class Keeping(nn.Linear):
    """A layer that leaves something for those behind it."""

    def forward(self, hidden, kept):
        hidden = super().forward(hidden)
        if isinstance(kept, list):
            kept.append(hidden)
        else:
            kept["hidden"] = hidden
        return hidden


def on_two_ranks(make, work):
    """What work returns for a module whose part `second` is on rank 1."""

    def rank():
        model = make().requires_grad_(False)
        with drumline.dispatch(model, {"first": 0, "second": 1}) as split, torch.no_grad():
            return work(split)

    return launcher.launch(rank, nprocs=2, launcher="threads", timeout_s=60)[0]


def test_what_a_layer_elsewhere_writes_into_a_list_or_dict_is_not_lost_in_silence():
    hidden = torch.ones(1, 2)

    def work(model):
        for kept in ([], {}, {"hidden": hidden}):
            with pytest.raises(DrumlineError, match=r"second wrote into .* collections\.UserDict"):
                model.second(hidden, kept)
        kept = UserDict()
        return torch.equal(model.second(hidden, kept), kept["hidden"])

    parts = {"first": nn.Linear, "second": Keeping}
    assert on_two_ranks(lambda: nn.ModuleDict({n: part(2, 2) for n, part in parts.items()}), work)


class Sizes(NamedTuple):
    width: int


class Scaled(nn.Linear):
    def forward(self, hidden, scale, flag=None):
        return super().forward(hidden) * (scale[0] if isinstance(scale, (tuple, list)) else scale)


def scaled():
    return nn.ModuleDict({"first": nn.Linear(2, 2), "second": Scaled(2, 2)})


def test_a_tuple_or_dict_of_a_class_of_its_own_is_refused_rather_than_made_plain():
    hidden = torch.ones(1, 2)

    def work(model):
        for scale in (Sizes(2), defaultdict(int)):
            with pytest.raises(DrumlineError, match=r"Sizes|defaultdict.*cannot be sent"):
                model.second(hidden, scale)
        sizes = hidden[:, :1].shape
        return torch.equal(model.second(hidden, sizes), model.second(hidden, tuple(sizes)))

    assert on_two_ranks(scaled, work)


class Kind(IntEnum):
    DOUBLE = 2


class Name(StrEnum):
    DOUBLE = "double"


class Flags(Flag):
    ONE, TWO = 1, 2


class Named(nn.Linear):
    def forward(self, hidden, kind):
        return super().forward(hidden), kind, f"{kind!r} {type(kind).__name__}"


def test_a_member_of_an_enum_stays_one_on_its_way_to_a_layer_and_back():
    """One that is a number arrived as that, so that `is` and its name were others."""

    def work(model):
        for kind in (Kind.DOUBLE, Name.DOUBLE, Flags.ONE | Flags.TWO, [Kind.DOUBLE]):
            _, back, seen = model.second(torch.ones(1, 2), kind)
            assert (repr(back), seen) == (repr(kind), f"{kind!r} {type(kind).__name__}")
        return True

    assert on_two_ranks(
        lambda: nn.ModuleDict({"first": nn.Linear(2, 2), "second": Named(2, 2)}), work
    )


def test_a_member_of_an_enum_that_only_the_script_has_arrives_as_its_number_or_text():
    """Only rank 0 runs the script of `drumline auto`; what is neither cannot arrive."""

    def arrived(member):
        leaves = Leaves()
        kind, _, value = flatten(member, leaves, lambda cache: 0)
        spec = (kind, "__main__.OfTheScript", value)
        return unflatten(spec, Unflattener(iter(leaves.ints), [], {}))

    assert [arrived(Kind.DOUBLE), arrived(Name.DOUBLE)] == [2, "double"]
    assert {type(arrived(member)) for member in (Kind.DOUBLE, Name.DOUBLE)} == {int, str}
    with pytest.raises(DrumlineError, match="OfTheScript"):
        arrived(Flags.ONE)


def test_a_number_of_any_size_arrives():
    numbers, leaves = [2**63, 2**63 - 1, -(2**63), 2**100, 7], Leaves()
    spec = json.loads(json.dumps(flatten(numbers, leaves, lambda cache: 0)))
    assert leaves.ints == [2**63 - 1, 7]
    assert unflatten(spec, Unflattener(iter(leaves.ints), [], {})) == numbers


def test_a_number_that_is_another_one_in_each_call_makes_no_new_program():
    """Each was kept for ever, here and on the other ranks; and 1.0 was taken for True."""

    def work(model):
        one, hidden = model.second(torch.ones(1, 2), True).clone(), torch.ones(1, 2)
        found = [model.second(hidden, scale).tolist() for scale in (1.0, -0.5, 1e30, 0.1)]
        assert found == [(one * scale).tolist() for scale in (1.0, -0.5, 1e30, 0.1)]
        before = len(model._driver._programs), len(model._driver.specs)
        assert model.second(hidden, math.inf).abs().min() == math.inf
        return before == (len(model._driver._programs), len(model._driver.specs))

    assert on_two_ranks(scaled, work)


class Coded(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, hidden, code=b"", **others):
        return self.second(self.first(hidden)) * len(code.decode()) + len(others)


def test_what_a_model_says_that_it_takes_is_not_dropped_for_a_tokenizer():
    hidden = torch.ones(1, 2)

    def work(model):
        expected = model.second(model.first(hidden)) * 2
        return torch.equal(model(hidden, code=b"ab", tokenizer=b"c"), expected)

    assert on_two_ranks(Coded, work)


class OnGpu(UnsupportedMixin, nn.Module):
    """A model with layers elsewhere, as its class sees it."""

    device, _driver = torch.device("cuda:1"), object()


@pytest.mark.parametrize("current", [0, 1])
def test_a_device_without_a_number_is_the_current_one(monkeypatch, current):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    model = OnGpu()
    assert model.to("cuda:1") is model.cuda(torch.device("cuda:1")) is model
    for move in (model.cuda, lambda: model.cuda(None), lambda: model.to("cuda")):
        if current == 1:
            assert move() is model
        else:
            with pytest.raises(DrumlineError, match="moved or converted"):
                move()
    with pytest.raises(DrumlineError, match="moved or converted"):
        model.cpu()


def test_a_model_that_cannot_generate_has_no_method_for_it(checkpoints, on_master):
    """It had one, which ended in an AttributeError of `super`."""

    def work(model):
        assert not hasattr(model, "generate") and not hasattr(model, "init_continuous_batching")
        with pytest.raises(AttributeError, match="'LlamaModel' object has no attribute 'generate'"):
            model.generate(IDS)
        return model(IDS).last_hidden_state.shape

    _, path = checkpoints.make("llama_trunk", "LlamaModel", **LLAMA)
    assert on_master(path, 2, work) == (1, 9, 32)
