"""JSON of a schema, whatever the model would rather say."""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from drumline.errors import DrumlineError
from drumline.serving.grammar import GrammarCompiler
from drumline.serving.sampling import SamplingParams, TokenSampler

pytest.importorskip("llguidance", reason="runs after `pip install llguidance`")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "grace"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer():
    """One token a byte, and an end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    bytes_alone = Tokenizer(models.BPE(vocab={**vocabulary, "end": len(letters)}, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_alone, eos_token="end")


def text_of(tokenizer, schema, seed):
    """What a model of random logits answers."""
    end = tokenizer.eos_token_id
    grammar = GrammarCompiler(tokenizer, len(tokenizer)).json(schema)
    sampler = TokenSampler(SamplingParams(seed=seed), end_tokens={end}, grammar=grammar)
    torch.manual_seed(seed)
    tokens = []
    while not tokens or (tokens[-1] != end and len(tokens) < 500):
        tokens.append(sampler.sample(torch.randn(len(tokenizer))))
    return tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_sampled_is_json_of_the_schema(tokenizer, seed):
    answer = json.loads(text_of(tokenizer, SCHEMA, seed))
    assert answer.keys() == {"name", "age"} and answer["name"] in ("ada", "grace")
    assert isinstance(answer["age"], int) and answer["age"] <= 99


def test_a_constant_that_is_null_is_the_only_answer(tokenizer):
    schema = {"type": "object", "properties": {"a": {"const": None}}, "required": ["a"]}
    schema["additionalProperties"] = False
    assert json.loads(text_of(tokenizer, schema, 0)) == {"a": None}


def test_a_schema_that_is_not_understood_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="no-such-type"):
        GrammarCompiler(tokenizer, len(tokenizer)).json({"type": "no-such-type"})


def test_a_tokenizer_without_bytes_is_refused():
    with pytest.raises(DrumlineError, match="tokenizer cannot be bound to a grammar"):
        GrammarCompiler(object(), 10)
