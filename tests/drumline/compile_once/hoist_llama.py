"""What test_hoist.py runs in a process of its own, as it registers a device for the whole process.

A tiny Llama is exported for device 0 of an accelerator that is only a name, hoisted to device 3,
hoisted to the CPU, and run there. Nothing but the device is pretended.
"""

import copy

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from drumline import HoistError, HoistReport, check_devices, hoist

CONFIG = {
    "vocab_size": 65,
    "hidden_size": 32,
    "intermediate_size": 60,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "attn_implementation": "sdpa",
}


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, use_cache=False).logits


def fake(tensor, mode):
    """The tensor on the accelerator, without its data."""
    inner = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    pretended = FakeTensor(mode, inner, torch.device("fakegpu:0"))
    return torch.nn.Parameter(pretended) if isinstance(tensor, torch.nn.Parameter) else pretended


def exported(model, ids):
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model, memo = copy.deepcopy(model), {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = memo.setdefault(id(tensor), fake(tensor, mode))
    with mode:
        return torch.export.export(model, (fake(ids, mode),), strict=False)


def fill(program, model):
    """Real weights and constants in place of the fake ones, ties as the program has them."""
    real = {**model.state_dict(keep_vars=True), **dict(model.named_buffers())}
    program._state_dict.update({name: real[name] for name in program.state_dict})
    program._constants.update({name: real[name] for name in program.constants})


class Branches(torch.nn.Module):
    """Control flow, a tie, a frozen parameter, a buffer that no file holds, deliberate cpu."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(65, 4)
        self.head = torch.nn.Linear(4, 65, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("offset", torch.ones(4), persistent=False)

    def forward(self, ids):
        def more(h):
            return h + torch.ones(4, device=h.device)

        h = self.embed(ids) + self.frozen + self.offset
        h = torch.cond(h.sum() > 0, more, lambda h: h - 1, (h,))
        return self.head(h), torch.arange(3, device="cpu")


def check(model, ids):
    program = exported(model, ids)
    assert any("index=0" in code for code in codes(program))
    report = HoistReport()
    hoist(program, {"fakegpu:0": "fakegpu:3"}, strict=True, report=report)
    assert not report.unchecked and not report.kept, report
    assert not any("index=0" in code for code in codes(program))
    print("hoisted from 0 to 3:", report.changed)
    return program


def codes(program):
    """The code of the graph and of the branches in it."""
    return [getattr(module, "code", "") for module in program.graph_module.modules()]


def run(program, model, ids):
    before = {name: value.requires_grad for name, value in program.state_dict.items()}
    hoist(program, {"fakegpu:3": "cpu"}, strict=True)
    assert before == {name: value.requires_grad for name, value in program.state_dict.items()}
    heads = [value for name, value in program.state_dict.items() if "head.weight" in name]
    assert any(heads[0] is value for n, value in program.state_dict.items() if "embed" in n)
    fill(program, model)
    assert torch.equal(first(program.module()(ids)), first(model(ids)))
    print("bitwise equal on the CPU")


def first(outputs):
    return outputs[0] if isinstance(outputs, tuple) else outputs


@torch.no_grad()
def main():
    _setup_privateuseone_for_python_backend("fakegpu")
    torch.manual_seed(0)
    ids = torch.randint(0, 65, (2, 7))
    branches = Branches()
    run(check(branches, ids), branches, ids)

    model = Logits(transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).eval())
    program = check(model, ids)
    literal = next(n for n in program.graph.nodes if str(n.kwargs.get("device")) == "fakegpu:3")
    literal.update_kwarg("device", torch.device("fakegpu:0"))
    try:
        check_devices(program)
    except HoistError as error:
        print("half-hoisted refused:", error)
    literal.update_kwarg("device", torch.device("fakegpu:3"))
    run(program, model, ids)


if __name__ == "__main__":
    main()
