"""Cuts the layers of a model over ranks, and adds the collectives that make the parts one model.

styles = read_plan(model, "auto")            # module or parameter -> how it is cut
splits = shard_specs(model, styles, size=2)    # parameter -> Split along "tp", checked
...                                          # every rank loads its part
connect(model, styles, comm)                 # one allreduce where one is due, none where not

The names of the styles are those of transformers, so that the plan a model carries can be used.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from communicator import Communicator
from drumline.checkpoint.model_tensors import replace_tensors
from drumline.core.mesh import Mesh
from drumline.core.shards import Region, ShardSpec, local_shape, owned_regions
from drumline.errors import PlanError
from drumline.tensor_parallel.autograd_collectives import (
    bounds,
    gathered,
    shared,
    summed,
    with_summed_gradients,
)
from drumline.tensor_parallel.dropout_rng import leave_out_alike
from drumline.tensor_parallel.sequence_parallel import PartedTokens, with_norms

Styles = Mapping[str, str]

REPLICATED = ("replicate", "replicated_with_grad_allreduce", "moe_tp_experts", "local_params")
COLUMN = ("colwise", "colwise_gather_output", "colwise_rep")
ROW = ("rowwise", "rowwise_split_input", "rowwise_rep")
WHOLE = (*REPLICATED, "mla_kv_a_proj", "all_reduce", "moe_identity_expert", "sequence_parallel")
EXPERTS = ("grouped_gemm", "ep_dispatch_experts")
EMBEDDING = ("embedding_rowwise", "embedding_colwise")
PACKED = ("packed_colwise", "packed_rowwise")
LEAVING_PARTS = ("colwise", "packed_colwise")
TAKING_PARTS = ("rowwise", "packed_rowwise")
ATTENTION = ("q_proj", "k_proj", "v_proj")
GATED = ("gate_up_proj", "gate_up_proj_bias")
"""What transformers calls the columns of a gate and of what it lets through, in one tensor."""

PARTNERS = {
    "colwise_gather_output": "embedding_rowwise",
    "rowwise_split_input": "embedding_colwise",
    "embedding_rowwise": "colwise_gather_output",
    "embedding_colwise": "rowwise_split_input",
}
"""Of a head and an embedding that are one tensor: the styles that cut it alike."""

SUMMED = ("moe_tp_experts", "all_reduce", "ep_dispatch_experts")
OF_MODULES = (*COLUMN, *ROW, *PACKED, *EMBEDDING)
KNOWN = (*COLUMN, *ROW, *PACKED, *EMBEDDING, *EXPERTS, *WHOLE)


CARRIED = ("auto", "ep", "sequence")
"""Plans by name: the one that the model carries; with its experts whole, each on one rank; with the
tokens parted between its norms."""


def read_plan(model: nn.Module, plan: str | Styles) -> dict[str, str]:
    """The style of each module and parameter that the plan names.

    plan: a name of CARRIED, or styles by name, "*" standing for one part of a name:
        {"layers.*.up": "colwise", "layers.*.down": "rowwise"}.

    Raises PlanError for a style that is not known here, and for a rule of yours that nothing
    matches.
    """
    if isinstance(plan, str) and plan not in CARRIED:
        raise PlanError(
            f"tp_plan={plan!r} is no plan; give {', '.join(map(repr, CARRIED))}, or a dict of "
            "name to style."
        )
    rules = _carried(model, plan) if isinstance(plan, str) else dict(plan)
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
        if not matched and not isinstance(plan, str):
            raise PlanError(f"tp_plan names {pattern!r}, which the model does not have.")
        found.update(dict.fromkeys(matched, style))
    if not isinstance(plan, str):
        return found
    found = {name: _packed(model, name, style) for name, style in found.items()}
    found |= _tied(model, found)
    return with_norms(model, found) if plan == "sequence" else found


def _packed(model: nn.Module, name: str, style: str) -> str:
    """The style that a carried plan means for experts whose gate and up are one tensor.

    Some say "colwise", as of the two that it is made of; then a rank would have the gate of all
    columns and the next one all of what it lets through.
    """
    return f"packed_{style}" if style == "colwise" and _is_packed(model, name) else style


def _is_packed(model: nn.Module, name: str) -> bool:
    """Does the parameter hold a gate and, behind it, what it lets through?"""
    owner, _, last = name.rpartition(".")
    return last in GATED and getattr(model.get_submodule(owner), "is_concatenated", False) is True


def _tied(model: nn.Module, styles: Styles) -> dict[str, str]:
    """Styles for embeddings and heads that a plan leaves out and that are one tensor with what it
    cuts."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    found: dict[str, str] = {}
    for names in owners.values():
        given = {styles[name] for name in names if name in styles}
        style = given.pop() if len(given) == 1 else ""
        if style not in PARTNERS:
            continue
        for name in names:
            is_table = isinstance(model.get_submodule(name), nn.Embedding)
            if name not in styles:
                found[name] = style if is_table == (style in EMBEDDING) else PARTNERS[style]
    return found


