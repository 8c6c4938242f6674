"""The experts of a few tokens in another way than transformers': where, and that they are right."""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, NemotronHConfig, Qwen3MoeConfig
from transformers.integrations.moe import ExpertsInterface
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from drumline.contact.loading.models import keep_experts_apart
from drumline.core.cpu import experts, products
from drumline.core.cpu.experts import use_fast_experts

NUM_EXPERTS, HIDDEN, INNER = 8, 256, 512
SIZES = {"hidden_size": HIDDEN, "num_experts": NUM_EXPERTS, "moe_intermediate_size": INNER}
HAS_LOOP = pytest.mark.skipif(not products.LOOP_DTYPES, reason="torch multiplies on this processor")


def stack(dtype: torch.dtype = torch.float32, **sizes: int) -> Any:
    module = Qwen3MoeExperts(Qwen3MoeConfig(**{**SIZES, **sizes})).to(dtype)
    module.config._experts_implementation = "grouped_mm"
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.05)
    return module


def routed(num_tokens: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Up to four tokens go to experts of their own."""
    numbers = torch.cat([torch.randperm(NUM_EXPERTS) for _ in range(1 + num_tokens // 4)])
    index = numbers[: 2 * num_tokens].view(-1, 2)
    weights = torch.rand(num_tokens, 2).softmax(-1)
    return torch.randn(num_tokens, HIDDEN, dtype=dtype), index, weights.to(dtype)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The numbers of experts that were multiplied by the loop."""
    numbers: list[tuple[int, ...]] = []
    multiply_rows = experts.multiply_rows

    def counted(x: torch.Tensor, weight: torch.Tensor, rows: tuple[int, ...]) -> torch.Tensor:
        numbers.append(rows)
        return multiply_rows(x, weight, rows)

    monkeypatch.setattr(experts, "multiply_rows", counted)
    return numbers


@HAS_LOOP
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_experts_of_a_few_tokens_give_what_transformers_gives(
    calls: list[tuple[int, ...]], dtype: torch.dtype, rtol: float, num_tokens: int
) -> None:
    module, inputs = stack(dtype), routed(num_tokens, dtype)
    with torch.no_grad():
        expected = module(*inputs)
        use_fast_experts(module)
        result = module(*inputs)
        by_name = dict(zip(("hidden_states", "top_k_index", "top_k_weights"), inputs, strict=True))
        assert torch.equal(module(**by_name), result)
    assert result.dtype is dtype
    torch.testing.assert_close(result, expected, rtol=rtol, atol=rtol / 10)
    assert calls == [tuple(inputs[1].flatten().tolist())] * 4


@HAS_LOOP
def test_experts_of_other_ranks_add_nothing(calls: list[tuple[int, ...]]) -> None:
    module, (hidden, index, weights) = stack(), routed(2)
    assert keep_experts_apart(module)
    weights = weights.masked_fill(index == index[0, 0], 0)
    index = index.masked_fill(index == index[0, 0], NUM_EXPERTS)
    with torch.no_grad():
        expected = module(hidden, index, weights)
        use_fast_experts(module)
        torch.testing.assert_close(module(hidden, index, weights), expected, rtol=1e-4, atol=1e-5)
        assert all(NUM_EXPERTS not in numbers for numbers in calls) and len(calls) == 2
        nobody = torch.full_like(index, NUM_EXPERTS)
        assert not module(hidden, nobody, torch.zeros_like(weights)).any()


def test_gradients_many_tokens_and_casts_are_left_to_transformers(
    calls: list[tuple[int, ...]],
) -> None:
    module, inputs = stack(), routed(1)
    plain = copy.deepcopy(module)
    use_fast_experts(module)
    module(*inputs).sum().backward()
    plain(*inputs).sum().backward()
    assert torch.equal(module.down_proj.grad, plain.down_proj.grad)
    with torch.no_grad():
        for many in (routed(5), routed(0)):
            torch.testing.assert_close(module(*many), plain(*many))
        module.config._experts_implementation = "eager"  # transformers' faster ones take no double
        plain.config._experts_implementation = "eager"
        module.double(), plain.double()
        wide = (inputs[0].double(), inputs[1], inputs[2].double())
        torch.testing.assert_close(module(*wide), plain(*wide))
    assert not calls


def test_an_expert_of_many_tokens_is_left_to_transformers(calls: list[tuple[int, ...]]) -> None:
    module, (hidden, _, weights) = stack(), routed(4)
    plain = copy.deepcopy(module)
    use_fast_experts(module)
    shared = torch.tensor([[0, 1]] * 4)
    with torch.no_grad():
        assert torch.equal(module(hidden, shared, weights), plain(hidden, shared, weights))
    assert not calls


def test_numbers_out_of_range_are_left_to_transformers(calls: list[tuple[int, ...]]) -> None:
    module, (hidden, _, weights) = stack(), routed(1)
    module.config._experts_implementation = "eager"
    plain = copy.deepcopy(module)
    use_fast_experts(module)
    index = torch.tensor([[0, NUM_EXPERTS]])
    with torch.no_grad():
        assert torch.equal(module(hidden, index, weights), plain(hidden, index, weights))
    assert not calls


def test_experts_that_the_user_runs_stay_as_they_are(
    calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(Qwen3MoeExperts):
        def forward(self, *args: Any) -> str:
            return "own"

    own = stack()
    own.__class__ = Own
    named = stack()
    named.config._experts_implementation = "of_the_user"
    for module in (own, named):
        use_fast_experts(module)
        assert "forward" not in vars(module)
    plain = Qwen3MoeExperts.forward
    with monkeypatch.context() as patch:
        around = functools.wraps(plain)(lambda *args: plain(*args))
        patch.setattr(Qwen3MoeExperts, "forward", around)
        wrapped = stack()
        use_fast_experts(wrapped)
        assert "forward" not in vars(wrapped)
    late = stack()
    use_fast_experts(late)
    late.config._experts_implementation = "of_the_user"
    with pytest.raises(KeyError):
        late(*routed(1))
    assert not calls


def test_a_function_of_the_user_under_a_name_of_transformers_runs_the_experts(
    calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop ran in its place."""
    early = stack()
    use_fast_experts(early)
    ones = torch.ones(1)
    monkeypatch.setitem(ExpertsInterface._global_mapping, "grouped_mm", lambda *_, **__: ones)
    late = stack()
    use_fast_experts(late)
    assert "forward" not in vars(late)
    with torch.no_grad():
        assert early(*routed(1)) is ones
    assert not calls


@HAS_LOOP
def test_the_loop_does_not_depend_on_what_transformers_calls_its_decorator(
    calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Qwen3MoeExperts.forward
    code = plain.__code__.replace(co_name="run", co_qualname="choose.<locals>.run")
    renamed = types.FunctionType(code, plain.__globals__, closure=plain.__closure__)
    monkeypatch.setattr(Qwen3MoeExperts, "forward", renamed)
    module = stack()
    use_fast_experts(module)
    with torch.no_grad():
        module(*routed(1))
    assert len(calls) == 2


def test_stacks_that_do_not_fit_fail_as_without_the_loop(calls: list[tuple[int, ...]]) -> None:
    module, (hidden, index, weights) = stack(), routed(1)
    use_fast_experts(module)
    with torch.no_grad():
        with pytest.raises(RuntimeError):
            module(hidden[:, : HIDDEN // 2].contiguous(), index, weights)
        module.down_proj = torch.nn.Parameter(module.down_proj[:, :, : INNER // 2].contiguous())
        with pytest.raises(RuntimeError):
            module(hidden, index, weights)
    assert not calls


@HAS_LOOP
def test_a_copy_has_its_own_experts(calls: list[tuple[int, ...]]) -> None:
    module, inputs = stack(), routed(1)
    use_fast_experts(module)
    changed = copy.deepcopy(module)
    with torch.no_grad():
        changed.down_proj.zero_()
        assert not changed(*inputs).any() and module(*inputs).any()
    assert len(calls) == 4


@pytest.mark.parametrize("sizes", [{"hidden_size": 24}, {"moe_intermediate_size": 8}])
def test_small_experts_stay_as_they_are(sizes: dict[str, int]) -> None:
    module = stack(**sizes)
    use_fast_experts(module)
    assert "forward" not in vars(module)


def test_stacks_of_another_kind_stay_as_they_are() -> None:
    transposed = GptOssExperts(
        GptOssConfig(hidden_size=HIDDEN, num_local_experts=2, intermediate_size=INNER)
    )
    without_gate = NemotronHExperts(
        NemotronHConfig(hidden_size=HIDDEN, n_routed_experts=2, moe_intermediate_size=INNER)
    )
    with torch.backends.mkldnn.flags(enabled=False):
        use_fast_experts(usual := stack())
    for module in (transposed, without_gate):
        use_fast_experts(module)
    assert not any("forward" in vars(module) for module in (transposed, without_gate, usual))
