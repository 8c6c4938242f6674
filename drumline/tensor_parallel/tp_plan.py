"""Tensor-parallel plans: how each module or parameter of a model is sharded over the ranks.

styles = read_plan(model, "auto")      # module or parameter -> style

The names of the styles are those of transformers, so that the plan a model carries can be used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from drumline.contact.loading.models import expert_plan_of, shard_plan_of
from drumline.errors import PlanError
from drumline.planner.model_profile import layer_names

Styles = Mapping[str, str]

REPLICATED = ("replicate", "replicated_with_grad_allreduce", "moe_tp_experts", "local_params")
COLUMN = ("colwise", "colwise_gather_output", "colwise_rep")
ROW = ("rowwise", "rowwise_split_input", "rowwise_rep")
SEQUENCE_PARALLEL = "sequence_parallel"
UNSHARDED = (*REPLICATED, "mla_kv_a_proj", "all_reduce", "moe_identity_expert", SEQUENCE_PARALLEL)
EXPERT_PARALLEL = ("grouped_gemm", "ep_dispatch_experts")
EMBEDDING = ("embedding_rowwise", "embedding_colwise")
PACKED = ("packed_colwise", "packed_rowwise")
OUTPUT_SHARDED = ("colwise", "packed_colwise")
INPUT_SHARDED = ("rowwise", "packed_rowwise")
GATE_UP_NAMES = ("gate_up_proj", "gate_up_proj_bias")
"""Names in transformers of one tensor that holds the columns of a gate and those of a value."""

TIED_STYLES = {
    "colwise_gather_output": "embedding_rowwise",
    "rowwise_split_input": "embedding_colwise",
    "embedding_rowwise": "colwise_gather_output",
    "embedding_colwise": "rowwise_split_input",
}
"""By style of a head or an embedding: the style of the other that shards their tensor equally."""

REDUCING = ("moe_tp_experts", "all_reduce", "ep_dispatch_experts")
SUMS = (*REDUCING, *ROW, "packed_rowwise", "embedding_rowwise")
"""Styles of modules whose outputs are sums over all ranks."""
MODULE_STYLES = (*COLUMN, *ROW, *PACKED, *EMBEDDING)
ALL_STYLES = (*COLUMN, *ROW, *PACKED, *EMBEDDING, *EXPERT_PARALLEL, *UNSHARDED)

CARRIED_PLANS = ("auto", "ep", "sequence")
"""Plans by name: the one that the model carries; with its experts whole, each on one rank; with the
tokens partitioned between its norms."""


def read_plan(model: nn.Module, plan: str | Styles) -> dict[str, str]:
    """The style of each module and parameter that a plan names.

    plan: a name of CARRIED_PLANS, or styles by name, "*" standing for one part of a name:
        {"layers.*.up": "colwise", "layers.*.down": "rowwise"}.

    Raises PlanError for a style that is not known here, and for a rule of yours that nothing
    matches.
    """
    if isinstance(plan, str) and plan not in CARRIED_PLANS:
        raise PlanError(
            f"tp_plan={plan!r} is not a plan; give {', '.join(map(repr, CARRIED_PLANS))}, or a "
            "dict of name to style."
        )
    rules = _plan_of_model(model, plan) if isinstance(plan, str) else dict(plan)
    styles = _apply_rules(model, rules, must_match=not isinstance(plan, str))
    if not isinstance(plan, str):
        return styles
    # Some carried plans say "colwise" of experts whose gate and up are one tensor, as if they were
    # two: then one rank would have all gates, and the next all values.
    packed = [
        name for name, style in styles.items() if style == "colwise" and is_packed(model, name)
    ]
    styles |= dict.fromkeys(packed, "packed_colwise")
    styles |= _tied_styles(model, styles)
    return _with_norms(model, styles) if plan == "sequence" else styles


def _apply_rules(model: nn.Module, rules: Styles, must_match: bool) -> dict[str, str]:
    names = [name for name, _ in [*model.named_modules(), *model.named_parameters()]]
    styles: dict[str, str] = {}
    for pattern, style in rules.items():
        if style not in ALL_STYLES:
            raise PlanError(
                f"{pattern} is to be sharded as {style!r}, which is not a known style; the styles "
                f"are {', '.join(ALL_STYLES)}."
            )
        expression = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        matched = [name for name in names if expression.fullmatch(name)]
        if not matched and must_match:
            raise PlanError(f"tp_plan names {pattern!r}, which the model does not have.")
        styles.update(dict.fromkeys(matched, style))
    return styles


def is_packed(model: nn.Module, name: str) -> bool:
    """True if the parameter holds gates and, behind them, values."""
    owner, _, last = name.rpartition(".")
    return (
        last in GATE_UP_NAMES
        and getattr(model.get_submodule(owner), "is_concatenated", False) is True
    )


def _tied_styles(model: nn.Module, styles: Styles) -> dict[str, str]:
    """Styles for embeddings and heads that a plan leaves out, and that share a tensor with what it
    shards."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    tied: dict[str, str] = {}
    for names in owners.values():
        styles_of_owners = {styles[name] for name in names if name in styles}
        style = styles_of_owners.pop() if len(styles_of_owners) == 1 else ""
        if style not in TIED_STYLES:
            continue
        for name in names:
            is_table = isinstance(model.get_submodule(name), nn.Embedding)
            if name not in styles:
                tied[name] = style if is_table == (style in EMBEDDING) else TIED_STYLES[style]
    return tied


def _plan_of_model(model: Any, plan: str) -> dict[str, str]:
    """The plan that a transformers model carries; for "ep" with its plan for experts in it."""
    rules, experts = shard_plan_of(model), expert_plan_of(model)
    if plan == "ep":
        if not experts:
            raise PlanError(
                f"{type(model).__name__} carries no plan for experts on ranks of their own; "
                'use tp_plan="auto", which shards each expert if there are any.'
            )
        inside = tuple(f"{name}." for name in experts)
        kept = {n: s for n, s in rules.items() if n not in experts and not n.startswith(inside)}
        rules = kept | experts
    if not rules:
        raise PlanError(
            f"{type(model).__name__} carries no tensor-parallel plan, so nothing says how to shard "
            'it; pass tp_plan={"...": "colwise", ...}, or use device_map instead.'
        )
    return rules


def _with_norms(model: nn.Module, plan: Styles) -> dict[str, str]:
    """The plan with every norm between the sharded parts of layers, and behind them, parallel."""
    styles = dict(plan)
    layers = list(layer_names(model))
    trunks = {trunk_of(name) for name in layers}
    for outer in [*layers, *sorted(trunks)]:
        for name, child in model.get_submodule(outer).named_children():
            is_leaf = not any(True for _ in child.children())
            if is_leaf and "Norm" in type(child).__name__:
                styles[f"{outer}.{name}" if outer else name] = SEQUENCE_PARALLEL
    return styles


def trunk_of(layer: str) -> str:
    """The module that owns the list of layers."""
    return layer.rpartition(".")[0].rpartition(".")[0]
