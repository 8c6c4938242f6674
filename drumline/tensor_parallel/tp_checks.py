"""Checks of a tensor-parallel plan: PlanError for what would compute something else.

check_plan(model, styles, size)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from drumline.contact.loading.configs import experts_of
from drumline.core.mesh import Mesh
from drumline.core.shards import ShardSpec, local_shape
from drumline.errors import PlanError
from drumline.tensor_parallel import tp_plan
from drumline.tensor_parallel.tp_plan import Styles

ATTENTION_INPUTS = ("q_proj", "k_proj", "v_proj")

GROUPED_MM_ALIGNMENT = 16
"""In bytes: torch multiplies groups of rows whose length is a multiple of this."""


def check_plan(model: nn.Module, styles: Styles, size: int) -> None:
    """Raise PlanError if the styles do not fit the modules, or each other."""
    _check_kinds(model, styles)
    _check_heads(model, styles, size)
    _check_attention(model, styles)
    _check_partners(model, styles)
    _check_experts(model, styles, size)


def check_specs(
    model: nn.Module, styles: Styles, specs: Mapping[str, tuple[ShardSpec, ...]], size: int
) -> None:
    """Raise PlanError if the shards that the styles lead to would give another result."""
    _check_reductions(model, styles, specs, size)
    for name, style in styles.items():
        if style == "rowwise" and styles.get(name.rpartition(".")[0]) == "moe_tp_experts":
            _check_alignment(model, name, size)


def _check_kinds(model: nn.Module, styles: Styles) -> None:
    """Each style is for one kind of module, and the head must give every rank all scores."""
    modules = dict(model.named_modules())
    for name, style in styles.items():
        kind = nn.Embedding if style in tp_plan.EMBEDDING else nn.Linear
        is_sharded = style in tp_plan.MODULE_STYLES
        if is_sharded and name in modules and not isinstance(modules[name], kind):
            raise PlanError(
                f"{name} is a {type(modules[name]).__name__} and is to be sharded as {style!r}, "
                f"which is for {kind.__name__}; take it out of tp_plan."
            )
        is_row = style in (*tp_plan.ROW, "packed_rowwise") and name in modules
        if is_row and type(modules[name]).forward is not nn.Linear.forward:
            raise PlanError(
                f"{name} is a {type(modules[name]).__name__}, which multiplies in its own way, and "
                f"is to be sharded as {style!r}, which would skip that; take it out of tp_plan."
            )
    whole: Any = model
    head = whole.get_output_embeddings() if hasattr(whole, "get_output_embeddings") else None
    for name, module in modules.items():
        if module is head and head is not None and styles.get(name) == "colwise":
            raise PlanError(
                f"{name} is sharded as 'colwise', so every rank would choose among its own part of "
                "the words; shard it as 'colwise_gather_output'."
            )


def _check_heads(model: nn.Module, styles: Styles, size: int) -> None:
    """Attention is sharded between heads: a head on two ranks would be two other heads."""
    heads: dict[str, int] = {}
    modules = dict(model.named_modules())
    for name, style in styles.items():
        if style != "colwise" or name not in modules:
            continue
        owner, _, last = name.rpartition(".")
        count = _num_heads(modules[owner], getattr(modules[name], "out_features", 0))
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


def _num_heads(attention: Any, outputs: int) -> int:
    """The number of heads in `outputs` features, by the module around them; 0 if unknown."""
    width, count = getattr(attention, "head_dim", None), getattr(attention, "num_heads", None)
    if isinstance(width, int):
        return outputs // width
    return count if isinstance(count, int) and count and outputs % count == 0 else 0


def _check_attention(model: nn.Module, styles: Styles) -> None:
    """A shard of the queries with all keys would pair wrong heads, and nobody would notice."""
    for owner, module in model.named_modules():
        names = [
            f"{owner}.{name}" for name, _ in module.named_children() if name in ATTENTION_INPUTS
        ]
        sharded = [name for name in names if styles.get(name) in tp_plan.OUTPUT_SHARDED]
        rest = [name for name in names if name not in sharded]
        if sharded and rest:
            raise PlanError(
                f"{sharded[0]} is sharded into heads and {rest[0]} is not "
                f"({styles.get(rest[0], 'whole')}), so heads would be paired with those of "
                "other ranks; give q_proj, k_proj and v_proj the same style."
            )


def _check_partners(model: nn.Module, styles: Styles) -> None:
    """Sharded outputs must go into sharded inputs, and whole ones into whole ones."""
    for owner, module in model.named_modules():
        linears = {
            f"{owner}.{name}" if owner else name: child
            for name, child in module.named_children()
            if isinstance(child, nn.Linear)
        }
        columns = [name for name in linears if styles.get(name) in tp_plan.OUTPUT_SHARDED]
        rows = [name for name in linears if styles.get(name) in tp_plan.INPUT_SHARDED]
        for name, other in itertools.product(columns[:1], rows[:1]):
            is_pair = len(columns) == len(rows) == 1 and styles[name] == "colwise"
            if is_pair and linears[name].out_features == 2 * linears[other].in_features:
                raise PlanError(_describe_halves(name, other))
        if bool(columns) == bool(rows):
            continue
        rest = [name for name in linears if name not in (*columns, *rows)]
        for name, other in itertools.product(columns or rows, rest):
            gives, takes = (name, other) if columns else (other, name)
            width = linears[takes].in_features
            if linears[gives].out_features in (width, 2 * width if gives in columns else width):
                raise PlanError(
                    f"{gives} ({styles.get(gives, 'whole')}) gives "
                    f"{linears[gives].out_features} features and {takes} "
                    f"({styles.get(takes, 'whole')}) takes {width}, and only one of them is "
                    "sharded, so they would not fit; shard both ('colwise', then 'rowwise'), or "
                    "neither."
                )


def _describe_halves(name: str, partner: str) -> str:
    return (
        f"{name} gives two features, a gate and a value, for each that {partner} takes, and is "
        "sharded as 'colwise', so ranks would pair columns that do not belong together; shard it "
        "as 'packed_colwise'."
    )


def _check_experts(model: nn.Module, styles: Styles, size: int) -> None:
    """Every rank has equally many whole experts, or a shard of each expert."""
    for name, _ in model.named_parameters():
        owner, style = name.rpartition(".")[0], styles.get(name)
        if style == "colwise" and tp_plan.is_packed(model, name):
            raise PlanError(_describe_halves(name, f"{owner}.down_proj"))
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
            f'tp={" or ".join(map(str, fits))}, or tp_plan="auto", which shards each expert.'
        )


def _check_reductions(
    model: nn.Module, styles: Styles, specs: Mapping[str, tuple[ShardSpec, ...]], size: int
) -> None:
    """An output that every rank computes in full must not be summed."""
    modules = {name for name, _ in model.named_modules()}
    for name in (name for name, style in styles.items() if style in tp_plan.REDUCING):
        inside = [p for p in specs if p.startswith(f"{name}.")]
        summed = [n for n in modules if n.startswith(f"{name}.") and styles.get(n) in tp_plan.SUMS]
        whole = [p for p in inside if _is_added_by_all(p, name, specs)] + sorted(summed)
        if (whole and size > 1) or not any(specs[p] for p in inside):
            why = f"{whole[0]} gives all of them the same" if whole else "nothing in it is sharded"
            raise PlanError(
                f"{name} is {styles[name]!r}, which sums the outputs of all ranks, and {why}, so "
                "the sum would be too large; shard its parameters too, or leave it out."
            )


def _is_added_by_all(
    parameter: str, module: str, specs: Mapping[str, tuple[ShardSpec, ...]]
) -> bool:
    """True of a whole bias of the module itself, or of a layer in it that takes shards of rows."""
    owner, _, name = parameter.rpartition(".")
    takes_shards = any(split.dim == 1 for split in specs.get(f"{owner}.weight", ()))
    return name.endswith("bias") and not specs[parameter] and (owner == module or takes_shards)


def _check_alignment(model: nn.Module, name: str, size: int) -> None:
    """The shard of each rank has to fit torch.nn.functional.grouped_mm."""
    parameter, owner = model.get_parameter(name), model.get_submodule(name.rpartition(".")[0])
    inner, itemsize = parameter.shape[-1], parameter.element_size()
    if parameter.dim() != 3 or experts_of(getattr(owner, "config", None)) != "grouped_mm":
        return
    parts = [
        local_shape((inner,), [ShardSpec("tp", 0)], Mesh({"tp": size}), r)[0] for r in range(size)
    ]
    bad = next((part for part in parts if part * itemsize % GROUPED_MM_ALIGNMENT), None)
    if bad is not None:
        raise PlanError(
            f"{name} would leave a rank {bad} of {inner} features of each expert, which are "
            f"{bad * itemsize} bytes, and torch multiplies experts in multiples of "
            f'{GROUPED_MM_ALIGNMENT} bytes only; use another tp, tp_plan="ep", or '
            'experts_implementation="eager", which is slower.'
        )
