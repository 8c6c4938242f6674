"""Tokens as they come, as text: every way to cut a text into tokens and stops gives the same."""

from hypothesis import given
from hypothesis import strategies as st

from drumline.serving.detokenize import Text

WORDS = st.text(alphabet="ab é漢🙂", max_size=12)


class Bytes:
    """A tokenizer whose tokens are bytes: characters come in up to four pieces."""

    def decode(self, tokens, skip_special_tokens):
        return bytes(tokens).decode(errors="replace")


def said(text, stop=()):
    """What is told with each token, and at the end."""
    told = Text(Bytes(), stop)
    pieces = []
    for token in text.encode():
        pieces.append(told.add(token))
        if told.is_stopped:
            break
    return [*pieces, told.rest()]


@given(WORDS)
def test_the_pieces_are_the_text_and_have_no_half_characters(text):
    assert "".join(said(text)) == text
    assert not any("\ufffd" in piece for piece in said(text))


@given(WORDS, st.lists(st.text(alphabet="ab é", min_size=1, max_size=3), max_size=3))
def test_the_text_ends_before_the_first_stop_to_be_whole(text, stop):
    whole = [text.find(each) + len(each) for each in stop if each in text]
    complete = text[: min(whole)] if whole else text
    begins = [complete.find(each) for each in stop if each in complete]
    assert "".join(said(text, tuple(stop))) == complete[: min(begins, default=len(complete))]


def test_what_cannot_become_a_stop_is_said_at_once():
    assert said("abcabd", ("abd",)) == ["", "", "abc", "", "", "", ""]


def test_bytes_that_never_make_a_character_are_shown_at_the_end():
    told = Text(Bytes())
    assert [told.add(token) for token in "a漢".encode()[:-1]] == ["a", "", ""]
    assert told.rest() == "\ufffd"
