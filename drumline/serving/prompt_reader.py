"""The prompts of requests as tokens: through the chat template, or as they are.

prompts = PromptReader("llama", tokenizer, 4096, scheduler)
(tokens,) = prompts.of_chat(request)
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from drumline import timings
from drumline.serving import protocol
from drumline.serving.image_reader import ImageReader
from drumline.serving.scheduler import Scheduler

PROBE = "drumline"  # a text of a message

Prompts = list[list[int]]
"""The tokens of each."""


class PromptReader:
    """Makes tokens of the prompts of one model's requests. Raises ApiError for what it refuses.

    name: of the model. max_length: tokens of a prompt with its completion. images: None if the
    model takes none.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Any,
        max_length: int,
        scheduler: Scheduler,
        images: ImageReader | None = None,
    ) -> None:
        self._name, self._tokenizer, self._images = name, tokenizer, images
        self._max_length, self._scheduler = max_length, scheduler

    def of_completion(self, body: protocol.CompletionRequest | protocol.TokenizeRequest) -> Prompts:
        prompts = protocol.prompts_of(body.prompt)
        return [self._tokenize(prompt, body.add_special_tokens) for prompt in prompts]

    def _tokenize(self, prompt: Any, add_special_tokens: bool) -> list[int]:
        if isinstance(prompt, str):
            return self.text(prompt, "prompt", add_special_tokens=add_special_tokens)
        self.check_tokens(prompt, "prompt")
        return list(prompt)

    def of_tokens(self, body: protocol.DetokenizeRequest) -> Prompts:
        self.check_tokens(body.tokens, "tokens")
        return [body.tokens]

    def check_tokens(self, tokens: Sequence[int], name: str) -> None:
        unknown = [token for token in tokens if not 0 <= token < self._scheduler.vocabulary]
        if unknown:
            text = f"{name}: {unknown[0]} is not a token of this model"
            text += f", which has {self._scheduler.vocabulary} of them."
            raise protocol.invalid_request(text, name)

    def of_chat(self, body: protocol.ChatCompletionRequest) -> Prompts:
        reserved = inspect.signature(self._tokenizer.apply_chat_template).parameters
        for name in body.chat_template_kwargs:
            if name in reserved:
                text = f"chat_template_kwargs.{name} is not a variable of the template."
                raise protocol.invalid_request(text, f"chat_template_kwargs.{name}")
        if not self._tokenizer.chat_template:
            text = f"{self._name!r} has no chat template; use /v1/completions with a prompt."
            raise protocol.invalid_request(text, "messages")
        urls = [url for message in body.messages for url in message.image_urls]
        if urls and self._images is None:
            text = f"messages: {self._name!r} is served without images; send text alone."
            raise protocol.invalid_request(text, "messages")
        in_parts = self._images is not None and self._takes_no_text
        messages = [message.for_template(in_parts) for message in body.messages]
        try:
            text = rendered(self._tokenizer, messages, **body.template_options())
        except Exception as error:  # a template may raise any error for messages it rejects
            raise protocol.invalid_request(f"messages: {error}", "messages") from error
        adds = body.add_special_tokens
        if adds is None:
            adds = self._images is not None and self._images.lacks_begin(text)
        if not urls or self._images is None:
            return [self.text(text, "messages", add_special_tokens=adds)]
        self._check_chars(text)
        return [self._images.read(text, urls, adds)]

    @functools.cached_property
    def _takes_no_text(self) -> bool:
        """True if the template leaves out a message that is a text, and wants a list of parts."""
        try:
            return PROBE not in rendered(self._tokenizer, [{"role": "user", "content": PROBE}])
        except Exception:  # whatever a template raises for what it does not take
            return True

    def text(self, text: str, name: str, **options: bool) -> list[int]:
        """The tokens of a text of the field `name`. A tokenizer may have more than the model."""
        self._check_chars(text)
        tokens = list(self._tokenizer(text, **options)["input_ids"])
        self.check_tokens(tokens, name)
        return tokens

    def _check_chars(self, text: str) -> None:
        if len(text) > (most := self._max_length * self.longest_token):
            reason = f"you sent {len(text)} characters, and that many tokens hold at most {most}."
            raise protocol.context_error(self._max_length, reason, None)

    @functools.cached_property
    def longest_token(self) -> int:
        """In characters. A text that has more for each token that fits is refused."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)


def rendered(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    """The text of a chat. Raises whatever its template does, and TimeoutError after template_s."""
    with _time_limit(timings.TIMINGS.template_s):
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def template_problem(tokenizer: Any, template: Any) -> str:
    """Why a chat template is none, whatever the messages; "" if it is one."""
    if not isinstance(template, str):
        return "not a text"
    try:
        rendered(tokenizer, [{"role": "user", "content": ""}], chat_template=template)
    except Exception as error:  # of a line that is not Jinja, or of messages that are rejected
        return f"line {error.lineno}: {error}" if hasattr(error, "lineno") else ""
    return ""


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Within, code of a chat template that runs for longer raises TimeoutError in its thread.

    Python looks at the time with each line of a template and each call that it makes.
    """
    end_s = time.monotonic() + seconds

    def check(frame: FrameType, event: str, arg: Any) -> Any:
        if time.monotonic() > end_s:
            raise TimeoutError(f"the chat template did not end within {seconds:g} s")
        return check if frame.f_code.co_filename == "<template>" else None

    previous = sys.gettrace()
    sys.settrace(check)
    try:
        yield
    finally:
        sys.settrace(previous)
