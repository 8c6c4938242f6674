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
    assert body.template_options()["tools"] == [tool]
    (message,) = (message.for_template() for message in body.messages)
    assert message == {"role": "assistant", "content": "", "tool_calls": [call]}


def test_a_field_of_a_message_that_is_false_reaches_the_chat_template():
    """As it was dropped, templates took their default."""
    message = {"role": "user", "content": "5", "think": False, "depth": 0, "annotations": []}
    (given,) = (given.for_template() for given in chat(messages=[message]).messages)
    assert given == {"role": "user", "content": "5", "think": False, "depth": 0}


def test_the_fields_of_the_api_count_as_absent_where_they_are_null():
    options = {"include_usage": None, "include_obfuscation": None}
    body = chat(temperature=None, tools=None, stop=None, unknown=None, stream_options=options)
    assert body == chat(stream_options={})
    assert protocol.validate(protocol.TokenizeRequest, {"model": None, "prompt": "5"}, 9).prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"5": None}}, "logit_bias.5"),
        ({"stop": [None]}, "stop.0"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": None}}}, "schema"),
    ],
)
def test_a_null_that_has_no_meaning_is_named(fields, param):
    with pytest.raises(protocol.ApiError) as caught:
        chat(**fields)
    assert caught.value.status == 400 and str(caught.value.body["error"]["param"]).endswith(param)


def test_sound_is_refused_by_name():
    """The error told of a type that should be 'text', and of a field called list[TextPart]."""
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    refused = pytest.raises(protocol.ApiError, match="input_audio' is not supported")
    with refused as caught:
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "5"}, sound]}])
    assert caught.value.body["error"]["param"].startswith("messages.0.content.1")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"allowed_tools": {}}}, "tool_choice.allowed_tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"str": 5}, "str"),
    ],
)
def test_a_field_with_several_types_is_named_without_them(fields, param):
    """The param was tool_choice.NamedTool.allowed_tools, which no request has."""
    with pytest.raises(protocol.ApiError) as caught:
        chat(**fields)
    assert caught.value.body["error"]["param"] == param


@pytest.mark.parametrize("kind", ["text", "image_url"])
def test_a_part_without_its_content_is_refused(kind):
    with pytest.raises(protocol.ApiError, match="has no field of that name"):
        chat(messages=[{"role": "user", "content": [{"type": kind}]}])


def test_items_are_counted_in_what_a_user_defines_too():
    with pytest.raises(protocol.ApiError, match="20001 items are in one list") as caught:
        chat(tools=[{"function": {"enum": [None] * 20_001}}])
    assert caught.value.body["error"]["code"] is None  # a shorter conversation would not help
    assert chat(tools=[{"function": {"name": "f", "enum": [None] * 5000}}])


def completion(**fields):
    return protocol.validate(
        protocol.CompletionRequest, {"model": "m", "prompt": "5", **fields}, 99
    )


IGNORED = {
    "metadata": {"a": "b"},
    "store": True,
    "user": "ada",
    "service_tier": "priority",
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
    "safety_identifier": "s",
    "prediction": {"type": "content", "content": "5"},
    "priority": 3,
    "request_id": "r",
    "cache_salt": "c",
    "cache_prompt": False,
    "stream_options": {"include_obfuscation": True},
}
DEFAULTS = {
    "best_of": 1,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "include_reasoning": True,
    "return_tokens_as_token_ids": False,
    "mm_processor_kwargs": {},
    "bad_words": [],
    "logits_processors": [],
    "truncate_prompt_tokens": None,
    "prompt_logprobs": None,
    "typical_p": 1.0,
    "verbosity": "medium",
    "web_search_options": None,
}
CHANGED = {
    "best_of": 2,
    "use_beam_search": True,
    "length_penalty": 0.5,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "bad_words": ["5"],
    "truncate_prompt_tokens": 4,
    "prompt_logprobs": 1,
    "typical_p": 0.9,
    "guided_json": {"type": "object"},
    "n_predict": 4,
    "early_stopping": 0,
}


@pytest.mark.parametrize("name", [*IGNORED, *DEFAULTS])
def test_a_field_that_cannot_change_the_answer_or_has_its_default_is_taken(name):
    """Servers of today take them, so clients send them: 18 of 18 that were tried were refused."""
    field = {name: (IGNORED | DEFAULTS)[name]}
    chat(**field)
    completion(**field)


