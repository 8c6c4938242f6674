"""Batches of sequences without a server around them."""

import contextlib
import os
import threading
import time
import types

import pytest
import torch

from drumline.contact.batching.paced_scheduler import (
    LEAST_BESIDE,
    TOKENS_BESIDE_EACH,
    Pace,
    part_of_step,
)
from drumline.errors import DrumlineError, PeerLost
from drumline.pipeline.paged_generation import BatchedRanks
from drumline.serving import scheduler as scheduler_module
from drumline.serving.http_server import ServerSettings, limits_for
from drumline.serving.sampling import SamplingParams
from drumline.serving.scheduler import CHUNK_TOKENS, PAGE_SIZE, BatchScheduler, ServingLimits
from drumline.serving.scheduler import Generation as Sequence
from tests.cases import soak
from tests.drumline.test_families import CAUSAL, skip_unless_it_runs

GREEDY = SamplingParams(max_tokens=9, temperature=0)
ENDLESS = SamplingParams(max_tokens=1900, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)
LIMITS = ServingLimits(max_length=2000)


class Client:
    """One sequence, and how it ended; on_token is called with the number of its tokens."""

    def __init__(self, prompt, params=GREEDY, on_token=lambda _: True):
        self.reason, self.has_begun, self.has_ended = None, threading.Event(), threading.Event()

        def note(_):
            self.has_begun.set()
            return on_token(len(self.sequence.new_tokens))

        self.sequence = Sequence(prompt, params, note, self._end)

    def _end(self, reason):
        self.reason = reason
        self.has_ended.set()

    def tokens(self):
        assert self.has_ended.wait(60)
        return self.sequence.new_tokens


@contextlib.contextmanager
def scheduling(model, limits=LIMITS):
    """A scheduler; gives a function that submits clients, and the tokens of each pass so far."""
    sizes = []

    def count(_, args, kwargs):
        sizes.append(kwargs["input_ids"].shape[1])

    scheduler = BatchScheduler(model, limits)
    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield scheduler, sizes
    finally:
        hook.remove()
        scheduler.close()


def submit(scheduler, *clients):
    scheduler.submit([client.sequence for client in clients])
    return clients


def alone(plain, prompt, params=GREEDY):
    rows = torch.tensor([prompt])
    settings = {"max_new_tokens": params.max_tokens, "do_sample": False, "eos_token_id": None}
    return plain[0].generate(rows, **settings)[0, len(prompt) :].tolist()


def test_a_sequence_joins_at_the_next_step_and_no_token_is_computed_again(plain, loaded):
    """The batch was stopped, and all tokens of all its sequences were computed anew."""
    with scheduling(loaded) as (scheduler, sizes):

        def join(number):
            if number == 4:
                submit(scheduler, second)
            return number < 12

        second = Client([7] * 20)
        (first,) = submit(scheduler, Client([5, 6, 7], ENDLESS, join))
        assert second.tokens() == alone(plain, [7] * 20) and first.has_ended.wait(60)
    assert sizes == [3, 1, 1, 1, 1 + 20, *[2] * 7, 1]
    assert first.tokens() == alone(plain, [5, 6, 7], SamplingParams(max_tokens=12))


def test_a_loss_is_told_while_a_token_cannot_be_sent(loaded):
    """It waited for the token, which waited for whoever was to be told."""
    is_told = threading.Event()
    with contextlib.closing(BatchScheduler(loaded, LIMITS, lambda _: is_told.set())) as scheduler:
        (client,) = submit(scheduler, Client([5], ENDLESS, lambda _: is_told.wait(10)))
        assert client.has_begun.wait(60)
        scheduler.fail(PeerLost("rank 1 is gone"))
        assert client.has_ended.is_set() and isinstance(client.reason, PeerLost)


def test_a_beginning_that_is_shared_is_computed_once_also_after_its_first_sequence(plain, loaded):
    beginning = [3 + n % 50 for n in range(4 * PAGE_SIZE)]
    prompts = [[*beginning, 5 + number] for number in range(20)]
    with scheduling(loaded) as (scheduler, sizes):
        (first,) = submit(scheduler, Client(prompts[0]))
        texts = [first.tokens()]
        others = submit(scheduler, *map(Client, prompts[1:]))
        texts += [client.tokens() for client in others]
    assert first.sequence.num_cached == 0
    assert {client.sequence.num_cached for client in others} == {len(beginning)}
    assert texts == [alone(plain, prompt) for prompt in prompts]
    assert sum(sizes) == len(beginning) + 20 * 9


