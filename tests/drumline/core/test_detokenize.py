"""Incremental detokenization gives the text of all tokens, whatever the tokens and the stops."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from drumline.core.detokenize import MAX_HALVES, MAX_PENDING, IncrementalDetokenizer

WORDS = st.text(alphabet="ab é漢🙂", max_size=12)


class ByteTokenizer:
    """A tokenizer whose tokens are bytes: characters come in up to four pieces."""

    def decode(self, tokens, skip_special_tokens):
        return bytes(tokens).decode(errors="replace")


def pieces_of(text, stop=(), min_tokens=0):
    """The text after each token, and at the end."""
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), stop, min_tokens=min_tokens)
    pieces = []
    for token in text.encode():
        pieces.append(detokenizer.add(token))
        if detokenizer.stopped_by:
            break
    return [*pieces, detokenizer.flush()]


def test_tokens_without_text_and_half_characters_are_not_decoded_again_for_ever():
    """A prompt of them kept a server busy with the square of its length."""
    longest = 0

    class Counting(ByteTokenizer):
        def decode(self, tokens, skip_special_tokens):
            nonlocal longest
            longest = max(longest, len(tokens))
            return super().decode([token for token in tokens if token], skip_special_tokens)

    halves = IncrementalDetokenizer(Counting())
    text = "".join([*map(halves.add, [0xFF] * 3000), halves.flush()])
    assert text == "\ufffd" * 3000 and longest <= 2 * MAX_HALVES
    longest = 0
    detokenizer = IncrementalDetokenizer(Counting(), ("b",), min_tokens=202)
    tokens = [*b"a", *[0] * 200, *"bé".encode(), *b"b"]
    text = "".join([*map(detokenizer.add, tokens), detokenizer.flush()])
    assert text == "abé" and longest <= 2 * MAX_PENDING


@given(WORDS)
def test_the_pieces_are_the_text_and_have_no_half_characters(text):
    assert "".join(pieces_of(text)) == text
    assert not any("\ufffd" in piece for piece in pieces_of(text))


@given(WORDS, st.lists(st.text(alphabet="ab é", min_size=1, max_size=3), max_size=3))
def test_the_text_ends_before_the_first_complete_stop_string(text, stop):
    ends = [text.find(string) + len(string) for string in stop if string in text]
    complete = text[: min(ends)] if ends else text
    starts = [complete.find(string) for string in stop if string in complete]
    assert "".join(pieces_of(text, tuple(stop))) == complete[: min(starts, default=len(complete))]


STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=3)


@given(st.text(alphabet="ab", max_size=12), STOPS, st.integers(0, 6))
def test_a_stop_string_ends_a_text_behind_its_first_tokens_alone(text, stop, min_tokens):
    """min_tokens held for tokens that end a text, and not for strings."""
    ends = range(min_tokens + 1, len(text) + 1)
    end = next((end for end in ends if text[:end].endswith(tuple(stop))), None)
    length = max((len(s) for s in stop if end and text[:end].endswith(s)), default=0)
    wanted = text[:end].removesuffix(text[:end][-length:] if length else "")
    assert "".join(pieces_of(text, tuple(stop), min_tokens)) == wanted


def test_text_that_cannot_become_a_stop_string_is_not_held_back():
    assert pieces_of("abcabd", ("abd",)) == ["", "", "abc", "", "", "", ""]


def test_an_incomplete_character_is_shown_at_the_end():
    detokenizer = IncrementalDetokenizer(ByteTokenizer())
    assert [detokenizer.add(token) for token in "a漢".encode()[:-1]] == ["a", "", ""]
    assert detokenizer.flush() == "\ufffd"


def byte_fallback_tokenizer():
    """A tokenizer as Llama 2 has: words by their letters, and bytes for every other character."""
    names = ["<unk>", "<s>", "\u2581", "a", "b", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = {name: number for number, name in enumerate(names)}
    fast = Tokenizer(models.BPE(tokens, [], unk_token="<unk>", byte_fallback=True))
    fast.normalizer = normalizers.Replace(" ", "\u2581")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", unk_token="<unk>")


@pytest.mark.parametrize("text", ["a \u6f22b", "\U0001f642", "b a\u00e9\u6f22 a"])
def test_byte_fallback_and_special_tokens_of_a_real_tokenizer_are_decoded(text):
    tokenizer = byte_fallback_tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer)
    tokens = [tokenizer.bos_token_id, *tokenizer.encode(text), tokenizer.bos_token_id]
    pieces = [*map(detokenizer.add, tokens), detokenizer.flush()]
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