@pytest.mark.parametrize("name", CHANGED)
def test_a_field_that_would_change_the_answer_is_refused_by_name(name):
    for request in (chat, completion):
        with pytest.raises(protocol.ApiError, match=f"{name} is not supported") as caught:
            request(**{name: CHANGED[name]})
        assert caught.value.status == 400 and caught.value.body["error"]["param"] == name


def test_what_a_client_replays_of_an_answer_is_taken():
    """A conversation that had begun elsewhere, or with OpenAI's own answers, could not go on."""
    call = {"id": "1", "type": "function", "index": 0}
    call["function"] = {"name": "f", "arguments": '{"a": [1, null]}'}
    part = {"type": "text", "text": "5", "cache_control": {"type": "ephemeral"}}
    replayed = {
        "role": "assistant",
        "content": [part, {"type": "refusal", "refusal": "!"}],
        "reasoning_content": "hm",
        "annotations": [],
        "refusal": "",
        "audio": None,
        "function_call": None,
        "tool_calls": [call],
    }
    body = chat(messages=[replayed, {"role": "function", "name": "f", "content": "6"}])
    assistant, result = [message.for_template() for message in body.messages]
    wanted = {**call, "function": {"name": "f", "arguments": {"a": [1, None]}}}
    assert assistant == {
        "role": "assistant",
        "content": "5!",
        "reasoning_content": "hm",
        "tool_calls": [wanted],
    }
    assert result == {"role": "tool", "content": "6", "name": "f"}


@pytest.mark.parametrize("arguments", ["not JSON", "[1]", None, {"a": 1}, "[" * 100_000])
def test_arguments_that_are_not_a_mapping_in_json_stay_as_they_are(arguments):
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    message = protocol.ChatMessage(role="assistant", tool_calls=[call])
    assert message.for_template()["tool_calls"] == [call]
    assert protocol.ChatMessage(role="assistant", tool_calls=[{"id": "1"}]).for_template()


def test_options_of_the_template_reach_it():
    options = {"enable_thinking": False}
    body = chat(chat_template_kwargs=options, reasoning_effort="low", continue_final_message=True)
    wanted = {"enable_thinking": False, "reasoning_effort": "low", "continue_final_message": True}
    assert body.template_options().items() >= {**wanted, "add_generation_prompt": False}.items()


def test_false_as_the_number_of_log_probabilities_is_none():
    assert completion(logprobs=False).num_logprobs is None
    assert completion(logprobs=0).num_logprobs == 0
    assert not chat(parallel_tool_calls=False).parallel_tool_calls


@pytest.mark.parametrize("parameters", [True, False, 5, [], "x"])
def test_parameters_of_a_tool_that_are_not_an_object_are_refused(parameters):
    """A choice of the tool was answered with 500."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(protocol.ApiError, match="the parameters of a function") as refused:
        chat(tools=[tool], tool_choice={"type": "function", "function": {"name": "f"}})
    assert refused.value.status == 400


@pytest.mark.parametrize("function", [{}, {"name": 5}, {"name": None}])
def test_a_function_without_a_name_is_refused(function):
    """A call of a tool that is required had the name None."""
    with pytest.raises(protocol.ApiError, match="has no name"):
        chat(tools=[{"type": "function", "function": function}], tool_choice="required")


@pytest.mark.parametrize("tool", [{"type": "web_search"}, {"type": "function"}, {}])
def test_a_tool_that_is_no_function_is_refused_unless_none_may_be_called(tool):
    """It reached the template, which knows none."""
    function = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(protocol.ApiError, match="is not a function") as refused:
        chat(tools=[function, tool])
    assert refused.value.status == 400 and refused.value.body["error"]["param"] == "tools"
    assert chat(tools=[tool, function], tool_choice="none").tools == [function]


@pytest.mark.parametrize("count", [0, -0.0])
def test_a_chat_of_no_tokens_is_refused(count):
    """It was answered to the limit of the server."""
    with pytest.raises(protocol.ApiError, match="max_tokens"):
        chat(max_tokens=count)