def test_a_long_prompt_comes_in_chunks_between_the_tokens_of_others(plain, loaded):
    prompt, beside = [3 + n % 50 for n in range(400)], CHUNK_TOKENS["cpu"][1]
    with scheduling(loaded) as (scheduler, sizes):
        long = Client(prompt)
        others = submit(scheduler, Client([5], ENDLESS), Client([6], ENDLESS))
        assert all(client.has_begun.wait(60) for client in others)
        submit(scheduler, long)
        assert long.tokens() == alone(plain, prompt)
    assert max(sizes) == 2 + beside + 2 * TOKENS_BESIDE_EACH


def test_a_short_prompt_begins_while_long_ones_before_it_come_in(plain, loaded):
    """The first prompt had all tokens of each step, so that the others waited for its end."""
    prompts = [[3 + n % 50 for n in range(number, number + 900)] for number in range(3)]
    with scheduling(loaded) as (scheduler, sizes):
        began_at = []
        short = Client([5, 6, 7], on_token=lambda number: began_at.append(len(sizes)) or True)
        clients = submit(scheduler, *map(Client, prompts), short)
        texts = [client.tokens() for client in clients]
    assert began_at[0] <= 2
    assert texts == [alone(plain, prompt) for prompt in [*prompts, [5, 6, 7]]]


def test_the_more_prompts_wait_the_more_of_their_tokens_a_step_has(plain, loaded):
    """Thirty-two came in by a few tokens a step, so the first had ended before the last began: no
    more than a dozen were ever computed together."""
    prompts = [[3 + n % 50 for n in range(number, number + 40)] for number in range(9)]
    others = [Client(prompt) for prompt in prompts]
    with scheduling(loaded) as (scheduler, sizes):

        def join(number):
            if number == 2:
                submit(scheduler, *others)
            return True

        submit(scheduler, Client([5], ENDLESS, join))
        texts = [client.tokens() for client in others]
    assert texts == [alone(plain, prompt) for prompt in prompts]
    assert sizes[:3] == [1, 1, LIMITS.max_running + CHUNK_TOKENS["cpu"][0]]
    assert scheduler.largest_batch == 10


def test_sequences_without_a_limit_of_their_own_run_together(loaded):
    """They ran two at a time: each was counted with all tokens that it might get."""
    with scheduling(loaded) as (scheduler, _):
        clients = submit(scheduler, *(Client([5 + number], ENDLESS) for number in range(12)))
        assert all(client.has_begun.wait(60) for client in clients)
        assert scheduler.largest_batch == scheduler.num_running == 12


def test_sequences_that_do_not_fit_in_the_pages_get_the_same_texts(plain, loaded, monkeypatch):
    """One whose place was taken by older ones is begun anew with its tokens; a client that left
    then kept all others out. All six were counted as running."""
    monkeypatch.setattr(BatchedRanks, "num_blocks", lambda *_: 5)
    params = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
    prompts = [[5 + number] * 20 for number in range(6)]
    with scheduling(loaded) as (scheduler, sizes):
        clients = submit(scheduler, *(Client(prompt, params) for prompt in prompts))
        assert clients[0].has_begun.wait(60)
        assert scheduler.num_running < 6 and 0 < scheduler.pool_usage <= 1
        clients[0].sequence.cancel()
        texts = [client.tokens() for client in clients[1:]]
    assert scheduler.pool_usage == 0
    assert texts == [alone(plain, prompt, params) for prompt in prompts[1:]]
    assert sum(sizes) > 5 * (20 + 49)  # some tokens were computed twice


def test_pages_of_a_batch_that_another_thread_stops_are_not_counted(loaded):
    """A look at the metrics in that moment was an error of the server."""
    with scheduling(loaded) as (scheduler, _):
        (batch,) = scheduler._batches
        tables, batch.tables = batch.tables, None
        assert batch.pool_usage == batch.num_cached("0") == 0
        batch.tables = tables


def test_a_sequence_that_outgrows_the_pages_ends_alone(plain, loaded, monkeypatch):
    """The server ended with it, and did so again after each restart."""
    monkeypatch.setattr(BatchedRanks, "num_blocks", lambda *_: 3)
    with scheduling(loaded) as (scheduler, _):
        (endless,) = submit(scheduler, Client([5, 6, 7], ENDLESS))
        assert endless.tokens() and "no step can be made" in str(endless.reason)
        (other,) = submit(scheduler, Client([5, 6, 7]))
        assert other.tokens() == alone(plain, [5, 6, 7])


