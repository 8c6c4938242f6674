"""The fields of requests: those of the API may be null, and what a user defines stays as it is."""

import copy

import pytest

pytest.importorskip("pydantic", reason="runs after `pip install drumline[serve]`")
from drumline.serving import protocol

NULLS = {"const": None, "enum": [None, 1], "nested": {"default": None, "examples": [{"a": None}]}}


def chat(**fields):
    body = {"model": "m", "messages": [{"role": "user", "content": "5"}], **fields}
    return protocol.validate(protocol.ChatCompletionRequest, copy.deepcopy(body), 1000)


def test_a_null_inside_of_a_schema_is_part_of_it():
    """{"const": null} lost its null, so that any value was taken for it."""
    wanted = {"name": None, "schema": NULLS, "strict": None}
    body = chat(response_format={"type": "json_schema", "json_schema": wanted})
    assert body.json_schema == NULLS


def test_a_null_inside_of_tools_and_their_calls_reaches_the_chat_template():
    tool = {"type": "function", "function": {"name": "f", "parameters": NULLS, "strict": None}}
    call = {"id": "1", "function": {"name": "f", "arguments": {"unit": None}}}
    body = chat(
        tools=[tool],
        messages=[{"role": "assistant", "content": None, "name": None, "tool_calls": [call]}],
    )
    assert body.template_options() == {"tools": [tool]}
    (message,) = (message.for_template() for message in body.messages)
    assert message == {"role": "assistant", "content": "", "tool_calls": [call]}


def test_the_fields_of_the_api_count_as_absent_where_they_are_null():
    options = {"include_usage": None, "include_obfuscation": None}
    body = chat(temperature=None, tools=None, stop=None, unknown=None, stream_options=options)
    assert body == chat(stream_options={})
    assert protocol.validate(protocol.TokenizeRequest, {"model": None, "prompt": "5"}, 9).prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"metadata": {"user": None}}, "metadata"),
        ({"logit_bias": {"5": None}}, "logit_bias.5"),
        ({"stop": [None]}, "stop.list[str].0"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": None}}}, "schema"),
    ],
)
def test_a_null_that_has_no_meaning_is_named(fields, param):
    with pytest.raises(protocol.ApiError) as caught:
        chat(**fields)
    assert caught.value.status == 400 and str(caught.value.body["error"]["param"]).endswith(param)


def test_items_are_counted_in_what_a_user_defines_too():
    with pytest.raises(protocol.ApiError, match="1001 items in one list"):
        chat(tools=[{"enum": [None] * 1001}])
