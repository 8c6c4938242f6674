"""transformers' continuous batching over ranks: rank 0 has the tables, each rank its layers' pages.

outputs = model.generate_batch([[1, 5, 9], [1, 7]], generation_config=settings)

A step is one message: operations bring the tokens to read and to write, and the calls of the layers
follow. There is no log of what a cache holds, so a pass that fails leaves nothing to mend.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from drumline.contact.loading.configs import (
    attention_of,
    generation_settings,
    without_recommended_settings,
)
from drumline.core.cpu.idle_threads import release_idle_threads
from drumline.core.device_map import ModelProfile, ModulePart, Place
from drumline.errors import DrumlineError, PeerLost, PlanError
from drumline.kv_cache.owner import make_pool
from drumline.kv_cache.proxy import forget_with
from drumline.pipeline.driver import PipelineDriver
from drumline.pipeline.remote_layer import cache_layers
from drumline.planner.token_memory import token_memory

log = logging.getLogger("drumline")

MAX_UNTOLD_TOKENS = 1 << 12
"""Of a request, where neither it nor the model's config says how long it can be."""

TRIED_TOKENS, TRIED_STEPS, TRIED_PAGE_SIZE = 12, 2, 16
"""Of a request by which it is tried whether a model can be batched over pages; one page of the
usual size may be more than a small rank has memory for."""

MAX_DIFFERENCE = 0.05
"""Relative to the norm, of logits that are equal up to the last bits, also of half precision."""


class PoolsOfRanks:
    """The pools of all ranks as rank 0 changes them. own: that of rank 0's layers."""

    def __init__(self, driver: PipelineDriver | None, *shape: Any):
        self.driver, self.own = driver, make_pool(*shape)
        self.update = self.own.update
        self.number = 0
        if driver is not None:
            self.number = driver.next_cache()
            forget_with(self, driver, self.number)
        self._record("create_pool", *shape)

    def begin_step(self, *tensors: torch.Tensor) -> None:
        """Let every rank know the tokens of the next pass."""
        self.own.begin_step(*tensors)
        self._record("begin_step", *tensors)

    def copy_tokens(self, kind: int, sources: torch.Tensor, targets: torch.Tensor) -> None:
        self.own.copy_tokens(kind, sources, targets)
        self._record("copy_tokens", kind, sources, targets)

    def _record(self, operation: str, *arguments: Any) -> None:
        if self.driver is not None:
            self.driver.record(operation, self.number, *arguments)


