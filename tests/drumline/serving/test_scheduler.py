"""Batches of sequences without a server around them."""

import threading

from drumline.serving.sampling import SamplingParams
from drumline.serving.scheduler import BatchScheduler, Generation, ServingLimits
from tests.drumline.serving.conftest import expected

GREEDY = SamplingParams(max_tokens=9, temperature=0)


def test_an_error_of_one_sequence_ends_no_other_of_its_batch(plain):
    """Logits that are NaN, or text that cannot be decoded, ended all sequences of the batch."""
    tokens, reasons, all_submitted = [], [], threading.Barrier(2)

    def on_token(token: int) -> bool:
        tokens.append(token)
        return True

    def fail(_: object) -> bool:
        raise ValueError("no text")

    def fail_to_sample(_: object) -> int:
        raise RuntimeError("probabilities are NaN")

    generations = [
        Generation([5], GREEDY, fail, reasons.append),
        Generation([5], SamplingParams(max_tokens=9), on_token, reasons.append),
        Generation([5, 6, 7], GREEDY, on_token, lambda _: all_submitted.wait(30)),
    ]
    generations[1].sampler.sample = fail_to_sample
    scheduler = BatchScheduler(plain[0], ServingLimits(max_length=100))
    scheduler.submit(generations)
    all_submitted.wait(30)
    scheduler.close()
    assert [type(reason) for reason in reasons] == [RuntimeError, ValueError]
    assert " ".join(map(str, tokens)) == expected(plain, "5 6 7", 9)[0]
    assert scheduler.largest_batch == 3


def test_close_ends_a_generation_that_nobody_reads(plain):
    """It ran to its last token before the server ended, which the launcher did not wait for."""
    has_begun, reasons = threading.Event(), []

    def on_token(_: int) -> bool:
        has_begun.set()
        return True

    scheduler = BatchScheduler(plain[0], ServingLimits(max_length=2000))
    params = SamplingParams(max_tokens=1900, temperature=0)
    generation = Generation([15], params, on_token, reasons.append)
    scheduler.submit([generation])
    assert has_begun.wait(30)
    scheduler.close()
    assert "is being stopped" in str(reasons[0]) and len(generation.new_tokens) < 1900
