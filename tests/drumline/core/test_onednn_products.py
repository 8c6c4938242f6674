"""Large products of float32 by oneDNN: where they are taken, and that they are torch's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from coordinator import torch_private
from drumline.core.cpu import onednn_products
from drumline.core.cpu.onednn_products import linear, use_onednn

WIDE = onednn_products.MIN_NBYTES // 4 // 64


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of weights that oneDNN has multiplied by."""
    shapes: list[torch.Size] = []
    product = torch_private.onednn_linear

    def counted(x: torch.Tensor, weight: torch.Tensor, *rest: object) -> torch.Tensor:
        shapes.append(weight.shape)
        return product(x, weight, *rest)  # type: ignore[no-any-return]

    monkeypatch.setattr(torch_private, "onednn_linear", counted)
    assert onednn_products._has_onednn()
    shapes.clear()
    return shapes


@pytest.mark.parametrize("shape", [(1, 64), (3, 5, 64), (0, 64), (64,), (2, 0, 64)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_torch(
    calls: list[torch.Size], shape: tuple[int, ...], bias: bool
) -> None:
    layer, x = nn.Linear(64, WIDE, bias=bias), torch.randn(shape)
    expected = layer(x)
    use_onednn(layer)
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
            nn.Linear(64, WIDE, device="meta"),
            Own(64, WIDE),
        ]
    )
    use_onednn(model)
    assert not any("forward" in vars(layer) for layer in model)

    layer, x = nn.Linear(64, WIDE), torch.randn(2, 64)
    plain = copy.deepcopy(layer)
    use_onednn(layer)
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
    use_onednn(layer)
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
    use_onednn(layer)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.zero_()
        other.bias.zero_()
        assert not other(torch.ones(1, 64)).any() and layer(torch.ones(1, 64)).any()


def test_torch_multiplies_where_onednn_is_off_or_differs(
    calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.Linear(64, WIDE)
    with torch.backends.mkldnn.flags(enabled=False):
        use_onednn(layer)
    assert "forward" not in vars(layer)

    def fails(*_: object) -> torch.Tensor:
        raise RuntimeError("no such operator")

    for absent in (None, fails, lambda x, weight, *_: x @ weight.T):
        onednn_products._has_onednn.cache_clear()
        monkeypatch.setattr(torch_private, "onednn_linear", absent)
        use_onednn(layer)
        assert "forward" not in vars(layer)
    onednn_products._has_onednn.cache_clear()
