"""Sequences that go on with other ranks than those that they began with."""

import contextlib
import json
import socket
import threading

import pytest

import drumline
from coordinator import Coordinator
from drumline.serving.front import rank_worker
from drumline.serving.front.json_lines import hang_up, messages, to_line
from drumline.serving.front.rank_worker import RankWorker
from drumline.serving.front.remote_scheduler import RemoteScheduler
from drumline.serving.grammar import GrammarCompiler, schema_of_calls
from drumline.serving.sampling import SamplingParams
from drumline.serving.scheduler import BatchScheduler, Generation, ServingLimits
from tests.drumline.conftest import LLAMA

LIMITS = ServingLimits(max_length=200)
PARAMS = [
    SamplingParams(max_tokens=30, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=1.5, seed=7, logit_bias=((9, 1.0),), ignore_eos=True),
    SamplingParams(
        max_tokens=30, presence_penalty=1.0, repetition_penalty=1.2, seed=8, ignore_eos=True
    ),
    SamplingParams(max_tokens=30, seed=9, num_logprobs=2, min_tokens=20, ignore_eos=True),
    SamplingParams(max_tokens=30, seed=9, min_tokens=20, logit_bias=((2, 100.0),)),
]


class Client:
    """One sequence, its tokens so far and how it ended; on_token is called for each token."""

    def __init__(
        self, params, on_token=lambda: True, grammar=None, ends=frozenset({2}), prompt=(5, 6, 7)
    ):
        self.logprobs, self.reason, self.has_ended = [], None, threading.Event()

        def note(_):
            self.logprobs.append(self.generation.sampler.logprob)
            return on_token()

        self.generation = Generation(prompt, params, note, self._end, ends, grammar)

    def _end(self, reason):
        self.reason = reason
        self.has_ended.set()

    def result(self):
        assert self.has_ended.wait(300)
        return self.generation.new_tokens, self.reason, self.logprobs


@contextlib.contextmanager
def ranks(path, scheduler, read_tokenizer=None):
    """One rank behind the scheduler; gives a function that ends it in the middle of its work."""
    front, rank = socket.socketpair()
    with drumline.load(path) as model, Coordinator() as coor, front, rank:
        worker = RankWorker(rank, coor, model, LIMITS, read_tokenizer)

        def send(message):
            with contextlib.suppress(OSError):  # the rank has ended
                front.sendall(to_line(message))

        def read():
            for message in messages(front):
                if "id" in message:
                    scheduler.receive(message)
                else:
                    scheduler.resume(message, send)
            scheduler.suspend()

        threads = [threading.Thread(target=target) for target in (read, worker.run)]
        for thread in threads:
            thread.start()
        try:
            yield lambda: hang_up(front)
        finally:
            hang_up(front)
            for thread in threads:
                thread.join()


@pytest.mark.parametrize(
    ("sizes", "of_rank"), [("abcdef", "bcef"), ("a", "aaaa"), (None, None), ("ab", None)]
)
def test_each_rank_has_its_memory_where_machines_are_missing(ranks_or_errors, sizes, of_rank):
    """Sizes were counted by equal numbers of ranks on all machines."""

    def memory(info):
        with Coordinator(info) as coor:
            node, counts = (1, [1, 2, 1, 2]) if coor.rank < 2 else (3, ())
            of_all = [*sizes] if sizes and coor.rank == 0 else None
            return rank_worker._memory_of_ranks(coor, counts, node, of_all)

    outcomes = ranks_or_errors(memory, 4, nodes=[2, 2])
    if sizes == "ab":
        assert all("2 sizes for 6 ranks" in str(outcome) for outcome in outcomes)
    else:
        assert outcomes == [of_rank and [*of_rank]] * 4


