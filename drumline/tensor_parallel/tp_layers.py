"""Layers that compute their shard, with the collectives that make the shards one model.

insert_collectives(model, styles, comm)    # one allreduce where one is due, none where not
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from communicator import Communicator
from drumline.contact.loading.configs import experts_of
from drumline.contact.loading.models import keep_experts_apart
from drumline.core.cpu.experts import use_fast_experts
from drumline.core.cpu.products import linear, use_fast_products
from drumline.core.mixed_classes import mixed_class
from drumline.errors import PlanError
from drumline.tensor_parallel import autograd_collectives as collectives
from drumline.tensor_parallel import tp_plan
from drumline.tensor_parallel.autograd_collectives import copy_to_ranks, reduce_from_ranks
from drumline.tensor_parallel.dropout_rng import sync_dropout_rng
from drumline.tensor_parallel.sequence_parallel import SequenceParallel
from drumline.tensor_parallel.tp_plan import Styles


def insert_collectives(model: nn.Module, styles: Styles, comm: Communicator) -> None:
    """Have the forward of every sharded module compute its shard and join the results.

    Once, after loading. From then on every rank has to make the same calls of the model.

    comm: over the ranks of the "tp" axis, in its order. Gradients flow as they do on one rank.
    """
    use_fast_products(model)
    use_fast_experts(model)
    modules = dict(model.named_modules())
    for name, style in styles.items():
        if name in modules and style not in UNCHANGED:
            modules[name].forward = _FORWARDS[style](modules[name], comm)
        if style == "mla_kv_a_proj" and name in modules:
            owner = modules[name.rpartition(".")[0]]
            modules[name].forward = _latent_column(modules[name], owner.qk_rope_head_dim, comm)
    by_style = [(style, modules[name]) for name, style in styles.items() if name in modules]
    sharding = [module for style, module in by_style if style in tp_plan.OUTPUT_SHARDED]
    unsharding = [module for style, module in by_style if style in tp_plan.INPUT_SHARDED]
    sync_dropout_rng(model, sharding, unsharding, comm)
    if tp_plan.SEQUENCE_PARALLEL in styles.values():
        SequenceParallel(model, styles, comm).install()


def _column(module: nn.Module, comm: Communicator) -> Callable[..., Any]:
    plain = module.forward
    return lambda x: plain(copy_to_ranks(x, comm))


def _gathered_column(module: nn.Module, comm: Communicator) -> Callable[..., Any]:
    plain, outputs = module.forward, int(module.out_features)  # type: ignore[arg-type]
    return lambda x: collectives.gather_from_ranks(plain(copy_to_ranks(x, comm)), outputs, comm)


def _row(module: Any, comm: Communicator) -> Callable[..., Any]:

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = reduce_from_ranks(linear(x, module.weight), comm)
        return y if module.bias is None else y + module.bias.to(y.dtype)

    return forward


def _split_row(module: Any, comm: Communicator) -> Callable[..., Any]:
    rows, inputs = _row(module, comm), int(module.in_features)
    begin, end = collectives.shard_bounds(inputs, comm)
    return lambda x: rows(copy_to_ranks(x, comm)[..., begin:end])


class _ShardedTable(nn.Embedding):
    """Base of a model's own kind of embedding, which changes the vectors that it looks up."""

    look_up: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.look_up(ids)


