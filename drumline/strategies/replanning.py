"""A model that outlives the loss of ranks: those that are left plan and load it anew.

model = drumline.load("checkpoint", on_failure="replan")
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import gc
import logging
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import launcher
from coordinator import Coordinator, CoordinatorError, FailureReason, torch_private
from drumline.core.group_monitor import monitored_loading
from drumline.core.mixed_classes import mixed_class
from drumline.errors import DrumlineError, PeerLost, PlanError, WorkerExit, describe_error
from drumline.planner.load_options import LoadOptions
from drumline.planner.memory import Memory
from drumline.strategies.pipeline_parallel import load_pipeline
from drumline.timings import TIMINGS

log = logging.getLogger("drumline")

BY_MEMORY = ("auto", "balanced", "sequential")
SETTINGS = {"generation_config", "micro_batches", "prefill_chunk"}
"""Of a model, which are those of the script."""
REPEAT = "The next call loads the model anew over the ranks that are left: repeat this one."


def load_replanning(path: str | Path, coor: Coordinator | None, options: LoadOptions) -> Any:
    """The model of load_pipeline(), for as long as the master and enough others live. Collective.

    A rank that waits for the master while it plans again raises PeerLost once that is gone.
    """
    if coor is not None:
        raise PlanError(
            f'rank {coor.rank}: on_failure="replan" makes a Coordinator anew whenever a rank is '
            "lost, so it cannot take yours; leave coor= out."
        )
    if options.device_map not in (None, *BY_MEMORY):
        raise PlanError(
            f'on_failure="replan" plans by memory whenever a rank is lost, and device_map='
            f"{options.device_map!r:.99} says otherwise; give one of {', '.join(BY_MEMORY)}."
        )
    return Replanner(path, options).load()


class Replanner:
    """This rank's part in loading a model again and again, each time over fewer ranks."""

    def __init__(self, path: str | Path, options: LoadOptions) -> None:
        self._path, self._options, self.coor = path, options, Coordinator()
        self._first_rank = self.coor.rank
        self._idle, self._num_calls = threading.Condition(), 0
        self._outer = contextvars.ContextVar[threading.Event | None]("outer", default=None)
        self._end: DrumlineError | None = None
        self.script_failure: Exception | None = None  # the others end after this rank, to be blamed
        if self.coor.is_master():
            launcher.outlive_failures(self.coor.info)

    def load(self, model: Any = None, lost: PeerLost | None = None) -> Any:
        """The model; into this object if given. The other ranks serve here, and raise WorkerExit.

        lost: for which the ranks have to meet again before.
        """
        try:
            while True:
                if lost is not None:
                    self._regroup(lost)
                    _release_memory()
                try:
                    options = self._options_now()
                    return self._adopted(load_pipeline(self._path, self.coor, options, model))
                except PeerLost as error:
                    lost = copy.copy(error)  # without its frames, which hold the weights
        except WorkerExit:
            self.coor.close()
            raise
        except BaseException as error:
            why = f"loading the model anew raised {describe_error(error)}; start all ranks again."
            end = error if isinstance(error, DrumlineError) else DrumlineError(f"rank 0: {why}")
            self._end = copy.copy(end)
            self.coor.__exit__(type(error), error, None)
            raise

    def _regroup(self, lost: PeerLost) -> None:
        """Meet the ranks that are left, in a launch of their own. Collective over these."""
        before = self.coor
        now = next(filter(None, (_met(before) for _ in before.ranks)), None)
        if now is None:
            raise lost
        self.coor = now
        if before.is_master():
            counts = self.coor.world_size, before.world_size
            log.warning("%d of %d ranks go on: %s", *counts, lost.what)
            _end_given_up(before, self.coor)
        before.__exit__(PeerLost, lost, None)

    def _options_now(self) -> LoadOptions:
        """The options with the memory of the ranks that are left. Collective."""
        with monitored_loading(self.coor, lambda rank: ""):
            first_ranks = self.coor.allgather_object(self._first_rank)
        return replace(self._options, max_memory=memory_of(self._options.max_memory, first_ranks))

    def _adopted(self, model: Any) -> Any:
        """The master's model, whose calls come to this object first."""
        model.__class__ = mixed_class(type(model), ReplanningMixin, type(model))
        model._replanner = self
        _, leave, arguments, _ = model._leave.detach()
        model._leave = weakref.finalize(model, self._close, leave, *arguments)
        return model

    def _close(self, leave: Callable[..., None], *arguments: Any) -> None:
        """Release the other ranks, and wait for them unless one has failed, as this one may."""
        error: BaseException | None = self.script_failure or getattr(sys, "last_value", None)
        try:
            leave(*arguments)
        finally:
            lost = next((driver.lost for driver in arguments if driver is not None), None)
            failures = [f for f in self.coor.failures() if f.reason is not FailureReason.LEFT]
            if failures or lost:  # the other ranks wait to hear who goes on
                _close_listener(self.coor.survivors(release=True, timeout_s=TIMINGS.drain_s))
                error = PeerLost(str(failures[0]), failures) if failures else lost
            self.coor.__exit__(type(error) if error else None, error, None)

    @contextlib.contextmanager
    def call(self, model: Any, *, may_wait: bool) -> Iterator[None]:
        """A call of the master's model; before it, the model is loaded again if a rank was lost.

        Not while other calls are in it. may_wait: for these to fail, as they do soon. A call that
        is inside of another one, such as that of a logits processor, fails at once.
        """
        with self._idle:
            outer, ended = self._outer.get(), threading.Event()
            if outer is not None and not outer.is_set() and _is_lost(model):
                raise PeerLost(model._driver.lost.what, model._driver.lost.failures, REPEAT)
            while may_wait and _is_lost(model) and self._num_calls:
                self._idle.wait()
            if _is_lost(model) and not self._num_calls:
                self._load_again(model)
            self._num_calls += 1
        outside = self._outer.set(ended)
        try:
            yield
        except PeerLost as lost:
            if lost.advice == REPEAT:  # of a call inside this one
                raise
            traceback.clear_frames(lost.__traceback__)  # as in _load_again()
            raise PeerLost(lost.what, lost.failures, REPEAT) from lost
        finally:
            self._outer.reset(outside)
            ended.set()  # for what the call has started, and has a copy of this context
            with self._idle:
                self._num_calls -= 1
                self._idle.notify_all()

    def _load_again(self, model: Any) -> None:
        if self._end is not None:
            raise copy.copy(self._end)
        settings = {name: vars(model)[name] for name in SETTINGS & vars(model).keys()}
        model._leave.detach()
        for module in model.modules():  # their memory is needed for the new ones
            for table in torch_private.own_tables(module):
                table.clear()
        lost = model._driver.lost
        traceback.clear_frames(lost.__traceback__)  # they hold weights and caches
        self.load(model, lost)
        vars(model).update(settings)