def test_one_sequence_at_a_time_has_all_pages_whatever_the_number_of_ranks():
    """Half of them were too few for a sequence of the longest length."""
    model = types.SimpleNamespace(device_map=types.SimpleNamespace(ranks=[0, 1, 2]))
    settings = [ServerSettings("a", max_running=most) for most in (1, 2, 8)]
    assert [limits_for(model, 100, each).num_batches for each in settings] == [1, 2, 3]


def test_a_sequence_that_waits_gets_the_first_place_of_any_batch(plain, loaded):
    """Each waited for a batch of its own: one behind long texts, while the other had none."""
    limits = ServingLimits(max_length=2000, max_running=2, num_batches=2)
    with scheduling(loaded, limits) as (scheduler, _):
        clients = [Client([5], ENDLESS), *(Client([5, 6, 7 + number]) for number in range(6))]
        submit(scheduler, *clients)
        texts = [client.tokens() for client in clients[1:]]
        assert not clients[0].has_ended.is_set()
    assert texts == [alone(plain, [5, 6, 7 + number]) for number in range(6)]


def test_no_more_sequences_run_than_the_limit_whatever_the_number_of_batches(loaded):
    """Each batch had its part of them, rounded up."""
    limits = ServingLimits(max_length=2000, max_running=3, num_batches=2)
    with scheduling(loaded, limits) as (scheduler, _):
        clients = submit(scheduler, *(Client([5 + number], ENDLESS) for number in range(4)))
        assert all(client.has_begun.wait(60) for client in clients[:3])
        assert len(scheduler._batch_of) == 3 and not clients[3].has_begun.is_set()
        clients[0].sequence.cancel()
        assert clients[3].has_begun.wait(60)


def test_of_sequences_that_cannot_all_be_started_none_is_left(loaded, monkeypatch):
    """Those that were ran for nobody, and the others stayed in the queue for ever."""
    with scheduling(loaded) as (scheduler, _):
        add, added = scheduler._add, []

        def fail_at_the_second(number, batch):
            if added:
                raise RuntimeError("stopping")
            added.append(number)
            add(number, batch)

        monkeypatch.setattr(scheduler, "_add", fail_at_the_second)
        with pytest.raises(RuntimeError, match="stopping"):
            submit(scheduler, *(Client([5 + number], ENDLESS) for number in range(4)))
        assert scheduler.unfinished() == [] and not scheduler._batch_of
        monkeypatch.undo()
        (other,) = submit(scheduler, Client([5, 6, 7]))
        assert len(other.tokens()) == 9 and scheduler.largest_batch == 1


OPTIONS = {
    "greedy": {"temperature": 0},
    "a seed": {"temperature": 1.5, "seed": 7},
    "top_p and top_k": {"temperature": 1.2, "seed": 8, "top_p": 0.9, "top_k": 20},
    "min_p": {"temperature": 1.5, "seed": 9, "min_p": 0.1},
    "penalties": {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 1.0},
    "repetition": {"temperature": 0, "repetition_penalty": 1.5},
    "bias": {"temperature": 0, "logit_bias": ((9, 5.0), (11, -100.0))},
    "the end": {"temperature": 0, "min_tokens": 8, "stop_tokens": frozenset(range(3, 40))},
    "log-probabilities": {"temperature": 1.0, "seed": 3, "num_logprobs": 2},
}


def test_every_option_of_a_sequence_holds_for_it_alone_among_others(plain, loaded):
    """Each text is that of the sampler over the whole logits of one process."""
    prompts = {name: [5, 6, 7 + place] for place, name in enumerate(OPTIONS)}
    params = {name: SamplingParams(max_tokens=12, **options) for name, options in OPTIONS.items()}
    wanted = {name: Client(prompts[name], params[name]) for name in OPTIONS}
    for client in wanted.values():
        while not client.has_ended.is_set():
            with torch.no_grad():
                row = torch.tensor([client.sequence.tokens])
                client.sequence.append(client.sequence.sample(plain[0](row).logits[0, -1]))
    with scheduling(loaded) as (scheduler, _):
        found = {name: Client(prompts[name], params[name]) for name in OPTIONS}
        submit(scheduler, *found.values())
        for name, client in found.items():
            assert client.tokens() == wanted[name].tokens(), name
            assert client.reason == wanted[name].reason
    logprobs = [each["log-probabilities"].sequence.sampler.logprob for each in (found, wanted)]
    assert logprobs[0].logprob == pytest.approx(logprobs[1].logprob, abs=1e-4)


