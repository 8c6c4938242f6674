"""A tiny model with a tokenizer and a chat template, for tests of the server."""

import asyncio
import json
from contextlib import closing

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import drumline
from drumline.serving.scheduler import ServingLimits
from tests.drumline.conftest import LLAMA

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


@pytest.fixture(scope="module")
def plain(checkpoints):
    """The model in this process, and its folder with a tokenizer of 64 words."""
    config = {**LLAMA, "num_hidden_layers": 2}
    model, path = checkpoints.make("with words/llama", "LlamaForCausalLM", **config)
    names = ["nothing", "begin", "end", *map(str, range(3, 64))]
    words = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="nothing"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "nothing", "bos_token": "begin", "eos_token": "end"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return model, path


@pytest.fixture(scope="module")
def loaded(plain):
    """The same model as the server has it."""
    with drumline.load(plain[1]) as model:
        yield model


@pytest.fixture(scope="module")
def byte_tokenizer():
    """One token a byte, and an end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    bytes_alone = Tokenizer(models.BPE(vocab={**vocabulary, "end": len(letters)}, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_alone, eos_token="end")


def expected(plain, prompt, num_new=12):
    """The text and finish reason of greedy generation in one process."""
    prompt_tokens = torch.tensor([[int(word) for word in prompt.split()]])
    tokens = plain[0].generate(prompt_tokens, max_new_tokens=num_new, do_sample=False)[0].tolist()
    new = tokens[prompt_tokens.shape[1] :]
    return " ".join(str(n) for n in new if n > 2), "stop" if 2 in new else "length"


async def respond(service, body, is_disconnected=False, path="completions"):
    """The status and body that the application sends to a client, which may have gone by then."""
    from drumline.serving.app import application

    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    sent = []

    async def receive():
        if messages:
            return messages.pop()
        if not is_disconnected:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": f"/v1/{path}", "headers": []}
    await application(service, None)({**scope, "query_string": b""}, receive, send)
    return sent[0]["status"], b"".join(part.get("body", b"") for part in sent).decode()


@pytest.fixture(scope="module")
def speaker(checkpoints, byte_tokenizer):
    """A service of a model whose tokens are bytes, so that grammars can bind them."""
    config = {**LLAMA, "vocab_size": 257, "num_hidden_layers": 1, "eos_token_id": 256}
    _, path = checkpoints.make("bytes with an end", "LlamaForCausalLM", **config)
    byte_tokenizer.chat_template = "{{ messages[0].content }}"
    limits = ServingLimits(max_length=700)
    from drumline.serving import app  # which the server's packages must be there for

    with (
        drumline.load(path) as model,
        closing(app.Service(["llama"], model, byte_tokenizer, limits)) as service,
    ):
        yield service