class ReplanningMixin:
    """Mixed into the class of the master's model."""

    _replanner: Replanner

    def close(self, exit_code: int = 0) -> None:
        if exit_code:
            self._replanner.script_failure = RuntimeError(f"the script ends with {exit_code}")
        super().close(exit_code)  # type: ignore[misc]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._replanner.call(self, may_wait=False):  # it may be one of generate()
            return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        with self._replanner.call(self, may_wait=True):
            return super().generate(*args, **kwargs)  # type: ignore[misc]

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        with self._replanner.call(self, may_wait=True):
            return super().init_continuous_batching(*args, **kwargs)  # type: ignore[misc]


def _met(before: Coordinator) -> Coordinator | None:
    """A Coordinator of the ranks that are left; None if one more is lost while they meet."""
    # The master comes when its script calls next, as for any other message.
    timeout_s = TIMINGS.regroup_s if before.is_master() else TIMINGS.next_message_s
    info = before.survivors(timeout_s=timeout_s)
    if info is None:
        log.warning("rank %d: the others go on without this rank", before.rank)
        raise WorkerExit(0)
    try:
        return Coordinator(info, timeout_s=TIMINGS.meet_s)
    except CoordinatorError:
        return None
    finally:
        _close_listener(info)


def _close_listener(info: launcher.LaunchInfo | None) -> None:
    if info is not None and (listener := info.extras.get("master_fd")):
        os.close(int(listener))


def _release_memory() -> None:
    """Give back what the model before had, ahead of the measurement of what is free."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _is_lost(model: Any) -> bool:
    return model._driver is not None and model._driver.lost is not None


def _end_given_up(before: Coordinator, now: Coordinator) -> None:
    """Kill what is left on this host of ranks that do not go on, as a suspended one."""
    pids = {peer.pid for peer in now.peers}
    for peer in before.peers:
        if peer.pid not in pids and peer.is_visible and not peer.is_known_dead():
            launcher.linux.send_signal(peer.pid, signal.SIGKILL)


def memory_of(memory: Memory | None, first_ranks: Sequence[int]) -> Memory | None:
    """The max_memory of the ranks that are left. first_ranks: their numbers in it."""
    if memory is None:
        return None
    if not isinstance(memory, Mapping):
        return [memory[rank] for rank in first_ranks if rank < len(memory)]
    sizes: dict[Any, Any] = {}
    for key, size in memory.items():
        rank, *device = key if isinstance(key, tuple) else (key,)
        if isinstance(key, str):
            sizes[key] = size
        elif rank in first_ranks:
            number = first_ranks.index(rank)
            sizes[(number, *device) if device else number] = size
    return sizes
