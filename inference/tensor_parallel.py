"""Cuts the layers of a model over ranks, and adds the collectives that make the parts one model.

styles = read_plan(model, "auto")            # module or parameter -> how it is cut
splits = splits_of(model, styles, size=2)    # parameter -> Split along "tp", checked
...                                          # every rank loads its part
connect(model, styles, comm)                 # one allreduce where one is due, none where not

The names of the styles are those of transformers, so that the plan a model carries can be used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from communicator import Communicator
from inference.boxes import Box, Split, local_shape, own_boxes
from inference.errors import PlanError
from inference.mesh import Mesh
from inference.nd_load import replace

Styles = Mapping[str, str]

REPLICATED = ("replicate", "replicated_with_grad_allreduce", "moe_tp_experts", "local_params")
COLUMN = ("colwise", "colwise_gather_output", "colwise_rep")
ROW = ("rowwise", "rowwise_split_input", "rowwise_rep")
WHOLE = (*REPLICATED, "mla_kv_a_proj", "all_reduce", "moe_identity_expert", "sequence_parallel")
EMBEDDING = ("embedding_rowwise", "embedding_colwise")
KNOWN = (*COLUMN, *ROW, "packed_colwise", "packed_rowwise", *EMBEDDING, *WHOLE)


def read_plan(model: nn.Module, plan: str | Styles) -> dict[str, str]:
    """The style of each module and parameter that the plan names.

    plan: "auto" for the one that the model carries, or styles by name, "*" standing for one part
    of a name: {"layers.*.up": "colwise", "layers.*.down": "rowwise"}. Raises PlanError for a style
    that is not known here, and for a rule of yours that nothing matches.
    """
    if isinstance(plan, str) and plan != "auto":
        raise PlanError(f'tp_plan={plan!r} is no plan; give "auto" or a dict of name to style.')
    rules = _carried(model) if isinstance(plan, str) else dict(plan)
    names = [name for name, _ in [*model.named_modules(), *model.named_parameters()]]
    found: dict[str, str] = {}
    for pattern, style in rules.items():
        if style not in KNOWN:
            raise PlanError(
                f"{pattern} is to be cut as {style!r}, which is not known here, and would be left "
                f"uncut; the styles are {', '.join(KNOWN)}."
            )
        matching = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        matched = [name for name in names if matching.fullmatch(name)]
        if not matched and plan != "auto":
            raise PlanError(f"tp_plan names {pattern!r}, which the model does not have.")
        found.update(dict.fromkeys(matched, style))
    return found


def _carried(model: Any) -> dict[str, str]:
    plan = getattr(model, "_tp_plan", None)
    if not plan:
        raise PlanError(
            f"{type(model).__name__} carries no tensor-parallel plan, so nothing says how to cut "
            'it; pass tp_plan={"...": "colwise", ...}, or use device_map instead.'
        )
    return dict(plan)


def splits_of(model: nn.Module, styles: Styles, size: int) -> dict[str, tuple[Split, ...]]:
    """How each parameter is cut along "tp". Raises PlanError where that would not compute."""
    _check_heads(model, styles, size)
    found: dict[str, tuple[Split, ...]] = {}
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        cut = _cut(model, name, parameter, styles)
        first = owners.setdefault(id(parameter), name)
        if found.setdefault(first, cut) != cut:
            raise PlanError(
                f"{first} and {name} are one tensor, and the plan cuts it in two ways; give both "
                "styles that cut the same dimension (embedding_rowwise and colwise_gather_output)."
            )
        found[name] = cut
    return found


def _cut(model: nn.Module, name: str, parameter: torch.Tensor, styles: Styles) -> tuple[Split, ...]:
    """The split of one parameter by its own style, or that of its module."""
    owner, _, last = name.rpartition(".")
    style = styles.get(name) or styles.get(owner, "replicate")
    is_bias = last.endswith("bias")
    if style in WHOLE:
        return ()
    if style in ROW or style in ("packed_rowwise", "embedding_colwise"):
        factor = 2 if style == "packed_rowwise" else 1
        return () if is_bias else (Split("tp", parameter.dim() - 1, factor),)
    outputs = parameter.dim() - 1 if is_bias else max(parameter.dim() - 2, 0)
    return (Split("tp", outputs, 2 if style == "packed_colwise" else 1),)


def _check_heads(model: nn.Module, styles: Styles, size: int) -> None:
    """Attention is cut between heads; a head on two ranks would be two other heads."""
    heads: dict[str, int] = {}
    for name, style in styles.items():
        if style != "colwise":
            continue
        owner, _, last = name.rpartition(".")
        width = getattr(model.get_submodule(owner), "head_dim", None)
        outputs = getattr(model.get_submodule(name), "out_features", None)
        if isinstance(width, int) and outputs:
            heads[last] = outputs // width
    bad = {name: count for name, count in heads.items() if count % size}
    if bad:
        common = math.gcd(*heads.values())
        fits = [n for n in range(1, common + 1) if common % n == 0]
        raise PlanError(
            f"attention has {', '.join(f'{n} heads in {name}' for name, n in bad.items())}, which "
            f"{size} ranks cannot share evenly; use tp={' or '.join(map(str, fits))}."
        )


def parallelize(model: nn.Module, plan: str | Styles, comm: Communicator) -> dict[str, Any]:
    """Cut a model that every rank has whole, in place, and connect it; the split of each parameter.

    For models that fit; `load_into` and `connect` never hold the whole. Same plan on every rank.
    """
    styles = read_plan(model, plan)
    splits = splits_of(model, styles, comm.world_size)
    mesh = Mesh({"tp": comm.world_size})
    cut: dict[int, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        mine = shard_of(parameter.detach(), splits[name], mesh, comm.rank)
        cut[id(parameter)] = nn.Parameter(mine, requires_grad=parameter.requires_grad)
    connect(model, styles, comm)
    replace(model, cut)
    return splits


def shard_of(whole: torch.Tensor, splits: Sequence[Split], mesh: Mesh, rank: int) -> torch.Tensor:
    """What `rank` has of a tensor: a tensor of its own."""
    out = whole.new_empty(local_shape(whole.shape, splits, mesh, rank))
    for own in own_boxes(whole.shape, splits, mesh, rank):
        out[Box(own.at, own.box.size).slices()] = whole[own.box.slices()]
    return out


def connect(model: nn.Module, styles: Styles, comm: Communicator) -> None:
    """Make the forward of every cut module compute its part and join it. Once, after loading.

    comm: over the ranks of the "tp" axis, in its order. Gradients flow as they do on one rank.
    """
    modules = dict(model.named_modules())
    for name, style in styles.items():
        if name in modules:
            modules[name].forward = _FORWARDS[style](modules[name], comm)
        if style == "mla_kv_a_proj":
            owner = modules[name.rpartition(".")[0]]
            modules[name].forward = _latent(modules[name], owner.qk_rope_head_dim, comm)


def _column(module: nn.Module, comm: Communicator) -> Callable[..., Any]:
    _need(module, nn.Linear, "colwise")
    plain = module.forward
    return lambda x: plain(shared(x, comm))


def _gathered_column(module: nn.Module, comm: Communicator) -> Callable[..., Any]:
    _need(module, nn.Linear, "colwise_gather_output")
    plain, outputs = module.forward, int(module.out_features)  # type: ignore[arg-type]
    return lambda x: gathered(plain(shared(x, comm)), outputs, comm)


def _row(module: Any, comm: Communicator) -> Callable[..., Any]:
    _need(module, nn.Linear, "rowwise")

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = summed(F.linear(x, module.weight), comm)
        return y if module.bias is None else y + module.bias

    return forward


def _split_row(module: Any, comm: Communicator) -> Callable[..., Any]:
    rows, inputs = _row(module, comm), int(module.in_features)
    begin, end = _bounds(inputs, comm)
    return lambda x: rows(shared(x, comm)[..., begin:end])


def _embedding(module: Any, comm: Communicator) -> Callable[..., Any]:
    """Each rank looks up the words it has; the others put in zeros."""
    _need(module, nn.Embedding, "embedding_rowwise")
    begin, end = _bounds(module.num_embeddings, comm)
    module.padding_idx = None  # it counts from the start of the whole table
    plain = module.forward

    def forward(ids: torch.Tensor) -> torch.Tensor:
        elsewhere = (ids < begin) | (ids >= end)
        if begin == end:
            found = module.weight.new_zeros(*ids.shape, module.embedding_dim)
        else:
            found = plain((ids - begin).masked_fill(elsewhere, 0))
        return summed(found.masked_fill(elsewhere[..., None], 0), comm)

    return forward


def _embedding_columns(module: Any, comm: Communicator) -> Callable[..., Any]:
    """Each rank has a part of every word's vector."""
    _need(module, nn.Embedding, "embedding_colwise")
    plain, width = module.forward, int(module.embedding_dim)
    return lambda ids: gathered(plain(ids), width, comm)