def test_sequences_go_on_with_the_tokens_that_one_server_gives_them(plain, loaded):
    """Each ends as if no rank had gone, greedy or sampled, whatever came before it went."""
    scheduler = BatchScheduler(loaded, LIMITS)
    alone = [Client(params) for params in PARAMS]
    scheduler.submit([client.generation for client in alone])
    expected = [client.result() for client in alone]
    scheduler.close()
    assert [reason for _, reason, _ in expected] == ["length"] * 4 + ["stop"]

    remote, has_tokens = RemoteScheduler(LIMITS, print), threading.Semaphore(0)
    clients = [Client(params, lambda: has_tokens.release() or True) for params in PARAMS]
    with ranks(plain[1], remote) as end:
        remote.submit([client.generation for client in clients])
        for _ in range(25):
            assert has_tokens.acquire(timeout=60)
        end()
    assert remote.is_restarting and remote.num_waiting == len(remote.unfinished()) > 0
    with ranks(plain[1], remote):
        results = [client.result() for client in clients]
    for result, other in zip(results, expected, strict=True):
        assert result[:2] == other[:2]
        for logprob, other_logprob in zip(result[2], other[2], strict=True):
            if other_logprob is not None:
                assert logprob.token == other_logprob.token
                assert logprob.logprob == pytest.approx(other_logprob.logprob, abs=1e-4)
    assert remote.num_running == remote.num_waiting == 0


def test_calls_of_a_grammar_and_scored_prompts_go_on_where_they_were(checkpoints, byte_tokenizer):
    """The ranks that go on read the grammar up to the tokens that they are given."""
    pytest.importorskip("llguidance", reason="runs after `pip install llguidance`")
    vocabulary, end_token = 288, byte_tokenizer.eos_token_id
    config = {**LLAMA, "vocab_size": vocabulary, "num_hidden_layers": 1}
    path = checkpoints.make("bytes", "LlamaForCausalLM", **config)[1]
    numbers = {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 9, "maxItems": 9}
    parameters = {"type": "object", "properties": {"of": numbers}, "required": ["of"]}
    schema = schema_of_calls([{"name": "add", "parameters": parameters}], max_calls=1)
    sampled = {"max_tokens": 150, "temperature": 1.5}
    has_tokens = threading.Semaphore(0)

    def clients():
        grammar = GrammarCompiler(byte_tokenizer, vocabulary).json(schema)
        calling = SamplingParams(**sampled, seed=7, stop_tokens=frozenset({end_token}))
        scored = SamplingParams(**sampled, seed=8, num_logprobs=1, scores_prompt=True)
        options = {"on_token": lambda: has_tokens.release() or True, "ends": frozenset()}
        return Client(calling, grammar=grammar, **options), Client(scored, **options)

    with drumline.load(path) as model, contextlib.closing(BatchScheduler(model, LIMITS)) as alone:
        alone.end_tokens, expected = set(), clients()
        alone.submit([client.generation for client in expected])
        wanted = [client.result()[:2] for client in expected]
    has_tokens, disturbed = threading.Semaphore(0), clients()
    remote = RemoteScheduler(LIMITS, print)
    with ranks(path, remote, lambda: byte_tokenizer) as end:
        remote.submit([client.generation for client in disturbed])
        for _ in range(8):
            assert has_tokens.acquire(timeout=60)
        end()
    assert not all(client.has_ended.is_set() for client in disturbed)
    with ranks(path, remote, lambda: byte_tokenizer):
        assert [client.result()[:2] for client in disturbed] == wanted
    text = byte_tokenizer.decode(wanted[0][0], skip_special_tokens=True)
    assert wanted[0][1] == "stop" and len(json.loads(text)[0]["parameters"]["of"]) == 9
    scores = [client[1].generation.prompt_logprobs for client in (expected, disturbed)]
    assert len(scores[0]) == len(scores[1]) == 2
    assert scores[0][1].logprob == pytest.approx(scores[1][1].logprob, abs=1e-4)


def test_a_stop_string_ends_a_sequence_at_the_ranks_and_an_error_ends_it_alone(plain):
    remote = RemoteScheduler(LIMITS, print)
    endless = SamplingParams(max_tokens=190, temperature=0, ignore_eos=True)
    refused = SamplingParams(max_tokens=30, temperature=0, logit_bias=((1 << 40, 1.0),))
    with ranks(plain[1], remote):
        clients = [Client(endless, lambda: False), Client(refused), Client(PARAMS[0])]
        remote.submit([client.generation for client in clients])
        results = [client.result() for client in clients]
    assert results[0][1] == "stop" and len(results[0][0]) == 1
    assert isinstance(results[1][1], Exception) and len(results[2][0]) == 30
