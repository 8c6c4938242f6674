"""Keeps all ranks at work: micro-batches of a batch follow each other round the ring.

In a long pass the groups are parts of one call of the model, and their caches are put together
afterwards. In a greedy generate() they are generations of their own, so that one rank works on the
next token of some rows while another works on that of the others.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from coordinator import torch_private
from drumline.contact.caches import cache_of, has_windows, is_of_transformers, is_plain, with_cache
from drumline.contact.generate_options import keeps_rows_apart, unread_options
from drumline.contact.loading.configs import is_config
from drumline.contact.passes import (
    join_chunks,
    join_rows,
    masks_windows,
    undivided_inputs,
    unread_inputs,
    without_tokenizers,
)
from drumline.errors import short_traceback
from drumline.kv_cache.merge_caches import can_be_merged
from drumline.kv_cache.proxy import CacheProxy, merge_proxies
from drumline.pipeline import microbatch
from drumline.pipeline.driver import PipelineDriver
from drumline.pipeline.pass_hooks import PassChecks, is_requested
from drumline.pipeline.remote_layer import RemoteModule, is_autocast_enabled
from drumline.pipeline.unsupported import RemoteLayerError

Whole = Callable[..., Any]


class MicrobatchMixin:
    """Mixed into the class of a model: its passes and generations are split where that is safe.

    Each row's tokens are those of the whole batch; as with another batch size, the last bits of a
    logit may differ. `model.micro_batches = False` leaves every batch whole.

    Long prompts of a causal model are split into spans of tokens that follow each other.
    `model.prefill_chunk = 512` makes shorter prompts long, and 512 the tokens of a span; with 0,
    prompts stay whole.
    """

    micro_batches = True
    prefill_chunk: int | None = None
    device_map: Any
    forward: Any
    config: Any
    generation_config: Any
    _batched_ranks: Any
    _pass_checks: PassChecks
    _driver: PipelineDriver | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "_batched_ranks" in self.__dict__:  # a manager of batches may be gone without a stop()
            self._batched_ranks.release_attention()
        if self._driver is not None:
            kwargs = without_tokenizers(kwargs, self.forward)
        try:
            return self._pass(*args, **kwargs)
        except RemoteLayerError as error:  # BigBird changes its layers for a short text
            self._pass_checks.half_changed = error
            raise
        except BaseException:
            if self._driver is not None:  # no hook hears of an interrupt
                self._driver.context.end(self)
            raise

    def _pass(self, *args: Any, **kwargs: Any) -> Any:
        whole: Whole = super().__call__  # type: ignore[misc]
        groups = [] if args else self._groups_of_pass(kwargs)
        if len(groups) < 2:
            chunks = [] if args else self._chunks(kwargs)
            return self._run_chunks(whole, chunks) if len(chunks) > 1 else whole(*args, **kwargs)
        assert self._driver is not None
        cache = cache_of(kwargs)
        caches = [copy.deepcopy(cache) for _ in groups]
        parts = [
            with_cache(microbatch.take_rows(kwargs, group), part)
            for group, part in zip(groups, caches, strict=True)
        ]
        outputs = self._driver.microbatches.map(lambda part: whole(**part), parts)
        if cache is not None:
            merge_proxies(cache, caches)
        return join_rows(outputs, cache)

    @short_traceback
    def generate(self, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        whole: Whole = super().generate  # type: ignore[misc]
        is_tokens = getattr(self, "main_input_name", "") == "input_ids"
        if is_tokens and not args and inputs is not None and "input_ids" not in kwargs:
            inputs, kwargs = None, {**kwargs, "input_ids": inputs}
        streams = [] if args or inputs is not None else self._groups_of_generation(kwargs)
        if len(streams) < 2:
            positional = (inputs, *args) if args or inputs is not None else ()
            return whole(*positional, **kwargs)
        assert self._driver is not None
        parts = [{**kwargs, **microbatch.take_rows(_tensors(kwargs), group)} for group in streams]
        sequences = self._driver.microbatches.map(lambda part: whole(**part), parts)
        return microbatch.pad_together(sequences, self._padding(kwargs))

    def _groups_of_pass(self, inputs: Mapping[str, Any]) -> list[slice]:
        if self._driver is None or not self.micro_batches:
            return []
        batch, tokens = microbatch.shape(inputs)
        groups = microbatch.groups_of_pass(batch, tokens, *self._stages)
        if groups < 2 or torch.is_grad_enabled() or inputs.get("return_dict") is False:
            return []
        cache = cache_of(inputs)
        fits = inputs.get("use_cache") is False if cache is None else can_be_merged(cache)
        if not (fits and self._may_be_split):
            return []
        if undivided := undivided_inputs(inputs, batch):
            self._tell_unread("a pass", unread_inputs(inputs, batch))
        return [] if undivided else microbatch.rows(batch, groups)

    def _chunks(self, inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The inputs of consecutive spans of a prompt, if a pass may be split so."""
        if self._driver is None:
            return []
        cache, (batch, tokens) = cache_of(inputs), microbatch.shape(inputs)
        size = self.prefill_chunk
        if size is None:
            size = microbatch.tokens_of_chunk(tokens, *self._stages) if self.micro_batches else 0
        if not 0 < size < tokens or torch.is_grad_enabled():
            return []
        if cache is None or not is_plain(cache):
            return []
        if is_requested("output_hidden_states", self, inputs):  # which are those of all tokens
            return []
        if not (self._may_be_split and self._is_causal(cache)) or self._last_layer is None:
            return []
        past = int(cache.get_seq_length())
        if not microbatch.may_be_chunked(inputs, past, size):
            self._tell_unread("a pass", unread_inputs(inputs, batch))
            return []
        return microbatch.chunks(inputs, past, size)

    def _run_chunks(self, whole: Whole, chunks: list[dict[str, Any]]) -> Any:
        """One cache for all: a chunk begins when the last layer of the one before is called."""
        assert self._driver is not None
        microbatches, cache = self._driver.microbatches, cache_of(chunks[0])
        try:
            work = microbatches.map(lambda chunk: whole(**chunk), chunks, self._last_layer)
        except BaseException:
            if isinstance(cache, CacheProxy):
                cache.is_inconsistent = True  # it may hold the first of them
            raise
        if chunks[-1].get("logits_to_keep"):
            return work[-1]
        return join_chunks(work, [microbatch.shape(chunk)[1] for chunk in chunks])

    @cached_property
    def _last_layer(self) -> Any:
        """The remote layer that is called last; None if layers of the master come behind others."""
        owners = {
            number: module.forward
            for module in self.modules()  # type: ignore[attr-defined]
            if isinstance(module.forward, RemoteModule)
            for number in module.forward.cache_layers
        }
        numbers = range(self.config.num_hidden_layers)
        ranks = [owners[number].rank if number in owners else 0 for number in numbers]
        return owners[len(ranks) - 1] if ranks == sorted(ranks) and ranks[-1] else None

    def _groups_of_generation(self, options: Mapping[str, Any]) -> list[slice]:
        if self._driver is None or not self.micro_batches:
            return []
        tensors = _tensors(options)
        batch, _ = microbatch.shape(tensors)
        groups = microbatch.groups_of_generation(batch, *self._stages)
        if groups < 2 or not self._may_be_split:
            return []
        defaults = (options.get("generation_config"), self.generation_config)
        rest = {name: value for name, value in options.items() if name != "generation_config"}
        if not undivided_inputs(tensors, batch) and keeps_rows_apart(rest, *defaults):
            return microbatch.rows(batch, groups)
        self._tell_unread("generate()", unread_options(rest, *defaults))
        return []

    def _tell_unread(self, where: str, names: Sequence[str]) -> None:
        """Warn once of what was given that drumline does not know, so that a batch stays whole."""
        assert self._driver is not None
        if new := set(names) - self._driver.unread:
            self._driver.unread |= new
            warnings.warn(
                f"rank 0: {where} with {', '.join(sorted(new))} is computed whole, one rank after "
                "the other, because this drumline does not know whether the rows of a batch stay "
                "apart under it: tokens are right, and come later. Leave it out where speed "
                "matters; model.micro_batches = False ends this warning.",
                stacklevel=4,
            )

    @property
    def _may_be_split(self) -> bool:
        """True if nothing remains of a pass but its outputs and the cache.

        A hook of the script's own would see a part of the batch at a time. Of autocast, which is
        refused, other threads know nothing.
        """
        config = getattr(self, "config", None)  # not of every module that is dispatched
        if is_autocast_enabled() or not (is_config(config) and microbatch.keeps_no_state(config)):
            return False
        modules = self.modules()  # type: ignore[attr-defined]
        return not any(map(_is_hooked, modules))

    def _is_causal(self, cache: Any) -> bool:
        """True unless a token sees later ones, as in BERT, or in one pass more earlier ones than
        the cache keeps, as in Moshi, whose code makes no masks of windows. Of code that is not
        transformers' own, nothing is known."""
        module = type(self).__module__
        if self.prefill_chunk is None and not is_of_transformers(module):
            return False
        if has_windows(cache) and not masks_windows(vars(sys.modules[module])):
            return False
        modules = self.modules()  # type: ignore[attr-defined]
        answers = {bool(m.is_causal) for m in modules if getattr(m, "is_causal", None) is not None}
        return False not in (answers or {bool(getattr(self.config, "is_decoder", True))})

    @cached_property
    def _stages(self) -> tuple[int, int]:
        """The number of stages, and the factor by which groups must be larger for their devices.

        A rank with layers on more than one device fetches weights for each group anew.
        """
        ranks = self.device_map.ranks
        devices = [set(self.device_map.of(rank).values()) for rank in ranks]
        if any(len(on_rank) > 1 or "disk" in on_rank for on_rank in devices):
            return 1, microbatch.NEVER
        is_cpu = all(on_rank == {"cpu"} for on_rank in devices)
        return len(ranks), 1 if is_cpu else microbatch.ACCELERATED

    def _padding(self, options: Mapping[str, Any]) -> int:
        """The token that generate() writes behind the end of a row."""
        defaults = options.get("generation_config") or self.generation_config
        for name in ("pad_token_id", "eos_token_id"):
            value = options.get(name, getattr(defaults, name, None))
            value = getattr(self.generation_config, name, None) if value is None else value
            if value is not None:
                return int(value[0] if isinstance(value, (list, tuple)) else value)
        return 0  # rows without an end are all of one length


def _is_hooked(module: Any) -> bool:
    """True if a hook of the script's own would be given a part of a batch."""
    hooks = torch_private.forward_hooks(module)
    modules = [str(getattr(hook, "__module__", "")) for hook in hooks]
    return not all(name.startswith("drumline.") or is_of_transformers(name) for name in modules)


def _tensors(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if isinstance(value, torch.Tensor)}
