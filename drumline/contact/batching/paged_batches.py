"""transformers' continuous batching over tables of blocks alone: the pools are the ranks' own.

Requests, scheduling, chunks of prompts, shared beginnings, forks and sampling are its own.
"""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from drumline.contact import transformers_api
from drumline.contact.batching.paced_scheduler import Pace, scheduler_class
from drumline.contact.batching.paged_attention import BY_SEQUENCE
from drumline.errors import DrumlineError, PeerLost

api = transformers_api.continuous_batching()
Tables: Any = api.PagedAttentionCache
Manager: Any = api.ContinuousBatchingManager

STEP_ARGUMENTS = (
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    *("read_index", "write_index", "block_table"),
    *("logits_indices", "logits_processor_args", "is_causal"),
)
"""Of a step, what no layer needs that is told of it by its pool."""

SLICE_S = 0.1
"""Seconds between two looks at what has become of the thread, in a wait without a timeout."""

NEW_TOKEN = 1
"""In the list of what a window reads, the number of a token that this very pass brings."""

UNLIMITED = 1e9
"""The share of this host's memory that the tables take for granted: the ranks' own is counted."""


def kinds_of_layers(config: Any) -> list[int]:
    """The number of each layer's kind of attention. Raises ValueError for one without pages."""
    kinds = api.group_layers_by_attn_type(config).values()
    kind_by_layer = {layer: kind for kind, layers in enumerate(kinds) for layer in layers}
    return [kind_by_layer[layer] for layer in sorted(kind_by_layer)]


def kept_manager(model: Any, driver: Any) -> Any:
    """The manager that was kept for the next batch, if its ranks are those of the driver, and
    there; None otherwise."""
    manager: Any = getattr(model, "_cached_continuous_batching_manager", None)
    is_ours = isinstance(manager, PagedManager) and manager.ranks.driver is driver
    if not is_ours or manager.failure is not None:
        return None
    manager.switch_to_cb_friendly_attn(model)
    return manager


class PagedTables(Tables):  # type: ignore[misc]
    """The tables of blocks of all requests, and no keys and values: these are in the pools.

    make_pools: makes a PoolsOfRanks (of drumline.pipeline) of the fields of a PoolShape.
    in_groups: sequences with one query attend in groups. num_cached: by request, the tokens of its
    prompt that the pools had already. num_tokens: of each kind, those that requests can have.
    """

    def __init__(self, make_pools: Callable[..., Any], in_groups: bool, **arguments: Any):
        super().__init__(device=torch.device("meta"), **arguments)
        allocators = list(self.cache_allocators.values())
        assert {each.sentinel_index for each in allocators} == {NEW_TOKEN}
        for allocator in allocators:  # every layer's memory is its own, so blocks are neighbours
            allocator.block_physical_stride = allocator.tokens_per_page
            allocator.write_trash_index = allocator.tokens_per_page * allocator.blocks_per_sector
        numbers = range(max(self.layer_to_allocator) + 1)
        kinds = [self.layer_to_allocator[number].index for number in numbers]
        of_sector = [each.blocks_per_sector * each.tokens_per_page for each in allocators]
        self.num_tokens = [self.num_sectors * count for count in of_sector]
        num_tokens = [(self.num_sectors + 2) * count for count in of_sector]
        windows = [getattr(each, "sliding_window", 0) for each in allocators]
        self.num_cached: dict[str, int] = {}
        self.pools = make_pools(kinds, num_tokens, windows, in_groups)
        self.pool_number = self.pools.number

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the keys and values of a layer of rank 0; returns all that it attends to."""
        return self.pools.update(*args, **kwargs)  # type: ignore[no-any-return]

    def get_seq_length(self, *_: Any) -> int:
        raise DrumlineError(
            "this model asks how many tokens its cache holds, which is one number for each of the "
            "requests of a batch, so it cannot be batched continuously; use generate()."
        )

    def begin_step(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Tell the pools of a step; returns the arguments of the model without what they know."""
        own = {name: arguments.pop(name, None) for name in STEP_ARGUMENTS}
        tensors = [own["cu_seq_lens_q"]]
        for name, allocator in self.cache_allocators.items():
            tensors += [own[key][allocator.index] for key in ("read_index", "write_index")]
            tensors.append(own["cu_seq_lens_k"][name])
        self.pools.begin_step(*tensors)
        return arguments

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        num_cached = self.num_cached[request_id] = super().search_prefix_match(
            request_id, prompt_ids
        )
        return num_cached  # type: ignore[no-any-return]

    def free_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> None:
        self.num_cached.pop(request_id, None)
        super().free_blocks(request_id, *args, **kwargs)

    def usage(self) -> float:
        """The share of all blocks that requests have; each that several share counts once."""
        nbytes = 0
        for allocator in self.cache_allocators.values():
            blocks = set().union(*list(allocator.block_table.values()))
            nbytes += len(blocks) * allocator.bytes_per_block
        return float(nbytes / (self.num_sectors * self.bytes_per_sector))

    def perform_cache_copy(self, copy_src_and_dst: dict[str, Any]) -> None:
        """Copy blocks in the pools of all ranks, as a fork of a request wants it."""
        for name, pairs in copy_src_and_dst.items():
            allocator = self.cache_allocators[name]
            places = torch.arange(allocator.tokens_per_page)
            starts = [torch.tensor(blocks)[:, None] * len(places) for blocks in pairs if blocks]
            if starts:
                sources, targets = [(start + places).flatten() for start in starts]
                self.pools.copy_tokens(allocator.index, sources, targets)


