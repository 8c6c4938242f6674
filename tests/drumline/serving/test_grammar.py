"""JSON of a schema, whatever the model would rather say."""

import json

import pytest
import torch

from drumline.errors import DrumlineError
from drumline.serving.grammar import GrammarCompiler, schema_of_calls
from drumline.serving.sampling import SamplingParams, TokenSampler

pytest.importorskip("llguidance", reason="runs after `pip install llguidance`")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "grace"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def text_of(byte_tokenizer, schema, seed):
    """What a model of random logits answers."""
    end = byte_tokenizer.eos_token_id
    grammar = GrammarCompiler(byte_tokenizer, len(byte_tokenizer)).json(schema)
    sampler = TokenSampler(SamplingParams(seed=seed), end_tokens={end}, grammar=grammar)
    torch.manual_seed(seed)
    tokens = []
    while not tokens or (tokens[-1] != end and len(tokens) < 500):
        tokens.append(sampler.sample(torch.randn(len(byte_tokenizer))))
    return byte_tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_sampled_is_json_of_the_schema(byte_tokenizer, seed):
    answer = json.loads(text_of(byte_tokenizer, SCHEMA, seed))
    assert answer.keys() == {"name", "age"} and answer["name"] in ("ada", "grace")
    assert isinstance(answer["age"], int) and answer["age"] <= 99


def test_a_constant_that_is_null_is_the_only_answer(byte_tokenizer):
    schema = {"type": "object", "properties": {"a": {"const": None}}, "required": ["a"]}
    schema["additionalProperties"] = False
    assert json.loads(text_of(byte_tokenizer, schema, 0)) == {"a": None}


def test_a_schema_that_is_not_understood_is_an_error(byte_tokenizer):
    with pytest.raises(ValueError, match="no-such-type"):
        GrammarCompiler(byte_tokenizer, len(byte_tokenizer)).json({"type": "no-such-type"})


def test_a_tokenizer_without_bytes_is_refused():
    with pytest.raises(DrumlineError, match="tokenizer cannot be bound to a grammar"):
        GrammarCompiler(object(), 10)


def test_a_list_of_calls_names_tools_and_has_the_parameters_of_each(byte_tokenizer):
    """Two tools may define one name in two ways, and refer to themselves as a whole."""

    def tool(name, value):
        digit = {"enum": [value]}
        properties = {"a": {"$ref": "#/$defs/v"}, "self": {"$ref": "#"}}
        schema = {"type": "object", "properties": properties, "required": ["a"]}
        return {
            "name": name,
            "parameters": {**schema, "additionalProperties": False, "$defs": {"v": digit}},
        }

    schema = schema_of_calls([tool("one", 1), tool("two", 2), {"name": "none"}], max_calls=2)
    wanted = {"one": 1, "two": 2, "none": None}
    for seed in range(6):
        calls = json.loads(text_of(byte_tokenizer, schema, seed))
        assert 1 <= len(calls) <= 2
        assert all(call["parameters"].get("a") == wanted[call["name"]] for call in calls)


@pytest.mark.parametrize("temperature", [0, 1])
def test_an_answer_without_more_to_say_ends_before_min_tokens(byte_tokenizer, temperature):
    """No token was left, so that the first one followed, or an error."""
    end = byte_tokenizer.eos_token_id
    grammar = GrammarCompiler(byte_tokenizer, len(byte_tokenizer)).json({"enum": [1, 11]})
    params = SamplingParams(temperature=temperature, min_tokens=5)
    sampler = TokenSampler(params, end_tokens={end}, grammar=grammar)
    tokens = [sampler.sample(torch.zeros(len(byte_tokenizer))) for _ in range(3)]
    assert byte_tokenizer.decode(tokens[:2]) == "11" and tokens[2] == end