def test_a_long_prompt_is_scored_in_few_passes_beside_others(plain, loaded, monkeypatch):
    """Each token of a prompt took a step. A family without pages is scored in one pass."""
    monkeypatch.setitem(CHUNK_TOKENS, "cpu", (16, 8))
    prompt = [3 + n % 50 for n in range(40)]
    params = SamplingParams(max_tokens=3, temperature=0, num_logprobs=1, scores_prompt=True)
    with scheduling(loaded) as (scheduler, sizes):
        (scored,) = submit(scheduler, Client(prompt, params))
        assert scored.tokens() == alone(plain, prompt, params)
    with torch.no_grad():
        logits = plain[0](torch.tensor([prompt])).logits[0].log_softmax(1)
    wanted = [float(logits[place, token]) for place, token in enumerate(prompt[1:])]
    assert [each.logprob for each in scored.sequence.prompt_logprobs] == pytest.approx(
        wanted, abs=1e-4
    )
    assert sizes[:3] == [16, 16, 8] and len(sizes) < 3 + 4 + 2


def test_a_step_that_fails_ends_its_own_sequences_and_the_next_ones_run(plain, loaded):
    def fail_once(*_):
        hook.remove()
        raise MemoryError("no memory for this step")

    limits = ServingLimits(max_length=2000, max_running=2)
    with scheduling(loaded, limits) as (scheduler, _):
        clients = [Client([5 + number], ENDLESS, lambda number: number < 9) for number in range(2)]
        hook = loaded.register_forward_pre_hook(fail_once)
        submit(scheduler, *clients, waiting := Client([5, 6, 7]))
        assert waiting.tokens() == alone(plain, [5, 6, 7])
        assert isinstance(clients[0].reason, MemoryError)


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_sequence_that_comes_while_a_step_fails_runs_in_the_next_ones(
    plain, loaded, monkeypatch, is_taken
):
    """Its submit() raised, or nobody computed it, or two did. is_taken: if it comes between the
    look at the batch and the place in its queue."""

    def fail_once(*_):
        hook.remove()
        raise MemoryError("no memory for this step")

    with scheduling(loaded) as (scheduler, _):
        (batch,), raised, late = scheduler._batches, [], Client([5, 6, 7])
        end_all = batch._fail_all_remaining_requests

        def submit_late(*arguments):
            end_all(*arguments)
            monkeypatch.undo()
            status = batch.background_thread_status
            try:
                with monkeypatch.context() as patch:
                    if is_taken:
                        patch.setattr(status, "can_accept_new_requests", lambda: None)
                    submit(scheduler, late)
            except DrumlineError as error:
                raised.append(error)

        monkeypatch.setattr(batch, "_fail_all_remaining_requests", submit_late)
        hook = loaded.register_forward_pre_hook(fail_once)
        (first,) = submit(scheduler, Client([5], ENDLESS))
        assert first.has_ended.wait(60) and isinstance(first.reason, MemoryError)
        assert late.tokens() == alone(plain, [5, 6, 7]) and not raised


@pytest.mark.parametrize("name", ["num_blocks", "start"])
def test_a_batch_that_cannot_be_made_anew_is_the_end_of_all(loaded, monkeypatch, name):
    """It was started again for ever, or its thread ended and all that came waited for ever."""

    def fail(*_):
        raise RuntimeError("the accelerator is lost")

    def fail_once(*_):
        hook.remove()
        monkeypatch.setattr(BatchedRanks if name == "num_blocks" else batch, name, fail)
        fail()

    losses, limits = [], ServingLimits(max_length=2000, max_running=2)
    with contextlib.closing(BatchScheduler(loaded, limits, losses.append)) as scheduler:
        (batch,) = scheduler._batches
        hook = loaded.register_forward_pre_hook(fail_once)
        clients = submit(scheduler, *(Client([5 + number], ENDLESS) for number in range(4)))
        assert all(client.has_ended.wait(20) for client in clients)
        for thread in scheduler._threads:
            thread.join(20)
        assert "accelerator is lost" in str(losses[0]) and len(losses) == 1
        with pytest.raises(PeerLost):
            submit(scheduler, Client([5]))