ChooseTokens = Callable[[list[str], list[str], torch.Tensor], list[int]]
"""Of a step, the requests, those of them that get a token, and its logits for each of these,
[tokens, vocabulary]: the tokens."""


class SteppedModel:
    """The model as transformers calls it, in steps of a batch.

    choose: what decides about tokens in place of the manager's settings. It leaves the manager the
    logits of one token each to choose from.
    """

    def __init__(self, model: Any, tables: PagedTables, requests: Any, choose: ChooseTokens | None):
        self.model, self.tables, self.requests, self.choose = model, tables, requests, choose

    def _supports_logits_to_keep(self) -> bool:
        return bool(self.model._supports_logits_to_keep())

    def __call__(self, **arguments: Any) -> Any:
        indices = arguments["logits_indices"]
        output = self.model(**self.tables.begin_step(arguments))
        return output if self.choose is None else self._chosen(output.logits, indices)

    def _chosen(self, logits: torch.Tensor, indices: torch.Tensor) -> Any:
        names = [each.state.request_id for each in self.requests]
        with_token = [each.state.request_id for each in self.requests if each.has_new_token]
        rows = indices[: len(with_token)].long()
        if self._supports_logits_to_keep():
            rows = torch.arange(len(with_token), device=logits.device)
        assert self.choose is not None
        tokens = torch.tensor(self.choose(names, with_token, logits[0, rows]), dtype=torch.long)
        chosen = torch.full_like(logits, -torch.inf)
        chosen[0, rows, tokens.to(logits.device)] = 0
        return types.SimpleNamespace(logits=chosen)