def _carried(model: Any, plan: str) -> dict[str, str]:
    """The plan that a transformers model has; for "ep" with that of its experts in it."""
    rules = dict(getattr(model, "_tp_plan", None) or {})
    experts = dict(getattr(model, "_ep_plan", None) or {})
    if plan == "ep":
        if not experts:
            raise PlanError(
                f"{type(model).__name__} carries no plan for experts on ranks of their own; "
                'use tp_plan="auto", which cuts each expert if there are any.'
            )
        inside = tuple(f"{name}." for name in experts)
        kept = {n: s for n, s in rules.items() if n not in experts and not n.startswith(inside)}
        rules = kept | experts
    if not rules:
        raise PlanError(
            f"{type(model).__name__} carries no tensor-parallel plan, so nothing says how to cut "
            'it; pass tp_plan={"...": "colwise", ...}, or use device_map instead.'
        )
    return rules


def shard_specs(model: nn.Module, styles: Styles, size: int) -> dict[str, tuple[ShardSpec, ...]]:
    """How each parameter is cut along "tp". Raises PlanError where that would not compute."""
    if not styles:
        return {name: () for name, _ in model.named_parameters(remove_duplicate=False)}
    _check_kinds(model, styles)
    _check_heads(model, styles, size)
    _check_attention(model, styles)
    _check_partners(model, styles)
    _check_experts(model, styles, size)
    found: dict[str, tuple[ShardSpec, ...]] = {}
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
    _check_sums(styles, found)
    for name, style in styles.items():
        if style == "rowwise" and styles.get(name.rpartition(".")[0]) == "moe_tp_experts":
            _check_alignment(model, name, size)
    return found


def _check_sums(styles: Styles, splits: Mapping[str, tuple[ShardSpec, ...]]) -> None:
    """What every rank computes in full must not be added up."""
    for name, style in styles.items():
        if style in SUMMED and not any(splits[p] for p in splits if p.startswith(f"{name}.")):
            raise PlanError(
                f"{name} is {style!r}, which adds up what ranks have in part, and nothing in it is "
                "cut, so the sum would be too large; cut its parameters too, or leave it out."
            )


def _check_kinds(model: nn.Module, styles: Styles) -> None:
    """A style says how one kind of module computes in part, and tokens need all of their scores."""
    modules = dict(model.named_modules())
    for name, style in styles.items():
        kind = nn.Embedding if style in EMBEDDING else nn.Linear
        is_cut = style in OF_MODULES
        if is_cut and name in modules and not isinstance(modules[name], kind):
            raise PlanError(
                f"{name} is a {type(modules[name]).__name__} and is to be cut as {style!r}, "
                f"which is for {kind.__name__}; take it out of the plan."
            )
        is_row = style in (*ROW, "packed_rowwise") and name in modules
        if is_row and type(modules[name]).forward is not nn.Linear.forward:
            raise PlanError(
                f"{name} is a {type(modules[name]).__name__}, which multiplies in its own way, and "
                f"is to be cut as {style!r}, which would leave that out; take it out of the plan."
            )
    whole: Any = model
    head = whole.get_output_embeddings() if hasattr(whole, "get_output_embeddings") else None
    for name, module in modules.items():
        if module is head and head is not None and styles.get(name) == "colwise":
            raise PlanError(
                f"{name} is cut as 'colwise', so every rank would choose among its own part of the "
                "words; cut it as 'colwise_gather_output'."
            )


def _cut(
    model: nn.Module, name: str, parameter: torch.Tensor, styles: Styles
) -> tuple[ShardSpec, ...]:
    """The split of one parameter by its own style, or that of its module."""
    owner, _, last = name.rpartition(".")
    style = styles.get(name) or styles.get(owner, "replicate")
    is_bias = last.endswith("bias")
    if name not in styles and style in OF_MODULES and last not in ("weight", "bias"):
        return ()  # what a kind of its own has beside them
    if style in WHOLE or style == "ep_dispatch_experts":
        return ()
    if style == "grouped_gemm":
        return (ShardSpec("tp", 0),)
    if style in ROW or style in ("packed_rowwise", "embedding_colwise"):
        factor = 2 if style == "packed_rowwise" else 1
        return () if is_bias else (ShardSpec("tp", parameter.dim() - 1, factor),)
    outputs = parameter.dim() - 1 if is_bias else max(parameter.dim() - 2, 0)
    return (ShardSpec("tp", outputs, 2 if style == "packed_colwise" else 1),)