def _with_lookup(module: Any, look_up: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """The module's forward, with look_up in place of its lookup in a table.

    Its own code still runs on the vectors: it may need whole ones (a norm) and the ids."""
    kind, seen = type(module), [False]
    if kind.forward is nn.Embedding.forward:
        return look_up
    if not issubclass(kind, _ShardedTable):
        module.__class__ = mixed_class(kind, kind, _ShardedTable)
    plain = module.forward

    def noted(ids: torch.Tensor) -> torch.Tensor:
        seen[0] = True
        return look_up(ids)

    def forward(*args: Any, **kwargs: Any) -> Any:
        seen[0] = False
        vectors = plain(*args, **kwargs)
        if not seen[0]:
            raise PlanError(
                f"{kind.__name__} looks ids up in its own way, so a shard of its table would give "
                "other vectors; take it out of tp_plan."
            )
        return vectors

    module.look_up = noted
    return forward


def _embedding(module: Any, comm: Communicator) -> Callable[..., Any]:
    """Each rank looks up the ids of its shard; the others add zeros."""
    size = (int(module.num_embeddings), int(module.embedding_dim))
    begin, end = collectives.shard_bounds(size[0], comm)
    padding = module.padding_idx  # it counts from the start of the whole table
    is_here = padding is not None and begin <= padding < end
    module.padding_idx = padding - begin if is_here else None

    def look_up(ids: torch.Tensor) -> torch.Tensor:
        in_table = (ids >= 0) & (ids < size[0])  # torch refuses others, as it does on one rank
        elsewhere = in_table & ((ids < begin) | (ids >= end))
        if begin == end:
            vectors = F.embedding(ids, module.weight.new_zeros(1, 1).expand(size))
        else:
            vectors = nn.Embedding.forward(module, (ids - begin).masked_fill(elsewhere, 0))
        return reduce_from_ranks(vectors.masked_fill(elsewhere[..., None], 0), comm)

    return _with_lookup(module, look_up)


def _embedding_columns(module: Any, comm: Communicator) -> Callable[..., Any]:
    """Each rank has a part of every vector."""
    width = int(module.embedding_dim)
    return _with_lookup(
        module,
        lambda ids: collectives.gather_from_ranks(nn.Embedding.forward(module, ids), width, comm),
    )


def _latent_column(module: nn.Module, positions: Any, comm: Communicator) -> Callable[..., Any]:
    """Multi-head latent attention: the last columns (positions) are shared by all heads."""
    plain, width = module.forward, int(positions)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = plain(x)
        return torch.cat([y[..., :-width], copy_to_ranks(y[..., -width:], comm)], dim=-1)

    return forward


def _reduced_output(module: nn.Module, comm: Communicator) -> Callable[..., Any]:
    """A module whose parameters are sharded by styles of their own."""
    plain = module.forward
    return lambda *args, **kwargs: reduce_from_ranks(plain(*args, **kwargs), comm)


def _identity_expert(module: nn.Module, comm: Communicator) -> Callable[..., Any]:
    """An expert that returns its input: the sum over all ranks is to be the input once."""
    plain = module.forward
    return lambda x, *rest: plain(x / comm.world_size, *rest)


def _sharded_experts(module: nn.Module, comm: Communicator) -> Callable[..., Any]:
    """Every expert is sharded like an MLP; which experts run is the same on every rank."""
    plain = module.forward

    def forward(hidden: torch.Tensor, *routing: Any) -> Any:
        inputs = [
            x if not torch.is_tensor(x) else copy_to_ranks(x, comm) for x in (hidden, *routing)
        ]
        return reduce_from_ranks(plain(*inputs), comm)

    return forward


def _expert_parallel(module: Any, comm: Communicator) -> Callable[..., Any]:
    """Every rank has some whole experts, and computes the tokens that are routed to those."""
    experts_per_rank = module.num_experts // comm.world_size
    plain, first = module.forward, comm.rank * experts_per_rank
    module.num_experts = experts_per_rank
    skips = experts_of(getattr(module, "config", None)) != "eager" and keep_experts_apart(module)

    def forward(hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> Any:
        hidden, weights = copy_to_ranks(hidden, comm), copy_to_ranks(weights, comm)
        elsewhere = (experts < first) | (experts >= first + experts_per_rank)
        if skips:
            own = (experts - first).masked_fill(elsewhere, experts_per_rank)
            return reduce_from_ranks(plain(hidden, own, weights.masked_fill(elsewhere, 0)), comm)
        token, choice = (~elsewhere).nonzero(as_tuple=True)
        own = (experts[token, choice] - first)[:, None]
        rows = plain(hidden[token], own, weights[token, choice][:, None])
        if torch.is_grad_enabled():  # or no token would have no gradient
            rows = rows + (hidden[:0].sum() + weights[:0].sum())
        return reduce_from_ranks(
            torch.zeros_like(hidden).index_add(0, token, rows.to(hidden.dtype)), comm
        )

    return forward


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
    "all_reduce": _reduced_output,
    "moe_identity_expert": _identity_expert,
    "moe_tp_experts": _sharded_experts,
    "ep_dispatch_experts": _expert_parallel,
    "replicated_with_grad_allreduce": collectives.with_reduced_gradients,
}
"""By style, what makes the forward of a module."""
UNCHANGED = (
    "mla_kv_a_proj",
    "grouped_gemm",
    "replicate",
    "local_params",
    tp_plan.SEQUENCE_PARALLEL,
)
"""Styles whose modules keep their forward; that of norms between layers is wrapped with these."""