class PagedManager(Manager):  # type: ignore[misc]
    """transformers' manager, over the pools of all ranks. What ends its thread is raised to whoever
    adds a request, waits for a result or stops it.

    ranks: the model's BatchedRanks, of drumline.pipeline.
    choose: see SteppedModel. tokens_beside: of prompts, in a step that makes tokens of others.
    names_in_step: the requests of the step that runs, or that failed.
    """

    def __init__(
        self,
        ranks: Any,
        model: Any,
        hints: Any,
        choose: ChooseTokens | None = None,
        tokens_beside: int | None = None,
        **options: Any,
    ):
        self.ranks, self._hints = ranks, hints
        self._choose, self._tokens_beside = choose, tokens_beside
        self.names_in_step: list[str] = []
        self.tables: Any = None
        self._keeps_pages = True  # until stop() says otherwise
        try:
            super().__init__(model=model, workload_hints=hints, **options)
        except BaseException:
            ranks.release_attention(self)
            raise
        settings = self.continuous_batching_config
        settings.use_cuda_graph, settings.use_async_batching = (False, False), False
        settings.varlen_compile_config = settings.decode_compile_config = None
        settings.max_blocks_per_request = 0  # tables of blocks in kernels, on one rank only

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Have every rank attend to each sequence by itself."""
        loaded = self.ranks.loaded_attention
        self._attention = BY_SEQUENCE.get(loaded, loaded)
        remedy = ""
        if not model._can_set_attn_implementation():
            remedy = "it is written into its layers, so use generate()"
        elif loaded not in BY_SEQUENCE and "flash" not in loaded:
            remedy = "load it with attn_implementation='sdpa' or 'eager', or use generate()"
        if remedy:
            raise DrumlineError(
                f"rank 0: {type(model).__name__} attends by {loaded!r}, of which there is nothing "
                f"over pages, so it cannot be batched continuously; {remedy}."
            )
        self.ranks.use_attention(self, self._attention)

    def try_steps(self, prompt: list[int], num_steps: int) -> list[torch.Tensor]:
        """Run a request that nobody made, in this thread; returns the logits of its greedy tokens,
        [vocabulary] each. Raises what a step raises."""
        logits: list[torch.Tensor] = []

        def choose(_: list[str], __: list[str], rows: torch.Tensor) -> list[int]:
            logits.extend(rows.float())
            return [int(row.argmax()) for row in rows]

        self._choose, used_later = choose, self._choose
        processor = self.batch_processor = self._create_batch_processor()
        self.add_request(prompt, "tried", max_new_tokens=num_steps)
        while processor.prepare_next_batch():
            self._generation_step()
            processor.update_batch()
        self._choose = used_later
        self.get_result("tried", timeout=0)
        return logits

    def start(self, *args: Any, **kwargs: Any) -> None:
        self.ranks.leave_computing()
        self._keeps_pages |= not self.is_running()
        super().start(*args, **kwargs)

    @property
    def num_running(self) -> int:
        """The requests that have pages."""
        processor = self.batch_processor
        return 0 if processor is None else len(processor.scheduler.active_requests)

    @property
    def pool_usage(self) -> float:
        """The share of the pages that requests have; of those kept for later ones, none."""
        tables = self.tables  # None at any moment, once another thread stops the manager
        return 0.0 if tables is None else tables.usage()

    def num_cached(self, name: str) -> int:
        """The tokens of a request's prompt that were in the pools already."""
        tables = self.tables
        return 0 if tables is None else tables.num_cached.get(name, 0)

    @property
    def failure(self) -> Exception | None:
        """The error that ended the thread, if one did."""
        return self.background_thread_status.fatal_error  # type: ignore[no-any-return]

    def add_request(self, *args: Any, **kwargs: Any) -> str | None:
        self._raise_failure()
        request_id: str | None = super().add_request(*args, **kwargs)
        if request_id is None:  # transformers logs a warning
            self._raise_failure()
            raise DrumlineError(
                "rank 0: the manager of continuous batches is stopping, so it takes no request; "
                "wait until it has stopped, and start() it again or make a new one with "
                "init_continuous_batching()."
            )
        return request_id

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> Any:
        """As transformers does it. A failure is raised once no result is there for the request."""
        result, results = None, self.output_router.output_queue
        wait_s, is_last = SLICE_S if timeout is None else timeout, False
        while result is None and not is_last:
            is_last = timeout is not None or not self.is_running() or self.failure is not None
            result = super().get_result(request_id, wait_s)
            is_last = is_last or (request_id is not None and not results.empty())
        if self.failure is not None:
            for _ in range(results.qsize()):  # each look puts the result of another at the end
                result = result or super().get_result(request_id, 0)
        if result is None:
            self._raise_failure()
        return result

    def is_running(self) -> bool:
        thread = self._generation_thread  # None once another thread has stopped the manager
        return thread is not None and thread.is_alive()

    def __iter__(self) -> Iterator[Any]:
        while (output := self.get_result()) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Iterator[Any]:
        """Ask whether the thread runs before asking for results: the last come before its end."""
        is_running = True
        while is_running:
            is_running = self.is_running()
            for _ in range(max(1, self.output_router.output_queue.qsize())):
                output = super().get_result(request_id, SLICE_S)
                if output is not None:
                    yield output
                    if output.is_finished():
                        if output.error is not None:
                            self._raise_failure()
                        return
        self._raise_failure()

    def stop(self, *args: Any, keep_for_next_session: bool = False, **kwargs: Any) -> None:
        self._keeps_pages = keep = keep_for_next_session and self.failure is None
        super().stop(*args, keep_for_next_session=keep, **kwargs)
        if not self.is_running():  # a thread that still runs does it when it ends
            self.release()
        self._raise_failure()

    def release(self) -> None:
        """Restore the attention of the layers, and free the pages unless they are kept."""
        self.ranks.release_attention(self)
        if not self._keeps_pages:  # transformers forgets no processor that no thread has run yet
            self.batch_processor = None
        if self.batch_processor is None and self.tables is not None:
            self.tables.pools = None
            self.tables = None

    def _run_generation_loop(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._run_generation_loop(*args, **kwargs)
        finally:
            self.release()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _generation_step(self) -> None:
        processor = self.batch_processor
        if processor is None:
            raise DrumlineError(
                "rank 0: the manager was stopped, and stop() did not wait until the requests under "
                "way were done, so they end here; stop() it without block=False or a timeout."
            )
        self.ranks.check_there()
        self.ranks.use_attention(self, self._attention)  # another manager may have released it
        requests = processor.inputs_and_outputs.requests_in_batch
        step = SteppedModel(self.model, self.tables, requests, self._choose)
        self.names_in_step = [each.state.request_id for each in requests]
        began_s, scheduler = time.monotonic(), processor.scheduler
        try:
            processor._generation_step(step)
        except PeerLost as error:  # transformers logs it; a request ends with the whole
            raise error.with_traceback(None) from None
        if scheduler.pace is not None and scheduler.num_others:
            scheduler.pace.note(scheduler.num_prompts, time.monotonic() - began_s)
        self.names_in_step = []
        self.ranks.check_there()  # the call may have loaded the model again

    def _create_batch_processor(self) -> Any:
        """As transformers does it, with tables whose size comes from the memory of all ranks."""
        self.names_in_step = []
        self.ranks.check_there()
        self.ranks.use_attention(self, self._attention)  # released if it was stopped before
        try:
            return self._made_processor()
        except BaseException:
            self.ranks.release_attention(self)
            raise

    def _made_processor(self) -> Any:
        if self.batch_processor is not None:
            self.batch_processor.reset()
            return self.batch_processor
        settings, model = self.continuous_batching_config, self.model
        config = model.config.get_text_config()
        settings.num_blocks = self.ranks.num_blocks(settings, self._hints)
        settings.max_memory_percent, percent = UNLIMITED, settings.max_memory_percent
        tables = self.tables = PagedTables(
            self.ranks.make_pools,
            self._attention in BY_SEQUENCE.values(),
            config=config,
            continuous_batching_config=settings,
            distributed_helper=self.distributed_helper,
            dtype=model.dtype,
            model_supports_logits_to_keep=model._supports_logits_to_keep(),
        )
        settings.max_memory_percent = percent  # which counts again where it is started again
        self._use_prefix_sharing = tables.use_prefix_sharing
        api.update_cb_config_after_cache_creation(
            settings, tables.num_blocks, tables.max_batch_tokens
        )
        scheduler = scheduler_class(settings.scheduler_type)(
            tables,
            safety_margin=settings.safety_margin,
            max_requests_per_batch=settings.max_requests_per_batch,
        )
        if self._tokens_beside is not None:
            scheduler.pace = Pace(self._tokens_beside)
        return api.ContinuousBatchProcessor(
            tables,
            config=config,
            generation_config=self.generation_config,
            continuous_batching_config=settings,
            logit_processor=self.logit_processor,
            input_queue=self.input_queue,
            cancel_queue=self.cancel_queue,
            output_router=self.output_router,
            background_thread_status=self.background_thread_status,
            model_device=model.device,
            model_dtype=model.dtype,
            scheduler=scheduler,
            distributed_helper=self.distributed_helper,
        )