def _latent(module: nn.Module, positions: Any, comm: Communicator) -> Callable[..., Any]:
    """What all heads share: the last columns go to each rank's heads as they are."""
    plain, width = module.forward, int(positions)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = plain(x)
        return torch.cat([y[..., :-width], shared(y[..., -width:], comm)], dim=-1)

    return forward


def _summed_output(module: nn.Module, comm: Communicator) -> Callable[..., Any]:
    """For a module whose parameters are cut by styles of their own."""
    plain = module.forward
    return lambda *args, **kwargs: summed(plain(*args, **kwargs), comm)


def _part_of_identity(module: nn.Module, comm: Communicator) -> Callable[..., Any]:
    """Among experts whose outputs are summed over ranks: all ranks together give the input once."""
    plain = module.forward
    return lambda x, *rest: plain(x / comm.world_size, *rest)


def _experts(module: nn.Module, comm: Communicator) -> Callable[..., Any]:
    """Every expert is cut like a small MLP; which experts run is the same on every rank."""
    plain = module.forward

    def forward(hidden: torch.Tensor, experts: Any, weights: Any, *rest: Any) -> Any:
        return summed(plain(shared(hidden, comm), experts, shared(weights, comm), *rest), comm)

    return forward


def _replicated_with_gradient(module: nn.Module, comm: Communicator) -> Callable[..., Any]:
    """The whole parameter on every rank, each seeing some heads: its gradients are summed."""
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        own = {name: p for name, p in module._parameters.items() if p is not None}
        module._parameters.update({n: shared(p, comm) for n, p in own.items()})  # type: ignore[misc]
        try:
            return plain(*args, **kwargs)
        finally:
            module._parameters.update(own)

    return forward