def _check_heads(model: nn.Module, styles: Styles, size: int) -> None:
    """Attention is cut between heads; a head on two ranks would be two other heads."""
    heads: dict[str, int] = {}
    modules = dict(model.named_modules())
    for name, style in styles.items():
        if style != "colwise" or name not in modules:
            continue
        owner, _, last = name.rpartition(".")
        count = _heads_in(modules[owner], getattr(modules[name], "out_features", 0))
        if count:
            heads[last] = count
    bad = {name: count for name, count in heads.items() if count % size}
    if bad:
        common = math.gcd(*heads.values())
        fits = [n for n in range(1, common + 1) if common % n == 0]
        raise PlanError(
            f"attention has {', '.join(f'{n} heads in {name}' for name, n in bad.items())}, which "
            f"{size} ranks cannot share evenly; use tp={' or '.join(map(str, fits))}."
        )


def _heads_in(attention: Any, outputs: int) -> int:
    """How many heads so many features are, as far as the module around them says; 0 if not."""
    width, count = getattr(attention, "head_dim", None), getattr(attention, "num_heads", None)
    if isinstance(width, int):
        return outputs // width
    return count if isinstance(count, int) and count and outputs % count == 0 else 0


def _check_attention(model: nn.Module, styles: Styles) -> None:
    """A part of the queries with all keys would be one head with many, and nobody would notice."""
    for owner, module in model.named_modules():
        names = [f"{owner}.{name}" for name, _ in module.named_children() if name in ATTENTION]
        cut = [name for name in names if styles.get(name) in LEAVING_PARTS]
        rest = [name for name in names if name not in cut]
        if cut and rest:
            raise PlanError(
                f"{cut[0]} is cut into heads and {rest[0]} is not ({_style(styles, rest[0])}), so "
                "heads would be paired with those of other ranks; cut q_proj, k_proj and v_proj "
                "alike."
            )


def _check_partners(model: nn.Module, styles: Styles) -> None:
    """What columns leave in part is taken by rows, and by nothing that is whole."""
    for owner, module in model.named_modules():
        linears = {
            f"{owner}.{name}" if owner else name: child
            for name, child in module.named_children()
            if isinstance(child, nn.Linear)
        }
        columns = [name for name in linears if styles.get(name) in LEAVING_PARTS]
        rows = [name for name in linears if styles.get(name) in TAKING_PARTS]
        for name, other in itertools.product(columns[:1], rows[:1]):
            is_pair = len(columns) == len(rows) == 1 and styles[name] == "colwise"
            if is_pair and linears[name].out_features == 2 * linears[other].in_features:
                raise PlanError(_halves(name, other))
        if bool(columns) == bool(rows):
            continue
        rest = [name for name in linears if name not in (*columns, *rows)]
        for name, other in itertools.product(columns or rows, rest):
            gives, takes = (name, other) if columns else (other, name)
            width = linears[takes].in_features
            if linears[gives].out_features in (width, 2 * width if gives in columns else width):
                raise PlanError(
                    f"{gives} ({_style(styles, gives)}) gives {linears[gives].out_features} "
                    f"features and {takes} ({_style(styles, takes)}) takes {width}, and only one "
                    "of them is cut, so what one rank has would not fit the other; cut both "
                    "('colwise', then 'rowwise'), or neither."
                )


def _halves(name: str, partner: str) -> str:
    return (
        f"{name} gives two features, a gate and what it lets through, for each that {partner} "
        "takes, and is cut as 'colwise', so ranks would pair columns that do not belong together; "
        "cut it as 'packed_colwise'."
    )


def _style(styles: Styles, name: str) -> str:
    return styles.get(name, "whole")


def _check_experts(model: nn.Module, styles: Styles, size: int) -> None:
    """Experts are whole on their rank, and every rank has as many; or each is cut like an MLP."""
    for name, _ in model.named_parameters():
        owner, style = name.rpartition(".")[0], styles.get(name)
        if style == "colwise" and _is_packed(model, name):
            raise PlanError(_halves(name, f"{owner}.down_proj"))
        if (style == "grouped_gemm") != (styles.get(owner) == "ep_dispatch_experts"):
            raise PlanError(
                f"{name} is {style!r} and {owner} {styles.get(owner)!r}, so ranks would run other "
                "experts than they have; 'grouped_gemm' is for all parameters of a module that is "
                "'ep_dispatch_experts', and for no others."
            )
    counts = {n: model.get_parameter(n).shape[0] for n, s in styles.items() if s == "grouped_gemm"}
    name, bad = next(((n, count) for n, count in counts.items() if count % size), ("", 0))
    if bad:
        fits = [n for n in range(1, bad + 1) if bad % n == 0]
        raise PlanError(
            f"{name} holds {bad} experts, which {size} ranks cannot share evenly; use "
            f'tp={" or ".join(map(str, fits))}, or tp_plan="auto", which cuts each expert.'
        )


