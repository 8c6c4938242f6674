"""Large products in other ways than torch's: where they are taken, and that they are right."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from coordinator import torch_private
from drumline.core.cpu import _products, products
from drumline.core.cpu.products import linear, use_fast_products


class Doubled(TorchFunctionMode):
    """A context in which products are twice as large."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return 2 * result if func is F.linear else result


WIDE = products.MIN_NBYTES // 4 // 64
HAS_LOOP = pytest.mark.skipif(not products.LOOP_DTYPES, reason="torch multiplies on this processor")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of weights that were not multiplied by torch's own choice."""
    shapes: list[torch.Size] = []
    product = torch_private.onednn_linear

    def counted(x: torch.Tensor, weight: torch.Tensor, *rest: object) -> torch.Tensor:
        shapes.append(weight.shape)
        return product(x, weight, *rest)  # type: ignore[no-any-return]

    multiply_rows = _products.multiply_rows

    def counted_rows(*arguments: Any) -> None:
        shapes.append(torch.Size(arguments[6:8]))
        multiply_rows(*arguments)

    monkeypatch.setattr(torch_private, "onednn_linear", counted)
    monkeypatch.setattr(_products, "multiply_rows", counted_rows)
    assert products._has_onednn()
    shapes.clear()
    return shapes


@pytest.mark.parametrize("shape", [(1, 64), (3, 5, 64), (0, 64), (64,), (2, 0, 64)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_torch(
    calls: list[torch.Size], shape: tuple[int, ...], bias: bool
) -> None:
    layer, x = nn.Linear(64, WIDE, bias=bias), torch.randn(shape)
    expected = layer(x)
    use_fast_products(layer)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(linear(x, layer.weight, layer.bias), layer(x), rtol=0, atol=0)
        strided = torch.randn(7, 128)[:, ::2]
        torch.testing.assert_close(
            layer(strided), F.linear(strided, layer.weight, layer.bias), rtol=1e-4, atol=1e-5
        )
    assert len(calls) == 4


def test_only_large_plain_layers_outside_of_autograd_are_changed(calls: list[torch.Size]) -> None:
    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    model = nn.ModuleList(
        [
            nn.Linear(8, 8),
            nn.Linear(64, WIDE, dtype=torch.bfloat16),
            nn.Linear(64, 2 * WIDE, dtype=torch.float16),
            nn.Linear(72, 2 * WIDE, dtype=torch.bfloat16),
            nn.Linear(64, WIDE, device="meta"),
            Own(64, WIDE),
        ]
    )
    use_fast_products(model)
    assert not any("forward" in vars(layer) for layer in model)

    layer, x = nn.Linear(64, WIDE), torch.randn(2, 64)
    plain = copy.deepcopy(layer)
    use_fast_products(layer)
    loss = layer(x).sum()
    loss.backward()
    plain(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad, rtol=0, atol=0)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(layer)(x[:, None]), plain(x)[:, None])
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            assert forward_ad.unpack_dual(layer(input=dual)).tangent is not None
        assert "mkldnn" not in str(torch.jit.trace(layer, x, check_trace=False).graph)
        assert layer.double()(x.double()).dtype is torch.float64
    assert not calls


@pytest.mark.parametrize("new", ["sparse", "strided", "subclass"])
def test_weights_that_are_replaced_are_multiplied_by_torch(
    calls: list[torch.Size], new: str
) -> None:
    class Other(torch.Tensor):
        pass

    layer, x = nn.Linear(64, WIDE, bias=False), torch.randn(2, 64)
    use_fast_products(layer)
    with torch.no_grad():
        plain = layer.weight.clone()
        weights = {
            "sparse": lambda: plain.to_sparse_csr(),
            "strided": lambda: plain.t().contiguous().t(),
            "subclass": lambda: plain.as_subclass(Other),
        }
        layer.weight = nn.Parameter(weights[new](), requires_grad=False)
        torch.testing.assert_close(layer(x).as_subclass(torch.Tensor), F.linear(x, plain))
    assert not calls


def test_copies_of_a_changed_layer_have_their_own_weights(calls: list[torch.Size]) -> None:
    layer = nn.Linear(64, WIDE)
    use_fast_products(layer)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.zero_()
        other.bias.zero_()
        assert not other(torch.ones(1, 64)).any() and layer(torch.ones(1, 64)).any()


def test_torch_multiplies_where_onednn_is_off_or_differs(
    calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = nn.Linear(64, WIDE), torch.randn(2, 64)
    with torch.backends.mkldnn.flags(enabled=False):
        use_fast_products(layer)
    assert "forward" not in vars(layer)

    def fails(*_: object) -> torch.Tensor:
        raise RuntimeError("no such operator")

    for absent in (None, fails, lambda x, weight, *_: x @ weight.T):
        products._has_onednn.cache_clear()
        monkeypatch.setattr(torch_private, "onednn_linear", absent)
        use_fast_products(layer)
        with torch.no_grad():
            assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    products._has_onednn.cache_clear()


@HAS_LOOP
@pytest.mark.parametrize("columns", [32, 64, 96, 1536])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_one_row_is_summed_in_float32_and_rounded_once(
    calls: list[torch.Size], columns: int, dtype: torch.dtype, bias: bool
) -> None:
    rows = products.MIN_NBYTES // columns
    layer, x = nn.Linear(columns, rows, bias, dtype=dtype), torch.randn(1, 1, columns, dtype=dtype)
    use_fast_products(layer)
    exact = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    with torch.no_grad():
        result = layer(x)
    assert result.dtype is dtype and calls == [layer.weight.shape]
    difference = (result.double() - exact).abs()
    ulp = exact.abs() * torch.finfo(dtype).eps
    assert (difference <= ulp / 2 + 1e-6).all()


@HAS_LOOP
def test_one_row_has_the_same_bits_with_any_number_of_threads(calls: list[torch.Size]) -> None:
    layer, x = nn.Linear(256, 4 * WIDE + 3), torch.randn(1, 256)
    use_fast_products(layer)
    before = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            with torch.no_grad():
                results.append(layer(x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results) and len(calls) == 4


@HAS_LOOP
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_or_a_bias_that_the_loop_cannot_read_is_left_to_torch(
    calls: list[torch.Size], dtype: torch.dtype
) -> None:
    layer = nn.Linear(64, 2 * WIDE, dtype=dtype)
    use_fast_products(layer)
    x = torch.randn(1, 64, dtype=dtype)
    with torch.no_grad():
        expected = F.linear(x, layer.weight, layer.bias)
        with FlopCounterMode(display=False) as counted:
            layer(x)
        assert counted.get_total_flops() and not calls
        spread = torch.stack([x, x], -1)[..., 0]
        torch.testing.assert_close(layer(spread), expected)
        with torch.device("cpu"):
            torch.testing.assert_close(layer(x), expected)
        assert len(calls) == 2
        layer.bias = nn.Parameter(torch.stack([layer.bias] * 2, -1)[:, 0], requires_grad=False)
        torch.testing.assert_close(layer(x), expected)
        layer.bias = nn.Parameter(layer.bias[:1].clone(), requires_grad=False)
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
        with Doubled():
            doubled = linear(x, layer.weight)
        torch.testing.assert_close(doubled, 2 * F.linear(x, layer.weight))
        biases = torch.randn(3, 2 * WIDE, dtype=dtype)
        mapped = torch.func.vmap(lambda bias: linear(x, layer.weight, bias))(biases)
        torch.testing.assert_close(mapped[:, 0], F.linear(x, layer.weight) + biases)
        with pytest.raises(RuntimeError):
            layer(x[0, 0])
        with pytest.raises(RuntimeError):
            layer(x.double())
        with pytest.raises(RuntimeError):
            layer(x[:, :32])
    assert len(calls) == 2