def _sequence_parallel(module: nn.Module, comm: Communicator) -> Callable[..., Any]:
    """Each rank computes its own tokens, [batch, length, ...], and gets those of the others.

    A pass of fewer tokens than ranks, as in decoding, is computed by all: to gather takes longer.
    """
    whole, part = module.forward, _replicated_with_gradient(module, comm)

    def forward(x: torch.Tensor) -> Any:
        length = x.shape[1] if x.dim() > 2 else 0
        if length < comm.world_size:
            return whole(x)
        begin, end = _bounds(length, comm)
        mine = part(shared(x, comm)[:, begin:end])
        return gathered(mine.transpose(1, -1), length, comm).transpose(1, -1)

    return forward


def _unchanged(module: nn.Module, comm: Communicator) -> Callable[..., Any]:
    return module.forward


_FORWARDS: dict[str, Callable[[Any, Communicator], Callable[..., Any]]] = {
    "colwise": _column,
    "packed_colwise": _column,
    "colwise_gather_output": _gathered_column,
    "colwise_rep": _gathered_column,
    "rowwise": _row,
    "packed_rowwise": _row,
    "rowwise_split_input": _split_row,
    "rowwise_rep": _split_row,
    "embedding_rowwise": _embedding,
    "embedding_colwise": _embedding_columns,
    "mla_kv_a_proj": _unchanged,
    "all_reduce": _summed_output,
    "moe_identity_expert": _part_of_identity,
    "sequence_parallel": _sequence_parallel,
    "moe_tp_experts": _experts,
    "replicated_with_grad_allreduce": _replicated_with_gradient,
    "replicate": _unchanged,
    "local_params": _unchanged,
}


def _need(module: nn.Module, kind: type[nn.Module], style: str) -> None:
    if not isinstance(module, kind):
        raise PlanError(
            f"{type(module).__name__} is to be cut as {style!r}, which is for {kind.__name__}; "
            "take it out of the plan."
        )


def _bounds(size: int, comm: Communicator) -> tuple[int, int]:
    """Which of `size` this rank has, cut as Split cuts."""
    each = -(-size // comm.world_size)
    return min(comm.rank * each, size), min((comm.rank + 1) * each, size)


def shared(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """x, which all ranks have, entering what each does a part of: gradients are summed."""
    return _Shared.apply(x, comm) if _needs_gradient(x) else x  # type: ignore[no-untyped-call]


def summed(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """The sum of every rank's x, which is a fresh tensor and may be overwritten."""
    if _needs_gradient(x):
        return _Summed.apply(x, comm)  # type: ignore[no-any-return, no-untyped-call]
    return comm.allreduce(x.contiguous())


def gathered(x: torch.Tensor, width: int, comm: Communicator) -> torch.Tensor:
    """Every rank's columns side by side: [..., width]."""
    if _needs_gradient(x):
        return _Gathered.apply(x, width, comm)  # type: ignore[no-any-return, no-untyped-call]
    return _gather(x, width, comm)


def _needs_gradient(x: torch.Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _gather(x: torch.Tensor, width: int, comm: Communicator) -> torch.Tensor:
    each = -(-width // comm.world_size)
    rows = comm.allgather(F.pad(x, (0, each - x.shape[-1])).contiguous())
    return rows.movedim(0, -2).flatten(-2)[..., :width]


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.comm.allreduce(gradients[0].contiguous().clone()), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        return comm.allreduce(x.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, width: int, comm: Communicator) -> torch.Tensor:
        ctx.bounds = _bounds(width, comm)
        return _gather(x, width, comm)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        begin, end = ctx.bounds
        return gradients[0][..., begin:end].contiguous(), None, None