ALIGNED = 16
"""Bytes of which torch's multiplication of groups of rows wants a multiple in every row."""


def _check_alignment(model: nn.Module, name: str, size: int) -> None:
    """The part of a rank is what torch.nn.functional.grouped_mm can multiply with."""
    parameter, owner = model.get_parameter(name), model.get_submodule(name.rpartition(".")[0])
    inner, itemsize = parameter.shape[-1], parameter.element_size()
    if parameter.dim() != 3 or _implementation(owner) != "grouped_mm":
        return
    parts = [
        local_shape((inner,), [ShardSpec("tp", 0)], Mesh({"tp": size}), r)[0] for r in range(size)
    ]
    bad = next((part for part in parts if part * itemsize % ALIGNED), None)
    if bad is not None:
        raise PlanError(
            f"{name} would leave a rank {bad} of {inner} features of each expert, which are "
            f"{bad * itemsize} bytes, and torch multiplies experts in multiples of {ALIGNED} bytes "
            'only; use another tp, tp_plan="ep", or experts_implementation="eager", which is '
            "slower."
        )


def parallelize(model: nn.Module, plan: str | Styles, comm: Communicator) -> dict[str, Any]:
    """Cut a model that every rank has whole, in place, and connect it; the split of each parameter.

    For models that fit; `load_into` and `connect` never hold the whole. Same plan on every rank.
    """
    styles = read_plan(model, plan)
    splits = shard_specs(model, styles, comm.world_size)
    mesh = Mesh({"tp": comm.world_size})
    cut: dict[int, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        mine = local_shard(parameter.detach(), splits[name], mesh, comm.rank)
        cut[id(parameter)] = nn.Parameter(mine, requires_grad=parameter.requires_grad)
    connect(model, styles, comm)
    replace_tensors(model, cut)
    return splits


def local_shard(
    whole: torch.Tensor, splits: Sequence[ShardSpec], mesh: Mesh, rank: int
) -> torch.Tensor:
    """What `rank` has of a tensor: a tensor of its own."""
    out = whole.new_empty(local_shape(whole.shape, splits, mesh, rank))
    for own in owned_regions(whole.shape, splits, mesh, rank):
        out[Region(own.at, own.region.size).slices()] = whole[own.region.slices()]
    return out


def connect(model: nn.Module, styles: Styles, comm: Communicator) -> None:
    """Make the forward of every cut module compute its part and join it. Once, after loading.

    comm: over the ranks of the "tp" axis, in its order. Gradients flow as they do on one rank.
    """
    modules = dict(model.named_modules())
    alone = [name for name in modules if styles.get(name) == "sequence_parallel"]
    for name, style in styles.items():
        if name in modules and name not in alone:
            modules[name].forward = _FORWARDS[style](modules[name], comm)
        if style == "mla_kv_a_proj" and name in modules:
            owner = modules[name.rpartition(".")[0]]
            modules[name].forward = _latent(modules[name], owner.qk_rope_head_dim, comm)
    cut = {name: style for name, style in styles.items() if name in modules}
    opening = [modules[name] for name, style in cut.items() if style in LEAVING_PARTS]
    closing = [modules[name] for name, style in cut.items() if style in TAKING_PARTS]
    leave_out_alike(model, opening, closing, comm)
    if alone:
        done = PartedTokens(model, styles, comm).install()
        for name in set(alone) - done:
            modules[name].forward = _sequence_parallel(modules[name], comm)


def _column(module: nn.Module, comm: Communicator) -> Callable[..., Any]:
    plain = module.forward
    return lambda x: plain(shared(x, comm))


def _gathered_column(module: nn.Module, comm: Communicator) -> Callable[..., Any]:
    plain, outputs = module.forward, int(module.out_features)  # type: ignore[arg-type]
    return lambda x: gathered(plain(shared(x, comm)), outputs, comm)


def _row(module: Any, comm: Communicator) -> Callable[..., Any]:

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = summed(F.linear(x, module.weight), comm)
        return y if module.bias is None else y + module.bias

    return forward


def _split_row(module: Any, comm: Communicator) -> Callable[..., Any]:
    rows, inputs = _row(module, comm), int(module.in_features)
    begin, end = bounds(inputs, comm)
    return lambda x: rows(shared(x, comm)[..., begin:end])


class _PartedTable(nn.Embedding):
    """Stands below a model's own kind of embedding, which makes more of the vectors it looks up."""

    look_up: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.look_up(ids)


def _with_lookup(module: Any, look_up: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """The module's forward with another way to look up, whatever is done to what was found: that
    may need whole vectors (a norm) and the words themselves (a vector of its own for one)."""
    kind, seen = type(module), [False]
    if kind.forward is nn.Embedding.forward:
        return look_up
    if not issubclass(kind, _PartedTable):
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        module.__class__ = type(kind.__name__, (kind, _PartedTable), names)
    plain = module.forward

    def noted(ids: torch.Tensor) -> torch.Tensor:
        seen[0] = True
        return look_up(ids)

    def forward(*args: Any, **kwargs: Any) -> Any:
        seen[0] = False
        found = plain(*args, **kwargs)
        if not seen[0]:
            raise PlanError(
                f"{kind.__name__} looks words up in its own way, so a part of its table would "
                "give other words; take it out of tp_plan."
            )
        return found

    module.look_up = noted
    return forward


def _embedding(module: Any, comm: Communicator) -> Callable[..., Any]:
    """Each rank looks up the words it has; the others put in zeros."""
    begin, end = bounds(module.num_embeddings, comm)
    module.padding_idx = None  # it counts from the start of the whole table

    def look_up(ids: torch.Tensor) -> torch.Tensor:
        elsewhere = (ids < begin) | (ids >= end)
        if begin == end:
            found = module.weight.new_zeros(*ids.shape, module.embedding_dim)
        else:
            found = nn.Embedding.forward(module, (ids - begin).masked_fill(elsewhere, 0))
        return summed(found.masked_fill(elsewhere[..., None], 0), comm)

    return _with_lookup(module, look_up)


def _embedding_columns(module: Any, comm: Communicator) -> Callable[..., Any]:
    """Each rank has a part of every word's vector."""
    width = int(module.embedding_dim)
    return _with_lookup(
        module, lambda ids: gathered(nn.Embedding.forward(module, ids), width, comm)
    )


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

    def forward(hidden: torch.Tensor, *routing: Any) -> Any:
        given = [shared(one, comm) if isinstance(one, torch.Tensor) else one for one in routing]
        return summed(plain(shared(hidden, comm), *given), comm)

    return forward


def _own_experts(module: Any, comm: Communicator) -> Callable[..., Any]:
    """Every rank has some experts, whole, and computes for the tokens that are sent to those."""
    each = module.num_experts // comm.world_size
    plain, first = module.forward, comm.rank * each
    module.num_experts = each
    skips = hasattr(module, "_is_expert_parallel") and _implementation(module) != "eager"
    if skips:
        module._is_expert_parallel = True

    def forward(hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> Any:
        hidden, weights = shared(hidden, comm), shared(weights, comm)
        elsewhere = (experts < first) | (experts >= first + each)
        if skips:
            own = (experts - first).masked_fill(elsewhere, each)
            return summed(plain(hidden, own, weights.masked_fill(elsewhere, 0)), comm)
        token, choice = (~elsewhere).nonzero(as_tuple=True)
        own = (experts[token, choice] - first)[:, None]
        rows = plain(hidden[token], own, weights[token, choice][:, None])
        return summed(torch.zeros_like(hidden).index_add(0, token, rows.to(hidden.dtype)), comm)

    return forward


def _implementation(module: Any) -> str:
    """How transformers runs these experts."""
    config = getattr(module, "config", None)
    return str(getattr(config, "_experts_implementation", "eager") or "eager")


def _sequence_parallel(module: nn.Module, comm: Communicator) -> Callable[..., Any]:
    """A norm by itself: each rank computes its own tokens, and gets those of the others.

    A pass of fewer tokens than ranks, as in decoding, is computed by all: to gather takes longer.
    """
    whole, part = module.forward, with_summed_gradients(module, comm)

    def forward(x: torch.Tensor) -> Any:
        length = x.shape[1] if x.dim() > 2 else 0
        if length < comm.world_size:
            return whole(x)
        begin, end = bounds(length, comm)
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
    "ep_dispatch_experts": _own_experts,
    "grouped_gemm": _unchanged,
    "replicated_with_grad_allreduce": with_summed_gradients,
    "replicate": _unchanged,
    "local_params": _unchanged,
}