@pytest.mark.parametrize("has_pages", [True, False])
def test_a_client_that_leaves_while_it_waits_leaves_the_queue_at_once(
    loaded, monkeypatch, has_pages
):
    """It kept its place there until another had ended, so that new ones were refused."""

    def refuse(*_, **__):
        raise ValueError("no pages")

    if not has_pages:
        monkeypatch.setattr(scheduler_module, "tried_manager", refuse)
    limits = ServingLimits(max_length=2000, max_running=1, max_waiting=1)
    with scheduling(loaded, limits) as (scheduler, _):
        (first,) = submit(scheduler, Client([5], ENDLESS))
        assert first.has_begun.wait(60)
        for _ in range(3):
            (waiting,) = submit(scheduler, Client([6]))
            waiting.sequence.cancel()
            assert waiting.reason == "cancelled" and not scheduler._waiting
        assert not first.has_ended.is_set() and scheduler.num_waiting == 0


def test_a_cancel_that_a_batch_hears_of_before_its_sequence_is_not_lost(loaded, monkeypatch):
    """The sequence was computed to the length that the batch has pages for."""
    with scheduling(loaded) as (scheduler, sizes):
        (batch,), lost = scheduler._batches, []
        cancel = batch.cancel_request

        def lose_the_first(name):
            return cancel(name) if lost else lost.append(name)

        monkeypatch.setattr(batch, "cancel_request", lose_the_first)
        (client,) = submit(scheduler, Client([5], ENDLESS))
        assert client.has_begun.wait(60)
        client.sequence.cancel()
        while batch.num_running:
            assert len(sizes) < 1000
            time.sleep(0.01)
    assert lost and client.reason == "cancelled"


@pytest.mark.parametrize("family", ["gemma3n", "mamba", soak("opt")])
def test_a_family_without_pages_is_served_one_sequence_at_a_time_and_said_so(
    checkpoints, on_master, caplog, family
):
    """Gemma 3n reads keys of other layers: over pages it ran, with other texts."""
    skip_unless_it_runs(family)
    cls, config = CAUSAL[family]
    plain = checkpoints.make(family, cls, **config)

    def work(model):
        with scheduling(model, ServingLimits(max_length=60)) as (scheduler, _):
            clients = submit(scheduler, *(Client([5, 6, 7 + number]) for number in range(3)))
            params = SamplingParams(temperature=0, max_tokens=2, num_logprobs=0, scores_prompt=True)
            (scored,) = submit(scheduler, Client([5, 6, 7], params))
            assert scored.tokens() == clients[0].tokens()[:2]
            assert len(scored.sequence.prompt_logprobs) == 2
            return [client.tokens() for client in clients], scheduler.largest_batch

    texts, largest = on_master(plain[1], 2, work)
    assert texts == [alone(plain, [5, 6, 7 + number]) for number in range(3)] and largest == 1
    assert "answered one at a time" in caplog.text


def test_one_at_a_time_a_sequence_that_fails_is_cancelled_or_not_read_ends_alone(
    plain, loaded, monkeypatch
):
    """A step that fails ends its own sequence, and one that was cancelled while it waited is not
    begun."""

    def refuse(*_, **__):
        raise ValueError("no pages")

    def fail_once(*_):
        hook.remove()
        raise MemoryError("no memory for this step")

    monkeypatch.setattr(scheduler_module, "tried_manager", refuse)
    hook = loaded.register_forward_pre_hook(fail_once)
    with scheduling(loaded) as (scheduler, sizes):
        clients = [Client([5]), Client([6]), Client([5, 6, 7]), Client([8], ENDLESS), Client([9])]
        clients[1].sequence.cancel()
        submit(scheduler, *clients)
        assert clients[2].tokens() == alone(plain, [5, 6, 7])
        assert clients[3].has_begun.wait(60)
        assert scheduler.num_running == scheduler.num_waiting == 1
    assert isinstance(clients[0].reason, MemoryError) and clients[1].reason == "cancelled"
    assert all("is being stopped" in str(client.reason) for client in clients[3:])
    assert len(clients[3].sequence.new_tokens) < 1900 and not clients[1].sequence.new_tokens
    assert sizes[:2] == [3, 1]


