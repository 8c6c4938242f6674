"""Tool calls and reasoning in answers, parsed by transformers' machinery in pieces of any size."""

import json
import random

import pytest
from transformers import PreTrainedTokenizerFast

pytest.importorskip("pydantic", reason="runs after `pip install drumline[serve]`")
from drumline.contact.loading.configs import response_template
from drumline.serving import protocol
from drumline.serving.answers.message_parser import (
    JsonOrCall,
    PlainText,
    call_starts,
    merged,
    message_parser,
)

PROMPT = "<|im_start|>user\n5<|im_end|>\n<|im_start|>assistant\n"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


class Qwen(PreTrainedTokenizerFast):
    """A tokenizer of one model family that has no template of its own. begun: of the answer."""

    all_special_tokens = ("<|im_end|>",)

    def __init__(self, begun="", model_type="qwen3"):
        self.response_template = response_template(self, model_type=model_type)
        self.prompt = PROMPT + begun

    def decode(self, tokens):
        return self.prompt


def request(**fields):
    messages = [{"role": "user", "content": "5"}]
    body = {"model": "m", "messages": messages, "tools": [TOOL], **fields}
    return protocol.validate(protocol.ChatCompletionRequest, body, 1000)


def parsed(text, seed=None, tokenizer=None, is_cut=False, **fields):
    """The deltas of a text that comes in pieces, which a seed chooses."""
    parser = message_parser(tokenizer or Qwen(), request(**fields), [5])
    number = random.Random(seed)
    deltas, start = [], 0
    while start < len(text):
        end = len(text) if seed is None else start + number.randint(1, 9)
        deltas += parser.feed(text[start:end])
        start = end
    return deltas + parser.finish(is_cut)