class BatchedRanks:
    """The ranks of a model as a manager of batches uses them: see `paged_batches.PagedManager`."""

    def __init__(self, model: Any):
        self.model, self.driver = model, model._driver
        self.loaded_attention = str(attention_of(model.config))
        self._is_tried = False
        self._used_attention: str | None = None
        self._managers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._sized: weakref.WeakSet[Any] = weakref.WeakSet()  # managers that may have pages
        self._lock = threading.Lock()  # a thread that ends may not change what another's step uses

    def leave_computing(self) -> None:
        """Leave the processors to the thread that runs the steps, where another one starts it."""
        release_idle_threads()

    def check_there(self) -> None:
        """Raise PeerLost if a rank was lost, after which the model may be loaded anew already.

        Other ranks know nothing of these pools, and their layers attend as they were loaded.
        """
        if self._are_there:
            return
        lost = getattr(self.driver, "lost", None)
        if lost is not None and not hasattr(self.model, "_replanner"):
            raise copy.copy(lost)
        raise PeerLost(
            lost.what if lost else "rank 0: the model was loaded again after a rank was lost",
            lost.failures if lost else (),
            "The tokens that this manager kept are gone; make a new manager with "
            "init_continuous_batching().",
        )

    @property
    def _are_there(self) -> bool:
        return self.driver is self.model._driver and getattr(self.driver, "lost", None) is None

    def try_once(self) -> None:
        """Raise DrumlineError for a model that has other logits over pages than in generate().

        Tried with the first manager, by a smaller one.
        """
        if not self._is_tried:
            length = TRIED_TOKENS + TRIED_STEPS
            settings = {"max_requests_per_batch": 1, "page_size": TRIED_PAGE_SIZE}
            tried = tried_manager(self.model, None, length, 1, 0, **settings)
            tried.batch_processor = None
            tried.release()
            self._is_tried = True

    def use_attention(self, manager: Any, name: str) -> None:
        """Have all layers attend so as long as a manager is there."""
        with self._lock:
            self._managers.add(manager)
            self._sized.add(manager)
            if attention_of(self.model.config) != name:
                self.model._use_attention(name)
                self._used_attention = name

    def release_attention(self, manager: Any = None) -> None:
        """Have all layers attend as they were loaded, unless another manager is there."""
        with self._lock:
            if manager is not None:
                self._managers.discard(manager)
            if self._used_attention is not None and not self._managers and self._are_there:
                self.model._use_attention(self.loaded_attention)
                self._used_attention = None

    def make_pools(self, *shape: Any) -> PoolsOfRanks:
        return PoolsOfRanks(self.driver, *shape)

    def num_blocks(self, settings: Any, hints: Any) -> int:
        """The blocks of the whole model for which every rank has memory beside those of other
        managers, and no more than requests can fill. Raises PlanError if `settings` name more."""
        from drumline.contact.batching import paged_batches

        config = self.model.config.get_text_config()
        kinds = paged_batches.kinds_of_layers(config)
        num_layers, room = Counter(kinds), {}
        # Of two kinds of attention each may take all blocks; they take whole sectors of them.
        times = [len(kinds) / num_layers[kind] for kind in sorted(num_layers)]
        of_sector = math.lcm(*num_layers.values())  # layers' parts of a block
        with self._lock:
            tables = [manager.tables for manager in self._sized]
        taken = [self._nbytes(kinds, each.num_tokens) for each in tables if each is not None]
        for place, nbytes in self._nbytes(kinds, [settings.page_size * n for n in times]).items():
            planned, free = self.model.device_map.free_for_tokens(place)
            whole = planned + max(0, int(free * settings.max_memory_percent))
            own = whole * getattr(hints, "share", 1)
            left = min(own, whole - sum(each[place] for each in taken))
            num_sectors = int(left * len(kinds) / of_sector / nbytes)
            room[place] = max(0, num_sectors) * of_sector // len(kinds)
        place, num_blocks = min(room.items(), key=lambda item: item[1], default=((0, ""), 1 << 40))
        requested = settings.num_blocks
        if num_blocks < max(requested or 1, 1):
            raise PlanError(
                f"rank {place[0]}: {place[1]} has memory for the keys and values of {num_blocks} "
                f"blocks of {settings.page_size} tokens, and {requested or 1} are needed; give "
                "a smaller num_blocks or page_size, stop() other managers, or load the model over "
                "more ranks."
            )
        if requested is not None:
            return int(requested)
        return min(num_blocks, self._max_useful(config, settings, hints) * len({*kinds}))

    def _nbytes(self, kinds: list[int], num_tokens: Sequence[float]) -> dict[Place, float]:
        """The bytes of that many tokens of each kind by place with layers, as a pass without
        weights has them. The layer that attends holds once more what it reads, so the largest
        layer's part is added."""
        model, device_map = self.model, self.model.device_map
        modules, parts = dict(model.named_modules()), [ModulePart(n, 0) for n in device_map.places]
        memory = token_memory(  # of one token, which the shortest window keeps
            model._plain_class, model.config, model.dtype, ModelProfile(tuple(parts)), 1, 1
        )
        if memory.error:
            raise DrumlineError(
                f"rank 0: a pass of {type(model).__name__} without weights failed, so it is not "
                f"known how many blocks there is memory for; use generate(). {memory.error}"
            )
        nbytes: dict[Place, list[float]] = defaultdict(list)
        for rank in device_map.ranks:
            for name, device in device_map.runs_on(rank).items():
                numbers = cache_layers(modules[name]) if name in modules else ()
                own = [kinds[number] for number in numbers if number < len(kinds)]
                nbytes[rank, device] += [memory.kept[name] / len(own) * num_tokens[k] for k in own]
        return {
            place: sum(layers) + max(layers)
            for place, layers in nbytes.items()
            if layers and place in device_map.free_nbytes
        }

    @staticmethod
    def _max_useful(config: Any, settings: Any, hints: Any) -> int:
        """The blocks of one kind that requests can fill, with as many again for what they share."""
        tokens = getattr(hints, "max_prompt_length", 0) + getattr(hints, "max_generated_length", 0)
        if not getattr(hints, "max_generated_length", 0):
            tokens = getattr(config, "max_position_embeddings", None) or MAX_UNTOLD_TOKENS
        num_blocks = -(-int(tokens) // int(settings.page_size)) + 1
        return 2 * num_blocks * int(settings.max_requests_per_batch)


def tried_manager(
    model: Any, choose: Any, length: int, share: float, tokens_beside: int, **settings: Any
) -> Any:
    """A manager of batches whose requests have no end, so they are cancelled.

    choose: see paged_batches.SteppedModel. length: tokens of a request. share: of the memory for
    pages, what this manager may take. settings: of continuous batching.

    Some steps are tried. Raises what they raise, and DrumlineError if generate() has other logits:
    some models keep more than keys and values, or read those of other layers.
    """
    from drumline.contact.batching import batch_settings, paged_batches

    prompt = list(range(max(1, min(TRIED_TOKENS, length - TRIED_STEPS))))
    expected = _greedy_logits(model, prompt)  # before the manager gives layers another attention
    manager = paged_batches.PagedManager(
        model._batched_ranks,
        model,
        batch_settings.Workload(max_generated_length=length, share=share),
        choose,
        tokens_beside,
        generation_config=generation_settings(do_sample=False, eos_token_id=-1),
        continuous_batching_config=batch_settings.batch_settings(**settings),
    )
    try:
        for own, other in zip(expected, manager.try_steps(prompt, TRIED_STEPS), strict=False):
            difference = float((own - other).norm() / own.norm())
            if not difference <= MAX_DIFFERENCE:
                raise DrumlineError(
                    f"rank 0: {type(model).__name__} has other logits over pages than in "
                    f"generate(), by {difference:.0%}, so it cannot be batched continuously; use "
                    "generate()."
                )
            if own.argmax() != other.argmax():  # two nearly equal ones, and so another text
                break
    except BaseException:
        manager.ranks.release_attention(manager)
        raise
    return manager


def _greedy_logits(model: Any, prompt: list[int]) -> list[torch.Tensor]:
    """The logits of the first tokens behind a prompt, by generate(): [vocabulary] each."""
    row = torch.tensor([prompt], device=model.device)
    settings = generation_settings(
        max_new_tokens=TRIED_STEPS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    with without_recommended_settings(model):  # by which other tokens may be chosen
        output = model.generate(
            row, attention_mask=torch.ones_like(row), generation_config=settings
        )
    return [logits[0].float() for logits in output.logits]


class PagedGenerationMixin:
    """Mixed into the class of a model: it is batched continuously, over all of its ranks."""

    _driver: PipelineDriver | None
    _prefetcher: Any
    _plain_class: type[Any]
    config: Any

    @cached_property
    def _batched_ranks(self) -> BatchedRanks:
        return BatchedRanks(self)

    def init_continuous_batching(
        self,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> Any:
        """The manager of continuous batches, as transformers has it, with pages on every rank.

        Raises RefusedUse for settings that one process alone can have, and DrumlineError for a
        model whose attention is not over pages. If a rank is lost, the manager's thread ends, and
        PeerLost is raised to whoever adds a request, waits for a result or stops it; a handler of
        results gets an output that failed.
        """
        from drumline.contact.batching import batch_settings, paged_batches

        generation: Any = generation_config or getattr(self, "generation_config", None)
        settings = (
            continuous_batching_config
            or getattr(generation, "continuous_batching_config", None)
            or batch_settings.batch_settings()
        )
        refused = batch_settings.refused_settings(settings)
        is_on_cpu = self.device.type == "cpu"  # type: ignore[attr-defined]
        if self._driver is None and self._prefetcher is None and (refused or not is_on_cpu):
            return super().init_continuous_batching(  # type: ignore[misc]
                generation_config, continuous_batching_config, workload_hints
            )
        batch_settings.check_settings(settings)
        if (kept := paged_batches.kept_manager(self, self._driver)) is not None:
            log.info("rank 0: the manager that was kept is used again, with the settings it has")
            return kept
        if self.config.is_encoder_decoder:
            raise DrumlineError(
                f"rank 0: {type(self).__name__} has an encoder, and continuous batching is for "
                "models of a decoder alone; use generate()."
            )
        self._batched_ranks.try_once()
        if generation.eos_token_id is None:
            generation.eos_token_id = -1  # as transformers does it: no token ends a text
        return paged_batches.PagedManager(
            self._batched_ranks,
            self,
            workload_hints,
            generation_config=generation,
            continuous_batching_config=settings,
        )