def test_an_error_of_one_sequence_ends_no_other_of_its_batch(plain, loaded):
    """Logits that are NaN, or text that cannot be decoded, ended all sequences of the batch."""

    def fail(_):
        raise ValueError("no text")

    def fail_to_sample(_):
        raise RuntimeError("probabilities are NaN")

    clients = Client([5], GREEDY, fail), Client([5], SamplingParams()), Client([5, 6, 7])
    clients[1].sequence.sampler.sample = fail_to_sample
    with scheduling(loaded) as (scheduler, _):
        submit(scheduler, *clients)
        assert clients[2].tokens() == alone(plain, [5, 6, 7])
    assert [type(client.reason) for client in clients] == [ValueError, RuntimeError, str]
    assert scheduler.largest_batch == 3


@pytest.mark.parametrize("looks_ahead", [True, False])
def test_a_greedy_sequence_ends_with_an_error_where_its_logits_are_no_numbers(loaded, looks_ahead):
    """It went on with the first token of all, to its end."""
    with scheduling(loaded, LOOKUP if looks_ahead else LIMITS) as (scheduler, _):
        with loaded.lm_head.register_forward_hook(lambda *call: call[2] * torch.nan):
            (client,) = submit(scheduler, Client(REPEATED))
            assert client.tokens() == [] and "nan" in str(client.reason)
        (other,) = submit(scheduler, Client([5]))
        assert len(other.tokens()) == 9 and scheduler.limits.prompt_lookup == 4 * looks_ahead


def test_the_environment_of_a_rank_stays_as_it_is(loaded, monkeypatch):
    """transformers set a variable of NCCL, with a warning, where WORLD_SIZE is more than 1."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("NCCL_GRAPH_MIXING_SUPPORT", raising=False)
    with scheduling(loaded):
        assert "NCCL_GRAPH_MIXING_SUPPORT" not in os.environ


def test_close_ends_a_sequence_that_nobody_reads(loaded):
    """It ran to its last token before the server ended, which the launcher did not wait for."""
    with scheduling(loaded) as (scheduler, _):
        (client,) = submit(scheduler, Client([15], ENDLESS))
        assert client.has_begun.wait(30)
    assert "is being stopped" in str(client.reason) and len(client.sequence.new_tokens) < 1900


def test_prompts_have_fewer_tokens_of_a_step_that_takes_too_long_for_others():
    """The others' tokens came up to five times as far apart while a long prompt came in."""
    pace, most = Pace(32), 32 + 3 * TOKENS_BESIDE_EACH
    assert pace.tokens(3, 1) == most and pace.tokens(3, 5) == 5 * most

    def step(num_tokens):
        pace.note(min(num_tokens, 1), 0.02 + 0.002 * num_tokens)

    step(0)
    sizes = []
    for _ in range(30):
        sizes.append(pace.tokens(3, 1))
        step(sizes[-1])
    assert sizes[0] == most and 5 < sum(sizes[5:]) / 25 < 12  # ten tokens take as long again
    for _ in range(20):
        pace.note(1, 0.03)
    assert pace.tokens(3, 1) == most
    for _ in range(9):
        pace.note(1, 1.0)
    assert pace.tokens(3, 1) >= LEAST_BESIDE


def test_a_short_prompt_has_its_part_of_a_step_behind_many_long_ones():
    """Each long one left half to those behind it: of 512 tokens the ninth prompt had one."""
    num_left = 512
    parts = [part_of_step(num_left, 9, 8)]
    for num_behind in range(7, 0, -1):
        num_left -= parts[-1]
        parts.append(part_of_step(num_left, 9, num_behind))
    assert parts == [256, *[32] * 7] and num_left - parts[-1] == 32
    assert part_of_step(1, 3, 2) == 1


LOOKUP = ServingLimits(max_length=2000, prompt_lookup=4)
REPEATED = [5, 9, 30, 17, 22, 9, 41] * 6


def test_a_greedy_sequence_that_runs_alone_tries_what_its_text_repeats(plain, loaded):
    """Tokens are those of one at a time, in fewer passes."""
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    row = torch.tensor([REPEATED])
    wanted = plain[0].generate(row, max_new_tokens=60, do_sample=False, eos_token_id=-1)
    with scheduling(loaded, LOOKUP) as (scheduler, sizes):
        num_before = len(sizes)
        (client,) = submit(scheduler, Client(REPEATED, params))
        assert client.tokens() == wanted[0, len(REPEATED) :].tolist()
        assert len(sizes) - num_before < 60 and max(sizes[num_before + 1 :]) > 1
        (sampled,) = submit(scheduler, Client(REPEATED, SamplingParams(max_tokens=5, seed=3)))
        assert len(sampled.tokens()) == 5 and {*sizes[-4:]} == {1}