def call(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ANSWER = f"<think>\nhm < hm\n</think>\n\nI look. {call('f', {'a': 1})}\n{call('g', {})}"


@pytest.mark.parametrize("seed", [None, *range(8)])
def test_reasoning_text_and_calls_are_told_apart_however_the_text_comes(seed):
    message = merged(parsed(ANSWER, seed))
    assert message["reasoning_content"] == "hm < hm" and message["content"] == "I look."
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [
        {"name": "f", "arguments": '{"a": 1}'},
        {"name": "g", "arguments": "{}"},
    ]
    ids = {call["id"] for call in message["tool_calls"]}
    assert len(ids) == 2 and all(call["type"] == "function" for call in message["tool_calls"])


def test_text_and_reasoning_are_streamed_and_a_call_is_one_delta():
    deltas = parsed(ANSWER, seed=1)
    kinds = [next(iter(delta)) for delta in deltas]
    assert kinds.count("reasoning_content") > 1 and kinds.count("content") > 1
    assert [d["tool_calls"][0]["index"] for d in deltas if "tool_calls" in d] == [0, 1]


@pytest.mark.parametrize("seed", [None, *range(4)])
def test_a_call_that_is_not_json_stays_text(seed):
    """One malformed call would have been an error of the server."""
    bad = "well <tool_call>{'a': 1}</tool_call> then"
    message = merged(parsed(bad, seed))
    assert "tool_calls" not in message
    assert message["content"].startswith("well") and message["content"].endswith("then")
    assert "{'a': 1}" in message["content"]


@pytest.mark.parametrize("seed", [None, *range(8)])
@pytest.mark.parametrize("bad", ['{"name": "Hi"}', '{"name": "g", "parameters": {}}', "[5]"])
def test_a_call_that_lacks_its_arguments_stays_text(seed, bad):
    """It was lost, with what stood around it."""
    bad = f"<tool_call>{bad}</tool_call>"
    assert merged(parsed(f"Hi {bad} then Hi", seed))["content"] == f"Hi {bad} then Hi"
    message = merged(parsed(f"Hi {call('f', {})}\n{bad} then", seed))
    (made,) = message["tool_calls"]
    assert made["function"]["name"] == "f" and message["content"] == f"Hi\n{bad} then"


@pytest.mark.parametrize("seed", [None, *range(8)])
def test_a_cut_call_behind_a_whole_one_is_text(seed):
    """Its beginning was lost where it came with the end of the call before."""
    whole = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
    cut = "<tool_call>\n<function=g>\n<param"
    message = merged(parsed(whole + cut, seed, Qwen(model_type="qwen3_5"), is_cut=True))
    (made,) = message["tool_calls"]
    assert made["function"]["name"] == "f" and message["content"] == cut


def test_numbers_that_json_does_not_have_are_texts_in_arguments():
    """They were no JSON for most clients, and NaN may be meant as a text."""
    own = [call("f", {"a": float("nan")}), '<tool_call>{"name": "f", "arguments": {"a": -1e999}}']
    for text, name in zip((own[0], f"{own[1]}</tool_call>"), ("NaN", "-Infinity"), strict=True):
        (made,) = merged(parsed(text, 1))["tool_calls"]
        assert json.loads(made["function"]["arguments"]) == {"a": name}
    text = "<tool_call>\n<function=f>\n<parameter=a>\nNaN\n</parameter>\n</function>\n</tool_call>"
    (made,) = merged(parsed(text, 1, Qwen(model_type="qwen3_5")))["tool_calls"]
    assert made["function"]["arguments"] == '{"a": "NaN"}'
    text = '<tool_call>{"name": "f\\ud83d", "arguments": {}}</tool_call>'
    (made,) = merged(parsed(text, 1))["tool_calls"]
    assert made["function"]["name"] == "f?"
    text = '[{"name": "f", "parameters": {"a": 1e999, "b": "\\ud83d"}}]'
    (made,) = merged(parsed(text, 1, tool_choice="required"))["tool_calls"]
    assert made["function"]["arguments"] == '{"a": "Infinity", "b": "?"}'


@pytest.mark.parametrize("seed", [None, *range(4)])
def test_a_call_that_was_cut_is_text_and_one_that_ends_at_the_cut_is_a_call(seed):
    """A call of some of its arguments was delivered as a whole one."""
    arguments = [f"<parameter={name}>\n{name}\n</parameter>" for name in ("from", "to")]
    begun = "<tool_call>\n<function=f>\n" + arguments[0]
    cut, whole = (f"Go. {begun}{end}" for end in ("", f"{arguments[1]}\n</function>\n</tool_call>"))
    tokenizer = Qwen(model_type="qwen3_5")
    message = merged(parsed(cut, seed, tokenizer, is_cut=True))
    assert message["content"] == cut and "tool_calls" not in message
    cut = 'Go. <tool_call>\n{"name": "f", "argum'
    assert merged(parsed(cut, seed, is_cut=True))["content"] == cut
    (made,) = merged(parsed(whole, seed, tokenizer, is_cut=True))["tool_calls"]
    assert made["function"]["arguments"] == '{"from": "from", "to": "to"}'


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize(
    ("begun", "text", "content"),
    [
        ("The capital is", " Paris ", " Paris"),
        ("<think>\nhm\n</think>\n\nIt is", "\n\nParis", "\n\nParis"),
        ("It is ", "Paris", "Paris"),
        ("<think>\n\n</think>\n\n", " Paris", "Paris"),
    ],
)
def test_the_space_behind_a_text_that_is_continued_is_part_of_the_answer(
    seed, begun, text, content
):
    """The text and what continued it made one word."""
    deltas = parsed(text, seed, Qwen(begun), continue_final_message=True)
    assert merged(deltas)["content"] == content


def test_a_text_is_continued_that_the_template_cannot_parse():
    """It was an error of the server."""
    begun = "<tool_call>{'a': 1}</tool_call>"
    assert parsed("Paris", None, Qwen(begun), continue_final_message=True) == [{"content": "Paris"}]


def test_a_request_may_have_one_call_at_most():
    message = merged(parsed(ANSWER, parallel_tool_calls=False))
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": []}])
def test_an_answer_that_may_call_nothing_has_its_calls_as_text(fields):
    """A request that wanted text got a call."""
    message = merged(parsed(ANSWER, 1, **fields))
    assert message["reasoning_content"] == "hm < hm" and "tool_calls" not in message
    assert message["content"] == f"I look. {call('f', {'a': 1})}\n{call('g', {})}"


def test_text_of_a_schema_or_without_a_template_is_content():
    form = {"response_format": {"type": "json_object"}, "tool_choice": "none"}
    assert parsed(ANSWER, **form) == [{"content": ANSWER}]
    assert parsed(ANSWER, tokenizer=object()) == [{"content": ANSWER}]


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_5", "gemma4"])
def test_a_call_that_may_come_in_place_of_json_begins_with_a_token_of_its_own(model_type):
    tokenizer, form = Qwen("<think>\n", model_type), {"response_format": {"type": "json_object"}}
    words = {"<think>": 1, "<tool_call>": 2, "</tool_call>": 3, "<|tool_call>": 4, "<|turn>": 5}
    tokenizer.get_added_vocab = lambda: words
    wanted = {"<|tool_call>": 4} if model_type == "gemma4" else {"<tool_call>": 2}
    assert call_starts(tokenizer, request(**form)) == wanted
    assert call_starts(tokenizer, request()) == {}
    assert call_starts(tokenizer, request(**form, tool_choice="none")) == {}
    assert call_starts(object(), request(**form)) == {}
    for text in ('{"a": 1}', '{"a": "use <think> and <tool_call>{}</tool_call> here"}'):
        assert merged(parsed(text, 1, tokenizer, **form)) == {"role": "assistant", "content": text}
    parser = message_parser(tokenizer, request(**form), [5])
    deltas = [delta for text in ("{", "}", "<|im_end|>") for delta in parser.feed(text)]
    assert merged(deltas + parser.finish())["content"] == "{}"


def test_a_call_that_may_come_in_place_of_json_begins_with_the_first_token_of_its_delimiter():
    """Each in the delimiter let anything follow, also what begins an answer."""
    tokenizer, form = Qwen(), {"response_format": {"type": "json_object"}}
    opening = r"\s*<\|start\|>assistant<\|channel\|>commentary to="
    tokenizer.response_template = {"fields": {"tool_calls": {"open_pattern": opening}}}
    words = {"<|start|>": 1, "<|channel|>": 2, "<|st": 3, "a": 4, " ": 5}
    tokenizer.get_added_vocab = lambda: words
    assert call_starts(tokenizer, request(**form)) == {"<|start|>": 1}
    tokenizer.response_template["fields"]["tool_calls"]["open_pattern"] = r"\n?<\|channel\|>"
    assert call_starts(tokenizer, request(**form)) == {"<|channel|>": 2}
    tokenizer.response_template["fields"]["tool_calls"]["open_pattern"] = r"^(?:<\|channel|>)"
    assert call_starts(tokenizer, request(**form)) == {"<|channel|>": 2}
    tokenizer.response_template = {"fields": {"tool_calls": {"open": "to<|channel|>"}}}
    with pytest.raises(ValueError, match="do not begin with a token"):
        call_starts(tokenizer, request(**form))


def test_a_call_that_begins_like_a_list_of_json_is_a_call():
    calls = PlainText()
    parser = JsonOrCall(calls, ["[TOOL_CALLS]"], [])
    parser.feed("[TOOL_CALLS]")
    assert parser._parser is calls
    parser = JsonOrCall(calls, ["[TOOL_CALLS]"], [])
    parser.feed("[")
    assert parser._parser is not calls
    parser = JsonOrCall(calls, ["<tool_call>"], [])
    parser.feed("<tool_call")  # as before a stop string of ">>>"
    assert parser._parser is calls


@pytest.mark.parametrize("seed", [None, 1])
def test_the_arguments_of_a_named_tool_are_streamed_as_they_come(seed):
    named = {"type": "function", "function": {"name": "f"}}
    deltas = parsed('{"a": [1, 2, 3]}', seed, tool_choice=named)
    (made,) = merged(deltas)["tool_calls"]
    assert made["function"] == {"name": "f", "arguments": '{"a": [1, 2, 3]}'}
    assert len(deltas) > 1 or seed is None
    later = [delta["tool_calls"][0] for delta in deltas[1:]]
    assert all("id" not in call and "name" not in call["function"] for call in later)


def test_required_calls_come_at_the_end_and_what_was_cut_off_is_content():
    text = '[{"name": "f", "parameters": {"a": 1}}]'
    (made,) = merged(parsed(text, 1, tool_choice="required"))["tool_calls"]
    assert made["function"] == {"name": "f", "arguments": '{"a": 1}'}
    deep = text[:34] + 100_000 * "["
    for cut in (text[:20], deep):
        assert merged(parsed(cut, 1, tool_choice="required"))["content"] == cut
    longer = f"{text[:-1]}, {text[1:]}"
    for end in (len(text), len(longer) - 2):
        (made,) = merged(parsed(longer[:end], 1, tool_choice="required"))["tool_calls"]
        assert made["function"] == {"name": "f", "arguments": '{"a": 1}'}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": "required", "tools": []}, "no tools to choose from"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "names 'g', no tool"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ],
)
def test_a_choice_that_no_tool_fulfils_is_refused(fields, message):
    with pytest.raises(protocol.ApiError, match=message):
        request(**fields)
