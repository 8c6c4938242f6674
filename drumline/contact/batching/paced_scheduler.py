"""transformers' scheduler of continuous batches, in which long prompts hold up the others less.

scheduler = scheduler_class("fifo")(tables, safety_margin, max_requests_per_batch)
scheduler.pace = Pace(32)
"""

from __future__ import annotations

import functools
from typing import Any

from drumline.contact import transformers_api

api = transformers_api.continuous_batching()

TOKENS_BESIDE_EACH = 2
"""Of prompts, in a step, for each sequence that gets a token in it, as each makes it longer."""

LEAST_BESIDE = 8
"""Tokens of prompts in a step, however long it takes: a prompt comes to its end."""

SLOWER = 2
"""Times as long as a step without prompts a step with one may take; a further one adds the same."""


class Pace:
    """The tokens of prompts in a step beside others: the same number for each prompt that waits,
    fewer where such steps took too long.

    most: for one prompt, beside TOKENS_BESIDE_EACH for each of the others.
    """

    def __init__(self, most: int):
        self.most, self._part = most, 1.0
        self._plain_s = 0.0  # of a step without prompts, over the last ones

    def tokens(self, num_others: int, num_prompts: int) -> int:
        most = self.most + TOKENS_BESIDE_EACH * num_others
        return num_prompts * max(min(LEAST_BESIDE, most), int(most * self._part))

    def note(self, num_prompts: int, seconds: float) -> None:
        """Learn from a step that made tokens of others, while that many prompts waited."""
        if not num_prompts:
            self._plain_s = (3 * self._plain_s + seconds) / 4 if self._plain_s else seconds
        elif seconds > (1 + (SLOWER - 1) * num_prompts) * self._plain_s > 0:
            self._part = max(self._part / 2, LEAST_BESIDE / max(self.most, LEAST_BESIDE))
        else:
            self._part = min(self._part + 0.1, 1)


def part_of_step(num_left: int, num_prompts: int, num_behind: int) -> int:
    """The tokens for a prompt that takes several steps, of those that this step has left: half for
    the first of the prompts, so that it ends soon, and for a later one as many as for the others
    behind it."""
    is_first = num_behind == num_prompts - 1
    return max(num_left // (2 if is_first else num_behind + 1), 1)


@functools.cache
def scheduler_class(scheduler_type: str) -> type[Any]:
    """transformers' scheduler of this name, which a long prompt holds up less, and a cancelled
    request not at all."""

    base: Any = api.SCHEDULER_MAPPING[scheduler_type]

    class PacedScheduler(base):  # type: ignore[misc]
        pace: Pace | None = None
        num_others = num_prompts = 0  # of the last step
        num_behind = step_tokens = 0  # prompts that have no part of this step yet; its tokens
        block_new_requests: bool

        def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
            """Let a prompt have few tokens of a step in which others get their next token."""
            active = self.active_requests.values()
            self.num_others = sum(not state.remaining_prefill_tokens for state in active)
            self.num_prompts = len(active) - self.num_others + self.num_startable
            if self.num_others and self.pace is not None:
                most = self.num_others + self.pace.tokens(self.num_others, self.num_prompts)
                token_budget = min(token_budget, most)
            self.num_behind, self.step_tokens = self.num_prompts, token_budget - self.num_others
            scheduled = super().schedule_batch(token_budget, cache_budget)
            if scheduled[2] <= self.num_others:  # there were no pages for the prompts
                self.num_prompts = 0
            return scheduled

        def _schedule_request(self, state: Any, tokens: list[int], most: int, *args: Any) -> None:
            """Let a prompt that takes several steps leave a part of this one to those behind it."""
            if state.remaining_prefill_tokens:
                self.num_behind -= 1
                if self.num_behind > 0 and len(tokens) > self.step_tokens:
                    most = part_of_step(most, self.num_prompts, self.num_behind)
            super()._schedule_request(state, tokens, most, *args)

        @property
        def num_startable(self) -> int:
            """The new requests that there is a place for."""
            num_places = max(0, self.max_requests_per_batch - len(self.active_requests))
            return 0 if self.block_new_requests else min(len(self.waiting_requests), num_places)

        def clear_cancelled_requests(self) -> Any:
            """Let new requests in again: once some were put back, only a finished one did."""
            cancelled = super().clear_cancelled_requests()
            self.block_new_requests = self.block_new_requests and not cancelled
            return cancelled

    return PacedScheduler