def test_logits_that_are_no_numbers_are_no_error_behind_a_token_that_is_not_taken(plain, loaded):
    """A token that was tried, and that the model does not take, ended the request."""
    num_spoiled = 0

    def spoil(_, args, options, output):
        nonlocal num_spoiled
        logits = output.logits[0]
        tried = options["input_ids"][0, 1 - len(logits) :] if len(logits) > 1 else []
        chosen = logits.argmax(-1)
        wrong = [n for n, token in enumerate(tried) if token != chosen[n]]
        if wrong:
            logits[wrong[0] + 1 :] = torch.nan
            num_spoiled += 1

    with scheduling(loaded, LOOKUP) as (scheduler, _):
        with loaded.register_forward_hook(spoil, with_kwargs=True):
            (client,) = submit(scheduler, Client(REPEATED))
            assert client.tokens() == alone(plain, REPEATED) and num_spoiled
        assert scheduler.limits.prompt_lookup == LOOKUP.prompt_lookup


@pytest.mark.parametrize("looks_ahead", [True, False])
def test_what_a_checkpoint_recommends_is_applied_by_the_server_alone(
    plain, loaded, monkeypatch, looks_ahead
):
    """generate() did it too: twice, or although the request had switched it off."""

    def refuse(*_, **__):
        raise ValueError("no pages")

    monkeypatch.setattr(loaded.generation_config, "repetition_penalty", 5.0)
    if not looks_ahead:
        monkeypatch.setattr(scheduler_module, "tried_manager", refuse)
    with scheduling(loaded, LOOKUP if looks_ahead else LIMITS) as (scheduler, _):
        (client,) = submit(scheduler, Client(REPEATED))
        assert client.tokens() == alone(plain, REPEATED)
    assert loaded.generation_config.repetition_penalty == 5.0


def test_no_more_is_tried_than_there_are_positions_for(loaded, caplog):
    """GPT-2 has no more positions than its longest text, and failed at the end of it."""
    limits = ServingLimits(max_length=60, prompt_lookup=4)
    params = SamplingParams(max_tokens=18, temperature=0, ignore_eos=True)
    with scheduling(loaded, limits) as (scheduler, sizes):
        (client,) = submit(scheduler, Client(REPEATED, params))
        assert len(client.tokens()) == 18 and scheduler.limits.prompt_lookup == 4
        assert sizes[-3:] == [1] * 3 and max(sizes[-9:-4]) > 1


def test_a_sequence_that_ran_alone_goes_on_with_those_that_come(loaded):
    with scheduling(loaded) as (scheduler, _):
        wanted = [c.tokens() for c in submit(scheduler, Client([5], LONG), Client([7, 8], LONG))]
    with scheduling(loaded, LOOKUP) as (scheduler, _):
        (first,) = submit(scheduler, Client([5], LONG))
        assert first.has_begun.wait(60) and scheduler.num_running == 1
        (second,) = submit(scheduler, Client([7, 8], LONG))
        assert [first.tokens(), second.tokens()] == wanted
        assert scheduler.largest_batch == 2


def test_no_thread_that_computed_keeps_its_idle_threads_beside_the_next_one(loaded, monkeypatch):
    released = []

    def release():
        released.append(threading.current_thread().name.split("-")[0])

    monkeypatch.setattr(scheduler_module, "release_idle_threads", release)
    with scheduling(loaded, LOOKUP) as (scheduler, _):
        assert released == [threading.current_thread().name.split("-")[0]]
        submit(scheduler, Client([5], GREEDY))[0].tokens()
    assert released[1:] == ["ThreadPoolExecutor"]


def test_a_model_that_cannot_take_tokens_back_is_not_given_them(loaded, monkeypatch, caplog):
    def refuse(*_, **__):
        raise ValueError("assisted generation is not supported")

    monkeypatch.setattr(scheduler_module, "generate_ahead", refuse)
    with scheduling(loaded, LOOKUP) as (scheduler, _):
        (client,) = submit(scheduler, Client([5]))
        assert len(client.tokens()) == 9 and scheduler.limits.prompt_lookup == 0
    assert "prompts are no longer looked up: assisted" in caplog.text
